"""Handles a failed model call: a request that can be mended is sent again."""

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
from contextguard_adk._core.look import least_tokens
from contextguard_adk._core.recover import Recovery, read_overflow
from contextguard_adk._history.fingerprints import fingerprint
from contextguard_adk._measuring.calibration import DEFAULT_CORRECTION
from contextguard_adk._measuring.tokens import Memo, estimate_config_tokens
from contextguard_adk._providers.clients import resolve_llm
from contextguard_adk._providers.overflow import Overflow
from contextguard_adk._providers.refusals import parse_refusal
from contextguard_adk._runtime.runs import Guard, SentCall, call_key
from contextguard_adk.strategies.base import Strategy


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


async def answer_error(
    guard: Guard, failed: FailedCall, strategy: Strategy | None
) -> LlmResponse | None:
    """Sends a failed request again if that can help.

    Args:
        guard: The memory of the plugin.
        failed: The failed call.
        strategy: The strategy of the agent; None if the guard may change nothing.

    Returns:
        The model's answer, or another error as a response. It is None, and ADK raises
        the first error, in these cases:
        - The request was not too long, and its form was not refused.
        - The guard may change nothing.
        - The client of the model is unknown.
        - A later callback may have masked a part of the request.
        - The provider refused every smaller request, or every other form.
        - No request was accepted, and the agent has error callbacks of its own.
    """
    context = failed.context
    request = failed.request
    invocation = context.get_invocation_context()
    run = guard.run(invocation)
    key = call_key(context)
    sent = run.calls.get(key)  # None if the guard did not see the request.
    if sent is not None:
        sent.is_answered = True

    overflow = _read_overflow(failed.error, request, sent)
    refusal = parse_refusal(failed.error, request.contents)
    if strategy is None or not (overflow or refusal):
        if sent is not None:
            sent.release()
        return None

    llm = await resolve_llm(invocation)
    if llm is None:
        return None

    # Unless the model answers in the end, the run forgets the call.
    run.calls.pop(key, None)
    if sent is None:
        sent = measure_sent(request, run.memo(invocation))
    restored = restore_requests(sent, request, invocation, failed.plugin)
    call = Call(guard, context, restored.original, strategy)
    call.asked_model = sent.model
    recovery = Recovery(call, sent, restored.rejected, llm)
    if restored.may_be_masked:
        if overflow:  # The next request has to fit.
            recovery.learn(overflow)
        return None

    # If this is called while Python handles the rejection, an error that is raised here
    # has the rejection as its `__context__`, and would be read as another rejection.
    # A task has no such context.
    answer = await asyncio.create_task(recovery.recover(overflow, refusal))
    if sent.is_recovered:
        run.calls[key] = sent
        return answer

    # If the agent has error callbacks of its own, they may have an answer that is no
    # error. ADK calls them only if the plugin returns None.
    callbacks_name = "canonical_on_model_error_callbacks"
    has_own_callbacks = bool(getattr(invocation.agent, callbacks_name, None))
    return None if has_own_callbacks else answer


def _read_overflow(
    error: Exception, request: LlmRequest, sent: SentCall | None
) -> Overflow | None:
    """Reads from an error how far a request was too long for a window or a rate limit.

    Args:
        error: The error of the model's client.
        request: The request, as all callbacks have left it.
        sent: The guard's record of the call; None if it did not see the request.

    Returns:
        None in two cases: the error does not say that the request was too long, or the
        request exceeded a rate limit only together with other requests.
    """
    if sent is None:
        return read_overflow(error, request, 0)

    seen = sent.memory.facts.of(sent.model)
    if seen.counted is not None:
        sent_tokens = least_tokens(seen, sent.heuristic_tokens)
    else:
        sent_tokens = sent.heuristic_tokens
    overflow = read_overflow(error, request, sent_tokens)
    if overflow is None or not overflow.period or overflow.prompt_tokens is not None:
        return overflow

    # A rate limit does not count the tokens that a cache serves. If a larger prompt was
    # accepted, this one was not too long by itself.
    is_accepted = seen.accepted_tokens > (overflow.limit_tokens or 0)
    return None if is_accepted else overflow


