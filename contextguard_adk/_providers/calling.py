"""Calls a client so that it can neither end nor delay a turn, and calls it again.

A call runs in a task of its own. It is tried again after a failure that may soon pass.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_exponential_jitter,
)

from contextguard_adk._providers.overflow import parse_overflow
from contextguard_adk.errors import UnusableAnswerError

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""How long a client that is cancelled may take to end by itself."""

_TRANSIENT_STATUSES = frozenset({408, 429, 500, 502, 503, 504, 529})
_TIMEOUT_STATUSES = frozenset({408, 504})

# The classes of clients' exceptions that carry no status.
_TRANSIENT_NAME = re.compile(
    r"Timeout|Connect|RateLimit|Overloaded|ServiceUnavailable|InternalServer"
    r"|ServerDisconnected|RemoteProtocol|(Read|Write)Error"
)
# Gemini says in the body: "retryDelay": "34s".
_RETRY_DELAY = re.compile(r"""retryDelay['"]:\s*['"](\d+(?:\.\d+)?)s""")
_BACKOFF = wait_exponential_jitter(initial=1, exp_base=2, jitter=1)
"""Waits one second, then two, each with a jitter: up to a second more by chance."""

_MOST_TRIES = 3


class Closing(aclosing[Any]):
    """Closes an async generator, also after its event loop has gone."""

    async def __aexit__(self, *error: object) -> None:
        """Closes the generator."""
        # Python 3.11 says of a generator that was dropped that it still runs.
        with suppress(RuntimeError):
            await super().__aexit__(*error)


class BrokenCallError(Exception):
    """A client raised something that is no `Exception`; the text names its class."""


async def call_apart(ask: Callable[[], Awaitable[T]]) -> T:
    """Awaits a client's call in a task of its own, and returns its result.

    If the caller is cancelled, this ends at once, even if the client ignores that its
    task is cancelled. An `Exception` or a `KeyboardInterrupt` of the client is raised
    unchanged.

    Raises:
        BrokenCallError: The client has cancelled itself, or raised something that is
            neither of these.
    """
    work = _contain(ask)
    task = asyncio.create_task(work)
    # If the user closes the loop during the call, asyncio would report the task.
    task._log_destroy_pending = False  # type: ignore[attr-defined]

    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        # Nobody waits for the task any more: asyncio would report its error.
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


async def _contain(ask: Callable[[], Awaitable[T]]) -> T:
    """Awaits the call; a `SystemExit`, which would stop the event loop, is replaced."""
    try:
        return await ask()
    except SystemExit as error:
        raise BrokenCallError("SystemExit") from error


def _end_stubborn(task: asyncio.Task[Any], work: Coroutine[Any, Any, Any]) -> None:
    """Ends a call that has swallowed its cancellation."""
    if task.done():
        return

    with suppress(Exception):  # The client may raise anything as it is closed.
        work.close()
    task.cancel()  # This wakes the task, which finds its work closed and ends.


async def call_with_retries(
    make_call: Callable[[], Coroutine[Any, Any, T]],
    patience_seconds: float,
    is_worth_another: Callable[[BaseException], bool] | None = None,
) -> T:
    """Makes a call, and makes it again after transient errors.

    There are at most three tries. Before the next one it waits as long as the provider
    asks. If the provider asks for no delay, it waits one second before the second try
    and two before the third, each with a jitter of up to a second.

    Args:
        make_call: Makes the call. It must be a coroutine function or a `partial` of
            one: tenacity would not await the result of a lambda.
        patience_seconds: The last try begins at most this long after the first.
        is_worth_another: Returns whether an error allows another try; None stands for
            `is_transient`.

    Raises:
        Exception: The error of the last try, unchanged.
    """
    retrying = AsyncRetrying(
        retry=retry_if_exception(is_worth_another or is_transient),
        wait=_find_wait_seconds,
        stop=stop_after_attempt(_MOST_TRIES) | stop_before_delay(patience_seconds),
        reraise=True,
    )

    return await retrying(make_call)


def is_transient(error: BaseException) -> bool:
    """Returns whether the same call may succeed a moment later."""
    status = read_status(error)
    # A request that is too long never succeeds. Ollama and llama.cpp refuse it with
    # 500, and a rate limit below its size refuses it with 429.
    if status in (None, 429, 500) and parse_overflow(error) is not None:
        return False

    if status is not None:
        return status in _TRANSIENT_STATUSES

    class_names = " ".join(base.__name__ for base in type(error).__mro__)
    return _TRANSIENT_NAME.search(class_names) is not None


def read_status(error: BaseException) -> int | None:
    """Returns the HTTP status of a provider's error; None if it has none."""
    response = getattr(error, "response", None)  # httpx's own errors only have this.
    candidates = (
        getattr(error, "status_code", None),
        getattr(error, "code", None),
        getattr(error, "status", None),
        getattr(response, "status_code", None),
    )
    for candidate in candidates:
        digits = str(candidate)
        # Python refuses to read thousands of digits.
        if len(digits) == 3 and digits.isdecimal() and 400 <= int(digits) < 600:
            return int(digits)
    return None


def name_error(error: BaseException) -> str:
    """Returns the reason why a summary failed, in one word.

    The word is never taken from the error, which may quote the conversation.
    """
    if isinstance(error, UnusableAnswerError):
        return "blocked" if error.is_blocked else "unusable"
    if parse_overflow(error) is not None:
        return "overflow"

    status = read_status(error)
    is_named_timeout = status is None and "Timeout" in type(error).__name__
    if is_named_timeout or status in _TIMEOUT_STATUSES:
        return "timeout"
    if status == 429:
        return "rate_limit"
    if status is not None and status < 500:
        return "refused"
    return "unavailable" if is_transient(error) else "other"


def _find_wait_seconds(state: RetryCallState) -> float:
    """Returns how long to wait after a failure; 0 if it was not transient."""
    error = state.outcome.exception() if state.outcome else None
    if error is None or not is_transient(error):
        return 0.0

    seconds = _read_retry_after(error)
    return _BACKOFF(state) if seconds is None else seconds


def _read_retry_after(error: BaseException) -> float | None:
    """Returns how many seconds a provider asks to wait; None if it names no delay."""
    # LiteLLM keeps the headers beside the response.
    headers = getattr(error, "litellm_response_headers", None)
    if not headers:
        response = getattr(error, "response", None)
        headers = getattr(response, "headers", {})

    # An unreadable header is ignored: the body may still name the delay.
    with suppress(AttributeError, OverflowError, TypeError, ValueError):
        for name, value in headers.items():
            if name.lower() == "retry-after":
                return _read_seconds(value)

    delay_match = _RETRY_DELAY.search(str(error))
    return float(delay_match[1]) if delay_match else None


def _read_seconds(retry_after: str) -> float:
    """Returns the seconds that a header `Retry-After` asks for.

    It holds a number, as in "30", or a date: "Wed, 21 Oct 2026 07:28:00 GMT".
    """
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", retry_after):
        return float(retry_after)
    wanted_time = parsedate_to_datetime(retry_after).timestamp()
    return max(0.0, wanted_time - time.time())
