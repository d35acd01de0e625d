"""Writes the conversation as a text for a summarizer, within a budget of tokens.

The text has an entry for each message, call, result and file. The heading of an entry
is not indented and names the author. The body is indented, so no text in the body can
be taken for another entry. An entry has the handle under which the agent's recall tool
finds the whole text, if the agent has this tool.
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
    PlacedPart,
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
"""A body is not shortened to less than this, because a shorter excerpt says nothing.

Entries that are not required are dropped instead.
"""

_NOTE_TOKENS = MIN_BODY_TOKENS
"""The room for the note that tells how many entries are dropped."""

_MESSAGE_WEIGHT = 1.0
"""The weight of a message's entry when tokens are divided among entries."""

_TOOL_WEIGHT = 0.2
"""The weight of the entry of a call, a result, code or a file."""

_COPY_WEIGHT = 0.2 * _TOOL_WEIGHT
"""The weight of an entry of the recall tool, which repeats other entries."""

_MARGIN = "  "
"""The indentation of each line of a body."""

_MAX_NAMED = 3
"""How many dropped entries the note names by their handles."""


@dataclass(frozen=True)
class Entry:
    """A message, a call, a result or a file in a transcript.

    Attributes:
        heading: The line that names the author.
        body: The text below the heading, not indented; "" for none.
        weight: The weight of the body when tokens are divided among the bodies.
        is_required: Whether the entry is never dropped.
        handle: The name under which the recall tool finds the whole text; "" for none.
    """

    heading: str
    body: str = ""
    weight: float = _MESSAGE_WEIGHT
    is_required: bool = False
    handle: str = ""

    @property
    def text(self) -> str:
        """The heading, and the indented body below it."""
        if not self.body:
            return self.heading
        # `textwrap` indents the line after every kind of line break, not only "\n".
        return f"{self.heading}\n{textwrap.indent(self.body, _MARGIN)}"


def render_entries(
    contents: Sequence[types.Content],
    indexes: Iterable[int],
    required: Collection[int] = (),
    wholes: Sequence[types.Content] | None = None,
    outputs: Collection[int] = (),
) -> list[Entry]:
    """Renders contents: one entry for each part that `walk_parts` yields, in order.

    Empty parts get no entry.

    Args:
        contents: The contents of a request, perhaps with shortened results.
        indexes: The indexes of the contents that are rendered, in rising order.
        required: The indexes of the contents whose entries are never dropped.
        wholes: The same contents before they were shortened. The handle of an entry is
            made from the whole part; None for entries without handles.
        outputs: The indexes of the contents whose text was printed by executed code.
    """
    entries = []
    for placed in walk_parts(contents, indexes, outputs, wholes):
        # The name of a tool or a file may have line breaks, but a heading is one line.
        heading = " ".join(_write_heading(placed).split())
        if not heading:
            continue

        tool = placed.part.function_call or placed.part.function_response
        if placed.part.text:
            weight = _MESSAGE_WEIGHT
        elif tool is not None and tool.name == RECALL_TOOL:
            weight = _COPY_WEIGHT
        else:
            weight = _TOOL_WEIGHT

        entry = Entry(
            heading,
            quote(placed.text),
            weight=weight,
            is_required=placed.content_index in required,
            handle=placed.handle,
        )
        entries.append(entry)
    return entries


def _write_heading(placed: PlacedPart) -> str:
    """Writes the heading of a part: "model: [called tool: grep]".

    Returns "" for a part that gets no entry: an empty part, or an unknown kind of part.
    """
    part = placed.part
    author = placed.author
    if part.text:
        return f"{author}:"
    if part.function_call:
        return f"{author}: [called tool: {part.function_call.name}]"
    if part.function_response:
        response = part.function_response
        files = [describe_media(file) for file in response.parts or ()]
        return " ".join([f"tool: [tool {response.name} returned a result]", *files])
    if part.executable_code:
        return f"{author}: [ran code]"
    if part.code_execution_result:
        return "tool: [code returned a result]"

    file_name = name_media(part)
    if not file_name:
        return ""
    # If a body is shortened, a notice in the body names the handle. A file has no body,
    # so its heading names the handle.
    item = f"; item {placed.handle}" if placed.handle else ""
    return f"{author}: {ATTACHED.format(file_name + item)}"


