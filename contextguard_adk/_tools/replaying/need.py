"""Finds the values that recorded calls needed, and whether a request had them.

A value is an id, a number, a name or a path. A model call needs a value if its answer
gives the value to a tool, and if a content of its whole request holds the value. The
whole request is the one that no guard has cut.
"""

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

# A word that may be a name, a path or an id, such as "src/a.py" or "a@b.org".
_WORD = re.compile(r"[\w.@/+-]+")
# A word in a longer text is a value if it has a sign within it ("a/b", "a_b", "a@b",
# "a.b"), a capital after a small letter ("aB"), a letter beside a digit ("v2", "4ab"),
# or if it is a number of at least 4 digits.
_NAME = re.compile(r"[/_@]|\w\.\w|[a-z][A-Z]|[^\W\d]\d|\d[^\W\d]\w|^\d{4,}$")

# The beginnings of keys and tokens of common services, and field names of credentials.
_SECRET = re.compile(r"(sk-|[sr]k_live_|gh[a-z]_|xox[a-z]-|AKIA|AIza|eyJ)[\w-]{12}")
_SECRET_FIELD = re.compile(r"passw|secret|api_?key|credential|authori[sz]ation", re.I)

# The longest word of a value is its anchor: only texts with this word are searched for
# the value.
_ANCHOR = re.compile(r"[A-Za-z0-9_]+")

# A longer argument is a text, of which only some words are values.
MAX_VALUE_CHARS = 100

# Nearly every request holds shorter values by chance.
LEAST_TEXT_CHARS = 4
LEAST_NUMBER_CHARS = 2

# The beginning of a value that a line on missing values shows.
MAX_SHOWN_CHARS = 80

# The escapes of JSON. An escaped backslash before an "n" is read as a backslash and a
# line break, so a value such as "C:\new" is not found in its escaped form.
ESCAPES = (("\\n", "\n"), ("\\t", "\t"), ("\\/", "/"), ("\\\\", "\\"))


@dataclass(frozen=True)
class Needed:
    """A value that a call needed, and where the whole request held the value.

    A request may hold the value in several contents. "The content" below is the last of
    these.

    Attributes:
        value: The value.
        place: The part of the content that holds the value: "result of search", for
            instance.
        calls_ago: How many whole requests have had the content, from the first one to
            that of the call; at least 1.
        is_far: Whether the content lies more than half a window before the end of the
            whole request.
    """

    value: str
    place: str
    calls_ago: int
    is_far: bool


@dataclass(frozen=True)
class Share:
    """The number of needed values, and of the missing ones among them.

    The text of a share is the part of the needed values that requests held, such as
    "87.5%", or "-" if no values were needed.
    """

    needed: int
    missing: int

    def __str__(self) -> str:
        return f"{1 - self.missing / self.needed:.1%}" if self.needed else "-"


