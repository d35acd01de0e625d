"""Cutting texts to a budget, and dividing a budget among texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HEAD_RATIO = 0.6  # Of a shortened text.

TokenCounter = Callable[[str], int]


def shorten(text: str, max_chars: int, handle: str = "") -> str:
    """Keeps head and tail of a text and says how much is missing between them.

    Args:
        text: Any text.
        max_chars: The most characters to return, notice included; the notice is
            returned in any case.
        handle: The name under which the whole can be read back; "" for none.
    """
    if len(text) <= max_chars:
        return text
    item = f"; item {handle}" if handle else ""
    notice = f"\n[… {len(text)} characters in all, middle left out{item} …]\n"
    room = max(0, max_chars - len(notice))
    head = int(room * _HEAD_RATIO)
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
    """Divides a budget by weight; what a small item does not need goes to the others.

    Args:
        costs: What each item takes in full.
        weights: The relative share of each item; positive.
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
