"""What the guard does around one model call, and what it knows of the call."""