def fit_entries(
    entries: Sequence[Entry], budget_tokens: int, count_tokens: TokenCounter
) -> list[Entry]:
    """Fits entries into a budget: drops the oldest ones, and shortens other bodies.

    - If all entries fit, they are returned as they are.
    - Otherwise the newest entries stay, with bodies that may be shortened. If entries
      are dropped, the first of the returned entries is a note that says so.

    Required entries always stay. If there are too many of them, their headings alone
    may exceed the budget.
    """
    count_body = partial(_count_body, count_tokens=count_tokens)
    sized = []
    for entry in entries:
        # One token more for the line break after the entry.
        heading_tokens = count_tokens(entry.heading) + 1
        body_tokens = count_body(entry.body)
        least_body_tokens = min(body_tokens, MIN_BODY_TOKENS)
        sized.append(_Sized(entry, heading_tokens, body_tokens, least_body_tokens))

    whole_tokens = sum(each.heading_tokens + each.body_tokens for each in sized)
    if whole_tokens <= budget_tokens:
        return list(entries)

    # Whether an entry is dropped is not known yet, so the note always has room.
    entries_tokens = budget_tokens - _NOTE_TOKENS
    kept, dropped = _choose_kept(sized, entries_tokens)

    headings_tokens = sum(each.heading_tokens for each in kept)
    body_budgets = _divide_among_bodies(kept, entries_tokens - headings_tokens)

    fitted = []
    for each, body_budget in zip(kept, body_budgets, strict=True):
        entry = each.entry
        body = shorten_to_tokens(entry.body, body_budget, count_body, entry.handle)
        fitted.append(replace(entry, body=body))
    return [_note_dropped(dropped), *fitted] if dropped else fitted


def _count_body(body: str, count_tokens: TokenCounter) -> int:
    """Counts the tokens of a body in the form in which it stands below a heading."""
    return count_tokens("\n" + textwrap.indent(body, _MARGIN)) if body else 0


class _Sized(NamedTuple):
    """An entry with its size.

    Attributes:
        entry: The entry.
        heading_tokens: The tokens of the heading.
        body_tokens: The tokens of the whole body.
        least_body_tokens: The tokens to which the body may be shortened: at most
            `MIN_BODY_TOKENS`.
    """

    entry: Entry
    heading_tokens: int
    body_tokens: int
    least_body_tokens: int


def _choose_kept(
    sized: Sequence[_Sized], budget_tokens: int
) -> tuple[list[_Sized], list[Entry]]:
    """Chooses the required entries, and the newest of the others as long as they fit.

    A body counts only with its `least_body_tokens`, because it can still be shortened.

    Returns:
        The kept and the dropped entries, both in their order.
    """
    least_tokens = [each.heading_tokens + each.least_body_tokens for each in sized]
    required_positions = []
    other_positions = []
    for position, each in enumerate(sized):
        if each.entry.is_required:
            required_positions.append(position)
        else:
            other_positions.append(position)

    kept_positions = set(required_positions)
    used_tokens = sum(least_tokens[position] for position in required_positions)
    for position in reversed(other_positions):
        used_tokens += least_tokens[position]
        if used_tokens > budget_tokens:
            break
        kept_positions.add(position)

    kept = [each for i, each in enumerate(sized) if i in kept_positions]
    dropped = [each.entry for i, each in enumerate(sized) if i not in kept_positions]
    return kept, dropped


def _divide_among_bodies(kept: Sequence[_Sized], budget_tokens: float) -> list[float]:
    """Returns how many tokens the body of each entry gets.

    First each body gets its `least_body_tokens`, whatever its weight. Then the rest of
    the budget is divided by weight. If the budget is too small for the first step, all
    bodies have equal shares of it; a budget below 0 counts as 0.
    """
    least = [each.least_body_tokens for each in kept]
    equal_weights = [1.0] * len(kept)
    first_shares = divide_budget(least, equal_weights, budget_tokens)

    missing_tokens = [
        each.body_tokens - share for each, share in zip(kept, first_shares, strict=True)
    ]
    weights = [each.entry.weight for each in kept]
    rest_tokens = budget_tokens - sum(first_shares)
    rest_shares = divide_budget(missing_tokens, weights, rest_tokens)
    return [first + rest for first, rest in zip(first_shares, rest_shares, strict=True)]


def _note_dropped(dropped: Sequence[Entry]) -> Entry:
    """Returns a note on the dropped entries: an entry with their number.

    For example: "[5 earlier messages left out; the newest are items 3c1d, 9f0a]". The
    newest of the entries that can be read back are named, the newest one first. Such an
    entry has a handle, and a body to read.
    """
    handles = [entry.handle for entry in dropped if entry.handle and entry.body]
    newest_first = handles[::-1][:_MAX_NAMED]
    names = ""
    if newest_first:
        names = f"; the newest are items {', '.join(newest_first)}"
    return Entry(LEFT_OUT.format(len(dropped), names))
