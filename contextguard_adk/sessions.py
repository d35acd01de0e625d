"""Shows and changes the guard's values in a session between its runs; loads sessions.

Each change is one event with a state delta, which ADK's own session service appends.
The function that makes a change returns a line that names the change. For all
functions:

- `session` was loaded from `service`, with all of its events.
- `agent` is an agent's name. For an agent in a branch or an isolation scope, `agent` is
  the name with `@` and the scope, as `show` prints it. "" stands for all agents; `read`
  and `edit` then need a session with only one summary.
- `force` makes a change even if a run seems to be under way: the newest message has no
  answer, and is less than ten minutes old.
- A `SessionError` says why nothing was changed; a `NoSummaryError`, that there was
  nothing to change.

A message is covered if the summary replaces it. An index is the position of a message
among the contents of a request; a position is one among the session's events.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Iterator, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.run_config import RunConfig
from google.adk.apps import App
from google.adk.artifacts import BaseArtifactService
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.sessions import BaseSessionService as Service
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types

from contextguard_adk import _sections
from contextguard_adk._history.contents import content_text
from contextguard_adk._history.history import History
from contextguard_adk._history.stored import MAX_SUMMARY_CHARS, StoredSummary
from contextguard_adk._history.transcript import render_entries
from contextguard_adk._measuring.tokens import estimate_contents_tokens
from contextguard_adk._runtime import state as keys
from contextguard_adk._runtime.adk_objects import make_session_config
from contextguard_adk._runtime.spending import SPENT_KEY, read_spent
from contextguard_adk._summaries.compose import (
    refresh,
    render_head,
    show_texts,
    without_recall,
)
from contextguard_adk.config import PluginSettings
from contextguard_adk.errors import ContextGuardError
from contextguard_adk.plugin import ContextGuardPlugin
from contextguard_adk.strategies.base import Strategy

if TYPE_CHECKING:
    from google.adk.sessions.base_session_service import GetSessionConfig

BUSY_SECONDS = 600
"""A message without an answer that is older than this belongs to no running run."""

# The record stays when a summary goes: it has the forms that providers have accepted.
_SUMMARY_NAMES = tuple(name for name in keys.SCOPED_NAMES if name != "record")

# Finds the owner of a value in its key: the name of an agent and, in a branch or an
# isolation scope, `@` and the scope. "context_guard:record:writer@3f" -> "writer@3f"
_OWNER = re.compile("(?:__context_guard_|context_guard:)(?:record|real_tokens)[_:](.+)")


class SessionChange(Protocol):
    """A function of this module that changes a session, such as `leave`."""

    def __call__(
        self, service: Service, session: Session, *, force: bool
    ) -> Awaitable[str]: ...


class SessionError(ContextGuardError):
    """Nothing was changed; the message gives the reason in one line."""


class NoSummaryError(SessionError):
    """Nothing was changed, because there is no summary, or none that is in use."""


def show(session: Session, agent: str = "", is_full: bool = False) -> list[str]:
    """Returns a line on each agent; `is_full` adds the lines of its summary.

    With the summary come the texts beside it, as requests have them. With a budget for
    each session, a last line says what the session has spent on summaries.

    Returns [] if the session has no values of the agent.
    """
    lines = []
    for agent_state in _find_states(session, agent):
        lines.append(agent_state.describe())
        if is_full and agent_state.has_summary:
            summary = refresh(agent_state.summary, agent_state)
            lines += show_texts(summary).splitlines()

    spent = read_spent(session.state.get(SPENT_KEY))
    if lines and spent.since:
        lines.append(f"spent on summaries: {spent}")
    return lines


class _EditedState(keys.AgentState):
    """The values of an agent in a copy of a session's state; changes go to the copy.

    Attributes:
        session: The session, whose own state stays as it is.
        delta: The values that were written to the copy, by their keys.
        has_summary: Whether the agent has a stored summary.
        summary: The stored summary; an empty one if there is none.
    """

    def __init__(self, session: Session, owner: str) -> None:
        agent, _, scope = owner.partition("@")
        writes = keys.RunWrites(state=dict(session.state))
        # Keys have one of two forms. New values get keys of the form that the agent's
        # record has.
        has_plain_keys = (
            session.state.get(f"__context_guard_record_{owner}") is not None
        )
        super().__init__(
            writes.state,
            agent,
            is_namespaced=not has_plain_keys,
            scope=scope,
            run=writes,
        )
        self.session = session
        # `write` adds to this dict. `pending` has a dict for the values of each scope,
        # and all values of the agent have the agent's scope.
        self.delta = writes.pending.setdefault(scope, {})

        # The record has the summary without its text. `load_summary` adds the text, but
        # only if it is asked for the scope that the summary has.
        recorded = self.record.summary
        loaded = self.load_summary(recorded.scope) if recorded else None
        self.has_summary = loaded is not None
        self.summary = loaded or StoredSummary()

    def describe(self) -> str:
        """Returns a line on the agent: its usage, its summary and its sections.

        "writer: 41,210 of 128,000 tokens, 32 %; 40 messages summarized in 2,310
        characters; 2 pins"
        """
        usage = self.session.state.get(keys.USAGE_KEY + self.owner)
        # With `usage_in_state=False` there is no such line. The last count is stored
        # anyway.
        counted_tokens = self.read("real_tokens")
        if not usage and counted_tokens:
            usage = f"{int(counted_tokens):,} tokens"

        summary = "no summary"
        if self.has_summary:
            summary = (
                f"{self.summary.covered.content_count:,} messages summarized in "
                f"{len(self.summary.text):,} characters"
            )

        section_texts = [section.describe(self) for section in _sections.SECTIONS]
        sections = ", ".join(text for text in section_texts if text)
        line = f"{self.owner}: {usage or 'no count'}; {summary}"
        return f"{line}; {sections}" if sections else line


def _find_states(session: Session, agent: str) -> list[_EditedState]:
    """Returns the values of an agent, or those of each agent if `agent` is "".

    Returns [] if the session has no values of the agent.
    """
    owners = set[str]()
    for key, value in session.state.items():
        match = _OWNER.match(key)
        # State has no delete: None or 0 stands for a value that was removed.
        if match and value:
            owners.add(match[1])

    found = owners if agent == "" else owners & {agent}
    return [_EditedState(session, owner) for owner in sorted(found)]


def _find_summarized(session: Session, agent: str) -> list[_EditedState]:
    """Returns the values of the agents that have a summary; there is at least one.

    Raises:
        NoSummaryError: No agent has a summary.
        SessionError: A later release has written one of the summaries.
    """
    agent_states = [each for each in _find_states(session, agent) if each.has_summary]
    if not agent_states:
        raise NoSummaryError(f"there is no summary of {agent or 'any agent'}")
    if any(each.record.is_newer for each in agent_states):
        raise SessionError("a later release has written this state; use that one")
    return agent_states


async def compact(
    service: Service,
    session: Session,
    agent: str = "",
    focus: str = "",
    force: bool = False,
) -> str:
    """Has the next model call of the agent compact.

    If `agent` is "", this is the next call of any guarded agent. The summary keeps the
    `focus` above all; "" sets no focus.
    """
    delta = dict[str, Any]()
    # A request for a compaction names the agent without a scope, and holds in each one.
    name, _, _ = agent.partition("@")
    keys.request_compaction(delta, name, focus)
    change = f"the next model call of {name or 'a guarded agent'} compacts"
    actions = EventActions(state_delta=delta)
    return await _append(service, session, change, actions, force)


async def reset(
    service: Service, session: Session, agent: str = "", force: bool = False
) -> str:
    """Removes summaries: the next call has all messages, and compacts where it must.

    Pins, todos and the forms that a provider has accepted stay.
    """
    delta = dict[str, Any]()
    agent_states = _find_summarized(session, agent)
    for agent_state in agent_states:
        agent_state.edit_summary(None)
        for name in _SUMMARY_NAMES:
            agent_state.write(name, None)
        # The next call needs all events, so `load_recent` must find no start time.
        for reader_name in agent_state.find(keys.EVENTS_SINCE_KEY):
            agent_state.set(keys.EVENTS_SINCE_KEY + reader_name, None)
        delta |= agent_state.delta

    change = f"{_name_summaries(agent_states)} is gone; the next call has all messages"
    actions = EventActions(state_delta=delta)
    return await _append(service, session, change, actions, force)


def read(session: Session, agent: str = "") -> str:
    """Returns the text of an agent's summary.

    Raises:
        SessionError: There is no summary; or `agent` is "", and there are several.
    """
    return _find_only_summarized(session, agent).summary.text


def _find_only_summarized(session: Session, agent: str) -> _EditedState:
    """Returns the values of an agent with a summary.

    If `agent` is "", it is the only agent of the session with a summary.

    Raises:
        SessionError: There is no summary, or there are several.
    """
    agent_states = _find_summarized(session, agent)
    if len(agent_states) > 1:
        raise SessionError(f"there is {_name_summaries(agent_states)}: name one agent")
    return agent_states[0]


async def edit(
    service: Service, session: Session, text: str, agent: str = "", force: bool = False
) -> str:
    """Puts another text, of 1 to 262,144 characters, in place of a summary's text.

    White space around the new text is left out. The sections beside the summary's text,
    such as the pins and the todo list, stay.
    """
    agent_state = _find_only_summarized(session, agent)
    old_chars = len(agent_state.summary.text)

    # Databases refuse null characters and lone halves of surrogate pairs.
    without_nulls = text.strip().replace("\0", "\ufffd")
    new_text = without_nulls.encode("utf-8", "replace").decode()
    new_chars = len(new_text)
    if not 0 < new_chars <= MAX_SUMMARY_CHARS:
        raise SessionError(f"1 to {MAX_SUMMARY_CHARS:,} characters, not {new_chars:,}")

    # `model_chars` is the length of a summary without the excerpts that may follow. The
    # new text has no excerpts, so this is its whole length.
    new_summary = agent_state.summary.model_copy(update={"model_chars": new_chars})
    # `edit_summary` stores all of a summary but its text, which has a key of its own.
    agent_state.edit_summary(new_summary)
    agent_state.write("summary", new_text)
    subject = _name_summaries([agent_state])
    change = f"{subject} has {new_chars:,} characters, it had {old_chars:,}"
    actions = EventActions(state_delta=agent_state.delta)
    return await _append(service, session, change, actions, force)


async def leave(
    service: Service, session: Session, agent: str = "", force: bool = False
) -> str:
    """Turns summaries into ADK's own compaction: the session goes on without a guard.

    ADK shows the text of its compaction in place of older events. The text has what the
    agent sees now in place of older messages: the summary with the user's messages,
    values, calls and pins, but no images and files. Then come the older messages that
    were kept word for word. ADK shows the text to all agents, so the text has the
    summaries of all agents, one after another.

    The compaction ends before the first long-running call that waits for its result. It
    ends even earlier where a later event has an older time, as when the clocks of two
    machines differ: ADK compacts all events up to a time.

    The agents' values in session state are removed, except for pins and todos. The
    values of agents in a branch or an isolation scope stay, and the line names them. It
    also tells how many tokens the text and the newer messages have, by an estimate of 4
    bytes each: without a guard, these are sent to a model, with instruction and tools.
    """
    try:
        summarized = _find_summarized(session, agent)
    except NoSummaryError as error:
        remain = _describe_remaining(session.events)
        raise NoSummaryError(f"{error}; {remain}") from None

    # ADK shows its compaction to all agents. So summaries that hold only in a branch or
    # an isolation scope are left out: there the owner is more than the agent's name.
    agent_states = [each for each in summarized if each.owner == each.agent]
    if not agent_states:
        raise SessionError("the agent is in a branch or an isolation scope")

    views = await _build_views(agent_states)
    removed_count = views[-1].removable_count
    # ADK shows the text to all agents, whichever of them is named as its author.
    text = _render_views(views, agent_states[0].agent)
    compaction = {
        "start_timestamp": 0.0,  # From the session's first event on.
        "end_timestamp": session.events[removed_count - 1].timestamp,
        "compacted_content": text,
    }
    removals = _list_removals(session, agent_states)
    actions = EventActions.model_validate(
        {"state_delta": removals, "compaction": compaction}
    )
    remain = _describe_remaining([*session.events, Event(actions=actions)])
    change = (
        f"{removed_count:,} events give way to {_name_summaries(agent_states)}, as "
        f"ADK's own compaction; {remain}"
    )
    staying = [each for each in summarized if each.owner != each.agent]
    if staying:
        change = f"{change}; {_name_summaries(staying)} stays stored, for a guard"
    return await _append(service, session, change, actions, force)


def _describe_remaining(events: Sequence[Event]) -> str:
    """Describes how much an app without the guard would send of some events.

    "about 5,204 tokens of messages remain"
    """
    compactions = [
        event.actions.compaction for event in events if event.actions.compaction
    ]
    contents = list[types.Content]()
    replaced_until = 0.0
    if compactions:
        newest = max(compactions, key=lambda each: each.end_timestamp)
        contents.append(newest.compacted_content)
        replaced_until = newest.end_timestamp

    contents += [
        event.content
        for event in events
        if event.content and event.timestamp > replaced_until
    ]
    return f"about {estimate_contents_tokens(contents):,} tokens of messages remain"


def _list_removals(
    session: Session, agent_states: Sequence[_EditedState]
) -> dict[str, object]:
    """Returns the state delta that removes the values of these agents.

    The delta has None under each key that has a value, in both forms of keys. Pins and
    todos are not removed, nor what the session has spent on summaries.
    """
    names = (*keys.SCOPED_NAMES, "compacted", "usage", "events_since")
    owners = [each.owner for each in agent_states]
    plain_keys = [
        f"__context_guard_{name}_{owner}" for name in names for owner in owners
    ]
    namespaced_keys = [
        f"context_guard:{name}:{owner}" for name in names for owner in owners
    ]
    all_keys = [*plain_keys, *namespaced_keys]
    return {key: None for key in all_keys if session.state.get(key) is not None}


class _View(NamedTuple):
    """The older part of a request, as an agent would see it now.

    Attributes:
        covered_event_count: The number of the session's events up to the newest covered
            one; 0 if the session no longer has the messages of the summary.
        removable_count: How many of these events, from the first one on, ADK's
            compaction may replace.
        summary_text: The text of the summary and its sections.
        kept_texts: The texts of the messages that are not covered, but older than the
            newest covered message.
    """

    covered_event_count: int
    removable_count: int
    summary_text: str
    kept_texts: list[str]


def _render_views(views: Sequence[_View], agent: str) -> types.Content:
    """Returns one message with the summaries of several views, as an agent's words.

    Args:
        views: The views. The summary of the last view reaches farthest, so only its
            kept messages stand after the summaries.
        agent: The name of the agent to which ADK ascribes the words.
    """
    summary_texts = [view.summary_text for view in views]
    text = "\n\n".join([*summary_texts, *views[-1].kept_texts])
    # This is the form in which ADK tells agents the words of another agent: a message
    # of the user. Strict providers accept no other first message.
    parts = [
        types.Part(text="For context:"),
        types.Part(text=f"[{agent}] said: {text}"),
    ]
    return types.UserContent(parts)


async def _build_views(agent_states: Sequence[_EditedState]) -> list[_View]:
    """Returns the views of agents; the summary that reaches farthest comes last.

    Raises:
        NoSummaryError: The session no longer has the messages of the summaries.
        SessionError: No event may be removed.
    """
    views = [await _build_view(each) for each in agent_states]
    views.sort(key=lambda view: view.removable_count)
    if not any(view.covered_event_count for view in views):
        raise NoSummaryError("the messages that were summarized are gone")
    if views[-1].removable_count == 0:
        # These are the two reasons for which `_count_removable` returns 0.
        raise SessionError("a call waits for its result, or a later event is older")
    return views


async def _build_view(agent_state: _EditedState) -> _View:
    """Returns the view that an agent with a summary would have in a new run.

    A question of the user begins the run. The view leaves out the question, which is
    newer than all messages that a summary covers.
    """
    question = types.UserContent("?")
    # The model is never called.
    agent = LlmAgent(name=agent_state.agent, model="gemini-flash-latest")
    invocation = _begin_run(agent_state.session, agent, question)
    request = await _catch_request(invocation, agent)

    # The session goes on without the guard, so without its recall tool.
    stored = without_recall(refresh(agent_state.summary, agent_state))
    history = History(request.contents, invocation, question, stored)
    covered = history.covered
    summary_message = render_head(history, stored, covered)

    # A compaction may keep some older messages word for word, such as tool results.
    newest_covered = max(covered, default=0)
    kept_indexes = [
        index
        for index in history.indexes
        if index < newest_covered and index not in covered
    ]
    kept_entries = render_entries(request.contents, kept_indexes)

    events = invocation.session.events
    covered_event_count = 0
    if covered:  # Nothing is covered if the session no longer has these messages.
        # If the summary does not name its newest event, the history finds the event.
        newest_event_id = stored.last_event or history.last_event(covered)
        covered_event_count = _count_events_upto(newest_event_id, events)
    return _View(
        covered_event_count=covered_event_count,
        removable_count=_count_removable(events, covered_event_count),
        summary_text=content_text(summary_message),
        kept_texts=[entry.text for entry in kept_entries],
    )


def _begin_run(
    session: Session, agent: LlmAgent, question: types.Content
) -> InvocationContext:
    """Returns the invocation of an agent's run that a question of the user begins.

    The session of the invocation is a copy, whose last event is the question.
    """
    run_id = Event.new_id()
    question_event = Event(author="user", invocation_id=run_id, content=question)
    events = [*session.events, question_event]
    return InvocationContext(
        session_service=InMemorySessionService(),
        session=session.model_copy(update={"events": events}),
        invocation_id=run_id,
        agent=agent,
        run_config=RunConfig(),
    )


async def _catch_request(invocation: InvocationContext, agent: LlmAgent) -> LlmRequest:
    """Runs an agent up to its model call; returns the request that ADK has built.

    Raises:
        SessionError: ADK makes no model call with the events of the session.
    """
    requests: list[LlmRequest] = []

    def catch(callback_context: object, llm_request: LlmRequest) -> LlmResponse:
        requests.append(llm_request)
        # ADK calls no model if the callback returns a response.
        return LlmResponse(content=types.ModelContent("."))

    agent.before_model_callback = catch
    async for _ in agent.run_async(invocation):
        pass
    if not requests:
        raise SessionError("ADK makes no model call with these events")
    return requests[0]


def _count_events_upto(event_id: str, events: Sequence[Event]) -> int:
    """Returns the number of events up to the last event with this id.

    Returns 0 if no event has the id.
    """
    count = 0
    for number, event in enumerate(events, 1):
        if event.id == event_id:
            count = number
    return count


def _count_removable(events: Sequence[Event], most_count: int) -> int:
    """Returns how many of the first events ADK's compaction may replace.

    The result is the largest number, at most `most_count`, with which two conditions
    hold:

    - No tool call is separated from its result.
    - All events that stay have a later time than the last replaced event, because ADK
      compacts by time: up to the time of the last replaced event.
    """
    result_positions = _find_last_results(events, most_count)

    # For each position, the oldest time of the events from this position on. A later
    # event may have an older time, because the clock of its machine may be behind.
    oldest_times = [math.inf] * (len(events) + 1)
    for position in reversed(range(len(events))):
        time_of_event = events[position].timestamp
        oldest_times[position] = min(time_of_event, oldest_times[position + 1])

    removable_count = 0
    last_result_position = -1
    for position in range(most_count):
        # The position of the last result of all calls up to this event.
        last_result_position = max(last_result_position, result_positions[position])
        has_all_results = last_result_position <= position
        is_older_than_rest = events[position].timestamp < oldest_times[position + 1]
        if has_all_results and is_older_than_rest:
            removable_count = position + 1
    return removable_count


def _find_last_results(events: Sequence[Event], most_count: int) -> list[int]:
    """Returns, for each event, the position of the last result of its calls.

    An event without calls has its own position. For a call without a result, there are
    two cases:

    - If the call is long-running: its result is still to come. The position is
      `most_count`, which is behind all events that may be removed.
    - Otherwise: nobody waits for a result. The position is that of the call.

    Args:
        events: The events of the session.
        most_count: The most events that may be removed.
    """
    last_results = list(range(len(events)))
    # Two calls may have the same id. Each call is answered by the nearest later result.
    # The loop goes backward, so this dict has the nearest result of each id.
    nearest_results: dict[str | None, int] = {}
    for position, event in reversed(list(enumerate(events))):
        long_running_ids = event.long_running_tool_ids or ()
        for call in event.get_function_calls():
            is_awaited = call.id in long_running_ids
            if_unanswered = most_count if is_awaited else position
            call_result = nearest_results.get(call.id, if_unanswered)
            last_results[position] = max(last_results[position], call_result)

        for response in event.get_function_responses():
            nearest_results[response.id] = position
    return last_results


def _name_summaries(agent_states: Sequence[_EditedState]) -> str:
    """Returns the subject of a clause, such as "the summary of writer, editor"."""
    return f"the summary of {', '.join(each.owner for each in agent_states)}"


async def _append(
    service: Service, session: Session, change: str, actions: EventActions, force: bool
) -> str:
    """Appends one event with these actions; returns a line that names the change.

    Args:
        service: The session service.
        session: The session; the service adds the event to this object, too.
        change: The change as a clause, such as "the next model call compacts".
        actions: The state delta and the compaction of the event.
        force: Whether the event is appended although a run seems to be under way.

    Raises:
        SessionError: A run seems to be under way, and `force` is not set.
    """
    if not force and _is_busy(session):
        raise SessionError("a run seems to be under way: wait, or force the change")

    # ADK itself gives this author to a compaction, and to a change of the state.
    event = Event(author="user", invocation_id=Event.new_id(), actions=actions)
    # A run may have loaded the session already, and be about to append its first event.
    # ADK's services refuse that event if the session has a later time by then.
    if session.last_update_time and _takes_time_of_event(service):
        event.timestamp = session.last_update_time
    await service.append_event(session, event)
    return f"Session {session.id!r} of user {session.user_id!r}: {change}."


def _takes_time_of_event(service: Service) -> bool:
    """Whether a service sets the time of a session to that of each new event.

    The databases of google-adk before 2.13 set the current time if an event has the
    time of the session already.
    """
    if type(service).__name__ != "DatabaseSessionService":
        return True
    # The import needs SQLAlchemy, which such a service has imported.
    from google.adk.sessions.schemas.v1 import StorageSession

    return StorageSession.__table__.c.update_time.onupdate is None


def _is_busy(session: Session) -> bool:
    """Whether the newest message has no answer, and is less than ten minutes old."""
    # A partial event is a piece of a message that is still being streamed.
    messages = [
        event for event in session.events if event.content and not event.partial
    ]
    if not messages:
        return False
    newest = messages[-1]
    is_answer = newest.author != "user" and newest.is_final_response()
    age_seconds = time.time() - newest.timestamp
    return not is_answer and age_seconds < BUSY_SECONDS


async def purge(
    artifacts: BaseArtifactService, *, app_name: str, user_id: str, session_id: str
) -> int:
    """Deletes the summaries that `summary_artifacts=True` has saved as artifacts.

    ADK does not delete the artifacts of a session with the session, so call this beside
    `delete_session`.

    Returns:
        How many artifacts were deleted.
    """
    owner = {"app_name": app_name, "user_id": user_id, "session_id": session_id}
    names = await artifacts.list_artifact_keys(**owner)
    summary_names = [name for name in names if fnmatch(name, "compaction-*.md")]
    for name in summary_names:
        await artifacts.delete_artifact(**owner, filename=name)
    return len(summary_names)


async def load_recent(
    service: Service, app: App, *, user_id: str, session_id: str
) -> GetSessionConfig | None:
    """Returns how to load a session without the events that no agent needs any more.

    The result is for `RunConfig(get_session_config=…)` of a run of this app. The app
    needs a guard with `recent_events=True`: after each compaction, this guard notes in
    session state since when the agent needs events.

    Returns:
        A config of ADK that loads the events since the earliest of these times. None
        loads all events, in these cases:

        - If there is no session.
        - If the guard has no `recent_events=True`, is switched off, or only observes.
        - If an agent of the app has no such time, as before its first compaction.
        - If an agent is not guarded, or has a strategy that a function chooses.
        - If an agent is of a class of its own, which may read events by itself.
        - If no agent of the app reads the history.
    """
    guards = [each for each in app.plugins if isinstance(each, ContextGuardPlugin)]
    settings = guards[0].settings if guards else PluginSettings()
    if not settings.recent_events or settings.observe:
        return None

    # Even a session that is loaded with one event has all of its state.
    one_event = make_session_config(num_recent_events=1)
    session = await service.get_session(
        app_name=app.name, user_id=user_id, session_id=session_id, config=one_event
    )
    if not session or session.state.get(keys.OFF_KEY) is True:
        return None

    newest_time = max((event.timestamp for event in session.events), default=0.0)
    start_times: list[float] = []
    for name in _list_readers(app.root_agent):
        strategy = settings.agents.get(name, settings.default)
        if not isinstance(strategy, Strategy):
            return None

        # The guard notes no time under the name "", which stands for an agent of a
        # class of its own.
        start_time: Any = session.state.get(keys.EVENTS_SINCE_KEY + name)
        # Session state is untrusted. A time after the newest event would load no event.
        is_time = isinstance(start_time, float) and 0 < start_time <= newest_time
        if not is_time:
            return None
        start_times.append(start_time)

    if not start_times:
        return None  # No agent reads the history, so no time is known.
    return make_session_config(after_timestamp=min(start_times))


def _list_readers(agent: object) -> Iterator[str]:
    """Yields the names of the agents that read the session's history.

    Both the agent and the agents below it are looked at. "" stands for an agent of
    another class than ADK's, which may read the history by itself.
    """
    if isinstance(agent, LlmAgent):
        if agent.include_contents != "none":
            yield agent.name
    elif type(agent) not in (SequentialAgent, LoopAgent, ParallelAgent):
        yield ""
    for child in getattr(agent, "sub_agents", ()):
        yield from _list_readers(child)
