"""The contents of one request, and all that is known about them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Iterable, Sequence
from functools import cached_property

from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.genai import types

from contextguard_adk._history.adk_events import (
    Calls,
    find_calls,
    find_node_input,
    without_rewound,
)
from contextguard_adk._history.contents import (
    Pairs,
    content_text,
    find_current_request,
    has_function_response,
    has_tool,
    is_message,
    is_user_text,
    keep_pairs_whole,
    media_parts,
    pair_contents,
    parts_of,
)
from contextguard_adk._history.fingerprints import (
    align_covered,
    cover,
    find_older,
    fingerprint,
)
from contextguard_adk._history.origin import EventIndex, find_history
from contextguard_adk._history.rewritten import find_rewritten
from contextguard_adk._history.stored import StoredSummary
from contextguard_adk._history.truncation import Preview, truncate_content
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._support.redaction import Redactor

_OF_SUMMARY = (
    "shown",
    "previews",
    "_matches",
    "covered",
    "model_covered",
)
"""The properties that depend on the stored summary."""

_SEARCHED_EVENTS = 63
"""How far the event of a content is searched for: not every event has a content."""


class History:
    """The contents of one request, and all that is known about them.

    An index is a position in `contents`. Each fact is computed when it is first read.
    These words mean the same in every file:

    =============  ==================================================================
    contents       The request as ADK and the other plugins have built it, summarized
                   contents included. `Turn.messages` is the same list.
    original       One content as its session event has it. It differs where another
                   plugin has rewritten the text for this request.
    told           The contents after the user's `redact`: the form that leaves the
                   conversation, for a summarizer or for session state.
    shown          The contents with previews in place of large tool results: the form
                   that the agent's model reads.
    previews       The contents that have a preview, by index: their previews.
    indexes        The indexes of the contents that come from session events. Only these
                   are ever compacted: the other contents belong to this request alone.
    covered        The indexes of the contents that the stored summary replaces.
    model_covered  The covered indexes that a model has summarized. Of the other
                   contents the summary has excerpts at most.
    =============  ==================================================================
    """

    def __init__(
        self,
        contents: Sequence[types.Content],
        invocation: InvocationContext | None = None,
        user_content: types.Content | None = None,
        stored: StoredSummary | None = None,
        memo: Memo | None = None,
    ) -> None:
        self.contents = contents
        self.user_content = user_content
        self.stored = stored
        self.memo = memo or Memo()

        self.invocation_id = invocation.invocation_id if invocation else ""
        self.events = invocation.session.events if invocation else []
        self._invocation = invocation
        self._event_count = len(self.events)  # A summary may be written later.

        # The caller adds these contents to this run alone.
        run_config = invocation.run_config if invocation else None
        self._transient = getattr(run_config, "model_input_context", None) or ()

        self.loads_part = False  # Whether later requests may have less of the session.
        self.preview: Preview | None = None  # Set before a fact is read.
        self.redactor = Redactor()

        # These results hold with any summary, so the copies share them.
        self._fingerprints: dict[int, bytes] = {}
        self._known_previews: dict[int, types.Content | None] = {}
        self._shortened: dict[Hashable, types.Content] = {}

    def with_summary(self, stored: StoredSummary | None) -> History:
        """Returns the same history with another summary in place."""
        other = copy.copy(self)
        for name in _OF_SUMMARY:
            vars(other).pop(name, None)
        other.stored = stored
        return other

    def release(self) -> None:
        """Forgets the run, after computing the facts that depend on it."""
        _ = self.request_index
        _ = self.calls
        for index in self.indexes:
            self.fingerprint(index)
        self._invocation = None

    # Forms of the contents.

    @cached_property
    def told(self) -> Sequence[types.Content]:
        """The contents as they may leave: for a summarizer, or session state."""
        return self.redactor.contents(self.contents, self.memo.remember)

    @cached_property
    def shown(self) -> list[types.Content]:
        """The contents with the previews that the agent's model reads."""
        shown = list(self.contents)
        for index, preview in self.previews.items():
            shown[index] = preview
        return shown

    @cached_property
    def previews(self) -> dict[int, types.Content]:
        """The previews of large tool results, by index; summarized ones need none."""
        preview = self.preview
        if preview is None:
            return {}

        previews = {}
        summarized = self.model_covered
        for index, content in enumerate(self.contents):
            if not has_function_response(content) or index in summarized:
                continue
            shown = self._make_preview(index, preview)
            if shown is not None:
                previews[index] = shown
        if not previews:
            return {}  # Most requests have none: `indexes` need not be known.
        return {i: previews[i] for i in self.indexes if i in previews}

    def _make_preview(self, index: int, preview: Preview) -> types.Content | None:
        """Returns the preview of a content; None if the model reads it whole."""
        if index not in self._known_previews:
            content = self.contents[index]
            results = [part for part in parts_of(content) if part.function_response]
            made = None
            if not preview.fits(sum(self.memo.part_bytes(part) for part in results)):
                made = self.memo.remember(preview, content, content.parts or ())
            self._known_previews[index] = made
        return self._known_previews[index]

    def shortened_results(self, stored: StoredSummary) -> dict[int, types.Content]:
        """Returns the contents whose tool results a compaction has shortened."""
        how = stored.truncation
        if how is None:
            return {}

        shortened = {}
        last = self.find_place(stored.truncated_upto)
        for index in self.indexes:
            if index > last:
                break

            key = (index, index in self.previews, how, stored.has_recall)
            if key not in self._shortened:
                whole = self.contents[index] if stored.has_recall else None
                short = truncate_content(self.shown[index], how, whole)
                self._shortened[key] = short
            if self._shortened[key] is not self.shown[index]:
                shortened[index] = self._shortened[key]
        return shortened

    # Origin of the contents.

    @cached_property
    def indexes(self) -> list[int]:
        """The indexes of the contents that come from session events."""
        found = find_history(self.contents, self._event_index, self._transient)
        return sorted({*found, *self._rewritten})

    @cached_property
    def _event_index(self) -> EventIndex:
        return EventIndex(self.events)

    @cached_property
    def _rewritten(self) -> dict[int, Event]:
        """The events whose texts another plugin has rewritten, by index."""
        if self._invocation is None:
            return {}

        contents = self.contents
        texts = [
            index
            for index, content in enumerate(contents)
            if not has_tool(content) and content not in self._transient
        ]
        changed = {
            index
            for index in texts
            if not self._event_index.is_unchanged(contents[index])
        }
        if not changed:
            return {}
        return find_rewritten(contents, texts, changed, self._invocation, self.memo)

    def original(self, index: int) -> types.Content:
        """Returns a content as its event has it.

        A plugin may add another time on each call: the event stays the same.
        """
        event = self._rewritten.get(index)
        if event is not None and event.content is not None:
            return event.content
        return self.contents[index]

    def fingerprint(self, index: int) -> bytes:
        """Returns the fingerprint of a content; of a rewritten one, its event's."""
        if index not in self._fingerprints:
            self._fingerprints[index] = self.spell(self.original(index))
        return self._fingerprints[index]

    def spell(self, content: types.Content) -> bytes:
        """Returns the fingerprint of a content as it stands."""
        parts = content.parts or ()
        return self.memo.remember(fingerprint, content, parts, content.role)

    @cached_property
    def pairs(self) -> Pairs:
        """The tool calls of the contents, each with its results."""
        return pair_contents(self.contents)

    @cached_property
    def calls(self) -> Calls:
        """The agent's own calls in the session's events, and the open ones of them."""
        return find_calls(self.events[: self._event_count], self._invocation)

    # The user's request.

    @cached_property
    def request_index(self) -> int | None:
        """The index of this agent's current request; None if ADK does not show it."""
        contents = list(self.contents)
        for index, event in self._rewritten.items():
            if event.author == "user":
                # Either form may hold the words of the request.
                parts = [*parts_of(contents[index]), *parts_of(event.content)]
                contents[index] = types.Content(role="user", parts=parts)

        candidates = [i for i in self.indexes if i not in self.outputs]
        wanted = find_node_input(self._invocation) or self.user_content
        found = find_current_request(contents, candidates, wanted)
        if found is not None:
            return found

        has_message = content_text(wanted) or media_parts(wanted)
        if parts_of(wanted) and not has_message:
            return None

        return self._find_input(candidates)

    def _find_input(self, candidates: Sequence[int]) -> int | None:
        """Finds the input of an agent from which ADK keeps the user's request.

        Without an earlier message of the user it is a message of another agent.
        """
        if self.user_messages:
            return self._find_newest_message()

        messages = [i for i in candidates if is_message(self.contents[i])]
        relays = [i for i in messages if content_text(self.contents[i])]
        return relays[-1] if relays else None

    def _find_newest_message(self) -> int | None:
        """Finds the user's newest message that is part of this run."""
        events = [e for e in self.events if e.invocation_id == self.invocation_id]
        ids = {event.id for event in events}
        event_index = EventIndex(events)

        for index in reversed(self.user_messages):
            rewritten = self._rewritten.get(index)
            if rewritten is not None:
                is_of_run = rewritten.id in ids
            else:
                parts = parts_of(self.contents[index])
                is_of_run = any(event_index.holds(part) for part in parts)
            if is_of_run:
                return index
        return None

    @cached_property
    def outputs(self) -> frozenset[int]:
        """The indexes of the output of executed code, which ADK shows as user text."""
        outputs = []
        for index in self.indexes:
            event = self._rewritten.get(index)
            if event is None:
                is_output = self._event_index.is_output(self.contents[index])
            else:
                parts = parts_of(event.content)
                is_output = any(part.code_execution_result for part in parts)
            if is_output:
                outputs.append(index)
        return frozenset(outputs)

    @cached_property
    def user_messages(self) -> list[int]:
        """The indexes of texts that the user wrote, not tools, code or other agents."""
        texts = [i for i in self.indexes if is_user_text(self.contents[i])]
        others = {i for i, e in self._rewritten.items() if e.author != "user"}
        return [i for i in texts if i not in others and i not in self.outputs]

    @cached_property
    def running_turn(self) -> list[int]:
        """The indexes after the user's request: the steps of the running turn."""
        start = self.request_index
        if start is None:
            start = max(self.user_messages, default=-1)
        return [index for index in self.indexes if index > start]

    # Coverage by the stored summary.

    @cached_property
    def covered(self) -> frozenset[int]:
        """The indexes of the contents that the stored summary replaces."""
        return frozenset(self._matches)

    @cached_property
    def model_covered(self) -> frozenset[int]:
        """The covered indexes that a model has summarized."""
        if self.stored is None:
            return frozenset()
        count = self.stored.model_covered_count
        return frozenset(i for i, place in self._matches.items() if place < count)

    @cached_property
    def _matches(self) -> dict[int, int]:
        """The place of each covered content among all that the summary covers."""
        if self.stored is None:
            return {}

        aligned = self._align(self.stored)
        new = self._find_new(self.stored)
        old = {i: place for i, place in aligned.items() if i not in new}

        whole = keep_pairs_whole(old, self.pairs)
        return {i: place for i, place in old.items() if i in whole}

    def _align(self, stored: StoredSummary) -> dict[int, int]:
        """Finds covered contents by their fingerprints; returns the place of each."""
        indexes = self.indexes
        covered = stored.covered
        count = covered.content_count

        # As a rule the history has only grown since.
        first_prints = [self.fingerprint(index) for index in indexes[:count]]
        if len(first_prints) == count and cover(first_prints) == covered:
            return {index: place for place, index in enumerate(indexes[:count])}

        prints = [self.fingerprint(index) for index in indexes]
        pairs = align_covered(covered, prints)
        older = self._find_older(stored, pairs)
        return {indexes[right]: left for left, right in [*older, *pairs]}

    def _find_older(
        self, stored: StoredSummary, pairs: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Pairs the places of older covered contents that no digest has matched."""
        covered = stored.covered
        has_older = stored.has_older or covered.older_count > 0
        is_matched = bool(pairs) and pairs[0][0] < covered.older_count
        if not has_older or is_matched:
            return []

        newer = self._read_newer(stored)
        if newer is None:
            return []
        contents = [self.contents[index] for index in self.indexes]
        return find_older(covered, pairs, contents, newer)

    def _read_newer(self, stored: StoredSummary) -> list[types.Content] | None:
        """Reads the events after the last covered one; None if that one is unknown."""
        standing = without_rewound(self.events)
        ids = [event.id for event in standing]
        if stored.last_event not in ids:
            return None

        newer = []
        for event in standing[ids.index(stored.last_event) + 1 :]:
            if event.content:
                newer.append(event.content)
            compaction = event.actions.compaction if event.actions else None
            if compaction and compaction.compacted_content:
                newer.append(compaction.compacted_content)
        return newer

    def _find_new(self, stored: StoredSummary) -> Collection[int]:
        """Finds the contents that are newer than the summary, whatever they say.

        A repeated message ("yes", "yes") must not pass for the covered one.
        """
        request = self.request_index
        if request is None or self.invocation_id == stored.invocation:
            return ()

        # A late result continues a run that is older than the summary. Contents after
        # its request may be covered then.
        runs = (self.invocation_id, stored.invocation)
        order = [e.invocation_id for e in self.events if e.invocation_id in runs]
        if stored.invocation in order and order[0] == self.invocation_id:
            return {request}
        return range(request, len(self.contents))

    @property
    def is_summary_valid(self) -> bool:
        """Whether all covered contents are there, and nothing was rewound."""
        if self.stored is None:
            return False
        count = self.stored.covered.content_count
        return len(self.covered) >= count and not self.is_rewound

    @property
    def is_rewound(self) -> bool:
        """Whether a rewind has happened since the stored summary was written."""
        for event in reversed(self.events):
            if self.stored and event.invocation_id == self.stored.invocation:
                return False
            if event.actions and event.actions.rewind_before_invocation_id:
                return True
        return False

    @property
    def is_partial(self) -> bool:
        """Whether older messages are not loaded, or may not be in later requests."""
        wanted_count = self.stored.covered.content_count if self.stored else 0
        lacks_some = len(self.covered) < wanted_count
        return self.loads_part or (lacks_some and not self.is_rewound)

    def repeats(self, indexes: Iterable[int]) -> bool:
        """Whether later requests have these texts too: all loaded, none rewritten."""
        if self.is_partial:
            return False
        return all(self.original(index) is self.contents[index] for index in indexes)

    # Names that the next summary stores.

    def last_event(self, covered: frozenset[int]) -> str:
        """Returns the id of the newest event behind these contents; "" if unknown."""
        # Several contents may say the same, but all stand in the order of their events.
        end = self._event_count
        for index in reversed(self.indexes):
            place = self._find_event(index, end)
            if place is None:
                continue
            if index in covered:
                return self.events[place].id
            end = place
        return ""

    def _find_event(self, index: int, end: int) -> int | None:
        """Finds the place of a content's event among the last ones before `end`."""
        wanted = self.fingerprint(index)
        first = max(0, end - _SEARCHED_EVENTS)
        for place in reversed(range(first, end)):
            content = self.events[place].content
            if content and self.spell(content) == wanted:
                return place
        return None

    def name_place(self, index: int) -> str:
        """Names a content by fingerprint and number among equal ones; "" for -1."""
        if index < 0:
            return ""
        wanted = self.fingerprint(index)
        upto = [i for i in self.indexes if i <= index]
        number = sum(1 for i in upto if self.fingerprint(i) == wanted)
        return f"{wanted.hex()}.{number}"

    def find_place(self, name: str) -> int:
        """Returns the index that `name_place` has named; -1 if it is not there."""
        if not name:
            return -1

        digest, _, number = name.partition(".")
        same = [i for i in self.indexes if self.fingerprint(i).hex() == digest]
        # Anyone may have written this to session state: Python refuses huge numbers.
        has_number = number.isdecimal() and len(number) < 10
        upto = same[: int(number)] if has_number else same
        return upto[-1] if upto else -1
