"""`--all-sessions`: what the guard would have done in each session of a database.

A replay makes the recorded model calls again, offline, with a guard. The sessions are
replayed in several processes. The requests of most calls are far below the threshold,
so the guard changes nothing in them. The figures of such calls are taken from the
recording without a replay.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
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

# The figures of an agent in one session, or in several sessions, by name. The row of a
# session that cannot be replayed has no figures, but the reason as "failed".
Row = dict[str, Any]

# The items of a row that are no figures.
ROW_NAMES = {"app", "agent", "user", "session"}
BATCHES_PER_PROCESS = 8
MAX_REASON_CHARS = 200

# Before the first call that a guard may change, this number of calls is replayed, too.
# From their counts the guard learns how many bytes of this session make a token.
REPEATED_CALLS = 3
# The guard compares its estimate of a request with the threshold. An estimate is seldom
# more than a tenth too high, so a request below this part of the threshold stays whole.
QUIET_RATIO = 0.85

# Options of `replay` and `report` that cannot be used with `--all-sessions`.
UNSUPPORTED_OPTIONS = ("is_list", "compare", "is_complete")

# By the head of a column, the format of its cells. The arrow leads from the figure
# without the guard to that with it.
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
    """Replays all sessions of a database, and prints their figures by agent.

    Args:
        source: The database.
        key: The names that the sessions must have; None in it allows any name.
        config: The path of a settings file; None for the built-in settings.
        as_json: Whether JSON is printed. It has the figures of each session, too.
        output: The HTML page to write; None for none.
        options: The other fields of `ReplaySettings`, and `UNSUPPORTED_OPTIONS`. An
            unsupported option with a true value is an error.
    """
    unsupported_values = [options.pop(name, False) for name in UNSUPPORTED_OPTIONS]
    if any(unsupported_values):
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
    else:
        _print_agents(agents, failed)
        if output:
            terminal.print_line(f"{output} is written", "bold")


def _print_agents(agents: list[Row], failed: list[Row]) -> None:
    """Prints a table of agents, and a line on each session that was not replayed.

    `failed` are the rows of these sessions.
    """
    columns: list[Any] = ["app", "agent"]
    columns += [number_column(name) for name in COLUMNS]
    no_style = ""
    styled_rows = list[tuple[list[str], str]]()
    for row in agents:
        cells = [row["app"], row["agent"], *_format_cells(row)]
        styled_rows.append((cells, no_style))
    terminal.print_table(columns, styled_rows)

    for row in failed:
        terminal.print_line(" ".join(f"{name} {value}" for name, value in row.items()))


def _format_cells(row: Row) -> list[str]:
    """Returns a cell for each of `COLUMNS`, such as "1,200 → 800"."""
    costs = {name: format_cost(row[name]) for name in ("cost", "cost_guarded")}
    figures = {**row, **costs}
    return [form.format(**figures) for form in COLUMNS.values()]


def _replay_in_processes(
    source: str, key: SessionKey, settings: ReplaySettings
) -> list[Row]:
    """Replays the sessions that have the names of `key`, on all CPUs."""
    listed = asyncio.run(recordings.list_sessions(source, key))

    # Many small batches keep all processes busy until the end. Sessions that are
    # neighbors in the list may be long or short together, so each goes to another
    # batch. With two batches: [1 2 3 4 5] -> [1 3 5], [2 4]
    process_count = os.cpu_count() or 1
    batch_count = BATCHES_PER_PROCESS * process_count
    batches = [listed[first::batch_count] for first in range(batch_count)]

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(process_count, context) as pool:
        tasks = [
            pool.submit(_replay_batch, source, settings, batch)
            for batch in batches
            if batch  # There may be fewer sessions than batches.
        ]
        rows = list[Row]()
        for task in terminal.show_progress(tasks, "Replaying"):
            rows += task.result()
        return rows


def _replay_batch(
    source: str, settings: ReplaySettings, batch: list[ListedSession]
) -> list[Row]:
    """Replays some sessions in a process of its own."""
    with terminal.quiet_logs(Console(stderr=True)):
        return asyncio.run(_replay_sessions(source, settings, batch))


async def _replay_sessions(
    source: str, settings: ReplaySettings, batch: list[ListedSession]
) -> list[Row]:
    """Replays some sessions; returns a row for each agent of each session.

    A session that cannot be replayed has one row, with the reason.
    """
    rows = list[Row]()
    async with recordings.open_source(source) as opened:
        for listed in batch:
            names = {"app": listed.app, "user": listed.user, "session": listed.session}
            try:
                session = await opened.load(listed)
                agent_rows = await _measure(session, settings)
                rows += [names | row for row in agent_rows]
            except Exception as error:  # noqa: BLE001 - a stored event may be anything
                # The text of any other error may quote the conversation.
                is_ours = isinstance(error, CommandError)
                reason = str(error) if is_ours else type(error).__name__
                rows.append({**names, "failed": reason[:MAX_REASON_CHARS]})
    return rows


def _add_up_agents(rows: list[Row]) -> list[Row]:
    """Returns a row of sums for each agent, sorted by app and agent.

    If there are several agents, one more row with the sums of all agents follows.
    """
    rows_by_agent: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        rows_by_agent.setdefault((row["app"], row["agent"]), []).append(row)

    agents = list[Row]()
    for app, agent in sorted(rows_by_agent):
        agents.append(_add_up(app, agent, rows_by_agent[app, agent]))
    if len(agents) > 1:
        agents.append(_add_up("all", "", agents))
    return agents


def _add_up(app: str, agent: str, rows: list[Row]) -> Row:
    """Returns a row with the sum of each figure of some rows, at least one.

    A figure is None if it is unknown, such as a cost. A sum with an unknown figure is
    unknown.

    Args:
        app: The app of the new row.
        agent: The agent of the new row.
        rows: The rows to add up, which all have the same figures.
    """
    total: Row = {"app": app, "agent": agent}
    figure_names = [name for name in rows[0] if name not in ROW_NAMES]
    for name in figure_names:
        values = [row[name] for row in rows]
        total[name] = None if None in values else sum(values)
    return total


async def _measure(session: Session, settings: ReplaySettings) -> list[Row]:
    """Returns a row for each agent of a session.

    The rows lack the names of the app, the user and the session. Raises a
    `CommandError` if the session has no calls.
    """
    calls = list(list_calls(session, settings.agent))
    # The calls from the first one up to the first that a guard might change.
    unchanged_start = list(_list_unchanged_start(session, calls, settings))
    if calls and len(unchanged_start) == len(calls):
        # No figure of a row depends on `fixed_tokens` or `has_cache`, so any values do.
        replayed = Replayed(
            session.id, fixed_tokens={}, calls=unchanged_start, has_cache=True
        )
    else:
        # The last unchanged calls are replayed, too: see `REPEATED_CALLS`. Without
        # calls this replay raises the error.
        known_calls = unchanged_start[:-REPEATED_CALLS]
        replayed = await replay_session(session, settings, known_calls)

    agents = dict.fromkeys(call.agent for call in replayed.calls)  # Each agent once.
    return [_describe_agent(agent, session, replayed) for agent in agents]


def _describe_agent(agent: str, session: Session, replayed: Replayed) -> Row:
    """Returns the row of an agent in a session.

    The row lacks the names of the app, the user and the session. A figure without the
    guard, such as "cost", has a counterpart with the guard, "cost_guarded".

    `replayed` has the calls of all agents.
    """
    calls = [call for call in replayed.calls if call.agent == agent]
    own_replayed = replace(replayed, calls=calls)
    without = own_replayed.without_guard
    guarded = own_replayed.with_guard

    return {
        "agent": agent,
        "sessions": 1,
        "events": sum(1 for event in session.events if event.author == agent),
        "calls": len(calls),
        "compactions": guarded.compactions,
        "over_window": without.over_window,
        "over_window_guarded": guarded.over_window,
        "tokens": without.tokens,
        "tokens_guarded": guarded.tokens,
        "cost": without.cost,
        "cost_guarded": guarded.cost,
    }


@dataclass(frozen=True)
class _Limits:
    """The sizes and prices that hold for an agent with a model.

    Attributes:
        window_tokens: The context window.
        quiet_tokens: The guard surely leaves a request of fewer prompt tokens as it is.
        costs: The prices of the model; None if they are unknown.
    """

    window_tokens: int
    quiet_tokens: float
    costs: Costs | None


def _list_unchanged_start(
    session: Session, calls: list[RecordedCall], settings: ReplaySettings
) -> Iterator[ReplayedCall]:
    """Yields the calls before the first one that a guard might change.

    The figures of these calls are the recorded ones. A replay of these calls would give
    the same figures, and would take most of the time.
    """
    # By the names of an agent and a model.
    limits_by_model = dict[tuple[str, str], _Limits]()
    for number, call in enumerate(calls, 1):
        agent = call.event.author
        model = settings.model or call.event.model_version or ""
        if (agent, model) not in limits_by_model:
            limits_by_model[agent, model] = _find_limits(
                session, settings, agent, model
            )

        limits = limits_by_model[agent, model]
        is_large = call.prompt_tokens >= limits.quiet_tokens
        # If a guard had cut the recorded request, the recorded count does not tell the
        # size of the whole history, with which a replay begins.
        if call.is_guarded or is_large:
            return
        yield _keep_as_recorded(number, call, limits)


def _keep_as_recorded(number: int, call: RecordedCall, limits: _Limits) -> ReplayedCall:
    """Returns a call that a guard sends as it was recorded: both bills are the same.

    `number` is the number of the call in the recording, from 1. Figures that no row
    needs are 0, None or empty.
    """
    usage = read_usage(call.event.usage_metadata)
    bill = Bill(usage, price_calls([usage], limits.costs))

    return ReplayedCall(
        number=number,
        agent=call.event.author,
        contents=0,
        estimated_tokens=None,
        real_tokens=call.prompt_tokens,
        whole_tokens=call.prompt_tokens,
        whole_bill=bill,
        window_tokens=limits.window_tokens,
        threshold_tokens=None,
        sent_contents=0,
        sent_tokens=call.prompt_tokens,
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
    """Returns the sizes and prices that hold for an agent with a model."""
    guard = settings.guard
    # A strategy, a function that chooses one, or None. If the user has given a window
    # for the replay, `adapt` sets this window as the `context_window` of a strategy.
    # The other two have no such setting.
    strategy: Any = settings.adapt(guard.agents.get(agent, guard.default))
    configured_tokens = getattr(strategy, "context_window", settings.window_tokens)
    window_tokens = resolve_context_window(model, configured=configured_tokens).tokens
    return _Limits(
        window_tokens=window_tokens,
        costs=resolve_costs(model, guard.prices, None),
        quiet_tokens=_find_quiet_tokens(session, strategy, window_tokens),
    )


def _find_quiet_tokens(session: Session, strategy: Any, window_tokens: int) -> float:
    """Returns the prompt tokens below which a strategy surely changes no request.

    - infinity if the strategy never changes a request
    - 0 if it may change a request of any size
    - else a part of the size at which its work begins

    `strategy` is a strategy, a function that chooses one, or None.
    """
    always_quiet = math.inf
    never_quiet = 0.0
    if not strategy:
        return always_quiet  # The agent is not guarded.

    # A function, or a strategy of the user's own, may do anything.
    if type(strategy) not in (Threshold, SlidingWindow, Pipeline):
        return never_quiet

    # A sliding window compacts when there are too many messages, however small. Other
    # strategies do not count messages. A session has at most one message an event.
    most_messages = getattr(strategy, "max_messages", math.inf)
    if len(session.events) > most_messages:
        return never_quiet

    # A preview shortens a long tool result in every request, however small. By default
    # only an agent with the recall tool has previews. Any agent may have the tool.
    preview = strategy.preview(window_tokens, has_recall=True)
    contents = [event.content for event in session.events if event.content]
    if preview and any(preview(content) for content in contents):
        return never_quiet

    # The setting `ahead` is a part of the threshold, such as 0.8: from that size on, a
    # summary is written in the background. Without it, work begins at the threshold.
    threshold_tokens = plan_strategy(strategy, window_tokens).threshold_tokens
    earliest_ratio = strategy.ahead or 1
    return QUIET_RATIO * threshold_tokens * earliest_ratio
