"""Summaries that are written ahead of time, in the background.

The setting `ahead` of a strategy is a part of the threshold. The steps of such a
summary are:

1. Before a request of this size is sent, `plan` returns a function.
2. Once the request is answered, this function begins to write a summary.
3. The summary is ready (`SessionFacts.ready`), and waits until a compaction is wanted.
4. `compose_ahead` puts the summary in the request of that time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from contextguard_adk._core.call import Call
from contextguard_adk._core.decide import is_worth_it, may_begin_in_background
from contextguard_adk._core.pay import Payer
from contextguard_adk._history.history import History
from contextguard_adk._history.stored import Reason
from contextguard_adk._runtime.memory import ReadySummary
from contextguard_adk._summaries.compose import compose, describe_draft
from contextguard_adk._turn.facts import Outcome
from contextguard_adk._turn.turn import Turn


def plan(call: Call, turn: Turn) -> Callable[[int], None]:
    """Returns a function that begins to write a summary if it is still wanted then.

    The function is to be called once the call is answered. Its argument is the size of
    the prompt in tokens, by the provider's count or, without a count, by the estimate.

    Args:
        call: The model call.
        turn: The same call as a value, with the request that is about to be sent.
    """
    # The function must not keep the run alive. The history holds the run, and so do the
    # tools in the request's `tools_dict`.
    turn.history.release()
    # ADK and later callbacks may change the request, so the turn gets copies.
    request = turn.request.model_copy(
        update={"config": turn.config.model_copy(), "tools_dict": {}}
    )
    detached = replace(turn, request=request, contents=[*turn.contents])
    payer = Payer(call.guard, call.memory, call.strategy, call.invocation.agent)
    return partial(_begin, payer, detached)


def _begin(payer: Payer, turn: Turn, prompt_tokens: int) -> None:
    """Starts to write a summary if it is still wanted now that the call is answered.

    Args:
        payer: Lets the strategy compact.
        turn: The call as it was before its answer.
        prompt_tokens: The size of the call's prompt.
    """
    memory = payer.memory
    # `decide` does not compact the call after a compacted call. This summary is put in
    # a later request, so the memory looks as if no call had been compacted.
    counted = replace(
        turn,
        size=replace(turn.size, tokens=prompt_tokens),
        facts=replace(memory.facts, compacted_run=""),
        is_writing=memory.pending.is_under_way,
    )
    answered = replace(counted, nearness=payer.strategy.fullness(counted))
    if not may_begin_in_background(answered):
        return

    # The size of the request need not be the reason for the summary: the strategy may
    # want a summary, for example, because the history has many messages.
    # `ahead` is a number here: with None, `may_begin_in_background` is False.
    ahead = answered.settings.ahead or 1.0
    is_near_threshold = answered.fullness >= ahead
    if is_near_threshold and not is_worth_it(_at_threshold(answered)):
        # At the threshold, `decide` would not find a compaction worth its price.
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
    """Returns the turn with a threshold so low that a compaction is due now.

    The summary then covers all messages. The messages that a compaction keeps word for
    word are newer ones, which come before the summary is put in a request.
    """
    # The threshold becomes 99 % of the request, unless it is lower already. The other
    # sizes are lowered by the same ratio.
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
    """Writes a summary, which is then ready if a model has written it.

    Args:
        payer: Lets the strategy compact.
        turn: The call, with the threshold of `_as_if_due`.
        threshold_tokens: The real threshold, which the user's `before_compaction` is
            told.
    """
    # Only a few summaries are written ahead of time at once.
    has_slot = await payer.guard.tasks.acquire_slot()
    if not has_slot:
        # Other event loops hold all slots, and nobody here would notice their end.
        return
    allowed_turn = await payer.ask_user(turn, threshold_tokens, is_ahead=True)
    if allowed_turn is None:
        # `before_compaction` has put the compaction off.
        return

    written = await payer.write(allowed_turn, is_ahead=True)
    draft = written.draft
    if draft is None:
        # The strategy leaves the request as it is.
        return
    # The strategy may have asked for no summary, or may have got excerpts in its place.
    is_by_model = written.ask.attempts > 0 and not draft.is_mechanical
    if not is_by_model:
        # Without a model a compaction takes no time, so it can be made once it is due.
        return

    # Only the text of the model is kept. `compose_ahead` makes the rest for a later
    # request: the covered messages, the texts beside the summary, and short results.
    ready = ReadySummary(
        stored=describe_draft(allowed_turn, replace(draft, truncation=None)),
        facts={**written.facts, "was_ahead": True},
        is_ahead=True,
    )
    payer.memory.facts = replace(payer.memory.facts, ready=ready)


def compose_ahead(
    turn: Turn, ready: ReadySummary, history_with_ready: History, early_reason: Reason
) -> Outcome | None:
    """Returns the request with a summary that was written ahead of time.

    The summary covers its own messages, less those that a compaction keeps now.

    Args:
        turn: The model call, whose history has the stored summary.
        ready: The summary that was written ahead of time.
        history_with_ready: The same history with this summary in place.
        early_reason: The strategy's reason for a compaction before the threshold.

    Returns:
        The request, and the form in which the summary is stored. None if the summary
        covers no more than the stored one.
    """
    if not turn.history.covered < history_with_ready.covered:
        return None

    kept_indexes = turn.kept.indexes
    covered = turn.whole(history_with_ready.covered - kept_indexes)
    draft = replace(
        turn.draft,
        text=ready.stored.model_text,
        model_chars=ready.stored.model_chars,
        reason=turn.reason if turn.is_due else early_reason,
        covered=covered,
        model_covered=covered,
    )
    outcome = compose(turn, draft)

    # `left_tokens` is the size that the next compaction leaves at best: the threshold
    # is at least twice this size. So the messages that the next compaction covers are
    # subtracted: all that are newer than the stored summary, and are not kept.
    newer_messages = [
        history_with_ready.shown[index]
        for index in turn.uncovered
        if index not in kept_indexes
    ]
    rest_tokens = outcome.tokens - turn.measure_alone(newer_messages)
    # The request may have short forms of some of these messages, or may not have them
    # at all. Then too much is subtracted, but the fixed part is left in any case.
    left_tokens = max(turn.fixed_tokens, rest_tokens)
    stored = outcome.stored.model_copy(update={"left_tokens": left_tokens})
    return replace(outcome, stored=stored)
