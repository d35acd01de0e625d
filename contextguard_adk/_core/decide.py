"""Decides what becomes of a request: one table of rows, read from the top.

Nothing here changes anything. These words of `Turn` are used in many rows:

- demanded: a compaction was requested, or the provider has rejected the request.
- due: the request has reached the threshold, or a compaction is demanded.
- full: the window less the room for an answer. A threshold may be lower.
- overfull: so large that the provider is expected to reject the request.
- settled: this call has already let the strategy compact.
- nearness: how near the strategy is to a compaction. From 1 on, it wants one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from contextguard_adk._history.stored import Draft
from contextguard_adk._measuring.calibration import request_script_discount
from contextguard_adk._summaries.compose import compose
from contextguard_adk._turn.turn import Turn


class Step(Enum):
    """An action of the guard. `SEND` is the last one for a request."""

    WAIT = "wait for the summary under way"
    REFUSE = "refuse the compaction that was asked for"
    COMPACT = "let the strategy compact"
    PUT_IN = "put a summary in place"
    SEND = "send the request as it stands"


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        holds: Returns whether the row applies to a model call.
        step: The action that the row asks for.
        why: The reason, for the log and for whoever asked for a compaction.
    """

    holds: Callable[[Turn], bool]
    step: Step
    why: str


def decide(turn: Turn) -> Row:
    """Returns the first row that holds for a model call."""
    return next(row for row in TABLE if row.holds(turn))


def is_worth_it(turn: Turn) -> bool:
    """Returns whether a compaction that is wanted is worth its price."""
    return next(row for row in _WORTH if row.holds(turn)).step is Step.COMPACT


def _is_ready(turn: Turn) -> bool:
    """Returns whether a finished summary is to be put in the request now."""
    has_lost_summary = turn.facts.find_lost(turn.record.summary) is not None
    if has_lost_summary:
        return True

    ready = turn.facts.ready
    if ready is None:
        return False
    if ready.is_background:
        # Such a summary waits until a compaction is wanted. It was written without a
        # focus that the user asks for now.
        return _is_wanted(turn) and not turn.focus
    return True


def _is_wanted(turn: Turn) -> bool:
    """Returns whether somebody asks for a compaction, or the strategy wants one."""
    return turn.is_demanded or turn.nearness >= 1


def _was_just_compacted(turn: Turn) -> bool:
    """Returns whether the call before was compacted for its size.

    It is False for a request that may be rejected, because that has to be compacted.
    """
    was_compacted = turn.facts.compacted_run != ""
    was_for_size = was_compacted and turn.facts.was_full
    return was_for_size and not turn.is_overfull


def _is_in_compacted_run(turn: Turn) -> bool:
    """Returns whether the last call of this very run was compacted."""
    run_id = turn.history.invocation_id
    return run_id != "" and turn.facts.compacted_run == run_id


def _gains_nothing(turn: Turn) -> bool:
    """Returns whether a compaction would save nothing, however short its summary is."""
    covered = turn.older_than(0)
    if not covered:
        return True

    # The shortest summary adds no text to the stored one.
    stored = turn.history.stored
    stored_text = stored.model_text if stored is not None else ""
    shortest = Draft(
        text=stored_text,
        covered=covered,
        model_covered=turn.history.model_covered,
        model_chars=len(stored_text),
        reason=turn.reason,
    )
    outcome = compose(turn, shortest)
    return outcome.tokens >= turn.measure(turn.contents)


def may_begin_in_background(turn: Turn) -> bool:
    """Returns whether a summary may be begun once this request is answered.

    The strategy has to be as near to a compaction as its setting `ahead` says. One
    summary is begun between two compactions.
    """
    ahead = turn.settings.ahead
    may_pay = turn.settings.summaries != "stored"
    # If a later release has written the record, this one stores no summary.
    may_store = not turn.record.is_newer
    if ahead is None or not may_pay or not may_store:
        return False

    facts = turn.facts
    has_ready = facts.ready is not None
    if has_ready or turn.is_writing or facts.is_background_tried:
        return False

    # A strategy that cannot tell its nearness says infinity.
    return ahead <= turn.nearness < math.inf


