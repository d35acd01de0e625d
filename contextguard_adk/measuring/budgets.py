"""The sizes that follow from a context window."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budgets:
    """The sizes that one call has to respect, all in tokens of the agent's model.

    Attributes:
        window_tokens: The context window.
        threshold_tokens: Window minus buffer; at or over it a compaction is due.
        summary_tokens: What a summary may take.
    """

    window_tokens: int
    threshold_tokens: int
    summary_tokens: int

    @property
    def overfull_tokens(self) -> int:
        """From here on a request is not expected to be accepted."""
        return int(self.window_tokens * 0.97)


def buffer_tokens(window_tokens: int, reserved_output_tokens: int = 0) -> int:
    """Returns the tokens of the window that are kept free.

    20,000 for windows from 200,000 tokens, else 20 % of the window; never less than the
    request reserves for its output, never more than half of the window.
    """
    buffer = max(_base_buffer_tokens(window_tokens), reserved_output_tokens)
    return min(buffer, window_tokens // 2)


def threshold_tokens(window_tokens: int, reserved_output_tokens: int = 0) -> int:
    """Returns the prompt tokens that start compaction: the window less its buffer."""
    return window_tokens - buffer_tokens(window_tokens, reserved_output_tokens)


def summary_budget_tokens(window_tokens: int) -> int:
    """Returns the output tokens of a summary: half of the buffer without reserve."""
    return _base_buffer_tokens(window_tokens) // 2


def summarizer_input_tokens(window_tokens: int) -> int:
    """Returns the tokens a summarizer with this window is given: 80 % of the window."""
    return window_tokens * 80 // 100


def _base_buffer_tokens(window_tokens: int) -> int:
    return 20_000 if window_tokens >= 200_000 else window_tokens * 20 // 100
