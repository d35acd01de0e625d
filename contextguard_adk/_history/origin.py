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
        transient: Contents that the caller added to this run alone. A content that
            equals one of them is found only if an event has one of its parts.
    """
    indexes = []
    for index, content in enumerate(contents):
        # ADK and other plugins insert only texts in the user's role. So a content of
        # the model or of a tool comes from an event, even if a plugin has changed its
        # words. A relay of another agent comes from an event of that agent.
        has_event_kind = (
            content.role == "model" or has_tool(content) or known_events.relays(content)
        )
        is_from_event = has_event_kind and content not in transient
        if not is_from_event:
            is_from_event = any(known_events.holds(part) for part in parts_of(content))
        if is_from_event:
            indexes.append(index)
    return indexes


class KnownEvents:
    """The texts and the data of the session's events.

    With them, the methods tell whether a content of a request comes from an event. Two
    kinds of events look different in a request:

    - Speech: several consecutive events have its transcription, and ADK joins their
      texts into one content.
    - Code and the output of code: ADK shows each as a text between two fences.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        # The keys of all parts, by `_key_of`, and the joined texts of speech.
        self._keys: set[Hashable] = set()
        self._user_texts: set[str] = set()
        # The code that was executed, and the texts that this code has printed. Neither
        # set has "".
        self._code: set[str] = set()
        self._outputs: set[str] = set()
        self._authors: set[str] = set()

        # What the user and the model have said in the consecutive events up to here.
        user_speech = ""
        model_speech = ""
        for event in events:
            self._authors.add(event.author)
            user_words = event.input_transcription
            model_words = event.output_transcription
            if event.content and event.content.parts:
                self._add_content(event.content, event.author)
                user_speech = ""
                model_speech = ""
            elif user_words or model_words:
                user_speech = self._add_speech(user_speech, event, user_words)
                model_speech = self._add_speech(model_speech, event, model_words)

            compaction = event.actions.compaction if event.actions else None
            if compaction and compaction.compacted_content:
                self._add_content(compaction.compacted_content)
                # ADK shows the text of its compaction as words of the author "model".
                self._authors.add("model")

    def _add_content(self, content: types.Content, author: str = "") -> None:
        """Adds the parts of an event's content.

        Texts of the user, code, and outputs of code are also added to separate sets.
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

    def _add_speech(
        self, speech: str, event: Event, transcription: types.Transcription | None
    ) -> str:
        """Adds what one speaker has said up to an event, as one text.

        Args:
            speech: What the speaker has said in the consecutive events before the
                event; "" for nothing.
            event: The event.
            transcription: The words of the speaker in the event; None for none.

        Returns:
            The text that was added. "" if the event ends the speech: the event has a
            content, or no words of this speaker.
        """
        # ADK joins only consecutive events without a content.
        if event.content is not None or not transcription or not transcription.text:
            return ""

        longer_speech = speech + transcription.text
        self._keys.add(longer_speech)
        return longer_speech

    def holds(self, part: types.Part) -> bool:
        """Whether an event has a part with exactly the same text or data."""
        key = _key_of(part)
        if key and key in self._keys:
            return True

        # Most sessions have no code. Then no text has to be read for fences.
        if not (self._code or self._outputs):
            return False
        unfenced = _unfence(part.text or "")
        return unfenced in self._code or unfenced in self._outputs

    def is_unchanged(self, content: types.Content) -> bool:
        """Whether a content is as ADK writes it from the events.

        Calls, results and empty parts are not compared, because they have no key. A
        relay counts as unchanged: ADK itself puts its texts together.
        """
        compared = [part for part in parts_of(content) if _key_of(part)]
        return all(self.holds(part) for part in compared) or self.relays(content)

    def relays(self, content: types.Content) -> bool:
        """Whether a content is ADK's rendering of another agent's event: a relay.

        An example of its texts: "For context:", "[planner] said: Yes".
        """
        if not is_relay(content):
            return False

        # The form alone is no proof: a user may type it. But the user will hardly type
        # the name of an author of the session. The first text is ADK's opening, which
        # names no author.
        texts = [part.text for part in parts_of(content) if part.text][1:]
        openings = tuple(f"[{author}] " for author in self._authors)
        return any(text.startswith(openings) for text in texts)

    def is_output(self, content: types.Content) -> bool:
        """Whether a text is ADK's rendering of the output of executed code."""
        if not self._outputs:
            return False

        text = content_text(content)
        # A user may have typed the same text, with its fences.
        is_typed = text in self._user_texts
        return not is_typed and _unfence(text) in self._outputs


def _key_of(part: types.Part) -> Hashable:
    """Returns the key by which a part is looked up among the parts of events.

    - A text: the text.
    - A file in the part: its bytes.
    - A file with an address: "file" and the address.
    - Code or the output of code: "code" and the text.
    - A call or a result: None. `find_history` recognizes its content by the kind.
    - An empty part: None.
    """
    if part.text:
        return part.text
    if part.function_call or part.function_response:
        return None
    if part.inline_data:
        return part.inline_data.data or None
    if part.file_data and part.file_data.file_uri:
        return "file", part.file_data.file_uri

    code = code_of(part)
    return ("code", code) if code else None


def keys_of(content: types.Content | None) -> list[Hashable]:
    """Returns the keys of those parts of a content that have a key."""
    keys = [_key_of(part) for part in parts_of(content)]
    return [key for key in keys if key]


def _unfence(text: str) -> str:
    """Returns code, or an output of code, without the fences around it.

    Each fence is a word, so the first and the last word of the text are left out,
    whatever they are. Returns "" if no text is left.
    An example: "```python\nprint(1)\n```" -> "print(1)".
    """
    first_and_rest = text.split(None, 1)
    if len(first_and_rest) < 2:
        return ""

    inner_and_last = first_and_rest[1].rsplit(None, 1)
    return inner_and_last[0] if len(inner_and_last) == 2 else ""
