"""Folds texts for searches: all spellings of a word become one.

For example: "Hélène", "HELENE" and "Hélène" with accents that are characters of their
own all become "helene".

A mark is a character that changes the character before it: an accent, a vowel sign, a
tone. Folding drops the marks that writers may leave out. It keeps the marks that are
letters to their readers, such as the vowel signs of Hindi.
"""

# ruff: noqa: RUF001 - Letters of other scripts look like those of Latin.

from __future__ import annotations

import bisect
import re
import unicodedata

_MARK_CODES = (*range(0x300, 0x1E00), *range(0x20D0, 0x2100), *range(0xA600, 0xAC00))
"""The code points that are looked through for marks."""

_VARIANTS = {
    # Latin letters that Unicode does not take for a letter with an accent.
    "ı": "i",
    "ł": "l",
    "ø": "o",
    "đ": "d",
    "ð": "d",
    "ħ": "h",
    "æ": "ae",
    "œ": "oe",
    "þ": "th",
    # Arabic letters that keyboards and writers exchange.
    "ٱ": "ا",
    "ى": "ي",
    "ی": "ي",
    "ک": "ك",
    "ة": "ه",
    "ہ": "ه",
    # Two signs for one nasal sound in Hindi.
    "\u0901": "\u0902",
    # Final consonants of Bengali and Malayalam, which older texts write as a consonant
    # and a sign that takes its vowel away.
    "ৎ": "ত্",
    "ൺ": "ണ്",
    "ൻ": "ന്",
    "ർ": "ര്",
    "ൽ": "ല്",
    "ൾ": "ള്",
    "ൿ": "ക്",
    **dict.fromkeys("‘’‚‛ʻʼ′׳", "'"),
    **dict.fromkeys("“”„‟«»״", '"'),
    **dict.fromkeys("‐‒–—―−", "-"),
    "⁄": "/",
}
"""What stands for a character after folding. All keys are in lower case."""


def _is_optional(mark: str) -> bool:
    """Whether writers may leave a mark out.

    This holds for accents, the points of Hebrew, the short vowels of Arabic, and the
    dots below letters of India (nuktas). It does not hold for vowel signs of India and
    Southeast Asia, for tones of Thai, and for the voicing marks of kana.
    """
    # Unicode's combining class tells these kinds apart. From 200 on, it says where a
    # general mark stands; 10 to 36 are the points of Hebrew, Arabic and Syriac, 7 is a
    # nukta, and 1 a stroke through a letter.
    combining_class = unicodedata.combining(mark)
    return combining_class in (1, 7, *range(10, 37)) or combining_class >= 200


_CHARACTERS = [chr(code) for code in _MARK_CODES]
_MARKS = [char for char in _CHARACTERS if unicodedata.category(char)[0] == "M"]
_DIGITS = {char: str(unicodedata.digit(char)) for char in _CHARACTERS if char.isdigit()}
_REPLACEMENTS = {**_VARIANTS, **_DIGITS}

MARKS = "".join(mark for mark in _MARKS if not _is_optional(mark))
"""The marks that folding keeps. They are parts of words."""

_OPTIONAL_MARKS = "".join(mark for mark in _MARKS if _is_optional(mark))
# Beside optional marks: the stretch of Arabic letters (tatweel), and characters without
# a shape, such as soft hyphens, joiners, signs of direction and variants of emojis.
_DROPPED = (
    f"{_OPTIONAL_MARKS}\u0640\xad\u034f\u061c\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u20d0-\u20ff\ufe00-\ufe0f\ufe20-\ufe2f\ufeff\U000e0000-\U000e0fff"
)
_FOLDED = re.compile(f"[{_DROPPED}{''.join(_REPLACEMENTS)}]")
"""A character that folding drops or replaces."""


def fold(text: str) -> str:
    """Returns a text in the one spelling that all spellings of its words share.

    - The text is in lower case: "Straße" and "STRASSE" become "strasse".
    - The forms of a character become one: full-width, half-width, ligature.
    - Marks that writers may leave out are dropped, and so are invisible characters.
    - Curly quotes, dashes and digits of other scripts become those of ASCII.

    The folded text may be shorter or longer: see `find_unfolded`.
    """
    if text.isascii():
        return text.lower()

    # The compatible form of a trade mark sign, "TM", would join the word before it.
    without_trade_marks = text.replace("™", " ")
    # In the decomposed form, each mark is a character of its own.
    decomposed = unicodedata.normalize("NFKD", without_trade_marks).casefold()
    plain = decomposed
    start = 0
    # Most texts have few different characters that change, each many times.
    while found := _FOLDED.search(plain, start):
        plain = plain.replace(found[0], _REPLACEMENTS.get(found[0], ""))
        start = found.start()
    # Letters of Korean and kana with voicing marks are composed again.
    return unicodedata.normalize("NFC", plain)


def find_unfolded(text: str, folded_index: int) -> int:
    """Returns the index in a text of the character that folding puts at an index.

    For example: if folding drops the first two characters, 0 -> 2.

    Args:
        text: The text, not folded.
        folded_index: An index in `fold(text)`.
    """

    def count_folded(end: int) -> int:
        return len(fold(text[:end]))

    # The longest beginning of the text whose folded form ends at the index.
    ends = range(len(text) + 1)
    return bisect.bisect_right(ends, folded_index, key=count_folded) - 1
