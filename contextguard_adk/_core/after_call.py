"""What is done with a model's answer: its token count is stored, the call reported."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from operator import is_

from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.genai import types

from contextguard_adk import _listeners
from contextguard_adk._core.limits import review_limits
from contextguard_adk._history.contents import parts_of
from contextguard_adk._measuring.calibration import (
    estimate_prompt_tokens,
    request_script_discount,
)
from contextguard_adk._measuring.tokens import Memo, estimate_config_tokens, media_bytes
from contextguard_adk._providers.clients import read_tokens
from contextguard_adk._providers.costs import price_calls
from contextguard_adk._providers.registry import resolve_costs
from contextguard_adk._runtime.runs import Guard, Run, SentCall, call_key
from contextguard_adk._support.log import log_failures
from contextguard_adk._turn.facts import Count
from contextguard_adk._turn.units import Answered
from contextguard_adk.records import METADATA_KEY, CallRecord, describe_call

logger = logging.getLogger("contextguard_adk.answers")

# Of bytes / 4, less what the scripts of a text may save: Georgian takes 0.42 of it,
# Hindi 0.45. A lower count leaves out what a cache held, or what was cut.
_LEAST_RATIO = 0.5
_LEAST_SENT_TOKENS = 4_000  # Of less, bytes / 4 say little.

# How many times the estimate of the very request a count may be: at first, later than
# what was usual, with room for a chat template. More is believed if it is repeated.
_MOST_RATIO = 5.0
_USUAL_RATIO = 2.5
_TEMPLATE_TOKENS = 500

Sent = tuple[Sequence[types.Content], types.GenerateContentConfig | None, int]


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
    after_answer = call.after_answer
    state = guard.state(context)
    may_lose = _may_lose_events(context, plugin)
    memo = run.memo(context.get_invocation_context())
    count = _weigh_count(call, real, memo) if real else None
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
    if after_answer and call.is_answered:
        after_answer(real or call.estimated_tokens)
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


def _weigh_count(call: SentCall, real_tokens: int, memo: Memo) -> Count | None:
    """Compares a count with what was sent, as later callbacks have left it.

    None where the answer was counted before.
    """
    if not call.sent_contents:
        return None
    sent = contents, config, heuristic_tokens = _read_sent(call, memo)
    parts = itertools.chain.from_iterable(map(parts_of, contents))
    media_tokens = sum(map(media_bytes, parts)) // 4
    is_behind = False
    least_tokens = heuristic_tokens * _LEAST_RATIO
    if real_tokens < least_tokens and heuristic_tokens > _LEAST_SENT_TOKENS:
        discount = media_tokens + request_script_discount(contents, config, memo)
        is_behind = real_tokens < least_tokens - discount * _LEAST_RATIO
    is_size = not is_behind and _is_size(call, real_tokens, sent, memo)
    text_tokens = heuristic_tokens - media_tokens
    return Count(real_tokens, heuristic_tokens, text_tokens, is_size)


def _read_sent(call: SentCall, memo: Memo) -> Sent:
    """Returns what was sent, and its bytes / 4: callbacks after the guard may edit."""
    sent = call.sent_contents
    config = call.sent_config
    request = call.request()
    # ADK's Gemini class takes out of the request what a cache holds.
    edited = request.contents if request and not request.config.cached_content else sent
    if request is None or (len(edited) == len(sent) and all(map(is_, edited, sent))):
        return sent, config, call.heuristic_tokens
    tokens = memo.estimate_tokens(edited) + estimate_config_tokens(request.config)
    return edited, request.config, tokens


def _is_size(call: SentCall, real_tokens: int, sent: Sent, memo: Memo) -> bool:
    """Whether a count may be the size of one request, not the sum of several."""
    contents, config, heuristic_tokens = sent
    window_tokens = call.stated_window_tokens
    if real_tokens > (window_tokens or real_tokens) and not call.is_observed:
        return False
    if config is not None and config.cached_content:
        return True  # It counts what nobody here sees.
    model = call.model
    seen = call.memory.facts.of(model)
    more_tokens = max(0, real_tokens - _TEMPLATE_TOKENS)
    estimated_tokens = max(1, heuristic_tokens)  # It is at least that.
    if more_tokens > heuristic_tokens * _USUAL_RATIO:
        estimated_tokens = estimate_prompt_tokens(
            heuristic_tokens, None, None, contents, config=config, memo=memo
        )
    ratio = more_tokens / estimated_tokens
    usual = max(1.0, seen.lowest_ratio) * _USUAL_RATIO
    is_usual = ratio <= (usual if seen.lowest_ratio else _MOST_RATIO)
    # A vocabulary that takes more for a script, or what a gateway adds to all requests.
    doubted_ratio, doubted_tokens = seen.doubted
    is_same = ratio <= _MOST_RATIO and _is_near(ratio, doubted_ratio, 0.1)
    is_same |= _is_near(more_tokens - estimated_tokens, doubted_tokens, 0.03)
    if is_usual:
        lowest = min(ratio, seen.lowest_ratio or ratio)
        shown = replace(seen, doubted=(0.0, 0), lowest_ratio=lowest)
    else:
        shown = replace(seen, doubted=(ratio, more_tokens - estimated_tokens))
    call.memory.see(model, shown)
    return is_usual or is_same


def _is_near(value: float, before: float, most: float) -> bool:
    return bool(before) and abs(value / before - 1) < most


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
