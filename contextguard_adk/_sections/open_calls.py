"""The list of calls without an answer among the messages that a summary replaces.

A call without an answer is open: a person has to approve the call, or the tool runs
long. The id of a call is read from the session's events. The contents of a request lack
the ids that ADK has made, because ADK does not show these ids to a model. Covered
messages are those that the summary replaces.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from google.genai import types

from contextguard_adk._history.contents import parts_of
from contextguard_adk._history.fingerprints import handle_of
from contextguard_adk._history.history import History
from contextguard_adk._history.text import payload_text
from contextguard_adk._measuring.budgets import excerpt
from contextguard_adk._support.phrases import OPEN_CALLS, quote_line
from contextguard_adk._turn.room import Room
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section

OPEN_RATIO = 0.05
"""The list takes at most this part of `Budgets.working_tokens`."""

MAX_VALUE_BYTES = 80
"""An argument takes at most this in a line."""

MAX_LINE_BYTES = 4 * MAX_VALUE_BYTES
"""A call takes at most this in a line."""

MAX_READ_CHARS = 1_000
"""Only this many characters of an argument are read; its excerpt is far shorter."""

_LINE_END = ": no answer yet"
"""The end of each line that stands for a call."""


class _Call(NamedTuple):
    """A call of a content.

    Attributes:
        part: The part with the call, as the request has it.
        told: The redacted call, for the list.
    """

    part: types.Part
    told: types.FunctionCall


class OpenCalls(Section):
    """Lists the calls that were open when the summary was written.

    The list stays until the next compaction. Once a call has an answer, ADK shows the
    call and the answer after the summary, and the heading says so.
    """

    name = "open"
    label = "the list of calls that had no answer yet"
    heading = OPEN_CALLS
    goes_at = None
    window_ratio = OPEN_RATIO

    def write(self, turn: Turn, covered: frozenset[int], known: str, room: Room) -> str:
        """Returns a line for each open call that the summary replaces, newest first.

        They are the open calls of the covered messages. If the session is loaded in
        part, the calls of the list before follow that no loaded message has.
        """
        history = turn.history
        lines = list(_find_open(history, covered))
        lines += _find_missing(history, known)
        if not lines:
            return ""

        # The newest call, which comes first, is listed even without room.
        shown_lines = lines[:1]
        for line in lines[1:]:
            if not room.holds("\n".join([*shown_lines, line])):
                left_count = len(lines) - len(shown_lines)
                shown_lines.append(f"- … and {left_count} older ones")
                break
            shown_lines.append(line)
        return "\n".join([OPEN_CALLS, *shown_lines])


def _find_missing(history: History, known: str) -> list[str]:
    """Returns the lines of the last list whose calls the loaded messages do not have.

    A session that is loaded in part may lack the messages of these calls. A line that
    only counts older calls is left out.

    Args:
        history: The history of the request.
        known: The last list; "" for none.
    """
    if not known:
        return []

    loaded_lines = set[str]()
    for content in history.told:
        for part in parts_of(content):
            if part.function_call:
                loaded_lines.add(_write_line(part.function_call))

    return [
        line
        for line in known.splitlines()
        if line.endswith(_LINE_END) and line not in loaded_lines
    ]


def _find_open(history: History, covered: Collection[int]) -> Iterator[str]:
    """Yields the line of each open call of the covered contents, the newest first.

    A content may have several calls, of which some have an answer. The events tell
    which calls of the content are open.
    """
    # The ids of the open calls by handle, oldest first. Equal calls have the same
    # handle, but each call has its own id.
    unused_ids: dict[str, list[str]] = {}
    for call_id, part in history.calls.open.items():
        unused_ids.setdefault(handle_of(part), []).append(call_id)

    for index in sorted(history.pairs.open_calls, reverse=True):
        # The calls of a content that is not covered also use up their ids. Otherwise an
        # older equal call would get these ids.
        lines = _list_by_id(history, index, unused_ids)
        if index not in covered:
            continue

        # The list is empty if no open call of the events equals a call of the content:
        # another plugin has rewritten the calls, or the model has used an id twice.
        yield from lines or _list_unanswered(history, index)


def _list_by_id(
    history: History, index: int, unused_ids: dict[str, list[str]]
) -> list[str]:
    """Lists the calls of a content that are open by the events, the newest first.

    Args:
        history: The history of the request.
        index: The index of the content.
        unused_ids: The ids of the open calls that are not listed yet, by handle, oldest
            first. The ids of the calls that are listed here are removed.
    """
    lines: list[str] = []
    for call in reversed(_read_calls(history, index)):
        ids = unused_ids.get(handle_of(call.part))
        if ids:
            ids.pop()
            lines.append(_write_line(call.told))
    return lines


def _list_unanswered(history: History, index: int) -> list[str]:
    """Lists the calls of a content that no content answers, the newest first."""
    # Calls may be equal, so the objects are compared. Both come from
    # `history.contents`.
    unanswered_objects = {
        id(call) for call_index, call in history.pairs.unanswered if call_index == index
    }
    return [
        _write_line(call.told)
        for call in reversed(_read_calls(history, index))
        if id(call.part.function_call) in unanswered_objects
    ]


def _read_calls(history: History, index: int) -> list[_Call]:
    """Returns the calls of a content, in their order."""
    parts = parts_of(history.contents[index])
    told_parts = parts_of(history.told[index])
    return [
        _Call(part, told.function_call)
        for part, told in zip(parts, told_parts, strict=True)
        if part.function_call and told.function_call
    ]


def _write_line(call: types.FunctionCall) -> str:
    """Writes the line of a call, such as "- approve(sum=12): no answer yet"."""
    args = []
    for name, value in (call.args or {}).items():
        text = value if isinstance(value, str) else payload_text(value)
        value_line = quote_line(text[:MAX_READ_CHARS])
        args.append(f"{quote_line(name)}={excerpt(value_line, MAX_VALUE_BYTES)}")

    call_text = f"{quote_line(call.name or '?')}({', '.join(args)})"
    return f"- {excerpt(call_text, MAX_LINE_BYTES)}{_LINE_END}"
