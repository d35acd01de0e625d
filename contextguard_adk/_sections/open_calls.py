"""The list of compacted calls that have no answer yet.

Such calls are open: a person has to approve one, or a tool runs long.
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

OPEN_RATIO = 0.05  # Of the window, for the list.
MAX_VALUE_BYTES = 80  # Of one argument.
MAX_READ_CHARS = 1_000  # Of one argument; the rest cannot be in the excerpt.

_HANDLE = "#"
"""Before a handle, a hash of the call, in place of an id that is not known."""


class _Listed(NamedTuple):
    """An open call in the list.

    Attributes:
        call_id: Its id in the session's events, or a handle after a mark; "" for the
            last line, which counts the calls that have no room.
        line: The line on it.
    """

    call_id: str
    line: str


class _Call(NamedTuple):
    """A call as the session has it, and as the model is told of it."""

    part: types.Part
    told: types.FunctionCall


class OpenCalls(Section):
    """Lists the open calls that the summary replaces.

    The stored value is a list of pairs, the newest call first: the id of the call in
    the session's events, and a line on it. Once the call has an answer, ADK shows call
    and answer again, and the line goes.
    """

    name = "open"
    label = "the list of calls that have no answer yet"
    heading = OPEN_CALLS
    goes_at = None

    def write(
        self, turn: Turn, covered: frozenset[int], known: JsonValue, room_tokens: int
    ) -> JsonValue:
        """Lists open calls of the covered messages, then those that are not loaded."""
        history = turn.history
        lines = {call.call_id: call.line for call in _find_open(history, covered)}
        for call_id, line in _read_listed(known):
            is_loaded = call_id in history.calls.ids or call_id.startswith(_HANDLE)
            if call_id and not is_loaded:
                lines[call_id] = line

        # The newest call is listed in any case, however little room there is.
        left_tokens = int(turn.budgets.working_tokens * OPEN_RATIO)
        left_bytes = 4 * room_tokens
        pairs: list[JsonValue] = []
        for call_id, line in lines.items():
            stored = json.dumps([call_id, line], ensure_ascii=False)
            left_bytes -= len(stored.encode())
            left_tokens -= turn.count(line)
            is_full = left_tokens < 0 or left_bytes < 0
            if is_full and pairs:
                pairs.append(["", f"- … and {len(lines) - len(pairs)} older ones"])
                break
            pairs.append([call_id, line])
        return pairs

    def render(
        self, value: JsonValue, history: History, covered: Collection[int]
    ) -> str:
        """Returns the lines of the calls that are still open."""
        lines = [
            quote_stored(listed.line)
            for listed in _read_listed(value)
            if _is_open(history, listed.call_id)
        ]
        return "\n".join([self.heading, *lines]) if lines else ""


def _read_listed(value: JsonValue) -> list[_Listed]:
    """Reads a stored value; pairs that are malformed are left out."""
    listed: list[_Listed] = []
    for pair in value if isinstance(value, list) else ():
        match pair:
            case [str(call_id), str(line)]:
                listed.append(_Listed(call_id, line))
    return listed


def _find_open(history: History, covered: Collection[int]) -> Iterator[_Listed]:
    """Yields each covered call that is open, newest first.

    A model is not shown ids that ADK has made. The session's events have them, and tell
    which of several calls in one step has its answer.
    """
    # Equal calls have one handle, and each of them an id of its own.
    open_ids: dict[str, list[str]] = {}
    for call_id, part in history.calls.open.items():
        open_ids.setdefault(handle_of(part), []).append(call_id)

    for index in sorted(history.pairs.open_calls, reverse=True):
        # Calls that are not covered take their ids as well, so that no other gets them.
        listed = _take_ids(history, index, open_ids) or _list_handles(history, index)
        if index in covered:
            yield from listed


def _take_ids(
    history: History, index: int, open_ids: dict[str, list[str]]
) -> list[_Listed]:
    """Takes the ids of one content's open calls out of `open_ids`, and lists the calls.

    Args:
        history: The history of the request.
        index: The index of the content.
        open_ids: The ids of all open calls that are not taken yet, by handle.
    """
    listed: list[_Listed] = []
    for call in reversed(_read_calls(history, index)):
        ids = open_ids.get(handle_of(call.part))
        if ids:
            listed.append(_Listed(ids.pop(), _write_line(call.told)))
    return listed


def _list_handles(history: History, index: int) -> list[_Listed]:
    """Lists one content's open calls that no event has, with handles for ids.

    Another plugin has rewritten these calls, or their id was used again.
    """
    unanswered = [
        call for call_index, call in history.pairs.unanswered if call_index == index
    ]
    return [
        _Listed(_HANDLE + handle_of(call.part), _write_line(call.told))
        for call in reversed(_read_calls(history, index))
        if any(call.part.function_call is each for each in unanswered)
    ]


def _read_calls(history: History, index: int) -> list[_Call]:
    """Returns the calls of one content, in their order."""
    parts = parts_of(history.contents[index])
    told_parts = parts_of(history.told[index])
    return [
        _Call(part, told.function_call)
        for part, told in zip(parts, told_parts, strict=True)
        if part.function_call and told.function_call
    ]


def _is_open(history: History, call_id: str) -> bool:
    """Whether a listed call has no answer among the events that are loaded.

    A call that is not loaded counts as open.
    """
    if not call_id.startswith(_HANDLE):
        calls = history.calls
        return call_id in calls.open or call_id not in calls.ids

    open_handles = {
        _HANDLE + handle_of(part)
        for index in history.pairs.open_calls
        for part in parts_of(history.contents[index])
        if part.function_call
    }
    return call_id in open_handles


def _write_line(call: types.FunctionCall) -> str:
    """Writes the line on a call, as "- approve(sum=12): no answer yet"."""
    args = []
    for name, value in (call.args or {}).items():
        text = value if isinstance(value, str) else payload_text(value)
        shown = excerpt(quote_line(text[:MAX_READ_CHARS]), MAX_VALUE_BYTES)
        args.append(f"{quote_line(name)}={shown}")

    made = f"{quote_line(call.name or '?')}({', '.join(args)})"
    return f"- {excerpt(made, 4 * MAX_VALUE_BYTES)}: no answer yet"
