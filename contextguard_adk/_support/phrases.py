"""The lines that only the guard writes into a request, and how other texts are quoted.

Both come from one list: a text of others that begins like a line of the list is changed
a little, so that no reader takes it for the guard's.
"""

from __future__ import annotations

import re
from typing import Any

_FRAME: list[str] = []
"""The openings of lines around and beside a summary."""

_NOTICES: list[str] = []
"""The openings of lines that may also stand within a summary."""


def _line(phrase: str, openings: list[str] = _FRAME) -> str:
    """Lists a line of the guard; its opening ends at `|`."""
    opening, _, _ = phrase.partition("|")
    openings.append(opening)
    return phrase.replace("|", "")


SYSTEM = _line("[System:| ")
SUMMARY_BEGIN = _line("[Previous conversation summary|]")
SUMMARY_END = _line("[End of summary| — conversation continues below]")
NO_SUMMARY = _line("[Older messages were left out|; they are not summarized.]")
USER_MESSAGES = _line(
    "[The user's messages| up to here, in order; … marks a gap, some are left out]"
)
PINS = _line("[Pinned|; each text stands word for word beside every summary]")
TODO_LIST = _line("[The todo list| as it stands]")
DONE = _line(
    "[Done so far| for this request: each call below was made and has its result]"
)
OPEN_CALLS = _line(
    "[Still open|; each call below has no answer yet, the newest is first]"
)
VALUES = _line("[Values| of what was left out, each line with where they stood]")
RECALL = _line("[recall_history(|query=…) searches what this summary leaves out.]")
MORE = _line("[more:| {}]")
GOES_ON = _line("[goes on:| {}]")
END_OF_LIST = _line("[end of the list|]")
END_OF_ITEM = _line("[end of the item|]")
_line("[##########")  # The title of an item that is read back.
EXCERPTS = _line("[Excerpts of what came later|]", _NOTICES)
ATTACHED = _line("[attached |{}]", _NOTICES)
TRUNCATED = _line("[… truncated:| {} of {} characters kept …]", _NOTICES)
SHORTENED = _line("[… {} characters in all|, middle left out{} …]", _NOTICES)
LEFT_OUT = _line("[{} earlier messages left out|{}]", _NOTICES)

_BRACKETS = r"\[\uff3b\u3010\u3014\u3016\u3018\u301a\u27e6\u2045\u2772\ufe47"
# Invisible characters, too. All patterns here are bounded: no text makes them slow.
_GAP = rf"[^\w:\uff1a\uff3f({_BRACKETS}]{{0,32}}+"
_KINDS = {"{}": r"\d[\d,.]{0,15}+", "#": r"[0-9a-f\uff10-\uff19\uff41-\uff46]"}

# Where `str.splitlines` begins a line.
_LINE = r"(?:^|(?<=[\n\v\f\r\x1c-\x1e\x85\u2028\u2029]))"


def _compile(openings: list[str], start: str = _LINE + _GAP) -> re.Pattern[str]:
    """Compiles a pattern for what a reader would take for one of these openings."""
    spelled = []
    for opening in openings:
        alike = []
        for piece in re.findall(r"\{\}|[\w:#]", opening):
            if piece in _KINDS:
                alike.append(_KINDS[piece])
            else:  # Full-width forms stand in the order of ASCII.
                alike.append(f"[{piece}{chr(ord(piece) + 0xFEE0)}]")
        spelled.append(_GAP.join(alike))
    said = f"{_GAP}(?:{'|'.join(spelled)})"
    return re.compile(rf"({start})[{_BRACKETS}](?={said})", re.IGNORECASE)


_OF_FRAME = _compile(_FRAME)
_ANY = _compile(_FRAME + _NOTICES)
_BRACKET = re.compile(f"[{_BRACKETS}]")
_MARKERS = _compile(_FRAME[1:3], "")


def quote(text: str) -> str:
    """Returns a text of others as it may stand beside lines of the guard.

    Where a line begins like one of the guard, its bracket becomes a round one. In the
    markers around a summary it does so anywhere. The length stays the same. A part of a
    quoted text has to be quoted again, because it may begin elsewhere.
    """
    if not _BRACKET.search(text):
        return text
    return _MARKERS.sub("(", _ANY.sub(r"\1(", text))


def quote_stored(text: str) -> str:
    """Quotes a text from session state; notices of the guard in it stay."""
    if not _BRACKET.search(text):
        return text
    return _MARKERS.sub("(", _OF_FRAME.sub(r"\1(", text))


def quote_line(text: str) -> str:
    """Quotes a text in one line; every kind of line break becomes a blank."""
    return " ".join(quote(text).split())


def quote_value(value: Any, depth: int = 100) -> Any:
    """Quotes every text in nested dicts and lists, and the names of fields."""
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
