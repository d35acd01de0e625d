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
from google.adk.models.llm_request import LlmRequest
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
    """What a replay assumes; None takes what recording or strategy say."""

    guard: PluginSettings = field(default_factory=PluginSettings)
    agent: str | None = None
    model: str | None = None
    window_tokens: int | None = None

    def adapt(self, strategy: Strategy | Chooser | None) -> Strategy | Chooser | None:
        """Returns a strategy with the wanted window that asks no real model."""
        if not isinstance(strategy, Strategy):
            return strategy
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


def run_replay(
    is_list: bool,
    as_json: bool,
    compare: bool,
    is_complete: bool,
    **recording: Any,
) -> None:
    if is_list:
        print_sessions(as_json, **recording)
        return
    # Of settings that are only compared, what they cannot do is no warning.
    silent = [loop.logger] if compare else []
    with terminal.quiet_logs(Console(stderr=True), *silent):
        session, settings = read_recording(**recording)
        compared = list_rows(settings.guard, settings.window_tokens)
        rows = list(compared) if compare else []
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
    guard = read_settings(config)
    session = asyncio.run(recordings.load_session(source, key))
    return session, ReplaySettings(guard, **options)


def read_settings(config: str | None) -> PluginSettings:
    return load_settings(config) if config else PluginSettings()


