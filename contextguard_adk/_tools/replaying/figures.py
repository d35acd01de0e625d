"""The figures of a replay, as JSON and as a table."""

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

# An estimate is a miss if it is more than 10% too low.
MISS_RATIO = -0.10

# A session of fewer calls is printed whole; of a longer one, this number of calls at
# the start and at the end, and the calls next to a compaction.
LEAST_LONG_CALLS = 50
END_CALLS = 5

# By the name of a column, the field of `ReplayedCall` and the format of its figures.
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
    """The tokens of calls, and their price in US dollars; None where it is unknown."""

    usage: Usage = field(default_factory=Usage)
    cost: float | None = 0.0

    def __add__(self, other: Bill) -> Bill:
        return Bill(self.usage + other.usage, add_costs((self.cost, other.cost)))


@dataclass(frozen=True)
class Totals:
    """The figures of all calls of a session, summaries included."""

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
        """Prompt and output tokens."""
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
    pressure: float | None  # The estimate / window.
    needed: list[Needed]
    missing: list[Needed]  # Those that would not have been in the request.
    # Session state after a compaction of the replay; no part of the figures.
    state: dict[str, Any] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Describes the call without its state, safe as JSON."""
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
        requests = [(call.whole_tokens, call.whole_bill) for call in self.calls]
        return self._add_up(requests, missing=[], compactions=0)

    @property
    def with_guard(self) -> Totals:
        """The calls as the guard would have sent them."""
        requests = [(call.sent_tokens, call.sent_bill) for call in self.calls]
        missing = [each for _, each in self.missing]
        compactions = sum(1 for call in self.calls if call.compaction)
        return self._add_up(requests, missing, compactions)

    @property
    def missing(self) -> list[tuple[int, Needed]]:
        """The values that requests would not have had, by the number of the call."""
        return [(call.number, each) for call in self.calls for each in call.missing]

    def _add_up(
        self,
        requests: list[tuple[int, Bill]],
        missing: list[Needed],
        compactions: int,
    ) -> Totals:
        """Adds up the figures of the calls.

        `requests` has the prompt tokens and the bill of each call. `missing` are the
        needed values that requests did not hold.
        """
        windows = [call.window_tokens for call in self.calls]
        sizes = [tokens for tokens, _ in requests]
        too_long = [
            tokens
            for tokens, window_tokens in zip(sizes, windows, strict=True)
            if tokens > window_tokens
        ]

        total_bill = sum((bill for _, bill in requests), Bill())
        needed = [each for call in self.calls for each in call.needed]
        far_needed = [each for each in needed if each.is_far]
        far_missing = [each for each in missing if each.is_far]
        return Totals(
            over_window=len(too_long),
            compactions=compactions,
            usage=total_bill.usage,
            cost=total_bill.cost,
            largest_request_tokens=max(sizes),
            need=Share(len(needed), len(missing)),
            far=Share(len(far_needed), len(far_missing)),
        )

    def to_json(self) -> dict[str, Any]:
        without = self.without_guard
        guarded = self.with_guard
        uncompared = [call for call in self.calls if call.real_tokens is None]
        return {
            "session": self.session_id,
            "fixed_tokens": self.fixed_tokens,
            "calls": [call.to_json() for call in self.calls],
            "accuracy": _measure_accuracy(self.calls),
            "uncompared_calls": len(uncompared),
            "has_cache": self.has_cache,
            "without_guard": without.to_json(),
            "with_guard": guarded.to_json(),
            "saved_tokens": without.tokens - guarded.tokens,
        }


def _measure_accuracy(calls: Sequence[ReplayedCall]) -> dict[str, Any] | None:
    """Describes the errors of the estimates; None if there is nothing to compare.

    The first estimate of each agent is left out: the guard corrects its estimates by
    earlier counts, and the first one has none.
    """
    by_agent: dict[str, list[float]] = {}
    for call in calls:
        if call.error_ratio is not None:
            by_agent.setdefault(call.agent, []).append(call.error_ratio)

    errors = [error for own in by_agent.values() for error in own[1:]]
    if not errors:
        return None

    # The 95th percentile is the smallest size that 95% of the sizes do not exceed.
    sizes = sorted(abs(error) for error in errors)
    return {
        "calls": len(errors),
        "median_error_ratio": statistics.median(sizes),
        "p95_error_ratio": sizes[math.ceil(0.95 * len(sizes)) - 1],
        "misses": sum(1 for error in errors if error < MISS_RATIO),
    }


def print_replayed(replayed: Replayed, is_complete: bool) -> None:
    """Prints the sums and the calls.

    Of a long session, unless `is_complete`, only the first and the last calls and those
    near a compaction are printed.
    """
    calls = replayed.calls
    without = replayed.without_guard
    guarded = replayed.with_guard
    over = f"{without.over_window:,} without the guard → {guarded.over_window:,}"
    compactions = f"{guarded.compactions:,} compactions"
    print_line(f"Requests over the window: {over} with it; {compactions}", "bold")

    window_tokens = max(call.window_tokens for call in calls)
    whole_sizes = [call.whole_tokens for call in calls]
    terminal.print_sparkline("without the guard  ", whole_sizes, window_tokens)
    sent_sizes = [call.sent_tokens for call in calls]
    terminal.print_sparkline("with the guard     ", sent_sizes, window_tokens)
    print_line("")

    columns = [number_column(name) for name in COLUMNS]
    columns.append(Column("compaction", min_width=20))
    if len({call.agent for call in calls}) > 1:
        columns.append(Column("agent", overflow="fold"))
    terminal.print_table(columns, _list_rows(calls, is_complete, len(columns)))

    for line in _list_facts(replayed):
        print_line(line)
    for line in list_assumptions(replayed.has_cache):
        print_line(line)


def _list_rows(
    calls: list[ReplayedCall], is_complete: bool, width: int
) -> Iterator[tuple[list[str], str]]:
    """Yields the first `width` cells of each call to print, and the style of the row.

    A row of dots stands for the calls that are left out.
    """
    shows_all = is_complete or len(calls) < LEAST_LONG_CALLS
    last_number = 0  # Of the call that was printed last.
    for index, call in enumerate(calls):
        is_at_start = index < END_CALLS
        is_at_end = index >= len(calls) - END_CALLS
        neighbors = calls[max(0, index - 1) : index + 2]
        is_near_compaction = any(each.compaction for each in neighbors)
        if not (shows_all or is_at_start or is_at_end or is_near_compaction):
            continue

        if call.number > last_number + 1:
            yield ["..."], ""
        last_number = call.number

        cells = list[str]()
        for name, form in COLUMNS.values():
            figure = getattr(call, name)
            cells.append("-" if figure is None else format(figure, form))
        cells += [_describe(call.compaction), call.agent]
        yield cells[:width], "cyan" if call.compaction else ""


def _describe(compaction: CompactionRecord | None) -> str:
    """Describes a compaction in one cell; returns "" for none."""
    if compaction is None:
        return ""

    tokens = f"{compaction.tokens_before:,} → {compaction.tokens_after:,} tokens"
    contents_before = f"{compaction.contents_before:,}"
    messages = f"{contents_before} → {compaction.contents_after:,} messages"
    end = ", mechanical" if compaction.is_mechanical else ""
    return f"{compaction.reason}: {tokens}, {messages}{end}"


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

    uncompared = [call for call in replayed.calls if call.real_tokens is None]
    if uncompared:
        count = f"{len(uncompared):,} calls"
        yield f"{count}, changed by a guard when recorded, are not compared."
    accuracy = _measure_accuracy(replayed.calls)
    if accuracy:
        yield (
            "Accuracy from the second call on: median error "
            f"{accuracy['median_error_ratio']:.1%}, p95 "
            f"{accuracy['p95_error_ratio']:.1%}, {accuracy['misses']:,} of "
            f"{accuracy['calls']:,} estimates more than 10% too low."
        )
    else:
        yield "Accuracy: nothing to compare."

    yield f"Tokens without the guard: {_describe_tokens(without)}."
    saved_tokens = without.tokens - guarded.tokens
    saved = f"{saved_tokens:,} ({saved_tokens / without.tokens:.0%}) saved"
    yield f"Tokens with the guard: {_describe_tokens(guarded)}; {saved}."

    # A share as text is the part of the values that requests held.
    need = guarded.need
    far = guarded.far
    yield (
        f"Need: {need} of {need.needed:,} values that the calls took from the "
        f"conversation were in the request; far back, {far} of {far.needed:,}."
    )
    for line in list_missing(replayed.missing):
        yield f"  {line}"


def _describe_tokens(found: Totals) -> str:
    usage = found.usage
    return (
        f"{found.uncached_tokens:,} uncached, {usage.cached_tokens:,} cached, "
        f"{usage.output_tokens:,} of output; cost {format_cost(found.cost)}"
    )
