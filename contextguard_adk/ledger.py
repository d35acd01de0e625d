"""Excerpts of the user's own messages, kept beside every summary.

A model may leave out of its summary what the user asked for; the ledger is written
by the guard and out of the model's reach.
"""

from __future__ import annotations

import json
import re
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
NAMING_WEIGHT = 2.0
"""How much more room newest and first messages get, and those that name something."""

HEAD_RATIO = 1 / 3
"""How much of an excerpt is the message's beginning where it names something later."""

WORDS_BEFORE_NAME = 4
WORDS_AFTER_NAME = 2

_HEADING = "[The user's messages up to here, in order; long ones are excerpts]"
_GAP = "…"
_NAME = re.compile(r"[\d_/\\@#`]")


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
        telling_excerpt(" ".join(text.split()), MAX_EXCERPT_BYTES if order else first)
        for order, text in enumerate((*excerpts, *messages))
    ]
    texts = _leave_out_middle([text for text in texts if text], budget)
    costs = [_byte_count(text) for text in texts]
    last = len(texts) - FAVOURED_NEWEST
    weights = [
        (FAVOURED_WEIGHT if order < FAVOURED_FIRST or order >= last else 1.0)
        * (NAMING_WEIGHT if _NAME.search(text) else 1.0)
        for order, text in enumerate(texts)
    ]
    shares = fair_shares(costs, weights, budget)
    shortened = (
        telling_excerpt(text, int(share))
        for text, share in zip(texts, shares, strict=True)
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


def telling_excerpt(text: str, max_bytes: int) -> str:
    """Keeps the head of a text and the words around names, else head and tail.

    A name is a word with a digit, an underscore, a slash, `@`, `#` or a back-tick: a
    ticket, a path, a version, an identifier. Cutting it out of a message would leave a
    wish without its object.
    """
    text = text.encode("utf-8", "replace").decode()
    if _byte_count(text) <= max_bytes:
        return text
    words = text.split(" ")
    spans = _find_name_spans(words)
    gap = f" {_GAP} "
    room = int(max_bytes * (1 - HEAD_RATIO))
    chosen: list[tuple[int, str]] = []
    for start, end, _names in sorted(spans, key=lambda span: -span[2]):
        kept = _first_words(words[start:end], room - _byte_count(gap))
        # Of a span that is too long only its beginning; not a mere word of a later one.
        if kept and (not chosen or len(kept.split(" ")) == end - start):
            chosen.append((start, kept))
            room -= _byte_count(gap + kept)
    chosen.sort()
    spoken = gap.join(kept for _, kept in chosen)
    head_room = max_bytes - _byte_count(gap + spoken)
    before = words[: chosen[0][0]] if chosen else []
    head = _first_words(before, head_room)
    joint = " " if head == " ".join(before) else gap
    telling = f"{head}{joint}{spoken}" if head else spoken
    # Words may be longer than all of this, in scripts without blanks.
    is_poor = _byte_count(telling) < max_bytes / 2
    return excerpt(text, max_bytes) if is_poor else telling


def _first_words(words: Sequence[str], max_bytes: int) -> str:
    """As many of the first words as fit."""
    count = 0
    for word in words:
        max_bytes -= _byte_count(word) + (count > 0)
        if max_bytes < 0:
            break
        count += 1
    return " ".join(words[:count])


def _find_name_spans(words: Sequence[str]) -> list[tuple[int, int, int]]:
    """Finds names with the words around them: start, end, number of names."""
    spans: list[tuple[int, int, int]] = []
    for index, word in enumerate(words):
        if not _NAME.search(word):
            continue
        start = max(0, index - WORDS_BEFORE_NAME)
        end = min(len(words), index + 1 + WORDS_AFTER_NAME)
        if spans and start <= spans[-1][1]:
            first, _, names = spans.pop()
            spans.append((first, end, names + 1))
        else:
            spans.append((start, end, 1))
    return spans


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
