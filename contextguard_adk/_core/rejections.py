"""What a provider's rejection teaches of the limits of a model."""

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

# A rejection without numbers lets the next request have this part of the rejected one.
_NEXT_RATIO = 0.85

# The words of a warning for each `ModelFacts.window_source`.
_SOURCES = {
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
        correction: Tokens of the model per four bytes; None leaves it as it was.
        is_trusted: True if the limits hold until they are contradicted; False if they
            are tried again after some calls; None for as much trust as before, which
            limits of session state alone do not have.
    """
    seen = call.memory.facts.of(call.model)
    stored = call.state.record.of(call.model)
    shown = {
        "window_tokens": window_tokens,
        "output_tokens": output_tokens,
        "correction": correction,
    }
    update = {name: value for name, value in shown.items() if value is not None}
    limits = (seen.limits or stored).model_copy(update=update)
    call.state.learn(call.model, limits)

    # None stands for trust. From 0 on, calls are counted until the limits are tried
    # again.
    limit_calls: int | None
    if is_trusted is not None:
        limit_calls = None if is_trusted else 0
    elif seen.limits is not None:
        limit_calls = seen.limit_calls
    else:
        has_stored = stored != Learned()
        limit_calls = 0 if has_stored else None
    call.memory.see(call.model, replace(seen, limits=limits, limit_calls=limit_calls))


def learn_window(
    call: Call, bounds: Bounds, overflow: Overflow, estimated_tokens: float
) -> Bounds:
    """Remembers the limit that a rejection shows; it never widens the window.

    There are three cases:
    - A rejection that says nothing about tokens limits the next request alone.
    - A rate limit is kept by `_keep_to_rate`.
    - Any other rejection shows a window, which the model's record keeps.

    Args:
        call: The model call.
        bounds: The bounds of the rejected request.
        overflow: The rejection as it was read.
        estimated_tokens: The size of the rejected request.

    Returns:
        The bounds of the next request.
    """
    if overflow.in_bytes or overflow.is_quotation:
        next_tokens = max(_lower(estimated_tokens), MIN_LIMIT_TOKENS)
        return replace(bounds, window_tokens=next_tokens)
    if overflow.period:
        return _keep_to_rate(call, bounds, overflow, estimated_tokens)

    window = _read_window(call, overflow, estimated_tokens)
    model = resolve_model(call, bounds)
    if window.tokens < model.window_tokens:
        learn(call, window_tokens=window.tokens, is_trusted=window.is_trusted)
        _warn_window(call.agent, model, window, estimated_tokens)
    elif not window.is_trusted:
        learn(call, is_trusted=False)
    return bounds


class _Window(NamedTuple):
    """A window that a rejection shows.

    Attributes:
        tokens: Its size.
        is_named: Whether the provider has named it. Otherwise it follows from the size
            of the rejected request.
        is_trusted: Whether it holds until it is contradicted.
    """

    tokens: int
    is_named: bool
    is_trusted: bool


def _read_window(call: Call, overflow: Overflow, estimated_tokens: float) -> _Window:
    """Returns the window that a rejection shows.

    A window that the provider has named is returned if it is believed. Otherwise the
    window is smaller than the rejected request.

    Two kinds of windows are not trusted:
    - A fallback model has named it.
    - It is below a prompt that this client has accepted in the process. Such a window
      is not even believed, before a second rejection follows.
    """
    seen = call.memory.facts.of(call.model)
    lower_tokens = _lower(estimated_tokens)
    named_tokens = overflow.limit_tokens

    is_of_fallback = not _is_same_model(overflow.model, call.model)
    accepted_tokens = call.guard.accepted.get(call.client, 0)
    is_contradicted = (named_tokens or lower_tokens) < accepted_tokens
    is_trusted = not (is_of_fallback or is_contradicted)

    # If a limit without trust is remembered, this is at least the second rejection.
    is_repeated = seen.limits is not None and seen.limit_calls is not None
    is_believed = is_of_fallback or is_repeated or not is_contradicted
    if named_tokens and is_believed:
        tokens = max(named_tokens, MIN_WINDOW_TOKENS)
    else:
        tokens = max(seen.accepted_tokens, lower_tokens, MIN_WINDOW_TOKENS)
    return _Window(tokens, is_named=tokens == named_tokens, is_trusted=is_trusted)


def _lower(rejected_tokens: float) -> int:
    """Returns the size that is tried after a rejection without numbers."""
    return int(rejected_tokens * _NEXT_RATIO)


def _is_same_model(named: str, asked: str) -> bool:
    """Returns whether an error names the model that was asked, or names none ("").

    Clients leave out the provider in front: "openai/gpt-x" is the same as "gpt-x".
    """
    named_end = named.lower().rpartition("/")[2]
    asked_end = asked.lower().rpartition("/")[2]
    return not named or named_end == asked_end


def _keep_to_rate(
    call: Call, bounds: Bounds, overflow: Overflow, estimated_tokens: float
) -> Bounds:
    """Keeps the prompts of this process at half of a rate limit of its key.

    The other half is for the summary that makes room, and for the output of the calls,
    whose size only the provider may know. A limit of a fallback model, or one below a
    prompt that was accepted, holds for the next request alone.

    Returns:
        The bounds of the next request.
    """
    rate_tokens = max(overflow.limit_tokens or 0, MIN_WINDOW_TOKENS)
    accepted_tokens = call.guard.accepted.get(call.client, 0)
    is_of_fallback = not _is_same_model(overflow.model, call.model)
    if is_of_fallback or rate_tokens < accepted_tokens:
        return replace(bounds, window_tokens=rate_tokens)

    half_tokens = min(rate_tokens, int(estimated_tokens)) // 2
    prompt_tokens = max(half_tokens, MIN_WINDOW_TOKENS)
    # A provider that names the size of the request counts the output in it as well.
    sum_tokens = rate_tokens if overflow.prompt_tokens else 0
    limit = Limit(prompt_tokens, is_rate=True, sum_tokens=sum_tokens)
    call.guard.limits[call.client] = limit

    # `resolve_model` leaves aside a limit below a prompt that was accepted.
    seen = call.memory.facts.of(call.model)
    accepted_below_tokens = min(seen.accepted_tokens, prompt_tokens)
    limited = replace(seen, accepted_tokens=accepted_below_tokens, kept=limit)
    call.memory.see(call.model, limited)

    request_tokens = overflow.prompt_tokens or int(estimated_tokens)
    message = (
        "Model %r: a request of %s tokens is above the key's limit of %s tokens per "
        "%s: no wait helps. Prompts stay below %s tokens from now on, in this process. "
        "Set context_window=%d on the agent's strategy, or have the limit raised."
    )
    warn_once(
        logger,
        message,
        call.model,
        f"{request_tokens:,}",
        f"{rate_tokens:,}",
        overflow.period,
        f"{prompt_tokens:,}",
        prompt_tokens,
    )
    return bounds


def _warn_window(
    agent: str, model: ModelFacts, window: _Window, rejected_tokens: float
) -> None:
    """Warns once for an agent and its model that the window is smaller than stated."""
    about = f"Agent {agent!r}, model {model.name!r}"
    stated = f"{model.stated_window_tokens:,}, as {_SOURCES[model.window_source]}"
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
