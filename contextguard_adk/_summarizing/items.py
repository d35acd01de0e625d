"""The messages, tool results and files of a history, one by one, under handles."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from google.genai import types

from contextguard_adk._history.coverage import HANDLE_CHARS, handle_of
from contextguard_adk._history.pairs import is_relay, parts_of, take_call
from contextguard_adk._history.shown import INTERNAL_CALLS, RECALL_TOOL
from contextguard_adk._measuring.budgets import TokenCounter
from contextguard_adk._summarizing.transcript import describe_media, payload_text

UNLISTED_CALLS = INTERNAL_CALLS | {RECALL_TOOL}
MIN_LISTED_CHARS = 300  # A shorter message or result is not worth a line of the index.

INDEX_HEADING = (
    "[Items left out of this summary, newest first. recall_history(item=…) reads one, "
    "recall_history(query=…) searches all of them.]"
)
INDEX_GAP = "- … and older ones; recall_history() lists them all"

ATTACHED_KEY = "attached"  # In a result of the recall tool: the handle of a file.
LEFT_OUT_KEY = "attachments_left_out"  # In a result that came with files.


@dataclass(frozen=True)
class Item:
    """One message, call, tool result or file of a history; a file has no text."""

    handle: str
    label: str
    hint: str
    text: str
    content_index: int
    is_call: bool = False
    media: types.Part | None = None

    @property
    def is_listed(self) -> bool:
        """Whether it has a line in lists; the result shows what a short call was."""
        return not self.is_call or len(self.text) >= MIN_LISTED_CHARS

    @property
    def title(self) -> str:
        """The item in one line, without its text."""
        extent = "" if self.media else f", {len(self.text):,} characters"
        return " ".join(filter(None, (self.handle, self.label, self.hint))) + extent


def list_items(
    contents: Sequence[types.Content],
    indexes: Iterable[int],
    outputs: Collection[int] = (),
) -> list[Item]:
    """Lists the items of some contents, oldest first; no thoughts, no credentials.

    `outputs` are texts that executed code has printed.
    """
    items: list[Item] = []
    waiting: list[tuple[int, types.FunctionCall]] = []
    for index in indexes:
        content = contents[index]
        parts = parts_of(content)
        author = f"{content.role or 'user'} message"
        if index in outputs:
            author = "output of code"
        if is_relay(content):
            author = "other agent's message"
            del parts[0]  # ADK's preamble.
        for part in parts:
            if part.function_call:
                waiting.append((index, part.function_call))
            elif part.thought:
                continue
            if part.function_response:
                items += _read_result(part.function_response, part, index, waiting)
            elif part.inline_data or part.file_data:
                items.append(_read_file(part, index))
            elif said := _read_text(part, author):
                is_call = part.function_call is not None
                items.append(Item(handle_of(part), *said, index, is_call))
    return items


def _read_text(part: types.Part, author: str) -> tuple[str, str, str] | None:
    """Returns the label, hint and text of a message, a call, or code."""
    if part.text:
        return author, f'"{_clip(part.text)}"', part.text
    if call := part.function_call:
        if call.name in UNLISTED_CALLS or not call.args:
            return None
        return f"{call.name} call", "", payload_text(call.args)
    if part.executable_code:
        return "code that was run", "", part.executable_code.code or ""
    if part.code_execution_result:
        return "output of code", "", part.code_execution_result.output or ""
    return None


def _read_result(
    response: types.FunctionResponse,
    part: types.Part,
    index: int,
    waiting: list[tuple[int, types.FunctionCall]],
) -> list[Item]:
    """Returns a tool's result, with the call's arguments as a hint, and its files."""
    found = take_call(waiting, response)
    if response.name in UNLISTED_CALLS:
        return []
    hint = _clip(payload_text(found[1].args)) if found and found[1].args else ""
    text = payload_text(response.response) if response.response else ""
    items = [Item(handle_of(part), f"{response.name} result", hint, text, index)]
    for media in response.parts or ():
        if media.inline_data or media.file_data:
            file = types.Part.model_validate(media.model_dump(exclude_none=True))
            items.append(_read_file(file, index))
    return items


def _read_file(part: types.Part, index: int) -> Item:
    return Item(handle_of(part), describe_media(part), "", "", index, media=part)


def _clip(text: str) -> str:
    """The beginning of a text in one line, at most 60 characters."""
    line = " ".join(text[:240].split()).encode("utf-8", "replace").decode()
    return line if len(line) <= 60 else f"{line[:60]}…"


def write_index(
    items: Sequence[Item], known: str, budget_tokens: int, count: TokenCounter
) -> str:
    """Writes an index of items, newest first, before what the known index lists."""
    known_lines = known.splitlines()[1:]
    has_gap = INDEX_GAP in known_lines
    new_lines = (
        f"- {item.title}"
        for item in reversed(items)
        if item.media or len(item.text) >= MIN_LISTED_CHARS
    )
    lines: dict[str, str] = {}
    for line in (*new_lines, *known_lines):
        if line != INDEX_GAP:
            lines.setdefault(line[2 : 2 + HANDLE_CHARS], line)
    room = budget_tokens - count(f"{INDEX_HEADING}\n{INDEX_GAP}")
    used = itertools.accumulate(count(line) + 1 for line in lines.values())
    fitting = [*lines.values()][: sum(most <= room for most in used)]
    if not fitting:
        return ""
    gap = [INDEX_GAP] if has_gap or len(fitting) < len(lines) else []
    return "\n".join([INDEX_HEADING, *fitting, *gap])


def attach_files(
    sent: list[types.Content], contents: Sequence[types.Content], history: Iterable[int]
) -> list[types.Content]:
    """Puts each file that the agent has read back behind its announcement."""
    if not any(map(_announced, sent)):
        return sent
    known = {item.handle: item for item in list_items(contents, history)}
    attached: list[types.Content] = []
    for content in sent:
        attached.append(content)
        for handle in _announced(content):
            item = known.get(handle)
            if item and item.media:
                # Without a text: that would begin a turn for Gemini.
                attached.append(types.Content(role="user", parts=[item.media]))
    return attached


def _announced(content: types.Content) -> list[str]:
    """Handles of the files that results in a content announce."""
    results = (part.function_response for part in parts_of(content))
    recalled = (r.response or {} for r in results if r and r.name == RECALL_TOOL)
    handles = (response.get(ATTACHED_KEY) for response in recalled)
    return [handle for handle in handles if isinstance(handle, str)]


def leave_out_media(
    contents: list[types.Content], max_bytes: int | None
) -> list[types.Content]:
    """Describes the oldest images and files in words, where all take too many bytes.

    Down to half of `max_bytes` where that is exceeded, at each point of the history
    anew: so the next requests begin with the same bytes. The newest one stays.
    """
    if max_bytes is None:
        return contents
    kept: list[tuple[int, int, int]] = []
    left_out: dict[int, set[int]] = {}
    for index, content in enumerate(contents):
        for place, part in enumerate(content.parts or ()):
            if size_bytes := _media_bytes(part):
                kept.append((size_bytes, index, place))
        if sum(size for size, *_ in kept) > max_bytes:
            while len(kept) > 1 and sum(size for size, *_ in kept) > max_bytes // 2:
                _, oldest, place = kept.pop(0)
                left_out.setdefault(oldest, set()).add(place)
    if not left_out:
        return contents
    return [
        _describe_parts(content, left_out.get(index, ()))
        for index, content in enumerate(contents)
    ]


def count_media_bytes(contents: Iterable[types.Content]) -> int:
    """Counts the bytes of the images and files that contents carry themselves."""
    return sum(_media_bytes(part) for each in contents for part in each.parts or ())


def _media_bytes(part: types.Part | None) -> int:
    if part is None:
        return 0
    response = part.function_response
    holders = (part, *((response and response.parts) or ()))
    blobs = (each.inline_data for each in holders)
    return sum(len(blob.data or b"") for blob in blobs if blob)


def _describe_parts(content: types.Content, places: Collection[int]) -> types.Content:
    """Replaces the media of some parts by their descriptions."""
    if not places:
        return content
    parts = list(content.parts or ())
    for place in places:
        part, update = parts[place], dict[str, object]()
        if response := part.function_response:
            said = {LEFT_OUT_KEY: [*map(describe_media, response.parts or ())]}
            result = {"parts": None, "response": {**(response.response or {}), **said}}
            update["function_response"] = response.model_copy(update=result)
        else:
            update = {"text": describe_media(part), "inline_data": None}
            update["video_metadata"] = None
        parts[place] = part.model_copy(update=update)
    return content.model_copy(update={"parts": parts})
