"""Sessions that are loaded in part, as session state says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.apps import App
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions import BaseSessionService, InMemorySessionService
from google.adk.sessions.base_session_service import GetSessionConfig
from google.adk.tools.function_tool import FunctionTool
from google.genai import types

from contextguard_adk import CompactionRecord, ContextGuardPlugin, Pipeline, Threshold
from contextguard_adk.sessions import load_recent
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests.builders import SUMMARY_END, Chat, model, user
from tests.chats import seed, slow, words
from tests.guarded import guarded_chat, is_compacted
from tests.stores import own_database, store_marks

WINDOW = 4_000
SINCE = "context_guard:events_since:agent"
PLACE = {"user_id": "user", "session_id": "session"}
KEY = {"app_name": "app", "user_id": "user", "session_id": "session"}


def look_up(step: int) -> dict[str, str]:
    """Returns what was looked up."""
    return {"id": f"order-{step}", "text": words(300 + step % 7 * 80, f"row-{step}")}


def working(until: int) -> Callable[[LlmRequest], Reply]:
    """A model that looks something up in each of the first turns, then only talks."""
    steps = itertools.count()

    def script(request: LlmRequest) -> Reply:
        *_, part = request.contents[-1].parts or []
        if part.function_response is None:
            step = next(steps)
            if step < until:
                return call("look_up", step=step)
        return f"Answer {next(steps)}."

    return script


def say(number: int) -> str:
    """A message of the user: some equal, some long, with a rule now and then."""
    if number % 5 == 3:
        return "Go on."
    rule = f"Never touch cluster-{number}! " if number % 4 == 1 else ""
    return f"Message {number}: {words(360 + number % 3 * 180)}. {rule}{words(20)}."


async def play(
    until: int,
    turns: int,
    loads_part: bool,
    service: BaseSessionService | None = None,
    guard: dict[str, Any] | None = None,
    old: int = 20,
    kind: type[Strategy] = Threshold,
    **agent: Any,
) -> tuple[SimulatedLlm, list[CompactionRecord], list[int], Chat]:
    """Plays turns of a session that is loaded in part as soon as it may be.

    It begins with a number of old turns, of which the last sixteen are always loaded.
    """
    compactions = list[CompactionRecord]()
    loaded = list[int]()
    llm = SimulatedLlm(script=working(until), context_window=WINDOW)
    llm.summary_replies = [f"Summary {number}." for number in range(99)]
    guard = {"recent_events": True, **(guard or {})}
    guard["on_compaction"] = compactions.append
    strategy = kind(context_window=WINDOW)
    place = {"session_service": service}
    agent = {"tools": [look_up], **agent}
    chat = guarded_chat(llm, strategy, guard=guard, chat=place, **agent)
    said = ((user(say(n)), model(f"Answer of old {n}.")) for n in range(-old, 0))
    await seed(chat, *itertools.chain.from_iterable(said))

    for number in range(turns):
        config = await recent(chat)
        if loads_part and config:
            chat.run_config = RunConfig(get_session_config=config)
            loaded.append(len((await load(chat, config)).events))
        await chat.say(say(number))

    return llm, compactions, loaded, chat


async def recent(chat: Chat) -> GetSessionConfig | None:
    """How to load the session of a chat."""
    return await load_recent(chat.sessions, chat.app, **PLACE)


async def load(chat: Chat, config: GetSessionConfig | None = None) -> Any:
    """The session of a chat."""
    return await chat.sessions.get_session(**KEY, config=config)


def sent(llm: SimulatedLlm) -> list[str]:
    """What models were sent, word for word."""
    return [
        str([content.model_dump(exclude_none=True) for content in request.contents])
        for request in llm.requests
    ]


STORES = [
    pytest.param("memory", id="memory"),
    pytest.param("sqlite", marks=store_marks("sqlite"), id="sqlite"),
    pytest.param(
        "postgres", marks=store_marks("postgres", is_slow=True), id="postgres"
    ),
]


@pytest.fixture(scope="module")
def requests_of_whole() -> list[str]:
    """What models are sent in a session of six turns that is loaded whole."""
    whole, *_ = asyncio.run(play(3, 6, False, old=26))
    return sent(whole)


@pytest.mark.quick("memory")
@pytest.mark.parametrize("kind", STORES)
async def test_databases_load_no_less(
    kind: str, tmp_path: Path, requests_of_whole: list[str]
) -> None:
    """Whatever they make of microseconds."""
    async with own_database(kind, tmp_path) as store, store.open() as service:
        part, _, loaded, chat = await play(3, 6, True, service, old=26)
        assert sent(part) == requests_of_whole
        assert len(loaded) > 4
        assert max(loaded) < 0.7 * len(await chat.events())


@pytest.mark.quick("Threshold-3-11-chat", "Pipeline-2-7-chat")
@pytest.mark.parametrize("until", [0, 5, *slow(1_000)], ids=["chat", "mixed", "tools"])
@pytest.mark.parametrize(
    ("kind", "least_compactions", "least_loaded"),
    [(Threshold, 3, 11), (Pipeline, 2, 7)],
)
async def test_requests_are_those_of_the_whole_session(
    kind: type[Strategy], least_compactions: int, least_loaded: int, until: int
) -> None:
    """Byte for byte, those to the summarizer as well, over several compactions."""
    whole, compactions, _, _ = await play(until, 12, False, old=30, kind=kind)
    part, _, loaded, chat = await play(until, 12, True, old=30, kind=kind)
    assert sent(part) == sent(whole)
    assert len(compactions) >= least_compactions
    assert len(loaded) >= least_loaded
    assert max(loaded) < 0.7 * len(await chat.events())
    assert part.rejections == part.violations == 0


async def test_recall_reads_what_is_not_loaded() -> None:
    """By a search, from the first message on."""
    llm, _, loaded, chat = await play(3, 4, True, old=40)
    assert loaded
    llm.script = [call("recall_history", query="Message -40"), "Done."]
    await chat.say("What did I say first?")
    *_, result = llm.requests[-1].contents[-1].parts or []
    assert result.function_response
    assert "Message -40: notebooks" in str(result.function_response.response)


async def test_a_session_may_be_loaded_whole_again() -> None:
    """What no summary of the loaded part covers stays summarized all the same."""
    llm, compactions, loaded, chat = await play(0, 12, True)
    assert len(compactions) > 2
    assert len(loaded) > 10

    count = len(compactions)
    chat.run_config = RunConfig()
    await chat.say("Go on.")
    assert is_compacted(llm.requests[-1])
    _, _, behind_summary = llm.requests[-1].text.partition(SUMMARY_END)
    assert "Go on." in behind_summary
    assert "Answer of old" not in behind_summary
    assert len(compactions) == count


async def test_a_confirmation_is_still_answered_much_later() -> None:
    """ADK looks for the call that it is about, which no summary stands for."""
    paid = list[int]()

    def pay(amount: int) -> str:
        """Pays."""
        paid.append(amount)
        return "Paid."

    llm, _, loaded, chat = await play(
        3, 2, True, tools=[look_up, FunctionTool(pay, require_confirmation=True)]
    )
    script = llm.script
    llm.script = [call("pay", amount=7)] * 9
    asked = await chat.say("Pay 7.")
    (wanted,) = [
        called
        for event in asked
        for called in event.get_function_calls()
        if called.name == "adk_request_confirmation"
    ]
    llm.script = script
    said = ((user(say(n)), model(f"Answer {n}.")) for n in range(20))
    await seed(chat, *itertools.chain.from_iterable(said))
    for number in range(20, 26):
        config = await recent(chat)
        if config:
            chat.run_config = RunConfig(get_session_config=config)
            loaded.append(len((await load(chat, config)).events))
        await chat.say(say(number))
    answer = types.FunctionResponse(
        id=wanted.id, name=wanted.name, response={"confirmed": True}
    )
    await chat.say(types.UserContent([types.Part(function_response=answer)]))
    assert paid == [7]


@pytest.mark.parametrize(
    "state",
    [
        *({SINCE: each} for each in (None, "5", True, 5, -5.0, 1e300, float("nan"))),
        {SINCE: 1e13},
        {"context_guard:off": True},
    ],
    ids=str,
)
async def test_state_that_others_have_written(state: dict[str, Any]) -> None:
    """What is no time of the session loads all; so does one that is left alone."""
    *_, chat = await play(3, 2, False)
    assert await recent(chat)
    await chat.set_state(state)
    assert await recent(chat) is None


async def test_a_session_that_there_is_not_is_loaded_whole() -> None:
    """The service then says what it says."""
    plugin = ContextGuardPlugin(recent_events=True)
    app = App(name="app", root_agent=LlmAgent(name="agent"), plugins=[plugin])
    assert await load_recent(InMemorySessionService(), app, **PLACE) is None


@pytest.mark.parametrize(
    "guard",
    [
        {"recent_events": False},
        {"observe": True},
        {"default": None},
        {"agents": {"agent": None}},
        {"default": lambda _: Threshold()},
    ],
    ids=["off", "observes", "none", "exempt", "chosen"],
)
async def test_without_a_guard_all_is_loaded(guard: dict[str, Any]) -> None:
    """As after a rollback, or where a later release exempts the agent."""
    *_, chat = await play(3, 2, True)
    assert await recent(chat)
    plugin = ContextGuardPlugin(**{"recent_events": True, **guard})
    root = chat.app.root_agent
    app = App(name="app", root_agent=root, plugins=[plugin])
    assert await load_recent(chat.sessions, app, **PLACE) is None
    bare = App(name="app", root_agent=root)
    assert await load_recent(chat.sessions, bare, **PLACE) is None


class Reading(BaseAgent):
    """An agent that reads the events by itself."""


@pytest.mark.quick("other")
@pytest.mark.parametrize("kind", ["default", "none", "other"])
async def test_all_agents_count(kind: Any) -> None:
    """One that has not been compacted needs all, unless it never sees the history."""
    llm = SimulatedLlm(context_window=WINDOW)
    other: BaseAgent = Reading(name="other")
    if kind != "other":
        other = LlmAgent(name="other", model=llm, include_contents=kind)
    *_, chat = await play(3, 4, False, sub_agents=[other])
    assert (await recent(chat) is None) == (kind != "none")


async def test_a_summary_that_is_lost_heals() -> None:
    """After one turn all is loaded again."""
    *_, chat = await play(3, 2, True)
    await chat.set_state({"__context_guard_record_agent": "?"})
    assert await recent(chat)
    await chat.say("Go on.")
    assert await recent(chat) is None


async def test_without_the_setting_nothing_is_noted() -> None:
    """All is loaded then, and all of the user's words are at hand."""
    *_, chat = await play(3, 4, True, guard={"recent_events": False})
    assert await recent(chat) is None
    assert not [key for key in await chat.state() if "events_since" in key]
