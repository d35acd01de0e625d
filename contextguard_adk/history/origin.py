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
    Sequence,
)
from typing import TYPE_CHECKING

from google.genai import types

from contextguard_adk.history.coverage import align_in_order
from contextguard_adk.history.pairs import (
    content_text,
    has_tool,
    is_relay,
    media_parts,
    parts_of,
)

if TYPE_CHECKING:
    from google.adk.agents.invocation_context import InvocationContext
    from google.adk.events.event import Event

INTERNAL_CALLS = frozenset(
    {"adk_request_credential", "adk_request_confirmation", "adk_framework"}
)
"""Calls of ADK itself; no agent is shown them."""

_WORD = re.compile(r"\w+")
_WORDS_CHARS = 4_000
_MAX_MOVED = 64  # Looking further would be quadratic.
_END = 1 << 62
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
            if code := _code_of(part):
                self._code.add(code)
                if part.code_execution_result:
                    self._outputs.add(code)

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
        return bool(payload and payload in self._payloads) or any(
            _is_fenced(code, part.text or "") for code in self._code
        )

    def is_unchanged(self, content: types.Content) -> bool:
        """Returns whether all that a content says is as ADK would spell it."""
        said = (part for part in parts_of(content) if _payload_of(part))
        return all(map(self.holds, said)) or self.relays(content)

    def relays(self, content: types.Content) -> bool:
        """Returns whether the content is ADK's rendering of another agent's event."""
        # A user can type its prefix, but its parts name an author of the session.
        texts = [part.text for part in parts_of(content) if part.text]
        openings = tuple(f"[{author}] " for author in self._authors)
        return is_relay(content) and any(t.startswith(openings) for t in texts[1:])

    def is_output(self, content: types.Content) -> bool:
        """Returns whether a text is what ADK makes of the output of executed code."""
        text = content_text(content)
        if text in self._user_texts:  # The user may quote one.
            return False
        return any(_is_fenced(output, text) for output in self._outputs)


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
    roles = [_role_of(event, invocation) for event in events]
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
        text = " ".join(map(_words_of, parts_of(content)))[:_WORDS_CHARS]
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


def _words_of(part: types.Part) -> str:
    """What ADK tells of a part as text."""
    call, result = part.function_call, part.function_response
    if call or result:
        tool = (call and call.args) or (result and result.response)
        return str(tool)[:_WORDS_CHARS]
    return (not part.thought and part.text) or _code_of(part)


def find_shown_events(invocation: InvocationContext) -> list[Event]:
    """Finds the events that ADK shows to an invocation's agent, oldest first."""
    standing = without_rewound(invocation.session.events)
    spans = compacted_spans(standing)
    events = [
        event
        for event in standing
        if event.content
        and event.content.parts
        and not is_within(event.timestamp, spans)
        and is_visible(event, invocation)
    ]
    if _is_without_contents(invocation):
        starts = (i for i, event in enumerate(events) if _is_start(event, invocation))
        events = events[max(starts, default=len(events)) :]
    return events


def compacted_spans(events: Iterable[Event]) -> list[tuple[float, float]]:
    """The times for which ADK's own summaries stand, apart from each other, ordered."""
    compactions = [event.actions.compaction for event in events if event.actions]
    spans: list[tuple[float, float]] = []
    for start, end in sorted(
        (c.start_timestamp, c.end_timestamp) for c in compactions if c
    ):
        if spans and start <= spans[-1][1]:
            start, last = spans.pop()
            end = max(end, last)
        spans.append((start, end))
    return spans


def is_within(seconds: float, spans: Sequence[tuple[float, float]]) -> bool:
    """Whether a time is in one of these spans."""
    place = bisect_right(spans, seconds, key=lambda span: span[0])
    return place > 0 and seconds <= spans[place - 1][1]


def name_run(invocation: InvocationContext) -> list[str]:
    """Names what ADK shows an agent that does not see what it did before; else []."""
    path = getattr(invocation, "node_path", None) or ""
    if _is_without_contents(invocation):
        # In a loop it may start several times within one invocation.
        newest = reversed(without_rewound(invocation.session.events))
        starts = (e.id for e in newest if _is_start(e, invocation))
        return [path, next(starts, invocation.invocation_id)]
    return [path] if _is_single_turn(invocation) else []


