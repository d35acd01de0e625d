"""The todo list: how it is read, the tool that keeps it, and what models see."""

from __future__ import annotations

from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.llm_request import LlmRequest
from pydantic import BaseModel

from contextguard_adk import ContextGuardPlugin, Threshold, TodosTool
from contextguard_adk._summarizing.todos import LIST_HEADING, TodoList
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as tool_call
from tests.builders import Chat, answer_text, user
from tests.chats import EXACT, seed
from tests.guarded import NOW, guarded_chat

KEY = "__context_guard_todos_agent"
TODOS = [
    {"content": "Read the log", "status": "completed"},
    {"content": "Fix  the\nleak in pod api-7", "status": "in_progress"},
    {"content": "Write it up", "active_form": "Writing it up"},
]


def count(text: str) -> int:
    """One token for four characters."""
    return len(text) // 4


TODO = {"content": "Fix it", "status": "done"}
JUNK = [None, "text", 7, {}, {"content": "  "}, {"content": 1}, {"status": "done"}]
FOUND = (("done", "Fix it"),)
STORED: dict[str, tuple[dict[str, Any], Any]] = {
    "none": ({}, ()),
    "own-key": ({KEY: [TODO]}, FOUND),
    "shared-key": ({"todos": [TODO]}, FOUND),
    "own-key-first": ({KEY: [TODO], "todos": [{"content": "Other"}]}, FOUND),
    "own-is-no-list": ({KEY: "text", "todos": [TODO]}, FOUND),
    "other-items": ({"todos": [*JUNK, TODO]}, FOUND),
}


@pytest.mark.parametrize(("state", "expected"), STORED.values(), ids=STORED)
def test_todos_are_read(state: dict[str, Any], expected: Any) -> None:
    """The agent's own list is read, else the shared one; only todos are taken."""
    for is_namespaced in (False, True):
        assert TodoList(state, "agent", is_namespaced).items == expected


def write_once(**args: Any) -> Any:
    """A script that calls the tool for each message that says so."""

    def script(request: LlmRequest) -> Reply:
        last = request.contents[-1]
        results = [p.function_response for p in last.parts or () if p.function_response]
        if results:
            return str(results[0].response)
        texts = "".join(part.text or "" for part in last.parts or ())
        return tool_call("todos", **args) if "todos" in texts else "ok"

    return script


def chat_with(script: Any, *plugins: Any, **agent: Any) -> tuple[SimulatedLlm, Chat]:
    """An agent that has the tool."""
    llm = SimulatedLlm(context_window=4_000, script=script)
    root = LlmAgent(name="agent", model=llm, tools=[TodosTool()], **agent)
    return llm, Chat(root, list(plugins))


async def test_the_list_is_written_and_read() -> None:
    """The whole list replaces the one before; it is kept under the agent's name."""
    llm, chat = chat_with(write_once(todos=TODOS))
    assert "3 todos are stored, 2 of them open" in answer_text(await chat.say("todos"))
    assert (await chat.state())[KEY] == [*TODOS[:2], {"status": "pending", **TODOS[2]}]
    llm.script = write_once()
    answer = answer_text(await chat.say("todos"))
    assert "'status': 'in_progress'" in answer
    llm.script = write_once(todos=[])
    assert "0 todos" in answer_text(await chat.say("todos"))
    assert (await chat.state())[KEY] == []


@pytest.mark.parametrize(
    ("todos", "expected"),
    [
        ("Fix it", "todos.: Input should be a valid list"),
        ([{"content": "a", "status": "done"}], "todos.0.status: Input should be"),
        ([TODOS[0], 7], "todos.1: Input should be a valid dict"),
    ],
)
async def test_a_bad_list_is_explained_and_nothing_is_lost(
    todos: Any, expected: str
) -> None:
    """The model is told what is wrong, and what an item needs."""
    llm, chat = chat_with(write_once(todos=TODOS))
    await chat.say("todos")
    before = (await chat.state())[KEY]
    llm.script = write_once(todos=todos)
    answer = answer_text(await chat.say("todos"))
    assert expected in answer
    assert "Each item needs `content`" in answer
    assert (await chat.state())[KEY] == before


class Schema(BaseModel):
    """A state that declares nothing of ours."""

    topic: str = ""


async def test_a_state_schema_is_respected() -> None:
    """With or without the guard the turn goes on and the list is stored."""
    for plugins in ([], [ContextGuardPlugin()]):
        _, chat = chat_with(write_once(todos=TODOS), *plugins, state_schema=Schema)
        assert "3 todos" in answer_text(await chat.say("todos"))
        assert len((await chat.state())["context_guard:todos:agent"]) == 3


async def test_the_list_stands_in_the_request_after_a_compaction() -> None:
    """Word for word, whatever the summary says of it."""
    llm, chat = chat_with(
        write_once(todos=TODOS),
        ContextGuardPlugin(default=Threshold(context_window=4_000)),
    )
    llm.summary_replies = lambda request: "Nothing of note."
    await chat.say("todos")
    for _ in range(6):
        await chat.say("word " * 500)
    assert llm.summaries
    listed = (
        f"{LIST_HEADING}\n- [completed] Read the log\n- [in_progress] Fix the leak "
        "in pod api-7\n- [pending] Write it up\n"
    )
    assert listed in llm.requests[-1].text
    assert listed in next(r.text for r in llm.requests if r.is_summary)


async def test_a_list_beside_a_long_session_is_cut_and_not_left_out() -> None:
    """Covered contents and the user's words take their part of the record first."""
    settings: dict[str, Any] = {"context_window": 200_000, "token_ratio": 1.0}
    llm = SimulatedLlm(summary_replies=["Short enough."], **settings)
    todos = [{"content": f"{n} {'task ' * 12}"} for n in range(150)]
    chat = guarded_chat(llm, Threshold(context_window=200_000))
    talk = [user(f"{n} {'word ' * 80}") for n in range(560)]
    await seed(chat, *talk, state={"todos": todos, **EXACT, **NOW})
    await chat.say("Go on.")
    assert llm.requests[-1].text.count("- [pending]") > 40


def test_a_long_list_drops_completed_tasks_first() -> None:
    """Then the last ones; it says how many are missing."""
    statuses = ("pending", "completed")
    items = [{"status": statuses[n % 2], "content": f"task {n}"} for n in range(20)]
    todos = TodoList({"todos": items}, "agent")
    some = todos.render(100, count)
    assert 90 < count(some) <= 100
    assert some.count("- [pending]") == 10
    assert "task 19" in some
    assert "task 1\n" not in some
    few = todos.render(60, count)
    assert count(few) <= 60
    assert "task 18\n" not in few
    assert f" {20 - len(few.splitlines()) + 2} more tasks" in few
    assert todos.render(5, count) == TodoList({}, "agent").render(100, count) == ""
