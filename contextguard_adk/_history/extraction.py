"""Finds the values of texts and payloads.

A value is a word that an agent may need again exactly: an id, a number, a path, an
address or a name. A payload is the arguments of a tool's call or the result of a tool.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from contextguard_adk._history.credentials import (
    MAX_DEPTH,
    hide_named,
    hide_secrets,
    is_credential,
    looks_secret,
)
from contextguard_adk._history.field_names import Names, find_field, is_id, name_field
from contextguard_adk._history.noise import drop_noise, drop_vectors, is_vector
from contextguard_adk._history.schema_names import (
    find_names_of_object,
    find_names_of_row,
    find_schema_names,
)
from contextguard_adk._measuring.tokens import json_text

MAX_VALUE_CHARS = 120
"""A longer word is no value."""

MAX_WHOLE_CHARS = 48
"""A text that fills a field is a value as a whole if it is not longer than this."""

MAX_TEXT_CHARS = 100_000
"""Only this many characters of a text are searched for values."""

MAX_FOUND = 10_000
"""Only this many values of one payload are read, repeated ones included."""

MAX_FIELD_FOUND = 2_000
"""Only this many values of the fields of one name are kept of a payload."""

MAX_KNOWN = 300_000
"""The process remembers at most this many values, those of all payloads together."""

MAX_PAYLOADS = 4_096
"""The process remembers at most this many payloads, including those without a value."""

_LEAST_VALUE_BYTES = 5
"""The bytes of the shortest value in a list: three characters, a comma and a space."""

_MAX_JSON_DEPTH = 6
"""JSON in a text is parsed if the text is nested less deep than this in its payload.

