"""Excerpts of the user's messages, which no model writes or changes."""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Collection, Iterable, Sequence

from pydantic import JsonValue

from contextguard_adk._history.contents import content_text
from contextguard_adk._history.history import History
from contextguard_adk._measuring.budgets import divide_budget, excerpt
from contextguard_adk._support.phrases import USER_MESSAGES, quote_line
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section

MAX_EXCERPTS_BYTES = 6 * 1024  # What all excerpts may take together.
MAX_STORED_BYTES = 8 * 1024  # What they may take in session state, as JSON.
MAX_EXCERPT_BYTES = 240
MIN_EXCERPT_BYTES = 24  # Else the messages in the middle are left out.
MAX_FIRST_BYTES = 1_500  # For the first message, which mostly holds the task.
FAVORED_NEWEST = 8  # So many of the newest and first messages get more room.
FAVORED_FIRST = 2

_GAP = "…"
_GAP_BYTES = len(f"{_GAP} ".encode())
_NAME = re.compile(r"[\d_/\\@#`]")


class UserMessages(Section):
    """Excerpts of the user's messages that the summary replaces."""

    name = "user_messages"

    def write(
        self, turn: Turn, covered: frozenset[int], known: JsonValue, room_tokens: int
    ) -> JsonValue:
        """Adds the messages that are summarized now to the excerpts that are known."""
        history = turn.history
        new_indexes = (covered - history.covered).intersection(history.user_messages)
        new = [content_text(turn.messages[index]) for index in sorted(new_indexes)]
        max_bytes = int(turn.budgets.working_tokens * 0.5 / max(1.0, turn.correction))
        return [*extend_excerpts(_read(known), new, max_bytes)]

    def render(
        self, value: JsonValue, history: History, covered: Collection[int]
    ) -> str:
        """Returns one line for each message."""
        lines = [f"- {quote_line(text)}" for text in _read(value)]
        return "\n".join([USER_MESSAGES, *lines]) if lines else ""


def _read(value: JsonValue) -> list[str]:
    items = value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, str)]


def extend_excerpts(
    excerpts: Sequence[str],
    messages: Sequence[str],
    max_bytes: int = MAX_EXCERPTS_BYTES,
) -> list[str]:
    """Adds messages, oldest first, to excerpts, and divides their budget anew."""
    budget = min(max_bytes, MAX_EXCERPTS_BYTES)
    first = min(MAX_FIRST_BYTES, max(MAX_EXCERPT_BYTES, budget // 4))
    texts = [
        telling_excerpt(" ".join(text.split()), MAX_EXCERPT_BYTES if order else first)
        for order, text in enumerate((*excerpts, *messages))
    ]
    texts = [text for text in texts if text]
    most = max(1, budget // MIN_EXCERPT_BYTES)
    middle = min(FAVORED_FIRST, most - 1)
    del texts[middle : middle + max(0, len(texts) - most)]
    last = len(texts) - FAVORED_NEWEST
    weights = [
        (4.0 if order < FAVORED_FIRST or order >= last else 1.0)
        * (2.0 if _NAME.search(text) else 1.0)
        for order, text in enumerate(texts)
    ]
    shares = divide_budget([len(text.encode()) for text in texts], weights, budget)
    shortened = map(telling_excerpt, texts, map(int, shares))
    kept = [text for text in shortened if text]
    # Quotes and control characters take more room in session state than here.
    while len(json.dumps(kept, ensure_ascii=False).encode()) > MAX_STORED_BYTES:
        del kept[min(FAVORED_FIRST, len(kept) - 1)]
    return kept


def telling_excerpt(text: str, max_bytes: int) -> str:
    """Keeps a text's first and last words and those around names (paths, tickets)."""
    whole = excerpt(text, max(max_bytes, 16 * 1024))  # Names are searched there.
    if len(whole.encode()) <= max_bytes:
        return whole
    words = whole.split(" ")
    sizes = [len(word.encode()) + 1 for word in words]  # Each with its blank.
    room = max_bytes - _GAP_BYTES
    edge = room // 10
    # So long a message has something pasted into it; the wish is its end.
    is_pasted = len(text.encode("utf-8", "replace")) >= 4 * max_bytes
    last = room // 3 if is_pasted else edge
    end = len(words) - _count_fitting(reversed(sizes), last)
    room -= sum(sizes[end:])
    named = _choose_named(words[:end], sizes, room - edge)
    if not named:
        return excerpt(text, max_bytes)
    room -= sum(sum(sizes[start:stop]) + _GAP_BYTES for start, stop in named)
    head = _count_fitting(sizes[: named[0][0]], room)
    spans = [(0, head), *named, (end, len(words))]
    telling = f" {_GAP} ".join(" ".join(words[a:b]) for a, b in spans if a < b)
    is_poor = len(telling.encode()) < max_bytes / 2
    return excerpt(text, max_bytes) if is_poor else telling


def _count_fitting(sizes: Iterable[int], max_bytes: int) -> int:
    return bisect.bisect_right(list(itertools.accumulate(sizes)), max_bytes + 1)


def _choose_named(
    words: Sequence[str], sizes: Sequence[int], room: int
) -> list[tuple[int, int]]:
    """Chooses the spans around names that fit, those with most names first."""
    spans = _find_name_spans(words)
    if sum(end - start for start, end, _ in spans) > 0.9 * len(words):
        return []  # As in a log: where everything is named, names say nothing.
    chosen: list[tuple[int, int]] = []
    for start, end, _names in sorted(spans, key=lambda span: -span[2]):
        count = _count_fitting(sizes[start:end], room - _GAP_BYTES)
        # The first span may be cut, so that the name with most words is not lost.
        if count == end - start or (count and not chosen):
            room -= sum(sizes[start : start + count]) + _GAP_BYTES
            chosen.append((start, start + count))
    return sorted(chosen)


def _find_name_spans(words: Sequence[str]) -> list[tuple[int, int, int]]:
    """Finds names with the words around them: start, end, number of names."""
    spans: list[tuple[int, int, int]] = []
    for index in (i for i, word in enumerate(words) if _NAME.search(word)):
        start, names = max(0, index - 4), 1
        if spans and start <= spans[-1][1]:
            start, _, names = spans.pop()
            names += 1
        spans.append((start, min(len(words), index + 3), names))
    return spans
