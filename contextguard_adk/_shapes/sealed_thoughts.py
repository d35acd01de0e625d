"""Sends signed thoughts only after exactly the messages that they were written after.

Newer Claude models bind their thoughts. A provider of such a model checks a thought
against the system instruction, the tools, all earlier messages and all earlier thoughts
in the request. So the event of each answer with thoughts gets a seal: short digests of
all of these. Before a call, thoughts are left out if their seal does not hold any more,
whoever made the change.

Thoughts A may be left out of a request, and the answer to this request may have
thoughts B. The seal of B says that A were missing, so A are never sent again.

These words are used here:

- "Thoughts" are always the signed thoughts of one content. They have one name.
- Thoughts are foreign if another client, or another family of models, wrote them.
- An index is the position of a content in the request.
- A remedy is what a provider's refusal has shown about thoughts, see `help_thoughts`.
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
"""A warning is logged at this number of changes. A single one may be intended."""

SEAL_KEY = "context_guard_seal"
"""The key of the seal in the `custom_metadata` of an event."""

_Short = Annotated[str, Field(max_length=64)]
"""A text of a seal. Session data is untrusted, so its length is limited."""


class Seal(BaseModel):
    """The request that an answer with signed thoughts followed, in short digests.

    Attributes:
        writer: The client and the family of the model that wrote the answer, as one
            text, such as "AnthropicLlmclaude".
        system: A digest of the system instruction.
        tools: A digest of the declared tools.
        messages: A digest of the contents of the request, and of the parts of the
            answer before its last signed thought.
        own: The name of the answer's own thoughts.
        before: The name of the newest thoughts in the request; "" if it had none.
        count: The number of contents with thoughts in the request.
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
    """How often thoughts were left out because other code had changed the request."""

    change_count: int = 0


@dataclass(frozen=True)
class _Request:
    """A request whose thoughts are checked.

    Attributes:
        thinker: How the model that gets the request treats thoughts.
        contents: The contents of the request.
        config: The instruction and the tools of the request.
        memo: Measures the contents.
    """

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
    """The facts about the writer of thoughts, from the event of their answer.

    Attributes:
        seal: The seal of the answer; None if it has none.
        family: The family of the model; "" if unknown.
    """

    seal: Seal | None = None
    family: str = ""


class Seals(Listener):
    """Seals answers with signed thoughts, and warns if other code breaks the seals."""

    def sent(self, event: Sent) -> None:
        """Counts the changes of other code that break seals, and warns once."""
        # A compaction breaks seals as well, which is no fault of other code.
        if event.is_compacted:
            return

        changed_part = _name_breaking_change(event.turn)
        if not changed_part:
            return

        known_losses = event.memory.facts.unit(LostThoughts)
        losses = LostThoughts(known_losses.change_count + 1)
        event.memory.remember_unit(losses)
        if losses.change_count == _WARNED_CHANGE_COUNT:
            message = (
                "Agent %r: %s changed between calls, so that the thoughts of its model "
                "cannot be sent again. Keep what changes often out of the instruction, "
                "the tools and older messages."
            )
            warn_once(logger, message, event.turn.agent, changed_part)

    def answered(self, event: Answered) -> None:
        """Attaches a seal to the event of an answer with signed thoughts."""
        answer = event.response.content
        if answer is None or not find_signed(answer):
            return

        # The guard keeps a request only until it is answered, so the request of this
        # answer may be unknown.
        call = event.call
        if not call.sent_contents or not call.sent_config:
            return

        invocation = event.context.get_invocation_context()
        thinker = Thinker.of(find_llm(invocation.agent), call.model)
        # Other providers check no thought against the contents before it. So a seal
        # would be useless.
        if not thinker.is_checked:
            return

        memo = event.run.memo(invocation)
        request = _Request(thinker, call.sent_contents, call.sent_config, memo)
        seal = _make_seal(request, answer)
        event.attach(SEAL_KEY, seal.model_dump())


def _make_seal(request: _Request, answer: types.Content) -> Seal:
    """Makes the seal of an answer to a request; the answer has signed thoughts."""
    sent = request.contents
    sent_names = [name_thoughts(content) for content in sent if find_signed(content)]
    # `digest_before` yields a digest for each content. Only the digest for the answer,
    # the last one, is used. It is a digest of all contents that were sent, and of the
    # parts of the answer before its last signed thought.
    *_, answer_digest = digest_before([*sent, answer], request.memo)
    return Seal(
        writer=request.thinker.client + request.thinker.family,
        system=request.system_digest,
        tools=request.tools_digest,
        messages=answer_digest,
        own=name_thoughts(answer),
        before=sent_names[-1] if sent_names else "",
        count=len(sent_names),
    )


