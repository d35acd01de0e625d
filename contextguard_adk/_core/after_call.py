"""Records a model's answer: stores the provider's count of tokens, reports the call.

A provider's count of the prompt is not always the size of one request: the count may
leave out cached tokens, or be the sum of several requests. So each count is compared
with the guard's own figures of the request. Heuristic tokens are the bytes of the
request / 4. The ratio of a count is the count divided by an estimate of the request.
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
from contextguard_adk._core.limits import forget_exceeded
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

# A count below this part of the heuristic tokens leaves out cached or truncated text,
# unless media or a script explain the count: a text takes 0.42 tokens per heuristic
# token in Georgian, and 0.45 in Hindi.
_LEAST_RATIO = 0.5

# A low count of a request up to this many heuristic tokens is no sign of missing text.
_MOST_UNCHECKED_TOKENS = 4_000

# The first count of a model is believed up to this ratio. Some vocabularies have such a
# ratio for some scripts.
_MOST_FIRST_RATIO = 5.0

# Each later count is believed up to this number times the lowest believed ratio of the
# model. A lowest ratio below 1 counts as 1.
_MOST_GROWTH_OF_RATIO = 2.5

# A server adds the tokens of a chat template to the prompt: at most this many.
_TEMPLATE_TOKENS = 500

# A count with a higher ratio is believed if it repeats the doubted count before it: if
# the two ratios differ by less than 10 %, or if the two excesses differ by less than
# 3 %. The excess of a count is the count less the estimate of its request.
_SAME_RATIO = 0.1
_SAME_EXCESS = 0.03

# A request that fills this part of the window is large. If a large request has no
# answer, a server may have found the request too long. The part is low because the
# estimate may be low: if a server streams no usage, LiteLLM counts the tokens itself,
# and was seen to find only 40 % of them.
_LARGE_RATIO = 0.4


class _SentRequest(NamedTuple):
    """A request as callbacks after the guard have left it, and its heuristic tokens."""

    contents: Sequence[types.Content]
    config: types.GenerateContentConfig | None
    heuristic_tokens: int


async def record_answer(
    guard: Guard, context: CallbackContext, response: LlmResponse, plugin: BasePlugin
) -> None:
    """Stores the provider's count, if there is one, and reports the call once.

    The plugin calls this for each response of the model. A streamed answer has several
    responses, and a partial response has only a piece of the answer.

    Args:
        guard: The memory of the plugin.
        context: The context of ADK's callback.
        response: The response.
        plugin: The plugin whose callback ADK calls.
    """
    run = guard.run(context.get_invocation_context())
    call = run.calls.get(call_key(context))
    if call is None:
        # The guard did not see the request.
        return

    real_tokens = _read_prompt_tokens(response)
    has_content = response.content is not None and bool(response.content.parts)
    if real_tokens is not None or has_content:
        call.is_answered = True
    if response.partial:
        # Listeners are told of whole responses only.
        return

    # `_record_response` may make the call forget this function.
    begin_summary = call.after_answer
    answer = _record_response(guard, context, call, response, plugin)
    if call.is_reported:
        # A stream may have several whole responses, but the call is reported once.
        return

    call.is_reported = True
    if begin_summary is not None and call.is_answered:
        begin_summary(real_tokens or call.estimated_tokens)
    await _report(answer)


def _read_prompt_tokens(response: LlmResponse) -> int | None:
    """Returns the provider's count of the prompt; None if it counted nothing."""
    usage = response.usage_metadata
    if usage is None:
        return None
    # A count of 0 stands for no count.
    return read_tokens(usage.prompt_token_count) or None


def _record_response(
    guard: Guard,
    context: CallbackContext,
    call: SentCall,
    response: LlmResponse,
    plugin: BasePlugin,
) -> Answered:
    """Tells the listeners of a whole response, and stores its count if it has one.

    The arguments are those of `record_answer`, and the guard's record of the call.

    Returns:
        The answer as the listeners were told of it.
    """
    invocation = context.get_invocation_context()
    run = guard.run(invocation)
    real_tokens = _read_prompt_tokens(response)
    count: Count | None = None
    if real_tokens is not None:
        count = _weigh_count(call, real_tokens, run.memo(invocation))

    answer = Answered(
        guard=guard,
        context=context,
        run=run,
        call=call,
        response=response,
        real_tokens=real_tokens,
        count=count,
        state=guard.state(context),
        may_lose_event=_may_lose_events(context, plugin),
    )
    for listener in _listeners.ANSWERED:
        if listener.is_on(guard):
            with log_failures(logger, f"{type(listener).__name__} failed"):
                listener.answered(answer)
    forget_exceeded(answer)
    if count is not None:
        _store_count(answer, count)

    if answer.may_lose_event:
        # Usually the guard adds its values of session state to ADK's event. If another
        # plugin may keep this event from the guard, ADK gets the values here.
        _, scope = call_key(context)
        context.state.update(run.writes.give_once(scope, invocation.session.state))
    return answer


