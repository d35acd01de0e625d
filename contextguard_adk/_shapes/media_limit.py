"""Describes old images and files in words, if all of them take too many bytes.

Media are images and files. A part of a content may be an image or a file itself, or a
tool's result with media of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from google.genai import types

from contextguard_adk._history.contents import parts_of, with_parts
from contextguard_adk._history.notes import FILES_KEY, add_notes, split_notes
from contextguard_adk._history.text import describe_media
from contextguard_adk._providers.overflow import Overflow
from contextguard_adk._support.phrases import quote_value
from contextguard_adk._turn.turn import Turn

_NEXT_LIMIT_RATIO = 0.9
"""After a refusal, the media may take this part of the bytes that were refused."""


@dataclass(frozen=True)
class MediaLimit:
    """The most bytes of media in a request; None if the provider refused none yet."""

    max_bytes: int | None = None


def limit_media(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Describes the oldest media in words, if all media together exceed the limit.

    Returns `contents` itself if there is no limit, or if all media fit. There is a
    limit only after the provider has refused media for their bytes.
    """
    max_bytes = turn.facts.unit(MediaLimit).max_bytes
    if max_bytes is None:
        return contents

    left_out = _find_oldest_media(contents, max_bytes)
    if not left_out:
        return contents

    described = list(contents)
    for content_index, part_positions in left_out.items():
        described[content_index] = _describe_parts(
            contents[content_index], part_positions
        )
    return described


def lower_limit(
    turn: Turn, overflow: Overflow, contents: Sequence[types.Content]
) -> MediaLimit | None:
    """Returns a limit below the bytes of the media in a refused request.

    Returns None if no such limit can help:

    - If the request was not refused for its bytes.
    - If texts take at least as many bytes as media: media are not the cause.
    - If only one part has media: the newest part with media always stays.

    Args:
        turn: The model call.
        overflow: What the provider has said about the size of the request.
        contents: The contents that were refused.
    """
    if not overflow.in_bytes:
        return None

    memo = turn.history.memo
    media_bytes = 0
    text_bytes = 0
    for content in contents:
        for part in parts_of(content):
            text_bytes += memo.measure_part(part).text_bytes
            media_bytes += _count_part_bytes(part)
    if media_bytes <= text_bytes:
        return None

    max_bytes = int(media_bytes * _NEXT_LIMIT_RATIO)
    would_leave_out = bool(_find_oldest_media(contents, max_bytes))
    return MediaLimit(max_bytes) if would_leave_out else None


class _MediaPart(NamedTuple):
    """A part with media: how many bytes its media take, and where the part is.

    Attributes:
        media_bytes: The bytes of all media in the part.
        content_index: The index of the content among the contents of the request.
        part_position: The position of the part in its content.
    """

    media_bytes: int
    content_index: int
    part_position: int


def _find_oldest_media(
    contents: Sequence[types.Content], max_bytes: int
) -> dict[int, set[int]]:
    """Finds the oldest media that must be left out, so that the others fit.

    The contents are read from the oldest on. Whenever the media so far take more than
    `max_bytes`, the oldest media are left out, until the rest takes at most half of
    `max_bytes`. The newest part with media always stays.

    The other half is left free for the prompt cache, which needs equal beginnings of
    requests. A later request leaves out the same parts again, and leaves out more parts
    only when new media have filled the free half.

    Returns:
        The positions of the parts that are left out, by the index of their content.
    """
    kept: list[_MediaPart] = []
    kept_bytes = 0
    left_out: dict[int, set[int]] = {}
    for content_index, content in enumerate(contents):
        for part_position, part in enumerate(content.parts or ()):
            media_bytes = _count_part_bytes(part) if part else 0
            if media_bytes > 0:
                kept.append(_MediaPart(media_bytes, content_index, part_position))
                kept_bytes += media_bytes

        if kept_bytes <= max_bytes:
            continue
        while len(kept) > 1 and kept_bytes > max_bytes // 2:
            oldest = kept.pop(0)
            kept_bytes -= oldest.media_bytes
            left_out.setdefault(oldest.content_index, set()).add(oldest.part_position)
    return left_out


def _count_part_bytes(part: types.Part) -> int:
    """Counts the bytes of media in a part, or in the result that it holds.

    Media that are sent as an address have no bytes in the request.
    """
    response = part.function_response
    result_files = (response.parts if response else None) or ()
    blobs = [holder.inline_data for holder in (part, *result_files)]
    return sum(len(blob.data or b"") for blob in blobs if blob)


def _describe_parts(
    content: types.Content, part_positions: Collection[int]
) -> types.Content:
    """Describes the media in some parts of a content in words.

    `part_positions` are the positions of these parts in the content.
    """
    parts = list(content.parts or ())
    for part_position in part_positions:
        parts[part_position] = _describe_part(parts[part_position])
    return with_parts(content, parts)


def _describe_part(part: types.Part) -> types.Part:
    """Describes the media of a part in words.

    - If the part is an image or a file: it becomes a text.
    - If the part is a result: it loses its media, whose descriptions stand in a note
      of the result, `attachments_left_out`.
    """
    response = part.function_response
    if response is None:
        text = describe_media(part)
        update = {"text": text, "inline_data": None, "video_metadata": None}
        return part.model_copy(update=update)

    # The tool's own values are quoted, so that none of them looks like a line of the
    # guard. The notes of a preview stay as they are.
    bare_result, notes = split_notes(response.response or {})
    descriptions = [describe_media(file) for file in response.parts or ()]
    new_notes = {FILES_KEY: ", ".join(descriptions), **notes}
    new_result = add_notes(quote_value(bare_result), new_notes)
    described = response.model_copy(update={"parts": None, "response": new_result})
    return part.model_copy(update={"function_response": described})
