"""Summarizes the whole history once the window is nearly full."""

from __future__ import annotations

from contextguard_adk.measuring.calibration import DEFAULT_CORRECTION, token_counter
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
        return await summarize_everything(context, self.max_compaction_attempts)


async def summarize_everything(
    context: CompactionContext, max_attempts: int
) -> Compaction | None:
    """Summarizes all history that may be covered, in as few summaries as possible.

    Returns:
        The compaction; None when nothing is left to summarize.
    """
    covered = context.older_than(0)
    if not covered - context.view.model_covered:
        return None
    budget_tokens = context.budgets.summary_tokens
    compaction = await context.summarize(covered)
    attempts = 1
    while (
        not context.fits(compaction)
        and attempts < max_attempts
        and not compaction.stored.is_mechanical
        and _can_shorter_fit(context, compaction, budget_tokens // 2)
    ):
        budget_tokens //= 2
        compaction = await context.summarize(covered, budget_tokens)
        attempts += 1
    return context.squeeze(compaction).after(attempts)


def _can_shorter_fit(
    context: CompactionContext, compaction: Compaction, budget_tokens: int
) -> bool:
    """Whether a summary of that length would be shorter, and could be enough."""
    count = token_counter(context.correction or DEFAULT_CORRECTION)
    text_tokens = count(compaction.stored.text)
    without_text = compaction.tokens - text_tokens
    return text_tokens > budget_tokens and without_text < context.limit_tokens
