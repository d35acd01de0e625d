"""The list of the running turn's calls that the summary replaces."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
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

DONE_RATIO = 0.10  # Of the window, for the list of what is done.
MAX_TELLING_BYTES = 200  # For an argument that tells calls apart: a path, a URL.

_FAILURE = re.compile(
    r'^"?error\b|"(is_?)?error\w*": ?+(?!null|false|0|""|\[\]|\{\})|'
    r'"status": ?"(error|fail)|^\{"result": ?"error\b|'
    r'"(ok|success\w*)": ?false|"(exit|return)_?code": ?-?[1-9]',
    re.IGNORECASE,
)
_NO_ERROR: tuple[object, ...] = (
    *("", None, 0, [], {}),
    *("none", "null", "0", "false", "no", "ok", "success", "no error"),
)


@dataclass(frozen=True)
class _Call:
    """A completed call, its texts in one line each."""

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
        budget_tokens = int(turn.budgets.working_tokens * DONE_RATIO)

        def count(text: str) -> int:
            # Escapes take more room in session state than here.
            stored_bytes = len(json.dumps(text, ensure_ascii=False).encode())
            return turn.count(text) if stored_bytes <= 4 * room_tokens else sys.maxsize

        wholes = turn.messages if turn.has_recall else None
        found = walk_parts(turn.history.told, steps, (), wholes)
        calls = self._find_completed(found, turn.history.memo)
        return _write_within(calls, budget_tokens, count)

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
        calls = []
        for each in said:
            response = each.part.function_response
            call = each.call
            if response is None or call is None or response.name in self._unlisted:
                continue

            outcome, is_failed = memo.remember(_read_result, each.part, (each.part,))
            whole = each.whole
            handle = memo.remember(handle_of, whole, (whole,)) if whole else ""
            args = {_one_line(k): _one_line(v) for k, v in _flatten(call.args or {})}
            name = _one_line(response.name or "?")
            calls.append(_Call(name, args, outcome, handle, is_failed))
        return calls


def _write_within(calls: Sequence[_Call], max_tokens: int, count: TokenCounter) -> str:
    """Lists calls, ever shorter until the list fits; "" where nothing does.

    First a line for each call, then one for each tool with what tells its calls apart;
    at last the oldest calls are only counted. What failed always shows.
    """
    for lines in _write_ever_shorter(calls) if calls else ():
        text = "\n".join([DONE, *lines]).encode("utf-8", "replace").decode()
        if count(text) <= max_tokens:
            return text
    return ""


def _write_ever_shorter(calls: Sequence[_Call]) -> Iterator[list[str]]:
    telling = _find_telling(calls)
    yield _write_lines(_shorten_args(calls, telling, 80), 80)
    short = [
        replace(c, args={k: v for k, v in c.args.items() if k in telling[c.name]})
        for c in calls
    ]
    for most_bytes in (MAX_TELLING_BYTES, 48, 16):
        short = _shorten_args(short, {}, most_bytes)
        yield _write_groups(short)
    while short := short[len(short) // 8 + 1 :]:
        note = f"- … and {len(calls) - len(short)} calls before these"
        yield [*_write_groups(short), note]


def _read_result(part: types.Part) -> tuple[str, bool]:
    """Returns what a result says, and whether it says that its call failed."""
    payload = payload_of(part)
    outcome = checked = _one_line(payload)
    with contextlib.suppress(ValueError, RecursionError):
        said = json.loads(payload_text(payload), object_pairs_hook=_leave_out_no_error)
        checked = json.dumps(said, ensure_ascii=False)[:1_000]
    return outcome, _FAILURE.search(checked) is not None


def _leave_out_no_error(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Drops fields that are named for an error, and say that there was none."""
    kept = {}
    for name, value in pairs:
        said = value.lower() if isinstance(value, str) else value
        if "error" not in name.lower() or said not in _NO_ERROR:
            kept[name] = value
    return kept


