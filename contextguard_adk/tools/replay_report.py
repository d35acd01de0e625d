"""What a replay found: its figures, as JSON, as a table, and as a drawing."""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from contextguard_adk.telemetry import CompactionRecord
from contextguard_adk.tools.terminal import (
    CommandError,
    clean_text,
    make_console,
    print_line,
    print_whole,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MISS_RATIO = 0.10
"""An estimate this far below the real count is a miss."""

LONG_CALLS = 50
"""From this many calls on, the table leaves calls out …"""

SHOWN_ENDS = 5
"""… except for this many at either end, and the neighbors of each compaction."""

WIDE_COLUMNS = 120
PLOT_FORMATS = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class ReplayedCall:
    """One model call, as it was recorded and as it would have been.

    Attributes:
        number: Counts the calls from 1.
        agent: The agent's name.
        contents: The contents of the whole request.
        estimated_tokens: The guard's estimate of it; None where the agent is exempt.
        real_tokens: What the provider counted; None where it counted a request that a
            guard had changed.
        whole_tokens: The count of the whole request: the real one, or scaled from
            the calls before.
        window_tokens: The context window; None where the agent is exempt.
        threshold_tokens: The prompt tokens that start a compaction; None likewise.
        sent_contents: The contents that the guard would have sent.
        sent_tokens: Their count, scaled from that of the whole request.
        compaction: What the guard would have compacted before this call.
    """

    number: int
    agent: str
    contents: int
    estimated_tokens: int | None
    real_tokens: int | None
    whole_tokens: int
    window_tokens: int | None
    threshold_tokens: int | None
    sent_contents: int
    sent_tokens: int
    compaction: CompactionRecord | None

    @property
    def error_ratio(self) -> float | None:
        """How far the estimate is from the real count; None where one is unknown."""
        if self.estimated_tokens is None or self.real_tokens is None:
            return None
        return self.estimated_tokens / self.real_tokens - 1

    @property
    def pressure(self) -> float | None:
        """The estimate of the whole request / window."""
        if self.estimated_tokens is None or self.window_tokens is None:
            return None
        return self.estimated_tokens / self.window_tokens

    def to_json(self) -> dict[str, Any]:
        """Describes the call, safe as JSON."""
        ratios = {"error_ratio": self.error_ratio, "pressure": self.pressure}
        return {**asdict(self), **ratios}


@dataclass(frozen=True)
class Replayed:
    """A replayed session.

    Attributes:
        session_id: Its id.
        fixed_tokens: The inferred size of instruction and tools, by agent, in
            bytes / 4.
        calls: The model calls.
        summary_tokens: What the summaries would have cost, prompts and outputs.
    """

    session_id: str
    fixed_tokens: dict[str, int]
    calls: list[ReplayedCall]
    summary_tokens: int

    def to_json(self) -> dict[str, Any]:
        """Describes all of it, safe as JSON."""
        windows = [(call, call.window_tokens) for call in self.calls]
        whole_tokens = sum(call.whole_tokens for call in self.calls)
        sent_tokens = sum(call.sent_tokens for call in self.calls)
        return {
            "session": self.session_id,
            "fixed_tokens": self.fixed_tokens,
            "calls": [call.to_json() for call in self.calls],
            "accuracy": measure_accuracy(self.calls),
            "compactions": sum(call.compaction is not None for call in self.calls),
            "uncompared_calls": sum(call.real_tokens is None for call in self.calls),
            "tokens_without_guard": whole_tokens,
            "tokens_with_guard": sent_tokens,
            "summary_tokens": self.summary_tokens,
            "saved_tokens": whole_tokens - sent_tokens - self.summary_tokens,
            "over_window_without_guard": sum(
                call.whole_tokens > window for call, window in windows if window
            ),
            "over_window_with_guard": sum(
                call.sent_tokens > window for call, window in windows if window
            ),
        }


def measure_accuracy(calls: Sequence[ReplayedCall]) -> dict[str, Any] | None:
    """Compares estimates with real counts; None where there is nothing to compare.

    An agent's first call is left out: nothing has calibrated its estimate yet.
    """
    errors: list[float] = []
    known: set[str] = set()
    for call in calls:
        if (error := call.error_ratio) is None:
            continue
        if call.agent in known:
            errors.append(error)
        known.add(call.agent)
    if not errors:
        return None
    sizes = sorted(map(abs, errors))
    return {
        "calls": len(errors),
        "median_error_ratio": statistics.median(sizes),
        "p95_error_ratio": sizes[math.ceil(0.95 * len(sizes)) - 1],
        "misses": sum(error < -MISS_RATIO for error in errors),
    }


def print_replayed(replayed: Replayed, is_complete: bool) -> None:
    """Prints the calls and the sums.

    Args:
        replayed: What to print.
        is_complete: Whether to print every call of a long session.
    """
    console = make_console(WIDE_COLUMNS)
    print_whole(console, _tabulate(console, replayed.calls, is_complete))
    print_line(console, "")
    for line in _list_facts(replayed.to_json()):
        print_line(console, line)


def _tabulate(
    console: Console, calls: Sequence[ReplayedCall], is_complete: bool
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    names = ("call", "contents", "estimate", "real", "error", "pressure", "sent")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("compaction", min_width=20)
    has_agents = len({call.agent for call in calls}) > 1
    if has_agents:
        table.add_column("agent", overflow="fold")
    previous = 0
    for call in _choose(calls, is_complete):
        if call.number > previous + 1:
            table.add_row("...")
        previous = call.number
        cells = [*_list_cells(call), call.agent] if has_agents else _list_cells(call)
        table.add_row(
            *(Text(clean_text(console, cell)) for cell in cells),
            style="cyan" if call.compaction else "",
        )
    return table


def _choose(calls: Sequence[ReplayedCall], is_complete: bool) -> Iterator[ReplayedCall]:
    """Yields the calls to show: of a long session the ends and the compactions."""
    for index, call in enumerate(calls):
        is_end = min(index, len(calls) - 1 - index) < SHOWN_ENDS
        beside = calls[max(0, index - 1) : index + 2]
        is_near = is_end or any(one.compaction for one in beside)
        if is_complete or len(calls) < LONG_CALLS or is_near:
            yield call


def _list_cells(call: ReplayedCall) -> Iterator[str]:
    yield f"{call.number:,}"
    yield f"{call.contents:,}"
    for tokens in (call.estimated_tokens, call.real_tokens):
        yield "-" if tokens is None else f"{tokens:,}"
    yield "-" if call.error_ratio is None else f"{call.error_ratio:+.1%}"
    yield "-" if call.pressure is None else f"{call.pressure:.0%}"
    yield f"{call.sent_tokens:,}"
    if (compaction := call.compaction) is None:
        yield ""
        return
    yield (
        f"{compaction.reason}: {compaction.tokens_before:,} → "
        f"{compaction.tokens_after:,} tokens, {compaction.contents_before:,} → "
        f"{compaction.contents_after:,} contents"
        f"{', mechanical' if compaction.is_mechanical else ''}"
    )


def _list_facts(found: dict[str, Any]) -> Iterator[str]:
    """Says in sentences what the replay found."""
    fixed = ", ".join(f"{agent} {n:,}" for agent, n in found["fixed_tokens"].items())
    yield (
        "A recording holds neither instruction nor tools; inferred from its counts, "
        f"in tokens by bytes / 4: {fixed}."
    )
    if found["uncompared_calls"]:
        yield (
            f"{found['uncompared_calls']:,} calls were recorded while a guard had "
            "changed the request: their counts are not compared."
        )
    if (accuracy := found["accuracy"]) is None:
        yield "Accuracy: nothing to compare."
    else:
        yield (
            f"Accuracy from the second call on: median error "
            f"{accuracy['median_error_ratio']:.1%}, p95 "
            f"{accuracy['p95_error_ratio']:.1%}, {accuracy['misses']:,} of "
            f"{accuracy['calls']:,} estimates more than {MISS_RATIO:.0%} too low."
        )
    yield (
        f"Requests over the window: {found['over_window_without_guard']:,} without the "
        f"guard, {found['over_window_with_guard']:,} with it; "
        f"{found['compactions']:,} compactions."
    )
    share = found["saved_tokens"] / max(1, found["tokens_without_guard"])
    yield (
        f"Prompt tokens: {found['tokens_without_guard']:,} without the guard, "
        f"{found['tokens_with_guard']:,} with it and {found['summary_tokens']:,} for "
        f"summaries: {found['saved_tokens']:,} ({share:.0%}) saved."
    )


def require_plotting(path: Path) -> None:
    """Fails before the work does.

    Raises:
        CommandError: matplotlib is missing, or the format is unknown.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError(
            "--plot needs the extra: pip install 'contextguard-adk[plot]'"
        )
    if path.suffix.lower() not in PLOT_FORMATS:
        raise CommandError(f"{path}: the name must end in {', '.join(PLOT_FORMATS)}")


def save_plot(replayed: Replayed, path: Path) -> None:
    """Draws tokens, threshold and window over the calls, one panel for each agent.

    Raises:
        CommandError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    agents = list(dict.fromkeys(call.agent for call in replayed.calls))
    figure = Figure(figsize=(9.0, 3.6 * len(agents)), layout="constrained")
    panels = figure.subplots(len(agents), squeeze=False)
    for agent, axes in zip(agents, panels[:, 0], strict=True):
        _draw(axes, agent, [call for call in replayed.calls if call.agent == agent])
    try:
        figure.savefig(path)
    except OSError as error:
        raise CommandError(
            f"{path}: cannot be written: {error.strerror or type(error).__name__}"
        ) from error


def _draw(axes: Axes, agent: str, calls: Sequence[ReplayedCall]) -> None:
    def plot(label: str, tokens: list[int | None], **style: Any) -> None:
        """Draws a line; a gap where nothing is known."""
        values = [math.nan if value is None else value for value in tokens]
        axes.plot([call.number for call in calls], values, label=label, **style)

    plot("without the guard", [c.whole_tokens for c in calls], color="#999999")
    plot("with the guard", [c.sent_tokens for c in calls], color="#1f77b4")
    dashed = {"linestyle": "--", "linewidth": 1}
    plot("threshold", [c.threshold_tokens for c in calls], color="#ff7f0e", **dashed)
    plot("window", [c.window_tokens for c in calls], color="#d62728", **dashed)
    compacted = [c.sent_tokens if c.compaction else None for c in calls]
    plot("compaction", compacted, color="#1f77b4", marker="v", linestyle="none")
    axes.set_title(agent, loc="left", fontsize=10)
    axes.set_xlabel("model call")
    axes.set_ylabel("prompt tokens")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(fontsize=8, loc="upper left")
