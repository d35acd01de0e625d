"""Ranks items by how well they match a query: BM25 over passages, words by stems.

An item is a message, a tool call, a tool's result or a file. A passage is a piece of
its text. A term of a query is one of these:

- the stem of a word, which is found in all words with this stem
- a literal term: a word as it was typed, or the whole query, which is found anywhere
- a pair of characters, in scripts that put no blanks between words

Queries and passages are compared in their folded form: see `fold`. Excerpts are made
from the texts as they are.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from contextguard_adk._history.text import Item
from contextguard_adk._support.folding import MARKS, find_unfolded, fold

_PASSAGE_CHARS = 1_600
"""The length of a passage."""

_OVERLAP_CHARS = 200
"""The number of characters at the end of a passage that the next passage repeats.

Without them a phrase could be cut in two.
"""

_CLUSTER_CHARS = 200
"""Terms stand together if they begin within this number of characters."""

_K1 = 1.2
"""The constant k1 of BM25: how soon another occurrence of a term adds little."""

_B = 0.5
"""The constant b of BM25: how much the length of a passage counts."""

_NEIGHBOR_RATIO = 0.3
"""This part of an item's score is added to the items before and after."""

_MIN_WEIGHT_RATIO = 0.05
"""A term with less than this part of the largest weight finds nothing alone.

An example is "the" beside a rare word.
"""

_MAX_LITERALS = 12
"""The most literal terms of a query. If there are more, the longest are taken."""

_MIN_TELLING_CHARS = 5
"""A literal term of fewer letters stands within too many other words."""

_PUNCTUATION = "\"'`.,:;!?()[]{}<>"
"""The signs that are removed from both ends of a literal term."""

_WORD = re.compile(rf"[\w{MARKS}]+")
"""A word of a text that `_part_names` returns."""

# An English ending after at least three letters; no "s" as in "class" or "status".
_ENDING = re.compile(
    r"(?<=\w{3})(?:ing|ed|ly|ations?|ions?|ments?|ness|es?|(?<![siu])s)$"
)
# A consonant that an ending has doubled: "runn" of "running", but not "call" or "pass",
# and not "add": a stem of two letters would begin unlike its word.
_DOUBLED = re.compile(r"(?<=\w\w)([b-df-km-rtv-x])\1$")
# Scripts without blanks; and Korean, which joins endings to words.
_UNSPACED = re.compile(
    "[\u0e00-\u109f\u1100-\u11ff\u1780-\u17ff\u2e80-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff]+"
)


@dataclass(slots=True)
class Match:
    """A passage of an item, and how well the passage matches a query.

    Attributes:
        item: The item.
        start: Where the passage begins in the item's text, in characters.
        text: The passage in its folded form.
        hits: The terms of the query that the passage has, each with its count.
        score: The score by BM25; 0 until it is computed.
    """

    item: Item
    start: int
    text: str
    hits: dict[str, int]
    score: float = 0.0

    @property
    def position(self) -> int:
        """Where in the item's text most of the terms stand together, in characters.

        Each term begins a cluster of `_CLUSTER_CHARS`. The position is the start of the
        cluster with the most different terms, or of the first one among equals. If the
        text of the passage has no term, the position is the start of the passage.
        """
        spots = self._find_spots()
        best_start = 0
        best_count = 0
        for first in spots:
            end = first.start + _CLUSTER_CHARS
            terms = {spot.term for spot in spots if first.start <= spot.start < end}
            if len(terms) > best_count:
                best_start = first.start
                best_count = len(terms)
        passage = self.item.text[self.start : self.start + _PASSAGE_CHARS]
        return self.start + find_unfolded(passage, best_start)

    def _find_spots(self) -> list[_Spot]:
        """Finds where the terms stand in the text of the passage, first spot first.

        A stem is found at each word that has the stem. Any other term is found only
        where it stands first.
        """
        spots = list[_Spot]()
        for word in _WORD.finditer(_part_names(self.text)):
            stem = _stem(word[0])
            if stem in self.hits:
                spots.append(_Spot(word.start(), stem))
        for term in self.hits:
            start = self.text.find(term)
            # A stem may be no part of the text: "queri" of "query".
            if start >= 0:
                spots.append(_Spot(start, term))
        return sorted(spots)


