"""An event loop on which waiting takes no time."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it.

    `asyncio.sleep`, timeouts and `SimulatedLlm.latency_seconds` pass at once, and
    `loop.time()` tells how long they would have taken; it starts at 0. For use with
    `asyncio.Runner(loop_factory=VirtualTimeLoop)`, where nothing waits for threads,
    processes or a network.
    """

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        """The virtual time, in seconds."""
        return self._clock.passed_seconds


class _Clock(selectors.DefaultSelector):
    """Counts the time for which it should wait."""

    passed_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Returns what is ready now; without a timer it waits."""
        if timeout is not None and timeout > 0:
            self.passed_seconds += timeout
            timeout = 0
        return super().select(timeout)
