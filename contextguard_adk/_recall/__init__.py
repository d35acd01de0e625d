"""The tool by which an agent reads back what was compacted."""
