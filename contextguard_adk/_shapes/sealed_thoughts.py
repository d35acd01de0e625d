"""Signed thoughts go out only after exactly the messages that they were written after.

Newer Claude models check a thought against the system instruction, the tools, all
earlier messages, and the thoughts that were sent before it. So each answer gets a seal:
short digests of what it was written after. Before a call, thoughts whose seal no longer
holds are left out, whoever made the change. What was left out while a later thought was
written never comes back: the seal of the later one does not count it.
"""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from google.adk.events.event import Event
from google.genai import types
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contextguard_adk._history.contents import find_running_turn, parts_of, with_parts
from contextguard_adk._history.fingerprints import canonical_json, fingerprint
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._providers.clients import find_llm
from contextguard_adk._providers.thinkers import Thinker, name_family
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Answered, Listener, Sent

logger = logging.getLogger("contextguard_adk.call")

SEAL_KEY = "context_guard_seal"
"""Where an event's `custom_metadata` holds the seal of its thoughts."""

_Short = Annotated[str, Field(max_length=64)]


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
class _Request:
    """What thoughts in a request are checked against: digests of its fixed part."""

    thinker: Thinker
    contents: Sequence[types.Content]
    config: types.GenerateContentConfig
    memo: Memo

    @cached_property
    def system(self) -> str:
        return _digest([canonical_json(_plain(self.config.system_instruction))])

    @cached_property
    def tools(self) -> str:
        return _digest(sorted(_spell_tools(self.config)))


@dataclass(frozen=True)
class _Thoughts:
    index: int
    name: str
    messages: str  # A digest of those before them.
    seal: Seal | None
    is_foreign: bool  # Another client or family of models wrote them.


@dataclass(frozen=True)
class LostThoughts:
    """How often something before a thought has changed between two calls."""

    changed_count: int = 0


def thinker_of(turn: Turn) -> Thinker:
    """Describes the model of a turn, by what its refusals have shown first."""
    helped = turn.record.helped or {}
    model = turn.model.name
    binds = turn.settings.binds_thoughts
    if binds is None and model in (helped.get("binds"), helped.get("free")):
        binds = model == helped.get("binds")
    return Thinker.of(turn.model.llm, model, binds)


class Seals(Listener):
    """Seals the answers that hold signed thoughts; warns where seals break."""

    def sent(self, event: Sent) -> None:
        """Warns once if other code keeps changing what thoughts were written after."""
        if event.is_compacted:
            return
        changed = find_lost_cause(event.turn)
        if not changed:
            return
        known = event.memory.facts.unit(LostThoughts)
        lost = LostThoughts(known.changed_count + 1)
        event.memory.keep(lost)
        if lost.changed_count == 2:
            message = (
                "Agent %r: %s changed between calls, so that the thoughts of its model "
                "cannot be sent again. Keep what changes often out of the instruction, "
                "the tools and older messages."
            )
            warn_once(logger, message, event.turn.agent, changed)

    def answered(self, event: Answered) -> None:
        answer = event.response.content
        call = event.call
        own = _name_thoughts(answer) if answer else ""
        if answer is None or not (own and call.sent_contents and call.sent_config):
            return
        run = event.context.get_invocation_context()
        thinker = Thinker.of(find_llm(run.agent), call.model)
        if not thinker.is_checked:
            return
        memo = event.run.memo(run)
        sent = call.sent_contents
        request = _Request(thinker, sent, call.sent_config, memo)
        names = [name for name in map(_name_thoughts, sent) if name]
        *_, messages = _digest_before([*sent, answer], memo)
        seal = Seal(
            writer=thinker.client + thinker.family,
            system=request.system,
            tools=request.tools,
            messages=messages,
            own=own,
            before=names[-1] if names else "",
            count=len(names),
        )
        event.attach(SEAL_KEY, seal.model_dump())


def leave_out_thoughts(
    turn: Turn, contents: list[types.Content]
) -> list[types.Content]:
    """Leaves out the signed thoughts that the provider would refuse."""
    thinker = thinker_of(turn)
    if newest_thoughts(contents):
        request, found = _find_all(turn, thinker, contents)
        kept = {each.index for each in _choose_kept(turn, request, found)}
        lost = {each.index for each in found} - kept
        contents = _leave_out(contents, lost, thinker) if lost else contents
    return fit_claude(contents, thinker)


def find_lost_cause(turn: Turn) -> str:
    """Returns what others changed, so that the newest thoughts are lost; else ""."""
    newest = newest_thoughts(turn.messages)
    if not newest or newest == newest_thoughts(turn.contents):
        return ""
    request, found = _find_all(turn, thinker_of(turn), turn.messages)
    return "" if found[-1].is_foreign else _find_change(request, found[-1], False)


