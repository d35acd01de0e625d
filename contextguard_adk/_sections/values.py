"""The list of values in the messages that a summary replaces.

A value is a text that names something exactly: an id, a number, a path, a name. The
list has a line for each source of values, such as "- grep(TODO, src): src/a.py, 4711".
A source is a call with its result, or a message. "Covered" messages are those that the
summary replaces.
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
"""The list takes at most this part of what instruction and tools leave of the
threshold.
"""

COVERED_RATIO = 0.25
"""The list takes at most this part of the covered calls and results."""

MAX_VALUES_TOKENS = 8_000
"""The list takes at most this, whatever the window."""

MAX_STORED_BYTES = 4 * 1024
"""The most of the list in session state, for a history that is loaded in part."""

BYTES_A_TOKEN = 3
"""The size of a token of a list, as `fit_bytes` guesses it."""

MAX_STORED_NUMBER = 4 * MAX_VALUES_TOKENS
"""A number in session state counts as this at most: no list has so many bytes."""

LEAST_COST_BYTES = 12
"""With less room left, hardly a value would fit."""

MAX_LABEL_BYTES = 60
"""The arguments of a call take at most this in the label of a source."""

MAX_READ_CHARS = 4_000
"""Only this many characters of a call's arguments are read for a label."""

MAX_READ_BYTES = 400_000
"""The newest messages of this size are read whole; of older ones only the calls."""

REUSE_WEIGHT = 2.0
"""Points for the logarithm of the number of calls that used a value again.

These weights decide which values are listed. They were chosen on recorded sessions of
agents.
"""

RECENCY_WEIGHT = 2.0
"""Points of a value in the newest message; a value in an older message has fewer."""

CALL_WEIGHT = 1.0
"""Points of a value that a call has used."""

KIN_WEIGHT = 1.0
"""Points of a value that has all its words in common with values in calls."""

KIN_WITHOUT_WORDS_RATIO = 0.3
"""The part of `KIN_WEIGHT` that a value without words gets."""

_WORD = re.compile(r"[A-Za-z][a-z]{2,}|[A-Z]{3,}")
"""The words in a value: "orderId_42" has "order"."""

_TEXTS = BoundedDict[Hashable, str](64)
"""The lists that were written last, by the fingerprints of their messages and their
size.
"""


@dataclass
class _Source:
    """A call with its result, or a message.

    Attributes:
        label: The name of the source in the list: a tool with arguments, or an author.
        is_shown: Whether the list has a line for the source.
        listed: The values in this line, without those that stand in the label.
    """

    label: str
    is_shown: bool = False
    listed: list[str] = field(default_factory=list)


@dataclass
class _Value:
    """The uses of a value: the places where it stands.

    Attributes:
        telling: The points of its form, from `read_values`: an id has more than a word.
        source: The first source with the value in the newest message that has it.
        newest_number: The number of that message, from 1; 0 before the first use.
        call_count: How many times calls have used the value.
        reuse_count: `call_count` without a call that was the first use of the value.
    """

    telling: float
    source: _Source
    newest_number: int = 0
    call_count: int = 0
    reuse_count: int = 0

    def add_use(self, source: _Source, message_number: int, is_call: bool) -> None:
        """Counts one more use; messages are read in their order."""
        is_first_use = self.newest_number == 0
        if is_call:
            self.call_count += 1
        if is_call and not is_first_use:
            self.reuse_count += 1

        if message_number != self.newest_number:
            self.newest_number = message_number
            self.source = source


class _Stored(NamedTuple):
    """The stored value of the section.

    Attributes:
        max_bytes: The most bytes that the list may take.
        covered_count: How many messages are covered.
        lines: The newest lines of the list.
    """

    max_bytes: int
    covered_count: int
    lines: str


