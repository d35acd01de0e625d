"""The tasks in which summaries are written: which there are, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

from contextguard_adk._support.log import log_traceback

logger = logging.getLogger("contextguard_adk.pending")

V = TypeVar("V")


class SummaryTasks:
    """All such tasks of a plugin; of those ahead of time only a few work at once."""

    def __init__(self, most: int = 4) -> None:
        self.most = most
        self._tasks: dict[asyncio.Task[Any], Literal["", "queued", "working"]] = {}
        self._lock = threading.Lock()

    def start(self, work: Coroutine[Any, Any, V]) -> asyncio.Task[V]:
        """Starts a task that need not be awaited; it ends with its event loop."""
        task = asyncio.create_task(work)
        # A loop that is closed with it under way is the user's own, and no news.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        with self._lock:
            for dead in [t for t in self._tasks if t.get_loop().is_closed()]:
                del self._tasks[dead]
            self._tasks[task] = ""
        task.add_done_callback(self._forget)
        return task

    async def take_place(self) -> bool:
        """Waits until few enough are at work; False where other event loops have all.

        The place is that of the running task, for as long as it runs.
        """
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        assert task is not None, "A coroutine always runs in a task."
        while True:
            with self._lock:
                working = [t for t, does in self._tasks.items() if does == "working"]
                # A loop that was left does not work on its tasks.
                others = [t for t in working if t.get_loop().is_running()]
                if len(others) < self.most:
                    self._tasks[task] = "working"
                    return True
                self._tasks[task] = "queued"
            if not (near := [each for each in others if each.get_loop() is loop]):
                return False
            await asyncio.wait(near, return_when=asyncio.FIRST_COMPLETED)

    def is_queued(self, task: asyncio.Task[Any]) -> bool:
        return self._tasks.get(task) == "queued"

    async def close(self) -> None:
        """Waits up to one second for the tasks under way, then cancels them."""
        loop = asyncio.get_running_loop()
        with self._lock:
            tasks = list(self._tasks)
        near = [task for task in tasks if task.get_loop() is loop]
        for task in tasks:
            if self.is_queued(task) or task not in near:
                with contextlib.suppress(RuntimeError):  # Its event loop is closed.
                    task.get_loop().call_soon_threadsafe(task.cancel)
        late = (await asyncio.wait(near, timeout=0.9))[1] if near else ()
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=0.1)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        with self._lock:
            self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()):
            log_traceback(logger, "A summary was not written", error)
