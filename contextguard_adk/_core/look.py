"""Gathers all that decides what becomes of a request; changes nothing."""

from __future__ import annotations

import logging
from dataclasses import replace

from google.genai import types

from contextguard_adk import _recall
from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._core.fit import minimize
from contextguard_adk._core.limits import find_limits, plan_call, resolve_model
from contextguard_adk._history.draft import Reason
from contextguard_adk._history.history import History
from contextguard_adk._history.stored import StoredSummary
from contextguard_adk._measuring.calibration import (
    MAX_RATIO,
    correction_factor,
    estimate_prompt_tokens,
    first_margin,
)
from contextguard_adk._measuring.tokens import estimate_config_tokens
from contextguard_adk._runtime.memory import Seen
from contextguard_adk._summaries.compose import (
    render,
    shape,
    shows_tool_use,
    without_recall,
)
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.facts import Counts, Size
from contextguard_adk._turn.turn import Turn

logger = logging.getLogger("contextguard_adk.call")


def look(call: Call, bounds: Bounds, is_settled: bool = False) -> Turn:
    """Returns the call as a value, with the request as it would be sent."""
    state = call.state
    request = call.request
    model = resolve_model(call, bounds)
    has_recall = any(
        tool.is_possible(request, call.invocation.agent, call.strategy)
        for tool in _recall.TOOLS
    )
    is_plain = call.is_observed or bounds.is_rendered
    stored = None if is_plain else state.load_summary(call.scope)
    if stored and stored.has_recall and not has_recall:
        # A call of a tool that is not declared would end the turn.
        stored = without_recall(stored)
    focus = state.requested_focus
    reason: Reason = "tokens" if focus is None else "requested"
    turn = Turn(
        agent=call.agent,
        origin=call.origin,
        scope=call.scope,
        request=request,
        history=_read_history(call, stored, model.known_window_tokens, has_recall),
        settings=call.strategy,
        model=model,
        record=state.record,
        state=state,
        facts=call.memory.facts,
        budgets=plan_call(call, model, bounds),
        counts=call.counts,
        reason="overflow" if bounds.is_rejected else reason,
        focus=focus or "",
        has_recall=has_recall,
        has_used_tools=stored is not None and shows_tool_use(stored),
        is_observed=call.is_observed,
        is_settled=is_settled,
        is_writing=call.memory.pending.is_under_way,
        config=request.config,
    )
    turn = _measure(_render(turn), bounds)
    return replace(turn, nearness=call.strategy.fullness(turn))


def read_counts(call: Call) -> Counts:
    """Returns what the provider counted last, and what follows from it.

    What no answer of this process has shown is no count where it is more than the
    window, or far more than what was sent.
    """
    state = call.state
    facts = call.memory.facts
    model = call.model
    real = int(state.read("real_tokens") or 0)
    last = int(state.read("last_heuristic") or 0)
    window_tokens = resolve_model(call, Bounds()).known_window_tokens
    most_tokens = min(window_tokens, MAX_RATIO * last or window_tokens)
    if real > max(most_tokens, facts.of(model).accepted_tokens):
        real = 0
    learned = find_limits(call).correction
    if facts.counting_model not in ("", model):
        # What another model counted, by its own vocabulary, says nothing of this one.
        counted = facts.of(model).counted
        learned = correction_factor(*counted) if counted else learned
        real = last = 0
    if not (real and last):
        return Counts(real or None, last or None, learned, learned)
    correction = correction_factor(real, last)
    measured = max(correction, min(real / last, MAX_RATIO))
    return Counts(real, last, correction, measured)


def least_tokens(seen: Seen, heuristic_tokens: int) -> int:
    """Returns what a request takes at least, by the provider's last count.

    Half of bytes / 4 where it has counted nothing in this process.
    """
    if seen.counted is None:
        return heuristic_tokens // 2
    real_tokens, counted_tokens = seen.counted
    return heuristic_tokens * real_tokens // max(1, counted_tokens)


