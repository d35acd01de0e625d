"""Learns the limits of a model from a provider's rejection of a request.

A limit is trusted if it holds until it is contradicted. A limit without trust is tried
again after some calls, because another model may have named it, or because the model
has accepted a larger prompt before.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._core.limits import resolve_model
from contextguard_adk._history.stored import Learned
from contextguard_adk._providers.overflow import MIN_LIMIT_TOKENS, Overflow
from contextguard_adk._providers.registry import MIN_WINDOW_TOKENS
from contextguard_adk._runtime.memory import Limit
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.facts import ModelFacts

logger = logging.getLogger("contextguard_adk.limits")

# After a rejection without numbers, the next request may take this part of the rejected
# one.
_NEXT_RATIO = 0.85

# The words of a warning for each `ModelFacts.window_source`.
_SOURCE_WORDS = {
    "configured": "configured",
    "registry": "the model registry says",
    "default": "assumed for an unknown model",
}


def learn(
    call: Call,
    *,
    window_tokens: int | None = None,
    output_tokens: int | None = None,
    correction: float | None = None,
    is_trusted: bool | None = None,
) -> None:
    """Remembers limits that a rejection has shown, in the process and session state.

    The limits of the process go before those of session state, see `find_limits`.

    Args:
        call: The model call.
        window_tokens: The window; None leaves it as it was.
        output_tokens: The output limit; None leaves it as it was.
        correction: Tokens of the model per byte / 4; None leaves it as it was.
        is_trusted: Whether the limits hold until they are contradicted. None leaves the
            trust as it was.
    """
    seen = call.memory.facts.of(call.model)
    stored_limits = call.state.record.of(call.model)
    shown = {
        "window_tokens": window_tokens,
        "output_tokens": output_tokens,
        "correction": correction,
    }
    update = {name: value for name, value in shown.items() if value is not None}
    known_limits = seen.limits or stored_limits
    limits = known_limits.model_copy(update=update)
    call.state.learn(call.model, limits)

    if is_trusted is None and seen.limits is not None:
        limit_calls = seen.limit_calls
    elif is_trusted is None:
        # Limits that only session state has are not trusted: anybody may write it.
        has_stored_limits = stored_limits != Learned()
        limit_calls = _start_count(is_trusted=not has_stored_limits)
    else:
        limit_calls = _start_count(is_trusted)
    call.memory.remember_seen(
        call.model, replace(seen, limits=limits, limit_calls=limit_calls)
    )


def _start_count(is_trusted: bool) -> int | None:
    """Returns the first `Seen.limit_calls` of a limit; None stands for trust."""
    return None if is_trusted else 0


def learn_window(
    call: Call, bounds: Bounds, overflow: Overflow, estimated_tokens: float
) -> Bounds:
    """Remembers the limit that a rejection shows; it never widens the window.

    Args:
        call: The model call.
        bounds: The bounds of the rejected request.
        overflow: The rejection as it was read.
        estimated_tokens: The size of the rejected request.

    Returns:
        The bounds of the next request.
    """
    says_nothing_of_tokens = overflow.in_bytes or overflow.is_quotation
    if says_nothing_of_tokens:
        # Only the next request gets smaller, and nothing is remembered.
        next_tokens = max(_lower(estimated_tokens), MIN_LIMIT_TOKENS)
        return replace(bounds, window_tokens=next_tokens)
    if overflow.period:
        return _learn_rate(call, bounds, overflow, estimated_tokens)

    # Any other rejection shows a window.
    window = _read_window(call, overflow, estimated_tokens)
    model = resolve_model(call, bounds)
    if window.tokens < model.window_tokens:
        learn(call, window_tokens=window.tokens, is_trusted=window.is_trusted)
        _warn_window(call.agent, model, window, estimated_tokens)
    elif not window.is_trusted:
        # The known window is no larger. From now on it is as doubtful as this one.
        learn(call, is_trusted=False)
    return bounds


class _Window(NamedTuple):
    """A window that a rejection shows.

    Attributes:
        tokens: The size of the window.
        is_named: Whether the provider has named this size. Otherwise the size follows
            from that of the rejected request.
        is_trusted: Whether the window holds until it is contradicted.
    """

    tokens: int
    is_named: bool
    is_trusted: bool


def _read_window(call: Call, overflow: Overflow, estimated_tokens: float) -> _Window:
    """Returns the window that a rejection shows.

    The window is the one that the provider has named, if that is believed. Otherwise it
    is smaller than the rejected request, but not below a prompt that was accepted.
    """
    seen = call.memory.facts.of(call.model)
    named_tokens = overflow.limit_tokens
    lower_tokens = _lower(estimated_tokens)

    # Two kinds of windows are not trusted: one of a fallback model, and one below a
    # prompt that the client has accepted.
    is_of_fallback = not _is_same_model(overflow.model, call.model)
    accepted_tokens = call.guard.accepted.get(call.client, 0)
    is_contradicted = (named_tokens or lower_tokens) < accepted_tokens
    is_trusted = not (is_of_fallback or is_contradicted)

    # A contradicted window is believed from the second rejection on. After the first
    # one, a limit without trust is remembered.
    is_repeated = seen.limits is not None and seen.limit_calls is not None
    is_believed = is_of_fallback or is_repeated or not is_contradicted
    if named_tokens and is_believed:
        tokens = max(named_tokens, MIN_WINDOW_TOKENS)
    else:
        tokens = max(seen.accepted_tokens, lower_tokens, MIN_WINDOW_TOKENS)
    return _Window(tokens, is_named=tokens == named_tokens, is_trusted=is_trusted)


def _lower(rejected_tokens: float) -> int:
    """Returns the size of the next request, if a rejection has named no limit."""
    return int(rejected_tokens * _NEXT_RATIO)


def _is_same_model(named: str, asked: str) -> bool:
    """Returns whether an error is of the model that was asked.

    Some clients leave out the provider: "openai/gpt-x" is the same as "gpt-x".

    Args:
        named: The model that the error names; "" if it names none. Then the error is
            taken to be of the asked model.
        asked: The model that was asked.
    """
    if not named:
        return True
    return _without_provider(named) == _without_provider(asked)


def _without_provider(model: str) -> str:
    """Returns a name such as "gpt-x" for "OpenAI/gpt-x"."""
    return model.lower().rpartition("/")[-1]


def _learn_rate(
    call: Call, bounds: Bounds, overflow: Overflow, estimated_tokens: float
) -> Bounds:
    """Limits the prompts of this process to half of a rate limit, and warns of it.

    The other half is for the summary that makes room, and for the output of the calls,
    whose size only the provider may know.

    Returns:
        The bounds of the next request.
    """
    rate_tokens = max(overflow.limit_tokens or 0, MIN_WINDOW_TOKENS)
    accepted_tokens = call.guard.accepted.get(call.client, 0)
    is_of_fallback = not _is_same_model(overflow.model, call.model)
    is_contradicted = rate_tokens < accepted_tokens
    if is_of_fallback or is_contradicted:
        # This may not be the limit of the asked model, so nothing is remembered.
        return replace(bounds, window_tokens=rate_tokens)

    half_tokens = min(rate_tokens, int(estimated_tokens)) // 2
    prompt_tokens = max(half_tokens, MIN_WINDOW_TOKENS)
    # A provider that names the size of the request counts the output in it as well.
    sum_tokens = rate_tokens if overflow.prompt_tokens else 0
    limit = Limit(prompt_tokens, is_rate=True, sum_tokens=sum_tokens)
    call.guard.limits[call.client] = limit

    # `resolve_model` ignores a limit below the largest accepted prompt. So the largest
    # one is remembered as no larger than the limit.
    seen = call.memory.facts.of(call.model)
    largest_tokens = min(seen.accepted_tokens, prompt_tokens)
    limited = replace(seen, accepted_tokens=largest_tokens, kept=limit)
    call.memory.remember_seen(call.model, limited)
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


def _warn_window(
    agent: str, model: ModelFacts, window: _Window, rejected_tokens: float
) -> None:
    """Warns once for an agent and its model that the window is smaller than stated."""
    about = f"Agent {agent!r}, model {model.name!r}"
    stated = f"{model.stated_window_tokens:,}, as {_SOURCE_WORDS[model.window_source]}"
    if window.is_named:
        message = (
            "%s: the context window is %s tokens, as the provider says, not %s. Set "
            "context_window=%d on the agent's strategy."
        )
        warn_once(logger, message, about, f"{window.tokens:,}", stated, window.tokens)
        return

    message = (
        "%s: the provider rejected a request of about %s tokens as too long, although "
        "the context window is %s. Smaller ones are sent from now on; set "
        "context_window on the agent's strategy to what the model really takes."
    )
    warn_once(logger, message, about, f"{rejected_tokens:,.0f}", stated)
