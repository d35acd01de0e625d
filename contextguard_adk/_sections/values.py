"""The list of values in the messages that a summary replaces.

A value is a text that names something exactly: an id, a number, a path, a name. The
list says with each value where it stood.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from google.genai import types
from pydantic import JsonValue

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import content_text, has_tool, payload_of
from contextguard_adk._history.extraction import (
    Found,
    hide_secrets,
    read_values,
    without_secrets,
)
from contextguard_adk._history.history import History
from contextguard_adk._history.text import Said, payload_text, walk_parts
from contextguard_adk._measuring.budgets import excerpt
from contextguard_adk._measuring.tokens import text_bytes
from contextguard_adk._runtime.memory import BoundedDict
from contextguard_adk._support.phrases import VALUES, quote_line, quote_stored
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section

VALUES_RATIO = 0.10  # Of the window.
ROOM_RATIO = 0.25  # Of the room that instruction and tools leave below the threshold.
COVERED_RATIO = 0.25  # Of the calls and results that the summary replaces.
MAX_VALUES_TOKENS = 8_000
"""The list takes the least of these four."""

MAX_STORED_BYTES = 4 * 1024  # In session state, for a history that is loaded in part.
MAX_LABEL_BYTES = 60
MAX_LABEL_CHARS = 4_000  # Of the arguments of a call; the rest is not read.
MAX_READ_BYTES = 400_000  # Of messages older than that, only calls are read.

REUSE_WEIGHT = 2.0  # Calls have used it that came after it.
RECENCY_WEIGHT = 2.0  # It stands in a newer message.
CALL_WEIGHT = 1.0  # A call has used it.
KIN_WEIGHT = 1.0  # It shares words with values that calls have used.
"""How values are ranked. Chosen on recorded sessions of agents."""

_PIECE = re.compile(r"[A-Za-z][a-z]{2,}|[A-Z]{3,}")
_TEXTS = BoundedDict[Hashable, str](64)  # Lists that were written before.


@dataclass
class _Source:
    """A call with its result, or a message.

    `listed` are those of its values that the list names beside its label.
    """

    label: str
    is_shown: bool = False
    listed: list[str] = field(default_factory=list)


@dataclass
class _Value:
    """A value: its kind, the message and the source where it stood last."""

    kind: float
    source: _Source
    place: int = 0
    call_count: int = 0
    reuse_count: int = 0

    def count(self, source: _Source, place: int, is_call: bool) -> None:
        """Counts one more use; the newest message is its source."""
        if is_call:
            self.call_count += 1
            if self.place > 0:
                self.reuse_count += 1

        if self.place != place:
            self.place = place
            self.source = source


class _Known(NamedTuple):
    """A stored value: the size of the list, of how many messages, its newest lines."""

    max_bytes: int
    covered_count: int
    text: str


class Values(Section):
    """Lists ids, numbers, paths and names in the messages that the summary replaces.

    The list is written anew from these messages each time, so session state holds no
    more than its size, and 4 KB of it for a history that is loaded in part.
    """

    name = "values"
    label = "the list of values"
    heading = VALUES
    goes_at = 3
    shows_tool_use = True

    def write(
        self, turn: Turn, covered: frozenset[int], known: JsonValue, room_tokens: int
    ) -> JsonValue:
        """Returns the size of the list, and its newest lines."""
        history = turn.history
        older_lines = ""
        new_indexes = covered
        if history.is_partial and not history.is_rewound:
            # Of messages that are not loaded, the lines are stored.
            older_lines = _read(known).text
            new_indexes = covered - history.covered

        # The list may take a part of the window, and a part of the results themselves.
        contents = [history.shown[index] for index in new_indexes]
        with_tools = [content for content in contents if has_tool(content)]
        most_tokens = min(
            turn.budgets.working_tokens * VALUES_RATIO,
            turn.room_tokens * ROOM_RATIO,
            MAX_VALUES_TOKENS,
        )
        budget_tokens = min(most_tokens, turn.measure_alone(with_tools) * COVERED_RATIO)

        # Three bytes a token are a first guess. What it gives is counted, and scaled.
        correction = max(1.0, turn.correction)
        max_bytes = int(budget_tokens * 3 / correction)
        text = list_values(history, new_indexes, max_bytes)
        tokens = turn.count(text)
        if tokens > budget_tokens:
            max_bytes = int(max_bytes * budget_tokens / tokens)
            text = list_values(history, new_indexes, max_bytes)

        # Session state holds the newest lines, for when less of the history is loaded.
        most_bytes = int(most_tokens * 3 / correction)
        stored_bytes = min(MAX_STORED_BYTES, 2 * room_tokens, most_bytes)
        _, _, lines = text.partition("\n")
        stored_older = _newest_lines(older_lines, stored_bytes // 2)
        stored_newer = _newest_lines(lines, stored_bytes - len(stored_older))
        stored = "\n".join(each for each in (stored_older, stored_newer) if each)
        if not (stored or text):
            return None
        return {"bytes": max_bytes, "count": len(covered), "text": stored}

    def render(
        self, value: JsonValue, history: History, covered: Collection[int]
    ) -> str:
        """Returns the list anew, or its stored lines where messages are missing."""
        known = _read(value)
        is_whole = len(covered) >= known.covered_count and not history.loads_part
        if is_whole or history.is_rewound:
            return list_values(history, frozenset(covered), known.max_bytes)
        return f"{VALUES}\n{quote_stored(known.text)}" if known.text else ""


def _read(value: JsonValue) -> _Known:
    """Reads a stored value, which may be anybody's."""
    stored = value if isinstance(value, dict) else {}
    text = stored.get("text")
    return _Known(
        max_bytes=_read_number(stored.get("bytes")),
        covered_count=_read_number(stored.get("count")),
        text=text[:MAX_STORED_BYTES] if isinstance(text, str) else "",
    )


