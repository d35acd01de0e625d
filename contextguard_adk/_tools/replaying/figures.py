"""What a replay found: its figures, as JSON and as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.table import Column

from contextguard_adk._providers.costs import TYPICAL_COSTS, add_costs
from contextguard_adk._tools import terminal
from contextguard_adk._tools.replaying.need import Needed, Share, list_missing
from contextguard_adk._tools.terminal import number_column, print_line
from contextguard_adk.records import CompactionRecord, Usage, format_cost

COLUMNS = {
    "call": ("number", ","),
    "messages": ("contents", ","),
    "estimate": ("estimated_tokens", ","),
    "real": ("real_tokens", ","),
    "error": ("error_ratio", "+.1%"),
    "pressure": ("pressure", ".0%"),
    "sent": ("sent_tokens", ","),
}


@dataclass(frozen=True)
class Bill:
    """What calls take, and its price in US dollars; None where it is unknown."""

    usage: Usage = field(default_factory=Usage)
    cost: float | None = 0.0

    def __add__(self, other: Bill) -> Bill:
        return Bill(self.usage + other.usage, add_costs((self.cost, other.cost)))


@dataclass(frozen=True)
class Totals:
    """What all calls of a session take, summaries included."""

    over_window: int
    compactions: int
    usage: Usage
    cost: float | None
    largest_request_tokens: int
    need: Share  # Of the values that the recorded calls took from the conversation.
    far: Share  # Of those of them that were last said more than half a window before.

    @property
    def uncached_tokens(self) -> int:
        return self.usage.prompt_tokens - self.usage.cached_tokens

    @property
    def tokens(self) -> int:
        """All that is sent and written."""
        return self.usage.prompt_tokens + self.usage.output_tokens

    @property
    def weighted_tokens(self) -> int:
        """The cost in uncached prompt tokens, whatever the model's price."""
        return round(TYPICAL_COSTS.price(self.usage) * 1_000_000)

    def to_json(self) -> dict[str, Any]:
        names = ("uncached_tokens", "weighted_tokens")
        return asdict(self) | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class ReplayedCall:
    """One model call, as it was recorded and as it would have been."""

    number: int
    agent: str
    contents: int
    estimated_tokens: int | None
    real_tokens: int | None
    whole_tokens: int  # The real count or, without one, scaled from calls before.
    whole_bill: Bill
    window_tokens: int
    threshold_tokens: int | None
    sent_contents: int
    sent_tokens: int
    sent_bill: Bill  # With summaries, also of compactions that came to nothing.
    compaction: CompactionRecord | None
    error_ratio: float | None  # Of the estimate, against the real count.
    pressure: float | None  # The estimate of the whole request / window.
    needed: list[Needed]
    missing: list[Needed]  # Those that would not have been in the request.
    # What session state has after a compaction, in the replay; no part of the figures.
    state: dict[str, Any] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Describes all of it but the state, safe as JSON."""
        figures = asdict(replace(self, state={}))
        return {name: value for name, value in figures.items() if name != "state"}


@dataclass(frozen=True)
class Replayed:
    """A replayed session, and the fixed tokens that were inferred of each agent."""

    session_id: str
    fixed_tokens: dict[str, int]
    calls: list[ReplayedCall]
    has_cache: bool  # Whether the recording reports cached tokens.

    @property
    def without_guard(self) -> Totals:
        """The calls as they were recorded."""
        return self._add_up([(c.whole_tokens, c.whole_bill) for c in self.calls], [])

    @property
    def with_guard(self) -> Totals:
        """The calls as the guard would have sent them."""
        compactions = sum(call.compaction is not None for call in self.calls)
        requests = [(call.sent_tokens, call.sent_bill) for call in self.calls]
        missing = [each for _, each in self.missing]
        return self._add_up(requests, missing, compactions)

    @property
    def missing(self) -> list[tuple[int, Needed]]:
        """What would not have been in requests, by the number of the call."""
        return [(call.number, each) for call in self.calls for each in call.missing]

    def _add_up(
        self,
        requests: list[tuple[int, Bill]],
        missing: list[Needed],
        compactions: int = 0,
    ) -> Totals:
        sizes = [tokens for tokens, _ in requests]
        windows = [call.window_tokens for call in self.calls]
        over = sum(n > most for n, most in zip(sizes, windows, strict=True))
        bill = sum((bill for _, bill in requests), Bill())
        needed = [each for call in self.calls for each in call.needed]
        need = Share(len(needed), len(missing))
        far = Share(*(sum(n.is_far for n in each) for each in (needed, missing)))
        most = max(sizes)
        return Totals(over, compactions, bill.usage, bill.cost, most, need, far)

    def to_json(self) -> dict[str, Any]:
        without = self.without_guard
        guarded = self.with_guard
        return {
            "session": self.session_id,
            "fixed_tokens": self.fixed_tokens,
            "calls": [call.to_json() for call in self.calls],
            "accuracy": _measure_accuracy(self.calls),
            "uncompared_calls": sum(call.real_tokens is None for call in self.calls),
            "has_cache": self.has_cache,
            "without_guard": without.to_json(),
            "with_guard": guarded.to_json(),
            "saved_tokens": without.tokens - guarded.tokens,
        }


def _measure_accuracy(calls: Sequence[ReplayedCall]) -> dict[str, Any] | None:
    """Compares estimates with counts, from each agent's second, calibrated call on."""
    by_agent: dict[str, list[float]] = {}
    for call in calls:
        if call.error_ratio is not None:
            by_agent.setdefault(call.agent, []).append(call.error_ratio)
    errors = [error for own in by_agent.values() for error in own[1:]]
    if not errors:
        return None
    sizes = sorted(map(abs, errors))
    return {
        "calls": len(errors),
        "median_error_ratio": statistics.median(sizes),
        "p95_error_ratio": sizes[math.ceil(0.95 * len(sizes)) - 1],
        "misses": sum(error < -0.10 for error in errors),
    }


