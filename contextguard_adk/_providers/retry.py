"""Tries a model call again where the provider failed for a moment."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import TypeVar

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

_TRANSIENT_STATUSES = frozenset({408, 429, 500, 502, 503, 504, 529})

# Of clients' exceptions that carry no status.
_TRANSIENT_NAME = re.compile(
    r"Timeout|Connect|RateLimit|Overloaded|ServiceUnavailable|InternalServer"
    r"|ServerDisconnected|RemoteProtocol|(Read|Write)Error"
)
# What Gemini says in the body: "retryDelay": "34s".
_RETRY_DELAY = re.compile(r"""retryDelay['"]:\s*['"](\d+(?:\.\d+)?)s""")
_BACKOFF = wait_exponential_jitter(initial=1, exp_base=2, jitter=1)


async def call_with_retries(
    make_call: Callable[[], Awaitable[T]],
    patience_seconds: float,
    is_worth_another: Callable[[BaseException], bool] | None = None,
) -> T:
    """Makes a call, up to three times in all while errors are transient.

    It waits as long as the provider says, else one second and two. No other try begins
    later than `patience_seconds` after the first. The last error is raised.
    """
    tries = AsyncRetrying(
        retry=retry_if_exception(is_worth_another or is_transient),
        wait=_find_wait_seconds,
        stop=stop_after_attempt(3) | stop_before_delay(patience_seconds),
        reraise=True,
    )

    async def make_try() -> T:
        return await make_call()

    return await tries(make_try)  # It awaits none but coroutine functions.


def is_transient(error: BaseException) -> bool:
    """Whether a call that failed so may succeed a moment later."""
    status = read_status(error)
    # Ollama and llama.cpp answer 500 to a request that is too long; a rate limit may be
    # below the request.
    if status in (None, 429, 500) and parse_overflow(error) is not None:
        return False
    if status is None:
        names = " ".join(each.__name__ for each in type(error).__mro__)
        return _TRANSIENT_NAME.search(names) is not None
    return status in _TRANSIENT_STATUSES


def read_status(error: BaseException) -> int | None:
    """Returns the HTTP status of a provider's error; None where it has none."""
    response = getattr(error, "response", None)  # All that httpx's own errors have.
    values = [getattr(error, name, None) for name in ("status_code", "code", "status")]
    for value in map(str, (*values, getattr(response, "status_code", None))):
        # Python refuses to read thousands of digits.
        if len(value) == 3 and value.isdecimal() and 400 <= int(value) < 600:
            return int(value)
    return None


def name_error(error: BaseException) -> str:
    """Returns in one word, which quotes nobody, why a summary failed."""
    if isinstance(error, UnusableAnswerError):
        return "blocked" if error.is_blocked else "unusable"
    if parse_overflow(error) is not None:
        return "overflow"
    usual = "unavailable" if is_transient(error) else "other"
    status = read_status(error) or 408 * ("Timeout" in type(error).__name__)
    known = {408: "timeout", 429: "rate_limit", 504: "timeout"}
    return known.get(status, "refused" if 400 <= status < 500 else usual)


def _find_wait_seconds(state: RetryCallState) -> float:
    """How long to wait after a failure; not at all where it was not transient."""
    error = state.outcome.exception() if state.outcome else None
    if error is None or not is_transient(error):
        return 0.0
    seconds = _read_retry_after(error)
    return _BACKOFF(state) if seconds is None else seconds


def _read_retry_after(error: BaseException) -> float | None:
    headers = getattr(error, "litellm_response_headers", None)  # Not on its response.
    headers = headers or getattr(getattr(error, "response", None), "headers", {})
    try:
        value = next(v for k, v in headers.items() if k.lower() == "retry-after")
        if re.fullmatch(r"\s*\d+(\.\d+)?\s*", value):
            return float(value)
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (AttributeError, OverflowError, StopIteration, TypeError, ValueError):
        pass  # No such header, or not one that can be read.
    said = _RETRY_DELAY.search(str(error))
    return float(said[1]) if said else None
