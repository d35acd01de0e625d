"""Splits texts into lines, and ranks lines by how much they tell.

A line tells much if its words are rare among all lines, and if it names something
exactly: a number, a path, a name in code. A line tells little if it has hardly
anything but signs, as lines of code often do. It tells nothing if it is noise: base64,
or the same few words again and again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import NamedTuple

from contextguard_adk._history.credentials import hide_secrets, is_credential
from contextguard_adk._history.field_names import Names, name_field

MIN_LINE_CHARS = 16
"""A shorter line is not read: it hardly tells anything by itself."""

MAX_LINE_CHARS = 240
"""A longer line is split, at the end of a sentence or at a blank."""

MAX_TEXT_CHARS = 100_000
"""Only this many characters of a text are split into lines."""

MAX_NAME_CHARS = 80
"""Only this many characters of the name of a field are written before its text."""

MAX_LINES = 5_000
"""Only this many lines of one payload are read."""

# The points of a line were chosen on recorded sessions of agents.

MOST_RARE_WORDS = 8
"""Only the rarest words of a line give points."""

MOST_NAMES = 3.5
"""More names than this in one line give no more points."""

WORDS_OFFSET = 8
"""The points of a line are divided by the number of its words and this number.

Without it, lines of one word would have the most points.
"""

SIGN_WEIGHT = 2.0
"""A line loses this much of its points for the part of it that is signs."""

LEAST_PLAIN_RATIO = 0.05
"""A line keeps at least this part of its points, however many signs it has."""

MOST_REPEATS = 3
"""A line is noise if its words stand in it more often than this on average."""

_MAX_DEPTH = 20
"""Objects and lists that are nested deeper are not read."""

_MAX_JSON_DEPTH = 6
"""JSON in a text is parsed if the text is nested less deep than this in its payload."""

_KEY_FILE = "-----BEGIN"
"""A text with this may have the key of a server, in lines that look like base64."""

_PLAIN_FIELDS = frozenset(["result", "text", "content", "output", "stdout"])
"""A text in one of these fields is not written with the name of the field."""

_WORD = re.compile(r"\w+(?:[./:@#+-]\w+)*")
_DIGITS = re.compile(r"\d+")
_NAME = re.compile(r"\d|_|[./:@#+-]\w|[a-z][A-Z]")
"""A sign that a word names something: a digit, an underscore, a point in it."""

_SIGN = re.compile(r"[()\[\]{}=<>|\\/*`~^&%$#@+\"',;]")

_LETTERS = re.compile(r"[^\W\d_]{3}")
"""Three letters in a row. A line without them has only numbers and signs."""

_LONG_WORD = re.compile(r"[a-zA-Z0-9]{60}|[a-zA-Z0-9+/=]{80}")
"""So long a word is base64, or the like."""

_BLOB = re.compile(r"[\w+/=]{24,}")
"""A word that may be a piece of base64, or a hash."""

_HEX = re.compile(r"(?:0x)?[0-9a-fA-F]+")


class LineForm(NamedTuple):
    """What decides how much a line tells.

    Attributes:
        words: The different words, in lower case, with 0 for each number. So the rows
            of a table have the same words.
        name_count: How many of the words name something.
        plain_ratio: A factor below 1 for a line with signs; 0 for noise.
    """

    words: frozenset[str]
    name_count: int
    plain_ratio: float


class ReadLine(NamedTuple):
    """A line, and what tells whether there is a credential in it.

    Attributes:
        text: The line, without white space at its ends.
        context: The line as it stands in its text, with the line before it.
        names: The names of the fields around the text, the outermost one first.
    """

    text: str
    context: str
    names: Names


@lru_cache(maxsize=16_384)  # Each attempt to write a list asks for the same lines.
def has_credential(line: ReadLine) -> bool:
    """Whether a credential, or the number of a card, stands in a line."""
    if is_credential(line.names, line.text):
        return True
    return not hide_secrets(line.context, line.names).endswith(line.text)


def read_lines(payload: object) -> list[ReadLine]:
    """Returns the lines of a payload, or of a text, in their order.

    A short text in a field is a line with the name of the field: "note: …". The fields
    that hold credentials are left out, and so are lines of noise.
    """
    lines = _walk_lines(payload, walked={}, names=(), depth=0)
    first_lines = itertools.islice(lines, MAX_LINES)
    return [line for line in first_lines if read_form(line.text).words]


def _walk_lines(
    value: object, walked: dict[int, object], names: Names, depth: int
) -> Iterator[ReadLine]:
    """Yields the lines of the texts in a payload.

    Args:
        value: The payload, or a value that is nested in the payload.
        walked: The objects and lists that were walked so far, by their `id`. None of
            them is walked again, because a payload may contain itself.
        names: The names of the fields around the value, the outermost one first.
        depth: How many objects, lists and texts with JSON are around the value.
    """
    if isinstance(value, str):
        yield from _walk_text(value, walked, names, depth)
        return

    if depth >= _MAX_DEPTH or id(value) in walked:
        return
    if isinstance(value, dict):
        # The value is kept as well, so that no other object gets the same `id`.
        walked[id(value)] = value
        for key, item in value.items():
            item_names = name_field(value, names, key)
            yield from _walk_lines(item, walked, item_names, depth + 1)
    elif isinstance(value, list | tuple):
        walked[id(value)] = value
        for item in value:
            yield from _walk_lines(item, walked, names, depth + 1)


def _walk_text(
    text: str, walked: dict[int, object], names: Names, depth: int
) -> Iterator[ReadLine]:
    """Yields the lines of a text; of a text with JSON, those of the parsed JSON.

    The arguments are those of `_walk_lines`.
    """
    looks_like_json = text.lstrip()[:1] in ("{", "[")
    if looks_like_json and depth < _MAX_JSON_DEPTH:
        # A text that only looks like JSON is read as any other text below.
        with contextlib.suppress(ValueError, RecursionError):
            yield from _walk_lines(json.loads(text), walked, names, depth + 1)
            return

    read_text = text[:MAX_TEXT_CHARS]
    if _KEY_FILE in read_text:
        # The lines of a key do not look like credentials by themselves.
        read_text = hide_secrets(read_text)

    # The name stands in each line, and may be as long as a text.
    name = " ".join(names[-1][:MAX_NAME_CHARS].split()) if names else ""
    is_named = bool(name) and name not in _PLAIN_FIELDS and "\n" not in read_text
    yield from _split_text(f"{name}: {read_text}" if is_named else read_text, names)


def _split_text(text: str, names: Names) -> Iterator[ReadLine]:
    """Yields the lines of a text that are long enough; splits lines that are too long.

    Args:
        text: The text.
        names: The names of the fields around the text.
    """
    before = ""
    for line in text.splitlines():
        stripped = line.strip()
        if len(stripped) > MAX_LINE_CHARS:
            yield from _split_line(stripped, names)
        elif len(stripped) >= MIN_LINE_CHARS:
            yield ReadLine(stripped, f"{before}\n{line.rstrip()}", names)
        if stripped:
            before = line[-MAX_LINE_CHARS:]


def _split_line(line: str, names: Names) -> Iterator[ReadLine]:
    """Yields the pieces of a line that is too long.

    The context of a piece also has what stands before the piece: the name of a
    credential may stand there.

    Args:
        line: The line, without white space at its ends.
        names: The names of the fields around the text.
    """
    start = 0
    while len(line) - start >= MIN_LINE_CHARS:
        rest = line[start : start + MAX_LINE_CHARS + 1]
        length = _find_end(rest) if len(rest) > MAX_LINE_CHARS else len(rest)
        piece = rest[:length].strip()
        context_start = max(0, start - MAX_LINE_CHARS)
        context = line[context_start : start + length].rstrip()
        if len(piece) >= MIN_LINE_CHARS:
            yield ReadLine(piece, context, names)
        start += length


def _find_end(line: str) -> int:
    """Returns where a line that is too long is split."""
    half = MAX_LINE_CHARS // 2
    for gap in (". ", "。", "; ", ", ", " "):
        position = line.rfind(gap, half, MAX_LINE_CHARS)
        if position > 0:
            return position + 1
    return MAX_LINE_CHARS


@lru_cache(maxsize=16_384)  # Each summary ranks the lines of the last one again.
def read_form(line: str) -> LineForm:
    """Reads what decides how much a line tells."""
    all_words = _WORD.findall(line)
    spellings = set(all_words)
    is_repetitive = len(all_words) > MOST_REPEATS * len(spellings)
    if is_repetitive or _is_noise(line):
        return LineForm(frozenset(), 0, 0.0)

    name_count = sum(1 for word in spellings if _NAME.search(word))
    words = frozenset(_DIGITS.sub("0", word.lower()) for word in spellings)
    sign_ratio = len(_SIGN.findall(line)) / len(line)
    plain_ratio = max(LEAST_PLAIN_RATIO, 1 - SIGN_WEIGHT * sign_ratio)
    return LineForm(words, name_count, plain_ratio)


def _is_noise(line: str) -> bool:
    """Whether a line is made of base64, of hexadecimal digits, or of numbers alone."""
    if _LETTERS.search(line) is None or _LONG_WORD.search(line) is not None:
        return True

    blobs = [word for word in _BLOB.findall(line) if _is_blob(word)]
    return 2 * sum(len(word) for word in blobs) > len(line)


def _is_blob(word: str) -> bool:
    """Whether a long word looks like a piece of base64 or of hexadecimal digits."""
    if not any(char.isdigit() for char in word):
        return False
    is_hex = _HEX.fullmatch(word) is not None
    has_both_cases = not word.islower() and not word.isupper()
    return is_hex or (has_both_cases and "_" not in word)


def score_lines(lines: Collection[str]) -> dict[str, float]:
    """Returns the points of each line, about 0 to 1; leaves out lines of noise."""
    forms = {line: read_form(line) for line in lines}
    use_counts = Counter[str]()
    for form in forms.values():
        use_counts.update(form.words)

    # A word that one line alone has counts 1, a word that all lines have counts 0.
    highest = math.log(len(forms) + 1) or 1.0
    rarity = {
        word: 1 - math.log(count) / highest
        for word, count in use_counts.items()
        if len(word) > 2
    }

    points: dict[str, float] = {}
    for line, form in forms.items():
        if not form.words:
            continue
        rare_first = sorted(
            (rarity.get(word, 0.0) for word in form.words), reverse=True
        )
        told = sum(rare_first[:MOST_RARE_WORDS]) + min(form.name_count, MOST_NAMES)
        told_by_word = told / (len(form.words) + WORDS_OFFSET)
        points[line] = told_by_word * form.plain_ratio
    return points
