"""Cutting texts to a budget, and dividing a budget among texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

TokenCounter = Callable[[str], int]


def shorten(text: str, max_chars: int, handle: str = "") -> str:
    """Keeps head and tail of a text; a notice says what is missing, and its handle."""
    if len(text) <= max_chars:
        return text
    item = f"; item {handle}" if handle else ""
    notice = f"\n[… {len(text)} characters in all, middle left out{item} …]\n"
    room = max(0, max_chars - len(notice))
    head = int(room * 0.6)
    tail = room - head
    return text[:head] + notice + (text[-tail:] if tail else "")


def shorten_to_tokens(
    text: str, max_tokens: float, count_tokens: TokenCounter, handle: str = ""
) -> str:
    """Shortens a text to a budget of tokens, head and tail kept."""
    whole, tokens = text, count_tokens(text)
    for _ in range(4):
        if tokens <= max_tokens or not text:
            return text
        most = max(1, int(len(text) * max_tokens / tokens * 0.98))
        text = shorten(whole, most, handle)
        tokens = count_tokens(text)
    return text if tokens <= max_tokens else ""


def divide_budget(
    costs: Sequence[float], weights: Sequence[float], room: float
) -> list[float]:
    """Divides a budget by weight; what a small item does not need goes to others."""
    shares = [0.0] * len(costs)
    total_weight = sum(weights)
    for item in sorted(range(len(costs)), key=lambda i: costs[i] / weights[i]):
        fair = max(0.0, room) * weights[item] / total_weight
        shares[item] = min(float(costs[item]), fair)
        room -= shares[item]
        total_weight -= weights[item]
    return shares
