"""Calls a client in a task of its own, so that it ends no turn and holds up none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

V = TypeVar("V")

GRACE_SECONDS = 1.0
"""How long a client that is cancelled may take to end by itself."""


class Closing(aclosing[Any]):
    """Closes an async generator, also where its event loop has gone."""

    async def __aexit__(self, *error: object) -> None:
        """Python 3.11 takes a generator that is dropped for one that runs."""
        with suppress(RuntimeError):
            await super().__aexit__(*error)


class BrokenCallError(Exception):
    """A client ended its call with what is no `Exception`; its text names that."""


async def call_apart(ask: Callable[[], Awaitable[V]]) -> V:
    """Awaits a client's call in a task of its own.

    A cancellation goes through at once, also where the client goes on in spite of it.
    What the client raises itself comes out as an `Exception`, except for
    `KeyboardInterrupt`.

    Raises:
        BrokenCallError: The client has cancelled itself, or raised something odd.
    """
    work = _contain(ask)
    task = asyncio.create_task(work)
    # A loop that is closed with it under way is the user's own, and no news.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    task.add_done_callback(_take_error)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
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
    try:
        return await ask()
    except SystemExit as error:  # An event loop would be left with it.
        raise BrokenCallError("SystemExit") from error


def _take_error(task: asyncio.Task[Any]) -> None:
    """Looks at an error that nobody waits for any more; else asyncio reports it."""
    if not task.cancelled():
        task.exception()


def _end_stubborn(task: asyncio.Task[Any], work: Coroutine[Any, Any, Any]) -> None:
    """Ends a call that has swallowed its cancellation."""
    if task.done():
        return

    with suppress(Exception):  # What it does when it is closed is its own affair.
        work.close()
    task.cancel()  # It wakes, finds its work closed and is done.