def _flatten(
    args: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    """Arguments with those inside them: what tells calls apart may be one of these."""
    for key, value in args.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and 0 < len(value) <= 20 and name.count(".") < 3:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _one_line(value: object) -> str:
    text = value if isinstance(value, str) else payload_text(value)
    return quote_line(text[:1_000]) if value not in (None, "") else ""


def _write_lines(calls: Iterable[_Call], outcome_bytes: int) -> list[str]:
    lines = []
    for call in calls:
        outcome = excerpt(call.outcome, outcome_bytes)
        if call.handle and len(outcome) < len(call.outcome):
            outcome += f" [item {call.handle}]"
        made = f"- {call.name}({', '.join(_name_args(call.args))})"
        lines.append(f"{made} → {outcome}" if outcome else made)
    return lines


def _write_groups(calls: Iterable[_Call]) -> list[str]:
    """Writes a line for each tool; what its calls have in common is said once."""
    lines = []
    for group in _by_tool(calls):
        names = list(dict.fromkeys(name for call in group for name in call.args))
        own = [n for n in names if len({call.args.get(n) for call in group}) > 1]
        shared = {n: group[0].args[n] for n in names if n not in own}
        if len(own) == 1:
            shared[own[0]] = "…"
        items = []
        for call in group:
            args = {n: call.args[n] for n in own if n in call.args}
            text = ", ".join(_name_args(args) if len(own) > 1 else args.values())
            items.append(f"{text} → error" if call.is_failed else text)
        made = f"- {group[0].name}({', '.join(_name_args(shared))})"
        said = "; ".join(items) if any(items) else f"{len(group)} times"
        lines.append(f"{made}: {said}" if len(group) > 1 else f"{made}{items[0]}")
    return lines


def _name_args(args: Mapping[str, str]) -> list[str]:
    return [f"{name}={text}" for name, text in args.items()]


def _by_tool(calls: Iterable[_Call]) -> list[list[_Call]]:
    groups: dict[str, list[_Call]] = {}
    for call in calls:
        groups.setdefault(call.name, []).append(call)
    return list(groups.values())


def _find_telling(calls: Iterable[_Call]) -> dict[str, frozenset[str]]:
    """For each tool the arguments that tell its calls apart, short ones first."""
    telling: dict[str, frozenset[str]] = {}
    for group in _by_tool(calls):
        names = {name for call in group for name in call.args}
        lengths = {n: sum(len(c.args.get(n, "")) for c in group) for n in names}
        chosen = sorted(names) if len(group) == 1 else []
        different = 1
        for name in sorted(names, key=lambda name: (lengths[name], name)):
            wider = [*chosen, name]
            found = len({tuple(map(call.args.get, wider)) for call in group})
            if found > different:
                chosen = wider
                different = found
        telling[group[0].name] = frozenset(chosen)
    return telling


def _shorten_args(
    calls: Sequence[_Call], telling: Mapping[str, frozenset[str]], most_bytes: int
) -> list[_Call]:
    """The calls with shorter arguments; `telling` ones stay whole where they can."""
    values: dict[tuple[str, str], list[str]] = {}
    for call in calls:
        for name, text in call.args.items():
            values.setdefault((call.name, name), []).append(text)
    short = {
        (tool, name): _shorten_alike(
            texts, MAX_TELLING_BYTES if name in telling.get(tool, ()) else most_bytes
        )
        for (tool, name), texts in values.items()
    }
    return [
        replace(c, args={n: short[c.name, n][text] for n, text in c.args.items()})
        for c in calls
    ]


def _shorten_alike(texts: Iterable[str], most_bytes: int) -> dict[str, str]:
    """Excerpts of texts; where those would be alike, without what all have in common
    at the beginning and the end."""
    short = {text: excerpt(text, most_bytes) for text in texts}
    if len(set(short.values())) == len(short):
        return short
    count_shared = os.path.commonprefix  # Of any texts, not only paths.
    start = len(count_shared([*short]))
    end = len(count_shared([text[start:][::-1] for text in short]))
    return {t: excerpt(f"…{t[start : len(t) - end]}…", most_bytes) for t in short}
