"""Shares of a budget: small texts whole, the rest by weight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk.measuring.shortening import divide_budget


@pytest.mark.parametrize(
    ("costs", "weights", "room", "expected"),
    [
        pytest.param([], [], 10, [], id="nothing"),
        pytest.param([3, 4], [1, 1], 10, [3, 4], id="everything-fits"),
        pytest.param([3, 4], [1, 1], 7, [3, 4], id="just-fits"),
        pytest.param([20, 20], [1, 1], 10, [5, 5], id="halves"),
        pytest.param([20, 20], [1, 3], 12, [3, 9], id="by-weight"),
        pytest.param([2, 20, 20], [1, 1, 1], 12, [2, 5, 5], id="small-one-whole"),
        pytest.param(
            [20, 2, 20], [1, 1, 3], 14, [3, 2, 9], id="what-is-left-by-weight"
        ),
        pytest.param([5, 0], [1, 1], 3, [3, 0], id="costs-nothing"),
        pytest.param([5, 5], [1, 1], 0, [0, 0], id="no-room"),
        pytest.param([5, 5], [1, 1], -4, [0, 0], id="negative-room"),
    ],
)
def test_shares(
    costs: list[float], weights: list[float], room: float, expected: list[float]
) -> None:
    """What a small item does not need goes to the others, by weight."""
    assert divide_budget(costs, weights, room) == pytest.approx(expected)


ITEMS = st.lists(st.tuples(st.integers(0, 10_000), st.floats(1, 4)), max_size=40)


@given(ITEMS, st.integers(-10, 50_000))
def test_shares_stay_within_the_room(items: list[tuple[int, float]], room: int) -> None:
    """No item gets more than it takes, and together no more than there is."""
    costs, weights = [cost for cost, _ in items], [weight for _, weight in items]
    shares = divide_budget(costs, weights, room)
    assert sum(shares) <= max(0, room) + 1e-6
    assert all(0 <= share <= cost for share, cost in zip(shares, costs, strict=True))


@given(ITEMS, st.integers(1, 50_000))
def test_small_items_stay_whole(items: list[tuple[int, float]], room: int) -> None:
    """What takes less than its part by weight is whole, and no room is wasted."""
    costs, weights = [cost for cost, _ in items], [weight for _, weight in items]
    shares = divide_budget(costs, weights, room)
    for cost, weight, share in zip(costs, weights, shares, strict=True):
        if cost < room * weight / sum(weights) - 1e-6:
            assert share == cost
    assert sum(shares) == pytest.approx(min(room, sum(costs)))
