"""`--all-sessions`: what the guard would have done in each session of a database."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from google.adk.sessions import Session
from rich.console import Console

from contextguard_adk._plugin.plans import plan_strategy
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._providers.costs import Costs, price_calls
from contextguard_adk._providers.registry import resolve_context_window, resolve_costs
from contextguard_adk._tools import recordings, terminal
from contextguard_adk._tools.html_page import write_page
from contextguard_adk._tools.recordings import ListedSession, RecordedCall, SessionKey
from contextguard_adk._tools.replay import ReplaySettings, read_settings, replay_session
from contextguard_adk._tools.replaying.calls import list_calls
from contextguard_adk._tools.replaying.figures import Bill, Replayed, ReplayedCall
from contextguard_adk._tools.terminal import CommandError, number_column
from contextguard_adk.records import format_cost
from contextguard_adk.strategies import Pipeline, SlidingWindow, Threshold

# The figures of an agent in one session, or in several ones, by name.
Row = dict[str, Any]

ROW_NAMES = {"app", "agent", "user", "session"}
PARTS_PER_PROCESS = 8
MAX_REASON_CHARS = 200

# This number of known calls is replayed as well before the first unknown one: from
# their counts the guard learns how many bytes a token has.
REPEATED_CALLS = 3
# A guard's estimates are seldom more than a tenth too high, so a request of this part
# of the threshold is not compacted.
QUIET_RATIO = 0.85

UNSUPPORTED_OPTIONS = ("is_list", "compare", "is_complete")

COLUMNS = {
    "sessions": "{sessions:,}",
    "events": "{events:,}",
    "calls": "{calls:,}",
    "over window": "{over_window:,} → {over_window_guarded:,}",
    "compactions": "{compactions:,}",
    "tokens": "{tokens:,} → {tokens_guarded:,}",
    "cost": "{cost} → {cost_guarded}",
}


def run_fleet(
    source: str,
    key: SessionKey,
    config: str | None,
    as_json: bool,
    output: Path | None = None,
    **options: Any,
) -> None:
    """Replays sessions in several processes; prints their figures by agent.

    If `output` is set, an HTML page with the figures is written to it as well.
    """
    unsupported = [options.pop(name, False) for name in UNSUPPORTED_OPTIONS]
    if any(unsupported):
        raise CommandError("--all-sessions: no --list, --compare or --all")

    settings = ReplaySettings(read_settings(config), **options)
    with terminal.quiet_logs(Console(stderr=True)):
        all_rows = _replay_in_processes(source, key, settings)

    failed = [row for row in all_rows if "failed" in row]
    rows = [row for row in all_rows if "failed" not in row]
    agents = _add_up_agents(rows)
    found = {"agents": agents, "sessions": rows, "failed": failed}

    if output:
        write_page(output, "fleet.html", columns=COLUMNS, show=_format_cells, **found)
    if as_json:
        print(json.dumps(found, indent=2))
        return

    columns: list[Any] = ["app", "agent"]
    columns += [number_column(name) for name in COLUMNS]
    lines = [([row["app"], row["agent"], *_format_cells(row)], "") for row in agents]
    terminal.print_table(columns, lines)
    for row in failed:
        terminal.print_line(" ".join(f"{name} {value}" for name, value in row.items()))
    if output:
        terminal.print_line(f"{output} is written", "bold")


def _replay_in_processes(
    source: str, key: SessionKey, settings: ReplaySettings
) -> list[Row]:
    """Replays the sessions that have the given names, on all CPUs."""
    listed = asyncio.run(recordings.list_sessions(source, key))

    # Many small parts keep all processes busy until the end.
    process_count = os.cpu_count() or 1
    part_count = PARTS_PER_PROCESS * process_count
    parts = [listed[start::part_count] for start in range(part_count)]

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(process_count, context) as pool:
        tasks = [
            pool.submit(_replay_part, source, settings, part) for part in parts if part
        ]
        shown = terminal.show_progress(tasks, "Replaying")
        return [row for task in shown for row in task.result()]


def _format_cells(row: Row) -> list[str]:
    costs = {name: format_cost(row[name]) for name in ("cost", "cost_guarded")}
    return [form.format(**{**row, **costs}) for form in COLUMNS.values()]


def _add_up_agents(rows: list[Row]) -> list[Row]:
    """Returns a row with the sums of each agent; if there are several, one of all."""
    names = itemgetter("app", "agent")
    agents = [
        _add_up(app, agent, list(own))
        for (app, agent), own in groupby(sorted(rows, key=names), names)
    ]
    if len(agents) > 1:
        agents.append(_add_up("all", "", agents))
    return agents


def _add_up(app: str, agent: str, rows: list[Row]) -> Row:
    """Adds up the figures of some rows; a sum is None if one of its summands is."""
    total: Row = {"app": app, "agent": agent}
    figures = [name for name in rows[0] if name not in ROW_NAMES]
    for figure in figures:
        values = [row[figure] for row in rows]
        total[figure] = None if None in values else sum(values)
    return total


def _replay_part(
    source: str, settings: ReplaySettings, part: list[ListedSession]
) -> list[Row]:
    """Replays some sessions in a process of its own; an error becomes a row."""
    with terminal.quiet_logs(Console(stderr=True)):
        return asyncio.run(_replay_all(source, settings, part))


async def _replay_all(
    source: str, settings: ReplaySettings, part: list[ListedSession]
) -> list[Row]:
    """Replays some sessions; returns a row for each agent, or one for an error."""
    rows = list[Row]()
    async with recordings.open_source(source) as opened:
        for each in part:
            names = {"app": each.app, "user": each.user, "session": each.session}
            try:
                session = await opened.load(each)
                measured = await _measure(session, settings)
                rows.extend(names | row for row in measured)
            except Exception as error:  # noqa: BLE001 - of whatever is stored there
                # Other errors than ours may quote the conversation.
                is_ours = isinstance(error, terminal.CommandError)
                reason = str(error) if is_ours else type(error).__name__
                rows.append({**names, "failed": reason[:MAX_REASON_CHARS]})
    return rows


async def _measure(session: Session, settings: ReplaySettings) -> list[Row]:
    """Measures each agent of a session, without and with the guard."""
    calls = list(list_calls(session, settings.agent))
    known = list(_take_as_recorded(session, calls, settings))
    if known and len(known) == len(calls):
        replayed = Replayed(session.id, {}, known, has_cache=True)
    else:
        kept = known[:-REPEATED_CALLS]
        replayed = await replay_session(session, settings, kept)

    rows = list[Row]()
    for agent in dict.fromkeys(call.agent for call in replayed.calls):
        own_calls = [call for call in replayed.calls if call.agent == agent]
        own = replace(replayed, calls=own_calls)
        without = own.without_guard
        guarded = own.with_guard
        row: Row = {
            "agent": agent,
            "sessions": 1,
            "events": sum(1 for event in session.events if event.author == agent),
            "calls": len(own_calls),
            "compactions": guarded.compactions,
        }
        for name in ("over_window", "tokens", "cost"):
            row[name] = getattr(without, name)
            row[f"{name}_guarded"] = getattr(guarded, name)
        rows.append(row)
    return rows


@dataclass(frozen=True)
class _Limits:
    """The window and the prices of an agent's model."""

    window_tokens: int
    quiet_tokens: float  # The guard leaves smaller requests as they are.
    costs: Costs | None


