"""The list of values in the messages that a summary replaces.

A value is a text that names something exactly: an id, a number, a path, a name. The
list has a line for each tool and each author. The line of a tool has a group for each
source: "- grep(main, src): src/a.py, 4711; (TODO, docs): docs/b.md". A source is a call
with its result, or a message. "Covered" messages are those that the summary replaces.
An index is the position of a message among the contents of the request.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import content_text, payload_of
from contextguard_adk._history.extraction import NAMING, TELLING, read_fields
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
from contextguard_adk._support.phrases import VALUES, quote_line
from contextguard_adk._turn.room import Room
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section

VALUES_RATIO = 0.10
"""The list takes at most this part of `Budgets.working_tokens`."""

ROOM_RATIO = 0.25
"""The list takes at most this part of `Turn.room_tokens`.

`Turn.room_tokens` is the threshold less the tokens of instruction and tools.
"""

MAX_VALUES_TOKENS = 8_000
"""The list takes at most this, however large the window is."""

_LINE = re.compile(r"- (?P<origin>[^(:]*)(?P<groups>.*)$")
"""A line of the list: the name of a tool, or an author, and its groups of values."""

_GROUP = re.compile(r"(?P<args>\(.*?\))?(?:: (?P<values>.+))?$")
"""A group of a line: the arguments of a call, and the values that they do not have."""

_NEXT_GROUP = "; "
"""The mark between two groups of a line. A group that follows begins with a bracket."""

LEAST_COST_BYTES = 12
"""If the list has room for fewer bytes than this, no more values are tried.

Hardly any value would fit.
"""

# The points of a value decide whether it is listed. The weights of the points were
# chosen on recorded sessions of agents.

REUSE_WEIGHT = 2.0
"""A value gets `REUSE_WEIGHT * log(1 + n)` points if calls have used it again n times.
"""

RECENCY_WEIGHT = 2.0
"""The points of a value in the newest message. In older messages it has fewer points.
"""

CALL_WEIGHT = 1.0
"""The points of a value that a call has used."""

KIN_WEIGHT = 1.0
"""The points of a value whose words all stand in values of calls, too.

