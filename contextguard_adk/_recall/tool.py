"""The tool by which an agent reads back what was compacted."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.text import Item
from contextguard_adk._measuring.calibration import token_counter
from contextguard_adk._measuring.tokens import estimate_contents_tokens
from contextguard_adk._shapes.recalled_files import ATTACHED_KEY
from contextguard_adk._support import phrases

logger = logging.getLogger("contextguard_adk.recall")

# Short: it stands in every request from the first compaction on, or from the start.
DECLARATION = types.FunctionDeclaration(
    name=RECALL_TOOL,
    description="Reads what was compacted away. query: words to search for. item: a "
    "handle to read. Neither: lists items. offset: as a page says.",
    parameters_json_schema={
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "item": {"type": "string"},
            "offset": {"type": "integer"},
        },
    },
)

_MAX_QUERY_CHARS = 200
_SLICE_CHARS = 20_000
"""A regex with a long query takes less than 50 ms for as many."""

Load = Callable[[], Awaitable[tuple[list[Item], list[Item]]]]
"""Lists all items, and those that the request does not show; newest first."""


class RecallHistoryTool(BaseTool):
    """Searches and pages through the compacted part of a history."""

    def __init__(
        self, load: Load, window_tokens: int, page_tokens: int, correction: float
    ) -> None:
        super().__init__(name=RECALL_TOOL, description=DECLARATION.description or "")
        self._load = load
        self._window_tokens = window_tokens
        self._page_tokens = min(page_tokens, window_tokens // 10)
        self._count = token_counter(correction)

    def _get_declaration(self) -> types.FunctionDeclaration:
        return DECLARATION.model_copy()

    async def run_async(
        self, *, args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, str]:
        """Answers one call; a bad argument gets an answer that helps."""
        try:
            loaded = await self._load()
            # Megabytes take seconds, in which nothing else would run.
            answer = await asyncio.to_thread(self._answer, *loaded, args)
        except Exception as error:  # noqa: BLE001 - a turn must not end here.
            logger.error("recall_history failed: %s.", type(error).__name__)
            return {"result": "The history cannot be read just now."}
        # No client can send half a surrogate pair.
        return {k: v.encode("utf-8", "replace").decode() for k, v in answer.items()}

    def _answer(
        self, items: Sequence[Item], hidden: Sequence[Item], args: dict[str, Any]
    ) -> dict[str, str]:
        query = " ".join(str(args.get("query") or "")[:_MAX_QUERY_CHARS].split())
        handle = str(args.get("item") or "").strip(" #[]`'\"")
        offset = _read_offset(args.get("offset"))
        if not handle:
            found = self._search(hidden, query, offset) if query else None
            return {"result": found or self._list(hidden, offset)}
        item = next((i for i in items if i.handle == handle), None)
        if item is None:
            usage = "recall_history() lists the items, with query=… it searches them."
            return {"result": f"There is no item {handle[:40]!r}. {usage}"}
        if item.media:
            return self._attach(item, item.media)
        return {"result": self._read(item, offset)}

    def _read(self, item: Item, offset: int) -> str:
        """One item from a character on, as much as a page holds."""
        count = len(item.text)
        if offset >= count:
            return f"[{item.title}]\nOffset {offset} lies behind its end."
        head = f"[{item.title}; from {offset}]\n"
        again = f"recall_history(item={item.handle!r}, offset={{}})"
        more = phrases.GOES_ON.format(again)
        room = self._page_tokens - self._count(f"{head}\n{more.format(count)}")
        page = self._fill(item.text[offset:], room)
        end = offset + len(page)
        tail = more.format(end) if end < count else phrases.END_OF_ITEM
        return f"{head}{phrases.quote(page)}\n{tail}"

    def _attach(self, item: Item, media: types.Part) -> dict[str, str]:
        tokens, attached = estimate_contents_tokens([types.Content(parts=[media])]), {}
        if item.content_index < 0:
            text = "This run does not load its message, so it cannot be attached."
        elif tokens > self._window_tokens * 0.3:
            text = f"Its {tokens:,} tokens are too many for the context window."
        else:
            text, attached = "It is attached below.", {ATTACHED_KEY: item.handle}
        return {"result": f"[{item.title}]\n{text}", **attached}

    def _list(self, hidden: Sequence[Item], offset: int) -> str:
        items = [item for item in hidden if item.is_listed]
        if not items:
            return "Nothing was compacted yet."
        if offset >= len(items):
            return f"There are {len(items)} items; offset {offset} lies behind them."
        lines = [f"- {item.title}" for item in items[offset:]]
        head = f"{len(items)} items, newest first:"
        return self._page(head, lines, offset, len(items), "recall_history(offset={})")

    def _search(self, hidden: Sequence[Item], query: str, offset: int) -> str:
        matches = find_matches(hidden, query)
        if not matches:
            hint = "Try fewer or other words; recall_history() lists the items."
            return f"Nothing matches {query[:40]!r}. {hint}"
        if offset >= len(matches):
            return f"There are {len(matches)} matches; offset {offset} is behind them."
        shown = matches[offset : offset + 5]
        head = f"{len(matches)} items match, best and newest first:"
        room = (self._page_tokens - self._count(head) - 30) // len(shown)
        blocks = [self._excerpt(item, position, room) for item, position in shown]
        again = "recall_history(query=…, offset={})"
        return self._page(head, blocks, offset, len(matches), again)

    def _excerpt(self, item: Item, position: int, room_tokens: int) -> str:
        """The title of an item, and its text around the best match."""
        if item.media:
            return f"[{item.title}]"
        longest = f"[{item.title}; from {position}]\n"
        room = max(30, room_tokens - self._count(longest))
        start, text = self._around(item.text, position, room)
        return f"[{item.title}; from {start}]\n{phrases.quote(text)}"

    def _around(self, text: str, position: int, room_tokens: int) -> tuple[int, str]:
        """What stands around a position, a third of it before; and where it begins."""
        chars = 3 * room_tokens
        backwards = text[max(0, position - chars) : position][::-1]
        before = self._fill(backwards, room_tokens // 3)
        room_tokens -= self._count(before)
        after = self._fill(text[position : position + 3 * chars], room_tokens)
        if position + len(after) == len(text):  # There is room before it.
            room_tokens += self._count(before) - self._count(after)
            before = self._fill(backwards, room_tokens)
        return position - len(before), before[::-1] + after

    def _page(
        self, head: str, blocks: Sequence[str], offset: int, total: int, again: str
    ) -> str:
        """As many blocks as a page holds, and how to get the next ones."""
        room = self._page_tokens - self._count(head) - self._count(again) - 20
        shown: list[str] = []
        for block in blocks:
            room -= self._count(block) + 1
            if room < 0 and shown:
                break
            shown.append(block)
        end = offset + len(shown)
        more = phrases.MORE.format(again.format(end))
        return "\n".join([head, *shown, more if end < total else phrases.END_OF_LIST])

    def _fill(self, text: str, room_tokens: int) -> str:
        """The longest beginning of a text that fits; at least one character."""
        text = text[: max(1, room_tokens) * 8]
        while len(text) > 1 and (tokens := self._count(text)) > room_tokens:
            ratio = max(0.1, room_tokens / tokens)
            text = text[: max(1, min(len(text) - 1, int(len(text) * ratio)))]
        return text


def _read_offset(value: object) -> int:
    try:
        number: int = int(value)  # type: ignore[call-overload]
        return min(max(0, number), 10**12)
    except (TypeError, ValueError, OverflowError):
        return 0


def find_matches(items: Iterable[Item], query: str) -> list[tuple[Item, int]]:
    """Finds items with a phrase or, further down, with many of its words together.

    The best come first, each with the place where it matches best.
    """
    found = dict.fromkeys(re.findall(r"[\w./:@#+-]+", query.lower()))
    words = [word.strip(".:") or word for word in found][:12] or [query.lower()]
    phrase, any_word = _any_of([query]), _any_of(words)
    matches: list[tuple[int, Item, int]] = []
    for item in items:
        text = item.text if not item.media else item.label
        if place := next(_scan(phrase, text), None):
            matches.append((2 * len(words) + 2, item, place.start()))
            continue
        in_title = {w.lower() for w in any_word.findall(f"{item.label} {item.hint}")}
        position, nearby, in_text = _densest(_scan(any_word, text))
        if distinct := len(in_text | in_title):
            matches.append((nearby + distinct, item, position))
    matches.sort(key=lambda match: -match[0])
    return [(item, position) for _, item, position in matches]


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the words; the shortest only where they stand alone."""
    forms = (
        rf"(?<![^\W_]){re.escape(word)}(?![^\W_])"
        if len(word) < 3 and word.isascii() and word.isalnum()
        else re.escape(word)
        for word in words
    )
    return re.compile("|".join(forms), re.IGNORECASE)


def _scan(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Finds all matches, in slices: no other thread runs while a regex does."""
    start = 0
    while start < len(text):
        end = start + _SLICE_CHARS
        for match in pattern.finditer(text, start, end + _MAX_QUERY_CHARS):
            if match.start() >= end:
                break
            yield match
            end = max(end, match.end())
        start = end


def _densest(hits: Iterable[re.Match[str]]) -> tuple[int, int, set[str]]:
    """Where most different words stand within 200 characters; how many, and all."""
    best_position, best_count, found = 0, 0, set[str]()
    near: deque[tuple[int, str]] = deque()
    inside: Counter[str] = Counter()
    for hit in hits:
        position, word = hit.start(), hit.group().lower()
        near.append((position, word))
        inside[word] += 1
        while position - near[0][0] > 200:
            _, gone = near.popleft()
            inside[gone] -= 1
            if not inside[gone]:
                del inside[gone]
        if len(inside) > best_count:
            best_position, best_count = near[0][0], len(inside)
        found.add(word)
    return best_position, best_count, found
