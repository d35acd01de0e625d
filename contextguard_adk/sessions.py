"""Shows and changes the guard's values in a session between its runs; loads sessions.

Each change is one event with a state delta, which ADK's own session service appends. It
returns a line that names the change. For all functions:

- `session` was loaded from `service`, with all of its events.
- `agent` is an agent's name; in a branch or an isolation scope, as `show` prints it. ""
  takes all agents; for `read` and `edit` there must be only one then.
- `force` makes a change even if a run seems to be under way: the newest message has no
  answer, and is less than ten minutes old.
- A `SessionError` says why nothing was changed.
"""

from __future__ import annotations

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
_OWNER = re.compile("(?:__context_guard_|context_guard:)(?:record|real_tokens)[_:](.+)")


class SessionError(ContextGuardError):
    """Nothing was changed; the message gives the reason in one line."""


def show(session: Session, agent: str = "", is_full: bool = False) -> list[str]:
    """Returns a line on each agent; `is_full` adds the texts of the summaries."""
    lines = []
    for stored in _find(session, agent):
        lines.append(stored.describe())
        if is_full and stored.summary:
            lines += stored.summary.text.splitlines()
    return lines


class _Stored(keys.AgentState):
    """An agent's values in a copy of the state; `delta` is what is written there."""

    def __init__(self, session: Session, owner: str) -> None:
        name, _, scope = owner.partition("@")
        writes = keys.RunWrites({**session.state})
        has_plain = session.state.get(f"__context_guard_record_{owner}") is not None
        super().__init__(writes.state, name, not has_plain, scope, writes)
        self.session = session
        self.delta = writes.pending.setdefault(scope, {})
        stored = self.record.summary
        self.summary = stored and self.load_summary(stored.scope)

    def describe(self) -> str:
        """Returns a line on the agent."""
        tokens = self.read("real_tokens")
        usage = self.session.state.get(keys.USAGE_KEY + self.owner)
        if not usage:
            usage = f"{int(tokens):,} tokens" if tokens else "no count"

        said = "no summary"
        if self.summary:
            said = (
                f"{self.summary.covered.content_count:,} messages summarized in "
                f"{len(self.summary.text):,} characters"
            )
        told = [section.describe(self) for section in _sections.SECTIONS]
        counts = ", ".join(each for each in told if each)
        line = f"{self.owner}: {usage}; {said}"
        return f"{line}; {counts}" if counts else line


def _find(session: Session, agent: str) -> list[_Stored]:
    """Returns the values of this agent; of all where none is named."""
    owners = set()
    for key, value in session.state.items():
        match = _OWNER.match(key)
        if match and value and agent in ("", match[1]):
            owners.add(match[1])
    return [_Stored(session, owner) for owner in sorted(owners)]


def _choose(session: Session, agent: str) -> list[_Stored]:
    """Returns the agents whose summaries are to be changed, at least one."""
    found = [stored for stored in _find(session, agent) if stored.summary]
    if not found:
        raise SessionError(f"there is no summary of {agent or 'any agent'}")
    if any(each.record.is_newer for each in found):
        raise SessionError("a later release has written this state; use that one")
    return found


async def compact(
    service: Service,
    session: Session,
    agent: str = "",
    focus: str = "",
    force: bool = False,
) -> str:
    """Has the next model call compact; the summary keeps the `focus` above all."""
    delta = dict[str, Any]()
    name = agent.partition("@")[0]
    keys.request_compaction(delta, name, focus)
    said = f"the next model call of {name or 'a guarded agent'} compacts"
    return await _append(service, session, said, EventActions(state_delta=delta), force)


async def reset(
    service: Service, session: Session, agent: str = "", force: bool = False
) -> str:
    """Removes summaries: the next call has all messages, and compacts where it must.

    Pins, todos and what was learned of models stay.
    """
    delta = dict[str, Any]()
    found = _choose(session, agent)
    for state in found:
        state.edit_summary(None)
        for name in keys.SCOPED_NAMES[:-1]:
            state.write(name, None)
        for key in state.find(keys.EVENTS_SINCE_KEY):
            state.set(keys.EVENTS_SINCE_KEY + key, None)
        delta |= state.delta
    said = f"{_name(found)} is gone; the next call has all messages"
    return await _append(service, session, said, EventActions(state_delta=delta), force)


