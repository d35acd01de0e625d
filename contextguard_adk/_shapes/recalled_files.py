"""Attaches the files that the agent has read back with the recall tool.

A handle is the short name of a file in the history. A result of the tool announces a
file by its handle. The file itself is added to each request, behind the result.
"""

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
    """Attaches the announced files, each behind the content that announces it.

    If the model does not accept a file, words about the file replace its announcement:
    the model may be another one than at the time of the announcement. An announcement
    whose file is not in the history stays.
    """
    handles_by_content = [_read_handles(content) for content in contents]
    has_announcement = any(handles_by_content)
    if not has_announcement:
        return contents

    files_by_handle = _find_files(turn)
    with_files: list[types.Content] = []
    for content, handles in zip(contents, handles_by_content, strict=True):
        file_contents: list[types.Content] = []
        words_by_handle: dict[str, str] = {}
        for handle in handles:
            file = files_by_handle.get(handle)
            if file is None:
                continue

            if turn.media_mover.takes(file):
                # A text beside the file would begin a new turn for Gemini.
                file_contents.append(types.Content(role="user", parts=[file]))
            else:
                words_by_handle[handle] = turn.media_mover.tell(file, handle)

        if words_by_handle:
            with_files.append(_replace_announcements(content, words_by_handle))
        else:
            with_files.append(content)
        with_files += file_contents
    return with_files


def _find_files(turn: Turn) -> dict[str, types.Part]:
    """Returns the images and files of the history, by handle.

    If several items have the same handle, only the newest counts. If that is a text,
    the handle stands for no file.
    """
    files: dict[str, types.Part] = {}
    for item in list_items(turn.messages, turn.history.indexes):
        if item.media is None:
            files.pop(item.handle, None)
        else:
            files[item.handle] = item.media
    return files


def _read_handles(content: types.Content) -> list[str]:
    """Returns the handles of the files that results in a content announce."""
    handles: list[str] = []
    for part in parts_of(content):
        handle = _read_handle(part)
        if handle is not None:
            handles.append(handle)
    return handles


def _read_handle(part: types.Part) -> str | None:
    """Returns the handle of the file that a result announces.

    Returns None for other parts, and for results that announce no file.
    """
    response = part.function_response
    if response is None or response.name != RECALL_TOOL:
        return None
    handle = (response.response or {}).get(ATTACHED_KEY)
    return handle if isinstance(handle, str) else None


def _replace_announcements(
    content: types.Content, words_by_handle: Mapping[str, str]
) -> types.Content:
    """Replaces announcements by words about their files.

    Args:
        content: The content with the announcements.
        words_by_handle: The words about a file by its handle. Announcements of other
            handles stay.
    """
    parts: list[types.Part] = []
    for part in parts_of(content):
        handle = _read_handle(part)
        words = words_by_handle.get(handle or "")
        response = part.function_response
        if words is None or response is None:
            parts.append(part)
            continue

        result = {"result": f"[{handle}]\n{words}"}
        with_words = response.model_copy(update={"response": result})
        parts.append(part.model_copy(update={"function_response": with_words}))
    return with_parts(content, parts)
