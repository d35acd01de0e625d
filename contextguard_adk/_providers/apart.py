"""Calls a client in a task of its own, so that it can neither end nor delay a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

V = TypeVar("V")

GRACE_SECONDS = 1.0
"""How long a client that is cancelled may take to end by itself."""


class Closing(aclosing[Any]):
    """Closes an async generator, also after its event loop has gone."""

    async def __aexit__(self, *error: object) -> None:
        """Closes it; Python 3.11 says of a dropped generator that it still runs."""
        with suppress(RuntimeError):
            await super().__aexit__(*error)


class BrokenCallError(Exception):
    """A client raised something that is no `Exception`; the text names its class."""


async def call_apart(ask: Callable[[], Awaitable[V]]) -> V:
    """Awaits a client's call in a task of its own, and returns its result.

    If the caller is cancelled, it does not wait for a client that ignores its own
    cancellation. An `Exception` or `KeyboardInterrupt` of the client is raised
    unchanged.

    Args:
        ask: Makes the call.

    Raises:
        BrokenCallError: The client has cancelled itself, or raised any other
            `BaseException`.
    """
    work = _contain(ask)
    task = asyncio.create_task(work)
    # If the user closes the loop during the call, asyncio would report the task.
    task._log_destroy_pending = False  # type: ignore[attr-defined]

    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        # Nobody waits for the task any more. To read its error keeps asyncio from
        # reporting it.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        loop = asyncio.get_running_loop()
        loop.call_later(GRACE_SECONDS, _end_stubborn, task, work)
        raise

    if task.cancelled():
        raise BrokenCallError("CancelledError")

    error = task.exception()
    if error is None or isinstance(error, Exception | KeyboardInterrupt):
        return task.result()
    raise BrokenCallError(type(error).__name__) from error


async def _contain(ask: Callable[[], Awaitable[V]]) -> V:
    """Awaits the call; turns `SystemExit`, which would stop the event loop."""
    try:
        return await ask()
    except SystemExit as error:
        raise BrokenCallError("SystemExit") from error


def _end_stubborn(task: asyncio.Task[Any], work: Coroutine[Any, Any, Any]) -> None:
    """Ends a call that has not ended after its cancellation.

    Args:
        task: The task of the call.
        work: The coroutine that the task runs.
    """
    if task.done():
        return

    with suppress(Exception):  # The client may raise anything as it is closed.
        work.close()
    task.cancel()  # This wakes the task, which finds its work closed and ends.
