"""Writes the conversation as a text for a summarizer, within a budget of tokens.

The text has entries. The heading of an entry is not indented and names the author. The
body is indented, so no text in it can pass for another entry.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from google.genai import types

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.text import (
    Said,
    describe_media,
    name_media,
    walk_parts,
)
from contextguard_adk._measuring.budgets import (
    TokenCounter,
    divide_budget,
    shorten_to_tokens,
)
from contextguard_adk._support.phrases import ATTACHED, LEFT_OUT, quote

MIN_BODY_TOKENS = 40
"""The least size of a body. A shorter excerpt says nothing: the entry is dropped."""

_NOTE_TOKENS = MIN_BODY_TOKENS
"""The room for the note that tells how many entries were dropped."""

_TOOL_WEIGHT = 0.2
"""The share of the tokens that a tool's entry gets; a message's entry has 1.0."""

_COPY_WEIGHT = 0.2 * _TOOL_WEIGHT
"""The share that a result of the recall tool gets: it repeats other entries."""

_MARGIN = "  "
"""The indentation of each line of a body."""

_MAX_NAMED = 3
"""How many dropped entries the note names by their handles."""


@dataclass(frozen=True)
class Entry:
    """A message, a call or a result in a transcript.

    Attributes:
        heading: The line that names the author.
        body: The text below it.
        weight: Its share of the tokens, in proportion to the other entries' weights.
        is_required: Whether it always stays.
        handle: The name under which the recall tool finds the whole text.
    """

    heading: str
    body: str = ""
    weight: float = 1.0
    is_required: bool = False
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
    required: Collection[int] = (),
    wholes: Sequence[types.Content] | None = None,
    outputs: Collection[int] = (),
) -> list[Entry]:
    """Renders contents, one entry for each part.

    Args:
        contents: The contents of a request.
        indexes: The contents that are rendered.
        required: The indexes of contents whose entries are never dropped.
        wholes: The same contents before they were shortened, for the handles of the
            parts; None for no handles.
        outputs: The indexes of texts that executed code has printed.
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
            weight = _COPY_WEIGHT
        else:
            weight = _TOOL_WEIGHT

        entry = Entry(
            heading,
            quote(said.text),
            weight=weight,
            is_required=said.index in required,
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

    file_name = name_media(part)
    if not file_name:
        return ""
    if said.handle:
        named_item = f"{file_name}; item {said.handle}"
        return f"{author}: {ATTACHED.format(named_item)}"
    return f"{author}: {ATTACHED.format(file_name)}"


def fit_entries(
    entries: Sequence[Entry], budget_tokens: int, count_tokens: TokenCounter
) -> list[Entry]:
    """Drops the oldest entries and shortens the others until they fit.

    If entries are dropped, the first of the returned entries is a note that says so.
    """
    sized = []
    for entry in entries:
        heading_tokens = count_tokens(entry.heading) + 1
        body_tokens = _count_body(entry.body, count_tokens=count_tokens)
        least_tokens = min(body_tokens, MIN_BODY_TOKENS)
        sized.append(_Sized(entry, heading_tokens, body_tokens, least_tokens))

    whole_tokens = sum(each.heading_tokens + each.body_tokens for each in sized)
    if whole_tokens <= budget_tokens:
        return list(entries)

    tokens_for_entries = float(budget_tokens - _NOTE_TOKENS)
    kept, dropped = _choose_kept(sized, tokens_for_entries)

    kept_headings_tokens = sum(each.heading_tokens for each in kept)
    tokens_for_bodies = tokens_for_entries - kept_headings_tokens
    body_budgets = _divide_among_bodies(kept, tokens_for_bodies)

    fitted = []
    count_body = partial(_count_body, count_tokens=count_tokens)
    for each, body_budget in zip(kept, body_budgets, strict=True):
        whole_body = each.entry.body
        handle = each.entry.handle
        body = shorten_to_tokens(whole_body, body_budget, count_body, handle)
        fitted.append(replace(each.entry, body=body))
    return [_note_dropped(dropped), *fitted] if dropped else fitted


def _count_body(body: str, count_tokens: TokenCounter) -> int:
    """Counts the tokens of a body as it is written, below a heading and indented."""
    return count_tokens("\n" + textwrap.indent(body, _MARGIN)) if body else 0


class _Sized(NamedTuple):
    """An entry with its size.

    `least_body_tokens` is the size of its body once it is as short as it may become.
    """

    entry: Entry
    heading_tokens: int
    body_tokens: int
    least_body_tokens: int


def _choose_kept(
    sized: Sequence[_Sized], budget_tokens: float
) -> tuple[list[_Sized], list[Entry]]:
    """Chooses the required entries, and the newest of the others as long as they fit.

    For this choice each body counts with its least size. Returns the kept and the
    dropped entries, both in their order.
    """
    least_tokens = [each.heading_tokens + each.least_body_tokens for each in sized]
    required_places = [i for i, each in enumerate(sized) if each.entry.is_required]
    other_places = [i for i, each in enumerate(sized) if not each.entry.is_required]

    kept_places = set(required_places)
    used_tokens = sum(least_tokens[place] for place in required_places)
    for place in reversed(other_places):
        used_tokens += least_tokens[place]
        if used_tokens > budget_tokens:
            break
        kept_places.add(place)

    kept = [each for i, each in enumerate(sized) if i in kept_places]
    dropped = [each.entry for i, each in enumerate(sized) if i not in kept_places]
    return kept, dropped


def _divide_among_bodies(kept: Sequence[_Sized], budget_tokens: float) -> list[float]:
    """Returns how many tokens the body of each entry gets.

    First each body gets its least size. Then the rest is divided by weight.
    """
    least = [each.least_body_tokens for each in kept]
    first_shares = divide_budget(least, [1.0] * len(kept), budget_tokens)

    missing = [
        each.body_tokens - share for each, share in zip(kept, first_shares, strict=True)
    ]
    weights = [each.entry.weight for each in kept]
    rest_shares = divide_budget(missing, weights, budget_tokens - sum(first_shares))
    return [first + rest for first, rest in zip(first_shares, rest_shares, strict=True)]


def _note_dropped(dropped: Sequence[Entry]) -> Entry:
    """Returns an entry that tells how many are dropped, and names the newest.

    Only dropped entries with a body and a handle are named: the others cannot be read
    back.
    """
    handles = [entry.handle for entry in dropped if entry.handle and entry.body]
    newest_first = handles[::-1][:_MAX_NAMED]
    names = ""
    if newest_first:
        names = f"; the newest are items {', '.join(newest_first)}"
    return Entry(LEFT_OUT.format(len(dropped), names))
