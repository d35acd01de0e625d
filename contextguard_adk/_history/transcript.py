"""Writes the conversation as a text for a summarizer, within a budget of tokens.

The text has entries. The heading of an entry stands at the margin and names the author.
The body is indented, so no text in it can pass for an entry.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from google.genai import types

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.text import Said, describe_media, walk_parts
from contextguard_adk._measuring.budgets import (
    TokenCounter,
    divide_budget,
    shorten_to_tokens,
)
from contextguard_adk._support.phrases import LEFT_OUT, quote

MIN_BODY_TOKENS = 40  # A shorter excerpt says nothing; the entry is dropped instead.
_TOOL_WEIGHT = 0.2
"""How much of the room a tool's entry gets beside a message, which has the weight 1."""

_COPY_WEIGHT = 0.2 * _TOOL_WEIGHT
_MARGIN = "  "  # Before each line of a body.
_MAX_NAMED = 3  # Handles of dropped entries that are named.


@dataclass(frozen=True)
class Entry:
    """A message, a call or a result in a transcript.

    Attributes:
        heading: The line that names the author.
        body: The text below it.
        weight: How much of the room it gets beside other entries.
        is_pinned: Whether it always stays.
        handle: The name under which the recall tool finds the whole text.
    """

    heading: str
    body: str = ""
    weight: float = 1.0
    is_pinned: bool = False
    handle: str = ""

    @property
    def text(self) -> str:
        """The heading, and the indented body below it."""
        if not self.body:
            return self.heading
        # `textwrap` knows every separator of lines.
        return f"{self.heading}\n{textwrap.indent(self.body, _MARGIN)}"


def render_entries(
    contents: Sequence[types.Content],
    indexes: Iterable[int],
    pinned: Collection[int] = (),
    wholes: Sequence[types.Content] | None = None,
    outputs: Collection[int] = (),
) -> list[Entry]:
    """Renders contents, one entry for each part; the `pinned` ones always stay.

    `outputs` are the indexes of texts that executed code has printed. Entries get the
    handles of the same parts in `wholes`.
    """
    entries = []
    for said in walk_parts(contents, indexes, outputs, wholes):
        # Names of tools and files come from outside, line breaks and all.
        heading = " ".join(_write_heading(said).split())
        if not heading:
            continue

        tool = said.part.function_call or said.part.function_response
        if said.part.text:
            weight = 1.0
        elif tool is not None and tool.name == RECALL_TOOL:
            weight = _COPY_WEIGHT  # It repeats other entries.
        else:
            weight = _TOOL_WEIGHT

        entry = Entry(
            heading,
            quote(said.text),
            weight=weight,
            is_pinned=said.index in pinned,
            handle=said.handle,
        )
        entries.append(entry)
    return entries


def _write_heading(said: Said) -> str:
    """Writes the heading of a part; "" for a part without an entry."""
    part = said.part
    author = said.author
    if part.text:
        return f"{author}:"
    if part.function_call:
        return f"{author}: [called tool: {part.function_call.name}]"
    if part.function_response:
        response = part.function_response
        media = [describe_media(file) for file in response.parts or ()]
        return " ".join([f"tool: [tool {response.name} returned a result]", *media])
    if part.executable_code:
        return f"{author}: [ran code]"
    if part.code_execution_result:
        return "tool: [code returned a result]"

    placeholder = describe_media(part)
    if not placeholder:
        return ""
    if said.handle:
        return f"{author}: {placeholder[:-1]}; item {said.handle}]"
    return f"{author}: {placeholder}"


def fit_entries(
    entries: Sequence[Entry], budget_tokens: int, count_tokens: TokenCounter
) -> list[Entry]:
    """Shortens entries and drops the oldest until they fit; a note tells of these."""

    def count_body(body: str) -> int:
        return count_tokens("\n" + textwrap.indent(body, _MARGIN)) if body else 0

    body_tokens = [count_body(entry.body) for entry in entries]
    heading_tokens = [count_tokens(entry.heading) + 1 for entry in entries]
    if sum(body_tokens) + sum(heading_tokens) <= budget_tokens:
        return list(entries)

    least = [min(tokens, MIN_BODY_TOKENS) for tokens in body_tokens]
    costs = [least[i] + heading_tokens[i] for i in range(len(entries))]
    room = float(budget_tokens - MIN_BODY_TOKENS)  # The note takes some.
    kept = _choose_kept(entries, costs, room)

    # Each entry gets a little; messages are served first with the rest, copies last.
    body_room = room - sum(heading_tokens[i] for i in kept)
    shares = divide_budget([least[i] for i in kept], [1.0] * len(kept), body_room)
    missing = [body_tokens[i] - share for i, share in zip(kept, shares, strict=True)]
    weights = [entries[i].weight for i in kept]
    more = divide_budget(missing, weights, body_room - sum(shares))

    fitted = []
    for i, share, rest in zip(kept, shares, more, strict=True):
        entry = entries[i]
        tokens = share + rest
        body = shorten_to_tokens(entry.body, tokens, count_body, entry.handle)
        fitted.append(replace(entry, body=body))

    staying = set(kept)
    dropped = [entry for i, entry in enumerate(entries) if i not in staying]
    return [_note_dropped(dropped), *fitted] if dropped else fitted


def _choose_kept(
    entries: Sequence[Entry], costs: Sequence[int], room: float
) -> list[int]:
    """Chooses the pinned entries, and the newest of the others that fit."""
    pinned = [i for i, entry in enumerate(entries) if entry.is_pinned]
    others = [i for i, entry in enumerate(entries) if not entry.is_pinned]

    kept = list(pinned)
    used = sum(costs[i] for i in pinned)
    for i in reversed(others):
        used += costs[i]
        if used > room:
            break
        kept.append(i)
    return sorted(kept)


def _note_dropped(dropped: Sequence[Entry]) -> Entry:
    """Returns an entry that tells how many are dropped, and names the newest."""
    handles = [entry.handle for entry in dropped if entry.handle and entry.body]
    newest = handles[::-1][:_MAX_NAMED]
    items = f"; the newest are items {', '.join(newest)}" if newest else ""
    return Entry(LEFT_OUT.format(len(dropped), items))
