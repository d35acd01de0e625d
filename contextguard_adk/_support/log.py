"""Logs without message text: warns once, and names the place of a failure.

An error that other code has raised may quote the messages of a conversation. So the
text of such an error is logged only at DEBUG.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

# One word of at most 40 characters, such as "RESOURCE_EXHAUSTED" or "429".
_CODE = re.compile(r"[A-Za-z0-9][\w.]{0,39}", re.ASCII)

_MAX_WARNINGS = 1_024
"""When this many warnings are remembered, all of them are forgotten, to save memory."""

_MAX_PLACES = 12
"""A log line names at most this many places of a traceback: the first and last ones."""

_warned = dict[tuple[str, str], None]()
"""The message and the subject (`about`) of each warning that is remembered."""

REDACTORS = WeakSet[Any]()
"""The redactors of all plugins. Each one's `redact_text` changes the texts at DEBUG.

A weak set does not keep the redactor of a plugin that is gone.
"""


def safe_code(code: object, otherwise: str) -> str:
    """Returns a provider's error code as a text if the text is a single short word.

    Any other code may quote messages. Then `otherwise` is returned.
    """
    text = str(code)
    return text if _CODE.fullmatch(text) else otherwise


def one_line(text: str) -> str:
    """Replaces characters that would break a log line: all that are not printable.

    A character of white space, such as a line break, becomes a blank. Any other one,
    such as a control character, becomes "?".
    """
    if text.isprintable():
        return text
    with_blanks = "".join(" " if char.isspace() else char for char in text)
    return "".join(char if char.isprintable() else "?" for char in with_blanks)


def warn_once(
    logger: logging.Logger,
    message: str,
    about: str,
    *args: object,
    level: int = logging.WARNING,
) -> None:
    """Logs a warning, unless the process remembers that it was logged before.

    Args:
        logger: The logger.
        message: The message. Its first `%` place is for `about`, the other ones are for
            `args`.
        about: The subject of the warning, such as an agent's name. The same message
            about another subject is another warning.
        args: The other values in the message. They do not tell warnings apart.
        level: The level of the log line.
    """
    if (message, about) in _warned:
        return
    if len(_warned) >= _MAX_WARNINGS:
        _warned.pop(next(iter(_warned)))  # The oldest one.
    _warned[message, about] = None

    safe_args = [one_line(each) if isinstance(each, str) else each for each in args]
    logger.log(level, message, one_line(about), *safe_args)


def log_failure(
    logger: logging.Logger,
    failed: str,
    error: BaseException,
    level: int = logging.ERROR,
) -> None:
    """Logs an error in two lines: one without its text, and one at DEBUG with its text.

    The first line has the type of the error and the places in its traceback, such as
    "_core/loop.py:120 in run > _core/pay.py:40 in pay". The text at DEBUG is redacted.

    Args:
        logger: The logger.
        failed: The first words of both lines, as "The guard could not end a run".
        error: The error.
        level: The level of the first line.
    """
    places = list[str]()  # The place where the error was raised is the last.
    for frame, line_number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        folder_and_file = "/".join(Path(code.co_filename).parts[-2:])
        places.append(f"{folder_and_file}:{line_number} in {code.co_name}")
    if len(places) > _MAX_PLACES:
        kept_at_each_end = _MAX_PLACES // 2
        places[kept_at_each_end:-kept_at_each_end] = ["…"]

    logger.log(
        level,
        "%s: %s at %s. Its text may quote messages: it is logged at DEBUG.",
        failed,
        type(error).__name__,
        " > ".join(places) or "an unknown place",
    )
    log_traceback(logger, failed, error)


def log_traceback(logger: logging.Logger, failed: str, error: BaseException) -> None:
    """Logs an error with its text at DEBUG, redacted by every plugin's `redact`."""
    if logger.isEnabledFor(logging.DEBUG):
        text = "".join(traceback.format_exception(error))
        logger.debug("%s:\n%s", failed, _redact(text).rstrip())


def _redact(text: str) -> str:
    """Returns a text redacted by the `redact` of every plugin in the process.

    If one of these functions fails, the result is a note without any of the text.
    """
    redacted = text
    try:
        for redactor in REDACTORS:
            redacted = redactor.redact_text(redacted)
    except Exception:  # noqa: BLE001 - anyone's code may raise anything
        return "[left out: redact has failed]"
    return redacted


@contextmanager
def log_failures(logger: logging.Logger, failed: str) -> Iterator[None]:
    """Logs an error of the `with` block and suppresses it: the user's turn goes on.

    `failed` has the first words of the log line.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - anyone's code may raise anything
        log_failure(logger, failed, error)
