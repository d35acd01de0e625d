"""Finds the events whose texts another plugin has rewritten."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence

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
from contextguard_adk._history.origin import payloads_of

_WORD = re.compile(r"\w+")
_MAX_MOVED = 64  # Looking further would be quadratic.
_END = 1 << 62
_INSTRUCTION_BEGIN = "<<<BEGIN_SYSTEM_INSTRUCTION>>>"


def find_rewritten(
    contents: Sequence[types.Content],
    candidates: Sequence[int],
    changed: Collection[int],
    invocation: InvocationContext,
    spell: Callable[[types.Content], bytes],
) -> dict[int, Event]:
    """Finds the events of the candidates that another plugin has changed.

    A text stands where its event stood, between neighbors that were left as
    they are. There it has most words in common with its event, or there are as many
    contents as events.
    """
    events = find_shown_events(invocation)
    roles = [role_of(event, invocation) for event in events]
    told = [i for i, role in enumerate(roles) if role]
    known = (contents[i] for i in candidates if i not in changed)
    spare = Counter(itertools.chain.from_iterable(map(payloads_of, known)))
    spare.subtract(p for i in told for p in payloads_of(events[i].content))
    if min(spare.values(), default=0) >= 0:
        return {}  # Each event stands there as it is.
    is_scoped = getattr(invocation, "isolation_scope", None) is not None
    open_contents = [
        i
        for i in candidates
        # A task of its own comes first, without an event.
        if not (is_scoped and i == 0)
        and _INSTRUCTION_BEGIN not in content_text(contents[i])
    ]
    spelled = [spell(event.content or types.Content()) for event in events]
    links = _align_in_order(spelled, [spell(content) for content in contents])
    alike = [
        pair
        for gap in _find_gaps(links, told, open_contents)
        for pair in _match_words(events, contents, *gap)
    ]
    for left, right in _find_gaps(sorted([*links, *alike]), told, open_contents):
        if len(left) == len(right):
            alike += zip(left, right, strict=True)
    return {
        right: events[left]
        for left, right in alike
        if right in changed and contents[right].role == roles[left]
    }


def _align_in_order(
    left: Sequence[bytes], right: Sequence[bytes]
) -> list[tuple[int, int]]:
    """Pairs items that both have equally often, as many as keep their order."""
    counts, wanted = Counter(left), Counter(right)
    places = defaultdict[bytes, deque[int]](deque)
    for place, item in enumerate(right):
        places[item].append(place)
    ends: list[int] = []  # For each length the lowest end of a chain, as in patience.
    tops: list[int] = []
    chains: list[tuple[int, int, int]] = []
    for index, item in enumerate(left):
        if counts[item] == wanted[item]:
            place = places[item].popleft()
            length = bisect_left(ends, place)
            before = tops[length - 1] if length else -1
            ends[length : length + 1] = [place]
            tops[length : length + 1] = [len(chains)]
            chains.append((index, place, before))
    found, link = [], tops[-1] if tops else -1
    while link >= 0:
        index, place, link = chains[link]
        found.append((index, place))
    return found[::-1]


def _find_gaps(
    links: Sequence[tuple[int, int]], told: Sequence[int], open_contents: Sequence[int]
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yields the events and contents between linked neighbors, where both are."""
    for before, after in itertools.pairwise([(-1, -1), *links, (_END, _END)]):
        left = told[bisect_right(told, before[0]) : bisect_left(told, after[0])]
        first = bisect_right(open_contents, before[1])
        right = open_contents[first : bisect_left(open_contents, after[1])]
        if left and right:
            yield left, right


def _match_words(
    events: Sequence[Event],
    contents: Sequence[types.Content],
    left: Sequence[int],
    right: Sequence[int],
) -> Iterator[tuple[int, int]]:
    """Pairs events of a gap, in order, with the contents that are most like them."""
    shown = [_Traits(contents[index]) for index in right]
    more, start = len(right) - len(left), 0
    for number, index in enumerate(left):
        said = _Traits(events[index].content)
        # Where a content stands for each event, only others push it on, or back.
        first, end = max(start, number + min(more, 0)), number + max(more, 0) + 1
        window = range(first, min(end, len(right), first + _MAX_MOVED))
        best = max(window, key=lambda place: said.likeness(shown[place]), default=None)
        if best is not None and said.likeness(shown[best]):
            yield index, right[best]
            start = best + 1


class _Traits:
    """What tells a content from others, however it is framed."""

    def __init__(self, content: types.Content | None) -> None:
        self._payloads = {*payloads_of(content)}
        text = " ".join(map(words_of, parts_of(content)))[:WORDS_CHARS]
        self._words = frozenset(_WORD.findall(text.lower()))

    def likeness(self, other: _Traits) -> float:
        """The share of common words; 0 where that is no sign of one origin."""
        if self._payloads & other._payloads:
            return 1.0
        counts = len(self._words), len(other._words)
        shared = len(self._words & other._words)
        # Few words are in any long text by chance.
        is_alike = 2 * shared > min(counts) and 20 * shared >= sum(counts)
        return shared / sum(counts) if is_alike else 0.0
