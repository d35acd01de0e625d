"""The user's messages beside a summary: whole, or their most telling sentences.

The continuation is a message after the summary. It quotes the user's current request,
so this section does not show the request. "Covered" messages are those that the summary
replaces. An index is the position of a message among the contents of the request.

The list of this section has a text for each message: "- " and the text. A text that is
shortened has the mark "…" in place of each gap.
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
"""If some texts are shortened, the texts that stay whole take at most this part of the
room.
"""

MAX_STORED_BYTES = 6 * 1024
"""The most that the excerpts in session state take, before they are JSON."""

MAX_SENTENCE_CHARS = 240
"""A longer sentence is split at words. A text of at most so many bytes is not split."""

MAX_HEADING_BYTES = 100
"""Only an excerpt of this size of a heading is repeated before the sentences below."""

MAX_READ_BYTES = 16 * 1024
"""Only an excerpt of this size is read of a longer text, which is mostly pasted."""

LINE_BYTES = 3
"""In the list, a text has a dash and a space before it, and a line break after it."""

MARGIN_BYTES = 2
"""In the list, each line of a text but the first one has two spaces before it."""

FIRST_MARKS_BYTES = 8
"""The room for the marks around the first sentence that is chosen of a text.

There may be a mark before and a mark after this sentence. Each mark takes 3 bytes, and
the space beside the mark one byte.
"""

NEXT_MARK_BYTES = 5 - LINE_BYTES
"""The room for the mark of each other sentence that is chosen of a text.

The mark takes 3 bytes, and two spaces beside it take 2 bytes. `LINE_BYTES` are
subtracted: `_measure_lines` adds them to each sentence, but only the first sentence of
a text begins a line.
"""

# The sentences with the most points are chosen.

RARE_WEIGHT = 3.0
"""Points of a sentence whose words all stand in no other sentence."""

NAME_WEIGHT = 2.0
"""Points of a sentence that names something: a number, a path, a quote.

They are fewer if many sentences of the same text name something.
"""

COMMAND_POINTS = 2
"""Points of a sentence with a word such as "never" or "always"."""

EXCLAMATION_POINTS = 2
"""Points of a sentence that ends with an exclamation mark."""

BYTES_A_POINT = 100
"""A sentence loses a point for so many bytes: a long sentence takes room of others."""

_GAP = "…"
"""The mark in place of sentences that are left out."""

_SENTENCE = re.compile(r"(?<=[.!?…;])(?<!^\d\.)\s+|(?<=[。！？；।])")  # noqa: RUF001
"""The places where a line is split into sentences.

