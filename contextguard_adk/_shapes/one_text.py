"""Makes one text of neighboring texts in messages that the guard has put together.

`LiteLlm` sends several texts of the user as a list, which fails in chat templates that
take a string only.
"""

from __future__ import annotations

from google.genai import types

from contextguard_adk._history.contents import join_new_texts
from contextguard_adk._turn.turn import Turn


def join_texts(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Joins neighboring texts; messages that came so stay as they are."""
    return join_new_texts(contents, turn.history.contents)
