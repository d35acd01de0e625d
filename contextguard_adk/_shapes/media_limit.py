"""Describes old images and files in words, if all of them take too many bytes.

Media are images and files. A part of a content is a medium itself, or a tool's result
with media of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from google.genai import types

from contextguard_adk._history.contents import parts_of, with_parts
from contextguard_adk._history.text import describe_media
from contextguard_adk._providers.overflow import Overflow
from contextguard_adk._support.phrases import quote_value
from contextguard_adk._turn.turn import Turn

_NEXT_LIMIT_RATIO = 0.9
"""The part of the refused bytes that the next request may have."""


@dataclass(frozen=True)
class MediaLimit:
    """The most bytes of media that are sent; None for any number."""

    max_bytes: int | None = None


def limit_media(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Describes the oldest media in words, if all media together exceed the limit.

    There is a limit only after the provider has refused media for their bytes.
    """
    max_bytes = turn.facts.unit(MediaLimit).max_bytes
    if max_bytes is None:
        return contents

    left_out = _find_oldest_media(contents, max_bytes)
    if not left_out:
        return contents

    described = list(contents)
    for content_index, part_indexes in left_out.items():
        described[content_index] = _describe_parts(
            contents[content_index], part_indexes
        )
    return described


def lower_limit(
    turn: Turn, overflow: Overflow, contents: Sequence[types.Content]
) -> MediaLimit | None:
    """Returns a limit below the bytes of media that were refused.

    Returns None if no such limit can help:

    - The request was not refused for its bytes.
    - Texts take at least as many bytes as media.
    - The lower limit would leave out nothing.
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
    """The bytes of media in a part, and the indexes by which the part is found."""

    media_bytes: int
    content_index: int
    part_index: int


def _find_oldest_media(
    contents: Sequence[types.Content], max_bytes: int
) -> dict[int, set[int]]:
    """Finds the oldest media that must be left out, so that the others fit.

    The contents are read from the oldest on. Whenever the media so far take more than
    `max_bytes`, the oldest of them are left out until the others take half of it. The
    newest part with media always stays.

    The free half is for the prompt cache, which needs equal beginnings of requests: the
    history can grow by half of the limit before further media are left out.

    Returns:
        The indexes of the parts that are left out, by the index of their content.
    """
    kept: list[_MediaPart] = []
    kept_bytes = 0
    left_out: dict[int, set[int]] = {}
    for content_index, content in enumerate(contents):
        for part_index, part in enumerate(content.parts or ()):
            media_bytes = _count_part_bytes(part) if part else 0
            if media_bytes > 0:
                kept.append(_MediaPart(media_bytes, content_index, part_index))
                kept_bytes += media_bytes

        if kept_bytes <= max_bytes:
            continue
        while len(kept) > 1 and kept_bytes > max_bytes // 2:
            oldest = kept.pop(0)
            kept_bytes -= oldest.media_bytes
            left_out.setdefault(oldest.content_index, set()).add(oldest.part_index)
    return left_out


def _count_part_bytes(part: types.Part) -> int:
    """Counts the bytes of media in a part, or in the result that it holds.

    Media that are sent as an address have no bytes.
    """
    response = part.function_response
    result_files = (response.parts if response else None) or ()
    blobs = [holder.inline_data for holder in (part, *result_files)]
    return sum(len(blob.data or b"") for blob in blobs if blob)


def _describe_parts(
    content: types.Content, part_indexes: Collection[int]
) -> types.Content:
    """Describes the media in some parts of a content in words."""
    parts = list(content.parts or ())
    for index in part_indexes:
        parts[index] = _describe_part(parts[index])
    return with_parts(content, parts)


def _describe_part(part: types.Part) -> types.Part:
    """Replaces the media of a part, or of the result that it holds, by words.

    An image becomes a text. A result loses its files, and names them in a new field
    `attachments_left_out`.
    """
    response = part.function_response
    if response is None:
        text = describe_media(part)
        update = {"text": text, "inline_data": None, "video_metadata": None}
        return part.model_copy(update=update)

    # The tool's own values are quoted, since a text of the guard stands beside them.
    descriptions = [describe_media(file) for file in response.parts or ()]
    quoted_result = quote_value(response.response or {})
    new_result = {**quoted_result, "attachments_left_out": descriptions}
    described = response.model_copy(update={"parts": None, "response": new_result})
    return part.model_copy(update={"function_response": described})
