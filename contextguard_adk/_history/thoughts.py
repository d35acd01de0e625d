"""Signed thoughts go out only after exactly the messages that they were written after.

Newer Claude models check a thought against the system instruction, the tools, all
earlier messages, and the thoughts that were sent before it. So each answer gets a seal:
short digests of what it was written after. Before a call, thoughts whose seal no longer
holds are left out, whoever made the change. What was left out while a later thought was
written never comes back: the seal of the later one does not count it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from google.genai import types
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contextguard_adk._history.coverage import canonical_json, fingerprint
from contextguard_adk._history.pairs import find_running_turn, parts_of
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._providers.clients import name_client

if TYPE_CHECKING:
    from google.adk.events.event import Event

logger = logging.getLogger("contextguard_adk.thoughts")

SEAL_KEY = "context_guard_seal"
"""Where an event's `custom_metadata` holds the seal of its thoughts."""

_CLAUDE = re.compile(r"claude|anthropic|fable|mythos|opus|sonnet|haiku")
_OTHERS = re.compile(
    r"gemini|gemma|gpt|deepseek|kimi|glm|minimax|qwen|mistral|grok|llama"
)
# A date after the name is no minor version.
_VERSION = re.compile(
    r"(fable|mythos|opus|sonnet|haiku)-(\d{1,2})(?:[-.](\d{1,2}))?(?!\d)"
)
_FIRST_TO_BIND = {"fable": (5, 1), "mythos": (5, 1)}
_SIGNING = re.compile(r"gemini-([3-9]|\d\d)")
_OLD_CLAUDE = re.compile(r"claude-(instant|\d)")


@dataclass(frozen=True)
class Thinker:
    """A model as far as its thoughts are concerned.

    Attributes:
        client: The class of its client, which decides how signatures are coded.
        family: The models that read its thoughts; "" where the name is an alias.
        binds: Whether it checks a thought against what stood before it; None where
            that is unknown.
        wants_signatures: Whether each step of the running turn must be signed.
    """

    client: str
    family: str
    binds: bool | None = None
    wants_signatures: bool = False

    @classmethod
    def of(cls, llm: object, model: str, binds: bool | None = None) -> Thinker:
        """Describes a model by its client and its name, unless `binds` is known."""
        client, family = name_client(llm), _name_family(model)
        if client == "AnthropicLlm":
            family = "claude"
        if binds is None and family:
            binds = _binds(model.lower()) if family == "claude" else False
        signs = client == "Gemini" and _SIGNING.search(model) is not None
        return cls(client, family, binds, signs)

    @property
    def may_bind(self) -> bool:
        """Whether it binds thoughts, or is a Claude model of unknown version."""
        return self.binds is True or (self.binds is None and self.family == "claude")

    @property
    def is_checked(self) -> bool:
        """Whether its thoughts may need what they were written after."""
        return self.client != "Gemini" and self.family in ("claude", "")


def _name_family(model: str) -> str:
    if _CLAUDE.search(name := model.lower()):
        return "claude"
    found = _OTHERS.search(name)
    return found[0] if found else ""


def _binds(name: str) -> bool | None:
    if found := _VERSION.search(name):
        version = int(found[2]), int(found[3] or 0)
        return version >= _FIRST_TO_BIND.get(found[1], (5, 5))
    return False if _OLD_CLAUDE.search(name) else None


