"""`contextguard replay`: what the guard would have done in a recorded session."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

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
from contextguard_adk._tools.replaying.need import Needed, Needs
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

# A table shows at most this number of sessions; JSON has them all.
MAX_LISTED = 100
LIST_COLUMNS = ("app", "user", "session", "updated", "events")

# The size of an agent's instruction is inferred from 40 to 79 of its calls, or from all
# of them if it has fewer.
SAMPLE_CALLS = 40
# The median error below which the counts say that an agent was sent only the running
# turn. A guard's own counts of bytes / 4 fit almost exactly.
MOST_TURN_ERROR = 1.0
MOST_MEASURED_TURN_ERROR = 0.05

# Requests of nearly the same size do not tell the ratio of tokens to bytes / 4.
LEAST_DIFFERENCE = 0.1
# No text has a ratio outside this range: a ratio beyond it comes from other changes.
LEAST_RATIO = 0.5
MOST_RATIO = 5.0


@dataclass(frozen=True)
class ReplaySettings:
    """The assumptions of a replay; None takes the recorded or configured value."""

    guard: PluginSettings = field(default_factory=PluginSettings)
    agent: str | None = None
    model: str | None = None
    window_tokens: int | None = None

    def adapt(self, strategy: Strategy | Chooser | None) -> Strategy | Chooser | None:
        """Returns a strategy with the wanted window and a simulated summarizer.

        A function that chooses a strategy is returned as it is, and so is None.
        """
        if not isinstance(strategy, Strategy):
            return strategy

        changes: dict[str, Any] = {}
        summarizer = strategy.summarizer
        if summarizer:
            name = summarizer if isinstance(summarizer, str) else summarizer.model
            configured_tokens = strategy.summarizer_context_window
            summarizer_tokens = configured_tokens or resolve_context_window(name).tokens
            changes["summarizer_context_window"] = summarizer_tokens
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
    silenced_loggers = [loop.logger] if compare else []
    with terminal.quiet_logs(Console(stderr=True), *silenced_loggers):
        session, settings = read_recording(**recording)

        rows = list[Row]()
        if compare:
            rows += list_rows(settings.guard, settings.window_tokens)
        # A comparison has the user's settings only if the user gives a file of them.
        if recording["config"] or not compare:
            rows.append(Row("your settings", settings.guard))
        row_guards = [row.guard for row in rows]
        replays = asyncio.run(replay_guards(session, settings, row_guards))
        # Without a comparison there is one row, and one replay.
        result = Comparison(rows, replays) if compare else replays[0]

    if as_json:
        print(json.dumps(result.to_json(), indent=2))
        return

    print_line(str(recordings.describe_session(session)), "dim")
    if isinstance(result, Comparison):
        result.print()
    else:
        figures.print_replayed(result, is_complete)


def read_recording(
    source: str, key: SessionKey, config: str | None, **options: Any
) -> tuple[Session, ReplaySettings]:
    """Reads a recorded session, and the settings to replay it with.

    `options` are fields of `ReplaySettings`.
    """
    guard = read_settings(config)
    session = asyncio.run(recordings.load_session(source, key))
    return session, ReplaySettings(guard, **options)


def read_settings(config: str | None) -> PluginSettings:
    """Reads a settings file; without one, returns the built-in settings."""
    return load_settings(config) if config else PluginSettings()


def print_sessions(as_json: bool, source: str, key: SessionKey, **_: Any) -> None:
    """Prints the sessions that have the names of `key`, the newest first.

    `_` takes the options of a replay, which a list does not need.
    """
    with terminal.quiet_logs(Console(stderr=True)):
        listed = asyncio.run(recordings.list_sessions(source, key))
    sessions = [{**vars(each), "updated": f"{each.updated:%F %T}"} for each in listed]
    if as_json:
        print(json.dumps(sessions, indent=2))
        return

    print_line(f"Sessions: {len(sessions):,}; times in UTC", "bold")
    columns: list[Any] = []
    if sessions:  # A table without rows has no head, either.
        *name_columns, count_column = LIST_COLUMNS
        columns = [*name_columns, terminal.number_column(count_column)]

    no_style = ""
    rows = list[tuple[list[str], str]]()
    for session in sessions[:MAX_LISTED]:
        values = [session[name] for name in LIST_COLUMNS]
        cells = ["-" if value is None else str(value) for value in values]
        rows.append((cells, no_style))
    if len(sessions) > MAX_LISTED:
        text = f"... {len(sessions) - MAX_LISTED:,} older ones: see --app, --json"
        rows.append(([text], no_style))
    terminal.print_table(columns, rows)


async def replay_session(
    session: Session, settings: ReplaySettings, known_calls: Sequence[ReplayedCall] = ()
) -> Replayed:
    """Replays the recorded model calls of a session with the guard's settings.

    `known_calls` are the first calls if their figures are known without a replay.
    """
    guards = [settings.guard]
    (replayed,) = await replay_guards(session, settings, guards, known_calls)
    return replayed


async def replay_guards(
    session: Session,
    settings: ReplaySettings,
    guards: Sequence[PluginSettings],
    known_calls: Sequence[ReplayedCall] = (),
) -> list[Replayed]:
    """Replays a session with the settings of several guards at once.

    So ADK builds each request once for all guards. Returns one replay for each guard,
    in the order of `guards`. Each replay begins with the known calls.
    """
    calls = list(list_calls(session, settings.agent))
    if not calls:
        of_agent = f" of agent {settings.agent!r}" if settings.agent else ""
        raise CommandError(
            f"session {session.id!r} has no model response{of_agent} with a recorded "
            "prompt token count"
        )

    usages = [read_usage(call.event.usage_metadata) for call in calls]
    has_cache = any(usage.cached_tokens for usage in usages)
    replay = _Replay(session, settings, guards, has_cache)

    calls_by_agent = defaultdict[str, list[RecordedCall]](list)
    for call in calls:
        calls_by_agent[call.event.author].append(call)
    for agent, own_calls in calls_by_agent.items():
        await replay.infer_agent(agent, own_calls)

    needs = Needs(session.events, calls)
    numbered_calls = list(enumerate(calls, 1))
    unknown_calls = numbered_calls[len(known_calls) :]
    # One list for each call, with a replayed call for each guard.
    replayed_by_call = [
        await replay.play_call(number, call, needs)
        for number, call in terminal.show_progress(unknown_calls, "Replaying")
    ]
    replayed_by_guard = zip(*replayed_by_call, strict=True)
    return [
        Replayed(session.id, replay.fixed_tokens, [*known_calls, *played], has_cache)
        for played in replayed_by_guard
    ]


class _RecordedTool(BaseTool):
    """A declaration of a tool of which only the name is recorded."""

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(name=self.name)


class _ComparedTokens(NamedTuple):
    """A guard's estimate of a request, and the provider's count of the same request.

    Attributes:
        estimated: The estimated tokens; None if no guard watches the agent.
        real: The count; None if the recording has none of the estimated request.
    """

    estimated: int | None
    real: int | None

    @property
    def error_ratio(self) -> float | None:
        """The error of the estimate, as a ratio of the count; None if unknown."""
        if not (self.estimated and self.real):
            return None
        return self.estimated / self.real - 1

    def divide_estimate(self, window_tokens: int) -> float | None:
        """Returns the part of a window that the estimate fills; None if unknown."""
        return self.estimated / window_tokens if self.estimated else None


class _WholeCall(NamedTuple):
    """A recorded call, made again with the whole history.

    Attributes:
        number: The number of the call in the recording, from 1.
        agent: The name of the agent.
        sent: The request with the whole history, and its usage.
        tokens: The estimate and the count to compare.
        window_tokens: The window, in tokens, with which all requests are compared.
        needed: The values that the call needed and the whole history holds.
    """

    number: int
    agent: str
    sent: Sent
    tokens: _ComparedTokens
    window_tokens: int
    needed: list[Needed]


class _Replay:
    """Replays a session with one guard that watches, and with guards that act.

    The watching guard changes no request, so its requests have the whole history. An
    acting guard cuts its own requests.
    """

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
        # By agent, the tokens of instruction and tools by bytes / 4.
        self.fixed_tokens: dict[str, int] = {}

    def _make_side(self, guard: PluginSettings, observe: bool = False) -> Side:
        """Makes a copy of the session, with a plugin that has the guard's settings.

        If `observe` is true, the plugin changes no request.
        """
        side = Side(self._recorded, self._settings.model, self._memo, self._has_cache)
        adapted_agents = {
            name: self._settings.adapt(strategy)
            for name, strategy in guard.agents.items()
        }
        plugin = ContextGuardPlugin(
            agents=adapted_agents,
            default=self._settings.adapt(guard.default),
            observe=observe,
            state_keys="plain",
            warning_threshold=guard.warning_threshold,
            prices=guard.prices,
            on_call=side.records.append,
        )
        # All sides share the sizes and fingerprints of the recorded events.
        plugin._guard.recorded = self._memo
        side.plugins.register_plugin(plugin)
        return side

    async def infer_agent(self, name: str, calls: list[RecordedCall]) -> None:
        """Makes an agent whose instruction is as long as the counts suggest.

        A recording has neither the instruction nor `include_contents`. Both settings of
        `include_contents` are tried, and the one that fits the recorded counts is kept:
        - "none": the agent was sent only the running turn.
        - "default": the agent was sent the whole history.
        """
        agent = make_agent(name, tools=_list_tools(self._recorded, name))
        self._agents[name] = agent
        self._scales[name] = Scale()

        whole_calls = [call for call in calls if not call.is_guarded]
        measured_calls = [call for call in whole_calls if call.heuristic_tokens]
        is_measured = bool(measured_calls)
        usable_calls = measured_calls or whole_calls
        sample_step = max(1, len(usable_calls) // SAMPLE_CALLS)
        sample = usable_calls[::sample_step]

        agent.include_contents = "none"
        turn_counts, _ = await self._count_sample(agent, sample)
        turn_fit = _fit_counts(turn_counts, is_measured)
        agent.include_contents = "default"
        whole_counts, config_tokens = await self._count_sample(agent, sample)
        whole_fit = _fit_counts(whole_counts, is_measured)

        # "none" is the rarer setting: it is taken only if its error is small, and less
        # than half of the other one.
        most_error = MOST_MEASURED_TURN_ERROR if is_measured else MOST_TURN_ERROR
        if turn_fit.error < min(most_error, whole_fit.error / 2):
            agent.include_contents = "none"
            fit = turn_fit
        else:
            agent.include_contents = "default"
            fit = whole_fit
        self.fixed_tokens[name] = fit.fixed_tokens

        if sample:
            instruction_tokens = max(0, fit.fixed_tokens - config_tokens)
            instruction_chars = 4 * instruction_tokens
            agent.instruction = ("instruction " * instruction_chars)[:instruction_chars]

    async def _count_sample(
        self, agent: LlmAgent, sample: Sequence[RecordedCall]
    ) -> tuple[list[_Counts], int]:
        """Builds the requests of some calls of an agent that has no instruction yet.

        Returns the counts of each call, and the tokens of the last request's
        configuration, which has the tools.
        """
        side = Side(self._recorded, self._settings.model, self._memo)

        counts = list[_Counts]()
        config_tokens = 0
        for call in sample:
            request = await side.build(call, agent)
            content_tokens = self._memo.estimate_tokens(request.contents)
            recorded_tokens = call.heuristic_tokens or call.prompt_tokens
            counts.append(_Counts(content_tokens, recorded_tokens))
            config_tokens = estimate_config_tokens(request.config)

        return counts, config_tokens

    async def play_call(
        self, number: int, call: RecordedCall, needs: Needs
    ) -> list[ReplayedCall]:
        """Replays a call; returns one replayed call for each acting guard."""
        agent = self._agents[call.event.author]
        # The whole history is sent first: the recorded count corrects the scale, by
        # which the requests of the acting guards are counted.
        whole_call = await self._send_whole(number, call, needs)

        replayed = list[ReplayedCall]()
        for acting in self._acting:
            acting.llm.scale = self._scales[agent.name]
            sent = await acting.send(call, agent, whole_call.sent.request)
            missing = needs.find_missing(whole_call.needed, sent.request.contents)
            replayed.append(self._describe(whole_call, sent, missing, acting.state))
        return replayed

    async def _send_whole(
        self, number: int, call: RecordedCall, needs: Needs
    ) -> _WholeCall:
        """Sends the whole history to the model of the watching guard."""
        agent = self._agents[call.event.author]
        scale = self._scales[agent.name]
        # This is read before the call is sent, which makes it the last call.
        last_ratio = scale.last.ratio if scale.last else None

        watching = self._watching
        watching.llm.call = call
        watching.llm.scale = scale
        request = await watching.build(call, agent)
        sent = await watching.send(call, agent, request)

        window_tokens = self._find_window(sent)
        return _WholeCall(
            number=number,
            agent=agent.name,
            sent=sent,
            tokens=self._compare_tokens(call, sent, last_ratio),
            window_tokens=window_tokens,
            needed=needs.find(call, sent.request.contents, window_tokens),
        )

    def _compare_tokens(
        self, call: RecordedCall, whole: Sent, last_ratio: float | None
    ) -> _ComparedTokens:
        """Returns a guard's estimate of a request, and the count to compare it with.

        `last_ratio` is the ratio of the agent's last recorded request; None if it is
        unknown.
        """
        whole_estimate = whole.record.estimated_tokens if whole.record else None
        if self._watching.llm.is_whole:
            return _ComparedTokens(whole_estimate, call.prompt_tokens)

        # A guard had cut the recorded request. Its count can be compared only with an
        # estimate of the cut request.
        if whole_estimate and call.heuristic_tokens and last_ratio:
            cut_estimate = round(call.heuristic_tokens * last_ratio)
            return _ComparedTokens(cut_estimate, call.prompt_tokens)
        return _ComparedTokens(whole_estimate, None)

    def _describe(
        self,
        whole_call: _WholeCall,
        sent: Sent,
        missing: list[Needed],
        state: dict[str, Any],
    ) -> ReplayedCall:
        """Describes a call of an acting guard, beside the call with the whole history.

        `missing` are the needed values that the sent request does not hold, and `state`
        is the session state of the acting guard.
        """
        whole = whole_call.sent
        record = sent.record or whole.record
        compaction = sent.record.compaction if sent.record else None
        tokens = whole_call.tokens
        return ReplayedCall(
            number=whole_call.number,
            agent=whole_call.agent,
            contents=len(whole.request.contents),
            estimated_tokens=tokens.estimated,
            real_tokens=tokens.real,
            whole_tokens=whole.usage.prompt_tokens,
            whole_bill=self._price(whole),
            window_tokens=whole_call.window_tokens,
            threshold_tokens=record.threshold_tokens if record else None,
            sent_contents=len(sent.request.contents),
            sent_tokens=sent.usage.prompt_tokens,
            sent_bill=self._price(sent),
            compaction=compaction,
            error_ratio=tokens.error_ratio,
            pressure=tokens.divide_estimate(whole_call.window_tokens),
            needed=whole_call.needed,
            missing=missing,
            state=dict(state) if compaction else {},
        )

    def _find_window(self, whole: Sent) -> int:
        """Returns the window, in tokens, with which all requests are compared."""
        if whole.record:  # An agent that no guard watches has no record.
            return whole.record.window_tokens
        if self._settings.window_tokens is not None:
            return self._settings.window_tokens
        return resolve_context_window(whole.request.model or "").tokens

    def _price(self, sent: Sent) -> Bill:
        """Prices a call and its summaries, those of failed compactions included."""
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
                names[call.name or ""] = None

    foreign_names = (RECALL_TOOL, "adk_")
    own_names = [name for name in names if name and not name.startswith(foreign_names)]
    return [_RecordedTool(name=name, description=name) for name in own_names]


class _Counts(NamedTuple):
    """The size of a recorded request, without and with its instruction and tools.

    Attributes:
        contents: The tokens of the contents by bytes / 4.
        recorded: The recorded count of the request: a guard's bytes / 4 if there is
            one, else the provider's tokens.
    """

    contents: int
    recorded: int


class _Fit(NamedTuple):
    """The size of an agent's instruction and tools, and how well it fits the counts.

    Attributes:
        fixed_tokens: The tokens of instruction and tools by bytes / 4.
        error: The median error of the recorded counts, as a ratio of them.
    """

    fixed_tokens: int
    error: float


def _fit_counts(counts: Sequence[_Counts], is_heuristic: bool) -> _Fit:
    """Infers the size of instruction and tools from the counts of some requests.

    If `is_heuristic`, the recorded counts are a guard's bytes / 4. Otherwise they are a
    provider's tokens, which are some multiple of bytes / 4: the ratio. A recorded count
    is `ratio * (contents + fixed_tokens)`. Without counts, size and error are 0.
    """
    if not counts:
        return _Fit(0, 0.0)

    # Two requests with contents of different size tell the tokens per bytes / 4.
    ratios = list[float]()
    for one, other in combinations(counts, 2):
        difference = other.contents - one.contents
        if abs(difference) > LEAST_DIFFERENCE * max(one.contents, other.contents):
            ratios.append((other.recorded - one.recorded) / difference)
    ratio = 1.0
    if ratios and not is_heuristic:
        raised_ratio = max(LEAST_RATIO, statistics.median(ratios))
        ratio = min(MOST_RATIO, raised_ratio)

    # A guard may have cut all requests but the first.
    uncut = counts[:1] if is_heuristic else counts
    recorded_rests = [each.recorded - ratio * each.contents for each in uncut]
    fixed_tokens = max(0, round(statistics.median(recorded_rests) / ratio))
    errors = [
        abs(ratio * (each.contents + fixed_tokens) - each.recorded) / each.recorded
        for each in counts
    ]
    return _Fit(fixed_tokens, statistics.median(errors))
