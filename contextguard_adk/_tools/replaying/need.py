"""Finds the values that recorded calls needed, and whether a request had them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from google.adk.events.event import Event
from google.genai import types

from contextguard_adk._history.adk_events import INTERNAL_CALLS, RECALL_TOOL, code_of
from contextguard_adk._history.contents import parts_of, payload_of
from contextguard_adk._support.phrases import quote_line
from contextguard_adk._tools.recordings import RecordedCall

_WORD = re.compile(r"[\w.@/+-]+")
_NAME = re.compile(r"[/_@]|\w\.\w|[a-z][A-Z]|[^\W\d]\d|\d[^\W\d]\w|^\d{4,}$")
_SECRET = re.compile(r"(sk-|[sr]k_live_|gh[a-z]_|xox[a-z]-|AKIA|AIza|eyJ)[\w-]{12}")
_SECRET_FIELD = re.compile(r"passw|secret|api_?key|credential|authori[sz]ation", re.I)
_ANCHOR = re.compile(r"[A-Za-z0-9_]+")

# A longer argument is a text, of which only some words are values.
MAX_VALUE_CHARS = 100

# An escaped backslash before an "n" is read as a backslash and a line break, so a value
# such as "C:\new" is not found in its escaped form.
ESCAPES = (("\\n", "\n"), ("\\t", "\t"), ("\\/", "/"), ("\\\\", "\\"))


@dataclass(frozen=True)
class Needed:
    """A value that a call needed, and its last place in the whole request."""

    value: str
    place: str  # "result of search", for instance.
    calls_ago: int
    is_far: bool  # More than half a window back.


@dataclass(frozen=True)
class Share:
    """The number of needed values, and of the missing ones among them.

    As text it is the part of the needed values that requests held, such as "87.5%".
    """

    needed: int
    missing: int

    def __str__(self) -> str:
        return f"{1 - self.missing / self.needed:.1%}" if self.needed else "-"


class Needs:
    """The values that the recorded calls of a session took from the conversation."""

    def __init__(self, events: Sequence[Event], calls: Iterable[RecordedCall]) -> None:
        # The values that each call needed, by the index of the call's event.
        self._values = {call.index: _list_values(events, call) for call in calls}

        # Each recorded part has a number: its index in `_parts` and in `_texts`. The
        # parts are kept because the key of a payload is its `id`, which Python gives
        # to another object once the payload is deleted.
        self._parts = [part for event in events for part in parts_of(event.content)]
        self._part_numbers = {_key(part): n for n, part in enumerate(self._parts)}
        self._texts = [read_part(part) for part in self._parts]

        # To look for each value in each text would take minutes. Only a text that has
        # the longest word of a value, its anchor, can hold the value.
        anchors = set[str]()
        for values in self._values.values():
            anchors.update(_find_anchor(value) for value in values)
        self._part_numbers_by_anchor = defaultdict[str, list[int]](list)
        for part_number, text in enumerate(self._texts):
            # The anchor of a value without words is "", and any text may hold it.
            for anchor in anchors.intersection(["", *_ANCHOR.findall(text)]):
                self._part_numbers_by_anchor[anchor].append(part_number)

        # By value, the numbers of the parts that hold it.
        self._holders: dict[str, list[int]] = {}

    def find(
        self, call: RecordedCall, whole: Sequence[types.Content], window_tokens: int
    ) -> list[Needed]:
        """Finds the values that a call needed and that the whole request holds."""
        last_holders = self._find_last_holders(self._values[call.index], whole)
        if not last_holders:
            return []

        far_count = self._count_far(whole, window_tokens)
        all_needed = list[Needed]()
        for value, index in last_holders.items():
            # Each content of the model after the value is the answer of a call.
            answers_since = [c for c in whole[index + 1 :] if c.role == "model"]
            needed = Needed(
                value=value,
                place=_describe_holder(whole[index], value),
                calls_ago=1 + len(answers_since),
                is_far=index < far_count,
            )
            all_needed.append(needed)
        return all_needed

    def find_missing(
        self, needed: Sequence[Needed], sent: Sequence[types.Content]
    ) -> list[Needed]:
        """Finds the needed values that no content of a request holds."""
        values = [each.value for each in needed]
        last_holders = self._find_last_holders(values, sent)
        return [each for each in needed if each.value not in last_holders]

    def _find_last_holders(
        self, values: list[str], contents: Sequence[types.Content]
    ) -> dict[str, int]:
        """Returns the index of the last content that holds a value, by value.

        Values that no content holds are left out.
        """
        if not values:
            return {}

        parts = self._sort_parts(contents)
        last_holders = dict[str, int]()
        for value in values:
            indexes = [
                parts.recorded[part_number]
                for part_number in self._list_holders(value)
                if part_number in parts.recorded
            ]
            indexes += [
                other.content_index for other in parts.others if value in other.text
            ]
            if indexes:
                last_holders[value] = max(indexes)
        return last_holders

    def _sort_parts(self, contents: Sequence[types.Content]) -> _SortedParts:
        """Sorts the parts of a request into recorded ones and others."""
        sorted_parts = _SortedParts(recorded={}, others=[])
        for index, content in enumerate(contents):
            for part in parts_of(content):
                part_number = self._part_numbers.get(_key(part))
                if part_number is None:
                    other = _OtherPart(index, read_part(part))
                    sorted_parts.others.append(other)
                else:
                    sorted_parts.recorded[part_number] = index
        return sorted_parts

    def _list_holders(self, value: str) -> list[int]:
        """Returns the numbers of the recorded parts that hold a value."""
        if value not in self._holders:
            candidates = self._part_numbers_by_anchor[_find_anchor(value)]
            self._holders[value] = [n for n in candidates if value in self._texts[n]]
        return self._holders[value]

    def _count_far(self, whole: Sequence[types.Content], window_tokens: int) -> int:
        """Counts the contents that lie more than half a window before the end.

        They are the first ones of the request. The content that crosses the border is
        one of them.
        """
        near_room_chars = 2 * window_tokens  # Half of it, at 4 characters a token.
        far_count = len(whole)
        while far_count and near_room_chars >= 0:
            far_count -= 1
            near_room_chars -= self._count_chars(whole[far_count])
        return far_count

    def _count_chars(self, content: types.Content) -> int:
        """Counts the characters of a content, in the form of `read_part`.

        The texts of recorded parts are known already.
        """
        chars = 0
        for part in parts_of(content):
            part_number = self._part_numbers.get(_key(part))
            if part_number is not None:
                text = self._texts[part_number]
            else:  # An older ADK copies payloads, and no copy is a recorded part.
                text = read_part(part)
            chars += len(text)
        return chars


class _OtherPart(NamedTuple):
    """A part that is not recorded, such as a summary: its content's index, its text."""

    content_index: int
    text: str


