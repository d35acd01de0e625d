"""Shows and changes the guard's values in a session between its runs; loads sessions.

Each change is one event with a state delta, which ADK's own session service appends.
The function that makes it returns a line that names the change. For all functions:

- `session` was loaded from `service`, with all of its events.
- `agent` is an agent's name. For an agent in a branch or an isolation scope, it is the
  name that `show` prints. "" takes all agents; `read` and `edit` then need a session
  with one agent only.
- `force` makes a change even if a run seems to be under way: the newest message has no
  answer, and is less than ten minutes old.
- A `SessionError` says why nothing was changed.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from itertools import accumulate
from typing import Any, NamedTuple

from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.apps import App
from google.adk.artifacts import BaseArtifactService
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions, EventCompaction
from google.adk.flows.llm_flows.contents import request_processor
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions import BaseSessionService as Service
from google.adk.sessions import InMemorySessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

from contextguard_adk import _sections
from contextguard_adk._history.contents import content_text
from contextguard_adk._history.history import History
from contextguard_adk._history.stored import MAX_SUMMARY_CHARS, StoredSummary
from contextguard_adk._history.transcript import render_entries
from contextguard_adk._runtime import state as keys
from contextguard_adk._summaries.compose import render_head, without_recall
from contextguard_adk.config import PluginSettings
from contextguard_adk.errors import ContextGuardError
from contextguard_adk.plugin import ContextGuardPlugin
from contextguard_adk.strategies.base import Strategy

BUSY_SECONDS = 600

# The record stays when a summary goes: it has the facts that were learned about models.
_SUMMARY_NAMES = tuple(name for name in keys.SCOPED_NAMES if name != "record")

# The owner of a value is an agent: its name, and `@` and the scope where it has one.
_OWNER = re.compile("(?:__context_guard_|context_guard:)(?:record|real_tokens)[_:](.+)")


class SessionError(ContextGuardError):
    """Nothing was changed; the message gives the reason in one line."""


def show(session: Session, agent: str = "", is_full: bool = False) -> list[str]:
    """Returns a line on each agent; `is_full` adds the texts of the summaries."""
    lines = []
    for state in _find_states(session, agent):
        lines.append(state.describe())
        if is_full and state.summary:
            lines += state.summary.text.splitlines()
    return lines


class _EditedState(keys.AgentState):
    """An agent's values in a copy of the session's state, where they are changed.

    Attributes:
        session: The session, which stays as it is.
        delta: The values that were written to the copy, by their keys.
        summary: The stored summary; None where the agent has none.
    """

    def __init__(self, session: Session, owner: str) -> None:
        name, _, scope = owner.partition("@")
        writes = keys.RunWrites({**session.state})
        has_plain = session.state.get(f"__context_guard_record_{owner}") is not None
        super().__init__(
            writes.state, name, is_namespaced=not has_plain, scope=scope, run=writes
        )
        self.session = session
        self.delta = writes.pending.setdefault(scope, {})
        self.summary: StoredSummary | None = None
        reference = self.record.summary
        if reference is not None:
            self.summary = self.load_summary(reference.scope)

    def describe(self) -> str:
        """Returns a line on the agent: its usage, its summary and its sections."""
        tokens = self.read("real_tokens")
        usage = self.session.state.get(keys.USAGE_KEY + self.owner)
        if not usage:
            usage = f"{int(tokens):,} tokens" if tokens else "no count"

        summary = "no summary"
        if self.summary:
            summary = (
                f"{self.summary.covered.content_count:,} messages summarized in "
                f"{len(self.summary.text):,} characters"
            )

        section_texts = [section.describe(self) for section in _sections.SECTIONS]
        sections = ", ".join(text for text in section_texts if text)
        line = f"{self.owner}: {usage}; {summary}"
        return f"{line}; {sections}" if sections else line


def _find_states(session: Session, agent: str) -> list[_EditedState]:
    """Returns the state of an agent, or of all agents if `agent` is ""."""
    owners = set()
    for key, value in session.state.items():
        match = _OWNER.match(key)
        if match and value and agent in ("", match[1]):
            owners.add(match[1])
    return [_EditedState(session, owner) for owner in sorted(owners)]


def _find_summarized(session: Session, agent: str) -> list[_EditedState]:
    """Returns the states of the agents that have a summary, at least one.

    Raises:
        SessionError: There is no summary, or a later release has written one.
    """
    states = [state for state in _find_states(session, agent) if state.summary]
    if not states:
        raise SessionError(f"there is no summary of {agent or 'any agent'}")
    if any(state.record.is_newer for state in states):
        raise SessionError("a later release has written this state; use that one")
    return states


async def compact(
    service: Service,
    session: Session,
    agent: str = "",
    focus: str = "",
    force: bool = False,
) -> str:
    """Has the next model call compact; the summary keeps the `focus` above all."""
    delta = dict[str, Any]()
    name, _, _ = agent.partition("@")
    keys.request_compaction(delta, name, focus)
    change = f"the next model call of {name or 'a guarded agent'} compacts"
    actions = EventActions(state_delta=delta)
    return await _append(service, session, change, actions, force)


async def reset(
    service: Service, session: Session, agent: str = "", force: bool = False
) -> str:
    """Removes summaries: the next call has all messages, and compacts where it must.

    Pins, todos and the facts that were learned about models stay.
    """
    delta = dict[str, Any]()
    states = _find_summarized(session, agent)
    for state in states:
        state.edit_summary(None)
        for name in _SUMMARY_NAMES:
            state.write(name, None)
        for reader in state.find(keys.EVENTS_SINCE_KEY):
            state.set(keys.EVENTS_SINCE_KEY + reader, None)
        delta |= state.delta

    change = f"{_name_summaries(states)} is gone; the next call has all messages"
    actions = EventActions(state_delta=delta)
    return await _append(service, session, change, actions, force)


def read(session: Session, agent: str = "") -> str:
    """Returns the text of an agent's summary.

    Raises:
        SessionError: There is no summary; or `agent` is "", and there are several.
    """
    states = _find_summarized(session, agent)
    if len(states) > 1:
        raise SessionError(f"there is {_name_summaries(states)}: name one agent")
    summary = states[0].summary
    return summary.text if summary else ""


async def edit(
    service: Service, session: Session, text: str, agent: str = "", force: bool = False
) -> str:
    """Replaces a summary's text by 1 to 262,144 characters.

    The sections beside the text, such as the pins and the todo list, stay.
    """
    old_text = read(session, agent)
    state = _find_summarized(session, agent)[0]

    # Databases refuse null characters and lone halves of surrogate pairs.
    without_nulls = text.strip().replace("\0", "\ufffd")
    new_text = without_nulls.encode("utf-8", "replace").decode()
    count = len(new_text)
    if not 0 < count <= MAX_SUMMARY_CHARS:
        raise SessionError(f"1 to {MAX_SUMMARY_CHARS:,} characters, not {count:,}")

    summary = state.summary or StoredSummary()
    state.edit_summary(summary.model_copy(update={"model_chars": count}))
    state.write("summary", new_text)
    change = (
        f"{_name_summaries([state])} has {count:,} characters, it had {len(old_text):,}"
    )
    actions = EventActions(state_delta=state.delta)
    return await _append(service, session, change, actions, force)


async def leave(
    service: Service, session: Session, agent: str = "", force: bool = False
) -> str:
    """Makes summaries ADK's own compaction: the session goes on without a guard.

    The compaction has the text that the agent would see in place of older messages:
    summary, user's messages, values, calls and pins, but no images and files. It has
    the older messages that were kept word for word, too. It ends before the first call
    that waits for a result. ADK shows it to all agents, so it has the texts of all
    agents, one after another.

    The guard's values are removed. Agents in a branch or an isolation scope stay as
    they are.
    """
    summarized = _find_summarized(session, agent)
    states = [state for state in summarized if state.owner == state.agent]
    if not states:
        raise SessionError("the agent is in a branch or an isolation scope")

    views = [await _build_view(state) for state in states]
    views.sort(key=lambda view: view.event_count)
    if not any(view.covered_event_count for view in views):
        raise SessionError("the messages that were summarized are gone")
    event_count = views[-1].event_count
    if not event_count:
        raise SessionError("a call waits for its result, or a later event is older")

    compaction = EventCompaction(
        start_timestamp=0.0,  # A session that is loaded in part begins later.
        end_timestamp=session.events[event_count - 1].timestamp,
        compacted_content=_render_views(views, states[0].agent),
    )
    actions = EventActions(
        state_delta=_list_removals(session, states), compaction=compaction
    )
    change = (
        f"{event_count:,} events give way to {_name_summaries(states)}, as ADK's own "
        "compaction"
    )
    return await _append(service, session, change, actions, force)


def _list_removals(
    session: Session, states: Sequence[_EditedState]
) -> dict[str, object]:
    """Returns the state delta that removes all values of these agents.

    A value has a key in one of two forms, plain or namespaced.
    """
    names = (*keys.SCOPED_NAMES, "compacted", "usage", "events_since")
    removals = dict[str, object]()
    for form in ("__context_guard_{}_{}", "context_guard:{}:{}"):
        for name in names:
            for state in states:
                key = form.format(name, state.owner)
                if session.state.get(key) is not None:
                    removals[key] = None
    return removals


class _View(NamedTuple):
    """The older part of a request, as an agent would see it now.

    Attributes:
        covered_event_count: How many of the session's first events end with the last
            event of the summary; 0 if the messages of the summary are gone.
        event_count: How many of these events ADK's compaction may replace.
        summary: The text of the summary and its sections.
        kept: The texts of the older messages that the summary does not replace.
    """

    covered_event_count: int
    event_count: int
    summary: str
    kept: list[str]


def _render_views(views: Sequence[_View], agent: str) -> types.Content:
    """Returns one message with the summaries of several views.

    It ends with the messages that the last view, which reaches farthest, keeps.
    """
    summaries = [view.summary for view in views]
    text = "\n\n".join([*summaries, *views[-1].kept])
    # ADK relays an agent's words so: strict providers accept no other first message.
    parts = [
        types.Part(text="For context:"),
        types.Part(text=f"[{agent}] said: {text}"),
    ]
    return types.UserContent(parts)


async def _build_view(state: _EditedState) -> _View:
    """Returns the view of an agent: ADK's own code builds the request for it."""
    question = types.UserContent("?")
    run_id = Event.new_id()
    question_event = Event(author="user", invocation_id=run_id, content=question)
    events = [*state.session.events, question_event]
    invocation = InvocationContext(
        session_service=InMemorySessionService(),
        session=state.session.model_copy(update={"events": events}),
        invocation_id=run_id,
        agent=LlmAgent(name=state.agent, model="gemini-2.5-flash"),
    )
    request = LlmRequest()
    async for _ in request_processor.run_async(invocation, request):
        pass

    stored = without_recall(state.summary or StoredSummary())
    history = History(request.contents, invocation, question, stored)
    covered = history.covered
    summary = content_text(render_head(history, stored, covered))

    last_covered = max(covered, default=0)
    kept_indexes = [
        index
        for index in history.indexes
        if index < last_covered and index not in covered
    ]
    kept = [entry.text for entry in render_entries(request.contents, kept_indexes)]

    covered_event_count = 0
    if covered:
        last_event_id = stored.last_event or history.last_event(covered)
        for number, event in enumerate(events, 1):
            if event.id == last_event_id:
                covered_event_count = number
    return _View(
        covered_event_count=covered_event_count,
        event_count=_count_removable(events, covered_event_count),
        summary=summary,
        kept=kept,
    )


