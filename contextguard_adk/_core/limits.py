"""What the model of a call takes: its window, its output, and what it has shown."""

from __future__ import annotations

import logging
from dataclasses import replace

from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._history.stored import Learned
from contextguard_adk._measuring.budgets import (
    Budgets,
    most_buffer_tokens,
    plan_budgets,
)
from contextguard_adk._providers.clients import Client, thinking_tokens
from contextguard_adk._providers.overflow import MIN_LIMIT_TOKENS, Overflow
from contextguard_adk._providers.registry import (
    MIN_WINDOW_TOKENS,
    resolve_context_window,
)
from contextguard_adk._runtime.memory import Limit
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
    """Returns what the model has shown, as far as it is believed.

    What this process has seen a provider show holds, whatever session state says. It
    does not trust limits that only session state says, which may be anybody's, those
    of a fallback model, and those below what was accepted before: they hold for 20
    answered calls, and are tried again.
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
    """Remembers what a provider has shown, in place of what only session state says.

    Args:
        call: The model call.
        window_tokens: The window that a rejection has shown; None for no news of it.
        output_tokens: The output limit that a rejection has shown; None for no news.
        correction: Tokens of the model per four bytes; None for no news.
        is_trusted: Whether it holds until it is contradicted; None is as before.
    """
    seen = call.memory.facts.of(call.model)
    stored = call.state.record.of(call.model)
    if is_trusted is not None:
        limit_calls = None if is_trusted else 0
    elif seen.limits is None:  # What is stored stays, as little trusted as before.
        limit_calls = None if stored == Learned() else 0
    else:
        limit_calls = seen.limit_calls

    limits = seen.limits or stored
    if window_tokens is not None:
        limits = limits.model_copy(update={"window_tokens": window_tokens})
    if output_tokens is not None:
        limits = limits.model_copy(update={"output_tokens": output_tokens})
    if correction is not None:
        limits = limits.model_copy(update={"correction": correction})

    call.state.learn(call.model, limits)
    call.memory.see(call.model, replace(seen, limits=limits, limit_calls=limit_calls))


def use_hearsay(call: Call) -> None:
    """Notes a compaction; limits that only session state says are good for two."""
    seen = call.memory.facts.of(call.model)
    said = call.state.record.of(call.model)
    if vars(said) == vars(seen.limits or Learned()):
        return
    if said.is_used:
        call.state.learn(call.model, seen.limits or Learned())
    else:
        call.state.learn(call.model, said.model_copy(update={"is_used": True}))


def review_limits(event: Answered) -> None:
    """Counts an answered call, and forgets a window that its prompt has exceeded."""
    call = event.call
    state = event.state
    count = event.count
    if call.is_observed or call.is_reported or not call.is_answered:
        return
    model = call.model
    seen = call.memory.facts.of(model)
    limits = seen.limits or Learned()
    known_tokens = limits.window_tokens or state.record.of(model).window_tokens
    if known_tokens and count and count.is_size and count.real_tokens > known_tokens:
        limits = limits.model_copy(update={"window_tokens": None})
        state.learn(model, limits)
        call.memory.see(model, replace(seen, limits=limits, limit_calls=None))
    elif seen.limit_calls is not None and seen.limit_calls < TRY_AGAIN_CALLS:
        call.memory.see(model, replace(seen, limit_calls=seen.limit_calls + 1))


def resolve_model(call: Call, bounds: Bounds) -> ModelFacts:
    """Returns what is known of the model; a provider's word narrows its window."""
    name = call.model
    registry = call.guard.registry
    strategy = call.strategy
    resolved = resolve_context_window(
        name, configured=strategy.context_window, registry=registry, agent=call.agent
    )
    shown = find_limits(call)
    seen = call.memory.facts.of(name)
    unlimited = Limit(resolved.tokens)
    limit = call.guard.limits.get(call.client, seen.kept or unlimited)
    if limit.tokens < seen.accepted_tokens:
        limit = unlimited  # What this very session was shown says more.
    known = min(resolved.tokens, limit.tokens)
    if shown.window_tokens:
        accepted_tokens = 0 if seen.has_shown(shown) else seen.accepted_tokens
        shown_tokens = max(shown.window_tokens, accepted_tokens, MIN_WINDOW_TOKENS)
        known = min(known, shown_tokens)
    client = Client.of(call.llm)
    default = client.default_output_tokens(name, registry) or shown.output_tokens
    return ModelFacts(
        name=name,
        llm=call.llm,
        known_window_tokens=known,
        window_tokens=min(known, bounds.window_tokens or known),
        reserved_output_tokens=client.set_output_tokens(call.request.config) or 0,
        default_output_tokens=default or 0,
        is_rate=limit.is_rate,
        sum_tokens=limit.sum_tokens,
        stated_window_tokens=resolved.tokens,
        window_source=resolved.source,
    )


