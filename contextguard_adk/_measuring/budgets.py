"""The sizes that follow from a context window, and texts cut to a size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contextguard_adk._support.phrases import SHORTENED, quote

OVERFULL_RATIO = 0.97
"""The part of a window above which a request is not expected to be accepted."""

MOST_BUFFER_RATIO = 0.75
"""The most of a window that is kept free, whatever a request reserves."""

_LARGE_WINDOW_TOKENS = 200_000
_LARGE_WINDOW_BUFFER_TOKENS = 20_000
_SMALL_WINDOW_BUFFER_PERCENT = 20

_HEAD_RATIO = 0.6
"""The part of a shortened text that its head takes: slightly more than its tail."""

_MOST_CUTS = 5
"""How often a text is cut until its tokens fit.

Head and tail may be denser than the whole, so that the first cut may leave too much.
Each later cut starts from a text that is nearly short enough."""

_CUT_MARGIN = 0.98
"""A text is cut to slightly less than what would fit, so that few cuts are needed."""


@dataclass(frozen=True)
class Budgets:
    """The sizes that one call has to respect, in tokens of the agent's model.

    Attributes:
        window_tokens: The context window.
        threshold_tokens: A request of this size or more is compacted.
        summary_tokens: The most that a summary may take.
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
        """A request of this size or more is not expected to be accepted."""
        return int(self.window_tokens * OVERFULL_RATIO)

    @property
    def room_for_answer_tokens(self) -> int:
        """A request of up to this size leaves room for its answer.

        Half of the buffer is room enough, unless the request reserves more.
        """
        half_buffer_tokens = buffer_tokens(self.window_tokens) // 2
        room_tokens = max(self.reserved_output_tokens, half_buffer_tokens)
        return max(self.full_tokens, self.window_tokens - room_tokens)


