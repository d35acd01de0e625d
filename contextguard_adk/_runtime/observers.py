"""Calls the listeners of a user: functions that get a record of what happened.

A failure of a listener is logged. A call of a listener is late if the call has not
ended after a timeout. A late call goes on, and nobody waits for its end any more.
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
    PlannedSummary,
    PressureRecord,
)

logger = logging.getLogger("contextguard_adk.telemetry")

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Listener = Callable[[R], Awaitable[None] | None]
"""A function of one record; sync or async."""

Plan = str | Literal[False] | None
BeforeCompaction = Callable[[PlannedCompaction], Awaitable[Plan] | Plan]
"""A function, sync or async, that is asked before a compaction.

It returns a focus (str), which says what the summary should keep above all; False,
which puts the compaction off; or None, which changes nothing."""

Review = str | Literal[False] | None
AfterSummary = Callable[[PlannedSummary], Awaitable[Review] | Review]
"""A function, sync or async, that is shown a summary before it is used.

It returns a text (str), which takes the place of the summary; False, which has excerpts
take its place; or None, which changes nothing."""

# The most late calls that are remembered. The oldest is forgotten first: its listener
# may then be called again before the late call ends.
_MAX_LATE_CALLS = 1_024


def is_coroutine_function(function: object) -> bool:
    """Whether a function, or the method `__call__` of an object, is an `async def`."""
    method = getattr(function, "__call__", None)  # noqa: B004 - of an object.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


@dataclass(frozen=True)
class Listeners:
    """The functions of a user, one for each kind of record; None for no function."""

    on_pressure: Listener[PressureRecord] | None = None
    on_compaction: Listener[CompactionRecord] | None = None
    on_call: Listener[CallRecord] | None = None
    before_compaction: BeforeCompaction | None = None
    after_summary: AfterSummary | None = None


class _LateKey(NamedTuple):
    """Names a group of calls: while a late call of the group goes on, no other is made.

    `before_compaction` and `after_summary` answer for one session, so each session has
    groups of its own. The other listeners have one group each.

    Attributes:
        kind: The class of the record.
        session_id: The session of a `PlannedCompaction` or a `PlannedSummary`; "" for
            all other records.
    """

    kind: type
    session_id: str


class Observers:
    """Tells listeners what happened, and waits for their answers until a timeout.

    Attributes:
        listeners: The functions of the user.
        listener_timeout_seconds: The timeout.
    """

    def __init__(self, listeners: Listeners | None = None) -> None:
        self.listeners = listeners or Listeners()
        self._functions: Mapping[type, Callable[[Any], object] | None] = {
            PressureRecord: self.listeners.on_pressure,
            CompactionRecord: self.listeners.on_compaction,
            CallRecord: self.listeners.on_call,
            PlannedCompaction: self.listeners.before_compaction,
            PlannedSummary: self.listeners.after_summary,
        }
        self.listener_timeout_seconds = 5.0
        self._tasks = SummaryTasks()
        self._failed_kinds = set[type]()
        self._late_calls: dict[_LateKey, _Call] = {}

    async def tell(self, record: object) -> Any:
        """Calls the listener of a record, and waits for the answer until the timeout.

        The listener is not called while a late call of the same group goes on.

        Args:
            record: A record of one of the classes in `self._functions`.

        Returns:
            The listener's answer; None if there is no listener, or if the listener is
            not called, fails, or is late.
        """
        kind = type(record)
        listener = self._functions[kind]
        if listener is None:
            return None

        session_id = ""
        if isinstance(record, PlannedCompaction | PlannedSummary):
            session_id = record.session_id
        late_key = _LateKey(kind, session_id)
        late_call = self._late_calls.get(late_key)
        if late_call is not None and not late_call.is_over:
            return None

        call = _Call()
        task = self._tasks.start(self._ask(call, listener, record))
        call.task = task
        await asyncio.wait([task], timeout=self.listener_timeout_seconds)
        if not task.done():
            self._remember_late(late_key, call)
            return None

        # `_ask` logs an `Exception`. A task may still be cancelled, or end with another
        # error: neither may reach the caller.
        has_failed = task.cancelled() or task.exception() is not None
        return None if has_failed else task.result()

    def _remember_late(self, key: _LateKey, call: _Call) -> None:
        """Remembers a late call, in place of an earlier late call with the same key.

        The warning says what happens to every late call with this key. So only the
        first of these calls is logged.
        """
        if key not in self._late_calls:
            logger.warning(
                "A listener for %s takes longer than %g seconds. It goes on, and is "
                "not called again before it has returned.",
                key.kind.__name__,
                self.listener_timeout_seconds,
            )

        self._late_calls[key] = call
        if len(self._late_calls) > _MAX_LATE_CALLS:
            oldest_key = next(iter(self._late_calls))
            del self._late_calls[oldest_key]

    async def tell_pressure(self, record: PressureRecord) -> None:
        """Tells the log and the listener of a request that fills much of the window."""
        logger.warning(
            "Agent %r is under pressure: %d of %d tokens (%.0f %%) are sent; %s.",
            record.agent,
            record.tokens,
            record.window_tokens,
            100 * record.pressure,
            record.place,
        )
        await self.tell(record)

    async def _ask(
        self, call: _Call, listener: Callable[[Any], object], record: object
    ) -> Any:
        """Returns a listener's answer; logs a failure, and then returns None.

        The first failure for a class of records is logged as a warning. Later failures
        for this class are logged at DEBUG.

        Args:
            call: The call, which is new.
            listener: The listener.
            record: The record that the listener gets.
        """
        try:
            return await call.ask(listener, record)
        # A `SystemExit` of a coroutine would stop the event loop.
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is anyone's code.
            kind = type(record)
            level = logging.DEBUG if kind in self._failed_kinds else logging.WARNING
            self._failed_kinds.add(kind)
            failed = f"A listener for {kind.__name__} failed"
            log_failure(logger, failed, error, level=level)
            return None


class _DaemonThreads(Executor):
    """Runs each function in a daemon thread of its own.

    The pool of `asyncio.to_thread` has two faults: a function has to wait while the app
    has filled the pool, and the process waits for the pool's threads before it ends.
    The process does not wait for daemon threads.
    """

    def submit(
        self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Starts a thread that calls a function.

        Args:
            call: The function, which must raise nothing.
            args: The arguments of the function.
            kwargs: The keyword arguments of the function.
        """
        future = Future[T]()
        # A future that is marked as running cannot be cancelled. `set_result` would
        # raise for a cancelled future.
        future.set_running_or_notify_cancel()

        def run_call() -> None:
            result = call(*args, **kwargs)
            future.set_result(result)

        threading.Thread(target=run_call, daemon=True).start()
        return future


