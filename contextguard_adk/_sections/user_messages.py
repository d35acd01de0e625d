"""The user's messages beside a summary: whole, or their most telling sentences."""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from pydantic import BaseModel, Field, JsonValue, ValidationError

from contextguard_adk._history.contents import content_text
from contextguard_adk._history.history import History
from contextguard_adk._measuring.budgets import excerpt
from contextguard_adk._support.phrases import USER_MESSAGES, quote
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section

WHOLE_RATIO = 0.5  # Of the budget for messages word for word, where some are shortened.
MAX_STORED_BYTES = 6 * 1024  # Of excerpts in session state, as JSON.
MAX_SENTENCE_CHARS = 240
MAX_HEADING_BYTES = 100  # Of a line with a colon, before each line below it.
MAX_READ_BYTES = 16 * 1024  # Of one message; longer ones have something pasted in.

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
        bytes: What the messages may take.
        quoted: The fingerprint of the request that is quoted elsewhere; "" for none.
        digest: A hash of the other messages; "" where later requests may lack some.
        excerpts: Excerpts of the messages; the last one is of a request that is quoted.
    """

    bytes: int = Field(default=0, ge=0, le=200_000)
    quoted: str = ""
    digest: str = ""
    excerpts: list[str] = []


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
        """Returns the size of the section, and excerpts of the messages."""
        history = turn.history
        user_indexes = covered.intersection(history.user_messages)

        # The current request is quoted elsewhere, so it is kept apart from the others.
        request_index = history.request_index
        request_texts: tuple[str, ...] = ()
        quoted = ""
        if request_index is not None and request_index in user_indexes:
            request_texts = _read_texts(history, [request_index])
        if request_index is not None and request_texts:
            quoted = history.fingerprint(request_index).hex()

        # Messages that are not loaded any more are known by their excerpts alone.
        before = _read(known)
        older_texts: list[str] = []
        new_indexes = user_indexes - {request_index}
        if history.is_partial and before.excerpts:
            older_texts = before.excerpts
            if quoted and before.quoted == quoted:
                older_texts = before.excerpts[:-1]  # The last one is of the request.
            new_indexes -= history.covered
        texts = (*older_texts, *_read_texts(history, new_indexes))

        # Three bytes a token are a first guess. What it gives is counted, and scaled.
        guess_bytes = int(turn.user_tokens * 3 / max(1.0, turn.correction))
        tokens = turn.count(_write_lines(condense(texts, guess_bytes)))
        max_bytes = guess_bytes
        if tokens > turn.user_tokens:
            max_bytes = int(guess_bytes * turn.user_tokens / tokens)

        stored_bytes = min(MAX_STORED_BYTES, max_bytes, 2 * room_tokens)
        # Quotes and control characters take more room in JSON.
        excerpts = _fit_as_json(condense(texts, stored_bytes), 2 * stored_bytes)
        request_excerpts = [excerpt(text, stored_bytes // 4) for text in request_texts]
        return {
            "bytes": max_bytes,
            "quoted": quoted,
            "digest": _digest(texts) if history.repeats(user_indexes) else "",
            "excerpts": [*excerpts, *request_excerpts],
        }

    def render(
        self, value: JsonValue, history: History, covered: Collection[int]
    ) -> str:
        """Returns the messages, each after a dash; nothing of the current request."""
        known = _read(value)
        user_indexes = {*covered}.intersection(history.user_messages)
        quoted_indexes = [
            index
            for index in user_indexes
            if history.fingerprint(index).hex() == known.quoted
        ]
        request_index = max(quoted_indexes, default=None)
        texts = _read_texts(history, user_indexes - {request_index})

        is_rewound = history.is_rewound and known.digest and not history.is_partial
        if is_rewound or _digest(texts) == known.digest:
            shown = condense(texts, known.bytes)
        elif request_index is None:
            shown = tuple(known.excerpts)
        else:
            shown = tuple(known.excerpts[:-1])

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


def _read_texts(history: History, indexes: Collection[int]) -> tuple[str, ...]:
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
    """Drops texts until the others fit; the first one is the task, and goes last."""
    kept = [*texts]
    while kept and len(json.dumps(kept)) > max_bytes:
        oldest = 1 if len(kept) > 1 else 0
        del kept[oldest]
    return kept


def _digest(texts: Sequence[str]) -> str:
    said = b"\0".join(text.encode("utf-8", "replace") for text in texts)
    return hashlib.blake2b(said, digest_size=8).hexdigest()


@lru_cache(maxsize=16)  # Every request repeats the messages before it.
def condense(texts: tuple[str, ...], max_bytes: int) -> tuple[str, ...]:
    """Keeps the newest texts whole, and of the others the most telling sentences.

    Sentences that command, forbid or name something have priority, as have those with
    words of their own. The sentences of one text stay in their order.
    """
    sizes_bytes = _measure_lines(texts)
    if sum(sizes_bytes) <= max_bytes:
        return texts

    # The newest texts stay whole, while they take half of the room.
    whole_bytes = 0
    first_whole = len(texts)
    for size_bytes in reversed(sizes_bytes):
        if whole_bytes + size_bytes > max_bytes * WHOLE_RATIO:
            break
        whole_bytes += size_bytes
        first_whole -= 1

    split = [_split(text) for text in texts]
    split_sizes_bytes = [_measure_lines(sentences) for sentences in split]
    kept_sentences = set[str]()  # None of them is shown twice.
    for sentences in split[first_whole:]:
        kept_sentences.update(sentences)

    # Of the older texts the best sentences stay, as many as fit: by the number of the
    # text, the numbers of its sentences.
    left_bytes = max_bytes - whole_bytes
    chosen = defaultdict[int, list[int]](list)
    for text_number, sentence_number in _rank(split, first_whole):
        sentence = split[text_number][sentence_number]
        mark_bytes = 2 if text_number in chosen else 8
        cost_bytes = split_sizes_bytes[text_number][sentence_number] + mark_bytes
        if cost_bytes <= left_bytes and sentence not in kept_sentences:
            left_bytes -= cost_bytes
            kept_sentences.add(sentence)
            chosen[text_number].append(sentence_number)

    shortened = [
        _join(split[text_number], sorted(chosen[text_number]))
        for text_number in sorted(chosen)
    ]
    return (*shortened, *texts[first_whole:])


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
    heading = ""  # That of the line that is read; "" for none.
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
        result.append(heading)  # Nothing has come below it.
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
    uses = Counter[str]()  # Of each word: the number of sentences with it.
    for sentences in read:
        for sentence in sentences:
            uses.update(sentence.words)

    scores: dict[_Place, float] = {}
    for text_number, sentences in enumerate(read[:text_count]):
        for sentence_number, score in enumerate(_score(sentences, uses)):
            scores[_Place(text_number, sentence_number)] = score
    return sorted(scores, key=scores.__getitem__, reverse=True)


def _score(sentences: Sequence[_Sentence], uses: Counter[str]) -> list[float]:
    """Returns the points of each sentence of a text; a telling one has many.

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
    """Joins the sentences with these numbers; a mark stands for sentences left out."""
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
