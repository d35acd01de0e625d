"""Reads what the provider counted, and notices when it counted something odd."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from google.adk.models.llm_response import LlmResponse

from contextguard_adk.history.state import GuardState
from contextguard_adk.measuring.calibration import request_spare_tokens
from contextguard_adk.memory import CallInFlight, CallKey, Memory
from contextguard_adk.run_cache import RunCache
from contextguard_adk.telemetry import (
    METADATA_KEY,
    CallRecord,
    Observers,
    describe_call,
    report_call,
)

if TYPE_CHECKING:
    from google.adk.agents.callback_context import CallbackContext
    from google.adk.agents.invocation_context import InvocationContext

logger = logging.getLogger("contextguard_adk.usage")

TRUNCATION_RATIO = 0.5
"""A count this far below what the text takes means that the server cut the prompt.

It takes bytes / 4, less what its scripts may spare: o200k_base counts 0.42 of bytes / 4
for Georgian and 0.45 for Hindi.
"""

MIN_TRUNCATED_TOKENS = 2_000
"""Requests smaller than this are not suspected."""

SILENT_REFUSAL_RATIO = 0.4
"""Of the window; an empty answer to less is not suspected.

Where a server streams no usage, LiteLLM counts with a tokenizer of its own: on lists of
numbers it was seen to find 40 % of the tokens that SmolLM2 counts.
"""


def name_session(invocation: InvocationContext) -> str:
    """Names a session; its id alone does not, every user may have one of that id."""
    session = invocation.session
    return "\0".join((session.app_name, session.user_id, session.id))


def call_key(context: CallbackContext, invocation: InvocationContext) -> CallKey:
    """Identifies the model call that a callback speaks of."""
    return (
        name_session(invocation),
        context.invocation_id,
        context.agent_name,
        invocation.branch or "",
    )


def record_usage(
    context: CallbackContext,
    invocation: InvocationContext,
    response: LlmResponse,
    memory: Memory,
    is_namespaced: bool,
) -> None:
    """Stores the prompt tokens that the provider counted, with their heuristic.

    Partial chunks and answers without usage leave the stored pair alone: a
    correction is only ever taken from two numbers of the same call.
    """
    key = call_key(context, invocation)
    call = memory.calls.get(key)
    if call is None:
        return
    usage = response.usage_metadata
    real = usage.prompt_token_count if usage else None
    if real or (response.content and response.content.parts):
        call.is_answered = True
    if response.partial:
        return
    if (
        real
        and call.sent_contents
        and _is_truncated(call, real, memory.caches.get(key) or RunCache())
    ):
        _warn_truncation(context.agent_name, call.window_tokens)
    # A recovery needs them no more, and not every ADK tells when a run ends.
    call.original_contents = call.sent_contents = ()
    call.sent_config = None
    if not usage or not real:
        return
    if call.session_key:
        cached_ratio = (usage.cached_content_token_count or 0) / real
        memory.cached_ratios.put(call.session_key, cached_ratio)
    state = GuardState(context.state, context.agent_name, is_namespaced)
    state.write("real_tokens", real)
    state.write("last_heuristic", call.heuristic_tokens)


def _is_truncated(call: CallInFlight, real_tokens: int, cache: RunCache) -> bool:
    """Tells whether the provider counted too little for all that was sent."""
    suspect_tokens = call.heuristic_tokens * TRUNCATION_RATIO
    if real_tokens >= suspect_tokens or suspect_tokens <= MIN_TRUNCATED_TOKENS:
        return False
    spare_tokens = request_spare_tokens(
        call.sent_contents, call.sent_config, cache.measure_part
    )
    return real_tokens < suspect_tokens - spare_tokens * TRUNCATION_RATIO


async def report_answer(
    context: CallbackContext,
    invocation: InvocationContext,
    response: LlmResponse,
    memory: Memory,
    observers: Observers,
) -> None:
    """Says what a model call came to, once, with its first complete response.

    In short also to the response's `custom_metadata`, which ADK stores.
    """
    call = memory.calls.get(call_key(context, invocation))
    if call is None or call.is_reported or response.partial:
        return
    call.is_reported = True
    usage = response.usage_metadata
    record = CallRecord(
        agent=context.agent_name,
        session_id=invocation.session.id,
        estimated_tokens=call.estimated_tokens,
        real_tokens=(usage.prompt_token_count if usage else None) or None,
        window_tokens=call.window_tokens,
        threshold_tokens=call.threshold_tokens,
        pressure=call.estimated_tokens / call.window_tokens,
        is_recovered=call.is_recovered,
        compaction=call.compaction,
    )
    described = {METADATA_KEY: describe_call(record)}
    response.custom_metadata = {**(response.custom_metadata or {}), **described}
    await report_call(record, observers)


def finish_calls(is_finished: Callable[[CallKey], bool], memory: Memory) -> None:
    """Forgets the model calls of finished runs; reports those that came to nothing."""
    memory.caches.pop_where(is_finished)
    for key, call in memory.calls.pop_where(is_finished):
        suspect_tokens = SILENT_REFUSAL_RATIO * call.window_tokens
        if not call.is_answered and call.estimated_tokens >= suspect_tokens:
            logger.warning(
                "The model of agent %r answered nothing, not even usage, to a request "
                "of about %d tokens; its window is %d. Some servers do so instead of "
                "rejecting what is too long.",
                key[2],
                call.estimated_tokens,
                call.window_tokens,
            )


@functools.lru_cache(maxsize=256)
def _warn_truncation(agent: str, window_tokens: int) -> None:
    logger.warning(
        "The provider counted far fewer prompt tokens for agent %r than were sent: it "
        "seems to truncate silently. Its real window may be smaller than the %d tokens "
        "assumed; set `context_window`.",
        agent,
        window_tokens,
    )
