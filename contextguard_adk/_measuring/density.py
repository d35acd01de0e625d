"""Estimates how many tokens a text takes for each four bytes, without a tokenizer.

This ratio is called the density of a text. English prose has 1.0; digits, compact JSON
and base64 have two to three times as much.

Each byte of a sample is reduced to its class, a letter such as `v` for a vowel or `C`
for Cyrillic. One pattern cuts the classes into pieces, as byte-pair tokenizers cut a
text into pieces. Each piece counts as many tokens as such a piece takes on average.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

# --- Tokens of a piece ------------------------------------------------------------

# Tokens of o200k_base. All numbers down to `_CHARACTER_TOKENS` are one least-squares
# fit over 2,000 texts: code, markup, JSON, logs, base64, prose in 30 languages. A name
# says what takes the tokens: `_LETTER_OVER_5` is for each letter of a word after the
# fifth. A lead is one space or mark before a word.
_WORD = 0.87
_WORD_WITHOUT_LEAD = 0.15
_LETTER_AFTER_MARK = 0.095
_CAPITAL_WITHOUT_SPACE = 0.08
_LETTER_OVER_5 = 0.07
_LETTER_OVER_9 = 0.43
_RANDOM_LETTER = 0.51
_DIACRITIC = 0.65
_FINAL_VOWEL = 0.4
_CAPITAL_OVER_2 = 0.285
_MIXED_CASE = 2.3
_MIXED_CASE_LETTER_OVER_2 = 0.39
_DIGITS_OR_LETTER = 1.03
_SPACES_OR_MARKS = 0.97
_MARK_OVER_2 = 0.04
_MOST_MARKS_OVER_2 = 4  # Long runs of marks, such as rulers, take no more.
_SYMBOL = 1.1
_SYMBOL_OVER_3 = 0.1
_REPEATED_LETTER = 0.125
_QUOTED_WORD = 0.7
_ESCAPED_LETTER = 0.6
_CHARACTER_TOKENS = {
    b"G": 0.32,  # Greek
    b"C": 0.15,  # Cyrillic
    b"A": 0.31,  # Armenian, Syriac, Thaana, N'Ko
    b"H": 0.32,  # Hebrew
    b"R": 0.26,  # Arabic
    b"I": 0.34,  # Indic scripts, Thai, Lao
    b"E": 0.25,  # Georgian, Ethiopic, Khmer, Vietnamese diacritics
    b"K": 0.74,  # kana
    b"Z": 0.8,  # Han
    b"O": 0.53,  # Hangul
    b"F": 0.7,  # full-width forms
    b"Q": 1.65,  # emoji and all else beyond the first plane
}

_VOWELS_PER_LETTER_OVER_2 = 0.35
"""The vowels that a word has at least, for each of its letters after the second.

Hashes and base64 have fewer."""

_MIN_DENSITY = 0.1
"""No text takes fewer tokens for each four bytes."""

_SCRIPT_DISCOUNTS = {
    b"G": 0.5 - 0.35,  # Greek
    b"C": 0.5 - 0.21,  # Russian; other languages in Cyrillic take 0.28 or more
    b"A": 0.5 - 0.25,
    b"H": 0.5 - 0.41,
    b"R": 0.5 - 0.30,
    b"I": 0.75 - 0.27,  # Hindi
    b"E": 0.75 - 0.27,
}
"""The script discount of one character, by the class of its first byte.

