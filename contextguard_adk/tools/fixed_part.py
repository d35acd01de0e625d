"""Infers what instruction and tools take of requests of which only counts are known."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

MIN_GROWTH_RATIO = 0.1
"""How far two requests must differ in size to say what a token of theirs weighs."""

_TOKENS_PER_HEURISTIC = (0.5, 5.0)


@dataclass(frozen=True)
class CountFit:
    """A line through the counts of an agent's requests.

    Attributes:
        fixed_tokens: What was in every request beside its contents, by bytes / 4; 0
            where nothing speaks for it.
        error_ratio: How far a count is from the line, in the middle.
    """

    fixed_tokens: int
    error_ratio: float


def fit_counts(pairs: Sequence[tuple[int, int]]) -> CountFit:
    """Infers what was in every request beside its contents.

    The counts of growing requests lie near a line: its slope is what a token by
    bytes / 4 weighs, where it begins is the part that does not grow. The median of
    slopes is taken, so that a few odd contents do not matter.

    Args:
        pairs: Of each request the contents by bytes / 4, and its real count.
    """
    if not pairs:
        return CountFit(0, 0.0)
    slopes = [
        (real_b - real_a) / (heuristic_b - heuristic_a)
        for (heuristic_a, real_a), (heuristic_b, real_b) in combinations(pairs, 2)
        if abs(heuristic_b - heuristic_a)
        > MIN_GROWTH_RATIO * max(heuristic_a, heuristic_b)
    ]
    low, high = _TOKENS_PER_HEURISTIC
    weight = min(max(statistics.median(slopes), low), high) if slopes else 1.0
    begins = statistics.median(real - weight * heuristic for heuristic, real in pairs)
    fixed_tokens = max(0, round(begins / weight))
    errors = [abs(weight * (h + fixed_tokens) - real) / real for h, real in pairs]
    return CountFit(fixed_tokens, statistics.median(errors))