def _read_number(value: JsonValue) -> int:
    return min(max(0, value), 4 * MAX_VALUES_TOKENS) if isinstance(value, int) else 0


def _newest_lines(text: str, max_bytes: int) -> str:
    """Returns the newest whole lines that fit into session state as JSON."""
    kept: list[str] = []
    left_bytes = max_bytes
    for line in reversed(text.splitlines()):
        left_bytes -= text_bytes(json.dumps(line, ensure_ascii=False))
        if left_bytes < 0:
            break
        kept.append(line)
    return "\n".join(reversed(kept))


def list_values(history: History, covered: Collection[int], max_bytes: int) -> str:
    """Lists the values of some messages with their sources; "" for none.

    The list depends on these messages and the size alone.
    """
    indexes = sorted(covered)
    spelled = tuple(history.spell(history.told[index]) for index in indexes)
    key = (spelled, max_bytes)
    text = _TEXTS.get(key)
    if text is None:
        values, sources = _gather(history, indexes)
        _choose(values, max_bytes - len(VALUES))
        text = _write_list(sources)
    _TEXTS[key] = text  # The newest stay.
    return text


def _gather(
    history: History, indexes: Sequence[int]
) -> tuple[dict[str, _Value], list[_Source]]:
    """Finds the values of some messages, and all sources, the oldest first."""
    values: dict[str, _Value] = {}
    sources: dict[Hashable, _Source] = {}
    places = {index: place for place, index in enumerate(indexes, 1)}
    oldest = _find_oldest(history, indexes)

    for number, said in enumerate(walk_parts(history.told, indexes, history.outputs)):
        is_call = said.part.function_call is not None
        is_read = is_call or said.index >= oldest
        tool = said.part.function_call or said.part.function_response
        if not is_read or (tool and tool.name == RECALL_TOOL):
            continue

        # A call and its result are one source.
        call = said.part.function_call or said.call
        key = id(call) if call else (said.index, number)
        if key not in sources:
            sources[key] = _Source(_label_source(said, call))

        for text, kind in _read_part(history, said):
            value = values.setdefault(text, _Value(kind, sources[key]))
            value.count(sources[key], places[said.index], is_call)
    return values, list(sources.values())


