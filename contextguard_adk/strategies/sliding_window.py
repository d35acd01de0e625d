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

MIN_KEPT = 3
"""The least number of newest messages that stay beside a summary."""

KEPT_RATIO = 0.30
"""The part of the messages without a summary that stays: the newest of them."""

_MAX_KEPT_WINDOW_RATIO = 0.10
"""With more of the window taken by the kept messages, it would be full again soon."""


class SlidingWindow(Strategy):
    """Summarizes older history when it grows beyond a number of messages.

    Fires when more than `max_messages` messages are not covered by a summary, or when
    tokens reach the threshold. It keeps the newest 30 % of these messages, at least 3,
    and separates no tool call from its result.

    While the request would not fit, or the kept messages would fill the window again
    soon, it keeps half as many, down to 3 beside the newest messages (see `keep`). If
    the request does not fit even then, it summarizes all messages but those of `keep`.
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

    if TYPE_CHECKING:  # Type checkers need the alias as a setting of its own.
        max_turns: int = 20
    else:
        max_turns = property(lambda self: self.max_messages)

    def fullness(self, turn: Turn) -> float:
        """Returns the larger one of two ratios; from 1 on, a compaction is due.

        They are the tokens as a part of the threshold, and the messages without a
        summary as a part of the first number that is too many.
        """
        due_count = self.max_messages + 1
        # All messages are cheaper to count than the uncovered ones. If even all are too
        # few for anything to happen, nobody needs the exact figure.
        messages_ratio = len(turn.messages) / due_count
        if messages_ratio >= (self.ahead or 1.0):
            messages_ratio = len(turn.uncovered) / due_count
        return max(turn.fullness, messages_ratio)

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Summarizes the older messages, when there are too many or too large ones.

        Each further summary leaves half as many messages beside it.
        """
        if self.fullness(turn) < 1:
            return None

        usual_count = max(MIN_KEPT, int(len(turn.uncovered) * KEPT_RATIO))
        most_count = min(usual_count, turn.keep_count)
        reason = turn.reason if turn.is_due else self.early_reason
        window_turn = replace(turn, reason=reason, keep_count=most_count)

        draft: Draft | None = None
        while ask.attempts < self.max_compaction_attempts:
            kept_count = _reduce_kept(window_turn, most_count)
            covered = window_turn.older_than(kept_count)
            if not _may_help(window_turn, covered):
                break

            draft = await ask.summarize(window_turn, covered)
            if ask.outcome(window_turn, draft).tokens <= window_turn.limit_tokens:
                return draft
            if kept_count <= MIN_KEPT:
                break  # No fewer messages may stay, so nothing else can be tried.
            most_count = _halve(kept_count)

        if window_turn.is_due:
            return await ask.summarize_all(window_turn)
        return squeeze(window_turn, draft).draft if draft else None


def _halve(kept_count: int) -> int:
    return max(MIN_KEPT, kept_count // 2)


def _reduce_kept(turn: Turn, most_count: int) -> int:
    """Returns how many of the newest messages may stay, at most `most_count`."""
    kept_count = most_count
    while kept_count > MIN_KEPT and _is_too_much(turn, kept_count):
        kept_count = _halve(kept_count)
    return kept_count


def _may_help(turn: Turn, covered: frozenset[int]) -> bool:
    """Whether a summary of these messages has anything new, and may be small enough."""
    if not covered - turn.summarized:
        return False
    # Before the threshold the number of messages counts, not the size.
    return not turn.is_due or expect_tokens(turn, covered) <= turn.limit_tokens


def _is_too_much(turn: Turn, kept_count: int) -> bool:
    """Whether the newest messages are too large to stay beside a summary.

    They are too large in two cases:

    - The request would not fit.
    - The threshold is reached, and the newest messages would take so much of the window
      that it would be full again soon.
    """
    covered = turn.older_than(kept_count)
    if turn.is_due:
        history = turn.history
        not_counted = covered | turn.kept.indexes  # The messages of `keep` stay anyway.
        kept = [
            history.shown[index]
            for index in history.indexes
            if index not in not_counted
        ]
        most_tokens = _MAX_KEPT_WINDOW_RATIO * turn.budgets.working_tokens
        if turn.measure_alone(kept) > most_tokens:
            return True
    return expect_tokens(turn, covered) > turn.limit_tokens
