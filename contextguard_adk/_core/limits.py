"""The limits that a call has to keep to: its model's window and output."""

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

# No request is sent that may have fewer output tokens than these, beside its thinking.
_MIN_ANSWER_TOKENS = 256


def find_limits(call: Call) -> Learned:
    """Returns the limits that rejections of the model have shown.

    Limits that a provider has shown to this process hold, whatever session state says.
    Three kinds of limits are not trusted:
    - limits of session state alone, because anybody may have put them there,
    - limits of a fallback model,
    - limits below the size of a prompt that was accepted.

    These hold for 20 answered calls. Then the model is tried without them, and an empty
    `Learned` is returned.
    """
    seen = call.memory.facts.of(call.model)
    is_trusted = seen.limit_calls is None
    if seen.limits is not None and is_trusted:
        return seen.limits
    if seen.limit_calls is not None and seen.limit_calls >= _TRY_AGAIN_CALLS:
        return Learned()
    return call.state.record.of(call.model)


def use_stored_limits(call: Call) -> None:
    """Notes that a compaction has used limits of session state, if it has.

    Limits that this process has not seen itself are good for two compactions. After the
    second one, the limits that the process has seen replace them in session state.
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
    """Reviews the limits that rejections have shown, once a call is answered.

    A window that the prompt has exceeded is forgotten. Otherwise the call counts among
    those after which limits that are not trusted are tried again.
    """
    call = event.call
    if call.is_observed or call.is_reported or not call.is_answered:
        return

    model = call.model
    seen = call.memory.facts.of(model)
    seen_limits = seen.limits or Learned()
    stored_limits = event.state.record.of(model)
    window_tokens = seen_limits.window_tokens or stored_limits.window_tokens
    count = event.count
    prompt_tokens = count.real_tokens if count and count.is_size else 0

    if window_tokens and prompt_tokens > window_tokens:
        wider_limits = seen_limits.model_copy(update={"window_tokens": None})
        event.state.learn(model, wider_limits)
        call.memory.see(model, replace(seen, limits=wider_limits, limit_calls=None))
    elif seen.limit_calls is not None and seen.limit_calls < _TRY_AGAIN_CALLS:
        call.memory.see(model, replace(seen, limit_calls=seen.limit_calls + 1))


def resolve_model(call: Call, bounds: Bounds) -> ModelFacts:
    """Returns the facts about the model that a call goes to.

    Three sources tell its window, and the smallest window wins. A prompt that was
    accepted outweighs a smaller window, unless the provider has shown that window to
    this process in a rejection.
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

    # Second source: a limit that this process keeps to, by a rate limit or by the
    # counts of a server that truncates.
    no_limit = Limit(stated.tokens)
    limit = call.guard.limits.get(call.client, seen.kept or no_limit)
    if limit.tokens < seen.accepted_tokens:
        limit = no_limit

    # Third source: a window that a rejection has shown.
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
    """Returns the sizes that a call has to respect, in tokens.

    The threshold is not raised above `full_tokens`. A recovery multiplies both by its
    `threshold_ratio`.
    """
    window_tokens = model.window_tokens
    trigger_tokens = call.strategy.trigger_tokens(window_tokens)
    # Half of a rate limit is left for output already.
    reserved_tokens = 0 if model.is_rate else model.reserved_output_tokens
    budgets = plan_budgets(window_tokens, reserved_tokens, trigger_tokens)

    # A trigger below twice the size after the last compaction would fire again at once.
    stored = call.state.record.summary
    left_tokens = stored.left_tokens if stored else 0
    least_tokens = min(budgets.full_tokens, 2 * left_tokens)
    due_tokens = max(budgets.threshold_tokens, least_tokens)

    ratio = bounds.threshold_ratio
    return replace(
        budgets,
        threshold_tokens=int(due_tokens * ratio),
        full_tokens=int(budgets.full_tokens * ratio),
    )


def fit_output(call: Call, model: ModelFacts, prompt_tokens: int) -> None:
    """Lowers the output that a request asks for to what the window leaves.

    An output limit that somebody has set is lowered in two cases only: the provider has
    refused the sum of input and output before, or the sum counts against a rate limit.
    A tenth of the room stays free, because the size of the prompt is an estimate.
    """
    was_sum_refused = find_limits(call).output_tokens is not None
    is_sum_limited = was_sum_refused or model.sum_tokens > 0
    if model.reserved_output_tokens and not is_sum_limited:
        return

    output_tokens = model.reserved_output_tokens or model.default_output_tokens
    needed_tokens = prompt_tokens + output_tokens
    most_tokens = model.sum_tokens or model.window_tokens
    if needed_tokens > most_tokens and not is_sum_limited:
        # A window that is configured smaller than the model's own limits prompts only.
        most_tokens = _largest_window_tokens(call, model)
    if needed_tokens > most_tokens:
        reserve_output(call, int((most_tokens - prompt_tokens) * 0.9))


def _largest_window_tokens(call: Call, model: ModelFacts) -> int:
    """Returns the window that a rejection has shown, else the largest stated one.

    The stated ones are those of the settings and of the registry. A rate limit does not
    count.
    """
    if find_limits(call).window_tokens:
        return model.known_window_tokens

    registered = resolve_context_window(
        model.name, registry=call.guard.registry, is_quiet=True
    )
    registered_tokens = registered.tokens if registered.source == "registry" else 0
    return max(model.stated_window_tokens, registered_tokens)


def reserve_output(call: Call, output_tokens: int) -> bool:
    """Sets the output limit of the request.

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
    """Warns once that the output limit that was set leaves no room for a history."""
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
