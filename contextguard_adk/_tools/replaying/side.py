"""One side of a replay: a session that grows as recorded, and a model of its own.

The model answers nothing. It reports as many tokens as the recorded model would have.
Heuristic tokens are UTF-8 bytes / 4; real tokens are those that a provider counts.
"""

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

# Requests of the same size differ by a smaller share of it.
SAME_SIZE = 0.05

# The difference between two heuristic counts of one request is at most this ratio and,
# in addition, this number of tokens. A larger one means that a result was shortened.
SAME_COUNT_RATIO = 1.03
SAME_COUNT_TOKENS = 30

# The ratio of a few new tokens is mostly noise outside this range.
LEAST_NEW_RATIO = 0.2
MOST_NEW_RATIO = 5.0

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
    """A request as it was sent, its usage, and a guard's record of it.

    There is no record of an exempt agent, which no guard watches.
    """

    request: LlmRequest
    usage: Usage
    record: CallRecord | None


@dataclass
class Scale:
    """The real tokens of an agent's whole history, per heuristic token.

    Three kinds of calls correct the ratio:
    - The recorded request had the whole history: its count gives the ratio.
    - A guard had cut the recorded request: the text that is new since the last call
      gives a ratio of its own. The new text is a part of the whole history as well, so
      it changes the ratio by its share.
    - The first recorded request was cut: its ratio stands for the whole history.

    Attributes:
        ratio: Real tokens per heuristic token.
        last: The last call that was read; None before the first.
    """

    ratio: float = 1.0
    last: RecordedCall | None = None
    # The heuristic tokens of the whole history at the last call.
    _last_whole_tokens: int = 0

    def find_ratio(self, heuristic_tokens: int) -> float:
        """Returns the ratio of a request that a guard sends.

        If the last recorded request had about the same size, it had the same content:
        its ratio is returned. Otherwise it is the ratio of the whole history.
        """
        last = self.last
        if last is None or not last.ratio or not last.heuristic_tokens:
            return self.ratio

        difference = abs(heuristic_tokens / last.heuristic_tokens - 1)
        return last.ratio if difference < SAME_SIZE else self.ratio

    def correct(self, call: RecordedCall, whole_tokens: int) -> bool:
        """Corrects the ratio; returns whether the request had the whole history.

        `whole_tokens` are the heuristic tokens of the whole history at the call.
        """
        # A preview of a tool result leaves no trace but a smaller request.
        is_shortened = False
        if call.heuristic_tokens:
            most_tokens = SAME_COUNT_RATIO * call.heuristic_tokens + SAME_COUNT_TOKENS
            is_shortened = whole_tokens > most_tokens
        is_whole = not (call.is_guarded or is_shortened)

        if is_whole:
            self.ratio = call.prompt_tokens / whole_tokens
        elif self.last:
            # The new ratio is the mean of two ratios, weighted by tokens: that of the
            # new text, and the ratio so far for the older text.
            new_tokens = max(0, whole_tokens - self._last_whole_tokens)
            ratio_of_new = self._measure_new(call, self.last)
            self.ratio += new_tokens * (ratio_of_new - self.ratio) / whole_tokens
        elif call.ratio:
            self.ratio = call.ratio

        self.last = call
        self._last_whole_tokens = whole_tokens
        return is_whole

    def _measure_new(self, call: RecordedCall, last: RecordedCall) -> float:
        """Returns the ratio of the text that is new since the last call.

        If the counts do not tell it, returns the ratio of the whole history.
        """
        if not (call.heuristic_tokens and last.heuristic_tokens):
            return self.ratio

        # The new text may be a summary in place of older text if the guard notes
        # something on the event.
        new_heuristic_tokens = call.heuristic_tokens - last.heuristic_tokens
        may_be_summary = bool(read_facts(call.event))
        if new_heuristic_tokens <= 0 or may_be_summary:
            return self.ratio

        new_real_tokens = call.prompt_tokens - last.prompt_tokens
        raised_ratio = max(LEAST_NEW_RATIO, new_real_tokens / new_heuristic_tokens)
        return min(MOST_NEW_RATIO, raised_ratio)


class _RequestSize(NamedTuple):
    """The size of a request, and the real tokens of it that a prompt cache serves."""

    heuristic_tokens: int
    cached_tokens: int


