"""Calls the listeners of a user: functions that get a record of what happened.

A listener that fails is logged. One that takes too long is not waited for.
"""

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
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

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
"""A function, sync or async, that is asked before a compaction. It may give a focus
(str), put the compaction off (False), or do neither (None)."""

# The most late calls that are remembered; the oldest is forgotten first. A listener
# whose late call is forgotten may be called again before that call ends.
_MAX_LATE_CALLS = 1_024


@dataclass(frozen=True)
class Listeners:
    """The functions of a user, one for each kind of record; None for no function."""

    on_pressure: Listener[PressureRecord] | None = None
    on_compaction: Listener[CompactionRecord] | None = None
    on_call: Listener[CallRecord] | None = None
    before_compaction: BeforeCompaction | None = None


class _LateKey(NamedTuple):
    """Identifies the calls that a late call among them holds up.

    Attributes:
        kind: The class of the record.
        session_id: The session of a `PlannedCompaction`; "" for all other records.
    """

    kind: type
    session_id: str


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
        self._late: dict[_LateKey, _Call] = {}

    async def tell(self, record: object) -> Any:
        """Calls the listener of a record.

        A late call goes on. Until it ends, the listener is not called again.

        Returns:
            The listener's answer. None in four cases: there is no listener, an earlier
            call is late and has not ended, this call is late, or it fails.
        """
        kind = type(record)
        listener = self._functions[kind]
        if listener is None:
            return None

        # `before_compaction` may be late in one session, and asked in another.
        session_id = record.session_id if isinstance(record, PlannedCompaction) else ""
        late_key = _LateKey(kind, session_id)
        late_call = self._late.get(late_key)
        if late_call is not None and not late_call.is_over:
            return None

        call = _Call()
        task = self._tasks.start(self._finish(call, listener, record))
        call.task = task
        await asyncio.wait([task], timeout=self.listener_timeout_seconds)
        if task.done():
            has_answer = not task.cancelled() and task.exception() is None
            return task.result() if has_answer else None

        if late_key not in self._late:
            logger.warning(
                "A listener for %s takes longer than %g seconds. It goes on, and is "
                "not called again before it has returned.",
                kind.__name__,
                self.listener_timeout_seconds,
            )
        self._late[late_key] = call
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
        """Waits for a listener's answer; returns None if the listener fails.

        The first failure for a kind of record is logged as a warning, later ones at
        DEBUG.
        """
        try:
            return await call.ask(listener, record)
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
        """Starts a thread for a call, which must not raise anything."""
        result = Future[T]()
        result.set_running_or_notify_cancel()  # Nothing cancels a thread.

        def work() -> None:
            result.set_result(call(*args, **kwargs))

        threading.Thread(target=work, daemon=True).start()
        return result


_THREADS = _DaemonThreads()


class _Outcome(NamedTuple):
    """The outcome of a function call.

    Attributes:
        returned: The value that the function has returned, maybe an awaitable.
        error: The exception that it has raised; None if it has returned.
    """

    returned: Any = None
    error: Exception | None = None


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

    async def ask(self, listener: Callable[[Any], object], record: object) -> Any:
        """Returns the listener's answer, awaited; raises the listener's exceptions.

        A coroutine function is called on the event loop, because it returns at once.
        Any other function may block, so it is called in a thread.
        """
        # An object may be called as well: then its `__call__` is the function.
        method = getattr(listener, "__call__", None)  # noqa: B004 - of an object.
        if any(inspect.iscoroutinefunction(each) for each in (listener, method)):
            outcome = self._invoke(listener, record)
        else:
            context = contextvars.copy_context()
            work = functools.partial(context.run, self._invoke, listener, record)
            loop = asyncio.get_running_loop()
            outcome = await loop.run_in_executor(_THREADS, work)

        if outcome.error is not None:
            raise outcome.error
        if inspect.isawaitable(outcome.returned):
            return await outcome.returned
        return outcome.returned

    def _invoke(self, listener: Callable[[Any], object], record: object) -> _Outcome:
        """Calls the listener; raises nothing.

        An exception is a value here, because a future takes no `StopIteration`.
        """
        try:
            return _Outcome(returned=listener(record))
        except Exception as error:  # noqa: BLE001 - it is anyone's code.
            return _Outcome(error=error)
        except BaseException as error:  # noqa: BLE001 - in a thread it ends nothing.
            return _Outcome(error=RuntimeError(type(error).__name__))
        finally:
            self.has_returned = True
