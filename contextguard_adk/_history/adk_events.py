"""Which events ADK shows an agent, and as what."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
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

WORDS_CHARS = 4_000
"""How much of a text is read to recognize it by its words."""


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
    if getattr(invocation.agent, "include_contents", "default") != "none":
        return events

    starts = [i for i, event in enumerate(events) if _is_start(event, invocation)]
    return events[starts[-1] :] if starts else []


def compacted_spans(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Returns the times that ADK's own summaries stand for, joined and in order."""
    compactions = [event.actions.compaction for event in events if event.actions]
    times = [(c.start_timestamp, c.end_timestamp) for c in compactions if c]

    spans: list[tuple[float, float]] = []
    for start, end in sorted(times):
        if spans and start <= spans[-1][1]:
            first_start, last_end = spans[-1]
            spans[-1] = (first_start, max(end, last_end))
        else:
            spans.append((start, end))
    return spans


def is_within(seconds: float, spans: Sequence[tuple[float, float]]) -> bool:
    """Whether a time is in one of these spans."""
    place = bisect_right(spans, seconds, key=lambda span: span[0])
    return place > 0 and seconds <= spans[place - 1][1]


@dataclass(frozen=True)
class Calls:
    """The tool calls of an agent: the ids of all, and the open ones by their ids."""

    ids: frozenset[str]
    open: dict[str, types.Part]


def find_calls(events: Iterable[Event], invocation: InvocationContext | None) -> Calls:
    """Finds the calls of an invocation's agent, and those that no event answers.

    Without an invocation the calls of all agents count. The oldest calls stand first.
    """
    ids = set[str]()
    waiting: dict[str, types.Part] = {}
    for event in events:
        for part in parts_of(event.content):
            call = part.function_call
            response = part.function_response

            if call and call.id and _is_call_of_agent(call, event, invocation):
                ids.add(call.id)
                waiting.pop(call.id, None)  # Some models use an id again.
                waiting[call.id] = part
            elif response and response.id:
                waiting.pop(response.id, None)
    return Calls(frozenset(ids), waiting)


def _is_call_of_agent(
    call: types.FunctionCall, event: Event, invocation: InvocationContext | None
) -> bool:
    if call.name in INTERNAL_CALLS:
        return False
    if invocation is None:
        return True
    return _is_own(event, invocation) and is_visible(event, invocation)


def _is_own(event: Event, invocation: InvocationContext) -> bool:
    return event.author == getattr(invocation.agent, "name", "")


def find_node_input(invocation: InvocationContext | None) -> types.Content | None:
    """Finds the input that a workflow gave to this agent's node; None without one.

    ADK shows it beside the user's message, or in its place.
    """
    path = getattr(invocation, "node_path", None)
    if invocation is None or not path:
        return None

    for event in reversed(invocation.session.events):
        # ADK gives the input of a node with a single turn no invocation id.
        if event.invocation_id not in ("", invocation.invocation_id):
            return None
        place = getattr(getattr(event, "node_info", None), "path", None)
        if event.author == "user" and place == path:
            return None if event.get_function_responses() else event.content
    return None


def name_run(invocation: InvocationContext) -> list[str]:
    """Names the run of an agent to which ADK does not show its earlier runs.

    Returns the path of its node, and where `include_contents` is "none" also the id of
    the event that begins the run; [] for an agent that sees its earlier runs.
    """
    path = getattr(invocation, "node_path", None) or ""
    if getattr(invocation.agent, "include_contents", "default") == "none":
        # In a loop it may start several times within one invocation.
        newest = reversed(without_rewound(invocation.session.events))
        starts = (e.id for e in newest if _is_start(e, invocation))
        return [path, next(starts, invocation.invocation_id)]
    is_single_turn = getattr(invocation.agent, "mode", None) == "single_turn"
    return [path] if is_single_turn else []


def is_visible(event: Event, invocation: InvocationContext) -> bool:
    """Whether ADK would show an event to the agent of an invocation."""
    event_scope = getattr(event, "isolation_scope", None)
    if event_scope != getattr(invocation, "isolation_scope", None):
        return False

    branch = invocation.branch
    if branch and event.branch and not f"{branch}.".startswith(f"{event.branch}."):
        return False

    path = getattr(getattr(event, "node_info", None), "path", None) or ""
    own_path = getattr(invocation, "node_path", None) or ""
    responses = event.get_function_responses()
    if event.author == "user" and not responses and path not in ("", own_path):
        return False

    is_single_turn = getattr(invocation.agent, "mode", None) == "single_turn"
    if is_single_turn and own_path and path:
        shorter, longer = sorted((path, own_path), key=len)
        if not f"{longer}/".startswith(f"{shorter}/"):  # Another node's.
            return False

    call_names = {call.name for call in event.get_function_calls()}
    result_names = {response.name for response in responses}
    return INTERNAL_CALLS.isdisjoint(call_names | result_names)


def role_of(event: Event, invocation: InvocationContext) -> str:
    """Returns the role under which ADK shows an event as text; "" if it shows none."""
    parts = parts_of(event.content)
    has_text = any(words_of(part) for part in parts)

    if _is_own(event, invocation):
        if not has_text or event.get_function_calls():
            return ""
        is_output = len(parts) == 1 and parts[0].code_execution_result
        return "user" if is_output else "model"

    if event.author == "user" and event.get_function_responses():
        return ""
    return "user" if has_text or media_parts(event.content) else ""


def _is_start(event: Event, invocation: InvocationContext) -> bool:
    """Whether `include_contents="none"` lets the history begin with an event."""
    if _is_own(event, invocation) or role_of(event, invocation) != "user":
        return False

    calls = event.get_function_calls()
    is_transfer = any(call.name == "transfer_to_agent" for call in calls)
    if is_transfer or (event.actions and event.actions.transfer_to_agent):
        return False
    return is_visible(event, invocation)


def without_rewound(events: Sequence[Event]) -> list[Event]:
    """Leaves out the events that a rewind took back, and the rewinds themselves."""
    kept: list[Event] = []
    end = len(events)
    while end > 0:
        end -= 1
        event = events[end]
        target = event.actions.rewind_before_invocation_id if event.actions else None
        if target:
            # The events since this invocation began are gone.
            starts = (i for i in range(end) if events[i].invocation_id == target)
            end = next(starts, end)
        else:
            kept.append(event)
    return kept[::-1]


def words_of(part: types.Part) -> str:
    """Returns the text that ADK makes of a part; "" where it makes none."""
    if part.function_call or part.function_response:
        return str(payload_of(part))[:WORDS_CHARS]
    if part.text and not part.thought:
        return part.text
    return code_of(part)


def code_of(part: types.Part) -> str:
    """Returns the code that a part runs, or the output of code; "" for neither."""
    if part.executable_code:
        return part.executable_code.code or ""
    if part.code_execution_result:
        return part.code_execution_result.output or ""
    return ""
