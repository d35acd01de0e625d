"""What is done when a model call fails: a request that can be mended is sent again."""

from __future__ import annotations

import asyncio
from collections import Counter

from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin

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


async def answer_error(
    guard: Guard,
    context: CallbackContext,
    request: LlmRequest,
    error: Exception,
    strategy: Strategy | None,
    plugin: BasePlugin,
) -> LlmResponse | None:
    """Returns the answer to a request that was sent again; None for none.

    `strategy` is None where nothing is to be changed.
    """
    invocation = context.get_invocation_context()
    run = guard.run(invocation)
    key = call_key(context)
    if (sent := run.calls.get(key)) is not None:
        sent.is_answered = True
    overflow = _read_overflow(error, request, sent)
    refusal = parse_refusal(error, request.contents)
    if strategy is None or not (overflow or refusal):
        if sent is not None:
            sent.release()
        return None
    if (llm := await resolve_llm(invocation)) is None:
        return None
    sent = run.calls.pop(key, None) or measure_sent(request, run.memo(invocation))
    requests = restore_requests(sent, request, invocation, plugin)
    before, rejected = requests or (request, request)
    call = Call(guard, context, before, strategy)
    call.asked_model = sent.model
    recovery = Recovery(call, sent, rejected, llm)
    if requests is None:
        if overflow:  # The next request has to fit.
            recovery.learn(overflow)
        return None
    # In a task of its own: an error in there would else have the rejection
    # as its context, and be taken for another one.
    answer = await asyncio.create_task(recovery.recover(overflow, refusal))
    if sent.is_recovered:
        run.calls[key] = sent
        return answer
    # The agent's own callbacks may have an answer that is no error.
    names = "canonical_on_model_error_callbacks"
    return None if getattr(invocation.agent, names, None) else answer


def _read_overflow(
    error: Exception, request: LlmRequest, sent: SentCall | None
) -> Overflow | None:
    """Reads whether the request was too long, for its window or a rate limit."""
    if sent is None:
        return read_overflow(error, request, 0)
    seen = sent.memory.facts.of(sent.model)
    sent_tokens = sent.heuristic_tokens
    if seen.counted is not None:
        sent_tokens = least_tokens(seen, sent.heuristic_tokens)
    overflow = read_overflow(error, request, sent_tokens)
    if overflow is None or not overflow.period or overflow.prompt_tokens is not None:
        return overflow
    # Such limits do not count what a cache serves.
    is_accepted = seen.accepted_tokens > (overflow.limit_tokens or 0)
    return None if is_accepted else overflow


def restore_requests(
    sent: SentCall, rejected: LlmRequest, run: InvocationContext, plugin: object
) -> tuple[LlmRequest, LlmRequest] | None:
    """Returns the request before the guard changed it, and as it was rejected.

    Both are the rejected one where another callback has put other contents into it:
    they may be masked. Both hold what others have added, and what ADK's Gemini class
    has taken out because it is cached. None where later callbacks may have masked what
    was taken out: then nothing is sent again.
    """
    present = {id(content) for content in rejected.contents}
    config = rejected.config
    stripped = dict[str, object]()
    was_cached = sent.sent_config and sent.sent_config.cached_content
    if config.cached_content and sent.sent_config and not was_cached:
        tail = sent.sent_contents[-len(rejected.contents) :]
        masks = getattr(run.agent, "canonical_before_model_callbacks", None)
        is_last = run.plugin_manager.plugins[-1] is plugin
        if masks or not is_last or present != set(map(id, tail)):
            return None
        names = ("cached_content", "system_instruction", "tools", "tool_config")
        stripped = {name: getattr(sent.sent_config, name) for name in names}
    # By what they say: an agent's own callback may have copied them.
    missing = Counter(map(fingerprint, sent.sent_contents))
    added = []
    for content in rejected.contents:
        said = fingerprint(content)
        if missing[said]:
            missing[said] -= 1
        elif not any(content is original for original in sent.original_contents):
            added.append(content)
    if not stripped and missing.total():
        # Another callback has replaced or removed contents.
        return rejected, rejected
    update: dict[str, object] = {"config": config.model_copy(update=stripped)}
    before = update | {"contents": [*sent.original_contents, *added]}
    after = update | {"contents": [*sent.sent_contents, *added]}
    return rejected.model_copy(update=before), rejected.model_copy(update=after)


def measure_sent(request: LlmRequest, memo: Memo) -> SentCall:
    """Describes a request that the guard did not get to measure."""
    heuristic = estimate_config_tokens(request.config)
    heuristic += memo.estimate_tokens(request.contents)
    estimated = int(heuristic * DEFAULT_CORRECTION)
    contents = tuple(request.contents)
    model = request.model or ""
    return SentCall(
        heuristic_tokens=heuristic,
        estimated_tokens=estimated,
        window_tokens=estimated,
        model=model,
        original_contents=contents,
        sent_contents=contents,
    )
