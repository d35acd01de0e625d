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

# The keys of a guard; todos and a request for a compaction belong to the user.
_OWN_KEY = re.compile(
    r"__context_guard_(?!todos_)|context_guard:(?!todos:|compact(?!ed))"
)


def make_summarizer(model: str = "simulated") -> SimulatedLlm:
    """Makes a model that writes summaries of any length offline, and keeps nothing."""
    return SimulatedLlm(
        model=model, context_window=10**12, token_ratio=1.0, keep_requests=0
    )


class Sent(NamedTuple):
    """A request as it was sent, its usage, and a guard's record of it, if any."""

    request: LlmRequest
    usage: Usage
    record: CallRecord | None


@dataclass
class Scale:
    """The real tokens of an agent's whole history, per token by bytes / 4.

    While no guard has cut a request, its count is that of the whole history and gives
    the ratio. Once a guard cuts the requests, only the text that is new since the last
    call tells its own ratio: it is new in the whole history as well. It changes the
    ratio by its share of the history.
    """

    ratio: float = 1.0
    last: RecordedCall | None = None
    _last_count: int = 0

    def of_sent(self, count: int) -> float:
        """Returns the ratio of a request that a guard sends, by bytes / 4 of it.

        It is the recorded one, if the recorded request had about the same size.
        """
        last = self.last
        if last is None or not last.ratio or not last.heuristic_tokens:
            return self.ratio
        is_same = abs(count / last.heuristic_tokens - 1) < 0.05
        return last.ratio if is_same else self.ratio

    def read(self, call: RecordedCall, count: int) -> bool:
        """Reads a recorded count; returns whether it is that of the whole history.

        `count` are the tokens of the whole history by bytes / 4.
        """
        sent = call.heuristic_tokens or 0
        # A preview of a tool result leaves no other trace.
        is_shortened = bool(sent) and count > 1.03 * sent + 30
        is_whole = not (call.is_guarded or is_shortened)

        if is_whole:
            self.ratio = call.prompt_tokens / count
        elif self.last:
            grown = max(0, count - self._last_count)
            new_ratio = self._measure_new(call, self.last)
            self.ratio += grown * (new_ratio - self.ratio) / count
        elif call.ratio:
            self.ratio = call.ratio

        self.last = call
        self._last_count = count
        return is_whole

    def _measure_new(self, call: RecordedCall, last: RecordedCall) -> float:
        """Returns the ratio of the text that is new since the last call."""
        if not (call.heuristic_tokens and last.heuristic_tokens):
            return self.ratio
        new = call.heuristic_tokens - last.heuristic_tokens
        if new <= 0 or read_facts(call.event):  # The new text may be a summary.
            return self.ratio
        measured = (call.prompt_tokens - last.prompt_tokens) / new
        return min(max(measured, 0.2), 5.0)


