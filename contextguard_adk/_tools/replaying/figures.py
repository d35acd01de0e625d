"""The figures of a replay, as JSON and as a table.

A replay makes each recorded call twice: with the whole history, as without a guard, and
with the request that the guard would have sent.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
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

# A session of fewer calls is printed whole. Of a longer session this number of calls at
# the start and at the end is printed, and the calls next to a compaction.
LEAST_LONG_CALLS = 50
END_CALLS = 5

# By the name of a column, the field of `ReplayedCall` and the format of its figures.
# "-" stands for None.
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
    """The tokens of some calls, and what they cost.

    Attributes:
        usage: The tokens of the calls.
        cost: The price of the tokens in US dollars; None if it is unknown.
    """

    usage: Usage = field(default_factory=Usage)
    cost: float | None = 0.0

    def __add__(self, other: Bill) -> Bill:
        return Bill(self.usage + other.usage, add_costs((self.cost, other.cost)))


@dataclass(frozen=True)
class Totals:
    """The figures of all calls of a session, summaries included.

    Attributes:
        over_window: The number of requests that are larger than the window.
        compactions: The number of compactions.
        usage: The tokens of the calls.
        cost: The price of the tokens in US dollars; None if it is unknown.
        largest_request_tokens: The prompt tokens of the largest request.
        need: The share of all values that the recorded calls needed.
        far: The share of those needed values that are far back: in the whole request,
            the last content with the value lies more than half a window before the end.
    """

    over_window: int
    compactions: int
    usage: Usage
    cost: float | None
    largest_request_tokens: int
    need: Share
    far: Share

    @property
    def uncached_tokens(self) -> int:
        return self.usage.prompt_tokens - self.usage.cached_tokens

    @property
    def tokens(self) -> int:
        """Prompt and output tokens."""
        return self.usage.prompt_tokens + self.usage.output_tokens

    @property
    def weighted_tokens(self) -> int:
        """The number of uncached prompt tokens that would cost as much as all tokens.

        The prices are the typical ones.
        """
        # By the typical prices, a million uncached prompt tokens cost one dollar.
        return round(TYPICAL_COSTS.price(self.usage) * 1_000_000)

    def to_json(self) -> dict[str, Any]:
        names = ("uncached_tokens", "weighted_tokens")
        return asdict(self) | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class ReplayedCall:
    """One model call, with the whole history and with the request of the guard.

    The sent request is the one that the guard sends.

    Attributes:
        number: The number of the call in the recording, from 1.
        agent: The name of the agent.
        contents: The number of contents of the whole history.
        estimated_tokens: The guard's estimate of the recorded request or, if that
            request cannot be estimated, of the whole history; None if no guard watches
            the agent.
        real_tokens: The recorded count of the estimated request; None if the recording
            has none.
        whole_tokens: The prompt tokens of the whole history: the recorded count, if
            there is one; else a number that is inferred from the counts of the agent.
        whole_bill: The bill of the whole history.
        window_tokens: The context window.
        threshold_tokens: The prompt tokens from which on a compaction is due; None if
            no guard watches the agent.
        sent_contents: The number of contents of the sent request.
        sent_tokens: The prompt tokens of the sent request.
        sent_bill: The bill of the sent request and of its summaries, also of summaries
            that were not used.
        compaction: The compaction before the call; None if there was none.
        error_ratio: The error of the estimate, as a part of the recorded count: -0.1 is
            10% too low. None if the estimate or the count is unknown.
        pressure: The part of the window that the estimate fills; None if unknown.
        needed: The values that the call needed.
        missing: The needed values that the sent request does not hold.
        state: The session state after a compaction before the call; {} if there was no
            compaction. It is no figure, so JSON does not have it.
    """

    number: int
    agent: str
    contents: int
    estimated_tokens: int | None
    real_tokens: int | None
    whole_tokens: int
    whole_bill: Bill
    window_tokens: int
    threshold_tokens: int | None
    sent_contents: int
    sent_tokens: int
    sent_bill: Bill
    compaction: CompactionRecord | None
    error_ratio: float | None
    pressure: float | None
    needed: list[Needed]
    missing: list[Needed]
    state: dict[str, Any] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Describes the call, but not its state, as a dict for JSON."""
        figures = asdict(replace(self, state={}))
        del figures["state"]
        return figures


