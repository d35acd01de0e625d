"""How many bytes a value has as compact JSON: whatever a tool returned has a size."""

from base64 import b64encode
from typing import Any

from pydantic_core import SchemaSerializer, core_schema

__all__ = ["json_bytes", "json_text", "text_bytes"]

_MAX_WALKED_VALUES = 100_000

# `pydantic_core.to_json` makes one anew on every call, which takes a fifth of the time.
_TO_JSON = SchemaSerializer(
    core_schema.any_schema(), core_schema.CoreConfig(ser_json_inf_nan="constants")
).to_json


def text_bytes(text: str) -> int:
    """Returns the UTF-8 size of a text; a lone surrogate counts three bytes."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def json_bytes(value: object) -> int:
    """Returns the size of a value as compact JSON, in UTF-8 bytes.

    Whatever a tool returned has a size: what JSON cannot express (own classes, bytes,
    lone surrogates, nesting of any depth, cycles) counts about what its parts do.

    Args:
        value: Anything. A text counts itself, without quotes or escapes.
    """
    return text_bytes(value) if isinstance(value, str) else len(json_text(value))


def json_text(value: object) -> bytes:
    """Returns a value as compact JSON, or as the text itself if it is one."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    try:
        return _TO_JSON(value, exclude_none=True)
    except ValueError:
        return _walked_text(value)


def _walked_text(value: object) -> bytes:
    """Returns what `to_json` refuses as something close to JSON, each object once."""
    chunks: list[bytes] = []
    seen: dict[int, object] = {}
    stack = [value]
    while stack and len(chunks) < _MAX_WALKED_VALUES:
        item = stack.pop()
        if isinstance(item, str):
            chunks.append(b'"%b"' % item.encode("utf-8", "surrogatepass"))
        elif isinstance(item, bytes | bytearray):
            chunks.append(b'"%b"' % b64encode(item))
        elif isinstance(item, int):
            # Python refuses to print very long numbers in decimal.
            chunks.append(b"%x" % item if item.bit_length() > 64 else b"%d" % item)
        elif item is None or isinstance(item, float):
            chunks.append(repr(item).encode())
        elif id(item) not in seen:
            seen[id(item)] = item
            chunks.append(b"{}")
            stack.extend(reversed(_children(item)))
    return b",".join(chunks)


def _children(item: object) -> list[Any]:
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    fields = item if isinstance(item, dict) else getattr(item, "__dict__", None)
    if isinstance(fields, dict):
        return [child for pair in fields.items() for child in pair]
    return [type(item).__name__]
