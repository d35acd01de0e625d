"""Finds the items of a history that match a query."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from contextguard_adk.summarizing.items import Item

MAX_QUERY_WORDS = 12
MAX_PLACES = 4
"""How many places of a phrase in one item are told."""

NEARBY_CHARS = 200
"""Words of a query that stand this close together make a better match."""


@dataclass(frozen=True)
class Match:
    """Where a query matches an item best.

    Attributes:
        item: The item.
        position: The character where the best match begins.
        others: Where further matches begin.
        score: How well it matches; higher is better.
    """

    item: Item
    position: int
    others: tuple[int, ...]
    score: int


def find_matches(items: Iterable[Item], query: str) -> list[Match]:
    """Searches items for a phrase or its words, case-insensitively.

    Args:
        items: What to search, best first among equals.
        query: A phrase; an item matches where it holds any of its words.

    Returns:
        One match per item and text: the whole phrase first, then by how many of the
        words stand together, then by how many there are.
    """
    words = list(dict.fromkeys(re.findall(r"[\w./:@#+-]+", query.lower())))[
        :MAX_QUERY_WORDS
    ]
    words = [word.strip(".:") or word for word in words]
    if not words:
        words = [query.lower()]
    phrase = re.compile(re.escape(query), re.IGNORECASE)
    any_word = re.compile("|".join(re.escape(w) for w in words), re.IGNORECASE)
    matches, seen = [], set[str]()
    for item in items:
        if item.handle in seen:
            continue
        seen.add(item.handle)
        match = _match(item, phrase, any_word, len(words))
        if match:
            matches.append(match)
    return sorted(matches, key=lambda match: -match.score)


def _match(
    item: Item, phrase: re.Pattern[str], any_word: re.Pattern[str], word_count: int
) -> Match | None:
    text = item.text if not item.media else item.label
    places = itertools.islice(phrase.finditer(text), MAX_PLACES)
    found = [place.start() for place in places]
    if found:
        return Match(item, found[0], tuple(found[1:]), 2 * word_count + 2)
    in_title = {
        m.group().lower() for m in any_word.finditer(f"{item.label} {item.hint}")
    }
    hits = [(m.start(), m.group().lower()) for m in any_word.finditer(text)]
    if not hits:
        return Match(item, 0, (), len(in_title)) if in_title else None
    position, nearby = _densest(hits)
    distinct = len({word for _, word in hits} | in_title)
    return Match(item, position, (), nearby + distinct)


def _densest(hits: Sequence[tuple[int, str]]) -> tuple[int, int]:
    """Where most different words stand close together, and how many they are."""
    best_position, best_count, start = hits[0][0], 0, 0
    inside: dict[str, int] = {}
    for position, word in hits:
        inside[word] = inside.get(word, 0) + 1
        while position - hits[start][0] > NEARBY_CHARS:
            first = hits[start][1]
            inside[first] -= 1
            if not inside[first]:
                del inside[first]
            start += 1
        if len(inside) > best_count:
            best_position, best_count = hits[start][0], len(inside)
    return best_position, best_count
