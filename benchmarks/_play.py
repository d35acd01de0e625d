"""Plays a conversation with one way of keeping it inside the window."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.apps import App
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types
from pydantic import PrivateAttr

from benchmarks import _common
from benchmarks._conversations import Conversation
from benchmarks._extractive import SUMMARY_TOKENS, ExtractiveSummaries
from benchmarks._scripts import Script
from contextguard_adk._measuring.budgets import plan_budgets
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm
from contextguard_adk.testing.provider import (
    count_tokens,
    list_content_texts,
    list_prompt_texts,
    read_summary_material,
)

CACHED_PROMPTS = 4
"""How many of the newest prompts a cache holds, as that of `SimulatedLlm`."""

CountedText = tuple[str, int]  # With its UTF-8 bytes.


@dataclass(frozen=True)
class Way:
    """One way of keeping a conversation inside the window; a row of the table.

    Attributes:
        name: What the table calls it.
        is_ours: Whether it is this package's.
        plugins: Makes the plugins for a conversation.
        app: Makes further settings of the app for a conversation and its model.
    """

    name: str
    is_ours: bool = False
    plugins: Callable[[Conversation], list[BasePlugin]] = lambda _: []
    app: Callable[[Conversation, SimulatedLlm], dict[str, Any]] = lambda *_: {}


class Provider(SimulatedLlm):
    """The strict provider, behind what ADK's own model classes do to a request.

    A request that does not end with the user gets the words that ADK's Gemini and
    LiteLlm classes add, and one that does not begin with the user gets the `.` that
    LiteLLM puts there for Anthropic. Summaries without a length of their own get
    the length that the others ask for.
    """

    summary_tokens: int

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers a request, or refuses it."""
        request = llm_request.model_copy(
            update={
                "contents": list(llm_request.contents),
                "config": llm_request.config.model_copy(),
            }
        )
        self._maybe_append_user_content(request)
        if request.contents[0].role == "model":
            dot = types.Content(role="user", parts=[types.Part(text=".")])
            request.contents.insert(0, dot)
        if self.is_summary_request(request) and not request.config.max_output_tokens:
            request.config.max_output_tokens = self.summary_tokens
        async for response in super().generate_content_async(request, stream):
            yield response


