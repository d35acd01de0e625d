"""Exceptions that callers of the package can catch."""


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
    """A settings file cannot be read, or a setting in it is wrong.

    The message names the file, the key, the value and what is accepted.
    """
