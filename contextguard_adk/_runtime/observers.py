"""Calls the functions of users that are told what happened, so that none does harm."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

from contextguard_adk._runtime.memory import SummaryTasks
from contextguard_adk._support.log import log_failure
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

_MAX_LATE_CALLS = 1_024


@dataclass(frozen=True)
class Listeners:
    """The functions of a user, one for each kind of record; None for no function."""

    on_pressure: Listener[PressureRecord] | None = None
    on_compaction: Listener[CompactionRecord] | None = None
    on_call: Listener[CallRecord] | None = None
    before_compaction: BeforeCompaction | None = None


class Observers:
    """Tells listeners what happened, and waits only so long for their answer."""

    def __init__(
        self,
        listeners: Listeners | None = None,
        listener_timeout_seconds: float = 5.0,
    ) -> None:
        self.listeners = listeners or Listeners()
        self._functions: Mapping[type, Callable[[Any], object] | None] = {
            PressureRecord: self.listeners.on_pressure,
            CompactionRecord: self.listeners.on_compaction,
            CallRecord: self.listeners.on_call,
            PlannedCompaction: self.listeners.before_compaction,
        }
        self.listener_timeout_seconds = listener_timeout_seconds
        self._tasks = SummaryTasks()
        self._failed = set[type]()  # Kinds of records.
        self._late: dict[tuple[type, str], _Call] = {}

    async def tell(self, record: object) -> Any:
        """Calls the listener of a record.

        Returns:
            The listener's answer; None where there is no listener, or where it fails or
            is late. A late call goes on; until it ends, no other begins.
        """
        kind = type(record)
        listener = self._functions[kind]
        if listener is None:
            return None

        # `before_compaction` may be late in one session, and asked in another.
        session_id = record.session_id if isinstance(record, PlannedCompaction) else ""
        key = kind, session_id
        last = self._late.get(key)
        if last is not None and not last.is_over:
            return None

        call = _Call()
        task = self._tasks.start(self._finish(call, listener, record))
        call.task = task
        await asyncio.wait([task], timeout=self.listener_timeout_seconds)
        if task.done():
            has_answer = not task.cancelled() and task.exception() is None
            return task.result() if has_answer else None

        if key not in self._late:
            logger.warning(
                "A listener for %s takes longer than %g seconds. It goes on, and is "
                "not called again before it has returned.",
                kind.__name__,
                self.listener_timeout_seconds,
            )
        self._late[key] = call
        if len(self._late) > _MAX_LATE_CALLS:
            oldest = next(iter(self._late))
            del self._late[oldest]
        return None

    async def tell_pressure(self, record: PressureRecord) -> None:
        """Tells log and listener of a request that fills much of the window."""
        logger.warning(
            "Agent %r is under pressure: %d of %d tokens (%.0f %%) are sent; %s.",
            record.agent,
            record.tokens,
            record.window_tokens,
            100 * record.pressure,
            record.place,
        )
        await self.tell(record)

    async def _finish(
        self, call: _Call, listener: Callable[[Any], object], record: object
    ) -> Any:
        """Runs a call to its end; logs the first failure as a warning."""
        try:
            return await call.run(listener, record)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is anyone's code.
            kind = type(record)
            level = logging.DEBUG if kind in self._failed else logging.WARNING
            self._failed.add(kind)
            log_failure(logger, f"A listener for {kind.__name__} failed", error, level)
            return None


class _DaemonThreads(Executor):
    """Has a thread for each call; a call that blocks keeps no process from ending.

    The pool of `asyncio.to_thread` lets a call wait where the app has filled it, and
    the process waits for its threads.
    """

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


@dataclass(eq=False)
class _Call:
    """One call of a listener.

    Attributes:
        task: Waits for the end of the call; None until it is started.
        has_returned: Whether the function has returned, maybe an awaitable that is
            not finished.
    """

    task: asyncio.Task[Any] | None = None
    has_returned: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the call has ended; a thread outlives the event loop it came from."""
        if not self.has_returned:
            return False
        task = self.task
        return task is None or task.done() or task.get_loop().is_closed()

    async def run(self, listener: Callable[[Any], object], record: object) -> Any:
        """Returns the listener's answer; raises what the listener raises."""
        # A coroutine function returns at once, and so needs no thread.
        method = getattr(listener, "__call__", None)  # noqa: B004 - of an object.
        if any(inspect.iscoroutinefunction(each) for each in (listener, method)):
            answer, error = self._invoke(listener, record)
        else:
            context = contextvars.copy_context()
            work = functools.partial(context.run, self._invoke, listener, record)
            loop = asyncio.get_running_loop()
            answer, error = await loop.run_in_executor(_THREADS, work)

        if error is not None:
            raise error
        if inspect.isawaitable(answer):
            return await answer
        return answer

    def _invoke(
        self, listener: Callable[[Any], object], record: object
    ) -> tuple[Any, Exception | None]:
        """Calls the listener; returns its answer and what it raised.

        An exception is a value here, because a future takes no `StopIteration`.
        """
        try:
            return listener(record), None
        except Exception as error:  # noqa: BLE001 - it is anyone's code.
            return None, error
        except BaseException as error:  # noqa: BLE001 - in a thread it ends nothing.
            return None, RuntimeError(type(error).__name__)
        finally:
            self.has_returned = True