def plan_call(call: Call, model: ModelFacts, bounds: Bounds) -> Budgets:
    """Returns the sizes that a call has to respect."""
    window = model.window_tokens
    stored = call.state.record.summary
    trigger = call.strategy.trigger_tokens(window)
    # Of a rate limit the other half is left for output.
    reserved_tokens = 0 if model.is_rate else model.reserved_output_tokens
    budgets = plan_budgets(window, reserved_tokens, trigger)
    # A trigger below twice what the last compaction left would fire again at once.
    least = min(budgets.full_tokens, 2 * stored.left_tokens if stored else 0)
    due_tokens = max(budgets.threshold_tokens, least)
    due_tokens = int(due_tokens * bounds.threshold_ratio)
    full_tokens = int(budgets.full_tokens * bounds.threshold_ratio)
    return replace(budgets, threshold_tokens=due_tokens, full_tokens=full_tokens)


def fit_output(call: Call, model: ModelFacts, prompt_tokens: int) -> None:
    """Lowers the output that a request asks for to what the window leaves.

    A limit that somebody has set stays until the sum of input and output was refused
    once, or counts against a rate limit. A tenth stays free: what is known of the
    prompt is an estimate.
    """
    was_refused = find_limits(call).output_tokens is not None
    is_sum = was_refused or model.sum_tokens > 0
    if model.reserved_output_tokens and not is_sum:
        return
    output_tokens = model.reserved_output_tokens or model.default_output_tokens
    window_tokens = model.sum_tokens or model.window_tokens
    if not is_sum and prompt_tokens + output_tokens > window_tokens:
        window_tokens = _largest_window_tokens(call, model)
    if prompt_tokens + output_tokens > window_tokens:
        reserve_output(call, int((window_tokens - prompt_tokens) * 0.9))


def _largest_window_tokens(call: Call, model: ModelFacts) -> int:
    """Returns what a model takes in truth, where a smaller window is configured.

    A rate limit is none of that.
    """
    if find_limits(call).window_tokens:
        return model.known_window_tokens
    usual = resolve_context_window(
        model.name, registry=call.guard.registry, is_quiet=True
    )
    usual_tokens = usual.tokens if usual.source == "registry" else 0
    return max(model.stated_window_tokens, usual_tokens)


def reserve_output(call: Call, output_tokens: int) -> bool:
    """Lets the request reserve so much output; False where that is too little."""
    config = call.request.config
    # Less than 256 is too little for an answer.
    if output_tokens < 256 + thinking_tokens(call.llm, config):
        return False
    call.request.config = config.model_copy(update={"max_output_tokens": output_tokens})
    return True


def warn_reserved_output(agent: str, budgets: Budgets) -> None:
    """Says once that the output limit that was set leaves no room for a history."""
    output_tokens = budgets.reserved_output_tokens
    window_tokens = budgets.window_tokens
    if output_tokens > most_buffer_tokens(window_tokens):
        message = (
            "Agent %r: the output limit of %s tokens takes more than three quarters of "
            "the context window, %s tokens; a quarter is used for the prompt. Lower "
            "`max_output_tokens` (or the model's `max_tokens`), or set a larger "
            "context_window on the agent's strategy."
        )
        warn_once(logger, message, agent, f"{output_tokens:,}", f"{window_tokens:,}")


