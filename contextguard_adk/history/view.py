"""What is known of one request's contents, each fact computed when asked for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from google.genai import types

from contextguard_adk.history.coverage import Covered, align_covered, cover, fingerprint
from contextguard_adk.history.pairs import (
    Pairs,
    content_text,
    find_live_request,
    has_function_response,
    has_tool,
    is_relay,
    keep_pairs_whole,
    pair_contents,
)
from contextguard_adk.measuring.tokens import Memo

if TYPE_CHECKING:
    from google.adk.agents.invocation_context import InvocationContext
    from google.adk.events.event import Event

    from contextguard_adk.history.state import StoredSummary


class HistoryView:
    """Lazily computed facts about the contents of one request, all in indexes."""

    def __init__(
        self,
        contents: Sequence[types.Content],
        invocation: InvocationContext | None = None,
        user_content: types.Content | None = None,
        stored: StoredSummary | None = None,
        memo: Memo | None = None,
    ) -> None:
        self.contents = contents
        self.invocation_id = invocation.invocation_id if invocation else ""
        self.user_content = user_content
        self.stored = stored
        self._events = invocation.session.events if invocation else []
        self._run_config = invocation.run_config if invocation else None
        self._memo = memo or Memo([], "")
        self._fingerprints: dict[int, bytes] = {}

    @cached_property
    def history(self) -> list[int]:
        """The contents that derive from session events."""
        transient = getattr(self._run_config, "model_input_context", None) or ()
        return find_history(self.contents, self._events, transient)

    @cached_property
    def pairs(self) -> Pairs:
        """Which contents belong together."""
        return pair_contents(self.contents)

    @cached_property
    def pinned_calls(self) -> frozenset[int]:
        """Contents with a call still open, and all that was answered beside it."""
        return frozenset[int]().union(*map(self.pairs.group_of, self.pairs.open_calls))

    @cached_property
    def fingerprints(self) -> dict[int, bytes]:
        """The fingerprint of each history content."""
        return {index: self.fingerprint(index) for index in self.history}

    def fingerprint(self, index: int) -> bytes:
        """The fingerprint of one content."""
        if index not in self._fingerprints:
            content = self.contents[index]
            parts = content.parts or ()
            found = self._memo.get(fingerprint, content, parts, content.role)
            self._fingerprints[index] = found
        return self._fingerprints[index]

    @cached_property
    def live_index(self) -> int | None:
        """Where the user's current request stands, if it does."""
        return find_live_request(self.contents, self.history, self.user_content)

    @cached_property
    def turn(self) -> list[int]:
        """History of the running turn: what stands behind the user's request."""
        start = self.live_index
        if start is None:
            start = max(self.user_messages, default=-1)
        return [index for index in self.history if index > start]

    @property
    def first_task_index(self) -> int | None:
        """Where the first message of the user stands."""
        return next(iter(self.user_messages), None)

    @cached_property
    def user_messages(self) -> list[int]:
        """What the user wrote: no tool results, no other agents."""
        return [index for index in self.history if is_user_text(self.contents[index])]

    @cached_property
    def covered(self) -> frozenset[int]:
        """The contents that the stored summary stands for."""
        return frozenset(self._matches)

    @cached_property
    def model_covered(self) -> frozenset[int]:
        """Those of them that a model summarized."""
        count = self.stored.model_covered_count if self.stored else 0
        return frozenset(i for i, place in self._matches.items() if place < count)

    @cached_property
    def uncovered(self) -> list[int]:
        """History that stands in the request beside the summary."""
        return [index for index in self.history if index not in self.covered]

    @cached_property
    def compactable(self) -> list[int]:
        """History that a model has not summarized yet and that may be."""
        kept = self.model_covered | self.pinned_calls
        return [index for index in self.history if index not in kept]

    @cached_property
    def _matches(self) -> dict[int, int]:
        """Covered contents, with their position in the covered set."""
        if self.stored is None:
            return {}
        matches = self._align(self.stored.covered)
        if self._may_split_pairs(matches) and self.pinned_calls & matches.keys():
            # A call that waits for its result must not pass for an equal one.
            matches = self._align(self.stored.covered, self.pinned_calls)
        live = self.live_index
        if self.stored.invocation != self.invocation_id and live is not None:
            # A repeated message ("yes", "yes") must not pass for the covered one.
            matches = {i: place for i, place in matches.items() if i < live}
        if self._may_split_pairs(matches):
            whole = keep_pairs_whole(matches, self.pairs)
            matches = {i: place for i, place in matches.items() if i in whole}
        return matches

    def _align(
        self, covered: Covered, hidden: frozenset[int] = frozenset()
    ) -> dict[int, int]:
        """Finds what is covered, with its position there; not what is hidden."""
        count, indexes = covered.content_count, self.history
        prints = [self.fingerprint(index) for index in indexes[:count]]
        if not hidden and len(prints) == count and cover(prints) == covered:
            return dict(zip(indexes, range(count), strict=False))
        prints = [b"" if i in hidden else self.fingerprint(i) for i in indexes]
        return {indexes[right]: left for left, right in align_covered(covered, prints)}

    def _may_split_pairs(self, matches: dict[int, int]) -> bool:
        """Whether pairs need a look: not where a clean prefix is covered."""
        count = len(matches)
        wanted_count = self.stored.covered.content_count if self.stored else count
        if count != wanted_count or list(matches) != self.history[:count]:
            return True
        rest = self.history[count : count + 1]
        return any(has_function_response(self.contents[index]) for index in rest)

    def was_rewound_since(self, invocation_id: str) -> bool:
        """Whether the session was taken back after an invocation."""
        for event in reversed(self._events):
            if event.invocation_id == invocation_id:
                return False
            if event.actions and event.actions.rewind_before_invocation_id:
                return True
        return False

    def name_place(self, index: int) -> str:
        """Names a content by fingerprint and number among the equal ones before it."""
        wanted = self.fingerprint(index)
        same = sum(self.fingerprints[i] == wanted for i in self.history if i <= index)
        return f"{wanted.hex()}.{same}"

    def cover(self, indexes: frozenset[int]) -> Covered:
        """Builds what a summary of these contents is stored with."""
        prints = [self.fingerprint(i) if i in indexes else b"" for i in self.history]
        return cover(prints)


