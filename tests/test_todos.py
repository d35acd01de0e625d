"""The todo list as a summariser reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from contextguard_adk.summarizing.todos import MAX_TODOS_CHARS, load_todos, render_todos


class Todo(BaseModel):
    """A todo as a tool may keep it."""

    content: str
    status: str


@dataclass
class PlainTodo:
    """A todo without a status."""

    content: str


OWN, SHARED = "__context_guard_todos_agent", "todos"
TODO = {"content": "Fix it", "status": "done"}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        pytest.param({}, [], id="none"),
        pytest.param({OWN: [TODO]}, [("done", "Fix it")], id="own-key"),
        pytest.param(
            {"context_guard:todos:agent": [TODO]},
            [("done", "Fix it")],
            id="own-key-with-colons",
        ),
        pytest.param({SHARED: [TODO]}, [("done", "Fix it")], id="shared-key"),
        pytest.param(
            {OWN: [TODO], SHARED: [{"content": "Other"}]},
            [("done", "Fix it")],
            id="own-key-first",
        ),
        pytest.param({OWN: [], SHARED: [TODO]}, [], id="own-list-is-empty"),
        pytest.param({OWN: None, SHARED: [TODO]}, [("done", "Fix it")], id="own-none"),
        pytest.param(
            {OWN: "text", SHARED: [TODO]}, [("done", "Fix it")], id="own-is-no-list"
        ),
        pytest.param({SHARED: {"a": TODO}}, [], id="shared-is-no-list"),
        pytest.param(
            {SHARED: [Todo(content="Fix it", status="done")]},
            [("done", "Fix it")],
            id="model",
        ),
        pytest.param({SHARED: [PlainTodo("a")]}, [("pending", "a")], id="dataclass"),
        pytest.param({SHARED: [{"content": "a"}]}, [("pending", "a")], id="no-status"),
        pytest.param(
            {SHARED: [{"content": "a", "status": 1}]},
            [("pending", "a")],
            id="status-of-another-type",
        ),
        pytest.param(
            {
                SHARED: [
                    None,
                    "text",
                    7,
                    {},
                    {"content": ""},
                    {"content": "  "},
                    {"content": 1},
                    {"status": "done"},
                    TODO,
                ]
            },
            [("done", "Fix it")],
            id="other-items",
        ),
        pytest.param({"__context_guard_todos_other": [TODO]}, [], id="other-agent"),
    ],
)
@pytest.mark.parametrize("is_namespaced", [False, True], ids=["plain", "namespaced"])
def test_todos_are_read(
    state: dict[str, Any], expected: list[tuple[str, str]], is_namespaced: bool
) -> None:
    """The agent's own list is read, else the shared one; only todos are taken."""
    assert load_todos(state, "agent", is_namespaced) == expected


INCLUDE = (
    "Include these tasks and their statuses in your summary under a dedicated "
    '"## Todo List" section.'
)
RESTORE = (
    " Instruct the resuming assistant to restore them using the `todos` tool to "
    "continue tracking progress."
)


@pytest.mark.parametrize("has_tool", [True, False], ids=["tool", "no-tool"])
def test_rendered_list(has_tool: bool) -> None:
    """The list and what to do with it read as documented."""
    todos = [("in_progress", "Fix the\n  bug"), ("pending", "Write tests")]
    assert render_todos(todos, has_tool) == (
        "[Current todo list]\n"
        "- [in_progress] Fix the bug\n"
        "- [pending] Write tests\n"
        "[End todo list]\n\n" + INCLUDE + (RESTORE if has_tool else "")
    )


def test_empty_list_is_not_mentioned() -> None:
    """Without todos the summariser hears nothing of them."""
    assert render_todos([]) == ""


def test_long_list_is_cut_after_an_item() -> None:
    """A list that is too long ends with a whole item."""
    todos = [("pending", f"{n:04} " + "x" * 90) for n in range(500)]
    lines = render_todos(todos).splitlines()
    items = lines[1 : lines.index("[End todo list]")]
    assert sum(len(item) + 1 for item in items) <= MAX_TODOS_CHARS
    assert len(items) == MAX_TODOS_CHARS // len(items[0] + "\n")
    assert all(len(item) == len(items[0]) for item in items)
