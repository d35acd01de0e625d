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

COLUMNS = {
    "call": ("number", ","),
    "contents": ("contents", ","),
    "estimate": ("estimated_tokens", ","),
    "real": ("real_tokens", ","),
    "error": ("error_ratio", "+.1%"),
    "pressure": ("pressure", ".0%"),
    "sent": ("sent_tokens", ","),
}
"""Heading, figure and format of the table's columns."""

LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "without the guard": ("whole_tokens", {"color": "#999999"}),
    "with the guard": ("sent_tokens", {"color": "#1f77b4"}),
    "threshold": ("threshold_tokens", {"color": "#ff7f0e", "linestyle": "--"}),
    "window": ("window_tokens", {"color": "#d62728", "linestyle": "--"}),
}
"""Label, figure and style of the drawing's lines."""

UNCOMPARED = (
    "{uncompared_calls:,} calls were recorded while a guard had changed the request: "
    "their counts are not compared."
)
ACCURACY = (
    "Accuracy from the second call on: median error {median_error_ratio:.1%}, p95 "
    "{p95_error_ratio:.1%}, {misses:,} of {calls:,} estimates more than 10% too low."
)
OVERFLOWS = (
    "Requests over the window: {over_window_without_guard:,} without the guard, "
    "{over_window_with_guard:,} with it; {compactions:,} compactions."
)
SAVINGS = (
    "Prompt tokens: {tokens_without_guard:,} without the guard, {tokens_with_guard:,} "
    "with it and {summary_tokens:,} for summaries: {saved_tokens:,} ({share:.0%}) "
    "saved."
)
PLOT_FORMATS = (".svg", ".png", ".pdf")
LONG_CALLS = 50
SHOWN_ENDS = 5


@dataclass(frozen=True)
class ReplayedCall:
    """One model call, as it was recorded and as it would have been.

    The estimate, window and threshold of an exempt agent are None, as is the real count
    of a request that a guard had changed. `whole_tokens` is the real count or, without
    one, scaled from the calls before; so is `sent_tokens`.
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

    error_ratio: float | None
    """How far the estimate is from the real count."""
    pressure: float | None
    """The estimate of the whole request / window."""


@dataclass(frozen=True)
class Replayed:
    """A replayed session, fixed tokens inferred by agent, and what summaries cost."""

    session_id: str
    fixed_tokens: dict[str, int]
    calls: list[ReplayedCall]
    summary_tokens: int

    def to_json(self) -> dict[str, Any]:
        """Describes all of it, safe as JSON."""
        calls = self.calls
        whole_tokens = sum(call.whole_tokens for call in calls)
        sent_tokens = sum(call.sent_tokens for call in calls)
        windows = [(call, call.window_tokens or math.inf) for call in calls]
        return {
            "session": self.session_id,
            "fixed_tokens": self.fixed_tokens,
            "calls": [asdict(call) for call in calls],
            "accuracy": _measure_accuracy(calls),
            "compactions": sum(call.compaction is not None for call in calls),
            "uncompared_calls": sum(call.real_tokens is None for call in calls),
            "tokens_without_guard": whole_tokens,
            "tokens_with_guard": sent_tokens,
            "summary_tokens": self.summary_tokens,
            "saved_tokens": whole_tokens - sent_tokens - self.summary_tokens,
            "over_window_without_guard": sum(c.whole_tokens > w for c, w in windows),
            "over_window_with_guard": sum(c.sent_tokens > w for c, w in windows),
        }


def _measure_accuracy(calls: Sequence[ReplayedCall]) -> dict[str, Any] | None:
    """Compares estimates with counts, from each agent's second, calibrated call on."""
    errors: list[float] = []
    known: set[str] = set()
    for call in calls:
        if call.error_ratio is not None:
            if call.agent in known:
                errors.append(call.error_ratio)
            known.add(call.agent)
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
    """Prints the calls, every one of a long session if wanted, and the sums."""
    console = make_console(120)
    print_whole(console, _tabulate(console, replayed.calls, is_complete))
    print_line(console, "")
    for line in _list_facts(replayed.to_json()):
        print_line(console, line)


