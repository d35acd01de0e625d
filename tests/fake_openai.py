"""Chat APIs that ADK reaches through LiteLLM: OpenAI's form, and Bedrock's Converse."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tests.fake_provider import FakeProvider, RefusalError, Said

Message = dict[str, Any]

ORPHAN = (
    "Invalid parameter: messages with role 'tool' must be a response to a preceeding "
    "message with 'tool_calls'."
)
UNANSWERED = (
    "An assistant message with 'tool_calls' must be followed by tool messages "
    "responding to each 'tool_call_id'. The following tool_call_ids did not have "
    "response messages: {}"
)
DEEPSEEK = (
    "The `reasoning_content` in the thinking mode must be passed back to the API."
)
KIMI = (
    "thinking is enabled but reasoning_content is missing in assistant tool call "
    "message at index {}"
)
MISTRAL_LAST = (
    "Expected last role User or Tool (or Assistant with prefix True) for serving but "
    "got {}"
)
MISTRAL_ORDER = "Unexpected role 'user' after role 'tool'"
MISTRAL_COUNT = "Not the same number of function calls and responses"
MISTRAL_EXTRA = "extra_forbidden"
ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."

MISTRAL_FIELDS = {"role", "content", "tool_calls", "tool_call_id", "name", "prefix"}

Kind = Literal["openai", "deepseek", "kimi", "mistral", "vllm-mistral", "vllm-gemma"]


@dataclass
class FakeOpenAI(FakeProvider):
    """A model behind `/chat/completions`.

    Attributes:
        kind: Whose rules hold.
        is_strict: DeepSeek wants the reasoning of every answer once there are tools;
            Kimi compares it with what it said.
    """

    path: ClassVar[str] = "/chat/completions"

    kind: Kind = "openai"
    is_strict: bool = False
    reasoning: dict[str, str] = field(default_factory=dict, repr=False)

    def last_text(self, body: dict[str, Any]) -> str:
        """The text of the last message."""
        return text_of(body["messages"][-1])

    def check(self, body: dict[str, Any]) -> None:
        """Refuses what the provider refuses."""
        messages = body["messages"]
        match self.kind:
            case "mistral":
                check_mistral(messages)
            case "vllm-mistral" | "vllm-gemma":
                check_template(messages, skips_tools=self.kind == "vllm-mistral")
            case _:
                check_pairs(messages)
        if self.kind == "deepseek":
            self._check_deepseek(messages)
        if self.kind == "kimi":
            self._check_kimi(messages)

    def _check_deepseek(self, messages: list[Message]) -> None:
        answers = [each for each in messages if each["role"] == "assistant"]
        with_calls = [each for each in answers if each.get("tool_calls")]
        needed = answers if with_calls and self.is_strict else with_calls
        if not all(each.get("reasoning_content") for each in needed):
            raise RefusalError(DEEPSEEK)

    def _check_kimi(self, messages: list[Message]) -> None:
        for index, message in enumerate(messages):
            for call in message.get("tool_calls") or ():
                said = message.get("reasoning_content")
                is_wrong = self.is_strict and said != self.reasoning.get(call["id"])
                if not said or is_wrong:
                    raise RefusalError(KIMI.format(index))

    def refusal(self, error: RefusalError) -> Any:
        """The body of a refusal."""
        said = {"message": error.words, "type": "invalid_request_error"}
        if error.status == 422:
            return {"detail": [{"type": error.words, "msg": "Extra inputs are not p…"}]}
        return {"error": said | {"param": None, "code": None}}

    def overflow_words(self, used: int, limit: int) -> str:
        """What it says to a request that is too long."""
        words = f"This model's maximum context length is {limit} tokens. However, your "
        words += f"messages resulted in {used} tokens. Please reduce the length of the "
        return f"{words}messages."

    def answer(self, body: dict[str, Any], said: Said) -> Any:
        """The body of an answer."""
        message: Message = {"role": "assistant", "content": said.text or None}
        if self.kind not in ("openai", "mistral"):
            message["reasoning_content"] = said.thought
        for index, (name, args) in enumerate(said.calls):
            # Mistral's ids have nine letters and digits.
            call_id = f"c{said.number:06}{index:02}"
            self.reasoning[call_id] = said.thought
            function = {"name": name, "arguments": json.dumps(dict(args))}
            call = {"id": call_id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        end = "tool_calls" if said.calls else "stop"
        return {
            "id": f"chatcmpl-{said.number}",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": end}],
            "usage": {
                "prompt_tokens": said.prompt_tokens,
                "completion_tokens": 60,
                "total_tokens": said.prompt_tokens + 60,
            },
        }


def text_of(message: Message) -> str:
    """The text of a message, which may be in blocks."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(each.get("text", "") for each in content or ())


