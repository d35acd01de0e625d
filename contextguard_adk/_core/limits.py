"""The limits that a call has to keep to: its model's window and output.

`Learned` limits are those that rejections of the model have shown. This process keeps
them in `Seen.limits`, and session state in the agent's record. `Seen.limit_calls` is
None if this process trusts its limits. Otherwise it counts the calls that were answered
since they were shown.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._history.stored import Learned
from contextguard_adk._measuring.budgets import (
    MOST_BUFFER_RATIO,
    Budgets,
    plan_budgets,
)
from contextguard_adk._providers.clients import Client, thinking_tokens
from contextguard_adk._providers.registry import (
    MIN_WINDOW_TOKENS,
    resolve_context_window,
)
from contextguard_adk._runtime.memory import Limit
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.facts import ModelFacts
from contextguard_adk._turn.units import Answered

logger = logging.getLogger("contextguard_adk.limits")

# After this many answered calls, a model is tried without the limits that are not
# trusted (see `find_limits`).
_TRY_AGAIN_CALLS = 20

# An output limit has room for thinking and at least these tokens of an answer.
_MIN_ANSWER_TOKENS = 256

# The output may take this part of the tokens that the prompt leaves. A tenth stays
# free, because the size of the prompt is an estimate.
_OUTPUT_RATIO = 0.9


def find_limits(call: Call) -> Learned:
    """Returns the limits of the call's model; an empty `Learned` if none hold.

    Limits that this process trusts hold, whatever session state says. It does not trust
    limits of session state alone, of a fallback model, or below a prompt that was
    accepted. Those hold for 20 answered calls. Then the model is tried without them.
    """
    seen = call.memory.facts.of(call.model)
    answered_calls = seen.limit_calls
    is_trusted = answered_calls is None
    if is_trusted and seen.limits is not None:
        return seen.limits
    if answered_calls is not None and answered_calls >= _TRY_AGAIN_CALLS:
        return Learned()
    return call.state.record.of(call.model)


def note_use_of_limits(call: Call) -> None:
    """Notes in session state that a compaction has used limits of session state.

    Nothing is noted if this process has seen the same limits. Other limits are good for
    two compactions. After the second one, the limits that this process has seen replace
    them in session state.
    """
    seen_limits = call.memory.facts.of(call.model).limits or Learned()
    stored_limits = call.state.record.of(call.model)
    if vars(stored_limits) == vars(seen_limits):
        return

    if stored_limits.is_used:
        call.state.learn(call.model, seen_limits)
    else:
        used_limits = stored_limits.model_copy(update={"is_used": True})
        call.state.learn(call.model, used_limits)


def review_limits(event: Answered) -> None:
    """Forgets a window that an accepted prompt has exceeded; else counts the call.

    The calls are counted until limits that are not trusted are tried again.
    """
    call = event.call
    is_first_answer = call.is_answered and not call.is_reported
    if call.is_observed or not is_first_answer:
        return

    model = call.model
    seen = call.memory.facts.of(model)
    seen_limits = seen.limits or Learned()
    stored_limits = event.state.record.of(model)
    window_tokens = seen_limits.window_tokens or stored_limits.window_tokens
    count = event.count
    prompt_tokens = 0
    if count is not None and count.is_size:
        prompt_tokens = count.real_tokens

    if window_tokens and prompt_tokens > window_tokens:
        wider_limits = seen_limits.model_copy(update={"window_tokens": None})
        event.state.learn(model, wider_limits)
        call.memory.remember_seen(
            model, replace(seen, limits=wider_limits, limit_calls=None)
        )
    elif seen.limit_calls is not None and seen.limit_calls < _TRY_AGAIN_CALLS:
        call.memory.remember_seen(
            model, replace(seen, limit_calls=seen.limit_calls + 1)
        )


def resolve_model(call: Call, bounds: Bounds) -> ModelFacts:
    """Returns the facts about the model that a call goes to.

    Three sources tell the model's window: the settings or the registry, a limit that
    this process keeps to, and a rejection. The smallest of the three windows holds.
    """
    name = call.model
    seen = call.memory.facts.of(name)

    # First source: the settings, else the registry.
    registry = call.guard.registry
    stated = resolve_context_window(
        name,
        configured=call.strategy.context_window,
        registry=registry,
        agent=call.agent,
    )

    # Second source: a limit that this process keeps to, because of a rate limit, or
    # because a server truncates longer prompts. A larger accepted prompt disproves it.
    no_limit = Limit(stated.tokens)
    limit = call.guard.limits.get(call.client, seen.kept or no_limit)
    if limit.tokens < seen.accepted_tokens:
        limit = no_limit

    # Third source: a window that a rejection has shown. A larger accepted prompt
    # disproves it only if the rejection was seen by another process.
    learned = find_limits(call)
    learned_tokens = stated.tokens
    if learned.window_tokens:
        accepted_tokens = 0 if seen.has_shown(learned) else seen.accepted_tokens
        learned_tokens = max(learned.window_tokens, accepted_tokens, MIN_WINDOW_TOKENS)

    known_tokens = min(stated.tokens, limit.tokens, learned_tokens)
    client = Client.of(call.llm)
    client_output_tokens = client.default_output_tokens(name, registry)
    return ModelFacts(
        name=name,
        llm=call.llm,
        known_window_tokens=known_tokens,
        window_tokens=min(known_tokens, bounds.window_tokens or known_tokens),
        reserved_output_tokens=client.chosen_output_tokens(call.request.config) or 0,
        default_output_tokens=client_output_tokens or learned.output_tokens or 0,
        is_rate=limit.is_rate,
        sum_tokens=limit.sum_tokens,
        stated_window_tokens=stated.tokens,
        window_source=stated.source,
    )


def plan_call(call: Call, model: ModelFacts, bounds: Bounds) -> Budgets:
    """Returns the sizes that a call has to respect, in tokens."""
    window_tokens = model.window_tokens
    trigger_tokens = call.strategy.trigger_tokens(window_tokens)
    # The window of a rate limit leaves half of the limit for output already.
    reserved_tokens = 0 if model.is_rate else model.reserved_output_tokens
    budgets = plan_budgets(window_tokens, reserved_tokens, trigger_tokens)

    # The threshold is at least twice the size of the request after the last
    # compaction, because a lower one would be reached again at once. But the window
    # bounds it.
    stored = call.state.record.summary
    compacted_tokens = stored.left_tokens if stored is not None else 0
    least_tokens = min(budgets.full_tokens, 2 * compacted_tokens)
    due_tokens = max(budgets.threshold_tokens, least_tokens)

    # A recovery from a rejection lowers both sizes.
    ratio = bounds.threshold_ratio
    return replace(
        budgets,
        threshold_tokens=int(due_tokens * ratio),
        full_tokens=int(budgets.full_tokens * ratio),
    )


def fit_output(call: Call, model: ModelFacts, prompt_tokens: int) -> None:
    """Lowers the output limit of a request if prompt and output do not fit together.

    Args:
        call: The model call, whose request is changed.
        model: The model that the request goes to.
        prompt_tokens: The estimated size of the request.
    """
    was_sum_refused = find_limits(call).output_tokens is not None
    is_sum_limited = was_sum_refused or model.sum_tokens > 0
    if model.reserved_output_tokens and not is_sum_limited:
        # Somebody has set this output limit, and no provider has objected to it.
        return

    output_tokens = model.reserved_output_tokens or model.default_output_tokens
    needed_tokens = prompt_tokens + output_tokens
    most_tokens = model.sum_tokens or model.window_tokens
    if needed_tokens > most_tokens and not is_sum_limited:
        # The settings may state a smaller window than the model has. Such a window
        # limits the prompt alone.
        most_tokens = _find_real_window(call, model)
    if needed_tokens > most_tokens:
        reserve_output(call, int((most_tokens - prompt_tokens) * _OUTPUT_RATIO))


def _find_real_window(call: Call, model: ModelFacts) -> int:
    """Returns the window that the model itself is likely to have, in tokens.

    It is the window that a rejection has shown, else the larger one of the settings and
    the registry. A rate limit does not count.
    """
    if find_limits(call).window_tokens:
        return model.known_window_tokens

    registered = resolve_context_window(
        model.name, registry=call.guard.registry, is_quiet=True
    )
    registered_tokens = registered.tokens if registered.source == "registry" else 0
    return max(model.stated_window_tokens, registered_tokens)


def reserve_output(call: Call, output_tokens: int) -> bool:
    """Sets the output limit of the request if it leaves enough for an answer.

    Returns:
        False if the limit leaves too little for thinking and an answer. Then the
        request is not changed.
    """
    config = call.request.config
    if output_tokens < _MIN_ANSWER_TOKENS + thinking_tokens(call.llm, config):
        return False

    update = {"max_output_tokens": output_tokens}
    call.request.config = config.model_copy(update=update)
    return True


def warn_reserved_output(agent: str, budgets: Budgets) -> None:
    """Warns once if the output limit of an agent leaves no room for a history."""
    output_tokens = budgets.reserved_output_tokens
    window_tokens = budgets.window_tokens
    if output_tokens <= int(window_tokens * MOST_BUFFER_RATIO):
        return

    message = (
        "Agent %r: the output limit of %s tokens takes more than three quarters of the "
        "context window, %s tokens; a quarter is used for the prompt. Lower "
        "`max_output_tokens` (or the model's `max_tokens`), or set a larger "
        "context_window on the agent's strategy."
    )
    warn_once(logger, message, agent, f"{output_tokens:,}", f"{window_tokens:,}")
