"""The conversation as text for a summarizer, within a budget of tokens.

An entry is a heading at the margin, which says whose word it is, and an indented body:
what a body says cannot pass for an entry.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from google.genai import types

from contextguard_adk._history.adk_events import INTERNAL_CALLS, RECALL_TOOL
from contextguard_adk._history.contents import is_relay, parts_of
from contextguard_adk._history.fingerprints import handle_of
from contextguard_adk._history.text import describe_media, payload_text
from contextguard_adk._measuring.budgets import (
    TokenCounter,
    divide_budget,
    shorten_to_tokens,
)

MIN_BODY_TOKENS = 40  # A shorter excerpt says nothing; the entry is dropped instead.


@dataclass(frozen=True)
class Entry:
    """One message, call or result of a transcript; a copy repeats what is there."""

    heading: str
    body: str = ""
    is_tool: bool = False
    is_pinned: bool = False
    is_copy: bool = False
    handle: str = ""

    @property
    def text(self) -> str:
        """The entry as it stands in the transcript."""
        return self.heading + _indent(self.body)


def _indent(body: str) -> str:
    """A body below its heading; `textwrap` knows every separator of lines."""
    return "\n" + textwrap.indent(body, "  ") if body else ""


def render_entries(
    contents: Sequence[types.Content],
    indexes: Iterable[int],
    pinned: Iterable[int] = (),
    wholes: Sequence[types.Content] | None = None,
    outputs: Collection[int] = (),
) -> list[Entry]:
    """Renders contents, one entry for each part; those that are pinned always stay.

    Handles are those of the contents that are `wholes`. `outputs` are texts that
    executed code has printed.
    """
    entries = []
    for index in indexes:
        content, whole = contents[index], (wholes or contents)[index]
        parts = list(zip(parts_of(content), parts_of(whole), strict=True))
        author = content.role or "user"
        if is_relay(content):
            author = "other agent"
            del parts[0]  # ADK's preamble says nothing about the conversation.
        for part, whole_part in parts:
            handle = handle_of(whole_part) if wholes else ""
            if index in outputs:
                printed = types.CodeExecutionResult(output=part.text)
                part = types.Part(code_execution_result=printed)
            if entry := _render_part(author, part, handle):
                # Names of tools and files come from outside, line breaks and all.
                heading = " ".join(entry.heading.split())
                entry = replace(entry, heading=heading, handle=handle)
                entries.append(replace(entry, is_pinned=index in pinned))
    return entries


def _render_part(author: str, part: types.Part, handle: str) -> Entry | None:
    if part.thought and not part.function_call:
        return None
    if part.text:
        return Entry(f"{author}:", part.text)
    if call := part.function_call:
        heading = f"{author}: [called tool: {call.name}]"
        return _render_payload(heading, call.name, call.args)
    if response := part.function_response:
        media = [describe_media(item) for item in response.parts or ()]
        heading = f"tool: [tool {response.name} returned a result]"
        heading = " ".join(filter(None, [heading, *media]))
        return _render_payload(heading, response.name, response.response)
    if code := part.executable_code:
        return Entry(f"{author}: [ran code]", code.code or "", True)
    if output := part.code_execution_result:
        return Entry("tool: [code returned a result]", output.output or "", True)
    placeholder = describe_media(part)
    if placeholder and handle:
        placeholder = f"{placeholder[:-1]}; item {handle}]"
    return Entry(f"{author}: {placeholder}") if placeholder else None


def _render_payload(heading: str, tool: str | None, payload: object) -> Entry | None:
    if tool in INTERNAL_CALLS:
        return None
    body = payload_text(payload) if payload else ""
    return Entry(heading, body, is_tool=bool(body), is_copy=tool == RECALL_TOOL)


def fit_entries(
    entries: Sequence[Entry], budget_tokens: int, count_tokens: TokenCounter
) -> list[Entry]:
    """Shortens entries and drops the oldest, which a note says, until they fit."""

    def count_body(body: str) -> int:
        return count_tokens(_indent(body)) if body else 0

    costs = [count_body(entry.body) for entry in entries]
    headings = [count_tokens(entry.heading) + 1 for entry in entries]
    if sum(costs) + sum(headings) <= budget_tokens:
        return list(entries)
    least = [min(cost, MIN_BODY_TOKENS) for cost in costs]
    room = float(budget_tokens - MIN_BODY_TOKENS)  # A note about dropped entries.
    # The pinned entries, and the newest of the others that fit.
    order = sorted(range(len(entries)), key=lambda i: (entries[i].is_pinned, i))[::-1]
    used = itertools.accumulate(headings[i] + least[i] for i in order)
    pairs = zip(order, used, strict=True)
    kept = sorted(i for i, most in pairs if most <= room or entries[i].is_pinned)
    room -= sum(headings[i] for i in kept)
    # Each entry gets a little; messages are served first with the rest, copies last.
    shares = divide_budget([least[i] for i in kept], [1.0] * len(kept), room)
    missing = [costs[i] - share for i, share in zip(kept, shares, strict=True)]
    weights = [0.2 ** (entries[i].is_tool + entries[i].is_copy) for i in kept]
    more = divide_budget(missing, weights, room - sum(shares))
    fitted = []
    for i, *tokens in zip(kept, shares, more, strict=True):
        entry = entries[i]
        body = shorten_to_tokens(entry.body, sum(tokens), count_body, entry.handle)
        fitted.append(replace(entry, body=body))
    dropped = [entries[i] for i in sorted({*range(len(entries))}.difference(kept))]
    if not dropped:
        return fitted
    handles = [entry.handle for entry in dropped if entry.handle and entry.body]
    items = f"; the newest are items {', '.join(handles[:-4:-1])}" if handles else ""
    return [Entry(f"[{len(dropped)} earlier messages left out{items}]"), *fitted]


def split_entries(
    entries: Sequence[Entry], budget_tokens: int, count_tokens: TokenCounter
) -> list[list[Entry]]:
    """Splits a transcript into parts that fit; an entry may go on in the next one."""
    parts: list[list[Entry]] = [[]]
    room = budget_tokens
    waiting = list(reversed(entries))
    while waiting:
        entry = waiting.pop()
        first, rest = _cut_entry(entry, room, budget_tokens, count_tokens)
        if not (first or parts[-1]):
            first, rest = entry, None  # Its heading alone is too long.
        if first:
            parts[-1].append(first)
            room -= count_tokens(first.heading) + 1 + count_tokens(_indent(first.body))
        if rest:
            waiting.append(rest)
            parts.append([])
            room = budget_tokens
    return parts


def _cut_entry(
    entry: Entry, room_tokens: int, part_tokens: int, count_tokens: TokenCounter
) -> tuple[Entry | None, Entry | None]:
    """Cuts an entry into what fits the room of a part, and the rest."""
    body, room = entry.body, room_tokens - count_tokens(entry.heading) - 1
    cost = count_tokens(_indent(body)) if body else 0
    if cost <= room:
        return entry, None
    chars = 0
    if room >= part_tokens / 4:
        chars = min(int(len(body) * room / cost * 0.95), len(body) - 1)
        while chars and count_tokens(_indent(body[:chars])) > room:
            chars = chars * 3 // 4  # Its beginning is denser than the rest.
    if not chars:
        return None, entry
    heading = entry.heading.removesuffix(" (continued)")
    rest = replace(entry, heading=f"{heading} (continued)", body=body[chars:])
    return replace(entry, body=body[:chars]), rest
