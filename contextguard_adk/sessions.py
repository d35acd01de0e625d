"""Shows, changes and loads what the guard keeps of a session between its runs.

Each change is one event with a state delta, by ADK's own session service, and returns
a line that says what it changed. Of all functions:

- `session` was loaded from `service`, with all of its events.
- `agent` is an agent's name, in a branch or isolation scope as `show` has it; "" takes
  all, but for `edit` the only one.
- `force` makes a change though a run seems to be under way: the newest message has no
  answer, and is less than ten minutes old.
- A `SessionError` says why nothing was changed.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from itertools import accumulate
from typing import Any

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
    """Nothing was changed; the message is one line that says why."""


def show(session: Session, agent: str = "", is_full: bool = False) -> list[str]:
    """Returns a line on each agent; `is_full` adds the texts of the summaries."""
    return [line for each in _find(session, agent) for line in each.describe(is_full)]


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

    def describe(self, is_full: bool) -> Iterator[str]:
        tokens = self.read("real_tokens")
        said = "no summary"
        usage = f"{int(tokens):,} tokens" if tokens else "no count"
        usage = self.session.state.get(keys.USAGE_KEY + self.owner) or usage
        text = self.summary.text if self.summary else ""
        if self.summary:
            said = f"{self.summary.covered.content_count:,} messages summarized in "
            said += f"{len(text):,} characters"
        told = [section.describe(self) for section in _sections.SECTIONS]
        counts = ", ".join(each for each in told if each)
        facts = [usage, said, counts]
        yield f"{self.owner}: {'; '.join(fact for fact in facts if fact)}"
        yield from text.splitlines() if is_full else ()


def _find(session: Session, agent: str) -> list[_Stored]:
    found = (_OWNER.match(key) for key, value in session.state.items() if value)
    owners = sorted({match[1] for match in found if match})
    return [_Stored(session, owner) for owner in owners if agent in ("", owner)]


def _choose(session: Session, agent: str) -> list[_Stored]:
    """Returns the agents whose summaries are to be changed."""
    if not (found := [each for each in _find(session, agent) if each.summary]):
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
    """Has the next model call compact; `focus` is what to keep above all."""
    delta = dict[str, Any]()
    name = agent.partition("@")[0]
    keys.request_compaction(delta, name, focus)
    said = f"the next model call of {name or 'a guarded agent'} compacts"
    return await _append(service, session, said, delta, force)


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
    return await _append(service, session, said, delta, force)


def read(session: Session, agent: str = "") -> str:
    """Returns the text of a summary, of the only one where no agent is named."""
    if len(found := _choose(session, agent)) > 1:
        raise SessionError(f"there is {_name(found)}: name one agent")
    return found[0].summary.text if found[0].summary else ""


async def edit(
    service: Service, session: Session, text: str, agent: str = "", force: bool = False
) -> str:
    """Replaces a summary's text by 1 to 262,144 characters; what is beside it stays."""
    known = read(session, agent)
    [state, *_] = _choose(session, agent)
    text = text.strip().replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if not 0 < len(text) <= MAX_SUMMARY_CHARS:
        raise SessionError(f"1 to {MAX_SUMMARY_CHARS:,} characters, not {len(text):,}")
    stored = state.summary or StoredSummary()
    changed = stored.model_copy(update={"model_chars": len(text)})
    state.edit_summary(changed)
    state.write("summary", text)
    said = f"{_name([state])} has {len(text):,} characters, it had {len(known):,}"
    return await _append(service, session, said, state.delta, force)


async def leave(
    service: Service, session: Session, agent: str = "", force: bool = False
) -> str:
    """Makes summaries ADK's own compaction: the session goes on without a guard.

    It has what the agent would see in place of older messages, but for images and files
    (summary, user's messages, values, calls, pins), and word for word what was kept. It
    ends before the first call that waits for a result. ADK shows it to all agents: of
    several, the texts stand one after another. Then nothing is stored of them any more.
    Agents in a branch or an isolation scope are left out.
    """
    found = [each for each in _choose(session, agent) if each.owner == each.agent]
    views = sorted([await _view(state) for state in found], key=lambda view: view[0])
    end, _, kept = views[-1] if views else (0, "", [])  # Of the newest.
    if not end:
        raise SessionError("what is summarized is gone, in a branch, or has open calls")
    text = "\n\n".join([*(said for _, said, _ in views), *kept])
    # As ADK relays an agent: strict providers want no request to begin otherwise.
    parts = [types.Part(text="For context:")]
    parts.append(types.Part(text=f"[{found[0].agent}] said: {text}"))
    compaction = EventCompaction(
        start_timestamp=0.0,  # Also where the session is loaded in part.
        end_timestamp=session.events[end - 1].timestamp,
        compacted_content=types.UserContent(parts),
    )
    forms = ("__context_guard_{}_{}", "context_guard:{}:{}")
    names = (*keys.SCOPED_NAMES, "compacted", "usage", "events_since")
    stored = [f.format(name, s.owner) for f in forms for name in names for s in found]
    delta = {key: None for key in stored if session.state.get(key) is not None}
    done = f"{end:,} events give way to {_name(found)}, as ADK's own compaction"
    return await _append(service, session, done, delta, force, compaction)


