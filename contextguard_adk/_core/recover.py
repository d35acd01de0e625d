"""What follows when a provider says that a request is too long, or refuses its form."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from contextguard_adk import _listeners
from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._core.fit import minimize
from contextguard_adk._core.limits import (
    learn,
    learn_window,
    plan_call,
    reserve_output,
    resolve_model,
)
from contextguard_adk._core.look import look, read_counts, render_unshaped
from contextguard_adk._core.loop import declare_tools, settle
from contextguard_adk._measuring.calibration import DEFAULT_CORRECTION, MAX_RATIO
from contextguard_adk._measuring.tokens import estimate_config_tokens
from contextguard_adk._providers.apart import Closing, call_apart
from contextguard_adk._providers.overflow import Overflow, parse_overflow
from contextguard_adk._providers.refusals import parse_refusal
from contextguard_adk._providers.retry import call_with_retries
from contextguard_adk._runtime.runs import SentCall
from contextguard_adk._shapes.media_limit import (
    MediaLimit,
    count_media_bytes,
    leave_out_media,
)
from contextguard_adk._shapes.refused_forms import SeenRefusals, find_help
from contextguard_adk._summaries.compose import shape
from contextguard_adk._support.log import log_failures
from contextguard_adk._turn.units import Recovered

logger = logging.getLogger("contextguard_adk.recovery")


def read_overflow(
    error: Exception, request: LlmRequest, sent_tokens: int
) -> Overflow | None:
    """Reads whether a request was too long, and for which model."""
    overflow = parse_overflow(error, request.contents, sent_tokens)
    if overflow and not overflow.model:
        # ADK's `FallbackModel` writes there whom it has asked.
        return replace(overflow, model=request.model or "")
    return overflow


class Recovery:
    """Sends a rejected request again, smaller or in another form."""

    def __init__(
        self, call: Call, sent: SentCall, rejected: LlmRequest, llm: BaseLlm
    ) -> None:
        is_rendered = call.request is rejected and bool(call.state.record.summary)
        self._bounds = Bounds(True, is_rendered, threshold_ratio=0.8)
        self._call = call
        self._sent = sent
        self._rejected = rejected
        self._llm = llm
        self._tried_tokens = [sent.heuristic_tokens]
        self._answered = set[str]()  # Kinds of refusals.
        self._kind = "form"  # Of what was tried last.
        self._factor = sent.estimated_tokens / max(1, sent.heuristic_tokens)
        call.counts = read_counts(call)

    async def recover(
        self, overflow: Overflow | None, refusal: str
    ) -> LlmResponse | None:
        """Asks again, smaller or in another form; None if nothing was accepted.

        Where nothing was accepted, `helped` is as it was before.
        """
        helped = self._call.state.record.helped
        answer = await (self._run(overflow) if overflow else self._answer(refusal))
        call = self._call
        kind = self._kind if self._sent.is_recovered else "failed"
        if kind == "failed" and call.state.record.helped != helped:
            call.state.note_help(helped or {})
        event = Recovered(call.origin, call.model, kind)
        for listener in _listeners.LISTENERS:
            with log_failures(logger, f"{type(listener).__name__} failed"):
                listener.recovered(event)
        return answer

    async def _run(self, overflow: Overflow) -> LlmResponse | None:
        """Asks the model again, with ever smaller requests; None if all were rejected.

        Where another error ends it, the answer is that error.
        """
        self.learn(overflow)
        compact = ("compaction", self._compact)
        minimize = ("minimal", self._minimize)
        less = ("output", self._lower_output), ("media", self._leave_out_media)
        for self._kind, attempt in (*less, compact, compact, minimize, minimize):
            contents = await attempt(overflow)
            if contents is None:
                continue
            outcome = await self._send(contents)
            if not isinstance(outcome, Overflow):
                return outcome
            self.learn(overflow := outcome)
        logger.error(
            "The provider rejected every request for agent %r: window %d tokens, "
            "system instruction and tools %d, sizes tried %s (bytes / 4). Check "
            "`context_window` and what the agent is given apart from its history; %s.",
            self._call.agent,
            resolve_model(self._call, self._bounds).window_tokens,
            estimate_config_tokens(self._rejected.config),
            self._tried_tokens,
            self._call.origin.place,
        )
        return None

    async def _answer(self, refusal: str) -> LlmResponse | None:
        """Asks again in the form that helps against a refusal; None if nothing did."""
        contents: Sequence[types.Content] = self._rejected.contents
        if refusal == "turn":  # The guard may have left out what it misses.
            contents = render_unshaped(look(self._call, self._bounds))
        is_prepared = self._keep_help(refusal, contents)
        outcome = await self._send(contents) if is_prepared else None
        if isinstance(outcome, Overflow):
            return await self._run(outcome)
        return outcome if self._sent.is_recovered else None

    def _keep_help(self, refusal: str, contents: Sequence[types.Content]) -> bool:
        """Keeps what helps against a refusal, once for each kind and request."""
        call = self._call
        memory = self._call.memory
        for kind in (refusal, "flat") if refusal else ():  # At last as plain text.
            helps = find_help(look(call, self._bounds), kind, contents)
            if kind in self._answered or helps == (call.state.record.helped or {}):
                continue
            self._answered.add(kind)
            call.state.note_help(helps)
            seen = memory.facts.unit(SeenRefusals)
            if refusal not in seen.kinds:
                memory.keep(SeenRefusals(seen.kinds | {refusal}))
                logger.warning(
                    "The provider refused a request of agent %r for its form (%s); it "
                    "is sent again in another one; %s.",
                    *(call.agent, refusal, call.origin.place),
                )
            return True
        return False

    def learn(self, overflow: Overflow) -> None:
        """Remembers the limit that a rejection shows, once for each."""
        # Of the newest request that was rejected, not of the first.
        factor = self._sent.estimated_tokens / max(1, self._sent.heuristic_tokens)
        estimated_tokens = self._tried_tokens[-1] * factor
        self._bounds = learn_window(
            self._call, self._bounds, overflow, estimated_tokens
        )

    async def _lower_output(self, overflow: Overflow) -> list[types.Content] | None:
        """Reserves less output where the sum of input and output was too much."""
        limit = overflow.limit_tokens
        prompt = overflow.prompt_tokens
        if not overflow.is_input_plus_output or limit is None or prompt is None:
            return None
        call = self._call
        output = overflow.output_tokens
        if not reserve_output(call, int((limit - prompt) * 0.98)):
            return None
        learn(call, output_tokens=output or limit - prompt)
        update = {"config": call.request.config}
        self._rejected = self._rejected.model_copy(update=update)
        return list(self._rejected.contents)

    async def _leave_out_media(self, overflow: Overflow) -> list[types.Content] | None:
        """Leaves out the oldest images and files where their bytes are too many."""
        if not overflow.in_bytes:
            return None
        sent = list(self._rejected.contents)
        media_bytes = count_media_bytes(sent)
        most_bytes = int(media_bytes * 0.9)
        parts = (part for content in sent for part in content.parts or ())
        measures = map(self._call.memo.measure_part, parts)
        # Where texts take more, they are what was too much.
        is_text = media_bytes <= sum(measure.text_bytes for measure in measures)
        if is_text or leave_out_media(sent, most_bytes) is sent:
            return None
        self._call.memory.keep(MediaLimit(most_bytes))
        return sent

    async def _compact(self, overflow: Overflow) -> list[types.Content] | None:
        """Compacts harder than last time, or puts in a summary that is ready."""
        if self._call.is_recovery_paid or self._bounds.is_rendered:
            return None  # Its summary would hold the stored one.
        self._measure_by(overflow)
        before = self._call.state.record.summary
        turn = await settle(self._call, self._bounds)
        made = self._call.state.record.summary
        if made is before:
            return None
        declare_tools(self._call, turn)
        return list(turn.contents) if self._is_smaller(turn.contents) else None

    async def _minimize(self, overflow: Overflow) -> list[types.Content] | None:
        """Summary, current request and the newest contents, in 40 % of the room."""
        self._measure_by(overflow)
        turn = look(self._call, self._bounds)
        factor = self._factor
        window = turn.budgets.window_tokens
        most = min(window, self._tried_tokens[-1] * factor)
        # Instruction and tools stay. They may take fewer tokens than `factor` says.
        room = (most - turn.size.config_tokens * factor) * 0.4
        room = int(max(room, window * 0.1))
        contents = minimize(turn, room, factor)
        return contents if self._is_smaller(contents) else None

    def _measure_by(self, overflow: Overflow) -> None:
        """Takes real tokens per heuristic token from what a rejection names."""
        call = self._call
        sent_tokens = max(1, self._tried_tokens[-1])
        known = call.counts.measured_correction or DEFAULT_CORRECTION
        at_least = (overflow.limit_tokens or 0) - (overflow.output_tokens or 0)
        correction = known
        if overflow.prompt_tokens is not None:
            prompt_tokens = overflow.prompt_tokens
            if overflow.period:  # It counts what was reserved as well.
                model = resolve_model(call, self._bounds)
                prompt_tokens -= model.reserved_output_tokens
            correction = prompt_tokens / sent_tokens
        elif known * sent_tokens <= at_least:
            correction = at_least * 1.1 / sent_tokens  # It is more than the limit.
        correction = min(max(correction, 1.0), MAX_RATIO)
        if correction > DEFAULT_CORRECTION:
            # Only a provider that reports no usage will need it again.
            learn(call, correction=round(correction, 2))
        self._factor = correction
        self._bounds = replace(self._bounds, correction=correction)

    def _is_smaller(self, contents: Sequence[types.Content]) -> bool:
        return self._measure(self._shape(contents)) < self._tried_tokens[-1]

    def _measure(self, shaped: Sequence[types.Content]) -> int:
        contents_tokens = self._call.memo.estimate_tokens(shaped)
        return estimate_config_tokens(self._rejected.config) + contents_tokens

    def _shape(self, contents: Sequence[types.Content]) -> list[types.Content]:
        return shape(look(self._call, self._bounds), list(contents))

    async def _send(
        self, contents: Sequence[types.Content]
    ) -> LlmResponse | Overflow | None:
        """Asks the model; returns its answer, a new rejection, or another error."""
        shaped = self._shape(contents)
        heuristic = self._measure(shaped)
        self._tried_tokens.append(heuristic)
        # A client may change the config, and must cache nothing.
        update: dict[str, object] = {"config": self._rejected.config.model_copy()}
        update |= {"cache_metadata": None, "cacheable_contents_token_count": None}
        request = self._rejected.model_copy(update={**update, "contents": shaped})
        try:
            answer = await call_with_retries(lambda: self._ask(request), 30)
        except Exception as error:  # noqa: BLE001 - a client may raise anything.
            sent_tokens = int(heuristic * self._factor)
            if overflow := read_overflow(error, request, sent_tokens):
                return overflow
            if self._keep_help(parse_refusal(error, request.contents), contents):
                return await self._send(contents)
            name = type(error).__name__
            agent = self._call.agent
            message = "The resend for agent %r failed with %s; %s."
            logger.warning(message, agent, name, self._call.origin.place)
            # As ADK describes an error. Raised, it would take along what was learned.
            status = getattr(error, "status", None)
            code = status if isinstance(status, str) else name
            return LlmResponse(error_code=code, error_message=str(error))
        if answer is not None:
            self._describe_sent(heuristic, request)
            text = "Agent %r recovered: a request of %d tokens in place of %d; %s."
            sizes = (heuristic, self._tried_tokens[0])
            place = self._call.origin.place
            logger.info(text, self._call.agent, *sizes, place)
        return answer

    async def _ask(self, request: LlmRequest) -> LlmResponse | None:
        """Makes one model call; returns its last response that is whole."""
        return await call_apart(lambda: _read_answer(self._llm, request))

    def _describe_sent(self, heuristic_tokens: int, request: LlmRequest) -> None:
        """Updates what is remembered of the call to the request that was accepted."""
        call = self._call
        sent = self._sent
        model = resolve_model(call, bounds := Bounds())
        budgets = plan_call(call, model, bounds)
        sent.heuristic_tokens = heuristic_tokens
        sent.sent_contents = request.contents
        sent.sent_config = request.config
        sent.request = weakref.ref(request)
        sent.stated_window_tokens = model.stated_window_tokens
        sent.estimated_tokens = int(heuristic_tokens * self._factor)
        sent.window_tokens = budgets.window_tokens
        sent.threshold_tokens = budgets.threshold_tokens
        sent.is_recovered = True
        sent.origin = call.origin
        sent.compaction = call.compaction or sent.compaction


async def _read_answer(llm: BaseLlm, request: LlmRequest) -> LlmResponse | None:
    answer: LlmResponse | None = None
    async with Closing(llm.generate_content_async(request, stream=False)) as responses:
        async for response in responses:
            answer = answer if response.partial else response
    return answer
