"""Finds the values of a text, and hides its credentials.

A value is a word that an agent may need again exactly: an id, a number, a path, an
address or a name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

from contextguard_adk._measuring.tokens import json_text

MAX_VALUE_CHARS = 120
"""A longer word is no value."""

MAX_WHOLE_CHARS = 48
"""A text that fills a field is a value as a whole if it is not longer than this."""

MAX_TEXT_CHARS = 100_000
"""Only this many characters of a text are searched for values."""

MAX_FOUND = 10_000
"""Only this many values of one payload are read, repeated ones included."""

MAX_KNOWN = 300_000
"""The process remembers at most this many values of all payloads together."""

MAX_PAYLOADS = 4_096
"""The process remembers at most this many payloads, including those without a value."""

_LEAST_VALUE_BYTES = 5
"""The room that the shortest value takes: three characters, a comma and a space."""

_MAX_DEPTH = 20
"""Objects and lists that are nested deeper are not read."""

_MAX_JSON_DEPTH = 3
"""A text that holds JSON is parsed if it is nested less deep than this."""


_TOKEN = re.compile(
    r"""https?://[^\s"'<>()\[\]{}|\\`]{3,200}
    | [\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,32}){1,4}
    | [~.]{0,2}(?:[\w.@+-]{0,64}/){1,16}[\w.@+-]{1,64}
    | [$€£]?\d{1,3}(?:,\d{3}){1,5}(?:\.\d{1,9})?
    | [$€£]?\d{1,15}(?:[.:]\d{1,9}){1,4}%?
    | \w{1,64}(?:(?:[.:-]|->|::)\w{1,64}){0,8}
    """,
    re.VERBOSE,
)
_WORD = re.compile(r"[^\s,;\"']{8,}")
_LINE_NUMBER = re.compile(r"(?m)^[ \t]{0,16}\d{1,6}(?=[\t:| ])")
_CODE = re.compile(r"[a-z][^\Wa-zA-Z]*[A-Z]|\w_\w|\w\.\w|::|->|@|/")
_PAGE = r"(?<!page)(?<!page[_-])"  # Not where a list goes on.
_KEY = r"(?:api|access|account|encryption|master|private|signing|ssh)[_-]?key"
_SECRET_NAME = re.compile(
    rf"passw|passphrase|(?<![a-z])pass$|pwd$|secret|{_KEY}|authoriz|credential|cookie|"
    rf"cvv|{_PAGE}token(?!s)",
    re.IGNORECASE,
)
_NAME = (
    # A word is read once, from its beginning: not again from each of its letters.
    r"(?:(?<!\w)\w*?(?:passw\w{0,8}|\w_pass|"
    r"pwd(?![\\\"']{0,4}[ \t]{0,4}[:=][ \t]{0,4}[/~])|"  # No folder.
    rf"secret\w{{0,24}}|{_PAGE}token|{_KEY})|"
    r"passphrase|authorization|credentials?|cookie|cvv)"
)
_SCHEME = r"(?:(?:bearer|basic|digest|token)[ \t]{1,4})"
_SECRET = re.compile(
    # An address with a password, or a signed one.
    r"\w[\w+.-]{0,20}://[^\s/@]{0,200}:[^\s/@]{1,200}@\S{0,2000}|"
    r"(?<=[?&])(?:x-amz-\w{1,20}|sig|signature|key)=[^&\s\"']{1,2000}|"
    rf"{_SCHEME}\S{{8,2000}}|"
    # A name, and what stands behind it: in quotes, also escaped ones, or a word.
    rf"(?:--{_NAME}[ \t]{{1,4}}|{_NAME}[\\\"']{{0,4}}[ \t]{{0,4}}[:=][ \t]{{0,4}}"
    rf"(?:\r?\n[ \t]{{1,16}})?){_SCHEME}?"
    r"(?:\"(?:[^\"\\\n]|\\.){1,2000}|'(?:[^'\\\n]|\\.){1,2000}|"
    r"\\{1,3}[\"'][^\"'\\\n]{1,2000}|\S{1,2000})|"
    r"-----BEGIN[^-]{1,40}-----[^-]{1,8000}",
    re.IGNORECASE,
)
_CARD = re.compile(
    r"(?<!\d)(?:\d{4}(?P<gap>[ -])(?:\d{4}(?P=gap)\d{4}(?P=gap)\d{4}|"
    r"\d{6}(?P=gap)\d{5})|\d{13,19})(?!\d)"
)
_KEY_SHAPE = re.compile(
    r"(?:sk|pk|rk)[-_]\w|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|A[KS]IA[A-Z0-9]{12}|"
    r"AIza|ya29\.|eyJ[\w-]{8}"
)

TELLING = 1.0
"""How telling a value is that has the form of one: an id, a path, a name in code."""

LESS_TELLING = 0.5
"""How telling a value is that only fills its field: a number or a short text."""

Found = Sequence[tuple[str, float]]
"""The values of a payload, each with how telling it is."""


class KnownValues:
    """Remembers the values of the payloads that were read last."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Found] = OrderedDict()  # The newest last.
        self._value_count = 0
        self._lock = threading.Lock()

    def read(self, payload: object) -> Found:
        """Returns the values of a payload, each once; remembers them."""
        # A text has the same bytes as the payload that it is the JSON of.
        is_text = isinstance(payload, str)
        key = (is_text, blake2b(json_text(payload)).digest())
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]

        first_values = itertools.islice(walk_values(payload), MAX_FOUND)
        found = list(dict.fromkeys(first_values))

        with self._lock:
            # Another thread may have read the same payload in the meantime.
            replaced = self._found.get(key, ())
            self._value_count += len(found) - len(replaced)
            self._found[key] = found

            # The payloads that were not read for the longest time make room.
            while len(self._found) > MAX_PAYLOADS or self._value_count > MAX_KNOWN:
                _, oldest = self._found.popitem(last=False)
                self._value_count -= len(oldest)
        return found


