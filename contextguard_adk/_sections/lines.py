"""Telling lines of what a summary replaces, word for word.

The lines come from the arguments of calls, from results, and from the texts of the
model. Some of them no request has shown: a large result is shortened on arrival. The
list has a group for each source:

    - read_file(src/a.py):
      MAX_RETRIES = 3  # as agreed with the operators

"Covered" messages are those that the summary replaces. An index is the position of a
message among the contents of the request.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from contextguard_adk._history.contents import content_text, payload_of
from contextguard_adk._history.history import History
from contextguard_adk._history.text import PlacedPart, walk_parts
from contextguard_adk._measuring.tokens import text_bytes
from contextguard_adk._sections.sources import (
    USER,
    Source,
    describe_source,
    find_oldest_read,
    find_read,
    find_repeating_tools,
    limit_by_covered,
)
from contextguard_adk._sections.telling import (
    MIN_LINE_CHARS,
    ReadLine,
    has_credential,
    read_form,
    read_lines,
    score_lines,
)
from contextguard_adk._support.phrases import LINES, quote_line
from contextguard_adk._turn.room import Room
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section

LINES_RATIO = 0.10
"""The list takes at most this part of `Budgets.working_tokens` if a tool was called."""

CHAT_LINES_RATIO = 0.05
"""The list takes at most this part of `Budgets.working_tokens` if no tool was called.

There a summary has its whole budget. On recorded chats, longer lists cost more than
what they kept was worth.
"""

MAX_LINES_TOKENS = 4_000
"""The list takes at most this, however large the window is: it stands in the state."""

CALLS_RATIO = 0.75
"""Lines of calls take at most this part of the list.

