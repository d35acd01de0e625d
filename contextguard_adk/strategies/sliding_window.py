"""Summarizes the older history and keeps the newest messages word for word."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import AliasChoices, Field

from contextguard_adk._history.draft import Draft
from contextguard_adk._summaries.ask import Ask
from contextguard_adk._summaries.compose import expect_tokens, fits, squeeze
from contextguard_adk._turn.turn import Turn
from contextguard_adk.strategies.base import Strategy

MIN_KEPT = 3  # Messages.


class SlidingWindow(Strategy):
    """Summarizes older history when it grows beyond a number of messages.

    Fires when more than `max_messages` are not covered by a summary, or when tokens
    reach the threshold. It keeps the newest 30 % of them, at least 3, at a
    cut that separates no tool call from its result. While the result would not
    fit, or what is kept would fill the window again soon, the number kept is halved
    down to 3, beside the newest messages (see `keep`); where even that
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

    if TYPE_CHECKING:  # Another name, for type checkers a setting.
        max_turns: int = 20
    else:
        max_turns = property(lambda self: self.max_messages)

    def fullness(self, turn: Turn) -> float:
        """Returns tokens or messages as a part of what is allowed, the larger one."""
        first_due = self.max_messages + 1
        most = len(turn.messages) / first_due
        # Counting all contents is cheaper than finding out what is history.
        if most >= (self.ahead or 1.0):
            most = len(turn.uncovered) / first_due
        return max(turn.fullness, most)

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Summarizes the older messages, when there are too many or too large ones."""
        if self.fullness(turn) < 1:
            return None
        keep = max(MIN_KEPT, int(len(turn.uncovered) * 0.30))
        keep = min(keep, turn.keep_count)
        reason = turn.reason if turn.is_due else self.early_reason
        turn = replace(turn, reason=reason, keep_count=keep)
        draft: Draft | None = None
        while ask.attempts < self.max_compaction_attempts:
            while keep > MIN_KEPT and _is_too_much(turn, turn.older_than(keep)):
                keep = max(MIN_KEPT, keep // 2)
            covered = turn.older_than(keep)
            if not covered - turn.summarized:
                break
            if turn.is_due and expect_tokens(turn, covered) > turn.limit_tokens:
                break
            draft = await ask.summarize(turn, covered)
            if fits(turn, ask.outcome(turn, draft)):
                return draft
            if keep <= MIN_KEPT:
                break
            keep = max(MIN_KEPT, keep // 2)
        if turn.is_due:
            return await ask.summarize_all(turn)
        return squeeze(turn, draft).draft if draft else None


def _is_too_much(turn: Turn, covered: frozenset[int]) -> bool:
    """Whether what would stay is too large, or large enough to fire again."""
    history = turn.history
    stays = covered | turn.kept.indexes
    if turn.is_due:
        kept = [history.shown[index] for index in history.indexes if index not in stays]
        if turn.measure_alone(kept) > 0.10 * turn.budgets.working_tokens:
            return True
    return expect_tokens(turn, covered) > turn.limit_tokens
