"""What the guard writes in a call leaves with the call's last event alone."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent, SequentialAgent
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.sessions import InMemorySessionService
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Threshold, request_compaction
from contextguard_adk.testing import SimulatedLlm
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
from tests.stores import own_database
from tests.workers import ITEM, shows_own_items, work

ANSWER = [types.Part(text=f"The answer goes on, part {n:02}. ") for n in range(67)]
"""Streamed in 201 chunks."""

WORKERS = 3
LONG_SUMMARY = words(380, "They said:").strip()
LONG: dict[str, Any] = {
    "context_window": 100_000,
    "token_ratio": 1.0,
    "summary_replies": [LONG_SUMMARY] * 9,
}


def streaming_llm() -> SimulatedLlm:
    """A model whose answers take 200 chunks."""
    return SimulatedLlm(script=[ANSWER] * 9, **LONG)


async def seed_long(chat: Chat, tokens: int = 3_300) -> None:
    """Puts a long answer into the session."""
    await seed(chat, user("The task."), model(words(tokens, "ORIGINAL")))


def measure_bytes(events: Iterable[Event]) -> int:
    """What a client gets."""
    dumps = (e.model_dump_json(exclude_none=True, by_alias=True) for e in events)
    return sum(len(dump.encode()) for dump in dumps)


def guard_keys(state: dict[str, Any]) -> dict[str, Any]:
    """What of a state is the guard's, but for what is None."""
    found = {key: value for key, value in state.items() if "context_guard" in key}
    return {key: value for key, value in found.items() if value is not None}


def last_delta(events: list[Event]) -> dict[str, Any]:
    """What the last event of a turn brings, and no partial one does."""
    assert not any(event.actions.state_delta for event in events if event.partial)
    return events[-1].actions.state_delta


@pytest.mark.parametrize(("kind", "is_watched"), [("memory", False), ("sqlite", True)])
async def test_a_streamed_turn_sends_the_state_once(
    kind: str, is_watched: bool, tmp_path: Path
) -> None:
    """No partial event has it; the session has it after the turn."""
    sizes = {}
    for guards in (True, False):
        folder = tmp_path / str(guards)
        folder.mkdir()
        async with own_database(kind, folder) as store, store.open() as service:
            llm = streaming_llm()
            wide = Threshold(context_window=100_000)
            place: dict[str, Any] = {"session_service": service}
            place["before"] = [Watching("watching")] if is_watched else []
            strategy = SMALL if guards else wide
            chat = guarded_chat(llm, strategy, is_streaming=True, **place)
            await seed_long(chat)
            events = await chat.say("Go on.")

            assert sum(bool(event.partial) for event in events) == 201
            delta = last_delta(events)
            state = await chat.state()
            sizes[guards] = measure_bytes(events)
            assert llm.summaries == guards

            if guards:
                assert delta == guard_keys(state)
                new_bytes = len(json.dumps(delta).encode())
                counted = agent_requests(llm)[-1].prompt_tokens
                assert (state[SUMMARY], state[REAL]) == (LONG_SUMMARY, counted)
                await guarded_chat(llm, SMALL, **place).say("Well done.")
                assert llm.summaries == 1
                assert is_compacted(llm.requests[-1])

    assert sizes[True] <= sizes[False] + 2 * new_bytes


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_a_demand_of_the_same_call_is_answered_once(is_streaming: bool) -> None:
    """What another plugin has put on the event before is not what it ends with."""
    llm = streaming_llm()
    asked = list[bool]()

    class Demanding(Watching):
        async def before_model_callback(self, **context: Any) -> None:
            if not asked:
                request_compaction(context["callback_context"].state)
            asked.append(True)

    before = [Demanding("demanding")]
    chat = guarded_chat(llm, SMALL, before=before, is_streaming=is_streaming)
    await seed_long(chat, 1_500)
    await chat.say("Go on.")
    assert llm.summaries == 1
    assert [(await chat.state())[key] for key in DEMAND] == [False]
    await chat.say("Well done.")
    assert llm.summaries == 1


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
    first = LlmAgent(name="agent", model=BreakingOff(script=[ANSWER], **LONG))
    other = LlmAgent(name="other", model=SimulatedLlm(context_window=100_000))
    root = SequentialAgent(name="both", sub_agents=[first, other])
    guard = ContextGuardPlugin(agents={"agent": SMALL}, default=None)
    chat = Chat(root, [guard], is_streaming=True)
    await seed_long(chat)
    events = await chat.say("Go on.")
    delta = last_delta(events)

    assert (events[-1].author, delta[SUMMARY]) == ("other", LONG_SUMMARY)
    assert (await chat.state())[SUMMARY] == LONG_SUMMARY


def scopes_of(delta: dict[str, Any]) -> set[str]:
    """The scopes that the keys of a state name."""
    return {key.partition("@")[2] for key in guard_keys(delta)} - {""}


@shows_own_items
async def test_an_event_brings_the_state_of_its_own_worker() -> None:
    """Three work at once, and nothing of one is on an event of another."""
    sessions = InMemorySessionService()
    await work(WORKERS, 12, 90, sessions)
    chat = Chat(guarded_agent(SimulatedLlm()), session_service=sessions)
    scopes = defaultdict[str, set[str]](set)
    summary_count = 0
    for event in await chat.events():
        delta = guard_keys(event.actions.state_delta)
        scopes[event.branch or ""] |= scopes_of(delta)
        summary_count += any(":summary:" in key for key in delta)
        assert len({*ITEM.findall(json.dumps(delta))}) <= 1

    counts = {branch: len(found) for branch, found in scopes.items()}

    assert counts == {branch: int(bool(branch)) for branch in scopes}
    assert len(scopes_of(await chat.state())) == WORKERS
    assert summary_count >= 2 * WORKERS
