"""The list of the running turn's calls that the summary replaces.

The running turn is the agent's work since the user's current request. A completed call
is a call with its result.

Telling arguments are those that tell the calls of one tool apart: two calls of
`read_file` differ in `path`, and share `encoding`. So `path` is telling.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from google.genai import types
from pydantic import JsonValue

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import payload_of
from contextguard_adk._history.fingerprints import handle_of
from contextguard_adk._history.text import PlacedPart, payload_text, walk_parts
from contextguard_adk._measuring.budgets import TokenCounter, excerpt
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._support.phrases import DONE, quote_line
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section

DONE_RATIO = 0.10
"""The list takes at most this part of the window."""

MAX_TEXT_CHARS = 1_000
"""Only this many characters of an argument or a result are read."""

MAX_TEXT_BYTES = 80
"""In a line for each call, an argument or an outcome takes at most this."""

MAX_TELLING_BYTES = 200
"""A telling argument, such as a path or a URL, takes at most this."""

EVER_FEWER_BYTES = (MAX_TELLING_BYTES, 48, 16)
"""In a line for each tool, a telling argument takes at most one of these.

The smaller ones are tried while the list is too long.
"""

MAX_FLAT_FIELDS = 20
"""A dict in arguments with more fields than this is a single text."""

MAX_FLAT_DEPTH = 3
"""A dict that is nested in this many others is a single text."""

_FAILURE = re.compile(
    r'^"?error\b|"(is_?)?error\w*": ?+(?!null|false|0|""|\[\]|\{\})|'
    r'"status": ?"(error|fail)|^\{"result": ?"error\b|'
    r'"(ok|success\w*)": ?false|"(exit|return)_?code": ?-?[1-9]',
    re.IGNORECASE,
)
"""The words of a failed result, such as `Error: …`, `"ok": false`, `"exit_code": 1`."""

_NO_ERROR: tuple[object, ...] = (
    "",
    None,
    0,
    [],
    {},
    "none",
    "null",
    "0",
    "false",
    "no",
    "ok",
    "success",
    "no error",
)
"""A field such as "error" with one of these values denies an error."""


@dataclass(frozen=True)
class _Call:
    """A completed call; each of its texts is one line.

    Attributes:
        name: The name of the tool.
        args: The arguments as texts, by name; small dicts among them are taken apart.
        outcome: The beginning of the result; "" for an empty result.
        handle: The short name under which the recall tool finds the whole result; ""
            if the agent does not have that tool.
        is_failed: Whether the result tells of an error.
    """

    name: str
    args: dict[str, str]
    outcome: str
    handle: str
    is_failed: bool


class DoneCalls(Section):
    """Lists the completed calls of the running turn, so that none is made twice.

    Some tools have a section of their own, which shows what their calls did. Calls of
    these tools are not listed.
    """

    name = "done"
    label = "the list of calls"
    heading = DONE
    goes_at = None
    held_ratio = DONE_RATIO
    is_told_anew = True

    def __init__(self, beside: Sequence[Section] = ()) -> None:
        """Creates the section; `beside` are the sections that may have own tools."""
        listed_tools = {tool for section in beside for tool in section.listed_tools}
        self._unlisted = listed_tools | {RECALL_TOOL}

    def write(
        self, turn: Turn, covered: frozenset[int], known: JsonValue, room_tokens: int
    ) -> JsonValue:
        """Lists the calls of the running turn among all covered messages.

        Calls that an earlier summary has replaced are listed again. Returns "" if there
        are no calls, or no list of them fits.
        """
        history = turn.history
        indexes = sorted(covered.intersection(history.running_turn))
        wholes = history.contents if turn.has_recall else None
        parts = walk_parts(history.told, indexes, wholes=wholes)
        calls = self._find_completed(parts, history.memo)
        if not calls:
            return ""

        def count_if_storable(text: str) -> int:
            """Counts a text; one that is too large for session state never fits."""
            stored_bytes = len(json.dumps(text, ensure_ascii=False).encode())
            if stored_bytes > 4 * room_tokens:
                return sys.maxsize
            return turn.count(text)

        max_tokens = int(turn.budgets.working_tokens * DONE_RATIO)
        return _write_within(calls, max_tokens, count_if_storable)

    def tell_left_out(
        self,
        contents: Sequence[types.Content],
        indexes: Iterable[int],
        max_tokens: int,
        count: TokenCounter,
        memo: Memo,
    ) -> str:
        """Lists the completed calls among messages that are left out; "" for none."""
        calls = self._find_completed(walk_parts(contents, indexes), memo)
        return _write_within(calls, max_tokens, count)

    def _find_completed(self, parts: Iterable[PlacedPart], memo: Memo) -> list[_Call]:
        """Returns the calls whose results are among these parts, in their order.

        Calls that another section lists, and calls of the recall tool, are left out.
        """
        calls = []
        for placed in parts:
            response = placed.part.function_response
            call = placed.call
            if response is None or call is None or response.name in self._unlisted:
                continue

            part = placed.part
            outcome, is_failed = memo.remember(_read_result, part, (part,))
            # The part may be shortened. The handle leads to the whole result.
            whole = placed.whole
            handle = memo.remember(handle_of, whole, (whole,)) if whole else ""
            args = {
                _one_line(name): _one_line(value)
                for name, value in _flatten(call.args or {})
            }
            name = _one_line(response.name or "?")
            calls.append(_Call(name, args, outcome, handle, is_failed))
        return calls


def _read_result(part: types.Part) -> tuple[str, bool]:
    """Returns the outcome of a call in one line, and whether the call failed.

    A failed call is found by the words of its result. If the result is JSON, fields
    that deny an error are left out first.
    """
    payload = payload_of(part)
    outcome = _one_line(payload)

    try:
        without_denials = json.loads(
            payload_text(payload), object_pairs_hook=_leave_out_no_error
        )
        json_text = json.dumps(without_denials, ensure_ascii=False)
        searched = json_text[:MAX_TEXT_CHARS]
    except (ValueError, RecursionError):
        searched = outcome  # The result is no JSON.
    return outcome, _FAILURE.search(searched) is not None


def _leave_out_no_error(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns a JSON object without the fields that deny an error.

    An example of such a field: `"error": "none"`. The object is given as pairs of names
    and values.
    """
    kept = {}
    for name, value in pairs:
        folded = value.lower() if isinstance(value, str) else value
        denies_error = "error" in name.lower() and folded in _NO_ERROR
        if not denies_error:
            kept[name] = value
    return kept


