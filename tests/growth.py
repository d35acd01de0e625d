"""How time grows with size, measured in one run: no clock's speed matters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

FACTOR = 4
"""How much larger the large input is."""

MAX_GROWTH = 10
"""Between `FACTOR`, for time in proportion, and its square; the rest is noise."""


def time_growth(
    make: Callable[[int], Any], work: Callable[[Any], Any], n: int
) -> float:
    """Returns how many times longer the work takes on a `FACTOR` times larger input."""
    small, large = (_cpu_seconds(work, make(size)) for size in (n, n * FACTOR))
    return (large + 0.001) / (small + 0.001)


def _cpu_seconds(work: Callable[[Any], Any], item: Any) -> float:
    """The shortest of three runs."""
    taken = []
    for _ in range(3):
        started = time.process_time()
        work(item)
        taken.append(time.process_time() - started)
    return min(taken)