def leave_out_thoughts(
    turn: Turn, contents: list[types.Content]
) -> list[types.Content]:
    """Leaves out the signed thoughts that the provider would refuse.

    Returns `contents` itself if all thoughts may be sent.
    """
    request = _describe_request(turn, contents)
    found = list(_find_thoughts(request, turn.history.events))
    accepted = _choose_accepted(turn, request, found)

    found_indexes = {thoughts.content_index for thoughts in found}
    accepted_indexes = {thoughts.content_index for thoughts in accepted}
    refused_indexes = found_indexes - accepted_indexes
    if not refused_indexes:
        return contents
    return _leave_out(contents, refused_indexes, request.thinker)


def help_thoughts(
    turn: Turn, refusal: str, contents: Sequence[types.Content]
) -> dict[str, str] | None:
    """Adds what a refusal shows about thoughts to the remedies of the session.

    The remedies have these keys and values:

    - `binds`: The name of a model that binds its thoughts; "" for none.
    - `free`: The name of a model that does not bind its thoughts; "" for none.
    - `gone`: The name of the newest thoughts that were refused. These thoughts and all
      older ones are never sent again.

    Args:
        turn: The model call.
        refusal: The kind of the refusal. These kinds are about thoughts: "turn" if the
            running turn lacks thoughts, "binding" if something before the thoughts has
            changed, "thoughts" if the thoughts are not valid for another reason.
        contents: The contents that were refused.

    Returns:
        All remedies of the session, by their keys; None if the refusal is of another
        kind, or if no remedy helps against it.
    """
    remedies = turn.record.helped or {}
    model = turn.model.name
    if refusal == "turn":
        # The guard leaves out thoughts of the running turn only if it takes the model
        # for one that binds its thoughts. Otherwise the refusal has another cause.
        may_have_left_out = bool(_describe_thinker(turn).binds)
        if not may_have_left_out:
            return None
        return {**remedies, "free": model, "binds": ""}

    # If the refused contents have no thoughts, the value of `gone` stays as it was.
    refused_name = newest_thoughts(contents) or remedies.get("gone", "")
    if refusal == "binding":
        return {**remedies, "gone": refused_name, "binds": model, "free": ""}
    if refusal == "thoughts":
        return {**remedies, "gone": refused_name}
    return None


def _name_breaking_change(turn: Turn) -> str:
    """Names the part of the request whose change has broken the newest seal.

    For example "the tools". Changes that the guard has made are ignored. The result is
    "" in these cases:

    - If the request has no thoughts, or if the newest thoughts are sent.
    - If the newest thoughts are foreign: they would be left out in any case.
    - If the newest thoughts have no seal: nobody knows what was before them.
    - If no other code has changed the request.
    """
    # `turn.messages` is the request before the guard changed it. `turn.contents` is the
    # request that is sent.
    newest_name = newest_thoughts(turn.messages)
    are_sent = newest_name == newest_thoughts(turn.contents)
    if not newest_name or are_sent:
        return ""

    # The messages have thoughts, so at least one item is found.
    request = _describe_request(turn, turn.messages)
    *_, newest = _find_thoughts(request, turn.history.events)
    if newest.is_foreign or newest.seal is None:
        return ""
    return _name_change(request, newest, newest.seal)


def _describe_request(turn: Turn, contents: Sequence[types.Content]) -> _Request:
    """Describes a request with these contents, with the config of the turn."""
    thinker = _describe_thinker(turn)
    return _Request(thinker, contents, turn.config, turn.history.memo)


def _describe_thinker(turn: Turn) -> Thinker:
    """Describes how the model of a turn treats thoughts."""
    binds = turn.settings.binds_thoughts
    return Thinker.of(turn.model.llm, turn.model.name, binds, turn.record.helped)


def _choose_accepted(
    turn: Turn, request: _Request, found: Sequence[_Thoughts]
) -> list[_Thoughts]:
    """Chooses the thoughts that the provider is expected to accept.

    Foreign thoughts and thoughts that were refused before are never chosen. The other
    thoughts are chosen in these cases:

    - If the provider does not check what stands before a thought: all of them.
    - If the model does not bind its thoughts: all of them.
    - If the model binds its thoughts: each one, unless a content before it has changed.
    - If it is unknown whether the model binds its thoughts: as if the model binds them,
      and also all thoughts of the running turn. A model that does not bind its thoughts
      may demand these.

    Args:
        turn: The model call.
        request: The request.
        found: All thoughts in the request, the oldest first.
    """
    thinker = request.thinker
    candidates = _without_refused(turn, found)
    native = [thoughts for thoughts in candidates if not thoughts.is_foreign]
    may_choose_all = not thinker.is_checked or thinker.binds is False
    if may_choose_all:
        return native

    # `candidates` has foreign thoughts as well. They may have been in the requests that
    # the seals of later thoughts describe.
    accepted_indexes = _find_unchanged(turn, request, candidates)
    if thinker.binds is None:
        turn_start = find_running_turn(request.contents)
        accepted_indexes.update(range(turn_start, len(request.contents)))
    return [
        thoughts for thoughts in native if thoughts.content_index in accepted_indexes
    ]


