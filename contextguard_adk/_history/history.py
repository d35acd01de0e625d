"""The contents of one request, and the facts about them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
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
    has_tool,
    is_message,
    is_user_text,
    keep_pairs_whole,
    media_parts,
    pair_contents,
    parts_of,
    results_of,
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

_FACTS_OF_SUMMARY = (
    "shown",
    "shown_in_part",
    "_covered_positions",
    "covered",
    "model_covered",
)
"""The names of the properties that depend on the stored summary."""

_SEARCHED_EVENTS = 63
"""How many events are searched for the event of a content.

Not every event has a content, so the next event is not always the right one. The bound
keeps the search short in a long session.
"""


class _ShortenedKey(NamedTuple):
    """The facts that decide how a content looks once its tool results are shortened.

    Attributes:
        content_index: The index of the content.
        is_preview: Whether the preview of the content is shortened.
        truncation: How the results are shortened.
        has_handles: Whether each shortened result gets a handle.
    """

    content_index: int
    is_preview: bool
    truncation: Truncation
    has_handles: bool


class History:
    """The contents of one request, and the facts about them.

    An index is a position in `contents`; a position is a place in another list, such as
    `events`. Each fact is computed when the fact is first read. These words mean the
    same in every file:

    =============  ==================================================================
    contents       The request as ADK and the other plugins have built it, covered
                   contents included. `Turn.messages` is the same list.
    original       A content in the form of its session event, before another plugin
                   has rewritten the text for this request.
    told           The contents after the user's `redact`: the form in which they leave
                   the conversation, for a summarizer or for session state.
    shown          The contents with previews in place of large tool results: the form
                   that the agent's model reads.
    shown_in_part  The previews of large tool results, by the index of the content.
    indexes        The indexes of the contents that come from session events. Only these
                   contents are ever compacted: the others belong to this request alone.
    covered        The indexes of the contents that the stored summary replaces.
    model_covered  The covered indexes that a model has summarized. The summary has
                   excerpts of the other covered contents, or nothing.
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
        """Creates the history of a request.

        Args:
            contents: The contents of the request.
            invocation: The run that the request belongs to; None if unknown. Then the
                history has no events.
            user_content: The content that began the run; None if there is none.
            stored: The stored summary; None if there is none.
            memo: Remembers measures and other results for old payloads; None for a new
                memo.
        """
        self.contents = contents
        self.user_content = user_content
        self.stored = stored
        self.memo = memo or Memo()

        self.invocation_id = invocation.invocation_id if invocation else ""
        self.events = invocation.session.events if invocation else []
        self._invocation = invocation
        # The session may add events to this list while a summary is written in the
        # background. The summary must not depend on the added events.
        self._event_count = len(self.events)

        # A run may have contents of its own, which are in no session event.
        run_config = invocation.run_config if invocation else None
        self._transient = getattr(run_config, "model_input_context", None) or ()

        # The caller sets these three before the first fact is read. `loads_part` says
        # whether later requests may have less of the session than this one. If
        # `preview` is None, all tool results are shown whole.
        self.loads_part = False
        self.preview: Preview | None = None
        self.redactor = Redactor()

        # These results do not depend on the summary, so copies of this history share
        # the same three dicts.
        self._fingerprints: dict[int, bytes] = {}
        self._known_previews: dict[int, types.Content | None] = {}
        self._shortened: dict[_ShortenedKey, types.Content] = {}

    def with_summary(self, stored: StoredSummary | None) -> History:
        """Returns a copy of this history with another stored summary.

        Facts that were computed are kept, apart from those that depend on the summary.
        """
        other = copy.copy(self)
        for name in _FACTS_OF_SUMMARY:
            # A `cached_property` stores its value as an attribute of the same name.
            # Without the attribute, the value is computed again.
            vars(other).pop(name, None)
        other.stored = stored
        return other

    def release(self) -> None:
        """Computes the facts that need the invocation, then forgets the invocation.

        Afterwards a summary can be written in the background, even if the run has
        ended.
        """
        # A fact is computed when it is read.
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

        The model reads a preview in place of the whole results, also in the first
        request with these results. {} if the caller has set no `preview`.
        """
        if self.preview is None:
            return {}

        previews: dict[int, types.Content] = {}
        summarized_indexes = self.model_covered
        for index, content in enumerate(self.contents):
            # A result that a model has summarized is not shown at all.
            if index in summarized_indexes:
                continue
            results = results_of(content)
            if not results:
                continue
            preview = self._make_preview(index, results, self.preview)
            if preview is not None:
                previews[index] = preview

        # Only contents that come from session events have previews. To find `indexes`
        # takes time, and most requests have no large result.
        if not previews:
            return {}
        return {index: previews[index] for index in self.indexes if index in previews}

    def has_short_strings(self, truncation: Truncation) -> bool:
        """Whether previews shorten strings in the way of `truncation`."""
        return self.preview is not None and self.preview.strings == truncation

    def _make_preview(
        self, index: int, results: Sequence[types.Part], settings: Preview
    ) -> types.Content | None:
        """Returns the preview of a content; None if the model reads the whole content.

        Args:
            index: The index of the content.
            results: The parts of the content with tool results.
            settings: The settings of previews.
        """
        if index in self._known_previews:
            return self._known_previews[index]

        content = self.contents[index]
        results_bytes = sum(self.memo.part_bytes(part) for part in results)
        preview = None
        if not settings.fits(results_bytes):
            # `remember` calls `settings` with the content, which makes the preview.
            preview = self.memo.remember(settings, content, content.parts or ())
        self._known_previews[index] = preview
        return preview

    def shortened_results(self, stored: StoredSummary) -> dict[int, types.Content]:
        """Returns the contents whose tool results a stored summary shortens, by index.

        The model reads the shortened contents in place of those in `shown`. Contents
        that stay the same are left out; {} if the summary shortens no results.

        Args:
            stored: The summary. Its `truncated_upto` names the last content that the
                summary shortens.
        """
        truncation = stored.truncation
        if truncation is None:
            return {}

        last_index = self.find_named(stored.truncated_upto)
        truncated_indexes = [index for index in self.indexes if index <= last_index]

        shortened_by_index: dict[int, types.Content] = {}
        for index in truncated_indexes:
            shown = self.shown[index]
            key = _ShortenedKey(
                index,
                is_preview=index in self.shown_in_part,
                truncation=truncation,
                has_handles=stored.has_recall,
            )
            if key not in self._shortened:
                # If `truncate_content` gets the whole content, each shortened result
                # has a handle, by which the recall tool finds the whole result.
                whole = self.contents[index] if stored.has_recall else None
                self._shortened[key] = truncate_content(shown, truncation, whole)

            # `truncate_content` returns the same object if nothing is too long.
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
        """The parts of the session's events, in which a part can be looked up."""
        return KnownEvents(self.events)

    @cached_property
    def _rewritten(self) -> dict[int, Event]:
        """The events whose texts another plugin has rewritten, by index of the content.

        {} if the invocation is unknown: then nothing tells which events ADK shows.
        """
        if self._invocation is None:
            return {}

        # Transient contents come from no event.
        text_indexes = [
            index
            for index, content in enumerate(self.contents)
            if not has_tool(content) and content not in self._transient
        ]
        # No event has these texts, so another plugin has rewritten or inserted them.
        changed_indexes = {
            index
            for index in text_indexes
            if not self._known_events.is_unchanged(self.contents[index])
        }
        if not changed_indexes:
            return {}
        return find_rewritten(
            self.contents, text_indexes, changed_indexes, self._invocation, self.memo
        )

    def original(self, index: int) -> types.Content:
        """Returns a content as its session event has it.

        The original differs from the content if another plugin has rewritten the
        content for this request. Such a plugin may add the time of day, for example.
        """
        event = self._rewritten.get(index)
        if event is not None and event.content is not None:
            return event.content
        return self.contents[index]

    def fingerprint(self, index: int) -> bytes:
        """Returns the fingerprint of the original of a content."""
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
        """The index of the agent's current request; None if no content is the request.

        The first of these that is found is the request:

        1. The newest message that fits the input of the agent's node or, if there is no
           such input, the content that began the run.
        2. The content that `_find_input` finds, unless the run began with other parts
           than texts and files: such a run has no request.
        """
        # If another plugin has rewritten a message of the user, the words of the
        # request may be in either form. So both forms are searched as one message.
        searched_contents = list(self.contents)
        for index, event in self._rewritten.items():
            if event.author == "user":
                both_forms = [*parts_of(self.contents[index]), *parts_of(event.content)]
                searched_contents[index] = types.Content(role="user", parts=both_forms)

        # The output of code has the user's role too, but is no request.
        candidates = [index for index in self.indexes if index not in self.outputs]
        request = find_node_input(self._invocation) or self.user_content
        found_index = find_current_request(searched_contents, candidates, request)
        if found_index is not None:
            return found_index

        # For example, the result of a call may begin a run.
        has_message = bool(content_text(request) or media_parts(request))
        has_only_other_parts = bool(parts_of(request)) and not has_message
        if has_only_other_parts:
            return None
        return self._find_input(candidates)

    def _find_input(self, candidates: Sequence[int]) -> int | None:
        """Finds the index of the request, if no message has the words of the request.

        - If the contents have texts of the user: the user's newest text of this run, or
          None. Another plugin may have changed the words.
        - Otherwise ADK shows the agent no text of the user. Then the request is the
          newest text of another agent, or None.

        Args:
            candidates: The indexes that may be found, in order.
        """
        if self.user_messages:
            return self._find_newest_message()

        # Without texts of the user, all messages with a text are of other agents.
        for index in reversed(candidates):
            content = self.contents[index]
            if is_message(content) and content_text(content):
                return index
        return None

    def _find_newest_message(self) -> int | None:
        """Finds the user's newest text whose event is part of this run, or None."""
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
        """The indexes of the contents that show the output of code."""
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
        """The indexes of the texts that the user wrote, oldest first."""
        texts_of_agents = {
            index for index, event in self._rewritten.items() if event.author != "user"
        }
        # The output of code, and what other agents did, has the user's role as well.
        excluded_indexes = self.outputs | texts_of_agents
        return [
            index
            for index in self.indexes
            if index not in excluded_indexes and is_user_text(self.contents[index])
        ]

    @cached_property
    def running_turn(self) -> list[int]:
        """The indexes after the agent's current request: the steps of the running turn.

        If `request_index` is None, the user's newest text counts as the request.
        Without such a text all `indexes` are steps.
        """
        request_index = self.request_index
        if request_index is None:
            request_index = max(self.user_messages, default=-1)
        return [index for index in self.indexes if index > request_index]

    # Coverage by the stored summary.

    @cached_property
    def covered(self) -> frozenset[int]:
        """The indexes of the contents that the stored summary replaces."""
        return frozenset(self._covered_positions)

    @cached_property
    def model_covered(self) -> frozenset[int]:
        """The covered indexes that a model has summarized."""
        if self.stored is None:
            return frozenset()

        # A model always summarizes the oldest covered contents, and excerpts of newer
        # ones follow. So a number is enough to tell what the model has summarized.
        summarized_count = self.stored.model_covered_count
        return frozenset(
            index
            for index, covered_position in self._covered_positions.items()
            if covered_position < summarized_count
        )

    @cached_property
    def _covered_positions(self) -> dict[int, int]:
        """The covered position of each covered content, by the index of the content.

        A covered position is a position among all contents that the summary covers. The
        oldest of these contents has the position 0.
        """
        if self.stored is None:
            return {}

        covered_positions = self._match_covered(self.stored)
        excluded_indexes = self._find_never_covered(self.stored)
        candidates = [i for i in covered_positions if i not in excluded_indexes]

        # A call and its result are covered together or not at all. So the partners of
        # the excluded contents are left out too.
        whole_indexes = keep_pairs_whole(candidates, self.pairs)
        return {
            index: covered_position
            for index, covered_position in covered_positions.items()
            if index in whole_indexes
        }

    def _match_covered(self, stored: StoredSummary) -> dict[int, int]:
        """Matches the contents of this request with those that a summary covers.

        Returns the covered position of each matched content, by the content's index.
        """
        covered = stored.covered
        covered_count = covered.content_count

        # Usually the summary covers the first contents without a gap, and the history
        # has only grown since. This is quick to test.
        first_indexes = self.indexes[:covered_count]
        has_enough = len(first_indexes) == covered_count
        first_fingerprints = [self.fingerprint(index) for index in first_indexes]
        if has_enough and cover(first_fingerprints) == covered:
            return {
                index: covered_position
                for covered_position, index in enumerate(first_indexes)
            }

        fingerprints = [self.fingerprint(index) for index in self.indexes]
        matches = align_covered(covered, fingerprints)
        older_matches = self._find_older_matches(stored, matches)
        return {
            self.indexes[history_position]: covered_position
            for covered_position, history_position in [*older_matches, *matches]
        }

    def _find_older_matches(
        self, stored: StoredSummary, matches: Sequence[Match]
    ) -> list[Match]:
        """Matches older contents by their positions, if their digest did not match.

        The terms are those of the file `fingerprints`.

        Args:
            stored: The summary.
            matches: The matches of `align_covered`.

        Returns:
            Matches that are not among `matches`; [] if there are none.
        """
        covered = stored.covered
        has_older = stored.has_older or covered.older_count > 0
        if not has_older:
            return []

        # If the digest matched, `matches` has all older contents, the oldest one first.
        if matches and matches[0].covered_position < covered.older_count:
            return []

        # Without the last covered event, nothing tells which contents are newer. Then
        # a newer content could pass for an older one.
        newer_contents = self._read_newer_contents(stored)
        if newer_contents is None:
            return []
        contents = [self.contents[index] for index in self.indexes]
        return match_older(covered, matches, contents, newer_contents)

    def _read_newer_contents(self, stored: StoredSummary) -> list[types.Content] | None:
        """Returns the contents of the events after the last covered event.

        Returns None if the session does not have the last covered event.
        """
        valid_events = without_rewound(self.events)
        ids = [event.id for event in valid_events]
        if stored.last_event not in ids:
            return None

        first_newer_position = ids.index(stored.last_event) + 1
        newer_contents: list[types.Content] = []
        for event in valid_events[first_newer_position:]:
            if event.content:
                newer_contents.append(event.content)
            # A summary of ADK itself is in the actions of an event.
            compaction = event.actions.compaction if event.actions else None
            if compaction and compaction.compacted_content:
                newer_contents.append(compaction.compacted_content)
        return newer_contents

    def _find_never_covered(self, stored: StoredSummary) -> Collection[int]:
        """Finds the indexes that cannot be covered, whatever the contents look like.

        A new message must not pass for an equal message that is covered ("yes", "yes").
        The result depends on the run of this request:

        - The run that wrote the summary: no index. The run may have covered its own
          request and steps.
        - An older run, which a late result continues: the request alone. A newer run
          may have covered the steps after the request, but this run still needs the
          request.
        - A newer run, or a run that the events do not place: the request and all
          indexes after the request.
        - A run without a request: no index, as nothing tells where the run begins.
        """
        has_written_summary = self.invocation_id == stored.invocation
        if has_written_summary or self.request_index is None:
            return ()

        # A dict keeps the order, so this lists each run once, the oldest one first.
        run_ids = list(dict.fromkeys(event.invocation_id for event in self.events))
        if self.invocation_id in run_ids and stored.invocation in run_ids:
            own_position = run_ids.index(self.invocation_id)
            is_older_run = own_position < run_ids.index(stored.invocation)
            if is_older_run:
                return {self.request_index}

        return range(self.request_index, len(self.contents))

    @property
    def has_all_covered(self) -> bool:
        """Whether this request has all contents that the stored summary replaces.

        True without a summary.
        """
        covered_count = self.stored.covered.content_count if self.stored else 0
        return len(self.covered) >= covered_count

    @property
    def is_whole(self) -> bool:
        """Whether this request and later ones have all contents of the session.

        False in two cases: the caller may load only a part of the session, or the
        request lacks contents that a summary has replaced.
        """
        return self.has_all_covered and not self.loads_part

    @property
    def is_rewound(self) -> bool:
        """Whether the session has a rewind since the run that made the summary.

        Without a summary, each rewind of the session counts.
        """
        for event in reversed(self.events):
            if self.stored and event.invocation_id == self.stored.invocation:
                return False
            if event.actions and event.actions.rewind_before_invocation_id:
                return True
        return False

    def find_quoted(
        self, stored: StoredSummary, covered: Collection[int]
    ) -> int | None:
        """Returns the index of the covered message that a continuation quotes.

        This is the newest covered message with the fingerprint in `stored.request`. The
        result is None if no covered message has this fingerprint.
        """
        equal_indexes = [
            index
            for index in covered
            if self.fingerprint(index).hex() == stored.request
        ]
        return max(equal_indexes, default=None)

    # Names that the next summary stores.

    def last_event(self, covered: frozenset[int]) -> str:
        """Returns the id of the event that the newest covered content comes from.

        Returns "" if no event is found for any covered content.

        Args:
            covered: The indexes of the covered contents.
        """
        # Contents have the order of their events. So the contents are read from the
        # newest one back, and the event of a content is searched before the event that
        # was found last. Contents that are not covered are searched too: otherwise the
        # event of a new "yes" could pass for that of a covered "yes".
        # Another plugin may have taken events out of the session in the meantime.
        end_position = min(self._event_count, len(self.events))
        for index in reversed(self.indexes):
            event_position = self._find_event(index, end_position)
            if event_position is None:
                continue
            if index in covered:
                return self.events[event_position].id
            end_position = event_position
        return ""

    def _find_event(self, index: int, end_position: int) -> int | None:
        """Finds the newest event with the same fingerprint as a content.

        Args:
            index: The index of the content.
            end_position: A position in `events`. Only the `_SEARCHED_EVENTS` events
                before this position are searched.

        Returns:
            The position of the event in `events`; None if no event is found.
        """
        wanted = self.fingerprint(index)
        first_position = max(0, end_position - _SEARCHED_EVENTS)
        for event_position in reversed(range(first_position, end_position)):
            content = self.events[event_position].content
            if content and self.fingerprint_content(content) == wanted:
                return event_position
        return None

    def name_content(self, index: int) -> str:
        """Names a content by its fingerprint, and its number among equal contents.

        For example, the second content that says "yes" is named "0f3a5b7c9d1e.2". A
        negative index stands for no content, whose name is "".
        """
        if index < 0:
            return ""

        wanted = self.fingerprint(index)
        equal_indexes = [
            other
            for other in self.indexes
            if other <= index and self.fingerprint(other) == wanted
        ]
        return f"{wanted.hex()}.{len(equal_indexes)}"

    def find_named(self, name: str) -> int:
        """Returns the index of the content that `name_content` has named.

        If there are fewer equal contents than the number in the name says, or if the
        name has no number, returns the index of the last equal content. Returns -1 for
        "", for the number 0, and if no content has the fingerprint.
        """
        if not name:
            return -1

        digest, _dot, written_number = name.partition(".")
        equal_indexes = [i for i in self.indexes if self.fingerprint(i).hex() == digest]

        # Anyone may have written the name to session state, so any text may stand after
        # the dot. Python refuses to read numbers with thousands of digits.
        has_number = written_number.isdecimal() and len(written_number) < 10
        if has_number:
            number = int(written_number)
            equal_indexes = equal_indexes[:number]
        return equal_indexes[-1] if equal_indexes else -1
