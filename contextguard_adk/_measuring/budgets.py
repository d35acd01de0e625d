"""The sizes that follow from a context window, and texts cut to a size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contextguard_adk._support.phrases import SHORTENED, quote


@dataclass(frozen=True)
class Budgets:
    """The sizes that one call has to respect, in tokens of the agent's model.

    Attributes:
        window_tokens: The context window.
        threshold_tokens: From here on a compaction is due.
        summary_tokens: What a summary may take.
        full_tokens: The window less its buffer; a trigger may lie below it.
        working_tokens: The window; with a trigger below the threshold 5/4 of the
            trigger, but at most 20,000 tokens more than it. Settings that are a part of
            the window are a part of this.
        reserved_output_tokens: What the request asks to be kept free for its answer.
    """

    window_tokens: int
    threshold_tokens: int
    summary_tokens: int
    full_tokens: int
    working_tokens: int
    reserved_output_tokens: int = 0

    @property
    def overfull_tokens(self) -> int:
        """From here on a request is not expected to be accepted."""
        return int(self.window_tokens * 0.97)

    @property
    def room_for_answer_tokens(self) -> int:
        """Up to here a request leaves room for its answer: half of the buffer."""
        least_tokens = buffer_tokens(self.window_tokens) // 2
        room_tokens = max(self.reserved_output_tokens, least_tokens)
        return max(self.full_tokens, self.window_tokens - room_tokens)


def buffer_tokens(window_tokens: int, reserved_output_tokens: int = 0) -> int:
    """Returns what is kept free: at least the reserve, at most 3/4 of the window."""
    usual = 20_000 if window_tokens >= 200_000 else window_tokens * 20 // 100
    return min(max(usual, reserved_output_tokens), most_buffer_tokens(window_tokens))


def most_buffer_tokens(window_tokens: int) -> int:
    """Returns the most that is kept free, whatever a request reserves."""
    return window_tokens * 3 // 4


def threshold_tokens(window_tokens: int, reserved_output_tokens: int = 0) -> int:
    """Returns the prompt tokens that start compaction: the window less its buffer."""
    return window_tokens - buffer_tokens(window_tokens, reserved_output_tokens)


def plan_budgets(
    window_tokens: int,
    reserved_output_tokens: int = 0,
    trigger_tokens: int | None = None,
) -> Budgets:
    """Derives all sizes from a window, and from where a compaction is wanted."""
    full = threshold_tokens(window_tokens, reserved_output_tokens)
    due = full
    working = window_tokens
    summary = buffer_tokens(window_tokens) // 2  # Without what is reserved.
    if trigger_tokens is not None and trigger_tokens < full:
        due = trigger_tokens
        working = min(working, scale_trigger(trigger_tokens))
        summary = min(summary, trigger_tokens // 8)
    return Budgets(window_tokens, due, summary, full, working, reserved_output_tokens)


def scale_trigger(trigger_tokens: int) -> int:
    """Returns the window that has a trigger for its threshold."""
    return trigger_tokens + min(trigger_tokens // 4, 20_000)


TokenCounter = Callable[[str], int]


def shorten(text: str, max_chars: int, handle: str = "") -> str:
    """Keeps head and tail of a text; a notice says what is missing, and its handle."""
    if len(text) <= max_chars:
        return text
    item = f"; item {handle}" if handle else ""
    notice = f"\n{SHORTENED.format(len(text), item)}\n"
    room = max(0, max_chars - len(notice))
    head = int(room * 0.6)
    return text[:head] + notice + quote(text[len(text) - (room - head) :])


def shorten_to_tokens(
    text: str, max_tokens: float, count_tokens: TokenCounter, handle: str = ""
) -> str:
    """Shortens a text to a budget of tokens, head and tail kept."""
    whole = text
    for _ in range(5):
        if (tokens := count_tokens(text)) <= max_tokens or not text:
            return text
        most = max(1, int(len(text) * max_tokens / tokens * 0.98))
        text = shorten(whole, most, handle)
    return ""


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


def excerpt(text: str, max_bytes: int) -> str:
    """Keeps head and tail of a text within a number of UTF-8 bytes."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= max_bytes:
        return raw.decode()
    room = max_bytes - len("…".encode())
    if room < 2:
        return ""
    head = raw[: room - room // 3]
    tail = raw[len(raw) - room // 3 :]
    return f"{head.decode('utf-8', 'ignore')}…{tail.decode('utf-8', 'ignore')}"
