"""The limits of a call's model: its window, its output, and those it has shown."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._history.stored import Learned
from contextguard_adk._measuring.budgets import (
    MOST_BUFFER_RATIO,
    Budgets,
    plan_budgets,
)
from contextguard_adk._providers.clients import Client, thinking_tokens
from contextguard_adk._providers.overflow import MIN_LIMIT_TOKENS, Overflow
from contextguard_adk._providers.registry import (
    MIN_WINDOW_TOKENS,
    resolve_context_window,
)
from contextguard_adk._runtime.memory import Limit, Seen
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.facts import ModelFacts
from contextguard_adk._turn.units import Answered

logger = logging.getLogger("contextguard_adk.limits")

_WHO_SAID = {
    "configured": "configured",
    "registry": "the model registry says",
    "default": "assumed for an unknown model",
}

TRY_AGAIN_CALLS = 20
"""After so many answered calls a limit that is not trusted is tried again."""


def find_limits(call: Call) -> Learned:
    """Returns the limits that the model has shown, as far as they are believed.

    Limits that a provider has shown to this process hold, whatever session state says.
    Others are not trusted: those of session state alone, which anybody may have put
    there, those of a fallback model, and those below a size that was accepted before.
    They hold for 20 answered calls, and are tried again.
    """
    seen = call.memory.facts.of(call.model)
    if seen.limits is not None and seen.limit_calls is None:
        return seen.limits
    if seen.limit_calls is not None and seen.limit_calls >= TRY_AGAIN_CALLS:
        return Learned()
    return call.state.record.of(call.model)


def learn(
    call: Call,
    *,
    window_tokens: int | None = None,
    output_tokens: int | None = None,
    correction: float | None = None,
    is_trusted: bool | None = None,
) -> None:
    """Remembers limits that a provider has shown, in place of those of session state.

    Args:
        call: The model call.
        window_tokens: The window that a rejection has shown; None for no news of it.
        output_tokens: The output limit that a rejection has shown; None for no news.
        correction: Tokens of the model per four bytes; None for no news.
        is_trusted: Whether it holds until it is contradicted; None is as before.
    """
    seen = call.memory.facts.of(call.model)
    stored = call.state.record.of(call.model)
    shown = {
        "window_tokens": window_tokens,
        "output_tokens": output_tokens,
        "correction": correction,
    }
    news = {name: value for name, value in shown.items() if value is not None}
    limits = (seen.limits or stored).model_copy(update=news)
    call.state.learn(call.model, limits)

    limit_calls = _count_calls(seen, stored, is_trusted)
    call.memory.see(call.model, replace(seen, limits=limits, limit_calls=limit_calls))


def _count_calls(seen: Seen, stored: Learned, is_trusted: bool | None) -> int | None:
    """Returns where to begin to count answered calls; None for limits to trust.

    If `is_trusted` is None, limits are trusted as much as before: those of session
    state are not.
    """
    if is_trusted is not None:
        return None if is_trusted else 0
    if seen.limits is not None:
        return seen.limit_calls
    return None if stored == Learned() else 0


def use_hearsay(call: Call) -> None:
    """Notes that a compaction used limits that only session state says.

    They are good for two compactions. After the second they are replaced by the limits
    that this process has seen.
    """
    seen = call.memory.facts.of(call.model)
    shown = seen.limits or Learned()
    said = call.state.record.of(call.model)
    if vars(said) == vars(shown):
        return

    if said.is_used:
        call.state.learn(call.model, shown)
    else:
        call.state.learn(call.model, said.model_copy(update={"is_used": True}))


def review_limits(event: Answered) -> None:
    """Counts an answered call, and forgets a window that its prompt has exceeded."""
    call = event.call
    if call.is_observed or call.is_reported or not call.is_answered:
        return

    model = call.model
    seen = call.memory.facts.of(model)
    limits = seen.limits or Learned()
    stored = event.state.record.of(model)
    known_tokens = limits.window_tokens or stored.window_tokens
    count = event.count
    prompt_tokens = count.real_tokens if count and count.is_size else 0

    if known_tokens and prompt_tokens > known_tokens:
        wider = limits.model_copy(update={"window_tokens": None})
        event.state.learn(model, wider)
        call.memory.see(model, replace(seen, limits=wider, limit_calls=None))
    elif seen.limit_calls is not None and seen.limit_calls < TRY_AGAIN_CALLS:
        call.memory.see(model, replace(seen, limit_calls=seen.limit_calls + 1))


def resolve_model(call: Call, bounds: Bounds) -> ModelFacts:
    """Returns what is known of the model; a provider's word narrows its window."""
    name = call.model
    registry = call.guard.registry
    stated = resolve_context_window(
        name,
        configured=call.strategy.context_window,
        registry=registry,
        agent=call.agent,
    )

    seen = call.memory.facts.of(name)
    unlimited = Limit(stated.tokens)
    limit = call.guard.limits.get(call.client, seen.kept or unlimited)
    if limit.tokens < seen.accepted_tokens:
        limit = unlimited  # What this very session was shown says more.

    shown = find_limits(call)
    known_tokens = min(stated.tokens, limit.tokens)
    if shown.window_tokens:
        accepted_tokens = 0 if seen.has_shown(shown) else seen.accepted_tokens
        shown_tokens = max(shown.window_tokens, accepted_tokens, MIN_WINDOW_TOKENS)
        known_tokens = min(known_tokens, shown_tokens)

    client = Client.of(call.llm)
    default = client.default_output_tokens(name, registry) or shown.output_tokens
    return ModelFacts(
        name=name,
        llm=call.llm,
        known_window_tokens=known_tokens,
        window_tokens=min(known_tokens, bounds.window_tokens or known_tokens),
        reserved_output_tokens=client.chosen_output_tokens(call.request.config) or 0,
        default_output_tokens=default or 0,
        is_rate=limit.is_rate,
        sum_tokens=limit.sum_tokens,
        stated_window_tokens=stated.tokens,
        window_source=stated.source,
    )