def _is_without_contents(invocation: InvocationContext) -> bool:
    return getattr(invocation.agent, "include_contents", "default") == "none"


def _is_single_turn(invocation: InvocationContext) -> bool:
    return getattr(invocation.agent, "mode", None) == "single_turn"


def is_visible(event: Event, invocation: InvocationContext) -> bool:
    """Whether ADK would show an event to the agent of an invocation."""
    scopes = {getattr(item, "isolation_scope", None) for item in (event, invocation)}
    if len(scopes) > 1:
        return False
    branch = invocation.branch
    if branch and event.branch and not f"{branch}.".startswith(f"{event.branch}."):
        return False
    responses = event.get_function_responses()
    path = getattr(getattr(event, "node_info", None), "path", None) or ""
    own = getattr(invocation, "node_path", None) or ""
    if event.author == "user" and not responses and path not in ("", own):
        return False
    if _is_single_turn(invocation) and own and path:
        shorter, longer = sorted((path, own), key=len)
        if not f"{longer}/".startswith(f"{shorter}/"):  # Another node's.
            return False
    names = {call.name for call in event.get_function_calls()}
    names |= {response.name for response in responses}
    return names.isdisjoint(INTERNAL_CALLS)


def _role_of(event: Event, invocation: InvocationContext) -> str:
    """The role under which ADK shows an event as a text; "" where it does not."""
    parts = parts_of(event.content)
    has_text = any(map(_words_of, parts))
    if event.author == _name_of(invocation):
        is_output = len(parts) == 1 and parts[0].code_execution_result
        is_shown = has_text and not event.get_function_calls()
        return ("user" if is_output else "model") if is_shown else ""
    if event.author == "user" and event.get_function_responses():
        return ""
    return "user" if has_text or media_parts(event.content) else ""


def _name_of(invocation: InvocationContext) -> str:
    return invocation.agent.name if invocation.agent else ""


def _is_start(event: Event, invocation: InvocationContext) -> bool:
    """Whether `include_contents="none"` lets the history begin with an event."""
    if event.author == _name_of(invocation) or _role_of(event, invocation) != "user":
        return False
    calls = event.get_function_calls()
    is_transfer = any(call.name == "transfer_to_agent" for call in calls)
    is_transfer |= bool(event.actions and event.actions.transfer_to_agent)
    return not is_transfer and is_visible(event, invocation)


def without_rewound(events: Sequence[Event]) -> list[Event]:
    """Leaves out the events that a rewind took back, and the rewinds themselves."""
    kept: list[Event] = []
    end = len(events)
    while end:
        end -= 1
        event = events[end]
        if target := event.actions and event.actions.rewind_before_invocation_id:
            first = (i for i in range(end) if events[i].invocation_id == target)
            end = next(first, end)
        else:
            kept.append(event)
    return kept[::-1]


def _payload_of(part: types.Part) -> Hashable:
    """What tells this part from others; None or "" for calls, results and nothing."""
    if part.text or part.function_call or part.function_response:
        return part.text
    if part.inline_data:
        return part.inline_data.data
    if part.file_data and part.file_data.file_uri:
        return "file", part.file_data.file_uri
    code = _code_of(part)
    return ("code", code) if code else None


def _payloads_of(content: types.Content | None) -> list[Hashable]:
    return [payload for part in parts_of(content) if (payload := _payload_of(part))]


def _code_of(part: types.Part) -> str:
    """The code that a part runs, or the output of code; "" for neither."""
    if part.executable_code:
        return part.executable_code.code or ""
    return (part.code_execution_result and part.code_execution_result.output) or ""


def _is_fenced(code: str, text: str) -> bool:
    """Returns whether a text is what ADK makes of executed code, or of its output."""
    if len(text) - len(code) > 64:
        return False
    # Short code may stand in any text by chance: each fence must be a word of its own.
    before, found, after = text.rpartition(code)
    return bool(found) and len(before.split()) == len(after.split()) == 1