read_values = KnownValues().read
"""Returns the values of a payload; remembers them for the whole process."""


def is_secret_name(name: str) -> bool:
    """Whether a field or argument of this name holds a credential."""
    return _SECRET_NAME.search(name) is not None


def without_secrets(value: Any, depth: int = 0) -> Any:
    """Returns a payload without the fields that hold credentials.

    Objects and lists that are nested more than 20 deep come back empty.
    """
    if isinstance(value, dict):
        if depth >= _MAX_DEPTH:
            return {}
        return {
            name: without_secrets(item, depth + 1)
            for name, item in value.items()
            if not is_secret_name(str(name))
        }

    if isinstance(value, list | tuple):
        if depth >= _MAX_DEPTH:
            return []
        return [without_secrets(item, depth + 1) for item in value]

    return value


def find_values(text: str) -> Iterator[str]:
    """Yields the values of a text in their order, a repeated value each time.

    Credentials are left out: a word may have the form of one, or stand behind a name of
    one. So are line numbers at the beginning of a line.
    """
    # Cards first: the text behind a card may begin like the name of a credential.
    without_cards = _CARD.sub(_mask_card, text[:MAX_TEXT_CHARS])
    without_credentials = _SECRET.sub(" ", without_cards)
    searched = _LINE_NUMBER.sub("", without_credentials)
    for token in _TOKEN.findall(searched):
        # The marks of a sentence around a word are no part of it; "./" before a path is
        # cut as well, its first "/" stays.
        value = token.rstrip(".-:,+/")
        if not value.startswith("/"):
            value = value.lstrip(".-:,+")
        if 3 <= len(value) <= MAX_VALUE_CHARS and is_value(value):
            yield value


def walk_values(
    value: object, seen: dict[int, object] | None = None, depth: int = 0
) -> Iterator[tuple[str, float]]:
    """Yields the values of a payload, each with how telling it is.

    Fields that hold credentials are left out.

    Args:
        value: The payload, or a value that is nested in it.
        seen: The objects and lists that were already walked, by their ids; None for the
            payload itself. They are not walked again: a payload may contain itself.
        depth: How deep the value is nested; 0 for the payload itself.
    """
    if seen is None:
        seen = {}
    if depth > _MAX_DEPTH or id(value) in seen:
        return

    if isinstance(value, dict):
        seen[id(value)] = value  # While it is kept, no other object gets its id.
        yield from _walk_fields(value, seen, depth)
    elif isinstance(value, list | tuple):
        seen[id(value)] = value
        for item in value:
            yield from walk_values(item, seen, depth + 1)
    elif isinstance(value, str):
        yield from _read_text(value.strip(), seen, depth)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = _write_number(value)
        if number:
            yield number, LESS_TELLING


def _walk_fields(
    fields: dict[Any, Any], seen: dict[int, object], depth: int
) -> Iterator[tuple[str, float]]:
    """Yields the values in the names and in the contents of fields."""
    for key, item in fields.items():
        name = key if isinstance(key, str) else ""
        if is_secret_name(name):
            continue

        # Some payloads have the ids of objects as names: {"ord-81": {"sum": 4}}.
        has_digit = any(char.isdigit() for char in name)
        if has_digit and is_value(name):
            yield name, TELLING
        yield from walk_values(item, seen, depth + 1)


def _write_number(number: float) -> str:
    """Writes a number that may be a value.

    "" for a single digit, the number of a card, and a number that is too large.
    """
    # "not <" also holds for NaN. Python refuses to write integers with many digits.
    if not abs(number) < 1e18:
        return ""
    text = str(number)
    return text if len(text) >= 2 and hide_secrets(text) == text else ""


