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
from typing import Any, ClassVar

from google.adk.models.llm_request import LlmRequest

from contextguard_adk.testing.provider import looks_like_summary_request
from tests.builders import user
from tests.loopback import Loopback, Provider, send, send_events

Call = tuple[str, Mapping[str, Any]]
"""A tool's name and the arguments it is called with."""

Step = str | Sequence[Call]
"""What the agent's model does next: its last words of a turn, or parallel calls."""

SUMMARY = """\
## Current State
The shelves of the warehouse are being counted, one after the other (summary {number}).

## Key Information
Shelf 17 holds 40 crates for Lisbon; order 4711 waits for its invoice.

## Context & Decisions
The user wants every shelf counted and no crate opened.

## Exact Next Steps
Count the next shelf with `look_up`, then answer.

## Language and Tools
English; `look_up` and `read_log`."""


class RefusalError(Exception):
    """What a provider says to a request, and with which status."""

    def __init__(self, words: str, status: int = 400) -> None:
        super().__init__(words)
        self.words, self.status = words, status


@dataclass(frozen=True)
class Said:
    """What the model says to one request."""

    number: int
    text: str = ""
    calls: Sequence[Call] = ()
    prompt_tokens: int = 0

    @property
    def thought(self) -> str:
        """What it thinks before; no two thoughts are the same."""
        return f"Thought {self.number}: the next shelf has to be counted."

    def call_id(self, index: int) -> str:
        """The id of one of its calls."""
        return f"toolu_{self.number}_{index}"


@dataclass
class Exchange:
    """A request, the words it was refused with, and the body of its answer."""

    path: str
    body: dict[str, Any]
    is_summary: bool
    refused: str = ""
    answer: Any = None
    position: int = 0


@dataclass
class FakeProvider(ABC):
    """A provider that plays the model of an agent, and of its summaries.

    Attributes:
        window_tokens: Longer requests are refused; None takes any.
        script: What the agent's model does next; then it says "Noted.".
        refusals: Words that requests of the agent are refused with, by their number
            from 1 on.
        exchanges: What was received, in order.
    """

    path: ClassVar[str] = ""
    """What every path that it serves contains."""

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
        first = len(self.of_agent) + after + 1
        self.refusals |= dict(enumerate(words, first))

    def receive(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Answers a request: a status, and a body or the events of a stream."""
        exchange = Exchange(path, body, self.wants_summary(body))
        exchange.position = len(self.exchanges)
        self.exchanges.append(exchange)
        try:
            self._refuse_as_told(exchange)
            self.check(body)
            tokens = self._count(body)
        except RefusalError as error:
            exchange.refused = error.words
            return error.status, self.refusal(error)
        said = self._say(exchange, tokens)
        exchange.answer = self.answer(body, said)
        return 200, self.spell(path, body, exchange.answer)

    def _refuse_as_told(self, exchange: Exchange) -> None:
        words = self.refusals.get(len(self.of_agent))
        if words and not exchange.is_summary:
            raise RefusalError(words)

    def _count(self, body: dict[str, Any]) -> int:
        tokens = len(json.dumps(body)) // 4
        if self.window_tokens and tokens > self.window_tokens:
            raise RefusalError(self.overflow_words(tokens, self.window_tokens))
        return tokens

    def _say(self, exchange: Exchange, tokens: int) -> Said:
        number = len(self.exchanges)
        if exchange.is_summary:
            return Said(number, SUMMARY.format(number=number), (), tokens)
        step = self.script.popleft() if self.script else "Noted."
        if isinstance(step, str):
            return Said(number, step, (), tokens)
        return Said(number, "", step, tokens)

    def wants_summary(self, body: dict[str, Any]) -> bool:
        """Whether a request asks for a summary."""
        text = self.last_text(body)
        return looks_like_summary_request(LlmRequest(contents=[user(text)]))

    def overflow_words(self, used: int, limit: int) -> str:
        """What it says to a request that is too long."""
        return f"prompt is too long: {used} tokens > {limit} maximum"

    @abstractmethod
    def last_text(self, body: dict[str, Any]) -> str:
        """The text of the last message."""

    @abstractmethod
    def check(self, body: dict[str, Any]) -> None:
        """Raises a `RefusalError` for what the provider refuses."""

    @abstractmethod
    def refusal(self, error: RefusalError) -> Any:
        """The body of a refusal."""

    @abstractmethod
    def answer(self, body: dict[str, Any], said: Said) -> Any:
        """The body of an answer."""

    def spell(self, path: str, body: dict[str, Any], answer: Any) -> Any:
        """The answer as it is sent: itself, or a list of server-sent events."""
        return answer


class FakeServer(Loopback):
    """Serves fake providers on a free port of this machine."""

    def __init__(self, *fakes: FakeProvider) -> None:
        super().__init__(Provider())
        self.fakes = fakes

    async def _answer(
        self, path: str, body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        fakes = [fake for fake in self.fakes if fake.path in path]
        if not fakes:
            return send(writer, 404, "{}")
        status, answer = fakes[0].receive(path, json.loads(body or b"{}"))
        if isinstance(answer, list):
            return send_events(writer, answer, is_whole=True)
        return send(writer, status, json.dumps(answer))
