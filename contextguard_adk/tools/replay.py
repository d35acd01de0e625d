"""`contextguard replay`: what the guard would have done in a recorded session.

For each recorded model call, an agent with the recorded name runs on the events before
it, once with a plugin that only observes and once with one that compacts. Its model is
simulated: it answers with the recorded token count, and its summaries are excerpts. A
recording has neither instruction nor tools; their size is inferred from the counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

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
from rich.progress import track

from contextguard_adk import telemetry
from contextguard_adk.config import CONFIG_VARIABLE, PluginSettings, load_settings
from contextguard_adk.plugin import ContextGuardPlugin
from contextguard_adk.providers.windows import resolve_context_window
from contextguard_adk.strategies import Strategy
from contextguard_adk.telemetry import CallRecord
from contextguard_adk.testing import SimulatedLlm
from contextguard_adk.testing.provider import count_request_tokens
from contextguard_adk.tools.recordings import (
    RecordedCall,
    SessionKey,
    fit_counts,
    list_calls,
    list_tools,
    load_session,
    own_state,
)
from contextguard_adk.tools.replay_report import (
    LONG_CALLS,
    Replayed,
    ReplayedCall,
    print_replayed,
    require_plotting,
    save_plot,
)
from contextguard_adk.tools.terminal import CommandError, quiet_logs

SAMPLED_CALLS = 40
"""How many calls of an agent are used to infer the size of its instruction."""

_UNLIMITED_TOKENS = 10**12
_FILLER = "instruction "

Report = Callable[[int], int | None]
"""Returns the prompt tokens to report for a request of so many bytes / 4."""


@dataclass(frozen=True)
class ReplaySettings:
    """What a replay assumes of the recorded app.

    Attributes:
        guard: The plugin's settings.
        agent: Only this agent's calls; None replays all.
        model: The model whose window counts; None takes the one that each response
            names.
        window_tokens: The window of all strategies; None leaves theirs.
    """

    guard: PluginSettings = field(default_factory=PluginSettings)
    agent: str | None = None
    model: str | None = None
    window_tokens: int | None = None

    def adapt(self, strategy: Strategy | None) -> Strategy | None:
        """Returns a strategy with the wanted window that asks no real model."""
        if strategy is None:
            return None
        summarizer = strategy.summarizer
        summary_window_tokens = strategy.summarizer_context_window
        if summarizer is not None and summary_window_tokens is None:
            name = summarizer if isinstance(summarizer, str) else summarizer.model
            summary_window_tokens = resolve_context_window(name).tokens
        return strategy.model_copy(
            update={
                "context_window": self.window_tokens or strategy.context_window,
                "summarizer": None,
                "summarizer_context_window": summary_window_tokens,
            }
        )


def run_replay(arguments: argparse.Namespace) -> int:
    """Replays a recorded session and prints the result.

    Args:
        arguments: Those of the command line.

    Returns:
        0.

    Raises:
        CommandError: There is nothing to replay, or the drawing cannot be written.
        ConfigError: The settings file is wrong.
    """
    if arguments.plot:
        require_plotting(arguments.plot)
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
        replayed = asyncio.run(_load_and_replay(arguments.source, key, settings))
        if arguments.plot:
            save_plot(replayed, arguments.plot)
    if arguments.json:
        print(json.dumps(replayed.to_json(), indent=2))
    else:
        print_replayed(replayed, is_complete=arguments.all)
    return 0


async def _load_and_replay(
    source: str, key: SessionKey, settings: ReplaySettings
) -> Replayed:
    return await replay_session(await load_session(source, key), settings)


async def replay_session(session: Session, settings: ReplaySettings) -> Replayed:
    """Replays the recorded model calls of a session.

    Args:
        session: The recording; it is not changed.
        settings: What is assumed.

    Raises:
        CommandError: There is nothing to replay.
    """
    calls = list(list_calls(session, settings.agent))
    if not calls:
        of_agent = f" of agent {settings.agent!r}" if settings.agent else ""
        raise CommandError(
            f"session {session.id!r} has no model response{of_agent} with a recorded "
            "prompt token count"
        )
    replay = _Replay(session, settings)
    for name in dict.fromkeys(call.event.author for call in calls):
        await replay.infer([call for call in calls if call.event.author == name])
    console = Console(stderr=True)
    progress = track(
        enumerate(calls, 1),
        "replaying",
        total=len(calls),
        console=console,
        transient=True,
        disable=not console.is_terminal or len(calls) < LONG_CALLS,
    )
    replayed = [await replay.step(number, call) for number, call in progress]
    return Replayed(session.id, replay.fixed_tokens, replayed, replay.summary_tokens)


class _RecordedTool(BaseTool):
    """A tool of which only the name is known."""

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(name=self.name)


class _RecordedModel(BaseLlm):
    """Reports a token count in place of an answer, and writes summaries offline."""

    summarizer: SimulatedLlm
    report: Report
    contents: list[types.Content] = Field(default_factory=list)
    """Of the agent's request; empty where it made none."""

    request_tokens: int = 0
    """The size of that request, by bytes / 4."""

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
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=self.report(self.request_tokens)
        )
        content = types.Content(role="model", parts=[types.Part(text=".")])
        yield LlmResponse(content=content, usage_metadata=usage)


