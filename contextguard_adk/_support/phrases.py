"""What only the guard writes into a request, and how texts of others stand beside it.

One list tells them apart: of it the guard's lines are made, and what finds a text that
would pass for one.
"""

from __future__ import annotations

import re
from typing import Any

_FRAME: list[str] = []
_NOTICES: list[str] = []  # They may also stand in a summary that the guard wrote.


def _line(phrase: str, openings: list[str] = _FRAME) -> str:
    """Lists a line of the guard; nothing of others may begin like it does up to `|`."""
    openings.append(phrase.partition("|")[0])
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
# Also what is not seen at all. Bounded, as all here: no text makes it slow.
_GAP = rf"[^\w:\uff1a\uff3f({_BRACKETS}]{{0,32}}+"
_KINDS = {"{}": r"\d[\d,.]{0,15}+", "#": r"[0-9a-f\uff10-\uff19\uff41-\uff46]"}

# Where `str.splitlines` begins a line.
_LINE = r"(?:^|(?<=[\n\v\f\r\x1c-\x1e\x85\u2028\u2029]))"


def _compile(openings: list[str], start: str = _LINE + _GAP) -> re.Pattern[str]:
    """Finds what a reader would take for one of these, at the beginning of a line."""
    spelled = []
    for opening in openings:
        pieces = re.findall(r"\{\}|[\w:#]", opening)
        # Full-width forms stand in the order of ASCII.
        alike = (_KINDS.get(p) or f"[{p}{chr(ord(p) + 0xFEE0)}]" for p in pieces)
        spelled.append(_GAP.join(alike))
    said = f"{_GAP}(?:{'|'.join(spelled)})"
    return re.compile(rf"({start})[{_BRACKETS}](?={said})", re.IGNORECASE)


_OF_FRAME = _compile(_FRAME)
_ANY = _compile(_FRAME + _NOTICES)
_BRACKET = re.compile(f"[{_BRACKETS}]")
_MARKERS = _compile(_FRAME[1:3], "")


def quote(text: str) -> str:
    """Returns a text of others as it may stand beside what the guard writes.

    Where a line begins like one of the guard, its bracket becomes a round one; that of
    the markers around a summary does so anywhere. No length changes. What is cut has to
    be quoted again where a new line begins.
    """
    if not _BRACKET.search(text):
        return text
    return _MARKERS.sub("(", _ANY.sub(r"\1(", text))


def quote_stored(text: str) -> str:
    """Quotes a text from session state, which may hold notices of the guard."""
    if not _BRACKET.search(text):
        return text
    return _MARKERS.sub("(", _OF_FRAME.sub(r"\1(", text))


def quote_line(text: str) -> str:
    """Quotes a text in one line, whatever it takes for a line break."""
    return " ".join(quote(text).split())


def quote_value(value: Any, depth: int = 100) -> Any:
    """Quotes every text in nested dicts and lists, names of fields included."""
    if isinstance(value, str):
        return quote(value)
    if depth and isinstance(value, dict):
        return {quote_value(k): quote_value(v, depth - 1) for k, v in value.items()}
    nested = depth and isinstance(value, list)
    return [quote_value(item, depth - 1) for item in value] if nested else value
