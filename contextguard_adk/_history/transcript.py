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

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.text import Said, describe_media, walk_parts
from contextguard_adk._measuring.budgets import (
    TokenCounter,
    divide_budget,
    shorten_to_tokens,
)
from contextguard_adk._support.phrases import LEFT_OUT, quote

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
        return self.heading + _indent(self.body)


def _indent(body: str) -> str:
    """A body below its heading; `textwrap` knows every separator of lines."""
    return "\n" + textwrap.indent(body, "  ") if body else ""


def render_entries(
    contents: Sequence[types.Content],
    indexes: Iterable[int],
    pinned: Collection[int] = (),
    wholes: Sequence[types.Content] | None = None,
    outputs: Collection[int] = (),
) -> list[Entry]:
    """Renders contents, one entry for each part; those that are pinned always stay."""
    entries = []
    for said in walk_parts(contents, indexes, outputs, wholes):
        # Names of tools and files come from outside, line breaks and all.
        if heading := " ".join(_write_heading(said).split()):
            part = said.part
            tool = part.function_call or part.function_response
            entry = Entry(
                heading,
                quote(said.text),
                is_tool=not part.text,
                is_pinned=said.index in pinned,
                is_copy=tool is not None and tool.name == RECALL_TOOL,
                handle=said.handle,
            )
            entries.append(entry)
    return entries


def _write_heading(said: Said) -> str:
    part = said.part
    author = said.author
    if part.text:
        return f"{author}:"
    if call := part.function_call:
        return f"{author}: [called tool: {call.name}]"
    if response := part.function_response:
        media = map(describe_media, response.parts or ())
        return " ".join([f"tool: [tool {response.name} returned a result]", *media])
    if part.executable_code:
        return f"{author}: [ran code]"
    if part.code_execution_result:
        return "tool: [code returned a result]"
    placeholder = describe_media(part)
    if placeholder and said.handle:
        placeholder = f"{placeholder[:-1]}; item {said.handle}]"
    return f"{author}: {placeholder}" if placeholder else ""


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
    return [Entry(LEFT_OUT.format(len(dropped), items)), *fitted]
