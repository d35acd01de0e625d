"""Ranks items by how well they match a query: BM25 over passages, words by stems."""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from contextguard_adk._history.text import Item

_PASSAGE_CHARS = 1_600
_OVERLAP_CHARS = 200
_K1 = 1.2  # Of BM25: how soon the repetition of a term stops to count.
_B = 0.5  # Of BM25: how much the length of a passage counts.
_NEIGHBOR_RATIO = 0.3
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
        words = [(word.start(), _stem(word[0])) for word in _WORD.finditer(self.text)]
        literal = [(self.text.find(term), term) for term in self.hits]
        spots = sorted(
            (start, term)
            for start, term in (*words, *literal)
            if start >= 0 and term in self.hits
        )

        def count_near(start: int) -> int:
            near = {term for at, term in spots if 0 <= at - start < _OVERLAP_CHARS}
            return len(near)

        starts = [start for start, _ in spots]
        return self.start + max(starts, key=count_near, default=0)


def rank_items(items: Sequence[Item], query: str) -> list[Match]:
    """Finds the items that match a query: the best passage of each, the best first.

    Those that hold the whole query as it was typed come before all others. No call into
    C reads more than a passage: no other thread runs while a regex does.
    """
    terms = _Terms(query.lower())
    groups = [list(terms.find_passages(item)) for item in items]
    passages = [passage for group in groups for passage in group]
    terms.count_typed(passages)

    weights = _weigh_terms(passages)
    _score_passages(passages, weights)
    best = [max(group, key=lambda match: match.score) for group in groups]
    _add_scores_of_neighbors(best)

    least_weight = _MIN_WEIGHT_RATIO * max(weights.values(), default=0.0)
    matches = [
        match
        for match in best
        if any(weights[term] >= least_weight for term in match.hits)
    ]
    return sorted(
        matches, key=lambda match: (terms.phrase not in match.hits, -match.score)
    )


def _weigh_terms(passages: Sequence[Match]) -> dict[str, float]:
    """Weighs terms by rarity, as BM25 does, but squared: common ones count for less."""
    total = len(passages)
    counts = Counter(term for passage in passages for term in passage.hits)
    weights = dict[str, float]()
    for term, count in counts.items():
        rarity = math.log(1 + (total - count + 0.5) / (count + 0.5))
        weights[term] = rarity**2
    return weights


def _score_passages(passages: Sequence[Match], weights: Mapping[str, float]) -> None:
    """Scores each passage by the formula of BM25."""
    total = len(passages)
    total_chars = sum(len(passage.text) for passage in passages) or 1
    for passage in passages:
        relative_length = len(passage.text) * total / total_chars
        norm = _K1 * (1 - _B + _B * relative_length)
        for term, count in passage.hits.items():
            passage.score += weights[term] * count * (_K1 + 1) / (count + norm)


def _add_scores_of_neighbors(matches: Sequence[Match]) -> None:
    """Lets an answer profit from its question: it rarely repeats the words."""
    own_scores = [0.0, *(match.score for match in matches), 0.0]
    for index, match in enumerate(matches):
        before = own_scores[index]
        after = own_scores[index + 2]
        match.score += _NEIGHBOR_RATIO * (before + after)


class _Terms:
    """The terms of a query: words by their stems, and literally what was typed.

    Attributes:
        phrase: The whole query.
    """

    def __init__(self, query: str) -> None:
        self._stem = functools.lru_cache(100_000)(_stem)
        self._stems = {self._stem(word) for word in _WORD.findall(query)}
        self._openings = {stem[:3] for stem in self._stems}

        typed = [text.strip("\"'`.,:;!?()[]{}<>") for text in (query, *query.split())]
        self.phrase = typed[0]
        longest = sorted(typed, key=len)[-_MAX_TYPED:]
        self._typed = {term for term in longest if term}

        self._pairs = set[str]()  # Of characters, in scripts without blanks.
        for run in _UNSPACED.findall(query):
            pair_count = max(1, len(run) - 1)
            self._pairs.update(run[start : start + 2] for start in range(pair_count))

    def find_passages(self, item: Item) -> Iterator[Match]:
        """Splits an item into passages; counts words there and in what it answers."""
        about = f"{item.label} {item.args} ".lower()
        last = len(item.text) - _OVERLAP_CHARS
        for start in range(0, max(1, last), _PASSAGE_CHARS - _OVERLAP_CHARS):
            text = item.text[start : start + _PASSAGE_CHARS].lower()

            hits = dict[str, int]()
            for word in _WORD.findall(about + text):
                # Most words are told apart by their first letters, without a stem.
                if word.isascii() and word[:3] not in self._openings:
                    continue
                term = self._stem(word)
                if term in self._stems:
                    hits[term] = hits.get(term, 0) + 1
            yield Match(item, start, text, hits)

    def count_typed(self, passages: Sequence[Match]) -> None:
        """Counts what is no plain word, and parts of words where no word was found."""
        found = {term for passage in passages for term in passage.hits}
        missing = [term for term in self._typed if self._stem(term) not in found]
        telling = {term for term in missing if len(term) >= 5 or not term.isalpha()}
        sought = telling | self._pairs

        for passage in passages:
            for term in sought:
                count = self._count_term(term, passage.text)
                if count:
                    passage.hits[term] = count

    def _count_term(self, term: str, text: str) -> int:
        """Counts a term; where it was typed and is a whole word, once more."""
        count = text.count(term)
        if not count or term not in self._typed:
            return count
        is_whole = re.search(rf"(?<!\w){re.escape(term)}(?!\w)", text)
        return count + 1 if is_whole else count


def _stem(word: str) -> str:
    """Returns a word without accents and common English endings."""
    plain = word
    if not word.isascii():
        decomposed = unicodedata.normalize("NFKD", word[:40])
        plain = "".join(char for char in decomposed if char.isalnum())

    without_ending = re.sub(_ENDING, "", plain)
    stem = re.sub(r"([b-df-km-rtv-x])\1$", r"\1", without_ending)
    if len(stem) > 3 and stem[-1] == "y":
        return f"{stem[:-1]}i"
    return stem
