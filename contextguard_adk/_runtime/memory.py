"""What the process remembers of an agent in one scope of a session."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Coroutine, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

from contextguard_adk._history.draft import Draft
from contextguard_adk._history.stored import Learned, StoredSummary, with_newest
from contextguard_adk._providers.costs import add_costs
from contextguard_adk._support.tasks import SummaryTasks
from contextguard_adk.records import Usage

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
U = TypeVar("U")


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

    def snapshot(self) -> list[tuple[K, V]]:
        """Returns the items; to iterate over the dict itself is not thread-safe."""
        with self._lock:
            return list(self.items())


@dataclass(frozen=True)
class Paid:
    """A summary that was paid for: on the shelf until the session has it.

    Attributes:
        draft: What the strategy decided; its indexes are those of the request then.
        stored: What would be stored, which tells what it replaces.
        facts: Fields of its `CompactionRecord`: what it took.
        run_id: The run that wrote it; once it was put in, the run that did.
        is_background: Whether it waits until a compaction is due.
        is_reported: Whether listeners were told of it.
        replaced: What stood in the session before the run that put it in.
        key: The key that brings it to the session, once it was put in.
        event_count: How many events the session had then.
    """

    draft: Draft
    stored: StoredSummary
    facts: dict[str, Any]
    run_id: str
    is_background: bool = False
    is_reported: bool = False
    replaced: StoredSummary | None = None
    key: str = ""
    event_count: int = 0
    paid_seconds: float = field(default_factory=time.monotonic)


class Limit(NamedTuple):
    """What the requests of a process keep to.

    Attributes:
        tokens: What a prompt may take.
        is_rate: Whether it follows from a rate limit, and not from a window.
        sum_tokens: What prompt and output may take together; 0 where output does not
            count.
    """

    tokens: int
    is_rate: bool = False
    sum_tokens: int = 0


@dataclass(frozen=True)
class Seen:
    """What the answers of one model have shown.

    Attributes:
        accepted_tokens: The largest prompt that it has accepted.
        limits: What its provider has shown to this process; None for nothing.
        limit_calls: How many calls were answered since limits were shown that this
            process does not trust; None where it trusts `limits`.
        counted: What it counted last, and bytes / 4 of that request.
        lowest_ratio: Its lowest count that is believed, over the estimate.
        doubted: Its last count, where that is no usual one: over the estimate, and by
            how many tokens it exceeds that.
        kept: What this session keeps to, also where its model object is made anew.
    """

    accepted_tokens: int = 0
    limits: Learned | None = None
    limit_calls: int | None = 0
    counted: tuple[int, int] | None = None
    lowest_ratio: float = 0.0
    doubted: tuple[float, int] = (0.0, 0)
    kept: Limit | None = None

    def has_shown(self, limits: Learned) -> bool:
        """Whether its provider has shown these limits to this process."""
        return self.limits is not None and vars(self.limits) == vars(limits)


@dataclass(frozen=True)
class SessionFacts:
    """What is known of one agent in one scope; `AgentMemory` holds the newest.

    Attributes:
        ready: A summary that is not in the request yet.
        put_in: The last one that was put in, until the session is seen to have it.
        is_background_tried: Whether one was begun since the last compaction.
        compacted_run: The run whose last call was compacted; "" if it was not.
        was_full: Whether that call was compacted for its size.
        fruitless_tokens: The estimate at which compacting gained nothing.
        cached_ratio: Which part of the last prompt a cache served.
        counting_model: The model whose count stands in session state; "" if unknown.
        models: What the newest models have shown, by name.
        summary_usage: What summary calls took since the last `CallRecord`.
        units: What sections, shapes and listeners remember, by its type.
    """

    ready: Paid | None = None
    put_in: Paid | None = None
    is_background_tried: bool = False
    compacted_run: str = ""
    was_full: bool = False
    fruitless_tokens: int | None = None
    is_under_pressure: bool = False
    cached_ratio: float = 0.0
    counting_model: str = ""
    models: Mapping[str, Seen] = field(default_factory=dict)
    summary_usage: Usage = field(default_factory=Usage)
    summary_cost: float | None = 0.0
    units: Mapping[type, object] = field(default_factory=dict)

    def find_lost(self, stored: StoredSummary | None) -> Paid | None:
        """Returns the summary that was put in, where the session does not show it.

        Another one in the session means that it arrived, or that another process saved
        one.
        """
        paid = self.put_in
        return paid if paid and paid.replaced == stored else None

    def of(self, model: str) -> Seen:
        return self.models.get(model) or Seen()

    def unit(self, kind: type[U]) -> U:
        """Returns what a unit remembers; its defaults where it has kept nothing."""
        found = self.units.get(kind)
        return found if isinstance(found, kind) else kind()


class PendingSummary:
    """The summary of an agent in one scope that is being written, if one is.

    It goes on when the call that wants it is cancelled, and ends with its event loop.
    """

    def __init__(self, tasks: SummaryTasks | None = None) -> None:
        self.tasks = tasks or SummaryTasks()
        self.task: asyncio.Task[Any] | None = None
        self._is_awaited = False

    @property
    def is_under_way(self) -> bool:
        """Whether one is being written on this event loop; others may be dead."""
        task = self.task
        return task is not None and task.get_loop() is asyncio.get_running_loop()

    async def wait(self, timeout_seconds: float) -> None:
        """Waits until none is under way on this event loop.

        One ahead of time that is late, or that waits for a place itself, is cancelled.
        """
        while self.is_under_way and (task := self.task):
            most_seconds = None if self._is_awaited else timeout_seconds
            if not self.tasks.is_queued(task):
                await asyncio.wait([task], timeout=most_seconds)
            if self.task is task:
                self.task = None
                task.cancel()

    def start(self, work: Coroutine[Any, Any, V]) -> asyncio.Task[V]:
        """Starts work ahead of time; no other may be under way."""
        self._is_awaited = False
        self.task = task = self.tasks.start(work)
        task.add_done_callback(self._forget)
        return task

    async def write(self, work: Coroutine[Any, Any, V]) -> V | None:
        """Does the work, None if it was cancelled; a caller that is does not end it."""
        task = self.start(work)
        self._is_awaited = True
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        """Lets go of the conversation in a result."""
        if self.task is task:
            self.task = None


@dataclass
class AgentMemory:
    """What the process remembers of one agent in one scope of a session.

    Attributes:
        pending: The summary under way, if there is one.
        facts: What is known now; each change puts other facts in place.
    """

    pending: PendingSummary = field(default_factory=PendingSummary)
    facts: SessionFacts = SessionFacts()

    def keep(self, own: object) -> None:
        """Keeps what a unit remembers, in place of another value of the same type."""
        units = {**self.facts.units, type(own): own}
        self.facts = replace(self.facts, units=units)

    def see(self, model: str, seen: Seen) -> None:
        """Keeps what the answers of a model have shown, in place of what they had."""
        models = with_newest(self.facts.models, model, seen)
        self.facts = replace(self.facts, models=models)

    def forget_arrived(self, run_id: str) -> None:
        """Forgets a summary of another run, which the session has by now."""
        paid = self.facts.put_in
        if paid is not None and paid.run_id != run_id:
            self.facts = replace(self.facts, put_in=None)

    def drop_late(self) -> None:
        """Forgets the summaries for which no call has come in ten minutes."""
        oldest_seconds = time.monotonic() - 600
        if _is_late(self.facts.ready, oldest_seconds):
            self.facts = replace(self.facts, ready=None)
        if _is_late(self.facts.put_in, oldest_seconds):
            self.facts = replace(self.facts, put_in=None)

    def add_costs(self, usage: Usage, cost: float | None) -> None:
        """Adds what summary calls took, and their price in US dollars."""
        known = self.facts
        self.facts = replace(
            known,
            summary_usage=known.summary_usage + usage,
            summary_cost=add_costs((known.summary_cost, cost)),
        )

    def take_costs(self) -> tuple[Usage, float | None]:
        """Returns once what summary calls took, and their price in US dollars."""
        taken = self.facts.summary_usage, self.facts.summary_cost
        self.facts = replace(self.facts, summary_usage=Usage(), summary_cost=0.0)
        return taken


def _is_late(paid: Paid | None, oldest_seconds: float) -> bool:
    if paid is None or paid.is_background:
        return False
    return paid.paid_seconds < oldest_seconds
