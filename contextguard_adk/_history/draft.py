"""What a strategy decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from contextguard_adk._history.truncation import Truncation

Reason = Literal["tokens", "requested", "overflow", "turns"]
"""Why a history is compacted; `turns` means too many messages."""

MAX_SHRINK = 4
"""The last step by which a summary and what stands beside it are shortened."""


@dataclass(frozen=True)
class Draft:
    """What a strategy decided: which text replaces which contents.

    Attributes:
        text: The summary; "" where contents are only left out.
        covered: Indexes of the contents that it replaces.
        model_covered: Those of them that a model summarized.
        model_chars: How much of the text a model wrote.
        reason: Why the history is compacted.
        truncation: How tool results are shortened up to content `truncated_upto`.
        shrink: How far the summary and what stands beside it are shortened: a step
            from 0, which is whole, to `MAX_SHRINK`.
    """

    text: str
    covered: frozenset[int]
    model_covered: frozenset[int] = frozenset()
    model_chars: int = 0
    reason: Reason = "tokens"
    truncation: Truncation | None = None
    truncated_upto: int = -1
    shrink: int = 0

    @property
    def is_mechanical(self) -> bool:
        """Whether a part of it was written without a model."""
        return self.model_covered != self.covered
