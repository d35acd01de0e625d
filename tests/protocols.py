"""How the three HTTP protocols spell requests, answers and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from google.genai import types
from pydantic_core import to_json

from contextguard_adk.testing.provider import list_content_texts

ROLES = {"user": "user", "assistant": "model", "tool": "user"}


@dataclass(frozen=True)
class Sent:
    """A request as the provider reads it; `texts` is what counts, as it was sent."""

    contents: list[types.Content]
    system: str
    texts: list[str]
    max_tokens: int | None
    is_streamed: bool
    parameters: set[str]
    thinking_tokens: int = 0
    includes_usage: bool = True


@dataclass(frozen=True)
class Reply:
    """What the model says, and what it is billed for."""

    parts: Sequence[types.Part]
    prompt_tokens: int
    output_tokens: int
    number: int
    is_cut: bool = False

    @property
    def text(self) -> str:
        """The words."""
        return "".join(part.text or "" for part in self.parts)

    @property
    def calls(self) -> list[types.FunctionCall]:
        """The tools that are called."""
        return [part.function_call for part in self.parts if part.function_call]

    @property
    def thought(self) -> str:
        """What a model that thinks has thought before; no two are the same."""
        return f"Thought {self.number}: the next shelf has to be counted."


@dataclass(frozen=True)
class Refusal:
    """A status, and what is said with it."""

    status: int
    message: str
    code: str | None = None
    parameter: str | None = None


def compact(value: Any) -> str:
    """JSON without blanks, every letter as it is."""
    return to_json(value, exclude_none=True).decode("utf-8", "replace")


def halves(text: str) -> list[str]:
    """A text in two pieces, as a stream brings it."""
    middle = (len(text) + 1) // 2
    return [piece for piece in (text[:middle], text[middle:]) if piece]


def list_blocks(content: Any) -> list[dict[str, Any]]:
    """The blocks of a message, which may be one text, or nothing."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [*(content or ())]


def text_blocks(content: Any) -> list[str]:
    """The texts of a message, which may be one or a list of blocks."""
    blocks = list_blocks(content)
    return [each["text"] for each in blocks if each.get("type") == "text"]


def called(name: str, call_id: str | None, args: Any) -> types.Part:
    """A part that calls a tool."""
    call = types.FunctionCall(name=name, id=call_id, args=args)
    return types.Part(function_call=call)


def answered(call_id: str, text: str) -> types.Part:
    """A part with a tool's result."""
    response = types.FunctionResponse(id=call_id, response={"result": text})
    return types.Part(function_response=response)


def event(data: Any, name: str = "") -> str:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


# Each protocol reads a request, says that a prompt is too long, and spells refusals,
# answers and streams.


