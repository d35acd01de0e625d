"""Tools to read compacted history, and to ask for a compaction."""

from __future__ import annotations

from contextguard_adk._recall.offer import Recall

TOOLS = (Recall(),)
"""The tools that the guard itself adds to requests."""
