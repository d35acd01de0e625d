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
        self._values = {call.index: _list_values(events, call) for call in calls}
        self._parts = [part for event in events for part in parts_of(event.content)]
        self._numbers = {_key(part): n for n, part in enumerate(self._parts)}
        self._texts = [read_part(part) for part in self._parts]

        # To look for each value in each text would take minutes. A value can stand only
        # in the texts that have its longest word, its anchor.
        anchors = {_anchor(v) for values in self._values.values() for v in values}
        self._texts_with = defaultdict[str, list[int]](list)
        for number, text in enumerate(self._texts):
            # The anchor of a value without words is "", and any text may hold it.
            for word in anchors.intersection(["", *_ANCHOR.findall(text)]):
                self._texts_with[word].append(number)
        self._holders: dict[str, list[int]] = {}  # By value, the texts that have it.

    def find(
        self, call: RecordedCall, whole: Sequence[types.Content], window_tokens: int
    ) -> list[Needed]:
        """Finds the values in the whole request that a call needed."""
        places = self._locate(self._values[call.index], whole)
        if not places:
            return []

        far_end = self._find_far_end(whole, window_tokens)
        needed = list[Needed]()
        for value, place in places.items():
            later_answers = [c for c in whole[place + 1 :] if c.role == "model"]
            each = Needed(
                value=value,
                place=_describe_holder(whole[place], value),
                calls_ago=1 + len(later_answers),
                is_far=place < far_end,
            )
            needed.append(each)
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
        """Finds the last content in which each value stands, by its index."""
        if not values:
            return {}

        recorded_places, other_texts = self._place_parts(contents)
        found = dict[str, int]()
        for value in values:
            holders = self._find_holders(value)
            places = [recorded_places[n] for n in holders if n in recorded_places]
            places += [place for place, text in other_texts if value in text]
            if places:
                found[value] = max(places)
        return found

    def _place_parts(
        self, contents: Sequence[types.Content]
    ) -> tuple[dict[int, int], list[tuple[int, str]]]:
        """Returns where the parts of contents stand, by the index of their content.

        Recorded parts come by their number, the texts of others with their place.
        """
        recorded_places = dict[int, int]()
        other_texts = list[tuple[int, str]]()
        for place, content in enumerate(contents):
            for part in parts_of(content):
                number = self._numbers.get(_key(part))
                if number is None:
                    other_texts.append((place, read_part(part)))
                else:
                    recorded_places[number] = place
        return recorded_places, other_texts

    def _find_holders(self, value: str) -> list[int]:
        """Finds the recorded parts that have a value, by their number."""
        if value not in self._holders:
            candidates = self._texts_with[_anchor(value)]
            self._holders[value] = [n for n in candidates if value in self._texts[n]]
        return self._holders[value]

    def _find_far_end(self, whole: Sequence[types.Content], window_tokens: int) -> int:
        """Returns the end of the contents that lie more than half a window back."""
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
    """Returns a part's text; if it has escapes of JSON, once more without them."""
    text = part.text or code_of(part)
    if not text:
        leaves = _walk(payload_of(part))
        text = "\n".join(f"{name}\n{leaf}" for name, leaf in leaves)

    plain = text
    for escape, char in ESCAPES:
        plain = plain.replace(escape, char)
    return text if plain == text else f"{text}\n{plain}"


def _walk(value: object, field: str = "") -> Iterator[tuple[str, object]]:
    """Yields the leaves of nested dicts and lists, each with the name of its field."""
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
    """Yields the arguments of the tool calls in an answer, with their fields."""
    own_names = (RECALL_TOOL, *INTERNAL_CALLS)
    for event in events[recorded.index :]:
        if event.partial:
            continue
        if event.get_function_responses():
            return  # The answer is over.
        if event.author != recorded.event.author:
            continue

        for call in event.get_function_calls():
            if not (call.name or "").startswith(own_names):
                yield from _walk(call.args)


def _split_values(leaf: object) -> list[str]:
    """Returns an argument as a value; of a text, the words that look like one."""
    text = str(leaf)
    words = [text]
    if len(text) > 100 or re.search(r"\s", text):
        words = [w.strip(".-/") for w in _WORD.findall(text) if _NAME.search(w)]
    least_chars = 4 if isinstance(leaf, str) else 2
    return [word for word in words if len(word) >= least_chars]


def list_missing(missing: Sequence[tuple[int, Needed]], most: int = 20) -> list[str]:
    """Says of missing values where they last stood, each once.

    A value comes with the number of the first call that needed it.
    """
    first = dict[str, tuple[int, Needed]]()
    for number, each in missing:
        first.setdefault(each.value, (number, each))

    lines = list[str]()
    for number, each in first.values():
        value = quote_line(each.value)[:80]
        place = quote_line(each.place)
        calls = "call" if each.calls_ago == 1 else "calls"
        lines.append(
            f"call {number:,}: {value!r} was missing; last in a {place}, "
            f"{each.calls_ago:,} {calls} before"
        )
    if len(lines) <= most:
        return lines
    return [*lines[:most], f"and {len(lines) - most:,} more"]
