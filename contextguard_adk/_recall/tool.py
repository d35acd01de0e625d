"""The tool by which an agent reads back what was compacted.

An item is a message, a tool call, a tool's result or a file, with a handle by which the
agent asks for it. An answer is a page: as much text as `recall_page_tokens` allows,
with a last line that has the call for the next page.
"""

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
"""The rest of a longer query is ignored."""

_MAX_OFFSET = 10**12
"""A larger offset is read as this one, to keep answers that quote the offset short."""

_MIN_EXCERPT_TOKENS = 60
"""An excerpt may take this number of tokens even if the page has less room left."""

_MIN_TEXT_TOKENS = 30
"""The text of an excerpt, below its title, may take this number of tokens always."""

_MAX_FILE_RATIO = 0.3
"""A file that takes a larger part of the context window is not attached."""

_SPARE_TOKENS = 20
"""The tokens of a page for the words around the call that gets the next page."""

_MAX_CHARS_PER_TOKEN = 8
"""A token is expected to have at most this number of characters.

A text with more characters is cut before its tokens are counted, because to count a
long text takes a while.
"""

_MIN_CUT_RATIO = 0.1
"""One step of a cut leaves at least this part of a text.

The tokens may be spread unevenly, so a larger cut could take too much.
"""


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
        """Makes the tool.

        Args:
            source: Lists the items.
            window_tokens: The context window.
            page_tokens: The size of a page. A size above a tenth of the window is read
                as a tenth.
            correction: The model's tokens per heuristic token (bytes / 4).
            mover: Knows which files can be attached.
        """
        super().__init__(name=RECALL_TOOL, description=DECLARATION.description or "")
        self._source = source
        self._window_tokens = window_tokens
        self._page_tokens = min(page_tokens, window_tokens // 10)
        self._count = token_counter(correction)  # Counts the tokens of a text.
        self._mover = mover

    def _get_declaration(self) -> types.FunctionDeclaration:
        return DECLARATION.model_copy()

    async def run_async(
        self, *, args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, str]:
        """Answers a call of the tool; the answer to a wrong call says what is wrong."""
        try:
            items = await self._source.load()
            # A search in megabytes takes seconds. In this thread it would block the
            # event loop.
            answer = await asyncio.to_thread(self._answer, items, args)
        except Exception as error:  # noqa: BLE001 - a turn must not end here.
            logger.error("recall_history failed: %s.", type(error).__name__)
            return {"result": "The history cannot be read just now."}
        return {name: _encodable(text) for name, text in answer.items()}

    def _answer(self, items: Items, args: dict[str, Any]) -> dict[str, str]:
        """Reads an item, searches for a query, or lists the items.

        A query beside an item is ignored. Without both, the items are listed.
        """
        query_text = str(args.get("query") or "")[:_MAX_QUERY_CHARS]
        query = " ".join(query_text.split())
        # A model may copy the signs around a handle.
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
        """Reads an item, or attaches an item that is a file without a text.

        `items` has the newest first.
        """
        found = [item for item in items if item.handle == handle]
        if not found:
            usage = "recall_history() lists the items, with query=… it searches them."
            return {"result": f"There is no item {handle[:40]!r}. {usage}"}

        # Several items may have this handle, and all have the same text or file. The
        # newest item is the most likely one to be in the request.
        item = found[0]
        if item.text or not item.media:
            return {"result": self._read(item, offset)}
        obstacle = self._find_obstacle(item, item.media)
        if obstacle:
            return {"result": f"[{item.heading}]\n{obstacle}"}
        result = f"[{item.heading}]\nIt is attached below."
        return {"result": result, ATTACHED_KEY: item.handle}

    def _find_obstacle(self, item: Item, media: types.Part) -> str:
        """Returns the reason why a file cannot be attached; "" if it can.

        `media` is the file of `item`.
        """
        if not self._mover.takes(media):
            return NOT_SHOWN
        if item.content_index < 0:  # The request does not have the message of the file.
            return "This run does not load its message, so it cannot be attached."
        tokens = estimate_contents_tokens([types.Content(parts=[media])])
        if tokens > _MAX_FILE_RATIO * self._window_tokens:
            return f"Its {tokens:,} tokens are too many for the context window."
        return ""

    def _read(self, item: Item, offset: int) -> str:
        """Returns a page of an item's text, from the character `offset` on."""
        text_chars = len(item.text)
        if offset >= text_chars:
            return f"[{item.heading}]\nOffset {offset} lies behind its end."

        head = f"[{item.heading}; from {offset}]\n"
        # `next_call` and `next_line` have `{}` in place of the next offset.
        next_call = f"recall_history(item={item.handle!r}, offset={{}})"
        next_line = phrases.GOES_ON.format(next_call)
        # The next offset is not known yet. It has at most as many digits as the number
        # of characters.
        longest_frame = f"{head}\n{next_line.format(text_chars)}"
        room_tokens = self._page_tokens - self._count(longest_frame)
        text = self._cut_end(item.text[offset:], room_tokens)

        end = offset + len(text)
        tail = phrases.END_OF_ITEM
        if end < text_chars:
            tail = next_line.format(end)
        return f"{head}{phrases.quote(text)}\n{tail}"

    def _list(self, hidden: Sequence[Item], offset: int) -> str:
        """Returns a page of the list of items, without the first `offset` items."""
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
        return self._join_page(frame, [f"- {item.title}" for item in items[offset:]])

    def _search(self, hidden: Sequence[Item], query: str, offset: int) -> str:
        """Returns a page of excerpts from the items that match a query.

        The first `offset` matches are left out.
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
        excerpts = self._write_excerpts(matches[offset:], self._count_room(frame))
        return self._join_page(frame, excerpts)

    def _write_excerpts(self, matches: Sequence[Match], room_tokens: int) -> list[str]:
        """Returns excerpts from the matches, until the room of a page is used up.

        Each excerpt may take half of the room that is left, so the best matches get
        most. If no other match follows, an excerpt may take all of the room that is
        left. Any excerpt may take `_MIN_EXCERPT_TOKENS`, so an excerpt may exceed the
        room. Then no other excerpt follows, and `_join_page` leaves this one out,
        unless the page would be empty.
        """
        excerpts = list[str]()
        left_tokens = room_tokens
        for match in matches:
            is_last_match = match is matches[-1]
            share_tokens = left_tokens if is_last_match else left_tokens // 2
            excerpt = self._excerpt(match, max(_MIN_EXCERPT_TOKENS, share_tokens))
            excerpts.append(excerpt)
            left_tokens -= self._count(excerpt) + 1  # A token for the line break.
            if left_tokens < 0:
                break
        return excerpts

    def _excerpt(self, match: Match, most_tokens: int) -> str:
        """Returns the whole text of an item if it fits, else a part of the text.

        A line above the text names the item:

        - "[HANDLE grep result {"pattern": "x"}]" stands above a whole text.
        - "[HANDLE grep result {"pattern": "x"}, 9,120 characters; from 840]" stands
          above a part, and says where the part begins.

        Args:
            match: The passage of the item that matches the query best.
            most_tokens: The most tokens of the excerpt, the line included.
        """
        item = match.item
        # The hint of a message repeats the beginning of the text. The hint of a result
        # comes from the arguments of the call, so the hint is not in the text.
        name = f"{item.label} {item.hint}" if item.args else item.label
        whole_line = f"[{item.handle} {phrases.quote_line(name)}]\n"
        text_tokens = most_tokens - self._count(whole_line)
        may_fit = len(item.text) <= _MAX_CHARS_PER_TOKEN * text_tokens
        if may_fit and self._count(item.text) <= text_tokens:
            # The text of a file may be empty: then the line stands alone.
            return f"{whole_line}{phrases.quote(item.text)}".rstrip("\n")

        # The part begins at the position or before, so the number in its line has no
        # more digits than the position.
        position = match.position
        part_line_tokens = self._count(f"[{item.title}; from {position}]\n")
        room_tokens = max(_MIN_TEXT_TOKENS, most_tokens - part_line_tokens)
        # A third of the room goes to the text before the position.
        start = self._find_start(item.text, position, room_tokens // 3)
        part = self._cut_end(item.text[start:], room_tokens)
        return f"[{item.title}; from {start}]\n{phrases.quote(part)}"

    def _find_start(self, text: str, position: int, lead_tokens: int) -> int:
        """Returns the index in a text from which a lead goes up to a position.

        The lead is the text between the two. It is as long as `lead_tokens` allow.
        """
        lead_chars = lead_tokens * _MAX_CHARS_PER_TOKEN
        before = text[max(0, position - lead_chars) : position]
        # `_cut_end` keeps the beginning of a text, but the lead is the end of `before`.
        # So the text is reversed.
        reversed_lead = self._cut_end(before[::-1], lead_tokens)
        return position - len(reversed_lead)

    def _join_page(self, frame: _Frame, blocks: Sequence[str]) -> str:
        """Returns a page: as many blocks as fit, at least one, between two lines.

        The last line has the call that gets the next page, or says that this page is
        the last.

        Args:
            frame: The lines around the blocks.
            blocks: The blocks from `frame.offset` on, at least one. The list may end
                early if its blocks already fill the page.
        """
        left_tokens = self._count_room(frame)
        page_blocks = list[str]()
        for block in blocks:
            left_tokens -= self._count(block) + 1  # A token for the line break.
            if left_tokens < 0 and page_blocks:
                break
            page_blocks.append(block)

        end = frame.offset + len(page_blocks)
        tail = phrases.END_OF_LIST
        if end < frame.total:
            tail = phrases.MORE.format(frame.next_call.format(end))
        return "\n".join([frame.head, *page_blocks, tail])

    def _count_room(self, frame: _Frame) -> int:
        """Returns how many tokens the blocks of a page may take.

        The other tokens of the page are for the lines before and after the blocks.
        """
        frame_tokens = self._count(frame.head) + self._count(frame.next_call)
        return self._page_tokens - frame_tokens - _SPARE_TOKENS

    def _cut_end(self, text: str, room_tokens: int) -> str:
        """Returns the beginning of a text that fits a room; at least one character.

        The text is cut in proportion to its tokens, step by step, until it fits. For
        example, a text of 300 tokens is cut to a third of its characters for a room of
        100 tokens. If this third has 110 tokens, it is cut to ten elevenths.
        """
        beginning = text[: max(1, room_tokens) * _MAX_CHARS_PER_TOKEN]
        tokens = self._count(beginning)
        while tokens > room_tokens and len(beginning) > 1:
            # The ratio is below 1, so each step cuts at least one character.
            ratio = max(_MIN_CUT_RATIO, room_tokens / tokens)
            most_chars = max(1, int(len(beginning) * ratio))
            beginning = beginning[:most_chars]
            tokens = self._count(beginning)
        return beginning


@dataclass(frozen=True)
class _Frame:
    """The lines around a page of blocks, which are excerpts or lines of a list.

    Attributes:
        head: The first line.
        next_call: The call that gets the next page, with `{}` in place of its offset.
        offset: How many blocks the pages before this one have.
        total: How many blocks all pages together have.
    """

    head: str
    next_call: str
    offset: int
    total: int


def _encodable(text: str) -> str:
    """Replaces halves of surrogate pairs, which no client can send."""
    return text.encode("utf-8", "replace").decode()


def _read_offset(value: object) -> int:
    """Returns the offset that a model has written, from 0 to `_MAX_OFFSET`.

    Returns 0 if the model has written no number, or a number below 0.
    """
    try:
        number: int = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return 0
    if number < 0:
        return 0
    return min(number, _MAX_OFFSET)
