"""The tools by which an agent reads back, or asks for, what a compaction does."""

from __future__ import annotations

from contextguard_adk._recall.offer import Recall

TOOLS = (Recall(),)
"""The tools that the guard itself adds to requests."""
