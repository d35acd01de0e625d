"""The decision of a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from contextguard_adk._history.truncation import Truncation

Reason = Literal["tokens", "requested", "overflow", "turns"]
"""Why a history is compacted; `turns` means too many messages."""

MAX_SHRINK = 4
"""The last step by which a summary and the texts beside it are shortened."""


@dataclass(frozen=True)
class Draft:
    """The decision of a strategy: which text replaces which contents.

    Attributes:
        text: The summary; "" where contents are only left out.
        covered: Indexes of the contents that the text replaces.
        model_covered: Indexes of the replaced contents that a model summarized.
        model_chars: How many characters of the text, from its beginning, a model wrote.
        reason: Why the history is compacted.
        truncation: How tool results are shortened; None leaves them whole.
        truncated_upto: Index of the last content whose tool results are shortened.
        shrink: How far the summary and the texts beside it are shortened: a step from
            0, which leaves them whole, to `MAX_SHRINK`.
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
        """Whether a part of the text was written without a model."""
        return self.model_covered != self.covered
