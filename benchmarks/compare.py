"""Compares the ways to keep a conversation inside the window, on the same ones.

    python benchmarks/compare.py [--json FILE] [--window TOKENS] [--seed TEXT]
        [--wording plain] [--only CONVERSATION ...] [--ways WAY ...]
    python benchmarks/compare.py --long [SESSION ...] [--json FILE]

No key and no network is needed: a simulated provider counts by BPE (o200k_base) and
refuses what exceeds its window or separates a call from its result. It writes all
summaries, by extraction, at the same length for everybody. Conversations with large
texts and those with small facts are added up apart.

With `--long` other sessions are played instead: of 600 model calls, in a window of
1,000,000 tokens, with and without `trigger="auto"`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from google.adk.apps.app import EventsCompactionConfig
from google.adk.apps.llm_event_summarizer import LlmEventSummarizer
from google.adk.plugins.context_filter_plugin import ContextFilterPlugin

from benchmarks import _common, _long_sessions
from benchmarks._conversations import (
    SHAPES,
    WORDINGS,
    Conversation,
    total_tokens,
    write_conversation,
)
from benchmarks._play import Played, Way, play
from benchmarks._small_facts import SMALL_FACTS, write_small_facts
from contextguard_adk import ContextGuardPlugin, Pipeline, SlidingWindow, Threshold
from contextguard_adk._measuring.budgets import threshold_tokens
from contextguard_adk._providers.costs import TYPICAL_COSTS
from contextguard_adk.strategies import Strategy, TokenWindow
from contextguard_adk.testing import SimulatedLlm

LARGE_TEXTS = "Large texts"
SMALL = "Small facts"
GROUPS = {LARGE_TEXTS: tuple(SHAPES), SMALL: tuple(SMALL_FACTS)}
"""The conversations, by the title of their tables."""

ALL_CONVERSATIONS = tuple(name for names in GROUPS.values() for name in names)

WINDOW_TOKENS = 16_000
KEPT_INVOCATIONS = 3
NEWEST_TOKENS = 2_000

BASELINE = "ADK compaction, keeps 0"
"""What the tokens are compared with; …"""

EARLY = "ADK compaction, at half"
"""… and once more: ADK compares the last count, so an early threshold suits it."""

HEADER = (
    "",
    "rejections",
    "broken pairs",
    "turns lost",
    "request missing",
    "summaries",
    "billed, k",
    "prefix share",
    "uncached, k",
    "cost, k",
    "user facts",
    "tool facts",
    "behind previews",
    "ideal: user facts",
    "ideal: tool facts",
)


def adk_compaction(name: str, kept_events: int, is_early: bool = False) -> Way:
    """Makes a row of ADK's own compaction."""

    def configure(talk: Conversation, llm: SimulatedLlm) -> dict[str, Any]:
        window_tokens = talk.configured_tokens
        config = EventsCompactionConfig(
            summarizer=LlmEventSummarizer(llm),
            token_threshold=(
                window_tokens // 2 if is_early else threshold_tokens(window_tokens)
            ),
            event_retention_size=kept_events,
        )
        return {"events_compaction_config": config}

    return Way(name, app=configure)


def guard_with(strategy: type[Strategy], name: str = "", **settings: Any) -> Way:
    """Guards with a strategy, all else default."""
    return Way(
        name or strategy.__name__,
        is_ours=True,
        plugins=lambda talk: [
            ContextGuardPlugin(
                default=strategy(context_window=talk.configured_tokens, **settings)
            )
        ],
    )


