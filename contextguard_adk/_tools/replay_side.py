"""One side of a replay: a session that grows as recorded, and a model that is none."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.run_config import RunConfig
from google.adk.events.event_actions import EventActions
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.plugin_manager import PluginManager
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types
from pydantic import Field

from contextguard_adk._providers.clients import read_usage
from contextguard_adk._tools.recordings import RecordedCall
from contextguard_adk._tools.terminal import CommandError
from contextguard_adk.records import CallRecord, Usage
from contextguard_adk.testing import SimulatedLlm
from contextguard_adk.testing.provider import (
    count_request_tokens,
    count_shared_tokens,
    list_prompt_texts,
)

# Todos and a request for a compaction are the user's.
_OWN_KEY = re.compile(
    r"__context_guard_(?!todos_)|context_guard:(?!todos:|compact(?!ed))"
)


def make_summarizer(model: str = "simulated") -> SimulatedLlm:
    """Makes a model that writes summaries of any length offline, and keeps nothing."""
    return SimulatedLlm(
        model=model, context_window=10**12, token_ratio=1.0, keep_requests=0
    )


class Sent(NamedTuple):
    """A request as it was sent, what it took, and a guard's record of it, if any."""

    request: LlmRequest
    usage: Usage
    record: CallRecord | None


class _RecordedModel(BaseLlm):
    """Reports tokens in place of an answer, and writes summaries offline."""

    model: str = ""
    has_cache: bool = False
    real_tokens: int | None = None  # What was recorded of the next request.
    output_tokens: int = 0
    ratio: float = 1.0  # Real tokens / (bytes / 4); a recorded count corrects it.
    summarizer: SimulatedLlm = Field(default_factory=make_summarizer)
    last: tuple[LlmRequest, Usage] | None = None  # Of those that ask for no summary.
    cached: list[list[tuple[str, str]]] = Field(default_factory=list)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers a request with a dot, or with the summary that it asks for."""
        if self.summarizer.is_summary_request(llm_request):
            self.summarizer.token_ratio = self.ratio
            async for response in self.summarizer.generate_content_async(llm_request):
                if usage := response.usage_metadata:
                    cached_tokens = self._serve_from_cache(llm_request)
                    usage.cached_content_token_count = cached_tokens
                yield response
            return
        count = max(1, count_bytes(llm_request))
        if self.real_tokens:
            self.ratio = self.real_tokens / count
        tokens = max(1, round(count * self.ratio))
        cached_tokens = min(tokens, self._serve_from_cache(llm_request))
        self.last = llm_request, Usage(tokens, cached_tokens, self.output_tokens)
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=tokens,
            cached_content_token_count=cached_tokens or None,
            candidates_token_count=self.output_tokens,
        )
        yield LlmResponse(content=types.ModelContent("."), usage_metadata=usage)

    def _serve_from_cache(self, request: LlmRequest) -> int:
        """Counts what one of the last four prompts began with; keeps this one."""
        if not self.has_cache:
            return 0
        now = list_prompt_texts(request)
        shared = [count_shared_tokens(old, now, self.ratio) for old in self.cached]
        self.cached = [*self.cached[-3:], now]
        return max(shared, default=0)


class Side:
    """A session that grows as the recording does, and a guard's records, if any."""

    def __init__(
        self, recorded: Session, model: str | None, has_cache: bool = False
    ) -> None:
        self._model, self._recorded = model, recorded
        later = {key for event in recorded.events for key in event.actions.state_delta}
        state = {k: v for k, v in recorded.state.items() if k not in later}
        update = {"state": _own_state(state), "events": []}
        self._session = recorded.model_copy(update=update)
        self.state = self._session.state
        self.plugins = PluginManager()
        self.records: list[CallRecord] = []
        self.llm = _RecordedModel(has_cache=has_cache)

    async def play(self, call: RecordedCall, agent: LlmAgent) -> Sent:
        """Has ADK build the request of a call and make it."""
        try:
            async for _ in agent.run_async(self._begin(call, agent)):
                pass
        except Exception as error:  # A result without its call, for instance.
            text = f"ADK cannot build a request from the recording: {error}"
            raise CommandError(text) from error
        return self._take()

    async def send(
        self, call: RecordedCall, agent: LlmAgent, request: LlmRequest
    ) -> Sent:
        """Makes the same call as ADK would: to build each anew takes most time."""
        changes = {
            "contents": list(request.contents),
            "config": request.config.model_copy(deep=True),
            "tools_dict": dict(request.tools_dict),
        }
        request = request.model_copy(update=changes)
        context = CallbackContext(
            self._begin(call, agent), event_actions=EventActions()
        )
        await self.plugins.run_before_model_callback(
            callback_context=context, llm_request=request
        )
        async for response in self.llm.generate_content_async(request):
            await self.plugins.run_after_model_callback(
                callback_context=context, llm_response=response
            )
        return self._take()

    def _begin(self, call: RecordedCall, agent: LlmAgent) -> InvocationContext:
        """Adds what was recorded before a model call."""
        event = call.event
        for new in self._recorded.events[len(self._session.events) : call.index]:
            self._session.events.append(new)
            self.state.update(_own_state(new.actions.state_delta))
        self.llm.model = self._model or event.model_version or ""
        self.llm.output_tokens = read_usage(event.usage_metadata).output_tokens
        agent.model = self.llm
        return InvocationContext(
            session_service=InMemorySessionService(),
            session=self._session,
            invocation_id=event.invocation_id,
            agent=agent,
            branch=event.branch,
            isolation_scope=event.isolation_scope,
            node_path=event.node_info.path or None,
            run_config=RunConfig(),
            plugin_manager=self.plugins,
        )

    def _take(self) -> Sent:
        """Returns what was sent last; an exempt agent has no record of it."""
        if self.llm.last is None:
            raise CommandError("ADK makes no model call where one was recorded")
        (request, usage), self.llm.last = self.llm.last, None
        return Sent(request, usage, self.records.pop() if self.records else None)


def _own_state(values: dict[str, Any]) -> dict[str, Any]:
    """Returns what is in state without what a guard keeps there for itself."""
    return {k: value for k, value in values.items() if not _OWN_KEY.match(k)}


def count_bytes(request: LlmRequest) -> int:
    """Counts a request's tokens as its bytes / 4."""
    return count_request_tokens(request, token_ratio=1.0, media_tokens=258)
