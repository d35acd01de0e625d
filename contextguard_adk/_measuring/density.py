"""How many tokens each four bytes of a text take, without a tokenizer.

One pattern cuts the classes of a sample's bytes into the pieces that byte-pair
tokenizers cut. Each costs its average: fitted to o200k_base over 2,000 texts."""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

# Tokens for a piece of text, or for each further byte or character of it.
_WORD = 0.87
_DIACRITIC = 0.65
_DIGITS_OR_LETTER = 1.03
# Of a character, and by how much bytes / 4 exceed the fewest tokens that it was seen
# to take: o200k_base, Universal Declaration of Human Rights, in the language and the
# thousand characters that take fewest. Han, kana and Hangul take about bytes / 4.
_SCRIPTS = {
    b"G": (0.32, 0.5 - 0.35),  # Greek
    b"C": (0.15, 0.5 - 0.21),  # Cyrillic: Russian; all other takes 0.28 or more
    b"A": (0.31, 0.5 - 0.25),  # Armenian, Syriac, Thaana, N'Ko
    b"H": (0.32, 0.5 - 0.41),  # Hebrew
    b"R": (0.26, 0.5 - 0.30),  # Arabic
    b"I": (0.34, 0.75 - 0.27),  # Indic scripts (Hindi), Thai, Lao
    b"E": (0.25, 0.75 - 0.27),  # Georgian, Ethiopic, Khmer, Vietnamese diacritics
    b"K": (0.74, 0),  # kana
    b"Z": (0.8, 0),  # Han
    b"O": (0.53, 0),  # Hangul
    b"F": (0.7, 0),  # full-width forms
    b"Q": (1.65, 0),  # emoji and all else beyond the first plane
}
# A lead byte tells the script. S: symbols, L: Latin with diacritics.
_NON_ASCII_CLASSES = {
    0x80: b"~", 0xC0: b"S", 0xC3: b"L", 0xCC: b"G", 0xD0: b"C", 0xD4: b"A",
    0xD6: b"H", 0xD8: b"R", 0xDC: b"A", 0xE0: b"I", 0xE1: b"E", 0xE2: b"S",
    0xE3: b"K", 0xE4: b"Z", 0xEA: b"O", 0xEE: b"S", 0xEF: b"F", 0xF0: b"Q",
}  # fmt: skip


def _byte_class(byte: int) -> bytes:
    char = bytes([byte])
    if byte >= 0x80:
        return _NON_ASCII_CLASSES[max(key for key in _NON_ASCII_CLASSES if key <= byte)]
    if byte <= 0x20:
        return b"n" if char in b"\r\n" else b"s"
    if char.islower():
        return b"e" if char == b"e" else b"v" if char in b"aiou" else b"l"
    return b"d" if char.isdigit() else b"u" if char.isupper() else b"p"


_CLASSES = b"".join(map(_byte_class, range(256)))
# The pieces of the o200k pattern. Their bounds keep them few and short in the cache.
_PIECES = re.compile(
    rb"[sp]?[lve]{1,64}(?:L~[lve]{0,64}){0,16}"
    rb"|d{1,3}"
    rb"|[sp]?u{1,64}[lve]{0,64}(?:L~[lve]{0,64}){0,16}"
    rb"|s?p{1,64}n*|s*n+|s+(?=s[^sn])|s+"
    rb"|[sp]?(?:[GCAHRIE]~+){1,16}|(?:S~+){1,16}|(?:[KZOFQ]~+){1,16}"
    rb"|[sp]?(?:L~[lve]{0,64}){1,16}|~+"
)
_REPEATED = re.compile(rb"([A-Za-z])\1{31,}+")
# Words of these scripts come with their space, but not with a quotation mark.
_QUOTED = re.compile(rb"p(?=[GCAHRIEKZO]~)")
_QUOTED_WORD = 0.7
# JSON in ASCII has Hangul and emoji begin with a letter, which seldom joins the `u`.
_ESCAPE = re.compile(rb"\\u[a-f]")
_ESCAPED_LETTER = 0.6


class SizedText(NamedTuple):
    """A text of known size that `read` returns; `other_bytes` count beside it."""

    size_bytes: int
    other_bytes: int
    read: Callable[[], bytes]


@lru_cache(maxsize=4096)
def _piece_tokens(piece: bytes) -> float:
    """Returns what a piece costs on average, from the classes of its bytes."""
    has_lead = len(piece) > 1 and piece[:1] in b"sp" and piece[1:2] not in b"spn"
    lead, body = (piece[:1], piece[1:]) if has_lead else (b"", piece)
    first = body[:1]
    if first in b"ulveL":
        return _word_tokens(lead, body)
    if first == b"d":
        return _DIGITS_OR_LETTER
    if first in b"spn":
        marks = body.count(b"p")
        return 0.97 + 0.04 * min(max(marks - 2, 0), 4) if marks else 0.97
    if first == b"S":
        symbols = body.count(b"S")
        return 1.1 * min(symbols, 3) + 0.1 * max(symbols - 3, 0)
    return sum(body.count(script) * cost for script, (cost, _) in _SCRIPTS.items())


