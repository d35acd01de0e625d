"""What the process remembers between the callbacks of a run; all of it bounded.

What belongs to a run goes with it, however it ends. A session leaves flags, numbers and
the summaries on its shelf. A process that starts anew loses at most these, and pays for
them again.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk._history.adk_events import name_run
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._providers.clients import find_llm, json_form
from contextguard_adk._providers.registry import ModelRegistry
from contextguard_adk._runtime.memory import (
    AgentMemory,
    BoundedDict,
    Limit,
    Paid,
    PendingSummary,
)
from contextguard_adk._runtime.settings import GuardSettings
from contextguard_adk._runtime.state import COMPACTED_KEY, AgentState, RunWrites
from contextguard_adk._support.observers import Observers
from contextguard_adk._support.redaction import Redactor
from contextguard_adk._support.tasks import SummaryTasks
from contextguard_adk.records import CompactionRecord, Origin

MAX_IDLE_SESSIONS = 1_024
MAX_SESSIONS = 8_192  # With the others, each with a summary of about 10 KB.


CallKey = tuple[str, str]  # Agent, scope.


def name_session(invocation: InvocationContext) -> str:
    """Names a session; its id alone does not, every user may have one of that id."""
    session = invocation.session
    return "\0".join((session.app_name, session.user_id, session.id))


def call_key(context: CallbackContext) -> CallKey:
    """Identifies the model call that a callback is about, in its run."""
    return context.agent_name, branch_scope(context.get_invocation_context())


def summary_scope(invocation: InvocationContext) -> str:
    """Names where a summary is valid: without history only in one run."""
    place = _branch_and_isolation(invocation)
    return digest([invocation.session.id, *place, *name_run(invocation)])


def branch_scope(place: InvocationContext | Event) -> str:
    """Names branch and isolation scope; "" where there are none."""
    names = _branch_and_isolation(place)
    return digest(names) if any(names) else ""


def _branch_and_isolation(place: Any) -> list[str]:
    return [place.branch or "", getattr(place, "isolation_scope", "") or ""]


def digest(names: Sequence[str]) -> str:
    return hashlib.blake2b("\0".join(names).encode(), digest_size=8).hexdigest()


@dataclass
class SentCall:
    """A model call between `before_model` and its answer."""

    heuristic_tokens: int
    estimated_tokens: int
    window_tokens: int
    threshold_tokens: int = 0
    model: str = ""
    client: tuple[str, int] = ("", 0)  # Whose limits count, see `Call.client`.
    original_contents: Sequence[types.Content] = ()
    sent_contents: Sequence[types.Content] = ()
    sent_config: types.GenerateContentConfig | None = None
    # As later callbacks leave it; its tools hold the session, so it is held weakly.
    request: Callable[[], LlmRequest | None] = lambda: None
    stated_window_tokens: int = 0  # Without what was learned; 0 if unknown.
    is_observed: bool = False
    memory: AgentMemory = field(default_factory=AgentMemory)
    origin: Origin = field(default=Origin("", ""))
    compaction: CompactionRecord | None = None
    after_answer: Callable[[int], None] | None = None
    is_answered: bool = False
    is_reported: bool = False
    is_recovered: bool = False

    def release(self) -> None:
        """Forgets the contents, and keeps the numbers."""
        self.original_contents = self.sent_contents = ()
        self.sent_config = self.after_answer = None


class Run:
    """What is remembered of a run for as long as ADK keeps its session object."""

    def __init__(self, invocation: InvocationContext, memo: Memo | None) -> None:
        self.invocation_id = invocation.invocation_id
        self.writes = RunWrites(invocation.session.state)
        self.calls: dict[CallKey, SentCall] = {}
        self.metadata: dict[CallKey, dict[str, Any]] = {}  # For the next event.
        self._memos: dict[str, Memo] = {}
        self._recorded = memo
        self._paid: list[AgentMemory] = []  # Whose summaries it has put in.
        self._events = invocation.session.events

    def memo(self, invocation: InvocationContext) -> Memo:
        """Returns what measures an agent's contents, and knows earlier results."""
        agent = getattr(invocation.agent, "name", "")
        if (memo := self._recorded or self._memos.get(agent)) is None:
            form = json_form(find_llm(invocation.agent))
            memo = Memo(self._events, self.invocation_id, form)
            self._memos[agent] = memo
        return memo

    def put_in(self, memory: AgentMemory, paid: Paid, key: str) -> None:
        """Takes a summary off the shelf; remembers it until an event has brought it."""
        if known := memory.facts.put_in:
            # What stood in the session before the run counts, not before this call.
            paid = replace(paid, replaced=known.replaced)
        count = len(self._events)
        run_id = self.invocation_id
        paid = replace(paid, key=key, event_count=count, run_id=run_id)
        memory.facts = replace(
            memory.facts, put_in=paid, ready=None, is_background_tried=False
        )
        self._paid.append(memory)

    def describe(self, key: CallKey, name: str, said: object) -> None:
        """Lets the next event of an agent carry something in `custom_metadata`."""
        if said:
            self.metadata.setdefault(key, {})[name] = said

    def hand_over(self, event: Event, state: Mapping[str, Any]) -> None:
        """Lets an event carry the state and the metadata that wait for it."""
        key = event.author, branch_scope(event)
        if delta := self.writes.take(key[1], state) | event.actions.state_delta:
            # ADK's web UI labels an event by the first key.
            keys = sorted(delta, key=lambda name: not name.startswith(COMPACTED_KEY))
            update: dict[str, Any] = {"state_delta": {key: delta[key] for key in keys}}
            update["artifact_delta"] = {**event.actions.artifact_delta}
            # The partial events of the call have the same actions.
            event.actions = event.actions.model_copy(update=update)
        if self.writes.owners and event.is_final_response():
            self.writes.owners.discard("@".join(key))
        if said := self.metadata.pop(key, None):
            # The dict may be that of the model's own response.
            event.custom_metadata = {**(event.custom_metadata or {}), **said}

    def forget_delivered(self) -> None:
        """Forgets the summaries that an event has brought to the session."""
        for memory in self._paid:
            paid = memory.facts.put_in
            if paid is None or paid.run_id != self.invocation_id:
                continue
            newer = self._events[paid.event_count :]
            if any(paid.key in event.actions.state_delta for event in newer):
                memory.facts = replace(memory.facts, put_in=None)


