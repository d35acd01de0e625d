"""The memory of the process between the callbacks of a run; all of it is bounded.

The memory of a run is forgotten with the run, however the run ends. The memory of a
session has only flags, numbers and the summaries that were paid for and are not in the
session yet. A process that starts anew pays for these again.

A callback cannot write to the session itself. Its values wait until ADK yields an event
of its agent and scope: the event carries them to the session (`RunWrites`).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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
    SummaryTasks,
)
from contextguard_adk._runtime.observers import Observers
from contextguard_adk._runtime.settings import GuardSettings
from contextguard_adk._runtime.state import COMPACTED_KEY, AgentState, RunWrites
from contextguard_adk._support.redaction import Redactor
from contextguard_adk.records import CompactionRecord, Origin

MAX_IDLE_SESSIONS = 1_024
"""The most memories of agents that have no summary and are writing none."""

MAX_SESSIONS = 8_192
"""The most memories of agents. One with a summary takes about 10 KB."""

CallKey = tuple[str, str]
"""The agent of a model call, and its scope as `branch_scope` names it."""

_AgentKey = tuple[str, str, str]
"""A session, an agent and a scope of the agent."""

_ClientKey = tuple[str, int]
"""The name of a model, and the `id()` of its model object; see `Call.client`."""


def name_session(invocation: InvocationContext) -> str:
    """Returns a name for a session: two users may have sessions with the same id."""
    session = invocation.session
    return "\0".join((session.app_name, session.user_id, session.id))


def call_key(context: CallbackContext) -> CallKey:
    """Identifies the model call that a callback is about, in its run."""
    return context.agent_name, branch_scope(context.get_invocation_context())


def summary_scope(invocation: InvocationContext) -> str:
    """Names the scope in which a summary is valid.

    It is the branch of a session. For an agent that does not see its earlier runs it is
    one run in the branch.
    """
    branch = invocation.branch or ""
    # Only ADK 2.0 has isolation scopes.
    isolation_scope = getattr(invocation, "isolation_scope", "") or ""
    session_id = invocation.session.id
    run_names = name_run(invocation)  # Empty for an agent that sees earlier runs.
    return digest([session_id, branch, isolation_scope, *run_names])


def branch_scope(source: InvocationContext | Event) -> str:
    """Names the branch and isolation scope of a run or an event; "" for neither."""
    branch = source.branch or ""
    # Only ADK 2.0 has isolation scopes.
    isolation_scope = getattr(source, "isolation_scope", "") or ""
    return digest([branch, isolation_scope]) if branch or isolation_scope else ""


def digest(names: Sequence[str]) -> str:
    """Returns a short name for several names together."""
    return hashlib.blake2b("\0".join(names).encode(), digest_size=8).hexdigest()


@dataclass
class SentCall:
    """A model call from the moment it is sent until it is answered.

    Attributes:
        heuristic_tokens: Bytes / 4 of the request.
        estimated_tokens: The estimate of the request, in tokens of the model.
        window_tokens: The context window that counted.
        threshold_tokens: The size at which a compaction is due.
        model: The model that was asked first.
        client: The client whose limits count.
        original_contents: The request's contents before the guard changed them.
        sent_contents: Its contents as the guard has left them.
        sent_config: A copy of its config as the guard has left it.
        request: Returns the request, which later callbacks may edit. It is held weakly
            because its tools hold the session.
        stated_window_tokens: The window without learned limits; 0 if unknown.
        is_observed: Whether the guard only watches.
        memory: What the process remembers of the agent.
        origin: The agent, session and run of the call.
        compaction: The record of the compaction that preceded the call, if any.
        after_answer: Called with the prompt's tokens once the call is answered; None
            for nothing to do.
        is_answered: Whether the model has answered anything.
        is_reported: Whether the call's record was made.
        is_recovered: Whether the answer is that of a request that was sent again.
    """

    heuristic_tokens: int
    estimated_tokens: int
    window_tokens: int
    threshold_tokens: int = 0
    model: str = ""
    client: _ClientKey = ("", 0)
    original_contents: Sequence[types.Content] = ()
    sent_contents: Sequence[types.Content] = ()
    sent_config: types.GenerateContentConfig | None = None
    request: Callable[[], LlmRequest | None] = lambda: None
    stated_window_tokens: int = 0
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
        self.original_contents = ()
        self.sent_contents = ()
        self.sent_config = None
        self.after_answer = None


class Run:
    """The memory of one run, for as long as ADK keeps its session object.

    Attributes:
        invocation_id: ADK's id of the run.
        writes: The values that no event has carried to the session yet.
        calls: The newest model call of each agent and scope.
        metadata: The `custom_metadata` of the next event of each agent and scope.
    """

    def __init__(self, invocation: InvocationContext, memo: Memo | None) -> None:
        self.invocation_id = invocation.invocation_id
        self.writes = RunWrites(invocation.session.state)
        self.calls: dict[CallKey, SentCall] = {}
        self.metadata: dict[CallKey, dict[str, Any]] = {}
        self._events = invocation.session.events
        self._memos: dict[str, Memo] = {}
        self._shared_memo = memo
        # The memories of the agents for which this run has put in a summary.
        self._compacted: list[AgentMemory] = []

    def memo(self, invocation: InvocationContext) -> Memo:
        """Returns the memo of an agent, which remembers the sizes of its contents."""
        if self._shared_memo is not None:  # A replay has one memo for all agents.
            return self._shared_memo

        agent = getattr(invocation.agent, "name", "")
        if agent not in self._memos:
            form = json_form(find_llm(invocation.agent))
            self._memos[agent] = Memo(self._events, self.invocation_id, form)
        return self._memos[agent]

    def note_unconfirmed(self, memory: AgentMemory, paid: Paid, key: str) -> None:
        """Remembers that a summary was put in a request, until an event has carried it.

        The summary leaves the shelf, and another one may be begun ahead of time.

        Args:
            memory: The memory of the agent.
            paid: The summary.
            key: The key of session state under which the summary was written.
        """
        replaced = paid.replaced
        earlier = memory.facts.unconfirmed
        if earlier is not None:
            # No event is known to have carried the earlier summary. So the session may
            # still have the one that the earlier summary replaced.
            replaced = earlier.replaced

        unconfirmed = replace(
            paid,
            replaced=replaced,
            key=key,
            event_count=len(self._events),
            run_id=self.invocation_id,
        )
        memory.facts = replace(
            memory.facts, unconfirmed=unconfirmed, ready=None, is_background_tried=False
        )
        self._compacted.append(memory)

    def describe(self, key: CallKey, name: str, value: object) -> None:
        """Lets the next event of an agent carry a value in `custom_metadata`."""
        if value:
            self.metadata.setdefault(key, {})[name] = value

    def add_writes_to(self, event: Event, state: Mapping[str, Any]) -> None:
        """Adds to an event the state values and the metadata that wait for it.

        Args:
            event: An event that is not partial.
            state: The session state of the run.
        """
        scope = branch_scope(event)
        delta = self.writes.pop_pending(scope, state) | event.actions.state_delta
        if delta:
            # ADK's web page labels an event by its first key. So the line about the
            # last compaction comes first.
            lines = {
                key: value
                for key, value in delta.items()
                if key.startswith(COMPACTED_KEY)
            }
            update: dict[str, Any] = {
                "state_delta": lines | delta,
                "artifact_delta": {**event.actions.artifact_delta},
            }
            # The partial events of the call share the old actions, so these stay.
            event.actions = event.actions.model_copy(update=update)

        # With its final response an agent is no longer at work in its scope.
        if self.writes.owners and event.is_final_response():
            self.writes.owners.discard(f"{event.author}@{scope}")

        metadata = self.metadata.pop((event.author, scope), None)
        if metadata is not None:
            # The old dict may belong to the model's response, so it is not changed.
            event.custom_metadata = {**(event.custom_metadata or {}), **metadata}

    def forget_delivered(self) -> None:
        """Forgets the summaries that an event has carried to the session."""
        for memory in self._compacted:
            unconfirmed = memory.facts.unconfirmed
            # Another run may have put in a newer summary. That run looks for its event.
            if unconfirmed is None or unconfirmed.run_id != self.invocation_id:
                continue

            key = unconfirmed.key
            newer_events = self._events[unconfirmed.event_count :]
            is_delivered = any(key in e.actions.state_delta for e in newer_events)
            if is_delivered:
                memory.facts = replace(memory.facts, unconfirmed=None)


class _RunsOfState(NamedTuple):
    """The runs that share one dict of session state.

    Attributes:
        session_ids: `id()` of each session object that has the dict.
        by_invocation: The runs, by the ids of their invocations.
    """

    session_ids: set[int]
    by_invocation: dict[str, Run]


@dataclass
class Guard:
    """The memory of the plugin.

    Attributes:
        settings: The settings of the plugin.
        registry: The registry of models; None for the default one.
        redactor: Applies the user's `redact`.
        observers: Calls the listeners of the user.
        recorded: The memo of a replay, in which no tool changes a result; else None.
        has_namespaced_keys: Whether keys of session state have the namespaced form.
            Each app decides this if the setting is "auto".
        seen_apps: The apps for which the log has told which agents are guarded.
        tasks: The summaries that are being written.
        limits: The limits that this process keeps to, by client.
        accepted: The tokens of the largest prompts that were accepted, by client.
        artifacts: Name and version of the artifacts that no event has named yet.
    """

    settings: GuardSettings = field(default_factory=GuardSettings)
    registry: ModelRegistry | None = None
    redactor: Redactor = field(default_factory=Redactor)
    observers: Observers = field(default_factory=Observers)
    recorded: Memo | None = None
    has_namespaced_keys: bool = field(init=False)
    seen_apps: set[str] = field(default_factory=set)
    tasks: SummaryTasks = field(init=False)
    limits: BoundedDict[_ClientKey, Limit] = field(default_factory=BoundedDict)
    accepted: BoundedDict[_ClientKey, int] = field(default_factory=BoundedDict)
    artifacts: BoundedDict[_AgentKey, tuple[str, int]] = field(
        default_factory=BoundedDict
    )
    _memories: BoundedDict[_AgentKey, AgentMemory] = field(
        default_factory=lambda: BoundedDict(MAX_SESSIONS)
    )
    # By `id()` of the dict of session state.
    _runs_by_state: dict[int, _RunsOfState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.has_namespaced_keys = self.settings.state_keys == "namespaced"
        self.tasks = SummaryTasks(self.settings.max_background_summaries)

    def memory(
        self, invocation: InvocationContext, agent: str, scope: str
    ) -> AgentMemory:
        """Returns the memory of an agent in a scope of a session, a new one if needed.

        It also forgets late summaries, and the oldest memories beyond
        `MAX_IDLE_SESSIONS` that have no summary and are writing none.
        """
        key = name_session(invocation), agent, scope
        wanted = self._memories.get(key)
        if wanted is None:
            wanted = AgentMemory(PendingSummary(self.tasks))
        self._memories[key] = wanted  # A `BoundedDict` now counts it as the newest.

        oldest_idle_first = list[_AgentKey]()
        for each_key, each in self._memories.snapshot():
            if each.facts.ready or each.facts.unconfirmed:
                each.drop_late()
            elif each.pending.task is None:
                oldest_idle_first.append(each_key)

        for idle_key in oldest_idle_first[:-MAX_IDLE_SESSIONS]:
            self._memories.pop(idle_key, None)
        return wanted

    def run(self, invocation: InvocationContext) -> Run:
        """Returns the memory of a run, a new one if needed.

        Runs are kept by their dict of session state. In ADK 2.0 each node of a workflow
        has a copy of the session object, and all copies have the same dict.

        The runs of a dict are forgotten with the last session object that has it. No
        callback tells of the end of a run that is cancelled, but session services make
        new session objects for each run.
        """
        session = invocation.session
        state_id = id(session.state)
        session_id = id(session)
        runs = self._runs_by_state.setdefault(state_id, _RunsOfState(set(), {}))
        if session_id not in runs.session_ids:
            runs.session_ids.add(session_id)
            # The dict itself cannot have a finalizer in Python.
            finalizer = weakref.finalize(
                session, self._forget_session, state_id, session_id
            )
            finalizer.atexit = False  # When the process ends, all is forgotten anyway.

        run_id = invocation.invocation_id
        if run_id not in runs.by_invocation:
            runs.by_invocation[run_id] = Run(invocation, self.recorded)
        return runs.by_invocation[run_id]

    def pop_run(self, invocation: InvocationContext) -> Run:
        """Returns the memory of a run that has ended, and forgets it."""
        ended_run = self.run(invocation)
        runs = self._runs_by_state[id(invocation.session.state)]
        runs.by_invocation.pop(ended_run.invocation_id, None)
        return ended_run

    def _forget_session(self, state_id: int, session_id: int) -> None:
        """Forgets a session object, and with the last one of a state also its runs.

        Args:
            state_id: The `id()` of the dict of session state.
            session_id: The `id()` of the session object.
        """
        runs = self._runs_by_state[state_id]
        runs.session_ids.discard(session_id)
        if runs.session_ids:
            return

        del self._runs_by_state[state_id]
        for run in runs.by_invocation.values():
            run.forget_delivered()

    def state(self, context: CallbackContext) -> AgentState:
        """Returns the session state of the agent that a callback is about."""
        invocation = context.get_invocation_context()
        return AgentState(
            context.state,
            context.agent_name,
            is_namespaced=self.has_namespaced_keys,
            scope=branch_scope(invocation),
            run=self.run(invocation).writes,
        )

    def hand_over(self, event: Event, invocation: InvocationContext) -> None:
        """Lets an event carry the values that no event before it has carried.

        A partial event carries nothing, because ADK does not store it.
        """
        run = self.run(invocation)
        if event.partial:
            _leave_out_pending(event, run.writes)
            return
        run.add_writes_to(event, invocation.session.state)

        # ADK's web server splits an event with an artifact in two, one of them without
        # content. Then its page shows no text, and fails at a long-running call. So the
        # name of an artifact waits for an event without these.
        parts = (event.content.parts if event.content else None) or ()
        has_text = any(part and part.text for part in parts)
        if has_text or event.long_running_tool_ids:
            return

        key = name_session(invocation), event.author, branch_scope(event)
        saved = self.artifacts.pop(key, None)
        if saved is not None:
            name, version = saved
            event.actions.artifact_delta[name] = version


def _leave_out_pending(event: Event, writes: RunWrites) -> None:
    """Removes the values from a partial event that a later event is to carry.

    ADK puts them there: the events of one model call share their actions.
    """
    pending_keys = set[str]()
    for values in writes.pending.values():
        pending_keys.update(values)

    delta = event.actions.state_delta
    if pending_keys.isdisjoint(delta):
        return
    rest = {key: value for key, value in delta.items() if key not in pending_keys}
    event.actions = event.actions.model_copy(update={"state_delta": rest})
