"""What any part may use: settings models, logging once, tasks, callbacks of users."""
