"""The loop of one model call: look, decide, and act, until the request is sent."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
import weakref
from dataclasses import replace

from google.genai import types

from contextguard_adk import _listeners, _recall
from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._core.counts import read_counts
from contextguard_adk._core.decide import (
    FIXED_PART_TOO_LARGE,
    Step,
    decide,
    fixed_part_tokens,
)
from contextguard_adk._core.limits import fit_output, use_hearsay, warn_reserved_output
from contextguard_adk._core.look import leave_out_rest, look
from contextguard_adk._core.pay import Payer, plan_background
from contextguard_adk._history.contents import has_result_of
from contextguard_adk._runtime.memory import Paid
from contextguard_adk._runtime.runs import SentCall
from contextguard_adk._runtime.scopes import call_key
from contextguard_adk._shapes.sealed_thoughts import LostThoughts, find_lost_cause
from contextguard_adk._summaries.compose import compose
from contextguard_adk._support.log import log_failures, warn_once
from contextguard_adk._turn.facts import Counts, Outcome
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Compacted
from contextguard_adk.records import CompactionRecord, PressureRecord

logger = logging.getLogger("contextguard_adk.call")


async def guard_call(call: Call) -> None:
    """Changes a request so that it fits, and remembers what is sent."""
    await send(call, await run(call, Bounds()))


async def run(call: Call, bounds: Bounds) -> Turn:
    """Returns the call as it is to be sent; compacts before, where that is due."""
    call.counts = read_counts(call)
    is_settled = False
    while True:
        turn = look(call, bounds, is_settled)
        call.tokens_before = call.tokens_before or turn.tokens
        row = decide(turn)
        logger.debug("Agent %r: %s; %s.", turn.agent, row.step.value, row.why)
        match row.step:
            case Step.WAIT:
                await call.wait()
            case Step.REFUSE:
                call.state.answer_request(row.why)
            case Step.COMPACT:
                is_settled = True
                call.is_recovery_paid = bounds.is_rejected
                # After a rejection another call's summary may be under way.
                await call.wait()
                # It survives the cancellation of this call; a later one uses it.
                paid = await call.memory.pending.write(Payer.of(call).pay(turn))
                if paid is False and turn.reason == "requested":
                    call.state.answer_request("before_compaction put it off")
            case Step.PUT_IN:
                is_settled = is_settled or bounds.is_rejected
                await _put_in(call, turn)
            case Step.SEND:
                if row is FIXED_PART_TOO_LARGE:
                    _warn_fixed_part(turn)
                return leave_out_rest(turn, bounds)


async def _put_in(call: Call, turn: Turn) -> None:
    """Takes a summary from the shelf, and puts it in place where it still holds."""
    lost = turn.facts.find_lost(turn.record.summary)
    memory = call.memory
    paid = lost or turn.facts.ready
    if lost:
        memory.facts = replace(memory.facts, put_in=None)
    else:
        memory.facts = replace(memory.facts, ready=None)
    outcome = _rebase(call, turn, paid) if paid else None
    if paid and outcome:
        await _commit(call, turn, paid, outcome)
    elif turn.is_settled:
        memory.facts = replace(memory.facts, fruitless_tokens=turn.tokens)
        message = "A summary for agent %r was dropped: it gains nothing; %s."
        logger.info(message, turn.agent, turn.origin.place)


def _rebase(call: Call, turn: Turn, paid: Paid) -> Outcome | None:
    """Returns the request with a paid summary in place; None where it does not hold."""
    history = turn.history.with_summary(paid.stored)
    if not history.is_summary_valid or paid.stored.edits < turn.record.edits:
        return None
    if not paid.is_background:
        covered = history.covered
        summarized = history.model_covered
        upto = history.find_place(paid.stored.truncated_upto)
        draft = replace(paid.draft, truncated_upto=upto)
    elif turn.history.covered < history.covered:
        covered = summarized = turn.whole(history.covered - turn.kept.indexes)
        reason = turn.reason if turn.is_due else call.strategy.early_reason
        text = paid.draft.text
        chars = paid.draft.model_chars
        draft = replace(turn.draft, text=text, model_chars=chars, reason=reason)
    else:
        return None
    draft = replace(draft, covered=covered, model_covered=summarized)
    outcome = compose(turn, draft)
    if outcome.tokens >= turn.measure(turn.contents):
        return None
    if paid.is_background:
        # Newer messages stay now; the next compaction will remove them.
        kept = turn.kept.indexes
        shown = history.shown
        since = [shown[i] for i in turn.uncovered if i not in kept]
        left_tokens = outcome.tokens - turn.measure_alone(since)
        left_tokens = max(turn.fixed_tokens, left_tokens)  # Some may stand shortened.
        stored = outcome.stored.model_copy(update={"left_tokens": left_tokens})
        outcome = replace(outcome, stored=stored)
    return outcome


async def _commit(call: Call, turn: Turn, paid: Paid, outcome: Outcome) -> None:
    """Brings a compaction to the session: the only place that does; tells of it."""
    is_new = not paid.is_reported
    state = call.state
    memory = call.memory
    paid = replace(
        paid,
        draft=outcome.draft,
        stored=outcome.stored,
        replaced=turn.record.summary,
        is_background=False,
        is_reported=True,
        paid_seconds=time.monotonic(),
    )
    call.run.put_in(memory, paid, state.key("record"))
    state.save_summary(outcome.stored, turn.tokens)
    use_hearsay(call)
    memory.facts = replace(memory.facts, fruitless_tokens=None)
    if turn.is_settled and turn.reason != "overflow":
        call.is_compacted = True
        # The counts are of contents that are gone; what they have shown stays.
        shown = call.counts.measured_correction
        call.counts = Counts(correction=shown, measured_correction=shown)
        was_full = turn.reason != "requested"
        memory.facts = replace(memory.facts, was_full=was_full)
    if turn.reason == outcome.draft.reason == "requested":
        state.answer_request()
    call.request.cache_metadata = None  # It describes a prefix that is gone.
    if not is_new:
        return
    gone = outcome.draft.covered - turn.summarized
    if any(has_result_of(turn.messages[i], turn.settings.keep_tools) for i in gone):
        message = "Results of `keep_tools` take more than a tenth of the window of "
        message += "agent %r, with what was called beside them; older ones go."
        warn_once(logger, message, turn.agent)
    call.compaction = record = _describe(call, turn, paid, outcome)
    event = Compacted(call.guard, call.context, state, turn, outcome, record)
    for listener in _listeners.LISTENERS:
        with log_failures(logger, f"{type(listener).__name__} failed"):
            await listener.compacted(event)
    await call.guard.observers.tell(record)


def _describe(call: Call, turn: Turn, paid: Paid, outcome: Outcome) -> CompactionRecord:
    now_seconds = asyncio.get_running_loop().time()
    waited_seconds = now_seconds - call.started_seconds
    call.started_seconds = now_seconds
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
    """Changes the request to what was decided, and remembers it for the answer."""
    memory = call.memory
    request = call.request
    model = turn.model
    original = request.contents
    warn_reserved_output(turn.agent, turn.budgets)
    if not call.is_observed:
        if turn.is_changed(turn.contents):
            request.contents = list(turn.contents)
        declare_tools(call, turn)
        fit_output(call, model, turn.tokens)
        _warn_lost_thoughts(call, turn)
        run_id = call.run.invocation_id
        compacted_run = run_id if call.is_compacted else ""
        memory.facts = replace(memory.facts, compacted_run=compacted_run)
        memory.forget_arrived(run_id)
    elif turn.is_due:
        logger.info(
            "Observing agent %r: a compaction would be due at %d tokens, the "
            "threshold is %d; %s.",
            *(turn.agent, turn.tokens, turn.budgets.threshold_tokens),
            turn.origin.place,
        )
    begin_background = plan_background(call, turn)
    await _watch_pressure(call, turn, begin_background is not None)
    call.run.calls[call_key(call.context)] = SentCall(
        heuristic_tokens=turn.size.heuristic_tokens,
        estimated_tokens=turn.tokens,
        window_tokens=turn.budgets.window_tokens,
        threshold_tokens=turn.budgets.threshold_tokens,
        model=model.name,
        client=call.client,
        original_contents=tuple(original),
        sent_contents=tuple(turn.contents),
        sent_config=_copy_config(request.config),
        request=weakref.ref(request),
        stated_window_tokens=model.stated_window_tokens,
        is_observed=call.is_observed,
        memory=memory,
        origin=turn.origin,
        compaction=call.compaction,
        begin_background=begin_background,
    )


def _copy_config(config: types.GenerateContentConfig) -> types.GenerateContentConfig:
    """Copies a config with its tools: later callbacks may add some in place."""
    tools = [copy.copy(tool) for tool in config.tools or ()]
    for tool in tools:
        if isinstance(tool, types.Tool) and tool.function_declarations:
            tool.function_declarations = [*tool.function_declarations]
    return config.model_copy(update={"tools": tools} if tools else None)


def declare_tools(call: Call, turn: Turn) -> None:
    """Gives the request the tools that read what it leaves out."""
    for tool in _recall.TOOLS:
        if not tool.is_wanted(turn):
            continue
        if tool.must_stay_declared(turn) and not turn.record.has_recall:
            call.state.note_recall()
        made = tool.make(turn, call.invocation)
        if made.name not in call.request.tools_dict:
            call.request.append_tools([made])
        call.request.tools_dict[made.name] = made


def _warn_lost_thoughts(call: Call, turn: Turn) -> None:
    """Warns once of what others change again and again: it costs all thoughts."""
    if call.compaction or not (changed := find_lost_cause(turn)):
        return
    count = call.memory.facts.unit(LostThoughts).changed_count + 1
    call.memory.keep(LostThoughts(count))
    if count == 2:
        message = "Agent %r: %s changed between calls, so that the thoughts of its "
        message += "model cannot be sent again. Keep what changes often out of the "
        message += "instruction, the tools and older messages."
        warn_once(logger, message, turn.agent, changed)


def _warn_fixed_part(turn: Turn) -> None:
    message = (
        "System instruction, tools and other context of agent %r take %d of %d "
        "tokens alone, the threshold is %d: compaction cannot help. Use a "
        "larger window or less instruction."
    )
    tokens = fixed_part_tokens(turn)
    budgets = turn.budgets
    sizes = tokens, budgets.window_tokens, budgets.full_tokens
    warn_once(logger, message, turn.agent, *sizes)


async def _watch_pressure(call: Call, turn: Turn, is_coming: bool) -> None:
    """Reports once that what is sent still fills much of the window.

    Not on the way up to the threshold, where compaction has its turn later.
    """
    warning_threshold = call.guard.settings.warning_threshold
    memory = call.memory
    window_tokens = turn.budgets.window_tokens
    is_final = turn.is_observed or call.is_compacted
    is_final |= turn.is_due and not (is_coming or turn.is_writing)
    if turn.tokens / window_tokens < warning_threshold:
        memory.facts = replace(memory.facts, is_under_pressure=False)
    elif is_final and not memory.facts.is_under_pressure:
        memory.facts = replace(memory.facts, is_under_pressure=True)
        record = PressureRecord(
            **vars(turn.origin),
            tokens=turn.tokens,
            window_tokens=window_tokens,
            pressure_before=call.tokens_before / window_tokens,
            pressure=turn.tokens / window_tokens,
            warning_threshold=warning_threshold,
        )
        await call.guard.observers.tell_pressure(record)
