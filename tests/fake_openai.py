"""Chat APIs of OpenAI's form, which ADK reaches through LiteLLM."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tests.fake_provider import FakeProvider, RefusalError
from tests.protocols import Reply, event

Message = dict[str, Any]


MISTRAL_FIELDS = {"role", "content", "tool_calls", "tool_call_id", "name", "prefix"}

Kind = Literal[
    "openai", "deepseek", "kimi", "mistral", "vllm-mistral", "vllm-gemma", "llama.cpp"
]


@dataclass
class FakeOpenAI(FakeProvider):
    """A model behind `/chat/completions`."""

    path: ClassVar[str] = "/chat/completions"

    kind: Kind = "openai"
    is_strict: bool = False
    reasoning: dict[str, str] = field(default_factory=dict, repr=False)

    def check(self, body: dict[str, Any]) -> None:
        messages = body["messages"]
        match self.kind:
            case "mistral":
                check_mistral(messages)
            case "vllm-mistral" | "vllm-gemma":
                check_template(messages, skips_tools=self.kind == "vllm-mistral")
            case "llama.cpp":
                check_strings(messages)
            case _:
                check_pairs(messages)
        if self.kind == "deepseek":
            self._check_deepseek(messages)
        if self.kind == "kimi":
            self._check_kimi(messages)

    def spell(self, body: dict[str, Any], answer: Any) -> Any:
        """The answer, or the events of its stream."""
        if not body.get("stream"):
            return answer

        [choice] = answer["choices"]
        delta = {**choice, "delta": choice["message"]}
        chunk = {**answer, "object": "chat.completion.chunk", "choices": [delta]}
        return [event(chunk), event("[DONE]")]

    def _check_deepseek(self, messages: list[Message]) -> None:
        answers = [each for each in messages if each["role"] == "assistant"]
        with_calls = [each for each in answers if each.get("tool_calls")]
        needed = answers if with_calls and self.is_strict else with_calls
        if not all(each.get("reasoning_content") for each in needed):
            raise RefusalError("deepseek reasoning")

    def _check_kimi(self, messages: list[Message]) -> None:
        for index, message in enumerate(messages):
            for call in message.get("tool_calls") or ():
                said = message.get("reasoning_content")
                is_wrong = self.is_strict and said != self.reasoning.get(call["id"])
                if not said or is_wrong:
                    raise RefusalError("kimi reasoning", index)

    def refusal(self, error: RefusalError) -> Any:
        """The body of a refusal; that of a validator has another form."""
        if error.status == 422:
            return {"detail": [{"type": error.words, "msg": "Extra inputs are not p…"}]}
        return super().refusal(error)

    def answer(self, body: dict[str, Any], reply: Reply) -> Any:
        """The body of an answer, with what was thought before."""
        answer = super().answer(body, reply) | {"model": body["model"]}
        message = answer["choices"][0]["message"]
        if self.kind not in ("openai", "mistral"):
            message["reasoning_content"] = reply.thought
        for call in message.get("tool_calls", ()):
            self.reasoning[call["id"]] = reply.thought
        return answer


def check_pairs(messages: list[Message]) -> None:
    """Refuses calls without answers, and answers without calls."""
    open_ids: list[str] = []
    for message in [*messages, {"role": "end"}]:
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_ids:
                raise RefusalError("openai orphan")
            open_ids.remove(message["tool_call_id"])
            continue
        if open_ids:
            raise RefusalError("openai unanswered", ", ".join(open_ids))
        open_ids = [each["id"] for each in message.get("tool_calls") or ()]


def check_mistral(messages: list[Message]) -> None:
    """Refuses what Mistral's API refuses."""
    if any(not MISTRAL_FIELDS.issuperset(each) for each in messages):
        raise RefusalError("mistral extra", status=422)
    if messages[-1]["role"] == "assistant" and not messages[-1].get("prefix"):
        raise RefusalError("mistral last", "assistant")
    calls = sum(len(each.get("tool_calls") or ()) for each in messages)
    if calls != sum(each["role"] == "tool" for each in messages):
        raise RefusalError("mistral count")

    for before, message in itertools.pairwise(messages):
        if (before["role"], message["role"]) == ("tool", "user"):
            raise RefusalError("mistral order")


def check_strings(messages: list[Message]) -> None:
    """Refuses lists of nothing but texts, as chat templates that join strings do."""
    for message in messages:
        said = message.get("content")
        if isinstance(said, list) and all(each["type"] == "text" for each in said):
            raise RefusalError("llama.cpp list", status=500)


def check_template(messages: list[Message], *, skips_tools: bool) -> None:
    """Refuses roles that do not alternate, as chat templates do."""
    begin = messages[0]["role"] == "system"
    said = messages[begin:]
    if skips_tools:
        said = [e for e in said if e["role"] != "tool" and not e.get("tool_calls")]
    for index, message in enumerate(said):
        if (message["role"] == "user") != (index % 2 == 0):
            raise RefusalError("vllm alternate")
