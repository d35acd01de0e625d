"""What the recall tool can reach, and what it never can."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.agents.run_config import RunConfig
from google.adk.apps.app import EventsCompactionConfig
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import InMemorySessionService
from google.adk.sessions.base_session_service import GetSessionConfig

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as tool_call
from tests.builders import Chat, call, event, model, queued_tool, response
from tests.chats import Changing, agent_requests, begin_as_user, hide, without_head
from tests.talks import workflow_agents

WINDOW = 4_000
SECRET = "zq-77-hidden"


def recalling(query: str) -> Any:
    """A script that searches once whenever a message begins with "Search"."""

    def script(request: LlmRequest) -> Reply:
        last = request.contents[-1]
        if any(part.function_response for part in last.parts or ()):
            return "Done."
        texts = "".join(part.text or "" for part in last.parts or ())
        has_tool = "recall_history" in request.tools_dict
        if has_tool and re.search(r"(^|`)Search", texts):
            return tool_call("recall_history", query=query)
        return "ok"

    return script


def pages(llm: SimulatedLlm) -> list[str]:
    """What the recall tool has answered, in the newest request."""
    contents = agent_requests(llm)[-1].contents
    found = [part.function_response for c in contents for part in c.parts or ()]
    return [str(r.response) for r in found if r and r.name == "recall_history"]


def tooled_agent(name: str, llm: SimulatedLlm) -> LlmAgent:
    """An agent with one tool."""
    return LlmAgent(name=name, model=llm, tools=[queued_tool("look", ["x"])])


def searching(
    query: str, *, before: Sequence[BasePlugin] = (), **chat: Any
) -> tuple[SimulatedLlm, Chat]:
    """A model that searches when it is told to, and a guarded chat with it."""
    llm = SimulatedLlm(context_window=WINDOW, script=recalling(query))
    return llm, Chat(tooled_agent("agent", llm), [*before, guard()], **chat)


def guard() -> ContextGuardPlugin:
    """A guard with a small window."""
    return ContextGuardPlugin(default=Threshold(context_window=WINDOW))


async def fill(chat: Chat, count: int = 6, text: str = "") -> None:
    """Talks until something is compacted."""
    for number in range(count):
        await chat.say(f"{number} {text} " + "word " * 500)


async def test_another_session_and_another_user_are_out_of_reach() -> None:
    """Neither through the same plugin, nor through the same session id."""
    service, plugin = InMemorySessionService(), guard()
    llm = SimulatedLlm(context_window=WINDOW, script=recalling(SECRET))
    agent = tooled_agent("agent", llm)
    other = Chat(agent, [plugin], session_service=service, session_id="other")
    await fill(other, text=SECRET)
    for session_id, user_id in (("session", "user"), ("other", "eve")):
        place: dict[str, Any] = {"session_id": session_id, "user_id": user_id}
        chat = Chat(agent, [plugin], session_service=service, **place)
        await fill(chat)
        await chat.say("Search it.")
        assert "Nothing matches" in pages(llm)[0]
        assert f"{SECRET} word" not in llm.requests[-1].text
    # The owner of the secret finds it.
    await other.say("Search it.")
    assert "user message" in pages(llm)[0]


@workflow_agents
async def test_another_branch_is_out_of_reach() -> None:
    """What a parallel agent has been told stays with it."""
    left = SimulatedLlm(context_window=WINDOW, script=lambda r: f"Mine is {SECRET}")
    right = SimulatedLlm(context_window=WINDOW, script=recalling("Mine is zq"))
    agents = [tooled_agent("left", left), tooled_agent("right", right)]
    chat = Chat(ParallelAgent(name="both", sub_agents=[*agents]), [guard()])
    await fill(chat)
    await chat.say("Search it.")
    (page,) = pages(right)
    assert "Nothing matches" in page
    assert SECRET not in right.requests[-1].text


NEWEST = RunConfig(get_session_config=GetSessionConfig(num_recent_events=12))
INTERNAL = ("adk_request_credential", "adk_request_confirmation", "adk_framework")


@pytest.mark.parametrize("run_config", [None, NEWEST], ids=["all", "newest events"])
@pytest.mark.parametrize("name", [*INTERNAL, "a task"])
async def test_what_adk_does_not_show_is_out_of_reach(
    name: str, run_config: RunConfig | None
) -> None:
    """Neither credentials and confirmations nor another task can be recalled."""
    if name == "a task" and "mode" not in LlmAgent.model_fields:
        pytest.skip("this ADK has no tasks")
    contents = [call(name, "1", secret=SECRET), response(name, {"token": SECRET}, "1")]
    if name == "a task":
        contents = [model(SECRET), response("finish_task", "Task completed.")]
    hidden = [event(content) for content in contents]
    llm, chat = searching(SECRET, run_config=run_config)
    await chat.say("Hello.")
    for each in hidden:
        if name == "a task":
            each.isolation_scope = name
        await chat.sessions.append_event(await chat.session(), each)
    await fill(chat)
    await chat.say("Search it.")
    assert "Nothing matches" in pages(llm)[0]


async def test_what_was_rewound_is_out_of_reach() -> None:
    """And what stays keeps its handle."""
    llm, chat = searching("marker")
    await fill(chat, 7, text="marker kept")
    await chat.say("Search now.")
    before = set(re.findall(r"\[(\w{10}) user message", pages(llm)[-1]))
    undone = await chat.say("marker undone " + "word " * 500)
    await fill(chat, 2, text="later")
    await chat.runner.rewind_async(
        user_id="user",
        session_id="session",
        rewind_before_invocation_id=undone[0].invocation_id,
    )
    await fill(chat, 3, text="again")
    await chat.say("Search now.")
    page = pages(llm)[-1]
    assert "undone" not in page
    assert before & set(re.findall(r"\[(\w{10}) user message", page))


async def test_events_that_a_run_does_not_load_are_in_reach() -> None:
    """With `get_session_config` ADK sends the newest events only."""
    llm, chat = searching(f"code {SECRET}", run_config=NEWEST)
    await chat.say(f"Mind the code {SECRET}.")
    await fill(chat, 14)
    assert SECRET not in str(without_head(llm.requests[-1].contents))
    await chat.say("Search it.")
    assert "user message" in pages(llm)[-1]


async def test_what_a_plugin_masks_does_not_come_back() -> None:
    """Of what a run loads the tool reads what the request shows, masked."""
    config = RunConfig(get_session_config=GetSessionConfig(num_recent_events=30))
    mask = Changing(partial(hide, SECRET))
    llm, chat = searching(f"code {SECRET}", before=[mask], run_config=config)
    await fill(chat, 10)
    await chat.say(f"Mind the code {SECRET}.")
    await fill(chat, 2)
    await chat.say("Search it.")
    (page,) = pages(llm)
    assert "Mind the code ****." in page
    assert SECRET not in page


async def test_what_adk_compacted_is_in_reach() -> None:
    """Its own compaction takes events out of the request, not out of the session."""
    compaction = EventsCompactionConfig(compaction_interval=2, overlap_size=0)
    first = Changing(begin_as_user)
    query = f"code {SECRET}"
    llm, chat = searching(query, before=[first], events_compaction_config=compaction)
    llm.summary_replies = lambda request: "They talked."
    await chat.say(f"Mind the code {SECRET}.")
    await fill(chat, 9)
    if not any(e.actions and e.actions.compaction for e in await chat.events()):
        pytest.skip("google-adk 2.0 compacts nothing where an agent is the root")
    await chat.say("more " * 3_200)
    await chat.say("Search it.")
    assert "user message" in pages(llm)[-1]
