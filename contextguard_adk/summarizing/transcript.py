"""The conversation as text for a summariser, within a budget of tokens.

Nothing is left out while everything fits. Beyond that tool results are shortened
first (small ones stay whole, large ones keep head and tail, newer ones get more),
then messages; only then are the oldest entries dropped, never the first task or the
live request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pydantic_core
from google.genai import types

from contextguard_adk.history.coverage import handle_of
from contextguard_adk.history.pairs import is_relay
from contextguard_adk.measuring.shortening import (
    TokenCounter,
    divide_budget,
    shorten_to_tokens,
)

HIDDEN_CALLS = frozenset({"adk_request_credential"})
"""Calls that carry credentials; they never reach a summariser."""

RECALL_TOOL = "recall_history"
"""The tool that reads compacted history back; its results are copies of that."""

NEWEST_WEIGHT = 3.0
"""The newest tool result may keep this many times what the oldest may."""

MIN_BODY_TOKENS = 40
"""Below this an excerpt says nothing; the entry is dropped instead."""

MIN_PART_RATIO = 0.25
"""An entry is split where at least this much of a part would be left unused."""

MAX_NAME_CHARS = 120
"""The end of a file's name or address that is told; some addresses hold pages."""

MAX_NOTED_HANDLES = 3
"""How many of the entries that were dropped are named."""


@dataclass(frozen=True)
class Entry:
    """One message, call or result of a transcript.

    Attributes:
        heading: What always stands there, such as `user: [tool X returned a result]`.
        body: What may be shortened.
        is_tool: Whether the body is a tool's arguments or result.
        is_pinned: Whether the entry is never dropped.
        is_copy: Whether the body stands in the history once more.
        handle: Under which name the whole can be read back; "" for none.
        content_index: Where it comes from.
    """

    heading: str
    body: str = ""
    is_tool: bool = False
    is_pinned: bool = False
    is_copy: bool = False
    handle: str = ""
    content_index: int = -1

    @property
    def text(self) -> str:
        """The entry as it stands in the transcript."""
        return self.heading + self.body


def render_entries(
    contents: Sequence[types.Content],
    indexes: Iterable[int],
    pinned: Iterable[int] = (),
    with_handles: bool = False,
) -> list[Entry]:
    """Renders contents as transcript entries, in order.

    Args:
        contents: The contents of the request.
        indexes: Which of them to render.
        pinned: Which of those are never dropped.
        with_handles: Whether the handles of what is shortened are to be told.

    Returns:
        The entries; a content with several parts gives several.
    """
    kept = set(pinned)
    return [
        replace(entry, is_pinned=index in kept, content_index=index)
        for index in indexes
        for entry in _render_content(contents[index], with_handles)
    ]


def _render_content(content: types.Content, with_handles: bool) -> list[Entry]:
    role = content.role or "user"
    entries = []
    parts = [part for part in content.parts or () if part]
    if is_relay(content):
        del parts[0]  # ADK's preamble says nothing about the conversation.
    for part in parts:
        if part.thought and not part.function_call:
            continue
        handle = handle_of(part) if with_handles else ""
        entry = _render_part(role, part, handle)
        if entry:
            entries.append(replace(entry, handle=handle))
    return entries


def _render_part(role: str, part: types.Part, handle: str) -> Entry | None:
    if part.text:
        return Entry(f"{role}: ", part.text)
    if part.function_call:
        return _render_call(role, part.function_call)
    if part.function_response:
        return _render_response(role, part.function_response)
    if part.executable_code:
        return Entry(f"{role}: [ran code]\n", part.executable_code.code or "", True)
    if part.code_execution_result:
        output = part.code_execution_result.output or ""
        return Entry(f"{role}: [code returned a result]\n", output, True)
    placeholder = describe_media(part)
    if placeholder and handle:
        placeholder = f"{placeholder[:-1]}; item {handle}]"
    return Entry(f"{role}: {placeholder}") if placeholder else None


def _render_call(role: str, call: types.FunctionCall) -> Entry | None:
    if call.name in HIDDEN_CALLS:
        return None
    heading = f"{role}: [called tool: {call.name}]"
    if not call.args:
        return Entry(heading)
    return Entry(f"{heading}\n", payload_text(call.args), True)