def _without_refused(turn: Turn, found: Sequence[_Thoughts]) -> Sequence[_Thoughts]:
    """Leaves out the thoughts of the remedy `gone`, and all older thoughts.

    Returns all thoughts if there is no such remedy, or if its thoughts are not found.

    Args:
        turn: The model call, with the remedies.
        found: Thoughts in the request, the oldest first.
    """
    refused_name = (turn.record.helped or {}).get("gone", "")
    names = [thoughts.name for thoughts in found]
    if refused_name not in names:
        return found

    refused_position = names.index(refused_name)
    return found[refused_position + 1 :]


def _find_unchanged(
    turn: Turn, request: _Request, found: Sequence[_Thoughts]
) -> set[int]:
    """Finds the thoughts before which nothing has changed since they were written.

    - If the thoughts have a seal: they are found if the seal holds.
    - If they have no seal: nobody knows what was before them. They are found if the
      guard leaves the whole request unchanged.

    Thoughts that were missing in the request of a later answer are never found.

    Args:
        turn: The model call.
        request: The request.
        found: Thoughts in the request, the oldest first.

    Returns:
        The indexes of the contents with these thoughts.
    """
    has_guard_changed = turn.is_changed(request.contents)
    unchanged_indexes: set[int] = set()
    for thoughts in _find_always_sent(found):
        if thoughts.seal is None:
            is_unchanged = not has_guard_changed
        else:
            is_unchanged = not _name_change(request, thoughts, thoughts.seal)
        if is_unchanged:
            unchanged_indexes.add(thoughts.content_index)
    return unchanged_indexes


def _find_always_sent(found: Sequence[_Thoughts]) -> list[_Thoughts]:
    """Finds the thoughts that were in the request of every later answer.

    A seal tells which thoughts were in the request of the sealed answer. The request of
    an answer without a seal is assumed to have had all earlier thoughts.

    Args:
        found: Thoughts in a request, the oldest first.
    """
    always_sent: list[_Thoughts] = []
    for thoughts in found:
        if thoughts.seal is not None:
            always_sent = _keep_sent(always_sent, thoughts.seal)
        always_sent.append(thoughts)
    return always_sent


def _keep_sent(earlier: list[_Thoughts], seal: Seal) -> list[_Thoughts]:
    """Returns the thoughts that were in the request of a sealed answer.

    `seal.before` is the name of the newest thoughts in that request. `seal.count` is
    the number of contents with thoughts in that request. Thoughts are left out from the
    oldest on, so the request had the last `count` thoughts up to `before`. For example,
    `earlier` is [A, B, C]. Each case begins with `before` and `count`:

    - C and 3: the request had A, B and C.
    - C and 2: the request had B and C.
    - B and 1: the request had B.
    - "" and 0: the request had no thoughts.

    Args:
        earlier: The thoughts before the answer, the oldest first.
        seal: The seal of the answer.
    """
    names = [thoughts.name for thoughts in earlier]
    newest_name = names[-1] if names else ""
    # This case comes first, because several thoughts may have the name `before`, and
    # `index` below finds only the oldest of them.
    had_all = seal.before == newest_name and seal.count == len(names)
    if had_all:
        return earlier
    # If the request had no thoughts, `before` is "", which is no name.
    if seal.before not in names:
        return []

    # The request may have had thoughts that are gone by now. Then `count` is larger
    # than the number of thoughts up to `before`.
    sent_end = names.index(seal.before) + 1
    sent_start = max(0, sent_end - seal.count)
    return earlier[sent_start:sent_end]


def _name_change(request: _Request, thoughts: _Thoughts, seal: Seal) -> str:
    """Names a part of the request that has changed since thoughts were written.

    The name is for a warning, for example "the tools". The result is "" if nothing has
    changed, so that the seal holds.

    Args:
        request: The request that has the thoughts now.
        thoughts: The thoughts.
        seal: The seal of the thoughts, with digests of the request that they followed.
    """
    if seal.system != request.system_digest:
        return "the system instruction"
    if seal.tools != request.tools_digest:
        return "the tools"

    has_same_messages = seal.messages == thoughts.messages_digest
    # Other code may have removed some of the thoughts from their content. Then the rest
    # of the thoughts have another name.
    has_all_own_thoughts = seal.own == thoughts.name
    if has_same_messages and has_all_own_thoughts:
        return ""
    return f"one of the first {thoughts.content_index} messages"