class Restored(NamedTuple):
    """A rejected request, before and after the guard had changed it.

    Attributes:
        original: The request before the guard changed it.
        rejected: The request that the provider was sent.
        may_be_masked: Whether a later callback may have masked a part that is missing
            here. Then nothing is sent again.
    """

    original: LlmRequest
    rejected: LlmRequest
    may_be_masked: bool = False


def restore_requests(
    sent: SentCall, rejected: LlmRequest, run: InvocationContext, plugin: object
) -> Restored:
    """Returns a rejected request as it was before and after the guard changed it.

    Both forms hold what later callbacks have added. They also hold the instruction, the
    tools and the first messages, which ADK's Gemini class takes out of a request when a
    cache of the provider has them. Where a later callback has replaced messages, both
    forms are the rejected request: the new messages may be masked ones.
    """
    is_cached = _was_cached_later(sent, rejected)
    if is_cached and _may_be_masked(sent, rejected, run, plugin):
        return Restored(rejected, rejected, may_be_masked=True)

    added = _find_added(sent, rejected)
    if not (added.is_complete or is_cached):
        return Restored(rejected, rejected)

    config = _uncache(sent, rejected.config) if is_cached else rejected.config
    update = {"config": config.model_copy()}
    original_update = {**update, "contents": [*sent.original_contents, *added.contents]}
    rejected_update = {**update, "contents": [*sent.sent_contents, *added.contents]}
    return Restored(
        original=rejected.model_copy(update=original_update),
        rejected=rejected.model_copy(update=rejected_update),
    )


def _was_cached_later(sent: SentCall, rejected: LlmRequest) -> bool:
    """Whether the model's class has put a cache in place of a part of the request."""
    if sent.sent_config is None or sent.sent_config.cached_content:
        return False
    return bool(rejected.config.cached_content)


def _may_be_masked(
    sent: SentCall, rejected: LlmRequest, run: InvocationContext, plugin: object
) -> bool:
    """Whether a later callback may have changed the part that a cache holds."""
    if getattr(run.agent, "canonical_before_model_callbacks", None):
        return True
    if run.plugin_manager.plugins[-1] is not plugin:
        return True

    # A cache holds the first contents: the others must be the very last ones sent.
    last_sent = sent.sent_contents[-len(rejected.contents) :]
    last_sent_ids = {id(content) for content in last_sent}
    return {id(content) for content in rejected.contents} != last_sent_ids


class _Added(NamedTuple):
    """The contents that later callbacks have added to a request.

    Attributes:
        contents: The added contents.
        is_complete: Whether the request still has all contents that were sent.
    """

    contents: list[types.Content]
    is_complete: bool


def _find_added(sent: SentCall, rejected: LlmRequest) -> _Added:
    """Returns the contents that later callbacks have added to a rejected request.

    Contents are compared by their fingerprints, because an agent's own callback may
    have copied them.
    """
    missing = Counter(fingerprint(content) for content in sent.sent_contents)
    added: list[types.Content] = []
    for content in rejected.contents:
        digest = fingerprint(content)
        if missing[digest]:
            missing[digest] -= 1
        elif not any(content is original for original in sent.original_contents):
            added.append(content)

    return _Added(added, is_complete=missing.total() == 0)


def _uncache(
    sent: SentCall, config: types.GenerateContentConfig
) -> types.GenerateContentConfig:
    """Returns a config with the instruction and tools that a cache had replaced."""
    names = ("cached_content", "system_instruction", "tools", "tool_config")
    return config.model_copy(
        update={name: getattr(sent.sent_config, name) for name in names}
    )


def measure_sent(request: LlmRequest, memo: Memo) -> SentCall:
    """Describes a request that the guard did not see before it was sent."""
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
