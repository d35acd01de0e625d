"""The memory of the process: facts about each agent, and its summary under way.

An agent has one memory for each scope of a session in which the agent works. A scope is
a branch of the session, or one of ADK's isolation scopes.

A summary ahead of time is written in the background, before a compaction is due.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Coroutine, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from contextguard_adk._history.stored import StoredSummary
from contextguard_adk._providers.costs import add_costs
from contextguard_adk._runtime.spending import SessionSpending
from contextguard_adk._support.log import log_traceback
from contextguard_adk.records import Usage

logger = logging.getLogger("contextguard_adk.pending")

MAX_MODELS = 8
"""An agent has facts about at most this many models; the newest stay."""

# How long `SummaryTasks.close` waits for tasks to end by themselves, and then for
# cancelled tasks. The app has to wait one second in all.
_END_SECONDS = 0.9
_CLEAN_UP_SECONDS = 0.1

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
U = TypeVar("U")


class BoundedDict(OrderedDict[K, V], Generic[K, V]):
    """A dict for several threads that forgets its oldest entry when it is full.

    The oldest entry is the one whose key was set the longest time ago.
    """

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
        """Returns a copy of the items, the oldest first.

        Iteration over the dict itself is not safe while other threads write.
        """
        with self._lock:
            return list(self.items())


def with_newest(known: Mapping[str, V], model: str, value: V) -> dict[str, V]:
    """Returns the known values and a new one: the newest `MAX_MODELS` of them.

    Args:
        known: The values by the models' names, the oldest first.
        model: The name of the model with the new value.
        value: The new value, which replaces an older value of this model.

    Returns:
        The values by the models' names; the new value is the last.
    """
    others = {name: other for name, other in known.items() if name != model}
    oldest_first = [*others.items(), (model, value)]
    return dict(oldest_first[-MAX_MODELS:])


@dataclass(frozen=True)
class ReadySummary:
    """A summary that was paid for, and that the session is not known to have.

    There are three cases:

    - The summary was written ahead of time, and waits until a compaction is due.
    - The summary was just written, and the next look puts it in the request. If the
      call was cancelled in the meantime, a later call does so.
    - The summary is in a request, and was written to session state. But the event that
      carries it to the session may get lost. Then a later run puts it in again.

    Attributes:
        stored: The summary as session state has it. A summary ahead of time has no
            texts beside it.
        facts: The fields of the summary's `CompactionRecord` that tell how the summary
            was written, by their names. None once listeners were told of the summary.
        is_ahead: Whether the summary was written ahead of time, and is in no request.
    """

    stored: StoredSummary
    facts: dict[str, Any] | None = None
    is_ahead: bool = False

    def is_stored_as(self, stored: StoredSummary | None) -> bool:
        """Returns whether the session has this summary.

        Args:
            stored: The summary that the session has; None for no summary.
        """
        if stored is None:
            return False
        replaces_the_same = stored.covered == self.stored.covered
        shortens_the_same = (
            stored.truncation == self.stored.truncation
            and stored.truncated_upto == self.stored.truncated_upto
        )
        has_same_text = stored.text == self.stored.text
        return has_same_text and replaces_the_same and shortens_the_same


@dataclass(frozen=True)
class Limits:
    """The limits of a model that its provider has shown to this process.

    Attributes:
        window_tokens: The most tokens of a prompt; None for no limit.
        is_rate: Whether `window_tokens` follows from a rate limit, and not from a
            window.
        sum_tokens: The rate limit for prompt and output together; 0 for none.
        output_tokens: The output limit of a request that was refused because prompt and
            output together were too large; None if no request was.
    """

    window_tokens: int | None = None
    is_rate: bool = False
    sum_tokens: int = 0
    output_tokens: int | None = None

    def with_window(self, window_tokens: int | None) -> Limits:
        """Returns the limits with another window in place of window and rate limit.

        Args:
            window_tokens: The window; None for no window.
        """
        return Limits(window_tokens, output_tokens=self.output_tokens)


class CountedRequest(NamedTuple):
    """Two measures of one request: the provider's count, and heuristic tokens.

    A heuristic token is 4 bytes.
    """

    real_tokens: int
    heuristic_tokens: int


class DoubtedCount(NamedTuple):
    """A provider's count of a request that is far above the estimate of the request.

    Attributes:
        ratio: The count divided by the estimate; 0 if there is no such count.
        excess_tokens: The count less the estimate.
    """

    ratio: float = 0.0
    excess_tokens: int = 0


NOT_DOUBTED = DoubtedCount()


@dataclass(frozen=True)
class Seen:
    """The facts that the answers and rejections of one model have shown.

    Attributes:
        accepted_tokens: The size of the largest prompt that the model has accepted.
        limits: What `Guard.limits` has for the model's server. When the app makes a new
            model object, that entry no longer counts, and this one does.
        correction: The tokens of the model per heuristic token (4 bytes), from 1 to 20,
            as rejections have shown; None for unknown. It counts where the provider
            reports no usage.
        counted: The measures of the last counted request; None before the first.
        lowest_ratio: The lowest believed ratio of a count to the estimate of the same
            request.
        doubted: The last count if it was far above the estimate; else `NOT_DOUBTED`.
    """

    accepted_tokens: int = 0
    limits: Limits = Limits()
    correction: float | None = None
    counted: CountedRequest | None = None
    lowest_ratio: float = 0.0
    doubted: DoubtedCount = NOT_DOUBTED


@dataclass(frozen=True)
class SessionFacts:
    """The facts about one agent in one scope at a moment; `AgentMemory` has the newest.

    Attributes:
        ready: The summary that may be put in a request without another payment; None
            for no summary.
        is_background_tried: Whether a summary ahead of time was begun since the last
            compaction.
        compacted_run: The id of the last call's run if the last call was compacted;
            else "".
        was_full: Whether the last call was compacted for its size.
        fruitless_tokens: The estimate of the last request whose compaction gained
            nothing; None if there was no such request since the last compaction.
        is_under_pressure: Whether the last request was reported because it filled much
            of the window.
        cached_ratio: The part of the last prompt that a cache served: 0 to 1.
        counting_model: The name of the model whose count stands in session state; "" if
            unknown.
        models: The facts that the newest models have shown, by the models' names.
        summary_usage: The tokens of summary calls since the last `CallRecord`.
        summary_cost: The price of these summary calls in US dollars; None if unknown.
        units: The values that sections, shapes and listeners remember, by their types.
    """

    ready: ReadySummary | None = None
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

    def of(self, model: str) -> Seen:
        """Returns the facts that the answers of a model have shown."""
        return self.models.get(model) or Seen()

    def unit(self, kind: type[U]) -> U:
        """Returns the remembered value of a type; if there is none, a new value.

        Args:
            kind: The type. A call of the type without arguments makes the new value.
        """
        found = self.units.get(kind)
        return found if isinstance(found, kind) else kind()


class SummaryTasks:
    """Tasks that write summaries or wait for listeners.

    The number of summaries that are written ahead of time at once is limited. So a task
    that writes a summary ahead of time first asks for a slot (`acquire_slot`). If all
    slots are taken, the task is queued.

    Attributes:
        max_working: The number of slots.
    """

    def __init__(self, max_working: int = 4) -> None:
        self.max_working = max_working
        # "working": the task has a slot. "queued": the task waits for a slot. "free":
        # the task has not asked for a slot.
        self._tasks: dict[asyncio.Task[Any], Literal["free", "queued", "working"]] = {}
        self._lock = threading.Lock()

    def start(self, work: Coroutine[Any, Any, V]) -> asyncio.Task[V]:
        """Starts a task that need not be awaited; the task ends with its event loop.

        Args:
            work: The coroutine that the task runs.
        """
        task = asyncio.create_task(work)
        # If the user closes the event loop during the task, the task never ends.
        # Without this line asyncio would log an error for such a task.
        task._log_destroy_pending = False  # type: ignore[attr-defined]

        with self._lock:
            # Tasks on a closed loop never end, so `_forget` is never called for them.
            dead_tasks = [each for each in self._tasks if each.get_loop().is_closed()]
            for dead_task in dead_tasks:
                del self._tasks[dead_task]
            self._tasks[task] = "free"
        task.add_done_callback(self._forget)
        return task

    async def acquire_slot(self) -> bool:
        """Waits for a slot for the current task; the task keeps the slot until it ends.

        Returns:
            True when the task has a slot. False if all slots are taken by tasks on
            other event loops, because asyncio cannot wait here for the end of such a
            task. Then the summary is not written.
        """
        current_task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        assert current_task is not None, "A coroutine always runs in a task."

        # When a task ends, `_forget` frees its slot. Another task may take the freed
        # slot before this one wakes. So this is a loop.
        while True:
            with self._lock:
                slot_owners = list[asyncio.Task[Any]]()
                for task, state in self._tasks.items():
                    # A task on a stopped loop does no work, so its slot is free.
                    if state == "working" and task.get_loop().is_running():
                        slot_owners.append(task)
                if len(slot_owners) < self.max_working:
                    self._tasks[current_task] = "working"
                    return True
                self._tasks[current_task] = "queued"

            owners_here = [owner for owner in slot_owners if owner.get_loop() is loop]
            if not owners_here:
                return False
            await asyncio.wait(owners_here, return_when=asyncio.FIRST_COMPLETED)

    def is_queued(self, task: asyncio.Task[Any]) -> bool:
        """Returns whether a task waits for a slot."""
        return self._tasks.get(task) == "queued"

    async def close(self) -> None:
        """Ends all tasks as the app ends; takes at most one second.

        A task that is queued, or runs on another event loop, is cancelled at once. Any
        other task has `_END_SECONDS` to end by itself. Then the task is cancelled, and
        has `_CLEAN_UP_SECONDS` to clean up.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            tasks = list(self._tasks)
        tasks_here = [task for task in tasks if task.get_loop() is loop]

        for task in tasks:
            if self.is_queued(task) or task not in tasks_here:
                # `call_soon_threadsafe` raises if the loop of the task is closed.
                with contextlib.suppress(RuntimeError):
                    task.get_loop().call_soon_threadsafe(task.cancel)

        if not tasks_here:
            return
        _, unfinished = await asyncio.wait(tasks_here, timeout=_END_SECONDS)
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=_CLEAN_UP_SECONDS)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        """Forgets a task that has ended.

        If the task has raised an error, it has written no summary. Then the error is
        logged at DEBUG.
        """
        with self._lock:
            self._tasks.pop(task, None)
        if task.cancelled():
            return

        error = task.exception()
        if error is not None:
            log_traceback(logger, "A summary was not written", error)


