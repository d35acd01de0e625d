"""Summaries by extraction, for benchmarks that look for facts in them.

What is shown is ranked by rarity, names, digits and fault words, statements before
code; nothing is known of the facts that a benchmark looks for.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from google.adk.models.llm_request import LlmRequest

from contextguard_adk.testing.provider import count_tokens, read_summary_material

SUMMARY_TOKENS = 1_000
"""The length of a summary whose request does not limit it."""

_LONG_LINE_CHARS = 240
_PIECE_CHARS = 100
# After a sentence, between the fields of JSON, at an escaped line break.
_PIECE_ENDS = re.compile(
    r'(?<=[.!?;])\s+|(?<=[\u3002\uff01\uff1f\uff1b])|(?<=[,}\]])\s*(?=["{])|\\n'
)
_WORD = re.compile(r"\w+(?:[./:@#+-]\w+)*")
_VARYING = re.compile(r"[^\W_]*\d[^\W_]*")
_NAME = re.compile(r"_|[./:@#+-]|[a-z][A-Z]")
_MAX_MISSES = 20
_SYMBOL = re.compile(r"[()\[\]{}=<>|\\/*`~^&%$#@+]")
# Chosen on the conversations of `benchmarks/compare.py`, whose facts are terse reports.
KNOWN_WEIGHT = 1.1  # Of a line of the summary before.
SYMBOL_WEIGHT = 2.0  # How much the share of code's symbols takes away.
MAX_NAMES = 3.5  # More names in a piece add nothing.
_FAULT = re.compile(r"error|exception|fail|denied|refused|fatal|warning", re.IGNORECASE)


class ExtractiveSummaries:
    """Answers requests for summaries, as `SimulatedLlm.summary_replies`."""

    def __init__(self) -> None:
        self._lines: Collection[str] = ()

    def __call__(self, request: LlmRequest) -> str:
        """Summarizes what a request shows; lines of the summary before weigh more."""
        summary = summarize(
            read_summary_material(request),
            request.config.max_output_tokens or SUMMARY_TOKENS,
            lambda text: count_tokens([text], None),
            self._lines,
        )
        self._lines = frozenset(summary.splitlines())
        return summary


def summarize(
    material: str,
    budget_tokens: int,
    count: Callable[[str], int],
    earlier: Collection[str] = (),
) -> str:
    """Picks the most telling pieces of a text, in their order, within a budget.

    A piece tells much when its words are rare in this text and name something:
    numbers, identifiers, paths, faults; and when it reads as a statement and not as
    code. Nothing is known of what a reader wants.

    Args:
        material: The text.
        budget_tokens: What the summary may take.
        count: Tokens of a text.
        earlier: Lines of the summary before, which are merged: they weigh more.
    """
    pieces = list(dict.fromkeys(_cut_pieces(material)))
    ranks = [
        rank * (KNOWN_WEIGHT if piece in earlier else 1)
        for piece, rank in zip(pieces, _rank_pieces(pieces), strict=True)
    ]
    best_first = sorted(range(len(pieces)), key=ranks.__getitem__, reverse=True)

    chosen = []
    left_tokens = budget_tokens
    misses = 0
    for index in best_first:
        cost_tokens = count(pieces[index]) + 1
        if cost_tokens <= left_tokens:
            chosen.append(index)
            left_tokens -= cost_tokens
        else:
            misses += 1
        if misses == _MAX_MISSES:
            break

    while chosen and count(_join(pieces, chosen)) > budget_tokens:
        chosen.pop()

    summary = _join(pieces, chosen or best_first[:1])
    while summary and count(summary) > budget_tokens:
        summary = summary[: len(summary) * 2 // 3]
    return summary


def _join(pieces: list[str], chosen: list[int]) -> str:
    return "\n".join(pieces[index] for index in sorted(chosen))


def _cut_pieces(material: str) -> Iterator[str]:
    for line in material.splitlines():
        stripped = line.strip()
        if len(stripped) > _LONG_LINE_CHARS:
            yield from _cut_line(stripped)
        elif stripped:
            yield stripped


def _cut_line(line: str) -> Iterator[str]:
    """Cuts a long line behind its sentences, and within those that are long."""
    piece = ""

    for field in _PIECE_ENDS.split(line):
        if piece and len(piece) + len(field) > _PIECE_CHARS:
            yield piece
            piece = ""
        *long_pieces, piece = _cut_to_length(f"{piece} {field}".strip())
        yield from long_pieces

    if piece:
        yield piece


def _cut_to_length(text: str) -> Iterator[str]:
    """Cuts off long pieces, at blanks where it has any; what is left comes last."""
    rest = text
    while len(rest) > _LONG_LINE_CHARS:
        blank = rest.rfind(" ", 1, _LONG_LINE_CHARS)
        cut = blank if blank > 0 else _LONG_LINE_CHARS
        yield rest[:cut]
        rest = rest[cut:].strip()
    yield rest


def _rank_pieces(pieces: list[str]) -> list[float]:
    """Scores pieces by their rare words and names, per word of their length."""
    spellings = [_WORD.findall(piece) for piece in pieces]
    vocabulary = {word for words in spellings for word in words}
    weights = {word: _weigh_name(word) for word in vocabulary}

    # What differs in its numbers only is the same word: rows of a table are alike.
    shape_of = {word: _VARYING.sub("0", word.lower()) for word in vocabulary}
    shapes = [{shape_of[word] for word in words} for words in spellings]
    highest = math.log(len(pieces) + 1)
    rarity = _weigh_rarity(shapes, highest)

    ranks = []
    for piece, words, piece_shapes in zip(pieces, spellings, shapes, strict=True):
        rarest = sorted(rarity[shape] for shape in piece_shapes)[-8:]
        names = min(sum(weights[word] for word in words), MAX_NAMES)
        faults = 0.5 if _FAULT.search(piece) else 0.0
        told = (sum(rarest) + (names + faults) * highest) / (len(piece_shapes) + 8)
        ranks.append(told * _weigh_form(piece))
    return ranks


def _weigh_rarity(shapes: list[set[str]], highest: float) -> dict[str, float]:
    """What a word tells that few pieces have; the rarest tells most."""
    frequency = Counter(shape for piece_shapes in shapes for shape in piece_shapes)
    return {shape: highest - math.log(n) for shape, n in frequency.items()}


def _weigh_form(piece: str) -> float:
    """The less, the more of a piece is symbols, as in code."""
    symbols = len(_SYMBOL.findall(piece)) / len(piece)
    return max(0.3, 1 - SYMBOL_WEIGHT * symbols)


def _weigh_name(word: str) -> float:
    if _VARYING.search(word):
        return 1
    return 0.4 if _NAME.search(word) else 0
