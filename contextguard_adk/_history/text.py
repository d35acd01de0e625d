"""Contents as text: tools' arguments and results, files, items under handles."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pydantic_core
from google.genai import types

from contextguard_adk._history.adk_events import INTERNAL_CALLS, RECALL_TOOL, code_of
from contextguard_adk._history.contents import (
    is_relay,
    parts_of,
    payload_of,
    result_media,
    take_call,
)
from contextguard_adk._history.fingerprints import handle_of
from contextguard_adk._measuring.tokens import safe_repr
from contextguard_adk._support.phrases import ATTACHED, quote_line

_TEXT_FILE = re.compile(
    r"text/|image/svg|application/(?:[\w.-]+\+)?(?:x-)?"
    r"(?:json|jsonl|jsonlines|ndjson|json5|xml|yaml|toml|csv|sql|sh|python"
    r"|javascript|typescript|ecmascript|graphql|httpd-php)\s*(?:;|$)",
    re.IGNORECASE,
)


# What is read as UTF-8 in any case, and codecs that are slow, or no charsets of files.
_OTHER_CODECS = frozenset(
    [
        "ascii",
        "utf_8",
        "punycode",
        "idna",
        "unicode_escape",
        "raw_unicode_escape",
        "utf_7",
    ]
)
_CHARSET = re.compile(r"""charset=["']?([\w-]{1,40})""", re.IGNORECASE)


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
    name = name_media(part)
    return ATTACHED.format(name) if name else ""


def name_media(part: types.Part | types.FunctionResponsePart) -> str:
    """Returns kind, name and size of an image or a file; "" for other parts."""
    media = part.inline_data or part.file_data
    if not media:
        return ""
    size = f", {len(part.inline_data.data or b'')} bytes" if part.inline_data else ""
    address = part.file_data.file_uri if part.file_data else ""
    name = (media.display_name or address or "")[-120:]  # Some addresses hold pages.
    label = f" {name!r}" if name else ""
    return quote_line(f"{media.mime_type or 'file'}{label}{size}")


def file_text(part: types.Part) -> str:
    """Returns what a file of text says; "" for other files, and where it says nothing.

    A file is one by its MIME type; one that holds zero bytes is none.
    """
    blob = part.inline_data
    if blob is None or not blob.data or not _TEXT_FILE.match(blob.mime_type or ""):
        return ""
    text = _decode(blob.data, blob.mime_type or "")
    return "" if "\0" in text else text


def _decode(data: bytes, mime_type: str) -> str:
    """The text of a file, by its charset, else UTF-8 or what Western Europe writes."""
    named = _CHARSET.search(mime_type)
    if named:
        with suppress(LookupError, UnicodeError):  # Also of what is no text encoding.
            charset = codecs.lookup(named[1]).name
            if charset.replace("-", "_") not in _OTHER_CODECS:
                return data.decode(charset, "replace")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace")

    text = data.decode("utf-8-sig", "replace")
    is_damaged = text.count("\ufffd") > len(text) // 100
    return data.decode("cp1252", "replace") if is_damaged else text


@dataclass(frozen=True)
class Said:
    """One part of a history; of a result also the call that it answers."""

    index: int
    part: types.Part
    author: str
    whole: types.Part | None
    call: types.FunctionCall | None

    @property
    def handle(self) -> str:
        """Under which the whole can be read back; "" where it cannot."""
        return handle_of(self.whole) if self.whole else ""

    @property
    def text(self) -> str:
        """What it says, a tool's arguments or result as JSON; "" for a file."""
        payload = payload_of(self.part)
        said = self.part.text or code_of(self.part)
        return payload_text(payload) if payload else said


def walk_parts(
    contents: Sequence[types.Content],
    indexes: Iterable[int],
    outputs: Collection[int] = (),
    wholes: Sequence[types.Content] | None = None,
) -> Iterator[Said]:
    """Yields what contents say, oldest first; no thoughts, no credentials.

    `outputs` are texts that executed code has printed. Handles are those of the
    contents that are `wholes`.
    """
    waiting: list[tuple[int, types.FunctionCall]] = []
    for index in indexes:
        content = contents[index]
        author = contents[index].role or "user"
        parts = parts_of(content)
        handled = parts_of(wholes[index]) if wholes else [None] * len(parts)
        pairs = list(zip(parts, handled, strict=True))
        if is_relay(content):
            author = "other agent"
            del pairs[0]  # ADK's preamble says nothing about the conversation.
        for part, whole in pairs:
            call = part.function_call
            result = part.function_response
            if call:
                waiting.append((index, call))
            answered = take_call(waiting, result) if result else None
            tool = call or result
            is_internal = tool is not None and tool.name in INTERNAL_CALLS
            if is_internal or (part.thought and not call):
                continue
            if part.text and index in outputs:
                printed = types.CodeExecutionResult(output=part.text)
                part = types.Part(code_execution_result=printed)
            yield Said(index, part, author, whole, answered and answered[1])


@dataclass(frozen=True)
class Item:
    """One message, call, tool result (with its call's arguments), or file.

    The text of a file is "" where it is no file of text.
    """

    handle: str
    label: str
    hint: str
    text: str
    content_index: int
    args: str = ""
    is_call: bool = False
    media: types.Part | None = None

    @property
    def is_listed(self) -> bool:
        """Whether it has a line in lists; the result shows what a short call was."""
        return not self.is_call or len(self.text) >= 300

    @property
    def title(self) -> str:
        """The item in one line, without its text."""
        described = quote_line(" ".join(filter(None, (self.label, self.hint))))
        return " ".join(filter(None, (self.handle, described))) + self._extent

    @property
    def heading(self) -> str:
        """The line above the item where it is read: its title, or the file it is."""
        if self.media is None:
            return self.title
        return f"{self.handle}: {name_media(self.media)}{self._extent}"

    @property
    def _extent(self) -> str:
        has_no_text = self.media is not None and not self.text
        return "" if has_no_text else f", {len(self.text):,} characters"


def list_items(
    contents: Sequence[types.Content],
    indexes: Iterable[int],
    outputs: Collection[int] = (),
    wholes: Sequence[types.Content] | None = None,
) -> list[Item]:
    """Lists the items of some contents, oldest first; see `walk_parts`."""
    items: list[Item] = []
    for said in walk_parts(contents, indexes, outputs, wholes or contents):
        part = said.part
        (label, hint) = _describe(said)
        result = part.function_response
        text = said.text
        media = result_media(result) if result else [part]
        if label and (text or result):
            args = payload_text(said.call.args)[:1_000] if said.call and hint else ""
            about = label, hint, text, said.index, args
            items.append(Item(said.handle, *about, part.function_call is not None))
        items += [
            Item(
                handle_of(file), described, "", file_text(file), said.index, media=file
            )
            for file in media
            if label and (described := describe_media(file))
        ]
    return items


def _describe(said: Said) -> tuple[str, str]:
    """Returns the label and hint of an item; "" for what has no item."""
    part = said.part
    hint = ""
    if tool := part.function_call or part.function_response:
        if tool.name == RECALL_TOOL:
            return "", ""
        if said.call and said.call.args:
            hint = _clip(payload_text(said.call.args))
        return f"{tool.name} {'call' if part.function_call else 'result'}", hint
    if part.text:
        return f"{said.author} message", f'"{_clip(part.text)}"'
    return "code that was run" if part.executable_code else "output of code", ""


def _clip(text: str) -> str:
    """The beginning of a text in one line, at most 60 characters."""
    line = " ".join(text[:240].split()).encode("utf-8", "replace").decode()
    return line if len(line) <= 60 else f"{line[:60]}…"
