"""`SimulatedLlm`: an offline model that accepts or refuses requests like a provider."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from pydantic import ConfigDict, Field, PrivateAttr

from contextguard_adk.testing import provider

if TYPE_CHECKING:
    from google.adk.models import LlmCapabilities

_Answer: TypeAlias = str | types.Part | list[types.Part] | types.Content | LlmResponse
Reply: TypeAlias = _Answer | Exception
Script: TypeAlias = Callable[[LlmRequest], Reply | Awaitable[Reply]] | Sequence[Reply]


@dataclass
class RecordedRequest:
    """One request as the provider saw it, and its answer.

    Attributes:
        contents: The contents of the request.
        system_instruction: The text of the system instruction.
        config: A copy of the config.
        prompt_tokens: The tokens of system instruction, tools and contents.
        is_summary: Whether the request asks for a summary.
        stream: Whether the answer is streamed.
        rejected: Why the request was refused; None if it was accepted.
        response: The final answer; None if there was none.
        cached_tokens: The prompt tokens that a prompt cache served; 0 without a cache.
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
        """The text of the contents, with calls and tool results as JSON."""
        return "\n".join(provider.list_content_texts(self.contents))


_FIRST_REPORTING_CALL = {"last": 0, "late": 4, "never": math.inf}
"""The number of the first agent call that reports its usage, by the setting `usage`.

The first call of all has the number 1, so all calls report usage from 0 on.
"""

