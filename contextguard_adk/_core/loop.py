"""The loop of one model call: look, decide, and act, until the request is sent."""

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
    use_stored_limits,
    warn_reserved_output,
)
from contextguard_adk._core.look import leave_out_rest, look, read_counts
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
    """Acts as the table of `decide` says until the request may be sent.

    Returns:
        The turn of the last look: the call as a value, with the contents to send.
    """
    call.counts = read_counts(call)
    is_settled = False

    while True:
        turn = look(call, bounds, is_settled)
        call.tokens_before = call.tokens_before or turn.tokens
        row = decide(turn)
        logger.debug("Agent %r: %s; %s.", turn.agent, row.step.value, row.why)

        if row is FIXED_PART_TOO_LARGE:
            _warn_fixed_part(turn)
        if row.step is Step.SEND:
            return leave_out_rest(turn, bounds)

        act = _ACTS[row.step]
        is_settled = await act(call, turn, row) or is_settled


async def _wait(call: Call, turn: Turn, row: Row) -> bool:
    """Waits for the summary under way; the next look finds it on the shelf."""
    await call.wait()
    return False


async def _refuse(call: Call, turn: Turn, row: Row) -> bool:
    """Takes back the compaction that was asked for, and says why."""
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
    if was_allowed is False and turn.reason == "requested":
        call.state.answer_request("before_compaction put it off")
    return True


async def _put_in(call: Call, turn: Turn, row: Row) -> bool:
    """Puts a summary in the request if it still holds and makes the request smaller.

    The summary is one that the session has lost, else the one on the shelf.

    Returns:
        True if the provider has rejected the request: then the recovery, not this loop,
        decides about another compaction. Otherwise False.
    """
    memory = call.memory
    lost = turn.facts.find_lost(turn.record.summary)
    if lost is not None:
        paid: Paid | None = lost
        memory.facts = replace(memory.facts, unconfirmed=None)
    else:
        paid = turn.facts.ready
        memory.facts = replace(memory.facts, ready=None)

    outcome = None if paid is None else _try_in_place(call, turn, paid)
    if paid is not None and outcome is not None:
        await _commit(call, turn, paid, outcome)
    elif turn.is_settled:
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
"""What each step does. An act returns True if the call must not compact again."""


def _try_in_place(call: Call, turn: Turn, paid: Paid) -> Outcome | None:
    """Tries how a request turns out with a summary in place; changes nothing.

    Returns:
        The request with the summary. None in three cases:
        - The history or the stored summary has changed since this one was written.
        - A summary from the background covers no more than the stored one.
        - The request would get no smaller.
    """
    history = turn.history.with_summary(paid.stored)
    if not history.is_summary_valid or paid.stored.edits < turn.record.edits:
        return None

    outcome: Outcome | None
    if paid.is_background:
        early_reason = call.strategy.early_reason
        outcome = background.compose_paid(turn, paid, history, early_reason)
    else:
        # Its indexes are those of an earlier request: they are found again in this one.
        draft = replace(
            paid.draft,
            covered=history.covered,
            model_covered=history.model_covered,
            truncated_upto=history.find_named(paid.stored.truncated_upto),
        )
        outcome = compose(turn, draft)

    if outcome is None or outcome.tokens >= turn.measure(turn.contents):
        return None
    return outcome


async def _commit(call: Call, turn: Turn, paid: Paid, outcome: Outcome) -> None:
    """Writes a compaction to session state, and reports it if that was not done before.

    No other function writes one.

    Args:
        call: The model call.
        turn: The request without the summary.
        paid: The summary as it was written.
        outcome: The request with the summary, and the form in which it is stored.
    """
    state = call.state
    memory = call.memory
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
    use_stored_limits(call)
    memory.facts = replace(memory.facts, fruitless_tokens=None)

    if turn.is_settled and turn.reason != "overflow":
        call.is_compacted = True
        # The count is of contents that are gone. The correction, which follows from
        # it, still holds.
        correction = call.counts.measured_correction
        call.counts = Counts(correction=correction, measured_correction=correction)
        was_full = turn.reason != "requested"
        memory.facts = replace(memory.facts, was_full=was_full)

    if turn.reason == outcome.draft.reason == "requested":
        state.answer_request()
    call.request.cache_metadata = None  # It describes a prefix that is gone.

    if not paid.is_reported:
        await _report(call, turn, unconfirmed, outcome)