def _has_hardly_grown(turn: Turn) -> bool:
    """Returns whether the last try gained nothing, and the request is hardly larger.

    It is False for a request that may be rejected: then another try may help.
    """
    tried_tokens = turn.facts.fruitless_tokens
    if tried_tokens is None or turn.is_overfull:
        return False

    least_growth_tokens = turn.budgets.summary_tokens // 2
    if tried_tokens < turn.budgets.full_tokens:
        # There is room left in the window, and each try is paid for. So the next try
        # waits until the request has grown by an eighth.
        least_growth_tokens = max(least_growth_tokens, tried_tokens // 8)
    return turn.tokens - tried_tokens < least_growth_tokens


def _is_fixed_part_too_large(turn: Turn) -> bool:
    """Returns whether no compaction helps, because instruction and tools are too large.

    They are too large if they alone leave no room for an answer.
    """
    fixed_tokens = fixed_part_tokens(turn)
    if fixed_tokens < turn.budgets.full_tokens:
        return False

    # A request that may be rejected is compacted all the same, if that can make it fit.
    can_fit = fixed_tokens < turn.budgets.overfull_tokens
    is_worth_trying = turn.is_overfull and can_fit
    return not is_worth_trying


def _is_little_new(turn: Turn) -> bool:
    """Returns whether the messages to summarize take less than half a summary.

    It is False for a request that may be rejected: then even little may help.
    """
    if turn.is_overfull:
        return False

    # A compaction leaves the newest steps. It also leaves the user's request, if the
    # request is quoted whole beside the summary.
    history = turn.history
    staying = set(turn.kept.indexes)
    is_quoted_whole = turn.quoted_chars < 0
    if is_quoted_whole and history.request_index is not None:
        staying.add(history.request_index)

    new_messages = [
        history.shown[index] for index in turn.uncovered if index not in staying
    ]
    return turn.measure_alone(new_messages) < turn.budgets.summary_tokens // 2


def fixed_part_tokens(turn: Turn) -> int:
    """Returns the size of the part that no compaction removes, in tokens.

    The size is comparable with `turn.tokens`. A provider's count may have lowered that
    estimate below the heuristic, which is bytes / 4. Then this size is lowered too.
    """
    memo = turn.history.memo
    fixed_tokens = turn.fixed_tokens
    contents_tokens = memo.estimate_tokens(turn.contents)
    heuristic_tokens = contents_tokens + turn.size.config_tokens
    is_lowered = turn.tokens < heuristic_tokens
    if not is_lowered:
        return fixed_tokens

    # The fixed part is lowered in proportion, but only as far as the scripts of its own
    # texts explain it: some scripts take fewer tokens than bytes / 4.
    discount_tokens = request_script_discount(turn.fixed_contents, turn.config, memo)
    lowered_tokens = fixed_tokens * turn.tokens // heuristic_tokens
    return max(lowered_tokens, fixed_tokens - discount_tokens)


FIXED_PART_TOO_LARGE = Row(
    _is_fixed_part_too_large, Step.SEND, "instruction and tools alone are too large"
)

_WORTH = (
    Row(_was_just_compacted, Step.SEND, "the call before was compacted"),
    Row(_has_hardly_grown, Step.SEND, "it has hardly grown since a fruitless try"),
    Row(lambda turn: not turn.is_due, Step.COMPACT, "the strategy wants it"),
    Row(
        lambda turn: (
            turn.tokens < min(turn.budgets.full_tokens, 2 * fixed_part_tokens(turn))
        ),
        Step.SEND,
        "half of it cannot be compacted",
    ),
    FIXED_PART_TOO_LARGE,
    Row(_is_little_new, Step.SEND, "there is little to summarize"),
    Row(lambda turn: True, Step.COMPACT, "the threshold is reached"),
)
"""Whether a compaction that is wanted is worth its price."""

TABLE = (
    Row(lambda turn: turn.is_observed, Step.SEND, "the guard only observes"),
    Row(lambda turn: turn.record.is_newer, Step.SEND, "a later release stores it"),
    Row(
        lambda turn: turn.is_writing and not turn.has_room,
        Step.WAIT,
        "a summary is under way, and the request cannot go out without it",
    ),
    Row(_is_ready, Step.PUT_IN, "a summary is ready"),
    Row(
        lambda turn: turn.is_settled and turn.reason == "requested",
        Step.REFUSE,
        "nothing could be compacted",
    ),
    Row(lambda turn: turn.is_settled, Step.SEND, "this call already tried to compact"),
    Row(lambda turn: turn.is_writing, Step.SEND, "a summary is under way"),
    Row(
        lambda turn: turn.reason == "requested" and _is_in_compacted_run(turn),
        Step.REFUSE,
        "the call before was compacted as well",
    ),
    Row(
        lambda turn: turn.reason == "requested" and _gains_nothing(turn),
        Step.REFUSE,
        "nothing would be gained",
    ),
    Row(lambda turn: not _is_wanted(turn), Step.SEND, "no compaction is wanted"),
    Row(
        # Without a model, a compaction leaves excerpts only. That is too high a price
        # for a request that has not reached the threshold.
        lambda turn: (
            turn.settings.summaries == "stored"
            and not (turn.is_due or turn.is_demanded)
        ),
        Step.SEND,
        "only stored summaries are used",
    ),
    Row(
        lambda turn: turn.has_room and may_begin_in_background(turn),
        Step.SEND,
        "a summary is begun in the background once this call is answered",
    ),
    Row(
        lambda turn: (
            turn.reason == "overflow"
            and turn.fixed_tokens >= turn.budgets.window_tokens
        ),
        Step.SEND,
        "the fixed part alone fills the window",
    ),
    Row(lambda turn: turn.is_demanded, Step.COMPACT, "it is demanded"),
    *_WORTH,
)
"""What becomes of a request: the first row that holds decides."""
