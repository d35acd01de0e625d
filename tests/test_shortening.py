"""Shares of a budget: small texts whole, the rest by weight."""

from __future__ import annotations

import pytest

from contextguard_adk.measuring.shortening import divide_budget


@pytest.mark.parametrize(
    ("costs", "weights", "room", "expected"),
    [
        ([], [], 10, []),
        ([3, 4], [1, 1], 7, [3, 4]),
        ([20, 2, 20], [1, 1, 3], 14, [3, 2, 9]),
        ([5, 0], [1, 1], 3, [3, 0]),
        ([5, 5], [1, 1], -4, [0, 0]),
    ],
)
def test_shares(
    costs: list[float], weights: list[float], room: float, expected: list[float]
) -> None:
    """What a small item does not need goes to the others, by weight."""
    assert divide_budget(costs, weights, room) == pytest.approx(expected)
