"""What a summary covers beyond the contents whose fingerprints it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from google.adk.events.event import Event
from google.genai import types

from contextguard_adk._history.adk_events import without_rewound
from contextguard_adk._history.contents import parts_of
from contextguard_adk._history.fingerprints import Covered, align_covered, handle_of
from contextguard_adk._history.stored import StoredSummary


def find_last_event(
    events: Sequence[Event],
    told: Iterable[tuple[bytes, bool]],
    spell: Callable[[types.Content], bytes],
) -> str:
    """Finds the event of the newest content that is covered; "" where it is not known.

    `told` has the fingerprints, newest first, and whether each is covered: many say the
    same, but in order.
    """
    end = len(events)
    for wanted, is_covered in told:
        for place in range(end - 1, max(-1, end - 64), -1):
            content = events[place].content
            if content and spell(content) == wanted:
                end = place
                if is_covered:
                    return events[place].id
                break
    return ""


def find_covered(
    covered: Covered,
    prints: Sequence[bytes],
    contents: Sequence[types.Content],
    events: Sequence[Event],
    stored: StoredSummary | None,
) -> list[tuple[int, int]]:
    """Pairs what is covered with places of contents, whose fingerprints are `prints`.

    Where a session is loaded in part, or has changed, no digest tells of the oldest.
    All before the first pair is taken for them, but what an event behind the last one
    that is covered says: a late result stands in the place of the first one. While it
    is the newest event, ADK shows none between the call and it: no pair may be left.
    """
    pairs = align_covered(covered, prints)
    has_older = stored is not None and (stored.has_older or covered.older_count > 0)
    standing = without_rewound(events) if has_older else []
    last_event = stored.last_event if stored else ""
    last = next((i for i, event in enumerate(standing) if event.id == last_event), None)
    if last is None or (pairs and pairs[0][0] < covered.older_count):
        return pairs
    place, end = pairs[0] if pairs else (len(contents), len(contents))
    newer = Counter(handle for e in standing[last + 1 :] for handle in _handles(e))
    behind = contents[pairs[-1][1] + 1 :] if pairs else ()
    newer.subtract(handle_of(part) for each in behind for part in parts_of(each))
    gaps = covered.gaps >> max(0, place + covered.gaps.bit_count() - end)
    older = [
        index
        for index in range(end)
        if prints[index]
        and not gaps >> index & 1
        and all(newer[handle_of(part)] <= 0 for part in parts_of(contents[index]))
    ]
    start = max(0, covered.older_count - len(older))
    return [*enumerate(older, start), *pairs]


def _handles(event: Event) -> Iterator[str]:
    yield from map(handle_of, parts_of(event.content))
    if event.actions and (made := event.actions.compaction):
        yield from map(handle_of, parts_of(made.compacted_content))