The first number is bytes / 4 of the character, which has two or three bytes. The second
number is the fewest tokens that o200k_base takes for a character of the class. It was
measured in the Universal Declaration of Human Rights, in the language and the thousand
characters that take the fewest tokens. Han, kana and Hangul take about bytes / 4, so
they have no discount."""

# --- Classes of bytes, and the pieces that they form ------------------------------

# A lead byte is the first byte of a character in UTF-8. Each key is the first byte of a
# range that ends before the next key. S: symbols, L: Latin letters with diacritics,
# ~: the bytes of a character after its lead byte. The other letters are those of
# `_CHARACTER_TOKENS`.
_NON_ASCII_CLASSES = {
    0x80: b"~", 0xC0: b"S", 0xC3: b"L", 0xCC: b"G", 0xD0: b"C", 0xD4: b"A",
    0xD6: b"H", 0xD8: b"R", 0xDC: b"A", 0xE0: b"I", 0xE1: b"E", 0xE2: b"S",
    0xE3: b"K", 0xE4: b"Z", 0xEA: b"O", 0xEE: b"S", 0xEF: b"F", 0xF0: b"Q",
}  # fmt: skip


def _byte_class(byte: int) -> bytes:
    """Returns the class of a byte, as one letter.

    The classes of ASCII: "n" line break, "s" space or control character, "e" the letter
    e, "v" another small vowel, "l" small consonant, "d" digit, "u" capital,
    "p" punctuation mark. Other bytes have the class of `_NON_ASCII_CLASSES`.
    """
    if byte >= 0x80:
        range_start = max(start for start in _NON_ASCII_CLASSES if start <= byte)
        return _NON_ASCII_CLASSES[range_start]

    char = bytes([byte])
    if char in b"\r\n":
        return b"n"
    if char <= b" ":
        return b"s"
    if char == b"e":
        return b"e"
    if char in b"aiou":
        return b"v"
    if char.islower():
        return b"l"
    if char.isdigit():
        return b"d"
    if char.isupper():
        return b"u"
    return b"p"


_CLASSES = b"".join(_byte_class(byte) for byte in range(256))
"""The class of each byte, for `bytes.translate`."""

# The pieces of the o200k pattern. The bounds keep pieces short, so that the cache of
# `_piece_tokens` has few and small keys.
_PIECES = re.compile(
    rb"[sp]?[lve]{1,64}(?:L~[lve]{0,64}){0,16}"  # A word in small letters.
    rb"|d{1,3}"  # Up to three digits.
    rb"|[sp]?u{1,64}[lve]{0,64}(?:L~[lve]{0,64}){0,16}"  # A word with a capital.
    rb"|s?p{1,64}n*|s*n+|s+(?=s[^sn])|s+"  # Marks, line breaks, spaces.
    rb"|[sp]?(?:[GCAHRIE]~+){1,16}|(?:S~+){1,16}|(?:[KZOFQ]~+){1,16}"  # Other scripts.
    rb"|[sp]?(?:L~[lve]{0,64}){1,16}|~+"  # A word that begins with a diacritic.
)
_REPEATED = re.compile(rb"([A-Za-z])\1{31,}+")
_REPEATED_CLASSES = (b"l" * 32, b"v" * 32, b"e" * 32, b"u" * 32)
# In these scripts a token may begin with a space, but seldom with a mark. So a mark
# before a word, like an opening quote, takes tokens of its own.
_QUOTED = re.compile(rb"p(?=[GCAHRIEKZO]~)")
# JSON in ASCII writes Hangul and emoji as escapes with a letter after the `u`, such as
# \ud55c. That letter seldom joins the `u` in one token.
_ESCAPE = re.compile(rb"\\u[a-f]")


@lru_cache(maxsize=4096)
def _piece_tokens(piece: bytes) -> float:
    """Returns the tokens that a piece takes on average.

    Args:
        piece: The classes of the bytes of a piece, such as `slvl` for " bad"; not
            empty.
    """
    # In `slvl` the lead is `s`. A piece of marks or spaces alone has no lead.
    may_be_lead = piece[:1] in b"sp"
    has_word_behind = len(piece) > 1 and piece[1:2] not in b"spn"
    if may_be_lead and has_word_behind:
        lead = piece[:1]
        body = piece[1:]
    else:
        lead = b""
        body = piece

    first_class = body[:1]
    is_latin_word = first_class in b"ulveL"
    if is_latin_word:
        return _word_tokens(lead, body)

    is_number = first_class == b"d"
    if is_number:
        return _DIGITS_OR_LETTER

    is_spaces_or_marks = first_class in b"spn"
    if is_spaces_or_marks:
        marks_over_2 = max(body.count(b"p") - 2, 0)
        return _SPACES_OR_MARKS + _MARK_OVER_2 * min(marks_over_2, _MOST_MARKS_OVER_2)

    is_symbols = first_class == b"S"
    if is_symbols:
        symbol_count = body.count(b"S")
        symbols_over_3 = max(symbol_count - 3, 0)
        return _SYMBOL * min(symbol_count, 3) + _SYMBOL_OVER_3 * symbols_over_3

    # A piece may mix characters of other scripts. Only their lead bytes count.
    return sum(
        body.count(script) * tokens_per_character
        for script, tokens_per_character in _CHARACTER_TOKENS.items()
    )


def _word_tokens(lead: bytes, letters: bytes) -> float:
    """Returns the tokens that a word of Latin letters takes on average.

    Args:
        lead: The class of the byte before the word: `s` for a space, `p` for a mark,
            empty for neither.
        letters: The classes of the bytes of the word, without the lead.
    """
    capitals = letters.count(b"u")
    diacritics = letters.count(b"L")
    # A letter with a diacritic has two bytes.
    length = len(letters) - diacritics
    letters_over_2 = max(length - 2, 0)

    # Three kinds of words have rules of their own. A single letter after a mark follows
    # the rules of longer words.
    is_single_letter = length == 1 and lead != b"p"
    if is_single_letter:
        return _DIGITS_OR_LETTER + _DIACRITIC * diacritics
    is_all_capitals = capitals == length
    if is_all_capitals:
        return _WORD + _CAPITAL_OVER_2 * letters_over_2
    is_mixed_case = capitals > 1  # For example "HTTPserver".
    if is_mixed_case:
        return _MIXED_CASE + _MIXED_CASE_LETTER_OVER_2 * letters_over_2

    # All other words have at most one capital. Long words take more tokens.
    tokens = _WORD
    tokens += _LETTER_OVER_5 * max(length - 5, 0)
    tokens += _LETTER_OVER_9 * max(length - 9, 0)

    # A word with too few vowels is random, like a hash. A word that lacks half a vowel
    # counts as half random; a word that lacks one vowel or more counts as random. The
    # vowel e has a class of its own. Letters with diacritics count as vowels.
    vowels = letters.count(b"v") + letters.count(b"e") + diacritics
    expected_vowels = letters_over_2 * _VOWELS_PER_LETTER_OVER_2
    lacking_vowels = max(expected_vowels - vowels, 0.0)
    randomness = min(lacking_vowels, 1.0)
    tokens += _RANDOM_LETTER * length * randomness + _DIACRITIC * diacritics

    # English words seldom end in a, i, o or u. Words that do are mostly of languages
    # for which the vocabulary has fewer words.
    if length > 3 and letters[-1:] == b"v":
        tokens += _FINAL_VOWEL

    # Vocabularies have most words with a space before the word. Without the space, a
    # word takes more tokens.
    if lead == b"s":
        return tokens
    tokens += _CAPITAL_WITHOUT_SPACE * capitals
    if lead == b"p":
        return tokens + _LETTER_AFTER_MARK * length
    return tokens + _WORD_WITHOUT_LEAD


@lru_cache(maxsize=512)  # A request is measured several times, mostly the same text.
def _sample_density(sample: bytes, has_single_digits: bool = False) -> float:
    """Returns the density of a sample, which is read whole; 1.0 for an empty sample.

    Args:
        sample: The sample.
        has_single_digits: Whether each digit is a token of its own.
    """
    if not sample:
        return 1.0

    # A run of 32 and more equal letters takes few tokens, so these letters are counted
    # apart and taken out of the sample. Such a run has equal classes too. To search for
    # equal classes is quick, and most samples have none, so the slow pattern is seldom
    # needed.
    repeated_letters = 0
    classes = sample.translate(_CLASSES)
    if any(repeated in classes for repeated in _REPEATED_CLASSES):
        without_repeated = _REPEATED.sub(b"", sample)
        repeated_letters = len(sample) - len(without_repeated)
        classes = without_repeated.translate(_CLASSES)

    tokens = _REPEATED_LETTER * repeated_letters
    tokens += len(_QUOTED.findall(classes)) * _QUOTED_WORD
    tokens += len(_ESCAPE.findall(sample)) * _ESCAPED_LETTER
    pieces = Counter(_PIECES.findall(classes))
    for piece, count in pieces.items():
        tokens += count * _piece_tokens(piece)
    if has_single_digits:
        # A piece of digits has counted as one token so far.
        tokens += _DIGITS_OR_LETTER * (pieces[b"dd"] + 2 * pieces[b"ddd"])

    tokens_per_4_bytes = tokens * 4 / len(sample)
    return max(tokens_per_4_bytes, _MIN_DENSITY)


# --- Samples of texts -------------------------------------------------------------

_SAMPLE_SLICES = 24
_SLICE_BYTES = 384
# Discounts are computed in each call, for each text that is not ASCII. So their samples
# are smaller.
_DISCOUNT_SLICES = 20
_DISCOUNT_SLICE_BYTES = 48


def _sample_ranges(
    size_bytes: int, slices: int = _SAMPLE_SLICES, slice_bytes: int = _SLICE_BYTES
) -> list[tuple[int, int]]:
    """Returns the ranges of bytes that make the sample of a text, each as (start, end).

    The sample of a long text is evenly spaced slices, the first one at the beginning
    and the last one at the end of the text. A text that is not longer than all slices
    together is its own sample.

    Args:
        size_bytes: The size of the text.
        slices: The number of slices of a long text.
        slice_bytes: The size of each slice.
    """
    if size_bytes <= slices * slice_bytes:
        return [(0, size_bytes)]

    step_bytes = (size_bytes - slice_bytes) / (slices - 1)
    starts = [int(index * step_bytes) for index in range(slices)]
    return [(start, start + slice_bytes) for start in starts]


def script_discount_tokens(text: bytes) -> float:
    """Returns the script discount of a text, in tokens; 0.0 for ASCII.

    Bytes / 4 is too high an estimate for some scripts, because their characters have
    two or three bytes and take few tokens. Bytes / 4 less the discount is the fewest
    tokens that a text in such a script takes.

    The discounts of the characters in a sample are added up. The sum is scaled from the
    size of the sample to the size of the text.
    """
    if text.isascii():
        return 0.0

    ranges = _sample_ranges(len(text), _DISCOUNT_SLICES, _DISCOUNT_SLICE_BYTES)
    sample = b"".join(text[start:end] for start, end in ranges)
    classes = sample.translate(_CLASSES)
    sample_discount = sum(
        classes.count(script) * discount_per_character
        for script, discount_per_character in _SCRIPT_DISCOUNTS.items()
    )
    return sample_discount * len(text) / len(sample)


def estimate_text_density(text: str | bytes) -> float:
    """Estimates the tokens of o200k_base for each four UTF-8 bytes; 1.0 for no text.

    A text of more than 9 KiB is judged by a sample of 9 KiB, so the work is bounded.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    ranges = _sample_ranges(len(raw))
    return _sample_density(b"".join(raw[start:end] for start, end in ranges))


