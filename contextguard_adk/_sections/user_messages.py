"""The user's messages beside a summary: whole, or their most telling sentences."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from pydantic import BaseModel, Field, JsonValue, ValidationError

from contextguard_adk._history.contents import content_text
from contextguard_adk._history.history import History
from contextguard_adk._measuring.budgets import excerpt, fit_bytes
from contextguard_adk._support.phrases import USER_MESSAGES, quote
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section

WHOLE_RATIO = 0.5
"""Where some messages are shortened, the whole ones take at most this part."""

MAX_STORED_BYTES = 6 * 1024
"""The most that the excerpts in session state take, before they are JSON."""

MAX_SENTENCE_CHARS = 240
MAX_HEADING_BYTES = 100
"""The most that is repeated of a heading, before each sentence below it."""

MAX_READ_BYTES = 16 * 1024
"""Only an excerpt of this size is read of a longer message: it has pasted text."""

FIRST_MARKS_BYTES = 8
"""The first kept sentence of a text has a mark before it and one after it.

Each of these marks takes 3 bytes, and a space.
"""

NEXT_MARK_BYTES = 2
"""A mark and two spaces before another kept sentence of a text take 5 bytes.

The measured size has 3 bytes for a dash and a line break, which it does not need.
"""

_GAP = "…"
_SENTENCE = re.compile(r"(?<=[.!?…;])(?<!^\d\.)\s+|(?<=[。！？；।])")  # noqa: RUF001
_ITEM = re.compile(r"[-*•–]|\d{1,3}[.)]")  # noqa: RUF001
_WORD = re.compile(r"[^\s\d.,;:!?\"'()।、。]{3,}")
_NAME = re.compile(r"[\d_/\\@#`]|\b[A-Z]{2,}|[\"“”«»„「『]")
_COMMAND = re.compile(
    # Words that mark a rule. A sentence in another language only lacks this bonus.
    r"\b(?:never|always|must|only|cannot|can't|don'?t|(?:do|may|should|shall) not|"
    r"nie|niemals|immer|nicht|kein\w*|muss\w*|müss\w*|darf\w*|dürf\w*|nur|jamais|"
    r"toujours|pas|doit|doivent|devez|faut|seulement|nunca|jamás|siempre|debe\w*|"
    r"solo|sólo|sempre|deve\w*|apenas|mai|не|никогда|всегда|нельзя|должн\w*|только|"
    r"nigdy|zawsze|asla|nooit|altijd|niet|geen|لا|أبدا|دائما|يجب|فقط)\b|"
    r"不要|不能|不得|必须|务必|绝不|切勿|禁止|始终|总是|只能|"
    r"必ず|決して|しないで|だけ|절대|항상|반드시|마세요|금지|कभी|हमेशा|\bमत |केवल",
    re.IGNORECASE,
)


class _Known(BaseModel):
    """A stored value, with which the messages are shown again.

    Attributes:
        max_bytes: The most that the shown messages may take.
        request_fingerprint: The fingerprint of the covered request, which the
            continuation after the summary quotes; "" for none.
        digest: A hash of the other messages; "" where later requests may lack some.
        excerpts: Excerpts of the messages. If there is a `request_fingerprint`, the
            last one is of that request.
    """

    max_bytes: int = Field(default=0, ge=0, le=200_000, alias="bytes")
    request_fingerprint: str = Field(default="", alias="quoted")
    digest: str = ""
    excerpts: list[str] = []

    def excerpts_beside(self, request_fingerprint: str) -> list[str]:
        """Returns the excerpts of all messages but a request; "" for no request."""
        if request_fingerprint and request_fingerprint == self.request_fingerprint:
            return self.excerpts[:-1]
        return self.excerpts


class _Request(NamedTuple):
    """The current request, if the summary replaces it; else both texts are "".

    Attributes:
        text: Its text.
        fingerprint: Its fingerprint.
    """

    text: str
    fingerprint: str


class UserMessages(Section):
    """Shows the user's messages that the summary replaces, in the user's own words.

    They are read from the covered contents. Stored excerpts stand in where these differ
    from the contents of `write`: the history is loaded in part, or another plugin
    rewrites it.
    """

    name = "user_messages"
    label = "the user's messages beside the summary"
    goes_at = 3

    def write(
        self, turn: Turn, covered: frozenset[int], known: JsonValue, room_tokens: int
    ) -> JsonValue:
        """Returns the size of the section, and excerpts of the messages.

        The keys of the result are those that `_Known` reads.
        """
        history = turn.history
        user_indexes = covered.intersection(history.user_messages)

        # The continuation quotes the current request, so the list does not show it.
        request = _read_request(history, user_indexes)
        new_indexes = user_indexes - {history.request_index}

        # Messages that are not loaded any more are known by their excerpts alone.
        older = _read(known)
        older_texts: list[str] = []
        if history.is_partial and older.excerpts:
            older_texts = older.excerpts_beside(request.fingerprint)
            new_indexes -= history.covered
        texts = (*older_texts, *_read_texts(history, new_indexes))

        max_bytes = fit_bytes(
            turn.user_tokens,
            turn.correction,
            write=lambda size_bytes: _write_lines(condense(texts, size_bytes)),
            count=turn.count,
        )

        # Session state has less room. Escapes in JSON may double the size of a text.
        stored_bytes = min(MAX_STORED_BYTES, max_bytes, 2 * room_tokens)
        excerpts = _fit_as_json(condense(texts, stored_bytes), 2 * stored_bytes)
        if request.text:
            excerpts.append(excerpt(request.text, stored_bytes // 4))
        return {
            "bytes": max_bytes,
            "quoted": request.fingerprint,
            "digest": _digest(texts) if history.repeats(user_indexes) else "",
            "excerpts": [*excerpts],
        }

    def render(
        self, value: JsonValue, history: History, covered: Collection[int]
    ) -> str:
        """Returns the messages, each after a dash, without the quoted request.

        The result is "" where there is no message. Stored excerpts are shown where the
        covered contents are not those of `write`.
        """
        known = _read(value)
        user_indexes = {*covered}.intersection(history.user_messages)

        # Of equal requests the newest one is quoted. It may not be covered any more.
        request_indexes = [
            index
            for index in user_indexes
            if history.fingerprint(index).hex() == known.request_fingerprint
        ]
        request_index = max(request_indexes, default=None)
        texts = _read_texts(history, user_indexes - {request_index})

        # After a rewind fewer messages are covered, but each of them is there.
        is_whole = history.is_rewound and known.digest and not history.is_partial
        if is_whole or _digest(texts) == known.digest:
            shown: Sequence[str] = condense(texts, known.max_bytes)
        elif request_index is None:
            shown = known.excerpts
        else:
            shown = known.excerpts_beside(known.request_fingerprint)

        if not shown:
            return ""
        return f"{USER_MESSAGES}\n{_write_lines(shown)}"


def _read(value: JsonValue) -> _Known:
    """Reads a stored value, which may be anybody's; older releases stored a list."""
    fields = value if isinstance(value, dict) else {"excerpts": value}
    try:
        return _Known.model_validate(fields, strict=True)
    except ValidationError:
        return _Known()


