"""`contextguard replay`: what the guard would have done in a recorded session."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.sessions import Session
from google.adk.tools.base_tool import BaseTool
from google.genai import types
from rich.console import Console

from contextguard_adk._core import loop
from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._measuring.tokens import Memo, estimate_config_tokens
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._providers.costs import price_calls
from contextguard_adk._providers.registry import resolve_context_window, resolve_costs
from contextguard_adk._tools import recordings, terminal
from contextguard_adk._tools.recordings import RecordedCall, SessionKey
from contextguard_adk._tools.replaying import figures
from contextguard_adk._tools.replaying.calls import list_calls
from contextguard_adk._tools.replaying.compare import Comparison, Row, list_rows
from contextguard_adk._tools.replaying.figures import Bill, Replayed, ReplayedCall
from contextguard_adk._tools.replaying.need import Needs
from contextguard_adk._tools.replaying.side import (
    Scale,
    Sent,
    Side,
    make_agent,
    make_summarizer,
)
from contextguard_adk._tools.terminal import CommandError, print_line
from contextguard_adk.config import Chooser, PluginSettings, load_settings
from contextguard_adk.plugin import ContextGuardPlugin
from contextguard_adk.strategies import Strategy

MAX_LISTED = 100  # Sessions of a list for people; JSON has them all.


@dataclass(frozen=True)
class ReplaySettings:
    """The assumptions of a replay; None takes the recorded or configured value."""

    guard: PluginSettings = field(default_factory=PluginSettings)
    agent: str | None = None
    model: str | None = None
    window_tokens: int | None = None

    def adapt(self, strategy: Strategy | Chooser | None) -> Strategy | Chooser | None:
        """Returns a strategy with the wanted window that asks no real model."""
        if not isinstance(strategy, Strategy):
            return strategy

        changes: dict[str, Any] = {}
        summarizer = strategy.summarizer
        if summarizer:
            name = summarizer if isinstance(summarizer, str) else summarizer.model
            fixed_tokens = strategy.summarizer_context_window
            tokens = fixed_tokens or resolve_context_window(name).tokens
            changes["summarizer_context_window"] = tokens
            changes["summarizer"] = make_summarizer(name)
        if self.window_tokens:
            changes["context_window"] = self.window_tokens
        return strategy.model_copy(update=changes)


def run_replay(
    is_list: bool,
    as_json: bool,
    compare: bool,
    is_complete: bool,
    **recording: Any,
) -> None:
    """Prints a replay of a session, a comparison of settings, or a list of sessions."""
    if is_list:
        print_sessions(as_json, **recording)
        return

    # Warnings about settings that are only compared would help nobody.
    silent = [loop.logger] if compare else []
    with terminal.quiet_logs(Console(stderr=True), *silent):
        session, settings = read_recording(**recording)
        rows = list[Row]()
        if compare:
            rows += list_rows(settings.guard, settings.window_tokens)
        if recording["config"] or not compare:
            rows.append(Row("your settings", settings.guard))
        guards = [row.guard for row in rows]
        replays = asyncio.run(replay_guards(session, settings, guards))
        found = Comparison(rows, replays) if compare else replays[0]

    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    print_line(str(recordings.describe_session(session)), "dim")
    if isinstance(found, Comparison):
        found.print()
    else:
        figures.print_replayed(found, is_complete)


def read_recording(
    source: str, key: SessionKey, config: str | None, **options: Any
) -> tuple[Session, ReplaySettings]:
    """Reads a recorded session, and the settings to replay it with."""
    guard = read_settings(config)
    session = asyncio.run(recordings.load_session(source, key))
    return session, ReplaySettings(guard, **options)


def read_settings(config: str | None) -> PluginSettings:
    """Reads a settings file; without one, returns the built-in settings."""
    return load_settings(config) if config else PluginSettings()


def print_sessions(as_json: bool, source: str, key: SessionKey, **_: Any) -> None:
    """Prints the sessions that have the given names, the newest first."""
    with terminal.quiet_logs(Console(stderr=True)):
        listed = asyncio.run(recordings.list_sessions(source, key))
    rows = [{**vars(each), "updated": f"{each.updated:%F %T}"} for each in listed]
    if as_json:
        print(json.dumps(rows, indent=2))
        return

    print_line(f"Sessions: {len(rows):,}; times in UTC", "bold")
    lines = list[tuple[list[str], str]]()
    for row in rows[:MAX_LISTED]:
        cells = ["-" if value is None else str(value) for value in row.values()]
        lines.append((cells, ""))
    if len(rows) > MAX_LISTED:
        text = f"... {len(rows) - MAX_LISTED:,} older ones: see --app, --json"
        lines.append(([text], ""))

    columns: list[Any] = []
    if rows:
        columns = ["app", "user", "session", "updated"]
        columns.append(terminal.number_column("events"))
    terminal.print_table(columns, lines)


async def replay_session(
    session: Session, settings: ReplaySettings, known: Sequence[ReplayedCall] = ()
) -> Replayed:
    """Replays the recorded model calls of a session, after those that are known."""
    (replayed,) = await replay_guards(session, settings, [settings.guard], known)
    return replayed


async def replay_guards(
    session: Session,
    settings: ReplaySettings,
    guards: Sequence[PluginSettings],
    known: Sequence[ReplayedCall] = (),
) -> list[Replayed]:
    """Replays a session with several guards at once: ADK builds each request once."""
    calls = list(list_calls(session, settings.agent))
    if not calls:
        of_agent = f" of agent {settings.agent!r}" if settings.agent else ""
        missing = f"no model response{of_agent} with a recorded prompt token count"
        raise CommandError(f"session {session.id!r} has {missing}")

    usages = [read_usage(call.event.usage_metadata) for call in calls]
    has_cache = any(usage.cached_tokens for usage in usages)
    replay = _Replay(session, settings, guards, has_cache)
    needs = Needs(session.events, calls)
    for agent in dict.fromkeys(call.event.author for call in calls):
        await replay.infer(agent, [c for c in calls if c.event.author == agent])

    numbered = list(enumerate(calls, 1))[len(known) :]
    shown = terminal.show_progress(numbered, "Replaying")
    # A step has the same call for each guard.
    steps = [await replay.step(number, call, needs) for number, call in shown]
    return [
        Replayed(session.id, replay.fixed_tokens, [*known, *calls_of_guard], has_cache)
        for calls_of_guard in zip(*steps, strict=True)
    ]


class _RecordedTool(BaseTool):
    """A declaration of a tool of which only the name is recorded."""

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(name=self.name)


class _Replay:
    """Replays a session with one guard that watches, and with guards that act."""

    def __init__(
        self,
        recorded: Session,
        settings: ReplaySettings,
        guards: Sequence[PluginSettings],
        has_cache: bool,
    ) -> None:
        self._recorded = recorded
        self._settings = settings
        self._has_cache = has_cache
        self._memo = Memo(recorded.events)
        self._watching = self._make_side(settings.guard, observe=True)
        self._acting = [self._make_side(guard) for guard in guards]
        self._agents: dict[str, LlmAgent] = {}
        self._scales: dict[str, Scale] = {}
        self.fixed_tokens: dict[str, int] = {}

    def _make_side(self, guard: PluginSettings, observe: bool = False) -> Side:
        """Makes a copy of the session that a guard watches or changes."""
        adapt = self._settings.adapt
        side = Side(self._recorded, self._settings.model, self._memo, self._has_cache)
        plugin = ContextGuardPlugin(
            agents={name: adapt(strategy) for name, strategy in guard.agents.items()},
            default=adapt(guard.default),
            observe=observe,
            state_keys="plain",
            warning_threshold=guard.warning_threshold,
            prices=guard.prices,
            on_call=side.records.append,
        )
        plugin._guard.recorded = self._memo
        side.plugins.register_plugin(plugin)
        return side

    async def infer(self, name: str, calls: list[RecordedCall]) -> None:
        """Makes an agent whose instruction is as long as the counts suggest.

        A recording has neither the instruction nor `include_contents`: whether the
        agent was sent the whole history, or only the running turn ("none").
        """
        agent = make_agent(name, tools=_list_tools(self._recorded, name))
        self._agents[name] = agent
        self._scales[name] = Scale()

        whole_calls = [call for call in calls if not call.is_guarded]
        measured = [call for call in whole_calls if call.heuristic_tokens]
        usable = measured or whole_calls
        sample = usable[:: max(1, len(usable) // 40)]

        agent.include_contents = "none"
        turn_counts, _ = await self._count_sample(agent, sample)
        turn_tokens, turn_error = _fit_counts(turn_counts, bool(measured))

        agent.include_contents = "default"
        whole_counts, config_tokens = await self._count_sample(agent, sample)
        whole_tokens, whole_error = _fit_counts(whole_counts, bool(measured))

        # "none" is the rarer setting: it is taken only if it fits much better.
        most_error = 0.05 if measured else 1.0
        self.fixed_tokens[name] = whole_tokens
        if turn_error < most_error and turn_error < whole_error / 2:
            agent.include_contents = "none"
            self.fixed_tokens[name] = turn_tokens

        if sample:
            text_chars = 4 * max(0, self.fixed_tokens[name] - config_tokens)
            agent.instruction = ("instruction " * text_chars)[:text_chars]

    async def _count_sample(
        self, agent: LlmAgent, sample: Sequence[RecordedCall]
    ) -> tuple[list[tuple[int, int]], int]:
        """Builds the requests of some calls of an agent that has no instruction yet.

        Returns, for each call, the tokens of the contents by bytes / 4 and the recorded
        count; and the tokens of the last request's configuration, which has the tools.
        """
        side = Side(self._recorded, self._settings.model, self._memo)
        counts = list[tuple[int, int]]()
        config_tokens = 0
        for call in sample:
            request = await side.build(call, agent)
            content_tokens = self._memo.estimate_tokens(request.contents)
            recorded_tokens = call.heuristic_tokens or call.prompt_tokens
            counts.append((content_tokens, recorded_tokens))
            config_tokens = estimate_config_tokens(request.config)
        return counts, config_tokens

    async def step(
        self, number: int, call: RecordedCall, needs: Needs
    ) -> list[ReplayedCall]:
        """Replays a call; returns it once for each acting guard."""
        name = call.event.author
        agent = self._agents[name]
        scale = self._scales[name]
        ratio_before = scale.last.ratio if scale.last else None

        watching = self._watching
        watching.llm.call = call
        watching.llm.scale = scale
        whole = await watching.send(call, agent, await watching.build(call, agent))
        window_tokens = self._find_window(whole)
        needed = needs.find(call, whole.request.contents, window_tokens)

        estimate = whole.record.estimated_tokens if whole.record else None
        real: int | None = call.prompt_tokens
        if not watching.llm.is_whole:
            # A guard had cut the recorded request. Its count can be compared only with
            # an estimate of the cut request.
            if estimate and call.heuristic_tokens and ratio_before:
                estimate = round(call.heuristic_tokens * ratio_before)
            else:
                real = None

        replayed = list[ReplayedCall]()
        for acting in self._acting:
            acting.llm.scale = scale
            sent = await acting.send(call, agent, whole.request)
            record = sent.record or whole.record
            compaction = sent.record.compaction if sent.record else None
            replayed.append(
                ReplayedCall(
                    number=number,
                    agent=name,
                    contents=len(whole.request.contents),
                    estimated_tokens=estimate,
                    real_tokens=real,
                    whole_tokens=whole.usage.prompt_tokens,
                    whole_bill=self._price(whole),
                    window_tokens=window_tokens,
                    threshold_tokens=record.threshold_tokens if record else None,
                    sent_contents=len(sent.request.contents),
                    sent_tokens=sent.usage.prompt_tokens,
                    sent_bill=self._price(sent),
                    compaction=compaction,
                    error_ratio=estimate / real - 1 if estimate and real else None,
                    pressure=estimate / window_tokens if estimate else None,
                    needed=needed,
                    missing=needs.find_missing(needed, sent.request.contents),
                    state=dict(acting.state) if compaction else {},
                )
            )
        return replayed

    def _find_window(self, whole: Sent) -> int:
        """Returns the window that every guard's request is held against."""
        if whole.record:  # There is none of an exempt agent.
            return whole.record.window_tokens
        if self._settings.window_tokens is not None:
            return self._settings.window_tokens
        return resolve_context_window(whole.request.model or "").tokens

    def _price(self, sent: Sent) -> Bill:
        """Prices a call, with summaries, also of compactions that came to nothing."""
        model = sent.request.model or ""
        costs = resolve_costs(model, self._settings.guard.prices, None)
        bill = Bill(sent.usage, price_calls([sent.usage], costs))
        if sent.record:
            bill += Bill(sent.record.summary_usage, sent.record.summary_cost)
        return bill


