"""The limits that a call has to keep to: its model's window and output.

A `Learned` value has the limits that rejections of a model have shown. There are two of
them for each model: one in the memory of this process (`Seen.limits`), and one in
session state, which other processes of the session write as well.

- If `Seen.limit_calls` is None: this process trusts its own limits.
- If `Seen.limit_calls` is a number: neither the limits of this process nor those of
  session state are trusted. The number counts the calls that the model has answered,
  from the first one in this process on, up to 20. Some rejections set the number back
  to 0, see `learn` in `rejections`.
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

# An output limit has room for thinking and for at least this many tokens of an answer.
_MIN_ANSWER_TOKENS = 256

# The output may take this part of the limit less the prompt. The rest is a reserve,
# because the size of the prompt is an estimate.
_OUTPUT_RATIO = 0.9


def find_limits(call: Call) -> Learned:
    """Returns the limits of the call's model that hold now.

    Returns:
        One of three values; an empty `Learned` stands for no limits:
        - If this process trusts its own limits: those, whatever session state says.
        - If 20 calls were answered under limits that are not trusted: an empty
          `Learned`, to try the model without these limits.
        - Otherwise: the limits of session state. This process or another one has
          written them, and they are not trusted.
    """
    seen = call.memory.facts.of(call.model)
    # The number is None if this process has limits that it trusts.
    untrusted_calls = seen.limit_calls
    if untrusted_calls is None and seen.limits is not None:
        return seen.limits
    if untrusted_calls is not None and untrusted_calls >= _TRY_AGAIN_CALLS:
        return Learned()
    return call.state.record.of(call.model)


def note_use_of_limits(call: Call) -> None:
    """Notes in session state that a compaction has used limits of session state.

    If this process has seen the same limits, nothing is noted. Other limits may be
    wrong, because anybody may write session state, so they hold for two compactions.
    The first compaction marks them as used. The second one replaces them by the limits
    that this process has seen, or by an empty `Learned`.
    """
    seen_limits = call.memory.facts.of(call.model).limits or Learned()
    stored_limits = call.state.record.of(call.model)
    # `vars` leaves out fields of later releases, which `==` would compare.
    if vars(stored_limits) == vars(seen_limits):
        return

    if stored_limits.is_used:
        call.state.learn(call.model, seen_limits)
    else:
        used_limits = stored_limits.model_copy(update={"is_used": True})
        call.state.learn(call.model, used_limits)


def review_limits(answer: Answered) -> None:
    """Reviews the limits of a model after an answer; forgets a window or counts a call.

    A window is forgotten once a larger prompt was accepted. Otherwise the call is
    counted while the limits are not trusted, so that `find_limits` tries the model
    without these limits after some calls.

    Args:
        answer: The answer, before its count is stored.
    """
    call = answer.call
    # A call may have several whole responses, and counts once.
    is_first_answer = call.is_answered and not call.is_reported
    if call.is_observed or not is_first_answer:
        return

    model = call.model
    seen = call.memory.facts.of(model)
    seen_limits = seen.limits or Learned()
    stored_limits = answer.state.record.of(model)
    window_tokens = seen_limits.window_tokens or stored_limits.window_tokens
    count = answer.count
    # A count that is not the size of one request says nothing about the window.
    prompt_tokens = 0
    if count is not None and count.is_size:
        prompt_tokens = count.real_tokens

    if window_tokens and prompt_tokens > window_tokens:
        # The limits that this process has seen stay, without the window. They become
        # trusted, so that `find_limits` no longer reads session state: another process
        # may store a window there again. Session state gets the same limits, because
        # its limits that this process has not seen are not trusted.
        wider_limits = seen_limits.model_copy(update={"window_tokens": None})
        answer.state.learn(model, wider_limits)
        call.memory.remember_seen(
            model, replace(seen, limits=wider_limits, limit_calls=None)
        )
    elif seen.limit_calls is not None and seen.limit_calls < _TRY_AGAIN_CALLS:
        call.memory.remember_seen(
            model, replace(seen, limit_calls=seen.limit_calls + 1)
        )


def resolve_model(call: Call, bounds: Bounds) -> ModelFacts:
    """Returns the facts about the model that a call goes to.

    Three sources tell the window of the model: what is stated, what this process has to
    keep to, and what a rejection has shown. The smallest of the three windows holds. A
    source that tells nothing gives the stated window.

    Args:
        call: The model call.
        bounds: The bounds, which may have a smaller window for this request alone.
    """
    name = call.model
    seen = call.memory.facts.of(name)

    # First source: the window is stated by the settings, by the registry, or by a
    # default for unknown models.
    registry = call.guard.registry
    stated = resolve_context_window(
        name,
        configured=call.strategy.context_window,
        registry=registry,
        agent=call.agent,
    )

    # Second source: this process keeps prompts below a limit because of a rate limit,
    # or because a server truncates longer prompts. The limit is kept by `server_key`,
    # and in this session also by the model's name, because the app may make a new model
    # object. If the model has accepted a larger prompt, the limit does not hold.
    no_limit = Limit(stated.tokens)
    limit = call.guard.limits.get(call.server_key, seen.kept or no_limit)
    if limit.tokens < seen.accepted_tokens:
        limit = no_limit

    # Third source: a rejection has shown a window. If this process has read the
    # rejection, it has compared the window with accepted prompts then. A window from
    # another process is raised to the largest prompt that was accepted here.
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
    # A rejection has shown an output limit only if the provider refused the sum of
    # prompt and output. A rate limit may count the sum as well (`sum_tokens`).
    was_sum_refused = find_limits(call).output_tokens is not None
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

    If a rejection has shown a window, the result is the smallest known window.
    Otherwise the result is the stated window or the registry's window, whichever is
    larger. Then a limit that only this process keeps to does not count.
    """
    if find_limits(call).window_tokens:
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
