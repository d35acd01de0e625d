"""One side of a replay: a session that grows as recorded, and a model of its own.

The model gives no real answers: it reports as many tokens as the recorded model would
have. Heuristic tokens are UTF-8 bytes / 4; real tokens are those that a provider
counts. The whole history is a request that no guard has cut.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
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

# Two requests whose sizes differ by less than this ratio have the same size.
SAME_SIZE_RATIO = 0.05

# The difference between two heuristic counts of one request is at most this ratio and,
# in addition, this number of tokens. A larger one means that a result was shortened.
SAME_COUNT_RATIO = 1.03
SAME_COUNT_TOKENS = 30

# The ratio of a few new tokens is mostly noise outside this range.
LEAST_NEW_RATIO = 0.2
MOST_NEW_RATIO = 5.0

# The simulated prompt cache has this number of prompts.
MOST_CACHED_PROMPTS = 4

# The keys of session state that a guard writes, in its two forms of keys. The keys of
# todos, "context_guard:compact" and "context_guard:compact_focus" belong to the user;
# "context_guard:compacted:…" is a key of the guard.
_OWN_KEY = re.compile(
    r"__context_guard_(?!todos_)|context_guard:(?!todos:|compact(?!ed))"
)


def make_summarizer(model: str = "simulated") -> SimulatedLlm:
    """Makes a model that writes summaries of any length offline, and keeps nothing."""
    return SimulatedLlm(
        model=model, context_window=10**12, token_ratio=1.0, keep_requests=0
    )


class Sent(NamedTuple):
    """A request as it was sent, with the figures of the call.

    Attributes:
        request: The request.
        usage: Its tokens, and those of the recorded answer.
        record: A guard's record of the call; None for an agent that no guard watches.
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
        last: The last recorded call that has corrected the ratio; None before the
            first.
    """

    ratio: float = 1.0
    last: RecordedCall | None = None
    # The heuristic tokens of the whole history at the last call.
    _last_whole_tokens: int = 0

    def find_ratio(self, heuristic_tokens: int) -> float:
        """Returns the ratio of a request that a guard sends.

        If the last recorded request had about the same size, it had the same content:
        its ratio is returned. Otherwise the ratio of the whole history is returned.
        """
        last = self.last
        if last and last.ratio and last.heuristic_tokens:
            difference_ratio = abs(heuristic_tokens / last.heuristic_tokens - 1)
            if difference_ratio < SAME_SIZE_RATIO:
                return last.ratio
        return self.ratio

    def correct(self, call: RecordedCall, is_whole: bool, whole_tokens: int) -> None:
        """Corrects the ratio by a recorded call, which becomes the last one.

        Args:
            call: The recorded call.
            is_whole: Whether the recorded request had the whole history.
            whole_tokens: The heuristic tokens of the whole history at the call.
        """
        if is_whole:
            self.ratio = call.prompt_tokens / whole_tokens
        elif self.last:
            # The new ratio is the mean of two ratios, weighted by tokens: that of the
            # new text, and the ratio so far for the older text.
            new_tokens = max(0, whole_tokens - self._last_whole_tokens)
            difference = self._measure_new_text(call, self.last) - self.ratio
            self.ratio += new_tokens * difference / whole_tokens
        elif call.ratio:
            self.ratio = call.ratio

        self.last = call
        self._last_whole_tokens = whole_tokens

    def _measure_new_text(self, call: RecordedCall, last: RecordedCall) -> float:
        """Returns the ratio of the text that is new since the last call.

        If the counts do not tell it, returns the ratio of the whole history.
        """
        if not (call.heuristic_tokens and last.heuristic_tokens):
            return self.ratio

        # If a guard has noted a fact on the event, the new text may be a summary that
        # replaces older text, so the two counts cannot be compared.
        may_be_summary = bool(read_facts(call.event))
        new_heuristic_tokens = call.heuristic_tokens - last.heuristic_tokens
        if may_be_summary or new_heuristic_tokens <= 0:
            return self.ratio

        new_real_tokens = call.prompt_tokens - last.prompt_tokens
        new_ratio = new_real_tokens / new_heuristic_tokens
        return clamp(new_ratio, LEAST_NEW_RATIO, MOST_NEW_RATIO)


def clamp(value: float, least: float, most: float) -> float:
    """Returns the number from `least` to `most` that is nearest to a value."""
    return min(most, max(least, value))


def _had_whole_history(call: RecordedCall, whole_tokens: int) -> bool:
    """Whether a recorded request had the whole history.

    `whole_tokens` are the heuristic tokens of the whole history at the call.
    """
    if call.is_guarded:
        return False
    if not call.heuristic_tokens:
        return True
    # A preview of a tool result leaves no trace but a smaller request.
    most_tokens = SAME_COUNT_RATIO * call.heuristic_tokens + SAME_COUNT_TOKENS
    return whole_tokens <= most_tokens


class _RequestSize(NamedTuple):
    """The heuristic tokens of a request, and its real tokens from a prompt cache."""

    heuristic_tokens: int
    cached_tokens: int


class _CachedPrompt(NamedTuple):
    """A prompt as the simulated cache has it.

    Attributes:
        head: The text of the instruction, and the heuristic tokens of instruction and
            tools. The tokens stand for the tools.
        fingerprints: The fingerprints of the contents.
    """

    head: tuple[str, int]
    fingerprints: list[bytes]


class _Answered(NamedTuple):
    """A request that the model has answered, and its usage."""

    request: LlmRequest
    usage: Usage


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
        answered: The last request that asked for no summary; None before the first.
        memo: A `Memo` of the recorded events.
        cached_prompts: The last prompts, which the cache has, oldest first.
    """

    model: str = ""
    has_cache: bool = False
    call: RecordedCall | None = None
    scale: Scale = Field(default_factory=Scale)
    is_whole: bool = False
    output_tokens: int = 0
    summarizer: SimulatedLlm = Field(default_factory=make_summarizer)
    answered: _Answered | None = None
    memo: Any = None
    cached_prompts: list[_CachedPrompt] = Field(default_factory=list)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers a request with a dot, or with the summary that it asks for."""
        if self.summarizer.is_summary_request(llm_request):
            async for response in self._summarize(llm_request):
                yield response
            return

        size = self._count_and_cache(llm_request)
        ratio = self._correct_scale(size.heuristic_tokens)
        tokens = max(1, round(size.heuristic_tokens * ratio))
        cached_tokens = min(tokens, size.cached_tokens)

        usage = Usage(tokens, cached_tokens, self.output_tokens)
        self.answered = _Answered(llm_request, usage)
        usage_metadata = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=tokens,
            # Providers leave out a count of 0.
            cached_content_token_count=cached_tokens or None,
            candidates_token_count=self.output_tokens,
        )
        yield LlmResponse(
            content=types.ModelContent("."), usage_metadata=usage_metadata
        )

    def _correct_scale(self, heuristic_tokens: int) -> float:
        """Returns the real tokens per heuristic token of a request.

        If the request is that of `call` with the whole history, the scale is corrected
        by the recorded count before.
        """
        if self.call is None:
            return self.scale.find_ratio(heuristic_tokens)

        self.is_whole = _had_whole_history(self.call, heuristic_tokens)
        self.scale.correct(self.call, self.is_whole, heuristic_tokens)
        return self.scale.ratio

    async def _summarize(
        self, request: LlmRequest
    ) -> AsyncGenerator[LlmResponse, None]:
        """Yields a summary; adds the cached tokens of the request to its usage."""
        self.summarizer.token_ratio = self.scale.ratio
        async for response in self.summarizer.generate_content_async(request):
            if response.usage_metadata:
                size = self._count_and_cache(request)
                response.usage_metadata.cached_content_token_count = size.cached_tokens
            yield response

    def _count_and_cache(self, request: LlmRequest) -> _RequestSize:
        """Counts the tokens of a request, whose prompt the cache stores, if any."""
        contents = request.contents
        head_tokens = estimate_config_tokens(request.config)
        heuristic_tokens = max(1, head_tokens + self.memo.estimate_tokens(contents))
        if not self.has_cache:
            return _RequestSize(heuristic_tokens, cached_tokens=0)

        fingerprints = [
            self.memo.remember(fingerprint, content, content.parts or (), content.role)
            for content in contents
        ]
        head = (str(request.config.system_instruction), head_tokens)
        prompt = _CachedPrompt(head, fingerprints)
        same_counts = [
            _count_same(cached.fingerprints, prompt.fingerprints)
            for cached in self.cached_prompts
            if cached.head == prompt.head
        ]
        self.cached_prompts = [*self.cached_prompts, prompt][-MOST_CACHED_PROMPTS:]

        if not same_counts:
            return _RequestSize(heuristic_tokens, cached_tokens=0)
        same_contents = contents[: max(same_counts)]
        same_tokens = head_tokens + self.memo.estimate_tokens(same_contents)
        return _RequestSize(heuristic_tokens, round(same_tokens * self.scale.ratio))


def _count_same(old: Sequence[bytes], new: Sequence[bytes]) -> int:
    """Counts the items with which two lists begin in common."""
    count = 0
    for old_item, new_item in zip(old, new, strict=False):
        if old_item != new_item:
            break
        count += 1
    return count


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
    """A session that grows as the recording does, and the model that is called in it.

    Attributes:
        state: The state of the session.
        plugins: The plugins that see each call. A side for building requests has none.
        records: The records of a guard that are not read yet.
        llm: The model that reports tokens in place of answers.
    """

    def __init__(
        self,
        recorded: Session,
        model: str | None,
        memo: Memo,
        has_cache: bool = False,
    ) -> None:
        self._model = model
        self._recorded = recorded

        # A recording has the state at its end. Without the keys that events wrote, this
        # is the state before the first event.
        first_state = dict(recorded.state)
        for event in recorded.events:
            for key in event.actions.state_delta:
                first_state.pop(key, None)
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

        ADK copies all events for each request, which takes most of the time of a
        replay. So a request is joined from two parts if possible: the stored contents
        of finished invocations, and the contents of the running one. Now and then the
        request is also built as a whole. If the contents differ, all later requests of
        the agent are built as a whole.
        """
        invocation = self.begin(call, agent, PluginManager())
        events = self._session.events
        finished = self._finished[agent.name, branch_scope(call.event)]
        if finished.is_separable:
            finished.is_separable = _are_separable(events[finished.end :])
        if agent.include_contents == "none" or not finished.is_separable:
            return await self._build_from(events, invocation, agent)

        try:
            joined = await self._build_joined(finished, invocation, agent)
        except CommandError:
            # ADK cannot build some of the events without the others.
            finished.is_separable = False
            return await self._build_from(events, invocation, agent)

        if not _is_check_due(finished.addition_count):
            return joined
        whole = await self._build_from(events, invocation, agent)
        finished.is_separable = whole.contents == joined.contents
        return whole

    async def _build_joined(
        self, finished: _Finished, invocation: InvocationContext, agent: LlmAgent
    ) -> LlmRequest:
        """Has ADK build the events that are not in `finished`; joins all contents.

        The contents of invocations that have finished since the last call are stored in
        `finished`.
        """
        events = self._session.events
        running_start = _find_running_start(events, invocation.invocation_id)
        newly_finished = events[finished.end : running_start]
        if newly_finished:
            addition = await self._build_from(newly_finished, invocation, agent)
            finished.contents += addition.contents
            finished.end = running_start
            finished.addition_count += 1

        request = await self._build_from(events[running_start:], invocation, agent)
        request.contents = [*finished.contents, *request.contents]
        return request

    async def _build_from(
        self, events: list[Event], invocation: InvocationContext, agent: LlmAgent
    ) -> LlmRequest:
        """Has ADK build a request from all events of the session, or from some."""
        session = self._session.model_copy(update={"events": events})
        own_invocation = invocation.model_copy(update={"session": session})
        return await _catch_request(own_invocation, agent)

    async def send(
        self, call: RecordedCall, agent: LlmAgent, request: LlmRequest
    ) -> Sent:
        """Makes a call with a copy of a request, which the guard may change.

        The plugins and the model are called as by ADK, but without the traces, which
        take most of the time.
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

        answered = self.llm.answered
        assert answered is not None, "The model has stored the request."
        self.llm.answered = None
        record = self.records.pop() if self.records else None
        return Sent(answered.request, answered.usage, record)

    def begin(
        self, call: RecordedCall, agent: LlmAgent, plugins: PluginManager
    ) -> InvocationContext:
        """Adds the events before a recorded call, and sets the model up for the call.

        The agent gets this model. Returns the invocation that the call belongs to.
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
    """Runs an agent up to its model call; returns the request that ADK has built.

    The agent keeps the callback that stops it.
    """
    requests: list[LlmRequest] = []

    def catch(callback_context: object, llm_request: LlmRequest) -> LlmResponse:
        requests.append(llm_request)
        # ADK calls no model if the callback returns a response.
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