In the result of an MCP tool, it is nested three deep: {"content": [{"text": "{}"}]}.
"""

_TOKEN = re.compile(
    r"""https?://[^\s"'<>()\[\]{}|\\`]{3,200}         # https://example.com/a?b=1
    | [\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,32}){1,4}  # ann@example.com
    | [~.]{0,2}(?:[\w.@+-]{0,64}/){1,16}[\w.@+-]{1,64} # src/app.py, ~/notes.md
    | [$€£]?\d{1,3}(?:,\d{3}){1,5}(?:\.\d{1,9})?       # $1,234.50
    | [$€£]?\d{1,15}(?:[.:]\d{1,9}){1,4}%?             # 12.5%, 10:30, 1.2.3
    | \w{1,64}(?:(?:[.:-]|->|::)\w{1,64}){0,8}         # order-81, max_turns, re.sub
    """,
    re.VERBOSE,
)
"""The words of a text that may be values."""

_ESCAPED_SPACE = re.compile(r"\\[nrt]")
"""The escapes in JSON that stand for white space."""

_ESCAPE_SIGN = re.compile(r"\\(?=[\"/])")
"""The escapes in JSON before a mark that stands for itself."""

_LINE_NUMBER = re.compile(r"(?m)^[ \t]{0,16}\d{1,6}(?=[\t:| ])")
"""The number before each line of a file: "  12: import re"."""

_CODE = re.compile(r"[a-z][^\Wa-zA-Z]*[A-Z]|\w_\w|\w\.\w|::|->|@|/")
"""The signs of a name in code: maxTurns, max_turns, re.sub, a::b, a->b, a@b, a/b."""

NAMING = 3.0
"""The weight of a name of a schema: a table, a column, a field or a parameter."""

TELLING = 1.0
"""The weight of a value that has the form of one: an id, a path, a name in code."""

LESS_TELLING = 0.5
"""The weight of a value that only fills its field: a number or a short text."""

WeightedValue = tuple[str, float]
"""A value and its weight, which is `NAMING`, `TELLING` or `LESS_TELLING`."""

Found = Sequence[WeightedValue]
"""The values of a payload."""


class Reading(NamedTuple):
    """What was read of a payload.

    Attributes:
        values: The values, each with its weight.
        fields: For each value, the name of the field in which it stands; "" for none.
    """

    values: Found
    fields: Sequence[str]


class KnownValues:
    """Reads the values of payloads, and remembers the payloads that were read last."""

    def __init__(self) -> None:
        # The payloads in the order in which they were last read, the newest one last.
        self._found: OrderedDict[Hashable, Reading] = OrderedDict()
        self._value_count = 0
        self._lock = threading.Lock()

    def read(self, payload: object) -> Found:
        """Returns the values of a payload without repeats, as `read_fields` does."""
        return self.read_fields(payload).values

    def read_fields(self, payload: object) -> Reading:
        """Returns the values of a payload without repeats, and the fields they are in.

        The values are remembered. A payload that is still remembered is not read again.
        At most `MAX_FOUND` values of the payload are read.
        """
        # The object {"a": 1} and the text of its JSON have the same bytes in
        # `json_text`, but the names of fields are read in the object alone.
        is_text = isinstance(payload, str)
        key = (is_text, blake2b(json_text(payload)).digest())
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]

        reading = _read(payload)
        with self._lock:
            # Another thread may have read the same payload in the meantime.
            replaced = self._found.get(key)
            if replaced:
                self._value_count -= len(replaced.values)
            self._value_count += len(reading.values)
            self._found[key] = reading

            # The payloads that were last read the longest ago are forgotten. The loop
            # keeps the new payload, which never has more than `MAX_FOUND` values.
            while len(self._found) > MAX_PAYLOADS or self._value_count > MAX_KNOWN:
                _key, oldest = self._found.popitem(last=False)
                self._value_count -= len(oldest.values)
        return reading


_known_values = KnownValues()

read_values = _known_values.read
"""Returns the values of a payload; remembers them for the whole process."""

read_fields = _known_values.read_fields
"""Returns the same values, and the fields in which they stand."""


def find_values(text: str, names: Names = ()) -> Iterator[str]:
    """Yields the values of a text in their order, a repeated value each time.

    Credentials, the numbers of cards, the line numbers of files, and noise such as
    base64 are left out. Only the first `MAX_TEXT_CHARS` characters are read.

    Args:
        text: The text.
        names: The names of the fields around the text; () for a text in no field.
    """
    # Some numbers in a vector have as many digits as cards, so vectors go first.
    without_vectors = drop_vectors(text[:MAX_TEXT_CHARS])
    without_credentials = hide_named(without_vectors, names)
    without_noise = _drop_noise(without_credentials, names)

    may_be_random = is_id(names, text)
    searched_text = _LINE_NUMBER.sub("", without_noise)
    for token in _TOKEN.findall(searched_text):
        # The marks of a sentence are cut off: "order-81." gives "order-81". A slash is
        # cut off at the end only, because it may begin a path: "./a/b" gives "/a/b".
        value = token.rstrip(".-:,+/").lstrip(".-:,+")
        if 3 <= len(value) <= MAX_VALUE_CHARS and is_value(value, may_be_random):
            yield value


def _drop_noise(text: str, names: Names) -> str:
    """Returns a text without noise. A text that is an id by its name stays."""
    is_short_id = len(text) <= MAX_VALUE_CHARS and is_id(names, text)
    return text if is_short_id else drop_noise(text)


_Placed = tuple[str, float, Names]
"""A value, its weight, and the names of the fields around it."""


def _read(payload: object) -> Reading:
    """Reads the values of a payload. No field takes the room of all others."""
    all_values = _walk_values(payload, walked={}, names=(), depth=0)
    fields: dict[WeightedValue, str] = {}
    counts = Counter[str]()
    for text, weight, names in itertools.islice(all_values, 2 * MAX_FOUND):
        value = (text, weight)
        field = find_field(names)
        if value in fields or counts[field] >= MAX_FIELD_FOUND:
            continue
        counts[field] += 1
        fields[value] = field
        if len(fields) >= MAX_FOUND:
            break
    return Reading(list(fields), list(fields.values()))


def _walk_values(
    value: object, walked: dict[int, object], names: Names, depth: int
) -> Iterator[_Placed]:
    """Yields the values of a payload; leaves out the fields that hold credentials.

    Args:
        value: The payload, or a value that is nested in the payload.
        walked: The objects and lists that were walked so far, by their `id`. None of
            them is walked again, because a payload may contain itself.
        names: The names of the fields around `value`, the outermost one first.
        depth: How many objects, lists and texts with JSON are around `value`; 0 for the
            payload itself.
    """
    if depth > MAX_DEPTH or id(value) in walked:
        return

    if isinstance(value, dict):
        # The object is kept as well, so that no other object gets the same `id`.
        walked[id(value)] = value
        yield from _walk_fields(value, walked, names, depth)
    elif isinstance(value, list | tuple):
        walked[id(value)] = value
        if is_vector(value):
            return
        yield from _place_schema_names(find_names_of_row(value), names)
        for item in value:
            yield from _walk_values(item, walked, names, depth + 1)
    elif isinstance(value, str):
        yield from _walk_text(value.strip(), walked, names, depth)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = _write_number(value, names)
        if number:
            yield number, LESS_TELLING, names


def _walk_fields(
    fields: dict[Any, Any], walked: dict[int, object], names: Names, depth: int
) -> Iterator[_Placed]:
    """Yields the values in the names of fields, and the values in the fields.

    `walked`, `names` and `depth` are those that `_walk_values` has for the object with
    the fields.
    """
    yield from _place_schema_names(find_names_of_object(fields), names)

    for key, item in fields.items():
        # Some payloads have the ids of objects as names: {"ord-81": {"sum": 4}}.
        name = key if isinstance(key, str) else ""
        has_digit = any(char.isdigit() for char in name)
        if has_digit and is_value(name) and hide_secrets(name) == name:
            yield name, TELLING, names

        item_names = name_field(fields, names, key)
        yield from _walk_values(item, walked, item_names, depth + 1)


def _place_schema_names(schema_names: Iterable[str], names: Names) -> Iterator[_Placed]:
    """Yields the names of a schema as values, without those that are credentials."""
    for name in schema_names:
        is_shown = hide_secrets(name) == name
        if is_shown and not is_credential(names, name):
            yield name, NAMING, names


def _write_number(number: float, names: Names) -> str:
    """Writes a number as a value.

    Returns "" for a number that is no value: a single digit, a credential by its names,
    the number of a card, NaN, and a number of 1e18 or more.
    """
    # Python refuses to write integers with thousands of digits. For NaN the comparison
    # is false.
    is_small = abs(number) < 1e18
    if not is_small or is_credential(names, number):
        return ""

    text = str(number)
    is_single_digit = len(text) == 1
    is_card = hide_secrets(text, names) != text  # A number can hide nothing else.
    return "" if is_single_digit or is_card else text


def _walk_text(
    text: str, walked: dict[int, object], names: Names, depth: int
) -> Iterator[_Placed]:
    """Yields the values of a text.

    - For the JSON of an object or a list: the values of the parsed JSON.
    - For a short text in a field: the text itself, and after it the values in the text.
      The text itself is left out if it has a credential, or is one of these values.
    - For any other text: the values in the text. The names of a schema come first.

    Args:
        text: The text, without white space at its ends.
        walked: See `_walk_values`.
        names: See `_walk_values`.
        depth: See `_walk_values`.
    """
    looks_like_json = text.startswith(("{", "["))
    if looks_like_json and depth < _MAX_JSON_DEPTH:
        # A text that only looks like JSON, such as one that was cut, is read as any
        # other text below.
        with contextlib.suppress(ValueError, RecursionError):
            yield from _walk_values(json.loads(text), walked, names, depth + 1)
            return
    if looks_like_json:
        text = _ESCAPE_SIGN.sub("", _ESCAPED_SPACE.sub(" ", text))
    if is_credential(names, text):
        return

    schema_names = find_schema_names(text[:MAX_TEXT_CHARS])
    yield from _place_schema_names(schema_names, names)

    values = list(find_values(text, names))
    is_short = 3 <= len(text) <= MAX_WHOLE_CHARS and "\n" not in text
    # A text that is the whole payload fills no field.
    fills_field = depth > 0 and is_short
    is_new_value = fills_field and text not in values
    if is_new_value and _drop_noise(hide_secrets(text, names), names) == text:
        yield text, LESS_TELLING, names
    for value in values:
        yield value, TELLING, names


def is_value(word: str, may_be_random: bool = False) -> bool:
    """Whether a word names something exactly, and does not look like a credential.

    These words name something exactly:

    - numbers of four and more digits
    - other words with a digit, such as "a7"
    - codes of up to four capital letters, such as "EUR"
    - names in code, such as "max_turns" or "a/b"

    Args:
        word: The word.
        may_be_random: Whether the word is an id by its name, so that it may look
            random as some credentials do.
    """
    # Most words have letters alone, for which the quick `isalpha` is enough.
    has_digit = not word.isalpha() and any(char.isdigit() for char in word)

    if has_digit:
        is_exact = len(word) >= 4 or not word.isdigit()
    else:
        # Longer words in capital letters are mostly plain words.
        is_short_code = word.isascii() and word.isupper() and len(word) <= 4
        is_exact = is_short_code or _CODE.search(word) is not None
    return is_exact and not looks_secret(word, may_be_random)


def name_hidden(values: Iterable[str], shown: str, max_bytes: int) -> str:
    """Lists the values that a text does not show, with commas between them.

    If not all of them fit into `max_bytes`, paths, addresses and ids are chosen first.
    The chosen values keep their order.

    Args:
        values: The values of the whole text, in their order. A repeated value is listed
            once.
        shown: The shortened text. A value in this text is not listed.
        max_bytes: The most bytes of the list.
    """
    unique_values = list(dict.fromkeys(values))

    chosen_values = set[str]()
    left_bytes = max_bytes
    for value in sorted(unique_values, key=_rank_kind):
        value_bytes = len(value.encode("utf-8", "replace")) + len(", ")
        if value_bytes <= left_bytes and value not in shown:
            left_bytes -= value_bytes
            chosen_values.add(value)

        is_full = left_bytes < _LEAST_VALUE_BYTES
        if is_full:
            break

    return ", ".join(value for value in unique_values if value in chosen_values)


def _rank_kind(value: str) -> int:
    """Returns the rank of a value in `name_hidden`; values of rank 0 are chosen first.

    The ranks: 0 for paths and addresses, 1 for ids such as "ord-81", 2 for all others,
    such as numbers and names in code.
    """
    if "/" in value or "@" in value:
        return 0

    has_digit = re.search(r"\d", value)
    has_letter = re.search(r"[^\W\d]", value)
    return 1 if has_digit and has_letter else 2
