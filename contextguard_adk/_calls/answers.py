"""What is done with a model's answer: its token count is stored, the call reported."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin

from contextguard_adk._calls.limits import note_count
from contextguard_adk._history.pairs import parts_of
from contextguard_adk._history.thoughts import SEAL_KEY
from contextguard_adk._measuring.calibration import request_script_discount
from contextguard_adk._measuring.tokens import Memo, media_bytes
from contextguard_adk._memory import CallInFlight, Guard, Run, call_key
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._providers.costs import price_calls
from contextguard_adk._providers.windows import resolve_costs
from contextguard_adk.telemetry import CallRecord, describe_call, report_call

if TYPE_CHECKING:
    from google.adk.agents.callback_context import CallbackContext

logger = logging.getLogger("contextguard_adk.answers")

# Of what the text takes; a count below it means that the server cut the prompt. Text
# takes bytes / 4 less what its scripts may: Georgian 0.42 of bytes / 4, Hindi 0.45.
_TRUNCATION_RATIO = 0.5


async def take_answer(
    guard: Guard, context: CallbackContext, response: LlmResponse, plugin: BasePlugin
) -> None:
    """Stores what the provider counted, if it did, and reports the call once."""
    invocation = context.get_invocation_context()
    run, key = guard.memory.run(invocation), call_key(context)
    call = run.calls.get(key)
    if call is None:
        return
    usage = response.usage_metadata
    real = (usage.prompt_token_count if usage else None) or None
    if real or (response.content and response.content.parts):
        call.is_answered = True
    if response.partial:
        return
    write_ahead = call.write_ahead
    if call.sealed and (seal := call.sealed.seal(response.content)):
        run.seals[key] = seal
    if usage and real:
        cached = usage.cached_content_token_count or 0
        state = guard.state(context)
        if call.sent_contents:  # A stream may end in several whole responses.
            memo = run.memo(invocation)
            # Some leave out of the count what a cache held.
            is_truncated = None if cached else _is_truncated(call, real, memo)
            text_tokens = call.heuristic_tokens - _media_tokens(call)
            note_count(call, state, real, is_truncated, text_tokens)
            call.release()  # A recovery needs the contents no more.
        call.session.cached_ratio = cached / real
        state.write("real_tokens", real)
        state.write("last_heuristic", call.heuristic_tokens)
    _give_to_adk(run, context, response, plugin)
    if call.is_reported:
        return
    call.is_reported = True
    if write_ahead and call.is_answered:
        write_ahead(real or call.estimated_tokens)
    taken = read_usage(usage)
    costs = resolve_costs(call.model, guard.prices, guard.registry)
    summary_usage, summary_cost = call.session.take_summaries()
    record = CallRecord(
        agent=context.agent_name,
        session_id=invocation.session.id,
        estimated_tokens=call.estimated_tokens,
        real_tokens=real,
        window_tokens=call.window_tokens,
        threshold_tokens=call.threshold_tokens,
        pressure=call.estimated_tokens / call.window_tokens,
        is_recovered=call.is_recovered,
        compaction=call.compaction,
        model=call.model,
        usage=taken,
        cost=price_calls([taken], costs),
        summary_usage=summary_usage,
        summary_cost=summary_cost,
    )
    # Not onto the response: a plugin may hand the same one out again.
    if description := describe_call(record):
        run.descriptions[key] = description
    await report_call(record, guard.observers)


def _give_to_adk(
    run: Run, context: CallbackContext, response: LlmResponse, plugin: BasePlugin
) -> None:
    """Has ADK store what was written if a plugin may keep events from this one."""
    invocation, key = context.get_invocation_context(), call_key(context)
    plugins, usual = invocation.plugin_manager.plugins, BasePlugin.on_event_callback
    before = itertools.takewhile(lambda each: each is not plugin, plugins)
    if all(type(each).on_event_callback is usual for each in before):
        return
    context.state.update(run.writes.give(key[1], invocation.session.state))
    if seal := run.seals.pop(key, None):
        response.custom_metadata = {**(response.custom_metadata or {}), SEAL_KEY: seal}


def _is_truncated(call: CallInFlight, real_tokens: int, memo: Memo) -> bool:
    """Whether the provider counted too little for all the text that was sent."""
    suspect_tokens = call.heuristic_tokens * _TRUNCATION_RATIO
    if real_tokens >= suspect_tokens or suspect_tokens <= 2_000:
        return False
    discount_tokens = _media_tokens(call) + request_script_discount(
        call.sent_contents, call.sent_config, memo
    )
    return real_tokens < suspect_tokens - discount_tokens * _TRUNCATION_RATIO


def _media_tokens(call: CallInFlight) -> int:
    """What the images and files of a request were taken for: counts of them vary."""
    parts = itertools.chain.from_iterable(map(parts_of, call.sent_contents))
    return sum(map(media_bytes, parts)) // 4


def end_run(run: Run) -> None:
    """Reports the model calls of a run that came to nothing."""
    run.settle()
    for (agent, _), call in run.calls.items():
        # Where a server streams no usage, LiteLLM was seen to find 40 % of the tokens.
        suspect_tokens = 0.4 * call.window_tokens
        if not call.is_answered and call.estimated_tokens >= suspect_tokens:
            logger.warning(
                "The model of agent %r answered nothing, not even usage, to a request "
                "of about %d tokens; its window is %d. Some servers do so instead of "
                "rejecting what is too long.",
                *(agent, call.estimated_tokens, call.window_tokens),
            )