def plan_call(call: Call, model: ModelFacts, bounds: Bounds) -> Budgets:
    """Returns the sizes that a call has to respect."""
    window_tokens = model.window_tokens
    trigger_tokens = call.strategy.trigger_tokens(window_tokens)
    # Half of a rate limit is left for output already.
    reserved_tokens = 0 if model.is_rate else model.reserved_output_tokens
    budgets = plan_budgets(window_tokens, reserved_tokens, trigger_tokens)

    # A trigger below twice what the last compaction left would fire again at once.
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

    A limit that somebody has set stays, until the provider has refused the sum of input
    and output once, or where the sum counts against a rate limit. A tenth of the room
    stays free, because the size of the prompt is an estimate.
    """
    was_sum_refused = find_limits(call).output_tokens is not None
    is_sum_limited = was_sum_refused or model.sum_tokens > 0
    if model.reserved_output_tokens and not is_sum_limited:
        return

    output_tokens = model.reserved_output_tokens or model.default_output_tokens
    sum_tokens = prompt_tokens + output_tokens
    most_tokens = model.sum_tokens or model.window_tokens
    if sum_tokens > most_tokens and not is_sum_limited:
        most_tokens = _largest_window_tokens(call, model)
    if sum_tokens > most_tokens:
        reserve_output(call, int((most_tokens - prompt_tokens) * 0.9))


def _largest_window_tokens(call: Call, model: ModelFacts) -> int:
    """Returns the model's own window, where a smaller one is configured.

    A rate limit does not count.
    """
    if find_limits(call).window_tokens:
        return model.known_window_tokens

    usual = resolve_context_window(
        model.name, registry=call.guard.registry, is_quiet=True
    )
    usual_tokens = usual.tokens if usual.source == "registry" else 0
    return max(model.stated_window_tokens, usual_tokens)


def reserve_output(call: Call, output_tokens: int) -> bool:
    """Has the request ask for so much output; False where that is too little."""
    config = call.request.config
    # Less than 256 is too little for an answer.
    if output_tokens < 256 + thinking_tokens(call.llm, config):
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


def learn_window(
    call: Call, bounds: Bounds, overflow: Overflow, estimated_tokens: float
) -> Bounds:
    """Remembers the limit that a rejection shows; it never widens the window.

    A limit of a fallback model is not trusted. Nor is one below a size that this client
    has accepted in the process: it is believed when it is named again, until then the
    rejection counts as one without numbers.

    Args:
        call: The model call.
        bounds: What the rejected request had to respect.
        overflow: What the rejection says.
        estimated_tokens: The size of the rejected request.

    Returns:
        What the next request has to respect.
    """
    if overflow.in_bytes or overflow.is_quotation:
        smaller_tokens = max(_lower(estimated_tokens), MIN_LIMIT_TOKENS)
        return replace(bounds, window_tokens=smaller_tokens)
    if overflow.period:
        return _keep_to_rate(call, bounds, overflow, estimated_tokens)

    shown = _read_window(call, overflow, estimated_tokens)
    model = resolve_model(call, bounds)
    if shown.tokens < model.window_tokens:
        learn(call, window_tokens=shown.tokens, is_trusted=shown.is_trusted)
        _warn_window(call.agent, model, shown, estimated_tokens)
    elif not shown.is_trusted:
        learn(call, is_trusted=False)
    return bounds


class _Window(NamedTuple):
    """A window that a rejection shows.

    Attributes:
        tokens: Its size.
        is_named: Whether the provider has named it, or it follows from the request.
        is_trusted: Whether it holds until it is contradicted.
    """

    tokens: int
    is_named: bool
    is_trusted: bool


def _read_window(call: Call, overflow: Overflow, estimated_tokens: float) -> _Window:
    """Returns the window that a rejection names, or one below the rejected request."""
    seen = call.memory.facts.of(call.model)
    lower_tokens = _lower(estimated_tokens)
    named_tokens = overflow.limit_tokens
    is_foreign = not _is_same_model(overflow.model, call.model)
    accepted_tokens = call.guard.accepted.get(call.client, 0)
    is_contradicted = (named_tokens or lower_tokens) < accepted_tokens
    is_trusted = not (is_foreign or is_contradicted)

    # A limit that contradicts what was accepted is doubted, until it is named again.
    was_doubted = seen.limits is not None and seen.limit_calls is not None
    is_believed = is_foreign or was_doubted or not is_contradicted
    if named_tokens and is_believed:
        tokens = max(named_tokens, MIN_WINDOW_TOKENS)
    else:
        tokens = max(seen.accepted_tokens, lower_tokens, MIN_WINDOW_TOKENS)
    return _Window(tokens, tokens == named_tokens, is_trusted)


def _lower(rejected_tokens: float) -> int:
    """Returns the size that is tried after a rejection without numbers."""
    return int(rejected_tokens * 0.85)


def _is_same_model(named: str, asked: str) -> bool:
    """Whether both name one model: clients leave out the provider in front."""
    named_end = named.lower().rpartition("/")[2]
    asked_end = asked.lower().rpartition("/")[2]
    return not named or named_end == asked_end


def _keep_to_rate(
    call: Call, bounds: Bounds, overflow: Overflow, estimated_tokens: float
) -> Bounds:
    """Keeps the prompts of this process at half of a rate limit of its key.

    The other half is for the summary that makes room, and for output, even if only the
    provider knows how much that is. A limit of a fallback model, or one that
    contradicts what was accepted, holds for the next request alone.
    """
    limit_tokens = max(overflow.limit_tokens or 0, MIN_WINDOW_TOKENS)
    accepted_tokens = call.guard.accepted.get(call.client, 0)
    is_foreign = not _is_same_model(overflow.model, call.model)
    if is_foreign or limit_tokens < accepted_tokens:
        return replace(bounds, window_tokens=limit_tokens)

    half_tokens = min(limit_tokens, int(estimated_tokens)) // 2
    prompt_tokens = max(half_tokens, MIN_WINDOW_TOKENS)
    # A provider that names the size of the request counts the output in it as well.
    sum_tokens = limit_tokens if overflow.prompt_tokens else 0
    limit = Limit(prompt_tokens, is_rate=True, sum_tokens=sum_tokens)
    call.guard.limits[call.client] = limit

    seen = call.memory.facts.of(call.model)
    believed_tokens = min(seen.accepted_tokens, prompt_tokens)
    kept = replace(seen, accepted_tokens=believed_tokens, kept=limit)
    call.memory.see(call.model, kept)

    sent_tokens = overflow.prompt_tokens or int(estimated_tokens)
    message = (
        "Model %r: a request of %s tokens is above the key's limit of %s tokens per "
        "%s: no wait helps. Prompts stay below %s tokens from now on, in this process. "
        "Set context_window=%d on the agent's strategy, or have the limit raised."
    )
    warn_once(
        logger,
        message,
        call.model,
        f"{sent_tokens:,}",
        f"{limit_tokens:,}",
        overflow.period,
        f"{prompt_tokens:,}",
        prompt_tokens,
    )
    return bounds


def _warn_window(
    agent: str, model: ModelFacts, shown: _Window, rejected_tokens: float
) -> None:
    """Warns once for an agent and its model that the window is smaller than stated."""
    about = f"Agent {agent!r}, model {model.name!r}"
    stated = f"{model.stated_window_tokens:,}, as {_WHO_SAID[model.window_source]}"
    if shown.is_named:
        message = (
            "%s: the context window is %s tokens, as the provider says, not %s. Set "
            "context_window=%d on the agent's strategy."
        )
        warn_once(logger, message, about, f"{shown.tokens:,}", stated, shown.tokens)
        return

    message = (
        "%s: the provider rejected a request of about %s tokens as too long, although "
        "the context window is %s. Smaller ones are sent from now on; set "
        "context_window on the agent's strategy to what the model really takes."
    )
    warn_once(logger, message, about, f"{rejected_tokens:,.0f}", stated)
