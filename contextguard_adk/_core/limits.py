"""The limits that a call has to keep to: its model's window and output.

What a provider has shown of its limits is kept in the memory of this process, and
nowhere else: for all sessions by server (`Guard.limits`), and for the session by the
name of the model (`Seen.limits`).
"""

from __future__ import annotations

import logging
from dataclasses import replace

from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._measuring.budgets import (
    MOST_BUFFER_RATIO,
    Budgets,
    plan_budgets,
)
from contextguard_adk._providers.clients import Client, thinking_tokens
from contextguard_adk._providers.registry import resolve_context_window
from contextguard_adk._runtime.memory import Limits
from contextguard_adk._runtime.runs import Guard, SentCall
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.facts import ModelFacts
from contextguard_adk._turn.units import Answered

logger = logging.getLogger("contextguard_adk.limits")

# An output limit has room for thinking and for at least this many tokens of an answer.
_MIN_ANSWER_TOKENS = 256

# The output may take this part of the limit less the prompt. The rest is a reserve,
# because the size of the prompt is an estimate.
_OUTPUT_RATIO = 0.9


def read_limits(guard: Guard, call: Call | SentCall) -> Limits:
    """Returns what the provider of a call's model has shown of its limits."""
    seen = call.memory.facts.of(call.model)
    return guard.limits.get(call.server_key, seen.limits)


def remember_limits(guard: Guard, call: Call | SentCall, limits: Limits) -> None:
    """Remembers the limits of a call's model, in place of the earlier ones.

    They hold in the whole process for this server, and in this session for this model.
    """
    guard.limits[call.server_key] = limits
    seen = call.memory.facts.of(call.model)
    call.memory.remember_seen(call.model, replace(seen, limits=limits))


def forget_exceeded(answer: Answered) -> None:
    """Forgets the window that a provider has shown once a larger prompt was accepted.

    A limit that follows from a rate limit stays, because it is no window.

    Args:
        answer: The answer. If its count is not the size of one request, the count shows
            nothing.
    """
    call = answer.call
    count = answer.count
    if call.is_observed or count is None or not count.is_size:
        return

    limits = read_limits(answer.guard, call)
    if limits.window_tokens is None or limits.is_rate:
        return
    if count.real_tokens > limits.window_tokens:
        remember_limits(answer.guard, call, limits.with_window(None))


def find_valid_limits(call: Call) -> Limits:
    """Returns the limits that hold for a call.

    These are the limits that the provider has shown, without the window if the model
    has accepted a larger prompt in this session.
    """
    limits = read_limits(call.guard, call)
    accepted_tokens = call.memory.facts.of(call.model).accepted_tokens
    if limits.window_tokens is not None and limits.window_tokens < accepted_tokens:
        return limits.with_window(None)
    return limits


def resolve_model(call: Call, bounds: Bounds) -> ModelFacts:
    """Returns the facts about the model that a call goes to.

    The window is the stated one, or a smaller one that the provider has shown.

    Args:
        call: The model call.
        bounds: The bounds, which may have a smaller window for this request alone.
    """
    name = call.model
    registry = call.guard.registry
    # The window is stated by the settings, by the registry, or by a default for unknown
    # models.
    stated = resolve_context_window(
        name,
        configured=call.strategy.context_window,
        registry=registry,
        agent=call.agent,
    )

    limits = find_valid_limits(call)
    known_tokens = min(stated.tokens, limits.window_tokens or stated.tokens)
    client = Client.of(call.llm)
    client_output_tokens = client.default_output_tokens(name, registry)
    return ModelFacts(
        name=name,
        llm=call.llm,
        known_window_tokens=known_tokens,
        window_tokens=min(known_tokens, bounds.window_tokens or known_tokens),
        reserved_output_tokens=client.chosen_output_tokens(call.request.config) or 0,
        default_output_tokens=client_output_tokens or limits.output_tokens or 0,
        is_rate=limits.is_rate,
        sum_tokens=limits.sum_tokens,
        stated_window_tokens=stated.tokens,
        window_source=stated.source,
    )


def plan_call(call: Call, model: ModelFacts, bounds: Bounds) -> Budgets:
    """Returns the sizes that a call has to respect, in tokens.

    Args:
        call: The model call.
        model: The model that the call goes to.
        bounds: The bounds, which lower the threshold after a rejection.
    """
    window_tokens = model.window_tokens
    trigger_tokens = call.strategy.trigger_tokens(window_tokens)
    # The window that follows from a rate limit is half of the limit. The other half
    # has room for the output.
    reserved_tokens = 0 if model.is_rate else model.reserved_output_tokens
    budgets = plan_budgets(window_tokens, reserved_tokens, trigger_tokens)

    # The request soon reaches a threshold that is hardly above its size after the last
    # compaction. So the threshold is raised to twice this size, but not above
    # `full_tokens`, which leaves room for an answer.
    stored = call.state.record.summary
    compacted_tokens = stored.left_tokens if stored is not None else 0
    least_tokens = min(budgets.full_tokens, 2 * compacted_tokens)
    raised_tokens = max(budgets.threshold_tokens, least_tokens)

    # A recovery from a rejection lowers both sizes. Otherwise the ratio is 1.
    ratio = bounds.threshold_ratio
    return replace(
        budgets,
        threshold_tokens=int(raised_tokens * ratio),
        full_tokens=int(budgets.full_tokens * ratio),
    )


def fit_output(call: Call, model: ModelFacts, prompt_tokens: int) -> None:
    """Lowers the output limit of a request if prompt and output do not fit together.

    Args:
        call: The model call, whose request is changed.
        model: The model that the request goes to.
        prompt_tokens: The estimated size of the request.
    """
    # The limits have an output limit only if the provider has refused the sum of prompt
    # and output. A rate limit may count the sum as well (`sum_tokens`).
    was_sum_refused = find_valid_limits(call).output_tokens is not None
    is_sum_limited = was_sum_refused or model.sum_tokens > 0
    if model.reserved_output_tokens and not is_sum_limited:
        # Somebody has set this output limit, and no provider has objected to it.
        return

    # The number is 0 if nobody has set an output limit, and no default is known.
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

    If the provider has shown a window, the result is the smallest known window.
    Otherwise the result is the stated window or the registry's window, whichever is
    larger. A limit that follows from a rate limit is no window.
    """
    limits = find_valid_limits(call)
    if limits.window_tokens is not None and not limits.is_rate:
        return model.known_window_tokens

    # The settings may have stated a smaller window than the registry.
    registered = resolve_context_window(
        model.name, registry=call.guard.registry, is_quiet=True
    )
    registered_tokens = registered.tokens if registered.source == "registry" else 0
    return max(model.stated_window_tokens, registered_tokens)


def reserve_output(call: Call, output_tokens: int) -> bool:
    """Sets the output limit of the request if it leaves enough for an answer.

    Args:
        call: The model call, whose request is changed.
        output_tokens: The output limit.

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
    """Warns once if an output limit takes more than three quarters of a window.

    The guard keeps at most three quarters of the window free for the output.

    Args:
        agent: The name of the agent.
        budgets: The sizes of the call, which have window and reserved output.
    """
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
