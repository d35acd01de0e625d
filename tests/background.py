"""Chats whose summaries are written in the background, and let go by hand."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

import pytest
from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import InMemorySessionService

import contextguard_adk as cg
from contextguard_adk import strategies
from contextguard_adk.testing import (
    RecordedRequest,
    Reply,
    SimulatedLlm,
    VirtualTimeLoop,
)
from tests.builders import (
    Chat,
    answer_text,
    guarded_agent,
    model,
    user,
)
from tests.chats import (
    EXACT,
    agent_requests,
    seed,
    words,
)

SIZES: dict[str, Any] = {
    "context_window": 10_000,
    "summarizer_context_window": 100_000,
    "ahead": 0.75,
    "recall": False,
}
"""Threshold 8,000 tokens; up to 9,000 a request leaves room for its answer. From 6,000
tokens on summaries are written."""

STRATEGY = cg.Threshold(**SIZES)
ANOTHER = "A summary of another try."
P = ParamSpec("P")


class Writer:
    """Writes summaries once it may."""

    def __init__(self) -> None:
        self.now = self.most = self.begun = 0
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def write(self, request: LlmRequest) -> Reply:
        """Writes one, or fails."""
        self.begun += 1
        self.now += 1
        self.most = max(self.most, self.now)
        self.has_begun.set()

        try:
            await self.may_end.wait()
        finally:
            self.now -= 1

        return self.error or f"Summary number {self.begun}, of all before."

    async def end(self) -> None:
        """Lets those end that are under way."""
        self.may_end.set()
        await settle()


class Door(BasePlugin):
    """Stands before the guard, and tells that a request has come."""

    def __init__(self) -> None:
        super().__init__(name="door")
        self.has_come = asyncio.Event()

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Lets it pass."""
        self.has_come.set()


async def settle() -> None:
    """Waits for all other tasks."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs a test without waiting for real."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


class Talk:
    """Guarded chats of one app whose summaries are let go by hand."""

    def __init__(
        self,
        strategy: strategies.Strategy = STRATEGY,
        *,
        sessions: int = 1,
        provider_window: int = 100_000,
        guard: dict[str, Any] | None = None,
        agent: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.writer = Writer()
        self.door = Door()
        self.told = list[cg.CompactionRecord]()
        self.calls = list[cg.CallRecord]()

        self.llm = SimulatedLlm(
            context_window=provider_window,
            summary_replies=self.writer.write,
            token_ratio=1.0,
        )

        listeners = {"on_compaction": self.told.append, "on_call": self.calls.append}
        plugin = cg.ContextGuardPlugin(
            default=strategy, **{**listeners, **(guard or {})}
        )
        root = guarded_agent(self.llm, **(agent or {}))
        plugins = [self.door, plugin, *settings.pop("plugins", ())]

        settings.setdefault("session_service", InMemorySessionService())
        self.chats = [
            Chat(root, plugins, session_id=str(number), **settings)
            for number in range(sessions)
        ]
        self.chat = self.chats[0]

    async def begin(self, tokens: int = 6_100, *, is_written: bool = False) -> None:
        """Says so much that a summary is begun, in each session."""
        if is_written:
            self.writer.may_end.set()
        for chat in self.chats:
            told = user("The task."), model(words(tokens, "ORIGINAL"))
            await seed(chat, *told, state=EXACT)
            assert answer_text(await chat.say("First."))
        await (settle() if is_written else asyncio.sleep(0))

    async def say(self, message: str) -> RecordedRequest:
        """Says something; returns what the agent's model was sent."""
        assert answer_text(await self.chat.say(message))
        return agent_requests(self.llm)[-1]

    async def interrupt(self, message: str) -> None:
        """Sends a message whose turn has no more time once it waits for a summary."""
        self.door.has_come.clear()
        turn = asyncio.ensure_future(self.chat.say(message))
        waits = asyncio.ensure_future(self._wait_for_summary())
        await asyncio.wait([waits, turn], return_when="FIRST_COMPLETED")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(turn, 0.03)

    async def _wait_for_summary(self) -> None:
        # A turn that is cancelled while it writes into a database leaves it locked.
        await self.door.has_come.wait()
        await self.writer.has_begun.wait()

    def hang_once(self, is_stubborn: bool = False) -> None:
        """The next summary does not end, if stubborn not even when it is cancelled."""

        async def write(request: LlmRequest) -> Reply:
            self.llm.summary_replies = lambda _: ANOTHER
            for _ in range(3):
                try:
                    await asyncio.sleep(3_600)
                except asyncio.CancelledError:
                    if not is_stubborn:
                        raise
            return "Too late."

        self.llm.summary_replies = write

    @property
    def were_ahead(self) -> list[bool]:
        """Of each compaction, whether its summary was written ahead."""
        return [record.was_ahead for record in self.told]


OLD = [user("The task."), model(words(9_000, "ORIGINAL"))]