def _count_removable(events: Sequence[Event], most_count: int) -> int:
    """Returns how many of the first events ADK's compaction may replace.

    The compaction replaces at most `most_count` events, under two conditions:

    - No tool call is separated from its result.
    - All events that stay are newer, because ADK compacts by time: up to the time of
      the last event that is replaced.
    """
    result_places = _find_last_results(events, most_count)
    # A clock may be behind: a later event may have an older time.
    times = [event.timestamp for event in events]
    oldest_from_end = accumulate(reversed(times), min)
    oldest_times = [*reversed(list(oldest_from_end)), math.inf]

    removable_count = 0
    last_result_place = -1  # The place of the last result of all calls so far.
    for place in range(most_count):
        last_result_place = max(last_result_place, result_places[place])
        next_place = place + 1
        has_all_results = last_result_place == place
        is_older_than_rest = times[place] < oldest_times[next_place]
        if has_all_results and is_older_than_rest:
            removable_count = next_place
    return removable_count


def _find_last_results(events: Sequence[Event], most_count: int) -> list[int]:
    """Returns, for each event, the place of the last result of its calls.

    A place is an index in `events`. Three cases have no result to find:

    - An event without calls has its own place.
    - A long-running call whose result is still to come counts as answered at
      `most_count`, behind all events that may go.
    - Any other call without a result counts as answered at its own place, because
      nobody waits for that result.
    """
    result_places = list(range(len(events)))
    # The loop goes backward because an id may come again: the next result counts.
    next_results: dict[str | None, int] = {}
    for place, event in reversed(list(enumerate(events))):
        awaited_ids = event.long_running_tool_ids or ()
        for call in event.get_function_calls():
            place_without_result = most_count if call.id in awaited_ids else place
            call_result_place = next_results.get(call.id, place_without_result)
            result_places[place] = max(result_places[place], call_result_place)
        for response in event.get_function_responses():
            next_results[response.id] = place
    return result_places


