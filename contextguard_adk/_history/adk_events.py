"""Which events ADK shows an agent, and the role and the text that ADK gives them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    """Finds the events that ADK shows to an invocation's agent, oldest first.

    With `include_contents="none"` these are the events since the agent's run began.
    """
    valid_events = without_rewound(invocation.session.events)
    spans = compacted_spans(valid_events)
    events = [
        event
        for event in valid_events
        if event.content
        and event.content.parts
        and not is_within(event.timestamp, spans)
        and is_visible(event, invocation)
    ]
    if getattr(invocation.agent, "include_contents", "default") != "none":
        return events

    starts = [i for i, event in enumerate(events) if _is_start(event, invocation)]
    return events[starts[-1] :] if starts else []


class Span(NamedTuple):
    """A span of time, in seconds since 1970; both ends are part of it."""

    start: float
    end: float


def compacted_spans(events: Iterable[Event]) -> list[Span]:
    """Returns the spans of time whose events ADK's own summaries replace.

    Overlapping spans are joined, and the spans are in order.
    """
    compactions = [event.actions.compaction for event in events if event.actions]
    overlapping = [(c.start_timestamp, c.end_timestamp) for c in compactions if c]

    joined: list[Span] = []
    for start, end in sorted(overlapping):
        if joined and start <= joined[-1].end:
            previous = joined.pop()
            joined.append(Span(previous.start, max(previous.end, end)))
        else:
            joined.append(Span(start, end))
    return joined


def is_within(seconds: float, spans: Sequence[Span]) -> bool:
    """Whether a time is in one of the spans of `compacted_spans`."""
    started_count = bisect_right(spans, seconds, key=lambda span: span.start)
    return started_count > 0 and seconds <= spans[started_count - 1].end


@dataclass(frozen=True)
class Calls:
    """The tool calls of an agent.

    Attributes:
        ids: The ids of all calls.
        open: The parts of the calls without a result, by the call's id.
    """

    ids: frozenset[str]
    open: dict[str, types.Part]


def find_calls(events: Iterable[Event], invocation: InvocationContext | None) -> Calls:
    """Finds the calls of an invocation's agent; of all agents without an invocation.

    The oldest open call is the first one.
    """
    ids = set[str]()
    open_calls: dict[str, types.Part] = {}
    for event in events:
        for part in parts_of(event.content):
            call = part.function_call
            response = part.function_response

            if call and call.id and _is_call_of_agent(call, event, invocation):
                ids.add(call.id)
                # Some models use an id again: then the call takes the last place.
                open_calls.pop(call.id, None)
                open_calls[call.id] = part
            elif response and response.id:
                open_calls.pop(response.id, None)
    return Calls(frozenset(ids), open_calls)


def _is_call_of_agent(
    call: types.FunctionCall, event: Event, invocation: InvocationContext | None
) -> bool:
    """Whether the agent of an invocation has made a call, and is shown it.

    Without an invocation the agent is unknown, so the calls of all agents count. ADK's
    internal calls never count.
    """
    if call.name in INTERNAL_CALLS:
        return False
    if invocation is None:
        return True
    return _is_own(event, invocation) and is_visible(event, invocation)


def _is_own(event: Event, invocation: InvocationContext) -> bool:
    return event.author == getattr(invocation.agent, "name", "")


def find_node_input(invocation: InvocationContext | None) -> types.Content | None:
    """Finds the input that a workflow gave to this agent's node.

    ADK shows the input beside the user's message, or in place of it. Returns None in
    these cases:

    - The agent is not in a workflow.
    - This run has no input of the node.
    - The newest input is a tool's result.
    """
    own_path = getattr(invocation, "node_path", None)
    if invocation is None or not own_path:
        return None

    for event in reversed(invocation.session.events):
        # An event of an earlier run ends the search. The input of a node with a single
        # turn has no invocation id in ADK.
        if event.invocation_id not in ("", invocation.invocation_id):
            return None
        event_path = getattr(getattr(event, "node_info", None), "path", None)
        if event.author == "user" and event_path == own_path:
            return None if event.get_function_responses() else event.content
    return None


def name_run(invocation: InvocationContext) -> list[str]:
    """Names the run of an agent to which ADK does not show its earlier runs.

    - With `include_contents="none"`: the path of the agent's node, and the id of the
      event that begins the run.
    - With `mode="single_turn"`: the path of the agent's node.
    - Otherwise the agent sees its earlier runs, and the result is [].
    """
    path = getattr(invocation, "node_path", None) or ""
    if getattr(invocation.agent, "include_contents", "default") == "none":
        # In a loop the agent may start several times within one invocation.
        newest_first = reversed(without_rewound(invocation.session.events))
        start_ids = (e.id for e in newest_first if _is_start(e, invocation))
        return [path, next(start_ids, invocation.invocation_id)]

    is_single_turn = getattr(invocation.agent, "mode", None) == "single_turn"
    return [path] if is_single_turn else []


def is_visible(event: Event, invocation: InvocationContext) -> bool:
    """Whether ADK would show an event to the agent of an invocation.

    The rules are those of ADK. It hides events of another isolation scope, another
    branch or another node, and its internal calls.
    """
    event_scope = getattr(event, "isolation_scope", None)
    if event_scope != getattr(invocation, "isolation_scope", None):
        return False

    branch = invocation.branch
    if branch and event.branch and not f"{branch}.".startswith(f"{event.branch}."):
        return False

    event_path = getattr(getattr(event, "node_info", None), "path", None) or ""
    own_path = getattr(invocation, "node_path", None) or ""
    responses = event.get_function_responses()
    is_node_input = event.author == "user" and not responses
    if is_node_input and event_path not in ("", own_path):
        return False

    is_single_turn = getattr(invocation.agent, "mode", None) == "single_turn"
    if is_single_turn and own_path and event_path:
        # Only the nodes around this one and those within it are shown.
        shorter, longer = sorted((event_path, own_path), key=len)
        if not f"{longer}/".startswith(f"{shorter}/"):
            return False

    call_names = {call.name for call in event.get_function_calls()}
    result_names = {response.name for response in responses}
    return INTERNAL_CALLS.isdisjoint(call_names | result_names)


def role_of(event: Event, invocation: InvocationContext) -> str:
    """Returns the role of the text that ADK makes of an event; "" if it makes none.

    - The agent's own words: "model". The output of its code: "user".
    - A message of the user: "user".
    - Words, calls and results of other agents, which ADK renders as text: "user".
    """
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
    """Whether the history of an agent with `include_contents="none"` may begin here.

    It begins with a message of the user or another agent that is not a mere transfer.
    """
    if _is_own(event, invocation) or role_of(event, invocation) != "user":
        return False

    calls = event.get_function_calls()
    is_transfer = any(call.name == "transfer_to_agent" for call in calls)
    if is_transfer or (event.actions and event.actions.transfer_to_agent):
        return False
    return is_visible(event, invocation)


def without_rewound(events: Sequence[Event]) -> list[Event]:
    """Leaves out the events that a rewind took back, and the rewinds themselves."""
    newest_first: list[Event] = []
    place = len(events)  # Of the event that was read last, from the newest back.
    while place > 0:
        place -= 1
        event = events[place]
        target = event.actions.rewind_before_invocation_id if event.actions else None
        if target:
            # The events since the target invocation began were taken back. If it is not
            # in the session, the rewind takes nothing back.
            starts = (i for i in range(place) if events[i].invocation_id == target)
            place = next(starts, place)
        else:
            newest_first.append(event)
    return newest_first[::-1]


def words_of(part: types.Part) -> str:
    """Returns the text that ADK makes of a part; "" if it makes none.

    For a call or a result it is only roughly the text of ADK, with most of its words.
    """
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
