"""Turns of four model calls on sessions that stay as they are, guarded or not."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.events.event import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types
from pydantic import PrivateAttr

from benchmarks import _common
from contextguard_adk import ContextGuardPlugin, Threshold, request_compaction

CALLS = 4
"""Model calls in a turn."""

TEXT_CHARS = 800
RESULT_CHARS = 4_000
TOKENS_PER_CONTENT = {"text": 215, "languages": 200, "summary": 215, "tools": 800}
"""What o200k_base counts for a content of such a session."""

ROOMY_TOKENS = 100_000_000
"""A context window that stays nearly empty."""

NEARLY_FULL = "nearly full"
FULL_RATIO = 0.95
"""How much of the threshold the largest request of a turn takes there."""


class InstantLlm(BaseLlm):
    """A model that calls a tool, and again, and then answers, each at once."""

    tokens_per_content: int
    """What it reports of its prompts, about what o200k_base counts."""

    _step: int = PrivateAttr(default=0)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers."""
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=self.tokens_per_content * len(llm_request.contents),
            candidates_token_count=3,
        )
        part = types.Part(text="All of it was understood.")
        # A request for a summary declares no tools.
        self._step += bool(llm_request.config.tools)
        if llm_request.config.tools and self._step % CALLS:
            look = types.FunctionCall(name="look", args={})
            part = types.Part(function_call=look)
        yield LlmResponse(
            content=types.Content(role="model", parts=[part]), usage_metadata=usage
        )


def look() -> dict[str, str]:
    """Looks."""
    return {"status": "ok"}


class TimedSessions(InMemorySessionService):
    """Measures how long it takes to hand out a session."""

    def __init__(self) -> None:
        super().__init__()
        self.loading_seconds = 0.0

    async def get_session(self, **arguments: Any) -> Session | None:
        """Returns a copy of the session."""
        started = time.process_time()
        session = await super().get_session(**arguments)
        self.loading_seconds += time.process_time() - started
        if tracemalloc.is_tracing():
            # To copy takes far more than the copy, and all else would hide behind it.
            tracemalloc.reset_peak()
        return session

    @property
    def stored(self) -> Session:
        """The one session, as it is stored."""
        return self.sessions["app"]["user"]["session"]


def make_events(kind: str, count: int) -> list[Event]:
    """A history of so many contents, an even number; the first is the user's."""
    rng = random.Random(f"{kind}-{count}")
    events = []

    for number in range(count):
        role = ("user", "model")[number % 2]
        if kind.startswith("tools") and 0 < number < count - 1:
            part = _make_tool_part(number, rng)
        else:
            pool = "other languages" if kind == "languages" else "prose"
            text = f"{number}: {_common.cut_text(pool, TEXT_CHARS, rng)}"
            part = types.Part(text=text)
        is_user = role == "user" and not part.function_response
        events.append(
            Event(
                author="user" if is_user else "agent",
                invocation_id=f"i-{number // 2}",
                content=types.Content(role=role, parts=[part]),
            )
        )

    return events


def _make_tool_part(number: int, rng: random.Random) -> types.Part:
    """A call where the number is odd, its result where it is even."""
    ref = f"call-{(number - 1) // 2}"
    name = "kubectl_get"
    if number % 2:
        call = types.FunctionCall(id=ref, name=name, args={"page": number})
        return types.Part(function_call=call)

    rows = _common.make_list(RESULT_CHARS, rng)
    result = types.FunctionResponse(id=ref, name=name, response=rows)
    return types.Part(function_response=result)


@dataclass
class Chat:
    """One session, with or without the guard, that stays as long as it is."""

    kind: str
    guard: ContextGuardPlugin | None
    runner: Runner
    sessions: TimedSessions
    base: list[Event]
    window_tokens: int = ROOMY_TOKENS

    async def turn(self) -> list[Event]:
        """Plays a turn and takes it back; returns its events."""
        message = types.Content(role="user", parts=[types.Part(text="Go on, please.")])
        async for _ in self.runner.run_async(
            user_id="user", session_id="session", new_message=message
        ):
            pass

        stored = self.sessions.stored
        events = stored.events[len(self.base) :]
        stored.events[:] = self.base
        return events

    async def timed_turn(self) -> tuple[float, float]:
        """Plays a turn; returns the processor time of a call, in milliseconds.

        And how much of it went into loading the session.
        """
        self.sessions.loading_seconds = 0.0
        started = time.process_time()
        await self.turn()
        seconds = time.process_time() - started
        return seconds * 1_000 / CALLS, self.sessions.loading_seconds * 1_000 / CALLS

    async def make_anew(self) -> Chat:
        """Makes the same session in the same state, with a runner and guard of its
        own, as another process would have it."""
        guard = _make_guard(self.window_tokens) if self.guard else None
        chat = await _make_chat(self.kind, self.base, guard)
        chat.window_tokens = self.window_tokens
        chat.sessions.stored.state.update(self.sessions.stored.state)
        return chat


def _make_guard(window_tokens: int) -> ContextGuardPlugin:
    return ContextGuardPlugin(default=Threshold(context_window=window_tokens))


def _full_window(kind: str, count: int) -> int:
    """A window of which the largest request of a turn takes nearly the threshold."""
    # The last call of a turn has its question, three calls and three results as well.
    due_tokens = int((count + 7) * _content_tokens(kind) / FULL_RATIO)
    # The buffer is 20 %, or 20,000 tokens of windows of 200,000 and more.
    return due_tokens + 20_000 if due_tokens >= 180_000 else int(due_tokens / 0.8)


def _content_tokens(kind: str) -> int:
    return TOKENS_PER_CONTENT[kind.split(",")[0]]


async def _make_chat(
    kind: str, events: Sequence[Event], guard: ContextGuardPlugin | None
) -> Chat:
    agent = LlmAgent(
        name="agent",
        model=InstantLlm(model="instant", tokens_per_content=_content_tokens(kind)),
        instruction="You help.",
        tools=[look],
    )
    plugins = [guard] if guard else []
    app = App(name="app", root_agent=agent, plugins=[*plugins])
    sessions = TimedSessions()
    await sessions.create_session(app_name="app", user_id="user", session_id="session")
    sessions.stored.events.extend(events)
    runner = Runner(app=app, session_service=sessions)
    return Chat(kind, guard, runner, sessions, list(events))


async def make_pair(kind: str, count: int) -> tuple[Chat, Chat]:
    """Makes the session without the guard and the one with it."""
    events = make_events(kind, count)
    guarded = await _make_chat(kind, events, _make_guard(ROOMY_TOKENS))
    stored = guarded.sessions.stored

    half = count // 2 // 2 * 2
    if kind.startswith("tools"):
        half += 1  # Behind a result.
    if kind.endswith("summary"):
        guarded.base = events[:half]
        stored.events[:] = guarded.base
        request_compaction(stored.state)
    turn = await guarded.turn()

    if kind.endswith("summary"):
        if not any("summary" in key for key in stored.state):
            raise RuntimeError("no summary was stored")
        # The session goes on behind the question and the answer of that turn.
        events[half : half + 2] = turn[0], turn[-1]
    guarded.base = list(events)
    stored.events[:] = guarded.base

    if kind.endswith(NEARLY_FULL):
        # Only now: before the first count the estimate is too high to stay below it.
        guarded.window_tokens = _full_window(kind, count)
        guarded = await guarded.make_anew()
        await guarded.turn()
        if any("summary" in key for key in guarded.sessions.stored.state):
            raise RuntimeError("the window is too full")

    bare = [event.model_copy(update={"custom_metadata": None}) for event in events]
    return await _make_chat(kind, bare, None), guarded
