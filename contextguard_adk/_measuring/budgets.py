"""The sizes that follow from a context window, and texts cut to a size.

The buffer of a window is the part that is kept free for the answer. A trigger is the
size of a request at which a strategy wants a compaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contextguard_adk._support.phrases import SHORTENED, quote

OVERFULL_RATIO = 0.97
"""The part of a window from which on a request is not expected to be accepted."""

MOST_BUFFER_RATIO = 0.75
"""The part of a window that is kept free at most, whatever a request reserves."""

_LARGE_WINDOW_TOKENS = 200_000
_LARGE_WINDOW_BUFFER_TOKENS = 20_000
_SMALL_WINDOW_BUFFER_PERCENT = 20

_HEAD_RATIO = 0.6
"""The part of the kept characters that are the head of a shortened text."""

_MOST_COUNTS = 5
"""How often a text is counted at most, while it is cut until its tokens fit.

Head and tail of a text may take more tokens than the middle, so that the first cut may
leave too much. A later cut follows from a count of a text that is nearly short enough.
"""

_CUT_MARGIN = 0.98
"""A text is cut to slightly less than what would fit, so that few cuts are needed."""


@dataclass(frozen=True)
class Budgets:
    """The sizes that one call has to respect, in tokens of the agent's model.

    Attributes:
        window_tokens: The context window.
        threshold_tokens: A request of this size or more is compacted. This is the
            trigger, or `full_tokens` if the trigger is not lower.
        summary_tokens: The most that a summary may take.
        full_tokens: The window less its buffer.
        working_tokens: The size to which ratios in the settings apply: the window or,
            with a trigger below `full_tokens`, the smaller window of `scale_trigger`.
        reserved_output_tokens: The output that the request reserves for its answer.
    """

    window_tokens: int
    threshold_tokens: int
    summary_tokens: int
    full_tokens: int
    working_tokens: int
    reserved_output_tokens: int = 0

    @property
    def overfull_tokens(self) -> int:
        """A request of this size or more is not expected to be accepted."""
        return int(self.window_tokens * OVERFULL_RATIO)

    @property
    def room_for_answer_tokens(self) -> int:
        """A request of up to this size leaves room for its answer.

        Half of the usual buffer is room enough, unless the request reserves more
        output. A request of up to `full_tokens` always leaves room, because more than
        the buffer cannot be kept free.
        """
        half_buffer_tokens = buffer_tokens(self.window_tokens) // 2
        answer_tokens = max(self.reserved_output_tokens, half_buffer_tokens)
        return max(self.full_tokens, self.window_tokens - answer_tokens)


def buffer_tokens(window_tokens: int, reserved_output_tokens: int = 0) -> int:
    """Returns the tokens of a window that are kept free.

    The usual buffer is 20,000 tokens, or a fifth of a window below 200,000. The buffer
    is at least the reserved output, and at most `MOST_BUFFER_RATIO` of the window.
    """
    if window_tokens >= _LARGE_WINDOW_TOKENS:
        usual_tokens = _LARGE_WINDOW_BUFFER_TOKENS
    else:
        usual_tokens = window_tokens * _SMALL_WINDOW_BUFFER_PERCENT // 100

    wanted_tokens = max(usual_tokens, reserved_output_tokens)
    most_tokens = int(window_tokens * MOST_BUFFER_RATIO)
    return min(wanted_tokens, most_tokens)


def threshold_tokens(window_tokens: int, reserved_output_tokens: int = 0) -> int:
    """Returns the prompt tokens that start compaction: the window less its buffer."""
    return window_tokens - buffer_tokens(window_tokens, reserved_output_tokens)


def plan_budgets(
    window_tokens: int,
    reserved_output_tokens: int = 0,
    trigger_tokens: int | None = None,
) -> Budgets:
    """Derives all sizes from a window, and from the trigger of a strategy.

    Args:
        window_tokens: The context window.
        reserved_output_tokens: The output that the request reserves for its answer.
        trigger_tokens: The trigger. A trigger that is not below the window less its
            buffer has no effect; neither has None.
    """
    full_tokens = window_tokens - buffer_tokens(window_tokens, reserved_output_tokens)
    # The usual buffer is taken, because a large reserve must make no summary longer.
    summary_tokens = buffer_tokens(window_tokens) // 2

    if trigger_tokens is not None and trigger_tokens < full_tokens:
        start_tokens = trigger_tokens
        working_tokens = min(window_tokens, scale_trigger(trigger_tokens))
        # A compaction must bring the request far below the trigger, so the summary
        # takes an eighth of the trigger at most.
        summary_tokens = min(summary_tokens, trigger_tokens // 8)
    else:
        start_tokens = full_tokens
        working_tokens = window_tokens

    return Budgets(
        window_tokens=window_tokens,
        threshold_tokens=start_tokens,
        summary_tokens=summary_tokens,
        full_tokens=full_tokens,
        working_tokens=working_tokens,
        reserved_output_tokens=reserved_output_tokens,
    )


def scale_trigger(trigger_tokens: int) -> int:
    """Returns the size of the window whose threshold would be equal to a trigger.

    This is the trigger and the usual buffer of the window. A fifth of the window is a
    quarter of the trigger: a trigger of 80,000 belongs to a window of 100,000.
    """
    return trigger_tokens + min(trigger_tokens // 4, _LARGE_WINDOW_BUFFER_TOKENS)


def resolve_size(size: int | float, window_tokens: float) -> int:
    """Returns a size in tokens.

    An integer is a number of tokens already. A float is a part of the window: 0.1 is a
    tenth of the window.
    """
    if isinstance(size, float):
        return int(size * window_tokens)
    return size


TokenCounter = Callable[[str], int]
"""Counts the tokens of a text."""


def shorten(text: str, max_chars: int, handle: str = "") -> str:
    """Keeps head and tail of a text; a notice between them tells its full length.

    Args:
        text: The text, which is returned unchanged if it is short enough.
        max_chars: The most characters that are returned. If the notice alone is longer,
            the result is the notice.
        handle: The name under which the whole text can be recalled; "" for none. The
            notice has this name.
    """
    if len(text) <= max_chars:
        return text

    item = f"; item {handle}" if handle else ""
    notice = f"\n{SHORTENED.format(len(text), item)}\n"
    room_chars = max(0, max_chars - len(notice))
    head_chars = int(room_chars * _HEAD_RATIO)
    tail_chars = room_chars - head_chars
    tail_start = len(text) - tail_chars
    # Behind the notice the tail begins a new line. Its first words may have stood
    # within a line before; now they could pass for a line of the guard, unless quoted.
    return text[:head_chars] + notice + quote(text[tail_start:])


def shorten_to_tokens(
    text: str, max_tokens: float, count_tokens: TokenCounter, handle: str = ""
) -> str:
    """Cuts the middle out of a text, and more of the middle until the text fits.

    Returns "" if the text still does not fit after `_MOST_COUNTS` counts.

    Args:
        text: The text, which is returned unchanged if it fits.
        max_tokens: The most tokens that may be returned.
        count_tokens: Counts the tokens of a text.
        handle: The name under which the whole text can be recalled; "" for none.
    """
    if not text:
        return ""

    shortened = text
    for _attempt in range(_MOST_COUNTS):
        tokens = count_tokens(shortened)
        if tokens <= max_tokens:
            return shortened

        fitting_chars = len(shortened) * max_tokens / tokens
        max_chars = max(1, int(fitting_chars * _CUT_MARGIN))
        # The whole text is cut each time, because a text that is cut twice would have
        # two notices.
        shortened = shorten(text, max_chars, handle)
    return ""


def divide_budget(
    costs: Sequence[float], weights: Sequence[float], room: float
) -> list[float]:
    """Divides a budget among items by their weights.

    An item never gets more than its cost. What an item cannot use goes to other items:
    with a budget of 10 and equal weights, costs of [2, 9, 9] get [2, 4, 4].

    Args:
        costs: The most that each item can use, in the unit of `room`.
        weights: The weight of each item; above 0.
        room: The budget.

    Returns:
        The share of each item, in the order of `costs`.
    """
    # An item with a low cost for its weight leaves a part of its share unused. Such
    # items come first, so that the items after them can share the unused part.
    indexes = range(len(costs))
    cheapest_first = sorted(indexes, key=lambda index: costs[index] / weights[index])

    shares = [0.0] * len(costs)
    left_room = room
    left_weight = sum(weights)
    for index in cheapest_first:
        # The rounding of floats may make the room that is left slightly negative.
        fair_share = max(0.0, left_room) * weights[index] / left_weight
        shares[index] = min(float(costs[index]), fair_share)
        left_room -= shares[index]
        left_weight -= weights[index]
    return shares


def excerpt(text: str, max_bytes: int) -> str:
    """Keeps head and tail of a text, with an ellipsis between them.

    Args:
        text: The text, which is returned whole if it is short enough. Lone surrogates
            become question marks.
        max_bytes: The most UTF-8 bytes of the result. If a text is too long, and the
            ellipsis leaves less than two bytes of the room, the result is "".
    """
    raw = text.encode("utf-8", "replace")
    if len(raw) <= max_bytes:
        return raw.decode()

    room_bytes = max_bytes - len("…".encode())
    if room_bytes < 2:
        return ""

    # The head says what a text is about, so the head gets twice as much as the tail.
    tail_bytes = room_bytes // 3
    head_bytes = room_bytes - tail_bytes
    tail_start = len(raw) - tail_bytes
    # A character of which the cut leaves only some bytes is left out.
    head = raw[:head_bytes].decode("utf-8", "ignore")
    tail = raw[tail_start:].decode("utf-8", "ignore")
    return f"{head}…{tail}"
