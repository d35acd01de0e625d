"""The user's messages, word for word as far as there is room, else by sentence."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

from pydantic import JsonValue

from contextguard_adk._history.contents import content_text
from contextguard_adk._history.history import History
from contextguard_adk._measuring.budgets import excerpt
from contextguard_adk._support.phrases import USER_MESSAGES, quote
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section

MAX_BYTES = 200_000
WHOLE_RATIO = 0.5  # Of the budget for messages word for word, where some are shortened.
MAX_STORED_BYTES = 6 * 1024  # In session state, for a history that is loaded in part.
MAX_SENTENCE_BYTES = 300
MAX_READ_BYTES = 16 * 1024  # Of one message; longer ones have something pasted in.

_GAP = "…"
_CONDENSED: OrderedDict[tuple[bytes, int], list[str]] = OrderedDict()
_SENTENCE = re.compile(r"(?<=[.!?…;:])\s+|(?<=[。！？；।])|\n+")  # noqa: RUF001
_PIECE = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+|\s+"
)
_GAPS = re.compile(rf"(?:{_GAP}\s*){{2,}}")
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


class UserMessages(Section):
    """What the user wrote of what the summary replaces; no model writes or changes it.

    It follows from the covered contents. Session state holds its size, and excerpts,
    which stand in where the history is loaded in part.
    """

    name = "user_messages"
    goes_at = 3

    def write(
        self, turn: Turn, covered: frozenset[int], known: JsonValue, room_tokens: int
    ) -> JsonValue:
        """Returns what the messages may take, and excerpts of them."""
        history, budget_tokens = turn.history, turn.user_tokens
        current = covered.intersection((history.request_index,))
        quoted = "".join(history.fingerprint(index).hex() for index in current)
        said = covered.intersection(history.user_messages)
        texts = _read_texts(history, said, quoted)
        max_bytes = int(budget_tokens * 3 / max(1.0, turn.correction))
        tokens = turn.count(_write_lines(condense(texts, max_bytes)))
        if tokens > budget_tokens:
            max_bytes = int(max_bytes * budget_tokens / tokens)
        window_tokens = turn.budgets.working_tokens
        sizes = MAX_STORED_BYTES, max_bytes, 2 * room_tokens, window_tokens // 2
        return {
            "bytes": max_bytes,
            "count": 0 if _is_partial(history) else len(said),
            "quoted": quoted,
            **_write_excerpts(history, said, _read(known), quoted, min(sizes)),
        }

    def render(
        self, value: JsonValue, history: History, covered: Collection[int]
    ) -> str:
        """Returns the messages, each after a dash; nothing of the current request."""
        known, said = _read(value), set(covered).intersection(history.user_messages)
        quoted = known["quoted"]
        if history.is_rewound or len(said) >= known["count"] > 0:
            texts = condense(_read_texts(history, said, quoted), known["bytes"])
        else:
            is_quoted = any(history.fingerprint(i).hex() == quoted for i in said)
            texts = [*known["excerpts"], *([] if is_quoted else known["request"])]
        return "\n".join([USER_MESSAGES, _write_lines(texts)]) if texts else ""


def _write_lines(texts: Sequence[str]) -> str:
    return "\n".join("- " + "\n  ".join(quote(text).splitlines()) for text in texts)


def _is_partial(history: History) -> bool:
    """Whether some of what is summarized already is not loaded."""
    stored = history.stored
    is_less = stored and len(history.covered) < stored.covered.content_count
    return bool(is_less) and not history.is_rewound


def _write_excerpts(
    history: History,
    said: Collection[int],
    known: dict[str, Any],
    quoted: str,
    max_bytes: int,
) -> dict[str, JsonValue]:
    """Excerpts of all messages that are covered; that of the request is apart."""
    is_rewound, is_same = history.is_rewound, known["quoted"] == quoted
    older = [] if is_rewound else [*known["excerpts"]]
    request = [] if is_rewound or not is_same else known["request"]
    older += [] if is_rewound or is_same else known["request"]
    new = set(said) - (set() if is_rewound else history.covered)
    if not request:
        same = [i for i in new if history.fingerprint(i).hex() == quoted]
        request = [excerpt(t, max_bytes // 4) for t in _read_texts(history, same)[-1:]]
    excerpts = condense([*older, *_read_texts(history, new, quoted)], max_bytes)
    # Quotes and control characters take more room there. The first one is the task.
    while excerpts and _json_bytes([*excerpts, *request]) > 1.3 * max_bytes:
        del excerpts[len(excerpts) > 1]
    return {"excerpts": [*excerpts], "request": [*request]}


def _json_bytes(texts: Sequence[str]) -> int:
    return len(json.dumps(texts, ensure_ascii=False).encode("utf-8", "replace"))


def _read(value: JsonValue) -> dict[str, Any]:
    """Reads what is stored, which may be anything; once it was the excerpts alone."""
    fields = value if isinstance(value, dict) else {"excerpts": value}
    numbers = {
        name: min(max(0, n), MAX_BYTES) if isinstance(n := fields.get(name), int) else 0
        for name in ("bytes", "count")
    }
    lists = {
        name: [item for item in found if isinstance(item, str) and item.strip()]
        if isinstance(found := fields.get(name), list)
        else []
        for name in ("excerpts", "request")
    }
    quoted = fields.get("quoted")
    return {**numbers, **lists, "quoted": quoted if isinstance(quoted, str) else ""}


def _read_texts(
    history: History, indexes: Collection[int], quoted: str = ""
) -> list[str]:
    """These messages, but for the one that is quoted apart."""
    texts = []
    same = (i for i in indexes if quoted and history.fingerprint(i).hex() == quoted)
    for index in sorted({*indexes} - {max(same, default=-1)}):
        text, original = content_text(history.contents[index]), history.original(index)
        if original is not history.contents[index]:
            text = _without_additions(text, content_text(original).strip())
        texts.append(text.strip())
    return [text for text in texts if text]


def _without_additions(text: str, said: str) -> str:
    """A text without what another plugin adds: it may be new on each call, as the time.

    What the plugin has taken out stays out.
    """
    if said and said in text:
        return said
    words = set(_PIECE.findall(said))
    pieces = _PIECE.findall(text)
    same = [p if p in words or p.isspace() else _GAP for p in pieces]
    # Where nothing is the same, the plugin has encoded all of it.
    kept = _GAPS.sub(f"{_GAP} ", "".join(same))
    return kept if kept.strip(f"{_GAP} \n") else text


def condense(texts: Sequence[str], max_bytes: int) -> list[str]:
    """Keeps the newest texts whole, and of the others the most telling sentences.

    Sentences that command, forbid or name something go before others, as do those whose
    words stand nowhere else; those of one text stand in their order.
    """
    sizes = [len(text.encode("utf-8", "replace")) + 3 for text in texts]
    sizes = [n + 2 * text.count("\n") for n, text in zip(sizes, texts, strict=True)]
    if sum(sizes) <= max_bytes:
        return [*texts]
    digest = hashlib.blake2b("\0".join(texts).encode("utf-8", "replace")).digest()
    if (known := _CONDENSED.get((digest, max_bytes))) is not None:
        return [*known]
    ends = itertools.accumulate(reversed(sizes))
    first = len(texts) - sum(end <= max_bytes * WHOLE_RATIO for end in ends)
    room = max_bytes - sum(sizes[first:])
    found, said = _rank(texts, first)
    chosen: dict[int, list[tuple[int, str]]] = {}
    for _, order, place, sentence in sorted(found, key=lambda each: -each[0]):
        cost = len(sentence.encode("utf-8", "replace")) + 2 * sentence.count("\n")
        cost += 6 if order in chosen else 8
        if cost <= room and sentence not in said:
            room -= cost
            said.add(sentence)
            chosen.setdefault(order, []).append((place, sentence))
    short = [_join(sorted(chosen[order])) for order in sorted(chosen)]
    _CONDENSED[digest, max_bytes] = kept = [*short, *texts[first:]]
    if len(_CONDENSED) > 64:
        _CONDENSED.popitem(last=False)
    return [*kept]


def _split(text: str) -> list[str]:
    if len(text.encode("utf-8", "replace")) <= MAX_SENTENCE_BYTES:
        return [text]
    pieces = (piece.strip() for piece in _SENTENCE.split(excerpt(text, MAX_READ_BYTES)))
    return [excerpt(piece, MAX_SENTENCE_BYTES) for piece in pieces if piece]


def _rank(
    texts: Sequence[str], count: int
) -> tuple[list[tuple[float, int, int, str]], set[str]]:
    """Returns the sentences of the oldest texts, each with how telling it is and its
    place, and those of the others."""
    split = [_split(text) for text in texts]
    words = [[{*_WORD.findall(p.lower())} for p in pieces] for pieces in split]
    uses = Counter(itertools.chain.from_iterable(itertools.chain(*words)))
    found = []
    for order in range(count):
        pieces, scored = split[order], []
        names = [_NAME.search(piece) is not None for piece in pieces]
        # Where everything is named, as in a log, names say nothing.
        named = 1 - sum(names) / len(pieces) if len(pieces) > 3 else 1
        for place, piece in enumerate(pieces):
            rare = sum(uses[word] == 1 for word in words[order][place])
            score = 2.0 * rare / max(1, len(words[order][place])) + named * names[place]
            score += 3 - 3 * len(piece.encode("utf-8", "replace")) / MAX_SENTENCE_BYTES
            if command := _COMMAND.search(piece):
                score += 3.0 if command.start() < len(piece) / 3 else 2.0
            score += 2.0 * piece.endswith(("!", "！"))  # noqa: RUF001
            score += 0.5 * (place in (0, len(pieces) - 1)) + (order == 0)
            if piece != _GAP:
                scored.append((score + 0.5 * order / len(texts), place, piece))
        # A sentence of each text goes before the third of another.
        ranked = sorted(scored, key=lambda each: -each[0])
        for rank, (score, place, piece) in enumerate(ranked):
            found.append((score - 0.2 * rank, order, place, piece))
    return found, {piece for pieces in split[count:] for piece in pieces}


def _join(sentences: Sequence[tuple[int, str]]) -> str:
    """Joins sentences in their order, with a mark where some are left out."""
    said, expected = [], 0
    for place, sentence in sentences:
        said += [_GAP, sentence] if place != expected else [sentence]
        expected = place + 1
    return " ".join(said)
