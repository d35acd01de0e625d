"""Writes contents as text: tools' arguments and results, files, items with handles.

A tool of the guard, the recall tool, lets the agent search and read the messages that a
summary has replaced. An item is what this tool lists: a message, a call, a result or a
file. A handle is the short name of an item, under which the tool finds the whole text.
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
"""The MIME types of files that are text."""

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
"""Only this many characters at the end of a file's name or address are written.

An address may be a "data:" URL, which has the whole file as base64.
"""

_MIN_LISTED_CALL_CHARS = 300
"""A call with shorter arguments has no line in lists of items."""

_HINT_CHARS = 60
"""A hint is shortened to this many characters and an ellipsis."""

_ITEM_ARGS_CHARS = 1_000
"""A search reads only this many characters of the arguments of a result's call."""

_CHARSET = re.compile(r"""charset=["']?([\w-]{1,40})""", re.IGNORECASE)
"""The charset in a MIME type, such as "text/csv; charset=latin1"."""


def payload_text(payload: object) -> str:
    """Writes a tool's arguments or result as JSON.

    A result that is one text is written as it is: {"result": "Done."} -> "Done."
    """
    # A tool may return any value. If it is no dict, ADK makes it `{"result": value}`.
    if isinstance(payload, dict) and len(payload) == 1:
        value = payload.get("result")
        if isinstance(value, str):
            return value

    try:
        json_bytes = pydantic_core.to_json(payload, fallback=safe_repr)
        return json_bytes.decode("utf-8", "replace")
    except (ValueError, TypeError, RecursionError):
        # The payload has a lone surrogate, bytes that are no text, a cycle, or too many
        # levels.
        return _odd_payload_text(payload)


def _odd_payload_text(payload: object) -> str:
    """Writes a payload that pydantic refuses to write as JSON.

    The standard library may still write JSON. If not, each field gets a line: with the
    value of a text or a number, and otherwise with the type of the value. For example:
    "size: 3" and "data: <class 'list'>".
    """
    try:
        text = json.dumps(payload, ensure_ascii=False, default=safe_repr)
    except (ValueError, TypeError, RecursionError):
        fields = payload if isinstance(payload, dict) else {"payload": payload}
        lines = []
        for name, value in fields.items():
            is_plain = isinstance(value, str | int | float)
            shown = value if is_plain else type(value)
            lines.append(f"{name}: {shown}")
        text = "\n".join(lines)

    # A lone surrogate could not be sent to a model.
    return text.encode("utf-8", "replace").decode()


def describe_media(part: types.Part | types.FunctionResponsePart) -> str:
    """Describes an image or a file in one line, without its bytes.

    For example: "[attached image/png 'cat.png', 2048 bytes]". Returns "" for a part
    that is no file.
    """
    name = name_media(part)
    return ATTACHED.format(name) if name else ""


def name_media(part: types.Part | types.FunctionResponsePart) -> str:
    """Returns the MIME type, the name and the size of an image or a file, in one line.

    For example: "image/png 'cat.png', 2048 bytes". Returns "" for a part that is no
    file.

    - An unknown MIME type is written as "file".
    - An unknown name is left out, or replaced by the address of the file.
    - The size is only known if the file is in the part itself.
    """
    if part.inline_data:
        blob = part.inline_data
        mime_type = blob.mime_type
        name = blob.display_name
        if not name and part.file_data:
            name = part.file_data.file_uri
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
    """Returns the text of a file that is in the part itself.

    Returns "" for other parts, and for an empty or a binary file. A file is binary if
    its MIME type is not that of a text, or if the decoded text has a null character.
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

    1. The charset that the MIME type names: "text/csv; charset=latin1".
    2. UTF-16, if the file begins with its byte order mark.
    3. UTF-8, if at most 1 % of the characters are invalid in it.
    4. Windows-1252.
    """
    codec_name = _find_codec(mime_type)
    if codec_name:
        # The codec may turn out to be one that does not decode to text, such as base64.
        with suppress(LookupError, UnicodeError):
            return data.decode(codec_name, "replace")

    utf16_marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    if data.startswith(utf16_marks):
        return data.decode("utf-16", "replace")

    utf8_text = data.decode("utf-8-sig", "replace")
    invalid_count = utf8_text.count("\ufffd")
    if invalid_count <= len(utf8_text) // 100:
        return utf8_text
    return data.decode("cp1252", "replace")