class Gemini:
    """`models/{model}:generateContent`; tool results count by value."""

    counts_output = False  # Whether reserved output has to fit in the window too.
    busy: ClassVar[Mapping[int, tuple[str, str]]] = {
        429: ("RESOURCE_EXHAUSTED", "You exceeded your current quota."),
        503: ("UNAVAILABLE", "The model is overloaded. Please try again later."),
    }
    output_words = (
        "Unable to submit request because it has a maxOutputTokens value of {wanted} "
        "but the supported range is from 1 (inclusive) to {limit} (exclusive)."
    )

    def read(self, path: str, body: dict[str, Any]) -> Sent:
        contents = [
            types.Content.model_validate(content)
            for content in body.get("contents", ())
        ]
        config = body.get("generationConfig", {})
        instruction = body.get("systemInstruction", {}).get("parts", ())
        system = "\n".join(part.get("text", "") for part in instruction)
        tools = (compact(tool) for tool in body.get("tools", ()))
        return Sent(
            contents=contents,
            system=system,
            texts=[system, *tools, *list_content_texts(contents)],
            max_tokens=config.get("maxOutputTokens"),
            is_streamed=":streamGenerateContent" in path,
            parameters={*body, *config},
        )

    def overflow_words(self, used: int, limit: int, reserved: int) -> str:
        words = "The input token count ({}) exceeds the maximum number of tokens"
        return f"{words.format(used)} allowed ({limit})."

    def refuse(self, refusal: Refusal) -> Any:
        name, _ = self.busy.get(refusal.status, ("INVALID_ARGUMENT", ""))
        said = {"code": refusal.status, "message": refusal.message, "status": name}
        return {"error": said}

    def answer(self, reply: Reply) -> Any:
        return self._chunk(reply, reply.parts, is_last=True)

    def stream(self, sent: Sent, reply: Reply) -> Iterator[str]:
        """The events of a streamed answer; each carries the usage."""
        pieces = [types.Part(text=piece) for piece in halves(reply.text)]
        pieces += [part for part in reply.parts if part.function_call]
        for number, piece in enumerate(pieces, start=1):
            yield event(self._chunk(reply, [piece], is_last=number == len(pieces)))

    def _chunk(
        self, reply: Reply, parts: Sequence[types.Part], *, is_last: bool
    ) -> dict[str, Any]:
        spelled = [part.model_dump(exclude_none=True, by_alias=True) for part in parts]
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": spelled}}
        if is_last:
            candidate["finishReason"] = "MAX_TOKENS" if reply.is_cut else "STOP"
        usage = {
            "promptTokenCount": reply.prompt_tokens,
            "candidatesTokenCount": reply.output_tokens,
            "totalTokenCount": reply.prompt_tokens + reply.output_tokens,
        }
        return {"candidates": [candidate], "usageMetadata": usage}


class OpenAI:
    """`/chat/completions`; arguments and results are the strings that were sent."""

    counts_output = True
    busy: ClassVar[Mapping[int, tuple[str, str]]] = {
        429: ("tokens", "Rate limit reached for this model. Please try again in 10ms."),
        503: ("server_error", "The server is currently overloaded, try again later."),
    }
    output_words = (
        "max_tokens is too large: {wanted}. This model supports at most {limit} "
        "completion tokens, whereas you provided {wanted}."
    )

    def read(self, path: str, body: dict[str, Any]) -> Sent:
        """Reads a request; results that follow each other are of one message."""
        texts = [compact(tool) for tool in body.get("tools", ())]
        instructions: list[str] = []
        contents: list[types.Content] = []

        for message in body["messages"]:
            role = message["role"]
            said = text_blocks(message.get("content"))
            texts += said
            if role in ("system", "developer"):
                instructions += [text for text in said if text]
            elif role == "tool":
                result = answered(message["tool_call_id"], "".join(said))
                self._add_result(contents, result)
            else:
                asked, counted = self._read_calls(message)
                texts += counted
                parts = [*(types.Part(text=text) for text in said), *asked]
                contents.append(types.Content(role=ROLES[role], parts=parts))

        is_streamed = bool(body.get("stream"))
        options = body.get("stream_options") or {}
        return Sent(
            contents=contents,
            system="\n".join(instructions),
            texts=texts,
            max_tokens=body.get("max_completion_tokens", body.get("max_tokens")),
            is_streamed=is_streamed,
            parameters=set(body),
            includes_usage=not is_streamed or bool(options.get("include_usage")),
        )

    def _read_calls(
        self, message: dict[str, Any]
    ) -> tuple[list[types.Part], list[str]]:
        """The calls of a message, and the texts in them that count."""
        parts: list[types.Part] = []
        texts: list[str] = []

        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            arguments = call["function"]["arguments"]
            texts += [name, arguments]
            parts.append(called(name, call["id"], json.loads(arguments)))

        return parts, texts

    def _add_result(self, contents: list[types.Content], result: types.Part) -> None:
        """Adds a result to those right before it, else as a message of its own."""
        before = contents[-1].parts if contents else None
        if before and before[-1].function_response:
            before.append(result)
        else:
            contents.append(types.Content(role=ROLES["tool"], parts=[result]))

    def overflow_words(self, used: int, limit: int, reserved: int) -> str:
        if not reserved:
            return (
                f"This model's maximum context length is {limit} tokens. However, "
                f"your messages resulted in {used} tokens. Please reduce the "
                "length of the messages."
            )
        return (
            f"This model's maximum context length is {limit} tokens. However, "
            f"you requested {used + reserved} tokens ({used} in the messages, "
            f"{reserved} in the completion). Please reduce the length of the "
            "messages or completion."
        )

    def refuse(self, refusal: Refusal) -> Any:
        kind, _ = self.busy.get(refusal.status, ("invalid_request_error", ""))
        error = {"message": refusal.message, "type": kind}
        return {"error": error | {"param": refusal.parameter, "code": refusal.code}}

    def answer(self, reply: Reply) -> Any:
        calls = self._calls(reply)
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
        message |= {"tool_calls": calls} if calls else {}
        choice = {"index": 0, "message": message, "finish_reason": self._end(reply)}
        usage = self._usage(reply)
        return self._frame("chat.completion", choices=[choice], usage=usage)

    def stream(self, sent: Sent, reply: Reply) -> Iterator[str]:
        """The events of a streamed answer; usage comes only where it is asked for."""
        kind = "chat.completion.chunk"
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": piece} for piece in halves(reply.text)]
        for index, call in enumerate(self._calls(reply)):
            deltas.append({"tool_calls": [{"index": index, **call}]})

        for delta in [*deltas, {}]:
            end = None if delta else self._end(reply)
            choice = {"index": 0, "delta": delta, "finish_reason": end}
            yield event(self._frame(kind, choices=[choice]))

        if sent.includes_usage:
            yield event(self._frame(kind, choices=[], usage=self._usage(reply)))
        yield event("[DONE]")

    def _frame(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "m"} | fields

    def _end(self, reply: Reply) -> str:
        return "length" if reply.is_cut else "tool_calls" if reply.calls else "stop"

    def _usage(self, reply: Reply) -> dict[str, int]:
        return {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.output_tokens,
            "total_tokens": reply.prompt_tokens + reply.output_tokens,
        }

    def _calls(self, reply: Reply) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        for index, call in enumerate(reply.calls):
            function = {"name": call.name, "arguments": json.dumps(call.args)}
            # Mistral's ids have nine letters and digits.
            call_id = f"c{reply.number:06}{index:02}"
            calls.append({"id": call_id, "type": "function", "function": function})
        return calls