class Values(Section):
    """Lists ids, numbers, paths and names in the covered messages.

    The list is written anew from these messages each time. Session state only has the
    size of the list, and 4 KB of its lines for a history that is loaded in part.
    """

    name = "values"
    label = "the list of values"
    heading = VALUES
    goes_at = 3
    shows_tool_use = True

    def write(
        self, turn: Turn, covered: frozenset[int], known: JsonValue, room_tokens: int
    ) -> JsonValue:
        """Returns the fields of `_Stored`, as `_read` reads them; None for no line."""
        history = turn.history
        older_lines = ""
        listed_indexes = covered
        if history.is_partial and not history.is_rewound:
            # Messages that are not loaded are known by their stored lines alone.
            older_lines = _read(known).lines
            listed_indexes = covered - history.covered

        most_tokens = min(
            turn.budgets.working_tokens * VALUES_RATIO,
            turn.room_tokens * ROOM_RATIO,
            MAX_VALUES_TOKENS,
        )
        max_bytes = _fit_list(turn, listed_indexes, most_tokens)
        text = list_values(history, listed_indexes, max_bytes)
        _heading, _, newer_lines = text.partition("\n")

        # Session state holds the newest lines, for when less of the history is loaded.
        # They also stand for older messages, so `max_bytes` does not limit them.
        most_bytes = int(most_tokens * BYTES_A_TOKEN / max(1.0, turn.correction))
        half_room_bytes = 2 * room_tokens  # The room has four bytes a token.
        stored_bytes = min(MAX_STORED_BYTES, half_room_bytes, most_bytes)
        lines = _join_newest(older_lines, newer_lines, stored_bytes)
        if not (lines or text):
            return None
        return {"bytes": max_bytes, "count": len(covered), "text": lines}

    def render(
        self, value: JsonValue, history: History, covered: Collection[int]
    ) -> str:
        """Returns the list anew, or its stored lines if messages are missing.

        Returns "" if there is no line.
        """
        stored = _read(value)
        has_all = len(covered) >= stored.covered_count and not history.loads_part
        # After a rewind fewer messages are covered, but none of them is missing.
        if has_all or history.is_rewound:
            return list_values(history, frozenset(covered), stored.max_bytes)
        return f"{VALUES}\n{quote_stored(stored.lines)}" if stored.lines else ""


def _read(value: JsonValue) -> _Stored:
    """Reads a stored value, which anybody may have written to session state."""
    fields = value if isinstance(value, dict) else {}
    numbers = {"bytes": 0, "count": 0}
    for name in numbers:
        number = fields.get(name)
        if isinstance(number, int) and number > 0:
            numbers[name] = min(number, MAX_STORED_NUMBER)

    lines = fields.get("text")
    return _Stored(
        max_bytes=numbers["bytes"],
        covered_count=numbers["count"],
        lines=lines[:MAX_STORED_BYTES] if isinstance(lines, str) else "",
    )


def _fit_list(turn: Turn, indexes: Collection[int], most_tokens: float) -> int:
    """Returns how many bytes the list of these messages may take.

    The list may take at most `most_tokens`, and at most a part of the calls and results
    among the messages.
    """
    history = turn.history
    contents = [history.shown[index] for index in indexes]
    with_tools = [content for content in contents if has_tool(content)]
    tool_tokens = turn.measure_alone(with_tools)
    return fit_bytes(
        min(most_tokens, tool_tokens * COVERED_RATIO),
        turn.correction,
        write=lambda size_bytes: list_values(history, indexes, size_bytes),
        count=turn.count,
    )


