"""The functions of users that are told what happened: called so that none does harm."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
from asyncio import Task
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from contextguard_adk._support.log import log_failure
from contextguard_adk._support.tasks import SummaryTasks
from contextguard_adk.records import (
    CallRecord,
    CompactionRecord,
    PlannedCompaction,
    PressureRecord,
)

logger = logging.getLogger("contextguard_adk.telemetry")

R = TypeVar("R")
Listener = Callable[[R], Awaitable[None] | None]
"""A function of one record; sync or async. One that fails or is late is logged."""

Plan = str | Literal[False] | None
BeforeCompaction = Callable[[PlannedCompaction], Awaitable[Plan] | Plan]
"""A function, sync or async, that may give a focus (str) or put it off (False)."""


def _start_call(listener: Callable[[R], object], record: R) -> Future[Any]:
    """Calls it in a thread, since it may block; most have returned when this does."""
    result, context = Future[Any](), contextvars.copy_context()
    result.set_running_or_notify_cancel()  # Nothing cancels a thread.

    def work() -> None:
        try:
            result.set_result(context.run(listener, record))
        except BaseException as error:  # noqa: BLE001 - it is raised in `_end_call`.
            is_usual, name = isinstance(error, Exception), type(error).__name__
            result.set_exception(error if is_usual else RuntimeError(name))

    try:
        threading.Thread(target=work, daemon=True).start()
        wait([result], timeout=0.1)  # Most need no task; the event loop waits.
    except RuntimeError as error:  # There are too many threads.
        result.set_exception(error)
    return result


@dataclass
class Observers:
    """Who is told what happened; pressure is a share of the context window."""

    warning_threshold: float = 0.70
    timeout_seconds: float = 5.0
    on_pressure: Listener[PressureRecord] | None = None
    on_compaction: Listener[CompactionRecord] | None = None
    on_call: Listener[CallRecord] | None = None
    before_compaction: BeforeCompaction | None = None
    _tasks: SummaryTasks = field(default_factory=SummaryTasks)
    _failed: set[type] = field(default_factory=set)
    _late: dict[object, tuple[Task[Any], Future[Any]]] = field(default_factory=dict)

    async def _end_call(self, result: Future[Any], kind: type) -> Any:
        """Waits for the end of a call; of failures only the first is a warning."""
        try:
            if not result.done():
                await asyncio.wrap_future(result)
            outcome = result.result()
            return await outcome if inspect.isawaitable(outcome) else outcome
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is anyone's code.
            level = logging.DEBUG if kind in self._failed else logging.WARNING
            self._failed.add(kind)
            what = f"A listener for {kind.__name__} failed"
            log_failure(logger, what, error, level)
            return None

    async def tell(self, listener: Callable[[R], object] | None, record: R) -> Any:
        """Returns what a listener says in time; it is left alone while it is late."""
        kind = type(record)
        key = kind, isinstance(record, PlannedCompaction) and record.session_id
        task, result = self._late.get(key, (None, None))
        if result and task:  # A thread outlives the event loop that has called it.
            is_over = task.done() or task.get_loop().is_closed()
            listener = listener if is_over and result.done() else None
        if listener is None:
            return None
        result = _start_call(listener, record)
        ending = self._end_call(result, kind)
        if result.done() and (result.exception() or result.result() is None):
            return await ending
        task = self._tasks.start(ending)
        await asyncio.wait([task], timeout=self.timeout_seconds)
        if not task.done():
            if key not in self._late:
                message = "A listener for %s takes longer than %g seconds. It goes on, "
                message += "and is not called again before it has returned."
                logger.warning(message, kind.__name__, self.timeout_seconds)
            self._late[key] = task, result
            if len(self._late) > 1_024:  # The oldest are forgotten.
                del self._late[next(iter(self._late))]
            return None
        return None if task.cancelled() or task.exception() else task.result()

    async def tell_pressure(self, record: PressureRecord) -> None:
        """Tells log and listener of a request that fills much of the window."""
        logger.warning(
            "Agent %r is under pressure: %d of %d tokens (%.0f %%) are sent; %s.",
            *(record.agent, record.tokens, record.window_tokens),
            *(100 * record.pressure, record.place),
        )
        await self.tell(self.on_pressure, record)