WAYS = (
    Way("no guard"),
    Way(
        f"ContextFilterPlugin({KEPT_INVOCATIONS})",
        plugins=lambda _: [
            ContextFilterPlugin(num_invocations_to_keep=KEPT_INVOCATIONS)
        ],
    ),
    adk_compaction(BASELINE, 0),
    adk_compaction(EARLY, 0, is_early=True),
    adk_compaction("ADK compaction, keeps 6", 6),
    guard_with(Threshold),
    guard_with(Threshold, "Threshold, at half", trigger=0.5),
    guard_with(Threshold, "Threshold, auto", trigger="auto"),
    guard_with(Threshold, "Threshold, no previews", preview_tokens=None),
    guard_with(Threshold, "Threshold, large previews", preview_tokens=0.2),
    guard_with(SlidingWindow),
    guard_with(Pipeline),
    guard_with(
        Pipeline,
        f"Pipeline, last {NEWEST_TOKENS // 1_000}k",
        window=TokenWindow(budget_tokens=NEWEST_TOKENS),
    ),
)

ALL_WAYS = tuple(way.name for way in WAYS)

AUTO = "Threshold, auto"
LEAST_AUTO_WINDOW_TOKENS = 40_000
"""In a smaller window, "auto" is what it is by default: the threshold."""

OF_PREVIEWS = ("Threshold, no previews", "Threshold, large previews")
"""What differs for large results only."""

NOTES = """\
Large texts      source files, JSON, prose and others; a window of {window:,} tokens,
                 which one conversation takes to be half as large again.
Small facts      a chat of a hundred turns, in which each message and each result
                 states a fact; bookings and receipts between talk; and the tables of a
                 database, which are read once: each column is a fact.

A lost turn bills nothing, so tokens can only be compared where both finish: below.

no guard                 every request goes out as ADK builds it.
ContextFilterPlugin(N)   ADK's plugin; keeps the newest N invocations.
ADK compaction, keeps N  EventsCompactionConfig(token_threshold=ours: 80 % of the
                         window, event_retention_size=N), the same summarizer model.
ADK compaction, at half  the same, keeps 0, token_threshold=half of the window.
Threshold, SlidingWindow, Pipeline
                         this package with context_window set, all else default.
Threshold, at half       the same with trigger=0.5.
Threshold, auto          the same with trigger="auto"; in a window below 40,000 tokens
                         it is the default, and has no row.
Threshold, no previews   the same with preview_tokens=None.
Threshold, large previews
                         the same with preview_tokens=0.2.
Pipeline, last Nk        all default but window=TokenWindow(budget_tokens=N,000): what
                         is older leaves without a summary.

rejections       requests that the provider refused as too long.
broken pairs     requests refused for a call without its result, or the reverse.
turns lost       turns that ended in an error.
request missing  requests in which the user's words of the turn do not stand.
billed           tokens of accepted requests and answers, summaries included.
prefix share     of the agent's prompt tokens, how many one of the four prompts before
                 began with: what a prompt cache serves. It reports that as usage.
uncached         billed, less what the cache served, of calls for summaries as well.
cost             in uncached prompt tokens: one that the cache served costs {cached:g},
                 one of an answer or a summary {output:g}.
facts            of the facts planted in messages and tool results, each with a random
                 identifier, how many stand in the request that carries the last
                 question; none where the provider refused it. The agents never call
                 `recall_history`: nothing is looked up again in the session.
behind previews  of the facts of tools, how many stand in a part of a result that no
                 request showed, and not by name in the last one: the result was
                 shortened on arrival, and one call of `recall_history` shows them.
ideal            facts once more, where the summarizer keeps every one that it is
                 shown: what is lost there, no summarizer could have kept. In all other
                 columns it works by extraction, which favors terse statements with
                 names and numbers, as facts in large texts are worded unless `--wording
                 plain` is set; how it chooses was tried out on these conversations.
                 Small facts stand in plain sentences.
The provider accepts what real ones do not all accept: the "." that LiteLLM puts before
a request that does not begin with the user, as those of ADK's own compaction.
"""


