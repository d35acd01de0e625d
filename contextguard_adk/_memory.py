"""What the guard remembers in process between two callbacks; all of it bounded.

What is of a run goes with it, however it ends. A session leaves flags, numbers, names
of artifacts, a summary that was written ahead of time, and for ten minutes one that was
paid for in a run that failed or was cancelled. A process that starts anew loses at most
these, and pays for them again.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from google.genai import types

from contextguard_adk._history.shown import name_run
from contextguard_adk._history.state import COMPACTED_KEY, AgentState, RunWrites
from contextguard_adk._history.stored import AheadSummary, StoredSummary
from contextguard_adk._history.thoughts import SEAL_KEY, SealedRequest
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._pending import PendingSummary, SummaryTasks
from contextguard_adk._providers.clients import find_llm, json_form
from contextguard_adk._providers.costs import Costs
from contextguard_adk._providers.windows import ModelRegistry
from contextguard_adk.telemetry import METADATA_KEY, CompactionRecord, Observers, Usage

if TYPE_CHECKING:
    from google.adk.agents.callback_context import CallbackContext
    from google.adk.agents.invocation_context import InvocationContext
    from google.adk.events.event import Event

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V], Generic[K, V]):
    """A dict for several threads that forgets its oldest entry when it is full."""

    def __init__(self, max_count: int = 1_024) -> None:
        super().__init__()
        self._max_count = max_count
        self._lock = threading.Lock()

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            super().__setitem__(key, value)
            self.move_to_end(key)
            while len(self) > self._max_count:
                self.popitem(last=False)

    def snapshot(self) -> list[V]:
        """The values as they are now; to iterate over the dict itself is not safe."""
        with self._lock:
            return list(self.values())


SessionKey = tuple[str, str, str]  # Session, agent, scope.
CallKey = tuple[str, str]  # Agent, scope.

UNSAVED_SECONDS = 600
"""How long a paid summary waits for the next call of its session."""


@dataclass(frozen=True)
class Unsaved:
    """A summary of a run, until the session is seen to have it.

    `replaced` is what stood there before; the run itself reads its own writes. Nobody
    has heard yet of an `unreported` one: its call was cancelled. The session has it
    once an event behind the first `event_count` has written its `key`.
    """

    summary: StoredSummary
    tokens: int
    replaced: StoredSummary | None
    invocation_id: str
    unreported: CompactionRecord | None = None
    key: str = ""
    event_count: int = 0
    paid_seconds: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Counted:
    """What a model counted last, and bytes / 4 of the text that it was of."""

    model: str = ""
    real_tokens: int = 0
    text_tokens: int = 0
    is_behind: bool = False  # Of what was sent.


@dataclass(slots=True)
class SessionMemory:
    """What is remembered of one agent in one scope of a session."""

    unsaved: Unsaved | None = None
    pending: PendingSummary = field(default_factory=PendingSummary)
    ahead: AheadSummary | None = None  # Until it is put in.
    is_ahead_tried: bool = False  # Since the last compaction.
    compacted_run: str = ""  # The run whose last call was compacted, if it was.
    was_full: bool = False  # Whether that was because of its tokens.
    dropped_tokens: int | None = None  # The estimate where compacting gained nothing.
    is_fixed_part_reported: bool = False
    is_under_pressure: bool = False
    cached_ratio: float = 0.0  # Of the last prompt, served from a cache.
    is_in_place_useless: bool = False
    changed_count: int = 0  # Of calls before which others changed what thoughts need.
    refusals: frozenset[str] = frozenset()  # Kinds that were logged.
    accepted: tuple[str, int] = "", 0  # A model; the largest prompt it has taken.
    counted: Counted = Counted()
    max_media_bytes: int | None = None  # More were refused.
    summary_usage: Usage = field(default_factory=Usage)  # Not in a record yet.
    summary_cost: float | None = 0.0

    def accepted_tokens(self, model: str) -> int:
        """The largest prompt that this process has seen the model accept."""
        name, tokens = self.accepted  # Counts in session state may be another model's.
        return tokens if name == model else 0

    def take_lost(self, stored: StoredSummary | None, run_id: str) -> Unsaved | None:
        """Takes the paid summary that the session has not got; None for no such one.

        Another one in the session means that it was saved, or that another process
        saved one.
        """
        unsaved = self.unsaved
        is_lost = unsaved is not None and unsaved.replaced == stored
        # Whether ADK kept what a run wrote is seen by a later one only.
        if is_lost or (unsaved and unsaved.invocation_id != run_id):
            self.unsaved = None
        return unsaved if is_lost else None

    def keep(self, made: Unsaved) -> None:
        """Keeps a summary; what stood in the session before its run counts on."""
        known = self.unsaved
        self.unsaved = replace(made, replaced=known.replaced) if known else made

    def take_summaries(self) -> tuple[Usage, float | None]:
        """Returns once what summary calls took, and their price in US dollars."""
        taken = self.summary_usage, self.summary_cost
        self.summary_usage, self.summary_cost = Usage(), 0.0
        return taken


@dataclass
class CallInFlight:
    """A model call between `before_model` and its answer."""

    heuristic_tokens: int
    estimated_tokens: int
    window_tokens: int
    threshold_tokens: int = 0
    model: str = ""
    original_contents: Sequence[types.Content] = ()
    sent_contents: Sequence[types.Content] = ()
    sent_config: types.GenerateContentConfig | None = None
    sealed: SealedRequest | None = None
    session: SessionMemory = field(default_factory=SessionMemory)
    compaction: CompactionRecord | None = None
    write_ahead: Callable[[int], None] | None = None  # By the tokens that it took.
    is_answered: bool = False
    is_reported: bool = False
    is_recovered: bool = False

    def release(self) -> None:
        """Forgets the contents, and keeps the numbers."""
        self.original_contents = self.sent_contents = ()
        self.sent_config = self.sealed = self.write_ahead = None


class CircuitBreaker:
    """Skips a summarizer for one compaction after three failures in a row.

    Then it is asked again; while it goes on failing, every second compaction skips it.
    """

    def __init__(self) -> None:
        self._failures: BoundedDict[str, int] = BoundedDict()  # In a row, by model.

    def allows(self, model: str) -> bool:
        """Whether to ask a model; called once for each compaction."""
        if self._failures.get(model, 0) < 3:
            return True
        self._failures[model] = 2
        return False

    def note(self, model: str, has_failed: bool) -> None:
        """Counts a failure of a model that was asked; a success ends the count."""
        self._failures[model] = self._failures.get(model, 0) + 1 if has_failed else 0


class Run:
    """What is remembered of a run for as long as ADK keeps its session object."""

    def __init__(self, invocation: InvocationContext) -> None:
        self.invocation_id = invocation.invocation_id
        self.writes = RunWrites(invocation.session.state)
        self.calls: dict[CallKey, CallInFlight] = {}
        self.descriptions: dict[CallKey, dict[str, Any]] = {}  # For the next event.
        self.seals: dict[CallKey, dict[str, Any]] = {}  # Likewise.
        self._memos: dict[str, Memo] = {}
        self._paid: list[SessionMemory] = []  # Whose summaries it has written.
        self._events = invocation.session.events

    def memo(self, invocation: InvocationContext) -> Memo:
        """Measures what an agent's model is sent; knows what was computed before."""
        agent = getattr(invocation.agent, "name", "")
        if (memo := self._memos.get(agent)) is None:
            form = json_form(find_llm(invocation.agent))
            memo = Memo(self._events, self.invocation_id, form)
            self._memos[agent] = memo
        return memo

    def keep_written(self, session: SessionMemory, made: Unsaved, key: str) -> None:
        """Keeps a summary until an event has brought what is written under a key."""
        event_count = len(self._events)
        session.keep(replace(made, key=key, event_count=event_count))
        self._paid.append(session)

    def hand_over(self, event: Event, state: Mapping[str, Any]) -> None:
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
        told = {METADATA_KEY: self.descriptions, SEAL_KEY: self.seals}
        for name, waiting in told.items():
            if said := waiting.pop(key, None):
                # The dict may be that of the model's own response.
                event.custom_metadata = {**(event.custom_metadata or {}), name: said}

    def settle(self) -> None:
        """Forgets the paid summaries that an event has brought to the session."""
        for session in self._paid:
            unsaved = session.unsaved
            if unsaved is None or unsaved.invocation_id != self.invocation_id:
                continue
            newer = self._events[unsaved.event_count :]
            if any(unsaved.key in event.actions.state_delta for event in newer):
                session.unsaved = None


