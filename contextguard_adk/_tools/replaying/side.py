"""One side of a replay: a session that grows as recorded, and a model of its own.

The model gives no real answers: it reports as many tokens as the recorded model would
have. Heuristic tokens are UTF-8 bytes / 4; real tokens are those that a provider
counts. A ratio is the number of real tokens per heuristic token.

The recorded request of a call is the one that was sent when the session was recorded. A
guard may have cut the recorded request. The whole history is the request that ADK
builds for the call without a guard.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.run_config import RunConfig
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types
from pydantic import Field, ValidationError

from contextguard_adk._history.fingerprints import fingerprint
from contextguard_adk._measuring.tokens import Memo, estimate_config_tokens
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._runtime.adk_objects import make_plugin_manager
from contextguard_adk._runtime.runs import branch_scope
from contextguard_adk._tools.recordings import RecordedCall, read_facts
from contextguard_adk._tools.terminal import CommandError
from contextguard_adk.records import CallRecord, Usage
from contextguard_adk.testing import SimulatedLlm

if TYPE_CHECKING:
    from google.adk.plugins.plugin_manager import PluginManager

# Two requests whose sizes differ by less than this ratio have the same size.
SAME_SIZE_RATIO = 0.05

# Two guards may count one request a little differently. The whole history has the size
# of the recorded request if its heuristic tokens are at most those of the recorded
# request, times this ratio, plus this number of tokens.
SAME_COUNT_RATIO = 1.03
SAME_COUNT_TOKENS = 30

# New text of no more than a few tokens may have a ratio outside this range by chance.
LEAST_NEW_RATIO = 0.2
MOST_NEW_RATIO = 5.0

# The simulated prompt cache has this number of prompts.
MOST_CACHED_PROMPTS = 4

# The keys of session state that a guard writes. A guard has two forms of keys, and both
# match. The keys of todos, "context_guard:compact" and "context_guard:compact_focus"
# belong to the user, so they do not match. "context_guard:compacted:…" is a key of the
# guard.
_OWN_KEY = re.compile(
    r"__context_guard_(?!todos_)|context_guard:(?!todos:|compact(?!ed))"
)


def make_summarizer(model: str = "simulated") -> SimulatedLlm:
    """Makes a model that writes summaries of histories of any length offline."""
    # A long replay would fill the memory with requests.
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
    """The ratio of an agent's whole history, as the recorded calls tell it.

    Attributes:
        ratio: The ratio of the whole history.
        last: The last recorded call of the agent; None before the first.
    """

    ratio: float = 1.0
    last: RecordedCall | None = None
    # The heuristic tokens of the whole history at the last call.
    _last_whole_tokens: int = 0

    def find_ratio(self, heuristic_tokens: int) -> float:
        """Returns the ratio for a request that a guard of the replay sends.

        - If the last recorded request has about the same size, the two requests are
          taken for equal, and the ratio of the recorded request is returned.
        - If the sizes differ, or if the size of the recorded request is unknown, the
          ratio of the whole history is returned.

        `heuristic_tokens` is the size of the request that the guard sends.
        """
        last = self.last
        if last and last.ratio and last.heuristic_tokens:
            difference_ratio = abs(heuristic_tokens / last.heuristic_tokens - 1)
            if difference_ratio < SAME_SIZE_RATIO:
                return last.ratio
        return self.ratio

    def correct(self, call: RecordedCall, is_whole: bool, whole_tokens: int) -> None:
        """Corrects the ratio by a recorded call, which becomes the last one.

        - The recorded request had the whole history: the ratio of the recorded request
          is taken.
        - The recorded request was cut, and there is a last call: the whole history is
          made of older text and of text that is new since the last call. The ratio
          becomes the mean of the ratio so far, for the older text, and the ratio of the
          new text. The tokens of the two texts are the weights.
        - The recorded request was cut, and there is no last call: the ratio of the
          recorded request is taken if it is known, because there is no better one.

        Args:
            call: The recorded call.
            is_whole: Whether the recorded request had the whole history.
            whole_tokens: The heuristic tokens of the whole history at the call; at
                least 1.
        """
        if is_whole:
            self.ratio = call.prompt_tokens / whole_tokens
        elif self.last:
            # A rewind may have made the whole history shorter.
            new_tokens = max(0, whole_tokens - self._last_whole_tokens)
            new_text_ratio = self._measure_new_text(call, self.last)
            # This is the weighted mean, written as a change of the ratio so far.
            self.ratio += new_tokens * (new_text_ratio - self.ratio) / whole_tokens
        elif call.ratio:
            self.ratio = call.ratio

        self.last = call
        self._last_whole_tokens = whole_tokens

    def _measure_new_text(self, call: RecordedCall, last: RecordedCall) -> float:
        """Returns the ratio of the text that is new since the last call.

        The new text is the difference between the two recorded requests, unless the
        guard cut more of the second request. Returns the ratio so far in three cases:

        - The guard has not counted the heuristic tokens of both requests.
        - The guard has noted a compaction or a recovery from an overflow on the event.
        - The second request is not the larger one.
        """
        if not (call.heuristic_tokens and last.heuristic_tokens):
            return self.ratio

        was_cut_anew = bool(read_facts(call.event))
        new_heuristic_tokens = call.heuristic_tokens - last.heuristic_tokens
        if was_cut_anew or new_heuristic_tokens <= 0:
            return self.ratio

        new_real_tokens = call.prompt_tokens - last.prompt_tokens
        new_text_ratio = new_real_tokens / new_heuristic_tokens
        return clamp(new_text_ratio, LEAST_NEW_RATIO, MOST_NEW_RATIO)


def clamp(value: float, least: float, most: float) -> float:
    """Returns the number from `least` to `most` that is nearest to a value."""
    return min(most, max(least, value))


def _had_whole_history(call: RecordedCall, whole_tokens: int) -> bool:
    """Whether a recorded request had the whole history.

    `whole_tokens` are the heuristic tokens of the whole history at the call.
    """
    if call.is_guarded:
        return False
    # A guard stores the heuristic tokens of each request that it watches. A request
    # without them is taken for one that no guard has watched.
    if not call.heuristic_tokens:
        return True

    # A guard may have shown only a part of a large tool result from the start. The
    # guard has left no note of that, but the recorded request is smaller.
    most_tokens = SAME_COUNT_RATIO * call.heuristic_tokens + SAME_COUNT_TOKENS
    return whole_tokens <= most_tokens


class _RequestSize(NamedTuple):
    """The size of a request.

    Attributes:
        heuristic_tokens: The heuristic tokens of the request, at least 1.
        cached_tokens: How many real tokens come from the prompt cache; 0 for none.
    """

    heuristic_tokens: int
    cached_tokens: int


class _CachedPrompt(NamedTuple):
    """A prompt as the simulated cache has it.

    Attributes:
        head: The text of the instruction, and the heuristic tokens of instruction and
            tools. Two heads with the same values are taken to have the same tools.
        fingerprints: The fingerprint of each content.
    """

    head: tuple[str, int]
    fingerprints: list[bytes]


class _RecordedModel(BaseLlm):
    """Reports tokens in place of an answer, and writes summaries offline.

    Attributes:
        has_cache: Whether a prompt cache is assumed.
        call: The recorded call whose whole history is sent. It corrects the scale. None
            if a guard may cut the requests: then this model corrects no scale.
        scale: The scale of the agent that calls.
        is_whole: Whether the recorded request of `call` had the whole history. The
            value is computed when the model answers.
        output_tokens: The tokens of the recorded answer.
        summarizer: The model that writes summaries.
        usage: The usage of the last answer, summaries aside; None before the first.
        memo: A `Memo` of the recorded events.
        cached_prompts: The prompts in the cache, oldest first.
    """

    model: str = ""
    has_cache: bool = False
    call: RecordedCall | None = None
    scale: Scale = Field(default_factory=Scale)
    is_whole: bool = False
    output_tokens: int = 0
    summarizer: SimulatedLlm = Field(default_factory=make_summarizer)
    usage: Usage | None = None
    memo: Any = None
    cached_prompts: list[_CachedPrompt] = Field(default_factory=list)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers a request with a dot, or with the summary that it asks for.

        No answer comes in parts, so `stream` has no effect.
        """
        if self.summarizer.is_summary_request(llm_request):
            async for response in self._summarize(llm_request):
                yield response
            return

        size = self._count_and_cache(llm_request)
        ratio = self._find_ratio(size.heuristic_tokens)
        tokens = max(1, round(size.heuristic_tokens * ratio))
        # The cached tokens were counted by another ratio, so they may be too many.
        cached_tokens = min(tokens, size.cached_tokens)

        self.usage = Usage(tokens, cached_tokens, self.output_tokens)
        usage_metadata = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=tokens,
            # Providers leave out a count of 0.
            cached_content_token_count=cached_tokens or None,
            candidates_token_count=self.output_tokens,
        )
        yield LlmResponse(
            content=types.ModelContent("."), usage_metadata=usage_metadata
        )

    def _find_ratio(self, heuristic_tokens: int) -> float:
        """Returns the ratio for a request, whose heuristic tokens are given.

        - If there is no `call`: the ratio is that of the scale for a request of this
          size.
        - If there is a `call`: the request is the whole history of this call. First
          `is_whole` is computed for the recorded request, and the call corrects the
          scale. Then the corrected ratio is returned.
        """
        if self.call is None:
            return self.scale.find_ratio(heuristic_tokens)

        self.is_whole = _had_whole_history(self.call, heuristic_tokens)
        self.scale.correct(self.call, self.is_whole, heuristic_tokens)
        return self.scale.ratio

    async def _summarize(
        self, request: LlmRequest
    ) -> AsyncGenerator[LlmResponse, None]:
        """Yields a summary, with the cached tokens of its request in the usage."""
        self.summarizer.token_ratio = self.scale.ratio
        async for response in self.summarizer.generate_content_async(request):
            if response.usage_metadata:
                size = self._count_and_cache(request)
                response.usage_metadata.cached_content_token_count = size.cached_tokens
            yield response

    def _count_and_cache(self, request: LlmRequest) -> _RequestSize:
        """Counts the tokens of a request, then adds the prompt to the simulated cache.

        The cached tokens are those of the longest beginning that the prompt shares with
        a prompt in the cache. The beginning is the head and some contents; it may be
        the head alone. Prompts with different heads share nothing. Without a cache
        there are no cached tokens, and nothing is added.
        """
        contents = request.contents
        head_tokens = estimate_config_tokens(request.config)
        heuristic_tokens = max(1, head_tokens + self.memo.estimate_tokens(contents))
        if not self.has_cache:
            return _RequestSize(heuristic_tokens, cached_tokens=0)

        # The memo remembers the fingerprints of recorded contents. A fingerprint
        # depends on the parts and the role.
        fingerprints = [
            self.memo.remember(
                fingerprint, content, parts=content.parts or (), role=content.role
            )
            for content in contents
        ]
        head = (str(request.config.system_instruction), head_tokens)
        prompt = _CachedPrompt(head, fingerprints)
        shared_counts = [
            _count_shared(cached.fingerprints, prompt.fingerprints)
            for cached in self.cached_prompts
            if cached.head == prompt.head
        ]
        self.cached_prompts = [*self.cached_prompts, prompt][-MOST_CACHED_PROMPTS:]

        if not shared_counts:  # No prompt in the cache has this head.
            return _RequestSize(heuristic_tokens, cached_tokens=0)
        shared_contents = contents[: max(shared_counts)]
        shared_tokens = head_tokens + self.memo.estimate_tokens(shared_contents)
        cached_tokens = round(shared_tokens * self.scale.ratio)
        return _RequestSize(heuristic_tokens, cached_tokens)


