"""Gemini's API, with what it demands of calls, their signatures and caches."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.fake_provider import FakeProvider, RefusalError, Said

Content = dict[str, Any]

DUMMIES = ("skip_thought_signature_validator", "context_engineering_is_the_way_to_go")

NO_SIGNATURE = (
    "Function call `{}` in the {}. content block is missing a `thought_signature`."
)
WRONG_SIGNATURE = "Thought signature is not valid."
MOVED_SIGNATURE = "Corrupted thought signature."
CALL_ORDER = (
    "Please ensure that function call turn comes immediately after a user turn or "
    "after a function response turn."
)
ANSWER_ORDER = (
    "Please ensure that function response turn comes immediately after a function call "
    "turn."
)
ANSWER_COUNT = (
    "Please ensure that the number of function response parts is equal to the number "
    "of function call parts of the function call turn."
)
FIRST_ROLE = "Please ensure that multiturn requests begin with a user role."
NO_PARTS = (
    "Unable to submit request because it must include at least one parts field, which "
    "describes the prompt input."
)
NO_CONTENTS = "* GenerateContentRequest.contents: contents is not specified"
NOT_WITH_CACHE = (
    "CachedContent can not be used with GenerateContent request setting "
    "system_instruction, tools or tool_config. Proposed fix: move those values to "
    "CachedContent from GenerateContent request."
)


@dataclass
class FakeGemini(FakeProvider):
    """A Gemini model.

    Attributes:
        is_signed: Whether calls of the running turn need their signatures, as from
            Gemini 3 on.
        caches: What was cached, by name; `deleted` those that were given up.
    """

    path: ClassVar[str] = "/v1beta/"

    is_signed: bool = True
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
        tokens = len(json.dumps(body)) // 4
        times = {"createTime": "2030-01-01T00:00:00Z"}
        times["expireTime"] = "2130-01-01T00:00:00Z"
        usage = {"usageMetadata": {"totalTokenCount": tokens}}
        return 200, {"name": name, "model": body["model"], **times, **usage}

    def last_text(self, body: dict[str, Any]) -> str:
        """The text of the last content."""
        parts = (body.get("contents") or [{}])[-1].get("parts", ())
        return "\n".join(part["text"] for part in parts if "text" in part)

    def contents_of(self, body: dict[str, Any]) -> list[Content]:
        """The contents of a request, behind those that are cached."""
        cached = self.caches.get(body.get("cachedContent", ""), {})
        return [*cached.get("contents", ()), *body.get("contents", ())]

    def check(self, body: dict[str, Any]) -> None:
        """Refuses what Gemini refuses."""
        own = {"systemInstruction", "tools", "toolConfig"}
        if body.get("cachedContent") and own & {*body}:
            raise RefusalError(NOT_WITH_CACHE)
        if not body.get("contents"):
            raise RefusalError(NO_CONTENTS)
        contents = self.contents_of(body)
        check_shape(contents)
        if self.is_signed:
            self._check_signatures(contents)

    def _check_signatures(self, contents: list[Content]) -> None:
        for number in range(begin_of_turn(contents), len(contents)):
            calls = [p for p in contents[number]["parts"] if "functionCall" in p]
            for position, part in enumerate(calls):
                self._check_call(part, number, is_first=position == 0)

    def _check_call(self, part: Content, number: int, *, is_first: bool) -> None:
        call, signature = part["functionCall"], part.get("thoughtSignature")
        if not signature:
            if is_first:
                raise RefusalError(NO_SIGNATURE.format(call["name"], number + 1))
            return
        if decode(signature) in DUMMIES or signature in DUMMIES:
            return
        if signature not in self.issued:
            raise RefusalError(WRONG_SIGNATURE)
        if self.issued[signature] != (call["name"], call.get("args")):
            raise RefusalError(MOVED_SIGNATURE)

    def refusal(self, error: RefusalError) -> Any:
        """The body of a refusal."""
        said = {"code": error.status, "message": error.words}
        return {"error": said | {"status": "INVALID_ARGUMENT"}}

    def overflow_words(self, used: int, limit: int) -> str:
        """What it says to a request that is too long."""
        words = "The input token count ({}) exceeds the maximum number of tokens"
        return f"{words.format(used)} allowed ({limit})."

    def answer(self, body: dict[str, Any], said: Said) -> Any:
        """The body of an answer; the first of its calls is signed."""
        parts: list[Content] = []
        config = body.get("generationConfig", {}).get("thinkingConfig", {})
        if config.get("includeThoughts"):
            parts.append({"text": said.thought, "thought": True})
        if said.text:
            parts.append({"text": said.text})
        for index, (name, args) in enumerate(said.calls):
            part: Content = {"functionCall": {"name": name, "args": dict(args)}}
            if index == 0 and self.is_signed:
                signature = base64.b64encode(f"sig_{said.number}".encode()).decode()
                part["thoughtSignature"] = signature
                self.issued[signature] = (name, dict(args))
            parts.append(part)
        content = {"role": "model", "parts": parts}
        usage = {"promptTokenCount": said.prompt_tokens, "candidatesTokenCount": 60}
        usage["totalTokenCount"] = said.prompt_tokens + 60
        if cache := body.get("cachedContent"):
            cached = len(json.dumps(self.caches[cache])) // 4
            usage["promptTokenCount"] += cached
            usage["cachedContentTokenCount"] = cached
        return {
            "candidates": [{"content": content, "finishReason": "STOP"}],
            "usageMetadata": usage,
            "modelVersion": "gemini",
        }


def decode(signature: str) -> str:
    """The bytes of a signature as a text."""
    return base64.b64decode(signature).decode("utf-8", "replace")


def kinds_of(content: Content) -> set[str]:
    """What a content consists of."""
    return {kind for part in content.get("parts", ()) for kind in part}


def check_shape(contents: list[Content]) -> None:
    """Refuses wrong roles, empty contents and broken pairs."""
    if contents[0].get("role", "user") != "user":
        raise RefusalError(FIRST_ROLE)
    before: Content = {}
    for content in contents:
        parts = content.get("parts")
        if not parts:
            raise RefusalError(NO_PARTS)
        calls = count(before, "functionCall")
        answers = count(content, "functionResponse")
        if count(content, "functionCall") and before.get("role", "user") != "user":
            raise RefusalError(CALL_ORDER)
        if answers and not calls:
            raise RefusalError(ANSWER_ORDER)
        if calls != answers:
            raise RefusalError(ANSWER_COUNT)
        before = content
    if count(before, "functionCall"):
        raise RefusalError(ANSWER_COUNT)


def count(content: Content, kind: str) -> int:
    """How many parts of a kind a content has."""
    return sum(kind in part for part in content.get("parts", ()))


def begin_of_turn(contents: list[Content]) -> int:
    """The index after the last content in which the user says something."""
    for number in range(len(contents) - 1, -1, -1):
        content = contents[number]
        if content.get("role") == "user" and "text" in kinds_of(content):
            return number + 1
    return 0
