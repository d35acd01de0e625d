"""Logs without message text: a warning once, and a failure with its place."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

_CODE = re.compile(r"[A-Za-z0-9][\w.]{0,39}", re.ASCII)
_MAX_WARNINGS = 1_024
_warned: set[tuple[str, str]] = set()

REDACTORS = WeakSet[Any]()
"""The redactors of all plugins; the method `text` of each changes what DEBUG shows."""


def safe_code(said: object, otherwise: str) -> str:
    """Returns an error code of others, or `otherwise` where it may quote messages."""
    text = str(said)
    return text if _CODE.fullmatch(text) else otherwise


def one_line(text: str) -> str:
    """Replaces line breaks and other control characters, which would act in a log."""
    if text.isprintable():
        return text
    spaced = "".join(" " if char.isspace() else char for char in text)
    return "".join(char if char.isprintable() else "?" for char in spaced)


def warn_once(
    logger: logging.Logger,
    message: str,
    about: str,
    *args: object,
    level: int = logging.WARNING,
) -> None:
    """Warns once in a process about something.

    Args:
        logger: Where it is logged.
        message: The message, with a place for `about` and each of `args`.
        about: Whatever it is about. The same message about anything else is another
            warning.
        args: What else the message says.
        level: The level at which it is logged.
    """
    if (message, about) in _warned:
        return
    if len(_warned) >= _MAX_WARNINGS:
        _warned.clear()
    _warned.add((message, about))

    said = [one_line(each) if isinstance(each, str) else each for each in args]
    logger.log(level, message, one_line(about), *said)


def log_failure(
    logger: logging.Logger, what: str, error: BaseException, level: int = logging.ERROR
) -> None:
    """Logs a failure and its place, without its text: that may quote messages."""
    places = list[str]()
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        file = "/".join(Path(code.co_filename).parts[-2:])
        places.append(f"{file}:{line} in {code.co_name}")
    if len(places) > 12:
        places[6:-6] = ["…"]

    logger.log(
        level,
        "%s: %s at %s. Its text may quote messages: it is logged at DEBUG.",
        what,
        type(error).__name__,
        " > ".join(places) or "an unknown place",
    )
    log_traceback(logger, what, error)


def log_traceback(logger: logging.Logger, what: str, error: BaseException) -> None:
    """Logs a failure at DEBUG with its text, which each plugin's `redact` changes."""
    if logger.isEnabledFor(logging.DEBUG):
        text = "".join(traceback.format_exception(error))
        logger.debug("%s:\n%s", what, _redact(text).rstrip())


def _redact(text: str) -> str:
    """Returns a text as all plugins of the process allow it to be logged."""
    redacted = text
    try:
        for redactor in REDACTORS:
            redacted = redactor.text(redacted)
    except Exception:  # noqa: BLE001 - anyone's code may raise anything
        return "[left out: redact has failed]"
    return redacted


@contextmanager
def log_failures(logger: logging.Logger, what: str) -> Iterator[None]:
    """Logs a failure of the code inside, which ends there: a user's turn goes on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - anyone's code may raise anything
        log_failure(logger, what, error)