@dataclass
class _RecordedAgent:
    """One agent of the recording, and what was inferred of it.

    Attributes:
        tools: The names of the tools that it called.
        instruction: As long as the recorded one must have been.
        is_turn_only: Whether it sees only the current turn.
        ratio: Real tokens / (bytes / 4) of its last request with a real count.
    """

    tools: list[str]
    instruction: str = ""
    is_turn_only: bool = False
    ratio: float = 1.0


class _Side:
    """A session that grows as the recording does, and the plugin that sees it."""

    def __init__(self, recorded: Session, plugin: ContextGuardPlugin | None) -> None:
        in_deltas = {
            key for event in recorded.events for key in event.actions.state_delta
        }
        initial = {k: v for k, v in recorded.state.items() if k not in in_deltas}
        update = {"state": own_state(initial), "events": []}
        self._session = recorded.model_copy(update=update)
        self._recorded = recorded
        self._plugins = PluginManager([plugin] if plugin else None)

    async def play(self, call: RecordedCall, agent: LlmAgent) -> None:
        """Runs an agent for one model call on what was recorded before it."""
        event = call.event
        before = self._recorded.events[: call.index]
        for new in before[len(self._session.events) :]:
            self._session.events.append(new)
            self._session.state.update(own_state(new.actions.state_delta))
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
        except ValueError as error:  # Of a result without its call, for instance.
            raise CommandError(
                f"ADK cannot build a request from the recording: {error}"
            ) from error


