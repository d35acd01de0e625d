"""The memory of the process: facts about each agent, and its summary under way.

An agent has one memory for each scope of a session in which it works.
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

# A summary that was not begun in the background is forgotten after this time.
_LATE_SECONDS = 600

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
        replaced: The summary that the session had before the run that put this one in;
            None for none. Until its event arrives, the session still has that one.
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
        """Returns the unconfirmed summary if the session has lost it; else None.

        It is lost if the session still has the summary that it replaced. Any other
        summary in the session is this one, or one that another process has saved.

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
        """Returns the value that a unit keeps; one with defaults if it keeps none."""
        found = self.units.get(kind)
        return found if isinstance(found, kind) else kind()


class SummaryTasks:
    """All tasks of a plugin that write summaries or wait for listeners.

    Attributes:
        max_working: The most summaries ahead of time that are written at once.
    """

    def __init__(self, max_working: int = 4) -> None:
        self.max_working = max_working
        # Each task's state; "" for one that is not among the summaries ahead of time.
        self._tasks: dict[asyncio.Task[Any], Literal["", "queued", "working"]] = {}
        self._lock = threading.Lock()

    def start(self, work: Coroutine[Any, Any, V]) -> asyncio.Task[V]:
        """Starts a task that need not be awaited; it ends with its event loop."""
        task = asyncio.create_task(work)
        # A user may close the loop while the task is under way: that is no news.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        with self._lock:
            dead_tasks = [each for each in self._tasks if each.get_loop().is_closed()]
            for dead_task in dead_tasks:
                del self._tasks[dead_task]
            self._tasks[task] = ""
        task.add_done_callback(self._forget)
        return task

    async def take_place(self) -> bool:
        """Waits until few enough summaries are being written ahead of time.

        Then the task that calls this takes a place, and holds it until it ends.

        Returns:
            True once the task has a place; False if tasks of other event loops hold all
            places, because nothing on this loop would notice their end.
        """
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        assert task is not None, "A coroutine always runs in a task."

        while True:
            with self._lock:
                working = [
                    each
                    for each, state in self._tasks.items()
                    # A loop that was left does not work on its tasks.
                    if state == "working" and each.get_loop().is_running()
                ]
                if len(working) < self.max_working:
                    self._tasks[task] = "working"
                    return True
                self._tasks[task] = "queued"

            on_this_loop = [each for each in working if each.get_loop() is loop]
            if not on_this_loop:
                return False
            await asyncio.wait(on_this_loop, return_when=asyncio.FIRST_COMPLETED)

    def is_queued(self, task: asyncio.Task[Any]) -> bool:
        """Returns whether a task waits for a place."""
        return self._tasks.get(task) == "queued"

    async def close(self) -> None:
        """Ends all tasks, within one second.

        Tasks that wait for a place, or run on other event loops, are cancelled at once.
        The others are cancelled if they do not end within 0.9 seconds. Then they get
        0.1 seconds for their own cleaning up.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            tasks = list(self._tasks)
        on_this_loop = [task for task in tasks if task.get_loop() is loop]

        for task in tasks:
            if self.is_queued(task) or task not in on_this_loop:
                with contextlib.suppress(RuntimeError):  # Its event loop is closed.
                    task.get_loop().call_soon_threadsafe(task.cancel)

        if not on_this_loop:
            return
        _, unfinished = await asyncio.wait(on_this_loop, timeout=0.9)
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=0.1)

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
        self._is_awaited = False  # Whether a call waits for it from the beginning.

    @property
    def is_under_way(self) -> bool:
        """Whether a summary is being written on this event loop.

        A summary of another event loop does not count, because that loop may be dead.
        """
        task = self.task
        return task is not None and task.get_loop() is asyncio.get_running_loop()

    async def wait(self, timeout_seconds: float) -> None:
        """Waits until no summary is under way on this event loop.

        A summary that a call waits for from the beginning has no timeout. A summary
        ahead of time is cancelled if it takes longer than the timeout, or if it has not
        begun because too many others are being written.
        """
        while self.is_under_way and (task := self.task):
            most_seconds = None if self._is_awaited else timeout_seconds
            if not self.tasks.is_queued(task):
                await asyncio.wait([task], timeout=most_seconds)

            # A task that has ended is no longer `self.task`, see `_forget`.
            if self.task is task:
                self.task = None
                task.cancel()

    def start(self, work: Coroutine[Any, Any, V]) -> asyncio.Task[V]:
        """Starts to write a summary ahead of time; no other may be under way."""
        self._is_awaited = False
        task = self.tasks.start(work)
        self.task = task
        task.add_done_callback(self._forget)
        return task

    async def write(self, work: Coroutine[Any, Any, V]) -> V | None:
        """Writes a summary that a call waits for; returns None if it was cancelled.

        The work goes on in a task of its own when the caller is cancelled.
        """
        task = self.start(work)
        self._is_awaited = True
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        """Forgets a task that has ended, whose result may hold the conversation."""
        if self.task is task:
            self.task = None


@dataclass
class AgentMemory:
    """The memory of the process of one agent in one scope of a session.

    Attributes:
        pending: The summary under way, if there is one.
        facts: The facts now. They are immutable; each change puts others in place.
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
        """Forgets the summaries for which no call has come in ten minutes."""
        oldest_seconds = time.monotonic() - _LATE_SECONDS
        if _is_expired(self.facts.ready, oldest_seconds):
            self.facts = replace(self.facts, ready=None)
        if _is_expired(self.facts.unconfirmed, oldest_seconds):
            self.facts = replace(self.facts, unconfirmed=None)

    def add_summary_costs(self, usage: Usage, cost: float | None) -> None:
        """Adds the tokens of summary calls, and their price in US dollars.

        A price of None is unknown. It makes the whole price unknown.
        """
        facts = self.facts
        self.facts = replace(
            facts,
            summary_usage=facts.summary_usage + usage,
            summary_cost=add_costs((facts.summary_cost, cost)),
        )

    def take_summary_costs(self) -> tuple[Usage, float | None]:
        """Returns the tokens and the price of summary calls; sets both to zero."""
        facts = self.facts
        self.facts = replace(facts, summary_usage=Usage(), summary_cost=0.0)
        return facts.summary_usage, facts.summary_cost


def _is_expired(paid: Paid | None, oldest_seconds: float) -> bool:
    """Returns whether a summary was paid for before `oldest_seconds`.

    The time is that of the monotonic clock. A summary from the background never
    expires, because it waits until a compaction is due.
    """
    if paid is None or paid.is_background:
        return False
    return paid.paid_seconds < oldest_seconds