def _is_check_due(addition_count: int) -> bool:
    """Whether to compare a joined request with the whole one, which takes long.

    Comparisons after 0, 1, 2, 4, 8, … additions are enough, and cost little.
    """
    # A power of two has one bit that is set, and 0 has none.
    return addition_count.bit_count() <= 1


def _find_running_start(events: Sequence[Event], invocation_id: str) -> int:
    """Returns the index of the first event of the running invocation.

    The events of the running invocation are the last ones. If there is none yet,
    returns the number of events.
    """
    start = len(events)
    while start and events[start - 1].invocation_id == invocation_id:
        start -= 1
    return start


def _are_separable(events: Sequence[Event]) -> bool:
    """Whether ADK can build the contents of some events without the earlier events.

    Two kinds of events need earlier ones: a compaction or a rewind, which changes the
    events before it, and a tool result whose call is not among the events.
    """
    call_ids = {call.id for event in events for call in event.get_function_calls()}
    for event in events:
        actions = event.actions
        changes_earlier = actions.compaction or actions.rewind_before_invocation_id
        result_ids = {result.id for result in event.get_function_responses()}
        if changes_earlier or not result_ids <= call_ids:
            return False
    return True


def make_agent(name: str, **settings: Any) -> LlmAgent:
    """Makes the agent of recorded calls; `settings` are fields of `LlmAgent`."""
    try:
        return LlmAgent(name=name, **settings)
    except ValidationError as error:
        raise CommandError(f"{name!r} is not a name of an agent") from error


def _without_own_keys(state: dict[str, Any]) -> dict[str, Any]:
    """Returns state without the keys that a guard keeps for itself."""
    return {key: value for key, value in state.items() if not _OWN_KEY.match(key)}