_CACHED_PROMPTS = 4
"""A prompt cache keeps this number of prompts."""


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

    error_style: provider.ErrorStyle = "openai"
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
        default=provider.looks_like_summary_request, exclude=True, repr=False
    )
    """Tells requests for a summary from the agent's. The default knows the guard's
    prompt and that of ADK's `LlmEventSummarizer`."""

    keep_requests: int | None = Field(default=None, ge=0)
    """How many of the newest requests stay in `requests`; None keeps all."""

    prompt_cache: bool = False
    """Whether usage reports cached tokens, as providers with a prompt cache do. These
    are the tokens of the longest beginning that the prompt has in common with one of
    the last four accepted prompts."""

    latency_seconds: float = Field(default=0, ge=0)
    """The time an accepted request takes."""

    # ADK may copy a model; its shallow copies share these.
    _counts: Counter[str] = PrivateAttr(default_factory=Counter)
    _records: list[RecordedRequest] = PrivateAttr(default_factory=list)
    _cached: list[list[tuple[str, str]]] = PrivateAttr(default_factory=list)

    @property
    def capabilities(self) -> LlmCapabilities:
        """Declares that output schemas and tools do not go together."""
        # Only an ADK that has the class reads this property.
        from google.adk.models import LlmCapabilities

        return LlmCapabilities(output_schema_and_tools=False)

    @property
    def requests(self) -> list[RecordedRequest]:
        """The requests received, oldest first, rejected ones included."""
        return list(self._records)

    @property
    def calls(self) -> int:
        """The number of requests received, rejected ones and summaries included."""
        return self._counts["calls"]

    @property
    def rejections(self) -> int:
        """The number of requests refused because they exceed the window."""
        return self._counts["rejections"]

    @property
    def violations(self) -> int:
        """The number of requests refused because of their structure."""
        return self._counts["violations"]

    @property
    def summaries(self) -> int:
        """The number of requests received for a summary, answered or not."""
        return self._counts["summaries"]

    @property
    def billed_tokens(self) -> int:
        """The prompt and output tokens of all answered calls, summaries included."""
        return self._counts["billed_tokens"]

    @property
    def largest_request_tokens(self) -> int:
        """The prompt tokens of the largest request received, rejected ones included."""
        return self._counts["largest_request_tokens"]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers a request, or refuses the request by an error.

        With `stream`, partial answers come before the whole answer.

        Raises:
            InvalidRequestError: The contents break a structural rule.
            ContextOverflowError: The prompt exceeds `context_window`.
            Exception: The script asks for this error.
        """
        record = self._receive(llm_request, stream)
        self._judge(record)
        if self.prompt_cache:
            self._use_cache(record, llm_request)

        # The number of the agent's calls so far. The number is read before the wait,
        # because other calls may come during the wait.
        agent_calls = self.calls - self.summaries
        reports_usage = agent_calls >= _FIRST_REPORTING_CALL[self.usage]
        await asyncio.sleep(self.latency_seconds)

        if record.is_summary:
            scripted = self._next_summary(llm_request)
        else:
            scripted = self._next_reply(llm_request)
        # A script may be an async function.
        reply = await scripted if inspect.isawaitable(scripted) else scripted
        if isinstance(reply, Exception):
            raise reply
        response = self._build_response(reply)
        self._record_answer(record, response, reports_usage)

        if stream:
            for chunk in _split_response(response):
                yield chunk
        yield response

    def _receive(self, request: LlmRequest, stream: bool) -> RecordedRequest:
        """Counts a request and keeps a record of it."""
        system = provider.list_content_texts([provider.read_system(request)])
        record = RecordedRequest(
            contents=list(request.contents),
            system_instruction="\n".join(system),
            config=_copy_config(request.config),
            prompt_tokens=provider.count_request_tokens(
                request, self.token_ratio, self.media_tokens
            ),
            is_summary=self.is_summary_request(request),
            stream=stream,
        )

        self._counts["calls"] += 1
        if record.is_summary:
            self._counts["summaries"] += 1
        largest_tokens = max(self.largest_request_tokens, record.prompt_tokens)
        self._counts["largest_request_tokens"] = largest_tokens

        self._records.append(record)
        if self.keep_requests is not None:
            excess_count = max(0, len(self._records) - self.keep_requests)
            del self._records[:excess_count]
        return record

    def _judge(self, record: RecordedRequest) -> None:
        """Refuses a request with a wrong structure or too many tokens.

        Raises:
            InvalidRequestError: The contents break a structural rule.
            ContextOverflowError: The prompt exceeds `context_window`.
        """
        violation = provider.find_violation(record.contents)
        if violation:
            self._counts["violations"] += 1
            record.rejected = "invalid"
            raise provider.InvalidRequestError(violation)

        excess_tokens = record.prompt_tokens - self.context_window
        if excess_tokens > 0:
            self._counts["rejections"] += 1
            record.rejected = "overflow"
            text = provider.OVERFLOW_WORDS[self.error_style].format(
                used=record.prompt_tokens,
                limit=self.context_window,
                excess=excess_tokens,
            )
            raise provider.ContextOverflowError(text)

    def _use_cache(self, record: RecordedRequest, request: LlmRequest) -> None:
        """Records how much of a prompt the cache serves, and caches the prompt.

        The cache serves the longest beginning that the prompt has in common with one of
        the cached prompts.
        """
        prompt = provider.list_prompt_texts(request)
        shared_tokens = [
            provider.count_shared_tokens(cached, prompt, self.token_ratio)
            for cached in self._cached
        ]
        most_shared_tokens = max(shared_tokens, default=0)
        record.cached_tokens = min(most_shared_tokens, record.prompt_tokens)

        # The list is changed in place: ADK's copies of the model share it.
        self._cached.append(prompt)
        del self._cached[:-_CACHED_PROMPTS]

    def _next_summary(self, request: LlmRequest) -> Reply | Awaitable[Reply]:
        """Returns the next of `summary_replies`; excerpts after the last one.

        Without `summary_replies`, each summary is made of excerpts.
        """
        if callable(self.summary_replies):
            return self.summary_replies(request)

        replies = self.summary_replies or ()
        index = self._counts["summary_replies"]
        self._counts["summary_replies"] += 1
        if index < len(replies):
            return replies[index]
        return provider.summarize(request, self.token_ratio)

    def _next_reply(self, request: LlmRequest) -> Reply | Awaitable[Reply]:
        """Returns the next reply of `script`, "Done." after the last one.

        Without a script the user's newest text is acknowledged.
        """
        if callable(self.script):
            return self.script(request)

        # Replies without a script count as well, because a script may be set later.
        index = self._counts["replies"]
        self._counts["replies"] += 1
        if self.script is None:
            return _acknowledge(request)
        if index < len(self.script):
            return self.script[index]
        return "Done."

    def _build_response(self, reply: _Answer) -> LlmResponse:
        """Makes a response of a reply, with the facts that every response has.

        The response has the name of the model, and `partial` is False if the reply does
        not set it. With `call_ids`, tool calls without an id get one.
        """
        response = _to_response(reply)
        if not response.model_version:
            response.model_version = self.model
        response.partial = bool(response.partial)
        if self.call_ids:
            for function_call in response.get_function_calls():
                if not function_call.id:
                    self._counts["call_ids"] += 1
                    function_call.id = f"call_{self._counts['call_ids']}"
        return response

    def _record_answer(
        self, record: RecordedRequest, response: LlmResponse, reports_usage: bool
    ) -> None:
        """Bills and records an answer; with `reports_usage`, adds usage to the answer.

        The usage of a scripted response stays as it is.
        """
        texts = provider.list_content_texts([response.content or types.Content()])
        output_tokens = provider.count_tokens(texts, self.token_ratio)
        total_tokens = record.prompt_tokens + output_tokens
        self._counts["billed_tokens"] += total_tokens

        if reports_usage and response.usage_metadata is None:
            response.usage_metadata = types.GenerateContentResponseUsageMetadata(
                prompt_token_count=record.prompt_tokens,
                candidates_token_count=output_tokens,
                total_token_count=total_tokens,
                cached_content_token_count=record.cached_tokens or None,
            )
        # ADK may change the response itself.
        record.response = response.model_copy(deep=True)


def _acknowledge(request: LlmRequest) -> str:
    """Returns an answer that repeats the last line of the user's newest text.

    At most 60 characters are repeated.
    """
    user_texts = [
        part.text
        for content in request.contents
        if content.role == "user"
        for part in content.parts or ()
        if part.text
    ]
    newest_text = user_texts[-1] if user_texts else ""

    # The guard may have put other texts before the user's own words, which stand last.
    newest_line = newest_text.rstrip().rpartition("\n")[2]
    return f"Acknowledged: {newest_line[:60]}" if newest_line else "Acknowledged."


def _to_response(reply: _Answer) -> LlmResponse:
    """Makes a response of a copy of a reply, because ADK may change the response."""
    if isinstance(reply, LlmResponse):
        return reply.model_copy(deep=True)

    if isinstance(reply, types.Content):
        content = reply.model_copy(deep=True)
    else:
        # A text of "" and an empty list make a content without parts.
        parts = types.ModelContent(reply).parts if reply else None
        # Each part is copied by itself: the same part twice is two calls.
        copies = [part.model_copy(deep=True) for part in parts or ()]
        content = types.Content(role="model", parts=copies)
    return LlmResponse(content=content, finish_reason=types.FinishReason.STOP)


def _copy_config(config: types.GenerateContentConfig) -> types.GenerateContentConfig:
    """Copies a config and its tools, to which ADK may still add declarations."""
    if not config.tools:
        return config.model_copy()

    tools = [copy.copy(tool) for tool in config.tools]
    for tool in tools:
        if isinstance(tool, types.Tool) and tool.function_declarations:
            tool.function_declarations = list(tool.function_declarations)
    return config.model_copy(update={"tools": tools})


def _split_response(response: LlmResponse) -> Iterator[LlmResponse]:
    """Yields the partial responses that a stream sends before the complete one."""
    parts = response.content.parts if response.content else None
    for part in parts or ():
        for chunk in _split_part(part):
            yield LlmResponse(
                content=types.Content(role="model", parts=[chunk]),
                partial=True,
                model_version=response.model_version,
            )


def _split_part(part: types.Part) -> Iterator[types.Part]:
    """Yields the text of a part in thirds; yields a copy of a part without text."""
    text = part.text
    if not text:
        yield part.model_copy(deep=True)
        return

    third_chars = math.ceil(len(text) / 3)
    for start in range(0, len(text), third_chars):
        third = text[start : start + third_chars]
        yield types.Part(text=third, thought=part.thought)
