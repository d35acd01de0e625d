"""The contents of one request, and the facts about them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

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
    Match,
    align_covered,
    cover,
    fingerprint,
    match_older,
)
from contextguard_adk._history.origin import KnownEvents, find_history
from contextguard_adk._history.rewritten import find_rewritten
from contextguard_adk._history.stored import StoredSummary
from contextguard_adk._history.truncation import Preview, Truncation, truncate_content
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._support.redaction import Redactor

_OF_SUMMARY = (
    "shown",
    "shown_in_part",
    "_covered_places",
    "covered",
    "model_covered",
)
"""The properties that depend on the stored summary."""

_SEARCHED_EVENTS = 63
"""How many events are searched for the event of a content.

Not every event has a content, so the next event is not always the right one. The bound
keeps the search short in a long session.
"""


class _ShortenedKey(NamedTuple):
    """The facts that decide how a content looks once its tool results are shortened."""

    content_index: int
    is_preview: bool
    truncation: Truncation
    has_handles: bool


class History:
    """The contents of one request, and the facts about them.

    An index is a position in `contents`; a place is a position in any other list. Each
    fact is computed when it is first read. These words mean the same in every file:

    =============  ==================================================================
    contents       The request as ADK and the other plugins have built it, summarized
                   contents included. `Turn.messages` is the same list.
    original       One content as its session event has it. It differs where another
                   plugin has rewritten the text for this request.
    told           The contents after the user's `redact`: the form in which they leave
                   the conversation, for a summarizer or for session state.
    shown          The contents with previews in place of large tool results: the form
                   that the agent's model reads.
    shown_in_part  The previews of large tool results, by the index of the content.
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
        # More events may come before a summary in the background is written.
        self._event_count = len(self.events)

        # The caller adds these contents to this run alone.
        run_config = invocation.run_config if invocation else None
        self._transient = getattr(run_config, "model_input_context", None) or ()

        # The caller sets these three before it reads a fact.
        self.loads_part = False  # Whether later requests may have less of the session.
        self.preview: Preview | None = None
        self.redactor = Redactor()

        # These results hold with any summary, so the copies share them.
        self._fingerprints: dict[int, bytes] = {}
        self._known_previews: dict[int, types.Content | None] = {}
        self._shortened: dict[_ShortenedKey, types.Content] = {}

    def with_summary(self, stored: StoredSummary | None) -> History:
        """Returns the same history with another summary in place."""
        other = copy.copy(self)
        for name in _OF_SUMMARY:
            vars(other).pop(name, None)  # Where `cached_property` keeps the old value.
        other.stored = stored
        return other

    def release(self) -> None:
        """Computes the facts that depend on the running invocation, then forgets it."""
        _ = self.request_index
        _ = self.calls
        for index in self.indexes:
            self.fingerprint(index)
        self._invocation = None

    # Forms of the contents.

    @cached_property
    def told(self) -> Sequence[types.Content]:
        """The contents as they may leave the conversation, redacted."""
        return self.redactor.redact_contents(self.contents, self.memo.remember)

    @cached_property
    def shown(self) -> list[types.Content]:
        """The contents with the previews that the agent's model reads."""
        contents = list(self.contents)
        for index, preview in self.shown_in_part.items():
            contents[index] = preview
        return contents

    @cached_property
    def shown_in_part(self) -> dict[int, types.Content]:
        """The previews of large tool results, by the index of the content.

        The model reads them in place of these contents from its first request on.
        Results that a model has summarized need none.
        """
        settings = self.preview
        if settings is None:
            return {}

        previews = {}
        summarized = self.model_covered
        for index, content in enumerate(self.contents):
            if not has_function_response(content) or index in summarized:
                continue
            preview = self._make_preview(index, settings)
            if preview is not None:
                previews[index] = preview

        # Only contents that come from session events have previews. Most requests have
        # none at all: then `indexes` need not be found.
        if not previews:
            return {}
        return {index: previews[index] for index in self.indexes if index in previews}

    def has_short_strings(self, truncation: Truncation) -> bool:
        """Whether previews shorten strings in the same way as `truncation`."""
        return self.preview is not None and self.preview.strings == truncation

    def _make_preview(self, index: int, settings: Preview) -> types.Content | None:
        """Returns the preview of a content; None if the model reads it whole."""
        if index not in self._known_previews:
            content = self.contents[index]
            results = [part for part in parts_of(content) if part.function_response]
            size_bytes = sum(self.memo.part_bytes(part) for part in results)

            preview = None
            if not settings.fits(size_bytes):
                preview = self.memo.remember(settings, content, content.parts or ())
            self._known_previews[index] = preview
        return self._known_previews[index]

    def shortened_results(self, stored: StoredSummary) -> dict[int, types.Content]:
        """Returns shortened contents, by index, as a compaction has shortened them.

        Only contents that are really shorter are returned; {} if the stored summary
        shortens no tool results.
        """
        truncation = stored.truncation
        if truncation is None:
            return {}

        shortened_by_index = {}
        last_index = self.find_named(stored.truncated_upto)
        for index in self.indexes:
            if index > last_index:
                break

            shown = self.shown[index]
            key = _ShortenedKey(
                index,
                is_preview=index in self.shown_in_part,
                truncation=truncation,
                has_handles=stored.has_recall,
            )
            if key not in self._shortened:
                # With the whole content, `truncate_content` adds a handle to each
                # shortened result: the recall tool finds the whole result by it.
                whole = self.contents[index] if stored.has_recall else None
                self._shortened[key] = truncate_content(shown, truncation, whole)

            shortened = self._shortened[key]
            if shortened is not shown:
                shortened_by_index[index] = shortened
        return shortened_by_index

    # Origin of the contents.

    @cached_property
    def indexes(self) -> list[int]:
        """The indexes of the contents that come from session events."""
        unchanged = find_history(self.contents, self._known_events, self._transient)
        return sorted({*unchanged, *self._rewritten})

    @cached_property
    def _known_events(self) -> KnownEvents:
        return KnownEvents(self.events)

    @cached_property
    def _rewritten(self) -> dict[int, Event]:
        """The events whose texts another plugin has rewritten, by index of the content.

        {} without an invocation: the events that ADK shows are not known then.
        """
        if self._invocation is None:
            return {}

        contents = self.contents
        text_indexes = [
            index
            for index, content in enumerate(contents)
            if not has_tool(content) and content not in self._transient
        ]
        changed_indexes = {
            index
            for index in text_indexes
            if not self._known_events.is_unchanged(contents[index])
        }
        if not changed_indexes:
            return {}
        return find_rewritten(
            contents, text_indexes, changed_indexes, self._invocation, self.memo
        )

    def original(self, index: int) -> types.Content:
        """Returns a content as its event has it.

        Another plugin may add the time of day to the content on each call, but the
        event stays the same.
        """
        event = self._rewritten.get(index)
        if event is not None and event.content is not None:
            return event.content
        return self.contents[index]

    def fingerprint(self, index: int) -> bytes:
        """Returns the fingerprint of a content as its event has it."""
        if index not in self._fingerprints:
            self._fingerprints[index] = self.fingerprint_content(self.original(index))
        return self._fingerprints[index]

    def fingerprint_content(self, content: types.Content) -> bytes:
        """Returns the fingerprint of a content; remembers it."""
        parts = content.parts or ()
        return self.memo.remember(fingerprint, content, parts, content.role)

    @cached_property
    def pairs(self) -> Pairs:
        """The tool calls of the contents, each with its results."""
        return pair_contents(self.contents)

    @cached_property
    def calls(self) -> Calls:
        """All of the agent's own calls in the session's events, and the open calls."""
        return find_calls(self.events[: self._event_count], self._invocation)

    # The user's request.

    @cached_property
    def request_index(self) -> int | None:
        """The index of this agent's current request; None if ADK does not show it.

        The request is the first of these that the contents have:

        1. The input of the agent's node or, without a node, the message that began the
           invocation.
        2. The content that `_find_input` finds, unless the run began with the result of
           a call.
        """
        searched = list(self.contents)
        for index, event in self._rewritten.items():
            if event.author == "user":
                # The rewritten or the original form may hold the words of the request.
                parts = [*parts_of(searched[index]), *parts_of(event.content)]
                searched[index] = types.Content(role="user", parts=parts)

        candidates = [index for index in self.indexes if index not in self.outputs]
        request = find_node_input(self._invocation) or self.user_content
        found_index = find_current_request(searched, candidates, request)
        if found_index is not None:
            return found_index

        # A run may begin with the result of a call, which is no request.
        has_message = bool(content_text(request) or media_parts(request))
        if parts_of(request) and not has_message:
            return None
        return self._find_input(candidates)

    def _find_input(self, candidates: Sequence[int]) -> int | None:
        """Finds the input of an agent to which ADK does not show the user's request.

        - If the contents have a message of the user: the user's newest message of this
          run, or None.
        - Otherwise: the newest message of another agent, or None.
        """
        if self.user_messages:
            return self._find_newest_message()

        for index in reversed(candidates):
            content = self.contents[index]
            if is_message(content) and content_text(content):
                return index
        return None

    def _find_newest_message(self) -> int | None:
        """Finds the user's newest message that is part of this run."""
        run_events = [e for e in self.events if e.invocation_id == self.invocation_id]
        run_event_ids = {event.id for event in run_events}
        known_events = KnownEvents(run_events)

        for index in reversed(self.user_messages):
            rewritten = self._rewritten.get(index)
            if rewritten is not None:
                is_of_run = rewritten.id in run_event_ids
            else:
                parts = parts_of(self.contents[index])
                is_of_run = any(known_events.holds(part) for part in parts)
            if is_of_run:
                return index
        return None

    @cached_property
    def outputs(self) -> frozenset[int]:
        """The indexes of contents with the output of code, which ADK shows as text."""
        outputs = []
        for index in self.indexes:
            event = self._rewritten.get(index)
            if event is None:
                is_output = self._known_events.is_output(self.contents[index])
            else:
                parts = parts_of(event.content)
                is_output = any(part.code_execution_result for part in parts)
            if is_output:
                outputs.append(index)
        return frozenset(outputs)

    @cached_property
    def user_messages(self) -> list[int]:
        """The indexes of texts that the user wrote, not tools, code or other agents."""
        text_indexes = [i for i in self.indexes if is_user_text(self.contents[i])]
        of_others = {i for i, e in self._rewritten.items() if e.author != "user"}
        return [
            index
            for index in text_indexes
            if index not in of_others and index not in self.outputs
        ]

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
        return frozenset(self._covered_places)

    @cached_property
    def model_covered(self) -> frozenset[int]:
        """The covered indexes that a model has summarized."""
        if self.stored is None:
            return frozenset()

        # A model has summarized the oldest of the covered contents.
        count = self.stored.model_covered_count
        return frozenset(
            index for index, place in self._covered_places.items() if place < count
        )

    @cached_property
    def _covered_places(self) -> dict[int, int]:
        """The covered place of each covered content, by the index of the content.

        A covered place is a position among the contents that the summary covers: 0 is
        the oldest of them.
        """
        if self.stored is None:
            return {}

        covered_places = self._match_covered(self.stored)
        new_indexes = self._find_new(self.stored)
        old_indexes = [index for index in covered_places if index not in new_indexes]

        # A call and its result are covered together or not at all.
        whole_indexes = keep_pairs_whole(old_indexes, self.pairs)
        return {
            index: covered_place
            for index, covered_place in covered_places.items()
            if index in whole_indexes
        }

    def _match_covered(self, stored: StoredSummary) -> dict[int, int]:
        """Finds the contents that are equal to covered ones.

        Returns the covered place of each, by the index of the content.
        """
        indexes = self.indexes
        covered = stored.covered
        count = covered.content_count

        # Usually the history has only grown since the summary was made: then the
        # covered contents are still its first ones.
        first_fingerprints = [self.fingerprint(index) for index in indexes[:count]]
        has_enough = len(first_fingerprints) == count
        if has_enough and cover(first_fingerprints) == covered:
            return {
                index: covered_place
                for covered_place, index in enumerate(indexes[:count])
            }

        fingerprints = [self.fingerprint(index) for index in indexes]
        matches = align_covered(covered, fingerprints)
        older_matches = self._find_older_matches(stored, matches)
        return {
            indexes[history_place]: covered_place
            for covered_place, history_place in [*older_matches, *matches]
        }

    def _find_older_matches(
        self, stored: StoredSummary, matches: Sequence[Match]
    ) -> list[Match]:
        """Matches the older covered contents, which have no fingerprints of their own.

        Returns [] in these cases:

        - The summary covers no older contents.
        - `matches` has the older contents already.
        - The session lacks the last covered event. Then nobody can tell which contents
          are older than the summary.
        """
        covered = stored.covered
        has_older = stored.has_older or covered.older_count > 0
        # Older contents match all together or not at all, so the first match tells.
        is_matched = bool(matches) and matches[0].covered_place < covered.older_count
        if not has_older or is_matched:
            return []

        newer = self._read_newer(stored)
        if newer is None:
            return []
        contents = [self.contents[index] for index in self.indexes]
        return match_older(covered, matches, contents, newer)

    def _read_newer(self, stored: StoredSummary) -> list[types.Content] | None:
        """Reads the contents of the events after the last covered event.

        None if the session does not have that event.
        """
        valid_events = without_rewound(self.events)
        ids = [event.id for event in valid_events]
        if stored.last_event not in ids:
            return None

        newer = []
        for event in valid_events[ids.index(stored.last_event) + 1 :]:
            if event.content:
                newer.append(event.content)
            compaction = event.actions.compaction if event.actions else None
            if compaction and compaction.compacted_content:
                newer.append(compaction.compacted_content)
        return newer

    def _find_new(self, stored: StoredSummary) -> Collection[int]:
        """Finds the indexes of contents that are newer than the summary for certain.

        A repeated message ("yes", "yes") must not pass for the covered message. There
        are three cases:

        - This run has written the summary itself, or its request is not shown: none.
        - This run is older than the run that wrote the summary, and a late result
          continues it: the request alone. Contents after it may be covered.
        - This run is newer: the request and all contents after it.
        """
        request_index = self.request_index
        if request_index is None or self.invocation_id == stored.invocation:
            return ()

        event_runs = [event.invocation_id for event in self.events]
        both_runs = (self.invocation_id, stored.invocation)
        oldest_of_both = next((run for run in event_runs if run in both_runs), None)
        is_this_older = oldest_of_both == self.invocation_id
        if is_this_older and stored.invocation in event_runs:
            return {request_index}
        return range(request_index, len(self.contents))

    @property
    def is_summary_valid(self) -> bool:
        """Whether the request has all covered contents, and no rewind happened since.

        False without a summary.
        """
        if self.stored is None:
            return False
        count = self.stored.covered.content_count
        return len(self.covered) >= count and not self.is_rewound

    @property
    def is_rewound(self) -> bool:
        """Whether the session has a rewind after the run that wrote the summary.

        Without a summary, whether it has any rewind.
        """
        for event in reversed(self.events):
            if self.stored and event.invocation_id == self.stored.invocation:
                return False
            if event.actions and event.actions.rewind_before_invocation_id:
                return True
        return False

    @property
    def is_partial(self) -> bool:
        """Whether this request or a later one may lack older messages of the session.

        It may in two cases: the caller loads only a part of the session, or covered
        contents are missing although the session has no rewind since.
        """
        wanted_count = self.stored.covered.content_count if self.stored else 0
        lacks_some = len(self.covered) < wanted_count
        return self.loads_part or (lacks_some and not self.is_rewound)

    def repeats(self, indexes: Iterable[int]) -> bool:
        """Whether later requests will have the contents with these indexes unchanged.

        This holds if the session is loaded as a whole, and no plugin has rewritten the
        contents.
        """
        if self.is_partial:
            return False
        return all(self.original(index) is self.contents[index] for index in indexes)

    # Names that the next summary stores.

    def last_event(self, covered: frozenset[int]) -> str:
        """Returns the id of the event of the newest covered content; "" if unknown.

        Args:
            covered: The indexes of the covered contents.
        """
        # Several contents may be equal, but they have the order of their events. So the
        # event of a content is before the event of the next content. That is why the
        # events of newer contents are found as well, covered or not.
        end_place = self._event_count
        for index in reversed(self.indexes):
            event_place = self._find_event(index, end_place)
            if event_place is None:
                continue
            if index in covered:
                return self.events[event_place].id
            end_place = event_place
        return ""

    def _find_event(self, index: int, end_place: int) -> int | None:
        """Finds the newest event before `end_place` that has a content's fingerprint.

        Returns its place in `events`; None if the last few events do not have it.
        """
        wanted = self.fingerprint(index)
        first_place = max(0, end_place - _SEARCHED_EVENTS)
        for event_place in reversed(range(first_place, end_place)):
            content = self.events[event_place].content
            if content and self.fingerprint_content(content) == wanted:
                return event_place
        return None

    def name_content(self, index: int) -> str:
        """Names a content by its fingerprint, and its number among equal contents.

        For example, the second content that says "yes" is named "0f3a5b7c9d1e.2". The
        index -1 stands for no content; its name is "".
        """
        if index < 0:
            return ""

        wanted = self.fingerprint(index)
        indexes_upto = [i for i in self.indexes if i <= index]
        number = sum(1 for i in indexes_upto if self.fingerprint(i) == wanted)
        return f"{wanted.hex()}.{number}"

    def find_named(self, name: str) -> int:
        """Returns the index of the content that `name_content` has named.

        If the number in the name is larger than the number of equal contents, returns
        the index of the last of them. Returns -1 for "", and if no content is equal.
        """
        if not name:
            return -1

        digest, _, number = name.partition(".")
        equal = [i for i in self.indexes if self.fingerprint(i).hex() == digest]
        # Anyone may have written the name to session state. Python refuses to read
        # numbers with thousands of digits.
        has_number = number.isdecimal() and len(number) < 10
        equal_upto = equal[: int(number)] if has_number else equal
        return equal_upto[-1] if equal_upto else -1
