"""Measures what the guard adds to a model call: time, memory, import.

    python benchmarks/overhead.py [--json FILE] [--sizes N ...] [--pairs N]

A turn of four model calls, three of which call a tool, is run by turns without and with
the guard, in one process, on sessions of the same contents: processor time, garbage
collector off, medians. The model answers at once, and the sessions are in ADK's
`InMemorySessionService`, the fastest that it has, so that nothing but ADK's own work
stands beside the guard's. That service copies the whole session for each turn; a second
ratio leaves out the time that this takes, on both sides. Each turn is taken out of the
session again. A third ratio is that of the first turn that a process sees of a session.

Memory is traced in turns of their own: the most that was held in the second of two,
once the session was loaded and with the collector off as well, of all that they
allocated, and what is still held of that in the end.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from rich.progress import track

from benchmarks import _common
from benchmarks._turns import NEARLY_FULL, RESULT_CHARS, Chat, make_pair

SIZES = (10, 100, 1_000, 5_000)
PAIRS = 30
IMPORTS = 7

KINDS = {
    "text": "text, below the threshold",
    "languages": "text in German, Spanish, Russian, Arabic, Hindi",
    "tools": f"every second content {RESULT_CHARS // 1_000} KB of nested JSON",
    f"tools, {NEARLY_FULL}": "the same, just below the threshold",
    "summary": "text, a stored summary covers half",
    "tools, summary": "nested JSON, a stored summary covers half",
}
GOALS = {("text", 1_000): 1.06, ("tools", 1_000): 1.20}
IMPORT_GOAL_MS = 50


@dataclass
class Times:
    """What turns with or without the guard took, each in milliseconds.

    Attributes:
        whole_ms: Each turn.
        loading_ms: Of it, loading the session.
        first_ms: Each turn that is the first one of its process.
    """

    whole_ms: list[float] = field(default_factory=list)
    loading_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)

    def add(self, whole_ms: float, loading_ms: float) -> None:
        """Adds a turn."""
        self.whole_ms.append(whole_ms)
        self.loading_ms.append(loading_ms)

    @property
    def call_ms(self) -> list[float]:
        """Each turn without loading the session."""
        both_ms = zip(self.whole_ms, self.loading_ms, strict=True)
        return [whole_ms - loading_ms for whole_ms, loading_ms in both_ms]


async def time_pairs(kind: str, count: int, pairs: int) -> dict[str, float]:
    """Runs turns without and with the guard by turns."""
    chats = await make_pair(kind, count)
    for chat in chats:
        await chat.turn()

    bare = Times()
    guarded = Times()
    sides = [(bare, chats[0]), (guarded, chats[1])]
    gc.collect()
    gc.freeze()
    for number in range(pairs):
        order = sides if number % 2 else sides[::-1]
        for times, chat in order:
            times.add(*await _time(chat))
        if number % 3 == 0:
            for times, chat in order:
                first_ms, _ = await _time(await chat.make_anew())
                times.first_ms.append(first_ms)
    gc.unfreeze()

    both_ms = zip(bare.whole_ms, guarded.whole_ms, strict=True)
    added_ms = statistics.median(
        guarded_ms - bare_ms for bare_ms, guarded_ms in both_ms
    )
    return {
        "adk_ms": statistics.median(bare.whole_ms),
        "adk_loading_ms": statistics.median(bare.loading_ms),
        "added_ms": added_ms,
        "ratio": _ratio(bare.whole_ms, guarded.whole_ms),
        "ratio_without_loading": _ratio(bare.call_ms, guarded.call_ms),
        "ratio_of_first_turn": _ratio(bare.first_ms, guarded.first_ms),
        "added_us_per_content": 1_000 * added_ms / count,
        **await measure_memory(chats),
    }


async def _time(chat: Chat) -> tuple[float, float]:
    gc.collect()
    gc.disable()
    times = await chat.timed_turn()
    gc.enable()
    return times


def _ratio(bare_ms: list[float], guarded_ms: list[float]) -> float:
    """The median over pairs: the machine is as fast for one turn as for the next."""
    pairs = zip(bare_ms, guarded_ms, strict=True)
    return statistics.median(guarded / bare for bare, guarded in pairs)


async def measure_memory(chats: tuple[Chat, Chat]) -> dict[str, float]:
    """The most that a turn holds at once, and what stays of it, without and with."""
    peaks = []
    kept = []
    for chat in chats:
        await chat.turn()  # The first turn of all imports modules.
        gc.collect()
        tracemalloc.start()
        # What this turn replaces was allocated untraced, and frees nothing.
        await chat.turn()

        found = []
        for _ in range(2):  # What else the process does at that moment is chance.
            gc.collect()
            gc.disable()  # Whether it comes before the peak or after it is, too.
            tracemalloc.reset_peak()
            await chat.turn()
            gc.enable()
            found.append(tracemalloc.get_traced_memory()[1])

        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        peaks.append(min(found))
        kept.append(after)

    return {
        "adk_peak_kb": peaks[0] / 1_024,
        "guard_peak_kb": (peaks[1] - peaks[0]) / 1_024,
        "peak_ratio": peaks[1] / peaks[0],
        "adk_kept_kb": kept[0] / 1_024,
        "kept_kb": (kept[1] - kept[0]) / 1_024,
    }


_IMPORT = """
import gc, time
gc.disable()  # Whether it runs in one import or the other is chance.
started = time.process_time()
import google.adk.agents, google.adk.apps, google.adk.plugins, google.adk.runners
import google.adk.sessions
between = time.process_time()
import contextguard_adk
print(between - started, time.process_time() - between)
"""


def time_imports(repeats: int = IMPORTS) -> tuple[float, float]:
    """Measures importing ADK, and what the plugin adds to it, in milliseconds."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    found: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _IMPORT],
            cwd=Path(__file__).parent.parent,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        adk, ours = (float(seconds) for seconds in done.stdout.split())
        found.append((adk, ours))

    del found[0]  # It may have compiled.
    return tuple(1_000 * statistics.median(side) for side in zip(*found, strict=True))


