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
LEAST_COST_BYTES = 12  # With less room left, hardly a value would fit.
MAX_LABEL_BYTES = 60
MAX_LABEL_CHARS = 4_000  # Of the arguments of a call; the rest is not read.
MAX_READ_BYTES = 400_000  # Of messages older than that, only calls are read.

REUSE_WEIGHT = 2.0  # Calls have used it that came after it.
RECENCY_WEIGHT = 2.0  # It stands in a newer message.
CALL_WEIGHT = 1.0  # A call has used it.
KIN_WEIGHT = 1.0  # It shares words with values that calls have used.
KIN_WITHOUT_WORDS = 0.3  # The share of such words in a value that has no words.
"""How values are ranked. Chosen on recorded sessions of agents."""

_WORD = re.compile(r"[A-Za-z][a-z]{2,}|[A-Z]{3,}")
_TEXTS = BoundedDict[Hashable, str](64)  # Lists that were written before.


@dataclass
class _Source:
    """A call with its result, or a message.

    Attributes:
        label: Its name in the list: a tool with arguments, or an author.
        is_shown: Whether the list has a line for it.
        listed: Its values that this line names beside the label.
    """

    label: str
    is_shown: bool = False
    listed: list[str] = field(default_factory=list)


@dataclass
class _Value:
    """A value, and its uses.

    Attributes:
        kind_weight: The points of its kind; an id has more than a word.
        source: The source where it stood last.
        message_number: The message of that source, counted from 1; 0 for none yet.
        call_count: How many calls have used it.
        reuse_count: How many of these calls came after it had stood elsewhere.
    """

    kind_weight: float
    source: _Source
    message_number: int = 0
    call_count: int = 0
    reuse_count: int = 0

    def add_use(self, source: _Source, message_number: int, is_call: bool) -> None:
        """Adds one more use; of several in one message the first is the source."""
        if is_call:
            self.call_count += 1
            if self.message_number > 0:
                self.reuse_count += 1

        if self.message_number != message_number:
            self.message_number = message_number
            self.source = source


class _Known(NamedTuple):
    """A stored value of the section.

    Attributes:
        max_bytes: What the list may take.
        covered_count: How many messages the summary replaces.
        text: The newest lines of the list.
    """

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
    """Lists the values of the covered messages with their sources; "" for none.

    The list depends on these messages and `max_bytes` alone, so it is written once.
    """
    indexes = sorted(covered)
    spelled = tuple(
        history.fingerprint_content(history.told[index]) for index in indexes
    )
    key = (spelled, max_bytes)
    text = _TEXTS.get(key)
    if text is None:
        values, sources = _gather(history, indexes)
        _choose(values, max_bytes - len(VALUES))
        text = _write_list(sources)
    _TEXTS[key] = text  # Stored again, it is the newest text: the oldest ones go.
    return text


def _gather(
    history: History, indexes: Sequence[int]
) -> tuple[dict[str, _Value], list[_Source]]:
    """Returns the values of some messages by their text, and all sources.

    The sources stand in the order of the messages.
    """
    values: dict[str, _Value] = {}
    sources: dict[Hashable, _Source] = {}
    message_numbers = {index: number for number, index in enumerate(indexes, 1)}
    oldest_index = _find_oldest_read(history, indexes)

    told_parts = walk_parts(history.told, indexes, history.outputs)
    for part_number, told in enumerate(told_parts):
        # Of messages that are too old, only calls are read.
        is_call = told.part.function_call is not None
        is_read = is_call or told.index >= oldest_index
        tool = told.part.function_call or told.part.function_response
        if not is_read or (tool and tool.name == RECALL_TOOL):
            continue

        # A call and its result are one source; any other part is a source of its own.
        call = told.part.function_call or told.call
        key = id(call) if call else (told.index, part_number)
        if key not in sources:
            sources[key] = _Source(_label_source(told, call))

        for text, kind_weight in _read_part(history, told):
            value = values.setdefault(text, _Value(kind_weight, sources[key]))
            value.add_use(sources[key], message_numbers[told.index], is_call)
    return values, list(sources.values())


def _find_oldest_read(history: History, indexes: Sequence[int]) -> int:
    """Returns the index of the oldest message that is read whole.

    To read all of a long history would hold up the event loop.
    """
    left_bytes = MAX_READ_BYTES
    oldest_index = len(history.contents)  # Not even the newest one is read.
    for index in reversed(indexes):
        left_bytes -= 4 * history.memo.estimate_tokens([history.contents[index]])
        if left_bytes < 0:
            break
        oldest_index = index
    return oldest_index


def _read_part(history: History, told: Said) -> Found:
    """Returns the values of a part, each with the points of its kind.

    Text that another plugin adds is not read: it may be new on each call, as the time.
    """
    found = read_values(payload_of(told.part) or told.text)
    original = history.original(told.index)
    if original is history.contents[told.index]:
        return found

    original_text = content_text(original)
    return [(text, weight) for text, weight in found if text in original_text]


def _label_source(told: Said, call: types.FunctionCall | None) -> str:
    """Names a tool with the beginning of its arguments, or the author of a message.

    An example: "read_file(notes/a.txt, utf-8)".
    """
    if call is None:
        return "code" if told.part.code_execution_result else told.author

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
    """Marks the sources, and lists the values of each, that have room in the list.

    The most useful values are chosen first. A value that stands in a chosen text, such
    as a label, is not repeated.
    """
    left_bytes = max_bytes
    written = "\n"  # All chosen texts.
    for text, value in _rank(values):
        if left_bytes < LEAST_COST_BYTES:
            break

        source = value.source
        cost_bytes = text_bytes(text) + 2  # With ", ".
        if not source.is_shown:
            cost_bytes += text_bytes(source.label) + 5  # With "- ", ": " and a break.
        if cost_bytes > left_bytes or _stands_in(text, written):
            continue

        # The label of a new source may be all that has to be shown of the value.
        left_bytes -= cost_bytes
        if not source.is_shown:
            source.is_shown = True
            written += source.label + "\n"
        if not _stands_in(text, source.label):
            source.listed.append(text)
            written += text + "\n"


def _rank(values: dict[str, _Value]) -> list[tuple[str, _Value]]:
    """Returns the values with their texts, the most useful first."""
    newest_number = max((value.message_number for value in values.values()), default=1)
    used_words = set[str]()
    for text, value in values.items():
        if value.call_count:
            used_words |= _find_words(text)

    def score(item: tuple[str, _Value]) -> float:
        text, value = item
        words = _find_words(text)
        kin_ratio = KIN_WITHOUT_WORDS
        if words:
            kin_ratio = len(words & used_words) / len(words)
        call_score = CALL_WEIGHT if value.call_count else 0.0
        return (
            value.kind_weight
            + REUSE_WEIGHT * math.log1p(value.reuse_count)
            + RECENCY_WEIGHT * value.message_number / newest_number
            + call_score
            + KIN_WEIGHT * kin_ratio
        )

    return sorted(values.items(), key=score, reverse=True)


def _find_words(text: str) -> set[str]:
    """Returns the words of a value: "orderId_42" has "order"."""
    return {word.lower() for word in _WORD.findall(text)}


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