def _render_response(role: str, response: types.FunctionResponse) -> Entry | None:
    if response.name in HIDDEN_CALLS:
        return None
    heading = f"{role}: [tool {response.name} returned a result]"
    media = [describe_media(part) for part in response.parts or ()]
    heading = " ".join([heading, *filter(None, media)])
    if not response.response:
        return Entry(heading)
    body = payload_text(response.response)
    is_copy = response.name == RECALL_TOOL
    return Entry(f"{heading}\n", body, is_tool=True, is_copy=is_copy)


def payload_text(payload: object) -> str:
    """Renders a tool's arguments or result as text.

    ADK wraps what is not a dict as `{"result": …}`; a text in it stands as it is,
    everything else as JSON.
    """
    if isinstance(payload, dict) and list(payload) == ["result"]:
        value = payload["result"]
        if isinstance(value, str):
            return value
    try:
        return pydantic_core.to_json(
            payload, fallback=repr, inf_nan_mode="constants"
        ).decode("utf-8", "replace")
    except (ValueError, TypeError, RecursionError):
        pass  # Lone surrogates, bytes that are no text; cycles, deep nesting.
    try:
        text = json.dumps(payload, ensure_ascii=False, default=repr)
    except (ValueError, TypeError, RecursionError):
        return _shallow_text(payload)
    return text.encode("utf-8", "replace").decode()


def _shallow_text(payload: object) -> str:
    """Describes what cannot be serialised, a few levels deep, without recursion."""
    if not isinstance(payload, dict):
        return f"[{type(payload).__name__} that cannot be shown]"
    shown = [
        f"{key}: {value if isinstance(value, str | int | float) else type(value)}"
        for key, value in payload.items()
    ]
    return "\n".join(shown).encode("utf-8", "replace").decode()


def describe_media(part: types.Part | types.FunctionResponsePart) -> str:
    """Names an image or a file where its bytes cannot stand; "" for other parts."""
    if part.inline_data:
        blob = part.inline_data
        name = blob.display_name or ""
        name = f" {name[-MAX_NAME_CHARS:]!r}" if name else ""
        size = len(blob.data or b"")
        return f"[attached {blob.mime_type or 'file'}{name}, {size} bytes]"
    if part.file_data:
        data = part.file_data
        name = data.display_name or data.file_uri or ""
        return f"[attached {data.mime_type or 'file'} {name[-MAX_NAME_CHARS:]!r}]"
    return ""


def fit_entries(
    entries: Sequence[Entry], budget_tokens: int, count_tokens: TokenCounter
) -> list[Entry]:
    """Shortens and, at last, drops entries until they fit a budget.

    Args:
        entries: The transcript, oldest first.
        budget_tokens: What the result may take.
        count_tokens: Tokens of a text.

    Returns:
        The entries that are left, with a note where some were dropped.
    """
    costs = [count_tokens(entry.body) if entry.body else 0 for entry in entries]
    headings = [count_tokens(entry.heading) + 1 for entry in entries]
    if sum(costs) + sum(headings) <= budget_tokens:
        return list(entries)
    kept, room = _drop_oldest(entries, costs, headings, budget_tokens)
    shares: dict[int, float] = {}
    # Messages are shortened last, what can be recalled once more first.
    messages = [i for i in kept if not entries[i].is_tool]
    tools = [i for i in kept if entries[i].is_tool and not entries[i].is_copy]
    copies = [i for i in kept if entries[i].is_copy]
    for chosen, later in ((messages, tools + copies), (tools, copies), (copies, [])):
        least = sum(min(costs[i], MIN_BODY_TOKENS) for i in later)
        shares |= dict(_share(chosen, costs, room - least - sum(shares.values())))
    fitted = [
        replace(
            entries[i],
            body=shorten_to_tokens(
                entries[i].body, shares[i], count_tokens, entries[i].handle
            ),
        )
        for i in kept
    ]
    dropped = set(range(len(entries))).difference(kept)
    if dropped:
        fitted.insert(0, _note_dropped([entries[i] for i in sorted(dropped)]))
    return fitted


