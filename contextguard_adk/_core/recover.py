"""Sends a request again that a provider found too long, or refused for its form.

A request is too long for the model's window or for a rate limit (an `Overflow`). A form
is refused, for example, if the provider does not take contents in this order (a
refusal). A resend is a request that is sent again.
"""

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
from contextguard_adk._core.look import build_turn, read_counts, render_unshaped
from contextguard_adk._core.rejections import bound_next
from contextguard_adk._measuring.tokens import estimate_config_tokens
from contextguard_adk._providers.calling import Closing, call_apart, call_with_retries
from contextguard_adk._providers.overflow import Overflow, parse_overflow
from contextguard_adk._providers.refusals import parse_refusal
from contextguard_adk._runtime.runs import SentCall
from contextguard_adk._support.log import log_failures
from contextguard_adk._turn.units import Recovered

logger = logging.getLogger("contextguard_adk.recovery")

# `parse_refusal` never returns this kind of refusal. So the only shape with a form
# against this kind is the shape whose form helps against all kinds.
_ANY_KIND = "any"

# After a rejection, a compaction is due at this part of the usual threshold. So the
# next request is smaller even if the estimate of the rejected request was too low.
_THRESHOLD_RATIO = 0.8

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
    """Reads from an error that a request was too long, and for which model.

    Args:
        error: The error of the model's client.
        request: The request.
        sent_tokens: A low estimate of the request, in tokens of the model; 0 if it is
            unknown.

    Returns:
        The limits that the error names; None if the error does not say that the request
        was too long.
    """
    overflow = parse_overflow(error, request.contents, sent_tokens)
    if overflow is None or overflow.model:
        return overflow

    # The error does not name the model. ADK's `FallbackModel` has written the name of
    # the model that it has asked to the request.
    return replace(overflow, model=request.model or "")


