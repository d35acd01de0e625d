"""The functions of users that are told what happened: called so that none does harm."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
from asyncio import Task
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeVar

from contextguard_adk._support.log import log_failure
from contextguard_adk._support.tasks import SummaryTasks
from contextguard_adk.records import (
    CallRecord,
    CompactionRecord,
    PlannedCompaction,
    PressureRecord,
)

logger = logging.getLogger("contextguard_adk.telemetry")

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Listener = Callable[[R], Awaitable[None] | None]
"""A function of one record; sync or async. One that fails or is late is logged."""

Plan = str | Literal[False] | None
BeforeCompaction = Callable[[PlannedCompaction], Awaitable[Plan] | Plan]
"""A function, sync or async, that may give a focus (str) or put it off (False)."""


class _DaemonThreads(Executor):
    """Has a thread for each call; one that blocks keeps no process from ending."""

    def submit(
        self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Starts the thread; the call must not raise anything."""
        result = Future[T]()
        result.set_running_or_notify_cancel()  # Nothing cancels a thread.

        def work() -> None:
            result.set_result(call(*args, **kwargs))

        threading.Thread(target=work, daemon=True).start()
        return result


_THREADS = _DaemonThreads()


def _is_async(listener: Callable[[Any], object]) -> bool:
    """Whether a call only makes a coroutine, which runs on the event loop."""
    method = getattr(listener, "__call__", None)  # noqa: B004 - of an object.
    return inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(method)


@dataclass(eq=False)
class _Call:
    """One call of a listener.

    Attributes:
        task: Waits for its end; None until it is started.
        has_returned: Whether the function has; what it returned may be awaited still.
    """

    task: Task[Any] | None = None
    has_returned: bool = False

    @property
    def is_over(self) -> bool:
        """Whether it has ended; a thread outlives the event loop that has begun it."""
        task = self.task
        is_left = task is None or task.done() or task.get_loop().is_closed()
        return is_left and self.has_returned

    async def run(self, listener: Callable[[R], object], record: R) -> Any:
        """Returns what the listener says in the end; raises what it raises."""
        if _is_async(listener):
            outcome, error = self._invoke(listener, record)
        else:
            loop = asyncio.get_running_loop()
            context = contextvars.copy_context()
            outcome, error = await loop.run_in_executor(
                _THREADS, context.run, self._invoke, listener, record
            )
        if error is not None:
            raise error
        return await outcome if inspect.isawaitable(outcome) else outcome

    def _invoke(
        self, listener: Callable[[R], object], record: R
    ) -> tuple[Any, Exception | None]:
        """Calls the function; what it raises comes back as a value."""
        try:
            return listener(record), None
        except Exception as error:  # noqa: BLE001 - it is anyone's code.
            return None, error
        except BaseException as error:  # noqa: BLE001 - in a thread it ends nothing.
            return None, RuntimeError(type(error).__name__)
        finally:
            self.has_returned = True


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
    _late: dict[object, _Call] = field(default_factory=dict)

    async def tell(self, listener: Callable[[R], object] | None, record: R) -> Any:
        """Returns what a listener says in time; it is left alone while it is late."""
        if listener is None:
            return None

        kind = type(record)
        key = kind, isinstance(record, PlannedCompaction) and record.session_id
        last = self._late.get(key)
        if last is not None and not last.is_over:
            return None

        call = _Call()
        call.task = self._tasks.start(self._end(call, listener, record))
        await asyncio.wait([call.task], timeout=self.timeout_seconds)
        if call.task.done():
            is_lost = call.task.cancelled() or call.task.exception()
            return None if is_lost else call.task.result()

        if key not in self._late:
            message = "A listener for %s takes longer than %g seconds. It goes on, "
            message += "and is not called again before it has returned."
            logger.warning(message, kind.__name__, self.timeout_seconds)
        self._late[key] = call
        if len(self._late) > 1_024:  # The oldest are forgotten.
            del self._late[next(iter(self._late))]
        return None

    async def _end(
        self, call: _Call, listener: Callable[[R], object], record: R
    ) -> Any:
        """Waits for the end of a call; of failures only the first is a warning."""
        try:
            return await call.run(listener, record)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is anyone's code.
            kind = type(record)
            level = logging.DEBUG if kind in self._failed else logging.WARNING
            self._failed.add(kind)
            what = f"A listener for {kind.__name__} failed"
            log_failure(logger, what, error, level)
            return None

    async def tell_pressure(self, record: PressureRecord) -> None:
        """Tells log and listener of a request that fills much of the window."""
        logger.warning(
            "Agent %r is under pressure: %d of %d tokens (%.0f %%) are sent; %s.",
            *(record.agent, record.tokens, record.window_tokens),
            *(100 * record.pressure, record.place),
        )
        await self.tell(self.on_pressure, record)
