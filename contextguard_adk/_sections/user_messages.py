"""The user's messages beside a summary: whole, or their most telling sentences.

The continuation is a message after the summary. It quotes the user's current request,
so this section does not show the request. "Covered" messages are those that the summary
replaces. An index is the position of a message among the contents of the request.

The list of this section has a text for each message: "- " and the text. A text that is
shortened has the mark "…" in place of each gap.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from contextguard_adk._history.contents import content_text
from contextguard_adk._history.history import History
from contextguard_adk._measuring.budgets import excerpt
from contextguard_adk._support.phrases import USER_MESSAGES, quote
from contextguard_adk._turn.room import Room
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section

WHOLE_RATIO = 0.5
"""If some texts are shortened, the texts that stay whole take at most this part of the
room.
"""

MAX_STATE_BYTES = 48 * 1024
"""The most that the list takes in session state.

The list does not share the room of the other texts. A fifth of the events would not
hold the words of the user if they are most of a conversation.
"""

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


class UserMessages(Section):
    """Shows the covered messages of the user, in the user's own words.

    A session that is loaded in part lacks some of these messages. Then the list before
    stands for all messages of the summary before.
    """

    name = "user_messages"
    label = "the user's messages beside the summary"
    heading = USER_MESSAGES
    goes_at = 3
    token_ratio = 0.7
    own_state_bytes = MAX_STATE_BYTES

    def most_tokens(self, turn: Turn, covered: frozenset[int]) -> float:
        """Returns the limit that follows from the setting `user_messages`."""
        return turn.user_tokens

    def write(self, turn: Turn, covered: frozenset[int], known: str, room: Room) -> str:
        """Returns the list of the covered messages, without the current request.

        The continuation quotes the current request.
        """
        history = turn.history
        texts: list[str] = []
        listed_indexes = covered
        stored = history.stored
        if stored is not None and not history.is_whole:
            texts = _split_list(known)
            # The list before does not have the request that was current then.
            quoted_index = history.find_quoted(stored, history.covered)
            listed_indexes = covered - (history.covered - {quoted_index})
            if quoted_index is None and stored.request_excerpt:
                texts.append(stored.request_excerpt)

        user_indexes = listed_indexes.intersection(history.user_messages)
        texts += _read_texts(history, user_indexes - {history.request_index})
        # `Room.fill` begins with a low guess of the bytes. So it might shorten messages
        # that have room as they are.
        whole_bytes = sum(_measure_lines(texts))
        if whole_bytes <= room.state_bytes:
            whole = _write_list(texts, whole_bytes)
            if room.holds(whole):
                return whole
        return room.fill(lambda size_bytes: _write_list(texts, size_bytes))


def _split_list(text: str) -> list[str]:
    """Splits a list that `_write_list` has written into the texts of the messages."""
    lines_by_text: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("- "):
            lines_by_text.append([line.removeprefix("- ")])
        elif lines_by_text:
            # This line goes on with the text.
            lines_by_text[-1].append(line.removeprefix("  "))
    return ["\n".join(lines) for lines in lines_by_text]


def _write_list(texts: Sequence[str], max_bytes: int) -> str:
    """Writes the list with its heading; "" if no text fits.

    Args:
        texts: The texts of the messages, the oldest first.
        max_bytes: The most bytes of the list, without its heading.
    """
    shown = condense(texts, max_bytes)
    return f"{USER_MESSAGES}\n{_write_lines(shown)}" if shown else ""


def _read_texts(history: History, indexes: Collection[int]) -> list[str]:
    """Returns the texts of messages in the messages' order; leaves out empty texts."""
    texts = [content_text(history.told[index]).strip() for index in sorted(indexes)]
    return [text for text in texts if text]


def _write_lines(texts: Sequence[str]) -> str:
    """Writes the list: each text after a dash, with its other lines indented."""
    lines = []
    for text in texts:
        # A client that writes JSON as UTF-8 cannot send half of a surrogate pair.
        clean = text.encode("utf-8", "replace").decode()
        lines.append("- " + "\n  ".join(quote(clean).splitlines()))
    return "\n".join(lines)


def condense(texts: Sequence[str], max_bytes: int) -> Sequence[str]:
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
    return [*shortened, *texts[older_count:]]


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