def _find_codec(mime_type: str) -> str:
    """Returns the name of Python's codec for the charset that a MIME type names.

    For example: "text/csv; charset=latin1" -> "iso8859-1".

    Returns "" if the MIME type names no charset, a charset that Python does not know,
    or a charset of `_UNUSED_CODECS`.
    """
    charset = _CHARSET.search(mime_type)
    if charset is None:
        return ""
    try:
        codec_name = codecs.lookup(charset[1]).name
    except (LookupError, UnicodeError):
        return ""
    is_unused = codec_name.replace("-", "_") in _UNUSED_CODECS
    return "" if is_unused else codec_name


@dataclass(frozen=True)
class PlacedPart:
    """A part of a content, with the facts that are needed to write it as text.

    Attributes:
        content_index: The index of the content.
        part: The part.
        author: The author of the content: "user", "model" or "other agent".
        whole: The part before it was shortened; None if the part gets no handle.
        call: For a result, the call that the result answers, if there is one. None for
            other parts.
    """

    content_index: int
    part: types.Part
    author: str
    whole: types.Part | None
    call: types.FunctionCall | None

    @property
    def handle(self) -> str:
        """The handle of the whole part; "" if the part gets none."""
        return handle_of(self.whole) if self.whole else ""

    @property
    def text(self) -> str:
        """The text of the part: for a call or a result, the JSON of the payload.

        "" for a file, and for a call or a result whose payload is empty.
        """
        payload = payload_of(self.part)
        if payload:
            return payload_text(payload)
        return self.part.text or code_of(self.part)


def walk_parts(
    contents: Sequence[types.Content],
    indexes: Iterable[int],
    outputs: Collection[int] = (),
    wholes: Sequence[types.Content] | None = None,
) -> Iterator[PlacedPart]:
    """Yields the parts of contents, each with the facts of `PlacedPart`.

    Two kinds of parts are left out: parts that nobody may read (see `_is_private`), and
    the text "For context:" that ADK puts before the words of another agent.

    Args:
        contents: The contents of a request.
        indexes: The indexes of the contents that are read, in rising order.
        outputs: The indexes of the contents whose text is an output of executed code.
            Such a text is yielded as an output of code.
        wholes: The same contents before they were shortened. The handle of each part is
            made from the whole part; None for no handles.
    """
    # The calls that were read so far and have no result yet.
    waiting: list[PlacedCall] = []
    for index in indexes:
        content = contents[index]
        parts = parts_of(content)
        whole_parts = parts_of(wholes[index]) if wholes else [None] * len(parts)
        parts_with_wholes = list(zip(parts, whole_parts, strict=True))

        author = content.role or "user"
        if is_relay(content):
            author = "other agent"
            # The first part of a relay is always "For context:".
            del parts_with_wholes[0]

        for part, whole in parts_with_wholes:
            # A private call is added to `waiting`, too. Otherwise its private result
            # could count as the answer to another call.
            answered_call = _update_waiting(waiting, index, part)
            if _is_private(part):
                continue

            is_output = index in outputs and bool(part.text)
            shown_part = _as_output(part) if is_output else part
            yield PlacedPart(index, shown_part, author, whole, answered_call)


def _update_waiting(
    waiting: list[PlacedCall], index: int, part: types.Part
) -> types.FunctionCall | None:
    """Updates `waiting`, the list of calls without a result, with the next part.

    - If the part is a call, the call is added to the list. Returns None.
    - If the part is a result, the call that it answers is removed from the list.
      Returns this call; None if no call matches.
    - For any other part, the list stays as it is. Returns None.

    Args:
        waiting: The calls before the part that have no result yet, oldest first.
        index: The index of the content that has the part.
        part: The part.
    """
    if part.function_call:
        waiting.append(PlacedCall(index, part.function_call))
    if part.function_response:
        answered = take_call(waiting, part.function_response)
        return answered.call if answered else None
    return None


def _is_private(part: types.Part) -> bool:
    """Whether nobody may read a part.

    This holds for thoughts, and for the calls and results of ADK itself: they may have
    credentials.
    """
    tool = part.function_call or part.function_response
    if tool is not None and tool.name in INTERNAL_CALLS:
        return True

    # A call with a signature may be marked as a thought. It is a call all the same.
    return bool(part.thought) and not part.function_call


def _as_output(part: types.Part) -> types.Part:
    """Returns a text, which ADK made from an output of code, as an output again."""
    result = types.CodeExecutionResult(output=part.text)
    return types.Part(code_execution_result=result)