class Needs:
    """The values that the recorded calls of a session took from the conversation.

    A part number is the index of a part in the list of all parts of the recorded
    events.
    """

    def __init__(self, events: Sequence[Event], calls: Iterable[RecordedCall]) -> None:
        # The values that each call gave to tools, by the index of the call's event.
        self._values = {call.index: _list_values(events, call) for call in calls}

        # The parts are kept because the key of a payload is its `id`. Python may give
        # the `id` of a deleted payload to another object.
        self._parts = [part for event in events for part in parts_of(event.content)]
        self._texts = [read_part(part) for part in self._parts]
        # By the key of a part, its number. The last of equal parts counts.
        self._part_numbers = dict[object, int]()
        for part_number, part in enumerate(self._parts):
            self._part_numbers[_key(part)] = part_number

        self._part_numbers_by_anchor = self._index_anchors()
        # By value, the numbers of the parts that hold the value; filled bit by bit.
        self._holders: dict[str, list[int]] = {}

    def _index_anchors(self) -> dict[str, list[int]]:
        """Returns the numbers of the parts that have an anchor, by the anchor.

        The anchor of a value is its longest word. A search for each value in each text
        would take minutes. So a value is searched only in the texts that have its
        anchor as a word.
        """
        anchors = set[str]()
        for values in self._values.values():
            anchors.update(_find_anchor(value) for value in values)

        part_numbers_by_anchor = defaultdict[str, list[int]](list)
        for part_number, text in enumerate(self._texts):
            # A value without words has the anchor "". Any text may hold such a value.
            possible_anchors = ["", *_ANCHOR.findall(text)]
            for anchor in anchors.intersection(possible_anchors):
                part_numbers_by_anchor[anchor].append(part_number)
        return part_numbers_by_anchor

    def find(
        self, call: RecordedCall, whole: Sequence[types.Content], window_tokens: int
    ) -> list[Needed]:
        """Finds the values that a call needed.

        Args:
            call: One of the recorded calls.
            whole: The contents of its whole request.
            window_tokens: The context window.
        """
        last_holders = self._find_last_holders(self._values[call.index], whole)
        if not last_holders:
            return []

        far_count = self._count_far(whole, window_tokens)
        all_needed = list[Needed]()
        for value, index in last_holders.items():
            # The content was in the whole request of this call. Each later content of
            # the model is the answer to one more request that had the content.
            later_contents = whole[index + 1 :]
            later_answers = [each for each in later_contents if each.role == "model"]
            needed = Needed(
                value=value,
                place=_describe_holder(whole[index], value),
                calls_ago=1 + len(later_answers),
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
        """Returns, by value, the index of the last content that holds the value.

        Values that no content holds are left out. Most parts of a request are recorded
        ones, which many requests have. `_list_holders` searches the recorded parts for
        a value once, for all requests.
        """
        if not values:
            return {}

        parts = self._sort_parts(contents)
        last_holders = dict[str, int]()
        for value in values:
            indexes = list[int]()
            for part_number in self._list_holders(value):
                if part_number in parts.recorded:  # The request has this part.
                    indexes.append(parts.recorded[part_number])
            for other in parts.others:
                if value in other.text:
                    indexes.append(other.content_index)
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
            anchor = _find_anchor(value)
            # An anchor that no part has is not indexed.
            candidates = self._part_numbers_by_anchor.get(anchor, [])
            self._holders[value] = [n for n in candidates if value in self._texts[n]]
        return self._holders[value]

    def _count_far(self, whole: Sequence[types.Content], window_tokens: int) -> int:
        """Counts the contents that end more than half a window before the request ends.

        These are the first contents of the request. With a window of 100 tokens, half a
        window has 200 characters, and contents of 50, 90, 150 and 120 characters give
        2: only the first two end more than 200 characters before the end.
        """
        half_window_chars = 2 * window_tokens  # At four characters a token.
        chars_to_end = 0
        for index in reversed(range(len(whole))):
            chars_to_end += self._count_chars(whole[index])
            if chars_to_end > half_window_chars:
                return index  # All contents before this one end before the border.
        return 0

    def _count_chars(self, content: types.Content) -> int:
        """Counts the characters of a content, in the form of `read_part`."""
        chars = 0
        for part in parts_of(content):
            part_number = self._part_numbers.get(_key(part))
            if part_number is not None:
                chars += len(self._texts[part_number])
            else:
                # ADK may have copied the payload of a recorded part.
                chars += len(read_part(part))
        return chars


class _OtherPart(NamedTuple):
    """The text of a part that is not recorded, such as a summary.

    `content_index` is the index, in the request, of the content with the part.
    """

    content_index: int
    text: str


class _SortedParts(NamedTuple):
    """The parts of a request.

    Attributes:
        recorded: By the number of a recorded part, the index of the last content with
            this part.
        others: The parts that are not recorded.
    """

    recorded: dict[int, int]
    others: list[_OtherPart]


def _key(part: types.Part) -> object:
    """Returns a key that equal parts share: the text, or the `id` of the payload."""
    return part.text or code_of(part) or id(payload_of(part))


def _describe_holder(content: types.Content, value: str) -> str:
    """Describes the first part that holds a value: "result of search".

    The content must have a part that holds the value.
    """
    holders = (part for part in parts_of(content) if value in read_part(part))
    part = next(holders)
    if part.function_call:
        return f"call of {part.function_call.name}"
    if part.function_response:
        return f"result of {part.function_response.name}"
    return f"message of {content.role}"


def read_part(part: types.Part) -> str:
    """Returns a part's text, or the fields and values of its call or result.

    The call {"path": "a.py"} becomes two lines, "path" and "a.py". If the text has
    escapes of JSON, the unescaped text follows the text: a value may have either form.
    The text of a file is "".
    """
    text = part.text or code_of(part)
    if not text:
        lines = list[str]()
        for field, value in _walk(payload_of(part)):
            lines += [field, str(value)]
        text = "\n".join(lines)

    unescaped = text
    for escape, char in ESCAPES:
        unescaped = unescaped.replace(escape, char)
    return text if unescaped == text else f"{text}\n{unescaped}"


def _walk(value: object, field: str = "") -> Iterator[tuple[str, object]]:
    """Yields the values in nested dicts and lists, each after the name of its field.

    A value of a list has the field of the list, and None is left out:
    {"a": {"b": 1}, "c": [2, None]} -> ("b", 1), ("c", 2).
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
    """Returns the longest word of a value; "" if there is no word."""
    return max(_ANCHOR.findall(value), key=len, default="")


def _list_values(events: Sequence[Event], recorded: RecordedCall) -> list[str]:
    """Lists the values that the answer of a call gave to tools, each once.

    Credentials are left out: fields with the name of a credential, and values with the
    beginning of one.
    """
    values = list[str]()
    for field, argument in _walk_arguments(events, recorded):
        is_secret = _SECRET_FIELD.search(field) is not None
        # Nearly every request holds the words "true" and "false" by chance.
        if not is_secret and not isinstance(argument, bool):
            values += _split_values(argument)
    return [value for value in dict.fromkeys(values) if not _SECRET.match(value)]


def _walk_arguments(
    events: Sequence[Event], recorded: RecordedCall
) -> Iterator[tuple[str, object]]:
    """Yields the arguments of the tool calls in an answer, each after its field's name.

    The answer begins with the event of the recorded call, and may be several events of
    the agent. The first tool result after the call ends the answer, even a result for
    another agent. Calls of ADK's own tools and of the recall tool are left out.
    """
    own_names = (RECALL_TOOL, *INTERNAL_CALLS)
    for event in events[recorded.index :]:
        if event.partial:  # A complete event repeats the calls of a partial one.
            continue
        if event.get_function_responses():
            return
        # Events of the user, or of an agent that works in parallel, may stand between.
        if event.author != recorded.event.author:
            continue

        for call in event.get_function_calls():
            if not (call.name or "").startswith(own_names):
                yield from _walk(call.args)


def _split_values(argument: object) -> list[str]:
    """Returns the values in an argument, of at least four characters or two digits.

    - An argument of at most `MAX_VALUE_CHARS` without blanks is one value.
    - In any other argument, the words that look like names, paths or ids are values:
      "open src/a.py." -> "src/a.py".
    """
    text = str(argument)
    is_one_value = len(text) <= MAX_VALUE_CHARS and not re.search(r"\s", text)
    if is_one_value:
        values = [text]
    else:
        names = [word for word in _WORD.findall(text) if _NAME.search(word)]
        # The dot may be that of a sentence.
        values = [name.strip(".-/") for name in names]

    # An argument that is no text is a number.
    is_text = isinstance(argument, str)
    least_chars = LEAST_TEXT_CHARS if is_text else LEAST_NUMBER_CHARS
    return [value for value in values if len(value) >= least_chars]


def list_missing(missing: Sequence[tuple[int, Needed]], most: int = 20) -> list[str]:
    """Returns a line on each missing value.

    The line names the first call that lacked the value, and the last place of the value
    before this call.

    Args:
        missing: The missing values, each after the number of the call that needed it.
            The calls are in order.
        most: How many values get a line of their own. If there are more, a last line
            has the number of the others.
    """
    first_misses = dict[str, tuple[int, Needed]]()
    for number, needed in missing:
        first_misses.setdefault(needed.value, (number, needed))

    lines = list[str]()
    for number, needed in first_misses.values():
        value = quote_line(needed.value)[:MAX_SHOWN_CHARS]
        place = quote_line(needed.place)
        calls = "call" if needed.calls_ago == 1 else "calls"
        lines.append(
            f"call {number:,}: {value!r} was missing; last in a {place}, "
            f"{needed.calls_ago:,} {calls} before"
        )
    if len(lines) <= most:
        return lines
    return [*lines[:most], f"and {len(lines) - most:,} more"]
