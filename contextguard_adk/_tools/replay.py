"""`contextguard replay`: what the guard would have done in a recorded session.

A replay makes each recorded model call again, offline, with two kinds of guards. A
guard is a plugin with settings of its own:

- The watching guard changes no request, so its requests have the whole history.
- An acting guard cuts its requests, as it would in an app. A comparison of settings has
  several acting guards.

A third guard may have been at work when the session was recorded. So a recorded request
may have been cut as well: the recorded count is then not that of the whole history.

Heuristic tokens are UTF-8 bytes / 4; real tokens are those that a provider counts.
Fixed tokens are the tokens of an agent's instruction and tools: all requests of the
agent have them.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal, NamedTuple

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
    clamp,
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

# The fixed tokens of an agent are inferred from 40 to 79 of its calls, or from all of
# them if it has fewer.
LEAST_SAMPLE_CALLS = 40

# Two requests tell a ratio only if the tokens of their contents differ by more than
# this part of the larger number. A smaller difference is mostly noise.
LEAST_DIFFERENCE_RATIO = 0.1
# The range of the real tokens per heuristic token of a text. A number outside the range
# comes from something else, such as a tool that was added between two requests.
LEAST_TOKEN_RATIO = 0.5
MOST_TOKEN_RATIO = 5.0

# The fixed tokens of an agent that is sent only the running turn fit the recorded
# counts with a median error below this ratio. The second number is for counts of a
# guard: they are heuristic tokens as well, so they fit almost exactly.
MOST_TURN_ERROR_RATIO = 1.0
MOST_HEURISTIC_TURN_ERROR_RATIO = 0.05


@dataclass(frozen=True)
class ReplaySettings:
    """The assumptions of a replay.

    Attributes:
        guard: The settings of the guard.
        agent: The only agent whose calls are replayed; None for all agents.
        model: The model whose window and prices count; None for the recorded one.
        window_tokens: The context window; None for the window in the settings or, if
            the settings have none, the window of the model.
    """

    guard: PluginSettings = field(default_factory=PluginSettings)
    agent: str | None = None
    model: str | None = None
    window_tokens: int | None = None

    def adapt(self, strategy: Strategy | Chooser | None) -> Strategy | Chooser | None:
        """Returns a strategy with the window of the replay and an offline summarizer.

        None, and a function that chooses a strategy, are returned unchanged.
        """
        if not isinstance(strategy, Strategy):
            return strategy

        changes = _replace_summarizer(strategy)
        if self.window_tokens:
            changes["context_window"] = self.window_tokens
        return strategy.model_copy(update=changes)


def _replace_summarizer(strategy: Strategy) -> dict[str, Any]:
    """Returns the fields that make the summarizer of a strategy an offline one.

    The offline summarizer has the name and the window of the configured one. Returns
    {} for a strategy without a summarizer: the model of the agent writes its summaries.
    """
    summarizer = strategy.summarizer
    if not summarizer:
        return {}

    name = summarizer if isinstance(summarizer, str) else summarizer.model
    window_tokens = strategy.summarizer_context_window
    if not window_tokens:
        window_tokens = resolve_context_window(name).tokens
    return {
        "summarizer": make_summarizer(name),
        "summarizer_context_window": window_tokens,
    }


def run_replay(
    is_list: bool,
    as_json: bool,
    compare: bool,
    is_complete: bool,
    **recording: Any,
) -> None:
    """Prints a replay of a session, a comparison of settings, or a list of sessions.

    Args:
        is_list: Whether to print the list of sessions, in place of all else.
        as_json: Whether to print JSON in place of text.
        compare: Whether to print a comparison in place of a replay.
        is_complete: Whether to print each call of a replay, also if there are many.
            JSON always has all calls.
        recording: The arguments of `read_recording`.
    """
    if is_list:
        print_sessions(as_json, **recording)
        return

    # Nearly all settings of a comparison are those of `COMPARED`, which the user has
    # not chosen. So the warnings about requests with such settings are silenced.
    silenced_loggers = [loop.logger] if compare else []
    with terminal.quiet_logs(Console(stderr=True), *silenced_loggers):
        session, settings = read_recording(**recording)
        result: Comparison | Replayed
        if compare:
            has_own_settings = bool(recording["config"])
            result = _compare_settings(session, settings, has_own_settings)
        else:
            result = asyncio.run(replay_session(session, settings))

    if as_json:
        print(json.dumps(result.to_json(), indent=2))
        return

    print_line(str(recordings.describe_session(session)), "dim")
    if isinstance(result, Comparison):
        result.print()
    else:
        figures.print_replayed(result, is_complete)


def _compare_settings(
    session: Session, settings: ReplaySettings, has_own_settings: bool
) -> Comparison:
    """Replays a session once with each of the settings to compare.

    If `has_own_settings` is true, `settings.guard` has the settings of the user. Then
    these are compared as well.
    """
    rows = list(list_rows(settings.guard, settings.window_tokens))
    if has_own_settings:
        rows.append(Row("your settings", settings.guard))

    row_guards = [row.guard for row in rows]
    replays = asyncio.run(replay_guards(session, settings, row_guards))
    return Comparison(rows, replays)


def read_recording(
    source: str, key: SessionKey, config: str | None, **options: Any
) -> tuple[Session, ReplaySettings]:
    """Reads a recorded session, and the settings to replay it with.

    Args:
        source: The file or the URL that has the session.
        key: The names of the session in a database.
        config: The path of a settings file; None for the built-in settings.
        options: The fields of `ReplaySettings` other than `guard`.
    """
    guard = load_settings(config) if config else PluginSettings()
    session = asyncio.run(recordings.load_session(source, key))
    return session, ReplaySettings(guard, **options)


def print_sessions(
    as_json: bool, source: str, key: SessionKey, **_unused_options: Any
) -> None:
    """Prints the sessions that have the names of `key`, the newest first.

    The other options of a replay have no effect on a list.
    """
    with terminal.quiet_logs(Console(stderr=True)):
        listed = asyncio.run(recordings.list_sessions(source, key))

    sessions = list[dict[str, Any]]()
    for session in listed:
        time = f"{session.updated:%F %T}"
        sessions.append({**vars(session), "updated": time})

    if as_json:
        print(json.dumps(sessions, indent=2))
    else:
        _print_session_table(sessions)


def _print_session_table(sessions: list[dict[str, Any]]) -> None:
    """Prints the newest sessions in a table, under a line with the number of all.

    `sessions` has the newest first. Each session has the keys of `LIST_COLUMNS`.
    """
    print_line(f"Sessions: {len(sessions):,}; times in UTC", "bold")
    no_style = ""
    rows = list[tuple[list[str], str]]()
    for session in sessions[:MAX_LISTED]:
        values = [session[name] for name in LIST_COLUMNS]
        # Agent Engine does not tell the number of events: the value is None.
        cells = ["-" if value is None else str(value) for value in values]
        rows.append((cells, no_style))

    older_count = len(sessions) - MAX_LISTED
    if older_count > 0:
        text = f"... {older_count:,} older ones: see --app, --json"
        rows.append(([text], no_style))

    columns: list[Any] = []
    if sessions:  # An empty table has no head, either.
        *name_columns, count_column = LIST_COLUMNS
        columns = [*name_columns, terminal.number_column(count_column)]
    terminal.print_table(columns, rows)


async def replay_session(session: Session, settings: ReplaySettings) -> Replayed:
    """Replays the recorded model calls of a session with the guard's settings."""
    (replayed,) = await replay_guards(session, settings, [settings.guard])
    return replayed


