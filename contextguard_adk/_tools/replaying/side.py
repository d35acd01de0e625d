"""One side of a replay: a session that grows as recorded, and a model that is none."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.run_config import RunConfig
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.plugin_manager import PluginManager
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types
from pydantic import Field, ValidationError

from contextguard_adk._history.fingerprints import fingerprint
from contextguard_adk._measuring.tokens import Memo, estimate_config_tokens
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._runtime.runs import branch_scope
from contextguard_adk._tools.recordings import RecordedCall, read_facts
from contextguard_adk._tools.terminal import CommandError
from contextguard_adk.records import CallRecord, Usage
from contextguard_adk.testing import SimulatedLlm

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


@dataclass
class Scale:
    """Real tokens / (bytes / 4) of the whole history that an agent has.

    Once a guard has cut the requests, no count is that of all. What is new in one tells
    how many tokens it takes, since it is new in the whole history as well.
    """

    ratio: float = 1.0
    last: RecordedCall | None = None
    _last_bytes: int = 0

    def of_sent(self, count: int) -> float:
        """The same of what a guard sends: as recorded, if that is what was sent."""
        sent = self.last and self.last.heuristic_tokens
        ratio = self.ratio
        is_same = sent and abs(count / sent - 1) < 0.05
        return self.last.ratio or ratio if self.last and is_same else ratio

    def read(self, call: RecordedCall, count: int) -> bool:
        """Reads a recorded count; returns whether it is that of the whole history."""
        sent = call.heuristic_tokens or 0
        last = self.last
        # A preview leaves no other trace.
        is_whole = not (call.is_guarded or (sent and count > 1.03 * sent + 30))
        if is_whole:
            self.ratio = call.prompt_tokens / count
        elif call.ratio and last is None:
            self.ratio = call.ratio
        elif last:
            density = self.ratio
            new = sent - (last.heuristic_tokens or sent)
            if new > 0 and not read_facts(call.event):  # Else it may be a summary.
                found = (call.prompt_tokens - last.prompt_tokens) / new
                density = min(max(found, 0.2), 5.0)
            grown = max(0, count - self._last_bytes)
            self.ratio += grown * (density - self.ratio) / count
        self.last = call
        self._last_bytes = count
        return is_whole


class _RecordedModel(BaseLlm):
    """Reports tokens in place of an answer, and writes summaries offline."""

    model: str = ""
    has_cache: bool = False
    call: RecordedCall | None = None  # Which corrects the scale, if it is given.
    scale: Scale = Field(default_factory=Scale)
    is_whole: bool = False  # Whether the call's count is that of the request.
    output_tokens: int = 0
    summarizer: SimulatedLlm = Field(default_factory=make_summarizer)
    last: tuple[LlmRequest, Usage] | None = None  # Of those that ask for no summary.
    memo: Any = None  # Of what was recorded.
    cached: list[list[Any]] = Field(default_factory=list)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers a request with a dot, or with the summary that it asks for."""
        if self.summarizer.is_summary_request(llm_request):
            self.summarizer.token_ratio = self.scale.ratio
            async for response in self.summarizer.generate_content_async(llm_request):
                if usage := response.usage_metadata:
                    _, cached_tokens = self._read(llm_request)
                    usage.cached_content_token_count = cached_tokens
                yield response
            return
        count, cached_tokens = self._read(llm_request)
        ratio = self.scale.of_sent(count)
        if self.call:
            self.is_whole = self.scale.read(self.call, count)
            ratio = self.scale.ratio
        tokens = max(1, round(count * ratio))
        cached_tokens = min(tokens, cached_tokens)
        self.last = llm_request, Usage(tokens, cached_tokens, self.output_tokens)
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=tokens,
            cached_content_token_count=cached_tokens or None,
            candidates_token_count=self.output_tokens,
        )
        yield LlmResponse(content=types.ModelContent("."), usage_metadata=usage)

    def _read(self, request: LlmRequest) -> tuple[int, int]:
        """Counts bytes / 4, and the tokens that a cache serves of them."""
        memo = self.memo
        contents = request.contents
        head = estimate_config_tokens(request.config)
        count = max(1, head + memo.estimate_tokens(contents))
        if not self.has_cache:
            return count, 0
        names = [memo.remember(fingerprint, c, c.parts or (), c.role) for c in contents]
        now = [str(request.config.system_instruction), head, *names]
        pairs = [zip(old, now, strict=False) for old in self.cached]
        begins = [sum(1 for _ in takewhile(lambda p: p[0] == p[1], p)) for p in pairs]
        self.cached = [*self.cached[-3:], now]
        if (same := max(begins, default=0) - 2) < 0:
            return count, 0
        shared = head + memo.estimate_tokens(contents[:same])
        return count, round(shared * self.scale.ratio)


@dataclass
class _Older:
    """What ADK makes of the invocations that are over, for an agent in a scope.

    It makes them one by one, unless something rewinds, compacts or answers across them.
    """

    end: int = 0  # Of the events.
    contents: list[types.Content] = field(default_factory=list)
    count: int = 0
    is_alone: bool = True  # The newest invocation can be made by itself.


