"""How time grows with size, measured in one run: no clock's speed matters."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from time import process_time
from typing import Any

FACTOR = 4
MAX_GROWTH = 10
"""Between `FACTOR`, for time in proportion, and its square; the rest is noise."""


def time_growth(
    make: Callable[[int], Any], work: Callable[[Any], Any], n: int
) -> float:
    """How many times longer the work takes on a `FACTOR` times larger input."""
    taken = []
    for item in (make(n), make(n * FACTOR)):
        timer = timeit.Timer(lambda item=item: work(item), timer=process_time)  # type: ignore[misc]
        taken.append(min(timer.repeat(repeat=3, number=1)))
    return (taken[1] + 0.001) / (taken[0] + 0.001)
