"""What follows when a provider says that a request is too long."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.readonly_context import ReadonlyContext
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from contextguard_adk.history.rendering import render_head
from contextguard_adk.measuring.calibration import DEFAULT_CORRECTION, MAX_RATIO
from contextguard_adk.measuring.tokens import (
    estimate_config_tokens,
    estimate_contents_tokens,
    estimate_request_tokens,
)
from contextguard_adk.memory import CallInFlight
from contextguard_adk.providers.overflow import Overflow, parse_overflow
from contextguard_adk.recovery.fit import reduce_contents

if TYPE_CHECKING:
    from contextguard_adk.guard import ModelCall
    from contextguard_adk.history.view import HistoryView
    from contextguard_adk.summarizing.context import CompactionContext

logger = logging.getLogger("contextguard_adk.recovery")


class Recovery:
    """Sends a rejected request again, smaller."""

    def __init__(
        self, call: ModelCall, sent: CallInFlight, rejected: LlmRequest, llm: BaseLlm
    ) -> None:
        self._call = call
        self._sent = sent
        self._rejected = rejected
        self._llm = llm
        self._tried_tokens = [sent.heuristic_tokens]
        self._factor = sent.estimated_tokens / max(1, sent.heuristic_tokens)

    async def run(self, overflow: Overflow) -> LlmResponse | None:
        """Asks the model again, with ever smaller requests; None where all failed."""
        for attempt in (self._lower_output, self._compact, self._minimize):
            contents = await attempt(overflow)
            if contents is None:
                continue
            outcome = await self._send(contents)
            if isinstance(outcome, LlmResponse) or outcome is None:
                return outcome
            overflow = outcome
        logger.error(
            "The provider rejected every request for agent %r: window %d tokens, "
            "system instruction and tools %d, sizes tried %s (bytes / 4). Check "
            "`context_window` and what the agent is given apart from its history.",
            self._call.agent,
            self._call.window_tokens(),
            estimate_config_tokens(self._rejected.config),
            self._tried_tokens,
        )
        return None

    async def _lower_output(self, overflow: Overflow) -> list[types.Content] | None:
        """Reserves less output where the sum of input and output was too much."""
        limit, prompt = overflow.limit_tokens, overflow.prompt_tokens
        if not overflow.is_input_plus_output or limit is None or prompt is None:
            return None
        room = int((limit - prompt) * 0.98)
        if room < 256:  # Too little for an answer.
            return None
        config = self._rejected.config.model_copy(update={"max_output_tokens": room})
        self._rejected = self._rejected.model_copy(update={"config": config})
        self._call.request.config = config  # A later attempt may add a tool to it.
        return list(self._rejected.contents)

    async def _compact(self, overflow: Overflow) -> list[types.Content] | None:
        """Compacts harder than last time."""
        context = self._context(overflow, 0.8)
        if context.fixed_tokens >= context.budgets.window_tokens:
            return None  # A summary would be paid for without effect.
        started = time.monotonic()
        compaction = await self._call.strategy.compact(context)
        context.summarizer.end()
        if compaction is None or not self._is_smaller(compaction.contents):
            return None
        await self._call.accept(context, compaction, started)
        return compaction.contents

    async def _minimize(self, overflow: Overflow) -> list[types.Content] | None:
        """Summary, live request and the newest contents, shortened to half."""
        context = self._context(overflow, 0.5)
        view, stored = context.view, context.view.stored
        factor = self._factor
        half = int(self._tried_tokens[-1] * 0.5 * factor)
        room = min(context.budgets.threshold_tokens, half)
        room -= int(context.config_heuristic_tokens * factor)
        head: list[types.Content] = []
        for draft in (stored, *context.composer.shorten(stored)) if stored else ():
            draft = draft.model_copy(update={"done": ""})  # Listed anew.
            head = render_head(view, draft, view.covered)
            if estimate_contents_tokens(head) * factor <= room * 0.5:
                break
        live = None if _is_request_quoted(view) else view.live_index
        contents = reduce_contents(view.contents, room, factor, head, live, view.turn)
        return contents if self._is_smaller(contents) else None

    def _context(self, overflow: Overflow, ratio: float) -> CompactionContext:
        """What a strategy reads, for a part of the usual threshold."""
        self._learn_window(overflow)
        sent_tokens = max(1, self._tried_tokens[-1])
        context = self._call.examine_rejected(ratio)
        known = context.correction or DEFAULT_CORRECTION
        at_least = (overflow.limit_tokens or 0) - (overflow.output_tokens or 0)
        correction = known
        if overflow.prompt_tokens is not None:
            correction = overflow.prompt_tokens / sent_tokens
        elif known * sent_tokens <= at_least:
            correction = at_least * 1.1 / sent_tokens  # It is more than the limit.
        correction = min(max(correction, 1.0), MAX_RATIO)
        if correction > DEFAULT_CORRECTION:
            # Only a provider that reports no usage will need it again.
            self._call.state.learn(correction=round(correction, 2))
        self._factor = correction
        return replace(context, correction=correction)

    def _learn_window(self, overflow: Overflow) -> None:
        """Remembers the provider's limit; it never widens what is configured."""
        learned = overflow.limit_tokens
        if learned is None:
            real = self._call.state.read_count("real_tokens") or 0
            # Of the newest request that was rejected, not of the first.
            factor = self._sent.estimated_tokens / max(1, self._sent.heuristic_tokens)
            learned = max(real, int(self._tried_tokens[-1] * factor * 0.85))
        if learned < self._call.window_tokens():
            self._call.state.learn(window_tokens=learned)

    def _is_smaller(self, contents: Sequence[types.Content]) -> bool:
        return self._measure(contents) < self._tried_tokens[-1]

    def _measure(self, contents: Sequence[types.Content]) -> int:
        config = self._rejected.config
        return estimate_config_tokens(config) + estimate_contents_tokens(contents)

    async def _send(
        self, contents: Sequence[types.Content]
    ) -> LlmResponse | Overflow | None:
        """Asks the model; returns its answer, a new rejection, or None."""
        heuristic = self._measure(contents)
        self._tried_tokens.append(heuristic)
        update = {"contents": list(contents), "cache_metadata": None}
        request = self._rejected.model_copy(update=update)
        answer: LlmResponse | None = None
        try:
            async for response in self._llm.generate_content_async(
                request, stream=False
            ):
                answer = answer if response.partial else response
        except Exception as error:  # noqa: BLE001 - a client may raise anything.
            overflow = parse_overflow(error)
            if overflow is None:
                name, agent = type(error).__name__, self._call.agent
                logger.warning("The resend for agent %r failed with %s.", agent, name)
            return overflow
        if answer is not None:
            self._describe_sent(heuristic)
            text = "Agent %r recovered: a request of %d tokens in place of %d."
            logger.info(text, self._call.agent, heuristic, self._tried_tokens[0])
        return answer

    def _describe_sent(self, heuristic_tokens: int) -> None:
        """Makes the call in flight that of the request that was answered."""
        sent, budgets = self._sent, self._call.budgets()
        sent.heuristic_tokens = heuristic_tokens
        sent.estimated_tokens = int(heuristic_tokens * self._factor)
        sent.window_tokens = budgets.window_tokens
        sent.threshold_tokens = budgets.threshold_tokens
        sent.is_recovered = True
        sent.compaction = self._call.compaction or sent.compaction


