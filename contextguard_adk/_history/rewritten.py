"""Finds the events of contents whose texts another plugin has rewritten.

An event position is a position among the events that ADK shows the agent. A content
index is a position among the contents of the request. A link joins the two: ADK has
made this content of this event.
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
    """The position of an event, and the index of the content that ADK made of it."""

    event_position: int
    content_index: int


def find_rewritten(
    contents: Sequence[types.Content],
    text_indexes: Sequence[int],
    changed_indexes: Collection[int],
    invocation: InvocationContext,
    memo: Memo,
) -> dict[int, Event]:
    """Finds the events of contents that another plugin has changed.

    A changed content is linked with an event between the events of its unchanged
    neighbors. The contents and events in between are linked by their common words. If
    as many contents as events have no link yet, they are linked in their order.

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
    # ADK makes no text of an event without a role.
    text_positions = [position for position, role in enumerate(roles) if role]

    # If each event has its content unchanged, the changed contents are all inserted.
    unchanged = [contents[i] for i in text_indexes if i not in changed_indexes]
    if _have_all(unchanged, [events[position].content for position in text_positions]):
        return {}

    candidates = _without_inserted(contents, text_indexes, invocation)
    equal_links = _link_equal(
        [_spell(event.content or types.Content(), memo) for event in events],
        [_spell(content, memo) for content in contents],
    )
    word_links: list[_Link] = []
    for gap in _find_gaps(equal_links, text_positions, candidates):
        word_links += _link_by_words(events, contents, gap)

    links = sorted([*equal_links, *word_links])
    order_links: list[_Link] = []
    for gap in _find_gaps(links, text_positions, candidates):
        order_links += _link_by_order(gap)

    # A plugin changes words, but not the role. So links with another role are wrong.
    return {
        index: events[position]
        for position, index in [*word_links, *order_links]
        if index in changed_indexes and contents[index].role == roles[position]
    }


def _have_all(
    contents: Sequence[types.Content], wanted: Sequence[types.Content | None]
) -> bool:
    """Whether contents have each text and file of the wanted ones at least as often."""
    surplus_counts: Counter[Hashable] = Counter()
    for content in contents:
        surplus_counts.update(keys_of(content))
    for wanted_content in wanted:
        surplus_counts.subtract(keys_of(wanted_content))
    # The count of a text or file that is missing is negative now.
    return min(surplus_counts.values(), default=0) >= 0


def _without_inserted(
    contents: Sequence[types.Content],
    text_indexes: Sequence[int],
    invocation: InvocationContext,
) -> list[int]:
    """Returns the indexes of texts, except the texts that ADK inserts without an event.

    ADK inserts the task of an isolated agent as the first content, and moves
    instructions among the contents.
    """
    # ADK before 2.0 has no isolation scopes.
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


def _link_equal(
    event_fingerprints: Sequence[bytes], content_fingerprints: Sequence[bytes]
) -> list[_Link]:
    """Links as many equal events and contents as possible without a change of order.

    A fingerprint counts only if as many events as contents have it. Then the first
    event belongs to the first content, and so on.
    """
    event_counts = Counter(event_fingerprints)
    content_counts = Counter(content_fingerprints)
    unlinked_indexes = defaultdict[bytes, deque[int]](deque)
    for index, content_fingerprint in enumerate(content_fingerprints):
        unlinked_indexes[content_fingerprint].append(index)

    links = []
    for position, event_fingerprint in enumerate(event_fingerprints):
        if event_counts[event_fingerprint] == content_counts[event_fingerprint]:
            index = unlinked_indexes[event_fingerprint].popleft()
            links.append(_Link(position, index))
    return _longest_rising(links)


class _Chain(NamedTuple):
    """Links with rising content indexes: the last link, and the chain before it."""

    last: _Link
    before: _Chain | None


def _longest_rising(links: Sequence[_Link]) -> list[_Link]:
    """Selects as many links as possible, so that their content indexes rise.

    For example, of links with the content indexes 0, 5, 1, 2 the links with 0, 1, 2 are
    returned. The algorithm is patience sorting.

    Args:
        links: Links in the order of their events.
    """
    # Of all chains of n + 1 links, `chains[n]` is the one whose last content index is
    # smallest: it is the easiest to extend. `last_indexes` has these last indexes.
    chains: list[_Chain] = []
    last_indexes: list[int] = []
    for link in links:
        # The link extends the longest chain that ends with a smaller index. The result
        # is the best chain of its length, because the next chain ends no earlier.
        chain_number = bisect_left(last_indexes, link.content_index)
        extended = chains[chain_number - 1] if chain_number > 0 else None
        chain = _Chain(link, extended)

        if chain_number == len(chains):
            chains.append(chain)
            last_indexes.append(link.content_index)
        else:
            chains[chain_number] = chain
            last_indexes[chain_number] = link.content_index

    newest_first = []
    rest = chains[-1] if chains else None
    while rest is not None:
        newest_first.append(rest.last)
        rest = rest.before
    return newest_first[::-1]


