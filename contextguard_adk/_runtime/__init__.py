"""What is remembered: in session state, and in the process between two callbacks."""
