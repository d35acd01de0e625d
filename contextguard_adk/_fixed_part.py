"""Infers what instruction and tools take of requests of which only counts are known."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations

MIN_GROWTH_RATIO = 0.1
"""How far two requests must differ in size to say what a token of theirs weighs."""

_TOKENS_PER_HEURISTIC = (0.5, 5.0)


def infer_fixed_tokens(pairs: Sequence[tuple[int, int]]) -> int:
    """Infers what was in every request beside its contents.

    The counts of growing requests lie near a line: its slope is what a token by
    bytes / 4 weighs, where it begins is the part that does not grow. The median of
    slopes is taken, so that a few odd contents do not matter.

    Args:
        pairs: Of each request the contents by bytes / 4, and its real count.

    Returns:
        That part, by bytes / 4; 0 where nothing speaks for one.
    """
    if not pairs:
        return 0
    slopes = [
        (real_b - real_a) / (heuristic_b - heuristic_a)
        for (heuristic_a, real_a), (heuristic_b, real_b) in combinations(pairs, 2)
        if abs(heuristic_b - heuristic_a)
        > MIN_GROWTH_RATIO * max(heuristic_a, heuristic_b)
    ]
    low, high = _TOKENS_PER_HEURISTIC
    weight = min(max(statistics.median(slopes), low), high) if slopes else 1.0
    begins = statistics.median(real - weight * heuristic for heuristic, real in pairs)
    return max(0, round(begins / weight))
