"""Sends a request again after its model call has failed, if that can help.

A resend can help if the request was too long (an `Overflow`), or if the provider
refused the form of its contents (a refusal). `Recovery` decides which requests are sent
then. A later callback is one that ADK calls after the guard, before the request is
sent: a callback of a later plugin or of the agent itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.genai import types

from contextguard_adk._core.call import Call
from contextguard_adk._core.look import estimate_least_tokens
from contextguard_adk._core.recover import Recovery, read_overflow
from contextguard_adk._history.fingerprints import fingerprint
from contextguard_adk._measuring.calibration import DEFAULT_CORRECTION
from contextguard_adk._measuring.tokens import Memo, estimate_config_tokens
from contextguard_adk._providers.clients import resolve_llm
from contextguard_adk._providers.overflow import Overflow
from contextguard_adk._providers.refusals import parse_refusal
from contextguard_adk._runtime.runs import Guard, SentCall, call_key
from contextguard_adk.strategies.base import Strategy

# The fields of a config that ADK's Gemini class changes for a cache of the provider.
_CACHED_FIELDS = ("cached_content", "system_instruction", "tools", "tool_config")


@dataclass(frozen=True)
class FailedCall:
    """A model call that has failed, with the values that ADK's callback gets.

    Attributes:
        plugin: The plugin whose callback ADK calls.
        context: The context of ADK's callback.
        request: The request, as all callbacks have left it.
        error: The error of the model's client.
    """

    plugin: BasePlugin
    context: CallbackContext
    request: LlmRequest
    error: Exception

    @property
    def invocation(self) -> InvocationContext:
        """The run of the call."""
        return self.context.get_invocation_context()


class _Problem(NamedTuple):
    """The reason why a provider did not accept a request.

    Attributes:
        overflow: The limits that the error names; None if the request was not too long.
        refusal: The kind of the refusal; "" if the form was not refused.
    """

    overflow: Overflow | None
    refusal: str


async def answer_error(
    guard: Guard, failed: FailedCall, strategy: Strategy | None
) -> LlmResponse | None:
    """Sends a failed request again if a smaller request or another form may help.

    Args:
        guard: The memory of the plugin.
        failed: The failed call.
        strategy: The strategy of the agent; None if the guard may change nothing.

    Returns:
        One of three outcomes:
        - The model's answer.
        - The error of a resend, as a response, if that error is of another kind.
        - None if nothing was sent again, or if no request was accepted. Then ADK raises
          the first error.
    """
    run = guard.run(failed.invocation)
    sent = run.calls.get(call_key(failed.context))
    if sent is not None:
        # A model that fails is not silent, see `warn_of_silence`.
        sent.is_answered = True

    problem = _read_problem(failed, sent)
    if strategy is not None and problem is not None:
        return await _send_again(guard, failed, strategy, sent, problem)

    if sent is not None:
        # The call is over, and nothing needs its contents any more.
        sent.release()
    return None


async def _send_again(
    guard: Guard,
    failed: FailedCall,
    strategy: Strategy,
    sent: SentCall | None,
    problem: _Problem,
) -> LlmResponse | None:
    """Sends a request again, smaller or in another form.

    Args:
        guard: The memory of the plugin.
        failed: The failed call.
        strategy: The strategy of the agent.
        sent: The guard's record of the call; None if the guard did not see the request.
        problem: The reason why the request was not accepted.

    Returns:
        The same as `answer_error`.
    """
    invocation = failed.invocation
    llm = await resolve_llm(invocation)
    if llm is None:
        # The client of the model is unknown, so nobody can be asked.
        return None

    run = guard.run(invocation)
    key = call_key(failed.context)
    # The run forgets the failed call. A recovery puts the record back below.
    run.calls.pop(key, None)
    if sent is None:
        sent = _measure_unseen(failed.request, run.memo(invocation))

    restored = _restore_requests(sent, failed)
    call = Call(guard, failed.context, restored.original, strategy)
    call.asked_model = sent.model
    recovery = Recovery(call, sent, restored.rejected, llm)

    if restored.may_be_masked:
        # A resend could show the model a text that a callback has hidden. But a limit
        # that the error names is remembered, so that the next request fits.
        if problem.overflow is not None:
            recovery.bound_next(problem.overflow)
        return None

    # ADK may call this function while Python handles the rejection. Then each error
    # that is raised here would have the rejection as its `__context__`, and would be
    # read as another rejection. An error in a new task has no such context.
    resending = recovery.recover(problem.overflow, problem.refusal)
    answer = await asyncio.create_task(resending)
    if sent.is_recovered:
        # The callback for answers needs the record of the call.
        run.calls[key] = sent
        return answer

    # The agent's own error callbacks may turn the first error into an answer. ADK asks
    # these callbacks only if the plugin returns None.
    return None if _has_error_callbacks(invocation) else answer


def _has_error_callbacks(invocation: InvocationContext) -> bool:
    """Returns whether the agent of a run has callbacks for errors of its model."""
    agent = invocation.agent
    return bool(getattr(agent, "canonical_on_model_error_callbacks", None))


def _read_problem(failed: FailedCall, sent: SentCall | None) -> _Problem | None:
    """Reads from an error why a request was not accepted.

    Returns:
        None if the request was not too long, and its form was not refused.
    """
    overflow = _read_own_overflow(failed.error, failed.request, sent)
    refusal = parse_refusal(failed.error, failed.request.contents)
    if overflow is None and not refusal:
        return None
    return _Problem(overflow, refusal)


def _read_own_overflow(
    error: Exception, request: LlmRequest, sent: SentCall | None
) -> Overflow | None:
    """Reads from an error that a request was too long by itself.

    A request may exceed a rate limit only together with other requests. Then a shorter
    request would not help.

    Args:
        error: The error of the model's client.
        request: The request, as all callbacks have left it.
        sent: The guard's record of the call; None if the guard did not see the request.

    Returns:
        The limits that the error names; None if the error does not say that the request
        was too long by itself.
    """
    if sent is None:
        return read_overflow(error, request, sent_tokens=0)

    # The estimate is compared with a rate limit if the error names no size.
    seen = sent.memory.facts.of(sent.model)
    if seen.counted is not None:
        sent_tokens = estimate_least_tokens(seen, sent.heuristic_tokens)
    else:
        # Without a count, `estimate_least_tokens` would return half of this number. A
        # request above a rate limit would then often seem to be below it.
        sent_tokens = sent.heuristic_tokens
    overflow = read_overflow(error, request, sent_tokens)
    if overflow is None:
        return None

    is_size_named = overflow.prompt_tokens is not None
    if not overflow.period or is_size_named:
        return overflow

    # The estimate may be above a rate limit although the request is not: tokens that a
    # cache serves do not count. If the model has accepted a prompt above the limit
    # before, the request is not taken to be too long by itself.
    limit_tokens = overflow.limit_tokens or 0
    return overflow if seen.accepted_tokens <= limit_tokens else None


class _Restored(NamedTuple):
    """A rejected request, before and after the guard had changed it.

    Attributes:
        original: The request before the guard changed it, with the contents that later
            callbacks have added. It is `rejected` itself if it cannot be restored.
        rejected: The request that the provider was sent, with all contents that a cache
            of the provider holds.
        may_be_masked: Whether a later callback may have masked contents that only the
            cache holds now. Then both requests lack the contents of the cache, and
            nothing may be sent again.
    """

    original: LlmRequest
    rejected: LlmRequest
    may_be_masked: bool = False


def _restore_requests(sent: SentCall, failed: FailedCall) -> _Restored:
    """Returns a rejected request as it was before and after the guard changed it.

    If a cache of the provider holds the instruction, the tools and the first contents,
    ADK's Gemini class has taken them out of the request. Here they are put back.
    """
    rejected = failed.request
    is_cached = _was_cached_later(sent, rejected)
    if is_cached and _may_be_masked(sent, failed):
        return _Restored(rejected, rejected, may_be_masked=True)

    added = _find_added(sent, rejected)
    if not added.is_complete and not is_cached:
        # A later callback may have replaced contents to mask them. The contents from
        # before that callback must not be sent. With a cache, contents are missing
        # because the cache holds them, and no callback has replaced any.
        return _Restored(rejected, rejected)

    config = _uncache(sent, rejected.config) if is_cached else rejected.config
    update = {"config": config.model_copy()}
    original_update = {**update, "contents": [*sent.original_contents, *added.contents]}
    rejected_update = {**update, "contents": [*sent.sent_contents, *added.contents]}
    return _Restored(
        original=rejected.model_copy(update=original_update),
        rejected=rejected.model_copy(update=rejected_update),
    )


def _was_cached_later(sent: SentCall, rejected: LlmRequest) -> bool:
    """Returns whether a cache has replaced a part of a request after the guard.

    ADK's Gemini class puts the provider's cache in place when it sends a request.
    """
    if sent.sent_config is None:
        # There is no config to compare with.
        return False
    if sent.sent_config.cached_content:
        # The cache is one that the app has made, and it was there before the guard.
        return False
    return bool(rejected.config.cached_content)


def _may_be_masked(sent: SentCall, failed: FailedCall) -> bool:
    """Returns whether a later callback may have changed contents that a cache holds.

    ADK's Gemini class has taken these contents out of the failed request, so that they
    cannot be compared with the contents that the guard has sent.
    """
    invocation = failed.invocation
    has_own_callbacks = getattr(
        invocation.agent, "canonical_before_model_callbacks", None
    )
    is_last_plugin = invocation.plugin_manager.plugins[-1] is failed.plugin
    if has_own_callbacks or not is_last_plugin:
        return True

    # There is no later callback. Still, the contents beside the cache have to be the
    # last contents that the guard has sent. Nobody has copied them, so they have to be
    # the same objects.
    uncached = failed.request.contents
    if not uncached:
        # A cache never holds the last content, so something else has removed it.
        return bool(sent.sent_contents)
    last_sent = sent.sent_contents[-len(uncached) :]
    last_sent_ids = {id(content) for content in last_sent}
    return {id(content) for content in uncached} != last_sent_ids


class _Added(NamedTuple):
    """The contents that later callbacks have added to a request.

    Attributes:
        contents: The added contents.
        is_complete: Whether the request still has all contents that the guard sent.
    """

    contents: list[types.Content]
    is_complete: bool


def _find_added(sent: SentCall, rejected: LlmRequest) -> _Added:
    """Returns the contents that later callbacks have added to a rejected request.

    A content of the rejected request does not count as added in two cases:

    - If the guard has sent the content. Such a content is recognized by its
      fingerprint, because a callback may have copied it.
    - If the content is an object of the request before the guard changed it. Such a
      content was taken out by the guard, and put back by a callback. An equal content
      counts as added, because it may be a new message with the same words.
    """
    # How many times each content is still to be found among the rejected contents.
    missing = Counter(fingerprint(content) for content in sent.sent_contents)
    original_ids = {id(content) for content in sent.original_contents}
    added: list[types.Content] = []
    for content in rejected.contents:
        name = fingerprint(content)
        is_original = id(content) in original_ids
        if missing[name] > 0:
            missing[name] -= 1
        elif not is_original:
            added.append(content)

    return _Added(added, is_complete=missing.total() == 0)


def _uncache(
    sent: SentCall, config: types.GenerateContentConfig
) -> types.GenerateContentConfig:
    """Returns a config with the fields of the sent config that a cache has replaced."""
    return config.model_copy(
        update={name: getattr(sent.sent_config, name) for name in _CACHED_FIELDS}
    )


def _measure_unseen(request: LlmRequest, memo: Memo) -> SentCall:
    """Returns a record of a request that the guard did not see before it was sent.

    Nobody knows a window, so the request itself counts as one.
    """
    heuristic_tokens = estimate_config_tokens(request.config)
    heuristic_tokens += memo.estimate_tokens(request.contents)
    estimated_tokens = int(heuristic_tokens * DEFAULT_CORRECTION)
    contents = tuple(request.contents)
    return SentCall(
        heuristic_tokens=heuristic_tokens,
        estimated_tokens=estimated_tokens,
        window_tokens=estimated_tokens,
        model=request.model or "",
        original_contents=contents,
        sent_contents=contents,
    )