def _leave_out(
    contents: Sequence[types.Content], indexes: Collection[int], thinker: Thinker
) -> list[types.Content]:
    """Leaves the signed thoughts out of some contents.

    A content that has nothing but signed thoughts is left out as well.

    DeepSeek and Kimi refuse a tool call without a thought before it. For a model of
    these families, each thought stays, and loses only its signature.

    Args:
        contents: The contents of the request.
        indexes: The indexes of the contents that lose their thoughts.
        thinker: How the model of the request treats thoughts.
    """
    needs_thought = thinker.family in ("deepseek", "kimi")

    def change_thought(thought: types.Part) -> types.Part | None:
        if not is_signed(thought):
            return thought
        if not needs_thought:
            return None
        # ADK's `LiteLlm` sends no thought with an empty text, so " " stands for "".
        update = {"thought_signature": None, "text": thought.text or " "}
        return thought.model_copy(update=update)

    remaining: list[types.Content] = []
    for index, content in enumerate(contents):
        if index not in indexes:
            remaining.append(content)
            continue

        # The result is None if no part is left.
        changed = change_thoughts(content, change_thought)
        if changed is not None:
            remaining.append(changed)
    return remaining


def _find_thoughts(request: _Request, events: Sequence[Event]) -> Iterator[_Thoughts]:
    """Finds the signed thoughts of a request, the oldest first.

    Args:
        request: The request.
        events: The events of the session, which have the seals.
    """
    origins = _read_origins(events)
    digests = list(digest_before(request.contents, request.memo))
    for index, content in enumerate(request.contents):
        signed = find_signed(content)
        if not signed:
            continue

        # One event has all thoughts of a content, so the first signature finds it. If
        # no event has this signature, the origin is unknown.
        origin = origins.get(signed[0].thought_signature, _Origin())
        yield _Thoughts(
            content_index=index,
            name=name_thoughts(content),
            messages_digest=digests[index],
            seal=origin.seal,
            is_foreign=_is_foreign(origin, request.thinker),
        )


def _is_foreign(origin: _Origin, thinker: Thinker) -> bool:
    """Whether thoughts of this origin are foreign to the model of the request.

    - If the thoughts have a seal: they are foreign if the client or the family differs
      from that of the model. An unknown family, "", differs from each known one.
    - If the thoughts have no seal: their client is unknown. They are foreign if both
      families are known and differ.
    """
    if origin.seal is not None:
        return origin.seal.writer != thinker.client + thinker.family

    are_both_known = bool(origin.family) and bool(thinker.family)
    return are_both_known and origin.family != thinker.family


def _read_origins(events: Sequence[Event]) -> Mapping[bytes | None, _Origin]:
    """Returns the origin of each signed thought in the events, by its signature.

    A plugin may repeat an answer in a later event. The first event with a signature
    counts.
    """
    origins: dict[bytes | None, _Origin] = {}
    for event in events:
        signed = find_signed(event.content)
        if not signed:
            continue

        metadata = event.custom_metadata or {}
        seal = _read_seal(metadata.get(SEAL_KEY))
        # If an event has no `model_version`, the family is "".
        model_version = getattr(event, "model_version", None) or ""
        origin = _Origin(seal, name_family(model_version))
        for thought in signed:
            origins.setdefault(thought.thought_signature, origin)
    return origins


def _read_seal(value: object) -> Seal | None:
    """Reads a seal from session data, which is untrusted; None if it is no seal."""
    try:
        return Seal.model_validate(value)
    except ValidationError:
        return None


def _spell_tools(config: types.GenerateContentConfig) -> Iterator[bytes]:
    """Yields each tool of a config as JSON.

    A tool of ADK may declare several functions, and each of these is yielded alone. A
    tool without declarations, such as a built-in tool, is yielded as it is.
    """
    for tool in config.tools or ():
        declarations = getattr(tool, "function_declarations", None)
        for declaration in declarations or [tool]:
            yield canonical_json(_plain(declaration))


def _plain(value: Any) -> Any:
    """Returns a value with a dict of fields in place of each Pydantic model.

    The value may be a model, or a list with models. Any other value is returned as it
    is. Fields that are None are left out, because another release of a library may have
    other fields.
    """
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True, warnings=False)
    return value
