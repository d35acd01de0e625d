"""The list of compacted calls that nobody has answered yet."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

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

_HANDLE = "#"
"""Before a handle, a hash of the call, in place of an id that is not known."""


class OpenCalls(Section):
    """Lists the calls that the summary replaces and that have no answer yet.

    The stored value is a list of pairs, the newest call first: the id of the call in
    the session's events, and a line on it. Once the call has an answer, ADK shows both
    again, and the line goes.
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
        listed = dict(_find_open(history, covered))
        for call_id, line in _read_pairs(known):
            is_loaded = call_id in history.calls.ids or call_id.startswith(_HANDLE)
            if call_id and not is_loaded:
                listed[call_id] = line

        left_tokens = int(turn.budgets.working_tokens * OPEN_RATIO)
        left_bytes = 4 * room_tokens
        pairs: list[JsonValue] = []
        for call_id, line in listed.items():
            stored = json.dumps([call_id, line], ensure_ascii=False)
            left_bytes -= len(stored.encode())
            left_tokens -= turn.count(line)
            is_full = left_tokens < 0 or left_bytes < 0
            if is_full and pairs:
                pairs.append(["", f"- … and {len(listed) - len(pairs)} older ones"])
                break
            pairs.append([call_id, line])
        return pairs

    def render(
        self, value: JsonValue, history: History, covered: Collection[int]
    ) -> str:
        """Returns the lines of the calls that are still open."""
        pairs = _read_pairs(value)
        lines = [
            quote_stored(line) for call_id, line in pairs if _is_open(history, call_id)
        ]
        return "\n".join([self.heading, *lines]) if lines else ""


def _read_pairs(value: JsonValue) -> list[tuple[str, str]]:
    """Reads a stored value, which may be anybody's."""
    pairs: list[tuple[str, str]] = []
    for pair in value if isinstance(value, list) else ():
        match pair:
            case [str(call_id), str(line)]:
                pairs.append((call_id, line))
    return pairs


def _find_open(history: History, covered: Collection[int]) -> Iterator[tuple[str, str]]:
    """Yields the id and the line of each covered call that is open, newest first.

    A model is not shown ids that ADK has made. The session's events have them, and tell
    which of several calls in one step has its answer.
    """
    open_ids: dict[str, list[str]] = {}
    for call_id, part in history.calls.open.items():
        open_ids.setdefault(handle_of(part), []).append(call_id)

    for index in sorted(history.pairs.open_calls, reverse=True):
        # Calls that are not covered take their ids as well, so that no other gets them.
        found = _take_ids(history, index, open_ids) or _take_handles(history, index)
        if index in covered:
            yield from found


def _take_ids(
    history: History, index: int, open_ids: dict[str, list[str]]
) -> list[tuple[str, str]]:
    """Takes the ids of a content's open calls; returns these with their lines."""
    found: list[tuple[str, str]] = []
    for part, call in reversed(_list_calls(history, index)):
        ids = open_ids.get(handle_of(part))
        if ids:
            found.append((ids.pop(), _write_line(call)))
    return found


def _take_handles(history: History, index: int) -> list[tuple[str, str]]:
    """Returns handles and lines of a content's open calls that no event has.

    Another plugin has rewritten them, or their id was used again.
    """
    unanswered = [call for i, call in history.pairs.unanswered if i == index]
    return [
        (_HANDLE + handle_of(part), _write_line(call))
        for part, call in reversed(_list_calls(history, index))
        if any(part.function_call is each for each in unanswered)
    ]


def _list_calls(
    history: History, index: int
) -> list[tuple[types.Part, types.FunctionCall]]:
    """Returns the parts of a content that are calls, and each call as it is told."""
    parts = parts_of(history.contents[index])
    told = parts_of(history.told[index])
    return [
        (part, shown.function_call)
        for part, shown in zip(parts, told, strict=True)
        if part.function_call and shown.function_call
    ]


def _is_open(history: History, call_id: str) -> bool:
    """Whether a listed call has no answer among the events that are loaded."""
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
    args = []
    for name, value in (call.args or {}).items():
        text = value if isinstance(value, str) else payload_text(value)
        text = excerpt(quote_line(text[:1_000]), MAX_VALUE_BYTES)
        args.append(f"{quote_line(name)}={text}")

    made = f"{quote_line(call.name or '?')}({', '.join(args)})"
    return f"- {excerpt(made, 4 * MAX_VALUE_BYTES)}: no answer yet"
