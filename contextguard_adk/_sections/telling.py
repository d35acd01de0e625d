"""Splits texts into lines, and ranks lines by how much they tell.

A line tells much if its words are rare among all lines, and if it names something
exactly: a number, a path, a name in code. A line tells little if it has hardly
anything but signs, as lines of code often do, or if it is noise, such as base64.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import NamedTuple

from contextguard_adk._history.cards import without_card
from contextguard_adk._history.credentials import (
    MAX_DEPTH,
    hide_secrets,
    is_credential,
    is_nested,
)
from contextguard_adk._history.field_names import Names, name_field

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

LEAST_NEW_RATIO = 0.25
"""A line is noise if the part of its words that are no repeats is less than this."""

_PLAIN_FIELDS = frozenset(["result", "text", "content", "output", "stdout"])
"""A text in one of these fields is not written with the name of the field."""

_WORD = re.compile(r"\w+(?:[./:@#+-]\w+)*")
_DIGITS = re.compile(r"\d+")
_NAME = re.compile(r"\d|_|[./:@#+-]\w|[a-z][A-Z]")
"""A sign that a word names something: a digit, an underscore, a point in it."""

_SIGN = re.compile(r"[()\[\]{}=<>|\\/*`~^&%$#@+\"',;]")

_NOISE = re.compile(r"\w{60}|[\w+/=]{80}")
"""So long a word is base64, a hash, or the like."""


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

    A short text in a field is a line with the name of the field: "note: …". The fields
    that hold credentials are left out, and so are lines of noise.
    """
    texts = _walk_texts(payload, {}, (), depth=0)
    lines = itertools.chain.from_iterable(_split_text(text) for text in texts)
    first_lines = itertools.islice(lines, MAX_LINES)
    return [line for line in first_lines if read_form(line).words]


def _walk_texts(
    value: object, walked: dict[int, object], names: Names, depth: int
) -> Iterator[str]:
    """Yields the texts in a payload.

    Args:
        value: The payload, or a value that is nested in the payload.
        walked: The objects and lists that were walked so far, by their `id`. None of
            them is walked again, because a payload may contain itself.
        names: The names of the fields around `value`, the outermost one first.
        depth: How many objects and lists are around the value.
    """
    if isinstance(value, str):
        if is_credential(names, value):
            return
        name = names[-1] if names else ""
        text = without_card(value, names)
        is_named = name and name not in _PLAIN_FIELDS and "\n" not in text
        yield f"{name}: {text}" if is_named else text
        return

    if not is_nested(value) or depth >= MAX_DEPTH or id(value) in walked:
        return
    # The value is kept as well, so that no other object gets the same `id`.
    walked[id(value)] = value
    if isinstance(value, dict):
        for key, item in value.items():
            item_names = name_field(value, names, key)
            yield from _walk_texts(item, walked, item_names, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _walk_texts(item, walked, names, depth + 1)


def _split_text(text: str) -> Iterator[str]:
    """Yields the lines of a text that are long enough; splits lines that are too long.

    Only the first `MAX_TEXT_CHARS` characters are read.
    """
    for line in text[:MAX_TEXT_CHARS].splitlines():
        if len(line) > MAX_LINE_CHARS:
            yield from _split_line(line)
        elif len(line.strip()) >= MIN_LINE_CHARS:
            yield line.strip()


def _split_line(line: str) -> Iterator[str]:
    """Yields the pieces of a line that is too long.

    A piece is left out if the whole line shows that a word of the piece is a
    credential: the name "password" may stand in the piece before.
    """
    shown = hide_secrets(line)
    rest = line.strip()
    while len(rest) >= MIN_LINE_CHARS:
        end = _find_end(rest) if len(rest) > MAX_LINE_CHARS else len(rest)
        piece = rest[:end].rstrip()
        if piece in shown:
            yield piece
        rest = rest[end:].lstrip()


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
    if _NOISE.search(line):
        return LineForm(frozenset(), 0, 0.0)

    all_words = _WORD.findall(line)
    spellings = set(all_words)
    if len(spellings) < LEAST_NEW_RATIO * len(all_words):
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
