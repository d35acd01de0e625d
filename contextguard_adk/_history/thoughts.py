"""Signed thoughts go out only after exactly the messages that they were written after.

Newer Claude models check a thought against the system instruction, the tools, all
earlier messages, and the thoughts that were sent before it. So each answer gets a seal:
short digests of what it was written after. Before a call, thoughts whose seal no longer
holds are left out, whoever made the change. What was left out while a later thought was
written never comes back: the seal of the later one does not count it.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from google.genai import types
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contextguard_adk._history.coverage import canonical_json, fingerprint
from contextguard_adk._history.pairs import find_running_turn, parts_of
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._providers.clients import name_client

if TYPE_CHECKING:
    from google.adk.events.event import Event

SEAL_KEY = "context_guard_seal"
"""Where an event's `custom_metadata` holds the seal of its thoughts."""

_FAMILY = re.compile(
    r"(claude|anthropic|fable|mythos|opus|sonnet|haiku)|gemini|gemma|gpt|deepseek|kimi"
    r"|glm|minimax|qwen|mistral|grok|llama"
)
# A date after the name is no minor version.
_VERSION = re.compile(
    r"(fable|mythos|opus|sonnet|haiku)-(\d{1,2})(?:[-.](\d{1,2}))?(?!\d)"
)
_OLD_CLAUDE = re.compile(r"claude-(instant|\d)")
_Short = Annotated[str, Field(max_length=64)]


@dataclass(frozen=True)
class Thinker:
    """A model as far as its thoughts are concerned.

    The class of its client decides how signatures are coded; other families cannot read
    its thoughts. `binds` says whether it checks them, None where that is unknown.
    """

    client: str
    family: str
    binds: bool | None
    is_alias: bool

    @classmethod
    def of(cls, llm: object, model: str, binds: bool | None = None) -> Thinker:
        """Describes a model by its client and its name, unless `binds` is known."""
        client, named = name_client(llm), _name_family(model)
        family = "claude" if client == "AnthropicLlm" and not named else named
        if binds is None and family:
            binds = _binds(model.lower()) if family == "claude" else False
        return cls(client, family, binds, not named)

    @property
    def may_bind(self) -> bool:
        """Whether it binds thoughts, or is a Claude model of unknown version."""
        return self.binds is True or (self.binds is None and self.family == "claude")

    @property
    def is_checked(self) -> bool:
        """Whether its thoughts may need what they were written after."""
        return self.client != "Gemini" and self.family in ("claude", "")


def _name_family(model: str) -> str:
    found = _FAMILY.search(model.lower())
    return ("claude" if found[1] else found[0]) if found else ""


def _binds(name: str) -> bool | None:
    if found := _VERSION.search(name):
        first = (5, 1) if found[1] in ("fable", "mythos") else (5, 5)
        return (int(found[2]), int(found[3] or 0)) >= first
    return False if _OLD_CLAUDE.search(name) else None