def _name_summaries(states: Sequence[_EditedState]) -> str:
    return f"the summary of {', '.join(state.owner for state in states)}"


async def _append(
    service: Service, session: Session, change: str, actions: EventActions, force: bool
) -> str:
    """Appends one event with these actions; returns a line that names the change.

    Args:
        service: The session service.
        session: The session, which gets the event too.
        change: The change as a clause, for the line.
        actions: The state delta and the compaction of the event.
        force: Whether the event is appended although a run seems to be under way.

    Raises:
        SessionError: A run seems to be under way, and `force` is not set.
    """
    if not force and _is_busy(session):
        raise SessionError("a run seems to be under way: wait, or force the change")

    # ADK itself gives this author to a compaction, and to a change of the state.
    event = Event(author="user", invocation_id=Event.new_id(), actions=actions)
    await service.append_event(session, event)
    return f"Session {session.id!r}: {change}."


def _is_busy(session: Session) -> bool:
    """Whether the newest message has no answer, and is less than ten minutes old."""
    messages = [
        event for event in session.events if event.content and not event.partial
    ]
    if not messages:
        return False
    newest = messages[-1]
    is_unanswered = newest.author == "user" or not newest.is_final_response()
    return is_unanswered and time.time() - newest.timestamp < BUSY_SECONDS


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

    The result is for `RunConfig(get_session_config=…)` of a run of this app, whose
    plugins have a guard with `recent_events=True`.

    Returns:
        None where all events are needed, or there is no session. All events are needed
        while one of the app's agents

        - has had no compaction in the session yet,
        - is not guarded, or has a strategy that a function chooses, or
        - is of a class of its own, which may read events by itself.
    """
    guards = [each for each in app.plugins if isinstance(each, ContextGuardPlugin)]
    settings = guards[0].settings if guards else PluginSettings()
    if not settings.recent_events or settings.observe:
        return None

    # A session that is loaded with one event has all of its state.
    one_event = GetSessionConfig(num_recent_events=1)
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
        # Session state may hold anything: others write to it, too.
        start_time: Any = session.state.get(keys.EVENTS_SINCE_KEY + name)
        if not (isinstance(start_time, float) and 0 < start_time <= newest_time):
            return None
        start_times.append(start_time)
    return GetSessionConfig(after_timestamp=min(start_times)) if start_times else None


def _list_readers(agent: object) -> Iterator[str]:
    """Yields the names of the agents below an agent that read the session's history.

    "" stands for an agent of another class than ADK's, which may read it by itself.
    """
    if isinstance(agent, LlmAgent):
        if agent.include_contents != "none":
            yield agent.name
    elif type(agent) not in (SequentialAgent, LoopAgent, ParallelAgent):
        yield ""
    for child in getattr(agent, "sub_agents", ()):
        yield from _list_readers(child)
