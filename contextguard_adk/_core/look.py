"""Looks at a model call: builds its `Turn`, which all decisions read.

A look changes neither the request nor session state. The call keeps the history that a
look has read, because the next look needs the same one.

- Heuristic tokens are bytes / 4. The correction is the tokens of the model per
  heuristic token.
- A count is the number of tokens that a provider has reported for a request.
- The config of a request is its instruction and its tools.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from google.genai import types

from contextguard_adk import _recall
from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._core.fit import minimize
from contextguard_adk._core.limits import plan_call, resolve_model
from contextguard_adk._history.history import History
from contextguard_adk._history.stored import Reason, StoredSummary
from contextguard_adk._measuring.calibration import (
    MAX_RATIO,
    correction_factor,
)
from contextguard_adk._measuring.tokens import estimate_config_tokens
from contextguard_adk._runtime.memory import Seen
from contextguard_adk._runtime.skills import find_skill_tools
from contextguard_adk._summaries.compose import (
    render,
    shape,
    without_recall,
)
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.facts import Counts, Size
from contextguard_adk._turn.turn import Turn

# If no compaction has helped, contents may take at least this part of the window less
# the config.
_LEAST_ROOM_RATIO = 0.8

logger = logging.getLogger("contextguard_adk.call")


def build_turn(call: Call, bounds: Bounds, is_settled: bool = False) -> Turn:
    """Returns the model call as a value, with the request as it would be sent now.

    Args:
        call: The model call.
        bounds: The bounds of the request beside the limits of its model.
        is_settled: Whether this call has already let the strategy compact.
    """
    state = call.state
    request = call.request
    model = resolve_model(call, bounds)
    # Whether the request may declare the tool that reads back covered messages.
    has_recall = any(
        tool.is_possible(request, call.invocation.agent, call.strategy)
        for tool in _recall.TOOLS
    )
    stored = _load_summary(call, bounds, has_recall)

    # The focus is None if nobody has asked for a compaction, and "" if somebody has
    # asked for a compaction without a focus.
    focus = state.requested_focus
    reason: Reason = "tokens"
    if bounds.is_rejected:
        reason = "overflow"
    elif focus is not None:
        reason = "requested"

    # Four steps build the turn, and each one reads the turn of the step before. The
    # first step adds the facts that are known. Then come the contents and the config as
    # they would be sent, then the size of both, then the nearness of a compaction.
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

    Session state has the count and the heuristic tokens of the counted request.

    Returns:
        One of three values:
        - No count if the last count was of another model. The correction then follows
          from this model's last count in this process, or from a rejection.
        - At most one of the two numbers, if the other is missing or not credible. The
          correction then follows from a rejection.
        - Both numbers, and the corrections that follow from them.

        A correction that follows from nothing is None.
    """
    facts = call.memory.facts
    seen = facts.of(call.model)
    # A number is 0 if session state has no valid one.
    real_tokens = int(call.state.read("real_tokens") or 0)
    heuristic_tokens = int(call.state.read("last_heuristic") or 0)

    # The counting model is "" if this process has seen no count.
    is_of_other_model = facts.counting_model not in ("", call.model)
    if is_of_other_model:
        # Models have different vocabularies, so that count says nothing of this model.
        own_correction = seen.correction
        if seen.counted is not None:
            own_correction = correction_factor(
                seen.counted.real_tokens, seen.counted.heuristic_tokens
            )
        return Counts(correction=own_correction, measured_correction=own_correction)

    # Session state is untrusted. If the count is above the window, or far above the
    # heuristic tokens, it is believed only if this process has seen that the model
    # accepted a prompt of this size.
    most_tokens: float = resolve_model(call, Bounds()).known_window_tokens
    if heuristic_tokens:
        most_tokens = min(most_tokens, MAX_RATIO * heuristic_tokens)
    is_credible = real_tokens <= max(most_tokens, seen.accepted_tokens)
    if not is_credible:
        real_tokens = 0

    if real_tokens == 0 or heuristic_tokens == 0:
        # A correction would need both numbers. An estimate takes a count alone for a
        # lower bound.
        return Counts(
            real_tokens=real_tokens or None,
            heuristic_tokens=heuristic_tokens or None,
            correction=seen.correction,
            measured_correction=seen.correction,
        )

    # The first correction is at most 5, the second one at most `MAX_RATIO`.
    correction = correction_factor(real_tokens, heuristic_tokens)
    measured_ratio = min(real_tokens / heuristic_tokens, MAX_RATIO)
    return Counts(
        real_tokens=real_tokens,
        heuristic_tokens=heuristic_tokens,
        correction=correction,
        measured_correction=max(correction, measured_ratio),
    )


def estimate_least_tokens(seen: Seen, heuristic_tokens: int) -> int:
    """Estimates a request in tokens of the model; the result is rarely too high.

    Args:
        seen: The facts that the answers of the model have shown.
        heuristic_tokens: The heuristic tokens of the request.
    """
    counted = seen.counted
    if counted is None:
        # Most texts take more than half a token of the model per heuristic token.
        return heuristic_tokens // 2
    # Most of the request is usually the same as the last counted request, so its ratio
    # of tokens to heuristic tokens is taken. A correction is at least 1, but this ratio
    # may be lower.
    return heuristic_tokens * counted.real_tokens // max(1, counted.heuristic_tokens)


