"""Gemini's API, with what it demands of calls, their signatures and caches."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.fake_provider import REFUSALS, FakeProvider, RefusalError
from tests.protocols import Gemini, Reply

Content = dict[str, Any]

DUMMIES = ("skip_thought_signature_validator", "context_engineering_is_the_way_to_go")
NO_SIGNATURE = REFUSALS["gemini no signature"]
MOVED_SIGNATURE = REFUSALS["gemini moved signature"]


@dataclass
class FakeGemini(FakeProvider):
    """A Gemini model."""

    path: ClassVar[str] = "/v1beta/"
    wire = Gemini()

    issued: dict[str, tuple[str, Any]] = field(default_factory=dict, repr=False)
    caches: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    deleted: list[str] = field(default_factory=list)

    def receive(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Answers a request, or keeps a cache."""
        if "cachedContents" not in path:
            return super().receive(path, body)
        if not body:
            self.deleted.append(path.partition("/v1beta/")[2])
            return 200, {}
        name = f"cachedContents/{len(self.caches) + 1}"
        self.caches[name] = body
        times = {"createTime": "2030-01-01T00:00:00Z"}
        times["expireTime"] = "2130-01-01T00:00:00Z"
        usage = {"usageMetadata": {"totalTokenCount": len(json.dumps(body)) // 4}}
        return 200, {"name": name, "model": body["model"], **times, **usage}

    def contents_of(self, body: dict[str, Any]) -> list[Content]:
        """The contents of a request, behind those that are cached."""
        cached = self.caches.get(body.get("cachedContent", ""), {})
        return [*cached.get("contents", ()), *body.get("contents", ())]

    def check(self, body: dict[str, Any]) -> None:
        own = {"systemInstruction", "tools", "toolConfig"}
        if body.get("cachedContent") and own & {*body}:
            raise RefusalError("gemini not with cache")
        if not body.get("contents"):
            raise RefusalError("gemini no contents")
        contents = self.contents_of(body)
        check_shape(contents)
        begin = begin_of_turn(contents)

        for number, content in enumerate(contents[begin:], begin + 1):
            calls = [part for part in content["parts"] if "functionCall" in part]
            for position, part in enumerate(calls):
                self._check_call(part, number, is_first=position == 0)

    def _check_call(self, part: Content, number: int, *, is_first: bool) -> None:
        call = part["functionCall"]
        signature = part.get("thoughtSignature")
        if not signature:
            if is_first:
                raise RefusalError("gemini no signature", call["name"], number)
            return
        decoded = base64.b64decode(signature).decode("utf-8", "replace")
        if decoded in DUMMIES or signature in DUMMIES:
            return
        if signature not in self.issued:
            raise RefusalError("gemini wrong signature")
        if self.issued[signature] != (call["name"], call.get("args")):
            raise RefusalError("gemini moved signature")

    def answer(self, body: dict[str, Any], reply: Reply) -> Any:
        """The body of an answer; the first of its calls is signed."""
        answer = super().answer(body, reply) | {"modelVersion": "gemini"}
        parts = answer["candidates"][0]["content"]["parts"]
        usage = answer["usageMetadata"]
        if reply.calls:
            signature = base64.b64encode(f"sig_{reply.number}".encode()).decode()
            call = parts[0]["functionCall"]
            parts[0]["thoughtSignature"] = signature
            self.issued[signature] = (call["name"], call["args"])
        config = body.get("generationConfig", {}).get("thinkingConfig", {})
        if config.get("includeThoughts"):
            parts.insert(0, {"text": reply.thought, "thought": True})
        cache = body.get("cachedContent")
        if cache:
            cached = len(json.dumps(self.caches[cache])) // 4
            usage["promptTokenCount"] += cached
            usage["cachedContentTokenCount"] = cached
        return answer


def check_shape(contents: list[Content]) -> None:
    """Refuses wrong roles, empty contents and broken pairs."""
    if contents[0].get("role", "user") != "user":
        raise RefusalError("gemini first role")
    before: Content = {}
    for content in contents:
        if not content.get("parts"):
            raise RefusalError("gemini no parts")
        calls = count(before, "functionCall")
        answers = count(content, "functionResponse")
        if count(content, "functionCall") and before.get("role", "user") != "user":
            raise RefusalError("gemini call order")
        if answers and not calls:
            raise RefusalError("gemini answer order")
        if calls != answers:
            raise RefusalError("gemini answer count")
        before = content

    if count(before, "functionCall"):
        raise RefusalError("gemini answer count")


def count(content: Content, kind: str) -> int:
    """How many parts of a kind a content has."""
    return sum(kind in part for part in content.get("parts", ()))


def begin_of_turn(contents: list[Content]) -> int:
    """The index after the last content in which the user says something."""
    said = [each.get("role") == "user" and count(each, "text") for each in contents]
    return max((n for n, is_said in enumerate(said, start=1) if is_said), default=0)
