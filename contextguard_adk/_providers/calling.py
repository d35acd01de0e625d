"""Calls a model's client so that the client can neither end nor delay a turn.

A call runs in a task of its own. A transient error is one after which the same call may
succeed a moment later. After such an error the call is made again.
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
"""How long a cancelled call may take to end by itself."""

_TRANSIENT_STATUSES = frozenset({408, 429, 500, 502, 503, 504, 529})
_TIMEOUT_STATUSES = frozenset({408, 504})

# Parts of the names of exception classes, for exceptions without a status.
_TRANSIENT_NAME = re.compile(
    r"Timeout|Connect|RateLimit|Overloaded|ServiceUnavailable|InternalServer"
    r"|ServerDisconnected|RemoteProtocol|(Read|Write)Error"
)
# Gemini says in the body: "retryDelay": "34s".
_RETRY_DELAY = re.compile(r"""retryDelay['"]:\s*['"](\d+(?:\.\d+)?)s""")
_BACKOFF = wait_exponential_jitter(initial=1, exp_base=2, jitter=1)
"""Returns the seconds to wait: one before the second try and two before the third, each
with up to one second more by chance."""

_MOST_TRIES = 3
"""The first try counts."""


class Closing(aclosing[Any]):
    """Closes an async generator, also after its event loop has gone."""

    async def __aexit__(self, *error: object) -> None:
        """Closes the generator."""
        # Python 3.11 takes a generator that was dropped with its event loop for one
        # that still runs, and raises.
        with suppress(RuntimeError):
            await super().__aexit__(*error)


class BrokenCallError(Exception):
    """A client raised something other than an `Exception`.

    The text of this error names the class of what the client raised.
    """


async def call_apart(ask: Callable[[], Awaitable[T]]) -> T:
    """Awaits a client's call in a task of its own, and returns the client's answer.

    If the caller is cancelled, the call is cancelled as well. The caller does not wait
    for the end of the call, because a client may swallow its cancellation.

    Args:
        ask: Makes the call.

    Raises:
        Exception: The client raised this exception.
        KeyboardInterrupt: The client raised this exception.
        BrokenCallError: The client raised anything else, or cancelled the task.
    """
    work = _ask_without_exit(ask)
    task = asyncio.create_task(work)
    # If the user closes the event loop during the call, the task never ends. Without
    # this line asyncio would log an error for such a task.
    task._log_destroy_pending = False  # type: ignore[attr-defined]

    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_ignore_error)
        loop = asyncio.get_running_loop()
        loop.call_later(GRACE_SECONDS, _end_stubborn, task, work)
        raise

    if task.cancelled():
        raise BrokenCallError("CancelledError")
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, Exception | KeyboardInterrupt):
        raise error
    raise BrokenCallError(type(error).__name__) from error


async def _ask_without_exit(ask: Callable[[], Awaitable[T]]) -> T:
    """Awaits a client's call, and raises a `BrokenCallError` for a `SystemExit`.

    A `SystemExit` that a task raises would stop the event loop.
    """
    try:
        return await ask()
    except SystemExit as error:
        raise BrokenCallError("SystemExit") from error


def _ignore_error(task: asyncio.Task[Any]) -> None:
    """Reads the error of a task, because asyncio reports errors that nobody reads."""
    if not task.cancelled():
        task.exception()


def _end_stubborn(task: asyncio.Task[Any], work: Coroutine[Any, Any, Any]) -> None:
    """Ends a call that has swallowed its cancellation.

    Args:
        task: The task of the call.
        work: The coroutine that the task runs.
    """
    if task.done():
        return

    # The client might swallow a second cancellation as well. So the coroutine is closed
    # first. Then the cancellation wakes the task, and the task ends.
    with suppress(Exception):  # The client may raise anything while it is closed.
        work.close()
    task.cancel()


