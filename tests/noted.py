"""Reads the notes that the guard puts into shortened results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def note(shown: Mapping[str, Any], name: str) -> str:
    """The value of a note, whether it is a field or a line; "" if there is none."""
    for value in (shown, *shown.values()):
        if isinstance(value, dict) and name in value:
            return str(value[name])
        text = _last_text(value)
        found = re.search(rf"^\[{name}: (.*)\]$", text, re.MULTILINE)
        if found:
            return found.group(1)
    return ""


def _last_text(value: object) -> str:
    """A text itself, or the last text of a list."""
    last = value[-1] if isinstance(value, list) and value else value
    text = last.get("text") if isinstance(last, dict) else last
    return text if isinstance(text, str) else ""
