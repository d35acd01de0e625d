"""Ranks items by how well they match a query: BM25 over passages, words by stems.

A term of a query is one of these:

- the stem of a word, which is found in all words with this stem
- a literal term: a word as it was typed, or the whole query, which is found anywhere
- a pair of characters, in scripts that put no blanks between words
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from contextguard_adk._history.text import Item

_PASSAGE_CHARS = 1_600
_OVERLAP_CHARS = 200

_K1 = 1.2
"""The constant k1 of BM25: how soon the repetition of a term stops to count."""

_B = 0.5
"""The constant b of BM25: how much the length of a passage counts."""

_NEIGHBOR_RATIO = 0.3
"""An item gets this part of the scores of the items before and after."""

_MIN_WEIGHT_RATIO = 0.05
"""A term with less than this part of the largest weight finds nothing alone.

Such a term is "the" beside a rare word.
"""

_MAX_LITERALS = 12
"""So many of the longest words are literal terms too, beside their stems."""

_MIN_TELLING_CHARS = 5
"""A literal term of fewer letters stands within too many other words."""

_WORD = re.compile(r"[^\W_]+")
_ENDING = r"(?<=\w{3})(?:ing|ed|ly|ations?|ions?|ments?|ness|es?|(?<![siu])s)$"
# Scripts without blanks; and Korean, which joins endings to words.
_UNSPACED = re.compile(
    "[\u0e00-\u109f\u1780-\u17ff\u2e80-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff]+"
)


@dataclass(slots=True)
class Match:
    """A passage of an item, and how well it matches a query.

    Attributes:
        item: The item.
        start: Where the passage begins in the item's text, in characters.
        text: The passage in lower case.
        hits: The terms of the query in it, each with its count.
        score: The score by BM25; 0 until it is computed.
    """

    item: Item
    start: int
    text: str
    hits: dict[str, int]
    score: float = 0.0

    @property
    def position(self) -> int:
        """Where in the item's text most of the terms stand together, in characters."""
        stems = [
            _Spot(word.start(), _stem(word[0])) for word in _WORD.finditer(self.text)
        ]
        # A term that is no literal text of the passage has the start -1 here.
        literals = [_Spot(self.text.find(term), term) for term in self.hits]
        spots = sorted(
            spot
            for spot in (*stems, *literals)
            if spot.start >= 0 and spot.term in self.hits
        )

        def count_terms_behind(start: int) -> int:
            """Counts the different terms in the 200 characters from a place on."""
            end = start + _OVERLAP_CHARS
            return len({spot.term for spot in spots if start <= spot.start < end})

        starts = [spot.start for spot in spots]
        return self.start + max(starts, key=count_terms_behind, default=0)


class _Spot(NamedTuple):
    """A term of a query, and where it begins in the text of a passage."""

    start: int
    term: str


def rank_items(items: Sequence[Item], query: str) -> list[Match]:
    """Returns the best passage of each item that matches a query, the best first.

    Passages that hold the whole query as it was typed come before all others.

    Texts are searched passage by passage, because other threads have to wait while a
    regular expression runs.
    """
    terms = _Terms(query.lower())
    passages_by_item = [list(terms.split_into_passages(item)) for item in items]
    passages = [passage for group in passages_by_item for passage in group]
    terms.count_literals(passages)

    weights = _weigh_terms(passages)
    _score_passages(passages, weights)
    best_passages = [
        max(group, key=lambda passage: passage.score) for group in passages_by_item
    ]
    _add_scores_of_neighbors(best_passages)

    least_weight = _MIN_WEIGHT_RATIO * max(weights.values(), default=0.0)
    matches = [
        passage
        for passage in best_passages
        if any(weights[term] >= least_weight for term in passage.hits)
    ]
    return sorted(
        matches, key=lambda match: (terms.phrase not in match.hits, -match.score)
    )


def _weigh_terms(passages: Sequence[Match]) -> dict[str, float]:
    """Returns the weight of each term, its rarity by BM25.

    The rarity is squared, so that common words count for less than in BM25.
    """
    passage_counts = Counter(term for passage in passages for term in passage.hits)
    weights = dict[str, float]()
    for term, count_with in passage_counts.items():
        count_without = len(passages) - count_with
        rarity = math.log(1 + (count_without + 0.5) / (count_with + 0.5))
        weights[term] = rarity**2
    return weights