class Seal(BaseModel):
    """What an answer with signed thoughts was written after, in short digests.

    `own` names its thoughts. Before it the thoughts of `count` contents were sent, of
    which `before` names the newest.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    client: str = Field(max_length=64)
    family: str = Field(max_length=64)
    system: str = Field(max_length=32)
    tools: str = Field(max_length=32)
    messages: str = Field(max_length=32)
    own: str = Field(max_length=32)
    before: str = Field(default="", max_length=32)
    count: int = Field(default=0, ge=0)


@dataclass(frozen=True)
class SealedRequest:
    """A request whose thoughts hold, to seal its answer with."""

    thinker: Thinker
    contents: list[types.Content]
    system: str = ""
    tools: str = ""
    names: Sequence[str] = ()  # Of the thoughts in it.
    changed: str = ""  # What is not as it was for the newest thoughts.
    has_lost_some: bool = False  # Of the running turn.
    memo: Memo = field(default_factory=Memo)

    def seal(self, answer: types.Content | None) -> dict[str, Any] | None:
        """Returns the seal of an answer as JSON; None where there is none to make."""
        if answer is None or not (own := _name_thoughts(answer)) or not self.system:
            return None
        *_, digest = _digest_before([*self.contents, answer], self.memo)
        return Seal(
            client=self.thinker.client,
            family=self.thinker.family,
            system=self.system,
            tools=self.tools,
            messages=digest,
            own=own,
            before=self.names[-1] if self.names else "",
            count=len(self.names),
        ).model_dump()


@dataclass(frozen=True)
class _Thoughts:
    """The signed thoughts of one content of a request."""

    index: int
    name: str
    digest: str  # Of the messages before them.
    seal: Seal | None
    is_foreign: bool  # Another family or client wrote them.


def leave_out_thoughts(
    request: SealedRequest,
    config: types.GenerateContentConfig,
    events: Sequence[Event],
    gone: str = "",
    is_changed: bool = False,
) -> SealedRequest:
    """Leaves out the signed thoughts that the provider would refuse.

    In the running turn only models that bind thoughts lose any: others want those
    back. `gone` names thoughts that go with all before them. Thoughts without a seal
    are older than the guard; they go once it has changed the request (`is_changed`).
    """
    thinker, contents = request.thinker, request.contents
    has_any = any(map(_name_thoughts, contents))
    if thinker.is_checked and (has_any or thinker.family):
        system, tools = _digest_config(config)
        request = replace(request, system=system, tools=tools)
    if not has_any:
        return request
    found = list(_find_thoughts(request, events))
    names = [each.name for each in found]
    start = names.index(gone) + 1 if gone in names else 0
    standing: list[_Thoughts] = []
    for each in found[start:]:
        # What was not sent with later thoughts does not come back.
        if each.seal and thinker.is_checked:
            sent = [e.name for e in standing]
            end = sent.index(each.seal.before) + 1 if each.seal.before in sent else 0
            standing = standing[max(0, end - each.seal.count) : end]
        standing.append(each)
    kept = [e for e in standing if not e.is_foreign]
    changed, turn_start = "", find_running_turn(contents)
    if thinker.is_checked:
        if found[-1].seal and not found[-1].is_foreign:
            changed = _find_change(request, found[-1])
        loose = {
            each.index
            for each in kept
            if (_find_change(request, each) if each.seal else is_changed)
        }
        kept = [e for e in kept if e.index not in loose]
        if not thinker.binds:
            turn = [e for e in found if e.index >= turn_start and not e.is_foreign]
            kept = [e for e in kept if e.index < turn_start] + turn
    lost = {e.index for e in found} - {e.index for e in kept}
    if lost:
        left = (
            without_thoughts(content) if i in lost else content
            for i, content in enumerate(contents)
        )
        contents = [content for content in left if content is not None]
    return replace(
        request,
        contents=contents,
        names=[e.name for e in kept],
        changed=changed,
        has_lost_some=max(lost, default=-1) >= turn_start,
    )


def without_thoughts(content: types.Content) -> types.Content | None:
    """A content without its signed thoughts; None where nothing else is in it."""
    if not _name_thoughts(content):
        return content
    parts = [part for part in parts_of(content) if not _is_signed(part)]
    return content.model_copy(update={"parts": parts}) if parts else None


def newest_thoughts(contents: Sequence[types.Content]) -> str:
    """Names the newest signed thoughts in contents; "" where there are none."""
    return next(filter(None, map(_name_thoughts, reversed(contents))), "")


def _is_signed(part: types.Part) -> bool:
    return bool(part.thought and part.thought_signature)


def _name_thoughts(content: types.Content) -> str:
    """A digest of the signatures of a content's thoughts; "" where it has none."""
    signed = [p.thought_signature or b"" for p in parts_of(content) if _is_signed(p)]
    return _digest(b"%d:%b" % (len(each), each) for each in signed) if signed else ""


def _digest(said: Iterator[bytes]) -> str:
    return hashlib.blake2b(b"".join(said), digest_size=6).hexdigest()