class CountingLlm(BaseLlm):
    """Says what it is told, counts what that takes, and refuses what is too long."""

    window_tokens: int
    has_cache: bool

    _counted: dict[int, tuple[types.Content, CountedText]] = PrivateAttr(
        default_factory=dict
    )
    _served: list[list[CountedText]] = PrivateAttr(default_factory=list)
    _spent: list[tuple[int, int, int]] = PrivateAttr(default_factory=list)

    @property
    def cost_tokens(self) -> int:
        """What all calls cost, summaries included."""
        prompt_tokens, cached_tokens, output_tokens = (
            sum(tokens) for tokens in zip(*self._spent, strict=True)
        )
        return _common.price(prompt_tokens, cached_tokens, output_tokens)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Writes a summary as long as it may be: nobody but the guard asks here."""
        tokens = llm_request.config.max_output_tokens or SUMMARY_TOKENS
        text = _common.read_pool("prose")[: 4 * tokens]
        yield self.say(llm_request, types.ModelContent(text))

    def say(self, request: LlmRequest, reply: types.Content) -> LlmResponse:
        """Answers a request with a content, or with an error."""
        settings = LlmRequest(config=request.config)
        head = "\n".join(text for _, text in list_prompt_texts(settings))
        texts = [
            (head, len(head.encode())),
            *(self._count(content) for content in request.contents),
        ]
        prompt_tokens = sum(utf8_bytes for _, utf8_bytes in texts) // 4
        if prompt_tokens > self.window_tokens:
            raise OverflowError(f"{prompt_tokens} of {self.window_tokens} tokens")

        cached_tokens = 0
        if self.has_cache:
            shared_tokens = (_count_shared(before, texts) for before in self._served)
            cached_tokens = max(shared_tokens, default=0)
            self._served = [*self._served[1 - CACHED_PROMPTS :], texts]

        output_tokens = self._count(reply)[1] // 4
        self._spent.append((prompt_tokens, cached_tokens, output_tokens))
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=prompt_tokens,
            cached_content_token_count=cached_tokens or None,
            candidates_token_count=output_tokens,
        )
        return LlmResponse(content=reply, usage_metadata=usage)

    def _count(self, content: types.Content) -> CountedText:
        # The content is kept, so that its id stays its own.
        if id(content) not in self._counted:
            text = "\n".join(list_content_texts([content]))
            self._counted[id(content)] = content, (text, len(text.encode()))
        return self._counted[id(content)][1]


def _count_shared(before: Sequence[CountedText], now: Sequence[CountedText]) -> int:
    """The tokens of the contents that two prompts begin with in common."""
    if before[0] != now[0]:
        return 0
    utf8_bytes = 0
    for old, new in zip(before, now, strict=False):
        if old != new:
            break
        utf8_bytes += new[1]
    return utf8_bytes // 4


class SharedSessions(InMemorySessionService):
    """Hands out the events that it holds.

    ADK's own service copies all of them for each turn, which takes a third of the time
    of a conversation of a hundred turns.
    """

    async def get_session(
        self, *, app_name: str, user_id: str, session_id: str, config: Any = None
    ) -> Session:
        """Returns the session with lists of its own, but shared events."""
        stored = self.sessions[app_name][user_id][session_id]
        own = {"events": [*stored.events], "state": {**stored.state}}
        return stored.model_copy(update=own)


class NotedSummaries(ExtractiveSummaries):
    """An ideal summarizer: it keeps every fact that it is shown.

    Args:
        notes: Sentences to keep, by the facts that they state.
    """

    def __init__(self, notes: dict[str, str]) -> None:
        super().__init__()
        self._notes = notes

    def __call__(self, request: LlmRequest) -> str:
        """Begins with the facts; the extract fills what is left."""
        extract = super().__call__(request)
        material = read_summary_material(request)
        kept = [note for fact, note in self._notes.items() if fact in material]
        left = (request.config.max_output_tokens or SUMMARY_TOKENS) - 8

        lines = []
        for line in [*kept, *extract.splitlines()]:
            left -= count_tokens([line], None) + 1
            if left < 0:
                break
            lines.append(line)

        return "\n".join(lines) if kept else extract


@dataclass
class Played:
    """What one conversation showed.

    Attributes:
        lost_turns: Turns that ended in an error.
        without_request: The agent's requests in which the words of the turn's own
            message do not stand.
        prompt_tokens: Of the agent's requests that were accepted.
        cached_tokens: Of those, what a prompt cache serves.
        served_tokens: What it serves of summary requests as well.
        output_tokens: Of answers and summaries.
        user_facts, tool_facts: Of those planted, how many stand in the last request.
        hidden_facts: Of those of tools, how many stand in a part of a result that no
            request showed, and not by name in the last one.
        ideal_user_facts: The former where the summarizer keeps every fact it is shown.
        ideal_tool_facts: The latter where the summarizer keeps every fact it is shown.
        seconds: The event loop's time at the last answer; virtual time begins at 0.
    """

    conversation: Conversation
    rejections: int
    broken_pairs: int
    summaries: int
    billed_tokens: int
    lost_turns: int = 0
    without_request: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    served_tokens: int = 0
    output_tokens: int = 0
    user_facts: int = 0
    tool_facts: int = 0
    hidden_facts: int = 0
    ideal_user_facts: int = 0
    ideal_tool_facts: int = 0
    seconds: float = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether every turn had an answer."""
        return not self.lost_turns

    @property
    def uncached_tokens(self) -> int:
        """What was billed, answers and summaries included, and no cache served."""
        return self.billed_tokens - self.served_tokens

    @property
    def cost_tokens(self) -> int:
        """What was billed, by price: in uncached prompt tokens."""
        prompt_tokens = self.billed_tokens - self.output_tokens
        return _common.price(prompt_tokens, self.served_tokens, self.output_tokens)


@dataclass(frozen=True)
class Delays:
    """What each answer and each summary takes."""

    answer_seconds: float = 0.0
    summary_seconds: float = 0.0


