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
from google.adk.agents.callback_context import CallbackContext
from google.adk.apps import App
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService

import contextguard_adk
from contextguard_adk import ContextGuardPlugin, SlidingWindow, Strategy, Threshold
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import (
    Chat,
    KeptSessions,
    answer_text,
    call_part,
    guarded_agent,
    model,
    user,
)
from tests.chats import take_apart

pytestmark = pytest.mark.slow

SESSIONS = 100
CALLS = 500

MAX_STATE_BYTES = 16 * 1024
MAX_GROWTH_BYTES = 64 * 1024
"""What our own memory may grow by after the first tenth, whatever is in flight."""

SECRET = re.compile(r"secret-\w{3}!")


def state_bytes(state: dict[str, Any]) -> int:
    """What the guard keeps for the agent besides the text of the summary."""
    return sum(
        len(value.encode()) if isinstance(value, str) else len(json.dumps(value))
        for key, value in state.items()
        if "context_guard" in key and not key.endswith("summary_agent")
    )


class Eavesdropper(BasePlugin):
    """Notes which secrets every user's sessions send, and which requests are still in
    memory; register it after the guard."""

    def __init__(self) -> None:
        super().__init__(name="eavesdropper")
        self.heard: dict[str, set[str]] = {}
        self.requests: list[weakref.ref[LlmRequest]] = []

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Notes the secrets; changes nothing."""
        self.requests.append(weakref.ref(llm_request))
        heard = self.heard.setdefault(callback_context.session.user_id, set())
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
        Threshold(context_window=2_500),
        SlidingWindow(context_window=2_500, max_messages=6),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
async def test_sessions_at_once_do_not_mix(strategy: Strategy) -> None:
    """One guard, one model and one runner serve many sessions; each keeps its own."""
    llm = SimulatedLlm(
        context_window=2_500, token_ratio=1.0, latency_seconds=0.001, script=fetch_once
    )
    eavesdropper = Eavesdropper()
    plugins = [ContextGuardPlugin(default=strategy), eavesdropper]
    app = App(name="app", root_agent=guarded_agent(llm, [fetch]), plugins=plugins)
    runner = Runner(app=app, session_service=InMemorySessionService())
    talks = (converse(runner, number, 6) for number in range(SESSIONS))
    states = await asyncio.gather(*talks)
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


def long_chat(strategy: Strategy, summary: str) -> tuple[Chat, SimulatedLlm]:
    """A session of long answers, kept as it is, and its model."""
    answers = itertools.count(1)
    llm = SimulatedLlm(
        context_window=strategy.context_window or 0,
        token_ratio=1.0,
        script=lambda request: f"Answer {next(answers)}: {'words ' * 60}",
        summary_replies=lambda request: summary,
        keep_requests=1,
    )
    plugins = [ContextGuardPlugin(default=strategy)]
    return Chat(guarded_agent(llm), plugins, session_service=KeptSessions()), llm


async def test_many_calls_leave_memory_and_state_flat() -> None:
    """After the first tenth our own memory grows no more, and state stays small."""
    chat, llm = long_chat(Threshold(context_window=1_200), "So far so good.")
    session = await chat.session()
    sizes = []
    tracemalloc.start()
    try:
        for turn in range(CALLS):
            await chat.say(f"Message {turn}: {'please ' * 20}")
            assert f"Message {turn}:" in llm.requests[-1].text
            assert state_bytes(session.state) <= MAX_STATE_BYTES
            del session.events[:-16]  # A database has the rest.
            if turn + 1 in (CALLS // 10, CALLS):
                sizes.append(own_bytes())
    finally:
        tracemalloc.stop()
    assert (llm.rejections, llm.violations) == (0, 0)
    assert llm.summaries >= CALLS // 50
    assert sizes[1] - sizes[0] <= MAX_GROWTH_BYTES


def own_bytes() -> int:
    """What is allocated by this package's own code and still there."""
    gc.collect()
    snapshot = tracemalloc.take_snapshot()
    package = str(Path(contextguard_adk.__file__).parent / "*")
    simulation = tracemalloc.Filter(False, package.replace("*", "testing/*"))
    ours = snapshot.filter_traces([tracemalloc.Filter(True, package), simulation])
    return sum(trace.size for trace in ours.traces)


@pytest.mark.parametrize("message", ["words " * 60, '"\\\x01' * 130, "漢字" * 200])
async def test_state_of_a_huge_history_is_small(message: str) -> None:
    """Ten thousand messages, whatever they hold, take 16 KiB beside the summary."""
    chat, llm = long_chat(Threshold(context_window=1_000_000), "They spoke.")
    speak = (user, model)
    await chat.tell(speak[n % 2](f"{n} {message}") for n in range(10_000))
    await chat.set_state({"context_guard:compact": True})
    await chat.say("Go on.")
    assert len(llm.requests[-1].contents) == 1
    assert len(take_apart(llm.requests[-1].contents)) == 2
    assert state_bytes(await chat.state()) <= MAX_STATE_BYTES
    assert llm.summaries >= 1


async def test_requests_do_not_wait_for_the_collector() -> None:
    """A request is freed after its call, also one that offers the recall tool."""
    llm = SimulatedLlm(context_window=2_500, token_ratio=1.0, script=fetch_once)
    eavesdropper = Eavesdropper()
    guard = ContextGuardPlugin(default=Threshold(context_window=2_500))
    chat = Chat(guarded_agent(llm, [fetch]), [guard, eavesdropper])
    gc.disable()
    try:
        for number in range(6):
            await chat.say(f"Question {number} on secret-{number:03}!, please.")
        assert llm.summaries
        tools = llm.requests[-1].config.model_dump_json(include={"tools"})
        assert "recall_history" in tools
        assert len(eavesdropper.requests) >= 12
        assert not [made for made in eavesdropper.requests if made() is not None]
    finally:
        gc.enable()
