"""Tries a model call again after a failure of the provider that may soon pass."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Coroutine
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


async def call_with_retries(
    make_call: Callable[[], Coroutine[Any, Any, T]],
    patience_seconds: float,
    is_worth_another: Callable[[BaseException], bool] | None = None,
) -> T:
    """Makes a call, up to three times while errors are transient.

    Before another try it waits as long as the provider says, else one second and then
    two. The last error is raised.

    Args:
        make_call: Makes the call. A lambda will not do, since tenacity awaits only
            what coroutine functions and `partial` objects of them return.
        patience_seconds: How long after the first try the last one may begin.
        is_worth_another: Whether an error allows another try; None is `is_transient`.
    """
    tries = AsyncRetrying(
        retry=retry_if_exception(is_worth_another or is_transient),
        wait=_find_wait_seconds,
        stop=stop_after_attempt(3) | stop_before_delay(patience_seconds),
        reraise=True,
    )

    return await tries(make_call)


def is_transient(error: BaseException) -> bool:
    """Returns whether the same call may succeed a moment later."""
    status = read_status(error)
    # Ollama and llama.cpp answer 500 to a request that is too long. A rate limit may be
    # smaller than the request.
    if status in (None, 429, 500) and parse_overflow(error) is not None:
        return False

    if status is not None:
        return status in _TRANSIENT_STATUSES
    names = " ".join(base.__name__ for base in type(error).__mro__)
    return _TRANSIENT_NAME.search(names) is not None


def read_status(error: BaseException) -> int | None:
    """Returns the HTTP status of a provider's error; None if it has none."""
    response = getattr(error, "response", None)  # httpx's own errors only have this.
    values = (
        getattr(error, "status_code", None),
        getattr(error, "code", None),
        getattr(error, "status", None),
        getattr(response, "status_code", None),
    )
    for value in values:
        digits = str(value)
        # Python refuses to read thousands of digits.
        if len(digits) == 3 and digits.isdecimal() and 400 <= int(digits) < 600:
            return int(digits)
    return None


def name_error(error: BaseException) -> str:
    """Returns in one word, which quotes nobody, why a summary failed."""
    if isinstance(error, UnusableAnswerError):
        return "blocked" if error.is_blocked else "unusable"
    if parse_overflow(error) is not None:
        return "overflow"

    status = read_status(error)
    if status is None:
        if "Timeout" in type(error).__name__:
            return "timeout"
    elif status in _TIMEOUT_STATUSES:
        return "timeout"
    elif status == 429:
        return "rate_limit"
    elif status < 500:
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
    """Returns how many seconds a provider asks to wait; None if it does not say."""
    # LiteLLM keeps the headers beside the response.
    headers = getattr(error, "litellm_response_headers", None)
    if not headers:
        response = getattr(error, "response", None)
        headers = getattr(response, "headers", {})

    try:
        for name, value in headers.items():
            if name.lower() == "retry-after":
                return _read_seconds(value)
    except (AttributeError, OverflowError, TypeError, ValueError):
        pass  # The header cannot be read; the body may say it.

    said = _RETRY_DELAY.search(str(error))
    return float(said[1]) if said else None


def _read_seconds(retry_after: str) -> float:
    """Reads the header `Retry-After`, which holds seconds or a date."""
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", retry_after):
        return float(retry_after)
    moment_seconds = parsedate_to_datetime(retry_after).timestamp()
    return max(0.0, moment_seconds - time.time())
