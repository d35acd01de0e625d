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
"""How many characters of a text file count as a token; a table of figures has as few.

The number is the same for all models, so a file has the same words in all requests.
"""


@dataclass(frozen=True)
class MediaMover:
    """Decides which images and files may be moved into a message of the user.

    A client is a library through which requests go to the model. It may accept a file
    in a message but not in a tool's result. Words take the place of the files that
    cannot be moved.

    Attributes:
        llm: ADK's object for the model that the request goes to; None if unknown.
        model: The name of this model.
        text_tokens: About how many tokens of a text file are written as words, at most.
    """

    llm: object
    model: str
    text_tokens: int

    @cached_property
    def _clients(self) -> tuple[str, ...]:
        """The names of the clients that may send the request."""
        return name_media_clients(self.llm, self.model)

    def takes(self, file: types.Part) -> bool:
        """Whether every client is known to accept a file in a message of the user.

        False for a text file, whose text is written instead.
        """
        if file_text(file):
            return False
        return all(takes_media(client, "user", file) for client in self._clients)

    def tell(self, file: types.Part, handle: str = "") -> str:
        """Returns the words in place of a file.

        The words are a description and, for a text file, the text. The text is
        shortened to about `text_tokens`. For all other files the description ends with
        `NOT_SHOWN`.

        Args:
            file: The file.
            handle: The name under which the whole file can be read; "" for no handle. A
                shortened text has a notice with this name.
        """
        description = describe_media(file)
        text = file_text(file)
        if not text:
            return f"{description} {NOT_SHOWN}"

        max_chars = self.text_tokens * _CHARS_PER_TOKEN
        return f"{description}\n{shorten(quote(text), max_chars, handle)}"

    def split(
        self, files: Iterable[types.Part], *, is_users: bool = False
    ) -> tuple[list[types.Part], list[str]]:
        """Returns the files that may be moved, and the words in place of the others.

        Args:
            files: Images and other files.
            is_users: Whether the user has sent the files in a message. A file of the
                user may be moved unless a client is known to refuse the file. Any other
                file may be moved only if all clients are known to accept the file.
        """
        moved: list[types.Part] = []
        words: list[str] = []
        for file in files:
            if is_users:
                may_move = not any(refuses_media(c, file) for c in self._clients)
            else:
                may_move = self.takes(file)

            if may_move:
                moved.append(file)
            else:
                words.append(self.tell(file))
        return moved, words