async def _report(answer: Answered) -> None:
    """Reports an answered call to three receivers.

    They are the metadata of ADK's next event, the log, and the user's `on_call`.
    """
    record = _describe(answer)
    # The response does not carry the record, because a plugin may hand out the same
    # response again.
    key = call_key(answer.context)
    answer.run.describe(key, METADATA_KEY, describe_call(record))
    logger.debug(
        "Agent %r: about %d tokens were sent, %s counted, window %d.",
        record.agent,
        record.estimated_tokens,
        answer.real_tokens,
        record.window_tokens,
    )
    await answer.guard.observers.tell(record)


def _may_lose_events(context: CallbackContext, plugin: BasePlugin) -> bool:
    """Returns whether another plugin may keep ADK's events from this plugin.

    ADK hands an event to the plugins in order, until a plugin returns an event. So an
    earlier plugin with an `on_event_callback` of its own may keep events.
    """
    plugins = context.get_invocation_context().plugin_manager.plugins
    base_method = BasePlugin.on_event_callback
    earlier = itertools.takewhile(lambda each: each is not plugin, plugins)
    return any(type(each).on_event_callback is not base_method for each in earlier)


def _weigh_count(call: SentCall, real_tokens: int, memo: Memo) -> Count | None:
    """Compares a count with the request that was sent.

    A count that leaves something out is not the size of the request. Any other count is
    compared with earlier counts of the model as well.

    Returns:
        The count with the guard's own figures; None if a count of this call was stored
        before.
    """
    if not call.sent_contents:
        # `_store_count` has made the call forget its contents.
        return None

    sent = _read_sent(call, memo)
    media_tokens = media_bytes(sent.contents) // 4

    # Media may take far fewer tokens than their bytes / 4, and a text in some scripts
    # may take fewer by `script_tokens`. A count that is low even without these tokens
    # is incomplete. The scripts take time, so they are read for a low count only.
    is_low = real_tokens < sent.heuristic_tokens * _LEAST_RATIO
    is_incomplete = False
    if is_low and sent.heuristic_tokens > _MOST_UNCHECKED_TOKENS:
        script_tokens = request_script_discount(sent.contents, sent.config, memo)
        other_tokens = sent.heuristic_tokens - (media_tokens + script_tokens)
        is_incomplete = real_tokens < other_tokens * _LEAST_RATIO

    is_size = False
    if not is_incomplete:
        is_size = _check_and_note_size(call, real_tokens, sent, memo)
    return Count(
        real_tokens=real_tokens,
        heuristic_tokens=sent.heuristic_tokens,
        text_tokens=sent.heuristic_tokens - media_tokens,
        is_size=is_size,
    )


def _read_sent(call: SentCall, memo: Memo) -> _SentRequest:
    """Returns the request as it was sent, measured again if its contents were edited.

    Callbacks after the guard may edit the contents. If they have not done so, or if the
    sent request is not at hand, the result is the request as the guard has left it.
    """
    left_by_guard = _SentRequest(
        call.sent_contents, call.sent_config, call.heuristic_tokens
    )
    request = call.request()
    if request is None:
        # ADK has forgotten the request.
        return left_by_guard
    if request.config.cached_content:
        # ADK's Gemini class has taken out the contents that the cache holds.
        return left_by_guard

    contents = request.contents
    ids = [id(content) for content in contents]
    is_unedited = ids == [id(content) for content in call.sent_contents]
    if is_unedited:
        return left_by_guard

    config_tokens = estimate_config_tokens(request.config)
    heuristic_tokens = memo.estimate_tokens(contents) + config_tokens
    return _SentRequest(contents, request.config, heuristic_tokens)


def _check_and_note_size(
    call: SentCall, real_tokens: int, sent: _SentRequest, memo: Memo
) -> bool:
    """Returns whether a count is the size of one request, and not of several.

    The ratio of the count is remembered, unless the count is above the window, or
    includes a cache.
    """
    # A window of 0 is unknown.
    window_tokens = call.stated_window_tokens
    is_above_window = window_tokens > 0 and real_tokens > window_tokens
    if is_above_window and not call.is_observed:
        # The guard keeps each request below the window, so the count is a sum.
        return False
    if sent.config is not None and sent.config.cached_content:
        # The count includes a cache of the provider, which no estimate covers.
        return True

    counted_tokens = max(0, real_tokens - _TEMPLATE_TOKENS)
    estimated_tokens = _estimate_sent(sent, counted_tokens, memo)
    return _note_ratio(call, counted_tokens, estimated_tokens)


