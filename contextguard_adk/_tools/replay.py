"""`contextguard replay`: what the guard would have done in a recorded session."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions import Session
from google.adk.tools.base_tool import BaseTool
from google.genai import types
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from contextguard_adk._core import loop
from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._measuring.tokens import estimate_config_tokens
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._providers.costs import price_calls
from contextguard_adk._providers.registry import resolve_context_window, resolve_costs
from contextguard_adk._tools import recordings, replay_report
from contextguard_adk._tools.recordings import (
    RecordedCall,
    SessionKey,
    describe_session,
)
from contextguard_adk._tools.replay_compare import Comparison, Row, list_rows
from contextguard_adk._tools.replay_report import Bill, Replayed, ReplayedCall
from contextguard_adk._tools.replay_side import Side, count_bytes, make_summarizer
from contextguard_adk._tools.terminal import (
    CommandError,
    clean_text,
    print_line,
    quiet_logs,
)
from contextguard_adk.config import PluginSettings, load_settings
from contextguard_adk.plugin import ContextGuardPlugin
from contextguard_adk.records import Usage
from contextguard_adk.strategies import Strategy

MAX_LISTED = 100
"""Sessions of a list for people; JSON has them all."""


@dataclass(frozen=True)
class ReplaySettings:
    """What a replay assumes; None takes what recording or strategy say."""

    guard: PluginSettings = field(default_factory=PluginSettings)
    agent: str | None = None
    model: str | None = None
    window_tokens: int | None = None

    def adapt(self, strategy: Strategy | None) -> Strategy | None:
        """Returns a strategy with the wanted window that asks no real model."""
        if strategy is None:
            return None
        changes: dict[str, Any] = {}
        if summarizer := strategy.summarizer:
            name = summarizer if isinstance(summarizer, str) else summarizer.model
            tokens = strategy.summarizer_context_window
            tokens = tokens or resolve_context_window(name).tokens
            changes["summarizer_context_window"] = tokens
            changes["summarizer"] = make_summarizer(name)
        if self.window_tokens:
            changes["context_window"] = self.window_tokens
        return strategy.model_copy(update=changes)


def read_recording(arguments: argparse.Namespace) -> tuple[Session, ReplaySettings]:
    """Reads the session and the settings that the command line names."""
    settings = ReplaySettings(
        guard=load_settings(arguments.config) if arguments.config else PluginSettings(),
        agent=arguments.agent,
        model=arguments.model,
        window_tokens=arguments.window,
    )
    key = SessionKey(arguments.app, arguments.user, arguments.session)
    return asyncio.run(recordings.load_session(arguments.source, key)), settings


def run_replay(arguments: argparse.Namespace) -> None:
    """Replays the session that the command line names, and prints the result."""
    if arguments.list:
        print_sessions(arguments)
        return
    if arguments.plot and arguments.compare:
        raise CommandError("--plot draws one replay: give it without --compare")
    if arguments.plot:
        replay_report.require_plotting(arguments.plot)
    # Of settings that are only compared, what they cannot do is no warning.
    silent = [loop.logger] if arguments.compare else []
    with quiet_logs(Console(stderr=True), *silent):
        session, settings = read_recording(arguments)
        found: Replayed | Comparison
        if arguments.compare:
            rows = list_rows(settings.guard, settings.window_tokens)
            rows += [Row("your settings", settings.guard)] * bool(arguments.config)
            guards = [row.guard for row in rows]
            replays = asyncio.run(replay_guards(session, settings, guards))
            found = Comparison(rows, replays)
        else:
            found = asyncio.run(replay_session(session, settings))
            if arguments.plot:
                replay_report.save_plot(found, arguments.plot)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
        return
    print_line(Console(highlight=False), str(describe_session(session)), "dim")
    if isinstance(found, Comparison):
        found.print_table()
    else:
        replay_report.print_replayed(found, is_complete=arguments.all)


def print_sessions(arguments: argparse.Namespace) -> None:
    """Lists the sessions that the command line names, the newest first."""
    with quiet_logs(Console(stderr=True)):
        key = SessionKey(arguments.app, arguments.user, arguments.session)
        listed = asyncio.run(recordings.list_sessions(arguments.source, key))
    rows = [{**vars(each), "updated": f"{each.updated:%F %T}"} for each in listed]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    console = Console(highlight=False)
    print_line(console, f"Sessions: {len(rows):,}; times in UTC", "bold")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in rows[0] if rows else ():
        table.add_column(name, justify="right" if name == "events" else "left")
    for row in rows[:MAX_LISTED]:
        cells = (clean_text(console, str(value)) for value in row.values())
        table.add_row(*map(Text, cells))
    if len(rows) > MAX_LISTED:
        table.add_row(f"... {len(rows) - MAX_LISTED:,} older ones: see --app, --json")
    replay_report.print_table(console, table)


async def replay_session(session: Session, settings: ReplaySettings) -> Replayed:
    """Replays the recorded model calls of a session, which stays as it is."""
    (replayed,) = await replay_guards(session, settings, [settings.guard])
    return replayed


async def replay_guards(
    session: Session, settings: ReplaySettings, guards: Sequence[PluginSettings]
) -> list[Replayed]:
    """Replays a session with several guards at once: ADK builds each request once."""
    calls = list(recordings.list_calls(session, settings.agent))
    if not calls:
        of_agent = f" of agent {settings.agent!r}" if settings.agent else ""
        missing = f"no model response{of_agent} with a recorded prompt token count"
        raise CommandError(f"session {session.id!r} has {missing}")
    usages = [read_usage(call.event.usage_metadata) for call in calls]
    has_cache = any(usage.cached_tokens for usage in usages)
    replay = _Replay(session, settings, guards, has_cache)
    for name in dict.fromkeys(call.event.author for call in calls):
        await replay.infer(name, [c for c in calls if c.event.author == name])
    steps = [await replay.step(number, call) for number, call in enumerate(calls, 1)]
    return [
        Replayed(session.id, replay.fixed_tokens, list(own), has_cache)
        for own in zip(*steps, strict=True)
    ]


class _RecordedTool(BaseTool):
    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(name=self.name)


class _Replay:
    def __init__(
        self,
        recorded: Session,
        settings: ReplaySettings,
        guards: Sequence[PluginSettings],
        has_cache: bool,
    ) -> None:
        self._recorded, self._settings = recorded, settings
        self._has_cache = has_cache
        self._watching = self._guard(settings.guard, observe=True)
        self._acting = list(map(self._guard, guards))
        self._agents: dict[str, LlmAgent] = {}
        # Real tokens / (bytes / 4) of an agent's last request with a real count.
        self._ratios: dict[str, float] = {}
        self._is_guarded = any(map(recordings.read_facts, recorded.events))
        self.fixed_tokens: dict[str, int] = {}

    def _guard(self, guard: PluginSettings, observe: bool = False) -> Side:
        """Makes a side of the session that a guard watches or changes."""
        adapt = self._settings.adapt
        side = Side(self._recorded, self._settings.model, self._has_cache)
        plugin = ContextGuardPlugin(
            agents={name: adapt(strategy) for name, strategy in guard.agents.items()},
            default=adapt(guard.default),
            observe=observe,
            state_keys="plain",
            warning_threshold=guard.warning_threshold,
            prices=guard.prices,
            on_call=side.records.append,
        )
        side.plugins.register_plugin(plugin)
        return side

    async def infer(self, name: str, calls: list[RecordedCall]) -> None:
        """Makes an agent whose instruction is as long as the counts suggest."""
        try:
            agent = LlmAgent(name=name, tools=_list_tools(self._recorded, name))
        except ValidationError as error:
            raise CommandError(f"{name!r} is not a name of an agent") from error
        self._agents[name], self._ratios[name] = agent, 1.0
        own = [call for call in calls if not call.is_guarded]
        sample = own[:: max(1, len(own) // 40)]
        fits = []
        for agent.include_contents in ("default", "none"):
            side = Side(self._recorded, self._settings.model)
            counts = []
            for call in sample:
                request, _ = await side.play(call, agent)
                counts.append((count_bytes(request.contents), call.prompt_tokens))
            fits.append(recordings.fit_counts(counts))
        (whole, whole_error), (turn, turn_error) = fits
        # The recorded counts must speak clearly for the rarer setting.
        is_turn_only = turn_error < whole_error / 2
        agent.include_contents = "none" if is_turn_only else "default"
        self.fixed_tokens[name] = turn if is_turn_only else whole
        if sample:
            side = Side(self._recorded, self._settings.model)
            first, _ = await side.play(sample[0], agent)
            config_tokens = estimate_config_tokens(first.config)
            text_chars = 4 * max(0, self.fixed_tokens[name] - config_tokens)
            agent.instruction = ("instruction " * text_chars)[:text_chars]

    async def step(self, number: int, call: RecordedCall) -> list[ReplayedCall]:
        """Replays one call, with each guard."""
        name = call.event.author
        agent, watching = self._agents[name], self._watching
        real = None if call.is_guarded else call.prompt_tokens
        watching.llm.real_tokens, watching.llm.ratio = real, self._ratios[name]
        whole, usage = await watching.play(call, agent)
        self._ratios[name] = watching.llm.ratio
        watched = watching.take_record()
        estimate = watched.estimated_tokens if watched else None
        # Whatever each guard takes for the window, what fits is the same for all.
        window_tokens = watched.window_tokens if watched else self._find_window(whole)
        replayed = []
        for acting in self._acting:
            acting.llm.ratio = self._ratios[name]
            sent, sent_usage = await acting.send(call, agent, whole)
            acted = acting.take_record()
            if self._is_guarded and real:  # Of what was cut already then.
                ratio = real / max(1, count_bytes(sent))
                self._ratios[name] = max(self._ratios[name], ratio)
            sent_bill = self._price(whole.model, sent_usage)
            if acted:
                sent_bill += Bill(acted.summary_usage, acted.summary_cost)
            replayed.append(
                ReplayedCall(
                    number=number,
                    agent=name,
                    contents=len(whole.contents),
                    estimated_tokens=estimate,
                    real_tokens=real,
                    whole_tokens=usage.prompt_tokens,
                    whole_bill=self._price(whole.model, usage),
                    window_tokens=window_tokens,
                    threshold_tokens=acted.threshold_tokens if acted else None,
                    sent_contents=len(sent.contents),
                    sent_tokens=sent_usage.prompt_tokens,
                    sent_bill=sent_bill,
                    compaction=acted.compaction if acted else None,
                    error_ratio=estimate / real - 1 if estimate and real else None,
                    pressure=estimate / window_tokens if estimate else None,
                    state=dict(acting.state) if acted and acted.compaction else {},
                )
            )
        return replayed

    def _find_window(self, request: LlmRequest) -> int:
        """The window, in tokens, of an exempt agent."""
        wanted, model = self._settings.window_tokens, request.model or ""
        return resolve_context_window(model, configured=wanted).tokens

    def _price(self, model: str | None, usage: Usage) -> Bill:
        costs = resolve_costs(model or "", self._settings.guard.prices, None)
        return Bill(usage, price_calls([usage], costs))


def _list_tools(session: Session, agent: str) -> list[Any]:
    """Makes the tools that an agent has called, without ADK's and the guard's own."""
    own = [event for event in session.events if event.author == agent]
    calls = [call for event in own for call in event.get_function_calls()]
    names = dict.fromkeys(call.name or "adk_" for call in calls)
    wanted = [name for name in names if not name.startswith((RECALL_TOOL, "adk_"))]
    return [_RecordedTool(name=name, description=name) for name in wanted]
