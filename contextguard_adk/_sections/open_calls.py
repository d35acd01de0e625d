"""The list of calls without an answer among the messages that a summary replaces.

A call without an answer is open: a person has to approve the call, or the tool runs
long. The id of a call is read from the session's events. The contents of a request lack
the ids that ADK has made, because ADK does not show these ids to a model. Covered
messages are those that the summary replaces.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import NamedTuple

from google.genai import types
from pydantic import JsonValue

from contextguard_adk._history.contents import parts_of
from contextguard_adk._history.fingerprints import handle_of
from contextguard_adk._history.history import History
from contextguard_adk._history.text import payload_text
from contextguard_adk._measuring.budgets import excerpt
from contextguard_adk._support.phrases import OPEN_CALLS, quote_line, quote_stored
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

_HANDLE_MARK = "#"
"""If no id of a call is known, this mark and the handle of the call are its id.

The handle is a hash of the call.
"""


class _Listed(NamedTuple):
    """An open call in the list.

    Attributes:
        call_id: The id of the call, or `_HANDLE_MARK` and the handle of the call. "" if
            the line stands for no call, but counts the calls that have no room.
        line: The line of the list.
    """

    call_id: str
    line: str


class _Call(NamedTuple):
    """A call of a content.

    Attributes:
        part: The part with the call, as the request has it.
        told: The redacted call, for the list.
    """

    part: types.Part
    told: types.FunctionCall


class OpenCalls(Section):
    """Lists the open calls that the summary replaces.

    The stored value is a list of pairs, the newest call first: `_Listed.call_id` and
    `_Listed.line`. Once a call has an answer, ADK shows the call and the answer after
    the summary. So the line of the call is not rendered any more.
    """

    name = "open"
    label = "the list of calls that have no answer yet"
    heading = OPEN_CALLS
    goes_at = None

    def write(
        self, turn: Turn, covered: frozenset[int], known: JsonValue, room_tokens: int
    ) -> JsonValue:
        """Returns the pairs of the open calls that the summary replaces.

        They are the open calls of the covered messages, and after them the calls of the
        last stored list whose events are not loaded any more.
        """
        history = turn.history
        lines = {listed.call_id: listed.line for listed in _find_open(history, covered)}
        for call_id, line in _read_listed(known):
            # A line is kept if the event of its call is not loaded. Only an id can show
            # this, so lines without an id are not kept.
            has_id = call_id != "" and not call_id.startswith(_HANDLE_MARK)
            if has_id and call_id not in history.calls.ids:
                lines[call_id] = line

        left_tokens = int(turn.budgets.working_tokens * OPEN_RATIO)
        left_bytes = 4 * room_tokens  # A token of this room counts as four bytes.
        pairs: list[JsonValue] = []
        for call_id, line in lines.items():
            stored = json.dumps([call_id, line], ensure_ascii=False)
            left_bytes -= len(stored.encode())
            left_tokens -= turn.count(line)
            is_full = left_tokens < 0 or left_bytes < 0
            # The newest call, which comes first, is listed even without room.
            if is_full and pairs:
                pairs.append(["", f"- … and {len(lines) - len(pairs)} older ones"])
                break
            pairs.append([call_id, line])
        return pairs

    def render(
        self, value: JsonValue, history: History, covered: Collection[int]
    ) -> str:
        """Returns the lines of the calls that are still open; "" without any line."""
        lines = [
            quote_stored(listed.line)
            for listed in _read_listed(value)
            if _is_open(history, listed.call_id)
        ]
        return "\n".join([self.heading, *lines]) if lines else ""


def _read_listed(value: JsonValue) -> list[_Listed]:
    """Reads a stored value, which anybody may have written to session state.

    Items that are no pair of texts are left out.
    """
    pairs = value if isinstance(value, list) else []
    listed: list[_Listed] = []
    for pair in pairs:
        match pair:
            case [str(call_id), str(line)]:
                listed.append(_Listed(call_id, line))
    return listed


def _find_open(history: History, covered: Collection[int]) -> Iterator[_Listed]:
    """Yields each open call of the covered contents, the newest first.

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
        listed = _list_by_id(history, index, unused_ids)
        if index not in covered:
            continue

        # The list is empty if no open call of the events equals a call of the content:
        # another plugin has rewritten the calls, or the model has used an id twice.
        yield from listed or _list_by_handle(history, index)


def _list_by_id(
    history: History, index: int, unused_ids: dict[str, list[str]]
) -> list[_Listed]:
    """Lists the calls of a content that are open by the events, the newest first.

    Args:
        history: The history of the request.
        index: The index of the content.
        unused_ids: The ids of the open calls that are not listed yet, by handle, oldest
            first. The ids of the calls that are listed here are removed.
    """
    listed: list[_Listed] = []
    for call in reversed(_read_calls(history, index)):
        ids = unused_ids.get(handle_of(call.part))
        if ids:
            newest_id = ids.pop()
            listed.append(_Listed(newest_id, _write_line(call.told)))
    return listed


def _list_by_handle(history: History, index: int) -> list[_Listed]:
    """Lists the calls of a content that no content answers, the newest first."""
    # Calls may be equal, so the objects are compared. Both come from
    # `history.contents`.
    unanswered_objects = {
        id(call) for call_index, call in history.pairs.unanswered if call_index == index
    }
    return [
        _Listed(_HANDLE_MARK + handle_of(call.part), _write_line(call.told))
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


def _is_open(history: History, call_id: str) -> bool:
    """Whether a line of the list is still to be shown: its call has no answer yet.

    Args:
        history: The history of the request.
        call_id: See `_Listed.call_id`. A call whose event is not loaded counts as open.
            So does "", because no event has this id.
    """
    if not call_id.startswith(_HANDLE_MARK):
        is_loaded = call_id in history.calls.ids
        return call_id in history.calls.open or not is_loaded

    # No event has a call with this handle, so the contents tell whether it is open.
    open_handles = {
        _HANDLE_MARK + handle_of(part)
        for index in history.pairs.open_calls
        for part in parts_of(history.contents[index])
        if part.function_call
    }
    return call_id in open_handles


def _write_line(call: types.FunctionCall) -> str:
    """Writes the line of a call, such as "- approve(sum=12): no answer yet"."""
    args = []
    for name, value in (call.args or {}).items():
        text = value if isinstance(value, str) else payload_text(value)
        value_line = quote_line(text[:MAX_READ_CHARS])
        args.append(f"{quote_line(name)}={excerpt(value_line, MAX_VALUE_BYTES)}")

    call_text = f"{quote_line(call.name or '?')}({', '.join(args)})"
    return f"- {excerpt(call_text, MAX_LINE_BYTES)}: no answer yet"