def _read_request(history: History, user_indexes: Collection[int]) -> _Request:
    """Returns the current request, if these messages have it and it has a text."""
    index = history.request_index
    if index is None or index not in user_indexes:
        return _Request(text="", fingerprint="")

    text = content_text(history.told[index]).strip()
    fingerprint = history.fingerprint(index).hex() if text else ""
    return _Request(text, fingerprint)


def _read_texts(history: History, indexes: Collection[int]) -> tuple[str, ...]:
    """Returns the texts of messages in their order, without empty ones."""
    texts = (content_text(history.told[index]).strip() for index in sorted(indexes))
    return tuple(text for text in texts if text)


def _write_lines(texts: Sequence[str]) -> str:
    lines = []
    for text in texts:
        # A client that writes JSON as UTF-8 cannot send half of a surrogate pair.
        clean = text.encode("utf-8", "replace").decode()
        lines.append("- " + "\n  ".join(quote(clean).splitlines()))
    return "\n".join(lines)


def _fit_as_json(texts: Sequence[str], max_bytes: int) -> list[str]:
    """Returns texts without the oldest ones, so that the others fit as JSON.

    The first text is the user's task, so it is the last one that is dropped.
    """
    kept = [*texts]
    while kept and len(json.dumps(kept)) > max_bytes:
        oldest = 1 if len(kept) > 1 else 0
        del kept[oldest]
    return kept


