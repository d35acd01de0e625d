"""The memory of the process between the callbacks of a run; all of it is bounded.

A run is one invocation of ADK. The memory of a run is forgotten with the run, however
the run ends. The memory of a session has only flags, numbers, and summaries that were
paid for and are not in the session yet. If the process is lost, another process pays
for these summaries again.

A callback cannot write to the session. The values of a callback wait until ADK yields
an event of the same agent and scope: the event carries the values to the session
(`RunWrites`).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from contextguard_adk._runtime.adk_tree import AppTools
from contextguard_adk._runtime.memory import (
    AgentMemory,
    BoundedDict,
    Limits,
    PendingSummary,
    ReadySummary,
    SummaryTasks,
)
from contextguard_adk._runtime.observers import Observers
from contextguard_adk._runtime.settings import GuardSettings
from contextguard_adk._runtime.spending import SessionSpending
from contextguard_adk._runtime.state import COMPACTED_KEY, AgentState, RunWrites
from contextguard_adk._support.redaction import Redactor
from contextguard_adk.records import CompactionRecord, Origin

MAX_IDLE_SESSIONS = 1_024
"""The most memories of agents that have no summary ahead of time, and write none."""

MAX_SESSIONS = 8_192
"""The most memories of agents. One with a summary takes up to 64 KB."""

CallKey = tuple[str, str]
"""The agent of a model call, and its scope as `branch_scope` names it."""

_AgentKey = tuple[str, str, str]
"""A session, an agent and a scope of the agent."""

_ServerKey = tuple[str, int]
"""The name of a model, and the `id()` of its model object; see `Call.server_key`."""


def name_session(invocation: InvocationContext) -> str:
    """Returns the name of a session, which no other session has.

    The id alone is not enough: two users may have sessions with the same id.
    """
    session = invocation.session
    return "\0".join((session.app_name, session.user_id, session.id))


def find_caller(invocation: InvocationContext) -> InvocationContext | None:
    """Returns the run that has called an `AgentTool`, which has begun this run.

    Returns None if no `AgentTool` has begun the run.
    """
    # An `AgentTool` gives its run an artifact service that knows the calling context.
    # A service of the user may have another attribute of this name.
    context = getattr(invocation.artifact_service, "tool_context", None)
    if not isinstance(context, CallbackContext):
        return None
    return context.get_invocation_context()


def find_outermost(invocation: InvocationContext) -> InvocationContext:
    """Returns the run itself, or the outermost run in which `AgentTool`s began it."""
    caller = find_caller(invocation)
    return invocation if caller is None else find_outermost(caller)


def name_user(invocation: InvocationContext, settings: GuardSettings) -> str:
    """Returns how records, traces and the log name the user: hashed, or by the id."""
    session = invocation.session
    if settings.user_ids == "plain":
        return session.user_id
    return digest([session.app_name, session.user_id])


def call_key(context: CallbackContext) -> CallKey:
    """Returns the key in `Run.calls` of the model call that a callback is about."""
    return context.agent_name, branch_scope(context.get_invocation_context())


def summary_scope(invocation: InvocationContext) -> str:
    """Returns a name for the scope in which a summary is valid.

    The scope is a branch of a session. For an agent that does not see its earlier runs,
    the scope is one run in the branch.
    """
    branch = invocation.branch or ""
    # Only ADK 2.0 has isolation scopes.
    isolation_scope = getattr(invocation, "isolation_scope", "") or ""
    session_id = invocation.session.id
    run_names = name_run(invocation)  # Empty for an agent that sees its earlier runs.
    return digest([session_id, branch, isolation_scope, *run_names])


def branch_scope(source: InvocationContext | Event) -> str:
    """Returns a name for the branch and isolation scope of a run or an event.

    The name is "" without a branch and an isolation scope.
    """
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
        heuristic_tokens: The size of the request in heuristic tokens, of 4 bytes each.
        estimated_tokens: The estimated size of the request in tokens of the model.
        window_tokens: The context window that the guard kept to.
        threshold_tokens: The size at which a compaction is due.
        model: The name of the model that was asked first.
        server_key: The key of `Guard.limits` for the server of the model.
        original_contents: The contents of the request before the guard changed them.
        sent_contents: The contents of the request as the guard has left them.
        sent_config: A copy of the request's config as the guard has left it.
        request: Returns the request, which later callbacks may edit; None if it is
            gone. The request is held weakly, because its tools hold the session.
        stated_window_tokens: The window without limits that the provider has shown; 0
            if unknown.
        is_observed: Whether the guard only watches, and changes nothing.
        memory: What the process remembers of the agent.
        origin: The agent, session and run of the call.
        compaction: The record of the compaction for this call; None for no compaction.
        after_answer: A function that is called once the call is answered, with the size
            of the prompt in tokens; None for no function.
        is_answered: Whether the model has answered anything.
        is_reported: Whether the record of the call was made.
        is_recovered: Whether the provider refused the request, and the model answered
            another request that the guard sent instead.
    """

    heuristic_tokens: int
    estimated_tokens: int
    window_tokens: int
    threshold_tokens: int = 0
    model: str = ""
    server_key: _ServerKey = ("", 0)
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
        """Forgets what holds the conversation, and keeps the numbers."""
        self.original_contents = ()
        self.sent_contents = ()
        self.sent_config = None
        self.after_answer = None


