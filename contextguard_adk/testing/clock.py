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
    a network. While a thread works for it (`asyncio.to_thread`, a listener that is no
    coroutine function), it waits for real.
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
        """Has a thread call something; until it has returned, time does not jump."""
        future = super().run_in_executor(executor, func, *args)
        self._clock.awaited.add(future)
        future.add_done_callback(self._clock.awaited.discard)
        return future


class _Clock(selectors.DefaultSelector):
    """Counts the time for which it should wait."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_seconds = 0.0
        self.awaited = set[Any]()  # What threads work on.

    def select(self, timeout: float | None = None) -> list[Any]:
        """Returns what is ready now; without a timer, or for a thread, it waits."""
        if timeout is None or timeout <= 0:
            return super().select(timeout)

        ready = super().select(timeout if self.awaited else 0)
        is_woken = bool(ready and self.awaited)
        if not is_woken:
            self.passed_seconds += timeout
        return ready
