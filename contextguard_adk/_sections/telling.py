"""Splits texts into lines, and ranks lines by how much they tell.

A line tells much if its words are rare among all lines, and if it names something
exactly: a number, a path, a name in code. A line tells little if it has hardly
anything but signs, as lines of code often do. It tells nothing if it is noise: base64,
or the same few words again and again.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import NamedTuple

MIN_LINE_CHARS = 16
"""A shorter line is not read: it hardly tells anything by itself."""

MAX_LINE_CHARS = 240
"""A longer line is split, at the end of a sentence or at a blank."""

MAX_TEXT_CHARS = 100_000
"""Only this many characters of a text are split into lines."""

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

_MAX_DEPTH = 20
"""Objects and lists that are nested deeper are not read."""

_PLAIN_FIELDS = frozenset(["result", "text", "content", "output", "stdout"])
"""A text in one of these fields is not written with the name of the field."""

_WORD = re.compile(r"\w+(?:[./:@#+-]\w+)*")
_DIGITS = re.compile(r"\d+")
_NAME = re.compile(r"\d|_|[./:@#+-]\w|[a-z][A-Z]")
"""A sign that a word names something: a digit, an underscore, a point in it."""

_SIGN = re.compile(r"[()\[\]{}=<>|\\/*`~^&%$#@+\"',;]")

_NOISE = re.compile(r"\w{60}|[\w+/=]{80}")
"""So long a word is base64, a hash, or the like."""

MOST_REPEATS = 3
"""A line is noise if its words stand in it more often than this on average."""


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


def read_lines(payload: object) -> list[str]:
    """Returns the lines of a payload, or of a text, in their order.

    A short text in a field is a line with the name of the field: "note: …".
    """
    texts = _walk_texts(payload, name="", depth=0)
    lines = itertools.chain.from_iterable(_split_text(text) for text in texts)
    return list(itertools.islice(lines, MAX_LINES))


def _walk_texts(value: object, name: str, depth: int) -> Iterator[str]:
    """Yields the texts in a payload.

    Args:
        value: The payload, or a value that is nested in the payload.
        name: The name of the field with the value; "" for none.
        depth: How many objects and lists are around the value.
    """
    if isinstance(value, str):
        is_named = name and name not in _PLAIN_FIELDS and "\n" not in value
        yield f"{name}: {value}" if is_named else value
    elif isinstance(value, dict) and depth < _MAX_DEPTH:
        for key, item in value.items():
            yield from _walk_texts(item, str(key), depth + 1)
    elif isinstance(value, list | tuple) and depth < _MAX_DEPTH:
        for item in value:
            yield from _walk_texts(item, name, depth + 1)


def _split_text(text: str) -> Iterator[str]:
    """Yields the lines of a text that are long enough; splits lines that are too long.

    Only the first `MAX_TEXT_CHARS` characters are read.
    """
    for line in text[:MAX_TEXT_CHARS].splitlines():
        rest = line.strip()
        while len(rest) > MAX_LINE_CHARS:
            end = _find_end(rest)
            yield rest[:end].rstrip()
            rest = rest[end:].lstrip()
        if len(rest) >= MIN_LINE_CHARS:
            yield rest


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
    if is_repetitive or _NOISE.search(line):
        return LineForm(frozenset(), 0, 0.0)

    name_count = sum(1 for word in spellings if _NAME.search(word))
    words = frozenset(_DIGITS.sub("0", word.lower()) for word in spellings)
    sign_ratio = len(_SIGN.findall(line)) / len(line)
    plain_ratio = max(LEAST_PLAIN_RATIO, 1 - SIGN_WEIGHT * sign_ratio)
    return LineForm(words, name_count, plain_ratio)


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
