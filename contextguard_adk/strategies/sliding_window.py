"""Summarizes the older history and keeps the newest contents word for word."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import AliasChoices, Field

from contextguard_adk.strategies.base import Strategy

if TYPE_CHECKING:
    from contextguard_adk._summarizing.compose import Compaction
    from contextguard_adk._summarizing.context import CompactionContext

MIN_KEPT = 3  # Contents.


class SlidingWindow(Strategy):
    """Summarizes older history when it grows beyond a number of contents.

    Fires when more than `max_messages` are not covered by a summary, or when tokens
    reach the threshold. It keeps the newest 30 % of them, at least 3, at a
    cut that separates no tool call from its result. While the result would not
    fit, or what is kept would fill the window again soon, the number kept is halved
    down to 3, beside the newest steps of the running turn (see `keep`); where even that
    does not fit, all but these is summarized.
    """

    max_messages: int = Field(
        default=20,
        ge=4,
        strict=True,
        validation_alias=AliasChoices("max_messages", "max_turns"),
        description="How many messages (texts, tool calls, tool results) may stand "
        "beside the summary, at least 4; also accepted as `max_turns`.",
    )

    early_reason = "turns"

    if TYPE_CHECKING:
        max_turns: int = 20
    else:

        @property
        def max_turns(self) -> int:
            """Another name of `max_messages`."""
            return self.max_messages

    def fullness(self, context: CompactionContext) -> float:
        """Tokens or messages as a part of what is allowed, whichever is more."""
        view, first_due = context.view, self.max_messages + 1
        most = len(view.contents) / first_due
        # Counting all contents is cheaper than finding out what is history.
        if most >= (self.ahead or 1.0):
            most = len(view.uncovered) / first_due
        return max(context.fullness, most)

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Compacts the older contents, when there are too many or too large ones."""
        if self.fullness(context) < 1:
            return None
        if not context.is_due:
            context = replace(context, reason=self.early_reason)
        return await self._compact(context)

    async def _compact(self, context: CompactionContext) -> Compaction | None:
        compaction: Compaction | None = None
        attempts = 0
        keep = max(MIN_KEPT, int(len(context.view.uncovered) * 0.30))
        keep = min(keep, context.keep_count)
        context = replace(context, keep_count=keep)
        while attempts < self.max_compaction_attempts:
            while keep > MIN_KEPT and _is_too_much(context, context.older_than(keep)):
                keep = max(MIN_KEPT, keep // 2)
            covered = context.older_than(keep)
            if not covered - context.view.model_covered:
                break
            if context.is_due and context.expect(covered) > context.limit_tokens:
                break
            compaction = await context.summarize(covered)
            attempts += 1
            if context.fits(compaction):
                return compaction.after(attempts)
            if keep <= MIN_KEPT:
                break
            keep = max(MIN_KEPT, keep // 2)
        if not context.is_due:
            return context.squeeze(compaction).after(attempts) if compaction else None
        return await context.summarize_all(self.max_compaction_attempts, attempts)


def _is_too_much(context: CompactionContext, covered: frozenset[int]) -> bool:
    """Whether what would stay is too large, or large enough to fire again."""
    view, stays = context.view, covered | context.kept.indexes
    if context.is_due:
        kept = [view.shown[index] for index in view.history if index not in stays]
        kept_tokens = context.measure(kept) - context.measure([])
        if kept_tokens > 0.10 * context.budgets.working_tokens:
            return True
    return context.expect(covered) > context.limit_tokens