def _digest(texts: Sequence[str]) -> str:
    joined = b"\0".join(text.encode("utf-8", "replace") for text in texts)
    return hashlib.blake2b(joined, digest_size=8).hexdigest()


@lru_cache(maxsize=16)  # Every request repeats the messages before it.
def condense(texts: tuple[str, ...], max_bytes: int) -> tuple[str, ...]:
    """Returns texts that take at most `max_bytes` in a list, in their order.

    - If all texts fit, they are returned as they are.
    - Otherwise the newest texts stay whole, up to half of the room. Each older text is
      shortened to its most telling sentences, or left out.

    Sentences that command, forbid or name something have priority, and sentences with
    words that stand nowhere else. The sentences of one text stay in their order.
    """
    sizes_bytes = _measure_lines(texts)
    if sum(sizes_bytes) <= max_bytes:
        return texts

    older_count = _count_older(sizes_bytes, int(max_bytes * WHOLE_RATIO))
    split = [_split(text) for text in texts]
    # No sentence is shown twice.
    shown_sentences = set(itertools.chain.from_iterable(split[older_count:]))

    # The most telling sentences of all older texts are kept, while they fit.
    older = split[:older_count]
    older_sizes_bytes = [_measure_lines(sentences) for sentences in older]
    kept_numbers: list[list[int]] = [[] for _ in older]
    left_bytes = max_bytes - sum(sizes_bytes[older_count:])
    for text_number, sentence_number in _rank(split, older_count):
        marks_bytes = FIRST_MARKS_BYTES
        if kept_numbers[text_number]:
            marks_bytes = NEXT_MARK_BYTES
        cost_bytes = older_sizes_bytes[text_number][sentence_number] + marks_bytes

        sentence = older[text_number][sentence_number]
        if cost_bytes <= left_bytes and sentence not in shown_sentences:
            left_bytes -= cost_bytes
            shown_sentences.add(sentence)
            kept_numbers[text_number].append(sentence_number)

    shortened = [
        _join(sentences, sorted(numbers))
        for sentences, numbers in zip(older, kept_numbers, strict=True)
        if numbers
    ]
    return (*shortened, *texts[older_count:])


def _count_older(sizes_bytes: Sequence[int], max_whole_bytes: int) -> int:
    """Returns how many texts stand before the newest ones, which stay whole.

    The newest texts are as many as take at most `max_whole_bytes` together.
    """
    whole_bytes = 0
    older_count = len(sizes_bytes)
    for size_bytes in reversed(sizes_bytes):
        whole_bytes += size_bytes
        if whole_bytes > max_whole_bytes:
            break
        older_count -= 1
    return older_count


def _measure_lines(texts: Iterable[str]) -> list[int]:
    """Returns how many bytes each text takes in a list, its dash and margins included.

    Every sentence of a long history is measured, so this is one call for all of a text.
    """
    return [
        len(text.encode("utf-8", "replace")) + 2 * text.count("\n") + 3
        for text in texts
    ]


def _split(text: str) -> list[str]:
    """Splits a text into sentences; a short text is returned whole.

    A heading is a sentence that ends with a colon at the end of its line. The sentences
    of the next line, and of list items after that line, begin with the heading: "Never
    do this:" over "- Delete files." gives "Never do this: - Delete files.". Otherwise
    the item could be shown without its heading, and be taken for an order.
    """
    if len(text.encode("utf-8", "replace")) <= MAX_SENTENCE_CHARS:
        return [text]

    result: list[str] = []
    heading = ""  # The heading above the line that is read; "" for none.
    follows_heading = False  # Whether the line before ended with the heading.
    for line in excerpt(text, MAX_READ_BYTES).splitlines():
        pieces = _SENTENCE.split(line.strip())
        sentences = [piece.strip() for piece in pieces if piece.strip(f"{_GAP} ")]
        if not sentences:
            continue

        is_item = _ITEM.match(sentences[0]) is not None
        if not follows_heading and not is_item:
            heading = ""
        result += _put_below(heading, sentences)

        # A new heading does not stand by itself: the sentences below it repeat it.
        follows_heading = sentences[-1].endswith((":", "："))  # noqa: RUF001
        if follows_heading:
            heading = excerpt(result.pop(), MAX_HEADING_BYTES)

    if follows_heading:
        result.append(heading)  # It is the last line: no sentence repeats it.
    return result


