"""How a summary is written, and what stands in the request in place of history."""