async def replay_guards(
    session: Session,
    settings: ReplaySettings,
    guards: Sequence[PluginSettings],
) -> list[Replayed]:
    """Replays a session with several acting guards; ADK builds each request once.

    Args:
        session: The recorded session.
        settings: The assumptions. `settings.guard` has the settings of the watching
            guard.
        guards: The settings of each acting guard.

    Returns:
        One replay for each acting guard, in the order of `guards`.
    """
    calls = _list_recorded_calls(session, settings.agent)
    usages = [read_usage(call.event.usage_metadata) for call in calls]
    has_cache = any(usage.cached_tokens for usage in usages)
    replay = _Replay(session, settings, guards, has_cache)
    await replay.infer_agents(calls)

    needs = Needs(session.events, calls)
    calls_by_guard = [list[ReplayedCall]() for _ in guards]
    numbered_calls = list(enumerate(calls, 1))
    for number, call in terminal.show_progress(numbered_calls, "Replaying"):
        played_calls = await replay.play_call(number, call, needs)
        for guard_calls, played in zip(calls_by_guard, played_calls, strict=True):
            guard_calls.append(played)

    return [
        Replayed(session.id, replay.fixed_tokens, guard_calls, has_cache)
        for guard_calls in calls_by_guard
    ]


def _list_recorded_calls(session: Session, agent: str | None) -> list[RecordedCall]:
    """Lists the recorded model calls of an agent; None for those of all agents.

    Raises a `CommandError` if there are no calls.
    """
    calls = list(list_calls(session, agent))
    if not calls:
        of_agent = f" of agent {agent!r}" if agent else ""
        raise CommandError(
            f"session {session.id!r} has no model response{of_agent} with a recorded "
            "prompt token count"
        )
    return calls


