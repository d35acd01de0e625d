"""The todo list: how it is read, the tool that keeps it, and what models see."""

from __future__ import annotations

from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.llm_request import LlmRequest
from pydantic import BaseModel

from contextguard_adk import ContextGuardPlugin, Threshold, TodosTool
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as tool_call
from tests.builders import Chat, answer_text, user
from tests.chats import EXACT, seed, words
from tests.guarded import NOW, guarded_chat

KEY = "__context_guard_todos_agent"
TODOS = [
    {"content": "Read the log", "status": "completed"},
    {"content": "Fix  the\nleak in pod api-7", "status": "in_progress"},
    {"content": "Write it up", "active_form": "Writing it up"},
]
TODO = {"content": "Fix it", "status": "done"}
JUNK = [None, "text", 7, {}, {"content": "  "}, {"content": 1}, {"status": "done"}]


def write_once(**args: Any) -> Any:
    """A script that calls the tool for each message that says so."""

    def script(request: LlmRequest) -> Reply:
        parts = request.contents[-1].parts or []
        for part in parts:
            if part.function_response:
                return str(part.function_response.response)
        texts = "".join(part.text or "" for part in parts)
        return tool_call("todos", **args) if "todos" in texts else "ok"

    return script


def chat_with(script: Any, *plugins: Any, **agent: Any) -> tuple[SimulatedLlm, Chat]:
    """An agent that has the tool."""
    llm = SimulatedLlm(context_window=4_000, script=script)
    root = LlmAgent(name="agent", model=llm, tools=[TodosTool()], **agent)
    return llm, Chat(root, list(plugins))


async def test_the_list_is_written_and_read() -> None:
    """The whole list replaces the one before, under the agent's name; what is wrong
    with a bad one is explained, and nothing is lost by it."""
    llm, chat = chat_with(write_once(todos=TODOS))
    assert "3 todos are stored, 2 of them open" in answer_text(await chat.say("todos"))
    stored = [*TODOS[:2], {"status": "pending", **TODOS[2]}]

    for todos, complaint in (
        ("Fix it", "todos.: Input should be a valid list"),
        ([{"content": "a", "status": "done"}], "todos.0.status: Input should be"),
        ([TODOS[0], 7], "todos.1: Input should be a valid dict"),
    ):
        llm.script = write_once(todos=todos)
        answer = answer_text(await chat.say("todos"))
        assert complaint in answer
        assert "Each item needs `content`" in answer
        assert (await chat.state())[KEY] == stored

    llm.script = write_once()
    assert "'status': 'in_progress'" in answer_text(await chat.say("todos"))
    llm.script = write_once(todos=[])
    assert "0 todos" in answer_text(await chat.say("todos"))
    assert (await chat.state())[KEY] == []


class Schema(BaseModel):
    """A state that declares nothing of ours."""

    topic: str = ""


async def test_a_state_schema_is_respected() -> None:
    """With or without the guard the turn goes on and the list is stored."""
    for plugins in ([], [ContextGuardPlugin()]):
        _, chat = chat_with(write_once(todos=TODOS), *plugins, state_schema=Schema)
        assert "3 todos" in answer_text(await chat.say("todos"))
        assert len((await chat.state())["context_guard:todos:agent"]) == 3


STATES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "none": ({}, []),
    "the tool's": (
        {KEY: TODOS},
        [
            "- [completed] Read the log",
            "- [in_progress] Fix the leak in pod api-7",
            "- [pending] Write it up",
        ],
    ),
    "shared": ({"todos": [TODO]}, ["- [done] Fix it"]),
    "both": ({KEY: [TODO], "todos": [{"content": "No"}]}, ["- [done] Fix it"]),
    "own is no list": ({KEY: "text", "todos": [TODO]}, ["- [done] Fix it"]),
    "other items": ({"todos": [*JUNK, TODO]}, ["- [done] Fix it"]),
}


@pytest.mark.parametrize(("state", "expected"), STATES.values(), ids=STATES)
async def test_the_list_stands_beside_the_summary(
    state: dict[str, Any], expected: list[str]
) -> None:
    """The agent's own list, else the shared one, word for word, whatever the summary
    says of it; the summarizer reads it too."""
    llm = SimulatedLlm(context_window=4_000, summary_replies=["Nothing of note."])
    chat = guarded_chat(llm, Threshold(context_window=4_000))
    await seed(chat, user(words(2_000)), state={**state, **NOW})
    await chat.say("Go on.")
    assert llm.summaries == 1
    for request in llm.requests:
        lines = [line.strip() for line in request.text.splitlines()]
        assert [line for line in lines if line.startswith("- [")] == expected


async def test_a_long_list_is_cut_and_not_left_out() -> None:
    """Completed tasks go first, then the last ones, also beside what takes most of the
    record; it says how many are missing."""
    settings: dict[str, Any] = {"context_window": 200_000, "token_ratio": 1.0}
    llm = SimulatedLlm(summary_replies=["Short enough."], **settings)
    statuses = ("pending", "completed")
    todos = [
        {"content": f"task {n} {'task ' * 12}", "status": statuses[n % 2]}
        for n in range(600)
    ]
    chat = guarded_chat(llm, Threshold(context_window=200_000))
    talk = [user(f"{n} {'word ' * 80}") for n in range(560)]
    await seed(chat, *talk, state={"todos": todos, **EXACT, **NOW})
    await chat.say("Go on.")
    text = llm.requests[-1].text
    count = text.count("- [pending] task")

    assert 30 < count < 300
    assert "- [completed]" not in text
    assert "task 0 " in text
    assert f"{600 - count} more tasks" in text
