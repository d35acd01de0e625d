"""Attaches the files that the agent has read back with the recall tool."""

from __future__ import annotations

from google.genai import types

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import parts_of
from contextguard_adk._history.text import list_items
from contextguard_adk._turn.turn import Turn

ATTACHED_KEY = "attached"
"""In a result of the recall tool: the handle of a file."""


def attach_recalled_files(
    turn: Turn, contents: list[types.Content]
) -> list[types.Content]:
    """Puts each file that the agent has read back after its announcement."""
    if turn.history.stored is None or not any(map(_announced, contents)):
        return contents
    known = {i.handle: i for i in list_items(turn.messages, turn.history.history)}
    attached: list[types.Content] = []
    for content in contents:
        attached.append(content)
        for handle in _announced(content):
            item = known.get(handle)
            if item and item.media:
                # Without a text: that would begin a turn for Gemini.
                attached.append(types.Content(role="user", parts=[item.media]))
    return attached


def _announced(content: types.Content) -> list[str]:
    """Handles of the files that results in a content announce."""
    results = (part.function_response for part in parts_of(content))
    recalled = (r.response or {} for r in results if r and r.name == RECALL_TOOL)
    handles = (response.get(ATTACHED_KEY) for response in recalled)
    return [handle for handle in handles if isinstance(handle, str)]
