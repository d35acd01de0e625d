"""Summarizes the older history and keeps the newest messages word for word."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import AliasChoices, Field

from contextguard_adk._history.stored import Draft
from contextguard_adk._summaries.ask import Ask
from contextguard_adk._summaries.compose import expect_tokens, squeeze
from contextguard_adk._turn.turn import Turn
from contextguard_adk.strategies.base import Strategy

MIN_KEPT = 3  # Messages.
KEPT_RATIO = 0.30  # Of the messages that no summary covers.


class SlidingWindow(Strategy):
    """Summarizes older history when it grows beyond a number of messages.

    Fires when more than `max_messages` are not covered by a summary, or when tokens
    reach the threshold. It keeps the newest 30 % of them, at least 3, and separates no
    tool call from its result. While the request would not fit, or the messages that are
    kept would fill the window again soon, it keeps half as many, down to 3 beside the
    newest messages (see `keep`). Where even that does not fit, it summarizes all
    messages but those of `keep`.
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

    if TYPE_CHECKING:  # Type checkers take the other name for a setting.
        max_turns: int = 20
    else:
        max_turns = property(lambda self: self.max_messages)

    def fullness(self, turn: Turn) -> float:
        """Returns tokens or messages as a part of what is allowed, the larger one."""
        first_due = self.max_messages + 1
        # Counting all messages is cheaper than counting those that no summary covers.
        messages_ratio = len(turn.messages) / first_due
        if messages_ratio >= (self.ahead or 1.0):
            messages_ratio = len(turn.uncovered) / first_due
        return max(turn.fullness, messages_ratio)

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Summarizes the older messages, when there are too many or too large ones."""
        if self.fullness(turn) < 1:
            return None
        usual_count = max(MIN_KEPT, int(len(turn.uncovered) * KEPT_RATIO))
        keep_count = min(usual_count, turn.keep_count)
        reason = turn.reason if turn.is_due else self.early_reason
        turn = replace(turn, reason=reason, keep_count=keep_count)

        draft: Draft | None = None
        while ask.attempts < self.max_compaction_attempts:
            kept_count = _reduce_kept(turn, keep_count)
            covered = turn.older_than(kept_count)
            if not _may_help(turn, covered):
                break
            draft = await ask.summarize(turn, covered)
            if ask.outcome(turn, draft).tokens <= turn.limit_tokens:
                return draft
            if kept_count <= MIN_KEPT:
                break
            keep_count = _halve(kept_count)

        if turn.is_due:
            return await ask.summarize_all(turn)
        return squeeze(turn, draft).draft if draft else None


def _halve(keep_count: int) -> int:
    return max(MIN_KEPT, keep_count // 2)


def _reduce_kept(turn: Turn, most_count: int) -> int:
    """Returns how many of the newest messages may stay."""
    keep_count = most_count
    while keep_count > MIN_KEPT and _is_too_much(turn, keep_count):
        keep_count = _halve(keep_count)
    return keep_count


def _may_help(turn: Turn, covered: frozenset[int]) -> bool:
    """Returns whether a summary has anything new, and could make the request fit."""
    if not covered - turn.summarized:
        return False
    return not turn.is_due or expect_tokens(turn, covered) <= turn.limit_tokens


def _is_too_much(turn: Turn, keep_count: int) -> bool:
    """Returns whether the newest messages are too large to stay.

    They are where the request would not fit, and also where they would fill the window
    again soon.
    """
    covered = turn.older_than(keep_count)
    if turn.is_due:
        history = turn.history
        left_out = covered | turn.kept.indexes
        kept = [
            history.shown[index] for index in history.indexes if index not in left_out
        ]
        if turn.measure_alone(kept) > 0.10 * turn.budgets.working_tokens:
            return True
    return expect_tokens(turn, covered) > turn.limit_tokens
