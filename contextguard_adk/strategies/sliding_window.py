"""Summarizes the older history and keeps the newest messages word for word.

An index is the position of a message among the contents of the request. `keep` is a
setting of all strategies: how many tokens of the newest messages stay in any case.
`turn.kept` has these messages.
"""

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
"""At least this many of the newest messages stay beside a summary of the window."""

KEPT_RATIO = 0.30
"""The newest messages stay: this part of the messages without a summary."""

_MAX_KEPT_WINDOW_RATIO = 0.10
"""If kept messages take more than this part of the window, it is soon full again."""


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

        The first ratio is tokens to the threshold. The second ratio is the number of
        messages without a summary to `max_messages` + 1, the first number that is too
        many.
        """
        due_count = self.max_messages + 1
        # Below this ratio no compaction begins, not even one in the background.
        least_ratio = 1.0 if self.ahead is None else self.ahead
        # `turn.messages` has at least as many messages as `turn.uncovered`, which takes
        # longer to list. If even all messages are too few for a compaction, the list is
        # not needed: below `least_ratio`, the exact ratio makes no difference.
        ratio_of_all = len(turn.messages) / due_count
        if ratio_of_all < least_ratio:
            return max(turn.fullness, ratio_of_all)
        return max(turn.fullness, len(turn.uncovered) / due_count)

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Summarizes older messages, if they are too many or the threshold is reached.

        While the request does not fit, the next summary covers more messages, so that
        half as many stay. If no such summary makes the request fit, there are three
        cases:

        - If the threshold is reached: all messages but those of `keep` are summarized.
        - If the threshold is not reached: the last summary is used, because it makes
          the messages fewer.
        - If the threshold is not reached, and no summary was written: the result is
          None.
        """
        if self.fullness(turn) < 1:
            return None

        usual_count = max(MIN_KEPT, int(len(turn.uncovered) * KEPT_RATIO))
        most_count = min(usual_count, turn.keep_count)
        reason = turn.reason if turn.is_due else self.early_reason
        # The messages of `keep` are never summarized. In this copy of the turn, at most
        # `most_count` messages are messages of `keep`.
        limited_turn = replace(turn, reason=reason, keep_count=most_count)

        draft: Draft | None = None
        while ask.attempts < self.max_compaction_attempts:
            kept_count = _reduce_kept(limited_turn, most_count)
            covered = limited_turn.older_than(kept_count)
            if not _may_help(limited_turn, covered):
                break

            draft = await ask.summarize(limited_turn, covered)
            if ask.outcome(limited_turn, draft).tokens <= limited_turn.limit_tokens:
                return draft
            if kept_count <= MIN_KEPT:
                break  # Another summary would cover the same messages.
            most_count = _halve(kept_count)

        # No summary has made the request fit.
        if limited_turn.is_due:
            return await ask.summarize_all(limited_turn)
        # `squeeze` shortens the summary and the texts beside it, as far as needed.
        return squeeze(limited_turn, draft).draft if draft else None


def _reduce_kept(turn: Turn, most_count: int) -> int:
    """Returns how many of the newest messages stay beside a summary.

    These are `most_count` messages or, while so many are too large, half as many, down
    to `MIN_KEPT`.
    """
    kept_count = most_count
    while kept_count > MIN_KEPT and _is_too_much(turn, kept_count):
        kept_count = _halve(kept_count)
    return kept_count


def _halve(kept_count: int) -> int:
    return max(MIN_KEPT, kept_count // 2)


def _may_help(turn: Turn, covered: frozenset[int]) -> bool:
    """Whether a summary of these messages is worth writing.

    There has to be a message that no model has summarized yet. If the threshold is
    reached, the request must also be expected to fit with the summary. Below the
    threshold only the number of messages is too high, which every summary lowers.
    """
    has_new = bool(covered - turn.summarized)
    if not has_new:
        return False
    return not turn.is_due or expect_tokens(turn, covered) <= turn.limit_tokens


def _is_too_much(turn: Turn, kept_count: int) -> bool:
    """Whether the newest `kept_count` messages are too large to stay beside a summary.

    These messages are too large in two cases:

    - If the threshold is reached, and the window would be full again soon.
    - If the request would not fit.
    """
    covered = turn.older_than(kept_count)
    if turn.is_due and _fills_window_soon(turn, covered):
        return True
    return expect_tokens(turn, covered) > turn.limit_tokens


def _fills_window_soon(turn: Turn, covered: frozenset[int]) -> bool:
    """Whether the messages beside a summary take more than a tenth of the window.

    The messages of `keep` and the results of `keep_tools` are not counted, because
    they stay in any case.
    """
    history = turn.history
    not_counted = covered | turn.kept.indexes | turn.always_kept
    counted = [
        history.shown[index] for index in history.indexes if index not in not_counted
    ]
    most_tokens = _MAX_KEPT_WINDOW_RATIO * turn.budgets.working_tokens
    return turn.measure_alone(counted) > most_tokens
