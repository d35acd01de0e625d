"""What an agent may need again of a text: ids, numbers, paths, addresses, names."""

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
MAX_WHOLE_CHARS = 48  # A shorter text in a field is a value as it stands.
MAX_TEXT_CHARS = 100_000  # Of what comes after in one text nothing is read.
MAX_FOUND = 10_000  # Values of one payload, repeated ones included.
MAX_KNOWN = 300_000  # Values that the process remembers, of all payloads.
MAX_PAYLOADS = 4_096  # Those included that hold no value.

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


Found = Sequence[tuple[str, float]]
"""The values of a payload, and how telling each is."""


class KnownValues:
    """What was found in the payloads that were read last."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Found] = OrderedDict()  # The newest last.
        self._value_count = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Found | None:
        """What was found in a payload, if it is still known."""
        with self._lock:
            if key not in self._found:
                return None
            self._found.move_to_end(key)
            return self._found[key]

    def add(self, key: Hashable, found: Found) -> None:
        """Keeps what was found in a payload; the oldest ones make room."""
        with self._lock:
            self._value_count += len(found) - len(self._found.get(key, ()))
            self._found[key] = found
            while len(self._found) > MAX_PAYLOADS or self._value_count > MAX_KNOWN:
                _, oldest = self._found.popitem(last=False)
                self._value_count -= len(oldest)


_KNOWN = KnownValues()


def read_values(payload: object) -> Found:
    """Returns what `walk_values` finds, each once; a payload is walked only once."""
    key = isinstance(payload, str), blake2b(json_text(payload)).digest()
    found = _KNOWN.get(key)
    if found is None:
        found = [*dict.fromkeys(itertools.islice(walk_values(payload), MAX_FOUND))]
        _KNOWN.add(key, found)
    return found


def is_secret_name(name: str) -> bool:
    """Whether a field or argument of this name holds a credential."""
    return _SECRET_NAME.search(name) is not None


def without_secrets(value: Any, depth: int = 0) -> Any:
    """Returns a payload without the fields that hold credentials."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not is_secret_name(str(k))}
        return {k: without_secrets(v, depth + 1) for k, v in kept.items() if depth < 20}
    if isinstance(value, list | tuple):
        return [without_secrets(item, depth + 1) for item in value if depth < 20]
    return value


def find_values(text: str) -> Iterator[str]:
    """Yields the values of a text in their order, repeated ones each time.

    Credentials, by their shape or by what stands before them, are left out.
    """
    text = _blank_secrets(text[:MAX_TEXT_CHARS])
    for token in _TOKEN.findall(_LINE_NUMBER.sub("", text)):
        value = token.rstrip(".-:,+/")
        value = value if value.startswith("/") else value.lstrip(".-:,+")
        if 3 <= len(value) <= MAX_VALUE_CHARS and is_value(value):
            yield value


def walk_values(
    value: object, seen: dict[int, object] | None = None, depth: int = 0
) -> Iterator[tuple[str, float]]:
    """Yields the values of a payload, and how telling each is: 0.5 or 1.

    Fields that hold credentials are left out. What was `seen` is not walked again: a
    payload may contain itself.
    """
    seen = {} if seen is None else seen
    if depth > 20 or id(value) in seen or value is None or isinstance(value, bool):
        return
    if isinstance(value, dict | list | tuple):
        seen[id(value)] = value  # Kept, so that no other object has its id.
    if isinstance(value, dict):
        for name, item in value.items():
            name = name if isinstance(name, str) else ""
            if is_secret_name(name):
                continue
            if any(map(str.isdigit, name)) and is_value(name):
                yield name, 1.0  # Some key objects by their ids.
            yield from walk_values(item, seen, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from walk_values(item, seen, depth + 1)
    elif isinstance(value, int | float):
        # Neither infinite, nor with more digits than Python writes.
        text = str(value) if abs(value) < 1e18 else ""
        if len(text) >= 2 and hide_secrets(text) == text:
            yield text, 0.5
    elif isinstance(value, str):
        yield from _read_text(value.strip(), seen, depth)


def _read_text(
    text: str, seen: dict[int, object], depth: int
) -> Iterator[tuple[str, float]]:
    if text[:1] in ("{", "[") and depth < 3:
        with contextlib.suppress(ValueError, RecursionError):
            yield from walk_values(json.loads(text), seen, depth + 1)
            return
    found = list(find_values(text))
    is_short = depth and 3 <= len(text) <= MAX_WHOLE_CHARS and "\n" not in text
    if is_short and text not in found and hide_secrets(text) == text:
        yield text, 0.5
    yield from ((value, 1.0) for value in found)


def hide_secrets(text: str) -> str:
    """Leaves credentials out of a text, by their shape or what stands before them.

    Numbers of cards are masked.
    """
    text = _blank_secrets(text)
    return _WORD.sub(lambda m: "" if _looks_secret(m[0]) else m[0], text)


def is_value(word: str) -> bool:
    """Whether a word names something exactly, and is no credential by its shape."""
    if any(map(str.isdigit, word)):
        is_named = len(word) >= 4 or not word.isdigit()
    elif _CODE.search(word):
        is_named = True
    else:  # Codes as of airports or currencies; longer ones are mostly words.
        is_named = word.isascii() and word.isupper() and len(word) <= 4
    return is_named and not _looks_secret(word)


def _blank_secrets(text: str) -> str:
    # Cards first: what follows one of them may begin like a name.
    return _SECRET.sub(" ", _CARD.sub(_mask_card, text))


def _mask_card(match: re.Match[str]) -> str:
    """Writes x for each digit of a card's number; other long numbers stay."""
    digits = [int(char) for char in match.group() if char.isdecimal()]
    # Words as long as they were: names before, behind and around are still found.
    return re.sub(r"\d", "x", match.group()) if _is_card(digits) else match.group()


def _is_card(digits: list[int]) -> bool:
    """Whether digits pass the check of card numbers (Luhn)."""
    doubled = (2 * digit - 9 * (digit > 4) for digit in digits[-2::-2])
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _looks_secret(word: str) -> bool:
    if _KEY_SHAPE.match(word) or ("://" in word and "@" in word.split("/")[2]):
        return True
    if word.isdecimal() and 13 <= len(word) <= 19:
        return _is_card([*map(int, word)])
    kinds = (str.isupper, str.islower, str.isdecimal)
    is_mixed = all(any(map(is_kind, word)) for is_kind in kinds)
    return len(word) >= 24 and word.isalnum() and is_mixed


def _rank_kind(value: str) -> int:
    """Ranks paths and addresses before ids, these before numbers and words of code."""
    if "/" in value or "@" in value:
        return 0
    return 1 if re.search(r"\d", value) and re.search(r"[^\W\d]", value) else 2


def name_hidden(values: Iterable[str], shown: str, max_bytes: int) -> str:
    """Names the values that a text does not show, in their order."""
    places = {value: place for place, value in enumerate(dict.fromkeys(values))}
    chosen = []
    for value in sorted(places, key=_rank_kind):
        size_bytes = len(value.encode("utf-8", "replace")) + 2
        if size_bytes <= max_bytes and value not in shown:
            max_bytes -= size_bytes
            chosen.append(value)
        if max_bytes < 5:
            break
    return ", ".join(sorted(chosen, key=places.__getitem__))
