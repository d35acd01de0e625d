"""The agent's todo list: the tool that keeps it, and how models are shown it."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from google.adk.tools.base_tool import BaseTool
from google.genai import types
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from contextguard_adk.history.state import AgentState, StateLike, declares_state_schema
from contextguard_adk.measuring.shortening import TokenCounter

if TYPE_CHECKING:
    from google.adk.tools.tool_context import ToolContext

SHARED_TODOS_KEY = "todos"
MAX_TODO_CHARS = 500
"""A single item longer than this is cut."""

MAX_TODOS_CHARS = 8_000
"""A list longer than this is cut at the end of an item."""

TODOS_TOOL = "todos"
LIST_HEADING = "[The todo list as it stands]"

_DESCRIPTION = (
    "Keeps your todo list. Give the whole list in `todos` to replace it; give nothing "
    "to read it."
)


class TodoItem(BaseModel):
    """One task of a todo list.

    Attributes:
        content: What is to be done, such as "Run the tests".
        status: How far it is.
        active_form: The same while it is being done, such as "Running the tests".
    """

    content: str = Field(min_length=1)
    status: Literal["pending", "in_progress", "completed"] = "pending"
    active_form: str = ""


_TODOS = TypeAdapter(list[TodoItem])


class TodosTool(BaseTool):
    """A tool named `todos`: given the whole list it writes it, given nothing it reads.

    The list is kept in session state under the agent's name. After a compaction it
    stands beside the summary as it is, whatever the summary says.
    """

    def __init__(self) -> None:
        super().__init__(name=TODOS_TOOL, description=_DESCRIPTION)

    def _get_declaration(self) -> types.FunctionDeclaration:
        item = TodoItem.model_json_schema()
        properties = {
            name: {key: value for key, value in schema.items() if key != "title"}
            for name, schema in item["properties"].items()
        }
        schema = {"type": "object", "properties": properties, "required": ["content"]}
        return types.FunctionDeclaration(
            name=self.name,
            description=self.description,
            parameters_json_schema={
                "type": "object",
                "properties": {"todos": {"type": "array", "items": schema}},
            },
        )

    async def run_async(
        self, *, args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, Any]:
        """Writes or reads the list; a list that is none gets an answer that helps."""
        agent, state = tool_context.agent_name, tool_context.state
        is_namespaced = _needs_namespaced_keys(tool_context)
        if args.get("todos") is None:
            todos = load_todos(state, agent, is_namespaced)
            return {
                "todos": [
                    {"content": content, "status": status} for status, content in todos
                ]
            }
        try:
            items = _TODOS.validate_python(args["todos"])
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place = ".".join(str(step) for step in first["loc"])
            return {
                "error": f"The list was not stored: todos.{place}: {first['msg']}. "
                "Each item needs `content`, and may have `status` (pending, "
                "in_progress or completed) and `active_form`."
            }
        # The other form of the key could hold an older list, which would be read.
        stored = [item.model_dump(exclude_defaults=True) for item in items]
        state[AgentState(state, agent, is_namespaced).key(SHARED_TODOS_KEY)] = [
            {"status": "pending", **item} for item in stored
        ]
        open_count = sum(item.status != "completed" for item in items)
        return {"result": f"{len(items)} todos are stored, {open_count} of them open."}


def _needs_namespaced_keys(tool_context: ToolContext) -> bool:
    """Whether a plain key could end the turn, because a `state_schema` is declared."""
    invocation = tool_context.get_invocation_context()
    plugins = getattr(invocation.plugin_manager, "plugins", ())
    if any(getattr(plugin, "has_namespaced_keys", False) for plugin in plugins):
        return True
    root = getattr(invocation.agent, "root_agent", None)
    return root is None or declares_state_schema(root)


class TodoList(list[tuple[str, str]]):
    """Todos."""

    def render(self, budget_tokens: int, count: TokenCounter) -> str:
        """For the agent."""
        return write_todo_list(self, budget_tokens, count)

    def for_summarizer(self) -> str:
        """For the summarizer."""
        return render_todos(self)


def load_todos(state: StateLike, agent: str, is_namespaced: bool = False) -> TodoList:
    """Reads the todo list of an agent from session state.

    The agent's own key is read first, then the plain `todos` key that other tools
    write. Items may be dicts or models with `content` and `status`; anything else
    is left out.

    Returns:
        `(status, content)` pairs; empty when there is no list.
    """
    stored = AgentState(state, agent, is_namespaced).read(SHARED_TODOS_KEY)
    if not isinstance(stored, list):
        stored = state.get(SHARED_TODOS_KEY)
    if not isinstance(stored, list):
        return TodoList()
    return TodoList(item for item in map(_read_item, stored) if item)


def _read_item(item: object) -> tuple[str, str] | None:
    if isinstance(item, Mapping):
        content, status = item.get("content"), item.get("status")
    else:
        content = getattr(item, "content", None)
        status = getattr(item, "status", None)
    if not isinstance(content, str) or not content.strip():
        return None
    return (status if isinstance(status, str) else "pending", content)


def render_todos(todos: list[tuple[str, str]], has_todos_tool: bool = True) -> str:
    """Renders a todo list for the summariser.

    Args:
        todos: What `load_todos` returned.
        has_todos_tool: Whether the agent has a tool of that name to restore them.

    Returns:
        The list and what to do with it; "" when it is empty.
    """
    if not todos:
        return ""
    lines, used = [], 0
    for status, content in todos:
        line = " ".join(f"- [{status}] {content}".split())[:MAX_TODO_CHARS]
        used += len(line) + 1
        if used > MAX_TODOS_CHARS:
            break
        lines.append(line)
    instruction = (
        "Include these tasks and their statuses in your summary under a dedicated "
        '"## Todo List" section.'
    )
    if has_todos_tool:
        instruction += (
            " Instruct the resuming assistant to restore them using the `todos` tool "
            "to continue tracking progress."
        )
    listed = "\n".join(lines)
    return f"[Current todo list]\n{listed}\n[End todo list]\n\n{instruction}"


def write_todo_list(
    todos: Sequence[tuple[str, str]], budget_tokens: int, count: TokenCounter
) -> str:
    """Writes a todo list for the agent, word for word.

    Args:
        todos: What `load_todos` returned.
        budget_tokens: What the list may take.
        count: Tokens of a text.

    Returns:
        The list; where it is too long, completed tasks are left out first, then the
        last ones. "" when it is empty.
    """
    done = [i for i, (status, _) in enumerate(todos) if status == "completed"]
    still_open = sorted(set(range(len(todos))).difference(done), reverse=True)
    dispensable = done + still_open

    def write(left_out: int) -> str:
        gone = set(dispensable[:left_out])
        lines = [LIST_HEADING]
        lines += [
            " ".join(f"- [{status}] {text}".split())
            for i, (status, text) in enumerate(todos)
            if i not in gone
        ]
        if left_out:
            lines.append(f"- … and {left_out} more, completed ones first left out")
        return "\n".join(lines)

    def fits(left_out: int) -> bool:
        return count(write(left_out)) <= budget_tokens

    if not todos:
        return ""
    if fits(0):
        return write(0)
    left_out = bisect.bisect_left(range(len(todos)), True, lo=1, key=fits)
    return write(left_out) if left_out < len(todos) else ""