def leave_out_rest(turn: Turn, bounds: Bounds) -> Turn:
    """Returns the turn without what has no room, where it is known not to fit.

    This is what is left where no compaction has helped, or none may be stored.
    """
    if turn.is_observed or not _is_too_large(turn):
        return turn

    budgets = turn.budgets
    config_tokens = turn.size.config_tokens * turn.correction
    left_tokens = budgets.window_tokens - config_tokens
    room_tokens = max(budgets.full_tokens - config_tokens, 0.8 * left_tokens)
    if room_tokens <= 0:  # What no compaction removes does not fit itself.
        room_tokens = budgets.window_tokens / 10
    contents = shape(turn, minimize(turn, int(room_tokens), turn.correction))
    smaller = _measure(replace(turn, contents=contents), bounds)
    if smaller.tokens >= turn.tokens:
        return turn
    message = (
        "Older messages of agent %r are left out of a request of %d tokens, which "
        "exceeds the window of %d: no compaction has made it fit."
    )
    warn_once(logger, message, turn.agent, turn.tokens, budgets.window_tokens)
    return smaller


def _is_too_large(turn: Turn) -> bool:
    if turn.record.is_newer:
        return not replace(turn, reason="tokens").has_room
    # The estimate may be too high: of prose less is counted than bytes / 4.
    seen = turn.facts.of(turn.model.name)
    known_tokens = least_tokens(seen, turn.size.heuristic_tokens)
    return turn.is_overfull and known_tokens > turn.budgets.window_tokens


def _read_history(
    call: Call, stored: StoredSummary | None, window_tokens: int, has_recall: bool
) -> History:
    """Returns the request's history; what is known of it is kept for the call."""
    if call.history is None:
        contents = [*call.request.contents]
        said = call.context.user_content
        history = History(contents, call.invocation, said, stored, call.memo)
        config = getattr(call.invocation.run_config, "get_session_config", None)
        is_partial = call.guard.settings.recent_events or config is not None
        history.loads_part = is_partial
        history.redactor = call.guard.redactor
        form = call.memo.form
        history.preview = call.strategy.preview(window_tokens, has_recall, form)
        call.history = history
    elif call.history.stored != stored:
        call.history = call.history.with_summary(stored)
    return call.history


def _render(turn: Turn) -> Turn:
    """Returns the turn with the contents and tools that would be sent."""
    if turn.is_observed:
        return replace(turn, contents=turn.request.contents)
    if missing := [tool for tool in _recall.TOOLS if tool.is_wanted(turn)]:
        turn = replace(turn, config=_declare(turn, [t.declaration for t in missing]))
    return replace(turn, contents=shape(turn, render_unshaped(turn)))


def render_unshaped(turn: Turn) -> list[types.Content]:
    """Returns the contents with the stored summary in place, before any shape."""
    history = turn.history
    if history.stored is not None:
        return render(turn, history.stored, history.covered)
    return list(history.shown if history.previewed else history.contents)


def _declare(
    turn: Turn, declarations: list[types.FunctionDeclaration]
) -> types.GenerateContentConfig:
    """Returns the request's config with tools that the guard adds when it is sent."""
    config = turn.request.config
    new = [d for d in declarations if d.name not in turn.request.tools_dict]
    if not new:
        return config
    # Where ADK adds them: the same bytes are in the provider's prompt cache.
    tools = list(config.tools or ())
    for place, tool in enumerate(tools):
        if isinstance(tool, types.Tool) and tool.function_declarations:
            update = {"function_declarations": [*tool.function_declarations, *new]}
            tools[place] = tool.model_copy(update=update)
            break
    else:
        tools.append(types.Tool(function_declarations=new))
    return config.model_copy(update={"tools": tools})


def _measure(turn: Turn, bounds: Bounds) -> Turn:
    """Returns the turn with the size of what would be sent."""
    counts = turn.counts
    memo = turn.history.memo
    budgets = turn.budgets
    ratio = budgets.threshold_tokens / budgets.window_tokens
    config_tokens = estimate_config_tokens(turn.config)
    heuristic_tokens = config_tokens + memo.estimate_tokens(turn.contents)
    tokens = estimate_prompt_tokens(
        heuristic_tokens,
        counts.real_tokens,
        counts.heuristic_tokens,
        turn.contents,
        default=counts.correction,
        config=turn.config,
        memo=memo,
        margin=first_margin(turn.model.name, ratio),
    )
    if turn.has_recall:
        # What a compaction adds: the tools are declared from then on.
        later = _declare(turn, [tool.declaration for tool in _recall.TOOLS])
        config_tokens = estimate_config_tokens(later)
    correction = bounds.correction or counts.measured_correction
    size = Size(
        tokens=tokens,
        heuristic_tokens=heuristic_tokens,
        config_tokens=config_tokens,
        correction=correction or tokens / max(1, heuristic_tokens),
        uncounted_tokens=max(0, tokens - (counts.real_tokens or 0)),
    )
    return replace(turn, size=size)