def buffer_tokens(window_tokens: int, reserved_output_tokens: int = 0) -> int:
    """Returns the tokens of a window that are kept free.

    They are 20,000, or a fifth of a window below 200,000. They are at least the
    reserved output, and at most `MOST_BUFFER_RATIO` of the window.
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
        reserved_output_tokens: What the request asks to be kept free for its answer.
        trigger_tokens: The size at which the strategy wants a compaction. None, or a
            size that is not below the window less its buffer, changes nothing.
    """
    full_tokens = window_tokens - buffer_tokens(window_tokens, reserved_output_tokens)
    # A large reserve of output makes no summary longer.
    summary_tokens = buffer_tokens(window_tokens) // 2
    if trigger_tokens is None or trigger_tokens >= full_tokens:
        return Budgets(
            window_tokens=window_tokens,
            threshold_tokens=full_tokens,
            summary_tokens=summary_tokens,
            full_tokens=full_tokens,
            working_tokens=window_tokens,
            reserved_output_tokens=reserved_output_tokens,
        )

    return Budgets(
        window_tokens=window_tokens,
        threshold_tokens=trigger_tokens,
        # An eighth: a compaction must bring the request far below the trigger.
        summary_tokens=min(summary_tokens, trigger_tokens // 8),
        full_tokens=full_tokens,
        working_tokens=min(window_tokens, scale_trigger(trigger_tokens)),
        reserved_output_tokens=reserved_output_tokens,
    )


def scale_trigger(trigger_tokens: int) -> int:
    """Returns the size of the window whose threshold a trigger would be."""
    return trigger_tokens + min(trigger_tokens // 4, 20_000)


def resolve_size(size: int | float, window_tokens: float) -> int:
    """Returns a size in tokens; a float is a part of the window."""
    if isinstance(size, float):
        return int(size * window_tokens)
    return size


TokenCounter = Callable[[str], int]


def shorten(text: str, max_chars: int, handle: str = "") -> str:
    """Keeps head and tail of a text; a notice between them tells its full length.

    Args:
        text: The text, which is returned unchanged if it is short enough.
        max_chars: The most characters that are returned; the notice may exceed them.
        handle: The number under which the whole text can be recalled; "" for none.
    """
    if len(text) <= max_chars:
        return text

    item = f"; item {handle}" if handle else ""
    notice = f"\n{SHORTENED.format(len(text), item)}\n"
    room_chars = max(0, max_chars - len(notice))
    head_chars = int(room_chars * _HEAD_RATIO)
    tail_chars = room_chars - head_chars
    head = text[:head_chars]
    tail = text[len(text) - tail_chars :]
    return head + notice + quote(tail)


def shorten_to_tokens(
    text: str, max_tokens: float, count_tokens: TokenCounter, handle: str = ""
) -> str:
    """Cuts the middle out of a text until it fits; "" if it does not fit.

    Args:
        text: The text, which is returned unchanged if it fits.
        max_tokens: The most tokens that may be returned.
        count_tokens: Counts the tokens of a text.
        handle: The number under which the whole text can be recalled; "" for none.
    """
    shortened = text
    for _ in range(_MOST_CUTS):
        tokens = count_tokens(shortened)
        if tokens <= max_tokens or not shortened:
            return shortened

        fitting_chars = len(shortened) * max_tokens / tokens
        max_chars = max(1, int(fitting_chars * _CUT_MARGIN))
        # Again of the whole text: a cut of a cut would have two notices.
        shortened = shorten(text, max_chars, handle)
    return ""


def divide_budget(
    costs: Sequence[float], weights: Sequence[float], room: float
) -> list[float]:
    """Divides a budget among items by their weights.

    An item never gets more than its cost. The rest of its share goes to other items.

    Args:
        costs: The most that each item can use, in the unit of `room`.
        weights: The weight of each item.
        room: The budget.

    Returns:
        The share of each item, in the order of `costs`.
    """
    # Items that are cheap for their weight come first: later items share the rest.
    indexes = range(len(costs))
    cheapest_first = sorted(indexes, key=lambda index: costs[index] / weights[index])

    shares = [0.0] * len(costs)
    left_room = room
    left_weight = sum(weights)
    for index in cheapest_first:
        fair_share = max(0.0, left_room) * weights[index] / left_weight
        shares[index] = min(float(costs[index]), fair_share)
        left_room -= shares[index]
        left_weight -= weights[index]
    return shares


def excerpt(text: str, max_bytes: int) -> str:
    """Keeps head and tail of a text, with an ellipsis between them.

    The result takes at most `max_bytes` of UTF-8. It is "" if there is no room for one
    byte before the ellipsis and one behind it.
    """
    raw = text.encode("utf-8", "replace")
    if len(raw) <= max_bytes:
        return raw.decode()

    room_bytes = max_bytes - len("…".encode())
    if room_bytes < 2:
        return ""

    # The head says what a text is about, and gets twice as much as the tail.
    tail_bytes = room_bytes // 3
    head_bytes = room_bytes - tail_bytes
    head = raw[:head_bytes].decode("utf-8", "ignore")
    tail = raw[len(raw) - tail_bytes :].decode("utf-8", "ignore")
    return f"{head}…{tail}"


def fit_bytes(
    budget_tokens: float,
    correction: float,
    write: Callable[[int], str],
    count: TokenCounter,
) -> int:
    """Returns how many bytes a text may take, so that it fits into a budget of tokens.

    The first guess is three bytes for each token. The text of this size is written and
    counted. If it has too many tokens, the guess is reduced in proportion.

    Args:
        budget_tokens: The most tokens that the text may take.
        correction: The factor between estimates and the provider's counts. A factor
            below 1 is not used: it would make the guess larger.
        write: Writes the text with at most so many bytes.
        count: Counts the tokens of a text.
    """
    guess_bytes = int(budget_tokens * 3 / max(1.0, correction))
    tokens = count(write(guess_bytes))
    if tokens <= budget_tokens:
        return guess_bytes
    return int(guess_bytes * budget_tokens / tokens)