def _is_request_quoted(view: HistoryView) -> bool:
    """Whether the continuation after the summary quotes the live request."""
    stored, live = view.stored, view.live_index
    if stored is None or live is None or not stored.has_continuation:
        return False
    return stored.request == view.fingerprint(live).hex()


def restore_contents(
    sent: CallInFlight, rejected: Sequence[types.Content]
) -> list[types.Content]:
    """Returns the contents before the guard changed them, then what others added."""
    present = {id(content) for content in rejected}
    if any(id(content) not in present for content in sent.sent_contents):
        return list(rejected)  # Another callback has replaced or removed contents.
    known = {id(content) for content in (*sent.sent_contents, *sent.original_contents)}
    added = [content for content in rejected if id(content) not in known]
    return [*sent.original_contents, *added]


def measure_sent(request: LlmRequest) -> CallInFlight:
    """Describes a request that the guard did not get to measure."""
    heuristic = estimate_request_tokens(request)
    estimated = int(heuristic * DEFAULT_CORRECTION)
    contents = tuple(request.contents)
    return CallInFlight(heuristic, estimated, estimated, 0, contents, contents)


async def resolve_model(invocation: InvocationContext) -> BaseLlm | None:
    """Returns the model that ADK calls for this agent."""
    agent = invocation.agent
    resolve = getattr(agent, "canonical_model_async", None)  # Not in ADK 2.0.
    if resolve is None:
        model = getattr(agent, "canonical_model", None)
    else:
        model = await resolve(ReadonlyContext(invocation))
    return model if isinstance(model, BaseLlm) else None
