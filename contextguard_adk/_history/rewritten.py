"""Finds the events of contents whose texts another plugin has rewritten.

A place is a position among the events that ADK shows, an index one among the contents.
A link is an event with its content: an event place and a content index.
"""

from __future__ import annotations

import itertools
import re
import sys
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import NamedTuple

from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.genai import types

from contextguard_adk._history.adk_events import (
    WORDS_CHARS,
    find_shown_events,
    role_of,
    words_of,
)
from contextguard_adk._history.contents import content_text, parts_of
from contextguard_adk._history.fingerprints import fingerprint
from contextguard_adk._history.origin import keys_of
from contextguard_adk._measuring.tokens import Memo

_WORD = re.compile(r"\w+")
_MOVED_INSTRUCTION = "<<<BEGIN_SYSTEM_INSTRUCTION>>>"
"""ADK writes this mark into a content that it makes of an instruction."""

_MAX_MOVED = 64
"""An event is compared with at most this many contents.

If each event was compared with all contents, the time would be quadratic.
"""


class _Link(NamedTuple):
    """The place of an event, and the index of the content that ADK made of it."""

    event_place: int
    content_index: int


def find_rewritten(
    contents: Sequence[types.Content],
    text_indexes: Sequence[int],
    changed_indexes: Collection[int],
    invocation: InvocationContext,
    memo: Memo,
) -> dict[int, Event]:
    """Finds the events of contents that another plugin has changed.

    A changed content is at the position of its event: between unchanged neighbors.
    Among the events between the same neighbors it belongs to the event with which it
    has most words in common. If the words do not tell, and as many contents as events
    are left, they belong together in their order.

    Args:
        contents: The contents of the request.
        text_indexes: The contents that may come from an event with a text.
        changed_indexes: The contents that another plugin has changed or inserted.
        invocation: The run, whose session has the events.
        memo: Remembers fingerprints.

    Returns:
        The events that were found, by the index of the changed content.
    """
    events = find_shown_events(invocation)
    roles = [role_of(event, invocation) for event in events]
    text_places = [place for place, role in enumerate(roles) if role]

    unchanged = [contents[i] for i in text_indexes if i not in changed_indexes]
    if _have_all(unchanged, [events[place].content for place in text_places]):
        return {}  # No event lacks its content, so all changed ones are inserted.

    # Equal contents and events are linked first, then the ones between them by their
    # words, and the ones that are still left by their order.
    candidates = _without_inserted(contents, text_indexes, invocation)
    equal_links = _align_in_order(
        [_spell(event.content or types.Content(), memo) for event in events],
        [_spell(content, memo) for content in contents],
    )
    word_links: list[_Link] = []
    for gap in _find_gaps(equal_links, text_places, candidates):
        word_links += _match_words(events, contents, gap)

    links = sorted([*equal_links, *word_links])
    order_links: list[_Link] = []
    for gap in _find_gaps(links, text_places, candidates):
        order_links += _match_order(gap)

    return {
        index: events[place]
        for place, index in [*word_links, *order_links]
        if index in changed_indexes and contents[index].role == roles[place]
    }


def _have_all(
    contents: Sequence[types.Content], wanted: Sequence[types.Content | None]
) -> bool:
    """Whether contents have each text and file of the wanted ones at least as often."""
    spare_counts: Counter[Hashable] = Counter()
    for content in contents:
        spare_counts.update(keys_of(content))
    for wanted_content in wanted:
        spare_counts.subtract(keys_of(wanted_content))
    return min(spare_counts.values(), default=0) >= 0


def _without_inserted(
    contents: Sequence[types.Content],
    text_indexes: Sequence[int],
    invocation: InvocationContext,
) -> list[int]:
    """Returns the indexes of texts, except the texts that ADK inserts without an event.

    ADK inserts the task of an isolated agent, and moved instructions.
    """
    # The task of an isolated agent is its first content.
    has_task = getattr(invocation, "isolation_scope", None) is not None
    first_index = 1 if has_task else 0
    return [
        index
        for index in text_indexes
        if index >= first_index
        and _MOVED_INSTRUCTION not in content_text(contents[index])
    ]


def _spell(content: types.Content, memo: Memo) -> bytes:
    return memo.remember(fingerprint, content, content.parts or (), content.role)


class _Chain(NamedTuple):
    """Links in rising order: the last link, and the chain of the links before it."""

    last: _Link
    before: _Chain | None