class _Replay:
    def __init__(self, recorded: Session, settings: ReplaySettings) -> None:
        self._recorded = recorded
        self._settings = settings
        self._watched: list[CallRecord] = []
        self._acted: list[CallRecord] = []
        self._watching = _Side(recorded, self._make_plugin(True, self._watched))
        self._acting = _Side(recorded, self._make_plugin(False, self._acted))
        self._agents: dict[str, _RecordedAgent] = {}
        self.fixed_tokens: dict[str, int] = {}
        self.summary_tokens = 0

    def _make_plugin(
        self, is_observing: bool, records: list[CallRecord]
    ) -> ContextGuardPlugin:
        guard, adapt = self._settings.guard, self._settings.adapt
        return ContextGuardPlugin(
            agents={name: adapt(strategy) for name, strategy in guard.agents.items()},
            default=adapt(guard.default),
            observe=is_observing,
            state_keys="plain",
            warning_threshold=guard.warning_threshold,
            on_call=records.append,
        )

    async def infer(self, calls: Sequence[RecordedCall]) -> None:
        """Infers the size of an agent's instruction and tools from its counts.

        And whether it sees only the current turn: its counts do not grow then.
        """
        name = calls[0].event.author
        agent = _RecordedAgent(list_tools(self._recorded.events, name))
        self._agents[name] = agent
        own = [call for call in calls if not call.is_guarded]
        sample = own[:: max(1, len(own) // SAMPLED_CALLS)]
        fit = fit_counts([await self._measure(call) for call in sample])
        agent.is_turn_only = True
        turn_fit = fit_counts([await self._measure(call) for call in sample])
        # The recorded counts must speak clearly for the rarer setting.
        agent.is_turn_only = turn_fit.error_ratio < fit.error_ratio / 2
        fixed_tokens = (turn_fit if agent.is_turn_only else fit).fixed_tokens
        self.fixed_tokens[name] = fixed_tokens
        if sample:
            request = await self._build(sample[0])
            known_tokens = request.request_tokens - _count_contents(request)
            text_chars = 4 * max(0, fixed_tokens - known_tokens)
            agent.instruction = (_FILLER * text_chars)[:text_chars]

    async def _measure(self, call: RecordedCall) -> tuple[int, int]:
        """Returns contents by bytes / 4 and the real count of a call."""
        return _count_contents(await self._build(call)), call.prompt_tokens

    async def _build(self, call: RecordedCall) -> _RecordedModel:
        """Plays a call without a plugin."""
        return await self._play(_Side(self._recorded, None), call, lambda _: None)

    async def step(self, number: int, call: RecordedCall) -> ReplayedCall:
        """Replays one call."""
        agent = self._agents[call.event.author]
        real = None if call.is_guarded else call.prompt_tokens
        whole = await self._play(self._watching, call, lambda _: real)
        if real is not None:
            agent.ratio = real / whole.request_tokens
        sent = await self._play(
            self._acting, call, lambda count: max(1, round(count * agent.ratio))
        )
        self.summary_tokens += round(sent.summarizer.billed_tokens * agent.ratio)
        # An exempt agent has no records.
        watched = self._watched.pop() if self._watched else None
        acted = self._acted.pop() if self._acted else None
        return ReplayedCall(
            number=number,
            agent=call.event.author,
            contents=len(whole.contents),
            estimated_tokens=watched.estimated_tokens if watched else None,
            real_tokens=real,
            whole_tokens=real or round(whole.request_tokens * agent.ratio),
            window_tokens=acted.window_tokens if acted else None,
            threshold_tokens=acted.threshold_tokens if acted else None,
            sent_contents=len(sent.contents),
            sent_tokens=max(1, round(sent.request_tokens * agent.ratio)),
            compaction=acted.compaction if acted else None,
        )

    async def _play(
        self, side: _Side, call: RecordedCall, report: Report
    ) -> _RecordedModel:
        """Plays one call with a model of its own; returns that."""
        name = call.event.author
        agent = self._agents[name]
        llm = _RecordedModel(
            model=self._settings.model or call.event.model_version or "",
            summarizer=SimulatedLlm(context_window=_UNLIMITED_TOKENS, token_ratio=1.0),
            report=report,
        )
        try:
            played = LlmAgent(
                name=name,
                model=llm,
                instruction=agent.instruction,
                tools=[_RecordedTool(name=n, description=n) for n in agent.tools],
                include_contents="none" if agent.is_turn_only else "default",
            )
        except ValidationError as error:
            raise CommandError(f"{name!r} is not a name of an agent") from error
        await side.play(call, played)
        if not llm.contents:
            raise CommandError("ADK makes no model call where one was recorded")
        return llm


def _count(request: LlmRequest) -> int:
    """Counts a request by bytes / 4, images and files as the simulator does."""
    return count_request_tokens(request, token_ratio=1.0, media_tokens=258)


def _count_contents(llm: _RecordedModel) -> int:
    return _count(LlmRequest(contents=llm.contents))
