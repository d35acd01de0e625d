"""Compares how long agents wait for summaries, with `ahead` and without.

    python benchmarks/waiting.py [--json FILE] [--scale N ...]

The large texts of `compare` are played in virtual time: nothing sleeps, yet every
answer and every summary takes as long as a real one may. With `--scale N` they are N
times as long, in windows N times as large, with messages and results of the same size.
Scale 8 takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _common, compare
from benchmarks._conversations import SHAPES, Conversation, write_conversation
from benchmarks._play import Delays, Played, Way, play
from contextguard_adk import CompactionRecord, ContextGuardPlugin, Threshold
from contextguard_adk._providers.costs import TYPICAL_COSTS
from contextguard_adk.testing import VirtualTimeLoop

ANSWER_SECONDS = 2.0
SUMMARY_SECONDS = 20.0
SCALES = (1, 8)

WITHOUT = "without"
WAYS: dict[str, float | None] = {
    WITHOUT: None,
    "ahead=True": True,
    "ahead=0.9": 0.9,
    "ahead=0.95": 0.95,
}
"""The settings of `ahead`, by the name of the row."""

HEADER = (
    "",
    "compactions",
    "of them ahead",
    "summaries",
    "waited, s",
    "waited, of without",
    "summaries, of without",
    "cost, of without",
    "minutes",
    "user facts",
    "tool facts",
    "request missing",
    "rejections",
    "broken pairs",
    "turns lost",
)

NOTES = """\
The {count} large texts of compare.py, kept by Threshold with context_window set, in
virtual time: an answer takes {answer:g} s, a summary {summary:g} s, a tool nothing.

without            every compaction has its model call wait for the summary.
ahead=PART         a summary is begun in the background at that part of the trigger;
                   True is 0.75.

of them ahead      compactions that put in a summary which was begun in the background.
summaries          requests for one, those included that were begun ahead and not used.
waited             how long model calls were held up until a compaction was in place:
                   for a whole summary, or for what was left of one begun ahead.
of without         as multiples of the first row.
cost               in uncached prompt tokens, summaries included: one that the cache
                   served costs {cached:g}, one of an answer or a summary {output:g}.
minutes            to the last answers, all conversations added up.
user facts, tool facts, request missing, rejections, broken pairs, turns lost
                   as in compare.py, with its summarizer.

At scale 1 the window has {window:,} tokens. A conversation grows by about 900 with each
call, and without `ahead` about ten calls lie between two compactions: they take as long
as one summary. What comes while a summary is written stays word for word beside it, and
fills half of the window; as much again would come during the next. So the agent cannot
go on all the time, however early a summary is begun: some waiting is left. At scale N
calls are as large, but the window is N times as large: at 4 there is room for most of
what comes during a summary, at 8, a window of 128,000 tokens, for nearly all of it.
"""


@dataclass(frozen=True)
class Timed:
    """One conversation in virtual time, and the compactions in it."""

    played: Played
    compactions: Sequence[CompactionRecord]


def write_scaled(name: str, scale: int, length: float = 1.0) -> Conversation:
    """Writes a conversation of `compare`, longer and in a larger window by a factor.

    Args:
        name: One of `SHAPES`.
        scale: The factor, at least 1.
        length: How much of the conversation; less is for a quick try.
    """
    talk = write_conversation(name, compare.WINDOW_TOKENS, scale * length)
    return replace(
        talk,
        window_tokens=scale * talk.window_tokens,
        configured_tokens=scale * talk.configured_tokens,
    )


def measure(
    names: Collection[str], scale: int, length: float = 1.0
) -> dict[str, list[Timed]]:
    """Plays conversations in all `WAYS`; arguments as for `write_scaled`."""
    talks = [write_scaled(name, scale, length) for name in names]
    tasks = [(ahead, talk) for ahead in WAYS.values() for talk in talks]
    found = iter(_common.map_in_processes(_play_task, tasks))
    return {way: [next(found) for _ in talks] for way in WAYS}


def _play_task(task: tuple[float | None, Conversation]) -> Timed:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(_play(*task))


async def _play(ahead: float | None, talk: Conversation) -> Timed:
    strategy = Threshold(context_window=talk.configured_tokens, ahead=ahead)
    compactions: list[CompactionRecord] = []
    guard = ContextGuardPlugin(default=strategy, on_compaction=compactions.append)
    played = await play(
        talk,
        Way("Threshold", plugins=lambda _: [guard]),
        delays=Delays(ANSWER_SECONDS, SUMMARY_SECONDS),
    )
    return Timed(played, compactions)


def build_figures(timed: Mapping[str, Sequence[Timed]]) -> dict[str, Any]:
    """What is measured at one scale, by way."""
    added = {way: _add_up(found) for way, found in timed.items()}
    base = added[WITHOUT]
    for row in added.values():
        for name in ("waited_seconds", "summaries", "cost_tokens"):
            row[f"{name}_ratio"] = row[name] / base[name] if base[name] else None
    return added


def _add_up(found: Sequence[Timed]) -> dict[str, Any]:
    records = [record for one in found for record in one.compactions]
    row = compare.summarize_way([one.played for one in found])
    return {
        "compactions": len(records),
        "ahead": sum(record.was_ahead for record in records),
        "waited_seconds": sum(record.waited_seconds for record in records),
        "seconds": sum(one.played.seconds for one in found),
        **{name: row[name] for name in row if not name.startswith("ideal")},
    }


def print_figures(figures: Mapping[str, Any], scale: int) -> None:
    """Prints the table of one scale."""
    rows = [[way, *_list_cells(row)] for way, row in figures.items()]
    window_tokens = scale * compare.WINDOW_TOKENS
    title = f"Scale {scale}: windows of {window_tokens:,} tokens"
    _common.print_table(title, HEADER, rows)


def _list_cells(row: Mapping[str, Any]) -> list[object]:
    return [
        row["compactions"],
        row["ahead"],
        row["summaries"],
        round(row["waited_seconds"]),
        row["waited_seconds_ratio"],
        row["summaries_ratio"],
        row["cost_tokens_ratio"],
        round(row["seconds"] / 60),
        row["user_facts"],
        row["tool_facts"],
        row["without_request"],
        row["rejections"],
        row["broken_pairs"],
        row["lost_turns"],
    ]


def main() -> None:
    """Prints a table for each scale, and writes them as JSON where asked."""
    parser = _common.build_parser(__doc__)
    parser.add_argument(
        "--scale", nargs="+", type=int, default=SCALES, metavar="N", help="factors"
    )
    arguments: argparse.Namespace = parser.parse_args()
    _common.quiet()

    figures = {}
    for scale in arguments.scale:
        figures[str(scale)] = build_figures(measure(SHAPES, scale))
        print_figures(figures[str(scale)], scale)

    print(
        NOTES.format(
            count=len(SHAPES),
            answer=ANSWER_SECONDS,
            summary=SUMMARY_SECONDS,
            cached=TYPICAL_COSTS.cached_input,
            output=TYPICAL_COSTS.output,
            window=compare.WINDOW_TOKENS,
        )
    )
    _common.write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