def _tabulate(
    console: Console, calls: Sequence[ReplayedCall], is_complete: bool
) -> Table:
    """Tabulates the calls; of a long session the ends and what is near a compaction."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("compaction", min_width=20)
    has_agents = len({call.agent for call in calls}) > 1
    if has_agents:
        table.add_column("agent", overflow="fold")
    previous = 0
    for index, call in enumerate(calls):
        is_end = min(index, len(calls) - 1 - index) < SHOWN_ENDS
        is_near = any(c.compaction for c in calls[max(0, index - 1) : index + 2])
        if not (is_complete or len(calls) < LONG_CALLS or is_end or is_near):
            continue
        if call.number > previous + 1:
            table.add_row("...")
        previous = call.number
        figures = [(getattr(call, name), form) for name, form in COLUMNS.values()]
        cells = ["-" if n is None else format(n, form) for n, form in figures]
        cells += [_describe(call.compaction), *([call.agent] if has_agents else [])]
        table.add_row(
            *(Text(clean_text(console, cell)) for cell in cells),
            style="cyan" if call.compaction else "",
        )
    return table


def _describe(done: CompactionRecord | None) -> str:
    if done is None:
        return ""
    return (
        f"{done.reason}: {done.tokens_before:,} → {done.tokens_after:,} tokens, "
        f"{done.contents_before:,} → {done.contents_after:,} contents"
        f"{', mechanical' if done.is_mechanical else ''}"
    )


def _list_facts(found: dict[str, Any]) -> Iterator[str]:
    """Says in sentences what the replay found."""
    fixed = ", ".join(f"{agent} {n:,}" for agent, n in found["fixed_tokens"].items())
    yield (
        "A recording holds neither instruction nor tools; inferred from its counts, "
        f"in tokens by bytes / 4: {fixed}."
    )
    share = found["saved_tokens"] / max(1, found["tokens_without_guard"])
    accuracy = found["accuracy"] or {}
    for is_true, sentence in (
        (found["uncompared_calls"], UNCOMPARED),
        (accuracy, ACCURACY),
        (not accuracy, "Accuracy: nothing to compare."),
        (True, OVERFLOWS),
        (True, SAVINGS),
    ):
        if is_true:
            yield sentence.format(**{**found, **accuracy, "share": share})


def require_plotting(path: Path) -> None:
    """Fails before the work does, where matplotlib is missing or the format unknown."""
    if importlib.util.find_spec("matplotlib") is None:
        hint = "pip install 'contextguard-adk[plot]'"
        raise CommandError(f"--plot needs the extra: {hint}")
    if path.suffix.lower() not in PLOT_FORMATS:
        raise CommandError(f"{path}: the name must end in {', '.join(PLOT_FORMATS)}")


def save_plot(replayed: Replayed, path: Path) -> None:
    """Draws tokens, threshold and window over the calls, one panel for each agent."""
    from matplotlib.figure import Figure

    agents = list(dict.fromkeys(call.agent for call in replayed.calls))
    figure = Figure(figsize=(9.0, 3.6 * len(agents)), layout="constrained")
    panels = figure.subplots(len(agents), squeeze=False)
    for agent, axes in zip(agents, panels[:, 0], strict=True):
        axes.set_title(agent, loc="left", fontsize=10)
        _draw(axes, [call for call in replayed.calls if call.agent == agent])
    try:
        figure.savefig(path)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CommandError(f"{path}: cannot be written: {reason}") from error


def _draw(axes: Axes, calls: Sequence[ReplayedCall]) -> None:
    numbers = [call.number for call in calls]
    for label, (name, style) in LINES.items():
        # A gap where nothing is known.
        values = [getattr(call, name) or math.nan for call in calls]
        axes.plot(numbers, values, label=label, linewidth=1.5, **style)
    compacted = [call.sent_tokens if call.compaction else math.nan for call in calls]
    axes.plot(
        numbers,
        compacted,
        "v",
        color=LINES["with the guard"][1]["color"],
        label="compaction",
    )
    axes.set_xlabel("model call")
    axes.set_ylabel("prompt tokens")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(fontsize=8, loc="upper left")
