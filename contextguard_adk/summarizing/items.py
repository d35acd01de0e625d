"""The messages, tool results and files of a history, one by one, under handles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from google.genai import types

from contextguard_adk.history.coverage import HANDLE_CHARS, handle_of
from contextguard_adk.history.pairs import is_relay, take_call
from contextguard_adk.measuring.shortening import TokenCounter
from contextguard_adk.summarizing.transcript import (
    HIDDEN_CALLS,
    RECALL_TOOL,
    describe_media,
    payload_text,
)

UNLISTED_CALLS = HIDDEN_CALLS | {RECALL_TOOL}
MAX_HINT_CHARS = 60
MIN_LISTED_CHARS = 300
"""A shorter message or result is not worth a line of the index."""

INDEX_HEADING = (
    "[Items left out of this summary, newest first. recall_history(item=…) reads one, "
    "recall_history(query=…) searches all of them.]"
)
INDEX_GAP = "- … and older ones; recall_history() lists them all"


ATTACHED_KEY = "attached"
"""In a result of the recall tool: the handle of the file to attach."""


@dataclass(frozen=True)
class Item:
    """One message, call, tool result or file of a history.

    Attributes:
        handle: Its name, a digest of what it says.
        label: What it is, such as `read_file result`.
        hint: A tool's arguments, or a message's first words, in short.
        text: What it says; "" for a file.
        content_index: Where it stands.
        is_call: Whether it is what a tool was called with.
        media: The part that holds the file, for images and files.
    """

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


def list_items(contents: Sequence[types.Content], indexes: Iterable[int]) -> list[Item]:
    """Lists the items of some contents, oldest first.

    Thoughts, requests for credentials, and what the recall tool itself has returned
    are left out.
    """
    items: list[Item] = []
    waiting: list[tuple[int, types.FunctionCall]] = []
    for index in indexes:
        content = contents[index]
        parts = [part for part in content.parts or () if part]
        author = f"{content.role or 'user'} message"
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
    item = Item(handle_of(part), f"{response.name} result", hint, text, index)
    return [item, *(_read_file(media, index) for media in _media_of(response))]


def _media_of(response: types.FunctionResponse) -> Iterator[types.Part]:
    """Yields the files of a tool's result as parts of their own."""
    for item in response.parts or ():
        if item.inline_data:
            blob = types.Blob(**item.inline_data.model_dump())
            yield types.Part(inline_data=blob)
        elif item.file_data:
            reference = types.FileData(**item.file_data.model_dump())
            yield types.Part(file_data=reference)


def _read_file(part: types.Part, index: int) -> Item:
    return Item(handle_of(part), describe_media(part), "", "", index, media=part)


def _clip(text: str) -> str:
    """The beginning of a text in one line."""
    line = " ".join(text[: 4 * MAX_HINT_CHARS].split())
    line = line.encode("utf-8", "replace").decode()
    return line if len(line) <= MAX_HINT_CHARS else f"{line[:MAX_HINT_CHARS]}…"


def write_index(
    items: Sequence[Item], known: str, budget_tokens: int, count: TokenCounter
) -> str:
    """Writes the index of items that a summary leaves out, newest first.

    Args:
        items: What is newly left out, oldest first.
        known: The index so far.
        budget_tokens: What the index may take.
        count: Tokens of a text.

    Returns:
        The index with its heading; "" where nothing is worth a line.
    """
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
    fitting = []
    for line in lines.values():
        room -= count(line) + 1
        if room < 0:
            has_gap = True
            break
        fitting.append(line)
    if not fitting:
        return ""
    return "\n".join([INDEX_HEADING, *fitting, *([INDEX_GAP] if has_gap else [])])


def attach_files(
    sent: list[types.Content],
    contents: Sequence[types.Content],
    history: Iterable[int],
) -> list[types.Content]:
    """Puts each file that the agent has read back behind its announcement.

    Args:
        sent: What is to be sent.
        contents: The contents as ADK built them.
        history: Indexes of those that are history.

    Returns:
        What is to be sent with the files; nothing is changed in place.
    """
    if not any(map(_announced, sent)):
        return sent
    known = {item.handle: item for item in list_items(contents, history)}
    attached: list[types.Content] = []
    for content in sent:
        attached.append(content)
        for handle in _announced(content):
            item = known.get(handle)
            if item and item.media:
                title = types.Part(text=f"[{item.title}]")
                attached.append(types.Content(role="user", parts=[title, item.media]))
    return attached


def _announced(content: types.Content) -> list[str]:
    """Handles of the files that results in a content announce."""
    handles = []
    for part in content.parts or ():
        response = part.function_response if part else None
        if response and response.name == RECALL_TOOL:
            handle = (response.response or {}).get(ATTACHED_KEY)
            if isinstance(handle, str):
                handles.append(handle)
    return handles
