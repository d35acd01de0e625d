"""Learns the limits of a model from a provider's rejection of a request.

A limit is trusted if it holds until it is contradicted. After some calls, the model is
tried without a limit that is not trusted: another model may have named the limit, or
the model has accepted a larger prompt before. `Seen.limit_calls` says which limits are
trusted: it is None for trusted limits, and otherwise a number of calls.
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

# If a rejection names no limit, the limit is taken to be this part of the rejected
# request.
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

    Args:
        call: The model call.
        window_tokens: The window; None leaves the known window.
        output_tokens: The output limit; None leaves the known output limit.
        correction: Tokens of the model per heuristic token (4 bytes); None leaves the
            known correction.
        is_trusted: Whether all limits of the model hold until they are contradicted.
            With None, limits that this process knows keep their trust. If this process
            knows none, the new limits are trusted, unless session state has others.
    """
    seen = call.memory.facts.of(call.model)
    stored_limits = call.state.record.of(call.model)
    shown = {
        "window_tokens": window_tokens,
        "output_tokens": output_tokens,
        "correction": correction,
    }
    update = {name: value for name, value in shown.items() if value is not None}
    # The limits that this process has seen replace those of session state.
    known_limits = seen.limits or stored_limits
    limits = known_limits.model_copy(update=update)
    call.state.learn(call.model, limits)

    if is_trusted is None and seen.limits is None:
        # Anybody may write session state, so its limits are not trusted. The new limits
        # include them.
        is_trusted = stored_limits == Learned()
    limit_calls = seen.limit_calls
    if is_trusted is not None:
        # Calls are counted only under limits that are not trusted.
        limit_calls = None if is_trusted else 0
    call.memory.remember_seen(
        call.model, replace(seen, limits=limits, limit_calls=limit_calls)
    )


def learn_window(
    call: Call, bounds: Bounds, overflow: Overflow, estimated_tokens: float
) -> Bounds:
    """Remembers the limit that a rejection shows, unless a smaller one is known.

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
    if says_nothing_of_tokens:
        # Nothing is remembered, and only the next request gets smaller.
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
        # The known window stays, because it is no larger. But all known limits of the
        # model are trusted no more than the window of this rejection.
        learn(call, is_trusted=False)
    return bounds


class _Window(NamedTuple):
    """A window that a rejection shows.

    Attributes:
        tokens: The size of the window.
        is_named: Whether the provider has named just this size.
        is_trusted: Whether the window holds until it is contradicted.
    """

    tokens: int
    is_named: bool
    is_trusted: bool


def _read_window(call: Call, overflow: Overflow, estimated_tokens: float) -> _Window:
    """Returns the window that a rejection shows; at least `MIN_WINDOW_TOKENS`.

    - If the provider has named a window, and the window is believed: the named window.
    - Otherwise: 85 % of the rejected request, or the largest prompt that was accepted
      in this session if that prompt is larger.

    The result may be a believed window that is not trusted: such a window holds only
    for some calls.
    """
    seen = call.memory.facts.of(call.model)
    named_tokens = overflow.limit_tokens
    lower_tokens = _lower(estimated_tokens)

    # Two kinds of windows are not trusted: the window of a fallback model, and a window
    # below a prompt that the same server has accepted. `guard.accepted` has the largest
    # prompt of all sessions, `seen.accepted_tokens` has that of this session.
    is_of_fallback = not _is_same_model(overflow.model, call.model)
    accepted_by_server = call.guard.accepted.get(call.server_key, 0)
    is_contradicted = (named_tokens or lower_tokens) < accepted_by_server
    is_trusted = not (is_of_fallback or is_contradicted)

    # A window is believed in three cases:
    # - If a fallback model has named the window: the accepted prompts were not sent to
    #   that model, so they do not show that the window is wrong.
    # - If this process has limits that are not trusted: an earlier rejection has shown
    #   them, so this is at least the second rejection.
    # - If no accepted prompt contradicts it.
    has_untrusted_limits = seen.limits is not None and seen.limit_calls is not None
    is_believed = is_of_fallback or has_untrusted_limits or not is_contradicted
    if named_tokens and is_believed:
        tokens = max(named_tokens, MIN_WINDOW_TOKENS)
    else:
        tokens = max(seen.accepted_tokens, lower_tokens, MIN_WINDOW_TOKENS)
    return _Window(tokens, is_named=tokens == named_tokens, is_trusted=is_trusted)


def _lower(rejected_tokens: float) -> int:
    """Returns the limit that is assumed after a rejection that names no limit."""
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
    is_of_fallback = not _is_same_model(overflow.model, call.model)
    is_contradicted = rate_tokens < accepted_tokens
    if is_of_fallback or is_contradicted:
        return replace(bounds, window_tokens=rate_tokens)

    # The limit counts as no larger than the request that was rejected.
    half_tokens = min(rate_tokens, int(estimated_tokens)) // 2
    prompt_tokens = max(half_tokens, MIN_WINDOW_TOKENS)
    # If a provider names the size of the request, its limit includes the output.
    sum_tokens = rate_tokens if overflow.prompt_tokens else 0
    limit = Limit(prompt_tokens, is_rate=True, sum_tokens=sum_tokens)
    call.guard.limits[call.server_key] = limit

    # `resolve_model` ignores a limit below the largest accepted prompt, so the memory
    # of this prompt is lowered to the limit.
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
    """Warns once for an agent and its model that the window is smaller than stated.

    Args:
        agent: The name of the agent.
        model: The model, with the window that is stated for it.
        window: The window that the rejection shows.
        rejected_tokens: The size of the rejected request.
    """
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
