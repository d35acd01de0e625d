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
        pytest.param([3, 4], [1, 1], 7, [3, 4], id="just-fits"),
        pytest.param([20, 20], [1, 3], 12, [3, 9], id="by-weight"),
        pytest.param([20, 2, 20], [1, 1, 3], 14, [3, 2, 9], id="small-one-whole"),
        pytest.param([5, 0], [1, 1], 3, [3, 0], id="costs-nothing"),
        pytest.param([5, 5], [1, 1], -4, [0, 0], id="negative-room"),
    ],
)
def test_shares(
    costs: list[float], weights: list[float], room: float, expected: list[float]
) -> None:
    """What a small item does not need goes to the others, by weight."""
    assert divide_budget(costs, weights, room) == pytest.approx(expected)


@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.floats(1, 4)), max_size=40),
    st.integers(-10, 50_000),
)
def test_shares_use_the_room_and_no_more(
    items: list[tuple[int, float]], room: int
) -> None:
    """No item gets more than it takes, small ones are whole, no room is wasted."""
    costs, weights = [cost for cost, _ in items], [weight for _, weight in items]
    shares = divide_budget(costs, weights, room)
    assert sum(shares) == pytest.approx(min(max(0, room), sum(costs)))
    for cost, weight, share in zip(costs, weights, shares, strict=True):
        assert 0 <= share <= cost
        if cost < room * weight / sum(weights) - 1e-6:
            assert share == cost