class Side:
    """A session that grows as the recording does, and a guard's records, if any."""

    def __init__(
        self,
        recorded: Session,
        model: str | None,
        memo: Memo,
        has_cache: bool = False,
    ) -> None:
        self._model = model
        self._recorded = recorded
        later = {key for event in recorded.events for key in event.actions.state_delta}
        state = {k: v for k, v in recorded.state.items() if k not in later}
        update = {"state": _own_state(state), "events": []}
        self._session = recorded.model_copy(update=update)
        self.state = self._session.state
        self.plugins = PluginManager()
        self.records: list[CallRecord] = []
        self.llm = _RecordedModel(memo=memo, has_cache=has_cache)
        self._older = defaultdict[tuple[str, str], _Older](_Older)

    async def build(self, call: RecordedCall, agent: LlmAgent) -> LlmRequest:
        """Has ADK build the request of a call; no model is called.

        ADK copies the whole history for each. So what is older than the invocation is
        built once, as long as that comes to the same, which is looked at now and then.
        """
        invocation = self.begin(call, agent, PluginManager())
        older = self._older[agent.name, branch_scope(call.event)]
        events = self._session.events
        older.is_alone &= _stand_alone(events[older.end :])
        if agent.include_contents == "none" or not older.is_alone:
            return await self._build(invocation, agent)
        own = takewhile(
            lambda e: e.invocation_id == invocation.invocation_id, reversed(events)
        )
        start = len(events) - sum(1 for _ in own)
        try:
            if start > older.end:
                new = await self._build(invocation, agent, events[older.end : start])
                older.contents += new.contents
                older.end = start
                older.count = older.count + 1
            request = await self._build(invocation, agent, events[start:])
            request.contents = [*older.contents, *request.contents]
            if older.count & (older.count - 1) or start < older.end:
                return request
        except CommandError:
            request = LlmRequest()
        whole = await self._build(invocation, agent)
        older.is_alone = whole.contents == request.contents
        return whole

    async def _build(
        self,
        invocation: InvocationContext,
        agent: LlmAgent,
        events: list[Event] | None = None,
    ) -> LlmRequest:
        """Has ADK build a request from all events, or from these."""
        if events is not None:
            session = self._session.model_copy(update={"events": events})
            invocation = invocation.model_copy(update={"session": session})
        built: list[LlmRequest] = []

        def take(callback_context: object, llm_request: LlmRequest) -> LlmResponse:
            built.append(llm_request)
            return LlmResponse(content=types.ModelContent("."))

        agent.before_model_callback = take
        try:
            async for _ in agent.run_async(invocation):
                pass
        except Exception as error:  # A result without its call, for instance.
            text = f"ADK cannot build a request from the recording: {error}"
            raise CommandError(text) from error
        if not built:
            raise CommandError("ADK makes no model call where one was recorded")
        return built[0]

    async def send(
        self, call: RecordedCall, agent: LlmAgent, request: LlmRequest
    ) -> Sent:
        """Makes the call as ADK would, without the traces, which take most time."""
        changes = {
            "contents": list(request.contents),
            "config": request.config.model_copy(deep=True),
            "tools_dict": dict(request.tools_dict),
        }
        request = request.model_copy(update=changes)
        invocation = self.begin(call, agent, self.plugins)
        context = CallbackContext(invocation, event_actions=EventActions())
        await self.plugins.run_before_model_callback(
            callback_context=context, llm_request=request
        )
        async for response in self.llm.generate_content_async(request):
            await self.plugins.run_after_model_callback(
                callback_context=context, llm_response=response
            )
        assert self.llm.last is not None, "The model has just noted it."
        (request, usage) = self.llm.last
        self.llm.last = None
        # An exempt agent has no record of it.
        return Sent(request, usage, self.records.pop() if self.records else None)

    def begin(
        self, call: RecordedCall, agent: LlmAgent, plugins: PluginManager
    ) -> InvocationContext:
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
            plugin_manager=plugins,
        )


def _stand_alone(events: Sequence[Event]) -> bool:
    """Whether events change nothing before them, and answer no call there."""
    calls = {call.id for event in events for call in event.get_function_calls()}
    return not any(
        event.actions.compaction
        or event.actions.rewind_before_invocation_id
        or any(answer.id not in calls for answer in event.get_function_responses())
        for event in events
    )


def make_agent(name: str, **settings: Any) -> LlmAgent:
    """Makes the agent of recorded calls."""
    try:
        return LlmAgent(name=name, **settings)
    except ValidationError as error:
        raise CommandError(f"{name!r} is not a name of an agent") from error


def _own_state(values: dict[str, Any]) -> dict[str, Any]:
    """Returns what is in state without what a guard keeps there for itself."""
    return {k: value for k, value in values.items() if not _OWN_KEY.match(k)}