class _RecordedModel(BaseLlm):
    """Reports tokens in place of an answer, and writes summaries offline."""

    model: str = ""
    has_cache: bool = False
    call: RecordedCall | None = None  # Corrects the scale, if it is given.
    scale: Scale = Field(default_factory=Scale)
    is_whole: bool = False  # Whether the call's count is that of the request.
    output_tokens: int = 0
    summarizer: SimulatedLlm = Field(default_factory=make_summarizer)
    last: tuple[LlmRequest, Usage] | None = None  # The last one for no summary.
    memo: Any = None  # A `Memo` of the recorded events.
    cached: list[list[Any]] = Field(default_factory=list)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers a request with a dot, or with the summary that it asks for."""
        if self.summarizer.is_summary_request(llm_request):
            async for response in self._summarize(llm_request):
                yield response
            return

        count, shared_tokens = self._read(llm_request)
        ratio = self.scale.of_sent(count)
        if self.call:
            self.is_whole = self.scale.read(self.call, count)
            ratio = self.scale.ratio
        tokens = max(1, round(count * ratio))
        cached_tokens = min(tokens, shared_tokens)

        self.last = llm_request, Usage(tokens, cached_tokens, self.output_tokens)
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=tokens,
            cached_content_token_count=cached_tokens or None,
            candidates_token_count=self.output_tokens,
        )
        yield LlmResponse(content=types.ModelContent("."), usage_metadata=usage)

    async def _summarize(
        self, request: LlmRequest
    ) -> AsyncGenerator[LlmResponse, None]:
        self.summarizer.token_ratio = self.scale.ratio
        async for response in self.summarizer.generate_content_async(request):
            if response.usage_metadata:
                _, shared_tokens = self._read(request)
                response.usage_metadata.cached_content_token_count = shared_tokens
            yield response

    def _read(self, request: LlmRequest) -> tuple[int, int]:
        """Counts bytes / 4, and the tokens that a cache serves of them."""
        memo = self.memo
        contents = request.contents
        head_count = estimate_config_tokens(request.config)
        count = max(1, head_count + memo.estimate_tokens(contents))
        if not self.has_cache:
            return count, 0

        names = [memo.remember(fingerprint, c, c.parts or (), c.role) for c in contents]
        head = [str(request.config.system_instruction), head_count]
        prompt = [*head, *names]
        same_items = max((_count_same(old, prompt) for old in self.cached), default=0)
        self.cached = [*self.cached[-3:], prompt]

        if same_items < len(head):
            return count, 0
        same_contents = contents[: same_items - len(head)]
        shared_count = head_count + memo.estimate_tokens(same_contents)
        return count, round(shared_count * self.scale.ratio)


def _count_same(old: Sequence[Any], new: Sequence[Any]) -> int:
    """Counts the items with which two lists begin in common."""
    pairs = zip(old, new, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass
class _Older:
    """ADK's contents of the finished invocations, for an agent in a branch scope.

    They are built one invocation after another, as long as none of them changes or
    answers an earlier one.
    """

    end: int = 0  # The events before it are built.
    contents: list[types.Content] = field(default_factory=list)
    count: int = 0  # How often something was added.
    is_alone: bool = True  # Whether an invocation can be built by itself.


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

        # A recording has the state at its end. The state before the first event is
        # without the keys that events bring.
        later = {key for event in recorded.events for key in event.actions.state_delta}
        first_state = {k: v for k, v in recorded.state.items() if k not in later}
        update = {"state": _without_own_keys(first_state), "events": []}
        self._session = recorded.model_copy(update=update)
        self.state = self._session.state

        self.plugins = PluginManager()
        self.records: list[CallRecord] = []
        self.llm = _RecordedModel(memo=memo, has_cache=has_cache)
        self._older = defaultdict[tuple[str, str], _Older](_Older)

    async def build(self, call: RecordedCall, agent: LlmAgent) -> LlmRequest:
        """Has ADK build the request of a call; no model is called.

        ADK copies the whole history for each request. So the finished invocations are
        built once, as long as that gives the same contents. Whether it does is checked
        after 1, 2, 4, 8, … additions.
        """
        invocation = self.begin(call, agent, PluginManager())
        older = self._older[agent.name, branch_scope(call.event)]
        events = self._session.events
        older.is_alone = older.is_alone and _stand_alone(events[older.end :])
        if agent.include_contents == "none" or not older.is_alone:
            return await self._build(invocation, agent, events)

        # The events of the running invocation stand last, from `start` on.
        running = takewhile(
            lambda e: e.invocation_id == invocation.invocation_id, reversed(events)
        )
        start = len(events) - sum(1 for _ in running)

        try:
            if start > older.end:
                new = await self._build(invocation, agent, events[older.end : start])
                older.contents += new.contents
                older.end = start
                older.count += 1

            joined = await self._build(invocation, agent, events[start:])
            joined.contents = [*older.contents, *joined.contents]
            is_power_of_two = older.count & (older.count - 1) == 0
            if start < older.end or not is_power_of_two:
                return joined
        except CommandError:  # A part cannot be built by itself.
            joined = LlmRequest()

        whole = await self._build(invocation, agent, events)
        older.is_alone = whole.contents == joined.contents
        return whole

    async def _build(
        self, invocation: InvocationContext, agent: LlmAgent, events: list[Event]
    ) -> LlmRequest:
        """Has ADK build a request from all or some events of the session."""
        session = self._session.model_copy(update={"events": events})
        part = invocation.model_copy(update={"session": session})
        return await _catch_request(part, agent)

    async def send(
        self, call: RecordedCall, agent: LlmAgent, request: LlmRequest
    ) -> Sent:
        """Makes the call as ADK would, without the traces, which take most time."""
        changes = {
            "contents": list(request.contents),
            "config": request.config.model_copy(deep=True),
            "tools_dict": dict(request.tools_dict),
        }
        own_request = request.model_copy(update=changes)  # A guard may change it.
        invocation = self.begin(call, agent, self.plugins)
        context = CallbackContext(invocation, event_actions=EventActions())

        await self.plugins.run_before_model_callback(
            callback_context=context, llm_request=own_request
        )
        async for response in self.llm.generate_content_async(own_request):
            await self.plugins.run_after_model_callback(
                callback_context=context, llm_response=response
            )

        assert self.llm.last is not None, "The model has just noted it."
        sent_request, usage = self.llm.last
        self.llm.last = None
        # There is no record of an exempt agent.
        record = self.records.pop() if self.records else None
        return Sent(sent_request, usage, record)

    def begin(
        self, call: RecordedCall, agent: LlmAgent, plugins: PluginManager
    ) -> InvocationContext:
        """Adds the events before a recorded call; returns the call's invocation."""
        event = call.event
        for new in self._recorded.events[len(self._session.events) : call.index]:
            self._session.events.append(new)
            self.state.update(_without_own_keys(new.actions.state_delta))

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


async def _catch_request(invocation: InvocationContext, agent: LlmAgent) -> LlmRequest:
    """Runs an agent up to its model call; returns the request that ADK has built."""
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


def _without_own_keys(state: dict[str, Any]) -> dict[str, Any]:
    """Returns state without the keys that a guard keeps for itself."""
    return {key: value for key, value in state.items() if not _OWN_KEY.match(key)}