def measure(
    names: Collection[str],
    window_tokens: int,
    ways: Collection[str] = ALL_WAYS,
    **settings: Any,
) -> dict[str, list[Played]]:
    """Plays conversations in several ways.

    Args:
        names: Of `ALL_CONVERSATIONS`.
        window_tokens: The provider's window.
        ways: Names of `WAYS`.
        settings: `length`, `seed` and `wording`, as for `write_conversation`.
    """
    talks = [_write(name, window_tokens, **settings) for name in names]
    tasks = [(way, talk) for way in ways for talk in talks]
    found = iter(_common.map_in_processes(_play_twice, tasks))
    return {way: [next(found) for _ in talks] for way in ways}


def _write(
    name: str,
    window_tokens: int,
    length: float = 1.0,
    seed: str = "",
    wording: str = "reports",
) -> Conversation:
    if name in SMALL_FACTS:
        return write_small_facts(name, window_tokens, length, seed)
    return write_conversation(name, window_tokens, length, seed, wording)


def _play_twice(task: tuple[str, Conversation]) -> Played:
    return asyncio.run(_play_with_ideal(*task))


async def _play_with_ideal(name: str, talk: Conversation) -> Played:
    way = next(way for way in WAYS if way.name == name)
    played = await play(talk, way)
    ideal = await play(talk, way, is_ideal=True) if played.summaries else played
    played.ideal_user_facts = ideal.user_facts
    played.ideal_tool_facts = ideal.tool_facts
    return played


def summarize_way(played: Sequence[Played]) -> dict[str, Any]:
    """Adds up one row of the table."""

    def total(name: str) -> int:
        return sum(getattr(one, name) for one in played)

    def share(found: int, planted: int) -> float | None:
        return found / planted if planted else None

    by_users = sum(len(one.conversation.user_facts) for one in played)
    by_tools = sum(len(one.conversation.tool_facts) for one in played)
    return {
        "rejections": total("rejections"),
        "broken_pairs": total("broken_pairs"),
        "lost_turns": total("lost_turns"),
        "without_request": total("without_request"),
        "summaries": total("summaries"),
        "billed_tokens": total("billed_tokens"),
        "prefix_share": share(total("cached_tokens"), total("prompt_tokens")),
        "uncached_tokens": total("uncached_tokens"),
        "cost_tokens": total("cost_tokens"),
        "user_facts": share(total("user_facts"), by_users),
        "tool_facts": share(total("tool_facts"), by_tools),
        "hidden_facts": share(total("hidden_facts"), by_tools),
        "ideal_user_facts": share(total("ideal_user_facts"), by_users),
        "ideal_tool_facts": share(total("ideal_tool_facts"), by_tools),
    }


def compare_with(
    baseline: Sequence[Played], other: Sequence[Played]
) -> dict[str, Any] | None:
    """Compares tokens on the conversations that both finish; None without one."""
    both = [
        (theirs, ours)
        for theirs, ours in zip(baseline, other, strict=True)
        if theirs.is_finished and ours.is_finished
    ]
    if not both:
        return None
    theirs, ours = (summarize_way(side) for side in zip(*both, strict=True))
    return {
        "conversations": len(both),
        "billed": ours["billed_tokens"] / theirs["billed_tokens"],
        "uncached": ours["uncached_tokens"] / theirs["uncached_tokens"],
        "cost": ours["cost_tokens"] / theirs["cost_tokens"],
        "user_facts": ours["user_facts"],
        "tool_facts": ours["tool_facts"],
    }


def build_figures(played: Mapping[str, Sequence[Played]]) -> dict[str, Any]:
    """Everything that is measured, as it is written to the file."""
    return {
        "ways": {name: summarize_way(found) for name, found in played.items()},
        "against": {
            baseline: {
                name: compare_with(played[baseline], found)
                for name, found in played.items()
            }
            for baseline in (BASELINE, EARLY)
            if baseline in played
        },
        "conversations": {
            one.conversation.name: {
                name: {**summarize_way([found[i]]), "is_finished": found[i].is_finished}
                for name, found in played.items()
            }
            for i, one in enumerate(next(iter(played.values())))
        },
    }


