"""Anthropic's Messages API, with what it demands of the thoughts in a history."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tests.fake_provider import FakeProvider, RefusalError
from tests.protocols import Anthropic, Reply, list_blocks

Block = dict[str, Any]
Message = dict[str, Any]

THOUGHTS = ("thinking", "redacted_thinking")


@dataclass(frozen=True)
class Issued:
    """A thought that was given out, and what it was written behind."""

    block: Block
    digest: str
    earlier: tuple[str, ...]


@dataclass
class FakeClaude(FakeProvider):
    """A Claude model."""

    path: ClassVar[str] = "/messages"
    wire = Anthropic()

    # "bound": each thought belongs to what it was written behind. "enabled": in a tool
    # loop an answer begins with its thought. "adaptive": those of the turn stay.
    kind: Literal["bound", "enabled", "adaptive"] = "bound"
    display: Literal["summarized", "omitted"] = "summarized"
    redacts: bool = False
    takes_thoughts_alone: bool = False
    issued: dict[str, Issued] = field(default_factory=dict, repr=False)
    of_call: dict[str, list[Block]] = field(default_factory=dict, repr=False)
    compactions: int = 0

    def check(self, body: dict[str, Any]) -> None:
        if self.kind != "enabled" and thinking_of(body) == "enabled":
            raise RefusalError("claude no budgets")
        messages = read_messages(body)
        check_shape(messages, has_tools=bool(body.get("tools")))

        for n, message in enumerate(messages):
            is_thought = message["content"][-1]["type"] in THOUGHTS
            if is_thought and not self.takes_thoughts_alone:
                raise RefusalError("claude final thought", n)

        if self.kind == "bound":
            return self._check_bound(body, messages)
        for n, m, block in list_thoughts(messages):
            self._find(n, m, block)
        if self.kind == "enabled":
            return self._check_tool_loop(body, messages)
        return self._check_running_turn(messages)

    def _check_bound(self, body: dict[str, Any], messages: list[Message]) -> None:
        seen: tuple[str, ...] = ()
        digests = digest_prefixes(body, messages)
        for n, m, block in list_thoughts(messages):
            issued = self._find(n, m, block)
            fits = issued.earlier[len(issued.earlier) - len(seen) :] == seen
            if not fits or digests[n, m] != issued.digest:
                raise RefusalError("claude bound", n, m)
            seen = (*seen, signature_of(block))

    def _find(self, n: int, m: int, block: Block) -> Issued:
        """Finds a thought that was given out; refuses others."""
        issued = self.issued.get(signature_of(block))
        if issued is None or issued.block["type"] != block["type"]:
            is_redacted = block["type"] == "redacted_thinking"
            key = "claude data" if is_redacted else "claude signature"
            raise RefusalError(key, n, m)
        # What is put into an omitted thought is ignored.
        if issued.block != block and issued.block.get("thinking"):
            key = "claude signature" if self.kind == "bound" else "claude modified"
            raise RefusalError(key, n, m)
        return issued

    def _check_tool_loop(self, body: dict[str, Any], messages: list[Message]) -> None:
        if thinking_of(body) != "enabled" or len(messages) < 2:
            return
        first = messages[-2]["content"][0]["type"]
        is_loop = any(each["type"] == "tool_result" for each in messages[-1]["content"])
        if is_loop and first not in THOUGHTS:
            raise RefusalError("claude expected", len(messages) - 2, first)

    def _check_running_turn(self, messages: list[Message]) -> None:
        for n in range(begin_of_turn(messages), len(messages)):
            content = messages[n]["content"]
            sent = [signature_of(each) for each in content if each["type"] in THOUGHTS]
            if sent != [signature_of(each) for each in self._find_thoughts(content)]:
                raise RefusalError("claude modified", n, 0)

    def _find_thoughts(self, content: list[Block]) -> list[Block]:
        """The thoughts that were given out with the calls of a message."""
        for block in content:
            if block["type"] == "tool_use":
                return self.of_call.get(block["id"], [])
        return []

    def answer(self, body: dict[str, Any], reply: Reply) -> Any:
        """The body of an answer; notes what its thoughts are bound to."""
        answer = super().answer(body, reply)
        thoughts = self._think(body, reply)
        blocks = answer["content"]
        calls = [each["id"] for each in blocks if each["type"] == "tool_use"]
        self.of_call |= dict.fromkeys(calls, thoughts)
        content = [*(dict(thought) for thought in thoughts), *blocks]
        if asks_to_compact(body):
            self.compactions += 1
            content.insert(0, {"type": "compaction", "content": "All so far."})
        return answer | {"model": body["model"], "content": content}

    def _think(self, body: dict[str, Any], reply: Reply) -> list[Block]:
        mode = thinking_of(body)
        if mode == "disabled" or (self.kind == "enabled" and mode != "enabled"):
            return []
        display = (body.get("thinking") or {}).get("display", self.display)
        thought = reply.thought if display == "summarized" else ""
        key = encode(f"thought {reply.number}")
        blocks = [{"type": "thinking", "thinking": thought, "signature": key}]
        if self.redacts and reply.number % 3 == 0:
            data = encode(f"redacted {reply.number}")
            blocks.append({"type": "redacted_thinking", "data": data})
        messages = read_messages(body)
        digest = digest_prefixes(body, messages)[len(messages), 0]
        chain = [signature_of(block) for _, _, block in list_thoughts(messages)]

        for block in blocks:
            signature = signature_of(block)
            self.issued[signature] = Issued(block, digest, tuple(chain))
            chain.append(signature)

        return blocks

    def spell(self, body: dict[str, Any], answer: Any) -> Any:
        """The answer, or the events of its stream."""
        return [*self.wire.stream_answer(answer)] if body.get("stream") else answer


def encode(text: str) -> str:
    """A text as signatures are spelled: LiteLLM decodes them."""
    return base64.b64encode(text.encode()).decode()


def thinking_of(body: dict[str, Any]) -> str | None:
    """What the request says of thinking."""
    return (body.get("thinking") or {}).get("type")


def asks_to_compact(body: dict[str, Any]) -> bool:
    """Whether the provider compacts: no request of this fake is below the trigger."""
    edits = (body.get("context_management") or {}).get("edits", [])
    if not any(each["type"].startswith("compact_") for each in edits):
        return False
    blocks = [each for message in read_messages(body) for each in message["content"]]
    return not any(block["type"] == "compaction" for block in blocks)


def signature_of(block: Block) -> str:
    """What a thought is known by."""
    return str(block["data" if block["type"] == "redacted_thinking" else "signature"])


def without_marks(value: Any) -> Any:
    """Leaves out what only says what to cache."""
    if isinstance(value, list):
        return [without_marks(each) for each in value]
    if isinstance(value, dict):
        kept = {name: each for name, each in value.items() if name != "cache_control"}
        return {name: without_marks(each) for name, each in kept.items()}
    return value


def read_messages(body: dict[str, Any]) -> list[Message]:
    """The messages, each with a list of blocks, and without marks."""
    return [
        {"role": each["role"], "content": without_marks(list_blocks(each["content"]))}
        for each in body["messages"]
    ]


def list_thoughts(messages: list[Message]) -> Iterator[tuple[int, int, Block]]:
    """The thoughts, each with the index of its message and its own."""
    for n, message in enumerate(messages):
        for m, block in enumerate(message["content"]):
            if block["type"] in THOUGHTS:
                yield n, m, block


def digest_prefixes(
    body: dict[str, Any], messages: list[Message]
) -> dict[tuple[int, int], str]:
    """Digests of all but thoughts that stands before each thought, by the indexes of
    its message and its own, and before the next message."""
    system = body.get("system") or ""
    if isinstance(system, str):
        system = [{"type": "text", "text": system}]
    tools = sorted(body.get("tools") or (), key=lambda each: str(each["name"]))
    running = hashlib.sha256(spell([system, tools]))

    found = {}
    for n, message in enumerate(messages):
        role = message["role"]
        for m, block in enumerate(message["content"]):
            if block["type"] in THOUGHTS:
                found[n, m] = running.hexdigest()
                continue
            running.update(spell([role, block]))
            role = ""  # What follows is of the same message.

    return {**found, (len(messages), 0): running.hexdigest()}


def spell(value: Any) -> bytes:
    """The bytes of a value, without marks."""
    return json.dumps(without_marks(value), sort_keys=True).encode()


def check_shape(messages: list[Message], *, has_tools: bool) -> None:
    """Refuses wrong roles, empty blocks and broken pairs."""
    if messages[0]["role"] != "user":
        raise RefusalError("claude first role")
    if messages[-1]["role"] != "user":
        raise RefusalError("claude last role")

    kinds = {each["type"] for message in messages for each in message["content"]}
    if kinds & {"tool_use", "tool_result"} and not has_tools:
        raise RefusalError("claude no tools")

    asked: list[str] = []
    for n, message in enumerate(messages):
        content = message["content"]
        check_not_empty(n, content)
        check_pairs(n, content, asked)
        asked = [each["id"] for each in content if each["type"] == "tool_use"]


def check_not_empty(n: int, content: list[Block]) -> None:
    """Refuses a message without blocks, and a text without letters."""
    if not content:
        raise RefusalError("claude empty message", n)
    if any(each["type"] == "text" and not each["text"] for each in content):
        raise RefusalError("claude empty text")


def check_pairs(n: int, content: list[Block], asked: list[str]) -> None:
    """Refuses a message that does not answer all calls before it, and no others."""
    for m, block in enumerate(content):
        if block["type"] == "tool_result" and block["tool_use_id"] not in asked:
            raise RefusalError("claude orphan", n, m, block["tool_use_id"])
    first = content[: len(asked)]  # Results come before anything else.
    answered = {each.get("tool_use_id") for each in first}
    missing = [each for each in asked if each not in answered]
    if missing:
        raise RefusalError("claude unanswered", n - 1, ", ".join(missing))


def begin_of_turn(messages: list[Message]) -> int:
    """The index after the last message in which the user says something."""
    for n in range(len(messages), 0, -1):
        kinds = {each["type"] for each in messages[n - 1]["content"]}
        if messages[n - 1]["role"] == "user" and "text" in kinds:
            return n
    return 0