def print_sessions(as_json: bool, source: str, key: SessionKey, **_: Any) -> None:
    with terminal.quiet_logs(Console(stderr=True)):
        listed = asyncio.run(recordings.list_sessions(source, key))
    rows = [{**vars(each), "updated": f"{each.updated:%F %T}"} for each in listed]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print_line(f"Sessions: {len(rows):,}; times in UTC", "bold")
    lines = [
        ([str("-" if v is None else v) for v in row.values()], "")
        for row in rows[:MAX_LISTED]
    ]
    if len(rows) > MAX_LISTED:
        text = f"... {len(rows) - MAX_LISTED:,} older ones: see --app, --json"
        lines.append(([text], ""))
    names = "app", "user", "session", "updated"
    terminal.print_table(
        [*names, terminal.number_column("events")] if rows else [], lines
    )


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
    for name in dict.fromkeys(call.event.author for call in calls):
        await replay.infer(name, [c for c in calls if c.event.author == name])
    numbered = list(enumerate(calls, 1))[len(known) :]
    shown = terminal.show_progress(numbered, "Replaying")
    steps = [await replay.step(number, call, needs) for number, call in shown]
    return [
        Replayed(session.id, replay.fixed_tokens, [*known, *own], has_cache)
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
        self._recorded = recorded
        self._settings = settings
        self._has_cache = has_cache
        self._memo = Memo(recorded.events)
        self._watching = self._guard(settings.guard, observe=True)
        self._acting = list(map(self._guard, guards))
        self._agents: dict[str, LlmAgent] = {}
        self._scales: dict[str, Scale] = {}
        self.fixed_tokens: dict[str, int] = {}

    def _guard(self, guard: PluginSettings, observe: bool = False) -> Side:
        """Makes a side of the session that a guard watches or changes."""
        adapt = self._settings.adapt
        recorded = self._recorded
        model = self._settings.model
        side = Side(recorded, model, self._memo, self._has_cache)
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
        """Makes an agent whose instruction is as long as the counts suggest."""
        agent = make_agent(name, tools=_list_tools(self._recorded, name))
        self._agents[name] = agent
        self._scales[name] = Scale()
        own = [call for call in calls if not call.is_guarded]
        measured = [call for call in own if call.heuristic_tokens]
        sample = (measured or own)[:: max(1, len(measured or own) // 40)]
        request = LlmRequest()
        fits = []
        for agent.include_contents in ("none", "default"):
            side = Side(self._recorded, self._settings.model, self._memo)
            counts = []
            for call in sample:
                request = await side.build(call, agent)
                tokens = self._memo.estimate_tokens(request.contents)
                counts.append((tokens, call.heuristic_tokens or call.prompt_tokens))
            fits.append(_fit_counts(counts, bool(measured)))
        (turn, turn_error), (whole, whole_error) = fits
        self.fixed_tokens[name] = whole
        # The recorded counts must speak clearly for the rarer setting.
        if turn_error < (0.05 if measured else 1.0) and turn_error < whole_error / 2:
            agent.include_contents = "none"
            self.fixed_tokens[name] = turn
        if sample:
            config_tokens = estimate_config_tokens(request.config)
            text_chars = 4 * max(0, self.fixed_tokens[name] - config_tokens)
            agent.instruction = ("instruction " * text_chars)[:text_chars]

    async def step(
        self, number: int, call: RecordedCall, needs: Needs
    ) -> list[ReplayedCall]:
        name = call.event.author
        watching = self._watching
        agent = self._agents[name]
        scale = self._scales[name]
        watching.llm.call = call
        watching.llm.scale = scale
        before = scale.last and scale.last.ratio
        whole = await watching.send(call, agent, await watching.build(call, agent))
        estimate = whole.record.estimated_tokens if whole.record else None
        real: int | None = call.prompt_tokens
        if not watching.llm.is_whole:  # A guard had cut it, and kept what it measured.
            if estimate and call.heuristic_tokens and before:
                estimate = round(call.heuristic_tokens * before)
            else:
                real = None
        # Whatever each guard takes for the window, what fits is the same for all.
        window_tokens = self._settings.window_tokens
        if whole.record:  # An exempt agent has none.
            window_tokens = whole.record.window_tokens
        elif window_tokens is None:
            window_tokens = resolve_context_window(whole.request.model or "").tokens
        needed = needs.find(call, whole.request.contents, window_tokens)
        replayed = []
        for acting in self._acting:
            acting.llm.scale = scale
            sent = await acting.send(call, agent, whole.request)
            acted = sent.record
            compaction = acted.compaction if acted else None
            stood = acted or whole.record
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
                    threshold_tokens=stood.threshold_tokens if stood else None,
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

    def _price(self, sent: Sent) -> Bill:
        """Prices a call, with summaries, also of compactions that came to nothing."""
        model = sent.request.model or ""
        costs = resolve_costs(model, self._settings.guard.prices, None)
        bill = Bill(sent.usage, price_calls([sent.usage], costs))
        if record := sent.record:
            bill += Bill(record.summary_usage, record.summary_cost)
        return bill


def _list_tools(session: Session, agent: str) -> list[Any]:
    """Makes the tools that an agent has called, without ADK's and the guard's own."""
    own = [event for event in session.events if event.author == agent]
    calls = [call for event in own for call in event.get_function_calls()]
    names = dict.fromkeys(call.name or "adk_" for call in calls)
    wanted = [name for name in names if not name.startswith((RECALL_TOOL, "adk_"))]
    return [_RecordedTool(name=name, description=name) for name in wanted]


def _fit_counts(
    pairs: Sequence[tuple[int, int]], is_heuristic: bool
) -> tuple[int, float]:
    """Infers what requests have beside their contents, by bytes / 4, and the error.

    A guard's heuristic is bytes / 4 as well, but it has cut all but the first.
    """
    if not pairs:
        return 0, 0.0
    slopes = [
        (real_b - real_a) / (bytes_b - bytes_a)
        for (bytes_a, real_a), (bytes_b, real_b) in combinations(pairs, 2)
        # Requests of nearly the same size say nothing of the slope.
        if abs(bytes_b - bytes_a) > 0.1 * max(bytes_a, bytes_b)
    ]
    weight = min(max(statistics.median(slopes), 0.5), 5.0) if slopes else 1.0
    weight = 1.0 if is_heuristic else weight
    first = pairs[:1] if is_heuristic else pairs
    intercept = statistics.median(real - weight * tokens for tokens, real in first)
    fixed_tokens = max(0, round(intercept / weight))
    errors = [abs(weight * (n + fixed_tokens) - real) / real for n, real in pairs]
    return fixed_tokens, statistics.median(errors)
