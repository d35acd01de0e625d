"""The room of the texts beside a summary, in the request and in session state.

An index is the position of a message in the request. Covered messages are those that a
summary replaces.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from contextguard_adk._measuring.tokens import text_bytes
from contextguard_adk._turn.turn import Turn

MAX_STATE_BYTES = 64 * 1024
"""A summary and the texts that share its room take at most this in session state."""

LEAST_STATE_BYTES = 6 * 1024
"""The texts that share a room may take this, however short the covered messages are."""

STATE_RATIO = 0.2
"""A summary and the texts that share its room take at most this part of the covered
events.
"""

BESIDE_RATIO = 0.28
"""The texts beside a summary that share a room take at most this part of the tokens
that instruction and tools leave below the threshold. The summary does not share it.

On recorded sessions, a larger part led to more compactions, and a smaller one lost what
later calls needed.
"""

LEAST_BESIDE_TOKENS = 400
"""The texts that share a room may take this together, however little room is left."""

EVENT_BYTES = 300
"""An event takes at least this in a session, beside its content."""

_BYTES_A_TOKEN = 3
"""The first guess of how many bytes of a text make a token of the model."""

_GUESS_MARGIN = 0.99
"""A text is written to slightly less than what would fit, so that few tries are needed.
"""

_LIKE_LINE_BREAKS = re.compile(r"[\b\f\n\r\t]")
"""The characters that take three bytes in session state."""

_LIKE_QUOTES = re.compile(r'["\\]')
"""The characters that take four bytes in session state."""

_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
"""The characters that take seven bytes in session state."""

_MOST_GUESSES = 6
"""How often a text is written at most, until it fits."""


@dataclass(frozen=True)
class Room:
    """The most that one text beside a summary may take.

    Attributes:
        tokens: The most that the text may take in the request, in tokens of the model.
        state_bytes: The most that the text may take in session state, as JSON.
        turn: The model call, which counts tokens.
        beside: The summary, the quoted request, and the texts beside it that are
            written already.
    """

    tokens: float
    state_bytes: int
    turn: Turn
    beside: str = ""

    def shows(self, text: str) -> bool:
        """Returns whether a text stands in the summary, or in a text beside it.

        The quoted request is a text beside it, too. A text within a longer word does
        not count: "INV-1" does not stand in "INV-12". The lists of calls have
        "name=value" for "name: value".
        """
        in_calls = text.replace(": ", "=", 1)
        return _stands_in(text, self.beside) or _stands_in(in_calls, self.beside)

    def holds(self, text: str) -> bool:
        """Returns whether a text fits."""
        has_bytes = measure_stored(text) <= self.state_bytes
        return has_bytes and self.turn.count(text) <= self.tokens

    def fill(self, write: Callable[[int], str]) -> str:
        """Returns about the longest text that fits; "" if no text fits.

        The text is written with a first guess of bytes, and measured. While the text
        does not fit, it is written again, with a guess that is reduced in proportion.

        Args:
            write: Writes the text; the argument is the most bytes that the text may
                take.
        """
        # A correction below 1 counts as 1.
        if self.tokens < 1:
            return ""
        bytes_a_token = _BYTES_A_TOKEN / max(1.0, self.turn.correction)
        guess_bytes = min(int(self.tokens * bytes_a_token), self.state_bytes)
        for _ in range(_MOST_GUESSES):
            if guess_bytes <= 0:
                return ""
            text = write(guess_bytes)
            token_ratio = self.turn.count(text) / self.tokens
            byte_ratio = measure_stored(text) / self.state_bytes
            ratio = max(token_ratio, byte_ratio)
            if ratio <= 1:
                return text
            # The text may be far shorter than the guess, because nothing more is to be
            # written. Then only a guess below its own size makes it shorter.
            written_bytes = min(guess_bytes, text_bytes(text))
            guess_bytes = int(_GUESS_MARGIN * written_bytes / ratio)
        return ""


def _stands_in(text: str, beside: str) -> bool:
    """Whether a text stands in another one by itself, not within a longer word."""
    position = beside.find(text)
    while position >= 0:
        end = position + len(text)
        goes_on_before = _is_one_word(beside[max(0, position - 1) : position + 1])
        goes_on_after = _is_one_word(beside[end - 1 : end + 1])
        if not goes_on_before and not goes_on_after:
            return True
        position = beside.find(text, position + 1)
    return False


def _is_one_word(pair: str) -> bool:
    """Whether two characters belong to one word; they do not at the end of a text."""
    return len(pair) == 2 and pair.isascii() and pair.isalnum()


class Rooms:
    """Divides the room beside a summary: gives each text what the others have left."""

    def __init__(
        self, turn: Turn, covered: frozenset[int], summary: str, request: str = ""
    ) -> None:
        """Finds the room that a summary leaves, in the request and in session state.

        Args:
            turn: The model call.
            covered: Indexes of the messages that the summary replaces.
            summary: The text of the summary.
            request: What is quoted of the current request; "" for nothing.
        """
        self._turn = turn
        self._beside = f"{summary}\n{request}"
        most_tokens = BESIDE_RATIO * turn.room_tokens
        self._left_tokens = max(LEAST_BESIDE_TOKENS, most_tokens)

        memo = turn.history.memo
        contents = [turn.history.contents[index] for index in covered]
        # A heuristic token is four bytes.
        content_bytes = 4 * memo.estimate_tokens(contents)
        covered_bytes = content_bytes + EVENT_BYTES * len(contents)
        most_bytes = min(int(STATE_RATIO * covered_bytes), MAX_STATE_BYTES)
        left_bytes = most_bytes - measure_stored(summary)
        self._left_bytes = max(LEAST_STATE_BYTES, left_bytes)

    def give(
        self, tokens: float, state_ratio: float, token_ratio: float | None = None
    ) -> Room:
        """Returns the room of the next text.

        Args:
            tokens: The most tokens that the text should take.
            state_ratio: The part of the bytes that are left in session state which the
                text may take; from 0 to 1.
            token_ratio: The part of the tokens that are left in the request which the
                text may take, from 0 to 1; None for a text that does not share them.
        """
        state_bytes = int(state_ratio * self._left_bytes)
        most_tokens = tokens
        if token_ratio is not None:
            most_tokens = min(tokens, token_ratio * self._left_tokens)
        return Room(most_tokens, state_bytes, self._turn, self._beside)

    def take(self, text: str) -> None:
        """Takes the room in session state of a text that was written."""
        self._left_bytes = max(0, self._left_bytes - measure_stored(text))

    def show(self, text: str, takes_tokens: bool = True) -> None:
        """Lets later texts look into a text that was written.

        Args:
            text: The text.
            takes_tokens: Whether the tokens of the text are taken from the later texts.
        """
        if takes_tokens:
            left_tokens = self._left_tokens - self._turn.count(text)
            self._left_tokens = max(0, left_tokens)
        self._beside += f"\n{text}"


def measure_stored(text: str) -> int:
    """Returns how many bytes a text of a record takes in session state.

    The record is JSON, and stands as a text in session state, which is stored as JSON.
    So some characters are escaped twice: a line break is written as "\\\\n".
    """
    line_breaks_count = len(_LIKE_LINE_BREAKS.findall(text))
    quotes_count = len(_LIKE_QUOTES.findall(text))
    controls_count = len(_CONTROLS.findall(text))
    # Each of these characters has one byte in the text.
    added_bytes = 2 * line_breaks_count + 3 * quotes_count + 6 * controls_count
    return text_bytes(text) + added_bytes
