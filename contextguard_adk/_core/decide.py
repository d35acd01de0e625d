"""Decides what becomes of a request: one table of rows, read from the top.

Nothing here changes anything. These words of `Turn` are used in many rows:

- requested: somebody has asked for a compaction. The `reason` is "requested".
- rejected: the provider has rejected the request. The `reason` is "overflow".
- demanded: a compaction was requested, or the request was rejected.
- due: the request has reached the threshold, or a compaction is demanded.
- `full_tokens`: the window less the room for an answer. The threshold may be lower.
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
    ready = turn.facts.ready
    if ready is None:
        return False
    if ready.is_ahead:
        # A summary that was written ahead of time waits until a compaction is wanted.
        # It was written without the focus that somebody may ask for now.
        return _is_wanted(turn) and not turn.focus
    # This summary was just written, or the event that was to carry it to the session
    # got lost.
    return not ready.is_stored_as(turn.history.stored)


def _is_wanted(turn: Turn) -> bool:
    """Returns whether somebody asks for a compaction, or the strategy wants one."""
    return turn.is_demanded or turn.nearness >= 1


def _was_just_compacted(turn: Turn) -> bool:
    """Returns whether the call before was compacted for its size.

    The result is False for an overfull request, which has to be compacted again.
    """
    was_compacted = turn.facts.compacted_run != ""
    was_for_size = was_compacted and turn.facts.was_full
    return was_for_size and not turn.is_overfull


def _is_in_compacted_run(turn: Turn) -> bool:
    """Returns whether the call before was compacted, and was a call of the same run."""
    run_id = turn.history.invocation_id
    return run_id != "" and turn.facts.compacted_run == run_id


def _gains_nothing(turn: Turn) -> bool:
    """Returns whether a compaction would save nothing, however short its summary is."""
    covered = turn.older_than(keep_count=0)
    if not covered:
        # There is no message that a compaction may cover.
        return True

    # A compaction saves most if the text of the stored summary stays as it is, and all
    # messages are covered without any words for the new ones.
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

    The strategy has to be as near to a compaction as its setting `ahead` says, where
    None stands for never. Between two compactions only one such summary is begun.
    """
    ahead = turn.settings.ahead
    may_pay = turn.settings.summaries != "stored"
    # If a later release has written the record, this release stores no summary.
    may_store = not turn.record.is_newer
    if ahead is None or not may_pay or not may_store:
        return False

    facts = turn.facts
    has_ready = facts.ready is not None and facts.ready.is_ahead
    if has_ready or turn.is_writing or facts.is_background_tried:
        return False

    # A strategy that cannot tell its nearness says infinity. Then nobody knows whether
    # it would compact anything.
    return ahead <= turn.nearness < math.inf


def _has_hardly_grown(turn: Turn) -> bool:
    """Returns whether the request has hardly grown since a fruitless compaction.

    A compaction is fruitless if it has gained nothing. The result is False for an
    overfull request: another compaction is its only chance.
    """
    tried_tokens = turn.facts.fruitless_tokens
    if tried_tokens is None or turn.is_overfull:
        return False

    # A compaction replaces the new messages by a summary. This pays only if the new
    # messages take at least half of the most that a summary may take.
    least_growth_tokens = turn.budgets.summary_tokens // 2
    if tried_tokens < turn.budgets.full_tokens:
        # There is still room for an answer, so the next compaction, which is paid for,
        # can wait until the request has grown by an eighth.
        least_growth_tokens = max(least_growth_tokens, tried_tokens // 8)
    return turn.tokens - tried_tokens < least_growth_tokens


def _is_fixed_part_too_large(turn: Turn) -> bool:
    """Returns whether no compaction helps, because the fixed part is too large.

    The fixed part is what no compaction removes, such as instruction and tools. It is
    too large if it leaves no room for an answer, with one exception: an overfull
    request is compacted if the provider may accept the compacted request.
    """
    fixed_tokens = fixed_part_tokens(turn)
    if fixed_tokens < turn.budgets.full_tokens:
        return False

    may_be_accepted = fixed_tokens < turn.budgets.overfull_tokens
    is_worth_trying = turn.is_overfull and may_be_accepted
    return not is_worth_trying


def _is_little_new(turn: Turn) -> bool:
    """Returns whether the messages to summarize take less than half a summary.

    The result is False for an overfull request: even a small gain may help.
    """
    if turn.is_overfull:
        return False

    # A compaction saves nothing with the newest steps, which it keeps. It saves nothing
    # with the user's request either, if it quotes the whole request.
    history = turn.history
    staying = set(turn.kept.indexes)
    # A number of -1 stands for all characters.
    is_quoted_whole = turn.quoted_chars < 0
    if is_quoted_whole and history.request_index is not None:
        staying.add(history.request_index)

    new_messages = [
        history.shown[index] for index in turn.uncovered if index not in staying
    ]
    return turn.measure_alone(new_messages) < turn.budgets.summary_tokens // 2


def fixed_part_tokens(turn: Turn) -> int:
    """Returns the size of the fixed part, which no compaction removes, in tokens.

    The size can be compared with `turn.tokens`. `turn.fixed_tokens` cannot always be
    compared: if the provider has counted fewer tokens than the heuristic tokens
    (bytes / 4) of a request, `turn.tokens` follows the count, and `turn.fixed_tokens`
    does not.
    """
    memo = turn.history.memo
    fixed_tokens = turn.fixed_tokens
    contents_tokens = memo.estimate_tokens(turn.contents)
    heuristic_tokens = contents_tokens + turn.size.config_tokens
    is_lowered = turn.tokens < heuristic_tokens
    if not is_lowered:
        return fixed_tokens

    # The fixed part is lowered in proportion. But only some scripts take fewer tokens
    # than bytes / 4, so it is lowered at most by the discount of its own scripts.
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
"""Whether a compaction that is wanted is worth its price; the last row always holds."""

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
        # With "stored" no model is asked, so a compaction leaves excerpts only. Before
        # the threshold is reached, that is too high a price.
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
"""What becomes of a request: the first row that holds decides; one always holds."""