@dataclass
class Guard:
    """What lives as long as the plugin; `registry=None` is the default registry."""

    settings: GuardSettings = field(default_factory=GuardSettings)
    registry: ModelRegistry | None = None
    redactor: Redactor = field(default_factory=Redactor)
    observers: Observers = field(default_factory=Observers)
    recorded: Memo | None = None  # Of a replay, in which no tool changes a result.
    has_namespaced_keys: bool = field(init=False)  # "auto" is decided by each app.
    seen_apps: set[str] = field(default_factory=set)  # Told what is guarded.
    tasks: SummaryTasks = field(init=False)
    # What this process keeps to, and has seen accepted, by client (`Call.client`).
    limits: BoundedDict[tuple[str, int], Limit] = field(default_factory=BoundedDict)
    accepted: BoundedDict[tuple[str, int], int] = field(default_factory=BoundedDict)
    # Name and version of what no event has named yet.
    artifacts: BoundedDict[tuple[str, str, str], tuple[str, int]] = field(
        default_factory=BoundedDict
    )
    _memories: BoundedDict[tuple[str, str, str], AgentMemory] = field(
        default_factory=lambda: BoundedDict(MAX_SESSIONS)
    )
    # id(state) to the ids of its session objects, and to its runs by invocation id:
    # ADK 2.0 gives each node of a workflow a copy of the session.
    _runs: dict[int, tuple[set[int], dict[str, Run]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.has_namespaced_keys = self.settings.state_keys == "namespaced"
        self.tasks = SummaryTasks(self.settings.max_background_summaries)

    def memory(
        self, invocation: InvocationContext, agent: str, scope: str
    ) -> AgentMemory:
        """Returns what is remembered of an agent in a scope of a session."""
        key = name_session(invocation), agent, scope
        found = self._memories.get(key) or AgentMemory(PendingSummary(self.tasks))
        self._memories[key] = found
        idle = []
        for each, memory in self._memories.snapshot():
            if memory.facts.ready or memory.facts.put_in:
                memory.drop_late()
            elif memory.pending.task is None:
                idle.append(each)
        for each in idle[:-MAX_IDLE_SESSIONS]:
            self._memories.pop(each, None)
        return found

    def run(self, invocation: InvocationContext) -> Run:
        """Returns what is remembered of a run.

        A run that was cancelled calls nothing of ours: it ends with its session object,
        which services make anew for each run.
        """
        session = invocation.session
        run_id = invocation.invocation_id
        place = id(session.state), id(session)
        sessions, runs = self._runs.setdefault(place[0], (set(), {}))
        if place[1] not in sessions:
            sessions.add(place[1])
            weakref.finalize(session, self._leave, *place).atexit = False
        if (run := runs.get(run_id)) is None:
            runs[run_id] = run = Run(invocation, self.recorded)
        return run

    def pop_run(self, invocation: InvocationContext) -> Run:
        """Returns what is remembered of a run that has ended, and forgets it."""
        run = self.run(invocation)
        self._runs[id(invocation.session.state)][1].pop(run.invocation_id, None)
        return run

    def _leave(self, state_id: int, session_id: int) -> None:
        sessions, runs = self._runs[state_id]
        sessions.discard(session_id)
        if not sessions:
            del self._runs[state_id]
            for run in runs.values():
                run.forget_delivered()

    def state(self, context: CallbackContext) -> AgentState:
        invocation = context.get_invocation_context()
        return AgentState(
            context.state,
            context.agent_name,
            self.has_namespaced_keys,
            branch_scope(invocation),
            self.run(invocation).writes,
        )

    def hand_over(self, event: Event, invocation: InvocationContext) -> None:
        """Lets an event carry what no event before it has."""
        run = self.run(invocation)
        if event.partial:  # It may share its actions with the last one.
            waiting = set[str]().union(*run.writes.pending.values())
            if waiting & (delta := event.actions.state_delta).keys():
                rest = {key: delta[key] for key in delta.keys() - waiting}
                event.actions = event.actions.model_copy(update={"state_delta": rest})
            return
        run.hand_over(event, invocation.session.state)
        parts = event.content and event.content.parts
        # ADK's web server sends an artifact apart, as the same event without content:
        # its page then shows no text, and fails at a long-running call.
        if event.long_running_tool_ids or any(p and p.text for p in parts or ()):
            return
        key = name_session(invocation), event.author, branch_scope(event)
        if saved := self.artifacts.pop(key, None):
            event.actions.artifact_delta.update([saved])
