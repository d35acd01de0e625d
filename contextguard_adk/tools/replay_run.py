"""What a guard would have done in a recorded session, offline.

For each recorded model call ADK itself builds the contents again from the events before
it. Two plugins with sessions of their own see them: one that only observes, for the
estimate of what was sent, and one that compacts, with summaries by extraction. A
recording has neither instruction nor tools; what they take is inferred from the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.run_config import RunConfig
from google.adk.flows.llm_flows.contents import request_processor
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types
from pydantic import ValidationError

from contextguard_adk.config import PluginSettings
from contextguard_adk.measuring.tokens import (
    estimate_contents_tokens,
    estimate_request_tokens,
)
from contextguard_adk.plugin import ContextGuardPlugin
from contextguard_adk.telemetry import CallRecord
from contextguard_adk.testing.llm import SimulatedLlm
from contextguard_adk.tools.fixed_part import fit_counts
from contextguard_adk.tools.recordings import (
    RecordedCall,
    RecordingError,
    list_calls,
    own_state,
)
from contextguard_adk.tools.replay_request import build_request, list_tools
from contextguard_adk.tools.replay_settings import ReplaySettings
from contextguard_adk.tools.replayed import Replayed, ReplayedCall

SAMPLED_CALLS = 40
"""How many calls of an agent are built to infer what its instruction takes."""

CLEARLY_BETTER_RATIO = 0.5
"""An agent is taken to see only its turn where that leaves so much of the error."""

_UNLIMITED_TOKENS = 10**12


async def replay_session(
    session: Session,
    settings: ReplaySettings,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Replayed:
    """Replays the recorded model calls of a session.

    Args:
        session: The recording; it is not changed.
        settings: What is assumed.
        advance: Told after each call how many are done, and of how many.

    Raises:
        RecordingError: There is nothing to replay.
    """
    calls = list(list_calls(session, settings.agent))
    if not calls:
        of_agent = f" of agent {settings.agent!r}" if settings.agent else ""
        raise RecordingError(
            f"session {session.id!r} has no model response{of_agent} with a recorded "
            "prompt token count"
        )
    replay = _Replay(session, settings)
    fixed_tokens = await replay.infer(calls)
    replayed = []
    for number, call in enumerate(calls, 1):
        replayed.append(await replay.step(number, call))
        advance(number, len(calls))
    return Replayed(session.id, fixed_tokens, replayed, replay.summary_tokens)


class _Side:
    """One plugin and the session state that it writes."""

    def __init__(
        self, recorded: Session, settings: PluginSettings, is_observing: bool
    ) -> None:
        self.calls: list[CallRecord] = []
        self.plugin = ContextGuardPlugin(
            agents=settings.agents,
            default=settings.default,
            observe=is_observing,
            state_keys="plain",
            warning_threshold=settings.warning_threshold,
            on_call=self.calls.append,
        )
        in_deltas = {
            key for event in recorded.events for key in event.actions.state_delta
        }
        initial = {k: v for k, v in recorded.state.items() if k not in in_deltas}
        self.session = Session(
            id=recorded.id,
            app_name=recorded.app_name,
            user_id=recorded.user_id,
            state=own_state(initial),
        )

    async def call(self, invocation: InvocationContext, request: LlmRequest) -> None:
        """Has the plugin see a request, and change it."""
        await self.plugin.before_model_callback(
            callback_context=CallbackContext(invocation), llm_request=request
        )

    async def answer(
        self, invocation: InvocationContext, prompt_tokens: int | None
    ) -> CallRecord | None:
        """Has the plugin see the answer; returns its record of the call."""
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=prompt_tokens
        )
        self.calls.clear()
        await self.plugin.after_model_callback(
            callback_context=CallbackContext(invocation),
            llm_response=LlmResponse(usage_metadata=usage),
        )
        return self.calls[0] if self.calls else None


class _Replay:
    def __init__(self, recorded: Session, settings: ReplaySettings) -> None:
        self._recorded = recorded
        self._settings = settings
        guard = settings.make_offline()
        self._watching = _Side(recorded, guard, is_observing=True)
        self._acting = _Side(recorded, guard, is_observing=False)
        self._sessions = InMemorySessionService()
        self._agents: dict[tuple[str, str, bool], LlmAgent] = {}
        self._fixed_tokens: dict[str, int] = {}
        self._tools: dict[str, list[str]] = {}
        self._turn_agents: set[str] = set()
        self._ratios: dict[str, float] = {}
        self._seen = 0
        self.summary_tokens = 0

    async def infer(self, calls: Sequence[RecordedCall]) -> dict[str, int]:
        """Infers what is in the requests apart from contents, agent by agent.

        And which agents see only the current turn: it is no part of a recording, but
        their counts do not grow with the history.
        """
        for agent in dict.fromkeys(call.event.author for call in calls):
            own = [c for c in calls if c.event.author == agent and not c.is_guarded]
            sample = own[:: max(1, len(own) // SAMPLED_CALLS)]
            fit = fit_counts(await self._measure(sample))
            self._turn_agents.add(agent)
            of_turn = fit_counts(await self._measure(sample))
            if of_turn.error_ratio >= CLEARLY_BETTER_RATIO * fit.error_ratio:
                self._turn_agents.discard(agent)
            else:
                fit = of_turn
            self._fixed_tokens[agent] = fit.fixed_tokens
            self._tools[agent] = list_tools(self._recorded.events, agent)
        return dict(self._fixed_tokens)

    async def _measure(self, calls: Sequence[RecordedCall]) -> list[tuple[int, int]]:
        session = self._watching.session.model_copy()
        pairs = []
        for call in calls:
            session.events = self._recorded.events[: call.index]
            contents = await self._build_contents(self._enter(session, call))
            pairs.append((estimate_contents_tokens(contents), call.prompt_tokens))
        return pairs

    async def step(self, number: int, call: RecordedCall) -> ReplayedCall:
        """Replays one call."""
        self._catch_up(call.index)
        agent = call.event.author
        watched = self._enter(self._watching.session, call)
        acted = self._enter(self._acting.session, call)
        whole = await self._build_contents(watched)
        await self._watching.call(watched, self._request(call, whole))
        llm = self._agent(call).canonical_model
        assert isinstance(llm, SimulatedLlm)
        billed = llm.billed_tokens
        whole_heuristic = max(1, estimate_request_tokens(self._request(call, whole)))
        sent = self._request(call, whole)
        await self._acting.call(acted, sent)
        sent_heuristic = max(1, estimate_request_tokens(sent))
        real = None if call.is_guarded else call.prompt_tokens
        if real is not None:
            self._ratios[agent] = real / whole_heuristic
        ratio = self._ratios.get(agent, 1.0)
        sent_tokens = max(1, round(sent_heuristic * ratio))
        self.summary_tokens += round((llm.billed_tokens - billed) * ratio)
        estimate = await self._watching.answer(watched, real)
        record = await self._acting.answer(acted, sent_tokens)
        return ReplayedCall(
            number=number,
            agent=agent,
            contents=len(whole),
            estimated_tokens=estimate.estimated_tokens if estimate else None,
            real_tokens=real,
            whole_tokens=real or round(whole_heuristic * ratio),
            window_tokens=record.window_tokens if record else None,
            threshold_tokens=record.threshold_tokens if record else None,
            sent_contents=len(sent.contents),
            sent_tokens=sent_tokens,
            compaction=record.compaction if record else None,
        )

    def _catch_up(self, index: int) -> None:
        """Shows both sides what was recorded before an event."""
        new = self._recorded.events[self._seen : index]
        self._seen = index
        for side in (self._watching, self._acting):
            side.session.events.extend(new)
            for event in new:
                side.session.state.update(own_state(event.actions.state_delta))

    def _enter(self, session: Session, call: RecordedCall) -> InvocationContext:
        event = call.event
        return InvocationContext(
            session_service=self._sessions,
            session=session,
            invocation_id=event.invocation_id,
            agent=self._agent(call),
            branch=event.branch,
            isolation_scope=event.isolation_scope,
            node_path=event.node_info.path or None,
            user_content=self._find_user_content(call),
            run_config=RunConfig(),
        )

    def _find_user_content(self, call: RecordedCall) -> types.Content | None:
        """What the user said at the start of the call's invocation."""
        found = None
        for event in reversed(self._recorded.events[: call.index]):
            if event.invocation_id != call.event.invocation_id:
                break
            if event.author == "user" and event.content:
                found = event.content
        return found

    def _agent(self, call: RecordedCall) -> LlmAgent:
        model = self._settings.model or call.event.model_version or ""
        is_turn = call.event.author in self._turn_agents
        key = (call.event.author, model, is_turn)
        if key not in self._agents:
            # It answers requests for summaries only.
            llm = SimulatedLlm(
                model=model,
                context_window=_UNLIMITED_TOKENS,
                token_ratio=1.0,
                keep_requests=0,
            )
            try:
                self._agents[key] = LlmAgent(
                    name=call.event.author,
                    model=llm,
                    include_contents="none" if is_turn else "default",
                )
            except ValidationError as error:
                raise RecordingError(
                    f"{call.event.author!r} is no name of an agent"
                ) from error
        return self._agents[key]

    def _request(
        self, call: RecordedCall, contents: Sequence[types.Content]
    ) -> LlmRequest:
        agent = call.event.author
        return build_request(
            self._settings.model or call.event.model_version,
            contents,
            self._tools[agent],
            self._fixed_tokens[agent],
        )

    async def _build_contents(
        self, invocation: InvocationContext
    ) -> list[types.Content]:
        """Has ADK build what it builds for every model call."""
        request = LlmRequest()
        try:
            async for _ in request_processor.run_async(invocation, request):
                pass
        except ValueError as error:  # Of a result without its call, for instance.
            raise RecordingError(
                f"ADK cannot build a request from the recording: {error}"
            ) from error
        return request.contents
