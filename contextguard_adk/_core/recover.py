"""Sends a request again that a provider found too long, or refused for its form."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from contextguard_adk import _listeners, _shapes
from contextguard_adk._core.attempts import ATTEMPTS, Rejected
from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._core.limits import plan_call, resolve_model
from contextguard_adk._core.look import look, read_counts, render_unshaped
from contextguard_adk._core.rejections import learn_window
from contextguard_adk._measuring.tokens import estimate_config_tokens
from contextguard_adk._providers.calling import Closing, call_apart, call_with_retries
from contextguard_adk._providers.overflow import Overflow, parse_overflow
from contextguard_adk._providers.refusals import parse_refusal
from contextguard_adk._runtime.runs import SentCall
from contextguard_adk._support.log import log_failures
from contextguard_adk._turn.units import Recovered

logger = logging.getLogger("contextguard_adk.recovery")

# The kind of refusal for which a shape gives the form that helps against all kinds. No
# provider's words are read as this kind.
_ANY_KIND = "any"

# After a transient error, the last retry of a request begins within this time. It is
# short, because the user waits for the answer.
_RETRY_SECONDS = 30


@dataclass(frozen=True)
class SeenRefusals:
    """The kinds of refusals of which the log has warned."""

    kinds: frozenset[str] = frozenset()


def read_overflow(
    error: Exception, request: LlmRequest, sent_tokens: int
) -> Overflow | None:
    """Reads from an error how far a request was too long, and for which model.

    Args:
        error: The error of the model's client.
        request: The request.
        sent_tokens: The least size of the request, in tokens of the model; 0 if it is
            unknown.

    Returns:
        The limits that the error names; None if it does not say that the request was
        too long.
    """
    overflow = parse_overflow(error, request.contents, sent_tokens)
    if overflow is None or overflow.model:
        return overflow

    # ADK's `FallbackModel` writes the name of the model that it has asked here.
    return replace(overflow, model=request.model or "")


class Recovery:
    """Sends a rejected request again, smaller or in another form."""

    def __init__(
        self, call: Call, sent: SentCall, rejected: LlmRequest, llm: BaseLlm
    ) -> None:
        is_same = call.request is rejected
        bounds = Bounds(
            is_rejected=True,
            is_rendered=is_same and bool(call.state.record.summary),
            threshold_ratio=0.8,
        )

        self._call = call
        self._sent = sent
        self._llm = llm
        self._rejected = Rejected(
            call=call,
            request=rejected,
            bounds=bounds,
            tried_tokens=[sent.heuristic_tokens],
            sent_ratio=sent.estimated_tokens / max(1, sent.heuristic_tokens),
        )
        self._attempt_kind = "form"  # Of the newest attempt, for the metric.
        self._answered_kinds = set[str]()  # Kinds of refusals.
        call.counts = read_counts(call)

    async def recover(
        self, overflow: Overflow | None, refusal: str
    ) -> LlmResponse | None:
        """Asks again: with a smaller request after an overflow, else in another form.

        If no request is accepted, the record forgets the forms that were tried.

        Args:
            overflow: The limits that the rejection names; None if the request was not
                too long.
            refusal: The kind of the refusal; "" if the form was not refused.

        Returns:
            The answer, or the error that ended the attempts, as a response; None if no
            request was accepted.
        """
        call = self._call
        forms_before = call.state.record.helped
        if overflow:
            answer = await self._send_smaller(overflow)
        else:
            answer = await self._send_in_other_form(refusal)

        is_recovered = self._sent.is_recovered
        if not is_recovered and call.state.record.helped != forms_before:
            call.state.note_help(forms_before or {})

        metric_kind = self._attempt_kind if is_recovered else "failed"
        event = Recovered(call.origin, call.model, metric_kind)
        for listener in _listeners.RECOVERED:
            with log_failures(logger, f"{type(listener).__name__} failed"):
                listener.recovered(event)
        return answer

    def learn(self, overflow: Overflow) -> None:
        """Remembers the limit that a rejection of the newest request shows."""
        rejected = self._rejected
        estimated_tokens = rejected.tried_tokens[-1] * rejected.sent_ratio
        rejected.bounds = learn_window(
            self._call, rejected.bounds, overflow, estimated_tokens
        )

    async def _send_smaller(self, overflow: Overflow) -> LlmResponse | None:
        """Asks the model again, with ever smaller requests.

        Returns:
            The answer, or another error that ended the attempts; None if all requests
            were rejected.
        """
        self.learn(overflow)
        newest = overflow
        for attempt in ATTEMPTS:
            self._attempt_kind = attempt.kind
            contents = await attempt.prepare(self._rejected, newest)
            if contents is None:
                continue

            outcome = await self._send(contents)
            if not isinstance(outcome, Overflow):
                return outcome
            newest = outcome
            self.learn(newest)

        self._log_failure()
        return None

    def _log_failure(self) -> None:
        """Logs the sizes of all requests that were rejected, and of the fixed part."""
        rejected = self._rejected
        logger.error(
            "The provider rejected every request for agent %r: window %d tokens, "
            "system instruction and tools %d, sizes tried %s (bytes / 4). Check "
            "`context_window` and what the agent is given apart from its history; %s.",
            self._call.agent,
            resolve_model(self._call, rejected.bounds).window_tokens,
            estimate_config_tokens(rejected.request.config),
            rejected.tried_tokens,
            self._call.origin.place,
        )

    async def _send_in_other_form(self, refusal: str) -> LlmResponse | None:
        """Asks again in the form that helps against a refusal; None if none helped."""
        contents: Sequence[types.Content] = self._rejected.request.contents
        if refusal == "turn":
            # A shape of the guard may have left out the contents that the provider
            # misses.
            contents = render_unshaped(look(self._call, self._rejected.bounds))
        if not self._note_new_form(refusal, contents):
            return None

        outcome = await self._send(contents)
        if isinstance(outcome, Overflow):
            return await self._send_smaller(outcome)
        return outcome if self._sent.is_recovered else None

    def _note_new_form(self, refusal: str, contents: Sequence[types.Content]) -> bool:
        """Stores a new form that helps against a refusal, and warns of the refusal.

        Each kind of refusal is answered once for a request. The last try is a form that
        helps against any kind.

        Args:
            refusal: The kind of the refusal; "" if the error is none.
            contents: The contents that were refused, before any shape.

        Returns:
            False if no shape has a new form.
        """
        if not refusal:
            return False

        state = self._call.state
        for kind in (refusal, _ANY_KIND):
            if kind in self._answered_kinds:
                continue
            forms = self._find_forms(kind, contents)
            if forms is None or forms == (state.record.helped or {}):
                continue

            self._answered_kinds.add(kind)
            state.note_help(forms)
            self._warn_of_refusal(refusal)
            return True
        return False

    def _find_forms(
        self, kind: str, contents: Sequence[types.Content]
    ) -> dict[str, str] | None:
        """Returns the forms of contents that help against a kind of refusal.

        They have the format of `AgentRecord.helped`; None if no shape can help.
        """
        turn = look(self._call, self._rejected.bounds)
        # The last shapes of the table change the contents least, so they are asked
        # first.
        for shape in reversed(_shapes.SHAPES):
            forms = shape.help(turn, kind, contents) if shape.help else None
            if forms is not None:
                return forms
        return None

    def _warn_of_refusal(self, refusal: str) -> None:
        """Warns once for each kind and agent."""
        call = self._call
        seen = call.memory.facts.unit(SeenRefusals)
        if refusal in seen.kinds:
            return

        call.memory.keep(SeenRefusals(seen.kinds | {refusal}))
        logger.warning(
            "The provider refused a request of agent %r for its form (%s); it is sent "
            "again in another one; %s.",
            call.agent,
            refusal,
            call.origin.place,
        )

    async def _send(
        self, contents: Sequence[types.Content]
    ) -> LlmResponse | Overflow | None:
        """Asks the model with contents; asks again if it refuses their form.

        Returns:
            One of four outcomes:
            - The answer.
            - The `Overflow` of a request that is still too long.
            - Another error, as a response.
            - None if the model has ended its answer without a whole response.
        """
        rejected = self._rejected
        while True:
            # The shapes give the contents the forms that are noted by now.
            shaped = rejected.shape(contents)
            heuristic_tokens = rejected.measure(shaped)
            rejected.tried_tokens.append(heuristic_tokens)
            request = self._build_request(shaped)
            try:
                ask = partial(self._ask, request)
                answer = await call_with_retries(ask, _RETRY_SECONDS)
                break
            except Exception as error:  # noqa: BLE001 - a client may raise anything.
                sent_tokens = int(heuristic_tokens * rejected.ratio)
                overflow = read_overflow(error, request, sent_tokens)
                if overflow:
                    return overflow

                refusal = parse_refusal(error, request.contents)
                if not self._note_new_form(refusal, contents):
                    return self._describe_error(error)

        if answer is not None:
            self._describe_sent(heuristic_tokens, request)
            logger.info(
                "Agent %r recovered: a request of %d tokens in place of %d; %s.",
                self._call.agent,
                heuristic_tokens,
                rejected.tried_tokens[0],
                self._call.origin.place,
            )
        return answer

    def _build_request(self, shaped: list[types.Content]) -> LlmRequest:
        """Returns a copy of the rejected request, with other contents and no cache."""
        rejected = self._rejected.request
        update = {
            "contents": shaped,
            "config": rejected.config.model_copy(),  # A client may change it.
            "cache_metadata": None,  # It must cache nothing.
            "cacheable_contents_token_count": None,
        }
        return rejected.model_copy(update=update)

    async def _ask(self, request: LlmRequest) -> LlmResponse | None:
        """Makes one model call; returns its last response that is whole."""
        return await call_apart(lambda: _read_answer(self._llm, request))

    def _describe_error(self, error: Exception) -> LlmResponse:
        """Logs an error of a request that was sent again; returns it as a response.

        The error is not raised, because ADK would then drop the values that the guard
        has written to session state.
        """
        name = type(error).__name__
        logger.warning(
            "The resend for agent %r failed with %s; %s.",
            self._call.agent,
            name,
            self._call.origin.place,
        )
        status = getattr(error, "status", None)
        code = status if isinstance(status, str) else name
        return LlmResponse(error_code=code, error_message=str(error))

    def _describe_sent(self, heuristic_tokens: int, request: LlmRequest) -> None:
        """Lets the record of the sent call describe the request that was accepted."""
        call = self._call
        bounds = Bounds()
        model = resolve_model(call, bounds)
        budgets = plan_call(call, model, bounds)

        sent = self._sent
        sent.heuristic_tokens = heuristic_tokens
        sent.estimated_tokens = int(heuristic_tokens * self._rejected.ratio)
        sent.sent_contents = request.contents
        sent.sent_config = request.config
        sent.request = weakref.ref(request)
        sent.stated_window_tokens = model.stated_window_tokens
        sent.window_tokens = budgets.window_tokens
        sent.threshold_tokens = budgets.threshold_tokens
        sent.is_recovered = True
        sent.origin = call.origin
        sent.compaction = call.compaction or sent.compaction


async def _read_answer(llm: BaseLlm, request: LlmRequest) -> LlmResponse | None:
    """Returns the last response that is not partial; None if there is none."""
    answer: LlmResponse | None = None
    async with Closing(llm.generate_content_async(request, stream=False)) as responses:
        async for response in responses:
            if not response.partial:
                answer = response
    return answer