def check_pairs(messages: list[Message]) -> None:
    """Refuses calls without answers, and answers without calls."""
    open_ids: list[str] = []
    for message in [*messages, {"role": "end"}]:
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_ids:
                raise RefusalError(ORPHAN)
            open_ids.remove(message["tool_call_id"])
            continue
        if open_ids:
            raise RefusalError(UNANSWERED.format(", ".join(open_ids)))
        open_ids = [each["id"] for each in message.get("tool_calls") or ()]


def check_mistral(messages: list[Message]) -> None:
    """Refuses what Mistral's API refuses."""
    if any(not MISTRAL_FIELDS.issuperset(each) for each in messages):
        raise RefusalError(MISTRAL_EXTRA, 422)
    if messages[-1]["role"] == "assistant" and not messages[-1].get("prefix"):
        raise RefusalError(MISTRAL_LAST.format("assistant"))
    calls = sum(len(each.get("tool_calls") or ()) for each in messages)
    if calls != sum(each["role"] == "tool" for each in messages):
        raise RefusalError(MISTRAL_COUNT)
    for before, message in itertools.pairwise(messages):
        if (before["role"], message["role"]) == ("tool", "user"):
            raise RefusalError(MISTRAL_ORDER)


def check_template(messages: list[Message], *, skips_tools: bool) -> None:
    """Refuses roles that do not alternate, as chat templates do."""
    begin = messages[0]["role"] == "system"
    said = messages[begin:]
    if skips_tools:
        said = [e for e in said if e["role"] != "tool" and not e.get("tool_calls")]
    for index, message in enumerate(said):
        if (message["role"] == "user") != (index % 2 == 0):
            raise RefusalError(ALTERNATE)


CONVERSE_MODEL = "bedrock/converse/anthropic.claude-3-sonnet-20240229-v1:0"
"""A model that LiteLLM reaches through it."""

CONVERSE_TOOLS = (
    "The toolConfig field must be defined when using toolUse and toolResult content "
    "blocks."
)
CONVERSE_FIRST = (
    "A conversation must start with a user message. Try again with a conversation that "
    "starts with a user message."
)
CONVERSE_ORDER = (
    "A conversation must alternate between user and assistant roles. Make sure the "
    "conversation alternates between user and assistant roles and try again."
)
CONVERSE_RESULTS = (
    "Expected toolResult blocks at messages.{}.content for the following Ids: {}"
)
CONVERSE_ORPHAN = (
    "The number of toolResult blocks at messages.{}.content exceeds the number of "
    "toolUse blocks of previous turn."
)


@dataclass
class FakeConverse(FakeProvider):
    """A model behind Bedrock's `/converse`."""

    path: ClassVar[str] = "/converse"

    def last_text(self, body: dict[str, Any]) -> str:
        """The text of the last message."""
        blocks = body["messages"][-1]["content"]
        return "\n".join(each["text"] for each in blocks if "text" in each)

    def check(self, body: dict[str, Any]) -> None:
        """Refuses what Bedrock refuses."""
        messages = body["messages"]
        if messages[0]["role"] != "user":
            raise RefusalError(CONVERSE_FIRST)
        for index, message in enumerate(messages):
            if message["role"] != ("user", "assistant")[index % 2]:
                raise RefusalError(CONVERSE_ORDER)
        kinds = {kind for each in messages for b in each["content"] for kind in b}
        if kinds & {"toolUse", "toolResult"} and not body.get("toolConfig"):
            raise RefusalError(CONVERSE_TOOLS)
        asked: set[str] = set()
        for index, message in enumerate(messages):
            answered = ids_of(message, "toolResult")
            if answered - asked:
                raise RefusalError(CONVERSE_ORPHAN.format(index))
            if missing := asked - answered:
                words = CONVERSE_RESULTS.format(index, ", ".join(sorted(missing)))
                raise RefusalError(words)
            asked = ids_of(message, "toolUse")

    def refusal(self, error: RefusalError) -> Any:
        """The body of a refusal."""
        return {"message": error.words}

    def overflow_words(self, used: int, limit: int) -> str:
        """What it says to a request that is too long."""
        return "Input is too long for requested model."

    def answer(self, body: dict[str, Any], said: Said) -> Any:
        """The body of an answer."""
        content: list[dict[str, Any]] = [{"text": said.text}] if said.text else []
        for index, (name, args) in enumerate(said.calls):
            use = {"toolUseId": said.call_id(index), "name": name, "input": dict(args)}
            content.append({"toolUse": use})
        return {
            "output": {"message": {"role": "assistant", "content": content}},
            "stopReason": "tool_use" if said.calls else "end_turn",
            "usage": {
                "inputTokens": said.prompt_tokens,
                "outputTokens": 60,
                "totalTokens": said.prompt_tokens + 60,
            },
            "metrics": {"latencyMs": 1},
        }


def ids_of(message: Message, kind: str) -> set[str]:
    """The ids of a message's calls, or of its answers."""
    return {each[kind]["toolUseId"] for each in message["content"] if kind in each}
