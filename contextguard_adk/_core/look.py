"""Looks at a model call: builds its `Turn`, which all decisions read.

A look changes neither the request nor session state. The call keeps the history that a
look has read, because the next look needs the same one.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from google.genai import types

from contextguard_adk import _recall
from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._core.fit import minimize
from contextguard_adk._core.limits import find_limits, plan_call, resolve_model
from contextguard_adk._history.history import History
from contextguard_adk._history.stored import Reason, StoredSummary
from contextguard_adk._measuring.calibration import (
    MAX_RATIO,
    LastCount,
    MeasuredRequest,
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

# If no compaction has helped, the contents that stay may take at least this part of the
# window, less the instruction and the tools.
_LEAST_ROOM_RATIO = 0.8

logger = logging.getLogger("contextguard_adk.call")


def build_turn(call: Call, bounds: Bounds, is_settled: bool = False) -> Turn:
    """Returns the model call as a value, with the request as it would be sent now.

    Args:
        call: The model call.
        bounds: The bounds of the request beside the limits of its model.
        is_settled: Whether this call has already tried to compact.
    """
    state = call.state
    request = call.request
    model = resolve_model(call, bounds)
    has_recall = any(
        tool.is_possible(request, call.invocation.agent, call.strategy)
        for tool in _recall.TOOLS
    )
    stored = _load_summary(call, bounds, has_recall)

    # It is None if nobody has asked for a compaction, and "" for one without a focus.
    focus = state.requested_focus
    reason: Reason = "tokens"
    if bounds.is_rejected:
        reason = "overflow"
    elif focus is not None:
        reason = "requested"

    # Each step below reads the turn of the step before: first the contents and tools
    # are added, then their size, then how near the strategy is to a compaction.
    unrendered = Turn(
        agent=call.agent,
        origin=call.origin,
        scope=call.scope,
        request=request,
        history=_get_history(call, stored, model.known_window_tokens, has_recall),
        settings=call.strategy,
        model=model,
        record=state.record,
        state=state,
        facts=call.memory.facts,
        budgets=plan_call(call, model, bounds),
        counts=call.counts,
        reason=reason,
        focus=focus or "",
        has_recall=has_recall,
        has_used_tools=stored is not None and shows_tool_use(stored),
        is_observed=call.is_observed,
        is_settled=is_settled,
        is_writing=call.memory.pending.is_under_way,
        config=request.config,
    )
    rendered = _render(unrendered)
    measured = _measure(rendered, bounds)
    return replace(measured, nearness=call.strategy.fullness(measured))


def read_counts(call: Call) -> Counts:
    """Returns the provider's last count of this agent's requests, and its correction.

    The count is read from session state. If there is none that can be used, the
    correction is one that this process or a rejection has shown; None for none.
    """
    facts = call.memory.facts
    seen = facts.of(call.model)
    # Session state is untrusted. Both numbers are 0 if it has no valid one.
    real_tokens = int(call.state.read("real_tokens") or 0)
    heuristic_tokens = int(call.state.read("last_heuristic") or 0)
    learned_correction = find_limits(call).correction

    is_of_other_model = facts.counting_model not in ("", call.model)
    if is_of_other_model:
        # Its vocabulary is another one, so its count says nothing about this model.
        own_correction = learned_correction
        if seen.counted is not None:
            own_correction = correction_factor(
                seen.counted.real_tokens, seen.counted.heuristic_tokens
            )
        return Counts(correction=own_correction, measured_correction=own_correction)

    # A count above the window, or far above the heuristic, is believed only if this
    # process has seen so large a prompt accepted.
    most_tokens: float = resolve_model(call, Bounds()).known_window_tokens
    if heuristic_tokens:
        most_tokens = min(most_tokens, MAX_RATIO * heuristic_tokens)
    is_credible = real_tokens <= max(most_tokens, seen.accepted_tokens)
    if not is_credible:
        real_tokens = 0

    if real_tokens == 0 or heuristic_tokens == 0:
        # The correction takes both numbers. But each of them is of use alone.
        return Counts(
            real_tokens=real_tokens or None,
            heuristic_tokens=heuristic_tokens or None,
            correction=learned_correction,
            measured_correction=learned_correction,
        )

    # The second correction has a higher upper bound than the first.
    correction = correction_factor(real_tokens, heuristic_tokens)
    measured_ratio = min(real_tokens / heuristic_tokens, MAX_RATIO)
    return Counts(
        real_tokens=real_tokens,
        heuristic_tokens=heuristic_tokens,
        correction=correction,
        measured_correction=max(correction, measured_ratio),
    )


def least_tokens(seen: Seen, heuristic_tokens: int) -> int:
    """Returns the fewest tokens that a request is likely to take.

    Args:
        seen: The facts that the answers of the model have shown.
        heuristic_tokens: Bytes / 4 of the request.
    """
    counted = seen.counted
    if counted is None:
        # This is a low guess: most texts take more than half of bytes / 4.
        return heuristic_tokens // 2
    return heuristic_tokens * counted.real_tokens // max(1, counted.heuristic_tokens)


def leave_out_rest(turn: Turn, bounds: Bounds) -> Turn:
    """Returns the turn without its oldest contents if the provider would reject it.

    This is the last resort if no compaction has helped, or if none may be stored.

    Returns:
        The same turn if it may fit, if the guard only observes, or if there is nothing
        to leave out.
    """
    if turn.is_observed or not _is_too_large(turn):
        return turn

    newest_contents = minimize(turn, _find_room(turn), turn.correction)
    contents = shape(turn, newest_contents)
    smaller = _measure(replace(turn, contents=contents), bounds)
    if smaller.tokens >= turn.tokens:
        return turn

    message = (
        "Older messages of agent %r are left out of a request of %d tokens, which "
        "exceeds the window of %d: no compaction has made it fit."
    )
    warn_once(logger, message, turn.agent, turn.tokens, turn.budgets.window_tokens)
    return smaller


def _find_room(turn: Turn) -> int:
    """Returns the tokens that contents may take if no compaction has helped."""
    budgets = turn.budgets
    config_tokens = turn.size.config_tokens * turn.correction
    left_in_full_tokens = budgets.full_tokens - config_tokens
    left_in_window_tokens = budgets.window_tokens - config_tokens
    room_tokens = max(left_in_full_tokens, _LEAST_ROOM_RATIO * left_in_window_tokens)
    if room_tokens <= 0:
        # Instruction and tools alone do not fit, but only by an estimate. Contents get
        # a tenth of the window even then.
        room_tokens = budgets.window_tokens // 10
    return int(room_tokens)


def _is_too_large(turn: Turn) -> bool:
    """Returns whether a request must not be sent without leaving out contents."""
    if turn.record.is_newer:
        # A later release has written the record, so this one compacts nothing. Contents
        # are left out as soon as there is no room for an answer. `has_room` tells this
        # room for the reason "tokens", and is False for all others.
        as_if_full = replace(turn, reason="tokens")
        return not as_if_full.has_room
    if not turn.is_overfull:
        return False

    # Otherwise the provider has to be certain to reject the request. The estimate may
    # be too high: prose takes fewer tokens than bytes / 4.
    seen = turn.facts.of(turn.model.name)
    certain_tokens = least_tokens(seen, turn.size.heuristic_tokens)
    return certain_tokens > turn.budgets.window_tokens


def _load_summary(call: Call, bounds: Bounds, has_recall: bool) -> StoredSummary | None:
    """Returns the stored summary that belongs in the request; None if there is none.

    Args:
        call: The model call.
        bounds: The bounds, which say whether the request has the summary already.
        has_recall: Whether the agent has the tool that reads back covered messages.
    """
    if call.is_observed or bounds.is_rendered:
        return None
    stored = call.state.load_summary(call.scope)
    if stored is None:
        return None

    names_missing_tool = stored.has_recall and not has_recall
    if names_missing_tool:
        # ADK ends the turn with an error if the model calls a tool that is missing.
        return without_recall(stored)
    return stored


def _get_history(
    call: Call, stored: StoredSummary | None, window_tokens: int, has_recall: bool
) -> History:
    """Returns the history of the request, and keeps it in `call.history`.

    Args:
        call: The model call.
        stored: The summary that belongs in the request; None for none.
        window_tokens: The context window, which limits the previews of tool results.
        has_recall: Whether the agent has the tool that reads back covered messages.
    """
    if call.history is not None:
        # A look before this one has kept it. Only the summary may be another one.
        if call.history.stored != stored:
            call.history = call.history.with_summary(stored)
        return call.history

    history = History(
        [*call.request.contents],
        call.invocation,
        call.context.user_content,
        stored,
        call.memo,
    )
    # A setting of the plugin, or one of ADK's run, may let a later request load the
    # newest events of the session only.
    run_config = call.invocation.run_config
    session_config = getattr(run_config, "get_session_config", None)
    history.loads_part = call.guard.settings.recent_events or session_config is not None

    history.redactor = call.guard.redactor
    form = call.memo.form
    history.preview = call.strategy.preview(window_tokens, has_recall, form)
    call.history = history
    return history


def _render(turn: Turn) -> Turn:
    """Returns the turn with the contents and tools that would be sent."""
    if turn.is_observed:
        # A guard that only observes changes nothing.
        return replace(turn, contents=turn.request.contents)

    declared = turn
    wanted = [tool.declaration for tool in _recall.TOOLS if tool.is_wanted(turn)]
    if wanted:
        declared = replace(turn, config=_declare(turn, wanted))
    unshaped = render_unshaped(declared)
    return replace(declared, contents=shape(declared, unshaped))


def render_unshaped(turn: Turn) -> list[types.Content]:
    """Returns the contents with the stored summary in place, before any shape.

    A shape then gives contents a form that the provider wants.
    """
    history = turn.history
    if history.stored is not None:
        return render(turn, history.stored, history.covered)
    # Without a preview of a tool result, both lists have the same contents.
    return list(history.shown if history.shown_in_part else history.contents)


def _declare(
    turn: Turn, declarations: list[types.FunctionDeclaration]
) -> types.GenerateContentConfig:
    """Returns the request's config with declarations of the guard's tools.

    The result is the same as that of ADK's `append_tools`, which `declare_tools` calls
    when the request is sent. ADK adds declarations to the first tool that has some,
    else as a new tool.
    """
    config = turn.request.config
    declared_names = turn.request.tools_dict
    missing = [each for each in declarations if each.name not in declared_names]
    if not missing:
        return config

    tools = list(config.tools or ())
    for position, tool in enumerate(tools):
        if not isinstance(tool, types.Tool) or not tool.function_declarations:
            continue
        update = {"function_declarations": [*tool.function_declarations, *missing]}
        tools[position] = tool.model_copy(update=update)
        return config.model_copy(update={"tools": tools})

    tools.append(types.Tool(function_declarations=missing))
    return config.model_copy(update={"tools": tools})


def _measure(turn: Turn, bounds: Bounds) -> Turn:
    """Returns the turn with the size of the request that would be sent."""
    counts = turn.counts
    memo = turn.history.memo
    threshold_ratio = turn.budgets.threshold_tokens / turn.budgets.window_tokens
    config_tokens = estimate_config_tokens(turn.config)
    heuristic_tokens = config_tokens + memo.estimate_tokens(turn.contents)
    tokens = estimate_prompt_tokens(
        MeasuredRequest(turn.contents, heuristic_tokens, turn.config, memo),
        LastCount(counts.real_tokens, counts.heuristic_tokens),
        correction=counts.correction,
        margin=first_margin(turn.model.name, threshold_ratio),
    )

    if turn.has_recall:
        # Each compaction declares the tools of the guard. Their size counts from the
        # beginning, so that the estimate of a compacted request has it.
        later = _declare(turn, [tool.declaration for tool in _recall.TOOLS])
        compacted_config_tokens = estimate_config_tokens(later)
    else:
        compacted_config_tokens = config_tokens

    correction = bounds.correction or counts.measured_correction
    if correction is None:
        correction = tokens / max(1, heuristic_tokens)

    # Digits and markup may take a sixth more tokens than the estimate says. The part of
    # the request that the provider has counted has no such error.
    counted_tokens = counts.real_tokens or 0
    uncounted_tokens = max(0, tokens - counted_tokens)
    size = Size(
        tokens=tokens,
        heuristic_tokens=heuristic_tokens,
        config_tokens=compacted_config_tokens,
        correction=correction,
        error_tokens=uncounted_tokens / 6,
    )
    return replace(turn, size=size)
