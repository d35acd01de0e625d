"""Anthropic's Messages API, with what it demands of the thoughts in a history."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tests.fake_provider import FakeProvider, RefusalError, Said
from tests.protocols import event, halves

Block = dict[str, Any]
Message = dict[str, Any]

THOUGHTS = ("thinking", "redacted_thinking")

BOUND_ELSEWHERE = (
    "messages.{}.content.{}: Invalid `signature` in `thinking` block. The block is "
    "bound to a different conversation. Remove the block, or set "
    '`thinking.block_binding.prefix_mismatch_behavior` to "drop_block".'
)
INVALID_SIGNATURE = "messages.{}.content.{}: Invalid `signature` in `thinking` block"
INVALID_DATA = "messages.{}.content.{}: Invalid `data` in `redacted_thinking` block"
EXPECTED_THINKING = (
    "messages.{}.content.0.type: Expected `thinking` or `redacted_thinking`, but found "
    "`{}`. When `thinking` is enabled, a final `assistant` message must start with a "
    "thinking block (preceeding the lastmost set of `tool_use` and `tool_result` "
    "blocks). We recommend you include thinking blocks from previous turns. To avoid "
    "this requirement, disable `thinking`."
)
MODIFIED = (
    "messages.{}.content.{}: `thinking` or `redacted_thinking` blocks in the latest "
    "assistant message cannot be modified. These blocks must remain as they were in "
    "the original response."
)
FINAL_THOUGHT = (
    "messages.{}: The final block in an assistant message cannot be `thinking`."
)
FIRST_ROLE = 'messages: first message must use the "user" role'
LAST_ROLE = (
    "This model does not support assistant message prefill. The conversation must end "
    "with a user message."
)
NO_TOOLS = (
    "Requests which include `tool_use` or `tool_result` blocks must define tools."
)
UNANSWERED = (
    "messages.{}: `tool_use` ids were found without `tool_result` blocks immediately "
    "after: {}. Each `tool_use` block must have a corresponding `tool_result` block in "
    "the next message."
)
ORPHAN = (
    "messages.{}.content.{}: unexpected `tool_use_id` found in `tool_result` blocks: "
    "{}. Each `tool_result` block must have a corresponding `tool_use` block in the "
    "previous message."
)
EMPTY_TEXT = "messages: text content blocks must be non-empty"
EMPTY_MESSAGE = (
    "messages.{}: all messages must have non-empty content except for the optional "
    "final assistant message"
)
NO_BUDGETS = (
    '"thinking.type.enabled" is not supported for this model. Use '
    '"thinking.type.adaptive" and "output_config.effort" to control thinking behavior.'
)


@dataclass(frozen=True)
class Issued:
    """A thought that was given out, and what it was written behind."""

    block: Block
    digest: str
    earlier: tuple[str, ...]


@dataclass
class FakeClaude(FakeProvider):
    """A Claude model.

    Attributes:
        kind: Which rules hold for thoughts. "bound": each one belongs to what it was
            written behind. "enabled": thinking with a budget; within a tool loop an
            answer begins with its thought. "adaptive": those of the running turn stay
            as they were.
        display: How thoughts come where the request does not say.
        redacts: Whether every third answer has a redacted thought too.
        is_enforced: Whether thoughts that are bound elsewhere are refused.
        takes_thoughts_alone: Whether an answer may be nothing but a thought.
    """

    path: ClassVar[str] = "/messages"

    kind: Literal["bound", "enabled", "adaptive"] = "bound"
    display: Literal["summarized", "omitted"] = "summarized"
    redacts: bool = False
    is_enforced: bool = True
    takes_thoughts_alone: bool = False
    issued: dict[str, Issued] = field(default_factory=dict, repr=False)
    of_call: dict[str, list[Block]] = field(default_factory=dict, repr=False)

    def last_text(self, body: dict[str, Any]) -> str:
        """The text of the last message."""
        blocks = list_blocks(body["messages"][-1])
        return "\n".join(each["text"] for each in blocks if each["type"] == "text")

    def check(self, body: dict[str, Any]) -> None:
        """Refuses what Anthropic refuses."""
        if self.kind != "enabled" and thinking_of(body) == "enabled":
            raise RefusalError(NO_BUDGETS)
        messages = read_messages(body)
        check_shape(messages, has_tools=bool(body.get("tools")))
        if not self.takes_thoughts_alone:
            check_ends(messages)
        if self.kind == "bound":
            self._check_bound(body, messages)
            return
        self._check_known(messages)
        if self.kind == "enabled":
            self._check_tool_loop(body, messages)
        else:
            self._check_running_turn(messages)

    def _check_bound(self, body: dict[str, Any], messages: list[Message]) -> None:
        behavior = (body.get("thinking") or {}).get("block_binding", {})
        drops = behavior.get("prefix_mismatch_behavior") == "drop_block"
        seen: list[str] = []
        digests = digest_prefixes(body, messages)
        for n, m, block in list_thoughts(messages):
            issued = self._find(n, m, block)
            earlier = issued.earlier[len(issued.earlier) - len(seen) :]
            fits = len(seen) <= len(issued.earlier) and earlier == tuple(seen)
            if fits and digests[n, m] == issued.digest:
                seen.append(signature_of(block))
            elif self.is_enforced and not drops:
                raise RefusalError(BOUND_ELSEWHERE.format(n, m))

    def _check_known(self, messages: list[Message]) -> None:
        for n, m, block in list_thoughts(messages):
            self._find(n, m, block)

    def _find(self, n: int, m: int, block: Block) -> Issued:
        """Finds a thought that was given out; refuses others."""
        issued = self.issued.get(signature_of(block))
        if issued is None or issued.block["type"] != block["type"]:
            is_redacted = block["type"] == "redacted_thinking"
            words = INVALID_DATA if is_redacted else INVALID_SIGNATURE
            raise RefusalError(words.format(n, m))
        # What is put into an omitted thought is ignored.
        if issued.block != block and issued.block.get("thinking"):
            words = INVALID_SIGNATURE if self.kind == "bound" else MODIFIED
            raise RefusalError(words.format(n, m))
        return issued

    def _check_tool_loop(self, body: dict[str, Any], messages: list[Message]) -> None:
        if thinking_of(body) != "enabled" or len(messages) < 2:
            return
        first = messages[-2]["content"][0]["type"]
        is_loop = any(each["type"] == "tool_result" for each in messages[-1]["content"])
        if is_loop and first not in THOUGHTS:
            raise RefusalError(EXPECTED_THINKING.format(len(messages) - 2, first))

    def _check_running_turn(self, messages: list[Message]) -> None:
        for n in range(begin_of_turn(messages), len(messages)):
            content = messages[n]["content"]
            ids = [each["id"] for each in content if each["type"] == "tool_use"]
            wanted = [each for id_ in ids[:1] for each in self.of_call.get(id_, ())]
            sent = [each for each in content if each["type"] in THOUGHTS]
            if [*map(signature_of, sent)] != [*map(signature_of, wanted)]:
                raise RefusalError(MODIFIED.format(n, 0))

    def refusal(self, error: RefusalError) -> Any:
        """The body of a refusal."""
        said = {"type": "invalid_request_error", "message": error.words}
        return {"type": "error", "error": said, "request_id": "req_1"}

    def answer(self, body: dict[str, Any], said: Said) -> Any:
        """The body of an answer; notes what its thoughts are bound to."""
        thoughts = self._think(body, said)
        blocks = [dict(each) for each in thoughts]
        if said.text:
            blocks.append({"type": "text", "text": said.text})
        for index, (name, args) in enumerate(said.calls):
            use = {"id": said.call_id(index), "name": name, "input": dict(args)}
            blocks.append({"type": "tool_use", **use})
            self.of_call[said.call_id(index)] = thoughts
        return {
            "id": f"msg_{said.number}",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": blocks,
            "stop_reason": "tool_use" if said.calls else "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": said.prompt_tokens, "output_tokens": 60},
        }

    def _think(self, body: dict[str, Any], said: Said) -> list[Block]:
        mode = thinking_of(body)
        if mode == "disabled" or (self.kind == "enabled" and mode != "enabled"):
            return []
        display = (body.get("thinking") or {}).get("display", self.display)
        thought = said.thought if display == "summarized" else ""
        key = encode(f"thought {said.number}")
        blocks = [{"type": "thinking", "thinking": thought, "signature": key}]
        if self.redacts and said.number % 3 == 0:
            data = encode(f"redacted {said.number}")
            blocks.append({"type": "redacted_thinking", "data": data})
        messages = read_messages(body)
        digest = digest_prefixes(body, messages)[len(messages), 0]
        chain = [signature_of(block) for _, _, block in list_thoughts(messages)]
        for block in blocks:
            signature = signature_of(block)
            self.issued[signature] = Issued(block, digest, tuple(chain))
            chain.append(signature)
        return blocks

    def spell(self, path: str, body: dict[str, Any], answer: Any) -> Any:
        """The answer, or the events of its stream."""
        if not body.get("stream"):
            return answer
        return [event({"type": name, **data}, name) for name, data in stream(answer)]


def encode(text: str) -> str:
    """A text as signatures are spelled: LiteLLM decodes them."""
    return base64.b64encode(text.encode()).decode()


def thinking_of(body: dict[str, Any]) -> str | None:
    """What the request says of thinking."""
    return (body.get("thinking") or {}).get("type")


def signature_of(block: Block) -> str:
    """What a thought is known by."""
    return str(block["data" if block["type"] == "redacted_thinking" else "signature"])


def list_blocks(message: Message) -> list[Block]:
    """The blocks of a message, which may be one text."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


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
        {"role": each["role"], "content": without_marks(list_blocks(each))}
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
    """Digests of all that stands before each thought, and before the next message.

    Thoughts are left out, and so is what only says what to cache. The keys are the
    indexes of a message and of a block in it.
    """
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
        raise RefusalError(FIRST_ROLE)
    if messages[-1]["role"] != "user":
        raise RefusalError(LAST_ROLE)
    kinds = {each["type"] for message in messages for each in message["content"]}
    if kinds & {"tool_use", "tool_result"} and not has_tools:
        raise RefusalError(NO_TOOLS)
    asked: list[str] = []
    for n, message in enumerate(messages):
        content = message["content"]
        if not content:
            raise RefusalError(EMPTY_MESSAGE.format(n))
        if any(each["type"] == "text" and not each["text"] for each in content):
            raise RefusalError(EMPTY_TEXT)
        check_pairs(n, content, asked)
        asked = [each["id"] for each in content if each["type"] == "tool_use"]


