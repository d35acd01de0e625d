"""Puts the guard's notes into a tool's result, where every client sends them.

A note has a name and a value, such as the handle of a shortened result. Most clients of
ADK send a result as a whole, but its Claude class sends only one field of some results:

- `content`, if this is a list or a text, as in the results of MCP servers
- `result`, before ADK 2.11

So notes stand in such a field: at the end of a text as lines "[recall_item: …]", at the
end of a list as an item with these lines, and in a dict as fields. In any other result
they stand beside the fields of the tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contextguard_adk._history.item_lists import item_text, join_items
from contextguard_adk._history.text import payload_text
from contextguard_adk._support.phrases import (
    FILES_NOTE,
    FULLNESS_NOTE,
    HANDLE_NOTE,
    NAMES_NOTE,
)

HANDLE_KEY = "recall_item"
"""The note with the handle of a shortened result, for the recall tool."""

NAMES_KEY = "not_shown"
"""The note with values that are only in the omitted text of a shortened result."""

FILES_KEY = "attachments_left_out"
"""The note with descriptions of images and files that a result has lost."""

FULLNESS_KEY = "context_guard"
"""The note that tells how full the window is. Only the newest result has it."""

_LINES = {
    FILES_KEY: FILES_NOTE,
    NAMES_KEY: NAMES_NOTE,
    HANDLE_KEY: HANDLE_NOTE,
    FULLNESS_KEY: FULLNESS_NOTE,
}
"""The line of each note, in the order of the lines."""

_MAX_HANDLE_CHARS = 100
"""A longer value of `HANDLE_KEY` is one of the tool, and no handle."""

_MAX_VALUE_CHARS = {
    FILES_KEY: 4_000,
    NAMES_KEY: 16_000,
    HANDLE_KEY: _MAX_HANDLE_CHARS,
    FULLNESS_KEY: 300,
}
"""The longest value of each note. A longer line is a text of the tool."""


def add_notes(result: dict[str, Any], notes: Mapping[str, str]) -> dict[str, Any]:
    """Returns a copy of a result with notes; the result itself without notes."""
    if not notes:
        return result
    field = _find_field(result)
    if field is None:
        return {**result, **notes}

    value = result[field]
    if isinstance(value, dict):
        return {**result, field: {**value, **notes}}

    lines = [_LINES[name].format(notes[name]) for name in _LINES if name in notes]
    text = "\n".join(lines)
    if isinstance(value, str):
        return {**result, field: f"{value}\n{text}"}
    item = {"type": "text", "text": text} if field == "content" else text
    return {**result, field: [*value, item]}


def split_notes(result: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Takes the notes off a result that may have some.

    A field `NAMES_KEY` stays where it is, because it may be one of the tool.

    Returns:
        The result without its notes, and the notes. The result itself if it has none.
    """
    field = _find_field(result)
    if field is None:
        return _split_fields(result)

    value = result[field]
    bare: Any = value
    notes = dict[str, str]()
    if isinstance(value, dict):
        bare, notes = _split_fields(value)
    elif isinstance(value, str):
        bare, notes = _split_lines(value)
    else:
        text, notes = _split_lines(item_text(value[-1]))
        # An item that has more than notes is one of the tool.
        if text:
            notes = {}
        bare = value[:-1]
    return ({**result, field: bare}, notes) if notes else (result, notes)


def has_names(result: dict[str, Any]) -> bool:
    """Whether a result has the note `NAMES_KEY`, or a field of this name."""
    _, notes = split_notes(result)
    return NAMES_KEY in notes or has_names_field(result)


def has_names_field(result: dict[str, Any]) -> bool:
    """Whether a result has a field `NAMES_KEY`, of the guard or of the tool."""
    return NAMES_KEY in _noted_fields(result)


def without_names(result: dict[str, Any]) -> dict[str, Any]:
    """Returns a result without the note `NAMES_KEY`; itself if it has no such note."""
    fields = _noted_fields(result)
    if NAMES_KEY in fields:
        others = {name: fields[name] for name in fields if name != NAMES_KEY}
        field = _find_field(result)
        return others if field is None else {**result, field: others}

    bare, notes = split_notes(result)
    if NAMES_KEY not in notes:
        return result
    del notes[NAMES_KEY]
    return add_notes(bare, notes)


def sent_text(result: dict[str, Any]) -> str:
    """Returns the text of a result that every client sends, whatever its class."""
    field = _find_field(result)
    if field != "content":
        return payload_text(result)
    content = result[field]
    return content if isinstance(content, str) else join_items(content)


def _find_field(result: dict[str, Any]) -> str | None:
    """Returns the name of the field in which notes stand; None for beside all fields.

    A client reads an empty field as if it was missing.
    """
    content = result.get("content")
    if content and isinstance(content, list | str):
        return "content"
    value = result.get("result")
    if value and isinstance(value, list | str | dict):
        return "result"
    return None


def _noted_fields(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the dict in which notes are fields; {} if notes are lines."""
    field = _find_field(result)
    holder = result if field is None else result[field]
    return holder if isinstance(holder, dict) else {}


def _split_fields(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Takes the handle off the fields of a result; `split_notes` explains the rest."""
    handle = fields.get(HANDLE_KEY)
    if not isinstance(handle, str) or len(handle) > _MAX_HANDLE_CHARS:
        return fields, {}
    others = {name: value for name, value in fields.items() if name != HANDLE_KEY}
    return others, {HANDLE_KEY: handle}


def _split_lines(text: str) -> tuple[str, dict[str, str]]:
    """Takes the lines of notes off the end of a text."""
    notes = dict[str, str]()
    rest = text
    for name in reversed(_LINES):
        opening, _, closing = _LINES[name].partition("{}")
        before, _, last_line = rest.rpartition("\n")
        is_note = last_line.startswith(opening) and last_line.endswith(closing)
        value = last_line[len(opening) : -len(closing)]
        # A longer line is a text of the tool that only looks like a note.
        if is_note and len(value) <= _MAX_VALUE_CHARS[name]:
            notes[name] = value
            rest = before
    return rest, notes
