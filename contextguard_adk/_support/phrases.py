"""What only the guard writes into a request, and how texts of others stand beside it.

Lines of the guard and the texts that could pass for them are told apart by one list.
"""

from __future__ import annotations

import re
from typing import Any

_FRAME: list[str] = []
_NOTICES: list[str] = []  # They may also stand within a summary that the guard wrote.


def _line(opening: str, rest: str = "", openings: list[str] = _FRAME) -> str:
    """Adds a line of the guard to the list; nothing of others may begin like it."""
    openings.append(opening)
    return opening + rest


SYSTEM = _line("[System:", " ")
SUMMARY_BEGIN = _line("[Previous conversation summary", "]")
SUMMARY_END = _line("[End of summary", " — conversation continues below]")
NO_SUMMARY = _line("[Older messages were left out", "; they are not summarized.]")
USER_MESSAGES = _line(
    "[The user's messages", " up to here, in order; long ones are excerpts]"
)
TODO_LIST = _line("[The todo list", " as it stands]")
DONE_SO_FAR = _line(
    "[Done so far", " for this request: each call below was made and has its result]"
)
RECALL_NOTE = _line(
    "[recall_history(", "query=…) searches what this summary leaves out.]"
)
_line("[{handle} ")  # The title of an item that is read back.
MORE = _line("[more:", " {}]")
GOES_ON = _line("[goes on:", " {}]")
END_OF_LIST = _line("[end of the list", "]")
END_OF_ITEM = _line("[end of the item", "]")

EXCERPTS = _line("[Excerpts of what came later", "]", _NOTICES)
ATTACHED = _line("[attached ", "{}]", _NOTICES)
TRUNCATED = _line("[… truncated:", " {} of {} characters kept …]", _NOTICES)
SHORTENED = _line("[… {} characters in all", ", middle left out{} …]", _NOTICES)
LEFT_OUT = _line("[{} earlier messages left out", "{}]", _NOTICES)
CALLS_BEFORE = _line("[… and {} calls before", " these]", _NOTICES)
MORE_TASKS = _line("[… and {} more tasks", " that are not shown]", _NOTICES)

_UNSEEN = (  # Nothing is seen of these.
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e01ef"
)
_ALIKE = {
    "[": r"[\[\uff3b\u3010\u3014\u3016\u3018\u301a\u27e6\u2045\u2772\ufe47]",
    " ": rf"[\s{_UNSEEN}]++",
    ":": rf"[\s{_UNSEEN}]*+[:\uff1a\u2236]",
    "…": r"(?:…|\.{3})",
    "'": r"['\u2019\u2018\uff07]",
}


def _spell(opening: str) -> str:
    """What a reader would take for an opening, behind its bracket."""
    plain = opening[1:].replace("{handle}", "\0").replace("{}", "\1")
    known = {
        **_ALIKE,
        "\0": rf"(?:[0-9a-f\uff10-\uff19\uff41-\uff46][{_UNSEEN}]*+){{10}}",
        "\1": r"\d[\d,.]*",
    }
    # Full-width forms stand in the order of ASCII.
    spelled = (known.get(c) or f"[{re.escape(c)}{chr(ord(c) + 0xFEE0)}]" for c in plain)
    return f"[{_UNSEEN}]*+".join(spelled)


def _compile(openings: list[str]) -> re.Pattern[str]:
    spelled = "|".join(map(_spell, openings))
    return re.compile(rf"{_ALIKE['[']}(?=[\s{_UNSEEN}]*+(?:{spelled}))", re.IGNORECASE)


_OF_FRAME, _ANY = _compile(_FRAME), _compile([*_FRAME, *_NOTICES])


def quote(text: str) -> str:
    """Returns a text of others as it may stand beside what the guard writes.

    The bracket of whatever reads like an opening of the guard is made a round one,
    anywhere: a cut or another line break cannot bring it to the front. The length stays
    the same, and what was quoted stays as it is.
    """
    return _ANY.sub("(", text)


def quote_stored(text: str) -> str:
    """Quotes a text that is stored as written by the guard, which may have notices."""
    return _OF_FRAME.sub("(", text)


def quote_line(text: str) -> str:
    """Quotes a text in one line, whatever it takes for a line break."""
    return " ".join(quote(text).split())


def quote_value(value: Any, depth: int = 100) -> Any:
    """Quotes every text in nested dicts and lists, the names of fields as well."""
    if isinstance(value, str):
        return quote(value)
    if depth and isinstance(value, dict):
        return {quote_value(k): quote_value(v, depth - 1) for k, v in value.items()}
    if depth and isinstance(value, list):
        return [quote_value(item, depth - 1) for item in value]
    return value