def is_user_text(content: types.Content) -> bool:
    """Whether a content is a message that the user wrote."""
    if content.role != "user" or has_function_response(content):
        return False
    return bool(content_text(content)) and not is_relay(content)


def find_history(
    contents: Sequence[types.Content],
    events: Sequence[Event],
    transient: Sequence[types.Content] = (),
) -> list[int]:
    """Returns the indexes of the contents that derive from session events."""
    index = _EventIndex(events)

    def is_history(content: types.Content) -> bool:
        parts = [part for part in content.parts or () if part]
        # What ADK inserts for one request is the user's and never speaks of tools.
        # Other plugins may rewrite what the model said: it needs no event.
        is_said = content.role == "model" or has_tool(content) or index.relays(content)
        is_transient = content in transient
        return (is_said and not is_transient) or any(map(index.holds, parts))

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
        parts = [part for part in content.parts or () if part]
        self._payloads.update(map(_payload_of, parts))
        self._code.update(code for part in parts if (code := _code_of(part)))

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
        """Returns whether the content is ADK's rendering of another agent's event."""
        # A user can type its prefix, but its parts name an author of the session.
        texts = [part.text for part in content.parts or () if part and part.text]
        openings = tuple(f"[{author}] " for author in self._authors)
        return is_relay(content) and any(t.startswith(openings) for t in texts[1:])


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
    """Returns whether a text is what ADK makes of executed code, or of its output."""
    if len(text) - len(code) > 64:
        return False
    # Short code may stand in any text by chance: each fence must be a word of its own.
    before, found, after = text.rpartition(code)
    return bool(found) and len(before.split()) == len(after.split()) == 1
