"""Shortens results with a list `content`, as the tools of MCP servers return.

For example: {"content": [{"type": "text", "text": "18 °C"}], "isError": false}. An item
may also be an image, a sound or a resource, and `structuredContent` may say once more
what the items say.
"""

from __future__ import annotations

import json
from typing import Any

from contextguard_adk._history.text import payload_text
from contextguard_adk._support.phrases import ATTACHED, quote_line

_COPY_KEY = "structuredContent"
_ERROR_KEY = "isError"

_MAX_NAME_CHARS = 80
"""Of the address of a file, this many characters at the end are shown."""


def has_items(result: dict[str, Any]) -> bool:
    """Whether a result has a list `content` that is not empty."""
    content = result.get("content")
    return isinstance(content, list) and bool(content)


def item_text(item: object) -> str:
    """Returns the text of an item; "" for an image or the like."""
    if isinstance(item, str):
        return item
    if not isinstance(item, dict) or item.get("type") != "text":
        return ""
    text = item.get("text")
    return text if isinstance(text, str) else ""


def join_items(items: list[Any]) -> str:
    """Joins items as ADK's Claude class does; what is no text is written as JSON."""
    return "\n".join(item_text(item) or payload_text(item) for item in items)


def drop_copy(result: dict[str, Any]) -> dict[str, Any]:
    """Returns a result without `structuredContent`, if the items say the same.

    Otherwise the result itself is returned.
    """
    if not has_items(result) or _COPY_KEY not in result:
        return result

    values = [_read_json(item_text(item)) for item in result["content"]]
    # A server makes {"result": value} of a value that is no dict. If the value is a
    # list, each of its items may become an item of `content`.
    texts = [item_text(item) for item in result["content"]]
    possible_copies: list[Any] = [{"result": values}, {"result": texts}]
    if len(values) == 1:
        possible_copies += [values[0], {"result": values[0]}, {"result": texts[0]}]
    if result[_COPY_KEY] not in possible_copies:
        return result
    return {name: value for name, value in result.items() if name != _COPY_KEY}


def describe_large_files(result: dict[str, Any], max_chars: int) -> dict[str, Any]:
    """Replaces images and other files by a line about them, if they are too long.

    A part of such a file would be of no use, and no valid base64.

    Args:
        result: The result, which is returned itself if nothing is too long.
        max_chars: The most characters of base64 that a file may have.
    """
    if not has_items(result):
        return result
    items = [_describe_file(item, max_chars) for item in result["content"]]
    changed = [
        new for new, old in zip(items, result["content"], strict=True) if new is not old
    ]
    return {**result, "content": items} if changed else result


def readable_text(result: dict[str, Any]) -> str:
    """Writes a result as one text, of which a beginning and an end can be shown.

    These are the texts of the items, line by line, and the other fields as JSON. A
    result without such items is written as JSON, or as its only text.
    """
    if not has_items(result):
        return payload_text(result)
    texts = [join_items(result["content"])]
    left_out = ("content", _ERROR_KEY)
    others = {name: value for name, value in result.items() if name not in left_out}
    if others:
        texts.append(payload_text(others))
    return "\n".join(texts)


def as_excerpt(result: dict[str, Any], text: str) -> dict[str, Any]:
    """Returns a text as a result of the same kind, with one text in place of all."""
    if not has_items(result):
        return {"result": text}
    excerpt: dict[str, Any] = {"content": [{"type": "text", "text": text}]}
    if _ERROR_KEY in result:
        excerpt[_ERROR_KEY] = result[_ERROR_KEY]
    return excerpt


def _read_json(text: str) -> Any:
    """Returns the value of a JSON text; the text itself if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _describe_file(item: object, max_chars: int) -> object:
    """Returns a text item in place of a file; the item itself if it is short enough."""
    if not isinstance(item, dict) or item.get("type") == "text":
        return item

    # An item has its base64 itself, or in a resource, as Claude's images in a source.
    for holder in (item, item.get("resource"), item.get("source")):
        if not isinstance(holder, dict):
            continue
        for key in ("data", "blob"):
            data = holder.get(key)
            if isinstance(data, str) and len(data) > max_chars:
                return {"type": "text", "text": _name_file(holder, data)}
    return item


def _name_file(holder: dict[Any, Any], base64_text: str) -> str:
    """Writes the line about a file: "[attached image/png, 2048 bytes]"."""
    mime_type = holder.get("mimeType") or holder.get("media_type") or "file"
    address = holder.get("uri")
    name = f" {str(address)[-_MAX_NAME_CHARS:]!r}" if address else ""
    size_bytes = len(base64_text.rstrip("=")) * 3 // 4
    return ATTACHED.format(quote_line(f"{mime_type}{name}, {size_bytes} bytes"))
