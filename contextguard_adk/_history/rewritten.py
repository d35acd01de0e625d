"""Finds the events behind contents whose texts another plugin has rewritten."""

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
"""Stands in a content that ADK makes of an instruction."""

_MAX_MOVED = 64  # Looking further would be quadratic.


def find_rewritten(
    contents: Sequence[types.Content],
    texts: Sequence[int],
    changed: Collection[int],
    invocation: InvocationContext,
    memo: Memo,
) -> dict[int, Event]:
    """Finds the events of the `changed` contents, by the indexes of these.

    `texts` are the indexes of all contents that may come from an event with a text. A
    changed content stands where its event stood, between neighbors that nobody changed.
    Between the same neighbors it belongs to the event with which it has most words in
    common. Where as many contents as events are left there, their order decides.
    """
    events = find_shown_events(invocation)
    roles = [role_of(event, invocation) for event in events]
    text_events = [place for place, role in enumerate(roles) if role]

    unchanged = [contents[index] for index in texts if index not in changed]
    if _say_all(unchanged, [events[place].content for place in text_events]):
        return {}

    from_events = _without_inserted(contents, texts, invocation)
    links = _align_in_order(
        [_spell(event.content or types.Content(), memo) for event in events],
        [_spell(content, memo) for content in contents],
    )
    alike: list[tuple[int, int]] = []
    for gap in _find_gaps(links, text_events, from_events):
        alike += _match_words(events, contents, gap)

    by_order: list[tuple[int, int]] = []
    for gap in _find_gaps(sorted([*links, *alike]), text_events, from_events):
        by_order += _match_order(gap)

    return {
        index: events[place]
        for place, index in [*alike, *by_order]
        if index in changed and contents[index].role == roles[place]
    }


def _say_all(
    contents: Sequence[types.Content], wanted: Sequence[types.Content | None]
) -> bool:
    """Whether contents say all that is wanted, each text as often."""
    spare: Counter[Hashable] = Counter()
    for content in contents:
        spare.update(keys_of(content))
    for each in wanted:
        spare.subtract(keys_of(each))
    return min(spare.values(), default=0) >= 0


def _without_inserted(
    contents: Sequence[types.Content],
    texts: Sequence[int],
    invocation: InvocationContext,
) -> list[int]:
    """Leaves out the texts that ADK inserts without an event."""
    # The task of an isolated agent stands first.
    has_task = getattr(invocation, "isolation_scope", None) is not None
    first = 1 if has_task else 0
    return [
        index
        for index in texts
        if index >= first and _MOVED_INSTRUCTION not in content_text(contents[index])
    ]


def _spell(content: types.Content, memo: Memo) -> bytes:
    return memo.remember(fingerprint, content, content.parts or (), content.role)


class _Chain(NamedTuple):
    """Pairs in order, by the last pair and the chain before it."""

    left: int
    right: int
    before: _Chain | None


def _align_in_order(
    left: Sequence[bytes], right: Sequence[bytes]
) -> list[tuple[int, int]]:
    """Pairs items that both have equally often, as many as keep their order."""
    left_counts = Counter(left)
    right_counts = Counter(right)
    right_places = defaultdict[bytes, deque[int]](deque)
    for place, item in enumerate(right):
        right_places[item].append(place)

    # The longest chain of rising places is found as in patience sorting: for each
    # length only the chain is kept that ends first.
    ends: list[int] = []
    chains: list[_Chain] = []
    for index, item in enumerate(left):
        if left_counts[item] != right_counts[item]:
            continue

        end = right_places[item].popleft()
        length = bisect_left(ends, end)
        before = chains[length - 1] if length > 0 else None
        ends[length : length + 1] = [end]
        chains[length : length + 1] = [_Chain(index, end, before)]

    pairs = []
    chain = chains[-1] if chains else None
    while chain is not None:
        pairs.append((chain.left, chain.right))
        chain = chain.before
    return pairs[::-1]


class _Gap(NamedTuple):
    """The places of events and the indexes of contents between linked neighbors."""

    places: Sequence[int]
    indexes: Sequence[int]


def _find_gaps(
    links: Sequence[tuple[int, int]], events: Sequence[int], contents: Sequence[int]
) -> Iterator[_Gap]:
    """Yields the gaps between links that have events as well as contents."""
    start = (-1, -1)
    end = (sys.maxsize, sys.maxsize)
    for before, after in itertools.pairwise([start, *links, end]):
        first_place = bisect_right(events, before[0])
        places = events[first_place : bisect_left(events, after[0])]

        first_index = bisect_right(contents, before[1])
        indexes = contents[first_index : bisect_left(contents, after[1])]

        if places and indexes:
            yield _Gap(places, indexes)


def _match_words(
    events: Sequence[Event], contents: Sequence[types.Content], gap: _Gap
) -> Iterator[tuple[int, int]]:
    """Pairs events of a gap, in order, with the contents that are most like them."""
    shown = [_Traits(contents[index]) for index in gap.indexes]
    spare_contents = max(0, len(gap.indexes) - len(gap.places))
    spare_events = max(0, len(gap.places) - len(gap.indexes))

    start = 0
    for number, place in enumerate(gap.places):
        # A content moves on only past spare contents, and back only over spare events.
        first = max(start, number - spare_events)
        end = number + spare_contents + 1
        window = range(first, min(end, len(shown), first + _MAX_MOVED))

        said = _Traits(events[place].content)
        likenesses = [said.likeness(shown[position]) for position in window]
        highest = max(likenesses, default=0.0)
        if highest > 0:
            position = window[likenesses.index(highest)]
            yield place, gap.indexes[position]
            start = position + 1


def _match_order(gap: _Gap) -> list[tuple[int, int]]:
    """Pairs the events of a gap with its contents, where there are as many of both."""
    if len(gap.places) != len(gap.indexes):
        return []
    return list(zip(gap.places, gap.indexes, strict=True))


class _Traits:
    """What tells a content from others, however it is framed."""

    def __init__(self, content: types.Content | None) -> None:
        text = " ".join(words_of(part) for part in parts_of(content))[:WORDS_CHARS]
        self._words = frozenset(_WORD.findall(text.lower()))
        self._keys = set(keys_of(content))

    def likeness(self, other: _Traits) -> float:
        """Returns the share of common words; 0 where it is no sign of one origin."""
        if not self._keys.isdisjoint(other._keys):
            return 1.0

        shared = len(self._words & other._words)
        fewest = min(len(self._words), len(other._words))
        total = len(self._words) + len(other._words)
        # Few words are in any long text by chance.
        is_alike = 2 * shared > fewest and 20 * shared >= total
        return shared / total if is_alike else 0.0
