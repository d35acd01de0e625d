"""What a replay found: its figures, as JSON, as a table, and as a drawing."""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from contextguard_adk.telemetry import CompactionRecord
from contextguard_adk.tools.terminal import CommandError, clean_text, print_line

COLUMNS = {
    "call": ("number", ","),
    "contents": ("contents", ","),
    "estimate": ("estimated_tokens", ","),
    "real": ("real_tokens", ","),
    "error": ("error_ratio", "+.1%"),
    "pressure": ("pressure", ".0%"),
    "sent": ("sent_tokens", ","),
}

LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "without the guard": ("whole_tokens", {"color": "#999999"}),
    "with the guard": ("sent_tokens", {"color": "#1f77b4"}),
    "threshold": ("threshold_tokens", {"color": "#ff7f0e", "linestyle": "--"}),
    "window": ("window_tokens", {"color": "#d62728", "linestyle": "--"}),
}

SUMS = """\
Requests over the window: {over_window_without_guard:,} without the guard, \
{over_window_with_guard:,} with it; {compactions:,} compactions.
Prompt tokens: {tokens_without_guard:,} without the guard, {tokens_with_guard:,} \
with it and {summary_tokens:,} for summaries: {saved_tokens:,} ({share:.0%}) saved."""


@dataclass(frozen=True)
class ReplayedCall:
    """One model call, as it was recorded and as it would have been."""

    number: int
    agent: str
    contents: int
    estimated_tokens: int | None
    real_tokens: int | None
    whole_tokens: int  # The real count or, without one, scaled from calls before.
    window_tokens: int | None
    threshold_tokens: int | None
    sent_contents: int
    sent_tokens: int
    compaction: CompactionRecord | None
    error_ratio: float | None  # Of the estimate, against the real count.
    pressure: float | None  # The estimate of the whole request / window.


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
    console, calls = Console(highlight=False), replayed.calls
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("compaction", min_width=20)
    has_agents = len({call.agent for call in calls}) > 1
    if has_agents:
        table.add_column("agent", overflow="fold")
    previous = 0
    for index, call in enumerate(calls):
        is_end = min(index, len(calls) - 1 - index) < 5
        is_near = any(c.compaction for c in calls[max(0, index - 1) : index + 2])
        if not (is_complete or len(calls) < 50 or is_end or is_near):
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
    unbounded = console.options.update(max_width=10_000)
    wanted_columns = Measurement.get(console, unbounded, table)
    # No number is cut, whatever the terminal.
    columns = console.width if console.is_terminal else 120
    console.width = max(columns, wanted_columns.minimum)
    console.print(table)
    print_line(console, "")
    for line in _list_facts(replayed.to_json()):
        print_line(console, line)


def _describe(done: CompactionRecord | None) -> str:
    if done is None:
        return ""
    tokens = f"{done.tokens_before:,} → {done.tokens_after:,} tokens"
    contents = f"{done.contents_before:,} → {done.contents_after:,} contents"
    end = ", mechanical" if done.is_mechanical else ""
    return f"{done.reason}: {tokens}, {contents}{end}"


def _list_facts(found: dict[str, Any]) -> Iterator[str]:
    """Says in sentences what the replay found."""
    fixed = ", ".join(f"{agent} {n:,}" for agent, n in found["fixed_tokens"].items())
    yield f"Instruction and tools, inferred from the counts, in bytes / 4: {fixed}."
    if count := found["uncompared_calls"]:
        yield f"{count:,} calls, changed by a guard when recorded, are not compared."
    if accuracy := found["accuracy"]:
        yield (
            "Accuracy from the second call on: median error "
            f"{accuracy['median_error_ratio']:.1%}, p95 "
            f"{accuracy['p95_error_ratio']:.1%}, {accuracy['misses']:,} of "
            f"{accuracy['calls']:,} estimates more than 10% too low."
        )
    else:
        yield "Accuracy: nothing to compare."
    share = found["saved_tokens"] / max(1, found["tokens_without_guard"])
    yield from SUMS.format(**found, share=share).splitlines()


def require_plotting(path: Path) -> None:
    """Fails before the work does, where matplotlib is missing or the format unknown."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs: pip install 'contextguard-adk[plot]'")
    if path.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise CommandError(f"{path}: the name must end in .svg, .png, .pdf")


def save_plot(replayed: Replayed, path: Path) -> None:
    """Draws tokens, threshold and window over the calls, one panel for each agent."""
    from matplotlib.figure import Figure

    agents = list(dict.fromkeys(call.agent for call in replayed.calls))
    figure = Figure(figsize=(9.0, 3.6 * len(agents)), layout="constrained")
    panels = figure.subplots(len(agents), squeeze=False)
    for agent, axes in zip(agents, panels[:, 0], strict=True):
        calls = [call for call in replayed.calls if call.agent == agent]
        numbers = [call.number for call in calls]
        for label, (name, style) in LINES.items():
            # A gap where nothing is known.
            values = [getattr(call, name) or math.nan for call in calls]
            axes.plot(numbers, values, label=label, linewidth=1.5, **style)
        compacted = [c.sent_tokens if c.compaction else math.nan for c in calls]
        axes.plot(numbers, compacted, "v", color="#1f77b4", label="compaction")
        axes.set_title(agent, loc="left", fontsize=10)
        axes.set(xlabel="model call", ylabel="prompt tokens", ylim=(0, None))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.legend(fontsize=8, loc="upper left")
    try:
        figure.savefig(path)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CommandError(f"{path}: cannot be written: {reason}") from error