class _RecordedModel(BaseLlm):
    """Reports tokens in place of an answer, and writes summaries offline.

    Attributes:
        has_cache: Whether a prompt cache is assumed.
        call: The recorded call that corrects the scale; None for a guard that acts,
            whose requests are none of the recording.
        scale: The scale of the agent that calls.
        is_whole: Whether the recorded request of `call` had the whole history.
        output_tokens: The tokens of the recorded answer.
        summarizer: The model that writes summaries.
        answered: The last request for no summary, with its usage.
        memo: A `Memo` of the recorded events.
        cached_prompts: The last prompts that a cache has, oldest first.
    """

    model: str = ""
    has_cache: bool = False
    call: RecordedCall | None = None
    scale: Scale = Field(default_factory=Scale)
    is_whole: bool = False
    output_tokens: int = 0
    summarizer: SimulatedLlm = Field(default_factory=make_summarizer)
    answered: tuple[LlmRequest, Usage] | None = None
    memo: Any = None
    cached_prompts: list[list[Any]] = Field(default_factory=list)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers a request with a dot, or with the summary that it asks for."""
        if self.summarizer.is_summary_request(llm_request):
            async for response in self._summarize(llm_request):
                yield response
            return

        size = self._count_request(llm_request)
        if self.call:
            self.is_whole = self.scale.correct(self.call, size.heuristic_tokens)
            ratio = self.scale.ratio
        else:
            ratio = self.scale.find_ratio(size.heuristic_tokens)
        tokens = max(1, round(size.heuristic_tokens * ratio))
        cached_tokens = min(tokens, size.cached_tokens)

        self.answered = llm_request, Usage(tokens, cached_tokens, self.output_tokens)
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=tokens,
            cached_content_token_count=cached_tokens or None,
            candidates_token_count=self.output_tokens,
        )
        yield LlmResponse(content=types.ModelContent("."), usage_metadata=usage)

    async def _summarize(
        self, request: LlmRequest
    ) -> AsyncGenerator[LlmResponse, None]:
        """Yields a summary, whose usage tells the tokens that a cache serves."""
        self.summarizer.token_ratio = self.scale.ratio
        async for response in self.summarizer.generate_content_async(request):
            if response.usage_metadata:
                size = self._count_request(request)
                response.usage_metadata.cached_content_token_count = size.cached_tokens
            yield response

    def _count_request(self, request: LlmRequest) -> _RequestSize:
        """Returns the size of a request.

        If a prompt cache is assumed, the prompt is kept in it for the next requests.
        """
        memo = self.memo
        contents = request.contents
        head_tokens = estimate_config_tokens(request.config)
        request_tokens = max(1, head_tokens + memo.estimate_tokens(contents))
        if not self.has_cache:
            return _RequestSize(request_tokens, 0)

        # A prompt in the cache is a list: two items stand for the instruction and the
        # tools, and one for each content.
        head = [str(request.config.system_instruction), head_tokens]
        fingerprints = [
            memo.remember(fingerprint, content, content.parts or (), content.role)
            for content in contents
        ]
        prompt = [*head, *fingerprints]
        same_counts = [_count_same(cached, prompt) for cached in self.cached_prompts]
        same_items = max(same_counts, default=0)
        self.cached_prompts = [*self.cached_prompts[-3:], prompt]

        if same_items < len(head):
            return _RequestSize(request_tokens, 0)
        same_contents = contents[: same_items - len(head)]
        same_tokens = head_tokens + memo.estimate_tokens(same_contents)
        return _RequestSize(request_tokens, round(same_tokens * self.scale.ratio))


def _count_same(old: Sequence[Any], new: Sequence[Any]) -> int:
    """Counts the items with which two lists begin in common."""
    pairs = zip(old, new, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass
class _Finished:
    """The contents that ADK builds of an agent's finished invocations, in one scope.

    Attributes:
        end: The number of events of which the contents are built.
        contents: The contents of the events before `end`.
        addition_count: How often contents were added.
        is_separable: Whether ADK builds the same contents from some invocations at a
            time as from all at once. Once false, it stays so.
    """

    end: int = 0
    contents: list[types.Content] = field(default_factory=list)
    addition_count: int = 0
    is_separable: bool = True


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
        later_keys = set[str]()
        for event in recorded.events:
            later_keys.update(event.actions.state_delta)
        first_state = {k: v for k, v in recorded.state.items() if k not in later_keys}
        changes = {"state": _without_own_keys(first_state), "events": []}
        self._session = recorded.model_copy(update=changes)
        self.state = self._session.state

        self.plugins = PluginManager()
        self.records: list[CallRecord] = []
        self.llm = _RecordedModel(memo=memo, has_cache=has_cache)
        # By the name of an agent, and its branch scope.
        self._finished = defaultdict[tuple[str, str], _Finished](_Finished)

    async def build(self, call: RecordedCall, agent: LlmAgent) -> LlmRequest:
        """Has ADK build the request of a call; no model is called.

        ADK copies all events for each request, which takes most of the time. So the
        contents of finished invocations are built once, and only the running invocation
        is built for each call. From time to time the request is also built as a whole,
        and that one is returned. If its contents differ from the joined ones, all later
        requests are built as a whole.
        """
        invocation = self.begin(call, agent, PluginManager())
        events = self._session.events
        finished = self._finished[agent.name, branch_scope(call.event)]
        if finished.is_separable:
            finished.is_separable = _are_separable(events[finished.end :])
        if agent.include_contents == "none" or not finished.is_separable:
            return await self._build_from(events, invocation, agent)

        start = _find_running_start(events, invocation.invocation_id)
        try:
            await self._add_finished(finished, start, invocation, agent)
            request = await self._build_from(events[start:], invocation, agent)
            joined_contents = [*finished.contents, *request.contents]
            request.contents = joined_contents

            # Checks after 1, 2, 4, 8, … additions are enough, and cost little.
            count = finished.addition_count
            is_power_of_two = count & (count - 1) == 0
            if start < finished.end or not is_power_of_two:
                return request
        except CommandError:
            # ADK cannot build some of the events without the others. No request is
            # without contents, so the comparison below fails.
            joined_contents = []

        whole_request = await self._build_from(events, invocation, agent)
        finished.is_separable = whole_request.contents == joined_contents
        return whole_request

    async def _add_finished(
        self,
        finished: _Finished,
        running_start: int,
        invocation: InvocationContext,
        agent: LlmAgent,
    ) -> None:
        """Builds the contents of invocations that have finished since the last call."""
        if running_start <= finished.end:
            return
        new_events = self._session.events[finished.end : running_start]
        new_request = await self._build_from(new_events, invocation, agent)
        finished.contents += new_request.contents
        finished.end = running_start
        finished.addition_count += 1

    async def _build_from(
        self, events: list[Event], invocation: InvocationContext, agent: LlmAgent
    ) -> LlmRequest:
        """Has ADK build a request from all or some events of the session."""
        session = self._session.model_copy(update={"events": events})
        own_invocation = invocation.model_copy(update={"session": session})
        return await _catch_request(own_invocation, agent)

    async def send(
        self, call: RecordedCall, agent: LlmAgent, request: LlmRequest
    ) -> Sent:
        """Makes the call as ADK would, without the traces, which take most time.

        The guard changes a copy of the request. Returns this copy, the usage, and the
        record of the guard.
        """
        changes = {
            "contents": list(request.contents),
            "config": request.config.model_copy(deep=True),
            "tools_dict": dict(request.tools_dict),
        }
        own_request = request.model_copy(update=changes)
        invocation = self.begin(call, agent, self.plugins)
        context = CallbackContext(invocation, event_actions=EventActions())

        await self.plugins.run_before_model_callback(
            callback_context=context, llm_request=own_request
        )
        async for response in self.llm.generate_content_async(own_request):
            await self.plugins.run_after_model_callback(
                callback_context=context, llm_response=response
            )

        assert self.llm.answered is not None, "The model has just noted it."
        sent_request, usage = self.llm.answered
        self.llm.answered = None
        record = self.records.pop() if self.records else None
        return Sent(sent_request, usage, record)

    def begin(
        self, call: RecordedCall, agent: LlmAgent, plugins: PluginManager
    ) -> InvocationContext:
        """Adds the events before a recorded call, and prepares the model for the call.

        Returns the invocation that the call belongs to.
        """
        event = call.event
        added_count = len(self._session.events)
        for new_event in self._recorded.events[added_count : call.index]:
            self._session.events.append(new_event)
            self.state.update(_without_own_keys(new_event.actions.state_delta))

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
    requests: list[LlmRequest] = []

    # ADK calls no model if the callback returns a response.
    def catch(callback_context: object, llm_request: LlmRequest) -> LlmResponse:
        requests.append(llm_request)
        return LlmResponse(content=types.ModelContent("."))

    agent.before_model_callback = catch
    try:
        async for _ in agent.run_async(invocation):
            pass
    except Exception as error:  # A result without its call, for instance.
        text = f"ADK cannot build a request from the recording: {error}"
        raise CommandError(text) from error
    if not requests:
        raise CommandError("ADK makes no model call where one was recorded")
    return requests[0]


def _find_running_start(events: Sequence[Event], invocation_id: str) -> int:
    """Returns the index of the first event of the running invocation.

    Its events are the last ones. If it has no event yet, returns the number of events.
    """
    start = len(events)
    while start and events[start - 1].invocation_id == invocation_id:
        start -= 1
    return start


def _are_separable(events: Sequence[Event]) -> bool:
    """Whether ADK can build the contents of some events without the earlier events.

    It can if no event changes the events before it, as a compaction or a rewind does,
    and if each tool result has its call among the events.
    """
    call_ids = {call.id for event in events for call in event.get_function_calls()}
    for event in events:
        actions = event.actions
        if actions.compaction or actions.rewind_before_invocation_id:
            return False
        responses = event.get_function_responses()
        if any(response.id not in call_ids for response in responses):
            return False
    return True


def make_agent(name: str, **settings: Any) -> LlmAgent:
    """Makes the agent of recorded calls."""
    try:
        return LlmAgent(name=name, **settings)
    except ValidationError as error:
        raise CommandError(f"{name!r} is not a name of an agent") from error


def _without_own_keys(state: dict[str, Any]) -> dict[str, Any]:
    """Returns state without the keys that a guard keeps for itself."""
    return {key: value for key, value in state.items() if not _OWN_KEY.match(key)}