class Seal(BaseModel):
    """What an answer with signed thoughts was written after, in short digests.

    `own` names its thoughts. Before it the thoughts of `count` contents were sent, of
    which `before` names the newest.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    writer: _Short
    system: _Short
    tools: _Short
    messages: _Short
    own: _Short
    before: _Short
    count: int = Field(ge=0)


@dataclass(frozen=True)
class SealedRequest:
    """A request to seal the answer of, the thoughts in it, what cost the newest."""

    thinker: Thinker
    contents: list[types.Content]
    memo: Memo
    system: str = ""
    tools: str = ""
    names: Sequence[str] = ()
    changed: str = ""

    def seal(self, answer: types.Content | None) -> dict[str, Any] | None:
        """Returns the seal of an answer as JSON; None where there is none to make."""
        if answer is None or not (own := _name_thoughts(answer)) or not self.system:
            return None
        *_, messages = _digest_before([*self.contents, answer], self.memo)
        return Seal(
            writer=self.thinker.client + self.thinker.family,
            system=self.system,
            tools=self.tools,
            messages=messages,
            own=own,
            before=self.names[-1] if self.names else "",
            count=len(self.names),
        ).model_dump()


@dataclass(frozen=True)
class _Thoughts:
    """The signed thoughts of one content of a request."""

    index: int
    name: str
    messages: str  # A digest of those before them.
    seal: Seal | None
    is_foreign: bool  # Another client or family of models wrote them.


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

    def leave_out(part: types.Part) -> types.Part | None:
        if not _is_signed(part):
            return part
        # These refuse calls without the reasoning before them.
        update = {"thought_signature": None, "text": part.text or " "}
        is_wanted = thinker.family in ("deepseek", "kimi")
        return part.model_copy(update=update) if is_wanted else None

    has_any = any(map(_name_thoughts, contents))
    if thinker.is_checked and (has_any or thinker.family):
        system = canonical_json(_plain(config.system_instruction))
        tools = _digest(sorted(_spell_tools(config)))
        request = replace(request, system=_digest([system]), tools=tools)
    if not has_any:
        return request
    found = list(_find_thoughts(request, events))
    names = [each.name for each in found]
    left = found[names.index(gone) + 1 if gone in names else 0 :]
    kept = [e for e in left if not e.is_foreign]
    if thinker.is_checked and thinker.binds is not False:
        turn_start = len(contents) if thinker.binds else find_running_turn(contents)
        standing = {e.index for e in _find_standing(left)}
        standing -= {e.index for e in left if _find_change(request, e, is_changed)}
        kept = [e for e in kept if e.index in standing or e.index >= turn_start]
    newest = found[-1]
    is_lost = newest not in kept and not newest.is_foreign
    changed = _find_change(request, newest, False) if is_lost else ""
    lost = {e.index for e in found} - {e.index for e in kept}
    if lost:
        fewer = (
            _change_thoughts(content, leave_out) if index in lost else content
            for index, content in enumerate(contents)
        )
        contents = [content for content in fewer if content is not None]
    return replace(
        request, contents=contents, names=[e.name for e in kept], changed=changed
    )


def _find_standing(found: Sequence[_Thoughts]) -> list[_Thoughts]:
    """Those that were sent again with all later ones, as the seals of these tell."""
    standing: list[_Thoughts] = []
    for each in found:
        newest = standing[-1].name if standing else ""
        seal = each.seal
        if seal and (seal.before, seal.count) != (newest, len(standing)):
            sent = [e.name for e in standing]
            end = sent.index(seal.before) + 1 if seal.before in sent else 0
            standing = standing[max(0, end - seal.count) : end]
        standing.append(each)
    return standing


def _find_change(request: SealedRequest, thoughts: _Thoughts, is_changed: bool) -> str:
    """What is not as it was when thoughts were written; "" where all is."""
    if (seal := thoughts.seal) is None:
        return "the request" if is_changed else ""
    if seal.system != request.system:
        return "the system instruction"
    if seal.tools != request.tools:
        return "the tools"
    is_same = (seal.messages, seal.own) == (thoughts.messages, thoughts.name)
    return "" if is_same else f"one of the first {thoughts.index} messages"


def _find_thoughts(
    request: SealedRequest, events: Sequence[Event]
) -> Iterator[_Thoughts]:
    """Finds the signed thoughts of a request, with the seals of their events."""
    thinker = request.thinker
    written: dict[bytes | None, tuple[Seal | None, str]] = {}
    for event in events:
        if signed := _find_signed(event.content):
            seal = _read_seal((event.custom_metadata or {}).get(SEAL_KEY))
            family = _name_family(getattr(event, "model_version", None) or "")
            # A plugin may hand out an answer again, which was not written there.
            for part in signed:
                written.setdefault(part.thought_signature, (seal, family))
    digests = _digest_before(request.contents, request.memo)
    for index, (content, messages) in enumerate(
        zip(request.contents, digests, strict=True)
    ):
        if signed := _find_signed(content):
            seal, family = written.get(signed[0].thought_signature, (None, ""))
            is_known = bool(family and thinker.family)
            is_foreign = is_known and family != thinker.family
            if seal:
                is_foreign = seal.writer != thinker.client + thinker.family
            yield _Thoughts(index, _name_thoughts(content), messages, seal, is_foreign)


def _read_seal(value: object) -> Seal | None:
    try:
        return Seal.model_validate(value)
    except ValidationError:
        return None


def _change_thoughts(
    content: types.Content, change: Callable[[types.Part], types.Part | None]
) -> types.Content | None:
    """Changes each thought of a content, or drops it; None if nothing is left."""
    old = parts_of(content)
    changed = [change(part) if part.thought else part for part in old]
    if all(map(operator.is_, changed, old)):
        return content
    parts = [part for part in changed if part is not None]
    return content.model_copy(update={"parts": parts}) if parts else None


def newest_thoughts(contents: Sequence[types.Content]) -> str:
    """Names the newest signed thoughts in contents; "" where there are none."""
    return next(filter(None, map(_name_thoughts, reversed(contents))), "")


def _is_signed(part: types.Part) -> bool:
    return bool(part.thought and part.thought_signature)


def _find_signed(content: types.Content | None) -> list[types.Part]:
    return [part for part in parts_of(content) if _is_signed(part)]


def _name_thoughts(content: types.Content) -> str:
    """A digest of the signatures of a content's thoughts; "" where it has none."""
    signed = [part.thought_signature or b"" for part in _find_signed(content)]
    return _digest(signed) if signed else ""


def _digest(said: Iterable[bytes]) -> str:
    spelled = b"".join(b"%d:%b" % (len(each), each) for each in said)
    return hashlib.blake2b(spelled, digest_size=6).hexdigest()


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
    """Fingerprints a message without its thoughts; of thoughts alone it is empty."""
    said = [part for part in parts if not _is_signed(part)]
    if not said:
        return b""
    tools = (part.function_call or part.function_response for part in said)
    ids = ",".join((tool.id or "") for tool in tools if tool)
    content = types.Content.model_construct(role=role, parts=said)
    return memo.get(fingerprint, content, said, role) + ids.encode()


def _spell_tools(config: types.GenerateContentConfig) -> Iterator[bytes]:
    """Each declared function, and each tool of another kind, as JSON."""
    for tool in config.tools or ():
        declared: Sequence[object] = getattr(tool, "function_declarations", None) or ()
        yield from (canonical_json(_plain(each)) for each in declared or [tool])


def _plain(value: Any) -> Any:
    """Fields that are set; those that a newer release adds make no difference."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    is_model = isinstance(value, BaseModel)
    return value.model_dump(exclude_none=True, warnings=False) if is_model else value


def fit_claude(contents: list[types.Content], thinker: Thinker) -> list[types.Content]:
    """Gives thoughts the form in which ADK's Claude class sends them back to Claude.

    It would send those without text as redacted ones, and those of other models
    without a signature: both are refused. Claude ignores the text of a thought whose
    text it has left out itself.
    """

    def fit(part: types.Part) -> types.Part | None:
        if not _is_signed(part):
            return part if thinker.is_alias else None
        return part.model_copy(update={"text": "."}) if part.text == "" else part

    if (thinker.client, thinker.family) != ("AnthropicLlm", "claude"):
        return contents
    fitting = [_change_thoughts(content, fit) for content in contents]
    if all(map(operator.is_, fitting, contents)):
        return contents
    return [content for content in fitting if content is not None]
