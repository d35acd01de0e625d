"""Contents as text: tools' arguments and results, files, items under handles."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import pydantic_core
from google.genai import types

from contextguard_adk._history.adk_events import INTERNAL_CALLS, RECALL_TOOL
from contextguard_adk._history.contents import is_relay, parts_of, take_call
from contextguard_adk._history.fingerprints import handle_of
from contextguard_adk._measuring.tokens import safe_repr

UNLISTED_CALLS = INTERNAL_CALLS | {RECALL_TOOL}
MIN_LISTED_CHARS = 300  # A shorter message or result is not worth a line of a list.


def payload_text(payload: object) -> str:
    """Renders a tool's arguments or result as JSON, a text as it is."""
    # ADK wraps everything but a dict as `{"result": …}`.
    value = payload.get("result") if isinstance(payload, dict) else None
    if isinstance(payload, dict) and len(payload) == 1 and isinstance(value, str):
        return value
    try:
        raw = pydantic_core.to_json(payload, fallback=safe_repr)
        return raw.decode("utf-8", "replace")
    except (ValueError, TypeError, RecursionError):
        pass  # Lone surrogates, bytes that are no text; cycles, deep nesting.
    try:
        text = json.dumps(payload, ensure_ascii=False, default=safe_repr)
    except (ValueError, TypeError, RecursionError):
        fields = payload if isinstance(payload, dict) else {"payload": payload}
        text = "\n".join(
            f"{name}: {value if isinstance(value, str | int | float) else type(value)}"
            for name, value in fields.items()
        )
    return text.encode("utf-8", "replace").decode()


def describe_media(part: types.Part | types.FunctionResponsePart) -> str:
    """Describes an image or a file without its bytes; "" for other parts."""
    media = part.inline_data or part.file_data
    if not media:
        return ""
    size = f", {len(part.inline_data.data or b'')} bytes" if part.inline_data else ""
    address = part.file_data.file_uri if part.file_data else ""
    name = (media.display_name or address or "")[-120:]  # Some addresses hold pages.
    label = f" {name!r}" if name else ""
    return f"[attached {media.mime_type or 'file'}{label}{size}]"


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
