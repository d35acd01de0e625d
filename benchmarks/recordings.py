"""Plays recorded sessions of real agents, and looks for what they needed next.

    python benchmarks/recordings.py [--only SET ...] [--ways WAY ...] [--json FILE]
        [--settings] [--markdown] [--picture FILE]

No key and no network is needed: what the model and the tools said is recorded, and the
simulated provider of `compare.py` refuses what exceeds its window. The sessions are in
`recordings_data/`, with their sources and licenses.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _common, _recordings_picture, compare
from benchmarks._play import Way, play
from benchmarks._recorded import (
    LEAST_LINE_CHARS,
    RecordedScript,
    Recording,
    read_recording,
)
from contextguard_adk import Pipeline, Threshold
from contextguard_adk._providers.costs import TYPICAL_COSTS
from contextguard_adk.strategies import Strategy, TokenWindow

AIRLINE = ("tau-23-t1", "tau-27-t3", "tau-28-t1", "tau-34-t1")
CUSTOMERS = tuple(f"tau-{task}-t2" for task in (24, 25, 26, 27, 28, 29, 30, 31, 33))

CODE = (
    "pandas-dev__pandas.95280573.pr_53652",
    "pandas-dev__pandas.95280573.pr_53856",
    "pydantic__pydantic.acb0f10f.pr_8316",
    "marshmallow-1867",
    "pydicom-1458",
)


@dataclass(frozen=True)
class RecordedSet:
    """Sessions that are played alike; a table.

    Attributes:
        title: What they are, for the table.
        file: Its name in `recordings_data`.
        names: The recorded sessions: each is one, or all of them are.
    """

    title: str
    file: str
    names: tuple[str, ...]
    window_tokens: int
    is_one_session: bool = False

    def read(self) -> list[Recording]:
        """Reads the sessions that are played."""
        groups = [self.names] if self.is_one_session else [(n,) for n in self.names]
        return [read_recording(self.file, g, self.window_tokens) for g in groups]


_EACH = "each by itself"
_ONE = "one session"
SETS = {
    "airline-8k": RecordedSet(f"4 customers, {_EACH}", "airline", AIRLINE, 8_000),
    "customers-8k": RecordedSet(
        f"9 customers, {_ONE}", "airline", CUSTOMERS, 8_000, True
    ),
    "customers-16k": RecordedSet(
        f"9 customers, {_ONE}", "airline", CUSTOMERS, 16_000, True
    ),
    "code-8k": RecordedSet(f"5 code tasks, {_EACH}", "code", CODE, 8_000),
    "code-16k": RecordedSet(f"5 code tasks, {_EACH}", "code", CODE, 16_000),
    "tasks-16k": RecordedSet(f"5 code tasks, {_ONE}", "code", CODE, 16_000, True),
    "tasks-32k": RecordedSet(f"5 code tasks, {_ONE}", "code", CODE, 32_000, True),
}

_KEEPS_6 = "ADK compaction, keeps 6"
_EARLY = compare.adk_compaction(f"{_KEEPS_6}, at half", 6, is_early=True)
_OTHERS = {way.name: way for way in compare.WAYS}
WAYS = {
    "no guard": _OTHERS["no guard"],
    _KEEPS_6: _OTHERS[_KEEPS_6],
    _EARLY.name: _EARLY,
    **{name: _OTHERS[name] for name in ("Threshold", "SlidingWindow", "Pipeline")},
}

_VARIED: tuple[tuple[type[Strategy], str, dict[str, Any]], ...] = (
    (Threshold, "preview_tokens=0.1", {"preview_tokens": 0.1}),
    (Threshold, "preview_tokens=0.2", {"preview_tokens": 0.2}),
    (Threshold, "keep=0", {"keep": 0}),
    (Threshold, "keep=0.2", {"keep": 0.2}),
    (Pipeline, "newest 0.1", {"window": TokenWindow(budget_tokens=0.1)}),
    (Pipeline, "newest 0.3", {"window": TokenWindow(budget_tokens=0.3)}),
)
SETTINGS = {
    way.name: way
    for way in (
        WAYS["Threshold"],
        WAYS["Pipeline"],
        *(
            compare.guard_with(kind, f"{kind.__name__}, {name}", **settings)
            for kind, name, settings in _VARIED
        ),
    )
}

ALL_WAYS = WAYS | SETTINGS

COUNTS = ("rejections", "lost_turns", "summaries", "cost_tokens")
SUMMED = (
    "lost_turns",
    "needed",
    "missing",
    "needed_far",
    "missing_far",
    "needed_lines",
    "missing_lines",
)
"""What is added up of all sets, beside the cost."""

SUM_HEADER = ("way", "turns lost", "need", "far", "lines", "cost, of keeps 6")
HEADER = (
    "way",
    "rejections",
    "turns lost",
    "summaries",
    "cost, k",
    "need",
    "far",
    "lines",
)

NOTES = """\
* this package, with context_window set and all else default. ADK's rows: as in
compare.py; `keeps N` is event_retention_size.

The model says and calls what it did in the recording, whatever stands in its request.

rejections  requests that the provider refused as too long.
turns lost  turns that ended in an error.
summaries   requests for one. They are answered by extraction, as in compare.py.
cost        in uncached prompt tokens, summaries included: one that the prompt cache
            served costs {cached:g}, one of an answer or a summary {output:g}. A lost
            turn costs little: compare only rows that lose none. That of all sets is
            of those in which neither `keeps 6` nor this package loses a turn.
need        of the ids, numbers, names and paths in the tool calls that stood before in
            the session, and neither in the instruction nor in the declarations of the
            tools: the share that stands word for word in the request just before the
            call. Without a limit it is 1. In a lost turn, what was not reached misses.
