"""Leaves out what ADK's Claude class made of blocks that it does not know.

An answer of Claude may have such a block, for example that of a compaction. The class
makes an empty part of it, and the next request fails, because the class cannot make a
block of an empty part (ADK 2.13).
"""

from __future__ import annotations

import logging

from google.genai import types

from contextguard_adk._history.contents import parts_of, with_parts
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.turn import Turn

logger = logging.getLogger("contextguard_adk.plugin")

_LOST_BLOCK = (
    "Agent %r: an answer of Claude had a block that ADK does not keep, such as that of "
    "a compaction by `context_management`. The guard leaves out the empty part that is "
    "left of it, so the session goes on. If it was a compaction, each call compacts "
    "anew and is billed for it: leave compaction to the guard."
)


def leave_out_unknown_blocks(
    turn: Turn, contents: list[types.Content]
) -> list[types.Content]:
    """Leaves out empty parts, and contents of the model without any other part.

    Warns once if a content of the model has such a part.

    Returns `contents` itself if no part is empty.
    """
    with_empty = [
        each for each in contents if any(_is_empty(part) for part in parts_of(each))
    ]
    if not with_empty:
        return contents

    # A client may send such a part in a message of the user.
    if any(content.role == "model" for content in with_empty):
        warn_once(logger, _LOST_BLOCK, turn.agent)
    remaining = list[types.Content]()
    for content in contents:
        parts = [part for part in parts_of(content) if not _is_empty(part)]
        if parts:
            remaining.append(with_parts(content, parts))
        elif content.role != "model":
            # Without the message, the request would not end with the user.
            remaining.append(content)
    return remaining


def _is_empty(part: types.Part) -> bool:
    if part.text is not None:
        return False
    # A Pydantic model yields its fields.
    return all(value is None for _, value in part)
