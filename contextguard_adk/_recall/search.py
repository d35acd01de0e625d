"""Ranks items by how well they match a query: BM25 over passages, words by stems."""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from contextguard_adk._history.text import Item

_PASSAGE_CHARS = 1_600
_OVERLAP_CHARS = 200
_K1 = 1.2
_B = 0.5  # BM25's: how soon repetition stops to count, how much length does.
_NEIGHBOR_RATIO = 0.3  # An answer rarely repeats the words of its question.
_MIN_WEIGHT_RATIO = 0.05  # Below, as "the" beside a rare word, a word is no match.
_MAX_TYPED = 12  # The longest words; of all others, only stems are looked for.

_WORD = re.compile(r"[^\W_]+")
_ENDING = r"(?<=\w{3})(?:ing|ed|ly|ations?|ions?|ments?|ness|es?|(?<![siu])s)$"
# Scripts without blanks; and Korean, which joins endings to words.
_UNSPACED = re.compile(
    "[\u0e00-\u109f\u1780-\u17ff\u2e80-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff]+"
)


@dataclass(slots=True)
class Match:
    """A passage of an item, in lower case; how often it has each term of a query."""

    item: Item
    start: int
    text: str
    hits: dict[str, int]
    score: float = 0.0

    @property
    def position(self) -> int:
        """Where in the item's text most of the terms stand together."""
        found = [(m.start(), _stem(m[0])) for m in _WORD.finditer(self.text)]
        found += [(self.text.find(term), term) for term in self.hits]
        spots = sorted(s for s in found if s[0] >= 0 and s[1] in self.hits)

        def crowd(start: int) -> int:
            return len({t for at, t in spots if 0 <= at - start < _OVERLAP_CHARS})

        return self.start + max((at for at, _ in spots), key=crowd, default=0)


def rank_items(items: Sequence[Item], query: str) -> list[Match]:
    """Finds the items that match a query: the best passage of each, the best first.

    Those that hold the whole query as it was typed come before all others. No call into
    C reads more than a passage: no other thread runs while a regex does.
    """
    terms = _Terms(query.lower())
    groups = [list(terms.find_passages(item)) for item in items]
    passages = [passage for group in groups for passage in group]
    terms.count_typed(passages)
    counts = Counter(term for passage in passages for term in passage.hits)
    total = len(passages) or 1
    chars = sum(len(p.text) for p in passages) or 1
    weights = {  # BM25's, squared: common words count for even less.
        term: math.log(1 + (total - count + 0.5) / (count + 0.5)) ** 2
        for term, count in counts.items()
    }
    for passage in passages:
        norm = _K1 * (1 - _B + _B * len(passage.text) * total / chars)
        for term, count in passage.hits.items():
            passage.score += weights[term] * count * (_K1 + 1) / (count + norm)
    best = [max(group, key=lambda match: match.score) for group in groups]
    alone = [0.0, *(match.score for match in best), 0.0]
    for match, before, after in zip(best, alone, alone[2:], strict=False):
        match.score += _NEIGHBOR_RATIO * (before + after)
    least = _MIN_WEIGHT_RATIO * max(weights.values(), default=0.0)
    best = [m for m in best if any(weights[term] >= least for term in m.hits)]
    return sorted(best, key=lambda m: (terms.phrase not in m.hits, -m.score))


class _Terms:
    """What a query looks for: words by their stems, and literally what was typed."""

    def __init__(self, query: str) -> None:
        self._stem = functools.lru_cache(100_000)(_stem)
        self._stems = {self._stem(word) for word in _WORD.findall(query)}
        self._openings = {stem[:3] for stem in self._stems}
        typed = [t.strip("\"'`.,:;!?()[]{}<>") for t in (query, *query.split())]
        self.phrase = typed[0]
        self._typed = {*sorted(typed, key=len)[-_MAX_TYPED:]} - {""}
        runs = _UNSPACED.findall(query)
        self._pairs = {r[i : i + 2] for r in runs for i in range(max(1, len(r) - 1))}

    def find_passages(self, item: Item) -> Iterator[Match]:
        """Splits an item into passages; counts words there and in what it answers."""
        about = f"{item.label} {item.args} "
        last = len(item.text) - _OVERLAP_CHARS
        for start in range(0, max(1, last), _PASSAGE_CHARS - _OVERLAP_CHARS):
            text = item.text[start : start + _PASSAGE_CHARS].lower()
            hits: dict[str, int] = {}
            for word in _WORD.findall(about.lower() + text):
                is_near = word[:3] in self._openings or not word.isascii()
                if is_near and (term := self._stem(word)) in self._stems:
                    hits[term] = hits.get(term, 0) + 1
            yield Match(item, start, text, hits)

    def count_typed(self, passages: Sequence[Match]) -> None:
        """Counts what is no plain word, and parts of words where no word was found."""
        found = {term for passage in passages for term in passage.hits}
        missing = {term for term in self._typed if self._stem(term) not in found}
        sought = {t for t in missing if len(t) >= 5 or not t.isalpha()} | self._pairs
        for passage in passages if sought else ():
            for term in sought:
                if count := passage.text.count(term):
                    is_whole = term in self._typed and re.search(
                        rf"(?<!\w){re.escape(term)}(?!\w)", passage.text
                    )
                    passage.hits[term] = count + bool(is_whole)


def _stem(word: str) -> str:
    """A word without accents and common English endings."""
    if not word.isascii():
        word = "".join(filter(str.isalnum, unicodedata.normalize("NFKD", word[:40])))
    stem = re.sub(r"([b-df-km-rtv-x])\1$", r"\1", re.sub(_ENDING, "", word))
    return stem[:-1] + "i" if len(stem) > 3 and stem[-1] == "y" else stem
