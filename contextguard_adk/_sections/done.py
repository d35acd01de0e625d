"""The list of the running turn's calls that the summary replaces."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from google.genai import types
from pydantic import JsonValue

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import payload_of
from contextguard_adk._history.fingerprints import handle_of
from contextguard_adk._history.text import Said, payload_text, walk_parts
from contextguard_adk._measuring.budgets import TokenCounter, excerpt
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._support.phrases import DONE, quote_line
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section

DONE_RATIO = 0.10  # Of the window, for the list.
MAX_TEXT_CHARS = 1_000  # Of an argument or a result; the rest is not read.
MAX_TEXT_BYTES = 80  # Of an argument or an outcome, in a line for each call.
MAX_TELLING_BYTES = 200  # Of an argument that tells calls apart: a path, a URL.

_FAILURE = re.compile(
    r'^"?error\b|"(is_?)?error\w*": ?+(?!null|false|0|""|\[\]|\{\})|'
    r'"status": ?"(error|fail)|^\{"result": ?"error\b|'
    r'"(ok|success\w*)": ?false|"(exit|return)_?code": ?-?[1-9]',
    re.IGNORECASE,
)
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


@dataclass(frozen=True)
class _Call:
    """A completed call; each of its texts is one line."""

    name: str
    args: dict[str, str]
    outcome: str
    handle: str
    is_failed: bool


class DoneCalls(Section):
    """Lists the completed calls of the running turn, so that none is made twice.

    Calls whose outcome the sections `beside` it show are not listed.
    """

    name = "done"
    label = "the list of calls"
    heading = DONE
    goes_at = None
    held_ratio = DONE_RATIO
    is_told_anew = True

    def __init__(self, beside: Sequence[Section] = ()) -> None:
        listed_tools = {tool for section in beside for tool in section.listed_tools}
        self._unlisted = listed_tools | {RECALL_TOOL}

    def write(
        self, turn: Turn, covered: frozenset[int], known: JsonValue, room_tokens: int
    ) -> JsonValue:
        """Lists the calls anew, also those that an earlier summary stood for."""
        steps = sorted(covered.intersection(turn.history.running_turn))
        wholes = turn.history.contents if turn.has_recall else None
        said = walk_parts(turn.history.told, steps, wholes=wholes)
        calls = self._find_completed(said, turn.history.memo)

        def count(text: str) -> int:
            # Escapes take more room in session state than here.
            stored_bytes = len(json.dumps(text, ensure_ascii=False).encode())
            return turn.count(text) if stored_bytes <= 4 * room_tokens else sys.maxsize

        max_tokens = int(turn.budgets.working_tokens * DONE_RATIO)
        return _write_within(calls, max_tokens, count)

    def tell_left_out(
        self,
        contents: Sequence[types.Content],
        indexes: Iterable[int],
        max_tokens: int,
        count: TokenCounter,
        memo: Memo,
    ) -> str:
        """Lists the completed calls among the messages that are left out."""
        calls = self._find_completed(walk_parts(contents, indexes), memo)
        return _write_within(calls, max_tokens, count)

    def _find_completed(self, said: Iterable[Said], memo: Memo) -> list[_Call]:
        """Returns the calls of which a result is among these parts."""
        calls = []
        for each in said:
            response = each.part.function_response
            call = each.call
            if response is None or call is None or response.name in self._unlisted:
                continue

            outcome, is_failed = memo.remember(_read_result, each.part, (each.part,))
            whole = each.whole
            handle = memo.remember(handle_of, whole, (whole,)) if whole else ""
            args = {
                _one_line(name): _one_line(value)
                for name, value in _flatten(call.args or {})
            }
            name = _one_line(response.name or "?")
            calls.append(_Call(name, args, outcome, handle, is_failed))
        return calls


def _read_result(part: types.Part) -> tuple[str, bool]:
    """Returns the outcome in one line, and whether it says that the call failed."""
    payload = payload_of(part)
    outcome = _one_line(payload)

    checked = outcome
    with contextlib.suppress(ValueError, RecursionError):
        said = json.loads(payload_text(payload), object_pairs_hook=_leave_out_no_error)
        checked = json.dumps(said, ensure_ascii=False)[:MAX_TEXT_CHARS]
    return outcome, _FAILURE.search(checked) is not None


def _leave_out_no_error(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Drops fields that are named for an error and say that there was none."""
    kept = {}
    for name, value in pairs:
        said = value.lower() if isinstance(value, str) else value
        if "error" not in name.lower() or said not in _NO_ERROR:
            kept[name] = value
    return kept


