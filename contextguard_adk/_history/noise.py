"""Finds the parts of a text that no agent repeats by heart: blobs, dumps and vectors.

A blob is a file or a key in letters: base64 or hex. Its pieces look like ids, and there
are many of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LEAST_VECTOR_LENGTH = 32
"""A list of at least this many numbers with a fraction is a vector, such as an
embedding.
"""

_HEX_ID_CHARS = (32, 40, 56, 64, 96, 128)
"""The lengths of MD5, SHA-1 and SHA-2 digests in hex. These are ids, not blobs.

So are the addresses of coins and accounts, 0x and 40 digits.
"""

_LONGEST_SEGMENT_CHARS = 64
"""A word without a separator that is longer is a blob, unless it is a digest."""

_LONGEST_PATH_CHARS = 128
"""A shorter run is no blob if one of its segments is a word in small letters."""

_MOST_LETTERS_RATIO = 0.3
"""The words of a blob, which are there by chance, take less of it than this. In random
base64 they take about 0.15, in a path or a name in code more than 0.6.
"""

_RUN = re.compile(
    r"(?<![\w+/=-])[\w+/=-]{41,}(?:\r?\n[\w+/=-]{41,})*"
    r"(?P<tail>\r?\n[\w+/=-]{1,40}(?![^\s\"'`<\\]))?",
    re.ASCII,
)
"""A long run of the characters of base64 and hex, or several lines of them.

The tail is the last line, which is shorter.
"""

_DATA_HEAD = re.compile(r"\bdata:[\w/+.;=-]{0,80};base64,")
"""The head of a file in an address: "data:image/png;base64,"."""

_SEPARATORS = re.compile(r"[+/=_-]+")

_SMALL_LETTERS = re.compile(r"[a-z]{3,}")

_WORD = re.compile(r"[A-Za-z][a-z]{2,}")

_HEX = re.compile(r"[0-9a-f]+|[0-9A-F]+|0x[0-9a-fA-F]+")

_NUMBER = r"[+-]?\d{1,9}\.\d{4,20}(?:e[+-]?\d{1,3})?"

_VECTOR = re.compile(
    rf"(?<![\w.]){_NUMBER}(?:[\s,;|()\[\]]{{1,8}}{_NUMBER}){{7,}}(?![\w.])",
    re.IGNORECASE,
)
"""Eight and more numbers with four and more decimals, one after the other."""

_DUMP_LINE = re.compile(
    r"(?m)^[ \t]{0,8}[0-9a-fA-F]{4,16}:?[ \t]{1,4}(?:[0-9a-fA-F]{2,8}[ \t]{1,4}){6,}.*$"
)
"""A line of a dump by xxd or hexdump: "00000010: 7f45 4c46 0201 …"."""

_ESCAPED_BYTE = re.compile(r"\\x[0-9a-fA-F]{2}")
"""A byte in the form of Python and C: "\\x89"."""


def drop_noise(text: str) -> str:
    """Returns a text with a space in place of each blob, dump and escaped byte.

    Ids stay: digests in hex, UUIDs, and paths and addresses with ids.
    """
    without_heads = _DATA_HEAD.sub(" ", text) if ";base64," in text else text
    without_blobs = _RUN.sub(_drop_blob, without_heads)
    without_dumps = _DUMP_LINE.sub(" ", without_blobs)
    has_escapes = "\\x" in without_dumps
    return _ESCAPED_BYTE.sub(" ", without_dumps) if has_escapes else without_dumps


def drop_vectors(text: str) -> str:
    """Returns a text with a space in place of each long run of numbers."""
    return _VECTOR.sub(" ", text)


def is_vector(items: Sequence[object]) -> bool:
    """Whether a list has nothing but many numbers, some of them with a fraction."""
    if len(items) < LEAST_VECTOR_LENGTH:
        return False
    are_numbers = all(isinstance(item, int | float) for item in items)
    return are_numbers and any(isinstance(item, float) for item in items)


def _drop_blob(match: re.Match[str]) -> str:
    """Returns the lines that were matched without the blobs."""
    tail = match["tail"] or ""
    lines = match.group().removesuffix(tail).split("\n")
    kept_lines = [line for line in lines if not _is_blob(line.strip())]

    # In a few lines of a file there may be a word by chance.
    is_wrapped_file = len(lines) > 1 and len(kept_lines) < len(lines) / 2
    if is_wrapped_file:
        return " "
    return "\n".join(kept_lines) + tail


def _is_blob(run: str) -> bool:
    """Whether a run of the characters of base64 and hex is a blob."""
    segments = _SEPARATORS.split(run)
    longest = max(segments, key=len)
    is_hex = _HEX.fullmatch(longest) is not None
    if is_hex and len(longest.removeprefix("0x")) in _HEX_ID_CHARS:
        return False
    if len(longest) > _LONGEST_SEGMENT_CHARS:
        return True

    has_word = any(_WORD.fullmatch(segment) for segment in segments)
    if has_word and len(run) <= _LONGEST_PATH_CHARS:
        return False

    has_digit = any(char.isdigit() for char in run)
    has_one_case = run.upper() == run or run.lower() == run
    if has_one_case:
        # Ids in one case have separators: UUIDs, constants.
        return longest == run and has_digit

    letters_count = sum(len(word) for word in _SMALL_LETTERS.findall(run))
    return letters_count / len(run) < _MOST_LETTERS_RATIO
