"""Tells which contents of a request come from the session's events.

Only those are history, which may be summarised. Instructions, preloaded memory,
artifacts and other context that ADK or a plugin adds to one request have no event
behind them; they are left where they are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from google.genai import types

from contextguard_adk.history.pairs import is_relay

if TYPE_CHECKING:
    from google.adk.events.event import Event


MAX_FENCE_CHARS = 64
"""How much longer than the code itself ADK's rendering of it can be."""


def find_history(
    contents: Sequence[types.Content],
    events: Sequence[Event],
    transient: Sequence[types.Content] = (),
    index: EventIndex | None = None,
) -> list[int]:
    """Returns the indexes of the contents that derive from session events.

    Args:
        contents: The contents of one request.
        events: All events of the session that the request was built from.
        transient: Contents known to have been added to this request alone
            (`RunConfig.model_input_context`).
        index: The index of these events, where there is one.

    Returns:
        Ascending indexes; empty when nothing derives from an event.
    """
    index = index or EventIndex(events)
    return [
        position
        for position, content in enumerate(contents)
        if _is_history(content, index, transient)
    ]


def _is_history(
    content: types.Content,
    index: EventIndex,
    transient: Sequence[types.Content],
) -> bool:
    """Tells whether any part of the content has an event behind it."""
    parts = content.parts or ()
    if transient and content in transient:
        return any(part and index.holds(part) for part in parts)
    # What ADK inserts for one request is the user's and never speaks of tools.
    if content.role == "model":
        return True
    for part in parts:
        if part and (part.function_response or part.function_call or index.holds(part)):
            return True
    return index.relays(content)


class EventIndex:
    """The payloads of the session's events, for look-ups by value."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._events: list[Event] = []
        self._texts: set[str] = set()
        self._files: set[str] = set()
        self._blobs: set[int] = set()
        self._code: list[str] = []
        self._authors: set[str] = set()
        self._spoken = ["", ""]
        self._add_events(events)

    def follow(self, events: Sequence[Event]) -> bool:
        """Adds the events that are new.

        Returns:
            False where an event is gone, or another one, and the index useless.
        """
        count = len(self._events)
        if len(events) < count or not all(map(operator.is_, self._events, events)):
            return False
        self._add_events(events[count:])
        return True

    def _add_events(self, events: Iterable[Event]) -> None:
        for event in events:
            self._events.append(event)
            self._authors.add(event.author)
            content = event.content
            if content is not None and content.parts:
                self._add(content)
                self._spoken = ["", ""]
            else:
                self._add_transcriptions(event)
            actions = event.actions
            compaction = actions.compaction if actions else None
            if compaction and compaction.compacted_content:
                self._add(compaction.compacted_content)
                self._authors.add("model")  # So ADK 2.0 signs the summary.

    def _add(self, content: types.Content) -> None:
        for part in content.parts or ():
            if part is None:
                continue
            text = part.text
            if text:
                self._texts.add(text)
            elif part.function_call or part.function_response:
                continue
            elif part.inline_data:
                self._blobs.add(hash(part.inline_data.data))
            elif part.file_data and part.file_data.file_uri:
                self._files.add(part.file_data.file_uri)
            elif part.executable_code and part.executable_code.code:
                self._code.append(part.executable_code.code)
            elif part.code_execution_result and part.code_execution_result.output:
                self._code.append(part.code_execution_result.output)

    def _add_transcriptions(self, event: Event) -> None:
        # ADK joins what was spoken in consecutive events into one content; events
        # that say nothing do not count.
        spoken = (event.input_transcription, event.output_transcription)
        if not any(spoken):
            return
        for direction, transcription in enumerate(spoken):
            if event.content is None and transcription and transcription.text:
                self._spoken[direction] += transcription.text
                self._texts.add(self._spoken[direction])
            else:
                self._spoken[direction] = ""

    def holds(self, part: types.Part) -> bool:
        """Tells whether an event has this very payload."""
        text = part.text
        if text:
            if text in self._texts:
                return True
            return any(_is_fenced(code, text) for code in self._code)
        if part.executable_code:
            return part.executable_code.code in self._code
        if part.inline_data:
            return hash(part.inline_data.data) in self._blobs
        return bool(part.file_data and part.file_data.file_uri in self._files)

    def relays(self, content: types.Content) -> bool:
        """Tells whether the content is ADK's rendering of another agent's event.

        The prefix alone proves nothing, a user can type it; the parts after it name
        an author that the session really has.
        """
        if not is_relay(content):
            return False
        texts = [part.text for part in content.parts or () if part and part.text]
        openings = tuple(f"[{author}] " for author in self._authors)
        return any(text.startswith(openings) for text in texts[1:])


def _is_fenced(code: str, text: str) -> bool:
    """Tells whether a text is what ADK makes of executed code, or of its output.

    It stands between fences that an agent's code executor may choose. Short code
    may stand in any text by chance, so a fence must be a word of its own.
    """
    if len(text) - len(code) > MAX_FENCE_CHARS:
        return False
    before, found, after = text.rpartition(code)
    return bool(found) and len(before.split()) == len(after.split()) == 1
