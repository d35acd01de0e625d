"""The messages, tool results and files of a history, one by one, under handles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from google.genai import types

from contextguard_adk.history.coverage import HANDLE_CHARS, handle_of
from contextguard_adk.history.pairs import take_call, is_relay
from contextguard_adk.measuring.shortening import TokenCounter
from contextguard_adk.summarizing.transcript import (
    HIDDEN_CALLS,
    RECALL_TOOL,
    describe_media,
    payload_text,
)

MAX_HINT_CHARS = 60
MIN_LISTED_CHARS = 300
"""A shorter message or result is not worth a line of the index."""

INDEX_HEADING = (
    "[Items left out of this summary, newest first. recall_history(item=…) reads one, "
    "recall_history(query=…) searches all of them.]"
)
INDEX_GAP = "- … and older ones; recall_history() lists them all"


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
        if is_relay(content):
            author = "other agent's message"
            del parts[0]  # ADK's preamble.
        else:
            author = f"{content.role or 'user'} message"
        for part in parts:
            if part.thought and not part.function_call:
                continue
            items.extend(_read_part(part, author, index, waiting))
    return items


def _read_part(
    part: types.Part,
    author: str,
    index: int,
    waiting: list[tuple[int, types.FunctionCall]],
) -> list[Item]:
    """Reads the items of one part; remembers calls until their results come."""
    handle = handle_of(part)
    if part.text:
        return [Item(handle, author, _quote(part.text), part.text, index)]
    if call := part.function_call:
        waiting.append((index, call))
        if call.name in HIDDEN_CALLS or call.name == RECALL_TOOL or not call.args:
            return []
        text = payload_text(call.args)
        return [Item(handle, f"{call.name} call", "", text, index, is_call=True)]
    if response := part.function_response:
        found = take_call(waiting, response)
        args = found[1].args if found else None
        if response.name in HIDDEN_CALLS or response.name == RECALL_TOOL:
            return []
        hint = _clip(payload_text(args)) if args else ""
        label = f"{response.name} result"
        text = payload_text(response.response) if response.response else ""
        files = [_read_file(media, index) for media in _media_of(response)]
        return [Item(handle, label, hint, text, index), *files]
    if part.executable_code:
        code = part.executable_code.code or ""
        return [Item(handle, "code that was run", "", code, index)]
    if part.code_execution_result:
        output = part.code_execution_result.output or ""
        return [Item(handle, "output of code", "", output, index)]
    if part.inline_data or part.file_data:
        return [_read_file(part, index)]
    return []


def list_files(contents: Sequence[types.Content], indexes: Iterable[int]) -> list[Item]:
    """Lists the files among the items, without reading anything else."""
    files: list[Item] = []
    for index in indexes:
        for part in contents[index].parts or ():
            if not part or part.thought or part.text or part.function_call:
                continue
            response = part.function_response
            if response is None and (part.inline_data or part.file_data):
                files.append(_read_file(part, index))
            elif response and response.name not in HIDDEN_CALLS:
                files += [_read_file(media, index) for media in _media_of(response)]
    return files


def _media_of(response: types.FunctionResponse) -> list[types.Part]:
    """The files of a tool's result, as parts of their own."""
    parts = []
    for item in response.parts or ():
        if item.inline_data:
            blob = item.inline_data
            data = types.Blob(
                data=blob.data, mime_type=blob.mime_type, display_name=blob.display_name
            )
            parts.append(types.Part(inline_data=data))
        elif item.file_data:
            reference = types.FileData(
                file_uri=item.file_data.file_uri,
                mime_type=item.file_data.mime_type,
                display_name=item.file_data.display_name,
            )
            parts.append(types.Part(file_data=reference))
    return parts


def _read_file(part: types.Part, index: int) -> Item:
    return Item(handle_of(part), describe_media(part), "", "", index, media=part)


def _quote(text: str) -> str:
    return f'"{_clip(text)}"'


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
    lines = [
        f"- {item.title}"
        for item in reversed(items)
        if item.media or len(item.text) >= MIN_LISTED_CHARS
    ]
    old_lines = known.splitlines()[1:]
    had_gap = bool(old_lines) and old_lines[-1] == INDEX_GAP
    lines += old_lines[:-1] if had_gap else old_lines
    lines = list({_handle_in(line): line for line in reversed(lines)}.values())[::-1]
    room = budget_tokens - count(f"{INDEX_HEADING}\n{INDEX_GAP}")
    fitting = 0
    for line in lines:
        room -= count(line) + 1
        if room < 0:
            break
        fitting += 1
    if not fitting:
        return ""
    gap = [INDEX_GAP] if had_gap or fitting < len(lines) else []
    return "\n".join([INDEX_HEADING, *lines[:fitting], *gap])


def _handle_in(line: str) -> str:
    return line[2 : 2 + HANDLE_CHARS]
