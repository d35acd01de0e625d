"""Where a request's contents come from: the session's events that stand behind them."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING

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
from contextguard_adk._history.fingerprints import align_in_order

if TYPE_CHECKING:
    from google.adk.agents.invocation_context import InvocationContext
    from google.adk.events.event import Event

_WORD = re.compile(r"\w+")
_MAX_MOVED = 64  # Looking further would be quadratic.
_END = 1 << 62
_MAX_FENCE_CHARS = 64
_INSTRUCTION_BEGIN = "<<<BEGIN_SYSTEM_INSTRUCTION>>>"


def find_history(
    contents: Sequence[types.Content],
    index: EventIndex,
    transient: Sequence[types.Content] = (),
) -> list[int]:
    """Returns the indexes of the contents whose very words an event has."""

    def is_history(content: types.Content) -> bool:
        # What ADK inserts for one request is the user's and never speaks of tools.
        # Other plugins may rewrite what the model said: it needs no event.
        is_said = content.role == "model" or has_tool(content) or index.relays(content)
        is_transient = content in transient
        return (is_said and not is_transient) or any(
            map(index.holds, parts_of(content))
        )

    return [place for place, content in enumerate(contents) if is_history(content)]


class EventIndex:
    """The payloads of the session's events, for look-ups by value."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._payloads: set[Hashable] = set()
        self._user_texts: set[str] = set()
        # By their length: only those of about a text's length can be fenced in it.
        self._code: dict[int, set[str]] = {}
        self._outputs: dict[int, set[str]] = {}
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
            if code := code_of(part):
                self._code.setdefault(len(code), set()).add(code)
                if part.code_execution_result:
                    self._outputs.setdefault(len(code), set()).add(code)

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
        return bool(payload and payload in self._payloads) or _is_any_fenced(
            self._code, part.text or ""
        )

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
        text = content_text(content)
        # The user may quote one.
        return text not in self._user_texts and _is_any_fenced(self._outputs, text)

    @property
    def has_outputs(self) -> bool:
        """Whether any event holds the output of executed code."""
        return bool(self._outputs)


def find_rewritten(
    contents: Sequence[types.Content],
    candidates: Sequence[int],
    changed: Collection[int],
    invocation: InvocationContext,
    spell: Callable[[types.Content], bytes],
) -> dict[int, Event]:
    """Finds the events behind the candidates that another plugin has changed.

    A text stands where its event stood, between neighbors that were left as
    they are. There it has most words in common with its event, or there are as many
    contents as events.
    """
    events = find_shown_events(invocation)
    roles = [role_of(event, invocation) for event in events]
    told = [i for i, role in enumerate(roles) if role]
    known = (contents[i] for i in candidates if i not in changed)
    spare = Counter(itertools.chain.from_iterable(map(_payloads_of, known)))
    spare.subtract(p for i in told for p in _payloads_of(events[i].content))
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
    links = align_in_order(spelled, [spell(content) for content in contents])
    alike = [
        pair
        for gap in _find_gaps(links, told, open_contents)
        for pair in _match_words(events, contents, *gap)
    ]
    links = sorted([*links, *alike])
    for left, right in _find_gaps(links, told, open_contents):
        if len(left) == len(right):
            alike += zip(left, right, strict=True)
    return {
        right: events[left]
        for left, right in alike
        if right in changed and contents[right].role == roles[left]
    }


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
        self._payloads = {*_payloads_of(content)}
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


def _payloads_of(content: types.Content | None) -> list[Hashable]:
    return [payload for part in parts_of(content) if (payload := _payload_of(part))]


def _is_any_fenced(codes: Mapping[int, Collection[str]], text: str) -> bool:
    """Returns whether a text is what ADK makes of executed code, or of its output."""
    lengths = range(len(text) - _MAX_FENCE_CHARS, len(text)) if codes else ()
    near = (code for length in lengths for code in codes.get(length, ()))
    # Short code may stand in any text by chance: each fence must be a word of its own.
    splits = (text.rpartition(code) for code in near)
    return any(
        found and len(before.split()) == len(after.split()) == 1
        for before, found, after in splits
    )
