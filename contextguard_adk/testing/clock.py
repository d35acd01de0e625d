"""An event loop on which waiting takes no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it.

    `asyncio.sleep`, timeouts and `SimulatedLlm.latency_seconds` pass at once, and
    `loop.time()` tells how long they would have taken; it starts at 0. For use with
    `asyncio.Runner(loop_factory=VirtualTimeLoop)`, where nothing waits for processes or
    a network. While a thread works for the loop (`asyncio.to_thread`, a listener that
    is no coroutine function), the loop waits for real.
    """

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        """The virtual time, in seconds."""
        return self._clock.passed_seconds

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Has a thread call a function.

        The clock does not jump before the function has returned.
        """
        future = super().run_in_executor(executor, func, *args)
        self._clock.thread_futures.add(future)
        future.add_done_callback(self._clock.thread_futures.discard)
        return future


class _Clock(selectors.DefaultSelector):
    """The selector of a loop, which adds up the time instead of waiting for it.

    A loop calls `select` with the seconds until its next timer.

    Attributes:
        passed_seconds: The virtual time.
        thread_futures: The results of the functions that threads still run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.passed_seconds = 0.0
        self.thread_futures = set[Any]()

    def select(self, timeout: float | None = None) -> list[Any]:
        """Returns the events that are ready, and lets the time pass to the next timer.

        There are three cases:

        - No timer is set (None), or a timer is due (0): no virtual time passes.
        - A timer is set, and no thread works: the time until the timer passes at once.
        - A timer is set, and a thread works: the loop waits for real. If an event comes
          before the timer, no virtual time passes.

        Args:
            timeout: The seconds until the next timer; None for no timer.
        """
        if timeout is None or timeout <= 0:
            return super().select(timeout)

        if not self.thread_futures:
            self.passed_seconds += timeout
            return super().select(0)

        events = super().select(timeout)
        if not events:
            self.passed_seconds += timeout
        return events
