"""Decides which files may be moved into a user's message, and describes the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from google.genai import types

from contextguard_adk._history.text import describe_media, file_text
from contextguard_adk._measuring.budgets import shorten
from contextguard_adk._providers.media import (
    name_media_clients,
    refuses_media,
    takes_media,
)
from contextguard_adk._support.phrases import quote

NOT_SHOWN = "It cannot be shown to this model."
_CHARS_PER_TOKEN = 2
"""A token of a text file counts as this many characters, as in a table of figures.

The number is the same for all models, so a file has the same words in all requests.
"""


@dataclass(frozen=True)
class MediaMover:
    """Decides which images and files may be moved into a message of the user.

    A client library accepts other files in a message than in a tool's result. Words
    take the place of the files that cannot be moved.

    Attributes:
        llm: The model that the request goes to; None if it is not known.
        model: The name of this model.
        text_tokens: How many tokens of a text file are written as words.
    """

    llm: object
    model: str
    text_tokens: int

    @cached_property
    def _clients(self) -> tuple[str, ...]:
        return name_media_clients(self.llm, self.model)

    def takes(self, file: types.Part) -> bool:
        """Whether every client accepts a file in a message of the user.

        False for a text file: its text is written instead.
        """
        if file_text(file):
            return False
        return all(takes_media(client, "user", file) for client in self._clients)

    def keeps(self, file: types.Part) -> bool:
        """Whether a file that the user has sent may be moved into another message."""
        return not any(refuses_media(client, file) for client in self._clients)

    def tell(self, file: types.Part, handle: str = "") -> str:
        """Returns the words in place of a file: its kind, and its text if it has one.

        A long text is shortened to about `text_tokens`. It then names `handle`, under
        which the whole file can be read; "" for no handle.
        """
        description = describe_media(file)
        text = file_text(file)
        if not text:
            return f"{description} {NOT_SHOWN}"

        most_chars = self.text_tokens * _CHARS_PER_TOKEN
        return f"{description}\n{shorten(quote(text), most_chars, handle)}"

    def split(
        self, files: Iterable[types.Part], *, is_users: bool = False
    ) -> tuple[list[types.Part], list[str]]:
        """Returns the files that may be moved, and the words in place of the others.

        `is_users` says that the user has sent the files.
        """
        moved: list[types.Part] = []
        words: list[str] = []
        for file in files:
            may_move = self.keeps(file) if is_users else self.takes(file)
            if may_move:
                moved.append(file)
            else:
                words.append(self.tell(file))
        return moved, words
