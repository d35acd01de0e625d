"""Finds the events that ADK shows an agent, and the role and text that each gets.

Three terms are ADK's own:

- A branch, such as "root.writer", names an agent after its parent agents.
- A node path, such as "flow/write", names a step of a workflow.
- An isolation scope is the id of the call that gave an agent its task.

Fields that some releases or agents lack are read by `getattr`.
"""

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
"""The names of ADK's own calls. ADK shows such calls to no agent."""

COMPACT_TOOL = "compact_history"
"""The name of the tool by which an agent has its own history summarized."""

RECALL_TOOL = "recall_history"
"""The name of the guard's own tool. Its results are copies of compacted history."""

WORDS_CHARS = 4_000
"""How many characters of a text are read to recognize the text by its words."""


def find_shown_events(invocation: InvocationContext) -> list[Event]:
    """Finds the events that ADK shows to an invocation's agent, oldest first.

    With `include_contents="none"` the result begins with the newest event that may
    begin the agent's run; it is [] if there is no such event.
    """
    valid_events = without_rewound(invocation.session.events)
    # ADK shows summaries of its own in place of the events in these spans.
    spans = compacted_spans(valid_events)

    events: list[Event] = []
    for event in valid_events:
        if event.content is None or not event.content.parts:
            continue
        is_compacted = is_within(event.timestamp, spans)
        if not is_compacted and is_visible(event, invocation):
            events.append(event)

    contents_setting = getattr(invocation.agent, "include_contents", "default")
    if contents_setting != "none":
        return events
    for position in reversed(range(len(events))):
        if _is_start(events[position], invocation):
            return events[position:]
    return []


class Span(NamedTuple):
    """A span of time, in seconds since 1970; both ends are part of it."""

    start: float
    end: float


def compacted_spans(events: Iterable[Event]) -> list[Span]:
    """Returns the spans of time whose events ADK's own summaries replace.

    The spans are in order. Overlapping spans are joined: 1-5 and 4-9 become 1-9.
    """
    unjoined: list[Span] = []
    for event in events:
        compaction = event.actions.compaction if event.actions else None
        if compaction:
            unjoined.append(Span(compaction.start_timestamp, compaction.end_timestamp))

    joined: list[Span] = []
    for span in sorted(unjoined):
        if joined and span.start <= joined[-1].end:
            previous = joined.pop()
            joined.append(Span(previous.start, max(previous.end, span.end)))
        else:
            joined.append(span)
    return joined


def is_within(seconds: float, spans: Sequence[Span]) -> bool:
    """Whether a time is in one of the spans of `compacted_spans`."""
    # The spans are in order and do not overlap, so only the last span that has started
    # can hold the time.
    started_count = bisect_right(spans, seconds, key=lambda span: span.start)
    return started_count > 0 and seconds <= spans[started_count - 1].end


@dataclass(frozen=True)
class Calls:
    """The tool calls of an agent.

    Attributes:
        ids: The ids of all calls.
        open: The parts of the calls without a result, by the call's id. The call that
            was made first comes first.
    """

    ids: frozenset[str]
    open: dict[str, types.Part]


def find_calls(events: Iterable[Event], invocation: InvocationContext | None) -> Calls:
    """Finds the tool calls of an invocation's agent; leaves out calls without an id.

    A call is open until a later event has a result with the id of the call.

    Args:
        events: The events that are searched, oldest first.
        invocation: The invocation; None for the tool calls of all agents.
    """
    ids = set[str]()
    open_calls: dict[str, types.Part] = {}
    for event in events:
        for part in parts_of(event.content):
            call = part.function_call
            response = part.function_response

            if call and call.id and _is_call_of_agent(call, event, invocation):
                ids.add(call.id)
                # Some models use an id again. The old call is removed first, because
                # an assignment alone would leave the new call at the old call's place.
                open_calls.pop(call.id, None)
                open_calls[call.id] = part
            elif response and response.id:
                open_calls.pop(response.id, None)
    return Calls(frozenset(ids), open_calls)


def _is_call_of_agent(
    call: types.FunctionCall, event: Event, invocation: InvocationContext | None
) -> bool:
    """Whether a call is one that the agent of an invocation made and is shown.

    ADK's internal calls never count. Without an invocation all other calls count.
    """
    if call.name in INTERNAL_CALLS:
        return False
    if invocation is None:
        return True
    return _is_own(event, invocation) and is_visible(event, invocation)


def _is_own(event: Event, invocation: InvocationContext) -> bool:
    """Whether an invocation's agent is the author of an event."""
    return event.author == getattr(invocation.agent, "name", "")


def find_node_input(invocation: InvocationContext | None) -> types.Content | None:
    """Finds the newest input that a workflow gave to the node of an invocation's agent.

    ADK shows the input beside the user's message, or in place of the message. The
    result is None in these cases:

    - There is no invocation, or the agent is not in a workflow.
    - The events of this run have no input for the node.
    - The newest input is a tool's result.
    """
    if invocation is None:
        return None
    own_path = getattr(invocation, "node_path", None)
    if not own_path:
        return None

    # ADK gives no invocation id to the input of a node with a single turn.
    ids_of_this_run = ("", invocation.invocation_id)
    for event in reversed(invocation.session.events):
        # The events of this run are the newest ones, so an older run ends the search.
        if event.invocation_id not in ids_of_this_run:
            return None

        node_info = getattr(event, "node_info", None)
        event_path = getattr(node_info, "path", None)
        is_node_input = event.author == "user" and event_path == own_path
        if is_node_input:
            is_tool_result = bool(event.get_function_responses())
            return None if is_tool_result else event.content
    return None