def _word_tokens(lead: bytes, letters: bytes) -> float:
    """Returns what Latin letters cost after a space, after a mark, or after neither."""
    capitals = letters.count(b"u")
    diacritics = letters.count(b"L")
    length = len(letters) - diacritics
    if length == 1 and lead != b"p":
        return _DIGITS_OR_LETTER + _DIACRITIC * diacritics
    if capitals == length:
        return _WORD + 0.285 * max(length - 2, 0)
    if capitals > 1:
        return 2.3 + 0.39 * (length - 2)
    # Words have a vowel in three letters, hashes and base64 do not.
    vowels = letters.count(b"v") + letters.count(b"e") + diacritics
    missing_vowels = min(max((length - 2) * 0.35 - vowels, 0.0), 1.0)
    tokens = _WORD + 0.07 * max(length - 5, 0) + 0.43 * max(length - 9, 0)
    tokens += 0.51 * length * missing_vowels + _DIACRITIC * diacritics
    # English words seldom end in a, i, o or u; those of languages with fewer tokens do.
    if length > 3 and letters[-1:] == b"v":
        tokens += 0.4
    if lead == b"s":
        return tokens
    return tokens + 0.08 * capitals + (0.095 * length if lead else 0.15)


def _count_tokens(text: bytes) -> float:
    classes = text.translate(_CLASSES)
    tokens = 0.0
    if any(letter * 32 in classes for letter in (b"l", b"v", b"e", b"u")):
        rest = _REPEATED.sub(b"", text)
        tokens = 0.125 * (len(text) - len(rest))
        classes = rest.translate(_CLASSES)
    tokens += len(_QUOTED.findall(classes)) * _QUOTED_WORD
    tokens += len(_ESCAPE.findall(text)) * _ESCAPED_LETTER
    for piece, count in Counter(_PIECES.findall(classes)).items():
        tokens += count * _piece_tokens(piece)
    return tokens


def _sample_ranges(
    size_bytes: int, slices: int = 24, slice_bytes: int = 384
) -> list[tuple[int, int]]:
    """Returns the whole of a text, or evenly spaced slices of a long one."""
    if size_bytes <= slices * slice_bytes:
        return [(0, size_bytes)]
    step = (size_bytes - slice_bytes) / (slices - 1)
    starts = (int(index * step) for index in range(slices))
    return [(start, start + slice_bytes) for start in starts]


def script_discount_tokens(text: bytes) -> float:
    """Returns how far below bytes / 4 the tokens of a text may be by its script."""
    if text.isascii():
        return 0.0
    # Each call takes them of every text that is not ASCII: few and short.
    ranges = _sample_ranges(len(text), slices=20, slice_bytes=48)
    classes = b"".join(text[a:b] for a, b in ranges).translate(_CLASSES)
    discounts = (classes.count(kind) * each for kind, (_, each) in _SCRIPTS.items())
    return sum(discounts) * len(text) / len(classes)


def estimate_text_density(text: str | bytes) -> float:
    """Estimates the tokens of o200k_base for each four UTF-8 bytes; 1.0 for no text.

    Beyond 9 KiB evenly spaced slices are judged, so that the work is bounded.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return _sample_density(b"".join(raw[a:b] for a, b in _sample_ranges(len(raw))))


@lru_cache(maxsize=512)  # A request is measured several times, mostly the same text.
def _sample_density(sample: bytes) -> float:
    return max(_count_tokens(sample) * 4 / len(sample), 0.1) if sample else 1.0


def weighted_tokens(parts: Iterable[SizedText], heuristic_tokens: int) -> float:
    """Returns what the first parts that a heuristic covers take, by their density.

    Of the last the end of its text counts; what the parts do not cover stays as it is.
    """
    missing_bytes = heuristic_tokens * 4
    taken = list[SizedText]()
    for part in parts:
        missing_bytes -= part.size_bytes + part.other_bytes
        taken.append(part)
        if missing_bytes <= 0:
            break
    sizes = [part.size_bytes for part in taken]
    if sizes:
        sizes[-1] = max(sizes[-1] - max(-missing_bytes, 0), 0)
    density = _sample_density(_sample_parts(taken, sizes))
    return heuristic_tokens + sum(sizes) / 4 * (density - 1)


def _sample_parts(parts: Sequence[SizedText], sizes: Sequence[int]) -> bytes:
    """Returns slices of the ends of texts as if they were one; reads no other texts."""
    ends = list(accumulate(sizes))
    slices = list[bytes]()
    text = b""
    read_index = None
    for start, end in _sample_ranges(sum(sizes)):
        pieces = list[bytes]()
        index = bisect_right(ends, start)
        while start < end:
            if index != read_index:
                text = parts[index].read()
                read_index = index
            stop = min(end, ends[index])
            # Seen from its end: of the last part the beginning may not count.
            shift = len(text) - ends[index]
            pieces.append(text[max(start + shift, 0) : max(stop + shift, 0)])
            start = stop
            index = index + 1
        slices.append(b"\n".join(pieces))
    return b"".join(slices)