DAEMON_THREADS = _DaemonThreads()
"""Has functions called that may block, each in a thread of its own."""


class _Outcome(NamedTuple):
    """The outcome of a listener's function.

    Attributes:
        returned: What the function has returned: an awaitable, or the answer.
        error: The exception that the function has raised; None if it has returned.
    """

    returned: Any = None
    error: Exception | None = None


@dataclass(eq=False)
class _Call:
    """One call of a listener.

    Attributes:
        task: The task that waits for the answer; None until the task is started.
        is_function_over: Whether the listener's function has returned or raised. If the
            function has returned an awaitable, the awaitable may still run.
    """

    task: asyncio.Task[Any] | None = None
    is_function_over: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the function has ended, and the awaitable if it returned one.

        A function in a thread goes on after the event loop is closed. An awaitable in a
        task does not go on, although its task is never done then.
        """
        if not self.is_function_over:
            return False
        # `Observers.tell` sets the task at once, so a remembered call has a task. The
        # check for None is only for the type.
        task = self.task
        return task is None or task.done() or task.get_loop().is_closed()

    async def ask(self, listener: Callable[[Any], object], record: object) -> Any:
        """Calls the listener, and returns the answer; raises the listener's exceptions.

        A coroutine function is called on the event loop, because the call only makes a
        coroutine. Any other function may block, so it is called in a thread. An
        awaitable that a function returns is awaited on the event loop.
        """
        if is_coroutine_function(listener):
            outcome = self._invoke(listener, record)
        else:
            # A new thread has no context variables, so it gets those of this task.
            context = contextvars.copy_context()
            work = functools.partial(context.run, self._invoke, listener, record)
            loop = asyncio.get_running_loop()
            outcome = await loop.run_in_executor(DAEMON_THREADS, work)

        if outcome.error is not None:
            raise outcome.error
        if inspect.isawaitable(outcome.returned):
            return await outcome.returned
        return outcome.returned

    def _invoke(self, listener: Callable[[Any], object], record: object) -> _Outcome:
        """Calls the listener, and returns the outcome; raises nothing.

        Exceptions are returned, because asyncio cannot pass a `StopIteration` from a
        thread to a task.
        """
        try:
            return _Outcome(returned=listener(record))
        except Exception as error:  # noqa: BLE001 - it is anyone's code.
            return _Outcome(error=error)
        except BaseException as error:  # noqa: BLE001 - such as `SystemExit`.
            # Such an error would end the app, so a `RuntimeError` takes its place.
            return _Outcome(error=RuntimeError(type(error).__name__))
        finally:
            self.is_function_over = True