class _Spot(NamedTuple):
    """A term of a query, and where it begins in the text of a passage."""

    start: int
    term: str


def rank_items(items: Sequence[Item], query: str) -> list[Match]:
    """Returns the best passage of each item that matches a query, the best first.

    Passages that hold the whole query as it was typed come before all others.
    """
    terms = _Terms(fold(query))
    # Other threads wait while a regular expression runs. So a text is searched passage
    # by passage.
    passages_by_item = [list(terms.split_into_passages(item)) for item in items]
    all_passages = [passage for passages in passages_by_item for passage in passages]
    terms.add_literal_hits(all_passages)

    weights = _weigh_terms(all_passages)
    _score_passages(all_passages, weights)
    # Each item has at least one passage.
    best_passages = [max(passages, key=_get_score) for passages in passages_by_item]
    _add_scores_of_neighbors(best_passages)

    matches = _choose_matches(best_passages, weights)
    # Matches with equal scores stay in the order of their items.
    matches.sort(key=_get_score, reverse=True)
    with_phrase = [match for match in matches if terms.phrase in match.hits]
    without_phrase = [match for match in matches if terms.phrase not in match.hits]
    return [*with_phrase, *without_phrase]


def _get_score(passage: Match) -> float:
    return passage.score


def _choose_matches(
    passages: Sequence[Match], weights: Mapping[str, float]
) -> list[Match]:
    """Returns the passages with at least one term that is not too common.

    Common terms have small weights: see `_MIN_WEIGHT_RATIO`.
    """
    least_weight = _MIN_WEIGHT_RATIO * max(weights.values(), default=0.0)
    telling_terms = {term for term in weights if weights[term] >= least_weight}
    return [each for each in passages if not telling_terms.isdisjoint(each.hits)]


