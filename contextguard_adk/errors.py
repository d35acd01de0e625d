"""Exceptions that callers of the package can catch."""

from collections.abc import Sequence


class ContextGuardError(Exception):
    """Base of every exception that the package raises on purpose."""


class SummaryError(ContextGuardError):
    """A summarizer gave no usable summary.

    The compaction itself catches this error, so the error never ends a user's turn. If
    the window is nearly full, a mechanical summary, which is made without a model,
    takes the place of the summarizer's.
    """


class UnusableAnswerError(SummaryError):
    """The summarizer's answer is no summary.

    Attributes:
        is_blocked: Whether a filter of the provider ended the answer.
    """

    def __init__(self, reason: str, is_blocked: bool = False) -> None:
        super().__init__(reason)
        self.is_blocked = is_blocked


class ConfigError(ContextGuardError, ValueError):
    """A setting is wrong, or a settings file cannot be read.

    The message is one line. It names the place (a class, or a file and a key), the
    value and the accepted values.

    Attributes:
        problems: A pair for each wrong setting: the place, which is its key with its
            value, and the message, which names the accepted values.
    """

    def __init__(self, message: str, problems: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)