def check_ends(messages: list[Message]) -> None:
    """Refuses answers that end with a thought."""
    for n, message in enumerate(messages):
        if message["content"][-1]["type"] in THOUGHTS:
            raise RefusalError(FINAL_THOUGHT.format(n))


def check_pairs(n: int, content: list[Block], asked: list[str]) -> None:
    """Refuses a message that does not answer all calls before it, and no others."""
    for m, block in enumerate(content):
        if block["type"] == "tool_result" and block["tool_use_id"] not in asked:
            raise RefusalError(ORPHAN.format(n, m, block["tool_use_id"]))
    first = content[: len(asked)]  # Results come before anything else.
    answered = {each.get("tool_use_id") for each in first}
    if missing := [each for each in asked if each not in answered]:
        raise RefusalError(UNANSWERED.format(n - 1, ", ".join(missing)))


def begin_of_turn(messages: list[Message]) -> int:
    """The index after the last message in which the user says something."""
    for n in range(len(messages) - 1, -1, -1):
        kinds = {each["type"] for each in messages[n]["content"]}
        if messages[n]["role"] == "user" and "text" in kinds:
            return n + 1
    return 0


def stream(answer: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a streamed answer; a signature comes apart from its thought."""
    usage = answer["usage"] | {"output_tokens": 1}
    yield "message_start", {"message": answer | {"content": [], "usage": usage}}
    for index, block in enumerate(answer["content"]):
        empty, deltas = split_block(block)
        yield "content_block_start", {"index": index, "content_block": block | empty}
        for delta in deltas:
            yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    end = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    yield "message_delta", {"delta": end, "usage": {"output_tokens": 60}}
    yield "message_stop", {}


def split_block(block: Block) -> tuple[Block, list[Block]]:
    """What of a block is empty at first, and the pieces that come then."""
    match block["type"]:
        case "thinking":
            pieces = halves(block["thinking"])
            deltas = [{"type": "thinking_delta", "thinking": each} for each in pieces]
            last = {"type": "signature_delta", "signature": block["signature"]}
            return {"thinking": "", "signature": ""}, [*deltas, last]
        case "text":
            pieces = halves(block["text"])
            return {"text": ""}, [{"type": "text_delta", "text": e} for e in pieces]
        case "tool_use":
            pieces = halves(json.dumps(block["input"]))
            kind = "input_json_delta"
            return {"input": {}}, [{"type": kind, "partial_json": e} for e in pieces]
    return {}, []