A line is not split behind the "1." of a list item.
"""

_ITEM = re.compile(r"[-*•–]|\d{1,3}[.)]")  # noqa: RUF001
"""The beginning of a list item, such as "-" or "2)"."""

_WORD = re.compile(r"[^\s\d.,;:!?\"'()।、。]{3,}")
"""A word that may be rare: three and more characters without digits and marks."""

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
    """The stored value of the section, from which `render` makes the list.

    Attributes:
        max_bytes: The most bytes that the list may take.
        request_fingerprint: The fingerprint, in hex, of the request that was current
            when the value was written; "" if the request was not covered. The
            continuation quotes a covered request.
        digest: A hash of the other covered messages of the user. "" if it was known
            that later requests may have fewer or other messages.
        excerpts: Excerpts of the covered messages, the oldest first. If there is a
            `request_fingerprint`, the last excerpt is that of the request.
    """

    max_bytes: int = Field(default=0, ge=0, le=200_000, alias="bytes")
    request_fingerprint: str = Field(default="", alias="quoted")
    digest: str = ""
    excerpts: list[str] = []

    def excerpts_without(self, request_fingerprint: str) -> list[str]:
        """Returns the excerpts without the one of a request.

        Args:
            request_fingerprint: The fingerprint of the request, in hex. If it is "", or
                not that of the stored request, all excerpts are returned.
        """
        if request_fingerprint and request_fingerprint == self.request_fingerprint:
            return self.excerpts[:-1]
        return self.excerpts


class _Request(NamedTuple):
    """The current request.

    Attributes:
        text: The text of the request; "" if the request is not covered.
        fingerprint: The fingerprint of the request, in hex; "" without a text.
    """

    text: str
    fingerprint: str


class UserMessages(Section):
    """Shows the covered messages of the user, in the user's own words.

    Usually each request has all covered messages, and the list is made from them. But a
    later request may lack some of them, because the history is loaded in part, or have
    them in other words, because another plugin rewrites them. Then the excerpts in
    session state are shown instead.
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
            # Some messages of the last summary may not be loaded: only their excerpts
            # are known. So the excerpts stand for all messages of that summary, but the
            # excerpt of the current request is left out here, too.
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

        # A token of the room counts as four bytes, so this is half of the room. As
        # JSON, texts may take twice as many bytes, because some characters are escaped.
        half_room_bytes = 2 * room_tokens
        excerpt_bytes = min(MAX_STORED_BYTES, max_bytes, half_room_bytes)
        excerpts = _fit_as_json(condense(texts, excerpt_bytes), 2 * excerpt_bytes)
        if request.text:
            # If a later request does not load this message, no continuation can quote
            # it. Then the list shows this excerpt.
            excerpts.append(excerpt(request.text, excerpt_bytes // 4))
        # The digest of these texts helps only if later requests have the same messages.
        will_have_same = history.repeats(user_indexes)
        return {
            "bytes": max_bytes,
            "quoted": request.fingerprint,
            "digest": _digest(texts) if will_have_same else "",
            "excerpts": [*excerpts],
        }

    def render(
        self, value: JsonValue, history: History, covered: Collection[int]
    ) -> str:
        """Returns the list of the messages, without the request that is quoted.

        The list has one of these:

        - If the covered messages are the same as when the value was written: the
          messages, shortened by `condense`.
        - If the session has lost some of them by a rewind, and requests have the whole
          session: the messages that are left, shortened by `condense`.
        - Otherwise: the stored excerpts.

        Returns "" if there is no message.
        """
        stored = _read(value)
        user_indexes = {*covered}.intersection(history.user_messages)

        # The continuation quotes the stored request if this history has its message.
        # Several messages may equal the request. The newest of them is the quoted one.
        quoted_indexes = [
            index
            for index in user_indexes
            if history.fingerprint(index).hex() == stored.request_fingerprint
        ]
        quoted_index = max(quoted_indexes, default=None)
        texts = _read_texts(history, user_indexes - {quoted_index})

        # A digest was stored only if requests had the whole session.
        had_all = stored.digest != ""
        has_all_left = had_all and history.is_rewound and not history.is_partial
        if has_all_left or _digest(texts) == stored.digest:
            shown: Sequence[str] = condense(texts, stored.max_bytes)
        elif quoted_index is not None:
            shown = stored.excerpts_without(stored.request_fingerprint)
        else:
            # No continuation quotes the request, because its message is not loaded. So
            # all excerpts are shown. The last one is that of the request, if any.
            shown = stored.excerpts

        if not shown:
            return ""
        return f"{USER_MESSAGES}\n{_write_lines(shown)}"


def _read(value: JsonValue) -> _Stored:
    """Reads a stored value, which anybody may have written to session state.

    A value that is malformed is read as empty.
    """
    # Older releases stored nothing but the list of excerpts.
    fields = value if isinstance(value, dict) else {"excerpts": value}
    try:
        return _Stored.model_validate(fields, strict=True)
    except ValidationError:
        return _Stored()


def _read_request(history: History, user_indexes: Collection[int]) -> _Request:
    """Returns the current request, if its index is one of `user_indexes`.

    Otherwise, or if the request has no text, both fields of the result are "".
    """
    index = history.request_index
    if index is None or index not in user_indexes:
        return _Request(text="", fingerprint="")

    text = content_text(history.told[index]).strip()
    fingerprint = history.fingerprint(index).hex() if text else ""
    return _Request(text, fingerprint)


def _read_texts(history: History, indexes: Collection[int]) -> tuple[str, ...]:
    """Returns the texts of messages in the messages' order; leaves out empty texts."""
    texts = (content_text(history.told[index]).strip() for index in sorted(indexes))
    return tuple(text for text in texts if text)


def _write_lines(texts: Sequence[str]) -> str:
    """Writes the list: each text after a dash, with its other lines indented."""
    lines = []
    for text in texts:
        # A client that writes JSON as UTF-8 cannot send half of a surrogate pair.
        clean = text.encode("utf-8", "replace").decode()
        lines.append("- " + "\n  ".join(quote(clean).splitlines()))
    return "\n".join(lines)


def _fit_as_json(texts: Sequence[str], max_bytes: int) -> list[str]:
    """Drops texts until the others fit as JSON; [] if not even one text fits.

    The oldest texts are dropped first. The very first text is mostly the user's task,
    so it is dropped last of all.
    """
    kept = [*texts]
    while kept and len(json.dumps(kept)) > max_bytes:
        oldest_after_task = 1 if len(kept) > 1 else 0
        del kept[oldest_after_task]
    return kept


def _digest(texts: Sequence[str]) -> str:
    """Returns a hash of texts, in hex; it is never ""."""
    joined = b"\0".join(text.encode("utf-8", "replace") for text in texts)
    return hashlib.blake2b(joined, digest_size=8).hexdigest()


@lru_cache(maxsize=16)  # Each request renders the same messages again.
def condense(texts: tuple[str, ...], max_bytes: int) -> tuple[str, ...]:
    """Shortens texts so that their list takes at most `max_bytes`.

    - If all texts fit, they are returned as they are.
    - Otherwise the newest texts stay whole, up to half of `max_bytes`. Each older text
      is shortened to its most telling sentences, or left out if none of them fits. For
      example: "First read the docs. … Never delete a file! …".

    Args:
        texts: The texts, the oldest first.
        max_bytes: The most bytes of the list, without its heading.

    Returns:
        The texts that are left, in their order.
    """
    sizes_bytes = _measure_lines(texts)
    if sum(sizes_bytes) <= max_bytes:
        return texts

    older_count = _count_older(sizes_bytes, int(max_bytes * WHOLE_RATIO))
    # What the newest texts leave is for the sentences of the older texts.
    room_bytes = max_bytes - sum(sizes_bytes[older_count:])
    split = [_split(text) for text in texts]
    chosen_numbers = _choose_sentences(split, older_count, room_bytes)

    shortened = [
        _join(sentences, sorted(numbers))
        for sentences, numbers in zip(split[:older_count], chosen_numbers, strict=True)
        if numbers
    ]
    return (*shortened, *texts[older_count:])


def _choose_sentences(
    split: Sequence[Sequence[str]], older_count: int, room_bytes: int
) -> list[list[int]]:
    """Chooses the most telling sentences of the older texts, as long as they fit.

    A sentence is passed over if it has been chosen already, or stands in a text that
    stays whole.

    Args:
        split: The sentences of all texts, the oldest text first.
        older_count: How many of the texts, from the first one on, are older: these are
            shortened. The other texts stay whole.
        room_bytes: The most that the shortened texts may take.

    Returns:
        A list for each older text: the numbers of the chosen sentences within the text,
        from 0, the most telling sentence first. [] if none was chosen.
    """
    older = split[:older_count]
    older_sizes_bytes = [_measure_lines(sentences) for sentences in older]
    shown_sentences = set(itertools.chain.from_iterable(split[older_count:]))
    chosen_numbers: list[list[int]] = [[] for _ in older]

    left_bytes = room_bytes
    for text_number, sentence_number in _rank(split, older_count):
        is_first_of_text = not chosen_numbers[text_number]
        marks_bytes = FIRST_MARKS_BYTES if is_first_of_text else NEXT_MARK_BYTES
        cost_bytes = older_sizes_bytes[text_number][sentence_number] + marks_bytes

        # A sentence that is too long does not end the search: a shorter one may fit.
        sentence = older[text_number][sentence_number]
        if cost_bytes <= left_bytes and sentence not in shown_sentences:
            left_bytes -= cost_bytes
            shown_sentences.add(sentence)
            chosen_numbers[text_number].append(sentence_number)
    return chosen_numbers


def _count_older(sizes_bytes: Sequence[int], max_whole_bytes: int) -> int:
    """Returns how many of the texts are older, and so do not stay whole.

    The other texts are the newest ones: as many as take at most `max_whole_bytes`
    together.

    Args:
        sizes_bytes: The size of each text, the oldest first.
        max_whole_bytes: The most bytes of the newest texts together.
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
    """Returns how many bytes each text takes in the list, with its dash and margins.

    A long history has thousands of sentences: one call for all of them saves time.
    """
    return [
        len(text.encode("utf-8", "replace"))
        + MARGIN_BYTES * text.count("\n")
        + LINE_BYTES
        for text in texts
    ]


def _split(text: str) -> list[str]:
    """Splits a text into sentences. A short text is a single sentence.

    If the last sentence of a line ends with a colon, this sentence is a heading. The
    heading is put before each sentence of the next line, and before those of all list
    items that follow directly. For example, the lines "Never do this:" and "- Delete
    files." give the sentence "Never do this: - Delete files.". Without the heading, the
    item could be taken for an order.
    """
    if len(text.encode("utf-8", "replace")) <= MAX_SENTENCE_CHARS:
        return [text]

    result: list[str] = []
    heading = ""  # The heading for the sentences of the line; "" for none.
    follows_heading = False  # Whether the heading is the end of the line before.
    for line in excerpt(text, MAX_READ_BYTES).splitlines():
        # A piece that has nothing but the mark of the excerpt's gap is no sentence.
        pieces = _SENTENCE.split(line.strip())
        sentences = [piece.strip() for piece in pieces if piece.strip(f"{_GAP} ")]
        if not sentences:
            continue

        is_item = _ITEM.match(sentences[0]) is not None
        if not follows_heading and not is_item:
            heading = ""
        result += _put_below(heading, sentences)

        # The last sentence is taken back if it is a heading: it stands before the
        # sentences below, and not by itself. It begins with the heading above, if any.
        follows_heading = sentences[-1].endswith((":", "："))  # noqa: RUF001
        if follows_heading:
            heading = excerpt(result.pop(), MAX_HEADING_BYTES)

    # A heading without sentences below stands by itself.
    if follows_heading:
        result.append(heading)
    return result


def _put_below(heading: str, sentences: Iterable[str]) -> list[str]:
    """Returns the sentences, each after the heading; splits long ones at words.

    A sentence may be very long: dictated text has no punctuation.

    Args:
        heading: The heading; "" for none.
        sentences: The sentences of a line; not empty.
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
        has_name: Whether the sentence names something: a number, a path, a quoted text.
        command_points: The points for a command; 0 if it has none.
        exclamation_points: The points for an exclamation mark at the end; 0 without.
        size_bytes: The length of the sentence.
    """

    words: frozenset[str]
    has_name: bool
    command_points: int
    exclamation_points: int
    size_bytes: int


class _Place(NamedTuple):
    """The place of a sentence. Both numbers begin at 0.

    Attributes:
        text_number: The number of the text that has the sentence.
        sentence_number: The number of the sentence within this text.
    """

    text_number: int
    sentence_number: int


@lru_cache(maxsize=1_024)  # Each summary ranks the sentences of the last one again.
def _read_sentence(sentence: str) -> _Sentence:
    """Finds the properties that decide the rank of a sentence."""
    is_exclamation = sentence.endswith(("!", "！"))  # noqa: RUF001
    return _Sentence(
        words=frozenset(_WORD.findall(sentence.lower())),
        has_name=_NAME.search(sentence) is not None,
        command_points=COMMAND_POINTS if _COMMAND.search(sentence) else 0,
        exclamation_points=EXCLAMATION_POINTS if is_exclamation else 0,
        size_bytes=len(sentence.encode("utf-8", "replace")),
    )


def _rank(split: Sequence[Sequence[str]], older_count: int) -> list[_Place]:
    """Returns the places of all sentences in the older texts, the most telling first.

    Args:
        split: The sentences of all texts, the oldest text first.
        older_count: How many of the texts, from the first one on, are older. The other
            texts only help to find out which words are rare.
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
    # In a log, most sentences name something, so a name tells little: the points are
    # reduced by the part of the sentences with a name. A text of at most three
    # sentences is too short for such a part to mean anything.
    name_points = NAME_WEIGHT
    if len(sentences) > 3:
        named_count = sum(1 for each in sentences if each.has_name)
        name_points = NAME_WEIGHT * (1 - named_count / len(sentences))

    scores = []
    for sentence in sentences:
        rare_count = sum(1 for word in sentence.words if use_counts[word] == 1)
        score = RARE_WEIGHT * rare_count / max(1, len(sentence.words))
        bonus_points = name_points if sentence.has_name else 0
        score += bonus_points + sentence.command_points
        score += sentence.exclamation_points
        scores.append(score - sentence.size_bytes / BYTES_A_POINT)
    return scores


def _join(sentences: Sequence[str], numbers: Sequence[int]) -> str:
    """Joins some sentences of a text, with "…" for each gap between and around them.

    An example: the numbers 1 and 2 of four sentences give "… Second. Third. …".

    Args:
        sentences: All sentences of the text.
        numbers: The numbers of the sentences to join, from 0, in rising order.
    """
    pieces = []
    next_number = 0  # Without a gap, this is the number of the next sentence.
    for number in numbers:
        if number > next_number:
            pieces.append(_GAP)
        pieces.append(sentences[number])
        next_number = number + 1
    if next_number < len(sentences):
        pieces.append(_GAP)
    return " ".join(pieces)