def _score_passages(passages: Sequence[Match], weights: Mapping[str, float]) -> None:
    """Adds the score by BM25 to each passage."""
    total_chars = sum(len(passage.text) for passage in passages) or 1
    for passage in passages:
        # 1.0 is the average length of a passage.
        relative_length = len(passage.text) * len(passages) / total_chars
        norm = _K1 * (1 - _B + _B * relative_length)
        for term, count in passage.hits.items():
            passage.score += weights[term] * count * (_K1 + 1) / (count + norm)


def _add_scores_of_neighbors(passages: Sequence[Match]) -> None:
    """Adds to each score a part of the scores of the items before and after.

    So an answer, which rarely repeats the words of its question, is found with it.
    """
    scores = [passage.score for passage in passages]
    scores_before = [0.0, *scores[:-1]]
    scores_after = [*scores[1:], 0.0]
    for passage, before, after in zip(
        passages, scores_before, scores_after, strict=False
    ):
        passage.score += _NEIGHBOR_RATIO * (before + after)


class _Terms:
    """The terms of a query, which is in lower case.

    Attributes:
        phrase: The whole query, without the punctuation around it.
    """

    def __init__(self, query: str) -> None:
        self._stem_cached = functools.lru_cache(100_000)(_stem)
        self._stems = {self._stem_cached(word) for word in _WORD.findall(query)}
        self._stem_openings = {stem[:3] for stem in self._stems}

        # The whole query is one literal term; each of its words is another.
        literals = [
            text.strip("\"'`.,:;!?()[]{}<>") for text in (query, *query.split())
        ]
        self.phrase = literals[0]
        longest_literals = sorted(literals, key=len)[-_MAX_LITERALS:]
        self._literals = {term for term in longest_literals if term}

        self._pairs = set[str]()
        for run in _UNSPACED.findall(query):
            pair_count = max(1, len(run) - 1)  # A single character stands for a pair.
            self._pairs.update(run[start : start + 2] for start in range(pair_count))

    def split_into_passages(self, item: Item) -> Iterator[Match]:
        """Yields the passages of an item, with counts of the stems of the query.

        The item's label and the arguments of its call count in each passage.
        """
        label_and_args = f"{item.label} {item.args} ".lower()
        end = max(1, len(item.text) - _OVERLAP_CHARS)  # An empty text has a passage.
        for start in range(0, end, _PASSAGE_CHARS - _OVERLAP_CHARS):
            text = item.text[start : start + _PASSAGE_CHARS].lower()

            hits = dict[str, int]()
            for word in _WORD.findall(label_and_args + text):
                # The first letters rule out most words, and stems take longer.
                if word.isascii() and word[:3] not in self._stem_openings:
                    continue
                stem = self._stem_cached(word)
                if stem in self._stems:
                    hits[stem] = hits.get(stem, 0) + 1
            yield Match(item, start, text, hits)

    def count_literals(self, passages: Sequence[Match]) -> None:
        """Adds the counts of literal terms and of pairs to the hits of each passage.

        Two kinds of literal terms are skipped: terms whose stem was found in a passage,
        which are counted already, and words of fewer than five letters.
        """
        found_terms = {term for passage in passages for term in passage.hits}
        sought = set(self._pairs)
        for term in self._literals:
            is_telling = len(term) >= _MIN_TELLING_CHARS or not term.isalpha()
            if is_telling and self._stem_cached(term) not in found_terms:
                sought.add(term)

        for passage in passages:
            for term in sought:
                count = self._count_literal(term, passage.text)
                if count:
                    passage.hits[term] = count

    def _count_literal(self, term: str, text: str) -> int:
        """Returns how often a text has a term, also within words.

        A literal term that stands somewhere as a whole word counts once more.
        """
        count = text.count(term)
        if not count or term not in self._literals:
            return count
        is_whole_word = re.search(rf"(?<!\w){re.escape(term)}(?!\w)", text)
        return count + 1 if is_whole_word else count


def _stem(word: str) -> str:
    """Returns a word without accents and common English endings."""
    plain = word
    if not word.isascii():
        decomposed = unicodedata.normalize("NFKD", word[:40])
        plain = "".join(char for char in decomposed if char.isalnum())

    without_ending = re.sub(_ENDING, "", plain)
    # "runn" of "running" -> "run"
    stem = re.sub(r"([b-df-km-rtv-x])\1$", r"\1", without_ending)
    if len(stem) > 3 and stem[-1] == "y":
        return f"{stem[:-1]}i"  # As "ies" leaves it: "query" and "queries" -> "queri".
    return stem