class PendingSummary:
    """The summary of an agent in one scope that is being written, if there is one.

    The task that writes the summary goes on if the model call that waits for the
    summary is cancelled. The task ends with its event loop.

    Attributes:
        tasks: All tasks of the plugin that write summaries.
        task: The task that writes the summary; None if no summary is being written.
    """

    def __init__(self, tasks: SummaryTasks | None = None) -> None:
        self.tasks = tasks or SummaryTasks()
        self.task: asyncio.Task[Any] | None = None
        self._is_ahead = False  # Whether `task` writes a summary ahead of time.

    @property
    def is_under_way(self) -> bool:
        """Whether a summary is being written on this event loop.

        A summary on another event loop does not count, because the other loop may never
        run again.
        """
        task = self.task
        return task is not None and task.get_loop() is asyncio.get_running_loop()

    async def wait(self, timeout_seconds: float) -> None:
        """Waits for the summary under way on this event loop, if there is one.

        There are three cases:

        - A summary that a model call waits for is waited for until it is written.
        - A summary ahead of time is cancelled if it takes longer than the timeout.
        - A summary ahead of time that is still queued is cancelled at once.

        Args:
            timeout_seconds: How long to wait for a summary ahead of time.
        """
        task = self.task
        if task is None or not self.is_under_way:
            return
        if not self._is_ahead:
            await asyncio.wait([task])
        elif not self.tasks.is_queued(task):
            await asyncio.wait([task], timeout=timeout_seconds)

        # `_forget` removes a task that has ended. So a task that is still here is a
        # summary ahead of time that is late or queued.
        if self.task is task:
            self.task = None
            task.cancel()

    def start(
        self, work: Coroutine[Any, Any, V], is_ahead: bool = True
    ) -> asyncio.Task[V]:
        """Starts a task that writes a summary; no other one is under way.

        Args:
            work: Writes the summary.
            is_ahead: Whether the summary is written ahead of time: then no model call
                waits for it.
        """
        task = self.tasks.start(work)
        self.task = task
        self._is_ahead = is_ahead
        task.add_done_callback(self._forget)
        return task

    async def write(self, work: Coroutine[Any, Any, V]) -> V | None:
        """Starts a task that writes a summary, and waits for the result of the task.

        If the caller is cancelled, the task goes on. Otherwise a turn with a deadline
        that is shorter than a summary takes would never get one.

        Args:
            work: Writes the summary.

        Returns:
            What `work` returns; None if the task was cancelled.
        """
        task = self.start(work, is_ahead=False)
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        """Forgets a task that has ended, because the task may hold the conversation.

        If another task has taken its place in `self.task`, that task is not forgotten.
        """
        if self.task is task:
            self.task = None


