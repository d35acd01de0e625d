"""Finds the values that recorded calls needed, and whether a request had them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
    """The numbers of needed values, and of those that requests did not hold."""

    needed: int
    missing: int

    def __str__(self) -> str:
        return f"{1 - self.missing / self.needed:.1%}" if self.needed else "-"


class Needs:
    """The values that the recorded calls of a session took from the conversation."""

    def __init__(self, events: Sequence[Event], calls: Iterable[RecordedCall]) -> None:
        # The values that each call needed, by the index of the call's event.
        self._values = {call.index: _list_values(events, call) for call in calls}

        # Each recorded part has a number, which is its index in `_texts` as well. The
        # parts are kept because the identity of a payload is that of its part.
        self._parts = [part for event in events for part in parts_of(event.content)]
        self._numbers = {_key(part): n for n, part in enumerate(self._parts)}
        self._texts = [read_part(part) for part in self._parts]

        # To look for each value in each text would take minutes. A value can stand only
        # in the texts that have its longest word, its anchor.
        anchors = set[str]()
        for values in self._values.values():
            anchors.update(_anchor(value) for value in values)
        self._numbers_by_anchor = defaultdict[str, list[int]](list)
        for number, text in enumerate(self._texts):
            # The anchor of a value without words is "", and any text may hold it.
            for anchor in anchors.intersection(["", *_ANCHOR.findall(text)]):
                self._numbers_by_anchor[anchor].append(number)

        # By value, the numbers of the parts that hold it.
        self._holders: dict[str, list[int]] = {}

    def find(
        self, call: RecordedCall, whole: Sequence[types.Content], window_tokens: int
    ) -> list[Needed]:
        """Finds the values that a call needed and that the whole request holds."""
        indexes = self._locate(self._values[call.index], whole)
        if not indexes:
            return []

        far_end = self._find_far_end(whole, window_tokens)
        needed = list[Needed]()
        for value, index in indexes.items():
            # Each content of the model after the value is the answer of a call.
            answers_since = [c for c in whole[index + 1 :] if c.role == "model"]
            one = Needed(
                value=value,
                place=_describe_holder(whole[index], value),
                calls_ago=1 + len(answers_since),
                is_far=index < far_end,
            )
            needed.append(one)
        return needed

    def find_missing(
        self, needed: Sequence[Needed], sent: Sequence[types.Content]
    ) -> list[Needed]:
        """Finds the needed values that stand nowhere in a request."""
        present = self._locate([each.value for each in needed], sent)
        return [each for each in needed if each.value not in present]

    def _locate(
        self, values: list[str], contents: Sequence[types.Content]
    ) -> dict[str, int]:
        """Returns the index of the last content that holds a value, by value.

        Values that no content holds are left out.
        """
        if not values:
            return {}

        index_by_number, other_texts = self._sort_parts(contents)
        last_indexes = dict[str, int]()
        for value in values:
            holders = self._list_holders(value)
            indexes = [index_by_number[n] for n in holders if n in index_by_number]
            indexes += [index for index, text in other_texts if value in text]
            if indexes:
                last_indexes[value] = max(indexes)
        return last_indexes

    def _sort_parts(
        self, contents: Sequence[types.Content]
    ) -> tuple[dict[int, int], list[tuple[int, str]]]:
        """Sorts parts into recorded ones and others, such as a summary.

        Returns:
            The index of the content of each recorded part, by the part's number; and
            for each other part the index of its content, and its text.
        """
        index_by_number = dict[int, int]()
        other_texts = list[tuple[int, str]]()
        for index, content in enumerate(contents):
            for part in parts_of(content):
                number = self._numbers.get(_key(part))
                if number is None:
                    other_texts.append((index, read_part(part)))
                else:
                    index_by_number[number] = index
        return index_by_number, other_texts

    def _list_holders(self, value: str) -> list[int]:
        """Returns the numbers of the recorded parts that hold a value."""
        if value not in self._holders:
            candidates = self._numbers_by_anchor[_anchor(value)]
            self._holders[value] = [n for n in candidates if value in self._texts[n]]
        return self._holders[value]

    def _find_far_end(self, whole: Sequence[types.Content], window_tokens: int) -> int:
        """Returns the number of contents that lie more than half a window back.

        They are the first ones of the request.
        """
        far_end = len(whole)
        near_chars = 2 * window_tokens  # Half of the window, by bytes / 4.
        while far_end and near_chars >= 0:
            far_end -= 1
            near_chars -= self._count_chars(whole[far_end])
        return far_end

    def _count_chars(self, content: types.Content) -> int:
        chars = 0
        for part in parts_of(content):
            # An older ADK copies payloads, and no copy is a recorded part.
            number = self._numbers.get(_key(part))
            text = read_part(part) if number is None else self._texts[number]
            chars += len(text)
        return chars


def _key(part: types.Part) -> object:
    """Tells a part from others: by its text, else by the identity of its payload."""
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


def _anchor(value: str) -> str:
    """Returns the longest word of a value, by which the texts with it are found."""
    return max(_ANCHOR.findall(value), key=len, default="")


def _list_values(events: Sequence[Event], recorded: RecordedCall) -> list[str]:
    """Lists the values that an agent must know to call its tools as it did.

    They are the ids, numbers, names and paths among the arguments. Credentials are
    left out, and so are the arguments of ADK's tools and of the guard's own.
    """
    values = dict[str, None]()
    for field, leaf in _walk_arguments(events, recorded):
        # A bool is no value that an agent could look up.
        if not isinstance(leaf, bool) and not _SECRET_FIELD.search(field):
            values.update(dict.fromkeys(_split_values(leaf)))
    return [value for value in values if not _SECRET.match(value)]


def _walk_arguments(
    events: Sequence[Event], recorded: RecordedCall
) -> Iterator[tuple[str, object]]:
    """Yields the fields and values of the arguments of the tool calls in an answer.

    An answer may be several events; the first one with a tool's result ends it.
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


def _split_values(leaf: object) -> list[str]:
    """Returns the values in an argument.

    A short argument without blanks is one value. In a long one, or one with blanks, the
    words that look like names, paths or ids are values: "open src/a.py" -> "src/a.py".
    Shorter texts than four characters, and numbers of one digit, stand everywhere.
    """
    text = str(leaf)
    values = [text]
    if len(text) > 100 or re.search(r"\s", text):
        values = [w.strip(".-/") for w in _WORD.findall(text) if _NAME.search(w)]
    least_chars = 4 if isinstance(leaf, str) else 2
    return [value for value in values if len(value) >= least_chars]


def list_missing(missing: Sequence[tuple[int, Needed]], most: int = 20) -> list[str]:
    """Returns a line on each missing value: the first call without it, and its place.

    `missing` has values, each after the number of the call that needed it. After the
    first `most` lines, one line says how many more there are.
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
