"""Excerpts of the user's own messages, kept beside every summary.

A model may leave out of its summary what the user asked for; the ledger is written
by the guard and out of the model's reach.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from contextguard_adk.sharing import fair_shares

MAX_LEDGER_BYTES = 6 * 1024
"""What all excerpts may take together."""

MAX_STORED_BYTES = 8 * 1024
"""What they may take in session state, as JSON."""

MAX_EXCERPT_BYTES = 240
"""What one excerpt may take."""

MAX_FIRST_BYTES = 1_500
MAX_FIRST_RATIO = 0.25
"""What the first message may take, which mostly holds the task; and of the budget."""

MIN_EXCERPT_BYTES = 24
"""Below this an excerpt says nothing; the middle ones are then left out."""

FAVOURED_NEWEST = 8
FAVOURED_FIRST = 2
FAVOURED_WEIGHT = 4.0

_HEADING = "[The user's messages up to here, in order; long ones are excerpts]"
_GAP = "…"


def extend_ledger(
    excerpts: Sequence[str], messages: Sequence[str], max_bytes: int = MAX_LEDGER_BYTES
) -> list[str]:
    """Adds messages to a ledger and shares out its budget anew.

    Args:
        excerpts: The ledger so far.
        messages: Newly covered messages of the user, oldest first.
        max_bytes: What all excerpts may take, UTF-8.

    Returns:
        The new ledger: the newest and the first messages keep the most; where even
        short excerpts of all are too much, middle ones are left out.
    """
    budget = min(max_bytes, MAX_LEDGER_BYTES)
    first = min(MAX_FIRST_BYTES, max(MAX_EXCERPT_BYTES, int(budget * MAX_FIRST_RATIO)))
    texts = [
        excerpt(" ".join(text.split()), MAX_EXCERPT_BYTES if order else first)
        for order, text in enumerate((*excerpts, *messages))
    ]
    texts = _leave_out_middle([text for text in texts if text], budget)
    costs = [_byte_count(text) for text in texts]
    weights = [
        FAVOURED_WEIGHT
        if order < FAVOURED_FIRST or order >= len(texts) - FAVOURED_NEWEST
        else 1.0
        for order in range(len(texts))
    ]
    shares = fair_shares(costs, weights, budget)
    shortened = (
        excerpt(text, int(share)) for text, share in zip(texts, shares, strict=True)
    )
    kept = [text for text in shortened if text]
    # Quotes and control characters take more room in session state than here.
    while kept and len(dump_ledger(kept).encode()) > MAX_STORED_BYTES:
        del kept[min(FAVOURED_FIRST, len(kept) - 1)]
    return kept


def _leave_out_middle(texts: list[str], budget: int) -> list[str]:
    """Drops the oldest but the first messages while there are too many."""
    most = max(1, budget // MIN_EXCERPT_BYTES)
    if len(texts) <= most:
        return texts
    first = min(FAVOURED_FIRST, most - 1)
    return texts[:first] + texts[len(texts) - (most - first) :]


def excerpt(text: str, max_bytes: int) -> str:
    """Keeps head and tail of a text within a number of UTF-8 bytes."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= max_bytes:
        return raw.decode()
    room = max_bytes - _byte_count(_GAP)
    if room < 2:
        return ""
    tail = room // 3
    return (
        raw[: room - tail].decode("utf-8", "ignore")
        + _GAP
        + raw[len(raw) - tail :].decode("utf-8", "ignore")
    )


def _byte_count(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def render_ledger(excerpts: Sequence[str]) -> str:
    """Renders a ledger for the summary content; "" when it is empty."""
    if not excerpts:
        return ""
    return "\n".join([_HEADING, *(f"- {text}" for text in excerpts)])


def dump_ledger(excerpts: Sequence[str]) -> str:
    """Writes a ledger as one string for session state."""
    return json.dumps(list(excerpts), ensure_ascii=False)


def load_ledger(stored: str) -> list[str]:
    """Reads what `dump_ledger` wrote; anything else is an empty ledger."""
    try:
        values = json.loads(stored) if stored else []
    except (ValueError, RecursionError):
        return []
    if not isinstance(values, list):
        return []
    return [value for value in values if isinstance(value, str)]
