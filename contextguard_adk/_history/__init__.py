"""What a request's history is, what a summary covers of it, and how both are stored."""
