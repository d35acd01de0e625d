"""Tells which contents of a request come from the session's events."""

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
    """Returns the indexes of the contents that come from session events.

    Texts in the user's role that another plugin has rewritten are not found here. The
    caller added the `transient` contents to this run alone.
    """
    found = []
    for place, content in enumerate(contents):
        # ADK and other plugins insert contents in the user's role, without tools. A
        # plugin may rewrite the model's words, so these need no event.
        may_be_inserted = content.role != "model" and not has_tool(content)
        needs_event = may_be_inserted and not index.relays(content)

        is_known = not needs_event and content not in transient
        if is_known or any(index.holds(part) for part in parts_of(content)):
            found.append(place)
    return found


class EventIndex:
    """Finds out whether an event of the session says the same as a content.

    ADK transcribes speech in several events and joins the texts of consecutive ones
    into one content. Code and its output become texts, fenced by two words.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self._keys: set[Hashable] = set()
        self._user_texts: set[str] = set()
        self._code: set[str] = set()
        self._outputs: set[str] = set()
        self._authors: set[str] = set()

        spoken = ["", ""]  # By the user and by the model, since the last content.
        for event in events:
            self._authors.add(event.author)
            if event.content and event.content.parts:
                self._add_content(event.content, event.author)
                spoken = ["", ""]
            elif event.input_transcription or event.output_transcription:
                self._add_transcriptions(event, spoken)

            compaction = event.actions.compaction if event.actions else None
            if compaction and compaction.compacted_content:
                self._add_content(compaction.compacted_content)
                self._authors.add("model")  # ADK 2.0 names this author for it.

    def _add_content(self, content: types.Content, author: str = "") -> None:
        for part in parts_of(content):
            self._keys.add(_key_of(part))
            if author == "user" and part.text:
                self._user_texts.add(part.text)

            code = code_of(part).strip()
            if code and part.code_execution_result:
                self._outputs.add(code)
            elif code:
                self._code.add(code)

    def _add_transcriptions(self, event: Event, spoken: list[str]) -> None:
        """Adds the words of an event to `spoken`, and keeps what that says by now."""
        heard = (event.input_transcription, event.output_transcription)
        for place, transcription in enumerate(heard):
            if event.content is None and transcription and transcription.text:
                spoken[place] += transcription.text
                self._keys.add(spoken[place])
            else:
                spoken[place] = ""

    def holds(self, part: types.Part) -> bool:
        """Whether an event has a part that says exactly the same."""
        key = _key_of(part)
        if key and key in self._keys:
            return True

        if not (self._code or self._outputs):
            return False
        code = _unfence(part.text or "")
        return code in self._code or code in self._outputs

    def is_unchanged(self, content: types.Content) -> bool:
        """Whether all parts of a content are as ADK would write them."""
        parts = [part for part in parts_of(content) if _key_of(part)]
        return all(self.holds(part) for part in parts) or self.relays(content)

    def relays(self, content: types.Content) -> bool:
        """Whether a content is ADK's rendering of another agent's event."""
        if not is_relay(content):
            return False

        # A user can type ADK's prefix, but not name an author of the session by chance.
        texts = [part.text for part in parts_of(content) if part.text]
        openings = tuple(f"[{author}] " for author in self._authors)
        return any(text.startswith(openings) for text in texts[1:])

    def is_output(self, content: types.Content) -> bool:
        """Whether a text is ADK's rendering of the output of executed code."""
        if not self._outputs:
            return False

        text = content_text(content)
        is_quoted = text in self._user_texts
        return _unfence(text) in self._outputs and not is_quoted


def _key_of(part: types.Part) -> Hashable:
    """Returns what tells a part from others; None or "" where no event is needed.

    A call or a result needs none, and neither does a part that says nothing.
    """
    if part.text or part.function_call or part.function_response:
        return part.text
    if part.inline_data:
        return part.inline_data.data
    if part.file_data and part.file_data.file_uri:
        return "file", part.file_data.file_uri

    code = code_of(part)
    return ("code", code) if code else None


def keys_of(content: types.Content | None) -> list[Hashable]:
    """Returns what tells the parts of a content from others, without empty ones."""
    keys = [_key_of(part) for part in parts_of(content)]
    return [key for key in keys if key]


def _unfence(text: str) -> str:
    """Returns the text between the first and the last word, where ADK puts code."""
    opened = text.split(None, 1)
    if len(opened) < 2:
        return ""

    closed = opened[1].rsplit(None, 1)
    return closed[0] if len(closed) == 2 else ""
