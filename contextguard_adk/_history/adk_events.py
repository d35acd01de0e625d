"""Which events ADK shows an agent, and as what."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.genai import types

from contextguard_adk._history.contents import media_parts, parts_of, payload_of

INTERNAL_CALLS = frozenset(
    {"adk_request_credential", "adk_request_confirmation", "adk_framework"}
)
"""Calls of ADK itself, some with credentials; no agent is shown them."""

RECALL_TOOL = "recall_history"
"""The guard's own tool, whose results are copies of compacted history."""

WORDS_CHARS = 4_000  # Of a text, to tell it by its words.


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


@dataclass(frozen=True)
class Calls:
    """The calls of some events, by id; of those that are open also what was called."""

    ids: frozenset[str]
    open: dict[str, types.Part]


def find_calls(
    events: Iterable[Event], is_own: Callable[[Event], bool] = lambda event: True
) -> Calls:
    """Finds the calls in own events, and those that none answers, oldest first."""
    ids = set[str]()
    waiting: dict[str, types.Part] = {}
    for event in events:
        for part in parts_of(event.content):
            call = part.function_call
            response = part.function_response

            is_call = call and call.id and call.name not in INTERNAL_CALLS
            if call and call.id and is_call and is_own(event):
                ids.add(call.id)
                waiting.pop(call.id, None)  # Some models use an id again.
                waiting[call.id] = part
            elif response and response.id:
                waiting.pop(response.id, None)
    return Calls(frozenset(ids), waiting)


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


def role_of(event: Event, invocation: InvocationContext) -> str:
    """The role under which ADK shows an event as a text; "" where it does not."""
    parts = parts_of(event.content)
    has_text = any(map(words_of, parts))
    if event.author == getattr(invocation.agent, "name", ""):
        is_output = len(parts) == 1 and parts[0].code_execution_result
        is_shown = has_text and not event.get_function_calls()
        return ("user" if is_output else "model") if is_shown else ""
    if event.author == "user" and event.get_function_responses():
        return ""
    return "user" if has_text or media_parts(event.content) else ""


def _is_start(event: Event, invocation: InvocationContext) -> bool:
    """Whether `include_contents="none"` lets the history begin with an event."""
    is_own = event.author == getattr(invocation.agent, "name", "")
    if is_own or role_of(event, invocation) != "user":
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


def words_of(part: types.Part) -> str:
    """What ADK tells of a part as text."""
    if part.function_call or part.function_response:
        return str(payload_of(part))[:WORDS_CHARS]
    return (not part.thought and part.text) or code_of(part)


def code_of(part: types.Part) -> str:
    """The code that a part runs, or the output of code; "" for neither."""
    if part.executable_code:
        return part.executable_code.code or ""
    return (part.code_execution_result and part.code_execution_result.output) or ""