def _weigh_terms(passages: Sequence[Match]) -> dict[str, float]:
    """Returns the weight of each term: the square of its rarity by BM25.

    Because of the square, common words count for less than in BM25.
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
    lengths = [len(passage.text) for passage in passages]
    total_chars = max(1, sum(lengths))  # All texts may be empty.
    for passage in passages:
        # 1.0 is the average length of a passage.
        relative_length = len(passage.text) * len(passages) / total_chars
        length_norm = _K1 * (1 - _B + _B * relative_length)
        for term, count in passage.hits.items():
            passage.score += weights[term] * count * (_K1 + 1) / (count + length_norm)


def _add_scores_of_neighbors(passages: Sequence[Match]) -> None:
    """Adds to each score a part of the scores of the items before and after.

    An answer rarely repeats the words of its question. Because of the added part, a
    query that finds the question finds the answer higher up as well.

    `passages` has one passage for each item, in the order of the items.
    """
    scores = [passage.score for passage in passages]
    scores_before = [0.0, *scores[:-1]]
    scores_after = [*scores[1:], 0.0]
    for index, passage in enumerate(passages):
        neighbors_score = scores_before[index] + scores_after[index]
        passage.score += _NEIGHBOR_RATIO * neighbors_score


class _Terms:
    """The terms of a query, which is in its folded form.

    Attributes:
        phrase: The whole query, without the punctuation around it; "" if the query has
            nothing else.
    """

    def __init__(self, query: str) -> None:
        # A history repeats most of its words, and a stem takes long.
        self._stem_cached = functools.lru_cache(100_000)(_stem)
        words = _WORD.findall(_part_names(query))
        self._stems = {self._stem_cached(word) for word in words}
        self._candidates = _compile_candidates(self._stems)

        # The whole query is one literal term; each of its words is another.
        texts = [query, *query.split()]
        literals = [text.strip(_PUNCTUATION) for text in texts]
        self.phrase = literals[0]
        longest_literals = sorted(literals, key=len)[-_MAX_LITERALS:]
        self._literals = {term for term in longest_literals if term}

        self._pairs = set[str]()
        for run in _UNSPACED.findall(query):
            self._pairs.update(_list_pairs(run))

    def split_into_passages(self, item: Item) -> Iterator[Match]:
        """Yields the passages of an item, at least one.

        The hits of a passage are the stems of the query that it has. The words of the
        item's label and of its call's arguments count as words of each passage.
        """
        label_and_args = fold(f"{item.label} {item.args} ")
        # No passage begins in the last `_OVERLAP_CHARS` of the text, because the
        # passage before has all of them. An empty text has one passage.
        end = max(1, len(item.text) - _OVERLAP_CHARS)
        for start in range(0, end, _PASSAGE_CHARS - _OVERLAP_CHARS):
            text = fold(item.text[start : start + _PASSAGE_CHARS])
            hits = self._count_stems(label_and_args + text)
            yield Match(item, start, text, hits)

    def _count_stems(self, text: str) -> dict[str, int]:
        """Returns the stems of the query that a text has, each with its count."""
        hits = dict[str, int]()
        for word in self._candidates.findall(_part_names(text)):
            stem = self._stem_cached(word)
            if stem in self._stems:
                hits[stem] = hits.get(stem, 0) + 1
        return hits

    def add_literal_hits(self, passages: Sequence[Match]) -> None:
        """Adds the counts of literal terms and of pairs to the hits of each passage.

        Two kinds of literal terms are skipped:

        - A term whose stem is a hit of any of the passages is counted already.
        - A term of letters alone, fewer than five, stands within too many other words.
        """
        found_stems = {stem for passage in passages for stem in passage.hits}
        sought = set(self._pairs)
        for term in self._literals:
            is_telling = len(term) >= _MIN_TELLING_CHARS or not term.isalpha()
            if is_telling and self._stem_cached(term) not in found_stems:
                sought.add(term)

        for passage in passages:
            for term in sought:
                count = self._count_in_text(term, passage.text)
                if count:
                    passage.hits[term] = count

    def _count_in_text(self, term: str, text: str) -> int:
        """Returns how often a text has a literal term or a pair, also within words.

        The count of a literal term is one higher if the term stands anywhere as a whole
        word.
        """
        count = text.count(term)
        if not count or term not in self._literals:
            return count
        is_whole_word = re.search(
            rf"(?<![\w{MARKS}]){re.escape(term)}(?![\w{MARKS}])", text
        )
        return count + 1 if is_whole_word else count


def _compile_candidates(stems: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern for the words that may have one of some stems.

    A word begins like its stem, so the first three letters of the stems rule out most
    words of a text, in less time than it takes to list them.
    """
    openings = "|".join(re.escape(stem[:3]) for stem in stems)
    return re.compile(rf"(?<![\w{MARKS}])(?:{openings})[\w{MARKS}]*")


def _list_pairs(run: str) -> list[str]:
    """Returns the pairs of neighboring characters: "abc" -> "ab", "bc".

    A run of one character gives this character in place of a pair. `run` is not empty.
    """
    if len(run) == 1:
        return [run]
    return [first + second for first, second in pairwise(run)]


def _part_names(text: str) -> str:
    """Returns a text with a blank for each underscore: "user_id" is two words."""
    return text.replace("_", " ")


def _stem(word: str) -> str:
    """Returns a folded word without common English endings.

    "running" -> "run", "cities" -> "citi", "city" -> "citi".
    """
    without_ending = _ENDING.sub("", word)
    stem = _DOUBLED.sub(r"\1", without_ending)
    if len(stem) > 3 and stem[-1] == "y":
        # The stem of the plural ends in "i" too: "cities" loses its "es".
        return f"{stem[:-1]}i"
    return stem