def _find_oldest(history: History, indexes: Sequence[int]) -> int:
    """Finds the oldest message that is read: many would hold up the event loop."""
    left_bytes = MAX_READ_BYTES
    oldest = len(history.contents)
    for index in reversed(indexes):
        left_bytes -= 4 * history.memo.estimate_tokens([history.contents[index]])
        if left_bytes < 0:
            break
        oldest = index
    return oldest


def _read_part(history: History, said: Said) -> Found:
    found = read_values(payload_of(said.part) or said.text)
    original = history.original(said.index)
    if original is history.contents[said.index]:
        return found

    # Text that another plugin adds may be new on each call, as the time is.
    known = content_text(original)
    return [(text, kind) for text, kind in found if text in known]


def _label_source(said: Said, call: types.FunctionCall | None) -> str:
    """Names a tool with the beginning of its arguments, or the author of a message."""
    if call is None:
        return "code" if said.part.code_execution_result else said.author

    args = without_secrets(call.args or {})
    texts = [
        value if isinstance(value, str) else payload_text(value)
        for value in args.values()
    ]
    whole = ", ".join(texts)
    shown = " ".join(hide_secrets(whole[:MAX_LABEL_CHARS]).split())
    if len(whole) > MAX_LABEL_CHARS:
        # No excerpt with its end: half a credential is not found by its shape.
        shown = shown[:MAX_LABEL_BYTES]
    return f"{call.name}({excerpt(shown, MAX_LABEL_BYTES)})"


def _choose(values: dict[str, _Value], max_bytes: int) -> None:
    """Marks the sources, and the values of each, that have room in the list."""
    left_bytes = max_bytes
    written = "\n"
    for text, value in _rank(values):
        if left_bytes < 12:
            break

        source = value.source
        cost_bytes = text_bytes(text) + 2
        if not source.is_shown:
            cost_bytes += text_bytes(source.label) + 5
        if cost_bytes > left_bytes or _stands_in(text, written):
            continue

        left_bytes -= cost_bytes
        if not source.is_shown:
            source.is_shown = True
            written += source.label + "\n"
        if not _stands_in(text, source.label):
            source.listed.append(text)
            written += text + "\n"


def _rank(values: dict[str, _Value]) -> list[tuple[str, _Value]]:
    """Orders values, the most useful first."""
    newest = max((value.place for value in values.values()), default=1)
    used_pieces = set[str]()
    for text, value in values.items():
        if value.call_count:
            used_pieces |= _pieces(text)

    def score(item: tuple[str, _Value]) -> float:
        text, value = item
        pieces = _pieces(text)
        kin = len(pieces & used_pieces) / len(pieces) if pieces else 0.3
        call_score = CALL_WEIGHT if value.call_count else 0.0
        return (
            value.kind
            + REUSE_WEIGHT * math.log1p(value.reuse_count)
            + RECENCY_WEIGHT * value.place / newest
            + call_score
            + KIN_WEIGHT * kin
        )

    return sorted(values.items(), key=score, reverse=True)


def _pieces(text: str) -> set[str]:
    return {piece.lower() for piece in _PIECE.findall(text)}


def _stands_in(value: str, text: str) -> bool:
    """Whether a value stands in a text by itself, not within a longer word."""
    if value not in text:
        return False
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


def _write_list(sources: Sequence[_Source]) -> str:
    """Writes a line for each source that is shown; "" where none is."""
    lines = []
    for source in sources:
        if source.listed:
            lines.append(quote_line(f"- {source.label}: {', '.join(source.listed)}"))
        elif source.is_shown:
            lines.append(quote_line(f"- {source.label}"))
    return "\n".join([VALUES, *lines]) if lines else ""
