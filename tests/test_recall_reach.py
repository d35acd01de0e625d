"""What the recall tool can reach, and what it never can."""

from __future__ import annotations

import re
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.run_config import RunConfig
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import InMemorySessionService
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.recall.offer import without_rewound
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as tool_call
from tests.builders import (
    Chat,
    call,
    event,
    guarded_agent,
    queued_tool,
    response,
    user,
)

WINDOW = 4_000
workflow_agents = pytest.mark.filterwarnings(
    r"ignore:(Parallel|Sequential)Agent is deprecated:DeprecationWarning"
)
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
    newest = [request for request in llm.requests if not request.is_summary][-1]
    return [
        str(part.function_response.response)
        for content in newest.contents
        for part in content.parts or ()
        if part.function_response and part.function_response.name == "recall_history"
    ]


def guarded_llm(query: str) -> tuple[SimulatedLlm, LlmAgent]:
    """A model that searches when it is told to, and its agent."""
    llm = SimulatedLlm(context_window=WINDOW, script=recalling(query))
    return llm, guarded_agent(llm, [queued_tool("look", ["x"])])


def guard(**settings: Any) -> ContextGuardPlugin:
    """A guard with a small window."""
    return ContextGuardPlugin(default=Threshold(context_window=WINDOW, **settings))


async def fill(chat: Chat, count: int = 6, text: str = "") -> None:
    """Talks until something is compacted."""
    for number in range(count):
        await chat.say(f"{number} {text} " + "word " * 500)


async def test_another_session_and_another_user_are_out_of_reach() -> None:
    """Neither through the same plugin, nor through the same session id."""
    service = InMemorySessionService()
    llm, agent = guarded_llm(SECRET)
    plugin = guard()
    other = Chat(agent, [plugin], session_service=service, session_id="other")
    await fill(other, text=SECRET)
    await service.create_session(app_name="app", user_id="eve", session_id="other")
    chat = Chat(agent, [plugin], session_service=service)
    await fill(chat)
    llm.keep_requests = None
    await chat.say("Search it.")
    assert "Nothing matches" in pages(llm)[0]
    assert SECRET not in llm.requests[-1].text.replace(f"'{SECRET}'", "").replace(
        f'"{SECRET}"', ""
    )
    # The owner of the secret finds it.
    await other.say("Search it.")
    assert "user message" in pages(llm)[0]


@workflow_agents
async def test_another_branch_is_out_of_reach() -> None:
    """What a parallel agent has been told stays with it."""
    llms = {
        "left": SimulatedLlm(
            context_window=WINDOW, script=lambda r: "Mine is " + SECRET
        ),
        "right": SimulatedLlm(context_window=WINDOW, script=recalling("Mine is zq")),
    }
    agents = [
        LlmAgent(name=name, model=llm, tools=[queued_tool("look", ["x"])])
        for name, llm in llms.items()
    ]
    chat = Chat(ParallelAgent(name="both", sub_agents=list(agents)), [guard()])
    await fill(chat)
    await chat.say("Search it.")
    (page,) = pages(llms["right"])
    assert "Nothing matches" in page
    assert SECRET not in llms["right"].requests[-1].text


CREDENTIALS = [
    call("adk_request_credential", "c1", secret=SECRET),
    response("adk_request_credential", {"token": SECRET}, "c1"),
]
THOUGHT = types.Content(
    role="model",
    parts=[types.Part(text=f"Maybe {SECRET}", thought=True), types.Part(text="Hm.")],
)


@pytest.mark.parametrize(
    "contents", [CREDENTIALS, [THOUGHT]], ids=["credentials", "thoughts"]
)
async def test_secrets_and_thoughts_are_out_of_reach(
    contents: list[types.Content],
) -> None:
    """Neither a credential, nor what the model only thought, can be recalled."""
    llm, agent = guarded_llm(SECRET)
    chat = Chat(agent, [guard()])
    await chat.say("Hello.")
    for content in contents:
        await chat.sessions.append_event(await chat._session(), event(content))
    await fill(chat)
    await chat.say("Search it.")
    assert "Nothing matches" in pages(llm)[0]


async def test_what_was_rewound_is_out_of_reach() -> None:
    """And what stays keeps its handle."""
    llm, agent = guarded_llm("marker")
    chat = Chat(agent, [guard()])
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
    llm, agent = guarded_llm(f"code {SECRET}")
    config = RunConfig(get_session_config=GetSessionConfig(num_recent_events=12))
    chat = Chat(agent, [guard()], run_config=config)
    await chat.say(f"Mind the code {SECRET}.")
    await fill(chat, 14)
    assert SECRET not in str(llm.requests[-1].contents[2:])
    await chat.say("Search it.")
    assert "user message" in pages(llm)[-1]


class Mask(BasePlugin):
    """Hides codes from the model."""

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Changes the texts of the request, not the session."""
        llm_request.contents = [
            types.Content(
                role=content.role,
                parts=[
                    types.Part(text=part.text.replace(SECRET, "****"))
                    if part.text
                    else part
                    for part in content.parts or ()
                ],
            )
            for content in llm_request.contents
        ]


async def test_what_a_plugin_masks_does_not_come_back() -> None:
    """Of what a run loads the tool reads what the request shows."""
    llm, agent = guarded_llm(f"code {SECRET}")
    config = RunConfig(get_session_config=GetSessionConfig(num_recent_events=30))
    chat = Chat(agent, [Mask(name="mask"), guard()], run_config=config)
    await fill(chat, 10)
    await chat.say(f"Mind the code {SECRET}.")
    await fill(chat, 2)
    await chat.say("Search it.")
    assert pages(llm)
    assert all("user message" not in page for page in pages(llm))


# --- The rules one by one ---------------------------------------------------------


def test_rewinds_leave_out_what_they_took_back() -> None:
    """One after the other, and one to nowhere."""

    def said(invocation: str) -> Event:
        return Event(author="user", invocation_id=invocation, content=user(invocation))

    def rewound(target: str) -> Event:
        actions = EventActions(rewind_before_invocation_id=target)
        return Event(author="user", invocation_id="r", actions=actions)

    events = [said("1"), said("2"), said("2"), said("3"), rewound("2"), said("4")]
    assert [e.invocation_id for e in without_rewound(events)] == ["1", "4"]
    events += [said("5"), rewound("5"), rewound("gone"), said("6")]
    assert [e.invocation_id for e in without_rewound(events)] == ["1", "4", "6"]