def _align_in_order(
    event_fingerprints: Sequence[bytes], content_fingerprints: Sequence[bytes]
) -> list[_Link]:
    """Links as many equal events and contents as possible without a change of order.

    A fingerprint counts only if as many events as contents have it. Then the first
    event belongs to the first content, and so on.
    """
    event_counts = Counter(event_fingerprints)
    content_counts = Counter(content_fingerprints)
    indexes_by_fingerprint = defaultdict[bytes, deque[int]](deque)
    for index, item in enumerate(content_fingerprints):
        indexes_by_fingerprint[item].append(index)

    # The longest chain of rising indexes is found as in patience sorting. Of all chains
    # of a length, only the chain with the smallest last index is kept.
    last_indexes: list[int] = []
    chains: list[_Chain] = []
    for place, item in enumerate(event_fingerprints):
        if event_counts[item] != content_counts[item]:
            continue

        index = indexes_by_fingerprint[item].popleft()
        length_before = bisect_left(last_indexes, index)
        before = chains[length_before - 1] if length_before > 0 else None

        # This replaces the chain of the new length, or appends the longest one so far.
        last_indexes[length_before : length_before + 1] = [index]
        chains[length_before : length_before + 1] = [
            _Chain(_Link(place, index), before)
        ]

    links = []
    chain = chains[-1] if chains else None
    while chain is not None:
        links.append(chain.last)
        chain = chain.before
    return links[::-1]


class _Gap(NamedTuple):
    """The places of events and the indexes of contents between linked neighbors."""

    places: Sequence[int]
    indexes: Sequence[int]


def _find_gaps(
    links: Sequence[_Link], text_places: Sequence[int], candidates: Sequence[int]
) -> Iterator[_Gap]:
    """Yields the gaps between links in which there are events as well as contents.

    Args:
        links: The links, in order.
        text_places: The places of the events with a text, in order.
        candidates: The indexes of the contents that may belong to them, in order.
    """
    start = _Link(-1, -1)
    end = _Link(sys.maxsize, sys.maxsize)
    for before, after in itertools.pairwise([start, *links, end]):
        places_start = bisect_right(text_places, before.event_place)
        places_end = bisect_left(text_places, after.event_place)
        places = text_places[places_start:places_end]

        indexes_start = bisect_right(candidates, before.content_index)
        indexes_end = bisect_left(candidates, after.content_index)
        indexes = candidates[indexes_start:indexes_end]

        if places and indexes:
            yield _Gap(places, indexes)


def _match_words(
    events: Sequence[Event], contents: Sequence[types.Content], gap: _Gap
) -> Iterator[_Link]:
    """Links events of a gap, in order, with the contents that are most like them.

    An event that is like no content gets no link.
    """
    content_traits = [_Traits(contents[index]) for index in gap.indexes]
    spare_contents = max(0, len(gap.indexes) - len(gap.places))
    spare_events = max(0, len(gap.places) - len(gap.indexes))

    # Events and contents are numbered from the beginning of the gap.
    next_number = 0
    for event_number, place in enumerate(gap.places):
        # A content is later than its event only by contents to spare, and earlier only
        # by events to spare.
        first_number = max(next_number, event_number - spare_events)
        end_number = min(
            event_number + spare_contents + 1,
            first_number + _MAX_MOVED,
            len(content_traits),
        )
        window = range(first_number, end_number)

        event_traits = _Traits(events[place].content)
        likenesses = [event_traits.likeness(content_traits[n]) for n in window]
        highest = max(likenesses, default=0.0)
        if highest > 0:
            content_number = window[likenesses.index(highest)]
            yield _Link(place, gap.indexes[content_number])
            next_number = content_number + 1


def _match_order(gap: _Gap) -> list[_Link]:
    """Links the events of a gap with its contents in order; [] if the counts differ."""
    if len(gap.places) != len(gap.indexes):
        return []
    return [
        _Link(place, index)
        for place, index in zip(gap.places, gap.indexes, strict=True)
    ]


class _Traits:
    """The words and the data of a content, which tell it from other contents."""

    def __init__(self, content: types.Content | None) -> None:
        text = " ".join(words_of(part) for part in parts_of(content))[:WORDS_CHARS]
        self._words = frozenset(_WORD.findall(text.lower()))
        self._keys = set(keys_of(content))

    def likeness(self, other: _Traits) -> float:
        """Returns how alike two contents are.

        - 1.0 if they have a text or a file in common.
        - 0.0 if so few words are common that this may be chance.
        - Otherwise the common words per word of both contents: from 0.05 to 0.5.
        """
        if not self._keys.isdisjoint(other._keys):
            return 1.0

        shared_count = len(self._words & other._words)
        fewer_count = min(len(self._words), len(other._words))
        total_count = len(self._words) + len(other._words)

        # A few words are in any long text by chance. So the contents must share more
        # than half of the words of the shorter one, and 5 % of all words.
        has_most_words = 2 * shared_count > fewer_count
        has_enough_words = 20 * shared_count >= total_count
        is_alike = has_most_words and has_enough_words
        return shared_count / total_count if is_alike else 0.0
