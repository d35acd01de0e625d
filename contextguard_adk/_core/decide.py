"""What becomes of a request: one table, read from the top; pure."""

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
    """What the guard does next."""

    WAIT = "wait for the summary under way"
    REFUSE = "refuse the compaction that was asked for"
    COMPACT = "let the strategy compact"
    PUT_IN = "put a summary in place"
    SEND = "send the request as it stands"


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        holds: Returns whether the row is about a model call.
        step: What the guard then does.
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
    """Returns whether a finished summary is to be put in place now."""
    if turn.facts.find_lost(turn.record.summary) is not None:
        return True
    ready = turn.facts.ready
    if ready is None:
        return False
    if not ready.is_background:
        return True
    # A summary from the background was written without the user's focus.
    return _is_wanted(turn) and not turn.focus


def _is_wanted(turn: Turn) -> bool:
    """Returns whether somebody asks for a compaction, or the strategy wants one."""
    return turn.is_demanded or turn.nearness >= 1


def _was_just_compacted(turn: Turn) -> bool:
    """Returns whether the call before was compacted for its size, and this one fits."""
    was_for_size = bool(turn.facts.compacted_run) and turn.facts.was_full
    return was_for_size and not turn.is_overfull


def _is_in_compacted_run(turn: Turn) -> bool:
    """Returns whether the last call of this very run was compacted."""
    run_id = turn.history.invocation_id
    return run_id != "" and turn.facts.compacted_run == run_id


def _gains_nothing(turn: Turn) -> bool:
    """Returns whether even a summary without any new text would save nothing."""
    covered = turn.older_than(0)
    if not covered:
        return True

    stored = turn.history.stored
    stored_text = stored.model_text if stored else ""
    draft = Draft(
        text=stored_text,
        covered=covered,
        model_covered=turn.history.model_covered,
        model_chars=len(stored_text),
        reason=turn.reason,
    )
    outcome = compose(turn, draft)
    return outcome.tokens >= turn.measure(turn.contents)


def may_begin_in_background(turn: Turn) -> bool:
    """Returns whether a summary may be begun once this request is answered.

    One is tried between two compactions, by strategies with the setting `ahead`.
    """
    ahead = turn.settings.ahead
    if ahead is None or turn.settings.summaries == "stored":
        return False

    facts = turn.facts
    is_tried = facts.ready or facts.is_background_tried or turn.is_writing
    if is_tried or turn.record.is_newer:
        return False
    # The nearness is infinite for a strategy that does not know it.
    return ahead <= turn.nearness < math.inf


def _has_hardly_grown(turn: Turn) -> bool:
    """Returns whether the last try gained nothing, and the request is hardly larger."""
    tried_tokens = turn.facts.fruitless_tokens
    if tried_tokens is None or turn.is_overfull:
        return False

    half_summary_tokens = turn.budgets.summary_tokens // 2
    if tried_tokens < turn.budgets.full_tokens:
        # Far below the window nothing presses, and each try is paid for.
        least_growth_tokens = max(half_summary_tokens, tried_tokens // 8)
    else:
        least_growth_tokens = half_summary_tokens
    return turn.tokens - tried_tokens < least_growth_tokens


def _is_fixed_part_too_large(turn: Turn) -> bool:
    """Returns whether instruction and tools alone reach the threshold.

    A request that may be rejected is compacted all the same, if that can make it fit.
    """
    fixed_tokens = fixed_part_tokens(turn)
    budgets = turn.budgets
    if fixed_tokens < budgets.full_tokens:
        return False
    return fixed_tokens >= budgets.overfull_tokens or not turn.is_overfull


def _is_little_new(turn: Turn) -> bool:
    """Returns whether the messages to summarize take less than half a summary.

    It is False for a request that may be rejected: then even little may help.
    """
    if turn.is_overfull:
        return False

    # The newest steps would stay, and the current request would be quoted again.
    history = turn.history
    staying = set(turn.kept.indexes)
    if turn.quoted_chars < 0 and history.request_index is not None:
        staying.add(history.request_index)
    new_messages = [
        history.shown[index] for index in turn.uncovered if index not in staying
    ]
    return turn.measure_alone(new_messages) < turn.budgets.summary_tokens // 2


def fixed_part_tokens(turn: Turn) -> int:
    """Returns the size of the part that no compaction removes, in tokens.

    The estimate of the whole request may follow a count of the provider. This size is
    lowered to be comparable with it, and never raised.
    """
    memo = turn.history.memo
    fixed_tokens = turn.fixed_tokens
    contents_tokens = memo.estimate_tokens(turn.contents)
    heuristic_tokens = contents_tokens + turn.size.config_tokens
    if turn.tokens >= heuristic_tokens:
        return fixed_tokens

    # The count is below bytes / 4. The fixed part is lowered in proportion, but only
    # as far as the scripts of its own text explain it.
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
        # Excerpts without a model would lose more than such a request has to.
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