def name_run(invocation: InvocationContext) -> list[str]:
    """Names the run of an agent, if ADK hides the agent's earlier runs from the agent.

    - With `include_contents="none"`, the name is the path of the agent's node and the
      id of the event that begins the run: ["flow/write", "e-17"]. The id of the
      invocation takes the place of the event's id if no event begins the run.
    - With `mode="single_turn"`, the name is the path of the agent's node alone.
    - For all other agents the result is []: they see their earlier runs.

    Outside a workflow the path is "".
    """
    own_path = getattr(invocation, "node_path", None) or ""
    contents_setting = getattr(invocation.agent, "include_contents", "default")
    if contents_setting == "none":
        # In a loop the agent may start several times within one invocation. So the id
        # of the invocation alone would not tell these runs apart.
        for event in reversed(without_rewound(invocation.session.events)):
            if _is_start(event, invocation):
                return [own_path, event.id]
        return [own_path, invocation.invocation_id]

    is_single_turn = getattr(invocation.agent, "mode", None) == "single_turn"
    return [own_path] if is_single_turn else []


def is_visible(event: Event, invocation: InvocationContext) -> bool:
    """Whether ADK would show an event to the agent of an invocation.

    ADK hides these events:

    - events of another isolation scope
    - events of a branch that is neither the agent's own nor that of a parent agent
    - the inputs of other nodes of a workflow
    - with `mode="single_turn"`, events of nodes that neither contain the agent's node
      nor stand within this node
    - ADK's internal calls, and the results of these calls
    """
    event_scope = getattr(event, "isolation_scope", None)
    if event_scope != getattr(invocation, "isolation_scope", None):
        return False

    # The agent of the branch "root.writer" sees the events of "root" as well. The added
    # dots keep "root.write" from passing for a parent of "root.writer". Events without
    # a branch are shown to all agents, and an agent without a branch sees all events.
    own_branch = invocation.branch
    event_branch = event.branch
    if (
        own_branch
        and event_branch
        and not f"{own_branch}.".startswith(f"{event_branch}.")
    ):
        return False

    # The input of a node is shown to this node alone.
    own_path = getattr(invocation, "node_path", None) or ""
    node_info = getattr(event, "node_info", None)
    event_path = getattr(node_info, "path", None) or ""
    responses = event.get_function_responses()
    is_node_input = event.author == "user" and not responses and event_path != ""
    if is_node_input and event_path != own_path:
        return False

    # The added slashes do for paths what the dots do for branches.
    is_single_turn = getattr(invocation.agent, "mode", None) == "single_turn"
    if is_single_turn and own_path and event_path:
        is_around = f"{own_path}/".startswith(f"{event_path}/")
        is_inside = f"{event_path}/".startswith(f"{own_path}/")
        if not is_around and not is_inside:
            return False

    call_names = {call.name for call in event.get_function_calls()}
    result_names = {response.name for response in responses}
    return INTERNAL_CALLS.isdisjoint(call_names | result_names)


def role_of(event: Event, invocation: InvocationContext) -> str:
    """Returns the role of the content that ADK makes of an event for an agent.

    An event of the agent itself gives:

    - "" for an event with a tool call, because ADK shows the call and no text
    - "" for an event without words
    - "user" for an event with nothing but the output of code
    - "model" for all others, among them the results of the agent's tools

    An event of the user or of another agent gives:

    - "" for a result that the user's client has sent, because ADK shows the result and
      no text
    - "" for an event with neither words nor media
    - "user" for all others; ADK writes the calls and results of other agents as texts
    """
    parts = parts_of(event.content)
    has_words = any(words_of(part) for part in parts)

    if _is_own(event, invocation):
        has_calls = bool(event.get_function_calls())
        if has_calls or not has_words:
            return ""
        is_code_output = len(parts) == 1 and parts[0].code_execution_result is not None
        return "user" if is_code_output else "model"

    is_users_result = event.author == "user" and bool(event.get_function_responses())
    has_media = bool(media_parts(event.content))
    if is_users_result or not (has_words or has_media):
        return ""
    return "user"


def _is_start(event: Event, invocation: InvocationContext) -> bool:
    """Whether an event may begin the history of an agent with no earlier history.

    Such an agent has `include_contents="none"`. The history begins with a message of
    the user, or with anything that another agent did, apart from a handover.
    """
    if _is_own(event, invocation) or role_of(event, invocation) != "user":
        return False

    # ADK does not begin a history with an event that hands over to an agent.
    has_handover = bool(event.actions and event.actions.transfer_to_agent)
    call_names = {call.name for call in event.get_function_calls()}
    if has_handover or "transfer_to_agent" in call_names:
        return False
    return is_visible(event, invocation)


def without_rewound(events: Sequence[Event]) -> list[Event]:
    """Leaves out the events that a rewind took back, and the rewinds themselves.

    A rewind is an event that names an invocation. The rewind takes back all events from
    the first event of this invocation up to the rewind.
    """
    newest_first: list[Event] = []
    position = len(events)  # The events before this position are still to be read.
    while position > 0:
        position -= 1
        event = events[position]
        actions = event.actions
        rewound_id = actions.rewind_before_invocation_id if actions else None
        if not rewound_id:
            newest_first.append(event)
            continue

        # If the session does not have the invocation, the rewind takes nothing back.
        for start_position in range(position):
            if events[start_position].invocation_id == rewound_id:
                position = start_position
                break
    newest_first.reverse()
    return newest_first


def words_of(part: types.Part) -> str:
    """Returns words by which the text that ADK makes of a part can be recognized.

    - For a call or a result: the payload as Python writes it. ADK's text has the same
      words in another form. A long payload is cut.
    - For a text or code: the whole text. Thoughts have no words.
    - For all other parts: "".
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
