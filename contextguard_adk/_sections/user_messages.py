"""The user's messages beside a summary: whole, or their most telling sentences.

After the summary stands the continuation: it quotes the user's current request, so this
section does not show the request. "Covered" messages are those that the summary
replaces.
"""

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
"""If some messages are shortened, those that stay whole take at most this part."""

MAX_STORED_BYTES = 6 * 1024
"""The most that the excerpts in session state take, before they are JSON."""

MAX_SENTENCE_CHARS = 240
"""A longer sentence is split at words; a shorter message is not split at all."""

MAX_HEADING_BYTES = 100
"""The most that is repeated of a heading, before each sentence below it."""

MAX_READ_BYTES = 16 * 1024
"""Only an excerpt of this size is read of a longer message: it has pasted text."""

LINE_BYTES = 3
"""In the list, a text has a dash and a space before it, and a line break after it."""

MARGIN_BYTES = 2
"""In the list, each further line of a text has two spaces before it."""

FIRST_MARKS_BYTES = 8
"""The first kept sentence of a text has a mark before it and one after it.

Each of these marks takes 3 bytes, and a space.
"""

NEXT_MARK_BYTES = 5 - LINE_BYTES
"""A further kept sentence of a text has a mark of 3 bytes and two spaces before it.

It begins no new line in the list, but is measured as if it did.
"""

RARE_WEIGHT = 3.0
"""Points of a sentence whose words stand in no other sentence."""

NAME_WEIGHT = 2.0
"""The most points of a sentence that names something: a number, a path, a quote."""

COMMAND_POINTS = 2
"""Points of a sentence with a word such as "never" or "always"."""

EXCLAMATION_POINTS = 2
"""Points of a sentence that ends with an exclamation mark."""

BYTES_A_POINT = 100
"""A sentence loses a point for so many bytes: a short one tells more in its room."""

_GAP = "…"
"""The mark in place of sentences that are left out."""

_SENTENCE = re.compile(r"(?<=[.!?…;])(?<!^\d\.)\s+|(?<=[。！？；।])")  # noqa: RUF001
"""Where a line is split into sentences, but not behind the "1." of a list item."""

_ITEM = re.compile(r"[-*•–]|\d{1,3}[.)]")  # noqa: RUF001
"""The beginning of a list item, such as "-" or "2)"."""

_WORD = re.compile(r"[^\s\d.,;:!?\"'()।、。]{3,}")
_NAME = re.compile(r"[\d_/\\@#`]|\b[A-Z]{2,}|[\"“”«»„「『]")
"""A sign that a sentence names something exactly: a digit, a path, a quotation mark."""

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


class _Stored(BaseModel):
    """The stored value of the section, with which the messages are shown again.

    Attributes:
        max_bytes: The most that the shown messages may take.
        request_fingerprint: The fingerprint, in hex, of the covered request, which the
            continuation quotes; "" if no covered message is the request.
        digest: A hash of the other messages; "" if later requests may have fewer or
            other messages.
        excerpts: Excerpts of the messages. If there is a `request_fingerprint`, the
            last one is of that request.
    """

    max_bytes: int = Field(default=0, ge=0, le=200_000, alias="bytes")
    request_fingerprint: str = Field(default="", alias="quoted")
    digest: str = ""
    excerpts: list[str] = []

    def excerpts_without(self, request_fingerprint: str) -> list[str]:
        """Returns the excerpts of all messages but this request; "" for no request."""
        if request_fingerprint and request_fingerprint == self.request_fingerprint:
            return self.excerpts[:-1]
        return self.excerpts


class _Request(NamedTuple):
    """The current request, if it is covered; else both texts are "".

    Attributes:
        text: The text of the request.
        fingerprint: The fingerprint of the request, in hex.
    """

    text: str
    fingerprint: str


