"""Attaches the files that the agent has read back with the recall tool.

A handle is the short name of a file in the history. If the agent reads a file back, the
result of the tool has only the file's handle: the result announces the file. The file
itself is added to each request that has the result, behind the result.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.genai import types

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import parts_of, with_parts
from contextguard_adk._history.text import list_items
from contextguard_adk._turn.turn import Turn

ATTACHED_KEY = "attached"
"""The field with the handle of a file in a result of the recall tool."""


def attach_recalled_files(
    turn: Turn, contents: list[types.Content]
) -> list[types.Content]:
    """Attaches the announced files, each behind the content with its announcement.

    - If the model accepts the file: the file is attached, and the announcement stays.
    - If the model does not accept the file: words about the file replace the
      announcement. The agent may have had another model when it read the file back.
    - If the history lacks the file: nothing is attached, and the announcement stays.
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
                # The content has the file alone: with a text beside the file, Gemini
                # would take the content for a new turn of the user.
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

    A handle is a digest, so a text may have the same handle as a file. Then the newest
    item counts: if this is a text, the handle stands for no file.
    """
    files: dict[str, types.Part] = {}
    for item in list_items(turn.messages, turn.history.indexes):
        if item.media is None:
            files.pop(item.handle, None)
        else:
            files[item.handle] = item.media
    return files


def _read_handles(content: types.Content) -> list[str]:
    """Returns the handles of the files that a content announces.

    A content may have several results, each with the announcement of one file.
    """
    handles: list[str] = []
    for part in parts_of(content):
        handle = _read_handle(part)
        if handle is not None:
            handles.append(handle)
    return handles


def _read_handle(part: types.Part) -> str | None:
    """Returns the handle of the file that a part announces; None if it announces none.

    Only results of the recall tool announce files.
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
        words_by_handle: The words about each file, by its handle. An announcement with
            another handle stays.
    """
    parts: list[types.Part] = []
    for part in parts_of(content):
        response = part.function_response
        handle = _read_handle(part) or ""
        if response is None or handle not in words_by_handle:
            parts.append(part)
            continue

        result = {"result": f"[{handle}]\n{words_by_handle[handle]}"}
        with_words = response.model_copy(update={"response": result})
        parts.append(part.model_copy(update={"function_response": with_words}))
    return with_parts(content, parts)