def read(session: Session, agent: str = "") -> str:
    """Returns the text of a summary, of the only one where no agent is named."""
    found = _choose(session, agent)
    if len(found) > 1:
        raise SessionError(f"there is {_name(found)}: name one agent")
    return found[0].summary.text if found[0].summary else ""


async def edit(
    service: Service, session: Session, text: str, agent: str = "", force: bool = False
) -> str:
    """Replaces a summary's text by 1 to 262,144 characters; the sections stay."""
    known = read(session, agent)
    state = _choose(session, agent)[0]
    # Databases refuse these characters.
    new = text.strip().replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if not 0 < len(new) <= MAX_SUMMARY_CHARS:
        raise SessionError(f"1 to {MAX_SUMMARY_CHARS:,} characters, not {len(new):,}")

    stored = state.summary or StoredSummary()
    changed = stored.model_copy(update={"model_chars": len(new)})
    state.edit_summary(changed)
    state.write("summary", new)
    said = f"{_name([state])} has {len(new):,} characters, it had {len(known):,}"
    actions = EventActions(state_delta=state.delta)
    return await _append(service, session, said, actions, force)


async def leave(
    service: Service, session: Session, agent: str = "", force: bool = False
) -> str:
    """Makes summaries ADK's own compaction: the session goes on without a guard.

    The compaction has the text that the agent would see in place of older messages:
    summary, user's messages, values, calls and pins, but no images and files. Messages
    that were kept are in it word for word. It ends before the first call that waits for
    a result. ADK shows it to all agents: the texts of several stand one after another.

    The guard's values are removed. Agents in a branch or an isolation scope stay as
    they are.
    """
    found = [each for each in _choose(session, agent) if each.owner == each.agent]
    views = [await _view(state) for state in found]
    views.sort(key=lambda view: view.event_count)
    newest = views[-1] if views else _View(0, "", [])
    if not newest.event_count:
        raise SessionError("what is summarized is gone, in a branch, or has open calls")

    text = "\n\n".join([*(view.summary for view in views), *newest.kept])
    # As ADK relays an agent: strict providers want no request to begin otherwise.
    parts = [
        types.Part(text="For context:"),
        types.Part(text=f"[{found[0].agent}] said: {text}"),
    ]
    compaction = EventCompaction(
        start_timestamp=0.0,  # Also where the session is loaded in part.
        end_timestamp=session.events[newest.event_count - 1].timestamp,
        compacted_content=types.UserContent(parts),
    )

    delta = {
        key: None for key in _list_keys(found) if session.state.get(key) is not None
    }
    said = (
        f"{newest.event_count:,} events give way to {_name(found)}, as ADK's own "
        "compaction"
    )
    actions = EventActions(state_delta=delta, compaction=compaction)
    return await _append(service, session, said, actions, force)


def _list_keys(states: Sequence[_Stored]) -> Iterator[str]:
    """Yields the keys of agents, in both of their forms."""
    names = (*keys.SCOPED_NAMES, "compacted", "usage", "events_since")
    for form in ("__context_guard_{}_{}", "context_guard:{}:{}"):
        for name in names:
            for state in states:
                yield form.format(name, state.owner)


class _View(NamedTuple):
    """A request as an agent would see it now.

    `event_count` is how many of the first events the summary replaces, with the older
    messages that are `kept`.
    """

    event_count: int
    summary: str
    kept: list[str]


async def _view(state: _Stored) -> _View:
    """Builds a request with ADK's own code, and renders the summary in it."""
    said = types.UserContent("?")
    run_id = Event.new_id()
    asked = Event(author="user", invocation_id=run_id, content=said)
    events = [*state.session.events, asked]
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
    history = History(request.contents, invocation, said, stored)
    covered = history.covered
    summary = content_text(render_head(history, stored, covered))
    last = max(covered, default=0)
    older = [i for i in history.indexes if i < last and i not in covered]
    kept = [entry.text for entry in render_entries(request.contents, older)]

    last_id = stored.last_event or history.last_event(covered)
    end = 0
    for number, event in enumerate(events, 1):
        if covered and event.id == last_id:
            end = number
    return _View(_count_removable(events, end), summary, kept)


def _count_removable(events: Sequence[Event], most: int) -> int:
    """Returns how many of the first events may go without a pair being split."""
    needed = _find_needed(events, most)
    # A clock may be behind: later events may have older times.
    times = [event.timestamp for event in events]
    oldest_times = list(accumulate(reversed(times), min))[::-1]

    count = 0
    last_needed = -1
    for place in range(most):
        last_needed = max(last_needed, needed[place])
        is_last = place + 1 == len(events)
        is_oldest = is_last or oldest_times[place + 1] > times[place]
        if last_needed == place and is_oldest:
            count = place + 1
    return count


