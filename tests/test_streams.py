"""What the guard writes in a call leaves with the call's last event alone."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.adk.agents import LlmAgent, SequentialAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.cli.fast_api import get_fast_api_app
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import InMemorySessionService
from google.adk.workflow import START, Workflow
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Threshold, request_compaction
from contextguard_adk.testing import Reply, SimulatedLlm
from tests import test_parallel_workers
from tests.builders import Chat, guarded_agent, model, user
from tests.chats import (
    DEMAND,
    REAL,
    SUMMARY,
    Watching,
    agent_requests,
    guarded_chat,
    seed,
    words,
)
from tests.guarded import SMALL, is_compacted
from tests.test_databases import own_database
from tests.test_parallel_workers import ITEM, work

OLD = [user("The task."), model(words(3_000, "ORIGINAL"))]
ANSWER = [types.Part(text=f"The answer goes on, part {n:02}. ") for n in range(67)]
"""Streamed in 201 chunks."""

LONG_SUMMARY = words(380, "They said:").strip()


def streaming_llm(*script: Reply) -> SimulatedLlm:
    """A model whose answers take 200 chunks."""
    return SimulatedLlm(
        context_window=100_000,
        token_ratio=1.0,
        script=list(script) or [ANSWER] * 9,
        summary_replies=[LONG_SUMMARY] * 9,
    )


def measure_bytes(events: Iterable[Event]) -> int:
    """What a client gets."""
    dumps = (e.model_dump_json(exclude_none=True, by_alias=True) for e in events)
    return sum(len(dump.encode()) for dump in dumps)


def guard_keys(state: dict[str, Any]) -> dict[str, Any]:
    """What of a state is the guard's, but for what is None."""
    found = {key: value for key, value in state.items() if "context_guard" in key}
    return {key: value for key, value in found.items() if value is not None}


def measure_state(state: dict[str, Any]) -> int:
    """The bytes of what the guard has written."""
    return len(json.dumps(guard_keys(state)).encode())


@pytest.mark.parametrize("before", [[], [Watching("watching")]], ids=["", "watched"])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_streamed_turn_sends_the_state_once(
    kind: str, before: list[BasePlugin], tmp_path: Path
) -> None:
    """No partial event has it; the session has it after the turn, and a new process
    goes on with it."""
    sizes = {}
    for guards in (True, False):
        (folder := tmp_path / str(guards)).mkdir()
        async with own_database(kind, folder) as store, store.open() as service:
            llm, wide = streaming_llm(), Threshold(context_window=100_000)
            strategy = SMALL if guards else wide
            place: dict[str, Any] = {"session_service": service, "before": before}
            chat = guarded_chat(llm, strategy, is_streaming=True, **place)
            await seed(chat, *OLD)
            events = await chat.say("Go on.")
            partials = [event for event in events if event.partial]
            assert len(partials) == 201
            assert not any(event.actions.state_delta for event in partials)
            sizes[guards], state = measure_bytes(events), await chat.state()
            assert llm.summaries == guards
            if guards:
                new_bytes = measure_state(state)
                assert events[-1].actions.state_delta == guard_keys(state)
                assert (state[SUMMARY], state[REAL]) == (
                    LONG_SUMMARY,
                    agent_requests(llm)[-1].prompt_tokens,
                )
                await guarded_chat(llm, SMALL, **place).say("Well done.")
                assert llm.summaries == 1
                assert is_compacted(llm.requests[-1])
    assert sizes[True] <= sizes[False] + 2 * new_bytes


AGENT = """
from google.adk.agents import LlmAgent
from google.adk.apps import App

from contextguard_adk import ContextGuardPlugin
from tests.test_streams import SMALL, streaming_llm

agent = LlmAgent(name="agent", model=streaming_llm())
app = App(name="{name}", root_agent=agent, plugins=[{plugins}])
"""


async def stream_turn(client: httpx.AsyncClient, app: str) -> str:
    """Has turns streamed, the last with a history too long for the guard."""
    place = f"/apps/{app}/users/user/sessions"
    made = await client.post(place, json={"sessionId": "session"})
    made.raise_for_status()
    request = {"appName": app, "userId": "user", "sessionId": "session"}
    texts = []
    for text in (words(1_200, "ORIGINAL"), words(1_200), "Go on."):
        message = {"role": "user", "parts": [{"text": text}]}
        body = {**request, "newMessage": message, "streaming": True}
        answer = await client.post("/run_sse", json=body, timeout=60)
        texts.append(answer.raise_for_status().text)
    return texts[-1]


