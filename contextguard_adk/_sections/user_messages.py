"""The user's messages, word for word as far as there is room, else by sentence."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
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
    """What session state holds: the room, what was said at the time, and excerpts."""

    bytes: int = Field(default=0, ge=0, le=200_000)
    quoted: str = ""  # The fingerprint of the request, which is quoted elsewhere.
    digest: str = ""  # Of the other texts; "" where they cannot be had again.
    excerpts: list[str] = []  # At last that of the request, if one is quoted.


class UserMessages(Section):
    """What the user wrote of what the summary replaces; no model writes or changes it.

    It follows from the covered contents. Excerpts stand in for these where they are not
    what they were: where the history is loaded in part, or another plugin rewrites it.
    """

    name = "user_messages"
    label = "the user's messages beside the summary"
    goes_at = 3

    def write(
        self, turn: Turn, covered: frozenset[int], known: JsonValue, room_tokens: int
    ) -> JsonValue:
        """Returns what the messages may take, and excerpts of them."""
        history = turn.history
        budget_tokens = turn.user_tokens
        said = covered.intersection(history.user_messages)
        request = said.intersection((history.request_index,))
        asked = _read_texts(history, request)
        quoted = "".join(history.fingerprint(i).hex() for i in request if asked)
        before = _read(known)
        older = list[str]()
        new = said - request
        if history.is_partial and before.excerpts:
            is_same = before.quoted == quoted != ""
            older = before.excerpts[:-1] if is_same else before.excerpts
            new -= history.covered
        texts = (*older, *_read_texts(history, new))
        max_bytes = int(budget_tokens * 3 / max(1.0, turn.correction))
        tokens = turn.count(_write_lines(condense(texts, max_bytes)))
        if tokens > budget_tokens:
            max_bytes = int(max_bytes * budget_tokens / tokens)
        room_bytes = min(MAX_STORED_BYTES, max_bytes, 2 * room_tokens)
        excerpts = [*condense(texts, room_bytes)]
        # Quotes and control characters take more room there. The first one is the task.
        while excerpts and len(json.dumps(excerpts)) > 2 * room_bytes:
            del excerpts[len(excerpts) > 1]
        excerpts += [excerpt(text, room_bytes // 4) for text in asked]
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
        same = (i for i in said if history.fingerprint(i).hex() == known.quoted)
        request = max(same, default=None)
        texts = _read_texts(history, said - {request})
        is_rewound = history.is_rewound and known.digest and not history.is_partial
        if is_rewound or _digest(texts) == known.digest:
            texts = condense(texts, known.bytes)
        else:
            end = None if request is None else -1
            texts = tuple(known.excerpts[:end])
        return "\n".join([USER_MESSAGES, _write_lines(texts)]) if texts else ""


def _read(value: JsonValue) -> _Known:
    """Reads what is stored, which may be anything; once it was the excerpts alone."""
    fields = value if isinstance(value, dict) else {"excerpts": value}
    try:
        return _Known.model_validate(fields, strict=True)
    except ValidationError:
        return _Known()


def _read_texts(history: History, indexes: Collection[int]) -> tuple[str, ...]:
    texts = (content_text(history.told[index]).strip() for index in sorted(indexes))
    return tuple(text for text in texts if text)


def _write_lines(texts: Sequence[str]) -> str:
    # A client that writes JSON as UTF-8 cannot send half of a surrogate pair.
    clean = (text.encode("utf-8", "replace").decode() for text in texts)
    return "\n".join("- " + "\n  ".join(quote(text).splitlines()) for text in clean)


def _digest(texts: Sequence[str]) -> str:
    said = b"\0".join(text.encode("utf-8", "replace") for text in texts)
    return hashlib.blake2b(said, digest_size=8).hexdigest()


@lru_cache(maxsize=16)  # Every request repeats the messages before it.
def condense(texts: tuple[str, ...], max_bytes: int) -> tuple[str, ...]:
    """Keeps the newest texts whole, and of the others the most telling sentences.

    Sentences that command, forbid or name something go before others, as do those whose
    words stand nowhere else; those of one text stand in their order.
    """
    sizes = [*map(_line_bytes, texts)]
    if sum(sizes) <= max_bytes:
        return texts
    ends = itertools.accumulate(reversed(sizes))
    first = len(texts) - sum(end <= max_bytes * WHOLE_RATIO for end in ends)
    room = max_bytes - sum(sizes[first:])
    split = [*map(_split, texts)]
    said = {sentence for sentences in split[first:] for sentence in sentences}
    chosen = defaultdict[int, list[int]](list)
    for order, place in _rank(split, first):
        sentence = split[order][place]
        cost = _line_bytes(sentence) + (2 if order in chosen else 8)
        if cost <= room and sentence not in said:
            room -= cost
            said.add(sentence)
            chosen[order].append(place)
    short = (" ".join(_join(split[i], sorted(chosen[i]))) for i in sorted(chosen))
    return *short, *texts[first:]


def _line_bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace")) + 2 * text.count("\n") + 3


def _split(text: str) -> list[str]:
    """Splits a text into sentences; a line of a list repeats what stands above it.

    Else "Never do this:" could be left out, and the lines below it be taken for orders.
    """
    if len(text.encode("utf-8", "replace")) <= MAX_SENTENCE_CHARS:
        return [text]
    pieces = list[str]()
    heading = ""
    is_below = False
    for line in map(str.strip, excerpt(text, MAX_READ_BYTES).splitlines()):
        found = [s.strip() for s in _SENTENCE.split(line) if s.strip(f"{_GAP} ")]
        if not found:
            continue
        if not (is_below or _ITEM.match(found[0])):
            heading = ""

        for sentence in found:
            headed = f"{heading} {sentence}".strip()
            if len(headed) <= MAX_SENTENCE_CHARS:
                pieces.append(headed)
            else:  # What has no punctuation, as dictated text, is split at words.
                pieces += textwrap.wrap(headed, MAX_SENTENCE_CHARS)

        if is_below := found[-1].endswith((":", "：")):  # noqa: RUF001
            heading = excerpt(pieces.pop(), MAX_HEADING_BYTES)
    return [*pieces, heading] if is_below else pieces


class _Sentence(NamedTuple):
    words: frozenset[str]
    has_name: bool
    has_command: bool


@lru_cache(maxsize=1_024)  # Each summary ranks those of the summaries before it.
def _read_sentence(sentence: str) -> _Sentence:
    return _Sentence(
        words=frozenset(_WORD.findall(sentence.lower())),
        has_name=_NAME.search(sentence) is not None,
        has_command=_COMMAND.search(sentence) is not None,
    )


def _rank(split: Sequence[Sequence[str]], count: int) -> list[tuple[int, int]]:
    """Returns text and place of the oldest texts' sentences, the most telling first."""
    read = [[_read_sentence(sentence) for sentence in sentences] for sentences in split]
    uses = Counter(word for found in read for each in found for word in each.words)

    scores = dict[tuple[int, int], float]()
    for order, sentences in enumerate(split[:count]):
        names = sum(each.has_name for each in read[order])
        # Where everything is named, as in a log, names say nothing.
        named = 1 - names / len(sentences) if len(sentences) > 3 else 1

        for place, sentence in enumerate(sentences):
            facts = read[order][place]
            rare = [word for word in facts.words if uses[word] == 1]

            name_bonus = 2 * named if facts.has_name else 0
            command_bonus = 2 if facts.has_command else 0
            score = 3 * len(rare) / max(1, len(facts.words))
            score += name_bonus + command_bonus
            score += 2 * sentence.endswith(("!", "！"))  # noqa: RUF001
            size_bytes = len(sentence.encode("utf-8", "replace"))
            scores[order, place] = score - size_bytes / 100

    return sorted(scores, key=scores.__getitem__, reverse=True)


def _join(sentences: Sequence[str], places: Sequence[int]) -> Iterator[str]:
    """Yields sentences in their order, with a mark where some are left out."""
    for before, place in itertools.pairwise((-1, *places)):
        if place != before + 1:
            yield _GAP
        yield sentences[place]
    if places[-1] < len(sentences) - 1:
        yield _GAP