class Recovery:
    """Sends a rejected request again, smaller or in another form."""

    def __init__(
        self, call: Call, sent: SentCall, rejected: LlmRequest, llm: BaseLlm
    ) -> None:
        """Prepares to send a request again; sends nothing yet.

        Args:
            call: The model call. `call.request` is the request before the guard changed
                it; it is `rejected` itself if nobody knows the request before.
            sent: The record of the call. A request that is accepted changes the record.
            rejected: The request that the provider was sent.
            llm: The client of the model.
        """
        # Only the request before the guard is sure to be without the stored summary.
        is_original_unknown = call.request is rejected
        has_summary = call.state.record.summary is not None
        bounds = Bounds(
            is_rejected=True,
            is_rendered=is_original_unknown and has_summary,
            threshold_ratio=_THRESHOLD_RATIO,
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
        # The name in the metric of the newest of `ATTEMPTS`. Before the first attempt
        # only another form is tried.
        self._attempt_name = "form"
        # The kinds of refusals against which a form was tried.
        self._answered_kinds = set[str]()
        call.counts = read_counts(call)

    async def recover(
        self, overflow: Overflow | None, refusal: str
    ) -> LlmResponse | None:
        """Sends a smaller request after an overflow, else the request in another form.

        Args:
            overflow: The limits that the rejection names; None if the request was not
                too long.
            refusal: The kind of the refusal; "" if the form was not refused.

        Returns:
            One of three outcomes:
            - The answer.
            - The error of another kind that ended the attempts, as a response.
            - None if no request was accepted.
        """
        call = self._call
        forms_before = call.state.record.helped
        if overflow is not None:
            answer = await self._send_smaller(overflow)
        else:
            answer = await self._send_in_other_form(refusal)

        is_recovered = self._sent.is_recovered
        has_new_forms = call.state.record.helped != forms_before
        if has_new_forms and not is_recovered:
            # The forms that were tried have not helped, so session state gets the forms
            # before them.
            call.state.note_help(forms_before or {})

        metric_name = self._attempt_name if is_recovered else "failed"
        event = Recovered(call.origin, call.model, metric_name)
        for listener in _listeners.RECOVERED:
            with log_failures(logger, f"{type(listener).__name__} failed"):
                listener.recovered(event)
        return answer

    def bound_next(self, overflow: Overflow) -> None:
        """Bounds the next request by the rejection of the newest one.

        A limit that the rejection names is remembered if it is believed.
        """
        rejected = self._rejected
        estimated_tokens = rejected.tried_tokens[-1] * rejected.sent_ratio
        rejected.bounds = bound_next(
            self._call, rejected.bounds, overflow, estimated_tokens
        )

    async def _send_smaller(self, overflow: Overflow) -> LlmResponse | None:
        """Makes the attempts in their order, until a request is not too long.

        Args:
            overflow: The limits that the newest rejection names.

        Returns:
            The outcome of the first request that was not too long, as `_send` returns
            it; None if all requests were too long.
        """
        newest_overflow = overflow
        self.bound_next(newest_overflow)
        for attempt in ATTEMPTS:
            self._attempt_name = attempt.name
            contents = await attempt.prepare(self._rejected, newest_overflow)
            if contents is None:
                # The attempt does not apply to this request.
                continue

            outcome = await self._send(contents)
            if not isinstance(outcome, Overflow):
                return outcome
            newest_overflow = outcome
            self.bound_next(newest_overflow)

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
        """Sends the request again in a form that may help against a refusal.

        Returns:
            The answer; None if no form was accepted. If the new form is too long, the
            result is that of `_send_smaller`.
        """
        contents: Sequence[types.Content] = self._rejected.request.contents
        if refusal == "turn":
            # The provider misses thoughts of the running turn. Perhaps a shape of the
            # guard has left out these thoughts, so the shapes begin anew.
            contents = render_unshaped(build_turn(self._call, self._rejected.bounds))

        has_new_form = self._note_new_form(refusal, contents)
        if not has_new_form:
            return None

        outcome = await self._send(contents)
        if isinstance(outcome, Overflow):
            return await self._send_smaller(outcome)
        # The error of a resend is dropped, because the first error tells more.
        return outcome if self._sent.is_recovered else None

    def _note_new_form(self, refusal: str, contents: Sequence[types.Content]) -> bool:
        """Stores forms that may help against a refusal, and warns of the refusal.

        The next request has the stored forms. If the shapes have no new forms against
        this kind of refusal, the forms against any kind are stored.

        Args:
            refusal: The kind of the refusal; "" if the error is no refusal.
            contents: The contents that were refused, before any shape.

        Returns:
            False if nothing was stored: the error is no refusal, or no shape has a form
            that was not tried.
        """
        if not refusal:
            return False

        state = self._call.state
        for kind in (refusal, _ANY_KIND):
            if kind in self._answered_kinds:
                continue

            refused_forms = state.record.helped or {}
            forms = self._find_forms(kind, contents)
            if forms is None or forms == refused_forms:
                # No shape has forms against this kind, or just these were refused.
                continue

            self._answered_kinds.add(kind)
            state.note_help(forms)
            self._warn_of_refusal(refusal)
            return True
        return False

    def _find_forms(
        self, kind: str, contents: Sequence[types.Content]
    ) -> dict[str, str] | None:
        """Asks the shapes for forms against a kind of refusal.

        The last shapes of the table change the contents least, so they are asked first.

        Args:
            kind: The kind of the refusal, or `_ANY_KIND`.
            contents: The contents that were refused, before any shape.

        Returns:
            A value for `AgentRecord.helped`; None if no shape can help.
        """
        turn = build_turn(self._call, self._rejected.bounds)
        for shape in reversed(_shapes.SHAPES):
            if shape.help is None:
                continue

            forms = shape.help(turn, kind, contents)
            if forms is not None:
                return forms
        return None

    def _warn_of_refusal(self, refusal: str) -> None:
        """Warns of a refusal, once for each kind and agent."""
        call = self._call
        seen = call.memory.facts.unit(SeenRefusals)
        if refusal in seen.kinds:
            return

        call.memory.remember_unit(SeenRefusals(seen.kinds | {refusal}))
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
        """Sends contents, in other forms as long as the provider refuses the form.

        Args:
            contents: The contents, before any shape.

        Returns:
            One of four outcomes:
            - The answer, if the request was accepted.
            - The `Overflow` of a request that is still too long.
            - Another error, as a response.
            - None if the model has ended its answer without a whole response.
        """
        rejected = self._rejected
        while True:
            # The shapes read the forms that `_note_new_form` has stored.
            shaped = rejected.shape(contents)
            rejected.tried_tokens.append(rejected.measure(shaped))
            request = self._build_request(shaped)
            ask = partial(self._ask, request)

            try:
                answer = await call_with_retries(ask, _RETRY_SECONDS)
            except Exception as error:  # noqa: BLE001 - a client may raise anything.
                failure = self._handle_failure(error, request, contents)
                if failure is not None:
                    return failure
                # The loop sends the contents again in the new form.
            else:
                if answer is not None:
                    self._note_recovered(request)
                return answer

    def _handle_failure(
        self, error: Exception, request: LlmRequest, contents: Sequence[types.Content]
    ) -> LlmResponse | Overflow | None:
        """Reads the error of a resend; stores a new form if the form was refused.

        Args:
            error: The error.
            request: The request that was sent again.
            contents: The contents of the request, before any shape.

        Returns:
            One of three outcomes:
            - The `Overflow` of a request that is still too long.
            - None if a new form was stored, in which the contents are to be sent.
            - Any other error, as a response.
        """
        sent_tokens = int(self._rejected.tried_tokens[-1] * self._rejected.ratio)
        overflow = read_overflow(error, request, sent_tokens)
        if overflow is not None:
            return overflow

        refusal = parse_refusal(error, request.contents)
        has_new_form = self._note_new_form(refusal, contents)
        return None if has_new_form else self._describe_error(error)

    def _build_request(self, shaped: list[types.Content]) -> LlmRequest:
        """Returns a copy of the rejected request, with other contents and no cache.

        Args:
            shaped: The contents, in the form in which they are sent.
        """
        rejected = self._rejected.request
        update = {
            "contents": shaped,
            # A client may change the config of a request.
            "config": rejected.config.model_copy(),
            # Without these two values ADK's Gemini class makes no cache.
            "cache_metadata": None,
            "cacheable_contents_token_count": None,
        }
        return rejected.model_copy(update=update)

    async def _ask(self, request: LlmRequest) -> LlmResponse | None:
        """Makes one model call; returns its whole response, None if there is none."""
        return await call_apart(lambda: _read_answer(self._llm, request))

    def _describe_error(self, error: Exception) -> LlmResponse:
        """Logs the error of a resend, and returns it as a response.

        The error is not raised, because ADK would then drop the values that the guard
        has written to session state.
        """
        type_name = type(error).__name__
        logger.warning(
            "The resend for agent %r failed with %s; %s.",
            self._call.agent,
            type_name,
            self._call.origin.place,
        )
        # The errors of google-genai have a status such as "INTERNAL".
        status = getattr(error, "status", None)
        code = status if isinstance(status, str) else type_name
        return LlmResponse(error_code=code, error_message=str(error))

    def _note_recovered(self, request: LlmRequest) -> None:
        """Makes `self._sent` describe the accepted request, and logs the request.

        The window and the threshold in `self._sent` are those of a call without a
        rejection, because the bounds of a recovery hold for the recovery alone.

        Args:
            request: The accepted request.
        """
        call = self._call
        usual_bounds = Bounds()
        model = resolve_model(call, usual_bounds)
        budgets = plan_call(call, model, usual_bounds)

        # The accepted request is the last one that `_send` has tried.
        first_tokens = self._rejected.tried_tokens[0]
        accepted_tokens = self._rejected.tried_tokens[-1]
        sent = self._sent
        sent.heuristic_tokens = accepted_tokens
        sent.estimated_tokens = int(accepted_tokens * self._rejected.ratio)
        sent.sent_contents = request.contents
        sent.sent_config = request.config
        sent.request = weakref.ref(request)
        sent.stated_window_tokens = model.stated_window_tokens
        sent.window_tokens = budgets.window_tokens
        sent.threshold_tokens = budgets.threshold_tokens
        sent.is_recovered = True
        sent.origin = call.origin
        if call.compaction is not None:
            sent.compaction = call.compaction

        logger.info(
            "Agent %r recovered: a request of %d tokens in place of %d; %s.",
            call.agent,
            accepted_tokens,
            first_tokens,
            call.origin.place,
        )


async def _read_answer(llm: BaseLlm, request: LlmRequest) -> LlmResponse | None:
    """Returns the last response that is whole; None if all responses are partial."""
    answer: LlmResponse | None = None
    async with Closing(llm.generate_content_async(request, stream=False)) as responses:
        async for response in responses:
            if not response.partial:
                answer = response
    return answer
