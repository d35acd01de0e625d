"""Which images and files may be moved into a message; words in place of the others."""

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
_CHARS_PER_TOKEN = 2  # Of figures, as in a table; the same in every request.


@dataclass(frozen=True)
class MediaMover:
    """Moves images and files into a message of the user, where other rules hold.

    Attributes:
        llm: The model that the request goes to; None where it is not known.
        model: Its name.
        text_tokens: How much of a file of text may be told.
    """

    llm: object
    model: str
    text_tokens: int

    @cached_property
    def _clients(self) -> tuple[str, ...]:
        return name_media_clients(self.llm, self.model)

    def takes(self, file: types.Part) -> bool:
        """Returns whether a file may be put into a message; a text is better told."""
        if file_text(file):
            return False
        return all(takes_media(client, "user", file) for client in self._clients)

    def keeps(self, file: types.Part) -> bool:
        """Returns whether a file that the user has sent may go into another message."""
        return not any(refuses_media(client, file) for client in self._clients)

    def tell(self, file: types.Part, handle: str = "") -> str:
        """Returns in words what cannot be put into a message: a text, or its kind."""
        described = describe_media(file)
        text = file_text(file)
        if not text:
            return f"{described} {NOT_SHOWN}"
        most_chars = self.text_tokens * _CHARS_PER_TOKEN
        return f"{described}\n{shorten(quote(text), most_chars, handle)}"

    def split(
        self, files: Iterable[types.Part], *, is_users: bool = False
    ) -> tuple[list[types.Part], list[str]]:
        """Returns the files that may be moved, and the words in place of the others.

        `is_users` says that the user has sent them.
        """
        moved: list[types.Part] = []
        told: list[str] = []
        for file in files:
            may_move = self.keeps(file) if is_users else self.takes(file)
            if may_move:
                moved.append(file)
            else:
                told.append(self.tell(file))
        return moved, told
