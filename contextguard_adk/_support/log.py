"""Logging without message text: once for each thing, or a failure and its place."""

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
_warned: set[tuple[str, str]] = set()

REDACTORS = WeakSet[Any]()
"""Whose method `text` changes what is logged at DEBUG."""


def safe_code(said: object, otherwise: str) -> str:
    """Returns what others gave as a code; what has no such form may quote messages."""
    return str(said) if _CODE.fullmatch(str(said)) else otherwise


def one_line(text: str) -> str:
    """Replaces line breaks and other control characters, which would act in a log."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def warn_once(
    logger: logging.Logger,
    message: str,
    about: str,
    *args: object,
    level: int = logging.WARNING,
) -> None:
    """Warns once in a process about something; it remembers 1,024 warnings."""
    if (message, about) not in _warned:
        if len(_warned) >= 1_024:
            _warned.clear()
        _warned.add((message, about))
        said = (one_line(each) if isinstance(each, str) else each for each in args)
        logger.log(level, message, one_line(about), *said)


def log_failure(
    logger: logging.Logger, what: str, error: BaseException, level: int = logging.ERROR
) -> None:
    """Logs a failure and its place, without its text: that may quote messages."""
    places = [
        f"{'/'.join(Path(code.co_filename).parts[-2:])}:{line} in {code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        for code in [frame.f_code]
    ]
    if len(places) > 12:
        places[6:-6] = ["…"]
    logger.log(
        level,
        "%s: %s at %s. Its text may quote messages: it is logged at DEBUG.",
        *(what, type(error).__name__, " > ".join(places) or "an unknown place"),
    )
    log_traceback(logger, what, error)


def log_traceback(logger: logging.Logger, what: str, error: BaseException) -> None:
    """Logs a failure at DEBUG with its text, by the leave of each plugin's `redact`."""
    if logger.isEnabledFor(logging.DEBUG):
        said = "".join(traceback.format_exception(error))
        try:
            for redactor in REDACTORS:
                said = redactor.text(said)
        except Exception:  # noqa: BLE001 - anyone's code may raise anything
            said = "[left out: redact has failed]"
        logger.debug("%s:\n%s", what, said.rstrip())


@contextmanager
def log_failures(logger: logging.Logger, what: str) -> Iterator[None]:
    """Ends what is inside at a failure, and logs it: a user's turn goes on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - anyone's code may raise anything
        log_failure(logger, what, error)
