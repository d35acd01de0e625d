"""What is known of one request's contents; each fact is computed when it is read."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any, cast

from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.genai import types

from contextguard_adk._history.adk_events import Calls, find_calls, is_visible
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
)
from contextguard_adk._history.covering import find_covered, find_last_event
from contextguard_adk._history.fingerprints import Covered, cover, fingerprint
from contextguard_adk._history.origin import EventIndex, find_history, find_rewritten
from contextguard_adk._history.stored import StoredSummary
from contextguard_adk._history.truncation import Preview, truncate_content
from contextguard_adk._measuring.tokens import Memo, V
from contextguard_adk._support.redaction import Redactor

_BY_SUMMARY = "shown", "previewed", "_previews", "_matches", "covered", "model_covered"
"""What depends on the stored summary."""


class History:
    """The contents of one request and the facts about them, all by index."""

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
        self._invocation = invocation
        self.loads_part = False  # Whether later requests may have less of it.
        self.events = invocation.session.events if invocation else []
        self._event_count = len(self.events)  # A summary may be written later.
        self.memo = memo or Memo()
        self.preview: Preview | None = None
        self.redactor = Redactor()
        self._known: dict[Hashable, Any] = {}  # With any summary.

    def with_summary(self, stored: StoredSummary | None) -> History:
        """Returns the same history with another summary in place."""
        other = copy.copy(self)
        for name in _BY_SUMMARY:
            vars(other).pop(name, None)
        other.stored = stored
        return other

    @cached_property
    def told(self) -> Sequence[types.Content]:
        """The contents as they may leave: for a summarizer, or session state."""
        return self.redactor.contents(self.contents, self.memo.remember)

    @cached_property
    def shown(self) -> list[types.Content]:
        """The contents with large tool results as the agent is shown them."""
        shown = list(self.contents)
        for index in self.previewed:
            shown[index] = self._previews[index]
        return shown

    @cached_property
    def previewed(self) -> frozenset[int]:
        """Contents of the history that the agent is not shown whole."""
        return frozenset(self._previews).intersection(self._previews and self.indexes)

    @cached_property
    def _previews(self) -> dict[int, types.Content]:
        if self.preview is None:
            return {}
        previews = {}
        summarized = self.model_covered  # That is not sent again.
        for index, content in enumerate(self.contents):
            results = [part for part in parts_of(content) if part.function_response]
            size_bytes = sum(map(self.memo.part_bytes, results))
            if index in summarized or self.preview.fits(size_bytes):
                continue
            see = partial(
                self.memo.remember, self.preview, content, content.parts or ()
            )
            if shown := self._once((index, self.preview), see):
                previews[index] = shown
        return previews

    @cached_property
    def indexes(self) -> list[int]:
        """The contents that derive from session events."""
        found = find_history(self.contents, self._index, self._transient)
        return sorted({*found, *self._rewritten})

    @cached_property
    def _index(self) -> EventIndex:
        return EventIndex(self.events)

    @cached_property
    def _transient(self) -> Sequence[types.Content]:
        """What the caller adds to this run alone."""
        run_config = self._invocation.run_config if self._invocation else None
        return getattr(run_config, "model_input_context", None) or ()

    @cached_property
    def _rewritten(self) -> dict[int, Event]:
        """The events whose texts another plugin has rewritten."""
        contents = self.contents
        transient = self._transient
        texts = [i for i, content in enumerate(contents) if not has_tool(content)]
        told = [i for i in texts if contents[i] not in transient]
        new = {i for i in told if not self._index.is_unchanged(contents[i])}
        if not new or self._invocation is None:
            return {}
        return find_rewritten(contents, told, new, self._invocation, self.spell)

    @cached_property
    def pairs(self) -> Pairs:
        return pair_contents(self.contents)

    @cached_property
    def calls(self) -> Calls:
        """The agent's own calls in the session's events, and which of them are open."""
        events = self.events[: self._event_count]
        invocation = self._invocation
        if invocation is None:
            return find_calls(events)
        name = getattr(invocation.agent, "name", "")

        def is_own(event: Event) -> bool:
            return event.author == name and is_visible(event, invocation)

        return find_calls(events, is_own)

    def fingerprint(self, index: int) -> bytes:
        """The fingerprint of one content; of a rewritten one, that of its event."""
        return self._once(index, lambda: self.spell(self.original(index)))

    def _once(self, key: Hashable, compute: Callable[[], V]) -> V:
        if key not in self._known:
            self._known[key] = compute()
        return cast("V", self._known[key])

    def original(self, index: int) -> types.Content:
        """A content as its event has it: a plugin may add another time on each call."""
        event = self._rewritten.get(index)
        return (event and event.content) or self.contents[index]

    def spell(self, content: types.Content) -> bytes:
        """The fingerprint of a content as it stands."""
        return self.memo.remember(
            fingerprint, content, content.parts or (), content.role
        )

    def release(self) -> None:
        """Forgets the run, after computing what depends on it."""
        _ = self.request_index, self.calls, *map(self.fingerprint, self.indexes)
        self._invocation = None

    @cached_property
    def request_index(self) -> int | None:
        """Where this agent's current request stands: what ADK shows it of that."""
        contents = [*self.contents]
        user_content = self._node_input or self.user_content
        for index, event in self._rewritten.items():
            if event.author == "user":
                parts = [*parts_of(contents[index]), *parts_of(event.content)]
                contents[index] = types.Content(role="user", parts=parts)
        told = [i for i in self.indexes if i not in self.outputs]
        live = find_current_request(contents, told, user_content)
        has_message = content_text(user_content) or media_parts(user_content)
        if live is not None or (parts_of(user_content) and not has_message):
            return live
        # ADK keeps the user's words from this agent: it has an input of its own.
        if self.user_messages:
            return self._newest_message
        messages = (i for i in told if is_message(self.contents[i]))
        relays = (i for i in messages if content_text(self.contents[i]))
        return max(relays, default=None)

    @property
    def _node_input(self) -> types.Content | None:
        """What a node of a workflow was given, beside or in place of the message."""
        path = getattr(self._invocation, "node_path", None)
        for event in reversed(self.events if path else ()):
            place = getattr(getattr(event, "node_info", None), "path", None)
            if event.invocation_id not in ("", self.invocation_id):
                break  # ADK gives the input of a single turn no id.
            if event.author == "user" and place == path:
                return None if event.get_function_responses() else event.content
        return None

    @property
    def _newest_message(self) -> int | None:
        now = [e for e in self.events if e.invocation_id == self.invocation_id]
        index = EventIndex(now)
        ids = {event.id for event in now}
        for place in reversed(self.user_messages):
            event = self._rewritten.get(place)
            parts = parts_of(self.contents[place])
            if event.id in ids if event else any(map(index.holds, parts)):
                return place
        return None

    @cached_property
    def outputs(self) -> frozenset[int]:
        """What executed code has printed, which ADK shows as the user's text."""

        def is_output(index: int) -> bool:
            if event := self._rewritten.get(index):
                parts = parts_of(event.content)
                return any(part.code_execution_result for part in parts)
            return self._index.is_output(self.contents[index])

        return frozenset(filter(is_output, self.indexes))

    @cached_property
    def running_turn(self) -> list[int]:
        """History of the running turn: what follows the user's request."""
        newest = max(self.user_messages, default=-1)
        start = self.request_index
        return [i for i in self.indexes if i > (newest if start is None else start)]

    @cached_property
    def user_messages(self) -> list[int]:
        """What the user wrote: nothing of tools, executed code or other agents."""
        others = {i for i, e in self._rewritten.items() if e.author != "user"}
        others |= self.outputs
        texts = (i for i in self.indexes if is_user_text(self.contents[i]))
        return [index for index in texts if index not in others]

    @cached_property
    def covered(self) -> frozenset[int]:
        """The contents that the stored summary replaces."""
        return frozenset(self._matches)

    @cached_property
    def model_covered(self) -> frozenset[int]:
        """Those of them that a model summarized."""
        count = self.stored.model_covered_count if self.stored else 0
        return frozenset(i for i, place in self._matches.items() if place < count)

    @cached_property
    def _matches(self) -> dict[int, int]:
        """Covered contents, with their position in the covered set."""
        if self.stored is None:
            return {}
        matches = self._align(self.stored.covered)
        live = self.request_index
        runs = (self.invocation_id, self.stored.invocation)
        if runs[0] != runs[1] and live is not None:
            # A repeated message ("yes", "yes") must not pass for the covered one. With
            # a late result a run goes on that is older than the summary.
            order = [e.invocation_id for e in self.events if e.invocation_id in runs]
            is_old = runs[1] in order and order[0] == runs[0]
            new = {live} if is_old else range(live, len(self.contents))
            matches = {i: place for i, place in matches.items() if i not in new}
        whole = keep_pairs_whole(matches, self.pairs)
        return {i: place for i, place in matches.items() if i in whole}

    def _align(self, covered: Covered) -> dict[int, int]:
        """Finds what is covered, with its position there."""
        count = covered.content_count
        indexes = self.indexes
        prints = [self.fingerprint(index) for index in indexes[:count]]
        if len(prints) == count and cover(prints) == covered:
            return dict(zip(indexes, range(count), strict=False))
        prints = [self.fingerprint(index) for index in indexes]
        contents = [self.contents[i] for i in indexes]
        pairs = find_covered(covered, prints, contents, self.events, self.stored)
        return {indexes[right]: left for left, right in pairs}

    @property
    def is_summary_valid(self) -> bool:
        """Whether all that the stored summary replaces is there, nothing rewound."""
        count = self.stored.covered.content_count if self.stored else sys.maxsize
        return len(self.covered) >= count and not self.is_rewound

    @property
    def is_rewound(self) -> bool:
        """Whether something was rewound since the stored summary was written."""
        for event in reversed(self.events):
            if self.stored and event.invocation_id == self.stored.invocation:
                return False
            if event.actions and event.actions.rewind_before_invocation_id:
                return True
        return False

    @property
    def is_partial(self) -> bool:
        """Whether older messages are not loaded, or may not be in later requests."""
        is_whole = self.stored is None or self.is_summary_valid or self.is_rewound
        return self.loads_part or not is_whole

    def repeats(self, indexes: Iterable[int]) -> bool:
        """Whether later requests have the same texts: all loaded, none rewritten."""
        is_own = (self.original(index) is self.contents[index] for index in indexes)
        return not self.is_partial and all(is_own)

    def name_place(self, index: int) -> str:
        """Names a content by fingerprint and number among equal ones; "" for -1."""
        if index < 0:
            return ""
        wanted = self.fingerprint(index)
        same = sum(self.fingerprint(i) == wanted for i in self.indexes if i <= index)
        return f"{wanted.hex()}.{same}"

    def find_place(self, name: str) -> int:
        """Returns the index of what `name_place` named; -1 if it is not there."""
        digest, _, number = name.partition(".")
        history = self.indexes if name else ()
        same = [i for i in history if self.fingerprint(i).hex() == digest]
        if number.isdecimal() and len(number) < 10:  # Python refuses huge numbers.
            same = same[: int(number)]
        return same[-1] if same else -1

    def shortened_results(self, stored: StoredSummary) -> dict[int, types.Content]:
        """Returns the contents whose tool results a compaction has shortened."""
        if not (how := stored.truncation):
            return {}
        upto = self.find_place(stored.truncated_upto)
        short = dict[int, types.Content]()
        for i in (i for i in self.indexes if i <= upto):
            whole = self.contents[i] if stored.has_recall else None
            key = i, i in self.previewed and self.preview, how, stored.has_recall
            cut = partial(truncate_content, self.shown[i], how, whole)
            if (content := self._once(key, cut)) is not self.shown[i]:
                short[i] = content
        return short

    def last_event(self, covered: frozenset[int]) -> str:
        """The id of the newest event that these contents tell of; "" if unknown."""
        told = ((self.fingerprint(i), i in covered) for i in reversed(self.indexes))
        return find_last_event(self.events[: self._event_count], told, self.spell)

    def cover(self, indexes: frozenset[int]) -> Covered:
        """Builds what a summary of these contents is stored with."""
        prints = [self.fingerprint(i) if i in indexes else b"" for i in self.indexes]
        return cover(prints)