class SizedText(NamedTuple):
    """A text of a part, and sizes that are known before the text is read.

    Attributes:
        text_bytes: The UTF-8 bytes of the text.
        media_bytes: Four bytes for each token of the media in the same part.
        is_ascii: Whether all of the text is ASCII.
        read: Returns the text.
    """

    text_bytes: int
    media_bytes: int
    is_ascii: bool
    read: Callable[[], bytes]


def weighted_tokens(
    parts: Iterable[SizedText],
    heuristic_tokens: int,
    *,
    has_single_digits: bool = False,
) -> float:
    """Multiplies a heuristic, which is bytes / 4, by the density of its texts.

    A heuristic of 100 with texts of density 2.0 gives 200. Tokens of media stay as they
    are. If `parts` has fewer tokens than the heuristic, the rest stays as it is too.

    Args:
        parts: The parts that the heuristic measures, the newest part first. Parts are
            taken until they have four bytes for each token of the heuristic. If `parts`
            is an iterator, the next call can take the parts that are left. If the last
            part that is taken is too large, only the end of its text is weighed,
            because the beginning counts as older.
        heuristic_tokens: The heuristic.
        has_single_digits: Whether each digit is a token of its own, which o200k_base
            does not do.
    """
    wanted_bytes = heuristic_tokens * 4
    taken_bytes = 0
    taken_parts = list[SizedText]()
    for part in parts:
        taken_parts.append(part)
        taken_bytes += part.text_bytes + part.media_bytes
        if taken_bytes >= wanted_bytes:
            break

    # All bytes of the texts are weighed, apart from the excess in the last part.
    weighed_bytes = [part.text_bytes for part in taken_parts]
    excess_bytes = taken_bytes - wanted_bytes
    if weighed_bytes and excess_bytes > 0:
        weighed_bytes[-1] = max(weighed_bytes[-1] - excess_bytes, 0)

    # The heuristic has the tokens of the texts for a density of 1 already.
    sample = _sample_parts(taken_parts, weighed_bytes)
    density = _sample_density(sample, has_single_digits)
    added_tokens = sum(weighed_bytes) / 4 * (density - 1)
    return heuristic_tokens + added_tokens


