"""The values that the left-out part held, as ids, numbers, paths, and their sources."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.genai import types
from pydantic import JsonValue

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import content_text, has_tool, payload_of
from contextguard_adk._history.extraction import (
    hide_secrets,
    read_values,
    without_secrets,
)
from contextguard_adk._history.history import History
from contextguard_adk._history.text import payload_text, walk_parts
from contextguard_adk._measuring.budgets import excerpt
from contextguard_adk._measuring.tokens import text_bytes
from contextguard_adk._runtime.memory import BoundedDict
from contextguard_adk._support.phrases import VALUES, quote_line, quote_stored
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section

VALUES_RATIO = 0.10
ROOM_RATIO = 0.25
COVERED_RATIO = 0.25
"""What the list may take at most: of the window, of what instruction and tools leave
below the threshold, of the calls and results that are left out."""
MAX_VALUES_TOKENS = 8_000
MAX_STORED_BYTES = 4 * 1024  # In session state, for a history that is loaded in part.
MAX_LABEL_BYTES = 60
MAX_READ_BYTES = 400_000  # Of what is older nothing is read but calls.
REUSE_WEIGHT = 2.0
RECENCY_WEIGHT = 2.0
CALL_WEIGHT = 1.0
KIN_WEIGHT = 1.0
"""How values are ranked: by use in later calls, age, use in a call, and words that
they share with what calls have used. Chosen on recorded sessions of agents."""

_PIECE = re.compile(r"[A-Za-z][a-z]{2,}|[A-Z]{3,}")
_TEXTS = BoundedDict[Hashable, str](64)


@dataclass
class _Source:
    """A call with its result, or a message, and those of its values that are listed."""

    label: str
    listed: list[str] = field(default_factory=list)


@dataclass
class _Value:
    """A value: its kind, where it stood last, how often calls used it."""

    kind: float
    source: _Source
    place: int = 0
    calls: int = 0
    reuses: int = 0


class Values(Section):
    """Lists ids, numbers, paths and names of what the summary replaces.

    The list follows from the covered contents, so that session state holds its size and
    4 KB of it only, which stand in where the history is loaded in part.
    """

    name = "values"
    label = "the list of values"
    heading = VALUES
    goes_at = 3
    shows_tool_use = True

    def write(
        self, turn: Turn, covered: frozenset[int], known: JsonValue, room_tokens: int
    ) -> JsonValue:
        """Returns how long the list is to be, and the newest lines of it."""
        history = turn.history
        older = ""
        new = covered
        if history.is_partial and not history.is_rewound:  # What is not new is stored.
            older = _read(known)["text"]
            new = covered - history.covered
        tools = filter(has_tool, [history.shown[index] for index in new])
        budget_tokens = min(
            turn.budgets.working_tokens * VALUES_RATIO,
            turn.room_tokens * ROOM_RATIO,
            MAX_VALUES_TOKENS,
        )
        most_bytes = budget_tokens * 3 / max(1.0, turn.correction)
        stored_bytes = min(MAX_STORED_BYTES, 2 * room_tokens, int(most_bytes))
        told_tokens = turn.measure_alone([*tools]) * COVERED_RATIO
        budget_tokens = min(budget_tokens, told_tokens)
        max_bytes = int(budget_tokens * 3 / max(1.0, turn.correction))
        text = list_values(history, new, max_bytes)
        if (tokens := turn.count(text)) > budget_tokens:
            max_bytes = int(max_bytes * budget_tokens / tokens)
            text = list_values(history, new, max_bytes)
        older = _newest_lines(older, stored_bytes // 2)
        newer = _newest_lines(text.partition("\n")[2], stored_bytes - len(older))
        stored = "\n".join(filter(None, (older, newer)))
        value: JsonValue = {"bytes": max_bytes, "count": len(covered), "text": stored}
        return value if stored or text else None

    def render(
        self, value: JsonValue, history: History, covered: Collection[int]
    ) -> str:
        """Returns the list anew, or what is stored of it where contents are missing."""
        known = _read(value)
        is_whole = len(covered) >= known["count"] and not history.loads_part
        if is_whole or history.is_rewound:
            return list_values(history, frozenset(covered), known["bytes"])
        return f"{VALUES}\n{quote_stored(known['text'])}" if known["text"] else ""


def _read(value: JsonValue) -> dict[str, Any]:
    """Reads what is stored, which may be anything."""
    stored = value if isinstance(value, dict) else {}
    known: dict[str, Any] = {"bytes": 0, "count": 0, "text": ""}
    for name in known:
        found = stored.get(name)
        if isinstance(found, int) and isinstance(known[name], int):
            known[name] = min(max(0, found), 4 * MAX_VALUES_TOKENS)
        elif isinstance(found, str) and isinstance(known[name], str):
            known[name] = found[:MAX_STORED_BYTES]
    return known


def _newest_lines(text: str, max_bytes: int) -> str:
    """The newest whole lines that fit, escapes of JSON included."""
    kept: list[str] = []
    for line in reversed(text.splitlines()):
        max_bytes -= text_bytes(json.dumps(line, ensure_ascii=False))
        if max_bytes < 0:
            break
        kept.insert(0, line)
    return "\n".join(kept)


def list_values(history: History, covered: Collection[int], max_bytes: int) -> str:
    """Lists the values of some contents with their sources; "" for none.

    It depends on these contents and the size alone.
    """
    key = tuple(history.spell(history.told[i]) for i in sorted(covered)), max_bytes
    if (text := _TEXTS.get(key)) is None:
        values, sources = _gather(history, sorted(covered))
        text = _write_list(values, sources, max_bytes)
    _TEXTS[key] = text  # The newest stay.
    return text


def _gather(
    history: History, indexes: Sequence[int]
) -> tuple[dict[str, _Value], list[_Source]]:
    values: dict[str, _Value] = {}
    sources: dict[Hashable, _Source] = {}
    places = {index: place for place, index in enumerate(indexes, 1)}
    oldest = _find_oldest(history, indexes)
    for number, said in enumerate(walk_parts(history.told, indexes, history.outputs)):
        is_call = said.part.function_call is not None
        tool = said.part.function_call or said.part.function_response
        is_recalled = tool is not None and tool.name == RECALL_TOOL
        if is_recalled or not (is_call or said.index >= oldest):
            continue
        call = said.part.function_call or said.call
        author = "code" if said.part.code_execution_result else said.author
        source = sources.setdefault(
            id(call) if call else (said.index, number),
            _Source(_label(call) if call else author),
        )
        found = read_values(payload_of(said.part) or said.text)
        original = history.original(said.index)
        if original is not history.contents[said.index]:
            # What another plugin adds may be new on each call, as the time is.
            known = content_text(original)
            found = [each for each in found if each[0] in known]
        for text, kind in found:
            value = values.setdefault(text, _Value(kind, source))
            value.reuses += is_call and value.place > 0
            value.calls += is_call
            if value.place != places[said.index]:
                value.place = places[said.index]
                value.source = source
    return values, list(sources.values())


def _find_oldest(history: History, indexes: Sequence[int]) -> int:
    """The oldest content that is read: a long list holds up the event loop."""
    left_bytes = MAX_READ_BYTES
    oldest = len(history.contents)
    for index in reversed(indexes):
        left_bytes -= 4 * history.memo.estimate_tokens([history.contents[index]])
        if left_bytes < 0:
            break
        oldest = index
    return oldest


def _label(call: types.FunctionCall) -> str:
    args = without_secrets(call.args or {})
    said = ", ".join(
        item if isinstance(item, str) else payload_text(item) for item in args.values()
    )
    # Of long ones nothing but the beginning: half a credential has no shape.
    is_long = len(said) > 4_000
    said = " ".join(hide_secrets(said[:4_000]).split())
    said = said[:MAX_LABEL_BYTES] if is_long else said
    return f"{call.name}({excerpt(said, MAX_LABEL_BYTES)})"


def _write_list(
    values: dict[str, _Value], sources: Sequence[_Source], max_bytes: int
) -> str:
    newest = max((value.place for value in values.values()), default=1)
    used = {p for text, value in values.items() if value.calls for p in _pieces(text)}

    def rank(item: tuple[str, _Value]) -> float:
        text, value = item
        pieces = _pieces(text)
        kin = len(pieces & used) / len(pieces) if pieces else 0.3
        return (
            value.kind
            + REUSE_WEIGHT * math.log1p(value.reuses)
            + RECENCY_WEIGHT * value.place / newest
            + CALL_WEIGHT * bool(value.calls)
            + KIN_WEIGHT * kin
        )

    room = max_bytes - len(VALUES)
    written = "\n"
    shown: set[int] = set()
    for text, value in sorted(values.items(), key=rank, reverse=True):
        if room < 12:
            break
        source = value.source
        is_new = id(source) not in shown
        cost = text_bytes(text) + 2
        cost += text_bytes(source.label) + 5 if is_new else 0
        if cost > room or (text in written and _stands_in(text, written)):
            continue
        room -= cost
        if is_new:
            shown.add(id(source))
            written += source.label + "\n"
        if not _stands_in(text, source.label):
            source.listed.append(text)
            written += text + "\n"
    lines = [
        f"- {source.label}: {', '.join(source.listed)}".removesuffix(": ")
        for source in sources
        if id(source) in shown
    ]
    return "\n".join([VALUES, *map(quote_line, lines)]) if lines else ""


def _pieces(text: str) -> set[str]:
    return {piece.lower() for piece in _PIECE.findall(text)}


def _stands_in(value: str, text: str) -> bool:
    """Whether a value stands in a text by itself, not within a longer word."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None