def _find_all(
    turn: Turn, thinker: Thinker, contents: Sequence[types.Content]
) -> tuple[_Request, list[_Thoughts]]:
    request = _Request(thinker, contents, turn.config, turn.history.memo)
    return request, [*_find_thoughts(request, turn.history.events)]


def _choose_kept(
    turn: Turn, request: _Request, found: Sequence[_Thoughts]
) -> list[_Thoughts]:
    """Chooses the thoughts that the model would accept.

    Within the running turn only models that check thoughts lose any: other models want
    them back. `gone` names thoughts that go with all before them. Thoughts without a
    seal are older than the guard; they go once it has changed the request.
    """
    thinker = request.thinker
    contents = request.contents
    gone = (turn.record.helped or {}).get("gone", "")
    names = [e.name for e in found]
    left = found[names.index(gone) + 1 if gone in names else 0 :]
    kept = [each for each in left if not each.is_foreign]
    if thinker.is_checked and thinker.binds is not False:
        turn_start = len(contents) if thinker.binds else find_running_turn(contents)
        is_changed = turn.is_changed(contents)
        standing = {each.index for each in _find_standing(left)}
        standing -= {e.index for e in left if _find_change(request, e, is_changed)}
        kept = [e for e in kept if e.index in standing or e.index >= turn_start]
    return kept


def _leave_out(
    contents: Sequence[types.Content], lost: Collection[int], thinker: Thinker
) -> list[types.Content]:
    # These refuse calls without the reasoning before them.
    is_wanted = thinker.family in ("deepseek", "kimi")

    def leave_out(part: types.Part) -> types.Part | None:
        if not _is_signed(part):
            return part
        update = {"thought_signature": None, "text": part.text or " "}
        return part.model_copy(update=update) if is_wanted else None

    fewer = (
        _change_thoughts(content, leave_out) if index in lost else content
        for index, content in enumerate(contents)
    )
    return [content for content in fewer if content is not None]


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


def _find_change(request: _Request, thoughts: _Thoughts, is_changed: bool) -> str:
    """What is not as it was when thoughts were written; "" where all is."""
    if (seal := thoughts.seal) is None:
        return "the request" if is_changed else ""
    if seal.system != request.system:
        return "the system instruction"
    if seal.tools != request.tools:
        return "the tools"
    is_same = (seal.messages, seal.own) == (thoughts.messages, thoughts.name)
    return "" if is_same else f"one of the first {thoughts.index} messages"


def _find_thoughts(request: _Request, events: Sequence[Event]) -> Iterator[_Thoughts]:
    """Finds the signed thoughts of a request, with the seals of their events."""
    thinker = request.thinker
    written: dict[bytes | None, tuple[Seal | None, str]] = {}
    for event in events:
        if signed := _find_signed(event.content):
            seal = _read_seal((event.custom_metadata or {}).get(SEAL_KEY))
            family = name_family(getattr(event, "model_version", None) or "")
            # A plugin may hand out an answer again, which was not written there.
            for part in signed:
                written.setdefault(part.thought_signature, (seal, family))
    digests = _digest_before(request.contents, request.memo)
    for index, (content, messages) in enumerate(
        zip(request.contents, digests, strict=True)
    ):
        if signed := _find_signed(content):
            seal, family = written.get(signed[0].thought_signature, (None, ""))
            is_foreign = family not in ("", thinker.family) and bool(thinker.family)
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
    """Changes or drops each thought of a content; None if nothing is left."""
    old = parts_of(content)
    changed = (change(part) if part.thought else part for part in old)
    parts = [part for part in changed if part is not None]
    return with_parts(content, parts) if parts or not old else None


def newest_thoughts(contents: Sequence[types.Content]) -> str:
    """Names the newest signed thoughts in contents; "" where there are none."""
    # Most requests hold none, and calling for each part would double the time.
    for content in reversed(contents):
        for part in content.parts or ():
            if part and part.thought and part.thought_signature:
                return _name_thoughts(content)
    return ""


def _is_signed(part: types.Part) -> bool:
    return bool(part.thought and part.thought_signature)


def _find_signed(content: types.Content | None) -> list[types.Part]:
    return [*filter(_is_signed, parts_of(content))]


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
    return memo.remember(fingerprint, content, said, role) + ids.encode()


def _spell_tools(config: types.GenerateContentConfig) -> Iterator[bytes]:
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
    is_same = all(map(operator.is_, fitting, contents))
    return contents if is_same else [content for content in fitting if content]
