"""The memory of the process: facts about each agent, and its summary under way.

An agent has one memory for each scope of a session in which it works. A scope is a
branch of the session, or one of ADK's isolation scopes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Coroutine, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from contextguard_adk._history.stored import Draft, Learned, StoredSummary, with_newest
from contextguard_adk._providers.costs import add_costs
from contextguard_adk._support.log import log_traceback
from contextguard_adk.records import Usage

logger = logging.getLogger("contextguard_adk.pending")

_LATE_SECONDS = 600
"""A summary that a call has waited for is forgotten after this time."""

# Together they are one second: so long may the app have to wait as it ends.
_END_SECONDS = 0.9
_CLEAN_UP_SECONDS = 0.1

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
    """A summary that was paid for, and that the session is not known to have.

    First it waits on the shelf (`SessionFacts.ready`). Then it is put in a request and
    written to session state. It stays unconfirmed (`SessionFacts.unconfirmed`) until an
    event has carried it to the session, because events may get lost.

    Attributes:
        draft: The decision of the strategy. Its indexes count the contents of the
            request for which it was made.
        stored: The form in which it is stored; it names the contents that it replaces.
        facts: The fields of its `CompactionRecord` that tell what writing it took.
        run_id: The run that wrote it; once it is in a request, the run that put it in.
        is_background: Whether it was written ahead of time, and waits until a
            compaction is due.
        is_reported: Whether listeners were told of it.
        replaced: The summary that the session has until the event of this one arrives;
            None for none.
        key: The key of session state under which it was written.
        event_count: The number of events that the session had when it was put in.
        paid_seconds: The time when it was written, on the monotonic clock; once it is
            in a request, the time when it was put in.
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
    """A limit of prompts that this process keeps to.

    Attributes:
        tokens: The most tokens of a prompt.
        is_rate: Whether it follows from a rate limit, and not from a window.
        sum_tokens: The most tokens of prompt and output together; 0 if output does not
            count.
    """

    tokens: int
    is_rate: bool = False
    sum_tokens: int = 0


class CountedRequest(NamedTuple):
    """A provider's count of a request, and bytes / 4 of the same request."""

    real_tokens: int
    heuristic_tokens: int


class DoubtedCount(NamedTuple):
    """A count that is far above the estimate of its request.

    Attributes:
        ratio: The count over the estimate; 0 if there is no such count.
        excess_tokens: The tokens of the count above the estimate.
    """

    ratio: float = 0.0
    excess_tokens: int = 0


NOT_DOUBTED = DoubtedCount()


@dataclass(frozen=True)
class Seen:
    """The facts that the answers of one model have shown.

    Attributes:
        accepted_tokens: The largest prompt that the model has accepted.
        limits: The limits that its provider has shown to this process; None for none.
        limit_calls: The number of calls that were answered under limits that this
            process does not trust; None if it trusts `limits`.
        counted: The last count, and bytes / 4 of its request; None before the first.
        lowest_ratio: The lowest believed count over the estimate of its request.
        doubted: The last count if it was far above its estimate; zeros otherwise.
        kept: The limit that this session keeps to. Unlike `Guard.limits` it stays when
            the app makes a new model object.
    """

    accepted_tokens: int = 0
    limits: Learned | None = None
    limit_calls: int | None = 0
    counted: CountedRequest | None = None
    lowest_ratio: float = 0.0
    doubted: DoubtedCount = NOT_DOUBTED
    kept: Limit | None = None

    def has_shown(self, limits: Learned) -> bool:
        """Returns whether its provider has shown these limits to this process."""
        return self.limits is not None and vars(self.limits) == vars(limits)


