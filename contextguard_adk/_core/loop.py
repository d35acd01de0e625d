"""The loop of one model call: look, decide, and act, until the request is sent.

The shelf (`SessionFacts.ready`) has a summary that was paid for, until the summary is
put in a request. Then the summary is unconfirmed (`SessionFacts.unconfirmed`) until an
event has carried it to the session. If the event gets lost, the session has lost the
summary, and it is put in a request again.

A call is settled once it has let the strategy compact: no call does so twice.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

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
from contextguard_adk._core.limits import (
    fit_output,
    note_use_of_limits,
    warn_reserved_output,
)
from contextguard_adk._core.look import build_turn, leave_out_oldest, read_counts
from contextguard_adk._core.pay import Payer
from contextguard_adk._history.contents import has_result_of
from contextguard_adk._runtime.memory import Paid
from contextguard_adk._runtime.runs import SentCall, call_key
from contextguard_adk._summaries.compose import compose
from contextguard_adk._support.log import log_failures, warn_once
from contextguard_adk._turn.facts import Counts, Outcome
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Compacted, Sent
from contextguard_adk.records import CompactionRecord, PressureRecord

logger = logging.getLogger("contextguard_adk.call")


async def settle(call: Call, bounds: Bounds) -> Turn:
    """Looks at a call and acts, until the table of `decide` says to send the request.

    Returns:
        The turn of the last look: the call as a value, with the contents to send.
    """
    call.counts = read_counts(call)
    is_settled = False

    while True:
        turn = build_turn(call, bounds, is_settled)
        if call.tokens_before == 0:
            call.tokens_before = turn.tokens
        row = decide(turn)
        logger.debug("Agent %r: %s; %s.", turn.agent, row.step.value, row.why)

        if row is FIXED_PART_TOO_LARGE:
            _warn_fixed_part(turn)
        if row.step is Step.SEND:
            return leave_out_oldest(turn, bounds)

        act = _ACTS[row.step]
        if await act(call, turn, row):
            is_settled = True


async def _wait(call: Call, turn: Turn, row: Row) -> bool:
    """Waits for the summary under way; the next look finds it on the shelf."""
    await call.wait()
    return False


async def _refuse(call: Call, turn: Turn, row: Row) -> bool:
    """Refuses the compaction that was asked for, and stores the reason."""
    call.state.answer_request(row.why)
    return False


async def _compact(call: Call, turn: Turn, row: Row) -> bool:
    """Lets the strategy compact; the next look finds its summary on the shelf.

    Returns:
        True, because a call lets the strategy compact only once.
    """
    call.is_recovery_paid = turn.reason == "overflow"
    # After a rejection another call's summary may be under way.
    await call.wait()
    payer = Payer(call.guard, call.memory, call.strategy, call.invocation.agent)
    # The task survives the cancellation of this call; a later call uses its summary.
    was_allowed = await call.memory.pending.write(payer.pay(turn))
    # It is None if the task was cancelled.
    if was_allowed is False and turn.reason == "requested":
        call.state.answer_request("before_compaction put it off")
    return True


async def _put_in(call: Call, turn: Turn, row: Row) -> bool:
    """Puts a summary in the request if that makes the request smaller.

    The summary is one that the session has lost, else the one on the shelf. It is
    dropped if it is not put in.

    Returns:
        True if the provider has rejected the request: then the recovery, not this loop,
        decides about another compaction. Otherwise False.
    """
    memory = call.memory
    lost = turn.facts.find_lost(turn.record.summary)
    if lost is None:
        memory.facts = replace(memory.facts, ready=None)
    else:
        memory.facts = replace(memory.facts, unconfirmed=None)

    paid = turn.facts.ready if lost is None else lost
    assert paid is not None, "The table asks for this step only with a summary."
    outcome = _try_in_place(call, turn, paid)
    if outcome is not None:
        await _commit(call, turn, paid, outcome)
    elif turn.is_settled:
        # This call has just paid for the summary. At this size no call pays again.
        memory.facts = replace(memory.facts, fruitless_tokens=turn.tokens)
        message = "A summary for agent %r was dropped: it gains nothing; %s."
        logger.info(message, turn.agent, turn.origin.place)
    return turn.reason == "overflow"


_Act = Callable[[Call, Turn, Row], Awaitable[bool]]
_ACTS: Mapping[Step, _Act] = {
    Step.WAIT: _wait,
    Step.REFUSE: _refuse,
    Step.COMPACT: _compact,
    Step.PUT_IN: _put_in,
}
"""The function for each step; it returns True if the call is settled by now."""


def _try_in_place(call: Call, turn: Turn, paid: Paid) -> Outcome | None:
    """Returns the request with a summary in place; changes nothing.

    Returns:
        None if the summary no longer fits the history, or makes the request no smaller.
    """
    history = turn.history.with_summary(paid.stored)
    was_edited_since = paid.stored.edits < turn.record.edits
    if not history.is_summary_valid or was_edited_since:
        # Since it was written, the messages or the stored summary have changed.
        return None

    outcome: Outcome | None
    if paid.is_background:
        early_reason = call.strategy.early_reason
        outcome = background.compose_paid(turn, paid, history, early_reason)
    else:
        # The draft has the indexes of an earlier request. The messages that the summary
        # covers are found again in this request.
        draft = replace(
            paid.draft,
            covered=history.covered,
            model_covered=history.model_covered,
            truncated_upto=history.find_named(paid.stored.truncated_upto),
        )
        outcome = compose(turn, draft)

    if outcome is None:
        return None
    makes_smaller = outcome.tokens < turn.measure(turn.contents)
    return outcome if makes_smaller else None


async def _commit(call: Call, turn: Turn, paid: Paid, outcome: Outcome) -> None:
    """Writes a compaction to session state, and reports it if nobody has reported it.

    Args:
        call: The model call.
        turn: The call before the summary is in its request.
        paid: The summary as it was written.
        outcome: The request with the summary, and the form in which it is stored.
    """
    state = call.state
    memory = call.memory
    # It no longer waits on the shelf, so `is_background` is cleared.
    unconfirmed = replace(
        paid,
        draft=outcome.draft,
        stored=outcome.stored,
        replaced=turn.record.summary,
        is_background=False,
        is_reported=True,
        paid_seconds=time.monotonic(),
    )
    call.run.note_unconfirmed(memory, unconfirmed, state.key("record"))
    state.save_summary(outcome.stored, turn.tokens)
    note_use_of_limits(call)
    memory.facts = replace(memory.facts, fruitless_tokens=None)

    # A recovery from a rejection goes on with the counts with which it began.
    is_recovery = turn.reason == "overflow"
    if turn.is_settled and not is_recovery:
        call.is_compacted = True
        # The provider's count is of contents that are gone. The correction, which
        # follows from the count, still holds.
        correction = call.counts.measured_correction
        call.counts = Counts(correction=correction, measured_correction=correction)
        was_full = turn.reason != "requested"
        memory.facts = replace(memory.facts, was_full=was_full)

    is_requested = turn.reason == "requested"
    if is_requested and outcome.draft.reason == "requested":
        state.answer_request()
    # ADK's cache metadata describe a prefix of the contents that is gone.
    call.request.cache_metadata = None

    if not paid.is_reported:
        await _report(call, turn, unconfirmed, outcome)


async def _report(call: Call, turn: Turn, paid: Paid, outcome: Outcome) -> None:
    """Tells listeners and the user's function of a compaction.

    It also warns if the compaction covers results that were to be kept.

    Args:
        call: The model call.
        turn: The call before the summary is in its request.
        paid: The summary.
        outcome: The request with the summary.
    """
    keep_tools = turn.settings.keep_tools
    newly_covered = outcome.draft.covered - turn.history.model_covered
    contents = [turn.history.contents[index] for index in newly_covered]
    if keep_tools and any(has_result_of(each, keep_tools) for each in contents):
        message = (
            "Results of `keep_tools` take more than a tenth of the window of agent %r, "
            "with what was called beside them; older ones go."
        )
        warn_once(logger, message, turn.agent)

    # The next compaction of this call counts its waiting from now.
    now_seconds = asyncio.get_running_loop().time()
    waited_seconds = now_seconds - call.started_seconds
    call.started_seconds = now_seconds

    record = _describe(turn, paid, outcome, waited_seconds)
    call.compaction = record
    event = Compacted(call.guard, call.context, call.state, turn, outcome, record)
    for listener in _listeners.COMPACTED:
        if listener.is_on(call.guard):
            with log_failures(logger, f"{type(listener).__name__} failed"):
                await listener.compacted(event)
    await call.guard.observers.tell(record)


def _describe(
    turn: Turn, paid: Paid, outcome: Outcome, waited_seconds: float
) -> CompactionRecord:
    """Returns the record of a compaction.

    Args:
        turn: The call before the summary is in its request.
        paid: The summary.
        outcome: The request with the summary.
        waited_seconds: How long the call has waited for the summary.
    """
    # `turn.tokens` may follow a count of the provider, but `outcome.tokens` is a mere
    # estimate. The scale makes both comparable.
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
        **paid.facts,
    )


async def send(call: Call, turn: Turn) -> None:
    """Changes the request as decided, and remembers it until its answer comes.

    A guard that only observes does not change the request.
    """
    original_contents = call.request.contents
    warn_reserved_output(turn.agent, turn.budgets)
    if not call.is_observed:
        _change_request(call, turn)
        _note_run(call)
    elif turn.is_due:
        _log_observed(turn)

    after_answer = None
    may_plan = not call.is_observed and not turn.is_settled
    if may_plan and may_begin_in_background(turn):
        after_answer = background.plan(call, turn)
    await _report_pressure(call, turn, is_coming=after_answer is not None)

    call.run.calls[call_key(call.context)] = SentCall(
        heuristic_tokens=turn.size.heuristic_tokens,
        estimated_tokens=turn.tokens,
        window_tokens=turn.budgets.window_tokens,
        threshold_tokens=turn.budgets.threshold_tokens,
        model=turn.model.name,
        client=call.client,
        original_contents=tuple(original_contents),
        sent_contents=tuple(turn.contents),
        sent_config=_copy_config(call.request.config),
        request=weakref.ref(call.request),
        stated_window_tokens=turn.model.stated_window_tokens,
        is_observed=call.is_observed,
        memory=call.memory,
        origin=turn.origin,
        compaction=call.compaction,
        after_answer=after_answer,
    )


def _change_request(call: Call, turn: Turn) -> None:
    """Gives the request its contents, tools and output limit.

    Listeners are told if the contents change.
    """
    is_changed = turn.is_changed(turn.contents)
    if is_changed:
        call.request.contents = list(turn.contents)
    declare_tools(call, turn)
    fit_output(call, turn.model, turn.tokens)
    if not is_changed:
        return

    event = Sent(call.memory, turn, is_compacted=call.compaction is not None)
    for listener in _listeners.SENT:
        with log_failures(logger, f"{type(listener).__name__} failed"):
            listener.sent(event)


def _note_run(call: Call) -> None:
    """Remembers whether this call, the last one of its run, was compacted.

    It also forgets the unconfirmed summary of an earlier run, because the session has
    that summary by now.
    """
    memory = call.memory
    run_id = call.run.invocation_id
    unconfirmed = memory.facts.unconfirmed
    if unconfirmed is not None and unconfirmed.run_id != run_id:
        memory.facts = replace(memory.facts, unconfirmed=None)

    compacted_run = run_id if call.is_compacted else ""
    memory.facts = replace(memory.facts, compacted_run=compacted_run)


def _log_observed(turn: Turn) -> None:
    """Logs that a compaction is due, which a guard that only observes leaves out."""
    logger.info(
        "Observing agent %r: a compaction would be due at %d tokens, the "
        "threshold is %d; %s.",
        turn.agent,
        turn.tokens,
        turn.budgets.threshold_tokens,
        turn.origin.place,
    )


def _copy_config(config: types.GenerateContentConfig) -> types.GenerateContentConfig:
    """Copies a config with its lists of tools, which later callbacks may extend."""
    if not config.tools:
        return config.model_copy()

    tools = [copy.copy(tool) for tool in config.tools]
    for tool in tools:
        if isinstance(tool, types.Tool) and tool.function_declarations:
            tool.function_declarations = [*tool.function_declarations]
    return config.model_copy(update={"tools": tools})


def declare_tools(call: Call, turn: Turn) -> None:
    """Gives the request the tools that read back covered messages, if it needs them."""
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
        # A tool that is declared already may read an older turn, so it is replaced.
        call.request.tools_dict[adk_tool.name] = adk_tool


def _warn_fixed_part(turn: Turn) -> None:
    """Warns once that no compaction can make the requests of an agent fit."""
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


async def _report_pressure(call: Call, turn: Turn, is_coming: bool) -> None:
    """Reports that a request still fills much of the window when it is sent.

    It reports nothing if a compaction is still to come. It reports again only after a
    request that fills less of the window.

    Args:
        call: The model call.
        turn: The call as a value, with the request as it is sent.
        is_coming: Whether a summary is begun once the call is answered.
    """
    warning_threshold = call.guard.settings.warning_threshold
    memory = call.memory
    window_tokens = turn.budgets.window_tokens
    pressure = turn.tokens / window_tokens
    if pressure < warning_threshold:
        memory.facts = replace(memory.facts, is_under_pressure=False)
        return

    # Below the threshold, or while a summary is under way, a compaction is to come.
    is_summary_coming = is_coming or turn.is_writing
    is_left_full = turn.is_due and not is_summary_coming
    is_final = turn.is_observed or call.is_compacted or is_left_full
    is_reported = memory.facts.is_under_pressure
    if is_final and not is_reported:
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
