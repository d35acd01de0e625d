"""`--all-sessions`: what the guard would have done in each session of a database."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
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

Row = dict[str, Any]

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
    """Replays sessions in several processes; prints a table, and writes a page."""
    others = {"is_list", "compare", "is_complete"} & options.keys()
    if any({name: options.pop(name) for name in others}.values()):
        raise CommandError("--all-sessions: no --list, --compare or --all")
    settings = ReplaySettings(read_settings(config), **options)
    with terminal.quiet_logs(Console(stderr=True)):
        listed = asyncio.run(recordings.list_sessions(source, key))
        count = os.cpu_count() or 1
        step = 8 * count
        parts = [part for n in range(step) if (part := listed[n::step])]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(count, context) as pool:
            tasks = [pool.submit(_replay_part, source, settings, p) for p in parts]
            shown = terminal.show_progress(tasks, "Replaying")
            done = [row for task in shown for row in task.result()]
    failed = [row for row in done if "failed" in row]
    rows = [row for row in done if "failed" not in row]
    names = itemgetter("app", "agent")
    by_agent = groupby(sorted(rows, key=names), names)
    agents = [_add_up(app, agent, [*own]) for (app, agent), own in by_agent]
    agents += [_add_up("all", "", agents)] if len(agents) > 1 else []
    found = {"agents": agents, "sessions": rows, "failed": failed}
    if output:
        write_page(output, "fleet.html", columns=COLUMNS, show=_show, **found)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    columns: list[Any] = ["app", "agent", *map(number_column, COLUMNS)]
    lines = [([row["app"], row["agent"], *_show(row)], "") for row in agents]
    terminal.print_table(columns, lines)
    for row in failed:
        terminal.print_line(" ".join(f"{name} {value}" for name, value in row.items()))
    if output:
        terminal.print_line(f"{output} is written", "bold")


def _show(row: Row) -> list[str]:
    costs = {name: format_cost(row[name]) for name in ("cost", "cost_guarded")}
    return [form.format(**{**row, **costs}) for form in COLUMNS.values()]


def _add_up(app: str, agent: str, rows: list[Row]) -> Row:
    """Adds up figures; None where one of the summands is unknown."""
    total: Row = {"app": app, "agent": agent}
    for name in rows[0].keys() - {"app", "agent", "user", "session"}:
        values = [row[name] for row in rows]
        total[name] = None if None in values else sum(values)
    return total


def _replay_part(
    source: str, settings: ReplaySettings, part: list[ListedSession]
) -> list[Row]:
    """Replays some sessions, in a process of its own; an error is a row of its own."""
    with terminal.quiet_logs(Console(stderr=True)):
        return asyncio.run(_replay_all(source, settings, part))


async def _replay_all(
    source: str, settings: ReplaySettings, part: list[ListedSession]
) -> list[Row]:
    rows = list[Row]()
    async with recordings.open_source(source) as found:
        for each in part:
            names = {"app": each.app, "user": each.user, "session": each.session}
            try:
                measured = await _measure(await found.load(each), settings)
                rows.extend(names | row for row in measured)
            except Exception as error:  # noqa: BLE001 - of whatever is stored there
                # What is wrong with stored values quotes them.
                is_ours = isinstance(error, terminal.CommandError)
                said = str(error) if is_ours else type(error).__name__
                rows.append({**names, "failed": said[:200]})
    return rows


async def _measure(session: Session, settings: ReplaySettings) -> list[Row]:
    """Measures what each agent of a session takes, without and with the guard."""
    calls = list(list_calls(session, settings.agent))
    known = list(_take_as_recorded(session, calls, settings))
    replayed = Replayed(session.id, {}, known, has_cache=True)
    if not known or len(known) < len(calls):
        # Three more calls tell the guard how large tokens are.
        replayed = await replay_session(session, settings, known[:-3])
    rows = list[Row]()
    for agent in dict.fromkeys(call.agent for call in replayed.calls):
        own = [call for call in replayed.calls if call.agent == agent]
        found = replace(replayed, calls=own)
        without = found.without_guard
        guarded = found.with_guard
        events = sum(event.author == agent for event in session.events)
        row: Row = {"agent": agent, "sessions": 1, "events": events, "calls": len(own)}
        row["compactions"] = guarded.compactions
        for name in ("over_window", "tokens", "cost"):
            row[name] = getattr(without, name)
            row[f"{name}_guarded"] = getattr(guarded, name)
        rows.append(row)
    return rows


def _take_as_recorded(
    session: Session, calls: list[RecordedCall], settings: ReplaySettings
) -> Iterator[ReplayedCall]:
    """Takes the first calls as they are: those for which the guard has nothing to do.

    To replay them takes nearly all the time.
    """
    limits = dict[tuple[str, str], tuple[int, float, Costs | None]]()
    for number, call in enumerate(calls, 1):
        agent = call.event.author
        tokens = call.prompt_tokens
        name = agent, settings.model or call.event.model_version or ""
        if name not in limits:
            limits[name] = _find_limits(session, settings, *name)
        window_tokens, quiet_tokens, costs = limits[name]
        if call.is_guarded or tokens >= quiet_tokens:
            return
        usage = read_usage(call.event.usage_metadata)
        bill = Bill(usage, price_calls([usage], costs))
        before = (number, agent, 0, None, tokens, tokens, bill, window_tokens)
        yield ReplayedCall(*before, None, 0, tokens, bill, None, None, None, [], [])


def _find_limits(
    session: Session, settings: ReplaySettings, agent: str, model: str
) -> tuple[int, float, Costs | None]:
    """Finds the window, below what size the guard does nothing, and the prices."""
    guard = settings.guard
    strategy: Any = settings.adapt(guard.agents.get(agent, guard.default))
    fixed = getattr(strategy, "context_window", settings.window_tokens)
    window_tokens = resolve_context_window(model, configured=fixed).tokens
    costs = resolve_costs(model, guard.prices, None)
    quiet_tokens = 0.0 if strategy else math.inf
    if type(strategy) in (Threshold, SlidingWindow, Pipeline):
        most = getattr(strategy, "max_messages", math.inf)
        preview = strategy.preview(window_tokens, has_recall=True) or (lambda _: None)
        contents = [event.content for event in session.events]
        if len(contents) <= most and not any(map(preview, filter(None, contents))):
            planned = plan_strategy(strategy, window_tokens)
            # Estimates are seldom more than a tenth too high.
            quiet_tokens = 0.85 * planned.threshold_tokens * (strategy.ahead or 1)
    return window_tokens, quiet_tokens, costs
