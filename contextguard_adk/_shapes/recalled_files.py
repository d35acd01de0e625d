"""Attaches the files that the agent has read back with the recall tool."""

from __future__ import annotations

from collections.abc import Mapping

from google.genai import types

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import parts_of, with_parts
from contextguard_adk._history.text import list_items
from contextguard_adk._turn.turn import Turn

ATTACHED_KEY = "attached"
"""In a result of the recall tool: the handle of a file."""


def attach_recalled_files(
    turn: Turn, contents: list[types.Content]
) -> list[types.Content]:
    """Puts each file that the agent has read back after its announcement.

    An announcement may be older than the model, or than the rules for it. Where a file
    may not be attached, the announcement is replaced by words about it.
    """
    announced = [_read_handles(content) for content in contents]
    if not any(announced):
        return contents

    files = _find_files(turn)
    attached: list[types.Content] = []
    for content, handles in zip(contents, announced, strict=True):
        moved: list[types.Content] = []
        told: dict[str, str] = {}
        for handle in handles:
            file = files.get(handle)
            if file is None:
                continue
            if turn.media_mover.takes(file):
                # Without a text: that would begin a turn for Gemini.
                moved.append(types.Content(role="user", parts=[file]))
            else:
                told[handle] = turn.media_mover.tell(file, handle)

        attached.append(_tell(content, told) if told else content)
        attached += moved
    return attached


def _find_files(turn: Turn) -> dict[str, types.Part]:
    """Returns the images and files of the history, by handle."""
    items = list_items(turn.messages, turn.history.indexes)
    newest = {item.handle: item.media for item in items}
    return {handle: media for handle, media in newest.items() if media is not None}


def _read_handles(content: types.Content) -> list[str]:
    """Returns the handles of the files that results in a content announce."""
    handles: list[str] = []
    for part in parts_of(content):
        handle = _read_handle(part)
        if handle is not None:
            handles.append(handle)
    return handles


def _read_handle(part: types.Part) -> str | None:
    """Returns the handle of the file that a result announces; None for other parts."""
    response = part.function_response
    if response is None or response.name != RECALL_TOOL:
        return None
    handle = (response.response or {}).get(ATTACHED_KEY)
    return handle if isinstance(handle, str) else None


def _tell(content: types.Content, told: Mapping[str, str]) -> types.Content:
    """Puts words in place of announcements, by handle."""
    changed: list[types.Part] = []
    for part in parts_of(content):
        handle = _read_handle(part)
        response = part.function_response
        if not handle or handle not in told or not response:
            changed.append(part)
            continue

        answer = {"result": f"[{handle}]\n{told[handle]}"}
        words = response.model_copy(update={"response": answer})
        changed.append(part.model_copy(update={"function_response": words}))
    return with_parts(content, changed)