class UserMessages(Section):
    """Shows the covered messages of the user, in the user's own words.

    The messages are read from the covered contents of each request. A later request may
    have fewer or other contents: the history is loaded in part, or another plugin
    rewrites it. Then excerpts in session state are shown instead.
    """

    name = "user_messages"
    label = "the user's messages beside the summary"
    goes_at = 3

    def write(
        self, turn: Turn, covered: frozenset[int], known: JsonValue, room_tokens: int
    ) -> JsonValue:
        """Returns the fields of `_Stored`, by their aliases."""
        history = turn.history
        user_indexes = covered.intersection(history.user_messages)

        # The continuation quotes the current request, so the list does not show it.
        request = _read_request(history, user_indexes)
        listed_indexes = user_indexes - {history.request_index}

        older_texts: list[str] = []
        if history.is_partial:
            # Messages that are not loaded any more are known by their excerpts alone.
            stored = _read(known)
            if stored.excerpts:
                older_texts = stored.excerpts_without(request.fingerprint)
                listed_indexes -= history.covered
        texts = (*older_texts, *_read_texts(history, listed_indexes))

        max_bytes = fit_bytes(
            turn.user_tokens,
            turn.correction,
            write=lambda size_bytes: _write_lines(condense(texts, size_bytes)),
            count=turn.count,
        )

        # The room has four bytes a token. Escapes in JSON may double the size of texts,
        # so the excerpts take half of the room before they are JSON.
        half_room_bytes = 2 * room_tokens
        excerpt_bytes = min(MAX_STORED_BYTES, max_bytes, half_room_bytes)
        excerpts = _fit_as_json(condense(texts, excerpt_bytes), 2 * excerpt_bytes)
        if request.text:
            # A later continuation cannot quote a request that is not loaded.
            excerpts.append(excerpt(request.text, excerpt_bytes // 4))
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

        Returns "" if there is no message.
        """
        stored = _read(value)
        user_indexes = {*covered}.intersection(history.user_messages)

        # If several messages equal the request, the continuation quotes the newest.
        quoted_indexes = [
            index
            for index in user_indexes
            if history.fingerprint(index).hex() == stored.request_fingerprint
        ]
        quoted_index = max(quoted_indexes, default=None)
        texts = _read_texts(history, user_indexes - {quoted_index})

        # After a rewind fewer messages are covered, but none of them is missing.
        has_digest = stored.digest != ""
        has_all = has_digest and history.is_rewound and not history.is_partial
        if has_all or _digest(texts) == stored.digest:
            shown: Sequence[str] = condense(texts, stored.max_bytes)
        elif quoted_index is not None:
            shown = stored.excerpts_without(stored.request_fingerprint)
        else:
            # The continuation quotes nothing, so the request is shown here, if any.
            shown = stored.excerpts

        if not shown:
            return ""
        return f"{USER_MESSAGES}\n{_write_lines(shown)}"


def _read(value: JsonValue) -> _Stored:
    """Reads a stored value, which anybody may have written to session state.

    Older releases stored only the list of excerpts.
    """
    fields = value if isinstance(value, dict) else {"excerpts": value}
    try:
        return _Stored.model_validate(fields, strict=True)
    except ValidationError:
        return _Stored()


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
    """Returns the texts that fit as JSON: the first text and the newest ones.

    The first text is the user's task, so it is the last one that is dropped.
    """
    kept = [*texts]
    while kept and len(json.dumps(kept)) > max_bytes:
        oldest_after_task = 1 if len(kept) > 1 else 0
        del kept[oldest_after_task]
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

    A long text may become "First read the docs. … Never delete a file! …".
    """
    sizes_bytes = _measure_lines(texts)
    if sum(sizes_bytes) <= max_bytes:
        return texts

    older_count = _count_older(sizes_bytes, int(max_bytes * WHOLE_RATIO))
    room_bytes = max_bytes - sum(sizes_bytes[older_count:])
    split = [_split(text) for text in texts]
    kept_numbers = _choose_sentences(split, older_count, room_bytes)

    shortened = [
        _join(sentences, sorted(numbers))
        for sentences, numbers in zip(split[:older_count], kept_numbers, strict=True)
        if numbers
    ]
    return (*shortened, *texts[older_count:])


def _choose_sentences(
    split: Sequence[Sequence[str]], older_count: int, room_bytes: int
) -> list[list[int]]:
    """Chooses the most telling sentences of the older texts, while they have room.

    No sentence is shown twice.

    Args:
        split: The sentences of every text, the oldest text first.
        older_count: How many texts are shortened; the texts after them stay whole.
        room_bytes: The most that the shortened texts may take.

    Returns:
        For each older text, the numbers of the chosen sentences in the text.
    """
    older = split[:older_count]
    older_sizes_bytes = [_measure_lines(sentences) for sentences in older]
    shown_sentences = set(itertools.chain.from_iterable(split[older_count:]))
    kept_numbers: list[list[int]] = [[] for _ in older]

    left_bytes = room_bytes
    for text_number, sentence_number in _rank(split, older_count):
        is_first_of_text = not kept_numbers[text_number]
        marks_bytes = FIRST_MARKS_BYTES if is_first_of_text else NEXT_MARK_BYTES
        cost_bytes = older_sizes_bytes[text_number][sentence_number] + marks_bytes

        sentence = older[text_number][sentence_number]
        if cost_bytes <= left_bytes and sentence not in shown_sentences:
            left_bytes -= cost_bytes
            shown_sentences.add(sentence)
            kept_numbers[text_number].append(sentence_number)
    return kept_numbers


def _count_older(sizes_bytes: Sequence[int], max_whole_bytes: int) -> int:
    """Returns how many texts stand before the newest ones, which stay whole.

    The newest texts are as many as take at most `max_whole_bytes` together.

    Args:
        sizes_bytes: The size of each text, the oldest first.
        max_whole_bytes: The most that the newest texts take.
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

    Every sentence of a long history is measured, so one call measures all texts.
    """
    return [
        len(text.encode("utf-8", "replace"))
        + MARGIN_BYTES * text.count("\n")
        + LINE_BYTES
        for text in texts
    ]


def _split(text: str) -> list[str]:
    """Splits a text into sentences; a short text is returned whole.

    A heading is a sentence that ends with a colon at the end of its line. It is put
    before each sentence of the next line, and of list items after that line: "Never do
    this:" over "- Delete files." gives "Never do this: - Delete files.". Without the
    heading, the item could be taken for an order.
    """
    if len(text.encode("utf-8", "replace")) <= MAX_SENTENCE_CHARS:
        return [text]

    result: list[str] = []
    heading = ""  # The heading above the line that is read; "" for none.
    follows_heading = False  # Whether the line before ended with the heading.
    for line in excerpt(text, MAX_READ_BYTES).splitlines():
        # The excerpt has a gap, which is no sentence.
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

    # No sentence repeats a heading in the last line.
    if follows_heading:
        result.append(heading)
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
        words: The words of three and more letters, in lower case.
        has_name: Whether it names something exactly: a number, a path, a quoted text.
        bonus_points: The points for a command and for an exclamation mark.
        size_bytes: The length of the sentence.
    """

    words: frozenset[str]
    has_name: bool
    bonus_points: int
    size_bytes: int


class _Place(NamedTuple):
    """The place of a sentence: the number of its text, and its number in that text."""

    text_number: int
    sentence_number: int


@lru_cache(maxsize=1_024)  # Each summary ranks the sentences of those before it.
def _read_sentence(sentence: str) -> _Sentence:
    """Finds the properties that decide the rank of a sentence."""
    is_exclamation = sentence.endswith(("!", "！"))  # noqa: RUF001
    command_points = COMMAND_POINTS if _COMMAND.search(sentence) else 0
    exclamation_points = EXCLAMATION_POINTS if is_exclamation else 0
    return _Sentence(
        words=frozenset(_WORD.findall(sentence.lower())),
        has_name=_NAME.search(sentence) is not None,
        bonus_points=command_points + exclamation_points,
        size_bytes=len(sentence.encode("utf-8", "replace")),
    )


def _rank(split: Sequence[Sequence[str]], older_count: int) -> list[_Place]:
    """Returns the places of the sentences in older texts, the most telling first.

    Args:
        split: The sentences of every text, the oldest text first.
        older_count: How many texts are ranked, from the first one on. The other texts
            only show which words are rare.
    """
    read = [[_read_sentence(sentence) for sentence in sentences] for sentences in split]
    use_counts = Counter[str]()  # How many sentences of all texts have a word.
    for sentences in read:
        for sentence in sentences:
            use_counts.update(sentence.words)

    points: dict[_Place, float] = {}
    for text_number, sentences in enumerate(read[:older_count]):
        for sentence_number, score in enumerate(_score(sentences, use_counts)):
            points[_Place(text_number, sentence_number)] = score
    return sorted(points, key=points.__getitem__, reverse=True)


def _score(sentences: Sequence[_Sentence], use_counts: Counter[str]) -> list[float]:
    """Returns the points of each sentence of a text; a telling sentence has many.

    Args:
        sentences: All sentences of the text.
        use_counts: How many sentences of all texts have a word, by the word.
    """
    # If most sentences name something, as in a log, a name tells little. In a text of
    # at most three sentences a name counts in full.
    name_points = NAME_WEIGHT
    if len(sentences) > 3:
        named_count = sum(1 for each in sentences if each.has_name)
        name_points = NAME_WEIGHT * (1 - named_count / len(sentences))

    scores = []
    for sentence in sentences:
        rare_count = sum(1 for word in sentence.words if use_counts[word] == 1)
        score = RARE_WEIGHT * rare_count / max(1, len(sentence.words))
        if sentence.has_name:
            score += name_points
        length_points = sentence.size_bytes / BYTES_A_POINT
        scores.append(score + sentence.bonus_points - length_points)
    return scores


def _join(sentences: Sequence[str], numbers: Sequence[int]) -> str:
    """Joins the sentences with these numbers; "…" stands for sentences left out.

    An example: the numbers 1 and 2 of four sentences give "… Second. Third. …".
    """
    pieces = []
    next_number = 0  # The number of the sentence after the last one that is joined.
    for number in numbers:
        if number > next_number:
            pieces.append(_GAP)
        pieces.append(sentences[number])
        next_number = number + 1
    if next_number < len(sentences):
        pieces.append(_GAP)
    return " ".join(pieces)
