"""How much of what the recorded calls needed was in the requests before them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

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


@dataclass(frozen=True)
class Needed:
    """A value that a call needed, and where in the whole request it last stood."""

    value: str
    place: str  # "result of search", for instance.
    calls_ago: int
    is_far: bool  # More than half a window back.


@dataclass(frozen=True)
class Share:
    """How many values were needed, and how many of them were not in the request."""

    needed: int
    missing: int

    def __str__(self) -> str:
        return f"{1 - self.missing / self.needed:.1%}" if self.needed else "-"


class Needs:
    """What the recorded calls of a session needed of what was said before."""

    def __init__(self, events: Sequence[Event], calls: Iterable[RecordedCall]) -> None:
        self._values = {call.index: _list_values(events, call) for call in calls}
        self._parts = [part for event in events for part in parts_of(event.content)]
        self._numbers = {_key(part): n for n, part in enumerate(self._parts)}
        self._texts = list(map(read_part, self._parts))
        anchors = {_anchor(v) for values in self._values.values() for v in values}
        self._having = defaultdict[str, list[int]](list)
        for number, text in enumerate(self._texts):
            for word in anchors.intersection(["", *_ANCHOR.findall(text)]):
                self._having[word].append(number)
        self._holders: dict[str, list[int]] = {}

    def find(
        self, call: RecordedCall, whole: Sequence[types.Content], window_tokens: int
    ) -> list[Needed]:
        """Finds what a call needed of the whole request before it."""
        places = self._locate(self._values[call.index], whole)
        needed = []
        far_end = len(whole)
        near_chars = 2 * window_tokens  # Half of it, by bytes / 4.
        while places and far_end and near_chars >= 0:
            far_end -= 1
            near_chars -= self._count_chars(whole[far_end])
        for value, place in places.items():
            part = next(
                each for each in parts_of(whole[place]) if value in read_part(each)
            )
            tool = part.function_call or part.function_response
            kind = "call" if part.function_call else "result" if tool else "message"
            said = f"{kind} of {tool.name if tool else whole[place].role}"
            calls_ago = 1 + sum(each.role == "model" for each in whole[place + 1 :])
            needed.append(Needed(value, said, calls_ago, is_far=place < far_end))
        return needed

    def find_missing(
        self, needed: Sequence[Needed], sent: Sequence[types.Content]
    ) -> list[Needed]:
        present = self._locate([each.value for each in needed], sent)
        return [each for each in needed if each.value not in present]

    def _locate(
        self, values: list[str], contents: Sequence[types.Content]
    ) -> dict[str, int]:
        """Finds the last of some contents in which each value stands, if any."""
        known = dict[int, int]()
        others = list[tuple[int, str]]()
        found = {}
        for place, content in enumerate(contents if values else ()):
            for part in parts_of(content):
                if (number := self._numbers.get(_key(part))) is None:
                    others.append((place, read_part(part)))
                else:
                    known[number] = place
        for value in values:
            if value not in self._holders:
                near = self._having[_anchor(value)]
                self._holders[value] = [n for n in near if value in self._texts[n]]
            places = [known[n] for n in self._holders[value] if n in known]
            places += [place for place, text in others if value in text]
            if places:
                found[value] = max(places)
        return found

    def _count_chars(self, content: types.Content) -> int:
        # An older ADK copies payloads, which are unknown then.
        found = ((part, self._numbers.get(_key(part))) for part in parts_of(content))
        texts = (read_part(p) if n is None else self._texts[n] for p, n in found)
        return sum(map(len, texts))


def _key(part: types.Part) -> object:
    """Tells a part from others: by its text, else by the identity of its payload."""
    return part.text or code_of(part) or id(payload_of(part))


def read_part(part: types.Part) -> str:
    """Returns what a part says, once more without the escapes of JSON if it has any."""
    fields = (f"{name}\n{leaf}" for name, leaf in _walk(payload_of(part)))
    text = plain = part.text or code_of(part) or "\n".join(fields)
    for escape, char in ("\\n", "\n"), ("\\t", "\t"), ("\\/", "/"), ("\\\\", "\\"):
        plain = plain.replace(escape, char)
    return text if plain == text else f"{text}\n{plain}"


def _walk(value: object, field: str = "") -> Iterator[tuple[str, object]]:
    """Yields what is in nested dicts and lists, each with the name of its field."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(item, str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item, field)
    elif value is not None:
        yield field, value


def _anchor(value: str) -> str:
    """Returns the word by which the texts are found that may hold a value."""
    return max(_ANCHOR.findall(value), key=len, default="")


def _list_values(events: Sequence[Event], recorded: RecordedCall) -> list[str]:
    """Lists what an agent must know to call its tools: ids, numbers, names, paths.

    An argument without blanks is a value; of texts, such as commands, the words are
    that look like one. Credentials are none, nor is what the guard's own tool is given.
    """
    values: list[str] = []
    later = (event for event in events[recorded.index :] if not event.partial)
    answer = takewhile(lambda each: not each.get_function_responses(), later)
    own = (event for event in answer if event.author == recorded.event.author)
    calls = [call for event in own for call in event.get_function_calls()]
    own_names = RECALL_TOOL, *INTERNAL_CALLS
    asked = (call.args for call in calls if not (call.name or "").startswith(own_names))
    for field, leaf in (leaf for args in asked for leaf in _walk(args)):
        if isinstance(leaf, bool) or _SECRET_FIELD.search(field):
            continue
        words = [text := str(leaf)]
        if len(text) > 100 or re.search(r"\s", text):
            words = [w.strip(".-/") for w in _WORD.findall(text) if _NAME.search(w)]
        least_chars = 4 if isinstance(leaf, str) else 2
        values += [word for word in words if len(word) >= least_chars]
    return [each for each in dict.fromkeys(values) if not _SECRET.match(each)]


def list_missing(missing: Sequence[tuple[int, Needed]], most: int = 20) -> list[str]:
    """Says of values where they last stood; each with the first call that needed it."""
    first = dict[str, tuple[int, Needed]]()
    for number, each in missing:
        first.setdefault(each.value, (number, each))
    lines = [
        f"call {number:,}: {quote_line(each.value)[:80]!r} was missing; last in a "
        f"{quote_line(each.place)}, {each.calls_ago:,} call{'s'[: each.calls_ago - 1]} "
        "before"
        for number, each in first.values()
    ]
    more = f"and {len(lines) - most:,} more"
    return lines[:most] + [more] * (len(lines) > most)