def _flatten(
    args: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    """Yields names and values of arguments, with small dicts taken apart.

    For example, {"file": {"path": "a"}} yields "file.path" and "a": such a value may
    tell calls apart. Empty, large and deep dicts are yielded whole.

    Args:
        args: The arguments, or a dict that is nested in them.
        prefix: The names of the dicts around `args`, such as "file.".
    """
    for key, value in args.items():
        name = f"{prefix}{key}"
        if not isinstance(value, dict):
            yield name, value
            continue

        is_small = 0 < len(value) <= MAX_FLAT_FIELDS
        is_deep = name.count(".") >= MAX_FLAT_DEPTH
        if is_small and not is_deep:
            yield from _flatten(value, prefix=f"{name}.")
        else:
            yield name, value


def _one_line(value: object) -> str:
    if value in (None, ""):
        return ""
    text = value if isinstance(value, str) else payload_text(value)
    return quote_line(text[:MAX_TEXT_CHARS])


def _write_within(calls: Sequence[_Call], max_tokens: int, count: TokenCounter) -> str:
    """Returns the longest list of calls that fits.

    Returns "" for no calls, and if even the shortest list does not fit.
    """
    if not calls:
        return ""

    for lines in _write_ever_shorter(calls):
        text = "\n".join([DONE, *lines]).encode("utf-8", "replace").decode()
        if count(text) <= max_tokens:
            return text
    return ""


def _write_ever_shorter(calls: Sequence[_Call]) -> Iterator[list[str]]:
    """Yields the lines of ever shorter lists.

    - The first list has a line for each call, with its outcome.
    - The next lists have a line for each tool, with the telling arguments of its calls.
      Instead of outcomes they show which calls failed.
    - The last lists have the newest calls in such lines, and the number of the others.
    """
    telling_names = {
        group[0].name: _find_telling_names(group) for group in _by_tool(calls)
    }
    with_short_args = _shorten_args(calls, MAX_TEXT_BYTES, telling_names)
    yield [_write_line(call) for call in with_short_args]

    with_telling_args = []
    for call in calls:
        names = telling_names[call.name]
        args = {name: text for name, text in call.args.items() if name in names}
        with_telling_args.append(replace(call, args=args))
    for most_bytes in EVER_FEWER_BYTES:
        with_telling_args = _shorten_args(with_telling_args, most_bytes)
        yield _write_groups(with_telling_args)

    # Each list drops an eighth of the calls, the oldest ones. So little is lost with
    # one step, and there are only few steps.
    newest = with_telling_args
    while len(newest) > 1:
        dropped_count = len(newest) // 8 + 1
        newest = newest[dropped_count:]
        note = f"- … and {len(calls) - len(newest)} calls before these"
        yield [*_write_groups(newest), note]


def _write_line(call: _Call) -> str:
    """Writes one call, with its handle if the outcome is not shown whole.

    An example: "- read_file(path=a.txt) → The first words … [item 1f3c]".
    """
    head = f"- {call.name}({', '.join(_name_args(call.args))})"
    if not call.outcome:
        return head

    outcome = excerpt(call.outcome, MAX_TEXT_BYTES)
    if call.handle and len(outcome) < len(call.outcome):
        return f"{head} → {outcome} [item {call.handle}]"
    return f"{head} → {outcome}"


def _write_groups(calls: Iterable[_Call]) -> list[str]:
    return [_write_group(group) for group in _by_tool(calls)]


def _write_group(group: Sequence[_Call]) -> str:
    """Writes the calls of one tool in one line.

    The arguments that all calls share are written once, in the head of the line. Each
    call has an item with its other arguments. An example with two calls:
    "- read_file(encoding=utf-8, path=…): a.txt; b.txt → error".
    """
    head_args: dict[str, str] = {}
    differing_names: list[str] = []
    for name in dict.fromkeys(name for call in group for name in call.args):
        texts = {call.args.get(name) for call in group}
        if len(texts) == 1:
            head_args[name] = group[0].args[name]
        else:
            differing_names.append(name)

    # If one argument differs, the items leave out its name. So the head has the name.
    if len(differing_names) == 1:
        head_args[differing_names[0]] = "…"

    head = f"- {group[0].name}({', '.join(_name_args(head_args))})"
    items = [_write_item(call, differing_names) for call in group]
    if len(group) == 1:
        # All arguments are in the head. The item only tells of a failure.
        return f"{head}{items[0]}"
    if not any(items):
        return f"{head}: {len(group)} times"
    return f"{head}: {'; '.join(items)}"


def _write_item(call: _Call, names: Sequence[str]) -> str:
    """Writes the named arguments of a call, and whether the call failed.

    For example: "path=a.txt, line=3 → error". The name of a single argument is left
    out: "a.txt".
    """
    args = {name: call.args[name] for name in names if name in call.args}
    texts = _name_args(args) if len(names) > 1 else args.values()
    item = ", ".join(texts)
    return f"{item} → error" if call.is_failed else item


def _name_args(args: Mapping[str, str]) -> list[str]:
    return [f"{name}={text}" for name, text in args.items()]


def _by_tool(calls: Iterable[_Call]) -> list[list[_Call]]:
    groups = defaultdict[str, list[_Call]](list)
    for call in calls:
        groups[call.name].append(call)
    return list(groups.values())


def _find_telling_names(group: Sequence[_Call]) -> frozenset[str]:
    """Returns the names of the telling arguments of one tool's calls.

    - A single call has nothing to be told apart from: all its arguments are returned.
    - Of several calls, an argument is telling if more calls differ with it than with
      the telling arguments before it. Arguments with short texts are tried first.
    """
    if len(group) == 1:
        return frozenset(group[0].args)

    total_chars = defaultdict[str, int](int)
    for call in group:
        for name, text in call.args.items():
            total_chars[name] += len(text)

    telling: list[str] = []
    distinct_count = 1  # How many calls differ in the telling arguments so far.
    for name in sorted(total_chars, key=lambda name: (total_chars[name], name)):
        wider = [*telling, name]
        distinct = {tuple(call.args.get(each) for each in wider) for call in group}
        if len(distinct) > distinct_count:
            telling = wider
            distinct_count = len(distinct)
    return frozenset(telling)


class _Argument(NamedTuple):
    """An argument of a tool: the names of both."""

    tool: str
    name: str


def _shorten_args(
    calls: Sequence[_Call],
    most_bytes: int,
    telling_names: Mapping[str, frozenset[str]] | None = None,
) -> list[_Call]:
    """Returns the calls with shorter arguments.

    Args:
        calls: The calls.
        most_bytes: The most that one argument may take.
        telling_names: The names of each tool's telling arguments, which may take
            `MAX_TELLING_BYTES`. None if `most_bytes` is for all arguments.
    """
    texts_by_argument = defaultdict[_Argument, list[str]](list)
    for call in calls:
        for name, text in call.args.items():
            texts_by_argument[_Argument(call.name, name)].append(text)

    # The texts of all calls are shortened at once, so that different texts stay
    # different.
    short_texts: dict[_Argument, dict[str, str]] = {}
    for argument, texts in texts_by_argument.items():
        argument_bytes = most_bytes
        if telling_names and argument.name in telling_names[argument.tool]:
            argument_bytes = MAX_TELLING_BYTES
        short_texts[argument] = _shorten_alike(texts, argument_bytes)

    shortened = []
    for call in calls:
        args = {
            name: short_texts[_Argument(call.name, name)][text]
            for name, text in call.args.items()
        }
        shortened.append(replace(call, args=args))
    return shortened


def _shorten_alike(texts: Iterable[str], most_bytes: int) -> dict[str, str]:
    """Returns an excerpt of each text, by the text.

    If two excerpts would be equal, every excerpt leaves out the beginning and the end
    that all texts share. An example: in 7 bytes, "data/2024/a.csv" and
    "data/2024/b.csv" become "…a…" and "…b…".
    """
    excerpts = {text: excerpt(text, most_bytes) for text in texts}
    if len(set(excerpts.values())) == len(excerpts):
        return excerpts

    # Despite its module, this function takes any texts, not only paths.
    find_shared_start = os.path.commonprefix
    start_chars = len(find_shared_start(list(excerpts)))
    # A shared end is a shared start of the texts read backwards.
    backwards = [text[start_chars:][::-1] for text in excerpts]
    end_chars = len(find_shared_start(backwards))

    differing_excerpts = {}
    for text in excerpts:
        differing = text[start_chars : len(text) - end_chars]
        differing_excerpts[text] = excerpt(f"…{differing}…", most_bytes)
    return differing_excerpts