async def _view(state: _Stored) -> tuple[int, str, list[str]]:
    """Returns how many events a request has a text for, that, and what it keeps."""
    said = types.UserContent("?")
    run_id = Event.new_id()
    request = LlmRequest()
    asked = Event(author="user", invocation_id=run_id, content=said)
    events = [*state.session.events, asked]
    invocation = InvocationContext(
        session_service=InMemorySessionService(),
        session=state.session.model_copy(update={"events": events}),
        invocation_id=run_id,
        agent=LlmAgent(name=state.agent, model="gemini-2.5-flash"),
    )
    async for _ in request_processor.run_async(invocation, request):
        pass
    stored = without_recall(state.summary or StoredSummary())
    history = History(request.contents, invocation, said, stored)
    text = content_text(render_head(history, stored, covered := history.covered))
    others = (i for i in history.indexes if i not in covered)
    older = [i for i in others if i < max(covered, default=0)]
    kept = [entry.text for entry in render_entries(request.contents, older)]
    last_id = stored.last_event or history.last_event(covered)
    ends = (i for i, e in enumerate(events, 1) if covered and e.id == last_id)
    return _find_end(events, max(ends, default=0)), text, kept


def _find_end(events: Sequence[Event], most: int) -> int:
    """Returns how many of the first events may go without a pair being split."""
    places = defaultdict[str | None, list[int]](list)
    for index, event in enumerate(events):
        for response in event.get_function_responses():
            places[response.id].append(index)
    # A clock may be behind: what comes later may bear an older time.
    times = [*accumulate((e.timestamp for e in reversed(events)), min)][::-1]
    end = 0
    reach = -1
    for index, event in enumerate(events[:most]):
        for call in event.get_function_calls():
            # For the result of any other call nobody waits; ids may come again.
            is_open = call.id in (event.long_running_tool_ids or ())
            later = (place for place in places[call.id] if place > index)
            reach = max(reach, next(later, most if is_open else index))
        if reach <= index and all(t > event.timestamp for t in times[index + 1 :][:1]):
            end = index + 1
    return end


def _name(states: Sequence[_Stored]) -> str:
    return f"the summary of {', '.join(state.owner for state in states)}"


async def _append(
    service: Service,
    session: Session,
    said: str,
    delta: dict[str, Any],
    force: bool,
    compaction: EventCompaction | None = None,
) -> str:
    told = [event for event in session.events if event.content and not event.partial]
    for last in told[-1:] if not force else ():
        is_open = last.author == "user" or not last.is_final_response()
        if is_open and time.time() - last.timestamp < BUSY_SECONDS:
            raise SessionError("a run seems to be under way: wait, or force the change")
    actions = EventActions(state_delta=delta, compaction=compaction)
    # The author that ADK gives to a compaction, and to a change of the state.
    event = Event(author="user", invocation_id=Event.new_id(), actions=actions)
    await service.append_event(session, event)
    return f"Session {session.id!r}: {said}."


async def purge(
    artifacts: BaseArtifactService, *, app_name: str, user_id: str, session_id: str
) -> int:
    """Deletes what `summary_artifacts=True` has saved of a session; says how many.

    ADK deletes no artifact with its session: call it beside `delete_session`.
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

    For `RunConfig(get_session_config=…)` of a run of this app, whose plugins have a
    guard with `recent_events=True`.

    Returns:
        None where all events are needed: an agent that may read them has had no
        compaction in the session yet, is not guarded, is chosen a strategy for by a
        function, or is of a class that reads events by itself; or there is no session.
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
    times = list[float]()
    for name in _list_readers(app.root_agent):
        since: Any = session.state.get(keys.EVENTS_SINCE_KEY + name)
        strategy = settings.agents.get(name, settings.default)
        # Anybody may have written it.
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
