"""A replay of a recorded session: its sides, its figures, and what calls needed."""
