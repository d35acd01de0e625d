"""The list of the running turn's calls that the summary replaces.

The running turn is the agent's work since the user's current request. A call is
completed if it has a result.

A telling argument tells the calls of one tool apart. An example: two calls of
`read_file` differ in `path`, and have the same `encoding`. So `path` is telling.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from google.genai import types

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import payload_of
from contextguard_adk._history.fingerprints import handle_of
from contextguard_adk._history.text import PlacedPart, payload_text, walk_parts
from contextguard_adk._measuring.budgets import TokenCounter, excerpt
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._support.phrases import DONE, quote_line
from contextguard_adk._turn.room import Room
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section

DONE_RATIO = 0.10
"""The list takes at most this part of `Budgets.working_tokens`."""

MAX_LINES_TOKENS = 400
"""A list with a line for each call takes at most this. Shorter lists may take more."""

MAX_TEXT_CHARS = 1_000
"""Only this many characters of an argument or a result are read."""

MAX_TEXT_BYTES = 80
"""In a list with a line for each call, an argument or an outcome takes at most this.

Telling arguments are an exception.
"""

MAX_TELLING_BYTES = 200
"""A telling argument, such as a path or a URL, takes at most this."""

EVER_FEWER_BYTES = (MAX_TELLING_BYTES, 48, 16)
"""The most that a telling argument takes in a list with a line for each tool.

The next limit is tried if the list is too long with the one before.
"""

MAX_FLAT_FIELDS = 20
"""A dict in the arguments with more fields than this is shown as a single text."""

MAX_FLAT_DEPTH = 3
"""A dict in the arguments that is nested in this many dicts is shown as a single text.
"""

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
"""A field such as "error" with one of these values says that there was no error."""


@dataclass(frozen=True)
class _Call:
    """A completed call. Each text in these fields is a single line.

    Attributes:
        name: The name of the tool.
        args: The arguments as texts, by name, as `_flatten` takes them apart.
        outcome: The beginning of the result; "" for an empty result.
        handle: The short name under which the recall tool finds the whole result; ""
            if the agent does not have that tool.
        is_failed: Whether the call has failed, by the words of its result.
    """

    name: str
    args: dict[str, str]
    outcome: str
    handle: str
    is_failed: bool


class DoneCalls(Section):
    """Lists the completed calls of the running turn, so that none is made twice.

    The calls of some tools are not listed, because another section shows what they did.
    """

    name = "done"
    label = "the list of calls"
    heading = DONE
    goes_at = None
    window_ratio = DONE_RATIO
    held_ratio = DONE_RATIO
    is_told_anew = True

    def __init__(self, beside: Sequence[Section] = ()) -> None:
        """Creates the section.

        Args:
            beside: The sections whose `listed_tools` are left out of this list.
        """
        listed_tools = {tool for section in beside for tool in section.listed_tools}
        # The results of the recall tool are copies of older messages.
        self._unlisted = listed_tools | {RECALL_TOOL}

    def write(self, turn: Turn, covered: frozenset[int], known: str, room: Room) -> str:
        """Lists the completed calls of the running turn among the covered messages.

        A run has all messages of its own turn, so `known` is not read. Returns "" if
        there are no such calls, or if even the shortest list does not fit.
        """
        history = turn.history
        indexes = sorted(covered.intersection(history.running_turn))
        # The list is written from redacted parts, but handles are made from the parts
        # in `contents`. Only an agent with the recall tool can use a handle.
        wholes = history.contents if turn.has_recall else None
        parts = walk_parts(history.told, indexes, wholes=wholes)
        calls = self._find_completed(parts, history.memo)
        lines_room = replace(room, tokens=min(room.tokens, MAX_LINES_TOKENS))
        return _write_first(calls, lines_room.holds, room.holds)

    def tell_left_out(
        self,
        contents: Sequence[types.Content],
        indexes: Iterable[int],
        max_tokens: int,
        count: TokenCounter,
        memo: Memo,
    ) -> str:
        """Lists the completed calls among messages that are left out.

        Returns "" if there are no such calls, or if even the shortest list does not
        fit.
        """
        calls = self._find_completed(walk_parts(contents, indexes), memo)

        def fits(text: str) -> bool:
            return count(text) <= max_tokens

        return _write_first(calls, fits, fits)

    def _find_completed(self, parts: Iterable[PlacedPart], memo: Memo) -> list[_Call]:
        """Returns the calls whose results are among these parts, in order of results.

        Calls of the tools in `_unlisted` are left out.
        """
        calls = []
        for placed in parts:
            response = placed.part.function_response
            call = placed.call
            if response is None or call is None or response.name in self._unlisted:
                continue

            part = placed.part
            outcome, is_failed = memo.remember(_read_result, part, (part,))
            # The handle is made from the whole part. Without the recall tool, there is
            # neither a whole part nor a handle.
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
    """Reads the part with the result of a call.

    Returns:
        - The outcome of the call in one line: the beginning of the result.
        - Whether the call failed: whether the result has words such as `Error: …`. If
          the result is JSON, fields that deny an error are left out before the search.
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
        # The result is no JSON, but a text.
        searched = outcome
    return outcome, _FAILURE.search(searched) is not None


