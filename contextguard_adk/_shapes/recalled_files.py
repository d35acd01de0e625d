"""Attaches the files that the agent has read back with the recall tool."""

from __future__ import annotations

from collections.abc import Mapping

from google.genai import types

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import parts_of, with_parts
from contextguard_adk._history.text import list_items
from contextguard_adk._shapes.moved_media import MediaMover
from contextguard_adk._turn.turn import Turn

ATTACHED_KEY = "attached"
"""In a result of the recall tool: the handle of a file."""


def attach_recalled_files(
    turn: Turn, contents: list[types.Content]
) -> list[types.Content]:
    """Puts each file that the agent has read back after its announcement.

    An announcement may be older than the model, or than the rules for it: what may not
    be attached is told in its place.
    """
    if turn.history.stored is None or not any(map(_announced, contents)):
        return contents

    mover = MediaMover.of(turn)
    known = {i.handle: i for i in list_items(turn.messages, turn.history.indexes)}
    attached: list[types.Content] = []
    for content in contents:
        files: list[types.Content] = []
        told: dict[str, str] = {}
        for handle in _announced(content):
            item = known.get(handle)
            if item is None or item.media is None:
                continue
            if mover.takes(item.media):
                # Without a text: that would begin a turn for Gemini.
                files.append(types.Content(role="user", parts=[item.media]))
            else:
                told[handle] = mover.tell(item.media, handle)
        attached += [_tell(content, told) if told else content, *files]
    return attached


def _announced(content: types.Content) -> list[str]:
    """Handles of the files that results in a content announce."""
    handles = map(_read_handle, parts_of(content))
    return [handle for handle in handles if handle is not None]


def _read_handle(part: types.Part) -> str | None:
    """The handle of the file that a result announces; None for other parts."""
    response = part.function_response
    if response is None or response.name != RECALL_TOOL:
        return None
    handle = (response.response or {}).get(ATTACHED_KEY)
    return handle if isinstance(handle, str) else None


def _tell(content: types.Content, told: Mapping[str, str]) -> types.Content:
    """Puts words in place of announcements, by handle."""
    parts = parts_of(content)
    for place, part in enumerate(parts):
        handle = _read_handle(part)
        if handle and handle in told and part.function_response:
            answer = {"result": f"[{handle}]\n{told[handle]}"}
            response = part.function_response.model_copy(update={"response": answer})
            parts[place] = part.model_copy(update={"function_response": response})
    return with_parts(content, parts)
