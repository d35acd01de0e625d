"""Reads from a provider's rejection which limits the next requests have to keep to.

What is believed is remembered, see `limits.py`. What is not believed changes only the
next request of the rejected call.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._core.limits import read_limits, remember_limits, resolve_model
from contextguard_adk._providers.overflow import MIN_LIMIT_TOKENS, Overflow
from contextguard_adk._providers.registry import MIN_WINDOW_TOKENS
from contextguard_adk._runtime.memory import Limits
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.facts import ModelFacts

logger = logging.getLogger("contextguard_adk.limits")

# If a rejection names no limit in tokens, the next request has to fit in this part of
# the rejected one.
_NEXT_RATIO = 0.85

# The words of a warning for each `ModelFacts.window_source`.
_SOURCE_WORDS = {
    "configured": "configured",
    "registry": "the model registry says",
    "default": "assumed for an unknown model",
}


def bound_next(
    call: Call, bounds: Bounds, overflow: Overflow, estimated_tokens: float
) -> Bounds:
    """Remembers the limit that a rejection names, and bounds the next request.

    A window is remembered if it is believed (`_is_believed`). Any other window changes
    only the next request. If the rejection names no limit in tokens, the next request
    gets 85 % of the rejected one.

    Args:
        call: The model call.
        bounds: The bounds of the rejected request.
        overflow: The rejection as it was read.
        estimated_tokens: The size of the rejected request.

    Returns:
        The bounds of the next request. They need not have a limit that is remembered,
        because each request reads the memory.
    """
    says_nothing_of_tokens = overflow.in_bytes or overflow.is_quotation
    if overflow.period and not says_nothing_of_tokens:
        return _keep_rate(call, bounds, overflow, estimated_tokens)

    model = resolve_model(call, Bounds())
    if overflow.limit_tokens is not None:
        window_tokens = max(overflow.limit_tokens, MIN_WINDOW_TOKENS)
    else:
        smaller_tokens = int(estimated_tokens * _NEXT_RATIO)
        window_tokens = max(smaller_tokens, MIN_LIMIT_TOKENS)
    if window_tokens >= model.known_window_tokens:
        # The known window is no larger. The size of the request was underestimated.
        return bounds

    if _is_believed(call, overflow):
        known_limits = read_limits(call.guard, call)
        remember_limits(call.guard, call, known_limits.with_window(window_tokens))
        _warn_window(call.agent, model, window_tokens)
        return bounds

    if not says_nothing_of_tokens:
        _warn_rejected(call.agent, model, estimated_tokens)
    return replace(bounds, window_tokens=window_tokens)


def _is_believed(call: Call, overflow: Overflow) -> bool:
    """Returns whether a rejection names the window of the asked model.

    A window is not believed if a larger prompt was accepted: in any session on the same
    server, or in this session by a model of the same name.
    """
    if overflow.limit_tokens is None or not is_of_asked_model(call, overflow):
        return False
    accepted_by_server = call.guard.accepted.get(call.server_key, 0)
    accepted_in_session = call.memory.facts.of(call.model).accepted_tokens
    return overflow.limit_tokens >= max(accepted_by_server, accepted_in_session)


def is_of_asked_model(call: Call, overflow: Overflow) -> bool:
    """Returns whether the asked model has rejected a request, and no fallback.

    Some clients leave out the provider: "openai/gpt-x" is the same as "gpt-x". If the
    rejection names no model, it is taken to be of the asked model.
    """
    if not overflow.model:
        return True
    return _without_provider(overflow.model) == _without_provider(call.model)


def _without_provider(model: str) -> str:
    """Returns a name such as "gpt-x" for "OpenAI/gpt-x"."""
    return model.lower().rpartition("/")[-1]


def _keep_rate(
    call: Call, bounds: Bounds, overflow: Overflow, estimated_tokens: float
) -> Bounds:
    """Limits the prompts of this process to half of a rate limit, and warns of it.

    The other half of the rate limit is for the summary that makes room, and for the
    output of the calls, whose size only the provider may know.

    Args:
        call: The model call.
        bounds: The bounds of the rejected request.
        overflow: The rejection, which has a `period`.
        estimated_tokens: The size of the rejected request.

    Returns:
        The bounds of the next request. They change only if the limit may be that of
        another model. Then nothing is remembered.
    """
    rate_tokens = max(overflow.limit_tokens or 0, MIN_WINDOW_TOKENS)
    accepted_tokens = call.guard.accepted.get(call.server_key, 0)
    is_contradicted = rate_tokens < accepted_tokens
    if is_contradicted or not is_of_asked_model(call, overflow):
        return replace(bounds, window_tokens=rate_tokens)

    # The limit counts as no larger than the request that was rejected.
    half_tokens = min(rate_tokens, int(estimated_tokens)) // 2
    prompt_tokens = max(half_tokens, MIN_WINDOW_TOKENS)
    # If a provider names the size of the request, its limit includes the output.
    sum_tokens = rate_tokens if overflow.prompt_tokens else 0
    known_limits = read_limits(call.guard, call)
    limits = Limits(
        window_tokens=prompt_tokens,
        is_rate=True,
        sum_tokens=sum_tokens,
        output_tokens=known_limits.output_tokens,
    )
    remember_limits(call.guard, call, limits)

    # `find_valid_limits` leaves out a limit below the largest accepted prompt, so the
    # memory of this prompt is lowered to the limit.
    seen = call.memory.facts.of(call.model)
    largest_tokens = min(seen.accepted_tokens, prompt_tokens)
    lowered = replace(seen, accepted_tokens=largest_tokens)
    call.memory.remember_seen(call.model, lowered)
    _warn_rate(call.model, overflow, estimated_tokens, rate_tokens, prompt_tokens)
    return bounds


def _warn_rate(
    model: str,
    overflow: Overflow,
    estimated_tokens: float,
    rate_tokens: int,
    prompt_tokens: int,
) -> None:
    """Warns once that a model's prompts are limited by a rate limit.

    Args:
        model: The name of the model.
        overflow: The rejection as it was read.
        estimated_tokens: The size of the rejected request.
        rate_tokens: The rate limit.
        prompt_tokens: The most tokens of a prompt from now on.
    """
    request_tokens = overflow.prompt_tokens or int(estimated_tokens)
    message = (
        "Model %r: a request of %s tokens is above the key's limit of %s tokens per "
        "%s: no wait helps. Prompts stay below %s tokens from now on, in this process. "
        "Set context_window=%d on the agent's strategy, or have the limit raised."
    )

    warn_once(
        logger,
        message,
        model,
        f"{request_tokens:,}",
        f"{rate_tokens:,}",
        overflow.period,
        f"{prompt_tokens:,}",
        prompt_tokens,
    )


def _warn_window(agent: str, model: ModelFacts, window_tokens: int) -> None:
    """Warns once for an agent and its model that the window is smaller than stated.

    Args:
        agent: The name of the agent.
        model: The model, with the window that is stated for it.
        window_tokens: The window that the provider has named.
    """
    message = (
        "%s: the context window is %s tokens, as the provider says, not %s. Set "
        "context_window=%d on the agent's strategy."
    )
    about = _name_model(agent, model)
    named = f"{window_tokens:,}"
    warn_once(logger, message, about, named, _name_stated(model), window_tokens)


def _warn_rejected(agent: str, model: ModelFacts, rejected_tokens: float) -> None:
    """Warns once for an agent and its model of a rejection that is not remembered.

    Args:
        agent: The name of the agent.
        model: The model, with the window that is stated for it.
        rejected_tokens: The size of the rejected request.
    """
    message = (
        "%s: the provider rejected a request of about %s tokens as too long, although "
        "the context window is %s. A smaller one is sent in its place, but later ones "
        "may be rejected as well: set context_window on the agent's strategy to what "
        "the model really takes."
    )
    about = _name_model(agent, model)
    rejected = f"{rejected_tokens:,.0f}"
    warn_once(logger, message, about, rejected, _name_stated(model))


def _name_model(agent: str, model: ModelFacts) -> str:
    """Returns the words of a warning for a model and its agent."""
    return f"Agent {agent!r}, model {model.name!r}"


def _name_stated(model: ModelFacts) -> str:
    """Returns the words of a warning for the stated window of a model."""
    source_words = _SOURCE_WORDS[model.window_source]
    return f"{model.stated_window_tokens:,}, as {source_words}"
