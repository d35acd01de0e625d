"""The instructions and resources of the agent's active skills, word for word.

ADK's `SkillToolset` returns the instructions of a skill as the result of a tool, and
names the active skills in session state. `_history.skills` explains what a document is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from google.genai import types

from contextguard_adk._history.contents import parts_of
from contextguard_adk._history.skills import Document, DocumentKey, read_document
from contextguard_adk._measuring.budgets import shorten
from contextguard_adk._runtime.skills import find_active_skills
from contextguard_adk._runtime.state import AgentState
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

Coding agents have this limit, and `MAX_DOCUMENT_TOKENS`, for skills after a compaction.
"""

MAX_DOCUMENT_TOKENS = 5_000
"""One document takes at most this."""

SKILLS_STATE_BYTES = 48 * 1024
"""The documents take at most this in session state."""

MIN_DOCUMENT_TOKENS = 60
"""A document that has to be shortened is left out if it has less room than this."""

MIN_DOCUMENT_BYTES = 4 * MIN_DOCUMENT_TOKENS
"""The same in session state."""

_LEFT_OUT = "(Others have no room; load again what you need.)"
"""The line after the heading, if not all documents have room."""

_TITLE_START = SKILL.partition("{")[0]
"""The beginning of the line above a document."""


class Skills(Section):
    """Shows what the agent has loaded of its active skills.

    A document stands here once, however often it was loaded. It does not stand here if
    the newest result with it stays in the request. If not all documents have room, the
    instructions of skills get it first, then their resources, the newest first.
    """

    name = "skills"
    label = "the active skills"
    heading = SKILLS
    goes_at = 4
    own_state_bytes = SKILLS_STATE_BYTES
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
        run_id = turn.origin.invocation_id
        active_skills = find_active_skills(turn.state, run_id)
        documents = _find_documents(turn, covered, known, active_skills)
        if not documents:
            return ""

        shown = _choose_shown(documents, room)
        return _write(shown, is_whole=len(shown) == len(documents))

    def refresh(
        self,
        text: str,
        state: AgentState,
        run_id: str,
        kept: Sequence[types.Content],
    ) -> str:
        """Leaves out the documents of skills that are no longer active.

        A document that stands in one of the kept messages is left out as well.
        """
        active_skills = find_active_skills(state, run_id)
        loaded_again = {document.key for document in _read_documents(kept)}
        documents = _parse(text)
        current = [
            document
            for document in documents
            if document.key.skill in active_skills and document.key not in loaded_again
        ]
        if len(current) == len(documents):
            return text
        was_whole = _LEFT_OUT not in text.partition(_TITLE_START)[0]
        return _write(current, is_whole=was_whole) if current else ""


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
        for key, text in _read_documents([history.told[index]]):
            if key.skill not in active_skills:
                continue
            # The newest text counts, and stands last.
            found.pop(key, None)
            if index in covered:
                found[key] = Document(key, quote(text.strip("\n")))
    return list(found.values())


def _read_documents(contents: Iterable[types.Content]) -> Iterator[Document]:
    """Yields the documents in the results of contents."""
    for content in contents:
        for part in parts_of(content):
            document = read_document(part.function_response)
            if document is not None:
                yield document


def _choose_shown(documents: Sequence[Document], room: Room) -> list[Document]:
    """Returns the documents that have room, some of them shortened, in their order.

    The instructions of skills get room first, then the resources; the newest first.

    Args:
        documents: The documents, the oldest first.
        room: The most that all of them may take, with the heading and their titles.
    """
    instructions = [each for each in documents if not each.key.path]
    resources = [each for each in documents if each.key.path]
    by_rank = [*reversed(instructions), *reversed(resources)]

    frame = f"{SKILLS}\n{_LEFT_OUT}"
    left_tokens = room.tokens - room.turn.count(frame)
    left_bytes = room.state_bytes - measure_stored(frame)
    texts: dict[DocumentKey, str] = {}
    for document in by_rank:
        tokens = min(left_tokens, MAX_DOCUMENT_TOKENS)
        text = _fit_text(document, replace(room, tokens=tokens, state_bytes=left_bytes))
        if not text:
            break
        texts[document.key] = text
        block = f"{_write_title(document.key)}\n{text}\n"
        left_tokens -= room.turn.count(block)
        left_bytes -= measure_stored(block)
    return [
        Document(each.key, texts[each.key]) for each in documents if each.key in texts
    ]


def _write(documents: Iterable[Document], is_whole: bool) -> str:
    """Writes documents, with the heading; `is_whole` tells that none is left out."""
    notes = [] if is_whole else [_LEFT_OUT]
    blocks = [f"{_write_title(key)}\n{text}" for key, text in documents]
    return "\n".join([SKILLS, *notes, *blocks])


def _write_title(key: DocumentKey) -> str:
    names = [key.skill, key.path] if key.path else [key.skill]
    return SKILL.format(quote_line(", ".join(names)))


def _fit_text(document: Document, room: Room) -> str:
    """Returns the text of a document, without its middle if it does not fit whole.

    Returns "" if there is hardly any room.

    Args:
        document: The document.
        room: The most that the text may take with its title.
    """
    title = _write_title(document.key)
    if room.holds(f"{title}\n{document.text}\n"):
        return document.text
    if room.tokens < MIN_DOCUMENT_TOKENS or room.state_bytes < MIN_DOCUMENT_BYTES:
        return ""

    def write(most_bytes: int) -> str:
        return f"{title}\n{shorten(document.text, most_bytes)}\n"

    shortened = room.fill(write)
    return shortened.removeprefix(title).strip("\n")


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
            # The lines before the first title belong to no document.
            texts[-1].append(line)
    return [
        Document(key, "\n".join(lines)) for key, lines in zip(keys, texts, strict=True)
    ]
