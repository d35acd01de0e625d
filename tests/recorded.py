"""A guarded chat, and what listeners, events and the log tell of it."""

from __future__ import annotations

from typing import Any

import pytest
from google.adk.events.event import Event

from contextguard_adk import (
    CallRecord,
    CompactionRecord,
    PressureRecord,
    Threshold,
)
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests.builders import queued_tool
from tests.chats import (
    agent_requests,
    guarded_chat,
)

WINDOW = 4_000
FINDING = "Hall B holds part 7f3a of the old press, says the inventory. " * 40
TURNS = 5


class Recorded:
    """A guarded chat whose agent may search, and what its listeners heard."""

    def __init__(
        self,
        llm: SimulatedLlm | None = None,
        strategy: Strategy | None = None,
        *,
        finding: str = FINDING,
        guard: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        searching: list[Reply] = [call("search"), call("search"), "In hall B."]
        self.llm = llm or SimulatedLlm(context_window=WINDOW, script=searching * TURNS)
        self.calls = list[CallRecord]()
        self.compactions = list[CompactionRecord]()
        self.pressures = list[PressureRecord]()

        listeners: dict[str, Any] = {
            "on_call": self.calls.append,
            "on_compaction": self.compactions.append,
            "on_pressure": self.pressures.append,
        }

        self.chat = guarded_chat(
            self.llm,
            strategy or Threshold(context_window=WINDOW),
            guard=listeners | (guard or {}),
            agent={"tools": [queued_tool("search", [finding])]},
            **settings,
        )
        self.events: list[Event] = []

    async def work(self, turns: int = TURNS, question: str = "Where is it?") -> None:
        """Has some turns."""
        for _ in range(turns):
            self.events += await self.chat.say(question)

    @property
    def answers(self) -> list[Event]:
        """The complete responses of the model."""
        said = [each for each in self.events if each.content and not each.partial]
        return [e for e in said if e.content and e.content.role == "model"]

    @property
    def real_tokens(self) -> list[int]:
        """What the provider counted in the agent's requests that it answered."""
        return [r.prompt_tokens for r in agent_requests(self.llm) if r.response]


def metadata(event: Event) -> Any:
    """What the guard put on an event."""
    return (event.custom_metadata or {}).get("context_guard")


def own_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the guard has logged."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("contextgua")]