class _ComparedTokens(NamedTuple):
    """A guard's estimate of a request, and the provider's count of the same request.

    Attributes:
        estimated: The estimated tokens; None if no guard watches the agent.
        real: The real tokens; None if the recording has no count of this request.
    """

    estimated: int | None
    real: int | None

    @property
    def error_ratio(self) -> float | None:
        """The error of the estimate, as a part of the count: -0.1 is 10% too low.

        None if the estimate or the count is unknown.
        """
        if not (self.estimated and self.real):
            return None
        return self.estimated / self.real - 1

    def measure_pressure(self, window_tokens: int) -> float | None:
        """Returns the part of a window that the estimate fills; None if unknown."""
        return self.estimated / window_tokens if self.estimated else None


class _WholeCall(NamedTuple):
    """A recorded call, made again with the whole history.

    Attributes:
        number: The number of the call in the recording, from 1.
        agent: The name of the agent.
        sent: The request with the whole history, and its usage.
        tokens: The estimate and the count to compare.
        window_tokens: The window of the agent's model, for all guards alike.
        needed: The values that the call needed.
    """

    number: int
    agent: str
    sent: Sent
    tokens: _ComparedTokens
    window_tokens: int
    needed: list[Needed]


class _Replay:
    """A session that is replayed with a watching guard and with acting guards.

    Each guard has a side: a copy of the session that grows as the recording did. Each
    agent has a scale, by which heuristic tokens become real tokens. The agents are made
    by `infer_agents`, before the first call of `play_call`.

    Attributes:
        fixed_tokens: By agent, its fixed tokens, in heuristic tokens.
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

        # By the name of the agent.
        self._agents: dict[str, LlmAgent] = {}
        self._scales: dict[str, Scale] = {}
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

    async def infer_agents(self, calls: Sequence[RecordedCall]) -> None:
        """Makes the agents that have made the recorded calls."""
        calls_by_agent = defaultdict[str, list[RecordedCall]](list)
        for call in calls:
            calls_by_agent[call.event.author].append(call)
        for name, agent_calls in calls_by_agent.items():
            await self._infer_agent(name, agent_calls)

    async def _infer_agent(self, name: str, calls: list[RecordedCall]) -> None:
        """Makes an agent with an instruction as long as the recorded counts suggest.

        A recording has neither the instruction nor `include_contents`. Both settings of
        `include_contents` are tried:

        - "none": the agent was sent only the running turn.
        - "default": the agent was sent the whole history.

        The agent keeps the setting that fits the counts.

        Args:
            name: The name of the agent.
            calls: The recorded calls of the agent.
        """
        agent = make_agent(name, tools=_list_tools(self._recorded, name))
        self._agents[name] = agent
        self._scales[name] = Scale()

        sample = _choose_sample(calls)
        turn_counts = await self._count_requests(agent, "none", sample.calls)
        turn_fit = _fit_counts(turn_counts, sample.is_heuristic)
        whole_counts = await self._count_requests(agent, "default", sample.calls)
        whole_fit = _fit_counts(whole_counts, sample.is_heuristic)

        if _is_turn_only(turn_fit, whole_fit, sample.is_heuristic):
            agent.include_contents = "none"
            fit = turn_fit
        else:
            agent.include_contents = "default"
            fit = whole_fit

        self.fixed_tokens[name] = fit.fixed_tokens
        # All requests have the same configuration, so any of the counts will do. There
        # are none if a guard had cut all recorded requests.
        config_tokens = whole_counts[-1].config_tokens if whole_counts else 0
        # The rest of the fixed tokens are those of the unknown instruction.
        agent.instruction = _make_instruction(fit.fixed_tokens - config_tokens)

    async def _count_requests(
        self,
        agent: LlmAgent,
        include_contents: Literal["none", "default"],
        calls: Sequence[RecordedCall],
    ) -> list[_Counts]:
        """Builds the requests of calls, and counts their tokens.

        Args:
            agent: The agent, which has no instruction yet.
            include_contents: The setting with which the agent is tried; the agent keeps
                it.
            calls: Some calls of the agent.
        """
        agent.include_contents = include_contents
        side = Side(self._recorded, self._settings.model, self._memo)
        counts = list[_Counts]()
        for call in calls:
            request = await side.build(call, agent)
            request_counts = _Counts(
                content_tokens=self._memo.estimate_tokens(request.contents),
                config_tokens=estimate_config_tokens(request.config),
                # All calls of a sample have heuristic tokens, or none has.
                recorded_tokens=call.heuristic_tokens or call.prompt_tokens,
            )
            counts.append(request_counts)
        return counts

    async def play_call(
        self, number: int, call: RecordedCall, needs: Needs
    ) -> list[ReplayedCall]:
        """Replays a call; returns one replayed call for each acting guard.

        Args:
            number: The number of the call in the recording, from 1.
            call: The recorded call. Calls come in the order of the recording.
            needs: The values that the recorded calls needed.
        """
        agent = self._agents[call.event.author]
        # The whole history is sent first, because its recorded count corrects the scale
        # of the agent. The requests of the acting guards are counted by this scale.
        whole_call = await self._send_whole(number, call, needs)

        played = list[ReplayedCall]()
        for acting in self._acting:
            acting.llm.scale = self._scales[agent.name]
            sent = await acting.send(call, agent, whole_call.sent.request)
            missing = needs.find_missing(whole_call.needed, sent.request.contents)
            played.append(self._join_figures(whole_call, sent, missing, acting.state))
        return played

    async def _send_whole(
        self, number: int, call: RecordedCall, needs: Needs
    ) -> _WholeCall:
        """Makes a call with the whole history, on the side of the watching guard.

        The arguments are those of `play_call`.
        """
        agent = self._agents[call.event.author]
        scale = self._scales[agent.name]
        # `send` will replace `scale.last`, so the ratio of the last call is read here.
        last_ratio = scale.last.ratio if scale.last else None

        watching = self._watching
        watching.llm.call = call
        watching.llm.scale = scale
        request = await watching.build(call, agent)
        sent = await watching.send(call, agent, request)

        whole_estimate = sent.record.estimated_tokens if sent.record else None
        if watching.llm.is_whole:
            tokens = _ComparedTokens(whole_estimate, call.prompt_tokens)
        else:
            tokens = _compare_cut_request(call, whole_estimate, last_ratio)

        window_tokens = self._find_window(sent)
        return _WholeCall(
            number=number,
            agent=agent.name,
            sent=sent,
            tokens=tokens,
            window_tokens=window_tokens,
            needed=needs.find(call, sent.request.contents, window_tokens),
        )

    def _join_figures(
        self,
        whole_call: _WholeCall,
        sent: Sent,
        missing: list[Needed],
        state: dict[str, Any],
    ) -> ReplayedCall:
        """Joins the figures of both requests of a call, the whole and the cut one.

        Args:
            whole_call: The call with the whole history.
            sent: The request that an acting guard has sent.
            missing: The needed values that the sent request does not hold.
            state: The session state on the side of the acting guard.
        """
        whole = whole_call.sent
        tokens = whole_call.tokens
        compaction = sent.record.compaction if sent.record else None
        # A guard that does not watch the agent has no record of the call. The threshold
        # is taken from the acting guard or, if it has no record, from the watching one.
        record = sent.record or whole.record

        return ReplayedCall(
            number=whole_call.number,
            agent=whole_call.agent,
            window_tokens=whole_call.window_tokens,
            threshold_tokens=record.threshold_tokens if record else None,
            # The request with the whole history.
            contents=len(whole.request.contents),
            whole_tokens=whole.usage.prompt_tokens,
            whole_bill=self._price(whole),
            needed=whole_call.needed,
            # The estimate of the recorded request.
            estimated_tokens=tokens.estimated,
            real_tokens=tokens.real,
            error_ratio=tokens.error_ratio,
            pressure=tokens.measure_pressure(whole_call.window_tokens),
            # The request of the acting guard.
            sent_contents=len(sent.request.contents),
            sent_tokens=sent.usage.prompt_tokens,
            sent_bill=self._price(sent),
            compaction=compaction,
            missing=missing,
            # A copy, because the state changes with the next call.
            state=dict(state) if compaction else {},
        )

    def _find_window(self, whole: Sent) -> int:
        """Returns the window, in tokens, of the agent that has sent a request.

        `whole` is the request of the watching guard.
        """
        if whole.record:  # An agent that no guard watches has no record.
            return whole.record.window_tokens
        if self._settings.window_tokens is not None:
            return self._settings.window_tokens
        return resolve_context_window(whole.request.model or "").tokens

    def _price(self, sent: Sent) -> Bill:
        """Prices a call and its summaries, also those of compactions that failed."""
        model = sent.request.model or ""
        costs = resolve_costs(model, self._settings.guard.prices, registry=None)
        bill = Bill(sent.usage, price_calls([sent.usage], costs))
        if sent.record:
            bill += Bill(sent.record.summary_usage, sent.record.summary_cost)
        return bill


def _compare_cut_request(
    call: RecordedCall, whole_estimate: int | None, last_ratio: float | None
) -> _ComparedTokens:
    """Returns an estimate, and its count, for a call whose recorded request was cut.

    The recorded count is that of the cut request, so only an estimate of the cut
    request can be compared with the count.

    - If the watching guard watches the agent, and `last_ratio` and the heuristic tokens
      of the cut request are known: the product of the two, with the recorded count. The
      product is the estimate of a guard for the cut request.
    - Otherwise: `whole_estimate`, without a count.

    Args:
        call: The recorded call.
        whole_estimate: The estimate of the whole history; None if the watching guard
            does not watch the agent.
        last_ratio: The real tokens per heuristic token of the agent's last recorded
            request; None if unknown.
    """
    if whole_estimate and call.heuristic_tokens and last_ratio:
        cut_estimate = round(call.heuristic_tokens * last_ratio)
        return _ComparedTokens(cut_estimate, call.prompt_tokens)
    return _ComparedTokens(whole_estimate, None)


class _RecordedTool(BaseTool):
    """A tool of which only the name is known, so that its declaration has no more."""

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(name=self.name)


def _list_tools(session: Session, agent: str) -> list[Any]:
    """Makes the tools that an agent has called, in the order of their first calls.

    The tools of ADK and of the guard are left out, and so are calls without a name.
    """
    names = list[str]()
    for event in session.events:
        if event.author == agent:
            names += [call.name or "" for call in event.get_function_calls()]

    foreign_prefixes = (RECALL_TOOL, "adk_")
    tools = list[Any]()
    for name in dict.fromkeys(names):  # Each name once.
        if name and not name.startswith(foreign_prefixes):
            tools.append(_RecordedTool(name=name, description=name))
    return tools


def _make_instruction(tokens: int) -> str:
    """Returns a text of some heuristic tokens; "" for 0 tokens, and for less."""
    chars = 4 * max(0, tokens)  # Each character is one byte.
    word = "instruction "
    word_count = math.ceil(chars / len(word))
    return (word * word_count)[:chars]


class _Sample(NamedTuple):
    """Calls of an agent, from which its fixed tokens are inferred.

    Attributes:
        calls: Some calls of the agent.
        is_heuristic: Whether a guard has stored the heuristic tokens of each request.
            Otherwise only the provider's counts are known.
    """

    calls: list[RecordedCall]
    is_heuristic: bool


def _choose_sample(calls: Sequence[RecordedCall]) -> _Sample:
    """Chooses calls of an agent, evenly spread over the session.

    Calls whose requests a guard had cut are left out. If some of the other calls have
    heuristic tokens, only these are chosen. For example, of 90 calls every second one
    is chosen.
    """
    whole_calls = [call for call in calls if not call.is_guarded]
    heuristic_calls = [call for call in whole_calls if call.heuristic_tokens]
    candidates = heuristic_calls or whole_calls
    step = max(1, len(candidates) // LEAST_SAMPLE_CALLS)
    return _Sample(candidates[::step], is_heuristic=bool(heuristic_calls))


class _Counts(NamedTuple):
    """The tokens of a request that was built again, and of the recorded request.

    Attributes:
        content_tokens: The heuristic tokens of the contents.
        config_tokens: The heuristic tokens of the tools and of ADK's own instruction.
        recorded_tokens: The recorded count of the request, the app's instruction
            included: heuristic tokens if a guard has stored them, else real tokens.
    """

    content_tokens: int
    config_tokens: int
    recorded_tokens: int


class _Fit(NamedTuple):
    """The fixed tokens of an agent, and how well they fit the recorded counts.

    Attributes:
        fixed_tokens: The heuristic tokens of instruction and tools.
        error_ratio: The median error of the counts that follow from the fixed tokens.
            The error is the difference from the recorded count, as a part of it; 0.1 is
            10% too high or too low.
    """

    fixed_tokens: int
    error_ratio: float


def _fit_counts(counts: Sequence[_Counts], is_heuristic: bool) -> _Fit:
    """Infers the fixed tokens of an agent from the counts of some of its requests.

    All requests should fit one equation, with the same ratio and fixed tokens:

        recorded_tokens = ratio * (content_tokens + fixed_tokens)

    For example, contents of 100 and 300 tokens that a provider counted as 240 and 640
    give a ratio of 2, and 20 fixed tokens.

    Args:
        counts: The counts of the requests. If there are none, the result is a fit of 0
            tokens without an error.
        is_heuristic: Whether the recorded tokens are heuristic tokens, so that the
            ratio is 1. Otherwise the ratio is inferred.
    """
    if not counts:
        return _Fit(0, 0.0)

    if is_heuristic:
        ratio = 1.0
        # The guard that has counted the requests may have shortened tool results. The
        # first request has the fewest results, so only this request is trusted.
        trusted_counts = counts[:1]
    else:
        ratio = _infer_token_ratio(counts)
        trusted_counts = counts

    # The recorded tokens of each request that are not those of its contents.
    fixed_recorded_tokens = [
        each.recorded_tokens - ratio * each.content_tokens for each in trusted_counts
    ]
    fixed_tokens = max(0, round(statistics.median(fixed_recorded_tokens) / ratio))

    error_ratios = list[float]()
    for each in counts:
        expected_tokens = ratio * (each.content_tokens + fixed_tokens)
        error_tokens = abs(expected_tokens - each.recorded_tokens)
        error_ratios.append(error_tokens / each.recorded_tokens)
    return _Fit(fixed_tokens, statistics.median(error_ratios))


def _is_turn_only(turn_fit: _Fit, whole_fit: _Fit, is_heuristic: bool) -> bool:
    """Whether the recorded counts say that an agent was sent only the running turn.

    Few agents are sent only the running turn. So the error of the fit with the running
    turn must be small, and less than half of the error of the fit with the whole
    history.
    """
    most_error_ratio = MOST_TURN_ERROR_RATIO
    if is_heuristic:
        most_error_ratio = MOST_HEURISTIC_TURN_ERROR_RATIO
    has_small_error = turn_fit.error_ratio < most_error_ratio
    return has_small_error and turn_fit.error_ratio < whole_fit.error_ratio / 2


def _infer_token_ratio(counts: Sequence[_Counts]) -> float:
    """Infers the real tokens per heuristic token from requests of one agent.

    All requests have the same fixed tokens, so the recorded tokens of two requests
    differ only by those of their contents. Each two requests give a ratio; the median
    is returned. Returns 1.0 if no two requests differ by enough tokens.
    """
    ratios = list[float]()
    for one, other in combinations(counts, 2):
        difference = other.content_tokens - one.content_tokens
        larger_tokens = max(one.content_tokens, other.content_tokens)
        if abs(difference) > LEAST_DIFFERENCE_RATIO * larger_tokens:
            real_difference = other.recorded_tokens - one.recorded_tokens
            ratios.append(real_difference / difference)

    if not ratios:
        return 1.0
    return clamp(statistics.median(ratios), LEAST_TOKEN_RATIO, MOST_TOKEN_RATIO)
