"""Summaries that are written ahead of time, in the background.

The setting `ahead` of a strategy says how near the threshold a request has to come.
Once such a request is answered, the function that `plan` has returned begins to write
a summary. The summary waits on the shelf (`SessionFacts.ready`) until a compaction is
due. Then `compose_paid` puts it in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from contextguard_adk._core.call import Call
from contextguard_adk._core.decide import is_worth_it, may_begin_in_background
from contextguard_adk._core.pay import Payer
from contextguard_adk._history.history import History
from contextguard_adk._history.stored import Draft, Reason
from contextguard_adk._runtime.memory import Paid
from contextguard_adk._summaries.compose import compose
from contextguard_adk._turn.facts import Outcome
from contextguard_adk._turn.turn import Turn


def plan(call: Call, turn: Turn) -> Callable[[int], None]:
    """Returns a function that begins to write a summary, if one is still wanted.

    It is to be called once the call is answered, with the size of the prompt in tokens.
    """
    turn.history.release()
    # The function must not keep the run alive: the request's tools may hold it.
    request = turn.request.model_copy(
        update={"config": turn.config.model_copy(), "tools_dict": {}}
    )
    detached = replace(turn, request=request, contents=[*turn.contents])
    payer = Payer(call.guard, call.memory, call.strategy, call.invocation.agent)
    return partial(_begin, payer, detached)


def _begin(payer: Payer, turn: Turn, tokens: int) -> None:
    """Starts to write a summary, if one is still wanted now that the call is answered.

    Args:
        payer: Lets the strategy compact.
        turn: The call, as it was before its answer.
        tokens: The size of its prompt.
    """
    memory = payer.memory
    counted = replace(
        turn,
        size=replace(turn.size, tokens=tokens),
        facts=replace(memory.facts, compacted_run=""),
        is_writing=memory.pending.is_under_way,
    )
    answered = replace(counted, nearness=payer.strategy.fullness(counted))
    if not may_begin_in_background(answered):
        return

    # A strategy may want a summary for another reason than the size of the request.
    is_near_threshold = answered.fullness >= (answered.settings.ahead or 1.0)
    if is_near_threshold and not is_worth_it(_at_threshold(answered)):
        return

    reason: Reason = "tokens" if is_near_threshold else payer.strategy.early_reason
    due = replace(_as_if_due(answered), reason=reason)
    memory.facts = replace(memory.facts, is_background_tried=True)
    memory.pending.start(_write(payer, due, answered.budgets.threshold_tokens))


def _at_threshold(turn: Turn) -> Turn:
    """Returns the turn as it will be once its request has reached the threshold."""
    tokens = max(turn.tokens, turn.budgets.threshold_tokens)
    return replace(turn, size=replace(turn.size, tokens=tokens))


def _as_if_due(turn: Turn) -> Turn:
    """Returns the turn with budgets so small that its request is due for compaction.

    The threshold becomes at most 99 % of the request. The turn keeps no message word
    for word, because later messages will be kept.
    """
    budgets = turn.budgets
    due_ratio = 0.99 * turn.tokens / budgets.threshold_tokens
    ratio = min(1.0, due_ratio)  # No budget grows.
    smaller = replace(
        budgets,
        threshold_tokens=int(ratio * budgets.threshold_tokens),
        full_tokens=int(ratio * budgets.full_tokens),
        working_tokens=int(ratio * budgets.working_tokens),
    )
    return replace(turn, budgets=smaller, keep_count=0)


async def _write(payer: Payer, turn: Turn, threshold_tokens: int) -> None:
    """Writes a summary, and puts it on the shelf until a compaction is due.

    Nothing goes on the shelf if there is no slot for the task, if the user's function
    puts the compaction off, or if no model has written a summary.
    """
    has_slot = await payer.guard.tasks.acquire_slot()
    if not has_slot:
        return
    planned = await payer.ask_user(turn, threshold_tokens, is_ahead=True)
    if planned is None:
        return

    draft, facts, ask = await payer.compact(planned)
    # A pipeline may compact without a model. That costs nothing when it is due.
    if draft is None or not ask.attempts or draft.is_mechanical:
        return

    stored = compose(planned, draft).stored
    paid = Paid(
        draft=Draft(stored.model_text, frozenset(), model_chars=stored.model_chars),
        stored=stored.model_copy(update={"beside": {}, "truncation": None}),
        facts={**facts, "was_ahead": True},
        run_id=planned.origin.invocation_id,
        is_background=True,
    )
    payer.memory.facts = replace(payer.memory.facts, ready=paid)


def compose_paid(
    turn: Turn, paid: Paid, history_with_paid: History, early_reason: Reason
) -> Outcome | None:
    """Returns the request with a summary in place that was written ahead of time.

    Args:
        turn: The model call.
        paid: The summary.
        history_with_paid: The request's history as this summary covers it.
        early_reason: The reason of a compaction before the threshold is reached.

    Returns:
        None if the summary covers no more messages than the stored one.
    """
    paid_covered = history_with_paid.covered
    is_more_covered = turn.history.covered < paid_covered
    if not is_more_covered:
        return None

    kept = turn.kept.indexes
    replaced = turn.whole(paid_covered - kept)
    draft = replace(
        turn.draft,
        text=paid.draft.text,
        model_chars=paid.draft.model_chars,
        reason=turn.reason if turn.is_due else early_reason,
        covered=replaced,
        model_covered=replaced,
    )
    outcome = compose(turn, draft)

    # The messages since the summary stay for now; the next compaction removes them.
    newer_messages = [
        history_with_paid.shown[index] for index in turn.uncovered if index not in kept
    ]
    rest_tokens = outcome.tokens - turn.measure_alone(newer_messages)
    # Some of these messages may be shortened in the request. Then too many tokens were
    # subtracted.
    left_tokens = max(turn.fixed_tokens, rest_tokens)
    stored = outcome.stored.model_copy(update={"left_tokens": left_tokens})
    return replace(outcome, stored=stored)
