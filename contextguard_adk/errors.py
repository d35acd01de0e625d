"""Exceptions that callers of the package can catch."""

from collections.abc import Sequence


class ContextGuardError(Exception):
    """Base of every exception that the package raises on purpose."""


class SummaryError(ContextGuardError):
    """A summarizer gave no usable summary.

    A compaction raises it and catches it, so no user's turn ever ends by it. Where the
    window is nearly full, a mechanical summary is put in place of the missing one.
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

    The message is one line that names the place (a class, or a file with its key), the
    value and what is accepted.

    Attributes:
        problems: Each wrong setting, as a pair: its key with its value, and what is
            accepted.
    """

    def __init__(self, message: str, problems: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)
