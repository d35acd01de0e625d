"""What providers do: how they refuse requests, and how large their windows are."""