def _find_needed(events: Sequence[Event], most: int) -> list[int]:
    """Returns for each event the place of the last result of its calls, or its own.

    A call whose result somebody waits for needs the first `most` events and more.
    """
    needed = list(range(len(events)))
    next_results: dict[str | None, int] = {}  # Ids may come again: the next one counts.
    for place, event in reversed(list(enumerate(events))):
        awaited_ids = event.long_running_tool_ids or ()
        for call in event.get_function_calls():
            end = most if call.id in awaited_ids else place
            needed[place] = max(needed[place], next_results.get(call.id, end))
        for response in event.get_function_responses():
            next_results[response.id] = place
    return needed


def _name(states: Sequence[_Stored]) -> str:
    return f"the summary of {', '.join(state.owner for state in states)}"


async def _append(
    service: Service, session: Session, said: str, actions: EventActions, force: bool
) -> str:
    """Appends one event; returns a line on the change."""
    if not force and _is_busy(session):
        raise SessionError("a run seems to be under way: wait, or force the change")

    # The author that ADK gives to a compaction, and to a change of the state.
    event = Event(author="user", invocation_id=Event.new_id(), actions=actions)
    await service.append_event(session, event)
    return f"Session {session.id!r}: {said}."


def _is_busy(session: Session) -> bool:
    """Whether the newest message has no answer, and is new."""
    told = [event for event in session.events if event.content and not event.partial]
    if not told:
        return False
    last = told[-1]
    is_open = last.author == "user" or not last.is_final_response()
    return is_open and time.time() - last.timestamp < BUSY_SECONDS


async def purge(
    artifacts: BaseArtifactService, *, app_name: str, user_id: str, session_id: str
) -> int:
    """Deletes the artifacts that `summary_artifacts=True` has saved of a session.

    ADK deletes no artifact with its session: call this beside `delete_session`.

    Returns:
        How many artifacts were deleted.
    """
    place = {"app_name": app_name, "user_id": user_id, "session_id": session_id}
    names = await artifacts.list_artifact_keys(**place)
    found = [name for name in names if fnmatch(name, "compaction-*.md")]
    for name in found:
        await artifacts.delete_artifact(**place, filename=name)
    return len(found)


async def load_recent(
    service: Service, app: App, *, user_id: str, session_id: str
) -> GetSessionConfig | None:
    """Returns how to load a session without the events that no agent needs any more.

    The result is for `RunConfig(get_session_config=…)` of a run of this app, whose
    plugins have a guard with `recent_events=True`.

    Returns:
        None where all events are needed, or there is no session. An agent needs all
        events that has had no compaction in the session yet, is not guarded, has a
        strategy that a function chooses, or is of a class that reads events by itself.
    """
    guards = (each for each in app.plugins if isinstance(each, ContextGuardPlugin))
    settings = next((each.settings for each in guards), PluginSettings())
    if not settings.recent_events or settings.observe:
        return None

    newest = GetSessionConfig(num_recent_events=1)  # It has all of the state.
    session = await service.get_session(
        app_name=app.name, user_id=user_id, session_id=session_id, config=newest
    )
    if not session or session.state.get(keys.OFF_KEY) is True:
        return None

    latest = max((event.timestamp for event in session.events), default=0.0)
    times: list[float] = []
    for name in _list_readers(app.root_agent):
        since: Any = session.state.get(keys.EVENTS_SINCE_KEY + name)
        strategy = settings.agents.get(name, settings.default)
        # Anybody may have written to session state.
        is_time = isinstance(since, float) and 0 < since <= latest
        if not is_time or not isinstance(strategy, Strategy):
            return None
        times.append(since)
    return GetSessionConfig(after_timestamp=min(times)) if times else None


def _list_readers(agent: object) -> Iterator[str]:
    """Names the agents that read a session's history; "" for one of another class."""
    if isinstance(agent, LlmAgent):
        if agent.include_contents != "none":
            yield agent.name
    elif type(agent) not in (SequentialAgent, LoopAgent, ParallelAgent):
        yield ""
    for child in getattr(agent, "sub_agents", ()):
        yield from _list_readers(child)
