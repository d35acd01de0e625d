"""Finds the session's events that a request's contents come from, or once came from."""

from __future__ import annotations

import itertools
import re
import sys
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.genai import types

from contextguard_adk._history.adk_events import (
    WORDS_CHARS,
    code_of,
    find_shown_events,
    role_of,
    words_of,
)
from contextguard_adk._history.contents import (
    content_text,
    has_tool,
    is_relay,
    parts_of,
)

_WORD = re.compile(r"\w+")
_MAX_MOVED = 64  # Looking further would be quadratic.


def find_history(
    contents: Sequence[types.Content],
    index: EventIndex,
    transient: Sequence[types.Content] = (),
) -> list[int]:
    """Returns the indexes of the contents whose very words an event has."""
    found = []
    for place, content in enumerate(contents):
        # What ADK inserts for one request is the user's and never speaks of tools.
        # Other plugins may rewrite what the model said: it needs no event.
        is_said = content.role == "model" or has_tool(content) or index.relays(content)
        is_said = is_said and content not in transient
        if is_said or any(map(index.holds, parts_of(content))):
            found.append(place)
    return found


class EventIndex:
    """The payloads of the session's events, for look-ups by value."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._payloads: set[Hashable] = set()
        self._user_texts: set[str] = set()
        self._code: set[str] = set()
        self._outputs: set[str] = set()
        self._authors: set[str] = set()
        spoken = ["", ""]
        for event in events:
            self._authors.add(event.author)
            if event.content and event.content.parts:
                self._add(event.content, event.author)
                spoken = ["", ""]
            else:
                self._add_transcriptions(event, spoken)
            compaction = event.actions.compaction if event.actions else None
            if compaction and compaction.compacted_content:
                self._add(compaction.compacted_content)
                self._authors.add("model")  # ADK 2.0 names this author for it.

    def _add(self, content: types.Content, author: str = "") -> None:
        parts = parts_of(content)
        self._payloads.update(map(_payload_of, parts))
        if author == "user":
            self._user_texts.update(part.text for part in parts if part.text)
        for part in parts:
            if code := code_of(part).strip():
                (self._outputs if part.code_execution_result else self._code).add(code)

    def _add_transcriptions(self, event: Event, spoken: list[str]) -> None:
        # ADK joins what was spoken in consecutive events into one content; events
        # that say nothing do not count.
        heard = (event.input_transcription, event.output_transcription)
        if not any(heard):
            return
        for direction, transcription in enumerate(heard):
            if event.content is None and transcription and transcription.text:
                spoken[direction] += transcription.text
                self._payloads.add(spoken[direction])
            else:
                spoken[direction] = ""

    def holds(self, part: types.Part) -> bool:
        """Returns whether an event has this very payload."""
        payload = _payload_of(part)
        if payload and payload in self._payloads:
            return True
        code = _unfence(part.text or "") if self._code or self._outputs else ""
        return code in self._code or code in self._outputs

    def is_unchanged(self, content: types.Content) -> bool:
        """Returns whether all that a content says is as ADK would spell it."""
        said = (part for part in parts_of(content) if _payload_of(part))
        return all(map(self.holds, said)) or self.relays(content)

    def relays(self, content: types.Content) -> bool:
        """Returns whether the content is ADK's rendering of another agent's event."""
        if not is_relay(content):
            return False
        # A user can type its prefix, but its parts name an author of the session.
        texts = [part.text for part in parts_of(content) if part.text]
        openings = tuple(f"[{author}] " for author in self._authors)
        return any(text.startswith(openings) for text in texts[1:])

    def is_output(self, content: types.Content) -> bool:
        """Returns whether a text is what ADK makes of the output of executed code."""
        text = content_text(content) if self._outputs else ""
        # The user may quote one.
        return _unfence(text) in self._outputs and text not in self._user_texts


def _payload_of(part: types.Part) -> Hashable:
    """What tells this part from others; None or "" for calls, results and nothing."""
    if part.text or part.function_call or part.function_response:
        return part.text
    if part.inline_data:
        return part.inline_data.data
    if part.file_data and part.file_data.file_uri:
        return "file", part.file_data.file_uri
    code = code_of(part)
    return ("code", code) if code else None


def payloads_of(content: types.Content | None) -> list[Hashable]:
    return [payload for part in parts_of(content) if (payload := _payload_of(part))]


def _unfence(text: str) -> str:
    """The code, or its output, between the two words by which ADK fences it."""
    _, *rest = text.split(None, 1) or [""]
    code, *fence = rest[0].rsplit(None, 1) if rest else [""]
    return code if fence else ""


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
        and "<<<BEGIN_SYSTEM_INSTRUCTION>>>" not in content_text(contents[i])
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
    counts = Counter(left)
    wanted = Counter(right)
    places = defaultdict[bytes, deque[int]](deque)
    for place, item in enumerate(right):
        places[item].append(place)
    # For each length the chain with the lowest end, as in patience: its last pair, and
    # the chain before that.
    chains: list[Any] = [None]
    for index, item in enumerate(left):
        if counts[item] == wanted[item]:
            place = places[item].popleft()
            length = bisect_left(chains, place, 1, key=lambda chain: chain[1])
            chains[length : length + 1] = [(index, place, chains[length - 1])]
    found = []
    link = chains[-1]
    while link:
        index, place, link = link
        found.append((index, place))
    return found[::-1]


def _find_gaps(
    links: Sequence[tuple[int, int]], told: Sequence[int], open_contents: Sequence[int]
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yields the events and contents between linked neighbors, where both are."""
    for before, after in itertools.pairwise([(-1, -1), *links, (sys.maxsize,) * 2]):
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
    more = len(right) - len(left)
    start = 0
    for number, index in enumerate(left):
        said = _Traits(events[index].content)
        # Where a content stands for each event, only others push it on, or back.
        first = max(start, number + min(more, 0))
        end = number + max(more, 0) + 1
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
