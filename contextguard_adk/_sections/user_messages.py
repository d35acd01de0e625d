"""The user's messages beside a summary: whole, or their most telling sentences."""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
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
    # Words of rules, of which a language need not be listed for the rest to work.
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
        said = covered.intersection(history.user_messages)
        request = said.intersection((history.request_index,))
        request_texts = _read_texts(history, request)
        quoted = ""
        for index in request:
            if request_texts:
                quoted = history.fingerprint(index).hex()

        before = _read(known)
        older: list[str] = []
        new = said - request
        if history.is_partial and before.excerpts:
            is_same_request = before.quoted == quoted != ""
            older = before.excerpts[:-1] if is_same_request else before.excerpts
            new -= history.covered
        texts = (*older, *_read_texts(history, new))

        max_bytes = int(turn.user_tokens * 3 / max(1.0, turn.correction))
        tokens = turn.count(_write_lines(condense(texts, max_bytes)))
        if tokens > turn.user_tokens:
            max_bytes = int(max_bytes * turn.user_tokens / tokens)

        stored_bytes = min(MAX_STORED_BYTES, max_bytes, 2 * room_tokens)
        # Quotes and control characters take more room in JSON.
        excerpts = _fit_as_json(condense(texts, stored_bytes), 2 * stored_bytes)
        excerpts += [excerpt(text, stored_bytes // 4) for text in request_texts]
        return {
            "bytes": max_bytes,
            "quoted": quoted,
            "digest": _digest(texts) if history.repeats(said) else "",
            "excerpts": [*excerpts],
        }

    def render(
        self, value: JsonValue, history: History, covered: Collection[int]
    ) -> str:
        """Returns the messages, each after a dash; nothing of the current request."""
        known = _read(value)
        said = {*covered}.intersection(history.user_messages)
        same = [i for i in said if history.fingerprint(i).hex() == known.quoted]
        request = max(same, default=None)
        texts = _read_texts(history, said - {request})

        is_rewound = history.is_rewound and known.digest and not history.is_partial
        excerpts = known.excerpts if request is None else known.excerpts[:-1]
        shown = tuple(excerpts)
        if is_rewound or _digest(texts) == known.digest:
            shown = condense(texts, known.bytes)
        return "\n".join([USER_MESSAGES, _write_lines(shown)]) if shown else ""


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
    sizes = [_line_bytes(text) for text in texts]
    if sum(sizes) <= max_bytes:
        return texts

    whole_bytes = 0
    first_whole = len(texts)
    for size_bytes in reversed(sizes):
        if whole_bytes + size_bytes > max_bytes * WHOLE_RATIO:
            break
        whole_bytes += size_bytes
        first_whole -= 1

    split = [_split(text) for text in texts]
    said = {sentence for sentences in split[first_whole:] for sentence in sentences}
    left_bytes = max_bytes - whole_bytes
    chosen = defaultdict[int, list[int]](list)
    for order, place in _rank(split, first_whole):
        sentence = split[order][place]
        mark_bytes = 2 if order in chosen else 8
        cost_bytes = _line_bytes(sentence) + mark_bytes
        if cost_bytes <= left_bytes and sentence not in said:
            left_bytes -= cost_bytes
            said.add(sentence)
            chosen[order].append(place)

    short = [_join(split[order], sorted(chosen[order])) for order in sorted(chosen)]
    return (*short, *texts[first_whole:])


def _line_bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace")) + 2 * text.count("\n") + 3


def _split(text: str) -> list[str]:
    """Splits a text into sentences; lines below a heading begin with that heading.

    Without it "Never do this:" could be left out, and the lines below be taken for
    orders.
    """
    if len(text.encode("utf-8", "replace")) <= MAX_SENTENCE_CHARS:
        return [text]

    pieces: list[str] = []
    heading = ""  # The line with a colon above, as long as it applies.
    is_below = False  # The line before is that heading.
    for line in excerpt(text, MAX_READ_BYTES).splitlines():
        sentences = _split_line(line.strip())
        if not sentences:
            continue

        is_item = _ITEM.match(sentences[0]) is not None
        above = heading if is_below or is_item else ""
        for sentence in sentences:
            pieces += _wrap(f"{above} {sentence}".strip())

        is_below = sentences[-1].endswith((":", "："))  # noqa: RUF001
        heading = excerpt(pieces.pop(), MAX_HEADING_BYTES) if is_below else above

    if is_below:
        pieces.append(heading)
    return pieces


def _split_line(line: str) -> list[str]:
    pieces = _SENTENCE.split(line)
    return [piece.strip() for piece in pieces if piece.strip(f"{_GAP} ")]


def _wrap(sentence: str) -> list[str]:
    """Splits a long sentence at words: dictated text has no punctuation."""
    if len(sentence) <= MAX_SENTENCE_CHARS:
        return [sentence]
    return textwrap.wrap(sentence, MAX_SENTENCE_CHARS)


class _Sentence(NamedTuple):
    """A sentence, with all that ranks it apart from the other sentences."""

    words: frozenset[str]
    has_name: bool
    bonus: int
    size_bytes: int


@lru_cache(maxsize=1_024)  # Each summary ranks the sentences of those before it.
def _read_sentence(sentence: str) -> _Sentence:
    command_bonus = 2 if _COMMAND.search(sentence) else 0
    exclamation_bonus = 2 if sentence.endswith(("!", "！")) else 0  # noqa: RUF001
    return _Sentence(
        words=frozenset(_WORD.findall(sentence.lower())),
        has_name=_NAME.search(sentence) is not None,
        bonus=command_bonus + exclamation_bonus,
        size_bytes=len(sentence.encode("utf-8", "replace")),
    )


def _rank(split: Sequence[Sequence[str]], count: int) -> list[tuple[int, int]]:
    """Orders the sentences of the first `count` texts, the most telling first.

    Returns the number of the text, and the place of the sentence in it.
    """
    read = [[_read_sentence(sentence) for sentence in sentences] for sentences in split]
    uses = Counter(word for found in read for each in found for word in each.words)

    scores: dict[tuple[int, int], float] = {}
    for order, sentences in enumerate(read[:count]):
        # Where everything is named, as in a log, names say nothing.
        named_count = sum(1 for each in sentences if each.has_name)
        is_long = len(sentences) > 3
        name_bonus = 2 * (1 - named_count / len(sentences)) if is_long else 2

        for place, sentence in enumerate(sentences):
            scores[order, place] = _score(sentence, name_bonus, uses)
    return sorted(scores, key=scores.__getitem__, reverse=True)


def _score(sentence: _Sentence, name_bonus: float, uses: Counter[str]) -> float:
    rare_count = sum(1 for word in sentence.words if uses[word] == 1)
    score = 3 * rare_count / max(1, len(sentence.words))
    if sentence.has_name:
        score += name_bonus
    return score + sentence.bonus - sentence.size_bytes / 100


def _join(sentences: Sequence[str], places: Sequence[int]) -> str:
    """Joins the sentences at these places, with a mark for those between them."""
    pieces = []
    before = -1
    for place in places:
        if place != before + 1:
            pieces.append(_GAP)
        pieces.append(sentences[place])
        before = place
    if before < len(sentences) - 1:
        pieces.append(_GAP)
    return " ".join(pieces)
