"""Joins neighboring texts of the user in one message."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from google.genai import types

from contextguard_adk._history.contents import parts_of, with_parts
from contextguard_adk._support.phrases import quote


def join_new_texts(
    contents: Sequence[types.Content], messages: Sequence[types.Content]
) -> list[types.Content]:
    """Joins neighboring texts of the user in contents that are none of the messages.

    Texts of the messages are quoted there: each of them then stands in one text with
    lines of the guard.
    """
    mixed = [
        index
        for index, content in enumerate(contents)
        if content.role == "user" and len(content.parts or ()) > 1
    ]
    new = [i for i in mixed if not any(contents[i] is each for each in messages)]
    if not new:
        return list(contents)

    part_ids = {id(part) for message in messages for part in message.parts or ()}
    joined = list(contents)
    for index in new:
        joined[index] = _join_texts(contents[index], part_ids)
    return joined


def _join_texts(content: types.Content, quoted_ids: Collection[int]) -> types.Content:
    """Joins the neighboring texts of a content; quotes the parts with these ids."""
    joined: list[types.Part] = []
    for is_text, group in itertools.groupby(parts_of(content), _is_plain_text):
        parts = list(group)
        if is_text and len(parts) > 1:
            joined.append(_join_parts(parts, quoted_ids))
        else:
            joined += parts
    return with_parts(content, joined)


def _join_parts(parts: Iterable[types.Part], quoted_ids: Collection[int]) -> types.Part:
    texts: list[str] = []
    for part in parts:
        text = part.text or ""
        quoted = quote(text) if id(part) in quoted_ids else text
        if quoted:
            texts.append(quoted)
    return types.Part(text="\n".join(texts))


def _is_plain_text(part: types.Part) -> bool:
    """Whether a part holds a text, and nothing else."""
    given = [name for name, value in vars(part).items() if value is not None]
    return given == ["text"]
