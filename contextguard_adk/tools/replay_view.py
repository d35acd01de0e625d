"""What `contextguard replay` prints: progress, a table of calls, and the sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from contextguard_adk.tools.replayed import (
    MISS_RATIO,
    Replayed,
    ReplayedCall,
    measure_accuracy,
)
from contextguard_adk.tools.terminal import clean_text, print_whole

LONG_CALLS = 50
"""From so many calls on there is a progress bar, and the table leaves calls out."""

SHOWN_ENDS = 5
"""How many calls a shortened table shows at either end, …"""

SHOWN_BESIDE = 1
"""… and beside each compaction."""

WIDE_COLUMNS = 120

_LEAST_COLUMNS = 20
"""What is left to the text of a compaction on a narrow terminal."""


@contextmanager
def show_progress() -> Iterator[Callable[[int, int], None]]:
    """Shows on a terminal's stderr how far a long replay is."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("replaying", visible=False)

        def advance(done: int, total: int) -> None:
            is_long = total >= LONG_CALLS
            progress.update(task, completed=done, total=total, visible=is_long)

        yield advance


def print_replayed(replayed: Replayed, is_complete: bool) -> None:
    """Prints the calls and what they add up to.

    Args:
        replayed: What to print.
        is_complete: Whether to print every call of a long session.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDE_COLUMNS)
    print_whole(console, _tabulate(console, replayed, is_complete))
    console.print()
    for line in list_facts(replayed):
        console.print(Text(clean_text(console, line)), soft_wrap=True)


def _tabulate(console: Console, replayed: Replayed, is_complete: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    names = ("call", "contents", "estimate", "real", "error", "pressure", "sent")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("compaction", min_width=_LEAST_COLUMNS)
    has_agents = len({call.agent for call in replayed.calls}) > 1
    if has_agents:
        table.add_column("agent", overflow="fold")
    before = 0
    for call in _choose(replayed.calls, is_complete):
        if call.number > before + 1:
            table.add_row("...")
        before = call.number
        cells = [Text(clean_text(console, cell)) for cell in _list_cells(call)]
        table.add_row(
            *cells,
            *([Text(clean_text(console, call.agent))] if has_agents else []),
            style="cyan" if call.compaction else "",
        )
    return table


def _choose(calls: Sequence[ReplayedCall], is_complete: bool) -> Iterator[ReplayedCall]:
    """Yields the calls to show: of a long session the ends and the compactions."""
    if is_complete or len(calls) < LONG_CALLS:
        yield from calls
        return
    wanted = {*range(SHOWN_ENDS), *range(len(calls) - SHOWN_ENDS, len(calls))}
    for index, call in enumerate(calls):
        if call.compaction:
            wanted.update(range(index - SHOWN_BESIDE, index + SHOWN_BESIDE + 1))
    yield from (call for index, call in enumerate(calls) if index in wanted)


def _list_cells(call: ReplayedCall) -> Iterator[str]:
    yield f"{call.number:,}"
    yield f"{call.contents:,}"
    yield _count(call.estimated_tokens)
    yield _count(call.real_tokens)
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


def _count(tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens:,}"


def list_facts(replayed: Replayed) -> Iterator[str]:
    """Says in sentences what the replay came to."""
    fixed = ", ".join(f"{a} {n:,}" for a, n in replayed.fixed_tokens.items())
    yield (
        "A recording holds neither instruction nor tools; inferred from its counts, "
        f"in tokens by bytes / 4: {fixed}."
    )
    if replayed.uncompared:
        yield (
            f"{replayed.uncompared:,} calls were recorded while a guard had changed "
            "the request: their counts are not compared."
        )
    accuracy = measure_accuracy(replayed.calls)
    if accuracy is None:
        yield "Accuracy: nothing to compare."
    else:
        yield (
            f"Accuracy from the second call on: median error "
            f"{accuracy.median_error_ratio:.1%}, p95 {accuracy.p95_error_ratio:.1%}, "
            f"{accuracy.misses:,} of {accuracy.calls:,} estimates more than "
            f"{MISS_RATIO:.0%} too low."
        )
    overflows, guarded_overflows = replayed.count_overflows()
    yield (
        f"Requests over the window: {overflows:,} without the guard, "
        f"{guarded_overflows:,} with it; {replayed.compactions:,} compactions."
    )
    share = replayed.saved_tokens / max(1, replayed.whole_tokens)
    yield (
        f"Prompt tokens: {replayed.whole_tokens:,} without the guard, "
        f"{replayed.sent_tokens:,} with it and {replayed.summary_tokens:,} for "
        f"summaries: {replayed.saved_tokens:,} ({share:.0%}) saved."
    )