class Anthropic:
    """`/messages`; results are the strings that were sent."""

    counts_output = False
    busy: ClassVar[Mapping[int, tuple[str, str]]] = {
        429: ("rate_limit_error", "This would exceed your organization's rate limit."),
        503: ("api_error", "Service temporarily unavailable."),
        529: ("overloaded_error", "Overloaded"),
    }
    output_words = (
        "max_tokens: {wanted} > {limit}, which is the maximum allowed number of "
        "output tokens for this model"
    )

    def read(self, path: str, body: dict[str, Any]) -> Sent:
        """Reads a request; each text of the user is taken for a message of its own."""
        system = "\n".join(text_blocks(body.get("system")))
        texts = [system, *(compact(tool) for tool in body.get("tools") or ())]
        contents: list[types.Content] = []

        for message in body["messages"]:
            read = [self._read_block(each) for each in list_blocks(message["content"])]
            contents += self._split_message(message, [part for part, _ in read])
            texts += [text for _, counted in read for text in counted]

        return Sent(
            contents=contents,
            system=system,
            texts=texts,
            max_tokens=body["max_tokens"],
            is_streamed=bool(body.get("stream")),
            parameters=set(body),
            thinking_tokens=(body.get("thinking") or {}).get("budget_tokens", 0),
        )

    def _split_message(
        self, message: dict[str, Any], parts: list[types.Part]
    ) -> Iterator[types.Content]:
        """The message; each text of the user stands apart, behind all else."""
        role = ROLES[message["role"]]
        texts = [] if role == "model" else [part for part in parts if part.text]
        others = [part for part in parts if part not in texts]
        if others or not parts:
            yield types.Content(role=role, parts=others)
        for text in texts:
            yield types.Content(role=role, parts=[text])

    def _read_block(self, block: dict[str, Any]) -> tuple[types.Part, list[str]]:
        if block["type"] == "tool_use":
            part = called(block["name"], block["id"], block["input"])
            return part, [block["name"], compact(block["input"])]
        if block["type"] == "tool_result":
            text = "".join(text_blocks(block.get("content")))
            return answered(block["tool_use_id"], text), [text]
        return types.Part(text=block["text"]), [block["text"]]

    def overflow_words(self, used: int, limit: int, reserved: int) -> str:
        if not reserved:
            return f"prompt is too long: {used} tokens > {limit} maximum"
        return (
            "input length and `max_tokens` exceed context limit: "
            f"{used} + {reserved} > {limit}, decrease input length or "
            "`max_tokens` and try again"
        )

    def refuse(self, refusal: Refusal) -> Any:
        kind, _ = self.busy.get(refusal.status, ("invalid_request_error", ""))
        error = {"type": kind, "message": refusal.message}
        return {"type": "error", "error": error, "request_id": "req_1"}

    def answer(self, reply: Reply) -> Any:
        blocks: list[dict[str, Any]] = []
        if reply.text:
            blocks.append({"type": "text", "text": reply.text})

        for n, call in enumerate(reply.calls):
            use = {"id": f"toolu_{reply.number}_{n}", "name": call.name}
            blocks.append({"type": "tool_use", **use, "input": call.args})

        end = "tool_use" if reply.calls else "end_turn"
        usage = {"input_tokens": reply.prompt_tokens}
        return {
            "id": f"msg_{reply.number}",
            "type": "message",
            "role": "assistant",
            "model": "claude",
            "content": blocks,
            "stop_reason": "max_tokens" if reply.is_cut else end,
            "stop_sequence": None,
            "usage": usage | {"output_tokens": reply.output_tokens},
        }

    def stream(self, sent: Sent, reply: Reply) -> Iterator[str]:
        """The events of a streamed answer."""
        return self.stream_answer(self.answer(reply))

    def stream_answer(self, answer: dict[str, Any]) -> Iterator[str]:
        """The prompt's tokens come first, a signature apart from its thought."""
        usage = answer["usage"] | {"output_tokens": 1}
        begin = {"content": [], "stop_reason": None, "usage": usage}
        events: list[tuple[str, dict[str, Any]]]
        events = [("message_start", {"message": answer | begin})]

        for index, block in enumerate(answer["content"]):
            empty, deltas = split_block(block)
            start = {"index": index, "content_block": block | empty}
            events.append(("content_block_start", start))
            for delta in deltas:
                change = {"index": index, "delta": delta}
                events.append(("content_block_delta", change))
            events.append(("content_block_stop", {"index": index}))

        ends = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
        bill = {"output_tokens": answer["usage"]["output_tokens"]}
        events.append(("message_delta", {"delta": ends, "usage": bill}))
        for name, data in [*events, ("message_stop", {})]:
            yield event({"type": name, **data}, name)


STREAMED = {
    "text": ("text", "text", "text_delta"),
    "thinking": ("thinking", "thinking", "thinking_delta"),
    "tool_use": ("input", "partial_json", "input_json_delta"),
    "compaction": ("content", "content", "compaction_delta"),
}
"""The field of a block that comes in pieces, and the name and type of a piece."""


def split_block(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What of a block is empty at first, and the pieces that come then."""
    if block["type"] not in STREAMED:
        return {}, []
    name, key, kind = STREAMED[block["type"]]
    value = block[name]
    empty = {name: "" if isinstance(block[name], str) else {}}
    pieces = halves(value if isinstance(value, str) else json.dumps(value))
    deltas = [{"type": kind, key: piece} for piece in pieces]
    signature = block.get("signature")
    if signature:
        deltas.append({"type": "signature_delta", "signature": signature})
        empty["signature"] = ""
    return empty, deltas


Wire = Gemini | OpenAI | Anthropic