def _count_shared(old: Sequence[bytes], new: Sequence[bytes]) -> int:
    """Counts the items that two lists share from their start: "abcx", "abdx" -> 2."""
    count = 0
    for old_item, new_item in zip(old, new, strict=False):
        if old_item != new_item:
            break
        count += 1
    return count


@dataclass
class _Finished:
    """The contents that ADK has built for an agent from its finished invocations.

    Attributes:
        end: The index of the first event of which no contents are built yet.
        contents: The contents of the events before `end`.
        addition_count: How often contents were added.
        is_separable: Whether ADK builds the same contents in two ways: from some
            invocations at a time, and from all at once. Once false, the value stays
            false.
    """

    end: int = 0
    contents: list[types.Content] = field(default_factory=list)
    addition_count: int = 0
    is_separable: bool = True


class Side:
    """A session that grows as the recording does, and the model that is called in it.

    Attributes:
        state: The state of the session.
        plugins: The plugins that see each call of `send`. They have one guard at most.
        records: The records of the guard that `send` has not returned yet.
        llm: The model that reports tokens in place of answers.
    """

    def __init__(
        self,
        recorded: Session,
        model: str | None,
        memo: Memo,
        has_cache: bool = False,
    ) -> None:
        """Makes a side with a session that has no events yet.

        Args:
            recorded: The recorded session.
            model: The name of the model; None for the recorded one.
            memo: A `Memo` of the recorded events.
            has_cache: Whether a prompt cache is assumed.
        """
        self._model = model
        self._recorded = recorded

        # A recording has the state at its end. The first state is this state without
        # the keys that events wrote: their first values are not recorded.
        first_state = dict(recorded.state)
        for event in recorded.events:
            for key in event.actions.state_delta:
                first_state.pop(key, None)
        changes = {"state": _without_own_keys(first_state), "events": []}
        self._session = recorded.model_copy(update=changes)
        self.state = self._session.state

        self.plugins = make_plugin_manager()
        self.records: list[CallRecord] = []
        self.llm = _RecordedModel(memo=memo, has_cache=has_cache)
        # By the name of an agent and its scope, see `branch_scope`.
        self._finished = defaultdict[tuple[str, str], _Finished](_Finished)

    async def build(self, call: RecordedCall, agent: LlmAgent) -> LlmRequest:
        """Has ADK build the request of a call with the whole history; calls no model.

        ADK copies all events from which it builds a request, and the copies take most
        of the time of a replay. So a request is joined from parts where that is
        possible. Now and then the same request is also built from all events at once,
        as ADK does in an app. If the two differ, no later request of the agent in this
        scope is joined.

        Args:
            call: The call. Calls come in the order of the recording.
            agent: The agent that calls. It gets the model of this side.
        """
        invocation = self.advance(call, agent, make_plugin_manager())
        finished = self._finished[agent.name, branch_scope(call.event)]
        joined = await self._join_request(finished, invocation, agent)
        if joined is not None and not _is_check_due(finished.addition_count):
            return joined

        events = self._session.events
        request = await self._build_from(events, invocation, agent)
        if joined is not None:
            finished.is_separable = request.contents == joined.contents
        return request

    async def _join_request(
        self, finished: _Finished, invocation: InvocationContext, agent: LlmAgent
    ) -> LlmRequest | None:
        """Joins the contents of finished invocations with those of the running one.

        Returns None, for a request that ADK has to build from all events at once, in
        two cases:

        - The agent gets the running turn alone, so finished invocations do not count.
        - ADK builds other contents from a part of the events than from all. Then
          `finished` becomes inseparable.

        Args:
            finished: The contents that are built already. The contents of invocations
                that have finished since then are added.
            invocation: The running invocation.
            agent: The agent that calls.
        """
        if agent.include_contents == "none" or not finished.is_separable:
            return None

        events = self._session.events
        finished.is_separable = _are_separable(events[finished.end :])
        if not finished.is_separable:
            return None

        running_start = _find_running_start(events, invocation.invocation_id)
        newly_finished = events[finished.end : running_start]
        try:
            if newly_finished:
                addition = await self._build_from(newly_finished, invocation, agent)
                finished.contents += addition.contents
                finished.end = running_start
                finished.addition_count += 1
            request = await self._build_from(events[running_start:], invocation, agent)
        except CommandError:  # ADK refuses some events without the earlier ones.
            finished.is_separable = False
            return None

        request.contents = [*finished.contents, *request.contents]
        return request

    async def _build_from(
        self, events: list[Event], invocation: InvocationContext, agent: LlmAgent
    ) -> LlmRequest:
        """Has ADK build a request as if the session had only these events."""
        session = self._session.model_copy(update={"events": events})
        own_invocation = invocation.model_copy(update={"session": session})
        return await _catch_request(own_invocation, agent)

    async def send(
        self, call: RecordedCall, agent: LlmAgent, request: LlmRequest
    ) -> Sent:
        """Lets the guard change a copy of a request, and makes a call with the copy.

        The plugins and the model are called in the order in which ADK calls them. ADK
        itself would spend most of the time on traces, which a replay does not need.

        Args:
            call: The recorded call that the request belongs to.
            agent: The agent that calls. The model of the agent becomes that of this
                side.
            request: The request with the whole history; it stays unchanged.

        Returns:
            The copy as it was sent, with the figures of the call.
        """
        changes = {
            "contents": list(request.contents),
            "config": request.config.model_copy(deep=True),
            "tools_dict": dict(request.tools_dict),
        }
        own_request = request.model_copy(update=changes)
        invocation = self.advance(call, agent, self.plugins)
        context = CallbackContext(invocation, event_actions=EventActions())

        # In this callback the guard changes the copy. It may also ask `llm` for a
        # summary.
        await self.plugins.run_before_model_callback(
            callback_context=context, llm_request=own_request
        )
        async for response in self.llm.generate_content_async(own_request):
            await self.plugins.run_after_model_callback(
                callback_context=context, llm_response=response
            )

        usage = self.llm.usage
        assert usage is not None, "The model has answered."
        self.llm.usage = None  # No later call can take this usage for its own.
        # A guard adds one record for each call of an agent that it watches. For any
        # other agent there is no record.
        record = self.records.pop() if self.records else None
        return Sent(own_request, usage, record)

    def advance(
        self, call: RecordedCall, agent: LlmAgent, plugins: PluginManager
    ) -> InvocationContext:
        """Takes the session and the model to the moment of a recorded call.

        The session gets all recorded events before the call, with their changes of
        state. Values that a recorded guard has stored are left out: the guard of this
        side stores its own. To advance twice to the same call adds nothing more.

        Args:
            call: The recorded call. Calls come in the order of the recording.
            agent: The agent that calls. It gets the model of this side.
            plugins: The plugins of the returned invocation.

        Returns:
            The invocation that the call belongs to.
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

    The callback that catches the request stays in the agent. The callback has no effect
    on `Side.send`, which does not run the agent.

    Raises:
        CommandError: ADK builds no request from the events of the session.
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
    """Whether to compare a joined request with one that is built from all events.

    The second request takes long. So requests are compared only while the number of
    additions is 0, 1, 2, 4, 8, …
    """
    # A power of two has one bit that is set, and 0 has none.
    return addition_count.bit_count() <= 1


def _find_running_start(events: Sequence[Event], invocation_id: str) -> int:
    """Returns the index of the first event of the running invocation.

    The events of the running invocation are the last ones. Returns the number of events
    if the running invocation has none yet.
    """
    start = len(events)
    while start and events[start - 1].invocation_id == invocation_id:
        start -= 1
    return start


def _are_separable(events: Sequence[Event]) -> bool:
    """Whether ADK can build the contents of some events without the earlier events.

    Two kinds of events need the earlier ones:

    - A compaction of ADK or a rewind hides earlier events.
    - A tool result may have its call among the earlier events.
    """
    call_ids = {call.id for event in events for call in event.get_function_calls()}
    for event in events:
        actions = event.actions
        hides_earlier = actions.compaction or actions.rewind_before_invocation_id
        result_ids = {result.id for result in event.get_function_responses()}
        has_all_calls = result_ids <= call_ids
        if hides_earlier or not has_all_calls:
            return False
    return True


def make_agent(name: str, **settings: Any) -> LlmAgent:
    """Makes the agent of recorded calls; `settings` are other fields of `LlmAgent`."""
    try:
        return LlmAgent(name=name, **settings)
    except ValidationError as error:
        raise CommandError(f"{name!r} is not a name of an agent") from error


def _without_own_keys(state: dict[str, Any]) -> dict[str, Any]:
    """Returns state without the keys that a guard keeps for itself."""
    return {key: value for key, value in state.items() if not _OWN_KEY.match(key)}
