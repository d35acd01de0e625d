"""Texts that regular expressions may stumble over, and how long reading them takes."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from time import process_time
from typing import Any

SMALL_CHARS = 100_000
FACTOR = 4
MAX_RATIO = 6
"""Of the time for `FACTOR` times the text: 4 is in proportion, 16 the square."""

FLOOR_SECONDS = 0.02
"""What takes less for the larger text is left alone: a clock tells nothing of it."""

UNITS = (
    "---\n",
    "| --- | --- |\n",
    "|",
    "\n",
    "\n \n",
    "   ",
    " \n",
    "\r",
    "\r\n",
    "\u2028",
    "a",
    "A",
    "Ab ",
    "ab\n",
    "_",
    "a_",
    "a.",
    "é",
    "[",
    "]",
    "[a",
    "(",
    ")",
    "{",
    '{"a":',
    "<",
    "`",
    "```a\n",
    '"',
    "'",
    '\\"',
    "\\",
    "1",
    "1,",
    "1.",
    "1 ",
    "1,111",
    "4111 ",
    "none\n",
    "- none\n\n",
    "# a\n",
    "a:",
    "key=",
    'key="',
    "a=b&",
    "://",
    "/",
    "a/",
    "a@",
    "-",
    "- a\n",
    "user:\n",
    "?",
    ". ",
    "中",
    "中。",
    "かな",
    "한글",
    "🙂",
    "\u0301",
    "QUJDREVGR0g=",
    "deadbeef",
)
"""What a text repeats: rules, rows, blanks, brackets, numbers, halves of words."""


MAX_BEGINNINGS = 20


_numbers = itertools.count()


def repeat(unit: str, chars: int) -> str:
    """A text of one unit again and again; its end is like that of no other text."""
    return (unit * (chars // len(unit) + 1))[:chars] + f"\x00{next(_numbers)}"


def find_growth(read: Callable[[str], object], unit: str) -> float:
    """How many times longer a text takes that is `FACTOR` times larger; 0 for no time.

    Time is that of the processor, the best of five.
    """

    def take_seconds(chars: int, runs: int) -> float:
        return min(_take_seconds(read, repeat(unit, chars)) for _ in range(runs))

    seconds = list[float]()
    for chars in (SMALL_CHARS // FACTOR, SMALL_CHARS):
        seconds.append(take_seconds(chars, 1))
        if seconds[-1] > 0.5:  # A larger text might take minutes.
            again_seconds = take_seconds(chars, 1)
            quarter_seconds = take_seconds(chars // FACTOR, 5)
            return min(seconds[-1], again_seconds) / quarter_seconds

    # Most texts need no more than a look: of a square this would be 16 times as much.
    least_seconds, small_seconds = seconds
    is_short = small_seconds * FACTOR**2 < FLOOR_SECONDS
    if is_short or small_seconds < 1.15 * FACTOR * least_seconds:
        return 0.0

    growth = 0.0
    for _ in range(3):  # A busy machine may slow one of them down; a square stays one.
        large_seconds = take_seconds(SMALL_CHARS * FACTOR, 5)
        if large_seconds < FLOOR_SECONDS:
            return 0.0
        growth = large_seconds / take_seconds(SMALL_CHARS, 5)
        if growth <= MAX_RATIO:
            break
    return growth


def _take_seconds(read: Callable[[str], object], text: str) -> float:
    start = process_time()
    read(text)
    return process_time() - start


def find_beginnings(pattern: re.Pattern[Any]) -> list[str]:
    """Beginnings of what a pattern matches: half words, and what stands before them."""
    source = pattern.pattern
    if isinstance(source, bytes):
        source = source.decode("latin-1")
    # Python tells nobody else of what a pattern consists.
    parse: Any = importlib.import_module("re._parser").parse
    tree = parse(source, pattern.flags & (re.IGNORECASE | re.VERBOSE | re.MULTILINE))

    found = dict[str, None]()
    for choice in range(8):
        text = "".join(_spell(tree, choice))
        lengths = {3, len(text) // 2, len(text) - 2, len(text) - 1, len(text)}
        found |= dict.fromkeys(text[: max(0, each)] for each in sorted(lengths))
    return [text for text in found if text and text not in UNITS][:MAX_BEGINNINGS]


INNER_PLACES = {"SUBPATTERN": 3, "ASSERT": 1}
"""Where the pattern inside an item of these kinds stands in its value."""


def _spell(tree: Any, choice: int) -> Iterator[str]:
    """Yields what the items of a parsed pattern match, of several the one chosen."""
    for operation, value in tree:
        kind = str(operation)

        if kind == "LITERAL":
            yield chr(value)
        elif kind in ("ANY", "NOT_LITERAL"):
            yield "x"
        elif kind == "IN":
            yield _choose([*_list_chars(value)], choice)
        elif kind == "BRANCH":
            yield from _spell(_choose(value[1], choice), choice // len(value[1]))
        elif kind in INNER_PLACES:
            yield from _spell(value[INNER_PLACES[kind]], choice)
        elif kind == "ATOMIC_GROUP":
            yield from _spell(value, choice)
        elif kind.endswith("_REPEAT"):
            least, most, repeated = value
            for _ in range(max(least, min(int(most), 1 + choice % 2))):
                yield from _spell(repeated, choice)


def _choose(options: Sequence[Any], choice: int) -> Any:
    return options[choice % len(options)]


_OF_CATEGORY = {"DIGIT": "1", "NOT_DIGIT": "x", "SPACE": " ", "WORD": "a"}


def _list_chars(items: Sequence[Any]) -> Iterator[str]:
    """Yields some characters of a class."""
    chars = []
    for operation, value in items:
        kind = str(operation)
        if kind == "LITERAL":
            chars.append(chr(value))
        elif kind == "RANGE":
            chars.append(chr(value[0]))
        elif kind == "CATEGORY":
            name = str(value).removeprefix("CATEGORY_")
            chars.append(_OF_CATEGORY.get(name, "-"))

    is_negated = any(str(operation) == "NEGATE" for operation, _ in items)
    if is_negated:
        yield next(char for char in "x-1 (~" if char not in chars)
    else:
        yield from chars