def _put_below(heading: str, sentences: Iterable[str]) -> list[str]:
    """Returns the sentences, each after the heading; long ones are split at words.

    Dictated text has no punctuation, so one of its sentences may be very long.
    """
    pieces: list[str] = []
    for sentence in sentences:
        whole = f"{heading} {sentence}".strip()
        if len(whole) <= MAX_SENTENCE_CHARS:
            pieces.append(whole)
        else:
            pieces += textwrap.wrap(whole, MAX_SENTENCE_CHARS)
    return pieces


class _Sentence(NamedTuple):
    """The properties of a sentence that decide its rank.

    Attributes:
        words: Its words of three and more letters, in lower case.
        has_name: Whether it names something exactly: a number, a path, a quoted text.
        bonus: Points for a command and for an exclamation mark.
        size_bytes: Its length.
    """

    words: frozenset[str]
    has_name: bool
    bonus: int
    size_bytes: int


class _Place(NamedTuple):
    """The place of a sentence: the number of its text, and its number in that text."""

    text_number: int
    sentence_number: int


@lru_cache(maxsize=1_024)  # Each summary ranks the sentences of those before it.
def _read_sentence(sentence: str) -> _Sentence:
    """Finds the properties that decide the rank of a sentence."""
    command_bonus = 2 if _COMMAND.search(sentence) else 0
    exclamation_bonus = 2 if sentence.endswith(("!", "！")) else 0  # noqa: RUF001
    return _Sentence(
        words=frozenset(_WORD.findall(sentence.lower())),
        has_name=_NAME.search(sentence) is not None,
        bonus=command_bonus + exclamation_bonus,
        size_bytes=len(sentence.encode("utf-8", "replace")),
    )


def _rank(split: Sequence[Sequence[str]], text_count: int) -> list[_Place]:
    """Returns the places of the sentences in some texts, the most telling first.

    Args:
        split: The sentences of every text, the oldest text first.
        text_count: The number of texts that are ranked, from the first one on. The
            other texts only show which words are rare.
    """
    read = [[_read_sentence(sentence) for sentence in sentences] for sentences in split]
    uses = Counter[str]()  # The number of sentences with a word, by the word.
    for sentences in read:
        for sentence in sentences:
            uses.update(sentence.words)

    scores: dict[_Place, float] = {}
    for text_number, sentences in enumerate(read[:text_count]):
        for sentence_number, score in enumerate(_score(sentences, uses)):
            scores[_Place(text_number, sentence_number)] = score
    return sorted(scores, key=scores.__getitem__, reverse=True)


def _score(sentences: Sequence[_Sentence], uses: Counter[str]) -> list[float]:
    """Returns the points of each sentence of a text; a telling sentence has many.

    Args:
        sentences: All sentences of the text.
        uses: How many sentences of all texts have a word.
    """
    # Where most sentences name something, as in a log, a name says little. In a text of
    # at most three sentences it counts in full.
    name_bonus = 2.0
    if len(sentences) > 3:
        named_count = sum(1 for each in sentences if each.has_name)
        name_bonus = 2 * (1 - named_count / len(sentences))

    scores = []
    for sentence in sentences:
        rare_count = sum(1 for word in sentence.words if uses[word] == 1)
        score = 3 * rare_count / max(1, len(sentence.words))
        if sentence.has_name:
            score += name_bonus
        scores.append(score + sentence.bonus - sentence.size_bytes / 100)
    return scores


def _join(sentences: Sequence[str], numbers: Sequence[int]) -> str:
    """Joins the sentences with these numbers; "…" stands for sentences left out.

    An example: the numbers 1 and 2 of four sentences give "… Second. Third. …".
    """
    pieces = []
    last_number = -1
    for number in numbers:
        if number != last_number + 1:
            pieces.append(_GAP)
        pieces.append(sentences[number])
        last_number = number
    if last_number < len(sentences) - 1:
        pieces.append(_GAP)
    return " ".join(pieces)