class StoredByRun(NamedTuple):
    """A summary that a run has put in a request, and written to session state.

    Attributes:
        memory: The memory of the agent.
        ready: The summary, as the memory keeps it.
        key: The key of session state under which the record was written.
    """

    memory: AgentMemory
    ready: ReadySummary
    key: str


class Run:
    """The memory of one run, for as long as the session object of the run lives.

    Attributes:
        invocation_id: ADK's id of the run.
        writes: The values that no event has carried to the session yet.
        calls: The newest model call of each agent and scope.
        metadata: What the next event of each agent and scope is to carry in its
            `custom_metadata`.
        stored: The summaries that this run has stored.
    """

    def __init__(self, invocation: InvocationContext, memo: Memo | None) -> None:
        self.invocation_id = invocation.invocation_id
        self.writes = RunWrites(invocation.session.state)
        self.calls: dict[CallKey, SentCall] = {}
        self.metadata: dict[CallKey, dict[str, Any]] = {}
        self.stored: list[StoredByRun] = []
        self._events = invocation.session.events
        self._memos: dict[str, Memo] = {}
        self._shared_memo = memo

    def memo(self, invocation: InvocationContext) -> Memo:
        """Returns the memo of the invocation's agent.

        The memo remembers the sizes of contents. Each agent has a memo of its own,
        because the clients of agents may spell the same content in different ways.
        """
        if self._shared_memo is not None:  # A replay has one memo for all agents.
            return self._shared_memo

        agent = getattr(invocation.agent, "name", "")
        if agent not in self._memos:
            form = json_form(find_llm(invocation.agent))
            self._memos[agent] = Memo(self._events, self.invocation_id, form)
        return self._memos[agent]

    def describe(self, key: CallKey, name: str, value: object) -> None:
        """Lets the next event of an agent and scope carry a value in `custom_metadata`.

        Args:
            key: The agent and scope.
            name: The key of the value in `custom_metadata`.
            value: The value; None and other empty values are not carried.
        """
        if value:
            self.metadata.setdefault(key, {})[name] = value

    def add_writes_to(self, event: Event, state: Mapping[str, Any]) -> None:
        """Adds to an event the values that wait for the next event of its scope.

        Values of session state go to the event's `state_delta`. Values that `describe`
        was given go to its `custom_metadata`. Each value is added to one event only.

        Args:
            event: An event that is not partial.
            state: The session state of the run.
        """
        scope = branch_scope(event)
        # A value that the event has already goes before a waiting one.
        delta = self.writes.pop_pending(scope, state) | event.actions.state_delta
        if delta:
            # ADK's web page labels an event by its first key. So the line about the
            # last compaction comes first.
            lines = {
                key: value
                for key, value in delta.items()
                if key.startswith(COMPACTED_KEY)
            }
            # The partial events of the model call have the same `actions` object, and
            # must not carry these values. So the event gets a copy of its own. The copy
            # has an `artifact_delta` of its own, because `hand_over` changes that dict.
            update: dict[str, Any] = {
                "state_delta": lines | delta,
                "artifact_delta": {**event.actions.artifact_delta},
            }
            event.actions = event.actions.model_copy(update=update)

        # A final response ends the work of the agent in its scope. The name of the
        # owner is made as in `AgentState`.
        if self.writes.owners and event.is_final_response():
            self.writes.owners.discard(f"{event.author}@{scope}")

        metadata = self.metadata.pop((event.author, scope), None)
        if metadata is not None:
            # The dict of the event may also be that of the model's response, which must
            # not change. So the event gets a new dict.
            event.custom_metadata = {**(event.custom_metadata or {}), **metadata}