def _list_tools(session: Session, agent: str) -> list[Any]:
    """Makes the tools that an agent has called, without ADK's and the guard's own."""
    names = dict[str, None]()
    for event in session.events:
        if event.author == agent:
            for call in event.get_function_calls():
                names[call.name or "adk_"] = None

    wanted = [name for name in names if not name.startswith((RECALL_TOOL, "adk_"))]
    return [_RecordedTool(name=name, description=name) for name in wanted]


def _fit_counts(
    pairs: Sequence[tuple[int, int]], is_heuristic: bool
) -> tuple[int, float]:
    """Infers the tokens that requests have beside their contents, and the error.

    A pair has the tokens of a request's contents by bytes / 4, and its recorded count.
    The count is a provider's, or, if `is_heuristic`, a guard's bytes / 4 as well.
    Returns tokens by bytes / 4, and the median error as a ratio of the counts.
    """
    if not pairs:
        return 0, 0.0

    slopes = [
        (real_b - real_a) / (bytes_b - bytes_a)
        for (bytes_a, real_a), (bytes_b, real_b) in combinations(pairs, 2)
        # Requests of nearly the same size say nothing of the slope.
        if abs(bytes_b - bytes_a) > 0.1 * max(bytes_a, bytes_b)
    ]
    weight = 1.0
    if slopes and not is_heuristic:
        weight = min(max(statistics.median(slopes), 0.5), 5.0)

    # A guard may have cut all requests but the first.
    uncut = pairs[:1] if is_heuristic else pairs
    intercept = statistics.median(real - weight * tokens for tokens, real in uncut)
    fixed_tokens = max(0, round(intercept / weight))
    errors = [
        abs(weight * (tokens + fixed_tokens) - real) / real for tokens, real in pairs
    ]
    return fixed_tokens, statistics.median(errors)
