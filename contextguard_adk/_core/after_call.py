"""What is done with a model's answer: its token count is stored, the call reported."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin

from contextguard_adk import _listeners
from contextguard_adk._core.counts import weigh_count
from contextguard_adk._core.limits import review_limits
from contextguard_adk._providers.clients import read_tokens
from contextguard_adk._providers.costs import price_calls
from contextguard_adk._providers.registry import resolve_costs
from contextguard_adk._runtime.runs import Guard, Run
from contextguard_adk._runtime.scopes import call_key
from contextguard_adk._support.log import log_failures
from contextguard_adk._turn.facts import Count
from contextguard_adk._turn.units import Answered
from contextguard_adk.records import METADATA_KEY, CallRecord, describe_call

logger = logging.getLogger("contextguard_adk.answers")


async def take_answer(
    guard: Guard, context: CallbackContext, response: LlmResponse, plugin: BasePlugin
) -> None:
    """Stores what the provider counted, if it did, and reports the call once."""
    run = guard.run(context.get_invocation_context())
    key = call_key(context)
    if (call := run.calls.get(key)) is None:
        return
    usage = response.usage_metadata
    real = read_tokens(usage.prompt_token_count) or None if usage else None
    if real or (response.content and response.content.parts):
        call.is_answered = True
    if response.partial:
        return
    begin_background = call.begin_background
    state = guard.state(context)
    may_lose = _may_lose_events(context, plugin)
    memo = run.memo(context.get_invocation_context())
    count = weigh_count(call, real, memo) if real else None
    event = Answered(guard, context, run, call, response, real, count, state, may_lose)
    for listener in _listeners.LISTENERS:
        with log_failures(logger, f"{type(listener).__name__} failed"):
            listener.answered(event)
    review_limits(event)
    if count:
        _note_count(event, count)
    if may_lose:
        invocation = context.get_invocation_context()
        context.state.update(run.writes.give(key[1], invocation.session.state))
    if call.is_reported:
        return
    call.is_reported = True
    if begin_background and call.is_answered:
        begin_background(real or call.estimated_tokens)
    record = _describe(event)
    # Not onto the response: a plugin may hand the same one out again.
    run.describe(key, METADATA_KEY, describe_call(record))
    logger.debug(
        "Agent %r: about %d tokens were sent, %s counted, window %d.",
        *(record.agent, record.estimated_tokens, real, record.window_tokens),
    )
    await guard.observers.tell(record)


def _may_lose_events(context: CallbackContext, plugin: BasePlugin) -> bool:
    """Whether a plugin before this one may keep events from it."""
    plugins = context.get_invocation_context().plugin_manager.plugins
    usual = BasePlugin.on_event_callback
    before = itertools.takewhile(lambda each: each is not plugin, plugins)
    return any(type(each).on_event_callback is not usual for each in before)


def _note_count(event: Answered, count: Count) -> None:
    """Keeps what the provider counted; a recovery needs the contents no more."""
    call = event.call
    memory = event.call.memory
    state = event.state
    real_tokens = count.real_tokens
    cached_ratio = event.usage.cached_tokens / real_tokens
    memory.facts = replace(memory.facts, cached_ratio=cached_ratio)
    call.release()
    if not count.is_size:  # What led to it may have been wrong as well.
        state.write("real_tokens", None)
        return
    seen = memory.facts.of(call.model)
    most_tokens = max(real_tokens, seen.accepted_tokens)
    accepted = event.guard.accepted
    if real_tokens > accepted.get(call.client, 0):
        accepted[call.client] = real_tokens
    counted = real_tokens, count.heuristic_tokens
    memory.see(call.model, replace(seen, accepted_tokens=most_tokens, counted=counted))
    memory.facts = replace(memory.facts, counting_model=call.model)
    state.write("real_tokens", real_tokens)
    state.write("last_heuristic", count.heuristic_tokens)


def _describe(event: Answered) -> CallRecord:
    call = event.call
    guard = event.guard
    usage = event.usage
    costs = resolve_costs(call.model, guard.settings.prices, guard.registry)
    summary_usage, summary_cost = call.memory.take_costs()
    return CallRecord(
        **vars(call.origin),
        estimated_tokens=call.estimated_tokens,
        real_tokens=event.real_tokens,
        window_tokens=call.window_tokens,
        threshold_tokens=call.threshold_tokens,
        pressure=call.estimated_tokens / call.window_tokens,
        is_recovered=call.is_recovered,
        compaction=call.compaction,
        model=call.model,
        usage=usage,
        cost=price_calls([usage], costs),
        summary_usage=summary_usage,
        summary_cost=summary_cost,
    )


def end_run(run: Run) -> None:
    """Warns of model calls of a run that came to nothing."""
    run.forget_delivered()
    for (agent, _), call in run.calls.items():
        # Where a server streams no usage, LiteLLM was seen to find 40 % of the tokens.
        is_large = call.estimated_tokens >= 0.4 * call.window_tokens
        if is_large and not call.is_answered:
            logger.warning(
                "The model of agent %r answered nothing, not even usage, to a request "
                "of about %d tokens; its window is %d. Some servers do so instead of "
                "rejecting what is too long; %s.",
                *(agent, call.estimated_tokens, call.window_tokens, call.origin.place),
            )