def leave_out_oldest(turn: Turn, bounds: Bounds) -> Turn:
    """Leaves out the oldest contents if the provider would reject the request.

    This is the last resort if no compaction has helped, or if a compaction may not be
    stored. The messages that are left out are in no summary.

    Args:
        turn: The model call, with the request as it would be sent.
        bounds: The bounds of the request.

    Returns:
        The turn with fewer contents. The same turn if the provider may accept its
        request, if the guard only observes, or if the request gets no smaller.
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
    """Returns the tokens that contents may take if no compaction has helped.

    A request of `full_tokens` leaves the usual room for an answer. If this room is so
    large that hardly any contents fit, contents get 80 % of the window less the config.
    """
    budgets = turn.budgets
    config_tokens = turn.size.config_tokens * turn.correction
    usual_tokens = budgets.full_tokens - config_tokens
    least_tokens = _LEAST_ROOM_RATIO * (budgets.window_tokens - config_tokens)
    room_tokens = max(usual_tokens, least_tokens)
    if room_tokens <= 0:
        # By the estimate, the config alone fills the window. But the estimate may be
        # too high, so contents get a tenth of the window.
        room_tokens = budgets.window_tokens // 10
    return int(room_tokens)


def _is_too_large(turn: Turn) -> bool:
    """Returns whether contents have to be left out of a request.

    If no compaction can be stored, contents are left out once there is no room for an
    answer. Otherwise they are left out only if even a low estimate of the request
    exceeds the window: `turn.tokens` may be too high, and a rejection can be recovered.
    """
    if turn.record.is_newer:
        # A later release has written the record, so this release stores no compaction.
        # `has_room` knows only for the reason "tokens" whether there is room, so the
        # property is read with this reason.
        has_room = replace(turn, reason="tokens").has_room
        return not has_room
    if not turn.is_overfull:
        return False

    seen = turn.facts.of(turn.model.name)
    low_estimate_tokens = estimate_least_tokens(seen, turn.size.heuristic_tokens)
    return low_estimate_tokens > turn.budgets.window_tokens


def _load_summary(call: Call, bounds: Bounds, has_recall: bool) -> StoredSummary | None:
    """Returns the stored summary that is to be put in the request.

    Args:
        call: The model call.
        bounds: The bounds, which say whether the request has the summary already.
        has_recall: Whether the request may declare the tool that reads back covered
            messages.

    Returns:
        The summary. None if there is none, if the request has the summary already, or
        if the guard only observes.
    """
    if call.is_observed or bounds.is_rendered:
        return None
    stored = call.state.load_summary(call.scope)
    if stored is None:
        return None

    names_missing_tool = stored.has_recall and not has_recall
    if names_missing_tool:
        # The model might call the tool. Then ADK would end the turn with an error.
        return without_recall(stored)
    return stored


def _get_history(
    call: Call, stored: StoredSummary | None, window_tokens: int, has_recall: bool
) -> History:
    """Returns the history of the request, and keeps it in `call.history`.

    Args:
        call: The model call.
        stored: The summary that is to be put in the request; None for no summary.
        window_tokens: The context window, which limits the previews of tool results.
        has_recall: Whether the request may declare the tool that reads back covered
            messages. Previews name this tool.
    """
    if call.history is not None:
        # An earlier look has kept the history. Only its summary may have changed.
        if call.history.stored != stored:
            call.history = call.history.with_summary(stored)
        return call.history

    # Later callbacks may change the list of the request, so the history gets a copy.
    history = History(
        [*call.request.contents],
        call.invocation,
        call.context.user_content,
        stored,
        call.memo,
    )
    # With a setting of the plugin or of ADK's run, a later request may load only the
    # newest events of the session.
    run_config = call.invocation.run_config
    session_config = getattr(run_config, "get_session_config", None)
    history.loads_part = call.guard.settings.recent_events or session_config is not None

    history.redactor = call.guard.redactor
    preview = call.strategy.preview(window_tokens, has_recall)
    if preview is not None:
        skill_tools = find_skill_tools(call.state, call.request.tools_dict)
        history.preview = replace(
            preview,
            # The way in which the client writes JSON decides the size of a result.
            form=call.memo.form,
            exclude_tools=(*preview.exclude_tools, *skill_tools),
        )
    call.history = history
    return history


def _render(turn: Turn) -> Turn:
    """Returns the turn with the contents and the config that would be sent."""
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

    A shape gives contents the form that the provider wants.
    """
    history = turn.history
    if history.stored is not None:
        return render(turn, history.stored, history.covered)
    # `shown` has previews of large tool results. Without any, `contents` is the same.
    return list(history.shown if history.shown_in_part else history.contents)


def _declare(
    turn: Turn, declarations: list[types.FunctionDeclaration]
) -> types.GenerateContentConfig:
    """Returns the request's config with declarations of the guard's tools.

    The request stays as it is until it is sent. Then `declare_tools` calls ADK's
    `append_tools`, with the same result: ADK adds declarations to the first `Tool` that
    has any, or else as a new `Tool`.

    Args:
        turn: The model call.
        declarations: The declarations. Those of tools that the request declares already
            are not added again.
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
    """Returns the turn with the size of its request.

    Args:
        turn: The model call, with the contents and the config that would be sent.
        bounds: The bounds, which have the correction that a rejection has shown.
    """
    counts = turn.counts
    config_tokens = estimate_config_tokens(turn.config)
    heuristic_tokens = config_tokens + turn.history.memo.estimate_tokens(turn.contents)
    tokens = turn.estimate(turn.contents, heuristic_tokens)

    # `Turn.measure` estimates compacted requests by two numbers. One is the size of
    # their config, which declares all tools of the guard. The other is the correction:
    # that of a rejection, else that of a count, else that of the estimate above.
    compacted_config_tokens = config_tokens
    if turn.has_recall:
        declarations = [tool.declaration for tool in _recall.TOOLS]
        compacted_config_tokens = estimate_config_tokens(_declare(turn, declarations))
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