On recorded sessions of coding agents, most lines that a later call repeated were the
agent's own: a test, a command, a piece of code that it had written before.
"""

RECENCY_WEIGHT = 0.1
"""The points of a line in the newest message. In older messages it has fewer points."""

MARGIN_BYTES = 3
"""In the list, a line has two spaces before it, and a line break after it."""

LABEL_BYTES = 4
"""In the list, a label has "- " before it, and ":" with a line break after it."""

MAX_MISSES = 40
"""After so many lines that do not fit, no more lines are tried."""

MAX_UNLISTABLE = 2_000
"""After so many lines that may not be listed, no more lines are tried."""


class _Placed(NamedTuple):
    """A line, and the newest source that has it."""

    line: ReadLine
    source: Source


@dataclass(frozen=True)
class _Lines:
    """The lines that may be listed.

    Attributes:
        sources: All sources, in the order of the messages.
        numbers: The number of the message of each source, from 1; 0 for the sources of
            an older list.
        in_calls: The lines of calls by their text; the newest line is last.
        in_others: The lines of results and of the model's texts, in the same form.
    """

    sources: list[Source] = field(default_factory=list)
    numbers: dict[Source, int] = field(default_factory=dict)
    in_calls: dict[str, _Placed] = field(default_factory=dict)
    in_others: dict[str, _Placed] = field(default_factory=dict)

    def add(
        self, source: Source, number: int, lines: Iterable[ReadLine], is_call: bool
    ) -> None:
        """Adds the lines of a source. The sources are added in their order."""
        if source not in self.numbers:
            self.sources.append(source)
        self.numbers[source] = number
        lines_of_kind = self.in_calls if is_call else self.in_others
        for line in lines:
            # A repeated line moves to the end, with its newest source.
            lines_of_kind.pop(line.text, None)
            lines_of_kind[line.text] = _Placed(line, source)


class Lines(Section):
    """Lists lines of the covered messages, word for word.

    If a session is loaded in part, the list takes over the lines of the list before,
    and adds those of the messages that are covered anew.
    """

    name = "lines"
    label = "the lines beside the summary"
    heading = LINES
    goes_at = 1
    token_ratio = 1.0

    def most_tokens(self, turn: Turn, covered: frozenset[int]) -> float:
        """Returns the smallest of the limits by the window and the messages."""
        ratio = CHAT_LINES_RATIO if turn.is_chat else LINES_RATIO
        window_tokens = turn.budgets.working_tokens * ratio
        covered_tokens = limit_by_covered(turn, covered, self.name)
        return min(window_tokens, covered_tokens, MAX_LINES_TOKENS)

    def write(self, turn: Turn, covered: frozenset[int], known: str, room: Room) -> str:
        """Returns the list; "" for no line."""
        history = turn.history
        unread_tools = find_repeating_tools(turn)
        indexes = sorted(find_read(history, covered))
        lines = _gather(history, indexes, known, unread_tools)
        newest_calls = list(reversed(lines.in_calls.values()))
        telling_others = _rank_others(lines)

        def write_list(max_bytes: int) -> str:
            chosen = _Choice(max_bytes - len(LINES), room)
            chosen.choose(newest_calls, CALLS_RATIO)
            chosen.choose(telling_others)
            return _write_list(lines.sources, chosen.listed)

        return room.fill(write_list)


def _gather(
    history: History,
    indexes: Sequence[int],
    known: str,
    unread_tools: Collection[str],
) -> _Lines:
    """Reads the lines of some messages, and of an older list.

    Args:
        history: The history of the request.
        indexes: The indexes of the messages, in rising order.
        known: The list of older messages, of which the history may lack some; "" for
            none.
        unread_tools: The tools of which no lines are listed.
    """
    lines = _Lines()
    for source, known_lines in _read_known(known).items():
        lines.add(source, 0, known_lines, is_call=False)

    numbers = {index: number for number, index in enumerate(indexes, 1)}
    oldest_index = find_oldest_read(history, indexes)
    sources: dict[Hashable, Source] = {}
    placed_parts = walk_parts(history.told, indexes, history.outputs)
    for part_number, placed in enumerate(placed_parts):
        is_too_old = placed.content_index < oldest_index
        if is_too_old or _is_left_out(placed, unread_tools):
            continue
        # A call and its result are one source. Two calls may be equal, so the key is
        # the object of the call.
        call = placed.part.function_call or placed.call
        source_key = id(call) if call else part_number
        if source_key not in sources:
            sources[source_key] = describe_source(history.memo, placed, call)
        lines.add(
            sources[source_key],
            numbers[placed.content_index],
            _read_part(history, placed),
            is_call=placed.part.function_call is not None,
        )
    return lines


def _read_known(known: str) -> dict[Source, list[ReadLine]]:
    """Reads a list that `_write_list` has written: the lines by their source."""
    lines_by_source: dict[Source, list[ReadLine]] = {}
    source = None
    for line in known.splitlines():
        if line.startswith("- "):
            source = Source(line.removeprefix("- ").removesuffix(":"))
            lines_by_source[source] = []
        elif source is not None:
            text = line.strip()
            lines_by_source[source].append(ReadLine(text, text, names=()))
    return lines_by_source


def _is_left_out(placed: PlacedPart, unread_tools: Collection[str]) -> bool:
    """Whether no lines of a part are listed.

    The user's messages have a section of their own.
    """
    tool = placed.part.function_call or placed.part.function_response
    if tool is None:
        return placed.author == USER
    return tool.name in unread_tools


def _read_part(history: History, placed: PlacedPart) -> list[ReadLine]:
    """Returns the lines of a part, without those that another plugin has added."""
    payload = payload_of(placed.part)
    lines = read_lines(placed.text if payload is None else payload)
    original = history.original(placed.content_index)
    if original is history.contents[placed.content_index]:
        # No plugin has changed the content.
        return lines

    original_text = content_text(original)
    return [line for line in lines if line.text in original_text]


def _rank_others(lines: _Lines) -> list[_Placed]:
    """Returns the lines of results and texts, the most telling first.

    A line that also stands in a call is left out.
    """
    newest_number = max([1, *lines.numbers.values()])
    points = score_lines(lines.in_others.keys() - lines.in_calls.keys())
    for line in points:
        number = lines.numbers[lines.in_others[line].source]
        points[line] += RECENCY_WEIGHT * number / newest_number
    # Lines with equal points are in their own order, so that the list is always the
    # same for the same messages.
    ranked = sorted(points, key=lambda line: (-points[line], line))
    return [lines.in_others[line] for line in ranked]


class _Choice:
    """Chooses the lines that are listed.

    Attributes:
        listed: The chosen lines by their source.
    """

    def __init__(self, max_bytes: int, room: Room) -> None:
        self.listed: dict[Source, list[str]] = {}
        self._left_bytes = max_bytes
        self._room = room

    def choose(self, ranked: Iterable[_Placed], ratio: float = 1.0) -> None:
        """Chooses lines as long as they fit.

        A line that is noise is passed over. So is a line that stands beside the list
        already, and a line with a credential.

        Args:
            ranked: The lines, the best one first.
            ratio: The part of the bytes that are left which the lines may take.
        """
        reserved_bytes = int(self._left_bytes * (1 - ratio))
        misses = 0
        unlistable_count = 0
        for line, source in ranked:
            free_bytes = self._left_bytes - reserved_bytes
            is_full = free_bytes < MIN_LINE_CHARS or misses > MAX_MISSES
            if is_full or unlistable_count > MAX_UNLISTABLE:
                return

            cost_bytes = text_bytes(line.text) + MARGIN_BYTES
            if source not in self.listed:
                cost_bytes += text_bytes(source.label) + LABEL_BYTES

            if cost_bytes > free_bytes:
                misses += 1
            elif self._is_listable(line):
                self.listed.setdefault(source, []).append(line.text)
                self._left_bytes -= cost_bytes
            else:
                unlistable_count += 1

    def _is_listable(self, line: ReadLine) -> bool:
        """Whether a line may be listed, if it fits."""
        is_noise = not read_form(line.text).words
        if is_noise or self._room.shows(line.text):
            return False
        return not has_credential(line)


def _write_list(
    sources: Sequence[Source], listed: Mapping[Source, Sequence[str]]
) -> str:
    """Writes the heading, and a group of lines for each source; "" for no line."""
    if not listed:
        return ""

    texts = [LINES]
    for source in sources:
        if source in listed:
            texts.append(f"- {quote_line(source.label)}:")
            texts += [f"  {quote_line(line)}" for line in listed[source]]
    return "\n".join(texts)