@dataclass(frozen=True)
class Replayed:
    """A replayed session.

    Attributes:
        session_id: The id of the session.
        fixed_tokens: By agent, the heuristic tokens (bytes / 4) of instruction and
            tools. They are inferred from the counts.
        calls: The model calls.
        has_cache: Whether the recording reports cached tokens.
    """

    session_id: str
    fixed_tokens: dict[str, int]
    calls: list[ReplayedCall]
    has_cache: bool

    @property
    def without_guard(self) -> Totals:
        """The totals of the calls with the whole history."""
        return self._add_up(
            request_tokens=[call.whole_tokens for call in self.calls],
            bills=[call.whole_bill for call in self.calls],
            missing=[],
            compactions=0,
        )

    @property
    def with_guard(self) -> Totals:
        """The totals of the calls as the guard would have sent them."""
        return self._add_up(
            request_tokens=[call.sent_tokens for call in self.calls],
            bills=[call.sent_bill for call in self.calls],
            missing=[each for call in self.calls for each in call.missing],
            compactions=sum(1 for call in self.calls if call.compaction),
        )

    @property
    def missing(self) -> list[tuple[int, Needed]]:
        """The needed values that sent requests do not hold, in the order of the calls.

        Each value stands after the number of its call.
        """
        return [(call.number, each) for call in self.calls for each in call.missing]

    def _add_up(
        self,
        request_tokens: list[int],
        bills: list[Bill],
        missing: list[Needed],
        compactions: int,
    ) -> Totals:
        """Adds up the figures of the calls, of which there is at least one.

        Args:
            request_tokens: The prompt tokens of each call.
            bills: The bill of each call.
            missing: The needed values that the requests do not hold.
            compactions: The number of compactions.
        """
        over_window = 0
        for call, prompt_tokens in zip(self.calls, request_tokens, strict=True):
            if prompt_tokens > call.window_tokens:
                over_window += 1

        total_bill = sum(bills, Bill())
        needed = [each for call in self.calls for each in call.needed]
        far_needed = [each for each in needed if each.is_far]
        far_missing = [each for each in missing if each.is_far]
        return Totals(
            over_window=over_window,
            compactions=compactions,
            usage=total_bill.usage,
            cost=total_bill.cost,
            largest_request_tokens=max(request_tokens),
            need=Share(len(needed), len(missing)),
            far=Share(len(far_needed), len(far_missing)),
        )

    def to_json(self) -> dict[str, Any]:
        """Describes the replay as a dict that can be written as JSON."""
        without = self.without_guard
        guarded = self.with_guard
        return {
            "session": self.session_id,
            "fixed_tokens": self.fixed_tokens,
            "calls": [call.to_json() for call in self.calls],
            "accuracy": _measure_accuracy(self.calls),
            "uncompared_calls": _count_uncompared(self.calls),
            "has_cache": self.has_cache,
            "without_guard": without.to_json(),
            "with_guard": guarded.to_json(),
            "saved_tokens": without.tokens - guarded.tokens,
        }


def _count_uncompared(calls: Sequence[ReplayedCall]) -> int:
    """Counts the calls whose estimate has no recorded count to compare it with."""
    return sum(1 for call in calls if call.real_tokens is None)


def _measure_accuracy(calls: Sequence[ReplayedCall]) -> dict[str, Any] | None:
    """Describes the errors of the estimates; None if there are none to describe.

    The first error of each agent is left out. The guard corrects its estimates by the
    counts of earlier calls, and before the first call it knows no count.
    """
    errors_by_agent = defaultdict[str, list[float]](list)
    for call in calls:
        if call.error_ratio is not None:
            errors_by_agent[call.agent].append(call.error_ratio)

    errors = list[float]()
    for agent_errors in errors_by_agent.values():
        errors += agent_errors[1:]
    if not errors:
        return None

    # The 95th percentile is the smallest size that 95% of the sizes do not exceed.
    sizes = sorted(abs(error) for error in errors)
    p95_rank = math.ceil(0.95 * len(sizes))
    return {
        "calls": len(errors),
        "median_error_ratio": statistics.median(sizes),
        "p95_error_ratio": sizes[p95_rank - 1],
        "misses": sum(1 for error in errors if error < MISS_RATIO),
    }


