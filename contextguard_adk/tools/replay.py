"""`contextguard replay`: what the guard would have done in a recorded session."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.run_config import RunConfig
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.plugin_manager import PluginManager
from google.adk.sessions import InMemorySessionService, Session
from google.adk.tools.base_tool import BaseTool
from google.genai import types
from pydantic import Field, ValidationError
from rich.console import Console

from contextguard_adk import telemetry
from contextguard_adk.config import CONFIG_VARIABLE, PluginSettings, load_settings
from contextguard_adk.measuring.tokens import estimate_config_tokens
from contextguard_adk.plugin import ContextGuardPlugin
from contextguard_adk.providers.windows import resolve_context_window
from contextguard_adk.strategies import Strategy
from contextguard_adk.summarizing.transcript import RECALL_TOOL
from contextguard_adk.testing import SimulatedLlm
from contextguard_adk.testing.provider import count_request_tokens
from contextguard_adk.tools import recordings, replay_report
from contextguard_adk.tools.recordings import RecordedCall, SessionKey
from contextguard_adk.tools.replay_report import Replayed, ReplayedCall
from contextguard_adk.tools.terminal import CommandError, quiet_logs

Report = Callable[[int], int | None]
# Todos and a request for a compaction are the user's.
_OWN_KEY = re.compile(r"__context_guard_(?!todos_)|context_guard:(?!todos:|compact)")


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
        changes: dict[str, Any] = {"summarizer": None}
        if summarizer := strategy.summarizer:
            name = summarizer if isinstance(summarizer, str) else summarizer.model
            tokens = strategy.summarizer_context_window
            tokens = tokens or resolve_context_window(name).tokens
            changes["summarizer_context_window"] = tokens
        if self.window_tokens:
            changes["context_window"] = self.window_tokens
        return strategy.model_copy(update=changes)


def run_replay(arguments: argparse.Namespace) -> int:
    """Replays the session that the command line names, and prints the result."""
    if arguments.plot:
        replay_report.require_plotting(arguments.plot)
    # The table shows what is logged of calls and compactions.
    with quiet_logs(Console(stderr=True), [telemetry.logger]):
        config = arguments.config or os.environ.get(CONFIG_VARIABLE)
        settings = ReplaySettings(
            guard=load_settings(config) if config else PluginSettings(),
            agent=arguments.agent,
            model=arguments.model,
            window_tokens=arguments.window,
        )
        key = SessionKey(arguments.app, arguments.user, arguments.session)
        session = asyncio.run(recordings.load_session(arguments.source, key))
        replayed = asyncio.run(replay_session(session, settings))
        if arguments.plot:
            replay_report.save_plot(replayed, arguments.plot)
    if arguments.json:
        print(json.dumps(replayed.to_json(), indent=2))
    else:
        replay_report.print_replayed(replayed, is_complete=arguments.all)
    return 0


async def replay_session(session: Session, settings: ReplaySettings) -> Replayed:
    """Replays the recorded model calls of a session, which stays as it is."""
    calls = list(recordings.list_calls(session, settings.agent))
    if not calls:
        of_agent = f" of agent {settings.agent!r}" if settings.agent else ""
        missing = f"no model response{of_agent} with a recorded prompt token count"
        raise CommandError(f"session {session.id!r} has {missing}")
    replay = _Replay(session, settings)
    for name in dict.fromkeys(call.event.author for call in calls):
        await replay.infer(name, [c for c in calls if c.event.author == name])
    replayed = [await replay.step(number, call) for number, call in enumerate(calls, 1)]
    return Replayed(session.id, replay.fixed_tokens, replayed, replay.summary_tokens)


class _RecordedTool(BaseTool):
    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(name=self.name)


class _RecordedModel(BaseLlm):
    """Reports a token count in place of an answer, and writes summaries offline."""

    report: Report
    summarizer: SimulatedLlm
    contents: list[types.Content] = Field(default_factory=list)
    request_tokens: int = 0
    config_tokens: int = 0

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers a request with a dot, or with the summary that it asks for."""
        if self.summarizer.is_summary_request(llm_request):
            async for response in self.summarizer.generate_content_async(llm_request):
                yield response
            return
        self.contents = llm_request.contents
        self.request_tokens = max(1, _count(llm_request))
        self.config_tokens = estimate_config_tokens(llm_request.config)
        tokens = self.report(self.request_tokens)
        usage = types.GenerateContentResponseUsageMetadata(prompt_token_count=tokens)
        yield LlmResponse(content=types.ModelContent("."), usage_metadata=usage)


