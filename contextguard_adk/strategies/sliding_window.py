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
"""Of the messages without a summary, this part stays: the newest ones."""

_MAX_KEPT_WINDOW_RATIO = 0.10
"""If kept messages take more of the window, it is soon full again."""


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
        least_ratio = 1.0 if self.ahead is None else self.ahead
        # All messages are cheaper to count than those without a summary. If even all
        # are too few for a compaction, nobody needs the exact ratio.
        ratio_of_all = len(turn.messages) / due_count
        if ratio_of_all < least_ratio:
            return max(turn.fullness, ratio_of_all)
        return max(turn.fullness, len(turn.uncovered) / due_count)

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Summarizes older messages, if they are too many or the threshold is reached.

        While the request does not fit, each further summary leaves half as many
        messages beside it.
        """
        if self.fullness(turn) < 1:
            return None

        usual_count = max(MIN_KEPT, int(len(turn.uncovered) * KEPT_RATIO))
        most_count = min(usual_count, turn.keep_count)
        reason = turn.reason if turn.is_due else self.early_reason
        # `keep` must not hold back more messages than the window does.
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

        # No summary of the window has made the request fit.
        if window_turn.is_due:
            return await ask.summarize_all(window_turn)
        # Only the number of messages is too high. The last summary helps against that,
        # even if it leaves the request too large.
        return squeeze(window_turn, draft).draft if draft else None


def _reduce_kept(turn: Turn, most_count: int) -> int:
    """Returns how many of the newest messages stay beside a summary.

    `most_count` is halved while that many messages are too large, down to `MIN_KEPT`.
    """
    kept_count = most_count
    while kept_count > MIN_KEPT and _is_too_much(turn, kept_count):
        kept_count = _halve(kept_count)
    return kept_count


def _halve(kept_count: int) -> int:
    return max(MIN_KEPT, kept_count // 2)


def _may_help(turn: Turn, covered: frozenset[int]) -> bool:
    """Whether a summary of these messages has anything new, and may be small enough."""
    has_new = bool(covered - turn.summarized)
    if not has_new:
        return False
    # Before the threshold only the number of messages is too large, not their size.
    return not turn.is_due or expect_tokens(turn, covered) <= turn.limit_tokens


def _is_too_much(turn: Turn, kept_count: int) -> bool:
    """Whether the newest messages are too large to stay beside a summary.

    They are too large in two cases:

    - The request would not fit.
    - The threshold is reached, and the window would be full again soon.
    """
    covered = turn.older_than(kept_count)
    if turn.is_due and _fills_window_soon(turn, covered):
        return True
    return expect_tokens(turn, covered) > turn.limit_tokens


def _fills_window_soon(turn: Turn, covered: frozenset[int]) -> bool:
    """Whether the messages beside a summary take more than a tenth of the window.

    The messages that `keep` holds are not counted: they stay in any case.
    """
    history = turn.history
    not_counted = covered | turn.kept.indexes
    counted = [
        history.shown[index] for index in history.indexes if index not in not_counted
    ]
    most_tokens = _MAX_KEPT_WINDOW_RATIO * turn.budgets.working_tokens
    return turn.measure_alone(counted) > most_tokens