def print_replayed(replayed: Replayed, is_complete: bool) -> None:
    """Prints the totals, a chart of the sizes, the calls, and what the replay found.

    `is_complete` says whether each call of a long session is printed. Otherwise the
    table has only the first and the last calls, and the calls next to a compaction.
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
    has_agents = len({call.agent for call in calls}) > 1
    if has_agents:
        columns.append(Column("agent", overflow="fold"))
    printed_calls = calls if is_complete else _choose_calls(calls)
    terminal.print_table(columns, _list_rows(printed_calls, has_agents))

    for line in _list_facts(replayed):
        print_line(line)
    for line in list_assumptions(replayed.has_cache):
        print_line(line)


def _choose_calls(calls: list[ReplayedCall]) -> list[ReplayedCall]:
    """Chooses the calls of a session that get a row: all, if there are few.

    In a long session these calls get a row:

    - the first and the last calls, `END_CALLS` of each
    - each call before which a compaction took place
    - the call before such a call, and the call after it
    """
    if len(calls) < LEAST_LONG_CALLS:
        return calls

    chosen_calls = list[ReplayedCall]()
    for index, call in enumerate(calls):
        is_at_start = index < END_CALLS
        is_at_end = index >= len(calls) - END_CALLS
        previous_index = max(0, index - 1)
        # The call before, this call, and the next one.
        nearby_calls = calls[previous_index : index + 2]
        is_near_compaction = any(each.compaction for each in nearby_calls)
        if is_at_start or is_at_end or is_near_compaction:
            chosen_calls.append(call)
    return chosen_calls


def _list_rows(
    calls: list[ReplayedCall], has_agents: bool
) -> Iterator[tuple[list[str], str]]:
    """Yields the cells of each call, with the style of the row.

    A row of dots stands for calls that are left out between two others.

    Args:
        calls: The calls that get a row, in order.
        has_agents: Whether each row ends with the name of the agent.
    """
    last_number = 0
    for call in calls:
        if call.number > last_number + 1:
            yield ["..."], ""
        last_number = call.number

        cells = list[str]()
        for name, form in COLUMNS.values():
            figure = getattr(call, name)
            cells.append("-" if figure is None else format(figure, form))
        cells.append(_describe(call.compaction))
        if has_agents:
            cells.append(call.agent)
        yield cells, "cyan" if call.compaction else ""


def _describe(compaction: CompactionRecord | None) -> str:
    """Describes a compaction in one cell; returns "" for none.

    For example: "tokens: 9,120 → 2,310 tokens, 40 → 12 messages".
    """
    if compaction is None:
        return ""

    tokens = f"{compaction.tokens_before:,} → {compaction.tokens_after:,} tokens"
    contents_before = f"{compaction.contents_before:,}"
    messages = f"{contents_before} → {compaction.contents_after:,} messages"
    end = ", mechanical" if compaction.is_mechanical else ""
    return f"{compaction.reason}: {tokens}, {messages}{end}"


def list_assumptions(has_cache: bool) -> Iterator[str]:
    """Says in sentences what the replay assumes of summaries and of a prompt cache.

    The simulated cache has the last four prompts (`MOST_CACHED_PROMPTS`). The cache
    serves the longest beginning that a new prompt shares with one of the four.
    """
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
    fixed = ", ".join(f"{name} {n:,}" for name, n in replayed.fixed_tokens.items())
    yield f"Instruction and tools, inferred from the counts, in bytes / 4: {fixed}."

    uncompared_count = _count_uncompared(replayed.calls)
    if uncompared_count:
        count = f"{uncompared_count:,} calls"
        yield f"{count}, changed by a guard when recorded, are not compared."
    yield _describe_accuracy(replayed.calls)

    without = replayed.without_guard
    guarded = replayed.with_guard
    yield f"Tokens without the guard: {_describe_tokens(without)}."
    saved_tokens = without.tokens - guarded.tokens
    # Each call has at least one token.
    saved = f"{saved_tokens:,} ({saved_tokens / without.tokens:.0%}) saved"
    yield f"Tokens with the guard: {_describe_tokens(guarded)}; {saved}."

    # The text of a share is the part of the values that requests held.
    need = guarded.need
    far = guarded.far
    yield (
        f"Need: {need} of {need.needed:,} values that the calls took from the "
        f"conversation were in the request; far back, {far} of {far.needed:,}."
    )
    for line in list_missing(replayed.missing):
        yield f"  {line}"


def _describe_accuracy(calls: Sequence[ReplayedCall]) -> str:
    """Describes the errors of the estimates in a sentence."""
    accuracy = _measure_accuracy(calls)
    if not accuracy:
        return "Accuracy: nothing to compare."
    return (
        "Accuracy from the second call on: median error "
        f"{accuracy['median_error_ratio']:.1%}, p95 "
        f"{accuracy['p95_error_ratio']:.1%}, {accuracy['misses']:,} of "
        f"{accuracy['calls']:,} estimates more than 10% too low."
    )


def _describe_tokens(totals: Totals) -> str:
    usage = totals.usage
    return (
        f"{totals.uncached_tokens:,} uncached, {usage.cached_tokens:,} cached, "
        f"{usage.output_tokens:,} of output; cost {format_cost(totals.cost)}"
    )
