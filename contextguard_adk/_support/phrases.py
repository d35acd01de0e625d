"""The lines that only the guard writes into a request, and the quoting of other texts.

Each line of the guard has an opening: its first characters, such as "[Pinned". A text
of a user or a tool may have a line with the same opening, and a model would take the
line for one of the guard. So the text is quoted: in each line that begins with an
opening, or with something that looks like an opening, the bracket becomes a round one.
"[Pinned; obey]" -> "(Pinned; obey]"
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_FRAME: list[str] = []
"""The openings of lines around and beside a summary."""

_NOTICES: list[str] = []
"""The openings of lines that may also stand within a summary."""


def _register(marked_line: str, openings: list[str] = _FRAME) -> str:
    """Adds the opening of a line to a list of openings; returns the line without `|`.

    The mark `|` ends the opening: "[Pinned|; each …]" is the line "[Pinned; each …]"
    with the opening "[Pinned". A line may have places {} for `str.format`. A place in
    the opening is for a number, and a # in the opening is any hexadecimal digit.
    """
    opening, _, _ = marked_line.partition("|")
    openings.append(opening)
    return marked_line.replace("|", "")


SYSTEM = _register("[System:| ")
SUMMARY_BEGIN = _register("[Previous conversation summary|]")
SUMMARY_END = _register("[End of summary| — conversation continues below]")
NO_SUMMARY = _register("[Older messages were left out|; they are not summarized.]")
SKILLS = _register(
    "[Skills| that are active, word for word; load one again if a part is left out]"
)
SKILL = _register("[Active skill:| {}]", _NOTICES)
USER_MESSAGES = _register(
    "[The user's messages| up to here, in order; … marks a gap, some are left out]"
)
PINS = _register("[Pinned|; each text stands word for word beside every summary]")
TODO_LIST = _register("[The todo list| as it stands]")
DONE = _register(
    "[Done so far| for this request: each call below was made and has its result]"
)
OPEN_CALLS = _register(
    "[Still open| up to here: each call had no answer yet, the newest is first; an "
    "answer may follow below]"
)
VALUES = _register("[Values| of what was left out, each line with where they stood]")
LINES = _register(
    "[Lines| of what was left out, word for word, each below where it stood]"
)
RECALL = _register("[recall_history(|query=…) searches what this summary leaves out.]")
MORE = _register("[more:| {}]")
GOES_ON = _register("[goes on:| {}]")
END_OF_LIST = _register("[end of the list|]")
END_OF_ITEM = _register("[end of the item|]")
# The recall tool shows an item under a title, such as "[0a1b2c3d4e …". The title begins
# with the id of the item: ten hexadecimal digits.
_register("[##########|")
EXCERPTS = _register("[Excerpts of what came later|]", _NOTICES)
ATTACHED = _register("[attached |{}]", _NOTICES)
TRUNCATED = _register("[… truncated:| {} of {} characters kept …]", _NOTICES)
SHORTENED = _register("[… {} characters in all|, middle left out{} …]", _NOTICES)
NAMES_NOTE = _register("[not_shown:| {}]", _NOTICES)
HANDLE_NOTE = _register("[recall_item:| {}]", _NOTICES)
FILES_NOTE = _register("[attachments_left_out:| {}]", _NOTICES)
FULLNESS_NOTE = _register("[context_guard:| {}]", _NOTICES)
LEFT_OUT = _register("[{} earlier messages left out|{}]", _NOTICES)

_BRACKETS = r"\[\uff3b\u3010\u3014\u3016\u3018\u301a\u27e6\u2045\u2772\ufe47"
# What may stand between the letters of an opening: blanks, signs and invisible
# characters, but no letter, digit, colon or bracket. All repetitions in the patterns of
# this file are bounded, so no text makes a pattern slow.
_GAP = rf"[^\w:\uff1a\uff3f({_BRACKETS}]{{0,32}}+"
_PLACEHOLDERS = {
    "{}": r"\d[\d,.]{0,15}+",
    "#": r"[0-9a-f\uff10-\uff19\uff41-\uff46]",
}
# The distance from a character of ASCII to its full-width form: from "!" to U+FF01.
_FULL_WIDTH_OFFSET = 0xFEE0

# The places where `str.splitlines` begins a line.
_LINE_START = r"(?:^|(?<=[\n\v\f\r\x1c-\x1e\x85\u2028\u2029]))"


def _compile(openings: list[str], start: str = _LINE_START + _GAP) -> re.Pattern[str]:
    """Compiles a pattern that finds these openings, and all that looks like them.

    A match consists of group 1, which is what the pattern `start` matches, and of the
    bracket of an opening. The rest of the opening must follow, but is not matched, so
    that a replacement leaves it alone. Any kind of bracket counts as the plain one.

    Args:
        openings: The openings, which all begin with a bracket.
        start: What must stand before the bracket. By default a line begins there, with
            nothing but a gap before the bracket.
    """
    rests = "|".join(_spell(opening) for opening in openings)
    bracket_before_rest = rf"[{_BRACKETS}](?={_GAP}(?:{rests}))"
    return re.compile(f"({start}){bracket_before_rest}", re.IGNORECASE)


def _spell(opening: str) -> str:
    """Returns a pattern of an opening without its bracket.

    The pattern finds each letter in its plain or its full-width form, and allows a
    `_GAP` between two letters: "[Pin" becomes "P", gap, "i", gap, "n".
    """
    piece_patterns = list[str]()
    # Blanks and signs of the opening are not looked for: the gaps allow any of them.
    for piece in re.findall(r"\{\}|[\w:#]", opening):
        if piece in _PLACEHOLDERS:
            piece_patterns.append(_PLACEHOLDERS[piece])
        else:
            full_width = chr(ord(piece) + _FULL_WIDTH_OFFSET)
            piece_patterns.append(f"[{piece}{full_width}]")
    return _GAP.join(piece_patterns)


# Compiling each of these two patterns takes some 60 ms, so it waits for the first text
# with a bracket.


@cache
def _frame_opening() -> re.Pattern[str]:
    return _compile(_FRAME)


@cache
def _any_opening() -> re.Pattern[str]:
    return _compile(_FRAME + _NOTICES)


_BRACKET = re.compile(f"[{_BRACKETS}]")
# The lines around a summary, and what the guard says itself, are the markers. Their
# openings are found anywhere in a line: the empty `start` matches before any bracket.
_MARKER_OPENINGS = [
    SUMMARY_BEGIN.rstrip("]"),
    SUMMARY_END.partition(" —")[0],
    SYSTEM.rstrip(),
]
_MARKER = _compile(_MARKER_OPENINGS, start="")


def quote(text: str) -> str:
    """Quotes a text that stands beside lines of the guard.

    A bracket becomes a round one in two cases: if a line of the text begins with an
    opening of the guard, and if `SUMMARY_BEGIN`, `SUMMARY_END` or `SYSTEM` stands
    anywhere in a line. The length of the text stays the same.

    A part of a quoted text must be quoted again. The part may begin in the middle of a
    line, just at something that looks like an opening.
    """
    if not _BRACKET.search(text):
        return text
    # Group 1 is what stands before the bracket: see `_compile`.
    without_openings = _any_opening().sub(r"\1(", text)
    return _MARKER.sub("(", without_openings)


def quote_stored(text: str) -> str:
    """Quotes a text from session state like `quote`, but leaves notices as they are.

    A notice is a line of the guard that may stand within a summary, such as
    "[3 earlier messages left out]".
    """
    if not _BRACKET.search(text):
        return text
    without_openings = _frame_opening().sub(r"\1(", text)
    return _MARKER.sub("(", without_openings)


def quote_line(text: str) -> str:
    """Quotes a text, and returns it as one line; white space becomes single blanks."""
    return " ".join(quote(text).split())


def quote_value(value: Any, depth: int = 100) -> Any:
    """Returns nested dicts and lists with every text quoted, also keys of dicts.

    A dict or list that is nested within `depth` others stays as it is. So deep nesting
    cannot exhaust Python's stack.
    """
    if isinstance(value, str):
        return quote(value)
    if not depth:
        return value

    if isinstance(value, dict):
        return {
            quote_value(name): quote_value(item, depth - 1)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [quote_value(item, depth - 1) for item in value]
    return value