def _note_dropped(entries: Sequence[Entry]) -> Entry:
    """Says how many entries are missing, and how to read the newest of them."""
    handles = [entry.handle for entry in entries if entry.handle and entry.body]
    items = ""
    if handles:
        newest = ", ".join(reversed(handles[-MAX_NOTED_HANDLES:]))
        items = f"; the newest are items {newest}"
    return Entry(f"[{len(entries)} earlier messages left out{items}]")


def _drop_oldest(
    entries: Sequence[Entry],
    costs: Sequence[int],
    headings: Sequence[int],
    budget_tokens: int,
) -> tuple[list[int], float]:
    """Chooses the entries that stay; returns them and the room for their bodies."""
    room = float(budget_tokens - MIN_BODY_TOKENS)  # The note that some are missing.
    least = [headings[i] + min(costs[i], MIN_BODY_TOKENS) for i in range(len(entries))]
    kept = {i for i, entry in enumerate(entries) if entry.is_pinned}
    used = sum(least[i] for i in kept)
    for i in range(len(entries) - 1, -1, -1):
        if i in kept:
            continue
        if used + least[i] > room:
            break
        kept.add(i)
        used += least[i]
    return sorted(kept), max(0.0, room - sum(headings[i] for i in kept))


def _share(
    indexes: Sequence[int], costs: Sequence[int], room: float
) -> list[tuple[int, float]]:
    """Divides room so that small texts stay whole and newer ones keep more.

    Each gets what `_drop_oldest` has reserved for it, where there is room for that.
    """
    last = max(1, len(indexes) - 1)
    weights = [1 + (NEWEST_WEIGHT - 1) * order / last for order in range(len(indexes))]
    least = [float(min(costs[index], MIN_BODY_TOKENS)) for index in indexes]
    if sum(least) > room:
        least = [0.0] * len(indexes)
    more = [costs[index] - given for index, given in zip(indexes, least, strict=True)]
    shares = divide_budget(more, weights, room - sum(least))
    return [
        (index, given + share)
        for index, given, share in zip(indexes, least, shares, strict=True)
    ]


def split_entries(
    entries: Sequence[Entry], budget_tokens: int, count_tokens: TokenCounter
) -> list[list[Entry]]:
    """Splits a transcript into parts that each fit a budget.

    A part ends between two entries where it can; an entry that would leave much of
    a part unused is continued in the next one.

    Args:
        entries: The transcript, oldest first.
        budget_tokens: What each part may take.
        count_tokens: Tokens of a text.

    Returns:
        The parts, in order; at least one.
    """
    parts: list[list[Entry]] = [[]]
    room = float(budget_tokens)
    waiting = list(reversed(entries))
    while waiting:
        entry = waiting.pop()
        heading_cost = count_tokens(entry.heading) + 1
        body_cost = count_tokens(entry.body) if entry.body else 0
        if heading_cost + body_cost <= room:
            parts[-1].append(entry)
            room -= heading_cost + body_cost
            continue
        first = 0
        if body_cost and room - heading_cost >= MIN_PART_RATIO * budget_tokens:
            first = _head_that_fits(entry.body, room - heading_cost, count_tokens)
        if first:
            parts[-1].append(replace(entry, body=entry.body[:first]))
            rest = entry.body[first:]
            waiting.append(replace(entry, heading=_continued(entry), body=rest))
        elif parts[-1]:
            waiting.append(entry)
        else:
            parts[-1].append(entry)  # Not even its heading fits anywhere.
            continue
        parts.append([])
        room = float(budget_tokens)
    return [part for part in parts if part] or [[]]


def _head_that_fits(body: str, room: float, count_tokens: TokenCounter) -> int:
    """How many characters of a body to put into the room that is left, or 0."""
    chars = min(int(len(body) * room / count_tokens(body) * 0.95), len(body) - 1)
    while chars and count_tokens(body[:chars]) > room:
        chars = chars * 3 // 4  # Its beginning is denser than the rest.
    return chars


def _continued(entry: Entry) -> str:
    heading = entry.heading.rstrip("\n ").removesuffix(" (continued)")
    return f"{heading} (continued)\n"
