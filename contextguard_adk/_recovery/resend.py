"""What follows when a provider says that a request is too long."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from google.adk.agents.invocation_context import InvocationContext
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from contextguard_adk._calls.outgoing import parse_refusal
from contextguard_adk._history.rendering import render_head
from contextguard_adk._measuring.calibration import DEFAULT_CORRECTION, MAX_RATIO
from contextguard_adk._measuring.tokens import Memo, estimate_config_tokens
from contextguard_adk._memory import CallInFlight
from contextguard_adk._providers.overflow import Overflow, parse_overflow
from contextguard_adk._providers.retry import call_with_retries
from contextguard_adk._recovery.fit import reduce_contents
from contextguard_adk._summarizing.items import count_media_bytes, leave_out_media

if TYPE_CHECKING:
    from contextguard_adk._calls.call import ModelCall
    from contextguard_adk._history.view import HistoryView
    from contextguard_adk._summarizing.context import CompactionContext

logger = logging.getLogger("contextguard_adk.recovery")


class Recovery:
    """Sends a rejected request again, smaller."""

    def __init__(
        self, call: ModelCall, sent: CallInFlight, rejected: LlmRequest, llm: BaseLlm
    ) -> None:
        self._call = call
        call.is_rendered = call.request is rejected and bool(call.state.record.summary)
        self._sent = sent
        self._rejected = rejected
        self._llm = llm
        self._tried_tokens = [sent.heuristic_tokens]
        self._answered = set[str]()  # Kinds of refusals.
        self._factor = sent.estimated_tokens / max(1, sent.heuristic_tokens)

    async def recover(
        self, overflow: Overflow | None, refusal: str
    ) -> LlmResponse | None:
        """Asks again, smaller or in another form; None if nothing was accepted.

        What did not help against refusals is not kept.
        """
        helped = self._call.outgoing.helped
        answer = await (self._run(overflow) if overflow else self._answer(refusal))
        if not self._sent.is_recovered and self._call.outgoing.helped != helped:
            self._call.state.note(helped=helped or None)
        return answer

    async def _run(self, overflow: Overflow) -> LlmResponse | None:
        """Asks the model again, with ever smaller requests; None if all were rejected.

        Where another error ends it, the answer is that error.
        """
        self.learn(overflow)
        first = self._lower_output, self._leave_out_media, self._put_in, self._compact
        for attempt in (*first, self._minimize, self._minimize):
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
            "`context_window` and what the agent is given apart from its history.",
            self._call.agent,
            self._call.limits.window_tokens(),
            estimate_config_tokens(self._rejected.config),
            self._tried_tokens,
        )
        return None

    async def _answer(self, refusal: str) -> LlmResponse | None:
        """Asks again in the form that helps against a refusal; None if nothing did."""
        # What a running turn lacks may have been left out.
        contents = self._call.render() if refusal == "turn" else self._rejected.contents
        is_prepared = self._prepare(refusal, contents)
        outcome = await self._send(contents) if is_prepared else None
        if isinstance(outcome, Overflow):
            return await self._run(outcome)
        return outcome if self._sent.is_recovered else None

    def _prepare(self, refusal: str, contents: Sequence[types.Content]) -> bool:
        """Keeps what helps against a refusal, once for each kind and request."""
        call, outgoing = self._call, self._call.outgoing
        for kind in (refusal, "flat") if refusal else ():  # At last as plain text.
            helps = outgoing.find_help(kind, contents)
            if kind in self._answered or helps == outgoing.helped:
                continue
            self._answered.add(kind)
            call.state.note(helped=helps)
            if refusal not in (session := call.limits.session).refusals:
                session.refusals |= {refusal}
                logger.warning(
                    "The provider refused a request of agent %r for its form (%s); it "
                    "is sent again in another one.",
                    *(call.agent, refusal),
                )
            return True
        return False

    def learn(self, overflow: Overflow) -> None:
        """Remembers the limit that a rejection shows, once for each."""
        # Of the newest request that was rejected, not of the first.
        factor = self._sent.estimated_tokens / max(1, self._sent.heuristic_tokens)
        self._call.limits.learn_window(overflow, self._tried_tokens[-1] * factor)

    async def _lower_output(self, overflow: Overflow) -> list[types.Content] | None:
        """Reserves less output where the sum of input and output was too much."""
        limit, prompt = overflow.limit_tokens, overflow.prompt_tokens
        if not overflow.is_input_plus_output or limit is None or prompt is None:
            return None
        limits, output = self._call.limits, overflow.output_tokens
        if not limits.reserve(int((limit - prompt) * 0.98)):
            return None
        limits.state.learn(limits.model, output_tokens=output or limit - prompt)
        update = {"config": limits.request.config}
        self._rejected = self._rejected.model_copy(update=update)
        return list(self._rejected.contents)

    async def _leave_out_media(self, overflow: Overflow) -> list[types.Content] | None:
        """Sends the oldest images and files no more where their bytes are too many."""
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
        self._call.limits.session.max_media_bytes = most_bytes
        return sent

    async def _put_in(self, overflow: Overflow) -> list[types.Content] | None:
        """Puts in the summary that was written ahead of time."""
        if self._call.strategy.ahead is None:
            return None
        await self._call.wait()
        compaction = await self._call.put_in_ahead(self._context(overflow))
        if compaction is None or not self._is_smaller(compaction.contents):
            return None
        return compaction.contents

    async def _compact(self, overflow: Overflow) -> list[types.Content] | None:
        """Compacts harder than last time."""
        context = self._context(overflow)
        has_room = context.fixed_tokens < context.budgets.window_tokens
        if self._call.is_rendered or not has_room:
            return None  # Its summary would hold the stored one, or have no effect.
        started = time.monotonic()
        compaction = await self._call.summarize(context)
        if compaction is None or not self._is_smaller(compaction.contents):
            return None
        await self._call.accept(context, compaction, started)
        return compaction.contents

    async def _minimize(self, overflow: Overflow) -> list[types.Content] | None:
        """Summary, live request and the newest contents, in 40 % of the room."""
        context = self._context(overflow)
        view, stored = context.view, context.view.stored
        factor = self._factor
        window = context.budgets.window_tokens
        most = min(window, self._tried_tokens[-1] * factor)
        # Instruction and tools stay. They may take fewer tokens than `factor` says.
        room = (most - context.config_heuristic_tokens * factor) * 0.4
        room = int(max(room, window * 0.1))
        head: list[types.Content] = []
        for draft in (stored, *context.composer.shorten(stored)) if stored else ():
            draft = draft.model_copy(update={"done": ""})  # Listed anew.
            head = [render_head(view, draft, view.covered)]
            if view.memo.estimate_tokens(head) * factor <= room * 0.5:
                break
        else:
            head = []  # A notice takes its place.
        live = None if head and _is_request_quoted(view) else view.live_index
        contents = reduce_contents(
            view.shown, room, factor, head, live, view.turn, view.memo
        )
        return contents if self._is_smaller(contents) else None

    def _context(self, overflow: Overflow) -> CompactionContext:
        """What a strategy reads, for 80 % of the usual threshold."""
        limits = self._call.limits
        sent_tokens = max(1, self._tried_tokens[-1])
        context = self._call.examine_rejected(0.8)
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
            limits.state.learn(limits.model, correction=round(correction, 2))
        self._factor = correction
        return replace(context, correction=correction)

    def _is_smaller(self, contents: Sequence[types.Content]) -> bool:
        return self._measure(contents) < self._tried_tokens[-1]

    def _measure(self, contents: Sequence[types.Content]) -> int:
        shaped = self._call.outgoing.shape(list(contents))
        contents_tokens = self._call.memo.estimate_tokens(shaped)
        return estimate_config_tokens(self._rejected.config) + contents_tokens

    def _copy_request(self, contents: Sequence[types.Content]) -> LlmRequest:
        """A request with other contents; a client may change it, and caches nothing."""
        update: dict[str, object] = {"contents": self._call.outgoing.shape([*contents])}
        update["config"] = self._rejected.config.model_copy()
        update |= {"cache_metadata": None, "cacheable_contents_token_count": None}
        return self._rejected.model_copy(update=update)

    async def _send(
        self, contents: Sequence[types.Content]
    ) -> LlmResponse | Overflow | None:
        """Asks the model; returns its answer, a new rejection, or another error."""
        heuristic = self._measure(contents)
        self._tried_tokens.append(heuristic)
        request = self._copy_request(contents)
        try:
            answer = await call_with_retries(lambda: self._ask(request), 30)
        except Exception as error:  # noqa: BLE001 - a client may raise anything.
            if overflow := parse_overflow(error, request.contents):
                return overflow
            if self._prepare(parse_refusal(error, request.contents), contents):
                return await self._send(contents)
            name, agent = type(error).__name__, self._call.agent
            logger.warning("The resend for agent %r failed with %s.", agent, name)
            # As ADK describes an error. Raised, it would take along what was learned.
            status = getattr(error, "status", None)
            code = status if isinstance(status, str) else name
            return LlmResponse(error_code=code, error_message=str(error))
        if answer is not None:
            self._describe_sent(heuristic, request)
            text = "Agent %r recovered: a request of %d tokens in place of %d."
            logger.info(text, self._call.agent, heuristic, self._tried_tokens[0])
        return answer

    async def _ask(self, request: LlmRequest) -> LlmResponse | None:
        """Makes one model call; returns its last response that is whole."""
        answer: LlmResponse | None = None
        async for response in self._llm.generate_content_async(request, stream=False):
            answer = answer if response.partial else response
        return answer

    def _describe_sent(self, heuristic_tokens: int, request: LlmRequest) -> None:
        """Makes the call in flight that of the request that was answered."""
        self._call.limits.passing_window_tokens = None
        sent, budgets = self._sent, self._call.limits.budgets()
        sent.heuristic_tokens = heuristic_tokens
        sent.sent_contents, sent.sent_config = request.contents, request.config
        sent.sealed = self._call.outgoing.sealed
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


def restore_requests(
    sent: CallInFlight, rejected: LlmRequest, run: InvocationContext, plugin: object
) -> tuple[LlmRequest, LlmRequest] | None:
    """Returns the request before the guard changed it, and as it was rejected.

    Both are the rejected one where another callback has put other contents into it:
    they may be masked. What others added stands in both, and what ADK's Gemini class
    takes out as cached; None where callbacks behind the plugin may have masked that.
    """
    present = {id(content) for content in rejected.contents}
    config, stripped = rejected.config, dict[str, object]()
    was_cached = sent.sent_config and sent.sent_config.cached_content
    if config.cached_content and sent.sent_config and not was_cached:
        tail = sent.sent_contents[-len(rejected.contents) :]
        masks = getattr(run.agent, "canonical_before_model_callbacks", None)
        is_last = run.plugin_manager.plugins[-1] is plugin
        if masks or not is_last or present != set(map(id, tail)):
            return None
        names = ("cached_content", "system_instruction", "tools", "tool_config")
        stripped = {name: getattr(sent.sent_config, name) for name in names}
    elif any(id(content) not in present for content in sent.sent_contents):
        # Another callback has replaced or removed contents.
        return rejected, rejected
    known = {id(content) for content in (*sent.sent_contents, *sent.original_contents)}
    added = [content for content in rejected.contents if id(content) not in known]
    update: dict[str, object] = {"config": config.model_copy(update=stripped)}
    before = update | {"contents": [*sent.original_contents, *added]}
    after = update | {"contents": [*sent.sent_contents, *added]}
    return rejected.model_copy(update=before), rejected.model_copy(update=after)


def measure_sent(request: LlmRequest, memo: Memo) -> CallInFlight:
    """Describes a request that the guard did not get to measure."""
    heuristic = estimate_config_tokens(request.config)
    heuristic += memo.estimate_tokens(request.contents)
    estimated = int(heuristic * DEFAULT_CORRECTION)
    contents, model = tuple(request.contents), request.model or ""
    return CallInFlight(heuristic, estimated, estimated, 0, model, contents, contents)
