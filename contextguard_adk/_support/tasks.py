"""The tasks in which summaries are written, and how they end."""

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
    """All tasks of a plugin that write summaries or wait for listeners.

    Attributes:
        most: How many of the summaries ahead of time are written at once.
    """

    def __init__(self, most: int = 4) -> None:
        self.most = most
        # "" stands for a task that takes no place among the summaries ahead of time.
        self._tasks: dict[asyncio.Task[Any], Literal["", "queued", "working"]] = {}
        self._lock = threading.Lock()

    def start(self, work: Coroutine[Any, Any, V]) -> asyncio.Task[V]:
        """Starts a task that need not be awaited; it ends with its event loop."""
        task = asyncio.create_task(work)
        # A user may close the loop while the task is under way: that is no news.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        with self._lock:
            dead = [each for each in self._tasks if each.get_loop().is_closed()]
            for each in dead:
                del self._tasks[each]
            self._tasks[task] = ""
        task.add_done_callback(self._forget)
        return task

    async def take_place(self) -> bool:
        """Waits until few enough summaries are being written ahead of time.

        Then the running task takes a place, and holds it for as long as it runs.

        Returns:
            False if tasks of other event loops hold all places: nothing here would
            notice their end.
        """
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        assert task is not None, "A coroutine always runs in a task."

        while True:
            with self._lock:
                working = [
                    each
                    for each, state in self._tasks.items()
                    # A loop that was left does not work on its tasks.
                    if state == "working" and each.get_loop().is_running()
                ]
                if len(working) < self.most:
                    self._tasks[task] = "working"
                    return True
                self._tasks[task] = "queued"

            near = [each for each in working if each.get_loop() is loop]
            if not near:
                return False
            await asyncio.wait(near, return_when=asyncio.FIRST_COMPLETED)

    def is_queued(self, task: asyncio.Task[Any]) -> bool:
        """Returns whether a task waits for a place."""
        return self._tasks.get(task) == "queued"

    async def close(self) -> None:
        """Waits up to one second for the tasks under way, then cancels them.

        Tasks that have not begun, or run on other event loops, are cancelled at once.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            tasks = list(self._tasks)
        near = [task for task in tasks if task.get_loop() is loop]

        for task in tasks:
            if self.is_queued(task) or task not in near:
                with contextlib.suppress(RuntimeError):  # Its event loop is closed.
                    task.get_loop().call_soon_threadsafe(task.cancel)

        if not near:
            return
        _, late = await asyncio.wait(near, timeout=0.9)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=0.1)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        """Forgets a task that has ended; logs its failure at DEBUG."""
        with self._lock:
            self._tasks.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log_traceback(logger, "A summary was not written", error)