class Memory:
    """All that one plugin instance remembers."""

    def __init__(self) -> None:
        self.sessions: BoundedDict[SessionKey, SessionMemory] = BoundedDict()
        self.breaker = CircuitBreaker()
        self.tasks = SummaryTasks()
        # Name and version of what no event has named yet.
        self.artifacts: BoundedDict[SessionKey, tuple[str, int]] = BoundedDict()
        # By the identity of a session's state: the sessions that have it, and by
        # invocation. ADK 2.0 gives each node of a workflow a copy of the session.
        self._runs: dict[int, tuple[set[int], dict[str, Run]]] = {}

    def session(self, key: SessionKey) -> SessionMemory:
        """What is remembered of an agent in a session."""
        self.drop_unsaved(time.monotonic())
        known = self.sessions.get(key)
        session = known or SessionMemory(pending=PendingSummary(self.tasks))
        self.sessions[key] = session
        return session

    def drop_unsaved(self, now_seconds: float) -> None:
        """Forgets the paid summaries for which no call has come."""
        for session in self.sessions.snapshot():
            unsaved = session.unsaved
            if unsaved and now_seconds - unsaved.paid_seconds > UNSAVED_SECONDS:
                session.unsaved = None

    def run(self, invocation: InvocationContext) -> Run:
        """What is remembered of a run.

        A run that was cancelled calls nothing of ours: it ends with its session object,
        which services make anew for each run.
        """
        session, run_id = invocation.session, invocation.invocation_id
        place = id(session.state), id(session)
        sessions, runs = self._runs.setdefault(place[0], (set(), {}))
        if place[1] not in sessions:
            sessions.add(place[1])
            weakref.finalize(session, self._leave, *place).atexit = False
        if (run := runs.get(run_id)) is None:
            runs[run_id] = run = Run(invocation)
        return run

    def hand_over(self, event: Event, invocation: InvocationContext) -> None:
        """Has an event carry what no event before it has, and tell what was done."""
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

    def pop_run(self, invocation: InvocationContext) -> Run:
        """What is remembered of a run that has ended; it is forgotten."""
        run = self.run(invocation)
        self._runs[id(invocation.session.state)][1].pop(run.invocation_id, None)
        return run

    def _leave(self, state_id: int, session_id: int) -> None:
        sessions, runs = self._runs[state_id]
        sessions.discard(session_id)
        if not sessions:
            del self._runs[state_id]
            for run in runs.values():
                run.settle()