def _find_thoughts(
    request: SealedRequest, events: Sequence[Event]
) -> Iterator[_Thoughts]:
    """Finds the signed thoughts of a request, with the seals of their events."""
    thinker, contents = request.thinker, request.contents
    sealed: dict[bytes, tuple[Seal | None, str]] = {}
    for event in events:
        if signed := [p for p in parts_of(event.content) if _is_signed(p)]:
            seal = _read_seal((event.custom_metadata or {}).get(SEAL_KEY))
            family = _name_family(getattr(event, "model_version", None) or "")
            sealed |= {p.thought_signature or b"": (seal, family) for p in signed}
    digests = _digest_before(contents, request.memo)
    for index, (content, digest) in enumerate(zip(contents, digests, strict=True)):
        if not (name := _name_thoughts(content)):
            continue
        first = next(p.thought_signature for p in parts_of(content) if _is_signed(p))
        seal, family = sealed.get(first or b"", (None, ""))
        if seal is not None:
            is_foreign = (seal.client, seal.family) != (thinker.client, thinker.family)
        else:
            is_foreign = family not in ("", thinker.family) and thinker.family != ""
        yield _Thoughts(index, name, digest, seal, is_foreign)


def _read_seal(value: object) -> Seal | None:
    try:
        return Seal.model_validate(value)
    except ValidationError:
        return None


def _find_change(request: SealedRequest, thoughts: _Thoughts) -> str:
    """What differs from what thoughts with a seal were written after; "" if nothing."""
    if (seal := thoughts.seal) is None:
        return ""
    if seal.system != request.system:
        return "the system instruction"
    if seal.tools != request.tools:
        return "the tools"
    is_same = (seal.messages, seal.own) == (thoughts.digest, thoughts.name)
    return "" if is_same else f"the messages up to number {thoughts.index}"


def _digest_before(contents: Sequence[types.Content], memo: Memo) -> Iterator[str]:
    """For each content a digest of what stands before its last signed thought."""
    running = hashlib.blake2b(digest_size=6)
    for content in contents:
        parts = parts_of(content)
        last = max((i for i, p in enumerate(parts) if _is_signed(p)), default=0)
        before = running.copy()
        before.update(_spell_message(content.role, parts[:last], memo))
        yield before.hexdigest()
        running.update(_spell_message(content.role, parts, memo))


def _spell_message(role: str | None, parts: Sequence[types.Part], memo: Memo) -> bytes:
    """Fingerprints a message without its thoughts; nothing else is nothing."""
    said = [part for part in parts if not _is_signed(part)]
    if not said:
        return b""
    tools = (part.function_call or part.function_response for part in said)
    ids = ",".join((tool.id or "") for tool in tools if tool)
    content = types.Content.model_construct(role=role, parts=said)
    return memo.get(fingerprint, content, said, role) + ids.encode()


def _digest_config(config: types.GenerateContentConfig) -> tuple[str, str]:
    """Digests of the system instruction and of the tools, whatever their order."""
    tools: list[bytes] = []
    for tool in config.tools or ():
        declared: Sequence[object] = getattr(tool, "function_declarations", None) or ()
        tools += [canonical_json(_plain(each)) for each in declared or [tool]]
    system = canonical_json(_plain(config.system_instruction))
    return _digest(iter([system])), _digest(iter(sorted(tools)))


def _plain(value: Any) -> Any:
    """Fields that are set; those that a newer release adds make no difference."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    is_model = isinstance(value, BaseModel)
    return value.model_dump(exclude_none=True, warnings=False) if is_model else value


def show_omitted(contents: list[types.Content], client: str) -> list[types.Content]:
    """Gives thoughts without text one, so that ADK sends them back as thoughts.

    ADK's Claude class sends those as redacted ones, which the provider refuses. It
    ignores what stands in a thought whose text it has left out itself.
    """
    if client != "AnthropicLlm" or not _omitted_become_redacted():
        return contents
    shown = []
    for content in contents:
        old = content.parts or []
        parts = [
            p.model_copy(update={"text": "."})
            if p and p.text == "" and _is_signed(p)
            else p
            for p in old
        ]
        is_same = all(new is p for new, p in zip(parts, old, strict=True))
        shown.append(
            content if is_same else content.model_copy(update={"parts": parts})
        )
    return shown


@functools.cache
def _omitted_become_redacted() -> bool:
    from google.adk.models import anthropic_llm  # ADK has it by now.

    part = types.Part(text="", thought=True, thought_signature=b"x")
    content = types.Content(role="model", parts=[part])
    try:
        message = anthropic_llm.content_to_message_param(content)
        return "redacted_thinking" in str(message)
    except Exception:  # noqa: BLE001 - ADK 2.0 sends no thoughts at all.
        return False
