"""A provider on loopback: three HTTP protocols, as strict as the real ones.

It plays the model of an agent, writes summaries, counts what it is sent, and refuses in
the words and with the status of the provider whose protocol is spoken.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk.testing import provider as simulated
from tests.protocols import Anthropic, Gemini, OpenAI, Refusal, Reply, Sent, Wire

Mood = int | Literal["reset", "cut"]
"""How a request fails: with a status, before its answer, or in the middle of it."""

PATHS: Mapping[str, Wire] = {
    "GenerateContent": Gemini(),
    "generateContent": Gemini(),
    "/chat/completions": OpenAI(),
    "/messages": Anthropic(),
}
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests"}


@dataclass
class Received:
    """A request, and what became of it; `refused` is None where it was answered."""

    sent: Sent
    is_summary: bool
    prompt_tokens: int
    refused: Literal["overflow", "invalid", "parameter", "mood"] | None = None


@dataclass
class Provider:
    """How the provider behaves, and what it received; set for each test."""

    window_tokens: int = 20_000
    output_limit_tokens: int | None = None
    counts_output: bool | None = None
    truncates: bool = False
    moods: dict[int, Mood] = field(default_factory=dict)
    replies: deque[str | types.Part] = field(default_factory=deque)
    requests: list[Received] = field(default_factory=list, repr=False)

    @property
    def of_agent(self) -> list[Received]:
        """The agent's requests."""
        return [each for each in self.requests if not each.is_summary]

    def count(self, refused: str) -> int:
        """How many requests were refused in this way."""
        return sum(each.refused == refused for each in self.requests)

    def receive(self, sent: Sent) -> Received:
        """Counts a request and keeps it."""
        tokens = simulated.count_tokens(sent.texts, None) + 3 * len(sent.contents)
        asked = LlmRequest(contents=sent.contents[-1:])
        is_summary = simulated.looks_like_summary_request(asked)
        self.requests.append(Received(sent, is_summary, tokens))
        return self.requests[-1]

    def mood_of(self, received: Received) -> Mood | None:
        """How it fails, if it does."""
        return None if received.is_summary else self.moods.get(len(self.of_agent))

    def judge(self, wire: Wire, received: Received) -> Refusal | None:
        """What is wrong with a request, which is marked; None for nothing."""
        sent = received.sent
        used = received.prompt_tokens
        wanted = sent.max_tokens or 0
        limit = self.output_limit_tokens

        if limit is not None and wanted > limit:
            received.refused = "parameter"
            too_much = wire.output_words.format(wanted=wanted, limit=limit)
            return Refusal(400, too_much, "invalid_value", "max_tokens")

        if sent.thinking_tokens and wanted <= sent.thinking_tokens:
            received.refused = "parameter"
            return Refusal(
                400, "`max_tokens` must be greater than `thinking.budget_tokens`."
            )

        violation = find_violation(sent)
        if violation:
            received.refused = "invalid"
            return Refusal(400, violation)

        counts_output = self.counts_output
        if counts_output is None:
            counts_output = wire.counts_output
        reserved = wanted if counts_output else 0
        if self.truncates or used + reserved <= self.window_tokens:
            return None

        received.refused = "overflow"
        too_long = wire.overflow_words(used, self.window_tokens, reserved)
        return Refusal(400, too_long, "context_length_exceeded", "messages")

    def reply(self, received: Received) -> Reply:
        """What the model says, within the output that was reserved."""
        sent = received.sent
        limit = received.sent.max_tokens
        said = self.replies[0] if self.replies else "Noted."
        if received.is_summary:
            config = types.GenerateContentConfig(max_output_tokens=limit)
            request = LlmRequest(contents=sent.contents, config=config)
            said = simulated.summarize(request, None)
        part = types.Part(text=said) if isinstance(said, str) else said
        texts = simulated.list_content_texts([types.Content(parts=[part])])
        tokens = simulated.count_tokens(texts, None)
        is_cut = bool(part.text and limit and tokens > limit)
        if is_cut and part.text and limit:
            kept = part.text[: len(part.text) * limit // tokens]
            part = types.Part(text=kept)
            tokens = limit
        used = min(received.prompt_tokens, self.window_tokens)
        return Reply([part], used, tokens, len(self.requests), is_cut)

    def settle(self, received: Received) -> None:
        """Goes on to what the agent's model says next."""
        if self.replies and not received.is_summary:
            self.replies.popleft()


def find_violation(sent: Sent) -> str | None:
    """What breaks a rule of all providers, or of the strictest of them."""
    parts = [part for content in sent.contents for part in content.parts or ()]
    calls = [part.function_call for part in parts if part.function_call]
    ids = [call.id for call in calls if call.id]
    if len({*ids}) < len(ids):
        return "`tool_use` ids must be unique"
    return simulated.find_violation(sent.contents)


class Loopback:
    """Serves a provider on a free port, in a thread with an event loop of its own."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answers one request and closes; a client that has gone is no failure."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = head.lower().partition("content-length:")[2].split()[:1] or "0"
            path = head.split()[1]
            await self._answer(path, await reader.readexactly(int(length[0])), writer)
            await writer.drain()
        writer.close()

    async def _answer(
        self, path: str, body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        wire = next((wire for end, wire in PATHS.items() if end in path), None)
        if wire is None:
            return send(writer, 404, "")

        provider = self.provider
        sent = wire.read(path, json.loads(body))
        received = provider.receive(sent)

        mood = provider.mood_of(received)
        if mood is not None:
            received.refused = "mood"
        if mood == "reset":
            return writer.transport.abort()
        if isinstance(mood, int):
            refusal = Refusal(mood, wire.busy[mood][1], "rate_limit_exceeded")
            return send(writer, mood, json.dumps(wire.refuse(refusal)))

        refused = provider.judge(wire, received) if mood is None else None
        if refused:
            return send(writer, refused.status, json.dumps(wire.refuse(refused)))

        reply = provider.reply(received)
        if mood is None:
            provider.settle(received)  # First: the client may at once say more.
        if not sent.is_streamed:
            text = json.dumps(wire.answer(reply))
            return send(writer, 200, text, is_whole=mood is None)

        events = list(wire.stream(sent, reply))
        pieces = events if mood is None else events[: len(events) // 2]
        return send_events(writer, pieces, is_whole=mood is None)


def send(
    writer: asyncio.StreamWriter, status: int, text: str, *, is_whole: bool = True
) -> None:
    """Sends a body, or only its first half."""
    body = text.encode()
    lines = [
        f"HTTP/1.1 {status} {REASONS.get(status, 'Unavailable')}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(["retry-after: 0.01"] if status in (429, 503, 529) else ()),
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    writer.write(body if is_whole else body[: len(body) // 2])


def send_events(
    writer: asyncio.StreamWriter, events: list[str], *, is_whole: bool
) -> None:
    """Sends a stream, with or without its end."""
    lines = ["HTTP/1.1 200 OK", "content-type: text/event-stream"]
    lines += ["transfer-encoding: chunked", "connection: close"]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    for text in events:
        data = text.encode()
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    if is_whole:
        writer.write(b"0\r\n\r\n")
