"""Makes one text of neighboring texts in messages that the guard has put together.

`LiteLlm` sends several texts of the user as a list, which fails in chat templates that
take a string only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from google.genai import types

from contextguard_adk._history.contents import parts_of, with_parts
from contextguard_adk._support.phrases import quote
from contextguard_adk._turn.turn import Turn


def join_texts(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Joins neighboring texts; messages that came so stay as they are."""
    if not turn.is_changed(contents):
        return contents
    return join_new_texts(contents, turn.messages)


def join_new_texts(
    contents: Sequence[types.Content], messages: Sequence[types.Content]
) -> list[types.Content]:
    """Joins neighboring texts of the user in contents that are none of the messages.

    What others have said is quoted there: it stands in one text with the guard's lines.
    """
    mixed = [
        index
        for index, content in enumerate(contents)
        if content.role == "user" and len(content.parts or ()) > 1
    ]
    new = [i for i in mixed if not any(contents[i] is each for each in messages)]
    if not new:
        return list(contents)

    theirs = {id(part) for message in messages for part in message.parts or ()}
    joined = list(contents)
    for index in new:
        joined[index] = _join(contents[index], theirs)
    return joined


def _join(content: types.Content, theirs: set[int]) -> types.Content:
    joined: list[types.Part] = []
    for is_text, group in itertools.groupby(parts_of(content), _is_plain_text):
        parts = list(group)
        if not is_text or len(parts) == 1:
            joined += parts
            continue

        texts = [
            quote(part.text or "") if id(part) in theirs else part.text
            for part in parts
        ]
        joined.append(types.Part(text="\n".join(filter(None, texts))))
    return with_parts(content, joined)


def _is_plain_text(part: types.Part) -> bool:
    """Whether a part says a text, and nothing else of it."""
    return [name for name, value in vars(part).items() if value is not None] == ["text"]
