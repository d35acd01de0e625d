"""Exceptions that callers of the package can catch."""


class ContextGuardError(Exception):
    """Base of every exception that the package raises on purpose."""


class SummaryError(ContextGuardError):
    """A summarizer gave no usable summary.

    Raised and caught inside a compaction: the strategy then falls back to a
    mechanical summary, so a user's turn never sees it.
    """


class UnusableAnswerError(SummaryError):
    """The summarizer answered, but with no summary."""


class ConfigError(ContextGuardError, ValueError):
    """A settings file cannot be read, or a setting in it is wrong.

    The message names the file, the key, the value and what is accepted.
    """
