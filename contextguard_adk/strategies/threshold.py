"""Summarizes the whole history once the window is nearly full."""

from __future__ import annotations

from contextguard_adk.strategies.base import Strategy
from contextguard_adk.summarizing.context import Compaction, CompactionContext


class Threshold(Strategy):
    """Replaces the whole history by a summary when tokens reach the threshold.

    The threshold is the context window minus a buffer: 20,000 tokens for windows of
    200,000 and more, else 20 % of the window. After a compaction the request is the
    summary and a continuation that quotes the user's current request, plus what is
    not history and tool calls that are still open. One summary per compaction is
    normal; further attempts ask for half the length.
    """

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Compacts everything, when the threshold is reached."""
        if not context.is_due:
            return None
        return await context.summarize_all(self.max_compaction_attempts)
