"""Finds the events of contents whose texts another plugin has rewritten.

An event position is a position among the events that ADK shows the agent. A content
index is a position among the contents of the request. A link has one of each: ADK has
made the content with this index from the event at this position.
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

_MAX_COMPARED = 64
"""An event is compared by its words with at most this many contents.

If each event was compared with all contents, the time would be quadratic.
"""


class _Link(NamedTuple):
    """The position of an event, and the index of the content made from this event."""

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

    Links are made in three steps:

    1. Events and contents that are equal are linked.
    2. Between two neighboring links, each other event is linked with the content that
       is most like the event by its words.
    3. If there are still events and contents without a link between two neighboring
       links, and as many events as contents, they are linked in their order.

    Args:
        contents: The contents of the request.
        text_indexes: The indexes of the contents that may come from an event with a
            text, in order.
        changed_indexes: Those of `text_indexes` whose content no event has in this
            form. Another plugin has changed the content, or ADK or a plugin has
            inserted the content.
        invocation: The run, whose session has the events.
        memo: Remembers fingerprints.

    Returns:
        The events that were found, by the index of the changed content.
    """
    events = find_shown_events(invocation)
    roles = [role_of(event, invocation) for event in events]
    # The role is "" for an event from which ADK makes no text.
    text_positions = [position for position, role in enumerate(roles) if role]

    # If each event has an unchanged content, then no event is left for the changed
    # contents: all of them are inserted.
    unchanged = [contents[i] for i in text_indexes if i not in changed_indexes]
    if _have_all(unchanged, [events[position].content for position in text_positions]):
        return {}

    candidates = _without_inserted(contents, text_indexes, invocation)
    equal_links = _link_equal(
        [_fingerprint(event.content or types.Content(), memo) for event in events],
        [_fingerprint(content, memo) for content in contents],
    )
    word_links: list[_Link] = []
    for gap in _find_gaps(equal_links, text_positions, candidates):
        word_links += _link_by_words(events, contents, gap)

    links = sorted([*equal_links, *word_links])
    order_links: list[_Link] = []
    for gap in _find_gaps(links, text_positions, candidates):
        order_links += _link_by_order(gap)

    # A plugin changes words, but not the role. So a link between two roles is wrong.
    return {
        index: events[position]
        for position, index in [*word_links, *order_links]
        if index in changed_indexes and contents[index].role == roles[position]
    }


def _have_all(
    contents: Sequence[types.Content], wanted: Sequence[types.Content | None]
) -> bool:
    """Whether the contents have all texts and files of the wanted contents.

    A text that the wanted contents have twice must be there at least twice.
    """
    surplus_counts: Counter[Hashable] = Counter()
    for content in contents:
        surplus_counts.update(keys_of(content))
    for wanted_content in wanted:
        surplus_counts.subtract(keys_of(wanted_content))
    # A text or file that is missing has a negative count now.
    return min(surplus_counts.values(), default=0) >= 0


def _without_inserted(
    contents: Sequence[types.Content],
    text_indexes: Sequence[int],
    invocation: InvocationContext,
) -> list[int]:
    """Returns `text_indexes` without the texts that ADK inserts without an event.

    ADK inserts the task of an isolated agent as the first content. It also moves some
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


def _fingerprint(content: types.Content, memo: Memo) -> bytes:
    return memo.remember(fingerprint, content, content.parts or (), content.role)


def _link_equal(
    event_fingerprints: Sequence[bytes], content_fingerprints: Sequence[bytes]
) -> list[_Link]:
    """Links as many equal events and contents as possible without a change of order.

    Only fingerprints are used that as many events as contents have. The first of these
    events then belongs to the first of these contents, and so on. With another
    fingerprint it is not known which event belongs to which content.
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
    """Links with rising content indexes.

    Attributes:
        last: The last link.
        before: The links before the last one; None for a chain of one link.
    """

    last: _Link
    before: _Chain | None


