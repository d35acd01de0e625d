"""A player for each provider."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests import fake_claude
from tests.fake_claude import FakeClaude
from tests.fake_gemini import FakeGemini
from tests.fake_openai import FakeOpenAI
from tests.fake_provider import RefusalError
from tests.playing import (
    CLAUDES,
    Player,
    claude,
    play_chat,
    play_claude,
    play_gemini,
)
from tests.protocols import Reply

Serve = Callable[..., str]
Body = dict[str, Any]


class OtherModel(FakeClaude):
    """One behind Anthropic's API that wants its thoughts back, signed or not."""

    signature = ""

    def check(self, body: Body) -> None:
        """Refuses calls without the thought before them."""
        messages = fake_claude.read_messages(body)
        fake_claude.check_shape(messages, has_tools=bool(body.get("tools")))
        for message in messages:
            kinds = [each["type"] for each in message["content"]]
            if "tool_use" in kinds and kinds[0] != "thinking":
                raise RefusalError("deepseek reasoning")

    def answer(self, body: Body, reply: Reply) -> Any:
        """The body of an answer with a thought."""
        answer = super().answer(body, reply)
        signature = self.signature and f"{self.signature}{reply.number}"
        thought = {"type": "thinking", "thinking": reply.thought}
        kept = [e for e in answer["content"] if e["type"] != "thinking"]
        return answer | {"content": [thought | {"signature": signature}, *kept]}


def make_player(
    name: str, serve: Serve, rules: dict[str, Any] | None = None, **settings: Any
) -> Player:
    """A player of one of the providers; "!" has it follow its stricter rules."""
    kind: Any = name.rstrip("!")
    if kind in CLAUDES:
        bound = FakeClaude(kind=kind, **(rules or {}))
        serve(bound)
        return play_claude(bound, **settings)
    if kind in ("signed", "unsigned"):
        other = OtherModel(kind="adaptive")
        serve(other)
        other.signature = "signature-" if kind == "signed" else ""
        return play_claude(other, llm=lambda: claude("kimi-k2-thinking"), **settings)
    if kind == "gemini":
        gemini = FakeGemini()
        return play_gemini(gemini, serve(gemini), **settings)
    chat = FakeOpenAI(kind=kind, is_strict=kind != name)
    return play_chat(chat, serve(chat), **settings)
