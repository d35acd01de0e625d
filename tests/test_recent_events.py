"""Sessions that are loaded in part, as session state says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions import BaseSessionService, InMemorySessionService
from google.adk.sessions.base_session_service import GetSessionConfig

from contextguard_adk import CompactionRecord, Threshold
from contextguard_adk.sessions import load_recent
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests.builders import Chat, model, user
from tests.chats import seed, words
from tests.guarded import guarded_chat

WINDOW = 4_000
SINCE = "context_guard:events_since"
KEY = {"app_name": "app", "user_id": "user", "session_id": "session"}


def look_up(step: int) -> dict[str, str]:
    """Returns what was looked up."""
    return {"id": f"order-{step}", "text": words(150 + step % 7 * 40, f"row-{step}")}


def working(until: int) -> Callable[[LlmRequest], Reply]:
    """A model that looks something up in each of the first turns, then only talks."""
    steps = itertools.count()

    def script(request: LlmRequest) -> Reply:
        *_, part = request.contents[-1].parts or []
        if part.function_response is None and (step := next(steps)) < until:
            return call("look_up", step=step)
        return f"Answer {next(steps)}."

    return script


def say(number: int) -> str:
    """A message of the user: some equal, some long, with a rule now and then."""
    if number % 5 == 3:
        return "Go on."
    rule = f"Never touch cluster-{number}! " if number % 4 == 1 else ""
    return f"Message {number}: {words(180 + number % 3 * 90)}. {rule}{words(20)}."


async def play(
    until: int,
    turns: int,
    loads_part: bool,
    service: BaseSessionService | None = None,
    guard: dict[str, Any] | None = None,
    **agent: Any,
) -> tuple[SimulatedLlm, list[CompactionRecord], list[int], Chat]:
    """Plays turns of a session that is loaded in part as soon as it may be."""
    compactions, loaded = list[CompactionRecord](), list[int]()
    llm = SimulatedLlm(script=working(until), context_window=WINDOW)
    llm.summary_replies = [f"Summary {number}." for number in range(99)]
    guard = {"recent_events": True, **(guard or {})}
    guard["on_compaction"] = compactions.append
    strategy, place = Threshold(context_window=WINDOW), {"session_service": service}
    chat = guarded_chat(
        llm, strategy, guard=guard, chat=place, tools=[look_up], **agent
    )
    said = ((user(say(n)), model(f"Answer of old {n}.")) for n in range(-40, 0))
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
    return await load_recent(chat.sessions, **KEY)


async def load(chat: Chat, config: GetSessionConfig | None = None) -> Any:
    """The session of a chat."""
    return await chat.sessions.get_session(**KEY, config=config)


def sent(llm: SimulatedLlm) -> list[str]:
    """What models were sent, word for word."""
    return [
        str([content.model_dump(exclude_none=True) for content in request.contents])
        for request in llm.requests
    ]


@pytest.mark.parametrize("until", [0, 9, 1_000], ids=["chat", "mixed", "tools"])
async def test_requests_are_those_of_the_whole_session(until: int) -> None:
    """Byte for byte, those to the summarizer as well, over several compactions."""
    whole, compactions, _, _ = await play(until, 24, False)
    part, _, loaded, chat = await play(until, 24, True)
    assert sent(part) == sent(whole)
    assert len(compactions) >= 3
    assert len(loaded) > 20
    assert max(loaded) < 0.7 * len(await chat.events())
    assert part.rejections == part.violations == 0


async def test_recall_reads_what_is_not_loaded() -> None:
    """By a search, from the first message on."""
    llm, _, loaded, chat = await play(3, 4, True)
    assert loaded
    llm.script = [call("recall_history", query="Message -40"), "Done."]
    await chat.say("What did I say first?")
    *_, result = llm.requests[-1].contents[-1].parts or []
    assert result.function_response
    assert "Message -40: notebooks" in str(result.function_response.response)


async def test_a_service_can_load_each_session_so() -> None:
    """As an app on ADK's web server needs it, where nobody makes a `RunConfig`."""

    class Recent(InMemorySessionService):
        async def get_session(
            self, *, config: GetSessionConfig | None = None, **key: Any
        ) -> Any:
            """Loads what is needed, unless a config says what to load."""
            config = config or await load_recent(self, **key)
            found = await super().get_session(**key, config=config)
            counts.append(len(found.events) if found else 0)
            return found

    counts = list[int]()
    whole, *_ = await play(3, 9, False)
    part, _, _, chat = await play(3, 9, False, Recent())
    assert sent(part) == sent(whole)
    everything = await load(chat, GetSessionConfig())
    assert counts[-2] < 0.9 * len(everything.events)


@pytest.mark.parametrize(
    ("state", "is_part"),
    [
        ({}, False),
        ({SINCE: 5.0}, True),
        ({SINCE: 5}, True),
        ({SINCE: "5"}, False),
        ({SINCE: True}, False),
        ({SINCE: float("nan")}, False),
        ({SINCE: -5.0}, False),
        ({SINCE: 5.0, "context_guard:off": True}, False),
    ],
)
async def test_what_state_says(state: dict[str, Any], is_part: bool) -> None:
    """What is no time loads all, and so does a session that is left alone."""
    service = InMemorySessionService()
    await service.create_session(**KEY, state=state)
    assert (await load_recent(service, **KEY) is not None) == is_part


async def test_a_session_that_there_is_not_is_loaded_whole() -> None:
    """The service then says what it says."""
    service = InMemorySessionService()
    assert await load_recent(service, **KEY) is None


@pytest.mark.parametrize("contents", ["default", "none"])
async def test_all_agents_count(contents: Any) -> None:
    """One that has not been compacted needs all, unless it never sees the history."""
    llm = SimulatedLlm(context_window=WINDOW)
    other = LlmAgent(name="other", model=llm, include_contents=contents)
    *_, chat = await play(3, 4, False, sub_agents=[other])
    assert (await recent(chat) is None) == (contents == "default")


async def test_without_the_setting_nothing_is_noted() -> None:
    """All is loaded then, and all of the user's words are at hand."""
    *_, chat = await play(3, 4, True, guard={"recent_events": False})
    assert await recent(chat) is None
    assert not [key for key in await chat.state() if "events_since" in key]