def _in_thousands(name: str, value: Any) -> Any:
    return value // 1_000 if name.endswith("_tokens") else value


def print_figures(title: str, figures: Mapping[str, Any]) -> None:
    """Prints the tables of a group of conversations."""
    ours = {way.name for way in WAYS if way.is_ours}
    rows = [
        [
            f"{name} *" if name in ours else name,
            *(_in_thousands(column, value) for column, value in row.items()),
        ]
        for name, row in figures["ways"].items()
    ]
    _common.print_table(f"{title} (* this package)", HEADER, rows)

    header = ("", "finished by both", "billed", "uncached", "cost", *HEADER[-5:-3])
    for baseline, compared in figures["against"].items():
        rows = [
            [name, *(row.values() if row else [0, *[None] * 5])]
            for name, row in compared.items()
        ]
        against = f"{title}: tokens as multiples of {baseline!r}, where both finish"
        _common.print_table(against, header, rows)


def print_facts(title: str, figures: Mapping[str, Any]) -> None:
    """Prints what is left of the facts of each conversation."""
    header = ("", "user facts", "tool facts", "ideal: user facts", "ideal: tool facts")
    columns = ("user_facts", "tool_facts", "ideal_user_facts", "ideal_tool_facts")
    for name, ways in figures["conversations"].items():
        rows = [[way, *(row[key] for key in columns)] for way, row in ways.items()]
        _common.print_table(f"{title}: {name}", header, rows)


def choose_ways(group: str, window_tokens: int) -> list[str]:
    """Leaves out the ways that are the same as another one."""
    same = list(OF_PREVIEWS) if group == SMALL else []
    if window_tokens < LEAST_AUTO_WINDOW_TOKENS:
        same.append(AUTO)
    return [name for name in ALL_WAYS if name not in same]


def describe_group(group: str, played: Mapping[str, Sequence[Played]]) -> str:
    """Says how much was played."""
    talks = [one.conversation for one in next(iter(played.values()))]
    tokens = sum(total_tokens(talk) for talk in talks)
    return f"{group}: {len(talks)} conversations of {tokens:,} tokens in all"


def main() -> None:
    """Prints the tables, and writes them as JSON where asked."""
    parser = _common.build_parser(__doc__)
    parser.add_argument("--window", type=int, default=WINDOW_TOKENS, metavar="TOKENS")
    parser.add_argument("--seed", default="", help="any text: other conversations")
    parser.add_argument("--wording", choices=WORDINGS, default="reports")
    parser.add_argument(
        "--only", nargs="+", choices=ALL_CONVERSATIONS, default=ALL_CONVERSATIONS
    )
    parser.add_argument("--ways", nargs="+", choices=ALL_WAYS)
    parser.add_argument(
        "--long", nargs="*", choices=_long_sessions.KINDS, help="long sessions instead"
    )
    arguments: argparse.Namespace = parser.parse_args()
    _common.quiet()

    if arguments.long is not None:
        kinds = arguments.long or _long_sessions.KINDS
        figures = _long_sessions.build_figures(_long_sessions.measure(kinds))
        _long_sessions.print_figures(figures)
        _common.write_json(arguments.json, figures)
        return

    found: dict[str, Any] = {}
    for group, names in GROUPS.items():
        chosen = [name for name in names if name in arguments.only]
        if not chosen:
            continue
        played = measure(
            chosen,
            arguments.window,
            arguments.ways or choose_ways(group, arguments.window),
            seed=arguments.seed,
            wording=arguments.wording,
        )
        found[group] = build_figures(played)
        print(describe_group(group, played))
        print_figures(group, found[group])
        if group == SMALL:
            print_facts(group, found[group])

    notes = NOTES.format(
        window=arguments.window,
        cached=TYPICAL_COSTS.cached_input,
        output=TYPICAL_COSTS.output,
    )
    print(notes)
    _common.write_json(arguments.json, found)


if __name__ == "__main__":
    main()
