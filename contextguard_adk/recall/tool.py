"""The tool by which an agent reads back what was compacted."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.adk.tools.base_tool import BaseTool
from google.genai import types

from contextguard_adk.measuring.shortening import TokenCounter
from contextguard_adk.measuring.tokens import estimate_part_tokens
from contextguard_adk.recall.search import Match, find_matches
from contextguard_adk.summarizing.items import ATTACHED_KEY, Item
from contextguard_adk.summarizing.transcript import RECALL_TOOL

if TYPE_CHECKING:
    from google.adk.tools.tool_context import ToolContext

logger = logging.getLogger("contextguard_adk.recall.tool")


PAGE_RATIO = 0.1
"""Of the context window; no page is larger."""

FILE_RATIO = 0.3
"""Of the context window; a larger file is not attached again."""

MAX_QUERY_CHARS = 200
MAX_ECHO_CHARS = 40
"""How much of a bad argument is quoted."""

MAX_OFFSET = 10**12
MAX_HITS_PER_PAGE = 5
MIN_EXCERPT_TOKENS = 30

# Short: it stands in every request from the first compaction on.
_DESCRIPTION = (
    "Reads what was compacted away. query: words to search for. item: a handle to "
    "read. Neither: lists items. offset: as a page says."
)
_PARAMETERS = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "item": {"type": "string"},
        "offset": {"type": "integer"},
    },
}


@dataclass(frozen=True)
class RecallSource:
    """What can be read back.

    Attributes:
        items: All items of the history, oldest first.
        hidden: Indexes of the contents that do not stand in the request whole.
    """

    items: Sequence[Item]
    hidden: frozenset[int]


class RecallHistoryTool(BaseTool):
    """Searches and pages through the compacted part of a history.

    Args:
        load_source: Gives what can be read back.
        window_tokens: The agent's context window.
        page_tokens: What one page may take; never more than a tenth of the window.
        count: Tokens of a text.
    """

    def __init__(
        self,
        load_source: Callable[[], Awaitable[RecallSource]],
        window_tokens: int,
        page_tokens: int,
        count: TokenCounter,
    ) -> None:
        super().__init__(name=RECALL_TOOL, description=_DESCRIPTION)
        self._load_source = load_source
        self._window_tokens = window_tokens
        self._page_tokens = min(page_tokens, int(window_tokens * PAGE_RATIO))
        self._count = count

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(
            name=self.name,
            description=self.description,
            parameters_json_schema=_PARAMETERS,
        )

    async def run_async(
        self, *, args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, str]:
        """Answers one call; a bad argument gets an answer that helps."""
        try:
            source = await self._load_source()
            answer = self._answer(source, args)
        except Exception as error:  # noqa: BLE001 - a turn must not end here.
            logger.error("recall_history failed: %s.", type(error).__name__)
            return {"result": "The history cannot be read just now."}
        # No client can send half a surrogate pair.
        return {
            key: text.encode("utf-8", "replace").decode()
            for key, text in answer.items()
        }

    def _answer(self, source: RecallSource, args: dict[str, Any]) -> dict[str, str]:
        query = " ".join(str(args.get("query") or "")[:MAX_QUERY_CHARS].split())
        handle = str(args.get("item") or "").strip(" #[]`'\"")
        offset = _read_offset(args.get("offset"))
        if handle:
            return self._read_item(source.items, handle, offset)
        if query:
            return {"result": self._search(source, query, offset)}
        return {"result": self._list(source, offset)}

    def _read_item(
        self, items: Sequence[Item], handle: str, offset: int
    ) -> dict[str, str]:
        """One item from a character on, as much as a page holds."""
        item = next((i for i in reversed(items) if i.handle == handle), None)
        if item is None:
            return {
                "result": f"There is no item {handle[:MAX_ECHO_CHARS]!r}. "
                "recall_history() lists the items, recall_history(query=…) searches "
                "them."
            }
        if item.media:
            return self._attach(item, item.media)
        if offset >= len(item.text):
            return {
                "result": f"[{item.title}]\nOffset {offset} lies behind its end; it "
                f"has offsets 0 to {max(0, len(item.text) - 1)}."
            }
        head = f"[{item.title}; from {offset}]\n"
        more = f"\n[goes on: recall_history(item={handle!r}, offset={len(item.text)})]"
        room = self._page_tokens - self._count(head + more)
        page = self._fill(item.text[offset:], room)
        end = offset + len(page)
        if end >= len(item.text):
            return {"result": f"{head}{page}\n[end of the item]"}
        more = f"\n[goes on: recall_history(item={handle!r}, offset={end})]"
        return {"result": f"{head}{page}{more}"}

    def _attach(self, item: Item, media: types.Part) -> dict[str, str]:
        if item.content_index < 0:
            return {
                "result": f"[{item.title}]\nThis run does not load the message that "
                "it came with, so it cannot be attached."
            }
        tokens = estimate_part_tokens(media)
        if tokens > self._window_tokens * FILE_RATIO:
            return {
                "result": f"[{item.title}]\nIt takes about {tokens:,} tokens, too many "
                f"for a context window of {self._window_tokens:,}."
            }
        return {
            "result": f"[{item.title}]\nIt is attached below.",
            ATTACHED_KEY: item.handle,
        }

    def _list(self, source: RecallSource, offset: int) -> str:
        """The items that were compacted, newest first."""
        hidden = {i.handle: i for i in source.items if i.content_index in source.hidden}
        items = [item for item in reversed(hidden.values()) if item.is_listed]
        if not items:
            return "Nothing was compacted yet."
        if offset >= len(items):
            return f"There are {len(items)} items; offset {offset} lies behind them."
        lines = [f"- {item.title}" for item in items[offset:]]
        head = f"{len(items)} items, newest first:"
        return self._page(head, lines, offset, len(items), "recall_history(offset={})")

    def _search(self, source: RecallSource, query: str, offset: int) -> str:
        """Excerpts of the items that match best, the newest first among equals."""
        matches = find_matches(
            (i for i in reversed(source.items) if i.content_index in source.hidden),
            query,
        )
        if not matches:
            return (
                f"Nothing matches {query[:MAX_ECHO_CHARS]!r}. Try fewer or other "
                "words; recall_history() lists the items."
            )
        if offset >= len(matches):
            return f"There are {len(matches)} matches; offset {offset} is behind them."
        shown = matches[offset : offset + MAX_HITS_PER_PAGE]
        head = f"{len(matches)} items match, best and newest first:"
        room = self._page_tokens - self._count(head) - 30
        blocks = [self._excerpt(match, room // len(shown)) for match in shown]
        again = "recall_history(query=…, offset={})"
        return self._page(head, blocks, offset, len(matches), again)

    def _excerpt(self, match: Match, room_tokens: int) -> str:
        """The title of an item, and its text around the best match."""
        item = match.item
        if item.media:
            return f"[{item.title}]"
        also = "; also at " + ", ".join(map(str, match.others)) if match.others else ""
        longest = f"[{item.title}; from {match.position}{also}]\n"
        room = max(MIN_EXCERPT_TOKENS, room_tokens - self._count(longest))
        start, text = self._around(item.text, match.position, room)
        others = [str(p) for p in match.others if not start <= p < start + len(text)]
        also = f"; also at {', '.join(others)}" if others else ""
        return f"[{item.title}; from {start}{also}]\n{text}"

    def _around(self, text: str, position: int, room_tokens: int) -> tuple[int, str]:
        """What stands around a position, a third of it before; and where it begins.

        However dense the text is, what stands at the position is in it.
        """
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
        more = (
            [f"[more: {again.format(end)}]"] if end < total else ["[end of the list]"]
        )
        return "\n".join([head, *shown, *more])

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
        return min(max(0, number), MAX_OFFSET)
    except (TypeError, ValueError, OverflowError):
        return 0
