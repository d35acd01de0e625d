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

_HANDLE = "#"  # Before a handle, which stands for an id that is not known.


class OpenCalls(Section):
    """Lists the calls that the summary replaces and that have no answer yet.

    The value is a list of pairs, the newest call first: its id in the session's events,
    and the line that tells of it. Once its answer is there, ADK shows both again, and
    its line goes.
    """

    name = "open"
    label = "the list of calls that have no answer yet"
    heading = OPEN_CALLS
    goes_at = None

    def write(
        self, turn: Turn, covered: frozenset[int], known: JsonValue, room_tokens: int
    ) -> JsonValue:
        """Lists what is open among the covered messages, and what was listed before."""
        history = turn.history
        listed = dict(_find_open(history, covered))
        for call_id, line in _read_pairs(known):
            is_known = call_id in history.calls.ids or call_id.startswith(_HANDLE)
            if call_id and not is_known:  # It is not loaded.
                listed[call_id] = line

        line_tokens = int(turn.budgets.working_tokens * OPEN_RATIO)
        stored_bytes = 4 * room_tokens
        pairs: list[JsonValue] = []
        for call_id, line in listed.items():
            line_tokens -= turn.count(line)
            stored_bytes -= len(
                json.dumps([call_id, line], ensure_ascii=False).encode()
            )
            if min(line_tokens, stored_bytes) < 0 and pairs:
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

    ADK takes its own ids out of what a model is shown: events tell them, and which of
    several calls in one step has its answer.
    """
    open_ids: dict[str, list[str]] = {}
    for call_id, part in history.calls.open.items():
        open_ids.setdefault(handle_of(part), []).append(call_id)

    for index in sorted(history.pairs.open_calls, reverse=True):
        # A call that is not covered takes its id, too.
        found = _take_ids(history, index, open_ids) or _take_handles(history, index)
        if index in covered:
            yield from found


def _take_ids(
    history: History, index: int, open_ids: dict[str, list[str]]
) -> list[tuple[str, str]]:
    """Takes the ids of a content's open calls, and writes their lines."""
    found: list[tuple[str, str]] = []
    for part, call in reversed(_list_calls(history, index)):
        ids = open_ids.get(handle_of(part))
        if ids:
            found.append((ids.pop(), _write_line(call)))
    return found


def _take_handles(history: History, index: int) -> list[tuple[str, str]]:
    """Names by their handles calls that no event says in the same words.

    Another plugin has rewritten them, or their id came again.
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
    """The parts of a content that are calls, and each call as it may be told."""
    parts = parts_of(history.contents[index])
    told = parts_of(history.told[index])
    return [
        (part, shown.function_call)
        for part, shown in zip(parts, told, strict=True)
        if part.function_call and shown.function_call
    ]


def _is_open(history: History, call_id: str) -> bool:
    """Whether a call that is listed has no answer, as far as is loaded."""
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
