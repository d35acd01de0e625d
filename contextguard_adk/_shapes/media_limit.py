"""Describes old images and files in words, where all of them take too many bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from google.genai import types

from contextguard_adk._history.contents import parts_of, with_parts
from contextguard_adk._history.text import describe_media
from contextguard_adk._providers.overflow import Overflow
from contextguard_adk._support.phrases import quote_value
from contextguard_adk._turn.turn import Turn


@dataclass(frozen=True)
class MediaLimit:
    """How many bytes of images and files are sent; None for any number."""

    max_bytes: int | None = None


def limit_media(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Leaves out the oldest media where the provider has refused so many bytes."""
    max_bytes = turn.facts.unit(MediaLimit).max_bytes
    if max_bytes is None:
        return contents
    return _leave_out_media(contents, max_bytes)


def lower_limit(
    turn: Turn, overflow: Overflow, contents: Sequence[types.Content]
) -> MediaLimit | None:
    """Returns a limit below the bytes of media that were refused.

    None where bytes are not the reason, or where texts take more of them.
    """
    if not overflow.in_bytes:
        return None

    memo = turn.history.memo
    media_bytes = _count_media_bytes(contents)
    text_bytes = sum(
        memo.measure_part(part).text_bytes
        for content in contents
        for part in content.parts or ()
    )
    if media_bytes <= text_bytes:
        return None

    max_bytes = int(media_bytes * 0.9)
    has_older = bool(_find_oldest_media(contents, max_bytes))
    return MediaLimit(max_bytes) if has_older else None


def _leave_out_media(
    contents: list[types.Content], max_bytes: int
) -> list[types.Content]:
    """Describes the oldest images and files in words, where all take too many bytes."""
    left_out = _find_oldest_media(contents, max_bytes)
    if not left_out:
        return contents

    described = list(contents)
    for index, places in left_out.items():
        described[index] = _describe_parts(contents[index], places)
    return described


def _find_oldest_media(
    contents: Sequence[types.Content], max_bytes: int
) -> dict[int, set[int]]:
    """Finds the media to leave out: places of parts, by the index of their content.

    It counts from the oldest message on. Where the sum exceeds `max_bytes`, the oldest
    go until half is left. So the next requests begin with the same bytes. The newest
    one stays.
    """
    kept: list[tuple[int, int, int]] = []
    kept_bytes = 0
    left_out: dict[int, set[int]] = {}
    for index, content in enumerate(contents):
        for place, part in enumerate(content.parts or ()):
            size_bytes = _count_part_bytes(part) if part else 0
            if size_bytes:
                kept.append((size_bytes, index, place))
                kept_bytes += size_bytes

        if kept_bytes <= max_bytes:
            continue
        while len(kept) > 1 and kept_bytes > max_bytes // 2:
            oldest_bytes, oldest, oldest_place = kept.pop(0)
            kept_bytes -= oldest_bytes
            left_out.setdefault(oldest, set()).add(oldest_place)
    return left_out


def _count_media_bytes(contents: Iterable[types.Content]) -> int:
    """Counts the bytes of the images and files that contents carry themselves."""
    return sum(_count_part_bytes(part) for each in contents for part in parts_of(each))


def _count_part_bytes(part: types.Part) -> int:
    response = part.function_response
    files = (response.parts if response else None) or ()
    blobs = [holder.inline_data for holder in (part, *files)]
    return sum(len(blob.data or b"") for blob in blobs if blob)


def _describe_parts(content: types.Content, places: Collection[int]) -> types.Content:
    """Puts words in place of the media in these parts of a content."""
    parts = list(content.parts or ())
    for place in places:
        parts[place] = _describe_part(parts[place])
    return with_parts(content, parts)


def _describe_part(part: types.Part) -> types.Part:
    response = part.function_response
    if response is None:
        update = {
            "text": describe_media(part),
            "inline_data": None,
            "video_metadata": None,
        }
        return part.model_copy(update=update)

    media = [describe_media(file) for file in response.parts or ()]
    result = {**quote_value(response.response or {}), "attachments_left_out": media}
    described = response.model_copy(update={"parts": None, "response": result})
    return part.model_copy(update={"function_response": described})