def _longest_rising(links: Sequence[_Link]) -> list[_Link]:
    """Returns as many of the links as possible, in order, with rising content indexes.

    For example, of links with the content indexes 0, 5, 1, 2 the links with 0, 1, 2 are
    returned. The algorithm finds a longest increasing subsequence by patience sorting.

    Args:
        links: Links in the order of their events; no two have the same content index.
    """
    # `chains[n]` is a chain of n + 1 of the links read so far. Of all such chains, it
    # ends with the smallest content index, so most later links can follow it. A longer
    # chain ends with a larger index, so `chains` is sorted. In the example, the chains
    # end with: [0] -> [0, 5] -> [0, 1] -> [0, 1, 2].
    chains: list[_Chain] = []
    for link in links:
        # The link can follow a chain that ends with a smaller index. These are the
        # first `followed_count` chains, because `chains` is sorted. The last of them is
        # the longest. The new chain is this longest chain with the link at its end, or
        # the link alone if no chain ends with a smaller index.
        #
        # The new chain has `followed_count` + 1 links, so its place is
        # `chains[followed_count]`. If there is a chain at this place, it ends with a
        # larger index, so the new chain replaces it.
        followed_count = bisect_left(
            chains, link.content_index, key=lambda chain: chain.last.content_index
        )
        longest_followed = chains[followed_count - 1] if followed_count > 0 else None
        new_chain = _Chain(link, longest_followed)
        if followed_count < len(chains):
            chains[followed_count] = new_chain
        else:
            chains.append(new_chain)

    last_first = []
    rest = chains[-1] if chains else None
    while rest is not None:
        last_first.append(rest.last)
        rest = rest.before
    return last_first[::-1]


class _Gap(NamedTuple):
    """The events and the contents that stand between two neighboring links.

    None of them has a link.

    Attributes:
        positions: The positions of the events, in order; at least one.
        indexes: The indexes of the contents, in order; at least one.
    """

    positions: Sequence[int]
    indexes: Sequence[int]


def _find_gaps(
    links: Sequence[_Link], text_positions: Sequence[int], candidates: Sequence[int]
) -> Iterator[_Gap]:
    """Yields the gaps between links that have both events and contents.

    There may also be a gap before the first link, and one after the last link.

    Args:
        links: The links, in order.
        text_positions: The positions of the events with a text, in order.
        candidates: The indexes of the contents that may belong to these events, in
            order.
    """
    # With these two links, each gap is between two links.
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
    """Returns the numbers above `low` and below `high`; `numbers` are sorted."""
    start = bisect_right(numbers, low)
    end = bisect_left(numbers, high)
    return numbers[start:end]


def _link_by_words(
    events: Sequence[Event], contents: Sequence[types.Content], gap: _Gap
) -> Iterator[_Link]:
    """Links each event of a gap with the content that is most like the event.

    The links are in the order of events as well as of contents. An event gets no link
    if no content that it may belong to is like the event.
    """
    content_traits = [_Traits(contents[index]) for index in gap.indexes]
    more_contents_count = max(0, len(gap.indexes) - len(gap.positions))
    more_events_count = max(0, len(gap.positions) - len(gap.indexes))

    # Events and contents are numbered from the beginning of the gap. Event 3 belongs to
    # content 3 if there are as many contents as events. If there are two contents more,
    # two are inserted, and event 3 belongs to content 3, 4 or 5. If there are two
    # events more, two have no content, and event 3 belongs to content 1, 2, 3 or none.
    first_free_number = 0
    for event_number, position in enumerate(gap.positions):
        first_number = max(first_free_number, event_number - more_events_count)
        last_number = event_number + more_contents_count
        # If content `last_number` is linked already, `first_number` is larger, and
        # nothing is possible.
        possible = content_traits[first_number : last_number + 1]

        event_traits = _Traits(events[position].content)
        offset = event_traits.find_most_alike(possible[:_MAX_COMPARED])
        if offset is not None:
            content_number = first_number + offset
            yield _Link(position, gap.indexes[content_number])
            # The next events come later, so their contents do, too.
            first_free_number = content_number + 1


def _link_by_order(gap: _Gap) -> list[_Link]:
    """Links the events of a gap with its contents in order.

    Returns [] if the counts differ: then any event may belong to any content.
    """
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

        Of equally alike contents, the first is chosen. Returns None if no content is
        like this one.
        """
        likenesses = [self._measure_likeness(other) for other in others]
        highest = max(likenesses, default=0.0)
        return likenesses.index(highest) if highest > 0 else None

    def _measure_likeness(self, other: _Traits) -> float:
        """Returns how alike two contents are.

        - 1.0 if they have a text or a file in common.
        - 0.0 if they have so few words in common that this may be chance.
        - Otherwise the number of common words, divided by the sum of both contents'
          numbers of words: from 0.05 to 0.5.
        """
        if not self._keys.isdisjoint(other._keys):
            return 1.0

        common_count = len(self._words & other._words)
        fewer_count = min(len(self._words), len(other._words))
        total_count = len(self._words) + len(other._words)

        # Two contents may have a few words in common by chance. So more than half of
        # the words of the content with fewer words must be common. A long text has most
        # words of a very short text by chance. So 5 % of all words must be common, too.
        has_most_words = 2 * common_count > fewer_count
        has_enough_words = 20 * common_count >= total_count
        is_alike = has_most_words and has_enough_words
        return common_count / total_count if is_alike else 0.0
