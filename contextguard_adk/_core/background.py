"""Summaries that are written in the background, while the agent goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from contextguard_adk._core.call import Call
from contextguard_adk._core.decide import is_worth_it, may_begin_in_background
from contextguard_adk._core.pay import Payer
from contextguard_adk._turn.turn import Turn


def plan_background(call: Call, turn: Turn) -> Callable[[int], None] | None:
    """Returns what to call with the tokens of the request once it is answered.

    None where nothing is to be written: the request is too small, there is a
    summary, or one was tried since the last compaction.
    """
    if call.is_observed or turn.is_settled or not may_begin_in_background(turn):
        return None
    turn.history.release()
    # What is kept must not hold the run: its tools may.
    update = {"config": turn.config.model_copy(), "tools_dict": {}}
    request = turn.request.model_copy(update=update)
    turn = replace(turn, request=request, contents=[*turn.contents])
    return partial(_begin, Payer.of(call), turn)


def _begin(payer: Payer, turn: Turn, tokens: int) -> None:
    size, budgets = replace(turn.size, tokens=tokens), turn.budgets
    facts = replace(payer.session.facts, compacted_run="")
    is_writing = payer.session.pending.is_under_way
    turn = replace(turn, size=size, facts=facts, is_writing=is_writing)
    turn = replace(turn, nearness=payer.strategy.fullness(turn))
    if not may_begin_in_background(turn):
        return
    is_full = turn.fullness >= (turn.settings.ahead or 1.0)
    at_trigger = replace(size, tokens=max(tokens, budgets.threshold_tokens))
    if is_full and not is_worth_it(replace(turn, size=at_trigger)):
        return
    # As if this size were the threshold. What comes later stays word for word.
    ratio = min(1.0, 0.99 * tokens / budgets.threshold_tokens)
    budgets = replace(
        budgets,
        threshold_tokens=int(ratio * budgets.threshold_tokens),
        full_tokens=int(ratio * budgets.full_tokens),
        working_tokens=int(ratio * budgets.working_tokens),
    )
    reason = "tokens" if is_full else payer.strategy.early_reason
    turn = replace(turn, reason=reason, budgets=budgets, keep_count=0)
    payer.session.note(is_background_tried=True)
    payer.session.pending.start(payer.pay_in_background(turn))