@dataclass(frozen=True)
class SessionFacts:
    """The facts about one agent in one scope at a moment; `AgentMemory` has the newest.

    Attributes:
        ready: A summary on the shelf: it was paid for and is in no request yet.
        unconfirmed: The last summary that was put in a request, until the session is
            seen to have it; None for none.
        is_background_tried: Whether a summary was begun ahead of time since the last
            compaction.
        compacted_run: The run whose last call was compacted; "" if it was not.
        was_full: Whether that call was compacted for its size.
        fruitless_tokens: The estimate of the request whose compaction gained nothing;
            None if none was tried since the last compaction.
        is_under_pressure: Whether the last request filled much of the window, and was
            reported for that.
        cached_ratio: The part of the last prompt that a cache served.
        counting_model: The model whose count stands in session state; "" if unknown.
        models: The facts that the newest models have shown, by their names.
        summary_usage: The tokens of summary calls since the last `CallRecord`.
        summary_cost: Their price in US dollars; None if it is unknown.
        units: The values that sections, shapes and listeners remember, by their types.
    """

    ready: Paid | None = None
    unconfirmed: Paid | None = None
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
        """Returns the unconfirmed summary if its event got lost; else None.

        Then the session still has the summary before it (`Paid.replaced`). Any other
        summary in the session is the unconfirmed one, or comes from another process.

        Args:
            stored: The summary that the session has; None for none.
        """
        unconfirmed = self.unconfirmed
        if unconfirmed is not None and unconfirmed.replaced == stored:
            return unconfirmed
        return None

    def of(self, model: str) -> Seen:
        """Returns the facts that the answers of a model have shown."""
        return self.models.get(model) or Seen()

    def unit(self, kind: type[U]) -> U:
        """Returns the remembered value of a type; one of defaults if there is none."""
        found = self.units.get(kind)
        return found if isinstance(found, kind) else kind()