def _sample_parts(parts: Sequence[SizedText], weighed_bytes: Sequence[int]) -> bytes:
    """Returns a sample of several texts, as if the texts were joined into one.

    An offset is a position in the joined text. For example, the last 2 bytes of "abcd"
    and all of "efg" make the joined text "cdefg". The texts end at the offsets 2 and 5.
    A slice with the offsets 1 to 4 is "d" of the first text and "ef" of the second one.

    Texts that lie between two slices are not read.

    Args:
        parts: The texts.
        weighed_bytes: How many bytes of each text are joined, from the end of the text.
    """
    text_end_offsets = list(accumulate(weighed_bytes))
    slices = list[bytes]()
    text = b""
    read_index = None  # The index in `parts` of `text`; None before the first read.

    for slice_start, slice_end in _sample_ranges(sum(weighed_bytes)):
        # A slice may have pieces of several texts. The first of these texts is the
        # first one that ends behind the start of the slice.
        pieces = list[bytes]()
        offset = slice_start
        index = bisect_right(text_end_offsets, slice_start)

        while offset < slice_end:
            # Neighboring slices often lie in the same text, which is read once.
            if index != read_index:
                text = parts[index].read()
                read_index = index

            # If only the end of a text is joined, the text has bytes before its joined
            # part. So its start is computed from its end.
            text_end = text_end_offsets[index]
            text_start = text_end - len(text)
            piece_end = min(slice_end, text_end)

            # A text may have become shorter since it was measured. Then the offsets may
            # lie before its start.
            start_position = max(0, offset - text_start)
            end_position = max(0, piece_end - text_start)
            pieces.append(text[start_position:end_position])

            offset = piece_end
            index += 1

        # The line break keeps words of two texts apart.
        slices.append(b"\n".join(pieces))

    return b"".join(slices)
