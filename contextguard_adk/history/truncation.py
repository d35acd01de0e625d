"""Shortens tool results without a model, wherever strings stand in them."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

from google.genai import types

from contextguard_adk.history.coverage import handle_of
from contextguard_adk.measuring.tokens import json_text

HANDLE_KEY = "recall_item"
"""In a shortened result: the handle under which the whole can be read back."""

MAX_DEPTH = 100
"""Strings nested deeper than this stay as they are."""


@dataclass(frozen=True)
class Truncation:
    """How strings over `max_length` characters in tool results are shortened.

    A result whose JSON is over `result_length` becomes an excerpt of it; 0 for never.
    """

    max_length: int = 4_000
    show_truncation_notice: bool = True
    smart_truncate: bool = False
    head_length: int = 3_000
    tail_length: int = 1_000
    result_length: int = 0


def truncate_content(
    content: types.Content, truncation: Truncation, with_handles: bool = False
) -> types.Content:
    """Shortens tool results in a copy; `with_handles` adds how to recall them."""
    old = content.parts or []
    parts = [_truncate_part(part, truncation, with_handles) for part in old]
    if all(map(operator.is_, parts, old)):
        return content
    return content.model_copy(update={"parts": parts})


def _truncate_part(
    part: types.Part, truncation: Truncation, with_handles: bool
) -> types.Part:
    response = part.function_response if part is not None else None
    if response is None or not response.response:
        return part
    shortened = _excerpt(truncate_value(response.response, truncation), truncation)
    if shortened is response.response:
        return part
    if with_handles:
        shortened = {**shortened, HANDLE_KEY: handle_of(part)}
    copied = response.model_copy(update={"response": shortened})
    return part.model_copy(update={"function_response": copied})


def _excerpt(response: dict[str, Any], truncation: Truncation) -> dict[str, Any]:
    """Replaces a result of many short strings by an excerpt of its JSON."""
    length = truncation.result_length
    text = json_text(response).decode("utf-8", "surrogatepass") if length else ""
    # Strings that were shortened come with notices and keys around them.
    if len(text) <= 2 * length:
        return response
    return {"result": truncate_text(text, replace(truncation, max_length=length))}


def truncate_value(value: Any, truncation: Truncation, depth: int = 0) -> Any:
    """Shortens every string in nested dicts and lists; copies only what changes."""
    if isinstance(value, str):
        return truncate_text(value, truncation)
    if depth >= MAX_DEPTH or not isinstance(value, dict | list):
        return value
    old = list(value.values()) if isinstance(value, dict) else value
    new = [truncate_value(item, truncation, depth + 1) for item in old]
    if all(map(operator.is_, new, old)):
        return value
    return dict(zip(value, new, strict=True)) if isinstance(value, dict) else new


def truncate_text(text: str, truncation: Truncation) -> str:
    """Shortens a string that is too long, unless the notice makes it longer."""
    if len(text) <= truncation.max_length:
        return text
    head, tail = text[: truncation.max_length], ""
    if truncation.smart_truncate:
        head = text[: truncation.head_length]
        tail = text[len(text) - truncation.tail_length :]
    notice = ""
    if truncation.show_truncation_notice:
        kept = len(head) + len(tail)
        notice = f"\n[… truncated: {kept} of {len(text)} characters kept …]\n"
    shortened = head + notice + tail
    return shortened if len(shortened) < len(text) else text
