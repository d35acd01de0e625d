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
from contextguard_adk._history.text import PlacedPart, payload_text, walk_parts
from contextguard_adk._measuring.budgets import excerpt, fit_bytes
from contextguard_adk._measuring.tokens import text_bytes
from contextguard_adk._runtime.memory import BoundedDict
from contextguard_adk._support.phrases import VALUES, quote_line, quote_stored
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section

VALUES_RATIO = 0.10
"""The list takes at most this part of the window."""

ROOM_RATIO = 0.25
"""It takes at most this part of what instruction and tools leave of the threshold."""

COVERED_RATIO = 0.25
"""It takes at most this part of the calls and results that the summary replaces."""

MAX_VALUES_TOKENS = 8_000
MAX_STORED_BYTES = 4 * 1024
"""The most of the list in session state, for a history that is loaded in part."""

LEAST_COST_BYTES = 12
"""With less room left, hardly a value would fit."""

MAX_LABEL_BYTES = 60
MAX_READ_CHARS = 4_000
"""Only so many characters of a call's arguments are read for its label."""

MAX_READ_BYTES = 400_000
"""The newest messages of this size are read whole; of older ones only the calls."""

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
        source: The source of its first use in the newest message that has it.
        newest_number: The number of that message, from 1; 0 before the first use.
        call_count: How many calls have used it.
        reuse_count: How many calls have used it that were not its first use.
    """

    kind_weight: float
    source: _Source
    newest_number: int = 0
    call_count: int = 0
    reuse_count: int = 0

    def use(self, source: _Source, message_number: int, is_call: bool) -> None:
        """Counts one more use. The first use in a message decides the source."""
        is_first_use = self.newest_number == 0
        if is_call:
            self.call_count += 1
        if is_call and not is_first_use:
            self.reuse_count += 1

        if message_number != self.newest_number:
            self.newest_number = message_number
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
        """Returns the size of the list, and its newest lines.

        The result is None where the list has no line, and no older line is stored.
        """
        history = turn.history
        older_lines = ""
        new_indexes = covered
        if history.is_partial and not history.is_rewound:
            # Messages that are not loaded are known by their stored lines alone.
            older_lines = _read(known).text
            new_indexes = covered - history.covered

        # A list in any request may take a part of the window. This list may also take
        # no more than a part of the calls and results that it stands for.
        contents = [history.shown[index] for index in new_indexes]
        with_tools = [content for content in contents if has_tool(content)]
        any_list_tokens = min(
            turn.budgets.working_tokens * VALUES_RATIO,
            turn.room_tokens * ROOM_RATIO,
            MAX_VALUES_TOKENS,
        )
        covered_tokens = turn.measure_alone(with_tools)
        max_bytes = fit_bytes(
            min(any_list_tokens, covered_tokens * COVERED_RATIO),
            turn.correction,
            write=lambda size_bytes: list_values(history, new_indexes, size_bytes),
            count=turn.count,
        )
        text = list_values(history, new_indexes, max_bytes)

        # Session state holds the newest lines, for when less of the history is loaded.
        any_list_bytes = int(any_list_tokens * 3 / max(1.0, turn.correction))
        stored_bytes = min(MAX_STORED_BYTES, 2 * room_tokens, any_list_bytes)
        _, _, newer_lines = text.partition("\n")
        stored_older = _newest_lines(older_lines, stored_bytes // 2)
        # Characters stand for bytes here: where the older lines are not ASCII, the
        # newer lines have slightly more room than is left.
        left_bytes = stored_bytes - len(stored_older)
        stored_newer = _newest_lines(newer_lines, left_bytes)
        stored = "\n".join(lines for lines in (stored_older, stored_newer) if lines)
        if not (stored or text):
            return None
        return {"bytes": max_bytes, "count": len(covered), "text": stored}

    def render(
        self, value: JsonValue, history: History, covered: Collection[int]
    ) -> str:
        """Returns the list anew, or its stored lines where messages are missing.

        The result is "" where there is no line.
        """
        known = _read(value)
        is_whole = len(covered) >= known.covered_count and not history.loads_part
        # After a rewind fewer messages are covered, but none of them is missing.
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
    """Returns a stored number, 0 at least; 0 for a value that is no number."""
    if not isinstance(value, int) or value < 0:
        return 0
    return min(value, 4 * MAX_VALUES_TOKENS)  # More bytes than a list has.


def _newest_lines(text: str, max_bytes: int) -> str:
    """Returns the last whole lines of a text that take at most `max_bytes` as JSON."""
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
        gathered = _gather(history, indexes)
        _choose(gathered.values, max_bytes - len(VALUES))
        text = _write_list(gathered.sources)
    # A text that is used is stored again: the oldest ones are dropped first.
    _TEXTS[key] = text
    return text


class _Gathered(NamedTuple):
    """The values of some messages by their text, and all sources in their order."""

    values: dict[str, _Value]
    sources: list[_Source]


def _gather(history: History, indexes: Sequence[int]) -> _Gathered:
    """Reads the values of some messages, and counts their uses.

    Calls of the recall tool, and their results, only repeat values, so they are not
    read.
    """
    values: dict[str, _Value] = {}
    sources: dict[Hashable, _Source] = {}
    message_numbers = {index: number for number, index in enumerate(indexes, 1)}
    oldest_index = _find_oldest_read(history, indexes)

    told_parts = walk_parts(history.told, indexes, history.outputs)
    for part_number, told in enumerate(told_parts):
        if not _is_read(told, oldest_index):
            continue

        # A call and its result are one source; any other part is a source of its own.
        call = told.part.function_call or told.call
        key = id(call) if call else (told.content_index, part_number)
        if key not in sources:
            sources[key] = _Source(_label_source(told, call))

        message_number = message_numbers[told.content_index]
        is_call = told.part.function_call is not None
        for text, kind_weight in _read_part(history, told):
            value = values.setdefault(text, _Value(kind_weight, sources[key]))
            value.use(sources[key], message_number, is_call)
    return _Gathered(values, list(sources.values()))


def _is_read(told: PlacedPart, oldest_index: int) -> bool:
    """Whether the values of a part count.

    Only calls are read of messages before `oldest_index`.
    """
    call = told.part.function_call
    tool = call or told.part.function_response
    if tool is not None and tool.name == RECALL_TOOL:
        return False
    return call is not None or told.content_index >= oldest_index


def _find_oldest_read(history: History, indexes: Sequence[int]) -> int:
    """Returns the index of the oldest message that is read whole.

    To read all of a long history would hold up the event loop. The index lies behind
    the last message where not even the newest one may be read whole.
    """
    left_bytes = MAX_READ_BYTES
    oldest_index = len(history.contents)
    for index in reversed(indexes):
        left_bytes -= 4 * history.memo.estimate_tokens([history.contents[index]])
        if left_bytes < 0:
            break
        oldest_index = index
    return oldest_index


def _read_part(history: History, told: PlacedPart) -> Found:
    """Returns the values of a part, each with the points of its kind.

    Text that another plugin adds is not read: it may be new on each call, as the time.
    """
    found = read_values(payload_of(told.part) or told.text)
    original = history.original(told.content_index)
    if original is history.contents[told.content_index]:
        return found

    original_text = content_text(original)
    return [(text, weight) for text, weight in found if text in original_text]


def _label_source(told: PlacedPart, call: types.FunctionCall | None) -> str:
    """Names a source: a tool with its arguments, code, or the author of a message.

    An example for a tool: "read_file(notes/a.txt, utf-8)".
    """
    if call is None:
        return "code" if told.part.code_execution_result else told.author

    args = without_secrets(call.args or {})
    texts = [
        value if isinstance(value, str) else payload_text(value)
        for value in args.values()
    ]
    whole = ", ".join(texts)
    clean = " ".join(hide_secrets(whole[:MAX_READ_CHARS]).split())
    if len(whole) > MAX_READ_CHARS:
        # The cut may go through a credential, and half of one is not recognized. So the
        # label shows nothing from near the cut, while an excerpt would show the end.
        clean = clean[:MAX_LABEL_BYTES]
    return f"{call.name}({excerpt(clean, MAX_LABEL_BYTES)})"


def _choose(values: dict[str, _Value], max_bytes: int) -> None:
    """Chooses values while they have room, and writes the choice into their sources.

    The source of a chosen value is marked as shown, and lists the value. The most
    useful values are chosen first. A value that stands in a label, or in another chosen
    value, is not listed again.
    """
    left_bytes = max_bytes
    written = "\n"  # All chosen labels and values, a line for each.
    for text, value in _rank(values):
        if left_bytes < LEAST_COST_BYTES:
            break

        source = value.source
        cost_bytes = text_bytes(text) + 2  # With ", ".
        if not source.is_shown:
            cost_bytes += text_bytes(source.label) + 5  # With "- ", ": " and a break.
        if cost_bytes > left_bytes or _stands_in(text, written):
            continue

        # The label of a new source may already show the value.
        left_bytes -= cost_bytes
        if not source.is_shown:
            source.is_shown = True
            written += source.label + "\n"
        if not _stands_in(text, source.label):
            source.listed.append(text)
            written += text + "\n"


def _rank(values: dict[str, _Value]) -> list[tuple[str, _Value]]:
    """Returns the values with their texts, the most useful first."""
    newest_number = max((value.newest_number for value in values.values()), default=1)
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
            + RECENCY_WEIGHT * value.newest_number / newest_number
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