def _note_ratio(call: SentCall, counted_tokens: int, estimated_tokens: int) -> bool:
    """Remembers the ratio of a count to the estimate of its request.

    Returns:
        Whether the count is believed to be that of one request. A count with too high a
        ratio is doubted: it may be the sum of several requests. A doubted count is
        believed only if it repeats the doubted count before it.
    """
    seen = call.memory.facts.of(call.model)
    ratio = counted_tokens / estimated_tokens
    has_believed_before = seen.lowest_ratio > 0
    if not has_believed_before:
        most_ratio = _MOST_FIRST_RATIO
        lowest_ratio = ratio
    else:
        most_ratio = max(1.0, seen.lowest_ratio) * _MOST_GROWTH_OF_RATIO
        lowest_ratio = min(ratio, seen.lowest_ratio)

    if ratio <= most_ratio:
        believed = replace(seen, doubted=NOT_DOUBTED, lowest_ratio=lowest_ratio)
        call.memory.remember_seen(call.model, believed)
        return True

    doubted = DoubtedCount(ratio, excess_tokens=counted_tokens - estimated_tokens)
    call.memory.remember_seen(call.model, replace(seen, doubted=doubted))
    return _is_repeated(doubted, before=seen.doubted)


def _estimate_sent(sent: _SentRequest, counted_tokens: int, memo: Memo) -> int:
    """Estimates a request, to compare a count with it; the result is at least 1."""
    is_near = counted_tokens <= sent.heuristic_tokens * _MOST_GROWTH_OF_RATIO
    if is_near:
        # `_note_ratio` believes such a count of any model. A better estimate takes more
        # time, and would not change that.
        return max(1, sent.heuristic_tokens)

    request = MeasuredRequest(sent.contents, sent.heuristic_tokens, sent.config, memo)
    return estimate_prompt_tokens(request)


def _is_repeated(doubted: DoubtedCount, before: DoubtedCount) -> bool:
    """Returns whether a doubted count repeats the doubted count before it.

    Args:
        doubted: The count.
        before: The count before it; `NOT_DOUBTED`, which nothing repeats, if that count
            was not doubted.
    """
    has_same_ratio = _is_near(doubted.ratio, before.ratio, _SAME_RATIO)
    if has_same_ratio and doubted.ratio <= _MOST_FIRST_RATIO:
        # A vocabulary may take this many tokens for a script, in each request.
        return True

    # A gateway may add the same number of tokens to each request.
    return _is_near(doubted.excess_tokens, before.excess_tokens, _SAME_EXCESS)


def _is_near(value: float, before: float, max_difference: float) -> bool:
    """Returns whether a value differs from the value before by less than a part of it.

    For example, 105 is near 100 if `max_difference` is 0.1. Nothing is near 0, which
    stands for no value.
    """
    return before != 0 and abs(value / before - 1) < max_difference


def _store_count(answer: Answered, count: Count) -> None:
    """Stores a count in session state and in the memory of the process.

    A count that is not the size of one request is not stored, and removes the stored
    count from session state.
    """
    call = answer.call
    memory = call.memory
    # A count is never 0, see `_read_prompt_tokens`.
    real_tokens = count.real_tokens
    cached_ratio = answer.usage.cached_tokens / real_tokens
    memory.facts = replace(memory.facts, cached_ratio=cached_ratio)
    # The call is answered, so no recovery needs its contents.
    call.release()
    if not count.is_size:
        # The count before may be wrong for the same reason.
        answer.state.write("real_tokens", None)
        return

    # The largest accepted prompt is kept for all sessions by `server_key`, and for this
    # agent in its session by the name of the model.
    largest_accepted = answer.guard.accepted
    if real_tokens > largest_accepted.get(call.server_key, 0):
        largest_accepted[call.server_key] = real_tokens

    seen = memory.facts.of(call.model)
    counted = replace(
        seen,
        accepted_tokens=max(real_tokens, seen.accepted_tokens),
        counted=CountedRequest(real_tokens, count.heuristic_tokens),
    )
    memory.remember_seen(call.model, counted)
    memory.facts = replace(memory.facts, counting_model=call.model)
    answer.state.write("real_tokens", real_tokens)
    answer.state.write("last_heuristic", count.heuristic_tokens)


def _describe(answer: Answered) -> CallRecord:
    """Returns the record of a call, with the costs of the summaries before the call.

    The memory forgets the costs of the summaries, so that no other record has them.
    """
    call = answer.call
    guard = answer.guard
    usage = answer.usage

    costs = resolve_costs(call.model, guard.settings.prices, guard.registry)
    summary_usage, summary_cost = call.memory.pop_summary_costs()
    return CallRecord(
        **vars(call.origin),
        estimated_tokens=call.estimated_tokens,
        real_tokens=answer.real_tokens,
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


def warn_of_silence(run: Run) -> None:
    """Warns of each model that was silent in a run.

    A model is silent if it answers a large request with neither content nor usage.
    """
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
