"""Handles a model's answer: stores its token count, and reports the call.

A provider's count is evidence of a request's size, but not always the size: it may
leave out cached tokens, or add up several requests.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.genai import types

from contextguard_adk import _listeners
from contextguard_adk._core.limits import review_limits
from contextguard_adk._history.contents import parts_of
from contextguard_adk._measuring.calibration import (
    MeasuredRequest,
    estimate_prompt_tokens,
    request_script_discount,
)
from contextguard_adk._measuring.tokens import Memo, estimate_config_tokens, media_bytes
from contextguard_adk._providers.clients import read_tokens
from contextguard_adk._providers.costs import price_calls
from contextguard_adk._providers.registry import resolve_costs
from contextguard_adk._runtime.memory import NOT_DOUBTED, CountedRequest, DoubtedCount
from contextguard_adk._runtime.runs import Guard, Run, SentCall, call_key
from contextguard_adk._support.log import log_failures
from contextguard_adk._turn.facts import Count
from contextguard_adk._turn.units import Answered
from contextguard_adk.records import METADATA_KEY, CallRecord, describe_call

logger = logging.getLogger("contextguard_adk.answers")

# A count below this part of bytes / 4 leaves out cached or truncated text. Scripts that
# take fewer tokens are allowed for: Georgian takes 0.42 of bytes / 4, Hindi 0.45.
_LEAST_RATIO = 0.5

# For requests of fewer tokens (bytes / 4), a low count is no sign of missing text.
_LEAST_SENT_TOKENS = 4_000

# The ratio of a count to the estimate of its request is believed up to 5 for the first
# count of a model, later up to 2.5 times the lowest ratio so far. The tokens of a chat
# template are subtracted from the count. A count with a higher ratio is believed if it
# repeats the count before.
_MOST_RATIO = 5.0
_USUAL_RATIO = 2.5
_TEMPLATE_TOKENS = 500

# A count repeats the one before if their ratios to the estimates differ by less than a
# tenth, or if their tokens above the estimates differ by less than 3 %.
_SAME_RATIO = 0.1
_SAME_EXCESS = 0.03

# A request that fills this part of the window is large: if it has no answer, a server
# may have found it too long. It is so low because LiteLLM was seen to find only 40 % of
# the tokens where a server streams no usage.
_LARGE_RATIO = 0.4


class _SentRequest(NamedTuple):
    """A request as callbacks after the guard have left it, and its bytes / 4."""

    contents: Sequence[types.Content]
    config: types.GenerateContentConfig | None
    heuristic_tokens: int


async def take_answer(
    guard: Guard, context: CallbackContext, response: LlmResponse, plugin: BasePlugin
) -> None:
    """Stores the provider's count, if there is one, and reports the call once.

    ADK calls this for each response of a stream. A partial response only shows that the
    model answers. Nothing is done for a call that the guard did not see.
    """
    invocation = context.get_invocation_context()
    run = guard.run(invocation)
    key = call_key(context)
    call = run.calls.get(key)
    if call is None:
        return

    usage = response.usage_metadata
    real_tokens = (read_tokens(usage.prompt_token_count) or None) if usage else None
    has_content = response.content is not None and bool(response.content.parts)
    if real_tokens or has_content:
        call.is_answered = True
    if response.partial:
        return

    # Read now: the call forgets this function once its count is stored.
    after_answer = call.after_answer
    may_lose_event = _may_lose_events(context, plugin)
    memo = run.memo(invocation)
    event = Answered(
        guard=guard,
        context=context,
        run=run,
        call=call,
        response=response,
        real_tokens=real_tokens,
        count=_weigh_count(call, real_tokens, memo) if real_tokens else None,
        state=guard.state(context),
        may_lose_event=may_lose_event,
    )
    _learn(event)
    if may_lose_event:
        _, scope = key
        context.state.update(run.writes.give_once(scope, invocation.session.state))

    if call.is_reported:
        return
    call.is_reported = True
    if after_answer is not None and call.is_answered:
        after_answer(real_tokens or call.estimated_tokens)
    await _report(event)


def _learn(event: Answered) -> None:
    """Tells the listeners of an answer, and remembers what its count shows."""
    for listener in _listeners.ANSWERED:
        if listener.is_on(event.guard):
            with log_failures(logger, f"{type(listener).__name__} failed"):
                listener.answered(event)

    review_limits(event)
    if event.count is not None:
        _note_count(event, event.count)


async def _report(event: Answered) -> None:
    """Tells the next event, the log and the user's function of an answered call."""
    record = _describe(event)
    # Not onto the response: a plugin may hand the same one out again.
    key = call_key(event.context)
    event.run.describe(key, METADATA_KEY, describe_call(record))
    logger.debug(
        "Agent %r: about %d tokens were sent, %s counted, window %d.",
        record.agent,
        record.estimated_tokens,
        event.real_tokens,
        record.window_tokens,
    )
    await event.guard.observers.tell(record)