class _Side:
    """A session that grows as the recording does, and the plugin that sees it."""

    def __init__(
        self, recorded: Session, model: str | None, *plugins: ContextGuardPlugin
    ) -> None:
        self._model = model
        later = {key for event in recorded.events for key in event.actions.state_delta}
        state = {k: v for k, v in recorded.state.items() if k not in later}
        update = {"state": _own_state(state), "events": []}
        self._session = recorded.model_copy(update=update)
        self._recorded = recorded
        self._plugins = PluginManager([*plugins])

    async def play(
        self, call: RecordedCall, agent: LlmAgent, report: Report = lambda _: None
    ) -> _RecordedModel:
        """Has an agent make one model call on what was recorded before it."""
        event = call.event
        for new in self._recorded.events[len(self._session.events) : call.index]:
            self._session.events.append(new)
            self._session.state.update(_own_state(new.actions.state_delta))
        model = self._model or event.model_version or ""
        summarizer = SimulatedLlm(context_window=10**12, token_ratio=1.0)
        llm = _RecordedModel(model=model, report=report, summarizer=summarizer)
        agent.model = llm
        invocation = InvocationContext(
            session_service=InMemorySessionService(),
            session=self._session,
            invocation_id=event.invocation_id,
            agent=agent,
            branch=event.branch,
            isolation_scope=event.isolation_scope,
            node_path=event.node_info.path or None,
            run_config=RunConfig(),
            plugin_manager=self._plugins,
        )
        try:
            async for _ in agent.run_async(invocation):
                pass
        except Exception as error:  # A result without its call, for instance.
            text = f"ADK cannot build a request from the recording: {error}"
            raise CommandError(text) from error
        if not llm.request_tokens:
            raise CommandError("ADK makes no model call where one was recorded")
        return llm


class _Replay:
    def __init__(self, recorded: Session, settings: ReplaySettings) -> None:
        self._recorded = recorded
        self._settings = settings
        self._watching, self._watched = self._make_side(observe=True)
        self._acting, self._acted = self._make_side(observe=False)
        self._agents: dict[str, LlmAgent] = {}
        # Real tokens / (bytes / 4) of an agent's last request with a real count.
        self._ratios: dict[str, float] = {}
        self.fixed_tokens: dict[str, int] = {}
        self.summary_tokens = 0

    def _make_side(self, observe: bool) -> tuple[_Side, list[telemetry.CallRecord]]:
        records: list[telemetry.CallRecord] = []
        guard, adapt = self._settings.guard, self._settings.adapt
        plugin = ContextGuardPlugin(
            agents={name: adapt(strategy) for name, strategy in guard.agents.items()},
            default=adapt(guard.default),
            observe=observe,
            state_keys="plain",
            warning_threshold=guard.warning_threshold,
            on_call=records.append,
        )
        return _Side(self._recorded, self._settings.model, plugin), records

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
            side = _Side(self._recorded, self._settings.model)
            built = [await side.play(call, agent) for call in sample]
            pairs = zip(built, sample, strict=True)
            counts = [(_count(llm.contents), call.prompt_tokens) for llm, call in pairs]
            fits.append(recordings.fit_counts(counts))
        (whole, whole_error), (turn, turn_error) = fits
        # The recorded counts must speak clearly for the rarer setting.
        is_turn_only = turn_error < whole_error / 2
        agent.include_contents = "none" if is_turn_only else "default"
        self.fixed_tokens[name] = turn if is_turn_only else whole
        if sample:
            side = _Side(self._recorded, self._settings.model)
            first = await side.play(sample[0], agent)
            text_chars = 4 * max(0, self.fixed_tokens[name] - first.config_tokens)
            agent.instruction = ("instruction " * text_chars)[:text_chars]

    async def step(self, number: int, call: RecordedCall) -> ReplayedCall:
        """Replays one call with either plugin."""
        name = call.event.author
        agent = self._agents[name]
        real = None if call.is_guarded else call.prompt_tokens
        whole = await self._watching.play(call, agent, lambda _: real)
        if real is not None:
            self._ratios[name] = real / whole.request_tokens
        ratio = self._ratios[name]
        sent = await self._acting.play(
            call, agent, lambda count: max(1, round(count * ratio))
        )
        self.summary_tokens += round(sent.summarizer.billed_tokens * ratio)
        # An exempt agent has no records.
        watched = self._watched.pop() if self._watched else None
        acted = self._acted.pop() if self._acted else None
        estimate = watched.estimated_tokens if watched else None
        return ReplayedCall(
            number=number,
            agent=name,
            contents=len(whole.contents),
            estimated_tokens=estimate,
            real_tokens=real,
            whole_tokens=real or round(whole.request_tokens * ratio),
            window_tokens=acted.window_tokens if acted else None,
            threshold_tokens=acted.threshold_tokens if acted else None,
            sent_contents=len(sent.contents),
            sent_tokens=max(1, round(sent.request_tokens * ratio)),
            compaction=acted.compaction if acted else None,
            error_ratio=estimate / real - 1 if estimate and real else None,
            pressure=estimate / acted.window_tokens if estimate and acted else None,
        )


def _list_tools(session: Session, agent: str) -> list[Any]:
    """Makes the tools that an agent has called, without ADK's and the guard's own."""
    own = [event for event in session.events if event.author == agent]
    calls = [call for event in own for call in event.get_function_calls()]
    names = dict.fromkeys(call.name or "adk_" for call in calls)
    wanted = [name for name in names if not name.startswith((RECALL_TOOL, "adk_"))]
    return [_RecordedTool(name=name, description=name) for name in wanted]


def _own_state(values: dict[str, Any]) -> dict[str, Any]:
    """Returns what is in state without what a guard keeps there for itself."""
    return {k: value for k, value in values.items() if not _OWN_KEY.match(k)}


def _count(content: LlmRequest | list[types.Content]) -> int:
    request = LlmRequest(contents=content) if isinstance(content, list) else content
    return count_request_tokens(request, token_ratio=1.0, media_tokens=258)