@dataclass
class Guard:
    """What lives as long as the plugin; `registry=None` is the default registry."""

    registry: ModelRegistry | None = None
    prices: Mapping[str, Costs] = field(default_factory=dict)
    observers: Observers = field(default_factory=Observers)
    has_namespaced_keys: bool = False
    has_artifacts: bool = True
    memory: Memory = field(default_factory=Memory)

    def state(self, context: CallbackContext) -> AgentState:
        """The values of a callback's agent in session state."""
        return AgentState(
            context.state,
            context.agent_name,
            self.has_namespaced_keys,
            branch_scope(context.get_invocation_context()),
            self.memory.run(context.get_invocation_context()).writes,
        )


def name_session(invocation: InvocationContext) -> str:
    """Names a session; its id alone does not, every user may have one of that id."""
    session = invocation.session
    return "\0".join((session.app_name, session.user_id, session.id))


def call_key(context: CallbackContext) -> CallKey:
    """Identifies the model call that a callback is about, in its run."""
    return context.agent_name, branch_scope(context.get_invocation_context())


def summary_scope(invocation: InvocationContext) -> str:
    """A digest of where a summary is valid; of an agent without history, of the run."""
    place = _branch_and_isolation(invocation)
    return _digest([invocation.session.id, *place, *name_run(invocation)])


def branch_scope(place: InvocationContext | Event) -> str:
    """A short name of branch and isolation scope; "" where there are none."""
    names = _branch_and_isolation(place)
    return _digest(names) if any(names) else ""


def _branch_and_isolation(place: InvocationContext | Event) -> list[str]:
    return [place.branch or "", getattr(place, "isolation_scope", "") or ""]


def _digest(names: Sequence[str]) -> str:
    return hashlib.blake2b("\0".join(names).encode(), digest_size=8).hexdigest()