def _may_lose_events(context: CallbackContext, plugin: BasePlugin) -> bool:
    """Returns whether a plugin before this one may keep events from it.

    Any plugin with an `on_event_callback` of its own may do so.
    """
    plugins = context.get_invocation_context().plugin_manager.plugins
    base_method = BasePlugin.on_event_callback
    earlier = itertools.takewhile(lambda each: each is not plugin, plugins)
    return any(type(each).on_event_callback is not base_method for each in earlier)


def _weigh_count(call: SentCall, real_tokens: int, memo: Memo) -> Count | None:
    """Compares a count with the request that was sent.

    Returns:
        The count with the guard's own figures; None if a count of this call was stored
        before.
    """
    if not call.sent_contents:
        return None

    sent = _read_sent(call, memo)
    parts = itertools.chain.from_iterable(parts_of(each) for each in sent.contents)
    media_tokens = sum(media_bytes(part) for part in parts) // 4

    # A count is incomplete if neither media nor scripts explain that it is so low.
    least_tokens = sent.heuristic_tokens * _LEAST_RATIO
    is_incomplete = False
    if real_tokens < least_tokens and sent.heuristic_tokens > _LEAST_SENT_TOKENS:
        script_tokens = request_script_discount(sent.contents, sent.config, memo)
        discount_tokens = media_tokens + script_tokens
        is_incomplete = real_tokens < least_tokens - discount_tokens * _LEAST_RATIO

    return Count(
        real_tokens=real_tokens,
        heuristic_tokens=sent.heuristic_tokens,
        text_tokens=sent.heuristic_tokens - media_tokens,
        is_size=not is_incomplete and _judge_size(call, real_tokens, sent, memo),
    )


def _read_sent(call: SentCall, memo: Memo) -> _SentRequest:
    """Returns the request as it was sent: callbacks after the guard may edit it.

    It is the request as the guard left it in three cases: the request no longer exists,
    a cache of the provider has a part of it, or nobody has edited its contents.
    """
    remembered = _SentRequest(
        call.sent_contents, call.sent_config, call.heuristic_tokens
    )
    request = call.request()
    if request is None:
        return remembered
    if request.config.cached_content:
        # ADK's Gemini class has taken out the contents that the cache holds.
        return remembered

    contents = request.contents
    is_same_length = len(contents) == len(call.sent_contents)
    pairs = zip(contents, call.sent_contents, strict=False)
    if is_same_length and all(present is sent for present, sent in pairs):
        return remembered

    config_tokens = estimate_config_tokens(request.config)
    tokens = memo.estimate_tokens(contents) + config_tokens
    return _SentRequest(contents, request.config, tokens)


def _judge_size(
    call: SentCall, real_tokens: int, sent: _SentRequest, memo: Memo
) -> bool:
    """Returns whether a count is the size of one request, and remembers its ratio.

    There are four cases, in this order:
    - The count exceeds the stated window: it is no size, unless the guard observes.
    - The provider has cached a part of the request: the count includes the cache, which
      no estimate covers, so it is believed.
    - The count is near enough to the estimate: it is believed.
    - The count is far above the estimate, so it may be the sum of several requests. It
      is believed if it repeats the count before.
    """
    window_tokens = call.stated_window_tokens
    is_above_window = bool(window_tokens) and real_tokens > window_tokens
    if is_above_window and not call.is_observed:
        return False
    if sent.config is not None and sent.config.cached_content:
        return True

    seen = call.memory.facts.of(call.model)
    counted_tokens = max(0, real_tokens - _TEMPLATE_TOKENS)
    estimated_tokens = _estimate_sent(sent, counted_tokens, memo)
    ratio = counted_tokens / estimated_tokens
    is_first = not seen.lowest_ratio
    if is_first:
        most_ratio = _MOST_RATIO
        lowest_ratio = ratio
    else:
        most_ratio = max(1.0, seen.lowest_ratio) * _USUAL_RATIO
        lowest_ratio = min(ratio, seen.lowest_ratio)

    if ratio <= most_ratio:
        believed = replace(seen, doubted=NOT_DOUBTED, lowest_ratio=lowest_ratio)
        call.memory.see(call.model, believed)
        return True

    doubted = DoubtedCount(ratio, excess_tokens=counted_tokens - estimated_tokens)
    call.memory.see(call.model, replace(seen, doubted=doubted))
    return _is_repeated(doubted, before=seen.doubted)