def _join_newest(older_lines: str, newer_lines: str, max_bytes: int) -> str:
    """Joins the newest lines of two texts; the older text gets half of the room.

    Characters are counted as bytes here: if older lines are not ASCII, the newer lines
    get slightly more than the rest of the room.
    """
    older = _newest_lines(older_lines, max_bytes // 2)
    newer = _newest_lines(newer_lines, max_bytes - len(older))
    return "\n".join(lines for lines in (older, newer) if lines)


def _newest_lines(text: str, max_bytes: int) -> str:
    """Returns the last whole lines of a text that take at most `max_bytes` as JSON."""
    newest_first: list[str] = []
    left_bytes = max_bytes
    for line in reversed(text.splitlines()):
        left_bytes -= text_bytes(json.dumps(line, ensure_ascii=False))
        if left_bytes < 0:
            break
        newest_first.append(line)
    return "\n".join(reversed(newest_first))


def list_values(history: History, covered: Collection[int], max_bytes: int) -> str:
    """Lists the values of the covered messages with their sources; "" for none.

    The list depends on these messages and `max_bytes` alone. Several requests have the
    same list, so it is written once.
    """
    indexes = sorted(covered)
    fingerprints = tuple(
        history.fingerprint_content(history.told[index]) for index in indexes
    )
    key = (fingerprints, max_bytes)
    text = _TEXTS.get(key)
    if text is None:
        gathered = _gather(history, indexes)
        _mark_listed(gathered.values, max_bytes - len(VALUES))
        text = _write_list(gathered.sources)
    # A list that is read is stored again, because the oldest ones are dropped first.
    _TEXTS[key] = text
    return text


class _Gathered(NamedTuple):
    """The values of some messages by their text, and all sources in their order."""

    values: dict[str, _Value]
    sources: list[_Source]


def _gather(history: History, indexes: Sequence[int]) -> _Gathered:
    """Reads the values of some messages, and counts their uses."""
    values: dict[str, _Value] = {}
    sources: dict[Hashable, _Source] = {}
    message_numbers = {index: number for number, index in enumerate(indexes, 1)}
    oldest_index = _find_oldest_read(history, indexes)

    placed_parts = walk_parts(history.told, indexes, history.outputs)
    for part_number, placed in enumerate(placed_parts):
        tool = placed.part.function_call or placed.part.function_response
        only_repeats_values = tool is not None and tool.name == RECALL_TOOL
        is_call = placed.part.function_call is not None
        is_too_old = not is_call and placed.content_index < oldest_index
        if only_repeats_values or is_too_old:
            continue

        # A call and its result are one source; any other part is a source of its own.
        call = placed.part.function_call or placed.call
        source_key = id(call) if call else (placed.content_index, part_number)
        if source_key not in sources:
            sources[source_key] = _Source(_label_source(placed, call))
        source = sources[source_key]

        message_number = message_numbers[placed.content_index]
        for text, telling in _read_part(history, placed):
            value = values.setdefault(text, _Value(telling, source))
            value.add_use(source, message_number, is_call)
    return _Gathered(values, list(sources.values()))


def _find_oldest_read(history: History, indexes: Sequence[int]) -> int:
    """Returns the index of the oldest message that is read whole.

    To read all of a long history would hold up the event loop. If even the newest
    message is too long, the index after the last content is returned.
    """
    left_bytes = MAX_READ_BYTES
    oldest_index = len(history.contents)
    for index in reversed(indexes):
        left_bytes -= 4 * history.memo.estimate_tokens([history.contents[index]])
        if left_bytes < 0:
            break
        oldest_index = index
    return oldest_index


def _read_part(history: History, placed: PlacedPart) -> Found:
    """Returns the values of a part, each with how telling it is.

    Text that another plugin adds is not read: it may be new on each call, as the time.
    """
    found = read_values(payload_of(placed.part) or placed.text)
    original = history.original(placed.content_index)
    if original is history.contents[placed.content_index]:
        return found  # No plugin has changed the content.

    original_text = content_text(original)
    return [(text, telling) for text, telling in found if text in original_text]


def _label_source(placed: PlacedPart, call: types.FunctionCall | None) -> str:
    """Names a source: a tool with its arguments, code, or the author of a message.

    An example for a tool: "read_file(notes/a.txt, utf-8)".
    """
    if call is None:
        return "code" if placed.part.code_execution_result else placed.author

    args = without_secrets(call.args or {})
    texts = [
        value if isinstance(value, str) else payload_text(value)
        for value in args.values()
    ]
    args_text = ", ".join(texts)
    shown = " ".join(hide_secrets(args_text[:MAX_READ_CHARS]).split())
    if len(args_text) > MAX_READ_CHARS:
        # The cut may go through a credential, and half of one is not recognized. An
        # excerpt would show the text at the cut, so only the beginning is used.
        shown = shown[:MAX_LABEL_BYTES]
    return f"{call.name}({excerpt(shown, MAX_LABEL_BYTES)})"


def _mark_listed(values: dict[str, _Value], max_bytes: int) -> None:
    """Marks in the sources which values are listed: the most useful ones that fit.

    A value that stands in a label, or in another listed value, is not listed again.
    """
    left_bytes = max_bytes
    list_text = "\n"  # All labels and values that are listed so far.
    for text, value in _rank(values):
        if left_bytes < LEAST_COST_BYTES:
            break

        source = value.source
        cost_bytes = text_bytes(text) + len(", ")
        if not source.is_shown:
            cost_bytes += text_bytes(source.label) + len("- : \n")
        if cost_bytes > left_bytes or _stands_in(text, list_text):
            continue

        left_bytes -= cost_bytes
        if not source.is_shown:
            source.is_shown = True
            list_text += source.label + "\n"
        # The label of the source may show the value already.
        if not _stands_in(text, source.label):
            source.listed.append(text)
            list_text += text + "\n"


def _rank(values: dict[str, _Value]) -> list[tuple[str, _Value]]:
    """Returns the values with their texts, the most useful first."""
    newest_number = max((value.newest_number for value in values.values()), default=1)
    words_in_calls = set[str]()
    for text, value in values.items():
        if value.call_count:
            words_in_calls |= _find_words(text)

    def score(text_and_value: tuple[str, _Value]) -> float:
        text, value = text_and_value
        recency_ratio = value.newest_number / newest_number
        words = _find_words(text)
        kin_ratio = KIN_WITHOUT_WORDS_RATIO
        if words:
            kin_ratio = len(words & words_in_calls) / len(words)
        call_points = CALL_WEIGHT if value.call_count else 0.0
        return (
            value.telling
            + REUSE_WEIGHT * math.log1p(value.reuse_count)
            + RECENCY_WEIGHT * recency_ratio
            + call_points
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
    """Writes the heading, and a line for each source that is shown; "" for no line."""
    lines = []
    for source in sources:
        if source.listed:
            lines.append(quote_line(f"- {source.label}: {', '.join(source.listed)}"))
        elif source.is_shown:
            lines.append(quote_line(f"- {source.label}"))
    return "\n".join([VALUES, *lines]) if lines else ""