def _flatten(
    args: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    """Yields arguments with those inside them: any of them may tell calls apart."""
    for key, value in args.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and 0 < len(value) <= 20 and name.count(".") < 3:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _one_line(value: object) -> str:
    if value in (None, ""):
        return ""
    text = value if isinstance(value, str) else payload_text(value)
    return quote_line(text[:MAX_TEXT_CHARS])


def _write_within(calls: Sequence[_Call], max_tokens: int, count: TokenCounter) -> str:
    """Returns the longest list of calls that fits; "" where none does."""
    if not calls:
        return ""

    for lines in _write_ever_shorter(calls):
        text = "\n".join([DONE, *lines]).encode("utf-8", "replace").decode()
        if count(text) <= max_tokens:
            return text
    return ""


def _write_ever_shorter(calls: Sequence[_Call]) -> Iterator[list[str]]:
    """Yields lists of lines, each shorter than the one before; what failed shows.

    The first has a line for each call. Then a line for each tool has the arguments that
    tell its calls apart. At last the oldest calls are only counted.
    """
    telling = _find_telling(calls)
    shortened = _shorten_args(calls, MAX_TEXT_BYTES, telling)
    yield [_write_line(call) for call in shortened]

    grouped = []
    for call in calls:
        names = telling[call.name]
        args = {name: text for name, text in call.args.items() if name in names}
        grouped.append(replace(call, args=args))
    for most_bytes in (MAX_TELLING_BYTES, 48, 16):
        grouped = _shorten_args(grouped, most_bytes)
        yield _write_groups(grouped)

    newest = grouped
    while len(newest) > 1:
        newest = newest[len(newest) // 8 + 1 :]
        note = f"- … and {len(calls) - len(newest)} calls before these"
        yield [*_write_groups(newest), note]


def _write_line(call: _Call) -> str:
    made = f"- {call.name}({', '.join(_name_args(call.args))})"
    if not call.outcome:
        return made

    outcome = excerpt(call.outcome, MAX_TEXT_BYTES)
    if call.handle and len(outcome) < len(call.outcome):
        return f"{made} → {outcome} [item {call.handle}]"
    return f"{made} → {outcome}"


def _write_groups(calls: Iterable[_Call]) -> list[str]:
    return [_write_group(group) for group in _by_tool(calls)]


def _write_group(group: Sequence[_Call]) -> str:
    """Writes the calls of one tool; says once the arguments that all of them share."""
    names = list(dict.fromkeys(name for call in group for name in call.args))
    own = [name for name in names if len({call.args.get(name) for call in group}) > 1]
    shared = {name: group[0].args[name] for name in names if name not in own}
    if len(own) == 1:
        shared[own[0]] = "…"

    made = f"- {group[0].name}({', '.join(_name_args(shared))})"
    items = [_write_item(call, own) for call in group]
    if len(group) == 1:
        return f"{made}{items[0]}"
    if not any(items):
        return f"{made}: {len(group)} times"
    return f"{made}: {'; '.join(items)}"


def _write_item(call: _Call, names: Sequence[str]) -> str:
    """Writes these arguments of a call, and whether it failed."""
    args = {name: call.args[name] for name in names if name in call.args}
    texts = _name_args(args) if len(names) > 1 else args.values()
    text = ", ".join(texts)
    return f"{text} → error" if call.is_failed else text


def _name_args(args: Mapping[str, str]) -> list[str]:
    return [f"{name}={text}" for name, text in args.items()]


def _by_tool(calls: Iterable[_Call]) -> list[list[_Call]]:
    groups = defaultdict[str, list[_Call]](list)
    for call in calls:
        groups[call.name].append(call)
    return list(groups.values())


def _find_telling(calls: Iterable[_Call]) -> dict[str, frozenset[str]]:
    """Returns for each tool the arguments that tell its calls apart."""
    return {group[0].name: _find_telling_args(group) for group in _by_tool(calls)}


def _find_telling_args(group: Sequence[_Call]) -> frozenset[str]:
    """Chooses short arguments before long ones; of a single call it takes all."""
    lengths = defaultdict[str, int](int)
    for call in group:
        for name, text in call.args.items():
            lengths[name] += len(text)
    if len(group) == 1:
        return frozenset(lengths)

    chosen: list[str] = []
    different_count = 1
    for name in sorted(lengths, key=lambda name: (lengths[name], name)):
        wider = [*chosen, name]
        different = {tuple(call.args.get(each) for each in wider) for call in group}
        if len(different) > different_count:
            chosen = wider
            different_count = len(different)
    return frozenset(chosen)


def _shorten_args(
    calls: Sequence[_Call],
    most_bytes: int,
    telling: Mapping[str, frozenset[str]] | None = None,
) -> list[_Call]:
    """Returns the calls with shorter arguments; `telling` ones stay longer."""
    texts_of = defaultdict[tuple[str, str], list[str]](list)
    for call in calls:
        for name, text in call.args.items():
            texts_of[call.name, name].append(text)

    short = {}
    for (tool, name), texts in texts_of.items():
        is_telling = telling is not None and name in telling[tool]
        text_bytes = MAX_TELLING_BYTES if is_telling else most_bytes
        short[tool, name] = _shorten_alike(texts, text_bytes)

    shortened = []
    for call in calls:
        args = {name: short[call.name, name][text] for name, text in call.args.items()}
        shortened.append(replace(call, args=args))
    return shortened


def _shorten_alike(texts: Iterable[str], most_bytes: int) -> dict[str, str]:
    """Returns an excerpt of each text.

    Where some excerpts would be alike, each leaves out the beginning and the end that
    all texts share.
    """
    short = {text: excerpt(text, most_bytes) for text in texts}
    if len(set(short.values())) == len(short):
        return short

    find_shared = os.path.commonprefix  # Of any texts, not only of paths.
    start = len(find_shared(list(short)))
    end = len(find_shared([text[start:][::-1] for text in short]))
    return {
        text: excerpt(f"…{text[start : len(text) - end]}…", most_bytes)
        for text in short
    }