def _take_as_recorded(
    session: Session, calls: list[RecordedCall], settings: ReplaySettings
) -> Iterator[ReplayedCall]:
    """Yields the first calls as recorded, up to the first that a guard might change.

    A replay of these calls would take most of the time and find nothing.
    """
    limits_of = dict[tuple[str, str], _Limits]()
    for number, call in enumerate(calls, 1):
        agent = call.event.author
        model = settings.model or call.event.model_version or ""
        if (agent, model) not in limits_of:
            limits_of[agent, model] = _find_limits(session, settings, agent, model)

        limits = limits_of[agent, model]
        tokens = call.prompt_tokens
        if call.is_guarded or tokens >= limits.quiet_tokens:
            return

        usage = read_usage(call.event.usage_metadata)
        bill = Bill(usage, price_calls([usage], limits.costs))
        yield ReplayedCall(
            number=number,
            agent=agent,
            contents=0,
            estimated_tokens=None,
            real_tokens=tokens,
            whole_tokens=tokens,
            whole_bill=bill,
            window_tokens=limits.window_tokens,
            threshold_tokens=None,
            sent_contents=0,
            sent_tokens=tokens,
            sent_bill=bill,
            compaction=None,
            error_ratio=None,
            pressure=None,
            needed=[],
            missing=[],
        )


def _find_limits(
    session: Session, settings: ReplaySettings, agent: str, model: str
) -> _Limits:
    """Returns the window and the prices that hold for an agent with a model."""
    guard = settings.guard
    strategy: Any = settings.adapt(guard.agents.get(agent, guard.default))
    configured_tokens = getattr(strategy, "context_window", settings.window_tokens)
    window = resolve_context_window(model, configured=configured_tokens)
    window_tokens = window.tokens
    costs = resolve_costs(model, guard.prices, None)
    quiet_tokens = _find_quiet_tokens(session, strategy, window_tokens)
    return _Limits(window_tokens, quiet_tokens, costs)


def _find_quiet_tokens(session: Session, strategy: Any, window_tokens: int) -> float:
    """Returns the prompt tokens below which a strategy surely changes no request.

    Infinity means that it changes no request, 0 that it may change each.
    """
    if not strategy:
        return math.inf
    if type(strategy) not in (Threshold, SlidingWindow, Pipeline):
        return 0.0  # A strategy of the user's own, or a function that chooses one.
    if len(session.events) > getattr(strategy, "max_messages", math.inf):
        return 0.0

    preview = strategy.preview(window_tokens, has_recall=True)
    contents = [event.content for event in session.events if event.content]
    if preview and any(preview(content) for content in contents):
        return 0.0

    # A strategy with `ahead` writes summaries from this part of the threshold on.
    threshold_tokens = plan_strategy(strategy, window_tokens).threshold_tokens
    return QUIET_RATIO * threshold_tokens * (strategy.ahead or 1)
