"""Signed thoughts go out only after exactly the messages that they were written after.

Newer Claude models check a thought against the system instruction, the tools, all
earlier messages, and the thoughts that were sent before it. So each answer gets a seal:
short digests of what it was written after. Before a call, thoughts whose seal no longer
holds are left out, whoever made the change. What was left out while a later thought was
written never comes back: the seal of the later one does not count it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from google.adk.events.event import Event
from google.genai import types
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contextguard_adk._history.contents import find_running_turn
from contextguard_adk._history.fingerprints import canonical_json
from contextguard_adk._history.thoughts import (
    change_thoughts,
    digest,
    digest_before,
    find_signed,
    is_signed,
    name_thoughts,
    newest_thoughts,
)
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

    Attributes:
        writer: The client and the family of the model that wrote the thoughts.
        system: The system instruction.
        tools: The declared tools.
        messages: All that stands before the last thought of the answer.
        own: The thoughts of the answer.
        before: The newest thoughts that were sent before them; "" for none.
        count: How many contents with thoughts were sent before them.
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
class LostThoughts:
    """How often something before a thought has changed between two calls."""

    changed_count: int = 0


@dataclass(frozen=True)
class _Request:
    """What thoughts in a request are checked against: digests of its fixed part."""

    thinker: Thinker
    contents: Sequence[types.Content]
    config: types.GenerateContentConfig
    memo: Memo

    @cached_property
    def system(self) -> str:
        return digest([canonical_json(_plain(self.config.system_instruction))])

    @cached_property
    def tools(self) -> str:
        return digest(sorted(_spell_tools(self.config)))


@dataclass(frozen=True)
class _Thoughts:
    """The signed thoughts of one content.

    Attributes:
        index: Where the content stands in the request.
        name: A digest of their signatures.
        messages: A digest of what stands before the last of them.
        seal: That of their answer; None where there is none.
        is_foreign: Whether another client or family of models wrote them.
    """

    index: int
    name: str
    messages: str
    seal: Seal | None
    is_foreign: bool


class _Written(NamedTuple):
    """What the event of a thought says of its writer; "" for a family unknown."""

    seal: Seal | None = None
    family: str = ""


class Seals(Listener):
    """Seals the answers that hold signed thoughts; warns where seals break."""

    def sent(self, event: Sent) -> None:
        """Warns once if other code keeps changing what thoughts were written after."""
        if event.is_compacted:
            return

        changed = _find_lost_cause(event.turn)
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
        """Attaches a seal to the answer's event."""
        answer = event.response.content
        call = event.call
        own = name_thoughts(answer) if answer else ""
        if answer is None or not (own and call.sent_contents and call.sent_config):
            return

        invocation = event.context.get_invocation_context()
        thinker = Thinker.of(find_llm(invocation.agent), call.model)
        if not thinker.is_checked:
            return

        sent = call.sent_contents
        memo = event.run.memo(invocation)
        request = _Request(thinker, sent, call.sent_config, memo)
        names = [name_thoughts(content) for content in sent if find_signed(content)]
        *_, messages = digest_before([*sent, answer], memo)
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
    request = _describe_request(turn, contents)
    found = list(_find_thoughts(request, turn.history.events))
    kept = {each.index for each in _choose_kept(turn, request, found)}
    lost = {each.index for each in found} - kept
    return _leave_out(contents, lost, request.thinker) if lost else contents


def help_thoughts(
    turn: Turn, refusal: str, contents: Sequence[types.Content]
) -> dict[str, str] | None:
    """Helps against refusals of thoughts, by what is stored of the model.

    `binds` names a model that checks its thoughts, `free` one that does not. `gone`
    names the newest thoughts that were refused.
    """
    helped = turn.record.helped or {}
    model = turn.model.name
    if refusal == "turn" and _read_thinker(turn).binds:
        return {**helped, "free": model, "binds": ""}

    gone = newest_thoughts(contents) or helped.get("gone", "")
    if refusal == "binding":
        return {**helped, "gone": gone, "binds": model, "free": ""}
    if refusal == "thoughts":
        return {**helped, "gone": gone}
    return None


def _find_lost_cause(turn: Turn) -> str:
    """Returns what others changed, so that the newest thoughts are lost; else ""."""
    newest = newest_thoughts(turn.messages)
    if not newest or newest == newest_thoughts(turn.contents):
        return ""

    request = _describe_request(turn, turn.messages)
    *_, last = _find_thoughts(request, turn.history.events)
    return "" if last.is_foreign else _find_change(request, last, is_changed=False)


def _describe_request(turn: Turn, contents: Sequence[types.Content]) -> _Request:
    return _Request(_read_thinker(turn), contents, turn.config, turn.history.memo)


def _read_thinker(turn: Turn) -> Thinker:
    """Describes the model of a turn."""
    binds = turn.settings.binds_thoughts
    return Thinker.of(turn.model.llm, turn.model.name, binds, turn.record.helped)


