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
    known_events: KnownEvents,
    transient: Sequence[types.Content] = (),
) -> list[int]:
    """Returns the indexes of the contents that come from session events.

    Texts in the user's role that another plugin has rewritten are not found here.

    Args:
        contents: The contents of a request.
        known_events: The events of the session.
        transient: Contents that the caller added to this run alone.
    """
    indexes = []
    for index, content in enumerate(contents):
        # ADK and other plugins insert contents in the user's role, without tools. A
        # plugin may rewrite the model's words, so these need no event.
        may_be_inserted = content.role != "model" and not has_tool(content)
        must_be_found = may_be_inserted and not known_events.relays(content)

        is_certain = not must_be_found and content not in transient
        if is_certain or any(known_events.holds(part) for part in parts_of(content)):
            indexes.append(index)
    return indexes


class KnownEvents:
    """Finds out whether an event of the session has the same part as a content.

    Two kinds of events look different in a request. ADK transcribes speech in several
    consecutive events, and joins their texts into one content. ADK also shows code, and
    the output of code, as a text between two fences.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self._keys: set[Hashable] = set()
        self._user_texts: set[str] = set()
        self._code: set[str] = set()
        self._outputs: set[str] = set()
        self._authors: set[str] = set()

        # The words that were spoken since the last event with a content.
        user_words = ""
        model_words = ""
        for event in events:
            self._authors.add(event.author)
            heard = event.input_transcription
            spoken = event.output_transcription
            if event.content and event.content.parts:
                self._add_content(event.content, event.author)
                user_words = ""
                model_words = ""
            elif heard or spoken:
                user_words = self._add_words(user_words, event, heard)
                model_words = self._add_words(model_words, event, spoken)

            compaction = event.actions.compaction if event.actions else None
            if compaction and compaction.compacted_content:
                self._add_content(compaction.compacted_content)
                self._authors.add("model")  # ADK 2.0 names this author for it.

    def _add_content(self, content: types.Content, author: str = "") -> None:
        """Adds the parts of an event's content to the known ones.

        The texts of the user, the code and its outputs are known by themselves, too.
        """
        for part in parts_of(content):
            self._keys.add(_key_of(part))
            if author == "user" and part.text:
                self._user_texts.add(part.text)

            code_or_output = code_of(part).strip()
            if code_or_output and part.code_execution_result:
                self._outputs.add(code_or_output)
            elif code_or_output:
                self._code.add(code_or_output)

    def _add_words(
        self, words_before: str, event: Event, transcription: types.Transcription | None
    ) -> str:
        """Adds the words of one speaker up to an event to the keys; returns them.

        "" if the event does not continue the words of this speaker.

        Args:
            words_before: The words that the speaker has said in the events before.
            event: The event.
            transcription: The words of the speaker in the event.
        """
        if event.content is not None or not transcription or not transcription.text:
            return ""
        words = words_before + transcription.text
        self._keys.add(words)
        return words

    def holds(self, part: types.Part) -> bool:
        """Whether an event has a part with exactly the same text or data."""
        key = _key_of(part)
        if key and key in self._keys:
            return True

        if not (self._code or self._outputs):
            return False
        unfenced = _unfence(part.text or "")
        return unfenced in self._code or unfenced in self._outputs

    def is_unchanged(self, content: types.Content) -> bool:
        """Whether a content is as ADK would write it from the events."""
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
        if text in self._user_texts:  # The user has typed the output of the code.
            return False
        return _unfence(text) in self._outputs


def _key_of(part: types.Part) -> Hashable:
    """Returns a key that is equal for equal parts.

    - For a text: the text.
    - For a file in the part: its bytes.
    - For a file with an address: "file" and the address.
    - For code and the output of code: "code" and its text.
    - For a call, a result and an empty part: an empty key, such as None. These parts
      need no event.
    """
    if part.text:
        return part.text
    if part.function_call or part.function_response:
        return None
    if part.inline_data:
        return part.inline_data.data
    if part.file_data and part.file_data.file_uri:
        return "file", part.file_data.file_uri

    code = code_of(part)
    return ("code", code) if code else None


def keys_of(content: types.Content | None) -> list[Hashable]:
    """Returns the keys of the parts of a content, without empty keys."""
    keys = [_key_of(part) for part in parts_of(content)]
    return [key for key in keys if key]


def _unfence(text: str) -> str:
    """Returns the text between the first and the last word; "" if there is none.

    ADK puts code there: "```python\nprint(1)\n```" -> "print(1)"
    """
    first_and_rest = text.split(None, 1)
    if len(first_and_rest) < 2:
        return ""

    inner_and_last = first_and_rest[1].rsplit(None, 1)
    return inner_and_last[0] if len(inner_and_last) == 2 else ""
