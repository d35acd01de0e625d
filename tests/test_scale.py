"""Many sessions at once, and very long ones: nothing mixes, nothing grows."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import re
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.apps import App
from google.adk.events.event_actions import EventActions
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.plugins.plugin_manager import PluginManager
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService, Session

import contextguard_adk
from contextguard_adk import ContextGuardPlugin, SlidingWindow, Strategy, Threshold
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import (
    Chat,
    KeptSessions,
    answer_text,
    call_part,
    event,
    guarded_agent,
    model,
    user,
)

pytestmark = pytest.mark.slow

SESSIONS = 200
RUNNER_CALLS = 1_000
CALLBACK_CALLS = 2_000

MAX_STATE_BYTES = 16 * 1024
MAX_GROWTH_BYTES = 64 * 1024
"""What our own memory may grow by after the first tenth, whatever is in flight."""

WINDOW = 8_000
SECRET = re.compile(r"secret-\w{3}!")


def state_bytes(state: dict[str, Any]) -> int:
    """What the guard keeps for the agent besides the text of the summary."""
    return sum(
        len(value.encode()) if isinstance(value, str) else len(json.dumps(value))
        for key, value in state.items()
        if "context_guard" in key and not key.endswith("summary_agent")
    )


# --- Many sessions at once --------------------------------------------------------


class Eavesdropper(BasePlugin):
    """Notes which secrets every session sends; register it after the guard."""

    def __init__(self) -> None:
        super().__init__(name="eavesdropper")
        self.heard: dict[str, set[str]] = {}

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Notes the secrets; changes nothing."""
        user_id = callback_context.session.user_id
        heard = self.heard.setdefault(user_id, set())
        for content in llm_request.contents:
            heard.update(SECRET.findall(content.model_dump_json()))


def fetch(topic: str) -> dict[str, Any]:
    """Fetches notes on a topic."""
    return {"topic": topic, "notes": [f"{topic} notebook {row}" for row in range(50)]}


def fetch_once(request: LlmRequest) -> Reply:
    """Fetches what the newest content speaks of, then answers."""
    newest = request.contents[-1]
    secret = SECRET.findall(newest.model_dump_json())[-1]
    if any(part.function_response for part in newest.parts or ()):
        return f"All about {secret}."
    return call_part("fetch", topic=secret)


async def converse(runner: Runner, number: int, turn_count: int) -> dict[str, Any]:
    """Plays one session to its end; returns its state."""
    # Only together with the user does the id name a session.
    place: Any = {"user_id": f"user-{number}", "session_id": f"session-{number % 50}"}
    await runner.session_service.create_session(app_name="app", **place)
    for turn in range(turn_count):
        asked = user(f"Question {turn} on secret-{number:03}!, please.")
        run = runner.run_async(**place, new_message=asked)
        answer = answer_text([event async for event in run])
        assert answer == f"All about secret-{number:03}!."
    session = await runner.session_service.get_session(app_name="app", **place)
    assert session is not None
    return dict(session.state)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(Threshold(context_window=2_500), id="threshold"),
        pytest.param(SlidingWindow(context_window=2_500, max_turns=6), id="sliding"),
    ],
)
async def test_sessions_at_once_do_not_mix(strategy: Strategy) -> None:
    """One guard, one model and one runner serve 200 sessions; each keeps its own."""
    llm = SimulatedLlm(
        context_window=2_500,
        token_ratio=1.0,
        latency_seconds=0.001,
        script=fetch_once,
    )
    eavesdropper = Eavesdropper()
    plugins = [ContextGuardPlugin(default=strategy), eavesdropper]
    runner = Runner(
        app=App(name="app", root_agent=guarded_agent(llm, [fetch]), plugins=plugins),
        session_service=InMemorySessionService(),
    )
    states = await asyncio.gather(
        *(converse(runner, number, 6) for number in range(SESSIONS))
    )
    assert (llm.rejections, llm.violations) == (0, 0)
    assert llm.summaries >= SESSIONS
    for number, state in enumerate(states):
        own = {f"secret-{number:03}!"}
        assert eavesdropper.heard[f"user-{number}"] == own
        assert set(SECRET.findall(json.dumps(state))) == own
        assert state_bytes(state) <= MAX_STATE_BYTES
    for record in llm.requests:
        if record.is_summary:
            assert len(set(SECRET.findall(record.text))) == 1


# --- Long sessions ----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:LoopAgent is deprecated:DeprecationWarning")
async def test_a_thousand_calls_in_one_session() -> None:
    """A session of 1,000 model calls goes on, and its state stays small."""
    steps = itertools.count(1)
    llm = SimulatedLlm(
        context_window=WINDOW,
        token_ratio=1.0,
        script=lambda request: f"Step {next(steps)}. " + "words " * 50,
        summary_replies=lambda request: "What was said so far.",
        keep_requests=10,
    )
    turn_count = 10
    agent = LoopAgent(
        name="loop",
        sub_agents=[guarded_agent(llm)],
        max_iterations=RUNNER_CALLS // turn_count,
    )
    plugin = ContextGuardPlugin(default=Threshold(context_window=WINDOW))
    chat = Chat(agent, [plugin], session_service=KeptSessions())
    for turn in range(turn_count):
        events = await chat.say(f"Message {turn}.")
        assert len(events) == RUNNER_CALLS // turn_count
        assert state_bytes(await chat.state()) <= MAX_STATE_BYTES
        newest = [request for request in llm.requests if not request.is_summary][-1]
        assert f"Message {turn}." in newest.text
    assert llm.calls == RUNNER_CALLS + llm.summaries
    assert (llm.rejections, llm.violations) == (0, 0)
    assert llm.summaries >= 8