async def call_with_retries(
    make_call: Callable[[], Coroutine[Any, Any, T]],
    patience_seconds: float,
    is_worth_another: Callable[[BaseException], bool] | None = None,
) -> T:
    """Makes a call, again after a transient error; at most three tries in all.

    A transient error is followed by a wait: the delay that the provider names, else the
    delay of `_BACKOFF`. Any other error that allows another try needs no wait.

    Args:
        make_call: Makes the call: a coroutine function or a `partial` of a coroutine
            function. Tenacity would not await the result of a lambda.
        patience_seconds: The last try begins at most this long after the first.
        is_worth_another: Returns whether an error allows another try; None stands for
            `is_transient`.

    Returns:
        The answer of the first try that succeeds.

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
    """Returns whether the same call may succeed a moment later.

    The status of the error decides. If the error has no status, the names of its class
    and base classes decide. An error about a request that is too long is not transient.
    """
    status = read_status(error)
    # Most providers refuse a request that is too long with a status that is not
    # transient. These are the exceptions: Ollama and llama.cpp use 500. A rate limit
    # that is smaller than the one request uses 429. Some errors have no status.
    may_be_overflow = status in (None, 429, 500)
    if may_be_overflow and parse_overflow(error) is not None:
        return False

    if status is not None:
        return status in _TRANSIENT_STATUSES

    class_names = [base.__name__ for base in type(error).__mro__]
    return _TRANSIENT_NAME.search(" ".join(class_names)) is not None


def read_status(error: BaseException) -> int | None:
    """Returns the HTTP status of a provider's error; None if the error has none.

    Only the statuses of errors count: 400 to 599.
    """
    # Each client has its own attribute for the status. httpx's errors only have a
    # response.
    response = getattr(error, "response", None)
    candidates = (
        getattr(error, "status_code", None),
        getattr(error, "code", None),
        getattr(error, "status", None),
        getattr(response, "status_code", None),
    )
    for candidate in candidates:
        text = str(candidate)  # Some errors hold the status as a text.
        if re.fullmatch(r"[45]\d\d", text):
            return int(text)
    return None


def name_error(error: BaseException) -> str:
    """Returns one word for the reason why a summary failed, such as "timeout".

    The word is never taken from the text of the error, because the text may quote the
    conversation.
    """
    if isinstance(error, UnusableAnswerError):
        return "blocked" if error.is_blocked else "unusable"
    if parse_overflow(error) is not None:
        return "overflow"

    status = read_status(error)
    if status is None and "Timeout" in type(error).__name__:
        return "timeout"
    if status in _TIMEOUT_STATUSES:
        return "timeout"
    if status == 429:
        return "rate_limit"
    if status is not None and status < 500:
        return "refused"
    if is_transient(error):
        return "unavailable"
    return "other"


def _find_wait_seconds(state: RetryCallState) -> float:
    """Returns how many seconds tenacity is to wait before the next try.

    After a transient error this is the delay that the provider names, else the delay of
    `_BACKOFF`. `is_worth_another` may also allow another try after an error that is not
    transient. After such an error a wait would change nothing, so the result is 0.
    """
    # Here the last try has failed, so `outcome` has an error. Its type allows None.
    error = state.outcome.exception() if state.outcome else None
    if error is None or not is_transient(error):
        return 0.0

    named_seconds = _read_retry_after(error)
    return _BACKOFF(state) if named_seconds is None else named_seconds


def _read_retry_after(error: BaseException) -> float | None:
    """Returns the delay in seconds that a provider names; None if it names no delay.

    The header `Retry-After` of the response goes before the text of the error.
    """
    # LiteLLM keeps the headers in an attribute of its own.
    headers = getattr(error, "litellm_response_headers", None)
    if not headers:
        response = getattr(error, "response", None)
        headers = getattr(response, "headers", {})

    # A header may hold anything. If reading it fails, the text of the error is read.
    with suppress(AttributeError, OverflowError, TypeError, ValueError):
        for name, value in headers.items():
            if name.lower() == "retry-after":
                return _read_seconds(value)

    delay_match = _RETRY_DELAY.search(str(error))
    return float(delay_match[1]) if delay_match else None


def _read_seconds(retry_after: str) -> float:
    """Returns the delay in seconds, from now, that a header `Retry-After` names.

    Args:
        retry_after: The value of the header: a number of seconds, as in "30", or a
            date, as in "Wed, 21 Oct 2026 07:28:00 GMT".

    Raises:
        TypeError, ValueError: The value is neither.
    """
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", retry_after):
        return float(retry_after)

    retry_time = parsedate_to_datetime(retry_after).timestamp()
    wait_seconds = retry_time - time.time()
    return max(0.0, wait_seconds)  # The date may have passed.
