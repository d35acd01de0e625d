"""What is said to people, line by line."""

from __future__ import annotations

import re


def tells(said: str, text: str) -> bool:
    """Whether a text is one line that says this; … stands for anything."""
    pattern = ".*".join(re.escape(piece) for piece in said.split("…"))
    return re.fullmatch(pattern, text.strip()) is not None