A value gets a part of these points if only a part of its words does.
"""

KIN_WITHOUT_WORDS_RATIO = 0.3
"""A value without words gets this part of `KIN_WEIGHT`."""

USER_WEIGHT = 1.0
"""The points of a value that the user has named last."""

CROWD_WEIGHT = 2.0
"""A value loses `CROWD_WEIGHT * log(1 + n / CROWD_BYTES)` points if better values of
its field take n bytes. The field is that of a tool, in all its results.
"""

CROWD_BYTES = 64
"""See `CROWD_WEIGHT`."""

_WORD = re.compile(r"[A-Za-z][a-z]{2,}|[A-Z]{3,}")
"""The words in a value: "orderId_42" has "order"."""


@dataclass
class _Value:
    """The uses of a value. A use is a part of a message in which the value stands.

    Attributes:
        telling: The weight of the value from `read_values`: `TELLING` if it has the
            form of an id, a path or a name, `NAMING` for a name of a schema.
        field: The name of the field in which the value stands; "" for none.
        source: The source in whose line the value is listed. It is the first source
            with the value in the newest message that has the value.
        newest_number: The number of this message among the covered ones, from 1; 0
            before the first use.
        call_count: How many of the uses are calls.
        reuse_count: Like `call_count`, but a call that is the first of all uses does
            not count.
    """

    telling: float
    field: str
    source: Source
    newest_number: int = 0
    call_count: int = 0
    reuse_count: int = 0

    def add_use(self, source: Source, message_number: int, is_call: bool) -> None:
        """Counts one more use. The uses are counted in the order of their messages."""
        is_first_use = self.newest_number == 0
        if is_call:
            self.call_count += 1
        if is_call and not is_first_use:
            self.reuse_count += 1

        if message_number != self.newest_number:
            self.newest_number = message_number
            self.source = source


class Values(Section):
    """Lists ids, numbers, paths and names in the covered messages.

    If a session is loaded in part, the list takes over the values of the list before,
    and adds those of the messages that are covered anew. If all values have no room
    together, the most useful ones stay.
    """

    name = "values"
    label = "the list of values"
    heading = VALUES
    goes_at = 3
    state_ratio = 0.5
    token_ratio = 1.0

    def most_tokens(self, turn: Turn, covered: frozenset[int]) -> float:
        """Returns the smallest limit: by the window, the room or the messages."""
        return min(
            turn.budgets.working_tokens * VALUES_RATIO,
            turn.room_tokens * ROOM_RATIO,
            limit_by_covered(turn, covered, self.name),
            MAX_VALUES_TOKENS,
        )

    def write(self, turn: Turn, covered: frozenset[int], known: str, room: Room) -> str:
        """Returns the list; "" for no value."""
        listed_indexes = find_read(turn.history, covered)
        unread_tools = find_repeating_tools(turn)
        ranked = _rank_values(turn.history, listed_indexes, known, unread_tools)
        # A value that stands beside the list already is not listed again.
        missing = [
            (text, source) for text, source in ranked.values if not room.shows(text)
        ]
        to_list = _Ranked(missing, ranked.sources)
        return room.fill(lambda size_bytes: _write_list(to_list, size_bytes))


class _Ranked(NamedTuple):
    """Values that may be listed.

    Attributes:
        values: The texts of the values, each with its source; the most useful first.
        sources: All sources in the order of the messages.
    """

    values: list[tuple[str, Source]]
    sources: list[Source]


def _rank_values(
    history: History,
    covered: Collection[int],
    known: str,
    unread_tools: Collection[str] = (RECALL_TOOL,),
) -> _Ranked:
    """Reads the values of covered messages and of an older list, and ranks them.

    Args:
        history: The history of the request.
        covered: The indexes of the covered messages.
        known: The list of older messages, of which the history may lack some; "" for
            none.
        unread_tools: The tools of which no values are listed.
    """
    gathered = _gather(history, sorted(covered), unread_tools)
    older_sources = _add_known(known, gathered.values)

    ranked_values = [
        (text, gathered.values[text].source) for text in _rank(gathered.values)
    ]
    return _Ranked(ranked_values, [*older_sources, *gathered.sources])


class _Gathered(NamedTuple):
    """What some messages have: values by their text, and all sources in order."""

    values: dict[str, _Value]
    sources: list[Source]


def _gather(
    history: History, indexes: Sequence[int], unread_tools: Collection[str]
) -> _Gathered:
    """Reads the values of some messages, and counts the uses of each value.

    Args:
        history: The history of the request.
        indexes: The indexes of the messages, in rising order.
        unread_tools: The tools whose values are not read.
    """
    values: dict[str, _Value] = {}
    sources: dict[Hashable, Source] = {}
    message_numbers = {index: number for number, index in enumerate(indexes, 1)}
    oldest_index = find_oldest_read(history, indexes)

    placed_parts = walk_parts(history.told, indexes, history.outputs)
    for part_number, placed in enumerate(placed_parts):
        tool = placed.part.function_call or placed.part.function_response
        is_unread = tool is not None and tool.name in unread_tools
        is_call = placed.part.function_call is not None
        is_too_old = not is_call and placed.content_index < oldest_index
        if is_unread or is_too_old:
            continue

        # A call and its result have one source. Any other part has its own source. Two
        # calls may be equal, so the key is the object of the call.
        call = placed.part.function_call or placed.call
        source_key = id(call) if call else (placed.content_index, part_number)
        if source_key not in sources:
            sources[source_key] = describe_source(history.memo, placed, call)
        source = sources[source_key]

        message_number = message_numbers[placed.content_index]
        for text, telling, field in _read_part(history, placed):
            value = values.setdefault(text, _Value(telling, field, source))
            value.telling = max(value.telling, telling)
            value.add_use(source, message_number, is_call)
    return _Gathered(values, list(sources.values()))


def _add_known(known: str, values: dict[str, _Value]) -> list[Source]:
    """Adds the values of an older list, unless the messages at hand have them.

    These values have no use among the messages, so they count as the oldest ones.

    Args:
        known: A list that `_write_list` has written; "" for none.
        values: The values of the messages by their text, which are added to.

    Returns:
        The sources of the older list, in their order.
    """
    sources: list[Source] = []
    for line in known.splitlines():
        match = _LINE.match(line)
        if match is None:
            # This is the heading.
            continue
        for args, values_text in _split_groups(match["groups"]):
            source = Source(match["origin"], args)
            sources.append(source)
            texts = (values_text or args.strip("()")).split(", ")
            for text in filter(None, texts):
                values.setdefault(text, _Value(TELLING, "", source))
    return sources


def _split_groups(text: str) -> Iterator[tuple[str, str]]:
    """Yields the arguments and the values of each group in a line of the list.

    For example, "(1): A-1, B-2; (7): C-3" yields "(1)" with "A-1, B-2", and "(7)" with
    "C-3". Either may be "".
    """
    first_group, *next_groups = text.split(f"{_NEXT_GROUP}(")
    for group_text in [first_group, *[f"({group}" for group in next_groups]]:
        group = _GROUP.match(group_text)
        if group is not None:
            yield group["args"] or "", group["values"] or ""


def _read_part(history: History, placed: PlacedPart) -> list[tuple[str, float, str]]:
    """Returns the values of a part, each with its weight and its field.

    Values that another plugin has added are left out: they may differ in each request,
    as the time does.
    """
    reading = read_fields(payload_of(placed.part) or placed.text)
    found = [
        (text, telling, field)
        for (text, telling), field in zip(reading.values, reading.fields, strict=True)
    ]
    original = history.original(placed.content_index)
    if original is history.contents[placed.content_index]:
        # No plugin has changed the content.
        return found

    original_text = content_text(original)
    return [value for value in found if value[0] in original_text]


def _write_list(ranked: _Ranked, max_bytes: int) -> str:
    """Writes the heading, and a line for each tool or author with a listed value.

    The line of a tool has a group for each call: "- get(1): A-1, B-2; (7): C-3".
    Returns "" if no value is listed.

    Args:
        ranked: The values that may be listed.
        max_bytes: The most bytes that the list may take, with its heading.
    """
    listed = _choose_listed(ranked.values, max_bytes - len(VALUES))
    groups_by_origin: dict[str, list[str]] = {}
    for source in ranked.sources:
        texts = listed.get(source)
        if texts is None:
            continue
        groups = groups_by_origin.setdefault(source.origin, [])
        values_text = ", ".join(texts)
        if groups and not source.args:
            groups[-1] += f", {values_text}"
        else:
            groups.append(f"{source.args}: {values_text}" if texts else source.args)

    lines = [
        quote_line(f"- {origin}{_NEXT_GROUP.join(groups)}")
        for origin, groups in groups_by_origin.items()
    ]
    return "\n".join([VALUES, *lines]) if lines else ""


def _choose_listed(
    ranked_values: Sequence[tuple[str, Source]], max_bytes: int
) -> dict[Source, list[str]]:
    """Chooses the values that are listed: the most useful ones that fit.

    A value that stands in the arguments of a listed call, or in another listed value,
    is not listed again.

    Args:
        ranked_values: The values, each with its source; the most useful first.
        max_bytes: The most bytes of all lines together.

    Returns:
        The values after the arguments, by each source that is shown.
    """
    left_bytes = max_bytes
    list_text = "\n"  # The arguments and values that are listed so far, one a line.
    listed: dict[Source, list[str]] = {}
    origins = set[str]()
    for text, source in ranked_values:
        if left_bytes < LEAST_COST_BYTES:
            break

        cost_bytes = text_bytes(text) + len(", ")
        is_shown = source in listed
        if not is_shown and source.args:
            cost_bytes += text_bytes(source.args) + len(": ; ")
        if source.origin not in origins:
            cost_bytes += text_bytes(source.origin) + len("- : \n")
        if cost_bytes > left_bytes or _stands_in(text, list_text):
            continue

        left_bytes -= cost_bytes
        origins.add(source.origin)
        if not is_shown:
            listed[source] = []
            list_text += source.args + "\n"
        # The arguments may have the value already.
        if not _stands_in(text, source.args):
            listed[source].append(text)
            list_text += text + "\n"
    return listed


def _rank(values: dict[str, _Value]) -> list[str]:
    """Returns the texts of the values, the most useful first.

    A value is useful if it has the form of an id, a path or a name, if calls have used
    it, if it stands in a new message, or if it is like the values that calls have used.
    """
    # The number is 0 if only an older list has values.
    newest_number = max([1, *(value.newest_number for value in values.values())])
    words_in_calls = set[str]()
    for text, value in values.items():
        if value.call_count > 0:
            words_in_calls |= _find_words(text)

    points: dict[str, float] = {}
    for text, value in values.items():
        reuse_points = REUSE_WEIGHT * math.log1p(value.reuse_count)
        recency_points = RECENCY_WEIGHT * (value.newest_number / newest_number)
        call_points = CALL_WEIGHT if value.call_count > 0 else 0.0
        user_points = USER_WEIGHT if value.source.origin == USER else 0.0

        words = _find_words(text)
        kin_ratio = KIN_WITHOUT_WORDS_RATIO
        if words:
            kin_ratio = len(words & words_in_calls) / len(words)
        kin_points = KIN_WEIGHT * kin_ratio

        points[text] = (
            value.telling
            + reuse_points
            + recency_points
            + call_points
            + kin_points
            + user_points
        )

    ranked = sorted(values, key=points.__getitem__, reverse=True)
    return _share(ranked, values, points)


def _share(
    ranked: Sequence[str], values: dict[str, _Value], points: dict[str, float]
) -> list[str]:
    """Returns ranked values in an order that gives each field a share of the list.

    A value has fewer points the more bytes the better values of its field take. So a
    field with hundreds of hashes leaves room for the ids beside it. Values that calls
    have used keep their places; the others share the places between.

    Args:
        ranked: The texts of the values, the most useful first.
        values: The values by their text.
        points: The points of the values by their text.
    """
    field_bytes = Counter[Hashable]()
    shared_points: dict[str, float] = {}
    for text in ranked:
        value = values[text]
        if value.call_count > 0:
            continue
        field = (value.source.origin, value.field, value.telling == NAMING)
        crowd_points = CROWD_WEIGHT * math.log1p(field_bytes[field] / CROWD_BYTES)
        shared_points[text] = points[text] - crowd_points
        field_bytes[field] += text_bytes(text)

    shared = iter(sorted(shared_points, key=shared_points.__getitem__, reverse=True))
    return [next(shared) if text in shared_points else text for text in ranked]


def _find_words(text: str) -> set[str]:
    """Returns the words of a value in lower case: "orderId_42" has "order"."""
    return {word.lower() for word in _WORD.findall(text)}


def _stands_in(value: str, text: str) -> bool:
    """Whether a value stands in a text by itself, not within a longer word."""
    # The quick test comes first, because the pattern is slow.
    if value not in text:
        return False
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None