far         the same, of values that last stood more than half a window back.
lines       the same, of the whole lines in the tool calls, of {line_chars} and more
            characters: an edit repeats lines of the file that it changes.

Need, far and lines say what stands in the request, not whether a model would use it.

`recall_history` is never called: a real agent looks up some of what is missing.
"""


def measure(
    sets: Collection[str] = tuple(SETS), ways: Collection[str] = tuple(WAYS)
) -> dict[str, Any]:
    """Plays sets, by their names, in several ways."""
    talks = {name: SETS[name].read() for name in sets}
    tasks = [(way, talk) for name in sets for way in ways for talk in talks[name]]
    found = iter(_common.map_in_processes(_play_task, tasks))
    return {
        name: {
            "title": f"{SETS[name].title}, window {SETS[name].window_tokens:,}",
            "turns": sum(len(talk.turns) for talk in talks[name]),
            "ways": {way: add_up([next(found) for _ in talks[name]]) for way in ways},
        }
        for name in sets
    }


def _play_task(task: tuple[str, Recording]) -> dict[str, int]:
    return asyncio.run(play_recording(task[1], ALL_WAYS[task[0]]))


async def play_recording(recording: Recording, way: Way) -> dict[str, int]:
    """Plays a recording one way; returns what can be added up."""
    script = RecordedScript(recording)
    played = await play(recording, way, script=script)
    row = {name: getattr(played, name) for name in COUNTS}
    for name, values in ("needed", script.needed), ("missing", script.missing):
        row[name] = sum(len(each) for each in values.values())
        row[f"{name}_far"] = sum(each.is_far for v in values.values() for each in v)
    row["needed_lines"] = sum(len(lines) for lines in script.lines.values())
    row["missing_lines"] = sum(len(lines) for lines in script.missing_lines.values())
    return row


def add_up(found: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Adds up one row of a table."""
    row: dict[str, Any] = {key: sum(one[key] for one in found) for key in found[0]}
    for name, end in ("need", ""), ("far", "_far"), ("lines", "_lines"):
        needed = row[f"needed{end}"]
        missing = row[f"missing{end}"]
        row[name] = 1 - missing / needed if needed else None
    return row


def add_up_sets(figures: Mapping[str, Any]) -> tuple[int, list[list[object]]]:
    """Adds up all sets.

    Returns:
        In how many sets neither `_KEEPS_6` nor this package loses a turn; and rows for
        `SUM_HEADER`, whose cost is that of these sets.
    """
    groups = [group["ways"] for group in figures.values()]
    names = list(groups[0])
    compared = [name for name in names if name == _KEEPS_6 or ALL_WAYS[name].is_ours]
    finished = []
    for ways in groups:
        if not any(ways[name]["lost_turns"] for name in compared):
            finished.append(ways)

    rows: list[list[object]] = []
    for name in names:
        row = add_up([{key: ways[name][key] for key in SUMMED} for ways in groups])
        shares = [row["lost_turns"], row["need"], row["far"], row["lines"]]
        rows.append([_spell_way(name), *shares, _compare_cost(name, finished)])
    return len(finished), rows


def _compare_cost(name: str, finished: Sequence[Mapping[str, Any]]) -> float | None:
    """The cost as a multiple of `_KEEPS_6`; None for a way that loses a turn there."""
    if not finished or _KEEPS_6 not in finished[0]:
        return None
    if any(ways[name]["lost_turns"] for ways in finished):
        return None
    cost_tokens: int = sum(ways[name]["cost_tokens"] for ways in finished)
    base_tokens: int = sum(ways[_KEEPS_6]["cost_tokens"] for ways in finished)
    return cost_tokens / base_tokens


def _spell_way(name: str) -> str:
    return f"{name} *" if ALL_WAYS[name].is_ours else name


def print_figures(figures: Mapping[str, Any], is_markdown: bool) -> None:
    """Prints a table of all sets and one of each, also in the form of the docs."""
    show = _common.print_markdown if is_markdown else _common.print_table
    finished, sums = add_up_sets(figures)
    title = f"All {len(figures)} sets; cost of {finished} of them"
    show(title, SUM_HEADER, sums)

    for group in figures.values():
        first = next(iter(group["ways"].values()))
        values = f"{first['needed']} values ({first['needed_far']} far)"
        lines = f"{first['needed_lines']} lines"
        title = f"{group['title']}: {group['turns']} turns, {values}, {lines}"
        rows = [
            [
                _spell_way(name),
                *(row[count] for count in COUNTS[:-1]),
                row["cost_tokens"] // 1_000,
                row["need"],
                row["far"],
                row["lines"],
            ]
            for name, row in group["ways"].items()
        ]
        show(title, HEADER, rows)

    if not is_markdown:
        notes = NOTES.format(
            cached=TYPICAL_COSTS.cached_input,
            output=TYPICAL_COSTS.output,
            line_chars=LEAST_LINE_CHARS,
        )
        print(notes)


def main() -> None:
    """Prints the tables, and writes them and the picture where asked."""
    parser = _common.build_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SETS, default=[*SETS])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument(
        "--settings", action="store_true", help="other settings in place of other ways"
    )
    parser.add_argument("--markdown", action="store_true", help="tables for the docs")
    parser.add_argument("--picture", type=Path, help="where to draw `need`, as SVG")
    arguments: argparse.Namespace = parser.parse_args()
    _common.quiet()
    ways = SETTINGS if arguments.settings else arguments.ways
    figures = measure(arguments.only, tuple(ways))
    print_figures(figures, arguments.markdown)
    _common.write_json(arguments.json, figures)
    if arguments.picture:
        drawn = _recordings_picture.draw(figures)
        arguments.picture.write_text(drawn, "utf-8")


if __name__ == "__main__":
    main()
