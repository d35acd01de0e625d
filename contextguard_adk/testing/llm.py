"""`SimulatedLlm`: an offline model that judges requests as a provider would."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from pydantic import ConfigDict, Field, PrivateAttr

from contextguard_adk.testing.provider import (
    OVERFLOW_WORDS,
    ContextOverflowError,
    ErrorStyle,
    InvalidRequestError,
    count_request_tokens,
    count_shared_tokens,
    count_tokens,
    find_violation,
    list_content_texts,
    list_system_parts,
    looks_like_summary_request,
    summarize,
)

if TYPE_CHECKING:
    from google.adk.models import LlmCapabilities

_Answer: TypeAlias = str | types.Part | list[types.Part] | types.Content | LlmResponse
Reply: TypeAlias = _Answer | Exception
Script: TypeAlias = Callable[[LlmRequest], Reply | Awaitable[Reply]] | Sequence[Reply]


@dataclass
class RecordedRequest:
    """One request as the provider saw it, and what it answered.

    `rejected` is None for an accepted request. `response` is the final answer, None
    where there was none: rejected, raised by the script, or not finished.
    `cached_tokens` is what a prompt cache served, where there is one.
    """

    contents: list[types.Content]
    system_instruction: str
    config: types.GenerateContentConfig
    prompt_tokens: int
    is_summary: bool
    stream: bool
    rejected: Literal["overflow", "invalid"] | None = None
    response: LlmResponse | None = None
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        """All that the contents say, with calls and tool results as JSON."""
        return "\n".join(list_content_texts(self.contents))


@dataclass
class _Ledger:
    """What one provider has counted; shared by shallow copies of the model."""

    calls: int = 0
    rejections: int = 0
    violations: int = 0
    summaries: int = 0
    billed_tokens: int = 0
    largest_request_tokens: int = 0
    call_ids: int = 0
    replies_taken: Counter[bool] = field(default_factory=Counter)
    records: list[RecordedRequest] = field(default_factory=list)
    cached: deque[LlmRequest] = field(default_factory=lambda: deque(maxlen=4))


def call(name: str, /, **args: Any) -> types.Part:
    """Returns a part that calls a tool, for use in a script."""
    return types.Part(function_call=types.FunctionCall(name=name, args=args))


class SimulatedLlm(BaseLlm):
    """A model that runs offline and is as strict as the strictest provider.

    It counts every prompt anew, refuses what exceeds its window or breaks the order
    of tool calls and results, plays a script, summarizes by excerpts, and keeps
    what it received. One instance may serve concurrent calls.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = "simulated"
    """The name that requests and responses carry."""

    context_window: int = Field(default=32_000, gt=0)
    """The prompt tokens above which a request is refused."""

    token_ratio: float | None = Field(default=None, gt=0)
    """Tokens per four UTF-8 bytes. None counts by BPE (o200k_base), plus three tokens
    per content."""

    media_tokens: int = Field(default=258, ge=0)
    """Tokens of every image, sound, document or file reference; Gemini's 258 for an
    image by default."""

    error_style: ErrorStyle = "openai"
    """The provider whose words a context overflow uses."""

    usage: Literal["last", "never", "late"] = "last"
    """Which calls report usage, always on the final chunk: all ("last"), none, or those
    from the fourth agent call on ("late")."""

    call_ids: bool = False
    """Whether calls carry ids of the model (`call_1`, …). Otherwise they have none and
    ADK makes its own."""

    script: Script | None = Field(default=None, exclude=True, repr=False)
    """The agent's part: replies in order over the life of the instance, after the last
    one "Done.", or a function of the request, which may be async. An exception is
    raised. None acknowledges the last user text."""

    summary_replies: Script | None = Field(default=None, exclude=True, repr=False)
    """The summarizer's part, as in `script`. None, and a sequence that is used up,
    summarize by excerpts."""

    is_summary_request: Callable[[LlmRequest], bool] = Field(
        default=looks_like_summary_request, exclude=True, repr=False
    )
    """Tells requests for a summary from the agent's. The default knows the guard's
    prompt and that of ADK's `LlmEventSummarizer`."""

    keep_requests: int | None = Field(default=None, ge=0)
    """How many of the newest requests stay in `requests`; None keeps all."""

    prompt_cache: bool = False
    """Whether an answer's usage tells how many tokens the prompt begins with in common
    with one of the last accepted ones, as providers with a prompt cache do."""

    latency_seconds: float = Field(default=0, ge=0)
    """The time an accepted request takes."""

    _ledger: _Ledger = PrivateAttr(default_factory=_Ledger)

    @property
    def capabilities(self) -> LlmCapabilities:
        """Declares that output schemas and tools do not go together."""
        # Only an ADK that has the class reads this property.
        from google.adk.models import LlmCapabilities

        return LlmCapabilities(output_schema_and_tools=False)

    @property
    def requests(self) -> list[RecordedRequest]:
        """The requests received, oldest first, rejected ones included."""
        return list(self._ledger.records)

    @property
    def calls(self) -> int:
        """The number of requests received, rejected ones and summaries included."""
        return self._ledger.calls

    @property
    def rejections(self) -> int:
        """The number of requests refused because they exceed the window."""
        return self._ledger.rejections

    @property
    def violations(self) -> int:
        """The number of requests refused because of their structure."""
        return self._ledger.violations

    @property
    def summaries(self) -> int:
        """The number of requests received for a summary, answered or not."""
        return self._ledger.summaries

    @property
    def billed_tokens(self) -> int:
        """The prompt and output tokens of all answered calls, summaries included."""
        return self._ledger.billed_tokens

    @property
    def largest_request_tokens(self) -> int:
        """The prompt tokens of the largest request received, rejected ones included."""
        return self._ledger.largest_request_tokens

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers a request, or refuses it.

        Yields:
            The response, which carries the usage; with `stream`, its parts before it.

        Raises:
            InvalidRequestError: The contents break a structural rule.
            ContextOverflowError: The prompt exceeds `context_window`.
            Exception: What the script asks for.
        """
        record = self._receive(llm_request, stream)
        self._judge(record)
        if self.prompt_cache:
            self._serve_from_cache(record)
        agent_calls = self._ledger.calls - self._ledger.summaries
        reports_usage = self.usage == "last" or (
            self.usage == "late" and agent_calls >= 4
        )
        await asyncio.sleep(self.latency_seconds)
        reply = self._take_reply(llm_request, record.is_summary)
        if inspect.isawaitable(reply):
            reply = await reply
        if isinstance(reply, Exception):
            raise reply
        response = self._build_response(reply)
        self._settle(record, response, reports_usage)
        if stream:
            for chunk in _split_response(response):
                yield chunk
        yield response

    def _receive(self, request: LlmRequest, stream: bool) -> RecordedRequest:
        parts = list_system_parts(request.config.system_instruction)
        system = [types.Content(parts=parts)]
        record = RecordedRequest(
            contents=list(request.contents),
            system_instruction="\n".join(list_content_texts(system)),
            config=_copy_config(request.config),
            prompt_tokens=count_request_tokens(
                request, self.token_ratio, self.media_tokens
            ),
            is_summary=self.is_summary_request(request),
            stream=stream,
        )
        ledger = self._ledger
        ledger.calls += 1
        ledger.summaries += record.is_summary
        ledger.largest_request_tokens = max(
            ledger.largest_request_tokens, record.prompt_tokens
        )
        ledger.records.append(record)
        if self.keep_requests is not None:
            del ledger.records[: max(0, len(ledger.records) - self.keep_requests)]
        return record

    def _judge(self, record: RecordedRequest) -> None:
        """Raises, counts and records what is wrong with a request."""
        if violation := find_violation(record.contents):
            self._ledger.violations += 1
            record.rejected = "invalid"
            raise InvalidRequestError(violation)
        excess = record.prompt_tokens - self.context_window
        if excess > 0:
            self._ledger.rejections += 1
            record.rejected = "overflow"
            raise ContextOverflowError(
                OVERFLOW_WORDS[self.error_style].format(
                    used=record.prompt_tokens, limit=self.context_window, excess=excess
                )
            )

    def _serve_from_cache(self, record: RecordedRequest) -> None:
        """Finds what earlier prompts began with, and keeps this one for later ones."""
        request = LlmRequest(contents=record.contents, config=record.config)
        cached = self._ledger.cached
        served = (
            count_shared_tokens(before, request, self.token_ratio) for before in cached
        )
        record.cached_tokens = min(max(served, default=0), record.prompt_tokens)
        cached.append(request)

    def _take_reply(
        self, request: LlmRequest, is_summary: bool
    ) -> Reply | Awaitable[Reply]:
        """Returns what the script says next, or the built-in answer."""
        source = self.summary_replies if is_summary else self.script
        if callable(source):
            return source(request)
        position = self._ledger.replies_taken[is_summary]
        self._ledger.replies_taken[is_summary] += 1
        if source is not None and position < len(source):
            return source[position]
        if is_summary:
            return summarize(request, self.token_ratio)
        return _acknowledge(request) if source is None else "Done."

    def _build_response(self, reply: _Answer) -> LlmResponse:
        """Makes a response of its own, which ADK may change, of a scripted reply."""
        if isinstance(reply, LlmResponse):
            response = reply.model_copy(deep=True)
        else:
            response = LlmResponse(
                content=_to_content(reply), finish_reason=types.FinishReason.STOP
            )
        response.model_version = response.model_version or self.model
        response.partial = bool(response.partial)
        for function_call in response.get_function_calls():
            if self.call_ids and not function_call.id:
                self._ledger.call_ids += 1
                function_call.id = f"call_{self._ledger.call_ids}"
        return response

    def _settle(
        self, record: RecordedRequest, response: LlmResponse, reports_usage: bool
    ) -> None:
        """Bills an answer, reports its usage where that is due, and records it."""
        texts = list_content_texts([response.content or types.Content()])
        output_tokens = count_tokens(texts, self.token_ratio)
        total_tokens = record.prompt_tokens + output_tokens
        self._ledger.billed_tokens += total_tokens
        if reports_usage and response.usage_metadata is None:
            response.usage_metadata = types.GenerateContentResponseUsageMetadata(
                prompt_token_count=record.prompt_tokens,
                candidates_token_count=output_tokens,
                total_token_count=total_tokens,
                cached_content_token_count=record.cached_tokens or None,
            )
        record.response = response.model_copy(deep=True)


def _copy_config(config: types.GenerateContentConfig) -> types.GenerateContentConfig:
    """Copies what a recovery or a later step may still add tools to."""
    tools = [copy.copy(tool) for tool in config.tools or ()]
    for tool in tools:
        if isinstance(tool, types.Tool) and tool.function_declarations:
            tool.function_declarations = list(tool.function_declarations)
    return config.model_copy(update={"tools": tools} if tools else None)


def _to_content(
    reply: str | types.Part | list[types.Part] | types.Content,
) -> types.Content:
    if isinstance(reply, types.Content):
        return reply.model_copy(deep=True)
    if isinstance(reply, str):
        reply = [types.Part(text=reply)] if reply else []
    parts = [reply] if isinstance(reply, types.Part) else reply
    return types.Content(
        role="model", parts=[part.model_copy(deep=True) for part in parts]
    )


def _acknowledge(request: LlmRequest) -> str:
    texts = [
        part.text
        for content in request.contents
        for part in content.parts or []
        if content.role == "user" and part.text
    ]
    return f"Acknowledged: {texts[-1][:60]}" if texts else "Acknowledged."


def _split_response(response: LlmResponse) -> Iterator[LlmResponse]:
    """Yields the partial chunks that a stream sends before the complete response."""
    for part in (response.content and response.content.parts) or []:
        text = part.text or ""
        third = -(-len(text) // 3) or 1
        pieces = [
            types.Part(text=text[i : i + third], thought=part.thought)
            for i in range(0, len(text), third)
        ]
        for piece in pieces or [part.model_copy(deep=True)]:
            content = types.Content(role="model", parts=[piece])
            yield LlmResponse(
                content=content, partial=True, model_version=response.model_version
            )
