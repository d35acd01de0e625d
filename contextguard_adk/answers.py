"""What is done with a model's answer: its token count is stored, the call reported."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from google.adk.models.llm_response import LlmResponse

from contextguard_adk.measuring.calibration import request_script_discount
from contextguard_adk.measuring.tokens import Memo
from contextguard_adk.memory import CallInFlight, call_key
from contextguard_adk.telemetry import (
    METADATA_KEY,
    CallRecord,
    describe_call,
    report_call,
    warn_once,
)

if TYPE_CHECKING:
    from google.adk.agents.callback_context import CallbackContext

    from contextguard_adk.guard import Guard

logger = logging.getLogger("contextguard_adk.answers")

# Of what the text takes; a count below it means that the server cut the prompt. Text
# takes bytes / 4 less what its scripts may: Georgian 0.42 of bytes / 4, Hindi 0.45.
_TRUNCATION_RATIO = 0.5


async def take_answer(
    guard: Guard, context: CallbackContext, response: LlmResponse
) -> None:
    """Stores what the provider counted, if it did, and reports the call once."""
    key = call_key(context)
    call = guard.memory.calls.get(key)
    if call is None:
        return
    usage = response.usage_metadata
    real = (usage.prompt_token_count if usage else None) or None
    if real or (response.content and response.content.parts):
        call.is_answered = True
    if response.partial:
        return
    if usage and real:
        memo = guard.memory.memo(context.get_invocation_context(), key)
        if call.sent_contents and _is_truncated(call, real, memo):
            _warn_truncation(context.agent_name, call.window_tokens)
        call.session.cached_ratio = (usage.cached_content_token_count or 0) / real
        state = guard.state(context)
        state.write("real_tokens", real)
        state.write("last_heuristic", call.heuristic_tokens)
    call.release()  # A recovery needs the contents no more.
    if call.is_reported:
        return
    call.is_reported = True
    record = CallRecord(
        agent=context.agent_name,
        session_id=context.get_invocation_context().session.id,
        estimated_tokens=call.estimated_tokens,
        real_tokens=real,
        window_tokens=call.window_tokens,
        threshold_tokens=call.threshold_tokens,
        pressure=call.estimated_tokens / call.window_tokens,
        is_recovered=call.is_recovered,
        compaction=call.compaction,
    )
    described = {METADATA_KEY: describe_call(record)}
    response.custom_metadata = {**(response.custom_metadata or {}), **described}
    await report_call(record, guard.observers)


def _is_truncated(call: CallInFlight, real_tokens: int, memo: Memo) -> bool:
    """Whether the provider counted too little for all that was sent."""
    suspect_tokens = call.heuristic_tokens * _TRUNCATION_RATIO
    if real_tokens >= suspect_tokens or suspect_tokens <= 2_000:
        return False
    discount_tokens = request_script_discount(
        call.sent_contents, call.sent_config, memo.measure_part
    )
    return real_tokens < suspect_tokens - discount_tokens * _TRUNCATION_RATIO


def _warn_truncation(agent: str, window_tokens: int) -> None:
    message = (
        "The provider counted far fewer prompt tokens for agent %r than were sent: it "
        "seems to truncate silently. Its real window may be smaller than the "
        f"{window_tokens} tokens assumed; set `context_window`."
    )
    warn_once(logger, message, agent)


def end_run(guard: Guard, invocation_id: str) -> None:
    """Forgets the model calls of a run; reports those that came to nothing."""
    for key, call in guard.memory.end_run(invocation_id):
        # Where a server streams no usage, LiteLLM was seen to find 40 % of the tokens.
        suspect_tokens = 0.4 * call.window_tokens
        if not call.is_answered and call.estimated_tokens >= suspect_tokens:
            logger.warning(
                "The model of agent %r answered nothing, not even usage, to a request "
                "of about %d tokens; its window is %d. Some servers do so instead of "
                "rejecting what is too long.",
                key[2],
                call.estimated_tokens,
                call.window_tokens,
            )
