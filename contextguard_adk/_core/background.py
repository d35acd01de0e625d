"""Summaries that are written ahead of time, in the background.

The setting `ahead` of a strategy says how near the threshold a request has to come.
Once such a request is answered, what `plan` has returned begins to write a summary. It
waits in the agent's memory until a compaction is due; then `put_in` puts it in place.
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
    """Returns a function to call with the prompt's tokens once the call is answered."""
    turn.history.release()
    # The plan must not keep the run alive: the request's tools may hold it.
    request = turn.request.model_copy(
        update={"config": turn.config.model_copy(), "tools_dict": {}}
    )
    own = replace(turn, request=request, contents=[*turn.contents])
    payer = Payer(call.guard, call.memory, call.strategy, call.invocation.agent)
    return partial(_begin, payer, own)


def _begin(payer: Payer, turn: Turn, tokens: int) -> None:
    """Starts writing a summary, if one is still wanted for so many prompt tokens."""
    memory = payer.memory
    answered = replace(
        turn,
        size=replace(turn.size, tokens=tokens),
        facts=replace(memory.facts, compacted_run=""),
        is_writing=memory.pending.is_under_way,
    )
    known = replace(answered, nearness=payer.strategy.fullness(answered))
    if not may_begin_in_background(known):
        return

    is_full = known.fullness >= (known.settings.ahead or 1.0)
    if is_full and not is_worth_it(_at_threshold(known)):
        return

    reason: Reason = "tokens" if is_full else payer.strategy.early_reason
    due = replace(_as_if_due(known), reason=reason)
    memory.facts = replace(memory.facts, is_background_tried=True)
    memory.pending.start(_write(payer, due, known.budgets.threshold_tokens))


def _at_threshold(turn: Turn) -> Turn:
    """Returns the turn as it will be once its request has reached the threshold."""
    tokens = max(turn.tokens, turn.budgets.threshold_tokens)
    return replace(turn, size=replace(turn.size, tokens=tokens))


def _as_if_due(turn: Turn) -> Turn:
    """Returns the turn as if its size were the threshold.

    It keeps no message word for word: those that come later will be kept.
    """
    budgets = turn.budgets
    ratio = min(1.0, 0.99 * turn.tokens / budgets.threshold_tokens)
    smaller = replace(
        budgets,
        threshold_tokens=int(ratio * budgets.threshold_tokens),
        full_tokens=int(ratio * budgets.full_tokens),
        working_tokens=int(ratio * budgets.working_tokens),
    )
    return replace(turn, budgets=smaller, keep_count=0)


async def _write(payer: Payer, turn: Turn, threshold_tokens: int) -> None:
    """Writes a summary, which waits in the memory until a compaction is due."""
    has_place = await payer.guard.tasks.take_place()
    if not has_place:
        return
    planned = await payer.ask_user(turn, threshold_tokens, is_ahead=True)
    if planned is None:
        return

    draft, facts, ask = await payer.compact(planned)
    # A pipeline may do without a summary, which costs nothing when it is due.
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


def put_in(
    turn: Turn, paid: Paid, history: History, early_reason: Reason
) -> Outcome | None:
    """Returns the request with a summary in place that was written ahead of time.

    Args:
        turn: The model call.
        paid: The summary.
        history: The request's history with that summary.
        early_reason: The reason of a compaction before the threshold is reached.

    Returns:
        None if the summary covers nothing new.
    """
    if not turn.history.covered < history.covered:
        return None

    covered = turn.whole(history.covered - turn.kept.indexes)
    draft = replace(
        turn.draft,
        text=paid.draft.text,
        model_chars=paid.draft.model_chars,
        reason=turn.reason if turn.is_due else early_reason,
        covered=covered,
        model_covered=covered,
    )
    outcome = compose(turn, draft)

    # The messages since then stay for now; the next compaction will remove them.
    kept = turn.kept.indexes
    newer = [history.shown[i] for i in turn.uncovered if i not in kept]
    left_tokens = outcome.tokens - turn.measure_alone(newer)
    # Some of them may be shortened in the request, and take less than was subtracted.
    left_tokens = max(turn.fixed_tokens, left_tokens)
    stored = outcome.stored.model_copy(update={"left_tokens": left_tokens})
    return replace(outcome, stored=stored)
