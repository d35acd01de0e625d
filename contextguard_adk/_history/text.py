"""Writes contents as text: tools' arguments and results, files, items with handles.

A handle is a short name under which the recall tool finds the whole text again.
"""

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
    PlacedCall,
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
_UNUSED_CODECS = frozenset(
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
"""The charsets that are ignored if a MIME type names them.

UTF-8, which contains ASCII, is tried anyway. The other codecs are slow, or not used in
files.
"""

_MAX_FILE_NAME_CHARS = 120
"""How many characters of a file's name are written, from its end.

The address of a file may hold the whole file as base64.
"""

_MIN_LISTED_CALL_CHARS = 300
"""A call with shorter arguments has no line in lists of items."""

_CHARSET = re.compile(r"""charset=["']?([\w-]{1,40})""", re.IGNORECASE)


def payload_text(payload: object) -> str:
    """Writes a tool's arguments or result as JSON.

    A result that is one text is written as it is: {"result": "Done."} -> "Done."
    """
    # ADK wraps everything but a dict as `{"result": …}`.
    if isinstance(payload, dict) and len(payload) == 1:
        value = payload.get("result")
        if isinstance(value, str):
            return value

    try:
        json_bytes = pydantic_core.to_json(payload, fallback=safe_repr)
        return json_bytes.decode("utf-8", "replace")
    except (ValueError, TypeError, RecursionError):
        # Lone surrogates, bytes that are no text; cycles, deep nesting.
        return _odd_payload_text(payload)


def _odd_payload_text(payload: object) -> str:
    """Writes a payload that pydantic refuses, as JSON if the standard library can.

    Otherwise it has one line for each field. The line has the value of the field if it
    is a text or a number, and else its type.
    """
    try:
        text = json.dumps(payload, ensure_ascii=False, default=safe_repr)
    except (ValueError, TypeError, RecursionError):
        fields = payload if isinstance(payload, dict) else {"payload": payload}
        lines = []
        for name, value in fields.items():
            is_plain = isinstance(value, str | int | float)
            lines.append(f"{name}: {value if is_plain else type(value)}")
        text = "\n".join(lines)
    return text.encode("utf-8", "replace").decode()


def describe_media(part: types.Part | types.FunctionResponsePart) -> str:
    """Describes an image or a file without its bytes; "" for other parts."""
    name = name_media(part)
    return ATTACHED.format(name) if name else ""


def name_media(part: types.Part | types.FunctionResponsePart) -> str:
    """Returns the MIME type, the name and the size of an image or a file, in one line.

    For example: "image/png 'cat.png', 2048 bytes". Facts that are not known are left
    out. "" for a part that is no file.
    """
    if part.inline_data:
        blob = part.inline_data
        mime_type = blob.mime_type
        name = blob.display_name
        size_text = f", {len(blob.data or b'')} bytes"
    elif part.file_data:
        mime_type = part.file_data.mime_type
        name = part.file_data.display_name or part.file_data.file_uri
        size_text = ""
    else:
        return ""

    name_text = f" {name[-_MAX_FILE_NAME_CHARS:]!r}" if name else ""
    return quote_line(f"{mime_type or 'file'}{name_text}{size_text}")


def file_text(part: types.Part) -> str:
    """Returns the text of a file.

    "" for an empty file, a file whose MIME type is not that of a text, and a file whose
    text has a zero character: such a file is binary.
    """
    blob = part.inline_data
    if blob is None or not blob.data:
        return ""

    mime_type = blob.mime_type or ""
    if not _TEXT_FILE.match(mime_type):
        return ""
    text = _decode(blob.data, mime_type)
    return "" if "\0" in text else text


def _decode(data: bytes, mime_type: str) -> str:
    """Decodes a file with text. The charset is the first of these that applies:

    1. The charset that the MIME type names, if Python knows it and it is not one of
       `_UNUSED_CODECS`: "text/csv; charset=latin1" -> "iso8859-1".
    2. UTF-16, if the file begins with its byte order mark.
    3. UTF-8, if at most 1 % of the characters are invalid in it.
    4. Windows-1252.
    """
    named_charset = _CHARSET.search(mime_type)
    if named_charset:
        # Python raises a LookupError for a codec that it does not know, and for one
        # that does not decode to text.
        with suppress(LookupError, UnicodeError):
            codec_name = codecs.lookup(named_charset[1]).name
            if codec_name.replace("-", "_") not in _UNUSED_CODECS:
                return data.decode(codec_name, "replace")

    utf16_marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    if data.startswith(utf16_marks):
        return data.decode("utf-16", "replace")

    utf8_text = data.decode("utf-8-sig", "replace")
    invalid_count = utf8_text.count("\ufffd")
    if invalid_count <= len(utf8_text) // 100:
        return utf8_text
    return data.decode("cp1252", "replace")


@dataclass(frozen=True)
class Said:
    """One part of a history, with the facts that are needed to write it.

    Attributes:
        index: The index of its content.
        part: The part.
        author: "user", "model" or "other agent".
        whole: The part before it was shortened; None if it gets no handle.
        call: For a result, the call that it answers.
    """

    index: int
    part: types.Part
    author: str
    whole: types.Part | None
    call: types.FunctionCall | None

    @property
    def handle(self) -> str:
        """The handle of the whole part; "" if the part cannot be read back."""
        return handle_of(self.whole) if self.whole else ""

    @property
    def text(self) -> str:
        """The text of the part, a tool's arguments or result as JSON; "" for a file."""
        payload = payload_of(self.part)
        if payload:
            return payload_text(payload)
        return self.part.text or code_of(self.part)


def walk_parts(
    contents: Sequence[types.Content],
    indexes: Iterable[int],
    outputs: Collection[int] = (),
    wholes: Sequence[types.Content] | None = None,
) -> Iterator[Said]:
    """Yields the parts of contents, oldest first, without thoughts and credentials.

    Args:
        contents: The contents of a request.
        indexes: The contents that are read.
        outputs: The indexes of texts that executed code has printed.
        wholes: The same contents before they were shortened, for the handles of the
            parts; None for no handles.
    """
    waiting: list[PlacedCall] = []
    for index in indexes:
        content = contents[index]
        parts = parts_of(content)
        whole_parts = parts_of(wholes[index]) if wholes else [None] * len(parts)

        author = content.role or "user"
        start = 0
        if is_relay(content):
            author = "other agent"
            start = 1  # ADK's preamble is no part of the conversation.

        for part, whole in zip(parts[start:], whole_parts[start:], strict=True):
            answered_call = _update_waiting(waiting, index, part)
            if _is_private(part):
                continue
            written_part = _as_output(part) if part.text and index in outputs else part
            yield Said(index, written_part, author, whole, answered_call)


def _update_waiting(
    waiting: list[PlacedCall], index: int, part: types.Part
) -> types.FunctionCall | None:
    """Updates the calls that wait for a result, once a part is read.

    - A call is added to `waiting`; returns None.
    - For a result, the call that it answers is removed and returned; None if no call
      matches.
    - For other parts nothing changes; returns None.
    """
    if part.function_call:
        waiting.append(PlacedCall(index, part.function_call))
    if not part.function_response:
        return None
    answered = take_call(waiting, part.function_response)
    return answered.call if answered else None


def _is_private(part: types.Part) -> bool:
    """Whether nobody may read a part: a thought, or a call of ADK with credentials.

    A signed call may be marked as a thought; it is still a call.
    """
    tool = part.function_call or part.function_response
    if tool is not None and tool.name in INTERNAL_CALLS:
        return True
    return bool(part.thought) and not part.function_call


def _as_output(part: types.Part) -> types.Part:
    """Returns the output of code that ADK shows as a text."""
    result = types.CodeExecutionResult(output=part.text)
    return types.Part(code_execution_result=result)


@dataclass(frozen=True)
class Item:
    """A message, a call, a tool's result or a file, as the recall tool lists it.

    Attributes:
        handle: Its short name.
        label: Its kind: the author of a message, the name of a tool.
        hint: The beginning of a message, or of the arguments of a result's call, in one
            line of at most 60 characters.
        text: Its text; "" for a file that has none.
        content_index: The index of its content.
        args: For a result, the first 1,000 characters of its call's arguments.
        is_call: Whether it is a call.
        media: The file; None for other items.
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
        """Whether the item has a line in lists.

        A short call has none: the line of its result shows the arguments.
        """
        return not self.is_call or len(self.text) >= _MIN_LISTED_CALL_CHARS

    @property
    def title(self) -> str:
        """The item in one line, without its text."""
        described = quote_line(f"{self.label} {self.hint}")
        return f"{self.handle} {described}".strip() + self._extent

    @property
    def heading(self) -> str:
        """The line above the item where it is read: its title, or the file's name."""
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
    """Lists the items of some contents, oldest first.

    A part may have an item for its text, and one for each of its files.

    Args:
        contents: The contents of a request.
        indexes: The contents whose items are listed.
        outputs: The indexes of texts that executed code has printed.
        wholes: The same contents before they were shortened, for the handles of the
            items; None if the contents are whole.
    """
    items: list[Item] = []
    for said in walk_parts(contents, indexes, outputs, wholes or contents):
        label = _label(said)
        if not label:
            continue

        result = said.part.function_response
        if said.text or result:
            items.append(_make_item(said, label))

        possible_files = result_media(result) if result else [said.part]
        items += _list_files(possible_files, said.index)
    return items


def _make_item(said: Said, label: str) -> Item:
    """Makes the item of a text, a call or a result."""
    args = payload_text(said.call.args) if said.call and said.call.args else ""
    hint = _hint(said, args)
    return Item(
        handle=said.handle,
        label=label,
        hint=hint,
        text=said.text,
        content_index=said.index,
        args=args[:1_000] if hint else "",
        is_call=said.part.function_call is not None,
    )


def _list_files(parts: Iterable[types.Part], content_index: int) -> Iterator[Item]:
    """Yields an item for each part that is an image or a file."""
    for part in parts:
        described = describe_media(part)
        if described:
            yield Item(
                handle=handle_of(part),
                label=described,
                hint="",
                text=file_text(part),
                content_index=content_index,
                media=part,
            )


def _label(said: Said) -> str:
    """Returns the label of a part: the author of a message, or the name of a tool.

    "" for a call or a result of the recall tool: these are copies of other items. The
    label of a file is not used: `_list_files` describes the file itself.
    """
    part = said.part
    if part.function_call:
        name = part.function_call.name
        return "" if name == RECALL_TOOL else f"{name} call"
    if part.function_response:
        name = part.function_response.name
        return "" if name == RECALL_TOOL else f"{name} result"
    if part.text:
        return f"{said.author} message"
    return "code that was run" if part.executable_code else "output of code"


def _hint(said: Said, args: str) -> str:
    """Returns the beginning of a message, or of the arguments of a result's call.

    "" for a call, a file and code.

    Args:
        said: The part with the message or the result.
        args: For a result, the arguments of the call that it answers; else "".
    """
    part = said.part
    if part.function_response:
        return _clip(args)
    if part.function_call:
        return ""
    return f'"{_clip(part.text)}"' if part.text else ""


def _clip(text: str) -> str:
    """Returns the beginning of a text in one line, at most 60 characters."""
    beginning = text[:240]  # Enough for 60 characters, even with many spaces.
    line = " ".join(beginning.split()).encode("utf-8", "replace").decode()
    return line if len(line) <= 60 else f"{line[:60]}…"