class _RunsOfState(NamedTuple):
    """The runs that share one dict of session state.

    Attributes:
        session_ids: The `id()` of each living session object that has the dict.
        by_invocation: The runs, by the ids of their invocations.
    """

    session_ids: set[int]
    by_invocation: dict[str, Run]


@dataclass
class Guard:
    """The memory of the plugin.

    Attributes:
        settings: The settings of the plugin; `use` replaces them.
        registry: The user's registry of models; None for LiteLLM's table.
        redactor: Applies the user's `redact`.
        observers: Calls the listeners of the user.
        recorded: The memo that all agents of a replay share; None if this is no replay.
        has_namespaced_keys: Whether keys of session state are written in the namespaced
            form. With the setting "auto", an app that declares a `state_schema` sets
            this to True.
        seen_apps: The names of the apps whose guarded agents were logged.
        app_tools: The tools of these apps, by the name of the app.
        tasks: The tasks that write summaries.
        limits: The limits that providers have shown to this process, by server.
        accepted: The size in tokens of the largest accepted prompt, by server.
        artifacts: The name and version of each artifact that no event has named yet.
    """

    settings: GuardSettings = field(default_factory=GuardSettings)
    registry: ModelRegistry | None = None
    redactor: Redactor = field(default_factory=Redactor)
    observers: Observers = field(default_factory=Observers)
    recorded: Memo | None = None
    has_namespaced_keys: bool = field(init=False)
    seen_apps: set[str] = field(default_factory=set)
    app_tools: dict[str, AppTools] = field(default_factory=dict)
    tasks: SummaryTasks = field(init=False)
    limits: BoundedDict[_ServerKey, Limits] = field(default_factory=BoundedDict)
    accepted: BoundedDict[_ServerKey, int] = field(default_factory=BoundedDict)
    artifacts: BoundedDict[_AgentKey, tuple[str, int]] = field(
        default_factory=BoundedDict
    )
    # By the names of sessions, which `name_session` returns.
    _session_spendings: BoundedDict[str, SessionSpending] = field(
        default_factory=lambda: BoundedDict(MAX_SESSIONS)
    )
    _memories: BoundedDict[_AgentKey, AgentMemory] = field(
        default_factory=lambda: BoundedDict(MAX_SESSIONS)
    )
    # By `id()` of the dict of session state.
    _runs_by_state: dict[int, _RunsOfState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.has_namespaced_keys = False
        self.tasks = SummaryTasks()
        self.use(self.settings)

    def use(self, settings: GuardSettings) -> None:
        """Puts settings in place of the current ones; the rest of the memory stays.

        With the setting "auto", state keys keep their form.
        """
        self.settings = settings
        self.observers.listener_timeout_seconds = settings.listener_timeout_seconds
        self.tasks.max_working = settings.max_background_summaries
        if settings.state_keys != "auto":
            self.has_namespaced_keys = settings.state_keys == "namespaced"

    def memory(
        self, invocation: InvocationContext, agent: str, scope: str
    ) -> AgentMemory:
        """Returns the memory of an agent in a scope of a session, a new one if needed.

        Each call also bounds all memories. Of the idle memories, which have no summary
        ahead of time and are writing none, only the newest `MAX_IDLE_SESSIONS` are
        kept.

        Args:
            invocation: The invocation, which tells the session.
            agent: The name of the agent.
            scope: The scope, as `summary_scope` names it.
        """
        key = name_session(invocation), agent, scope
        wanted = self._memories.get(key)
        if wanted is None:
            pending = PendingSummary(self.tasks)
            spending = self.session_spending(invocation)
            wanted = AgentMemory(pending, spending=spending)
        # This makes the memory the newest one of the `BoundedDict`.
        self._memories[key] = wanted

        idle_keys = list[_AgentKey]()  # The oldest first, as in the snapshot.
        for each_key, each in self._memories.snapshot():
            ready = each.facts.ready
            has_summary_ahead = ready is not None and ready.is_ahead
            if not has_summary_ahead and each.pending.task is None:
                idle_keys.append(each_key)

        for idle_key in idle_keys[:-MAX_IDLE_SESSIONS]:
            self._memories.pop(idle_key, None)
        return wanted

    def session_spending(self, invocation: InvocationContext) -> SessionSpending:
        """Returns what a session has spent on summaries, as far as is known here.

        The run of an `AgentTool` has a session of its own, which counts as that of the
        calling agent.
        """
        key = name_session(find_outermost(invocation))
        spending = self._session_spendings.get(key) or SessionSpending()
        self._session_spendings[key] = spending
        return spending

    def run(self, invocation: InvocationContext) -> Run:
        """Returns the memory of a run, a new one if needed.

        Runs are kept by the `id()` of their dict of session state, and not by session
        object: in ADK 2.0 each node of a workflow has a copy of the session object, and
        all copies have the same dict.

        When the last session object that has a dict is gone, the runs of the dict are
        forgotten. ADK has no callback for the end of a cancelled run. But session
        services make a new session object for each run, so the objects go with the run.
        """
        session = invocation.session
        state_id = id(session.state)
        session_id = id(session)
        runs = self._runs_by_state.setdefault(state_id, _RunsOfState(set(), {}))
        if session_id not in runs.session_ids:
            runs.session_ids.add(session_id)
            # Python calls `_forget_session` when the session object is gone. A dict
            # cannot have such a finalizer.
            finalizer = weakref.finalize(
                session, self._forget_session, state_id, session_id
            )
            finalizer.atexit = False  # At the end of the process nothing is to be done.

        run_id = invocation.invocation_id
        if run_id not in runs.by_invocation:
            runs.by_invocation[run_id] = Run(invocation, self.recorded)
        return runs.by_invocation[run_id]

    def pop_run(self, invocation: InvocationContext) -> Run:
        """Returns the memory of a run that has ended, and forgets it.

        A summary that an event of the run has carried to the session is forgotten as
        well.
        """
        ended_run = self.run(invocation)
        runs = self._runs_by_state[id(invocation.session.state)]
        runs.by_invocation.pop(ended_run.invocation_id, None)

        for memory, ready, key in ended_run.stored:
            has_arrived = any(
                key in event.actions.state_delta
                for event in invocation.session.events
                if event.invocation_id == ended_run.invocation_id
            )
            if has_arrived:
                memory.forget_ready(ready)
        return ended_run

    def _forget_session(self, state_id: int, session_id: int) -> None:
        """Forgets a session object that is gone.

        If no other session object has the same dict of session state, the runs of the
        dict are forgotten as well.

        Args:
            state_id: The `id()` of the dict of session state.
            session_id: The `id()` of the session object.
        """
        runs = self._runs_by_state[state_id]
        runs.session_ids.discard(session_id)
        if runs.session_ids:
            return

        del self._runs_by_state[state_id]

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
        """Lets an event carry the values that wait for it, and the name of an artifact.

        A partial event carries nothing, because ADK does not store partial events.

        Args:
            event: The event.
            invocation: The invocation that yields the event.
        """
        run = self.run(invocation)
        if event.partial:
            _leave_out_pending(event, run.writes)
            return
        run.add_writes_to(event, invocation.session.state)

        # If an event names an artifact, ADK's web server makes two events of the one.
        # Then the server's page does not show the text of the event, and fails if the
        # event calls a long-running tool. So the name waits for an event without text
        # and without such a call.
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
    """Removes the pending values from the `state_delta` of a partial event.

    A later event is to carry these values. ADK puts them on each partial event as well,
    because all events of one model call have the same `actions` object.

    Args:
        event: The partial event.
        writes: The pending values.
    """
    pending_keys = set[str]()
    for values in writes.pending.values():
        pending_keys.update(values)

    delta = event.actions.state_delta
    if pending_keys.isdisjoint(delta):
        return
    rest = {key: value for key, value in delta.items() if key not in pending_keys}
    # The later event has the same `actions` object, so this one gets a copy.
    event.actions = event.actions.model_copy(update={"state_delta": rest})
