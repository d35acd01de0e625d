"""The lines that only the guard writes into a request, and the quoting of other texts.

Each line of the guard has an opening: its first characters, such as "[Pinned". A line
of any other text that begins with an opening, or with something that looks like one,
gets a round bracket. So no reader takes the line for one of the guard's.
"""

from __future__ import annotations

import re
from typing import Any

_FRAME: list[str] = []
"""The openings of lines around and beside a summary."""

_NOTICES: list[str] = []
"""The openings of lines that may also stand within a summary."""


def _register(marked_line: str, openings: list[str] = _FRAME) -> str:
    """Adds the opening of a line to a list of openings; returns the line.

    The opening ends at the mark `|`, which is no part of the line: "[Pinned|; each …]"
    has the opening "[Pinned".
    """
    opening, _, _ = marked_line.partition("|")
    openings.append(opening)
    return marked_line.replace("|", "")


SYSTEM = _register("[System:| ")
SUMMARY_BEGIN = _register("[Previous conversation summary|]")
SUMMARY_END = _register("[End of summary| — conversation continues below]")
NO_SUMMARY = _register("[Older messages were left out|; they are not summarized.]")
USER_MESSAGES = _register(
    "[The user's messages| up to here, in order; … marks a gap, some are left out]"
)
PINS = _register("[Pinned|; each text stands word for word beside every summary]")
TODO_LIST = _register("[The todo list| as it stands]")
DONE = _register(
    "[Done so far| for this request: each call below was made and has its result]"
)
OPEN_CALLS = _register(
    "[Still open|; each call below has no answer yet, the newest is first]"
)
VALUES = _register("[Values| of what was left out, each line with where they stood]")
RECALL = _register("[recall_history(|query=…) searches what this summary leaves out.]")
MORE = _register("[more:| {}]")
GOES_ON = _register("[goes on:| {}]")
END_OF_LIST = _register("[end of the list|]")
END_OF_ITEM = _register("[end of the item|]")
_register(
    "[##########"
)  # The title of an item in recall; each # is a hexadecimal digit.
EXCERPTS = _register("[Excerpts of what came later|]", _NOTICES)
ATTACHED = _register("[attached |{}]", _NOTICES)
TRUNCATED = _register("[… truncated:| {} of {} characters kept …]", _NOTICES)
SHORTENED = _register("[… {} characters in all|, middle left out{} …]", _NOTICES)
LEFT_OUT = _register("[{} earlier messages left out|{}]", _NOTICES)

_BRACKETS = r"\[\uff3b\u3010\u3014\u3016\u3018\u301a\u27e6\u2045\u2772\ufe47"
# Invisible characters, too. All patterns here are bounded: no text makes them slow.
_GAP = rf"[^\w:\uff1a\uff3f({_BRACKETS}]{{0,32}}+"
_PLACEHOLDERS = {
    "{}": r"\d[\d,.]{0,15}+",  # A number.
    "#": r"[0-9a-f\uff10-\uff19\uff41-\uff46]",  # A hexadecimal digit.
}
_FULL_WIDTH_OFFSET = 0xFEE0  # From a character of ASCII to its full-width form.

# Where `str.splitlines` begins a line.
_LINE_START = r"(?:^|(?<=[\n\v\f\r\x1c-\x1e\x85\u2028\u2029]))"


def _compile(openings: list[str], start: str = _LINE_START + _GAP) -> re.Pattern[str]:
    """Compiles a pattern that finds these openings, and all that looks like them.

    A match is the opening bracket, and before it, as group 1, all that `start` matches.
    The rest of the opening must follow, but is no part of the match.

    Any bracket, and the full-width form of each letter, look like the plain one. Blanks
    and invisible characters between letters make no difference.
    """
    opening_patterns = []
    for opening in openings:
        piece_patterns = []
        for piece in re.findall(r"\{\}|[\w:#]", opening):
            if piece in _PLACEHOLDERS:
                piece_patterns.append(_PLACEHOLDERS[piece])
            else:
                full_width = chr(ord(piece) + _FULL_WIDTH_OFFSET)
                piece_patterns.append(f"[{piece}{full_width}]")
        opening_patterns.append(_GAP.join(piece_patterns))

    after_bracket = f"{_GAP}(?:{'|'.join(opening_patterns)})"
    return re.compile(rf"({start})[{_BRACKETS}](?={after_bracket})", re.IGNORECASE)


_OF_FRAME = _compile(_FRAME)
_ANY = _compile(_FRAME + _NOTICES)
_BRACKET = re.compile(f"[{_BRACKETS}]")
# The markers around a summary, wherever in a line they stand.
_MARKER_OPENINGS = [SUMMARY_BEGIN.rstrip("]"), SUMMARY_END.partition(" —")[0]]
_MARKERS = _compile(_MARKER_OPENINGS, "")


def quote(text: str) -> str:
    """Quotes a text that stands beside lines of the guard.

    If a line begins like a line of the guard, its bracket becomes a round one. So does
    the bracket of a marker around a summary, anywhere in a line. The length stays the
    same. A part of a quoted text must be quoted again: its first line may begin
    elsewhere.
    """
    if not _BRACKET.search(text):
        return text
    return _MARKERS.sub("(", _ANY.sub(r"\1(", text))


def quote_stored(text: str) -> str:
    """Quotes a text from session state, but leaves the guard's own notices in it."""
    if not _BRACKET.search(text):
        return text
    return _MARKERS.sub("(", _OF_FRAME.sub(r"\1(", text))


def quote_line(text: str) -> str:
    """Quotes a text in one line; every kind of line break becomes a blank."""
    return " ".join(quote(text).split())


def quote_value(value: Any, depth: int = 100) -> Any:
    """Quotes every text in nested dicts and lists, and the names of fields.

    Values that are nested more than `depth` levels deep stay as they are.
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