def _estimate_sent(sent: _SentRequest, counted_tokens: int, memo: Memo) -> int:
    """Estimates a request, in tokens.

    The estimate is bytes / 4, and at least 1. If the count is far higher, the estimate
    of the whole request is made, which takes more time.
    """
    if counted_tokens <= sent.heuristic_tokens * _USUAL_RATIO:
        return max(1, sent.heuristic_tokens)

    request = MeasuredRequest(sent.contents, sent.heuristic_tokens, sent.config, memo)
    return estimate_prompt_tokens(request)


def _is_repeated(doubted: DoubtedCount, before: DoubtedCount) -> bool:
    """Returns whether a doubted count repeats the doubted count before it.

    There are two ways to repeat it:
    - By the same ratio, up to 5: the vocabulary takes more tokens for a script.
    - By the same excess: a gateway adds the same tokens to all requests.
    """
    has_same_ratio = _is_near(doubted.ratio, before.ratio, _SAME_RATIO)
    if has_same_ratio and doubted.ratio <= _MOST_RATIO:
        return True
    return _is_near(doubted.excess_tokens, before.excess_tokens, _SAME_EXCESS)


def _is_near(value: float, before: float, max_difference: float) -> bool:
    """Returns whether a value differs from the value before by less than a part of it.

    A value of 0 before stands for no value: then nothing is near it.
    """
    return before != 0 and abs(value / before - 1) < max_difference


def _note_count(event: Answered, count: Count) -> None:
    """Stores a count, and forgets the call's contents: no recovery needs them now.

    A count that is not a request's size clears the stored one.
    """
    call = event.call
    memory = call.memory
    real_tokens = count.real_tokens
    cached_ratio = event.usage.cached_tokens / real_tokens
    memory.facts = replace(memory.facts, cached_ratio=cached_ratio)
    call.release()
    if not count.is_size:
        # The stored count may be wrong as well, so it is removed.
        event.state.write("real_tokens", None)
        return

    accepted = event.guard.accepted
    if real_tokens > accepted.get(call.client, 0):
        accepted[call.client] = real_tokens

    seen = memory.facts.of(call.model)
    counted = replace(
        seen,
        accepted_tokens=max(real_tokens, seen.accepted_tokens),
        counted=CountedRequest(real_tokens, count.heuristic_tokens),
    )
    memory.see(call.model, counted)
    memory.facts = replace(memory.facts, counting_model=call.model)
    event.state.write("real_tokens", real_tokens)
    event.state.write("last_heuristic", count.heuristic_tokens)


def _describe(event: Answered) -> CallRecord:
    """Returns the record of a call, with the summary calls that preceded it."""
    call = event.call
    guard = event.guard
    usage = event.usage

    costs = resolve_costs(call.model, guard.settings.prices, guard.registry)
    summary_usage, summary_cost = call.memory.pop_summary_costs()
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
    """Warns of large requests of a run that had no answer at all."""
    run.forget_delivered()
    for (agent, _), call in run.calls.items():
        is_large = call.estimated_tokens >= _LARGE_RATIO * call.window_tokens
        if is_large and not call.is_answered:
            logger.warning(
                "The model of agent %r answered nothing, not even usage, to a request "
                "of about %d tokens; its window is %d. Some servers do so instead of "
                "rejecting what is too long; %s.",
                agent,
                call.estimated_tokens,
                call.window_tokens,
                call.origin.place,
            )
