"""The loop of one model call: look, decide, and act, until the request can be sent.

A summary that was paid for is ready (`SessionFacts.ready`) until the session is known
to have it. So it is not paid for twice if a call is cancelled, or if the event that was
to carry the summary to the session gets lost.

A call is settled in two cases:

- The call has let the strategy compact.
- In a recovery from a rejection, a finished summary was put in the request or dropped.

A settled call does not let the strategy compact. A recovery begins with the call not
settled. So a call may be compacted more than once: with a summary that was ready, then
with a new summary, and again in a recovery.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from google.genai import types

from contextguard_adk import _listeners, _recall
from contextguard_adk._core import background
from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._core.decide import (
    FIXED_PART_TOO_LARGE,
    Row,
    Step,
    decide,
    fixed_part_tokens,
    may_begin_in_background,
)
from contextguard_adk._core.kept_tools import warn_of_compaction, warn_of_previews
from contextguard_adk._core.limits import fit_output, warn_reserved_output
from contextguard_adk._core.look import build_turn, leave_out_oldest, read_counts
from contextguard_adk._core.pay import Payer
from contextguard_adk._runtime.memory import ReadySummary
from contextguard_adk._runtime.runs import SentCall, StoredByRun, call_key
from contextguard_adk._summaries.compose import place_stored
from contextguard_adk._support.log import log_failures, warn_once
from contextguard_adk._turn.facts import Counts, Outcome
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Compacted, Sent
from contextguard_adk.records import CompactionRecord, PressureRecord

logger = logging.getLogger("contextguard_adk.call")


async def look_and_act(call: Call, bounds: Bounds) -> Turn:
    """Looks at a call and acts, until the table of `decide` says to send the request.

    Args:
        call: The model call.
        bounds: The bounds of the request beside the limits of its model.

    Returns:
        The turn of the last look: the call as a value, with the contents to send.
    """
    call.counts = read_counts(call)
    is_settled = False

    while True:
        turn = build_turn(call, bounds, is_settled)
        if call.tokens_before == 0:
            # This is the first look.
            call.tokens_before = turn.tokens
        row = decide(turn)
        logger.debug("Agent %r: %s; %s.", turn.agent, row.step.value, row.why)

        if row is FIXED_PART_TOO_LARGE:
            _warn_fixed_part(turn)
        if row.step is Step.SEND:
            return leave_out_oldest(turn, bounds)

        act = _ACTS[row.step]
        settles = await act(call, turn, row)
        if settles:
            is_settled = True


async def _wait(call: Call, turn: Turn, row: Row) -> bool:
    """Waits for the summary under way; the next look may find it ready.

    Returns:
        False: the call is not settled by this.
    """
    await call.wait()
    return False


async def _refuse(call: Call, turn: Turn, row: Row) -> bool:
    """Refuses the compaction that was asked for, and stores the reason.

    Returns:
        False: the call is not settled by this.
    """
    call.state.answer_request(row.why)
    return False


async def _compact(call: Call, turn: Turn, row: Row) -> bool:
    """Lets the strategy compact; the next look may find a summary that is ready.

    Returns:
        True: the call is settled by this.
    """
    call.is_recovery_paid = turn.reason == "overflow"
    payer = Payer(call.guard, call.memory, call.strategy, call.invocation.agent)
    # If this call is cancelled, the task goes on, and a later call uses the summary.
    was_allowed = await call.memory.pending.write(payer.pay(turn))
    # None stands for a task that was cancelled, and not for an answer of the user.
    was_put_off = was_allowed is False
    if was_put_off and turn.reason == "requested":
        call.state.answer_request("before_compaction put it off")
    return True


async def _put_in(call: Call, turn: Turn, row: Row) -> bool:
    """Puts the summary that is ready in the request if that makes it smaller.

    Otherwise the summary is dropped.

    Returns:
        True if the provider has rejected the request. Then the next look must not let
        the strategy compact, because the recovery first sends this request. Otherwise
        False.
    """
    memory = call.memory
    ready = turn.facts.ready
    assert ready is not None, "The table asks for this step only with a summary."
    memory.facts = replace(memory.facts, ready=None)
    outcome = _try_ready(call, turn, ready)
    is_recovery = turn.reason == "overflow"
    if outcome is not None:
        _commit(call, turn, outcome)
        if turn.is_settled and not is_recovery:
            _note_compaction(call, is_for_size=turn.reason != "requested")
        # A summary that was lost was reported when it was put in for the first time.
        if ready.facts is not None:
            await _report(call, turn, outcome, ready.facts)
    elif turn.is_settled:
        # This call has just paid for the summary. Until the request has grown, no call
        # pays for another one.
        memory.facts = replace(memory.facts, fruitless_tokens=turn.tokens)
        message = "A summary for agent %r was dropped: it gains nothing; %s."
        logger.info(message, turn.agent, turn.origin.place)
    return is_recovery


def _note_compaction(call: Call, is_for_size: bool) -> None:
    """Notes that the call has paid for its summary, and drops the provider's count.

    Args:
        call: The model call.
        is_for_size: Whether the compaction was for the size of the request. Then
            `decide` usually does not compact the next call.
    """
    memory = call.memory
    call.is_compacted = True
    memory.facts = replace(memory.facts, was_full=is_for_size)
    # The provider's count includes contents that are gone, so the count is dropped. The
    # correction, which follows from the count, still holds. `Turn.measure` has measured
    # the outcome with `measured_correction`. Both fields get this number, so the next
    # look estimates the request in the same way.
    correction = call.counts.measured_correction
    call.counts = Counts(correction=correction, measured_correction=correction)


_Act = Callable[[Call, Turn, Row], Awaitable[bool]]
_ACTS: Mapping[Step, _Act] = {
    Step.WAIT: _wait,
    Step.REFUSE: _refuse,
    Step.COMPACT: _compact,
    Step.PUT_IN: _put_in,
}
"""The function for each step. It returns whether the step settles the call."""


def _try_ready(call: Call, turn: Turn, ready: ReadySummary) -> Outcome | None:
    """Composes a request with a summary that is ready, as a trial.

    Returns:
        The request with the summary. None if the summary no longer fits the history,
        covers less than the stored one, or makes the request no smaller.
    """
    history = turn.history.with_summary(ready.stored)
    is_of_this_history = history.has_all_covered and not history.is_rewound
    was_edited_since = ready.stored.edits < turn.record.edits
    covers_as_much = turn.history.covered <= history.covered
    if not is_of_this_history or was_edited_since or not covers_as_much:
        # The messages have changed since the summary was written, somebody has edited
        # the stored summary by hand, or another process has stored a newer one.
        return None

    outcome: Outcome | None
    if ready.is_ahead:
        early_reason = call.strategy.early_reason
        outcome = background.compose_ahead(turn, ready, history, early_reason)
    else:
        outcome = place_stored(turn, ready.stored)
    if outcome is None:
        return None
    makes_smaller = outcome.tokens < turn.measure(turn.contents)
    return outcome if makes_smaller else None


def _commit(call: Call, turn: Turn, outcome: Outcome) -> None:
    """Stores a summary. The next look reads it, and builds the request with it.

    Args:
        call: The model call.
        turn: The same call as a value, before the summary is in its request.
        outcome: The request with the summary, and the form in which it is stored.
    """
    memory = call.memory
    call.state.save_summary(outcome.stored, turn.tokens)
    ready: ReadySummary | None = None
    if call.state.load_summary(call.scope) is not None:
        # A later run puts it in again if the session has lost it.
        ready = ReadySummary(outcome.stored)
        key = call.state.key("record")
        call.run.stored.append(StoredByRun(memory, ready, key))
    memory.facts = replace(
        memory.facts,
        ready=ready,
        is_background_tried=False,
        # This compaction gains something, so the next one need not wait for a larger
        # request.
        fruitless_tokens=None,
    )

    # If the summary has another reason, it was paid for before somebody asked for a
    # compaction. Then the compaction that was asked for is still to come.
    if turn.reason == "requested" and outcome.stored.reason == "requested":
        call.state.answer_request()
    # ADK's cache metadata describe a prefix of the contents that is gone.
    call.request.cache_metadata = None


async def _report(
    call: Call, turn: Turn, outcome: Outcome, facts: dict[str, Any]
) -> None:
    """Tells listeners and the user's `on_compaction` of a compaction.

    The log warns if the compaction does not keep results of `keep_tools`.

    Args:
        call: The model call.
        turn: The same call as a value, before the summary is in its request.
        outcome: The request with the summary.
        facts: The fields of the `CompactionRecord` that tell how the summary was
            written.
    """
    warn_of_compaction(call, turn, outcome.draft.covered)

    # The call may be compacted again. The wait for the next compaction counts from now.
    now_seconds = asyncio.get_running_loop().time()
    waited_seconds = now_seconds - call.started_seconds
    call.started_seconds = now_seconds

    record = _describe(turn, outcome, facts, waited_seconds)
    call.compaction = record
    event = Compacted(call.guard, call.context, call.state, turn, outcome, record)
    for listener in _listeners.COMPACTED:
        if listener.is_on(call.guard):
            with log_failures(logger, f"{type(listener).__name__} failed"):
                await listener.compacted(event)
    await call.guard.observers.tell(record)


def _describe(
    turn: Turn, outcome: Outcome, facts: dict[str, Any], waited_seconds: float
) -> CompactionRecord:
    """Returns the record of a compaction.

    Args:
        turn: The call as a value, before the summary is in its request.
        outcome: The request with the summary.
        facts: The fields that tell how the summary was written.
        waited_seconds: How long the call has waited for the summary.
    """
    # `turn.tokens` may follow a count of the provider, but `outcome.tokens` comes from
    # `turn.measure`, which knows only the correction. The scale makes the two
    # comparable.
    scale = turn.tokens / max(1, turn.measure(turn.contents))

    return CompactionRecord(
        **vars(turn.origin),
        reason=outcome.stored.reason,
        tokens_before=turn.tokens,
        tokens_after=int(outcome.tokens * scale),
        contents_before=len(turn.contents),
        contents_after=len(outcome.contents),
        summary_tokens=len(outcome.stored.text.encode()) // 4,
        is_mechanical=outcome.draft.is_mechanical,
        waited_seconds=round(waited_seconds, 3),
        **facts,
    )


async def prepare_request(call: Call, turn: Turn) -> None:
    """Prepares the request, which ADK sends next, and keeps a record of it.

    A guard that only observes does not change the request.

    Args:
        call: The model call.
        turn: The same call as a value, with the contents to send.
    """
    original_contents = call.request.contents
    warn_reserved_output(turn.agent, turn.budgets)
    if not call.is_observed:
        warn_of_previews(turn)
        _change_request(call, turn)
        _note_run(call, turn)
    elif turn.is_due:
        _log_observed(turn)

    # A summary may be begun in the background once the call is answered. But a call
    # that has just let the strategy compact begins no other summary.
    begin_summary = None
    may_plan = not call.is_observed and not turn.is_settled
    if may_plan and may_begin_in_background(turn):
        begin_summary = background.plan(call, turn)
    has_plan = begin_summary is not None
    await _report_pressure(call, turn, will_begin_summary=has_plan)

    call.run.calls[call_key(call.context)] = SentCall(
        heuristic_tokens=turn.size.heuristic_tokens,
        estimated_tokens=turn.tokens,
        window_tokens=turn.budgets.window_tokens,
        threshold_tokens=turn.budgets.threshold_tokens,
        model=turn.model.name,
        server_key=call.server_key,
        original_contents=tuple(original_contents),
        sent_contents=tuple(turn.contents),
        sent_config=_copy_config(call.request.config),
        request=weakref.ref(call.request),
        stated_window_tokens=turn.model.stated_window_tokens,
        is_observed=call.is_observed,
        memory=call.memory,
        origin=turn.origin,
        compaction=call.compaction,
        after_answer=begin_summary,
    )


def _change_request(call: Call, turn: Turn) -> None:
    """Gives the request its contents, tools and output limit.

    Listeners are told of the request if the guard sends other contents than those that
    ADK has built. Listeners look for what a request has lost, and ADK's own contents
    have lost nothing.
    """
    differs_from_adk = turn.is_changed(turn.contents)
    if differs_from_adk:
        call.request.contents = list(turn.contents)
    declare_tools(call, turn)
    fit_output(call, turn.model, turn.tokens)
    if not differs_from_adk:
        return

    event = Sent(call.memory, turn, is_compacted=call.compaction is not None)
    for listener in _listeners.SENT:
        with log_failures(logger, f"{type(listener).__name__} failed"):
            listener.sent(event)


def _note_run(call: Call, turn: Turn) -> None:
    """Remembers for the next call whether this call was compacted, and in which run.

    A summary that the session has although this run has not stored it was stored by an
    earlier run, and is forgotten: its event was not lost.

    Args:
        call: The model call.
        turn: The same call as a value, with the contents to send.
    """
    memory = call.memory
    ready = memory.facts.ready
    if ready is not None and ready.is_stored_as(turn.history.stored):
        is_of_this_run = any(each.ready is ready for each in call.run.stored)
        if not is_of_this_run:
            memory.forget_ready(ready)

    compacted_run = call.run.invocation_id if call.is_compacted else ""
    memory.facts = replace(memory.facts, compacted_run=compacted_run)


def _log_observed(turn: Turn) -> None:
    """Logs that a compaction would be due if the guard did not only observe."""
    logger.info(
        "Observing agent %r: a compaction would be due at %d tokens, the "
        "threshold is %d; %s.",
        turn.agent,
        turn.tokens,
        turn.budgets.threshold_tokens,
        turn.origin.place,
    )


def _copy_config(config: types.GenerateContentConfig) -> types.GenerateContentConfig:
    """Copies a config, its tools, and the declarations of each tool.

    Later callbacks may change all of these in place.
    """
    if not config.tools:
        return config.model_copy()

    tools = [copy.copy(tool) for tool in config.tools]
    for tool in tools:
        if isinstance(tool, types.Tool) and tool.function_declarations:
            tool.function_declarations = [*tool.function_declarations]
    return config.model_copy(update={"tools": tools})


def declare_tools(call: Call, turn: Turn) -> None:
    """Gives the request each tool that is wanted to read back covered messages.

    Session state remembers a tool that every later request has to declare as well.
    """
    for tool in _recall.TOOLS:
        if not tool.is_wanted(turn):
            continue
        is_noted = turn.record.has_recall
        if tool.must_stay_declared(turn) and not is_noted:
            call.state.note_recall()

        adk_tool = tool.make(turn, call.invocation)
        is_declared = adk_tool.name in call.request.tools_dict
        if not is_declared:
            call.request.append_tools([adk_tool])
        # ADK calls the object in `tools_dict`. An object reads only the messages that
        # the request of its own `turn` leaves out. After a rejection, the dict may have
        # the object of the rejected request, so the new object takes its place.
        call.request.tools_dict[adk_tool.name] = adk_tool


def _warn_fixed_part(turn: Turn) -> None:
    """Warns once that no compaction can make the requests of an agent fit.

    The fixed part of a request, which no compaction removes, is too large.
    """
    message = (
        "System instruction, tools and other context of agent %r take %d of %d "
        "tokens alone, the threshold is %d: compaction cannot help. Use a "
        "larger window or less instruction."
    )
    warn_once(
        logger,
        message,
        turn.agent,
        fixed_part_tokens(turn),
        turn.budgets.window_tokens,
        turn.budgets.full_tokens,
    )


async def _report_pressure(call: Call, turn: Turn, will_begin_summary: bool) -> None:
    """Tells the user's `on_pressure` that a request fills much of the window.

    Such a request is reported in one of these cases:

    - The guard only observes.
    - The call was compacted, and its request is large all the same.
    - A compaction is due, but it was not made, and no summary is expected soon.

    After a report, nothing is reported until a request below the warning threshold was
    sent.

    Args:
        call: The model call.
        turn: The call as a value, with the request as it is sent.
        will_begin_summary: Whether a summary is begun once the call is answered.
    """
    warning_threshold = call.guard.settings.warning_threshold
    memory = call.memory
    window_tokens = turn.budgets.window_tokens
    pressure = turn.tokens / window_tokens
    if pressure < warning_threshold:
        memory.facts = replace(memory.facts, is_under_pressure=False)
        return

    is_summary_expected = will_begin_summary or turn.is_writing
    is_left_full = turn.is_due and not is_summary_expected
    is_worth_telling = turn.is_observed or call.is_compacted or is_left_full
    is_reported = memory.facts.is_under_pressure
    if is_worth_telling and not is_reported:
        memory.facts = replace(memory.facts, is_under_pressure=True)
        record = PressureRecord(
            **vars(turn.origin),
            tokens=turn.tokens,
            window_tokens=window_tokens,
            pressure_before=call.tokens_before / window_tokens,
            pressure=pressure,
            warning_threshold=warning_threshold,
        )
        await call.guard.observers.tell_pressure(record)
