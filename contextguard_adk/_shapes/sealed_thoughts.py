"""Signed thoughts go out only after exactly the messages that they were written after.

Newer Claude models check a thought against the system instruction, the tools, all
earlier messages, and the thoughts that were sent before it. So each answer gets a seal:
short digests of the messages before it. Before a call, thoughts whose seal no longer
holds are left out, whoever made the change. A thought that was left out while a later
one was written never comes back, because the seal of the later one does not count it.

A thought here means the signed thoughts of one content. A thought is foreign if another
client, or another family of models, wrote it.
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

_WARNED_CHANGE_COUNT = 2
"""The number of changes after which a warning is logged. One may be intended."""

SEAL_KEY = "context_guard_seal"
"""Where an event's `custom_metadata` holds the seal of its thoughts."""

_Short = Annotated[str, Field(max_length=64)]


class Seal(BaseModel):
    """All that an answer with signed thoughts was written after, in short digests.

    Attributes:
        writer: The client and the family of the model that wrote the thoughts.
        system: The system instruction.
        tools: The declared tools.
        messages: All that stands before the last thought of the answer.
        own: The name of the answer's own thoughts.
        before: The name of the newest thoughts in the request that was answered; "" if
            it had none.
        count: The number of contents with thoughts in that request.
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
    """A request whose thoughts are checked against its instruction and its tools."""

    thinker: Thinker
    contents: Sequence[types.Content]
    config: types.GenerateContentConfig
    memo: Memo

    @cached_property
    def system_digest(self) -> str:
        """A digest of the system instruction."""
        return digest([canonical_json(_plain(self.config.system_instruction))])

    @cached_property
    def tools_digest(self) -> str:
        """A digest of the declared tools, whatever their order."""
        return digest(sorted(_spell_tools(self.config)))


@dataclass(frozen=True)
class _Thoughts:
    """The signed thoughts of one content.

    Attributes:
        content_index: The index of the content in the request.
        name: A digest of their signatures.
        messages_digest: A digest of all that stands before the last of them.
        seal: The seal of their answer; None if it has none.
        is_foreign: Whether another client or family of models wrote them.
    """

    content_index: int
    name: str
    messages_digest: str
    seal: Seal | None
    is_foreign: bool


class _Origin(NamedTuple):
    """All that the event of a thought tells of its writing.

    Attributes:
        seal: The seal of the answer; None if it has none.
        family: The family of the model; "" if unknown.
    """

    seal: Seal | None = None
    family: str = ""


class Seals(Listener):
    """Seals the answers that hold signed thoughts; warns where seals break."""

    def sent(self, event: Sent) -> None:
        """Counts the changes of other code that break seals, and warns once."""
        if event.is_compacted:
            return

        changed_part = _name_breaking_change(event.turn)
        if not changed_part:
            return

        earlier_losses = event.memory.facts.unit(LostThoughts)
        losses = LostThoughts(earlier_losses.changed_count + 1)
        event.memory.keep(losses)
        if losses.changed_count == _WARNED_CHANGE_COUNT:
            message = (
                "Agent %r: %s changed between calls, so that the thoughts of its model "
                "cannot be sent again. Keep what changes often out of the instruction, "
                "the tools and older messages."
            )
            warn_once(logger, message, event.turn.agent, changed_part)

    def answered(self, event: Answered) -> None:
        """Attaches a seal to the event of an answer with signed thoughts."""
        answer = event.response.content
        call = event.call
        answer_name = name_thoughts(answer) if answer else ""
        if answer is None or not answer_name:
            return
        if not call.sent_contents or not call.sent_config:
            return

        invocation = event.context.get_invocation_context()
        thinker = Thinker.of(find_llm(invocation.agent), call.model)
        if not thinker.is_checked:
            return

        sent = call.sent_contents
        memo = event.run.memo(invocation)
        request = _Request(thinker, sent, call.sent_config, memo)
        sent_names = [
            name_thoughts(content) for content in sent if find_signed(content)
        ]
        # The digests of all contents; the last one is that of the answer.
        *_, answer_digest = digest_before([*sent, answer], memo)
        seal = Seal(
            writer=thinker.client + thinker.family,
            system=request.system_digest,
            tools=request.tools_digest,
            messages=answer_digest,
            own=answer_name,
            before=sent_names[-1] if sent_names else "",
            count=len(sent_names),
        )
        event.attach(SEAL_KEY, seal.model_dump())


def leave_out_thoughts(
    turn: Turn, contents: list[types.Content]
) -> list[types.Content]:
    """Leaves out the signed thoughts that the provider would refuse."""
    request = _describe_request(turn, contents)
    found = list(_find_thoughts(request, turn.history.events))
    kept = _choose_accepted(turn, request, found)

    found_indexes = {thoughts.content_index for thoughts in found}
    kept_indexes = {thoughts.content_index for thoughts in kept}
    refused_indexes = found_indexes - kept_indexes
    if not refused_indexes:
        return contents
    return _leave_out(contents, refused_indexes, request.thinker)


def help_thoughts(
    turn: Turn, refusal: str, contents: Sequence[types.Content]
) -> dict[str, str] | None:
    """Returns all remedies of the session, with new ones against this refusal.

    A remedy is a fact on the model, by which later requests leave thoughts out:

    - `binds`: The name of a model that binds its thoughts; "" for none.
    - `free`: The name of a model that does not; "" for none.
    - `gone`: The name of the newest thoughts that were refused. No thoughts up to these
      are sent again.

    The result is None if none of these helps against the refusal.
    """
    remedies = turn.record.helped or {}
    model = turn.model.name
    if refusal == "turn":
        # Thoughts of the running turn are missing: the model wants all of them back.
        were_left_out = bool(_read_thinker(turn).binds)
        return {**remedies, "free": model, "binds": ""} if were_left_out else None

    refused_name = newest_thoughts(contents) or remedies.get("gone", "")
    if refusal == "binding":
        return {**remedies, "gone": refused_name, "binds": model, "free": ""}
    if refusal == "thoughts":
        return {**remedies, "gone": refused_name}
    return None


def _name_breaking_change(turn: Turn) -> str:
    """Names the part of the request by whose change the newest thoughts were lost.

    The result is "" in these cases:

    - There are no thoughts, or the newest ones are still sent.
    - Another client or family of models wrote them.
    - Only the guard has changed the request, and no other code.
    """
    newest_name = newest_thoughts(turn.messages)
    is_sent = newest_name == newest_thoughts(turn.contents)
    if not newest_name or is_sent:
        return ""

    # The request as other code has made it, without the changes of the guard.
    request = _describe_request(turn, turn.messages)
    *_, newest = _find_thoughts(request, turn.history.events)
    if newest.is_foreign:
        return ""
    return _find_change(request, newest, is_changed=False)


def _describe_request(turn: Turn, contents: Sequence[types.Content]) -> _Request:
    return _Request(_read_thinker(turn), contents, turn.config, turn.history.memo)


def _read_thinker(turn: Turn) -> Thinker:
    """Describes the model of a turn."""
    binds = turn.settings.binds_thoughts
    return Thinker.of(turn.model.llm, turn.model.name, binds, turn.record.helped)


def _choose_accepted(
    turn: Turn, request: _Request, found: Sequence[_Thoughts]
) -> list[_Thoughts]:
    """Chooses the thoughts that the model would accept.

    No model accepts foreign thoughts, or thoughts that were refused before. The others
    depend on the model:

    - A model that does not bind thoughts accepts all.
    - A model that binds thoughts accepts those whose seals hold.
    - If it is unknown whether the model binds thoughts, those of the running turn are
      sent as well: a model that does not bind them wants them back.
    """
    thinker = request.thinker
    candidates = _without_refused(turn, found)
    native = [thoughts for thoughts in candidates if not thoughts.is_foreign]
    if not thinker.is_checked or thinker.binds is False:
        return native

    # The seals of later answers also count foreign thoughts, so these are read as well.
    is_changed = turn.is_changed(request.contents)
    holding_indexes = {
        thoughts.content_index
        for thoughts in _find_always_sent(candidates)
        if not _find_change(request, thoughts, is_changed)
    }
    if thinker.binds:
        turn_start = len(request.contents)  # The running turn has no privilege.
    else:
        turn_start = find_running_turn(request.contents)

    accepted: list[_Thoughts] = []
    for thoughts in native:
        is_of_running_turn = thoughts.content_index >= turn_start
        if is_of_running_turn or thoughts.content_index in holding_indexes:
            accepted.append(thoughts)
    return accepted


def _without_refused(turn: Turn, found: Sequence[_Thoughts]) -> Sequence[_Thoughts]:
    """Leaves out the thoughts that the provider has refused, and all before them."""
    refused_name = (turn.record.helped or {}).get("gone", "")
    names = [thoughts.name for thoughts in found]
    if refused_name not in names:
        return found
    return found[names.index(refused_name) + 1 :]


def _find_always_sent(found: Sequence[_Thoughts]) -> list[_Thoughts]:
    """Finds the thoughts that were in the request of every later answer.

    The seal of an answer tells which thoughts were in its request. Thoughts without a
    seal tell nothing of earlier ones.
    """
    always_sent: list[_Thoughts] = []
    for thoughts in found:
        if thoughts.seal:
            always_sent = _keep_sent(always_sent, thoughts.seal)
        always_sent.append(thoughts)
    return always_sent


def _keep_sent(earlier: list[_Thoughts], seal: Seal) -> list[_Thoughts]:
    """Keeps the thoughts that were in the request of a sealed answer.

    The seal names the newest thoughts in that request, and tells their number.

    Args:
        earlier: Thoughts before the answer, the oldest first.
        seal: The seal of the answer.
    """
    names = [thoughts.name for thoughts in earlier]
    newest_name = names[-1] if names else ""
    had_all = seal.before == newest_name and seal.count == len(names)
    if had_all:
        return earlier
    if seal.before not in names:
        return []

    # The oldest ones were left out of that request, or newer ones, or both.
    end = names.index(seal.before) + 1
    start = max(0, end - seal.count)
    return earlier[start:end]


def _find_change(request: _Request, thoughts: _Thoughts, is_changed: bool) -> str:
    """Names a part of the request that has changed since thoughts were written.

    The result is "" if nothing has changed. Thoughts without a seal are older than the
    guard. For them a change by the guard is the only one that is known.

    Args:
        request: The request, in which the thoughts stand.
        thoughts: The thoughts.
        is_changed: Whether the guard has changed the request.
    """
    seal = thoughts.seal
    if seal is None:
        return "the request" if is_changed else ""

    if seal.system != request.system_digest:
        return "the system instruction"
    if seal.tools != request.tools_digest:
        return "the tools"

    has_same_messages = seal.messages == thoughts.messages_digest
    # Other code may have removed some of the thoughts from their own message.
    has_all_own_thoughts = seal.own == thoughts.name
    if has_same_messages and has_all_own_thoughts:
        return ""
    return f"one of the first {thoughts.content_index} messages"


def _leave_out(
    contents: Sequence[types.Content], indexes: Collection[int], thinker: Thinker
) -> list[types.Content]:
    """Leaves the signed thoughts out of some contents.

    Args:
        contents: The contents of the request.
        indexes: The indexes of the contents that lose their thoughts.
        thinker: The model of the request.
    """
    # These models refuse calls without a text of thoughts before them.
    needs_text = thinker.family in ("deepseek", "kimi")

    def leave_out(part: types.Part) -> types.Part | None:
        if not is_signed(part):
            return part
        if not needs_text:
            return None
        update = {"thought_signature": None, "text": part.text or " "}
        return part.model_copy(update=update)

    remaining: list[types.Content] = []
    for index, content in enumerate(contents):
        if index not in indexes:
            remaining.append(content)
            continue

        changed = change_thoughts(content, leave_out)
        if changed is not None:  # Something besides the thoughts is left.
            remaining.append(changed)
    return remaining


def _find_thoughts(request: _Request, events: Sequence[Event]) -> Iterator[_Thoughts]:
    """Finds the signed thoughts of a request, with the seals of their events.

    Args:
        request: The request.
        events: The events of the session.
    """
    origins = _read_origins(events)
    digests = digest_before(request.contents, request.memo)
    contents_with_digests = zip(request.contents, digests, strict=True)
    for index, (content, messages_digest) in enumerate(contents_with_digests):
        signed = find_signed(content)
        if not signed:
            continue

        origin = origins.get(signed[0].thought_signature, _Origin())
        yield _Thoughts(
            content_index=index,
            name=name_thoughts(content),
            messages_digest=messages_digest,
            seal=origin.seal,
            is_foreign=_is_foreign(origin, request.thinker),
        )


def _is_foreign(origin: _Origin, thinker: Thinker) -> bool:
    """Returns whether another client or family wrote a thought than the model's own.

    Without a seal only the families are compared. An unknown family is not foreign.
    """
    if origin.seal:
        return origin.seal.writer != thinker.client + thinker.family

    are_known = bool(origin.family) and bool(thinker.family)
    return are_known and origin.family != thinker.family


def _read_origins(events: Sequence[Event]) -> Mapping[bytes | None, _Origin]:
    """Reads the origins of all signed thoughts in events, by their signatures."""
    origins: dict[bytes | None, _Origin] = {}
    for event in events:
        signed = find_signed(event.content)
        if not signed:
            continue

        seal = _read_seal((event.custom_metadata or {}).get(SEAL_KEY))
        family = name_family(getattr(event, "model_version", None) or "")
        # The first event counts. In a later one a plugin has repeated the answer.
        for part in signed:
            origins.setdefault(part.thought_signature, _Origin(seal, family))
    return origins


def _read_seal(value: object) -> Seal | None:
    """Reads a seal from session data, which is untrusted; None if it is none."""
    try:
        return Seal.model_validate(value)
    except ValidationError:
        return None


def _spell_tools(config: types.GenerateContentConfig) -> Iterator[bytes]:
    """Yields each declared function as JSON, and each tool that declares none."""
    for tool in config.tools or ():
        declared: Sequence[object] = getattr(tool, "function_declarations", None) or ()
        for declaration in declared or [tool]:
            yield canonical_json(_plain(declaration))


def _plain(value: Any) -> Any:
    """Returns a Pydantic model as a dict of its set fields, also within a list.

    Fields that are None are left out: a newer release may add some. Other values are
    returned as they are.
    """
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True, warnings=False)
    return value