class _SortedParts(NamedTuple):
    """The parts of a request.

    Attributes:
        recorded: By the number of a recorded part, the index of its content.
        others: The parts that are not recorded.
    """

    recorded: dict[int, int]
    others: list[_OtherPart]


def _key(part: types.Part) -> object:
    """Returns a part's text, or the identity of its payload; equal for equal parts."""
    return part.text or code_of(part) or id(payload_of(part))


def _describe_holder(content: types.Content, value: str) -> str:
    """Says which part of a content has a value: "result of search", for instance."""
    part = next(each for each in parts_of(content) if value in read_part(each))
    if part.function_call:
        return f"call of {part.function_call.name}"
    if part.function_response:
        return f"result of {part.function_response.name}"
    return f"message of {content.role}"


def read_part(part: types.Part) -> str:
    """Returns a part's text, or the fields and values of its call or result.

    A text with escapes of JSON is returned twice, the second time without them: a value
    may be looked for in both forms.
    """
    text = part.text or code_of(part)
    if not text:
        leaves = _walk(payload_of(part))
        text = "\n".join(f"{field}\n{leaf}" for field, leaf in leaves)

    unescaped = text
    for escape, char in ESCAPES:
        unescaped = unescaped.replace(escape, char)
    return text if unescaped == text else f"{text}\n{unescaped}"


def _walk(value: object, field: str = "") -> Iterator[tuple[str, object]]:
    """Yields the values in nested dicts and lists, each after the name of its field.

    A value of a list has the field of the list. None is left out.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(item, str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item, field)
    elif value is not None:
        yield field, value


def _find_anchor(value: str) -> str:
    """Returns the longest word of a value, by which the texts with it are found."""
    return max(_ANCHOR.findall(value), key=len, default="")


def _list_values(events: Sequence[Event], recorded: RecordedCall) -> list[str]:
    """Lists the values that an agent must know to call its tools as it did.

    They are the ids, numbers, names and paths among the arguments. Credentials are
    left out, and so are the arguments of ADK's tools and of the guard's own.
    """
    values = dict[str, None]()  # In their order, each once.
    for field, argument in _walk_arguments(events, recorded):
        # A bool is no value that an agent could look up.
        if not isinstance(argument, bool) and not _SECRET_FIELD.search(field):
            values.update(dict.fromkeys(_split_values(argument)))
    return [value for value in values if not _SECRET.match(value)]


def _walk_arguments(
    events: Sequence[Event], recorded: RecordedCall
) -> Iterator[tuple[str, object]]:
    """Yields the arguments of the tool calls in an answer, each after its field's name.

    An answer may be several events. The first event with a tool result ends it.
    """
    own_names = (RECALL_TOOL, *INTERNAL_CALLS)
    for event in events[recorded.index :]:
        if event.partial:
            continue
        if event.get_function_responses():
            return
        if event.author != recorded.event.author:
            continue

        for call in event.get_function_calls():
            if not (call.name or "").startswith(own_names):
                yield from _walk(call.args)


def _split_values(argument: object) -> list[str]:
    """Returns the values in an argument.

    - A short argument without blanks is one value.
    - In any other argument, the words that look like names, paths or ids are values:
      "open src/a.py" -> "src/a.py".

    Texts of less than four characters and numbers of one digit are left out: nearly
    every request holds them by chance.
    """
    text = str(argument)
    is_one_value = len(text) <= MAX_VALUE_CHARS and not re.search(r"\s", text)
    if is_one_value:
        values = [text]
    else:
        names = [word for word in _WORD.findall(text) if _NAME.search(word)]
        values = [name.strip(".-/") for name in names]

    least_chars = 4 if isinstance(argument, str) else 2
    return [value for value in values if len(value) >= least_chars]


def list_missing(missing: Sequence[tuple[int, Needed]], most: int = 20) -> list[str]:
    """Returns a line on each missing value: the first call without it, and its place.

    `missing` has values, each after the number of the call that needed it. If there are
    more than `most` lines, one line in place of the others tells their number.
    """
    first_misses = dict[str, tuple[int, Needed]]()
    for number, needed in missing:
        first_misses.setdefault(needed.value, (number, needed))

    lines = list[str]()
    for number, needed in first_misses.values():
        value = quote_line(needed.value)[:80]
        place = quote_line(needed.place)
        calls = "call" if needed.calls_ago == 1 else "calls"
        lines.append(
            f"call {number:,}: {value!r} was missing; last in a {place}, "
            f"{needed.calls_ago:,} {calls} before"
        )
    if len(lines) <= most:
        return lines
    return [*lines[:most], f"and {len(lines) - most:,} more"]
