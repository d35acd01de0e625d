"""Describes old images and files in words, where all of them take too many bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from google.genai import types

from contextguard_adk._history.contents import parts_of, with_parts
from contextguard_adk._history.text import describe_media
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
    return leave_out_media(contents, max_bytes)


def leave_out_media(
    contents: list[types.Content], max_bytes: int
) -> list[types.Content]:
    """Describes the oldest images and files in words, where all take too many bytes.

    It counts from the oldest message on; where the sum exceeds `max_bytes`, the oldest
    go until half is left. So the next requests begin with the same bytes. The newest
    one stays.
    """
    kept: list[tuple[int, int, int]] = []
    left_out: dict[int, set[int]] = {}
    for index, content in enumerate(contents):
        for place, part in enumerate(content.parts or ()):
            if part and (size_bytes := _media_bytes(part)):
                kept.append((size_bytes, index, place))
        if sum(size for size, *_ in kept) > max_bytes:
            while len(kept) > 1 and sum(size for size, *_ in kept) > max_bytes // 2:
                _, oldest, place = kept.pop(0)
                left_out.setdefault(oldest, set()).add(place)
    described = list(contents)
    for index, places in left_out.items():
        described[index] = _describe_parts(contents[index], places)
    return described if left_out else contents


def count_media_bytes(contents: Iterable[types.Content]) -> int:
    """Counts the bytes of the images and files that contents carry themselves."""
    return sum(_media_bytes(part) for each in contents for part in parts_of(each))


def _media_bytes(part: types.Part) -> int:
    response = part.function_response
    holders = (part, *((response and response.parts) or ()))
    blobs = (each.inline_data for each in holders)
    return sum(len(blob.data or b"") for blob in blobs if blob)


def _describe_parts(content: types.Content, places: Collection[int]) -> types.Content:
    parts = list(content.parts or ())
    for place in places:
        part = parts[place]
        update = dict[str, object]()
        if response := part.function_response:
            media = map(describe_media, response.parts or ())
            said = {"attachments_left_out": [*media]}
            result = {**quote_value(response.response or {}), **said}
            update["function_response"] = response.model_copy(
                update={"parts": None, "response": result}
            )
        else:
            update = {"text": describe_media(part), "inline_data": None}
            update["video_metadata"] = None
        parts[place] = part.model_copy(update=update)
    return with_parts(content, parts)