async def _report(call: Call, turn: Turn, paid: Paid, outcome: Outcome) -> None:
    """Tells listeners and the user's function of a compaction."""
    newly_covered = outcome.draft.covered - turn.history.model_covered
    keep_tools = turn.settings.keep_tools
    contents = [turn.history.contents[index] for index in newly_covered]
    if keep_tools and any(has_result_of(each, keep_tools) for each in contents):
        message = (
            "Results of `keep_tools` take more than a tenth of the window of agent %r, "
            "with what was called beside them; older ones go."
        )
        warn_once(logger, message, turn.agent)

    record = _describe(call, turn, paid, outcome)
    call.compaction = record
    event = Compacted(call.guard, call.context, call.state, turn, outcome, record)
    for listener in _listeners.COMPACTED:
        if listener.is_on(call.guard):
            with log_failures(logger, f"{type(listener).__name__} failed"):
                await listener.compacted(event)
    await call.guard.observers.tell(record)


def _describe(call: Call, turn: Turn, paid: Paid, outcome: Outcome) -> CompactionRecord:
    """Returns the record of a compaction; the call's next wait is counted from now."""
    now_seconds = asyncio.get_running_loop().time()
    waited_seconds = now_seconds - call.started_seconds
    call.started_seconds = now_seconds

    # `outcome.tokens` is an estimate. `turn.tokens` may follow a count of the provider,
    # so the estimate is brought to its scale.
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

    Where the guard only observes, the request stays as it is.
    """
    original_contents = call.request.contents
    warn_reserved_output(turn.agent, turn.budgets)
    if not call.is_observed:
        _change_request(call, turn)
        _note_run(call)
    elif turn.is_due:
        _log_observed(turn)

    after_answer = None
    is_first_try = not (call.is_observed or turn.is_settled)
    if is_first_try and may_begin_in_background(turn):
        after_answer = background.plan(call, turn)
    await _watch_pressure(call, turn, is_coming=after_answer is not None)

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
    """Gives the request its contents, tools and output limit; tells the listeners."""
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
    """Remembers whether this run's last call was compacted.

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
    """Logs the compaction that a guard which only observes leaves out."""
    logger.info(
        "Observing agent %r: a compaction would be due at %d tokens, the "
        "threshold is %d; %s.",
        turn.agent,
        turn.tokens,
        turn.budgets.threshold_tokens,
        turn.origin.place,
    )


def _copy_config(config: types.GenerateContentConfig) -> types.GenerateContentConfig:
    """Copies a config with its tools: later callbacks may add some in place."""
    if not config.tools:
        return config.model_copy()

    tools = [copy.copy(tool) for tool in config.tools]
    for tool in tools:
        if isinstance(tool, types.Tool) and tool.function_declarations:
            tool.function_declarations = [*tool.function_declarations]
    return config.model_copy(update={"tools": tools})


def declare_tools(call: Call, turn: Turn) -> None:
    """Gives the request the tools that read the messages that it leaves out."""
    for tool in _recall.TOOLS:
        if not tool.is_wanted(turn):
            continue
        if tool.must_stay_declared(turn) and not turn.record.has_recall:
            call.state.note_recall()

        adk_tool = tool.make(turn, call.invocation)
        if adk_tool.name not in call.request.tools_dict:
            call.request.append_tools([adk_tool])
        # One that was declared before reads an older turn.
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


async def _watch_pressure(call: Call, turn: Turn, is_coming: bool) -> None:
    """Reports once that a request still fills much of the window when it is sent.

    It reports nothing if a compaction is still to come: on the way up to the threshold,
    or while a summary is written.

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

    is_left_full = turn.is_due and not (is_coming or turn.is_writing)
    is_final = turn.is_observed or call.is_compacted or is_left_full
    if is_final and not memory.facts.is_under_pressure:
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
