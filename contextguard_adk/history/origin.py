"""Which contents of a request come from the session's events.

Only those are history, which may be summarized. Instructions, preloaded memory and
other context that ADK or a plugin adds to one request are left where they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from google.genai import types

from contextguard_adk.history.pairs import is_relay

if TYPE_CHECKING:
    from google.adk.events.event import Event


def find_history(
    contents: Sequence[types.Content],
    events: Sequence[Event],
    transient: Sequence[types.Content] = (),
) -> list[int]:
    """Returns the indexes of the contents that derive from session events."""
    index = _EventIndex(events)

    def is_history(content: types.Content) -> bool:
        parts = [part for part in content.parts or () if part]
        if content in transient:
            return any(map(index.holds, parts))
        # What ADK inserts for one request is the user's and never speaks of tools.
        # Other plugins may rewrite what the model said: it needs no event.
        return (
            content.role == "model"
            or any(part.function_response or part.function_call for part in parts)
            or any(map(index.holds, parts))
            or index.relays(content)
        )

    return [place for place, content in enumerate(contents) if is_history(content)]


class _EventIndex:
    """The payloads of the session's events, for look-ups by value."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._payloads: set[Hashable] = set()
        self._code: set[str] = set()
        self._authors: set[str] = set()
        spoken = ["", ""]
        for event in events:
            self._authors.add(event.author)
            if event.content and event.content.parts:
                self._add(event.content)
                spoken = ["", ""]
            else:
                self._add_transcriptions(event, spoken)
            compaction = event.actions.compaction if event.actions else None
            if compaction and compaction.compacted_content:
                self._add(compaction.compacted_content)
                self._authors.add("model")  # ADK 2.0 names this author for it.

    def _add(self, content: types.Content) -> None:
        for part in content.parts or ():
            if part:
                self._payloads.add(_payload_of(part))
                self._code.add(_code_of(part))
        self._code.discard("")

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
        return bool(payload and payload in self._payloads) or any(
            _is_fenced(code, part.text or "") for code in self._code
        )

    def relays(self, content: types.Content) -> bool:
        """Returns whether the content is ADK's rendering of another agent's event.

        A user can type its prefix, but its parts name an author of the session.
        """
        if not is_relay(content):
            return False
        texts = [part.text for part in content.parts or () if part and part.text]
        openings = tuple(f"[{author}] " for author in self._authors)
        return any(text.startswith(openings) for text in texts[1:])


def _payload_of(part: types.Part) -> Hashable:
    """What tells this part from others; None or "" for calls, results and nothing."""
    if part.text or part.function_call or part.function_response:
        return part.text
    if part.inline_data:
        return part.inline_data.data
    if part.file_data and part.file_data.file_uri:
        return "file", part.file_data.file_uri
    code = _code_of(part)
    return ("code", code) if code else None


def _code_of(part: types.Part) -> str:
    """The code that a part runs, or the output of code; "" for neither."""
    if part.executable_code:
        return part.executable_code.code or ""
    return (part.code_execution_result and part.code_execution_result.output) or ""


def _is_fenced(code: str, text: str) -> bool:
    """Returns whether a text is what ADK makes of executed code, or of its output.

    Short code may stand in any text by chance: each fence must be a word of its own.
    """
    if len(text) - len(code) > 64:
        return False
    before, found, after = text.rpartition(code)
    return bool(found) and len(before.split()) == len(after.split()) == 1
