"""Finds the session's events that a request's contents come from."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from google.adk.events.event import Event
from google.genai import types

from contextguard_adk._history.adk_events import code_of
from contextguard_adk._history.contents import (
    content_text,
    has_tool,
    is_relay,
    parts_of,
)


def find_history(
    contents: Sequence[types.Content],
    index: EventIndex,
    transient: Sequence[types.Content] = (),
) -> list[int]:
    """Returns the indexes of the contents whose very words an event has."""
    found = []
    for place, content in enumerate(contents):
        # What ADK inserts for one request is the user's and never speaks of tools.
        # Other plugins may rewrite what the model said: it needs no event.
        is_said = content.role == "model" or has_tool(content) or index.relays(content)
        is_said = is_said and content not in transient
        if is_said or any(map(index.holds, parts_of(content))):
            found.append(place)
    return found


class EventIndex:
    """The payloads of the session's events, for look-ups by value."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._payloads: set[Hashable] = set()
        self._user_texts: set[str] = set()
        self._code: set[str] = set()
        self._outputs: set[str] = set()
        self._authors: set[str] = set()
        spoken = ["", ""]
        for event in events:
            self._authors.add(event.author)
            if event.content and event.content.parts:
                self._add(event.content, event.author)
                spoken = ["", ""]
            else:
                self._add_transcriptions(event, spoken)
            compaction = event.actions.compaction if event.actions else None
            if compaction and compaction.compacted_content:
                self._add(compaction.compacted_content)
                self._authors.add("model")  # ADK 2.0 names this author for it.

    def _add(self, content: types.Content, author: str = "") -> None:
        parts = parts_of(content)
        self._payloads.update(map(_payload_of, parts))
        if author == "user":
            self._user_texts.update(part.text for part in parts if part.text)
        for part in parts:
            if code := code_of(part).strip():
                (self._outputs if part.code_execution_result else self._code).add(code)

    def _add_transcriptions(self, event: Event, spoken: list[str]) -> None:
        # ADK joins what was spoken in consecutive events into one content; events
        # that say nothing do not count.
        heard = (event.input_transcription, event.output_transcription)
        if not any(heard):
            return
        for direction, transcription in enumerate(heard):
            if event.content is None and transcription and transcription.text:
                spoken[direction] += transcription.text
                self._payloads.add(spoken[direction])
            else:
                spoken[direction] = ""

    def holds(self, part: types.Part) -> bool:
        """Returns whether an event has this very payload."""
        payload = _payload_of(part)
        if payload and payload in self._payloads:
            return True
        code = _unfence(part.text or "") if self._code or self._outputs else ""
        return code in self._code or code in self._outputs

    def is_unchanged(self, content: types.Content) -> bool:
        """Returns whether all that a content says is as ADK would spell it."""
        said = (part for part in parts_of(content) if _payload_of(part))
        return all(map(self.holds, said)) or self.relays(content)

    def relays(self, content: types.Content) -> bool:
        """Returns whether the content is ADK's rendering of another agent's event."""
        if not is_relay(content):
            return False
        # A user can type its prefix, but its parts name an author of the session.
        texts = [part.text for part in parts_of(content) if part.text]
        openings = tuple(f"[{author}] " for author in self._authors)
        return any(text.startswith(openings) for text in texts[1:])

    def is_output(self, content: types.Content) -> bool:
        """Returns whether a text is what ADK makes of the output of executed code."""
        text = content_text(content) if self._outputs else ""
        # The user may quote one.
        return _unfence(text) in self._outputs and text not in self._user_texts


def _payload_of(part: types.Part) -> Hashable:
    """What tells this part from others; None or "" for calls, results and nothing."""
    if part.text or part.function_call or part.function_response:
        return part.text
    if part.inline_data:
        return part.inline_data.data
    if part.file_data and part.file_data.file_uri:
        return "file", part.file_data.file_uri
    code = code_of(part)
    return ("code", code) if code else None


def payloads_of(content: types.Content | None) -> list[Hashable]:
    return [payload for part in parts_of(content) if (payload := _payload_of(part))]


def _unfence(text: str) -> str:
    """The code, or its output, between the two words by which ADK fences it."""
    _, *rest = text.split(None, 1) or [""]
    code, *fence = rest[0].rsplit(None, 1) if rest else [""]
    return code if fence else ""
