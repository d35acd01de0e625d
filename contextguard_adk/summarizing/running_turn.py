"""The running turn: which of its steps stay word for word, and a list of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from google.genai import types

from contextguard_adk.history.coverage import handle_of
from contextguard_adk.history.pairs import pair_boundaries, pair_contents, take_call
from contextguard_adk.history.rendering import Truncation, truncate_content
from contextguard_adk.measuring.budgets import TokenCounter
from contextguard_adk.measuring.tokens import estimate_contents_tokens
from contextguard_adk.summarizing.items import UNLISTED_CALLS
from contextguard_adk.summarizing.ledger import excerpt
from contextguard_adk.summarizing.todos import TODOS_TOOL
from contextguard_adk.summarizing.transcript import payload_text

if TYPE_CHECKING:
    from contextguard_adk.summarizing.context import CompactionContext

MAX_UNSEEN_RATIO = 0.30  # Of the window, for results that the model has not seen.
DONE_RATIO = 0.10  # Of the window, for the list of what is done.
DONE_HEADING = (
    "[Done so far for this request: each call below was made and has its result]"
)


_UNLISTED = UNLISTED_CALLS | {TODOS_TOOL}  # The todo list stands beside the summary.


@dataclass(frozen=True)
class KeptSteps:
    """The newest steps of the running turn, by index, that a compaction leaves.

    `unseen` are those whose results the model has not seen; where they are too large,
    `truncation` shortens them.
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
    contents = [view.contents[index] for index in steps]
    boundaries = pair_boundaries(pair_contents(contents), len(contents))
    starts = [
        place
        for place, content in enumerate(contents)
        if boundaries[place] and content.role == "model"
    ]
    if not starts:
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
    most_tokens = int(context.budgets.window_tokens * MAX_UNSEEN_RATIO)
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
        truncation = Truncation(
            max_length=length,
            smart_truncate=True,
            head_length=int(length * 0.6),
            tail_length=length - int(length * 0.6),
            result_length=length,
        )
        short = [truncate_content(c, truncation, context.has_recall) for c in contents]
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


def write_done_list(
    contents: Sequence[types.Content],
    indexes: Iterable[int],
    budget_tokens: int,
    count: TokenCounter,
    with_handles: bool = False,
) -> str:
    """Lists the completed calls in some contents, ever shorter until it fits.

    First a line for each call, then one for each tool; at last the oldest calls are
    only counted.
    """
    calls = list(_completed_calls(contents, indexes, with_handles))
    brief = _without_details(calls)
    attempts: list[tuple[Callable[..., list[str]], list[_Call], int, int]] = [
        (_write_lines, calls, 80, 80),
        (_write_lines, calls, 48, 32),
        (_write_groups, calls, 48, 32),
        (_write_groups, calls, 48, 0),
        (_write_groups, brief, 32, 0),
    ]
    for write, listed, arg_bytes, outcome_bytes in attempts if calls else ():
        text = "\n".join([DONE_HEADING, *write(listed, arg_bytes, outcome_bytes)])
        if count(text) <= budget_tokens:
            return text
    while brief := brief[len(brief) // 8 + 1 :]:
        note = f"- … and {len(calls) - len(brief)} calls before these"
        text = "\n".join([DONE_HEADING, *_write_groups(brief, 32, 0), note])
        if count(text) <= budget_tokens:
            return text
    return ""


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
            args = (found[1].args or {}).items()
            yield _Call(
                name=_one_line(response.name or "?"),
                args={_one_line(key): _one_line(value) for key, value in args},
                outcome=_one_line(response.response),
                handle=handle_of(part) if with_handles else "",
            )


def _one_line(value: object) -> str:
    """The beginning of a value in one line."""
    text = value if isinstance(value, str) else payload_text(value)
    return " ".join(text[:1_000].split()) if value not in (None, "") else ""


def _write_line(call: _Call, arg_bytes: int, outcome_bytes: int) -> str:
    args = _name_args({k: excerpt(v, arg_bytes) for k, v in call.args.items()})
    outcome = excerpt(call.outcome, outcome_bytes)
    if call.handle and len(outcome) < len(call.outcome):
        outcome += f" [item {call.handle}]"
    made = f"- {call.name}({', '.join(args)})"
    return f"{made} → {outcome}" if outcome else made


def _write_lines(
    calls: Iterable[_Call], arg_bytes: int, outcome_bytes: int
) -> list[str]:
    return [_write_line(call, arg_bytes, outcome_bytes) for call in calls]


def _write_groups(
    calls: Iterable[_Call], arg_bytes: int, outcome_bytes: int
) -> list[str]:
    """A line for each tool; what its calls have in common is said once."""
    lines = []
    for group in _by_tool(calls):
        names = list(dict.fromkeys(name for call in group for name in call.args))
        own = [n for n in names if len({call.args.get(n) for call in group}) > 1]
        shared = {
            n: excerpt(group[0].args[n], arg_bytes) for n in names if n not in own
        }
        if len(own) == 1:
            shared[own[0]] = "…"
        outcomes = [excerpt(call.outcome, outcome_bytes) for call in group]
        common = outcomes[0] if len(set(outcomes)) == 1 else ""
        items = []
        for call, outcome in zip(group, outcomes, strict=True):
            args = {n: excerpt(call.args[n], arg_bytes) for n in own if n in call.args}
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


def _without_details(calls: Iterable[_Call]) -> list[_Call]:
    """The calls with no more arguments than tell those of a tool apart, short ones."""
    brief: dict[int, _Call] = {}
    calls = list(calls)
    for group in _by_tool(calls):
        names = {name for call in group for name in call.args}
        lengths = {n: sum(len(c.args.get(n, "")) for c in group) for n in names}
        ordered = sorted(names, key=lambda name: (lengths[name], name))
        wanted = len({tuple(map(call.args.get, ordered)) for call in group})
        telling = 0
        while len({tuple(map(c.args.get, ordered[:telling])) for c in group}) < wanted:
            telling += 1
        kept = set(ordered[:telling])
        for call in group:
            args = {key: value for key, value in call.args.items() if key in kept}
            brief[id(call)] = replace(call, args=args)
    return [brief[id(call)] for call in calls]
