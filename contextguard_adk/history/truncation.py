"""Shortens tool results without a model, wherever strings stand in them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
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
    """How strings in tool results are shortened; lengths in characters.

    Attributes:
        max_length: Strings longer than this are shortened to it.
        show_truncation_notice: Whether to say how much is missing.
        smart_truncate: Whether to keep head and tail in place of the head alone.
        head_length: What `smart_truncate` keeps of the beginning.
        tail_length: What `smart_truncate` keeps of the end.
        result_length: Results whose JSON is longer than this become an excerpt of it,
            however short the strings in them are; 0 for never.
    """

    max_length: int = 4_000
    show_truncation_notice: bool = True
    smart_truncate: bool = False
    head_length: int = 3_000
    tail_length: int = 1_000
    result_length: int = 0

    def to_json(self) -> str:
        """Writes the settings as JSON."""
        return json.dumps(list(asdict(self).values()))

    @classmethod
    def from_json(cls, text: str) -> Truncation:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: The text is nothing of the kind.
        """
        values = json.loads(text)
        kinds = [type(item.default) for item in fields(cls)]
        if not isinstance(values, list) or [type(value) for value in values] != kinds:
            raise ValueError("not the settings of a truncation")
        return cls(*values)


def truncate_content(
    content: types.Content, truncation: Truncation, with_handles: bool = False
) -> types.Content:
    """Shortens the tool results of a content.

    Args:
        content: The content.
        truncation: How to shorten.
        with_handles: Whether a shortened result tells how to read it back.

    Returns:
        A copy; the content itself where nothing is too long. Results are shared with
        the stored session, so nothing is changed in place.
    """
    parts = [
        _truncate_part(part, truncation, with_handles) for part in content.parts or ()
    ]
    if all(new is old for new, old in zip(parts, content.parts or (), strict=True)):
        return content
    return content.model_copy(update={"parts": parts})


def _truncate_part(
    part: types.Part, truncation: Truncation, with_handles: bool
) -> types.Part:
    response = part.function_response if part is not None else None
    if response is None or not response.response:
        return part
    shortened = truncate_value(response.response, truncation)
    shortened = _excerpt(shortened, truncation)
    if shortened is response.response:
        return part
    if with_handles:
        shortened = {**shortened, HANDLE_KEY: handle_of(part)}
    copied = response.model_copy(update={"response": shortened})
    return part.model_copy(update={"function_response": copied})


def _excerpt(response: dict[str, Any], truncation: Truncation) -> dict[str, Any]:
    """Replaces a result of many short strings by an excerpt of its JSON."""
    length = truncation.result_length
    if not length:
        return response
    text = json_text(response).decode("utf-8", "surrogatepass")
    # What strings were shortened to comes with notices and keys around it.
    if len(text) <= 2 * length:
        return response
    return {"result": truncate_text(text, replace(truncation, max_length=length))}


def truncate_value(value: Any, truncation: Truncation, depth: int = 0) -> Any:
    """Shortens every string in nested dicts and lists.

    Args:
        value: Any JSON-like value.
        truncation: How to shorten.
        depth: How deep the value stands.

    Returns:
        A copy of what had to change; the value itself where nothing did.
    """
    if isinstance(value, str):
        return truncate_text(value, truncation)
    if depth >= MAX_DEPTH:
        return value
    if isinstance(value, dict):
        items = {k: truncate_value(v, truncation, depth + 1) for k, v in value.items()}
        return items if any(items[key] is not value[key] for key in items) else value
    if isinstance(value, list):
        new = [truncate_value(item, truncation, depth + 1) for item in value]
        changed = any(a is not b for a, b in zip(new, value, strict=True))
        return new if changed else value
    return value


def truncate_text(text: str, truncation: Truncation) -> str:
    """Shortens one string, never between the halves of a surrogate pair.

    Returns:
        The head, or head and tail; the string itself where that is not shorter.
    """
    if len(text) <= truncation.max_length:
        return text
    if truncation.smart_truncate:
        head = _whole_pairs(text, truncation.head_length)
        tail = _whole_pairs(text, len(text) - truncation.tail_length)
    else:
        head, tail = _whole_pairs(text, truncation.max_length), len(text)
    notice = ""
    if truncation.show_truncation_notice:
        kept = head + len(text) - tail
        notice = f"\n[… truncated: {kept} of {len(text)} characters kept …]\n"
    if tail - head <= len(notice):
        return text  # The notice would take what the cut has gained.
    return text[:head] + notice + text[tail:]


def _whole_pairs(text: str, cut: int) -> int:
    """Moves a cut back where it would split a surrogate pair."""
    if 0 < cut < len(text):
        is_high = "\ud800" <= text[cut - 1] <= "\udbff"
        if is_high and "\udc00" <= text[cut] <= "\udfff":
            return cut - 1
    return cut