async def measure(
    sizes: Sequence[int], pairs: int, kinds: Sequence[str] = (*KINDS,)
) -> dict[str, Any]:
    """Measures kinds of history at every size."""
    cases = [(kind, size) for kind in kinds for size in sizes]
    shown = track(cases, "timing", transient=True, disable=not sys.stderr.isatty())

    rows = []
    for kind, size in shown:
        # Large sessions take seconds a turn, and vary less.
        count = pairs if size <= 1_000 else max(3, pairs // 3)
        figures = await time_pairs(kind, size, count)
        goal = GOALS.get((kind, size))
        rows.append({"kind": kind, "contents": size, **figures, "goal": goal})

    return {"calls": rows}


def print_figures(figures: dict[str, Any]) -> None:
    """Prints the tables."""
    rows = figures["calls"]
    times = [
        [
            KINDS[row["kind"]],
            row["contents"],
            *(f"{row[name]:.2f}" for name in ("adk_ms", "adk_loading_ms", "added_ms")),
            row["ratio"],
            f"≤ {row['goal']:.2f}" if row["goal"] else "",
            row["ratio_without_loading"],
            row["ratio_of_first_turn"],
            f"{row['added_us_per_content']:.1f}",
        ]
        for row in rows
    ]
    header = (
        "history",
        "contents",
        "ADK, ms",
        "of that, loading",
        "guard adds, ms",
        "ratio",
        "goal",
        "without loading",
        "first turn",
        "added µs a content",
    )
    imported = (
        f"Importing contextguard_adk adds {figures['import_ms']:.0f} ms to the "
        f"{figures['import_adk_ms']:.0f} ms of ADK (goal: at most "
        f"{IMPORT_GOAL_MS})."
    )
    _common.print_table("Processor time of one model call", header, times, imported)

    memory = [
        [
            KINDS[row["kind"]],
            row["contents"],
            *(f"{row[name]:,.0f}" for name in ("adk_peak_kb", "guard_peak_kb")),
            row["peak_ratio"],
            *(f"{row[name]:,.1f}" for name in ("adk_kept_kb", "kept_kb")),
        ]
        for row in rows
    ]
    memory_header = (
        "history",
        "contents",
        "ADK's peak, KB",
        "guard adds, KB",
        "ratio",
        "ADK keeps, KB",
        "guard keeps, KB",
    )
    _common.print_table("Memory of one turn", memory_header, memory)


def main() -> None:
    """Prints the tables, and writes them as JSON where asked."""
    parser = _common.build_parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N")
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N")
    arguments = parser.parse_args()
    _common.quiet()
    figures = asyncio.run(measure(arguments.sizes, arguments.pairs))
    figures["import_adk_ms"], figures["import_ms"] = time_imports()
    print_figures(figures)
    _common.write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