async def test_the_server_of_adk_streams_the_state_once(tmp_path: Path) -> None:
    """The bytes that `adk api_server` sends for a turn with a compaction."""
    apps = {"guarded": "ContextGuardPlugin(default=SMALL)", "plain": ""}
    for name, plugins in apps.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "agent.py").write_text(AGENT.format(name=name, plugins=plugins))
        (folder / "__init__.py").write_text("from . import agent\n")
    settings: dict[str, Any] = {"session_service_uri": "memory://"}
    settings["artifact_service_uri"] = "memory://"
    server = get_fast_api_app(agents_dir=str(tmp_path), web=False, **settings)
    transport = httpx.ASGITransport(app=server)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        guarded = await stream_turn(client, "guarded")
        plain = await stream_turn(client, "plain")
        place = "/apps/guarded/users/user/sessions/session"
        state = (await client.get(place)).json()["state"]
    assert guarded.count("data: ") == plain.count("data: ") == 202
    assert guarded.count(LONG_SUMMARY) == 1
    assert state[SUMMARY] == LONG_SUMMARY
    assert len(guarded) <= len(plain) + 2 * measure_state(state)


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_a_demand_of_the_same_call_is_answered_once(is_streaming: bool) -> None:
    """What another plugin has put on the event before is not what it ends with."""
    llm, demanding = streaming_llm(), Demanding("demanding")
    chat = guarded_chat(llm, SMALL, before=[demanding], is_streaming=is_streaming)
    await seed(chat, user("The task."), model(words(1_500)))
    await chat.say("Go on.")
    assert llm.summaries == 1
    [key] = DEMAND
    assert (await chat.state())[key] is False
    await chat.say("Well done.")
    assert llm.summaries == 1


class Demanding(BasePlugin):
    """Asks for a compaction before the first model call."""

    has_asked = False

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Asks for it."""
        if not self.has_asked:
            request_compaction(callback_context.state)
        self.has_asked = True


class BreakingOff(SimulatedLlm):
    """Its streams end before the whole answer."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Leaves the last response of a stream out."""
        async for response in super().generate_content_async(llm_request, stream):
            if response.partial or not stream:
                yield response


@pytest.mark.filterwarnings(r"ignore:\w+Agent is deprecated:DeprecationWarning")
async def test_the_next_agent_brings_what_a_broken_stream_left() -> None:
    """ADK has no event for a call whose stream ends in between."""
    summaries: dict[str, Any] = {
        "summary_replies": [LONG_SUMMARY],
        "context_window": 100_000,
    }
    first = LlmAgent(name="agent", model=BreakingOff(script=[ANSWER], **summaries))
    other = LlmAgent(name="other", model=SimulatedLlm(context_window=100_000))
    root = SequentialAgent(name="both", sub_agents=[first, other])
    guard = ContextGuardPlugin(agents={"agent": SMALL}, default=None)
    chat = Chat(root, [guard], is_streaming=True)
    await seed(chat, *OLD)
    [*partials, last] = await chat.say("Go on.")
    assert (last.author, last.actions.state_delta[SUMMARY]) == ("other", LONG_SUMMARY)
    assert not any(event.actions.state_delta for event in partials)
    assert (await chat.state())[SUMMARY] == LONG_SUMMARY


async def test_a_guard_that_observes_stores_its_counts() -> None:
    """They leave with the last event as well."""
    chat = guarded_chat(streaming_llm(), guard={"observe": True}, is_streaming=True)
    [*partials, last] = await chat.say("Go on.")
    assert not any(event.actions.state_delta for event in partials)
    assert last.actions.state_delta[REAL] == (await chat.state())[REAL] > 0


def find_scope(key: str) -> str:
    """The scope that a key of the state names."""
    return key.partition("@")[2]


@test_parallel_workers.pytestmark
async def test_an_event_brings_the_state_of_its_own_worker() -> None:
    """Six work at once, and nothing of one is on an event of another."""
    sessions = InMemorySessionService()
    await work(6, 31, 60, sessions)
    chat = Chat(guarded_agent(SimulatedLlm()), session_service=sessions)
    scopes, summary_count = defaultdict[str, set[str]](set), 0
    for event in await chat.events():
        delta = guard_keys(event.actions.state_delta)
        scopes[event.branch or ""] |= {*map(find_scope, delta)} - {""}
        summary_count += any(":summary:" in key for key in delta)
        assert len({*ITEM.findall(json.dumps(delta))}) <= 1
    assert {branch: len(found) for branch, found in scopes.items() if found} == {
        branch: 1 for branch in scopes if branch
    }
    assert len({*map(find_scope, guard_keys(await chat.state()))} - {""}) == 6
    assert summary_count >= 12


async def test_nodes_of_a_workflow_stream_their_state_once() -> None:
    """Each event has that of its own agent, and the session has all."""
    llms = {"one": streaming_llm(), "two": streaming_llm()}
    one, two = (LlmAgent(name=name, model=llm) for name, llm in llms.items())
    flow = Workflow(name="flow", edges=[(START, one, two)])
    chat = Chat(flow, [ContextGuardPlugin(default=SMALL)], is_streaming=True)
    brought: dict[str, Any] = {}
    for _ in range(2):
        for event in await chat.say("Go on."):
            delta = guard_keys(event.actions.state_delta)
            assert not (delta and event.partial)
            assert all(event.author in key for key in delta)
            brought |= delta
    assert {key.rpartition(":")[2].partition("@")[0] for key in brought} == {*llms}
    assert brought == guard_keys(await chat.state())
