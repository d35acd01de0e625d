"""The running turn: which of its steps stay word for word, and a list of the others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from google.genai import types

from contextguard_adk._history.coverage import handle_of
from contextguard_adk._history.pairs import pair_boundaries, pair_contents, take_call
from contextguard_adk._history.truncation import Truncation, truncate_content
from contextguard_adk._measuring.budgets import TokenCounter
from contextguard_adk._measuring.tokens import estimate_contents_tokens
from contextguard_adk._summarizing.items import UNLISTED_CALLS
from contextguard_adk._summarizing.ledger import excerpt
from contextguard_adk._summarizing.todos import TODOS_TOOL
from contextguard_adk._summarizing.transcript import payload_text

if TYPE_CHECKING:
    from contextguard_adk._summarizing.context import CompactionContext

MAX_UNSEEN_RATIO = 0.30  # Of the window, for results that the model has not seen.
DONE_RATIO = 0.10  # Of the window, for the list of what is done.
MAX_TELLING_BYTES = 200  # For an argument that tells calls apart: a path, a URL.
DONE_HEADING = (
    "[Done so far for this request: each call below was made and has its result]"
)

_FAILURE = re.compile(
    r'^"?error\b|"(is_?)?error\w*": ?(?!null|false|0|""|\[\]|\{\})|'
    r'"status": ?"(error|fail)|^\{"result": ?"error\b|'
    r'"(ok|success\w*)": ?false|"(exit|return)_?code": ?-?[1-9]',
    re.IGNORECASE,
)
_UNLISTED = UNLISTED_CALLS | {TODOS_TOOL}  # The todo list stands beside the summary.


@dataclass(frozen=True)
class KeptSteps:
    """The newest steps of the running turn, by index, that a compaction leaves.

    They take `tokens`. `unseen` are those whose results the model has not seen; where
    the results are too large, `truncation` shortens them.
    """

    indexes: frozenset[int] = frozenset()
    unseen: frozenset[int] = frozenset()
    tokens: int = 0
    truncation: Truncation | None = None


def find_kept_steps(context: CompactionContext, room_tokens: int) -> KeptSteps:
    """Finds the newest pairs within `keep`, and those with unseen results always.

    Whatever is kept takes no more than the room.
    """
    view = context.view
    running = frozenset(view.turn)
    steps = [index for index in view.compactable if index in running]
    contents = [view.shown[index] for index in steps]
    boundaries = pair_boundaries(pair_contents(contents), len(contents))
    starts = [
        place
        for place, content in enumerate(contents)
        if boundaries[place] and content.role == "model"
    ]
    if not starts or not context.keep_count:
        return KeptSteps()
    has_unseen = contents[-1].role != "model"
    unseen = frozenset(steps[starts[-1] :] if has_unseen else ())
    # A compaction that somebody asked for is to make room now.
    wished_tokens = 0 if context.reason == "requested" else context.keep_tokens
    most_tokens = min(wished_tokens, room_tokens)
    first, tokens = len(contents), 0
    for start, end in zip(starts[::-1], [len(contents), *starts[::-1]], strict=False):
        tokens += _measure(context, contents[start:end])
        if tokens > most_tokens or len(contents) - start > context.keep_count:
            break
        first = start
    if has_unseen and first > starts[-1]:
        first = starts[-1]
    kept = contents[first:]
    indexes, tokens = frozenset(steps[first:]), _measure(context, kept)
    most_tokens = int(context.budgets.working_tokens * MAX_UNSEEN_RATIO)
    most_tokens = max(0, min(max(most_tokens, wished_tokens), room_tokens))
    if tokens <= most_tokens:
        return KeptSteps(indexes, unseen, tokens)
    truncation, tokens = _shorten_results(context, kept, most_tokens)
    if tokens > room_tokens:
        return KeptSteps()  # What the model itself wrote in a call cannot be cut.
    return KeptSteps(indexes, unseen, tokens, truncation)


def _measure(context: CompactionContext, contents: Sequence[types.Content]) -> int:
    return context.measure(contents) - context.measure([])


def _shorten_results(
    context: CompactionContext, contents: Sequence[types.Content], most_tokens: int
) -> tuple[Truncation, int]:
    """How results have to be shortened so that contents take no more than that."""
    length, tokens = 4 * estimate_contents_tokens(contents), 0
    while True:
        truncation = Truncation.in_the_middle(length, result_length=length)
        short = [
            truncate_content(c, truncation, c if context.has_recall else None)
            for c in contents
        ]
        tokens = _measure(context, short)
        if tokens <= most_tokens or length <= 100:
            return truncation, tokens
        length = max(100, int(length * min(0.8, most_tokens / tokens)))


@dataclass(frozen=True)
class _Call:
    """A completed call, its texts in one line each."""

    name: str
    args: dict[str, str]
    outcome: str
    handle: str
    is_failed: bool


def write_done_list(
    contents: Sequence[types.Content],
    indexes: Iterable[int],
    budget_tokens: int,
    count: TokenCounter,
    with_handles: bool = False,
) -> str:
    """Lists the completed calls in some contents, ever shorter until it fits.

    First a line for each call, then one for each tool; at last the oldest calls are
    only counted. What tells calls apart is cut last, what failed always shows.
    """
    calls = list(_completed_calls(contents, indexes, with_handles))
    for lines in _write_ever_shorter(calls) if calls else ():
        text = "\n".join([DONE_HEADING, *lines])
        if count(text) <= budget_tokens:
            return text
    return ""


def _write_ever_shorter(calls: Sequence[_Call]) -> Iterator[list[str]]:
    telling = _find_telling(calls)
    yield _write_lines(_shorten_args(calls, telling, 80), 80)
    short = _shorten_args(calls, telling, 48)
    yield _write_lines(short, 32)
    yield _write_groups(short, 32)
    yield _write_groups(short, 0)
    brief = [
        replace(c, args={k: v for k, v in c.args.items() if k in telling[c.name]})
        for c in calls
    ]
    yield _write_groups(_shorten_args(brief, telling, 0), 0)
    short = _shorten_args(brief, {}, 48)
    yield _write_groups(short, 0)
    shortest = _shorten_args(brief, {}, 16)
    if _count_different(shortest) == _count_different(brief):
        yield _write_groups(short := shortest, 0)
    while short := short[len(short) // 8 + 1 :]:
        note = f"- … and {len(calls) - len(short)} calls before these"
        yield [*_write_groups(short, 0), note]


def _completed_calls(
    contents: Sequence[types.Content], indexes: Iterable[int], with_handles: bool
) -> Iterator[_Call]:
    waiting: list[tuple[int, types.FunctionCall]] = []
    for index in indexes:
        for part in filter(None, contents[index].parts or ()):
            if part.function_call:
                waiting.append((index, part.function_call))
            response = part.function_response
            found = take_call(waiting, response) if response else None
            if response is None or found is None or response.name in _UNLISTED:
                continue
            args = _flatten(found[1].args or {})
            outcome = _one_line(response.response)
            yield _Call(
                name=_one_line(response.name or "?"),
                args={_one_line(key): _one_line(value) for key, value in args},
                outcome=outcome,
                handle=handle_of(part) if with_handles else "",
                is_failed=_FAILURE.search(outcome) is not None,
            )


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
    """The beginning of a value in one line."""
    text = value if isinstance(value, str) else payload_text(value)
    return " ".join(text[:1_000].split()) if value not in (None, "") else ""


def _write_outcome(call: _Call, outcome_bytes: int) -> str:
    """Its first words; without room for them at least whether the call has failed."""
    if call.is_failed and not outcome_bytes:
        return "error"
    return excerpt(call.outcome, outcome_bytes)


def _write_lines(calls: Iterable[_Call], outcome_bytes: int) -> list[str]:
    lines = []
    for call in calls:
        outcome = _write_outcome(call, outcome_bytes)
        if call.handle and len(outcome) < len(call.outcome):
            outcome += f" [item {call.handle}]"
        made = f"- {call.name}({', '.join(_name_args(call.args))})"
        lines.append(f"{made} → {outcome}" if outcome else made)
    return lines


def _write_groups(calls: Iterable[_Call], outcome_bytes: int) -> list[str]:
    """A line for each tool; what its calls have in common is said once."""
    lines = []
    for group in _by_tool(calls):
        names = list(dict.fromkeys(name for call in group for name in call.args))
        own = [n for n in names if len({call.args.get(n) for call in group}) > 1]
        shared = {n: group[0].args[n] for n in names if n not in own}
        if len(own) == 1:
            shared[own[0]] = "…"
        outcomes = [_write_outcome(call, outcome_bytes) for call in group]
        common = outcomes[0] if len(set(outcomes)) == 1 else ""
        items = []
        for call, outcome in zip(group, outcomes, strict=True):
            args = {n: call.args[n] for n in own if n in call.args}
            text = ", ".join(_name_args(args) if len(own) > 1 else args.values())
            items.append(f"{text} → {outcome}" if outcome != common else text)
        said = "; ".join(items) if any(items) else f"{len(group)} times"
        each = f" → each {common}" if common else ""
        lines.append(
            f"- {group[0].name}({', '.join(_name_args(shared))}): {said}{each}"
        )
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
        chosen: list[str] = []
        different = 1
        for name in sorted(names, key=lambda name: (lengths[name], name)):
            wider = [*chosen, name]
            found = len({tuple(map(call.args.get, wider)) for call in group})
            if found > different:
                chosen, different = wider, found
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
    start = _count_shared_chars(short)
    end = _count_shared_chars(text[start:][::-1] for text in short)
    return {t: excerpt(f"…{t[start : len(t) - end]}…", most_bytes) for t in short}


def _count_shared_chars(texts: Iterable[str]) -> int:
    """How many characters all texts begin with."""
    return len(os.path.commonprefix(list(texts)))  # noqa: RUF071 - not of paths.


def _count_different(calls: Iterable[_Call]) -> int:
    return len({(call.name, *sorted(call.args.items())) for call in calls})