class _Gap(NamedTuple):
    """The events and the contents without a link between two neighboring links.

    Attributes:
        positions: The positions of the events.
        indexes: The indexes of the contents.
    """

    positions: Sequence[int]
    indexes: Sequence[int]


def _find_gaps(
    links: Sequence[_Link], text_positions: Sequence[int], candidates: Sequence[int]
) -> Iterator[_Gap]:
    """Yields the gaps between links in which there are events as well as contents.

    There may also be a gap before the first link, and after the last one.

    Args:
        links: The links, in order.
        text_positions: The positions of the events with a text, in order.
        candidates: The indexes of the contents that may belong to them, in order.
    """
    before_all = _Link(-1, -1)
    after_all = _Link(sys.maxsize, sys.maxsize)
    for before, after in itertools.pairwise([before_all, *links, after_all]):
        positions = _between(
            text_positions, before.event_position, after.event_position
        )
        indexes = _between(candidates, before.content_index, after.content_index)
        if positions and indexes:
            yield _Gap(positions, indexes)


def _between(numbers: Sequence[int], low: int, high: int) -> Sequence[int]:
    """Returns the numbers above `low` and below `high`; `numbers` are in order."""
    start = bisect_right(numbers, low)
    end = bisect_left(numbers, high)
    return numbers[start:end]


def _link_by_words(
    events: Sequence[Event], contents: Sequence[types.Content], gap: _Gap
) -> Iterator[_Link]:
    """Links events of a gap, in order, with the contents that are most like them.

    An event that is like no content gets no link.
    """
    content_traits = [_Traits(contents[index]) for index in gap.indexes]
    spare_contents = max(0, len(gap.indexes) - len(gap.positions))
    spare_events = max(0, len(gap.positions) - len(gap.indexes))

    # Events and contents are numbered from the beginning of the gap. With equal counts,
    # event 3 belongs to content 3. With spare contents it may belong to a later one,
    # and with spare events, which have no content, to an earlier one.
    next_number = 0
    for event_number, position in enumerate(gap.positions):
        first_number = max(next_number, event_number - spare_events)
        last_number = event_number + spare_contents
        compared = content_traits[first_number : last_number + 1][:_MAX_MOVED]

        event_traits = _Traits(events[position].content)
        offset = event_traits.find_most_alike(compared)
        if offset is not None:
            content_number = first_number + offset
            yield _Link(position, gap.indexes[content_number])
            next_number = content_number + 1


def _link_by_order(gap: _Gap) -> list[_Link]:
    """Links the events of a gap with its contents in order; [] if the counts differ."""
    if len(gap.positions) != len(gap.indexes):
        return []
    return [
        _Link(position, index)
        for position, index in zip(gap.positions, gap.indexes, strict=True)
    ]


class _Traits:
    """The words, texts and files of a content, which tell it from other contents."""

    def __init__(self, content: types.Content | None) -> None:
        text = " ".join(words_of(part) for part in parts_of(content))[:WORDS_CHARS]
        self._words = frozenset(_WORD.findall(text.lower()))
        self._keys = set(keys_of(content))

    def find_most_alike(self, others: Sequence[_Traits]) -> int | None:
        """Returns the position in `others` of the content that is most like this one.

        None if no content is like this one. Of equally alike contents, the first.
        """
        likenesses = [self._measure_likeness(other) for other in others]
        highest = max(likenesses, default=0.0)
        return likenesses.index(highest) if highest > 0 else None

    def _measure_likeness(self, other: _Traits) -> float:
        """Returns how alike two contents are.

        - 1.0 if they have a text or a file in common.
        - 0.0 if they have so few words in common that this may be chance.
        - Otherwise the number of common words, divided by the number of words of both
          contents: from 0.05 to 0.5.
        """
        if not self._keys.isdisjoint(other._keys):
            return 1.0

        common_count = len(self._words & other._words)
        fewer_count = min(len(self._words), len(other._words))
        total_count = len(self._words) + len(other._words)

        # Any long text has a few given words by chance. So the contents must have more
        # than half of the words of the shorter one in common, and 5 % of all words.
        has_most_words = 2 * common_count > fewer_count
        has_enough_words = 20 * common_count >= total_count
        is_alike = has_most_words and has_enough_words
        return common_count / total_count if is_alike else 0.0