def _choose_kept(
    turn: Turn, request: _Request, found: Sequence[_Thoughts]
) -> list[_Thoughts]:
    """Chooses the thoughts that the model would accept.

    Within the running turn only models that check thoughts lose any: other models want
    them back. Thoughts without a seal are older than the guard; they go once it has
    changed the request.
    """
    thinker = request.thinker
    left = _without_gone(turn, found)
    own = [each for each in left if not each.is_foreign]
    if not thinker.is_checked or thinker.binds is False:
        return own

    is_changed = turn.is_changed(request.contents)
    standing = {
        each.index
        for each in _find_standing(left)
        if not _find_change(request, each, is_changed)
    }
    if thinker.binds:
        return [each for each in own if each.index in standing]

    turn_start = find_running_turn(request.contents)
    return [each for each in own if each.index in standing or each.index >= turn_start]


def _without_gone(turn: Turn, found: Sequence[_Thoughts]) -> Sequence[_Thoughts]:
    """Leaves out the thoughts that were refused once, and all before them."""
    gone = (turn.record.helped or {}).get("gone", "")
    names = [each.name for each in found]
    return found[names.index(gone) + 1 :] if gone in names else found


def _find_standing(found: Sequence[_Thoughts]) -> list[_Thoughts]:
    """Finds the thoughts that were sent with all later ones, as their seals tell."""
    standing: list[_Thoughts] = []
    for each in found:
        if each.seal:
            standing = _find_sent_before(each.seal, standing)
        standing.append(each)
    return standing


def _find_sent_before(seal: Seal, standing: list[_Thoughts]) -> list[_Thoughts]:
    """Finds those of some thoughts that were sent when an answer was sealed.

    They are as many as the seal counts, up to the one that it names as the newest.
    """
    names = [each.name for each in standing]
    newest = names[-1] if names else ""
    if (seal.before, seal.count) == (newest, len(names)):
        return standing

    end = names.index(seal.before) + 1 if seal.before in names else 0
    return standing[max(0, end - seal.count) : end]


def _find_change(request: _Request, thoughts: _Thoughts, is_changed: bool) -> str:
    """Says what is not as it was when thoughts were written; "" where all is.

    Of thoughts without a seal only `is_changed` tells: whether the guard has changed
    the request.
    """
    seal = thoughts.seal
    if seal is None:
        return "the request" if is_changed else ""
    if seal.system != request.system:
        return "the system instruction"
    if seal.tools != request.tools:
        return "the tools"
    is_same = (seal.messages, seal.own) == (thoughts.messages, thoughts.name)
    return "" if is_same else f"one of the first {thoughts.index} messages"


def _leave_out(
    contents: Sequence[types.Content], lost: Collection[int], thinker: Thinker
) -> list[types.Content]:
    """Leaves the signed thoughts out of the contents with these indexes."""
    # These refuse calls without the reasoning before them.
    needs_text = thinker.family in ("deepseek", "kimi")

    def leave_out(part: types.Part) -> types.Part | None:
        if not is_signed(part):
            return part
        if not needs_text:
            return None
        update = {"thought_signature": None, "text": part.text or " "}
        return part.model_copy(update=update)

    left: list[types.Content] = []
    for index, content in enumerate(contents):
        changed = change_thoughts(content, leave_out) if index in lost else content
        if changed is not None:
            left.append(changed)
    return left


def _find_thoughts(request: _Request, events: Sequence[Event]) -> Iterator[_Thoughts]:
    """Finds the signed thoughts of a request, with the seals of their events."""
    thinker = request.thinker
    written = _read_writers(events)
    digests = digest_before(request.contents, request.memo)
    pairs = zip(request.contents, digests, strict=True)
    for index, (content, messages) in enumerate(pairs):
        signed = find_signed(content)
        if not signed:
            continue

        seal, family = written.get(signed[0].thought_signature, _Written())
        if seal:
            is_foreign = seal.writer != thinker.client + thinker.family
        else:
            is_foreign = family not in ("", thinker.family) and bool(thinker.family)
        yield _Thoughts(index, name_thoughts(content), messages, seal, is_foreign)


def _read_writers(events: Sequence[Event]) -> Mapping[bytes | None, _Written]:
    """Reads who wrote the signed thoughts of these events, by their signatures."""
    written: dict[bytes | None, _Written] = {}
    for event in events:
        signed = find_signed(event.content)
        if not signed:
            continue

        seal = _read_seal((event.custom_metadata or {}).get(SEAL_KEY))
        family = name_family(getattr(event, "model_version", None) or "")
        # A plugin may hand out an answer again, which was not written there.
        for part in signed:
            written.setdefault(part.thought_signature, _Written(seal, family))
    return written


def _read_seal(value: object) -> Seal | None:
    try:
        return Seal.model_validate(value)
    except ValidationError:
        return None


def _spell_tools(config: types.GenerateContentConfig) -> Iterator[bytes]:
    for tool in config.tools or ():
        declared: Sequence[object] = getattr(tool, "function_declarations", None) or ()
        for each in declared or [tool]:
            yield canonical_json(_plain(each))


def _plain(value: Any) -> Any:
    """Returns the fields that are set; those of a newer release make no difference."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True, warnings=False)
    return value
