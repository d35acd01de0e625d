"""The tool by which an agent reads back what was compacted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.moved_media import NOT_SHOWN, MediaMover
from contextguard_adk._history.text import Item
from contextguard_adk._measuring.calibration import token_counter
from contextguard_adk._measuring.tokens import estimate_contents_tokens
from contextguard_adk._recall.items import Items, ItemSource
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

_MAX_OFFSET = 10**12
"""A larger offset would only have an answer quote too many digits."""

_MIN_EXCERPT_TOKENS = 60

_MIN_TEXT_TOKENS = 30
"""The text of an excerpt, below its title, may take at least this."""

_MAX_WINDOW_RATIO = 0.3
"""A file that takes more of the context window is not attached."""

_SPARE_TOKENS = 20
"""The tokens of a page for the marks around the call that reads on."""

_MAX_CHARS_PER_TOKEN = 8
"""A text of more characters is cut uncounted, because counting takes a while."""


class RecallHistoryTool(BaseTool):
    """Searches and pages through the compacted part of a history."""

    def __init__(
        self,
        source: ItemSource,
        window_tokens: int,
        page_tokens: int,
        correction: float,
        mover: MediaMover,
    ) -> None:
        super().__init__(name=RECALL_TOOL, description=DECLARATION.description or "")
        self._source = source
        self._window_tokens = window_tokens
        self._page_tokens = min(page_tokens, window_tokens // 10)
        self._count = token_counter(correction)
        self._mover = mover

    def _get_declaration(self) -> types.FunctionDeclaration:
        return DECLARATION.model_copy()

    async def run_async(
        self, *, args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, str]:
        """Answers one call; the answer to a wrong argument says which are possible."""
        try:
            items = await self._source.load()
            # A search in megabytes takes seconds, and would block the event loop.
            answer = await asyncio.to_thread(self._answer, items, args)
        except Exception as error:  # noqa: BLE001 - a turn must not end here.
            logger.error("recall_history failed: %s.", type(error).__name__)
            return {"result": "The history cannot be read just now."}
        return {name: _encodable(text) for name, text in answer.items()}

    def _answer(self, items: Items, args: dict[str, Any]) -> dict[str, str]:
        """Reads an item, searches for a query, or, without both, lists the items."""
        query_text = str(args.get("query") or "")[:_MAX_QUERY_CHARS]
        query = " ".join(query_text.split())
        handle = str(args.get("item") or "").strip(" #[]`'\"")
        offset = _read_offset(args.get("offset"))

        if handle:
            return self._answer_item(items.all, handle, offset)
        if query:
            return {"result": self._search(items.hidden, query, offset)}
        return {"result": self._list(items.hidden, offset)}

    def _answer_item(
        self, items: Sequence[Item], handle: str, offset: int
    ) -> dict[str, str]:
        """Reads an item that has a text, or attaches an item that is a file."""
        item = next((each for each in items if each.handle == handle), None)
        if item is None:
            usage = "recall_history() lists the items, with query=… it searches them."
            return {"result": f"There is no item {handle[:40]!r}. {usage}"}
        if item.text or not item.media:
            return {"result": self._read(item, offset)}

        obstacle = self._find_obstacle(item, item.media)
        if obstacle:
            return {"result": f"[{item.heading}]\n{obstacle}"}
        result = f"[{item.heading}]\nIt is attached below."
        return {"result": result, ATTACHED_KEY: item.handle}

    def _find_obstacle(self, item: Item, media: types.Part) -> str:
        """Returns the reason why a file cannot be attached; "" if it can."""
        if not self._mover.takes(media):
            return NOT_SHOWN
        if item.content_index < 0:  # The request does not have its message.
            return "This run does not load its message, so it cannot be attached."
        tokens = estimate_contents_tokens([types.Content(parts=[media])])
        if tokens > _MAX_WINDOW_RATIO * self._window_tokens:
            return f"Its {tokens:,} tokens are too many for the context window."
        return ""

    def _read(self, item: Item, offset: int) -> str:
        """Returns a page of an item's text, from the character `offset` on."""
        text_chars = len(item.text)
        if offset >= text_chars:
            return f"[{item.heading}]\nOffset {offset} lies behind its end."

        head = f"[{item.heading}; from {offset}]\n"
        next_call = f"recall_history(item={item.handle!r}, offset={{}})"
        next_line = phrases.GOES_ON.format(next_call)
        longest_frame = f"{head}\n{next_line.format(text_chars)}"
        room_tokens = self._page_tokens - self._count(longest_frame)
        text = self._fill(item.text[offset:], room_tokens)

        end = offset + len(text)
        tail = phrases.END_OF_ITEM
        if end < text_chars:
            tail = next_line.format(end)
        return f"{head}{phrases.quote(text)}\n{tail}"

    def _list(self, hidden: Sequence[Item], offset: int) -> str:
        """Returns a page of the list of items, from the item number `offset` on."""
        items = [item for item in hidden if item.is_listed]
        if not items:
            return "Nothing was compacted yet."
        if offset >= len(items):
            return f"There are {len(items)} items; offset {offset} lies behind them."

        frame = _Frame(
            head=f"{len(items)} items, newest first:",
            next_call="recall_history(offset={})",
            offset=offset,
            total=len(items),
        )
        return self._page(frame, [f"- {item.title}" for item in items[offset:]])

    def _search(self, hidden: Sequence[Item], query: str, offset: int) -> str:
        """Returns a page of excerpts from the items that match a query.

        The page begins with the match number `offset`.
        """
        matches = rank_items(hidden, query)
        if not matches:
            hint = "Try fewer or other words; recall_history() lists the items."
            return f"Nothing matches {query[:40]!r}. {hint}"
        if offset >= len(matches):
            return f"There are {len(matches)} matches; offset {offset} is behind them."

        frame = _Frame(
            head=f"{len(matches)} items match, best and newest first:",
            next_call="recall_history(query=…, offset={})",
            offset=offset,
            total=len(matches),
        )
        excerpts = list[str]()
        room_tokens = self._room(frame)
        last = len(matches) - 1
        for number, match in enumerate(matches[offset:], offset):
            # Each excerpt may take half of the room that is left, so the best get most.
            share_tokens = room_tokens if number == last else room_tokens // 2
            excerpt = self._excerpt(match, max(_MIN_EXCERPT_TOKENS, share_tokens))
            excerpts.append(excerpt)
            room_tokens -= self._count(excerpt) + 1
            if room_tokens < 0:
                break
        return self._page(frame, excerpts)

    def _excerpt(self, match: Match, most_tokens: int) -> str:
        """Returns an item whole if it fits; else its title and a part of its text.

        The part is the text around the best match; up to a third of it stands before.
        """
        item = match.item
        name = f"{item.label} {item.hint}" if item.args else item.label
        heading = f"[{item.handle} {phrases.quote_line(name)}]\n"
        whole_tokens = most_tokens - self._count(heading)
        may_fit = len(item.text) <= _MAX_CHARS_PER_TOKEN * whole_tokens
        if may_fit and self._count(item.text) <= whole_tokens:
            return f"{heading}{phrases.quote(item.text)}".rstrip("\n")

        position = match.position
        title_tokens = self._count(f"[{item.title}; from {position}]\n")
        room_tokens = max(_MIN_TEXT_TOKENS, most_tokens - title_tokens)

        # `_fill` cuts the end of a text, so it gets the text before the match reversed.
        # It uses at most 8 characters for each token of its third of the room.
        before = item.text[max(0, position - 3 * most_tokens) : position]
        reversed_lead = self._fill(before[::-1], room_tokens // 3)
        start = position - len(reversed_lead)
        part = self._fill(item.text[start:], room_tokens)
        return f"[{item.title}; from {start}]\n{phrases.quote(part)}"

    def _page(self, frame: _Frame, blocks: Sequence[str]) -> str:
        """Returns as many blocks as fit a page, at least one, between two lines.

        The last line has the call that gets the next page, or says that there is none.
        """
        room_tokens = self._room(frame)
        page_blocks = list[str]()
        for block in blocks:
            room_tokens -= self._count(block) + 1
            if room_tokens < 0 and page_blocks:
                break
            page_blocks.append(block)

        end = frame.offset + len(page_blocks)
        tail = phrases.END_OF_LIST
        if end < frame.total:
            tail = phrases.MORE.format(frame.next_call.format(end))
        return "\n".join([frame.head, *page_blocks, tail])

    def _room(self, frame: _Frame) -> int:
        """Returns how many tokens a page has for blocks."""
        frame_tokens = self._count(frame.head) + self._count(frame.next_call)
        return self._page_tokens - frame_tokens - _SPARE_TOKENS

    def _fill(self, text: str, room_tokens: int) -> str:
        """Returns a long beginning of a text that fits the room; at least a character.

        It shortens the text in proportion to its tokens until it fits. One step leaves
        a tenth at least, because the tokens are spread unevenly.
        """
        beginning = text[: max(1, room_tokens) * _MAX_CHARS_PER_TOKEN]
        while len(beginning) > 1 and (tokens := self._count(beginning)) > room_tokens:
            ratio = max(0.1, room_tokens / tokens)
            # The text loses a character at least, so that the loop ends.
            most_chars = len(beginning) - 1
            proportional_chars = max(1, int(len(beginning) * ratio))
            beginning = beginning[: min(most_chars, proportional_chars)]
        return beginning


@dataclass(frozen=True)
class _Frame:
    """The lines around a page of blocks, which are excerpts or lines of a list.

    Attributes:
        head: The first line.
        next_call: The call that gets the next page, with `{}` for its offset.
        offset: The number of the first block on this page.
        total: How many blocks there are, on all pages.
    """

    head: str
    next_call: str
    offset: int
    total: int


def _encodable(text: str) -> str:
    """Replaces halves of surrogate pairs, which no client can send."""
    return text.encode("utf-8", "replace").decode()


def _read_offset(value: object) -> int:
    """Returns the offset that a model has written: 0 to 10**12; 0 for no number."""
    try:
        number: int = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return 0
    if number < 0:
        return 0
    return min(number, _MAX_OFFSET)
