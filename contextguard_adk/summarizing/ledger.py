"""Excerpts of the user's own messages, kept beside every summary.

A model may leave out of its summary what the user asked for; the ledger is written
by the guard and out of the model's reach.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from contextguard_adk.measuring.shortening import divide_budget

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

EDGE_RATIO = 0.1
"""How much of an excerpt first and last words have where names stand between."""

PASTED_TIMES = 4
PASTED_TAIL_RATIO = 1 / 3
"""In a message so many times as long something was pasted: the wish stands last."""

MAX_NAMED_RATIO = 0.9
"""Where more of the words stand around names, names are not what tells."""

MAX_SEARCHED_BYTES = 16 * 1024
"""How much of a message is searched for names: its head and its tail."""

WORDS_BEFORE_NAME = 4
WORDS_AFTER_NAME = 2

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
    shares = divide_budget(costs, weights, budget)
    shortened = (
        telling_excerpt(text, int(share))
        for text, share in zip(texts, shares, strict=True)
    )
    kept = [text for text in shortened if text]
    # Quotes and control characters take more room in session state than here.
    while (
        kept and len(json.dumps(kept, ensure_ascii=False).encode()) > MAX_STORED_BYTES
    ):
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
    """Keeps the first and last words of a text and those around names between them.

    A name is a word with a digit, an underscore, a slash, `@`, `#` or a back-tick: a
    ticket, a path, a version, an identifier. Cutting it out of a message would leave a
    wish without its object. The wish itself often stands last, behind what was pasted.
    Where that says too little, as in scripts without blanks, head and tail remain.
    """
    whole = excerpt(text, max(max_bytes, MAX_SEARCHED_BYTES))
    if _byte_count(whole) <= max_bytes:
        return whole
    words = whole.split(" ")
    gap = f" {_GAP} "
    inside = max_bytes - 2 * _byte_count(gap)
    is_pasted = _byte_count(text) >= PASTED_TIMES * max_bytes
    edge = int(inside * EDGE_RATIO)
    last = int(inside * PASTED_TAIL_RATIO) if is_pasted else edge
    end = len(words) - _count_last_words(words, last)
    tail = " ".join(words[end:])
    room = max_bytes - _byte_count(tail) - 2 * _byte_count(gap)
    named = _around_names(words[:end], room - edge)
    spoken = gap.join(kept for _, kept in named)
    before = words[: named[0][0]] if named else words[:end]
    head = _first_words(before, room - _byte_count(spoken))
    telling = gap.join(filter(None, (head, spoken, tail)))
    is_poor = not named or _byte_count(telling) < max_bytes / 2
    return excerpt(text, max_bytes) if is_poor else telling


def _around_names(words: Sequence[str], room: int) -> list[tuple[int, str]]:
    """Chooses the words around names that fit, most names first: place and text."""
    gap = _byte_count(f" {_GAP} ")
    chosen: list[tuple[int, str]] = []
    spans = _find_name_spans(words)
    if sum(end - start for start, end, _ in spans) > MAX_NAMED_RATIO * len(words):
        return []  # As in a log: where all is named, a name tells nothing.
    for start, end, _names in sorted(spans, key=lambda span: -span[2]):
        kept = _first_words(words[start:end], room - gap * bool(chosen))
        # Of a span that is too long only its beginning; not a mere word of a later one.
        if kept and (not chosen or len(kept.split(" ")) == end - start):
            room -= _byte_count(kept) + gap * bool(chosen)
            chosen.append((start, kept))
    return sorted(chosen)


def _first_words(words: Sequence[str], max_bytes: int) -> str:
    """As many of the first words as fit."""
    count = 0
    for word in words:
        max_bytes -= _byte_count(word) + (count > 0)
        if max_bytes < 0:
            break
        count += 1
    return " ".join(words[:count])


def _count_last_words(words: Sequence[str], max_bytes: int) -> int:
    """How many of the last words fit."""
    return len(_first_words(words[::-1], max_bytes).split(" ")) if words else 0


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
