"""Summaries that are written ahead of time, in the background.

The setting `ahead` of a strategy says how near the threshold a request has to come.
Once such a request is answered, the function that `plan` has returned begins to write
a summary. The summary waits on the shelf (`SessionFacts.ready`) until a compaction is
due. Then `compose_paid` puts the summary in the request.
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
    """Returns a function that begins to write a summary if one is still wanted.

    It is called once the call is answered. Its argument is the size of the prompt in
    tokens, as the provider has counted it, else as the guard has estimated it.
    """
    # The function must not keep the run alive. The history and the request's tools hold
    # the run, so both let go of it.
    turn.history.release()
    request = turn.request.model_copy(
        update={"config": turn.config.model_copy(), "tools_dict": {}}
    )
    detached = replace(turn, request=request, contents=[*turn.contents])
    payer = Payer(call.guard, call.memory, call.strategy, call.invocation.agent)
    return partial(_begin, payer, detached)


def _begin(payer: Payer, turn: Turn, prompt_tokens: int) -> None:
    """Starts to write a summary if one is still wanted now that the call is answered.

    Args:
        payer: Lets the strategy compact.
        turn: The call as it was before its answer.
        prompt_tokens: The size of the call's prompt.
    """
    memory = payer.memory
    # This call may have been compacted. That is no reason against the next summary, so
    # `compacted_run` is cleared.
    counted = replace(
        turn,
        size=replace(turn.size, tokens=prompt_tokens),
        facts=replace(memory.facts, compacted_run=""),
        is_writing=memory.pending.is_under_way,
    )
    answered = replace(counted, nearness=payer.strategy.fullness(counted))
    if not may_begin_in_background(answered):
        return

    # A strategy may want a summary for another reason than the size of the request.
    ahead = answered.settings.ahead or 1.0
    is_near_threshold = answered.fullness >= ahead
    if is_near_threshold and not is_worth_it(_at_threshold(answered)):
        # Once it is due, this compaction would not be worth its price.
        return

    reason: Reason = "tokens" if is_near_threshold else payer.strategy.early_reason
    due = replace(_as_if_due(answered), reason=reason)
    memory.facts = replace(memory.facts, is_background_tried=True)
    memory.pending.start(_write(payer, due, answered.budgets.threshold_tokens))


def _at_threshold(turn: Turn) -> Turn:
    """Returns the turn with the size that its request has when a compaction is due."""
    tokens = max(turn.tokens, turn.budgets.threshold_tokens)
    return replace(turn, size=replace(turn.size, tokens=tokens))


def _as_if_due(turn: Turn) -> Turn:
    """Returns the turn with a threshold so low that its request is due for compaction.

    The turn keeps no message word for word: the messages that a compaction will keep
    come later.
    """
    # The threshold becomes 99 % of the request, but it does not grow.
    budgets = turn.budgets
    due_ratio = 0.99 * turn.tokens / budgets.threshold_tokens
    ratio = min(1.0, due_ratio)
    smaller = replace(
        budgets,
        threshold_tokens=int(ratio * budgets.threshold_tokens),
        full_tokens=int(ratio * budgets.full_tokens),
        working_tokens=int(ratio * budgets.working_tokens),
    )
    return replace(turn, budgets=smaller, keep_count=0)


async def _write(payer: Payer, turn: Turn, threshold_tokens: int) -> None:
    """Writes a summary, and puts it on the shelf until a compaction is due.

    Args:
        payer: Lets the strategy compact.
        turn: The call, with the threshold of `_as_if_due`.
        threshold_tokens: The real threshold, of which the user's function is told.
    """
    # Only a few summaries are written ahead of time at once.
    has_slot = await payer.guard.tasks.acquire_slot()
    if not has_slot:
        return
    allowed_turn = await payer.ask_user(turn, threshold_tokens, is_ahead=True)
    if allowed_turn is None:
        # The user's function has put the compaction off.
        return

    draft, facts, ask = await payer.compact(allowed_turn)
    if draft is None:
        return
    is_by_model = ask.attempts > 0 and not draft.is_mechanical
    if not is_by_model:
        # Without a model a compaction costs nothing, so it waits until it is due.
        return

    # Only the text of the model is kept. The rest is made anew when the summary is put
    # in a request, because it depends on that request.
    stored = compose(allowed_turn, draft).stored
    paid = Paid(
        draft=Draft(stored.model_text, frozenset(), model_chars=stored.model_chars),
        stored=stored.model_copy(update={"beside": {}, "truncation": None}),
        facts={**facts, "was_ahead": True},
        run_id=allowed_turn.origin.invocation_id,
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
        early_reason: The strategy's reason for a compaction before the threshold.

    Returns:
        None if the summary covers no more messages than the stored one.
    """
    paid_covered = history_with_paid.covered
    covers_more = turn.history.covered < paid_covered
    if not covers_more:
        return None

    kept_indexes = turn.kept.indexes
    covered = turn.with_summarized(paid_covered - kept_indexes)
    draft = replace(
        turn.draft,
        text=paid.draft.text,
        model_chars=paid.draft.model_chars,
        reason=turn.reason if turn.is_due else early_reason,
        covered=covered,
        model_covered=covered,
    )
    outcome = compose(turn, draft)

    # The request also has the messages since the summary was begun. The next compaction
    # removes them, so they do not count in `left_tokens`.
    newer_messages = [
        history_with_paid.shown[index]
        for index in turn.uncovered
        if index not in kept_indexes
    ]
    rest_tokens = outcome.tokens - turn.measure_alone(newer_messages)
    # If the request has shortened some of these messages, too much was subtracted.
    left_tokens = max(turn.fixed_tokens, rest_tokens)
    stored = outcome.stored.model_copy(update={"left_tokens": left_tokens})
    return replace(outcome, stored=stored)
