"""The tool by which an agent reads back what was compacted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.moved_media import NOT_SHOWN, MediaMover
from contextguard_adk._history.text import Item
from contextguard_adk._measuring.calibration import token_counter
from contextguard_adk._measuring.tokens import estimate_contents_tokens
from contextguard_adk._recall.search import Match, rank_items
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
_MIN_EXCERPT_TOKENS = 60

Load = Callable[[], Awaitable[tuple[list[Item], list[Item]]]]
"""Lists all items, and those that the request does not show; newest first."""


class RecallHistoryTool(BaseTool):
    """Searches and pages through the compacted part of a history."""

    def __init__(
        self,
        load: Load,
        window_tokens: int,
        page_tokens: int,
        correction: float,
        mover: MediaMover,
    ) -> None:
        super().__init__(name=RECALL_TOOL, description=DECLARATION.description or "")
        self._load = load
        self._window_tokens = window_tokens
        self._page_tokens = min(page_tokens, window_tokens // 10)
        self._count = token_counter(correction)
        self._mover = mover

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
        if item.media and not item.text:
            return self._attach(item, item.media)
        return {"result": self._read(item, offset)}

    def _read(self, item: Item, offset: int) -> str:
        """One item from a character on, as much as a page holds."""
        count = len(item.text)
        if offset >= count:
            return f"[{item.heading}]\nOffset {offset} lies behind its end."
        head = f"[{item.heading}; from {offset}]\n"
        again = f"recall_history(item={item.handle!r}, offset={{}})"
        more = phrases.GOES_ON.format(again)
        room = self._page_tokens - self._count(f"{head}\n{more.format(count)}")
        page = self._fill(item.text[offset:], room)
        end = offset + len(page)
        tail = more.format(end) if end < count else phrases.END_OF_ITEM
        return f"{head}{phrases.quote(page)}\n{tail}"

    def _attach(self, item: Item, media: types.Part) -> dict[str, str]:
        obstacle = self._find_obstacle(item, media)
        if obstacle:
            return {"result": f"[{item.heading}]\n{obstacle}"}
        said = f"[{item.heading}]\nIt is attached below."
        return {"result": said, ATTACHED_KEY: item.handle}

    def _find_obstacle(self, item: Item, media: types.Part) -> str:
        """Says why a file cannot be attached; "" where it can."""
        if not self._mover.takes(media):
            return NOT_SHOWN
        if item.content_index < 0:
            return "This run does not load its message, so it cannot be attached."
        tokens = estimate_contents_tokens([types.Content(parts=[media])])
        if tokens > self._window_tokens * 0.3:
            return f"Its {tokens:,} tokens are too many for the context window."
        return ""

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
        matches = rank_items(hidden, query)
        if not matches:
            hint = "Try fewer or other words; recall_history() lists the items."
            return f"Nothing matches {query[:40]!r}. {hint}"
        if offset >= len(matches):
            return f"There are {len(matches)} matches; offset {offset} is behind them."
        head = f"{len(matches)} items match, best and newest first:"
        again = "recall_history(query=…, offset={})"
        blocks = list[str]()
        room = self._room(head, again)
        for place, match in enumerate(matches[offset:], offset):
            share = room // min(2, len(matches) - place)  # The best get most.
            blocks.append(self._excerpt(match, max(_MIN_EXCERPT_TOKENS, share)))
            room -= self._count(blocks[-1]) + 1
            if room < 0:
                break
        return self._page(head, blocks, offset, len(matches), again)

    def _excerpt(self, match: Match, room_tokens: int) -> str:
        """An item whole, or its title and the text around the best match."""
        item = match.item
        about = f"{item.label} {item.hint}" if item.args else item.label
        whole = f"[{item.handle} {phrases.quote_line(about)}]\n"
        room = room_tokens - self._count(whole)
        if len(item.text) <= 8 * room and self._count(item.text) <= room:
            return f"{whole}{phrases.quote(item.text)}".rstrip("\n")
        position = match.position
        room = max(30, room_tokens - self._count(f"[{item.title}; from {position}]\n"))
        before = item.text[max(0, position - 3 * room_tokens) : position][::-1]
        start = position - len(self._fill(before, room // 3))
        text = self._fill(item.text[start:], room)
        return f"[{item.title}; from {start}]\n{phrases.quote(text)}"

    def _page(
        self, head: str, blocks: Sequence[str], offset: int, total: int, again: str
    ) -> str:
        """As many blocks as a page holds, and how to get the next ones."""
        room = self._room(head, again)
        shown: list[str] = []
        for block in blocks:
            room -= self._count(block) + 1
            if room < 0 and shown:
                break
            shown.append(block)
        end = offset + len(shown)
        more = phrases.MORE.format(again.format(end))
        return "\n".join([head, *shown, more if end < total else phrases.END_OF_LIST])

    def _room(self, head: str, again: str) -> int:
        return self._page_tokens - self._count(head) - self._count(again) - 20

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