def _leave_out_no_error(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns a JSON object without the fields that deny an error.

    An example of such a field: `"error": "none"`.

    Args:
        pairs: The names and values of the object's fields.
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
    """Yields the names and values of arguments; takes small dicts apart.

    For example, {"file": {"path": "a"}} yields "file.path" and "a". So the path alone
    may be a telling argument. Empty, large and deep dicts are not taken apart.

    Args:
        args: The arguments, or a dict that is nested in the arguments.
        prefix: The names of the dicts around `args`, such as "file."; "" for none.
    """
    for key, value in args.items():
        name = f"{prefix}{key}"
        if not isinstance(value, dict):
            yield name, value
            continue

        is_small = 0 < len(value) <= MAX_FLAT_FIELDS
        # Each dict around `value` has added a dot to the name.
        is_deep = name.count(".") >= MAX_FLAT_DEPTH
        if is_small and not is_deep:
            yield from _flatten(value, prefix=f"{name}.")
        else:
            yield name, value


def _one_line(value: object) -> str:
    """Writes the first `MAX_TEXT_CHARS` of a value in one line; "" for None."""
    if value in (None, ""):
        return ""
    text = value if isinstance(value, str) else payload_text(value)
    return quote_line(text[:MAX_TEXT_CHARS])


def _write_first(
    calls: Sequence[_Call],
    fits_in_lines: Callable[[str], bool],
    fits: Callable[[str], bool],
) -> str:
    """Returns the first of the ever shorter lists that fits, with the heading.

    Returns "" if there are no calls, or if even the shortest list does not fit.

    Args:
        calls: The calls, the oldest first.
        fits_in_lines: Returns whether a list with a line for each call fits.
        fits: Returns whether a shorter list fits.
    """
    if not calls:
        return ""

    has_room = fits_in_lines
    for lines in _write_ever_shorter(calls):
        # A lone surrogate could not be sent to a model.
        text = "\n".join([DONE, *lines]).encode("utf-8", "replace").decode()
        if has_room(text):
            return text
        # Only the first list has a line for each call.
        has_room = fits
    return ""


def _write_ever_shorter(calls: Sequence[_Call]) -> Iterator[list[str]]:
    """Yields ever shorter lists, each as lines.

    1. The first list has a line for each call, with its arguments and outcome.
    2. Each of the next lists has a line for each tool, with the telling arguments of
       its calls. The line marks the calls that failed, and tells nothing else of the
       results. From list to list the arguments are shorter (`EVER_FEWER_BYTES`).
    3. Each of the last lists has such lines for the newest calls alone, and a line with
       the number of older calls.

    Args:
        calls: The calls, the oldest first; at least one.
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

    # Each list drops the oldest calls: about an eighth of the calls in the list before.
    # With smaller steps, the tokens of more lists would have to be counted. With larger
    # steps, the first list that fits could lack more calls than necessary.
    newest = with_telling_args
    while len(newest) > 1:
        dropped_count = len(newest) // 8 + 1
        newest = newest[dropped_count:]
        note = f"- … and {len(calls) - len(newest)} calls before these"
        yield [*_write_groups(newest), note]


def _write_line(call: _Call) -> str:
    """Writes the line of one call.

    An example: "- read_file(path=a.txt) → The first words … [item 1f3c]". The line has
    the handle only if the outcome is shortened.
    """
    head = f"- {call.name}({', '.join(_name_args(call.args))})"
    if not call.outcome:
        return head

    outcome = excerpt(call.outcome, MAX_TEXT_BYTES)
    if call.handle and len(outcome) < len(call.outcome):
        return f"{head} → {outcome} [item {call.handle}]"
    return f"{head} → {outcome}"


def _write_groups(calls: Iterable[_Call]) -> list[str]:
    """Writes a line for each tool, with all calls of the tool."""
    return [_write_group(group) for group in _by_tool(calls)]


def _write_group(group: Sequence[_Call]) -> str:
    """Writes the calls of one tool in one line.

    The arguments that are equal in all calls are written once, in the head of the line.
    After the head stands an item for each call, with its other arguments. An example
    with two calls: "- read_file(encoding=utf-8, path=…): a.txt; b.txt → error".

    Args:
        group: The calls; at least one.
    """
    head_args: dict[str, str] = {}
    differing_names: list[str] = []
    # A dict instead of a set, because a dict keeps the order of the names.
    names = dict.fromkeys(name for call in group for name in call.args)
    for name in names:
        # None stands for a call without this argument.
        texts = {call.args.get(name) for call in group}
        if len(texts) == 1:
            head_args[name] = group[0].args[name]
        else:
            differing_names.append(name)

    # If only one argument differs, its name stands in the head and not in each item.
    if len(differing_names) == 1:
        head_args[differing_names[0]] = "…"

    head = f"- {group[0].name}({', '.join(_name_args(head_args))})"
    items = [_write_item(call, differing_names) for call in group]
    if len(group) == 1:
        # All arguments are in the head, so the item is "" or " → error".
        return f"{head}{items[0]}"
    if not any(items):
        # The calls are equal, and none has failed.
        return f"{head}: {len(group)} times"
    return f"{head}: {'; '.join(items)}"


def _write_item(call: _Call, names: Sequence[str]) -> str:
    """Writes some arguments of a call, and whether the call failed.

    For example: "path=a.txt, line=3 → error". If there is only one name in `names`, the
    name is not written: "a.txt → error".

    Args:
        call: The call.
        names: The names of the arguments; the call may lack some of them.
    """
    args = {name: call.args[name] for name in names if name in call.args}
    texts = _name_args(args) if len(names) > 1 else args.values()
    item = ", ".join(texts)
    return f"{item} → error" if call.is_failed else item


def _name_args(args: Mapping[str, str]) -> list[str]:
    return [f"{name}={text}" for name, text in args.items()]


def _by_tool(calls: Iterable[_Call]) -> list[list[_Call]]:
    """Groups calls by their tools; the tool that was called first comes first."""
    groups = defaultdict[str, list[_Call]](list)
    for call in calls:
        groups[call.name].append(call)
    return list(groups.values())


def _find_telling_names(group: Sequence[_Call]) -> frozenset[str]:
    """Returns the names of the telling arguments of one tool's calls.

    The arguments are tried one after the other, those with short texts first. An
    argument is telling if it tells calls apart that are equal in all telling arguments
    before it. For example, of `read(line=1, path=src/a)` and `read(line=2, path=src/b)`
    only `line` is telling: its texts are shorter, and it leaves no equal calls that
    `path` could tell apart.

    All arguments of a single call are returned.

    Args:
        group: The calls; at least one.
    """
    if len(group) == 1:
        return frozenset(group[0].args)

    total_chars = defaultdict[str, int](int)
    for call in group:
        for name, text in call.args.items():
            total_chars[name] += len(text)
    # If arguments are equally long, their names decide the order. So the list does not
    # depend on the order in which the model writes the arguments.
    shortest_first = sorted(total_chars, key=lambda name: (total_chars[name], name))

    telling_names: list[str] = []
    variant_count = 1  # Without any argument, all calls look the same.
    for name in shortest_first:
        tried_names = [*telling_names, name]
        variants = {
            tuple(call.args.get(each) for each in tried_names) for call in group
        }
        if len(variants) > variant_count:
            telling_names = tried_names
            variant_count = len(variants)
    return frozenset(telling_names)


class _Argument(NamedTuple):
    """The name of a tool, and the name of an argument of this tool."""

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
        most_bytes: The most bytes of an argument.
        telling_names: The names of the telling arguments, by tool. These arguments may
            have `MAX_TELLING_BYTES` instead. None if `most_bytes` is for all arguments.
    """
    texts_by_argument = defaultdict[_Argument, list[str]](list)
    for call in calls:
        for name, text in call.args.items():
            texts_by_argument[_Argument(call.name, name)].append(text)

    # The texts of an argument in all calls are shortened together, so that different
    # texts stay different if possible.
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
    """Returns the excerpts of texts, by the text.

    If two excerpts are equal, all excerpts are made without the beginning and the end
    that the texts have in common. An example: in 7 bytes, "data/2024/a.csv" and
    "data/2024/b.csv" become "…a…" and "…b…".

    Args:
        texts: The texts of one argument; repeated texts count once.
        most_bytes: The most bytes of an excerpt.
    """
    excerpts = {text: excerpt(text, most_bytes) for text in texts}
    if len(set(excerpts.values())) == len(excerpts):
        return excerpts

    # Despite its module, `commonprefix` takes any texts, not only paths.
    find_shared_start = os.path.commonprefix
    start_chars = len(find_shared_start(list(excerpts)))
    # The shared end is the shared start of the reversed texts.
    backwards = [text[start_chars:][::-1] for text in excerpts]
    end_chars = len(find_shared_start(backwards))

    differing_excerpts = {}
    for text in excerpts:
        differing = text[start_chars : len(text) - end_chars]
        differing_excerpts[text] = excerpt(f"…{differing}…", most_bytes)
    return differing_excerpts