def _read_text(
    text: str, seen: dict[int, object], depth: int
) -> Iterator[tuple[str, float]]:
    """Yields the values of a text.

    - If the text is JSON: the values of the parsed payload.
    - If the text is short and fills a field: the text itself, unless it has a
      credential, and then the values in it.
    - Otherwise: the values in the text.
    """
    if text.startswith(("{", "[")) and depth < _MAX_JSON_DEPTH:
        with contextlib.suppress(ValueError, RecursionError):
            yield from walk_values(json.loads(text), seen, depth + 1)
            return

    values = list(find_values(text))
    is_short = 3 <= len(text) <= MAX_WHOLE_CHARS and "\n" not in text
    fills_field = depth > 0 and is_short
    if fills_field and text not in values and hide_secrets(text) == text:
        yield text, LESS_TELLING
    for value in values:
        yield value, TELLING


def hide_secrets(text: str) -> str:
    """Leaves out credentials; writes x for the digits of card numbers.

    A word is a credential if it has the form of one, or stands behind a name of one.
    """
    without_cards = _CARD.sub(_mask_card, text)  # First, as in `find_values`.
    without_named = _SECRET.sub(" ", without_cards)
    return _WORD.sub(_drop_secret, without_named)


def _drop_secret(match: re.Match[str]) -> str:
    word = match.group()
    return "" if _looks_secret(word) else word


def is_value(word: str) -> bool:
    """Whether a word names something exactly, and has not the form of a credential.

    These words do: numbers of four and more digits, other words with a digit, codes in
    capital letters such as "EUR", and names in code such as "max_turns" or "a/b".
    """
    has_digit = not word.isalpha() and any(char.isdigit() for char in word)
    if has_digit:
        is_exact = len(word) >= 4 or not word.isdigit()
    else:
        # Longer words in capital letters are mostly plain words.
        is_short_code = word.isascii() and word.isupper() and len(word) <= 4
        is_exact = is_short_code or _CODE.search(word) is not None
    return is_exact and not _looks_secret(word)


def _mask_card(match: re.Match[str]) -> str:
    """Writes x for each digit of a card's number; other long numbers stay."""
    number = match.group()
    digits = [int(char) for char in number if char.isdecimal()]
    # The length stays, so that names before and behind are still found.
    return re.sub(r"\d", "x", number) if _is_card(digits) else number


def _is_card(digits: list[int]) -> bool:
    """Whether digits pass the check of card numbers (Luhn)."""
    total = sum(digits[-1::-2])
    for digit in digits[-2::-2]:
        total += sum(divmod(2 * digit, 10))  # The sum of the digits of the double.
    return total % 10 == 0


def _looks_secret(word: str) -> bool:
    """Whether a word has the form of a credential.

    It may begin like a key, be an address with a password, be the number of a card, or
    be a long word that mixes capital letters, small letters and digits.
    """
    if _KEY_SHAPE.match(word):
        return True
    if "://" in word and "@" in word.split("/")[2]:
        return True
    if word.isdecimal() and 13 <= len(word) <= 19:
        return _is_card([int(char) for char in word])

    if len(word) < 24 or not word.isalnum():
        return False
    has_upper = any(char.isupper() for char in word)
    has_lower = any(char.islower() for char in word)
    has_decimal = any(char.isdecimal() for char in word)
    return has_upper and has_lower and has_decimal


def name_hidden(values: Iterable[str], shown: str, max_bytes: int) -> str:
    """Lists the values that a text does not show, with commas between them.

    If not all of them fit into `max_bytes`, paths, addresses and ids are chosen first.
    The chosen values keep their order.

    Args:
        values: The values of the whole text, in their order; repeated ones count once.
        shown: The text in which they are searched.
        max_bytes: How long the list may be.
    """
    places = {value: place for place, value in enumerate(dict.fromkeys(values))}

    chosen = []
    left_bytes = max_bytes
    for value in sorted(places, key=_rank_kind):
        size_bytes = len(value.encode("utf-8", "replace")) + len(", ")
        if size_bytes <= left_bytes and value not in shown:
            left_bytes -= size_bytes
            chosen.append(value)
        if left_bytes < _LEAST_VALUE_BYTES:
            break

    return ", ".join(sorted(chosen, key=places.__getitem__))


def _rank_kind(value: str) -> int:
    """Returns the rank of a value: 0 is named first.

    0 for paths and addresses, 1 for ids, 2 for numbers and for words of code.
    """
    if "/" in value or "@" in value:
        return 0

    has_digit = re.search(r"\d", value)
    has_letter = re.search(r"[^\W\d]", value)
    return 1 if has_digit and has_letter else 2