@dataclass(eq=False)
class AgentMemory:
    """What the process remembers of one agent in one scope of a session.

    Attributes:
        pending: The summary under way, if there is one.
        facts: The facts at this moment. They are never changed: a change of a fact puts
            another `SessionFacts` in place.
        spending: What the session has spent on summaries, of all its agents.
    """

    pending: PendingSummary = field(default_factory=PendingSummary)
    facts: SessionFacts = SessionFacts()
    spending: SessionSpending = field(default_factory=SessionSpending)

    def remember_unit(self, value: object) -> None:
        """Remembers the value of a section, shape or listener.

        The value replaces an earlier value of the same type.
        """
        units = {**self.facts.units, type(value): value}
        self.facts = replace(self.facts, units=units)

    def remember_seen(self, model: str, seen: Seen) -> None:
        """Remembers the facts that the answers of a model have shown.

        Args:
            model: The name of the model.
            seen: All facts about the model, in place of the earlier ones.
        """
        models = with_newest(self.facts.models, model, seen)
        self.facts = replace(self.facts, models=models)

    def forget_ready(self, ready: ReadySummary) -> None:
        """Forgets a summary, because the session has it by now.

        Another summary that is ready in its place is not forgotten.
        """
        if self.facts.ready is ready:
            self.facts = replace(self.facts, ready=None)

    def add_summary_costs(self, usage: Usage, cost: float | None) -> None:
        """Adds the tokens and the price of summary calls to the sums.

        Args:
            usage: The tokens.
            cost: The price in US dollars; None if unknown. The sum with an unknown
                price is unknown.
        """
        facts = self.facts
        self.facts = replace(
            facts,
            summary_usage=facts.summary_usage + usage,
            summary_cost=add_costs((facts.summary_cost, cost)),
        )

    def pop_summary_costs(self) -> tuple[Usage, float | None]:
        """Returns the sums of `add_summary_costs`, and sets both sums to zero.

        Returns:
            The tokens, and the price in US dollars; None for an unknown price.
        """
        facts = self.facts
        self.facts = replace(facts, summary_usage=Usage(), summary_cost=0.0)
        return facts.summary_usage, facts.summary_cost