@dataclass(frozen=True)
class Item:
    """A message, a call, a tool's result or a file, as the recall tool lists it.

    An example of a title: `1f3c5b7d9a user message "Please fix…", 2,048 characters`.

    Attributes:
        handle: The short name of the item.
        label: "user message", "grep call", "grep result" and the like. For a file, its
            description.
        hint: For a message, its beginning in quotes. For a result, the beginning of its
            call's arguments. "" for other items. One line of about 60 characters.
        text: The text of the item; "" for a file that has none.
        content_index: The index of the content that has the item.
        args: For a result, the first 1,000 characters of its call's arguments.
        is_call: Whether the item is a call.
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

        A short call has no line, because the line of its result shows the arguments.
        """
        return not self.is_call or len(self.text) >= _MIN_LISTED_CALL_CHARS

    @property
    def title(self) -> str:
        """The line that stands for the item in lists."""
        described = quote_line(f"{self.label} {self.hint}")
        return f"{self.handle} {described}".strip() + self._extent

    @property
    def heading(self) -> str:
        """The line above the text of the item: the title, or the name of the file."""
        if self.media is None:
            return self.title
        return f"{self.handle}: {name_media(self.media)}{self._extent}"

    @property
    def _extent(self) -> str:
        """The end of a title, such as ", 2,048 characters"; "" for a binary file."""
        is_file_without_text = self.media is not None and not self.text
        return "" if is_file_without_text else f", {len(self.text):,} characters"


def list_items(
    contents: Sequence[types.Content],
    indexes: Iterable[int],
    outputs: Collection[int] = (),
    wholes: Sequence[types.Content] | None = None,
) -> list[Item]:
    """Lists the items of some contents, oldest first.

    A result has an item for its text, and an item for each of its files.

    Args:
        contents: The contents of a request.
        indexes: The indexes of the contents whose items are listed, in rising order.
        outputs: The indexes of the contents whose text is an output of executed code.
        wholes: The same contents before they were shortened, for the handles of the
            items; None if `contents` are not shortened.
    """
    items: list[Item] = []
    for placed in walk_parts(contents, indexes, outputs, wholes or contents):
        # Calls and results of the recall tool are copies of other items.
        tool = placed.part.function_call or placed.part.function_response
        if tool is not None and tool.name == RECALL_TOOL:
            continue

        # A part without a text is a file, an empty call or an empty result. A file gets
        # its item below. An empty call is not listed. An empty result is listed: its
        # line tells that the call has an answer.
        result = placed.part.function_response
        if placed.text or result:
            items.append(_make_item(placed))

        # `_list_files` passes over parts that are no files.
        possible_files = result_media(result) if result else [placed.part]
        items += _list_files(possible_files, placed.content_index)
    return items


def _make_item(placed: PlacedPart) -> Item:
    """Makes the item of a text, of code, of a call or of a result."""
    # Only a result has `placed.call`, so `args` is "" for all other parts.
    args = payload_text(placed.call.args) if placed.call and placed.call.args else ""
    hint = _hint(placed, args)
    return Item(
        handle=placed.handle,
        label=_label(placed),
        hint=hint,
        text=placed.text,
        content_index=placed.content_index,
        # The hint of a result is "" if the arguments are blank. Blank arguments do not
        # help a search.
        args=args[:_ITEM_ARGS_CHARS] if hint else "",
        is_call=placed.part.function_call is not None,
    )


def _list_files(parts: Iterable[types.Part], content_index: int) -> Iterator[Item]:
    """Yields an item for each part that is an image or a file."""
    for part in parts:
        description = describe_media(part)
        if description:
            yield Item(
                handle=handle_of(part),
                label=description,
                hint="",
                text=file_text(part),
                content_index=content_index,
                media=part,
            )


def _label(placed: PlacedPart) -> str:
    """Returns the label of an item that is no file.

    For example: "user message", "grep call", "grep result", "output of code".
    """
    part = placed.part
    if part.function_call:
        return f"{part.function_call.name} call"
    if part.function_response:
        return f"{part.function_response.name} result"
    if part.text:
        return f"{placed.author} message"
    return "code that was run" if part.executable_code else "output of code"


def _hint(placed: PlacedPart, args: str) -> str:
    """Returns the hint of an item that is no file, in one line.

    - For a message: the beginning of the message, in quotes.
    - For a result: the beginning of `args`.
    - For a call and for code: "".

    Args:
        placed: The part.
        args: For a result, the arguments of the call that the result answers.
    """
    part = placed.part
    if part.function_response:
        return _clip(args)
    if part.function_call:
        return ""
    return f'"{_clip(part.text)}"' if part.text else ""


def _clip(text: str) -> str:
    """Returns the beginning of a text in one line.

    At most `_HINT_CHARS` characters are kept. If the line goes on, "…" follows them.
    """
    # Several blanks become one, so more characters are read than are kept.
    beginning = text[: 4 * _HINT_CHARS]
    line = " ".join(beginning.split()).encode("utf-8", "replace").decode()
    return line if len(line) <= _HINT_CHARS else f"{line[:_HINT_CHARS]}…"