class Treadmill:
    """A session that is driven through the guard's callbacks alone.

    Args:
        strategy: The guard's.
        summary: What every summary says.
    """

    def __init__(self, strategy: Strategy, summary: str = "So far so good.") -> None:
        answers = itertools.count(1)
        self._runs = itertools.count()
        self.llm = SimulatedLlm(
            context_window=strategy.context_window or WINDOW,
            token_ratio=1.0,
            script=lambda request: f"Answer {next(answers)}: {'words ' * 60}",
            summary_replies=lambda request: summary,
            keep_requests=1,
        )
        self.plugin = ContextGuardPlugin(default=strategy)
        self.session = Session(id="session", app_name="app", user_id="user")
        self.invocation = self._start("")

    def _start(self, message: str) -> InvocationContext:
        return InvocationContext(
            session_service=InMemorySessionService(),
            session=self.session,
            agent=LlmAgent(name="agent", model=self.llm),
            invocation_id=f"invocation-{next(self._runs)}",
            plugin_manager=PluginManager([self.plugin]),
            user_content=user(message),
        )

    async def begin(self, message: str) -> None:
        """Begins a turn."""
        self.session.events.append(event(user(message)))
        self.invocation = self._start(message)
        await self.plugin.before_run_callback(invocation_context=self.invocation)

    async def end(self) -> None:
        """Ends a turn."""
        await self.plugin.after_run_callback(invocation_context=self.invocation)

    async def step(self, newest: int | None = None) -> LlmResponse:
        """Makes one model call with the history, or with the newest part of it."""
        events = self.session.events[-newest:] if newest else self.session.events
        request = LlmRequest(
            model=self.llm.model,
            contents=[item.content for item in events if item.content],
        )
        actions = EventActions()
        context = CallbackContext(self.invocation, event_actions=actions)
        await self.plugin.before_model_callback(
            callback_context=context, llm_request=request
        )
        async for response in self.llm.generate_content_async(request):
            await self.plugin.after_model_callback(
                callback_context=context, llm_response=response
            )
        self.session.state.update(actions.state_delta)
        return response


async def test_two_thousand_calls_leave_memory_and_state_flat() -> None:
    """After the first tenth our own memory grows no more, and state stays small."""
    mill = Treadmill(Threshold(context_window=1_200))
    calls_per_turn = 10
    turn_count = CALLBACK_CALLS // calls_per_turn
    tracemalloc.start()
    try:
        sizes = []
        for turn in range(turn_count):
            await mill.begin(f"Message {turn}: " + "please " * 20)
            for _ in range(calls_per_turn):
                response = await mill.step(newest=16)
                assert response.content is not None
                mill.session.events.append(event(response.content))
            assert f"Message {turn}:" in mill.llm.requests[-1].text
            assert state_bytes(mill.session.state) <= MAX_STATE_BYTES
            await mill.end()
            del mill.session.events[:-16]  # A database has the rest.
            if turn + 1 in (turn_count // 10, turn_count):
                sizes.append(own_bytes())
    finally:
        tracemalloc.stop()
    assert (mill.llm.rejections, mill.llm.violations) == (0, 0)
    assert mill.llm.summaries >= CALLBACK_CALLS // 50
    assert sizes[1] - sizes[0] <= MAX_GROWTH_BYTES


class Mourner(BasePlugin):
    """Knows which requests are still in memory; register it after the guard."""

    def __init__(self) -> None:
        super().__init__(name="mourner")
        self.requests: list[weakref.ref[LlmRequest]] = []

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Notes the request; changes nothing."""
        self.requests.append(weakref.ref(llm_request))


async def test_requests_do_not_wait_for_the_collector() -> None:
    """A request is freed after its call, also one that offers the recall tool."""
    llm = SimulatedLlm(context_window=2_500, token_ratio=1.0, script=fetch_once)
    mourner = Mourner()
    guard = ContextGuardPlugin(default=Threshold(context_window=2_500))
    chat = Chat(guarded_agent(llm, [fetch]), [guard, mourner])
    gc.disable()
    try:
        for number in range(6):
            await chat.say(f"Question {number} on secret-{number:03}!, please.")
        assert llm.summaries
        tools = llm.requests[-1].config.model_dump_json(include={"tools"})
        assert "recall_history" in tools
        assert len(mourner.requests) >= 12
        assert not [request for request in mourner.requests if request() is not None]
    finally:
        gc.enable()


def own_bytes() -> int:
    """What is allocated by this package's own code and still there."""
    gc.collect()
    snapshot = tracemalloc.take_snapshot()
    package = str(Path(contextguard_adk.__file__).parent / "*")
    simulation = tracemalloc.Filter(False, package.replace("*", "testing/*"))
    ours = snapshot.filter_traces([tracemalloc.Filter(True, package), simulation])
    return sum(trace.size for trace in ours.traces)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("words " * 60, id="prose"),
        pytest.param('"\\\x01' * 130, id="escapes"),
        pytest.param("漢字" * 200, id="cjk"),
        pytest.param("🙂" * 200, id="emoji"),
    ],
)
async def test_state_of_a_huge_history_is_small(message: str) -> None:
    """Twenty thousand messages, whatever they hold, take 16 KiB beside the summary."""
    mill = Treadmill(Threshold(context_window=1_000_000), summary="Short.")
    mill.session.events.extend(
        event((model if number % 2 else user)(f"{number} {message}"))
        for number in range(20_000)
    )
    mill.session.state["context_guard:compact"] = True
    await mill.begin("Go on.")
    await mill.step()
    assert len(mill.llm.requests[-1].contents) == 2
    assert state_bytes(mill.session.state) <= MAX_STATE_BYTES
    assert mill.llm.summaries >= 1