def print_replayed(replayed: Replayed, is_complete: bool) -> None:
    """Prints the sums and the calls; of a long session those near a compaction."""
    calls = replayed.calls
    without = replayed.without_guard
    guarded = replayed.with_guard
    over = f"{without.over_window:,} without the guard → {guarded.over_window:,}"
    done = f"{guarded.compactions:,} compactions"
    print_line(f"Requests over the window: {over} with it; {done}", "bold")
    window_tokens = max(call.window_tokens for call in calls)
    for label, name in (("without", "whole_tokens"), ("with", "sent_tokens")):
        sizes = [getattr(call, name) for call in calls]
        terminal.print_sparkline(f"{label + ' the guard':19}", sizes, window_tokens)
    print_line("")
    columns = [*map(number_column, COLUMNS), Column("compaction", min_width=20)]
    if len({call.agent for call in calls}) > 1:
        columns.append(Column("agent", overflow="fold"))
    terminal.print_table(columns, _list_rows(calls, is_complete, len(columns)))
    for line in (*_list_facts(replayed), *list_assumptions(replayed.has_cache)):
        print_line(line)


def _list_rows(
    calls: list[ReplayedCall], is_complete: bool, width: int
) -> Iterator[tuple[list[str], str]]:
    """Yields the cells of each call to print, and its style."""
    previous = 0
    for index, call in enumerate(calls):
        is_end = min(index, len(calls) - 1 - index) < 5
        is_near = any(c.compaction for c in calls[max(0, index - 1) : index + 2])
        if not (is_complete or len(calls) < 50 or is_end or is_near):
            continue
        if call.number > previous + 1:
            yield ["..."], ""
        previous = call.number
        figures = [(getattr(call, name), form) for name, form in COLUMNS.values()]
        cells = ["-" if n is None else format(n, form) for n, form in figures]
        cells += [_describe(call.compaction), call.agent]
        yield cells[:width], "cyan" if call.compaction else ""


def _describe(done: CompactionRecord | None) -> str:
    if done is None:
        return ""
    tokens = f"{done.tokens_before:,} → {done.tokens_after:,} tokens"
    messages = f"{done.contents_before:,} → {done.contents_after:,} messages"
    end = ", mechanical" if done.is_mechanical else ""
    return f"{done.reason}: {tokens}, {messages}{end}"


def list_assumptions(has_cache: bool) -> Iterator[str]:
    """Says in sentences what was assumed of summaries and prompt cache."""
    yield "Summaries are excerpts that fill their budget: what they take is a maximum."
    if has_cache:
        yield (
            "The recording reports cached tokens: a cache is assumed that serves what "
            "one of the four prompts before began with."
        )
    else:
        yield "The recording reports no cached tokens: no prompt cache is assumed."


def _list_facts(replayed: Replayed) -> Iterator[str]:
    """Says in sentences what the replay found."""
    without = replayed.without_guard
    guarded = replayed.with_guard
    fixed = ", ".join(f"{name} {n:,}" for name, n in replayed.fixed_tokens.items())
    yield f"Instruction and tools, inferred from the counts, in bytes / 4: {fixed}."
    if count := sum(call.real_tokens is None for call in replayed.calls):
        yield f"{count:,} calls, changed by a guard when recorded, are not compared."
    if accuracy := _measure_accuracy(replayed.calls):
        yield (
            "Accuracy from the second call on: median error "
            f"{accuracy['median_error_ratio']:.1%}, p95 "
            f"{accuracy['p95_error_ratio']:.1%}, {accuracy['misses']:,} of "
            f"{accuracy['calls']:,} estimates more than 10% too low."
        )
    else:
        yield "Accuracy: nothing to compare."
    saved_tokens = without.tokens - guarded.tokens
    share = f"{saved_tokens:,} ({saved_tokens / without.tokens:.0%}) saved"
    for name, found, end in (("without", without, ""), ("with", guarded, f"; {share}")):
        usage = found.usage
        cost = format_cost(found.cost)
        yield (
            f"Tokens {name} the guard: {found.uncached_tokens:,} uncached, "
            f"{usage.cached_tokens:,} cached, {usage.output_tokens:,} of output; "
            f"cost {cost}{end}."
        )
    need = guarded.need
    far = guarded.far
    yield (
        f"Need: {need} of {need.needed:,} values that the calls took from the "
        f"conversation were in the request; far back, {far} of {far.needed:,}."
    )
    yield from (f"  {line}" for line in list_missing(replayed.missing))
