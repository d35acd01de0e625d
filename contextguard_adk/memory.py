"""What the guard remembers in process between two callbacks; all of it bounded.

A process that starts anew loses at most one summary, and pays for it again.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from google.genai import types

from contextguard_adk.history.shown import name_run
from contextguard_adk.history.state import RunWrites, Unsaved
from contextguard_adk.measuring.tokens import Memo
from contextguard_adk.telemetry import CompactionRecord

if TYPE_CHECKING:
    from google.adk.agents.callback_context import CallbackContext
    from google.adk.agents.invocation_context import InvocationContext
    from google.adk.events.event import Event

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V], Generic[K, V]):
    """A dict that forgets its oldest entry when it is full."""

    def __init__(self, max_count: int = 1_024) -> None:
        super().__init__()
        self._max_count = max_count

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        with suppress(KeyError):  # Another thread may have made room.
            self.move_to_end(key)
        while len(self) > self._max_count:
            self.popitem(last=False)


SessionKey = tuple[str, str, str]  # Session, agent, scope.
CallKey = tuple[str, str, str, str]  # Session, invocation, agent, branch.


@dataclass
class SessionMemory:
    """What is remembered of one agent in one scope of a session."""

    unsaved: Unsaved | None = None
    compacted_run: str = ""  # The run whose last call was compacted, if it was.
    was_full: bool = False  # Whether that was because of its tokens.
    dropped_tokens: int | None = None  # The estimate where compacting gained nothing.
    is_fixed_part_reported: bool = False
    is_under_pressure: bool = False
    cached_ratio: float = 0.0  # Of the last prompt, served from a cache.
    is_in_place_useless: bool = False


@dataclass
class CallInFlight:
    """A model call between `before_model` and its answer."""

    heuristic_tokens: int
    estimated_tokens: int
    window_tokens: int
    threshold_tokens: int = 0
    original_contents: Sequence[types.Content] = ()
    sent_contents: Sequence[types.Content] = ()
    sent_config: types.GenerateContentConfig | None = None
    session: SessionMemory = field(default_factory=SessionMemory)
    compaction: CompactionRecord | None = None
    is_answered: bool = False
    is_reported: bool = False
    is_recovered: bool = False
    started_seconds: float = field(default_factory=time.monotonic)

    def release(self) -> None:
        """Forgets the contents, and keeps the numbers."""
        self.original_contents = self.sent_contents = ()
        self.sent_config = None


class CircuitBreaker:
    """Skips a summarizer for five compactions after three failures in a row."""

    def __init__(self) -> None:
        # Failures in a row by model; below zero, compactions that are still skipped.
        self._failures: BoundedDict[str, int] = BoundedDict()

    def allows(self, model: str) -> bool:
        """Whether to ask a model; called once for each compaction."""
        failures = self._failures.get(model, 0)
        failures = -5 if failures >= 3 else failures
        if failures < 0:
            self._failures[model] = failures + 1
        return failures >= 0

    def note(self, model: str, has_failed: bool) -> None:
        """Counts a failure of a model that was asked; a success ends the count."""
        self._failures[model] = self._failures.get(model, 0) + 1 if has_failed else 0


class Memory:
    """All that one plugin instance remembers."""

    def __init__(self) -> None:
        self.calls: BoundedDict[CallKey, CallInFlight] = BoundedDict()
        self.sessions: BoundedDict[SessionKey, SessionMemory] = BoundedDict()
        self.breaker = CircuitBreaker()
        self.writes: BoundedDict[tuple[str, str], RunWrites] = BoundedDict()  # By run.
        # ADK 2.0, which reports no end of a run, fills it.
        self._memos: BoundedDict[CallKey, Memo] = BoundedDict(16)

    def session(self, key: SessionKey) -> SessionMemory:
        """What is remembered of an agent in a session."""
        self.sessions[key] = session = self.sessions.get(key) or SessionMemory()
        return session

    def writes_of(self, invocation: InvocationContext) -> RunWrites:
        """What is written in a run."""
        run = name_session(invocation), invocation.invocation_id
        if (writes := self.writes.get(run)) is None:
            self.writes[run] = writes = RunWrites()
        return writes

    def hand_over(self, invocation: InvocationContext, event: Event) -> None:
        """Has an event carry what was written in its run, and no event before it."""
        writes = self.writes.get((name_session(invocation), invocation.invocation_id))
        if event.partial or writes is None:
            return
        writes.hand_over(invocation.session.state, event.actions.state_delta)
        if writes.owners and event.is_final_response():
            writes.owners.discard(f"{event.author}@{branch_scope(event)}")

    def begin_call(self, key: CallKey, call: CallInFlight) -> None:
        """Remembers a model call; forgets those that have waited for over an hour.

        ADK reports no end of a run that failed or was cancelled: only the numbers are
        kept of the agent's calls in this session that have waited for ten minutes.
        """
        self.calls[key] = call
        for other, waiting in list(self.calls.items()):
            waited_seconds = call.started_seconds - waiting.started_seconds
            if waited_seconds > 600 and _same_agent(other, key):
                waiting.release()
            if waited_seconds > 3_600:
                self.calls.pop(other, None)

    def memo(self, invocation: InvocationContext, key: CallKey) -> Memo:
        """What was computed earlier in a run."""
        memo = self._memos.get(key)
        if memo is None:
            for other in list(self._memos):
                if _same_agent(other, key):
                    self._memos.pop(other, None)
            memo = Memo(invocation.session.events, invocation.invocation_id)
            self._memos[key] = memo
        return memo

    def end_run(self, invocation_id: str) -> list[tuple[CallKey, CallInFlight]]:
        """Forgets the model calls of a run, and returns them."""
        for key in [key for key in list(self._memos) if key[1] == invocation_id]:
            self._memos.pop(key, None)
        for run in [run for run in list(self.writes) if run[1] == invocation_id]:
            self.writes.pop(run, None)
        keys = [key for key in list(self.calls) if key[1] == invocation_id]
        return [(key, self.calls.pop(key)) for key in keys]


def name_session(invocation: InvocationContext) -> str:
    """Names a session; its id alone does not, every user may have one of that id."""
    session = invocation.session
    return "\0".join((session.app_name, session.user_id, session.id))


def call_key(context: CallbackContext) -> CallKey:
    """Identifies the model call that a callback is about."""
    invocation = context.get_invocation_context()
    session, scope = name_session(invocation), branch_scope(invocation)
    return session, context.invocation_id, context.agent_name, scope


def _same_agent(key: CallKey, other: CallKey) -> bool:
    return (key[0], *key[2:]) == (other[0], *other[2:])


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