class SummaryTasks:
    """All tasks of a plugin that write summaries or wait for listeners.

    A summary ahead of time is written in a slot. When all slots are taken, its task is
    queued.

    Attributes:
        max_working: The number of slots.
    """

    def __init__(self, max_working: int = 4) -> None:
        self.max_working = max_working
        # A task that has asked for no slot is "free".
        self._tasks: dict[asyncio.Task[Any], Literal["free", "queued", "working"]] = {}
        self._lock = threading.Lock()

    def start(self, work: Coroutine[Any, Any, V]) -> asyncio.Task[V]:
        """Starts a task that need not be awaited; the task ends with its event loop."""
        task = asyncio.create_task(work)
        # If the user closes the loop during the task, asyncio would report the task.
        task._log_destroy_pending = False  # type: ignore[attr-defined]

        with self._lock:
            # A task on a closed loop never ends, so that `_forget` is not called.
            dead_tasks = [each for each in self._tasks if each.get_loop().is_closed()]
            for dead_task in dead_tasks:
                del self._tasks[dead_task]
            self._tasks[task] = "free"
        task.add_done_callback(self._forget)
        return task

    async def acquire_slot(self) -> bool:
        """Waits for a slot for the current task, which keeps the slot until it ends.

        Returns:
            True once the task has a slot; False if tasks on other event loops hold all
            slots, because nothing on this loop would notice their end.
        """
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        assert task is not None, "A coroutine always runs in a task."

        while True:
            with self._lock:
                working_tasks = list[asyncio.Task[Any]]()
                for each, state in self._tasks.items():
                    # A loop that does not run any more does not work on its tasks.
                    if state == "working" and each.get_loop().is_running():
                        working_tasks.append(each)
                if len(working_tasks) < self.max_working:
                    self._tasks[task] = "working"
                    return True
                self._tasks[task] = "queued"

            tasks_here = [each for each in working_tasks if each.get_loop() is loop]
            if not tasks_here:
                return False
            await asyncio.wait(tasks_here, return_when=asyncio.FIRST_COMPLETED)

    def is_queued(self, task: asyncio.Task[Any]) -> bool:
        """Returns whether a task waits for a slot."""
        return self._tasks.get(task) == "queued"

    async def close(self) -> None:
        """Ends all tasks, within one second.

        A task that is queued, or runs on another event loop, is cancelled at once. Any
        other task has `_END_SECONDS` to end by itself. Then it is cancelled, and has
        `_CLEAN_UP_SECONDS` for its own cleaning up.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            tasks = list(self._tasks)
        tasks_here = [task for task in tasks if task.get_loop() is loop]

        for task in tasks:
            if self.is_queued(task) or task not in tasks_here:
                with contextlib.suppress(RuntimeError):  # Its event loop is closed.
                    task.get_loop().call_soon_threadsafe(task.cancel)

        if not tasks_here:
            return
        _, unfinished = await asyncio.wait(tasks_here, timeout=_END_SECONDS)
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=_CLEAN_UP_SECONDS)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        """Forgets a task that has ended; logs its failure at DEBUG."""
        with self._lock:
            self._tasks.pop(task, None)
        if task.cancelled():
            return

        error = task.exception()
        if error is not None:
            log_traceback(logger, "A summary was not written", error)


class PendingSummary:
    """The summary of an agent in one scope that is being written, if there is one.

    Its task goes on when the call that wants it is cancelled, and ends with its event
    loop.

    Attributes:
        tasks: All such tasks of the plugin.
        task: The task that writes it; None if none is being written.
    """

    def __init__(self, tasks: SummaryTasks | None = None) -> None:
        self.tasks = tasks or SummaryTasks()
        self.task: asyncio.Task[Any] | None = None
        self._is_ahead = False  # Whether it is written ahead of time.

    @property
    def is_under_way(self) -> bool:
        """Whether a summary is being written on this event loop.

        A summary of another event loop does not count, because that loop may be dead.
        """
        task = self.task
        return task is not None and task.get_loop() is asyncio.get_running_loop()

    async def wait(self, timeout_seconds: float) -> None:
        """Waits until no summary is under way on this event loop.

        Only a summary ahead of time can be cancelled here: if it takes longer than the
        timeout, or at once if it is still queued.
        """
        # Another call may begin a summary while this one waits. So this is a loop.
        while self.is_under_way and (task := self.task):
            if not self._is_ahead:
                await asyncio.wait([task])
            elif not self.tasks.is_queued(task):
                await asyncio.wait([task], timeout=timeout_seconds)

            # `_forget` removes a task that has ended, so this one is late or queued.
            if self.task is task:
                self.task = None
                task.cancel()

    def start(
        self, work: Coroutine[Any, Any, V], is_ahead: bool = True
    ) -> asyncio.Task[V]:
        """Starts to write a summary; no other may be under way on this event loop.

        Args:
            work: Writes the summary.
            is_ahead: Whether it is written ahead of time, so that no call waits for it.
        """
        task = self.tasks.start(work)
        self.task = task
        self._is_ahead = is_ahead
        task.add_done_callback(self._forget)
        return task

    async def write(self, work: Coroutine[Any, Any, V]) -> V | None:
        """Writes a summary that a call waits for; returns None if it was cancelled.

        If the caller is cancelled, the work goes on: a later call uses the summary.
        """
        task = self.start(work, is_ahead=False)
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        """Forgets a task that has ended, because it may hold the conversation."""
        if self.task is task:
            self.task = None


@dataclass
class AgentMemory:
    """The memory of the process of one agent in one scope of a session.

    Attributes:
        pending: The summary under way, if there is one.
        facts: The facts at this moment. A change puts another object in place.
    """

    pending: PendingSummary = field(default_factory=PendingSummary)
    facts: SessionFacts = SessionFacts()

    def keep(self, own: object) -> None:
        """Keeps the value of a unit, in place of another value of the same type."""
        units = {**self.facts.units, type(own): own}
        self.facts = replace(self.facts, units=units)

    def see(self, model: str, seen: Seen) -> None:
        """Keeps the facts that the answers of a model have shown so far."""
        models = with_newest(self.facts.models, model, seen)
        self.facts = replace(self.facts, models=models)

    def drop_late(self) -> None:
        """Forgets the summaries for which no call has come in `_LATE_SECONDS`."""
        if _is_late(self.facts.ready):
            self.facts = replace(self.facts, ready=None)
        if _is_late(self.facts.unconfirmed):
            self.facts = replace(self.facts, unconfirmed=None)

    def add_summary_costs(self, usage: Usage, cost: float | None) -> None:
        """Adds the tokens of summary calls, and their price in US dollars.

        None stands for an unknown price. With one of these the whole is unknown.
        """
        facts = self.facts
        self.facts = replace(
            facts,
            summary_usage=facts.summary_usage + usage,
            summary_cost=add_costs((facts.summary_cost, cost)),
        )

    def pop_summary_costs(self) -> tuple[Usage, float | None]:
        """Returns the tokens and the price of summary calls; sets both to zero."""
        facts = self.facts
        self.facts = replace(facts, summary_usage=Usage(), summary_cost=0.0)
        return facts.summary_usage, facts.summary_cost


def _is_late(paid: Paid | None) -> bool:
    """Returns whether a summary is older than `_LATE_SECONDS`.

    A summary from the background is never late, because it waits until a compaction is
    due.
    """
    if paid is None or paid.is_background:
        return False
    age_seconds = time.monotonic() - paid.paid_seconds
    return age_seconds > _LATE_SECONDS
