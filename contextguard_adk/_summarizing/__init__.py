"""What a compaction may do, and how a summary comes to be written."""
