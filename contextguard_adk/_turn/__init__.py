"""One model call as a value: its request, its history, its limits, its settings."""
