"""Dividing a budget among texts so that small ones stay whole."""

from __future__ import annotations

from collections.abc import Sequence


def fair_shares(
    costs: Sequence[float], weights: Sequence[float], room: float
) -> list[float]:
    """Divides room by weight; what a small item does not need goes to the others.

    Args:
        costs: What each item would take whole.
        weights: How much an item may take beside the others; positive.
        room: What there is to divide, in the unit of `costs`.

    Returns:
        A share for each item, at most its cost; their sum is at most `room`.
    """
    shares = [0.0] * len(costs)
    total_weight = sum(weights)
    for item in sorted(range(len(costs)), key=lambda i: costs[i] / weights[i]):
        fair = max(0.0, room) * weights[item] / total_weight
        shares[item] = min(float(costs[item]), fair)
        room -= shares[item]
        total_weight -= weights[item]
    return shares
