"""What the fake providers share: they keep requests, refuse, and answer by a script.

Each of them stands behind one of ADK's real clients, on loopback, and refuses what the
provider refuses, with its words and its status.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk.testing.provider import looks_like_summary_request
from tests.builders import user
from tests.loopback import Loopback, Provider, send, send_events
from tests.protocols import OpenAI, Refusal, Reply, Wire, called

Call = tuple[str, Mapping[str, Any]]
"""A tool's name and the arguments it is called with."""

Step = str | Sequence[Call]
"""What the agent's model does next: its last words of a turn, or parallel calls."""

SUMMARY = "## Current State\nSummary {number}: every shelf is to be counted.\n" + (
    "Shelf 17 holds 40 crates for Lisbon; order 4711 waits for its invoice.\n" * 6
)
_LINES = (Path(__file__).parent / "refusals.tsv").read_text("utf-8").splitlines()
REFUSALS: dict[str, str] = dict(line.split("\t") for line in _LINES)
"""The words of providers, by the rule that a request breaks."""


class RefusalError(Exception):
    """What a provider says to a request, by the rule or in words, and its status."""

    def __init__(self, rule: str, *places: object, status: int = 400) -> None:
        words = REFUSALS[rule].format(*places) if rule in REFUSALS else rule
        super().__init__(words)
        self.words = words
        self.status = status


@dataclass
class Exchange:
    """A request, the words it was refused with, and the body of its answer."""

    path: str
    body: dict[str, Any]
    is_summary: bool
    refused: str = ""
    answer: Any = None


@dataclass
class FakeProvider(ABC):
    """A provider that plays the model of an agent, and of its summaries."""

    path: ClassVar[str]
    wire: ClassVar[Wire] = OpenAI()

    window_tokens: int | None = None
    script: deque[Step] = field(default_factory=deque)
    refusals: dict[int, str] = field(default_factory=dict)
    exchanges: list[Exchange] = field(default_factory=list, repr=False)

    @property
    def of_agent(self) -> list[Exchange]:
        """The agent's requests, refused ones included."""
        return [each for each in self.exchanges if not each.is_summary]

    @property
    def accepted(self) -> list[Exchange]:
        """The agent's requests that were answered."""
        return [each for each in self.of_agent if not each.refused]

    @property
    def refused(self) -> list[str]:
        """The words of all refusals."""
        return [each.refused for each in self.exchanges if each.refused]

    def refuse_next(self, *words: str, after: int = 0) -> None:
        """Has the agent's next requests be refused, but for some that come first."""
        self.refusals |= dict(enumerate(words, len(self.of_agent) + after + 1))

    def receive(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Answers a request: a status, and a body or the events of a stream."""
        request = LlmRequest(contents=[user(last_text(body))])
        exchange = Exchange(path, body, looks_like_summary_request(request))
        self.exchanges.append(exchange)
        tokens = len(json.dumps(body)) // 4
        limit = self.window_tokens

        try:
            words = self.refusals.get(len(self.of_agent))
            if words and not exchange.is_summary:
                raise RefusalError(words)
            self.check(body)
            if limit and tokens > limit:
                raise RefusalError(self.overflow_words(tokens, limit))
        except RefusalError as error:
            exchange.refused = error.words
            return error.status, self.refusal(error)

        exchange.answer = self.answer(body, self._say(exchange, tokens))
        return 200, self.spell(body, exchange.answer)

    def _say(self, exchange: Exchange, tokens: int) -> Reply:
        number = len(self.exchanges)
        step: Step = SUMMARY.format(number=number)
        if not exchange.is_summary:
            step = self.script.popleft() if self.script else "Noted."
        if isinstance(step, str):
            return Reply([types.Part(text=step)] if step else [], tokens, 60, number)
        parts = [called(name, None, dict(args)) for name, args in step]
        return Reply(parts, tokens, 60, number)

    def overflow_words(self, used: int, limit: int) -> str:
        """What it says to a request that is too long."""
        return self.wire.overflow_words(used, limit, 0)

    @abstractmethod
    def check(self, body: dict[str, Any]) -> None:
        """Raises a `RefusalError` for what the provider refuses."""

    def refusal(self, error: RefusalError) -> Any:
        """The body of a refusal."""
        return self.wire.refuse(Refusal(error.status, error.words))

    def answer(self, body: dict[str, Any], reply: Reply) -> Any:
        """The body of an answer."""
        return self.wire.answer(reply)

    def spell(self, body: dict[str, Any], answer: Any) -> Any:
        """The answer as it is sent: itself, or a list of server-sent events."""
        return answer


def last_text(body: dict[str, Any]) -> str:
    """The text of the last message, whatever the protocol."""
    messages = body.get("messages") or body.get("contents") or [{}]
    said = messages[-1].get("content") or messages[-1].get("parts") or ""
    if isinstance(said, str):
        return said
    return "\n".join(each["text"] for each in said if "text" in each)


class FakeServer(Loopback):
    """Serves fake providers on a free port of this machine."""

    def __init__(self, *fakes: FakeProvider) -> None:
        super().__init__(Provider())
        self.fakes = fakes

    async def _answer(
        self, path: str, body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        fake = next((fake for fake in self.fakes if fake.path in path), None)
        if fake is None:
            return send(writer, 404, "{}")
        status, answer = fake.receive(path, json.loads(body or b"{}"))
        if isinstance(answer, list):
            return send_events(writer, answer, is_whole=True)
        return send(writer, status, json.dumps(answer))