async def play(
    conversation: Conversation,
    way: Way,
    is_ideal: bool = False,
    delays: Delays | None = None,
    script: Script | None = None,
) -> Played:
    """Plays a conversation to its end through a real Runner.

    Args:
        conversation: What is said.
        way: How it is kept inside the window.
        is_ideal: Whether the summarizer keeps every fact that it is shown.
        delays: What answers and summaries take; None for no time.
        script: The model's part; None makes one.
    """
    delays = delays or Delays()
    script = script or Script(conversation)
    summarizer = NotedSummaries(dict(conversation.notes) if is_ideal else {})
    llm = Provider(
        context_window=conversation.window_tokens,
        script=_delay(script.answer, delays.answer_seconds),
        summary_tokens=plan_budgets(conversation.configured_tokens).summary_tokens,
        summary_replies=_delay(summarizer, delays.summary_seconds),
        prompt_cache=True,
    )

    agent = LlmAgent(
        name="agent",
        model=llm,
        instruction=lambda _: script.instruction,  # As it is: braces are no state.
        tools=[*script.make_tools()],
    )
    app = App(
        name="app",
        root_agent=agent,
        plugins=way.plugins(conversation),
        **way.app(conversation, llm),
    )
    runner = Runner(app=app, session_service=SharedSessions())
    place: dict[str, Any] = {"user_id": "user", "session_id": "session"}
    await runner.session_service.create_session(app_name="app", **place)

    lost = []
    first_calls = []
    for number, turn in enumerate(conversation.turns):
        script.turn = number
        script.step = 0
        first_calls.append(llm.calls)
        if not await _say(runner, place, turn.message):
            lost.append(number)

    seconds = asyncio.get_running_loop().time()
    # A summary that was begun is paid for.
    await asyncio.sleep(delays.summary_seconds)
    played = _examine(conversation, llm, lost, [*first_calls, llm.calls])
    played.seconds = seconds
    if not way.is_ours:
        played.hidden_facts = 0  # Others lose what they do not show.
    return played


def _delay(
    reply: Callable[[LlmRequest], Reply], seconds: float
) -> Callable[[LlmRequest], Awaitable[Reply]]:
    """Has each reply take that long."""

    async def reply_later(request: LlmRequest) -> Reply:
        said = reply(request)
        await asyncio.sleep(seconds)
        return said

    return reply_later


async def _say(runner: Runner, place: dict[str, Any], text: str) -> bool:
    """Sends a message; tells whether the turn came to an answer."""
    message = types.Content(role="user", parts=[types.Part(text=text)])
    answer = ""
    try:
        async for event in runner.run_async(
            **place, new_message=message, run_config=RunConfig(max_llm_calls=0)
        ):
            if event.is_final_response() and event.content:
                answer = "".join(p.text or "" for p in event.content.parts or ())
    except Exception:  # noqa: BLE001 - what the user would see as an error.
        return False

    return bool(answer)


def _examine(
    conversation: Conversation,
    llm: SimulatedLlm,
    lost: Sequence[int],
    bounds: Sequence[int],
) -> Played:
    """Counts what the provider saw."""
    played = Played(
        conversation,
        rejections=llm.rejections,
        broken_pairs=llm.violations,
        summaries=llm.summaries,
        billed_tokens=llm.billed_tokens,
        lost_turns=len(lost),
    )

    for turn, (start, end) in zip(conversation.turns, pairwise(bounds), strict=True):
        played.without_request += sum(
            not record.is_summary and turn.message not in record.text
            for record in llm.requests[start:end]
        )

    served = [record for record in llm.requests if not record.rejected]
    accepted = [record for record in served if not record.is_summary]
    _count_tokens(played, served, accepted)
    is_asked = len(conversation.turns) - 1 not in lost
    final = accepted[-1].text if is_asked and accepted else ""
    _count_facts(played, accepted, final)
    return played


def _count_tokens(
    played: Played,
    served: Sequence[RecordedRequest],
    accepted: Sequence[RecordedRequest],
) -> None:
    """Counts tokens of all requests that were served, and of the agent's own ones."""
    played.served_tokens = sum(record.cached_tokens for record in served)
    answers = [record.response for record in served if record.response]
    usages = [answer.usage_metadata for answer in answers if answer.usage_metadata]
    played.output_tokens = sum(usage.candidates_token_count or 0 for usage in usages)
    played.prompt_tokens = sum(record.prompt_tokens for record in accepted)
    played.cached_tokens = sum(record.cached_tokens for record in accepted)


def _count_facts(
    played: Played, accepted: Sequence[RecordedRequest], final: str
) -> None:
    """Counts the planted facts in the last request, and those that none has shown."""
    conversation = played.conversation
    played.user_facts = sum(fact in final for fact in conversation.user_facts)
    played.tool_facts = sum(fact in final for fact in conversation.tool_facts)
    sent = "\n".join(record.text for record in accepted)
    notes = (conversation.notes[f] for f in conversation.tool_facts if f not in final)
    played.hidden_facts = sum(note not in sent for note in notes)