def learn_window(
    call: Call, bounds: Bounds, overflow: Overflow, estimated_tokens: float
) -> Bounds:
    """Remembers the limit that a rejection shows; it never widens the window.

    A limit below what this client has accepted in the process is believed when it is
    named again; until then the rejection counts as one without numbers. It is not
    trusted, nor is one of a fallback model. Returns the bounds for the next try.
    """
    shown_tokens = int(estimated_tokens * 0.85)
    if overflow.in_bytes or overflow.is_quotation:
        return replace(bounds, window_tokens=max(shown_tokens, MIN_LIMIT_TOKENS))
    if overflow.period:
        return _keep_to_rate(call, bounds, overflow, estimated_tokens)
    model = resolve_model(call, bounds)
    named = overflow.limit_tokens
    seen = call.memory.facts.of(model.name)
    is_foreign = not _is_same_model(overflow.model, model.name)
    accepted_tokens = call.guard.accepted.get(call.client, 0)
    is_contradicted = (named or shown_tokens) < accepted_tokens
    was_doubted = seen.limits is not None and seen.limit_calls is not None
    if named and (is_foreign or was_doubted or not is_contradicted):
        learned = max(named, MIN_WINDOW_TOKENS)
    else:
        learned = max(seen.accepted_tokens, shown_tokens, MIN_WINDOW_TOKENS)
    is_trusted = not (is_foreign or is_contradicted)
    if learned < model.window_tokens:
        learn(call, window_tokens=learned, is_trusted=is_trusted)
        is_named = learned == named
        _warn_window(call.agent, model, learned if is_named else None, estimated_tokens)
    elif not is_trusted:
        learn(call, is_trusted=is_trusted)
    return bounds


def _is_same_model(named: str, asked: str) -> bool:
    """Whether both name one model: clients leave out the provider in front."""
    ends = [name.lower().rpartition("/")[2] for name in (named, asked)]
    return not named or ends[0] == ends[1]


def _keep_to_rate(
    call: Call, bounds: Bounds, overflow: Overflow, estimated_tokens: float
) -> Bounds:
    """Keeps the prompts of this process at half of a rate limit of its key.

    The other half is for the summary that makes room, and for output, also where only
    the provider knows of it. Below the limit of a fallback, or one that contradicts
    what was accepted, only the next try is kept.
    """
    limit_tokens = max(overflow.limit_tokens or 0, MIN_WINDOW_TOKENS)
    accepted_tokens = call.guard.accepted.get(call.client, 0)
    is_foreign = not _is_same_model(overflow.model, call.model)
    if is_foreign or limit_tokens < accepted_tokens:
        return replace(bounds, window_tokens=limit_tokens)

    most_tokens = min(limit_tokens, int(estimated_tokens)) // 2
    prompt_tokens = max(most_tokens, MIN_WINDOW_TOKENS)
    # Who names the request counts the output that it asks for as well.
    sum_tokens = limit_tokens if overflow.prompt_tokens else 0
    limit = Limit(prompt_tokens, True, sum_tokens)
    call.guard.limits[call.client] = limit
    seen = call.memory.facts.of(call.model)
    believed_tokens = min(seen.accepted_tokens, prompt_tokens)
    call.memory.see(
        call.model, replace(seen, accepted_tokens=believed_tokens, kept=limit)
    )
    message = (
        "Model %r: a request of %s tokens is above the key's limit of %s tokens per "
        "%s: no wait helps. Prompts stay below %s tokens from now on, in this process. "
        "Set context_window=%d on the agent's strategy, or have the limit raised."
    )
    sent_tokens = overflow.prompt_tokens or int(estimated_tokens)
    figures = f"{sent_tokens:,}", f"{limit_tokens:,}", overflow.period
    kept = f"{prompt_tokens:,}", prompt_tokens
    warn_once(logger, message, call.model, *figures, *kept)
    return bounds


def _warn_window(
    agent: str, model: ModelFacts, named_tokens: int | None, rejected_tokens: float
) -> None:
    """Says once for an agent and its model that the window is not as wide."""
    said = f"{model.stated_window_tokens:,}, as {_WHO_SAID[model.window_source]}"
    about = f"Agent {agent!r}, model {model.name!r}"
    if named_tokens is not None:
        message = "%s: the context window is %s tokens, as the provider says, not "
        message += "%s. Set context_window=%d on the agent's strategy."
        warn_once(logger, message, about, f"{named_tokens:,}", said, named_tokens)
        return
    message = (
        "%s: the provider rejected a request of about %s tokens as too long, "
        "although the context window is %s. Smaller ones are sent from now on; set "
        "context_window on the agent's strategy to what the model really takes."
    )
    warn_once(logger, message, about, f"{rejected_tokens:,.0f}", said)
