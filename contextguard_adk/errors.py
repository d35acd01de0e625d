"""Exceptions that callers of the package can catch."""

from collections.abc import Sequence


class ContextGuardError(Exception):
    """Base of every exception that the package raises on purpose."""


class SummaryError(ContextGuardError):
    """A summarizer gave no usable summary.

    Raised and caught inside a compaction, so a user's turn never sees it. Where the
    window is nearly full, a mechanical summary takes its place.
    """


class UnusableAnswerError(SummaryError):
    """The summarizer answered, but with no summary.

    It is `is_blocked` where a provider's filter ended the answer.
    """

    def __init__(self, reason: str, is_blocked: bool = False) -> None:
        super().__init__(reason)
        self.is_blocked = is_blocked


class ConfigError(ContextGuardError, ValueError):
    """A setting is wrong, or a settings file cannot be read.

    The message is one line that names the place (a class, or a file with its key), the
    value and what is accepted. `problems` has the last three by themselves, as pairs of
    a place with its value and what is wrong with it.
    """

    def __init__(self, message: str, problems: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)
