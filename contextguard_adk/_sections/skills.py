"""The instructions and resources of the agent's active skills, word for word.

ADK's `SkillToolset` returns the instructions of a skill as the result of a tool, and
names the active skills in session state. `skills.Document` explains what a document is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from contextguard_adk._history.contents import parts_of
from contextguard_adk._history.skills import Document, DocumentKey, read_document
from contextguard_adk._measuring.budgets import shorten
from contextguard_adk._support.phrases import SKILL, SKILLS, quote, quote_line
from contextguard_adk._turn.room import Room, measure_stored
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section

SKILLS_RATIO = 0.15
"""The documents take at most this part of `Budgets.working_tokens`."""

ROOM_RATIO = 0.3
"""The documents take at most this part of `Turn.room_tokens`, the threshold less the
tokens of instruction and tools."""

MAX_SKILLS_TOKENS = 25_000
"""The documents take at most this, however large the window is.

Claude Code has this limit, and `MAX_DOCUMENT_TOKENS`, for skills after a compaction.
"""

MAX_DOCUMENT_TOKENS = 5_000
"""One document takes at most this."""

MAX_STATE_BYTES = 48 * 1024
"""The documents take at most this in session state."""

MIN_DOCUMENT_TOKENS = 60
"""A document is left out if it has less room than this."""

_LEFT_OUT = "(There is no room for it; load it again if you need it.)"
"""Stands in place of a document that has no room."""

_ACTIVE_KEY = "_adk_activated_skill_"
"""The beginning of ADK's key for the names of active skills; the agent follows."""

_LIFECYCLES_KEY = "_adk_skill_meta_"
"""The beginning of ADK's key for the lifecycles of skills; the agent follows."""

_EPHEMERAL = "ephemeral"
"""The lifecycle of a skill that is active only in the run that has loaded it."""

_TITLE_START = SKILL.partition("{")[0]
"""The beginning of the line above a document."""


class Skills(Section):
    """Shows what the agent has loaded of its active skills.

    A document stands here once, however often it was loaded. It does not stand here if
    the newest result with it stays in the request. If not all documents have room, the
    newest get it first.
    """

    name = "skills"
    label = "the active skills"
    heading = SKILLS
    goes_at = 4
    own_state_bytes = MAX_STATE_BYTES
    has_own_room = True

    def most_tokens(self, turn: Turn, covered: frozenset[int]) -> float:
        """Returns the smallest of the three limits."""
        window_tokens = SKILLS_RATIO * turn.budgets.working_tokens
        room_tokens = ROOM_RATIO * turn.room_tokens
        return min(window_tokens, room_tokens, MAX_SKILLS_TOKENS)

    def write(self, turn: Turn, covered: frozenset[int], known: str, room: Room) -> str:
        """Writes the documents among the covered messages, the oldest first.

        If the session is loaded in part, the documents of the text before follow from
        it. Returns "" if there is no document.
        """
        active_skills = find_active_skills(turn)
        documents = _find_documents(turn, covered, known, active_skills)
        if not documents:
            return ""

        left_tokens = room.tokens - turn.count(SKILLS)
        left_bytes = room.state_bytes - measure_stored(SKILLS)
        newest_first = list[str]()
        for document in reversed(documents):
            tokens = min(left_tokens, MAX_DOCUMENT_TOKENS)
            block = _write_block(
                document, replace(room, tokens=tokens, state_bytes=left_bytes)
            )
            newest_first.append(block)
            left_tokens -= turn.count(block)
            left_bytes -= measure_stored(block)
        return "\n".join([SKILLS, *reversed(newest_first)])

    def refresh(self, text: str, turn: Turn) -> str:
        """Leaves out the documents of skills that are no longer active."""
        active_skills = find_active_skills(turn)
        documents = _parse(text)
        active = [each for each in documents if each.key.skill in active_skills]
        if len(active) == len(documents):
            return text
        if not active:
            return ""
        blocks = [f"{_write_title(each.key)}\n{each.text}" for each in active]
        return "\n".join([SKILLS, *blocks])


def has_used_skills(turn: Turn) -> bool:
    """Whether ADK has ever counted a skill as active for this agent."""
    return _read_names(turn) is not None


def find_active_skills(turn: Turn) -> frozenset[str]:
    """Returns the names of the skills that ADK counts as active for this agent."""
    records = turn.state.read_at(f"{_LIFECYCLES_KEY}{turn.agent}", "skill_lifecycles")
    lifecycles = records or {}
    return frozenset(
        name
        for name in _read_names(turn) or ()
        if isinstance(name, str) and not _is_expired(lifecycles.get(name), turn)
    )


def _read_names(turn: Turn) -> list[Any] | None:
    """Returns what ADK has stored as the names of active skills; None for nothing."""
    names: list[Any] | None = turn.state.read_at(
        f"{_ACTIVE_KEY}{turn.agent}", "active_skills"
    )
    return names


def _is_expired(record: object, turn: Turn) -> bool:
    """Whether a skill was active only in an earlier run.

    Args:
        record: What ADK has stored of the skill's lifecycle; None for nothing.
        turn: The model call.
    """
    if not isinstance(record, dict) or record.get("lifecycle") != _EPHEMERAL:
        return False
    run_id = record.get("activated_in")
    return bool(run_id) and run_id != turn.origin.invocation_id


def _find_documents(
    turn: Turn, covered: frozenset[int], known: str, active_skills: frozenset[str]
) -> list[Document]:
    """Finds the documents that a summary replaces, in the order in which they came.

    Args:
        turn: The model call.
        covered: Indexes of the messages that the summary replaces.
        known: The text beside the summary before, for messages that are not loaded.
        active_skills: The skills whose documents are found.
    """
    history = turn.history
    found: dict[DocumentKey, Document] = {}
    for document in _parse(known):
        if document.key.skill in active_skills:
            found[document.key] = document

    for index in history.indexes:
        for part in parts_of(history.told[index]):
            document_or_none = read_document(part.function_response)
            if document_or_none is None:
                continue
            key, text = document_or_none
            if key.skill not in active_skills:
                continue
            # The newest text counts, and stands last.
            found.pop(key, None)
            if index in covered:
                found[key] = Document(key, quote(text.strip("\n")))
    return list(found.values())


def _write_title(key: DocumentKey) -> str:
    names = [key.skill, key.path] if key.path else [key.skill]
    return SKILL.format(quote_line(", ".join(names)))


def _write_block(document: Document, room: Room) -> str:
    """Writes a document with its title; its middle is left out if it does not fit."""
    title = _write_title(document.key)
    whole = f"{title}\n{document.text}"
    if room.holds(whole):
        return whole

    def write(most_bytes: int) -> str:
        return f"{title}\n{shorten(document.text, most_bytes)}"

    shortened = room.fill(write) if room.tokens >= MIN_DOCUMENT_TOKENS else ""
    return shortened or f"{title}\n{_LEFT_OUT}"


def _parse(text: str) -> list[Document]:
    """Reads the documents of a text that `Skills` has written."""
    keys: list[DocumentKey] = []
    texts: list[list[str]] = []
    for line in text.split("\n"):
        if line.startswith(_TITLE_START) and line.endswith("]"):
            skill, _, path = line[len(_TITLE_START) : -1].partition(", ")
            keys.append(DocumentKey(skill, path))
            texts.append([])
        elif texts:
            # The heading stands before the first title, and belongs to no document.
            texts[-1].append(line)
    return [
        Document(key, "\n".join(lines)) for key, lines in zip(keys, texts, strict=True)
    ]
