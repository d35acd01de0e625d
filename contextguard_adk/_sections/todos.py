"""The agent's todo list: the tool that keeps it, and how models are shown it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types
from pydantic import BaseModel, Field, JsonValue, TypeAdapter, ValidationError

from contextguard_adk._history.stored import MAX_TODOS
from contextguard_adk._measuring.budgets import TokenCounter
from contextguard_adk._runtime.adk_tree import declares_state_schema
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._support.phrases import TODO_LIST, quote_line
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section, declare

TOOL_NAME = "todos"
SHARED_TODOS_KEY = "todos"
MAX_CHARS = 100_000  # Of all tasks; later ones are not read.


class TodoItem(BaseModel):
    """One task; `active_form` is its content while it is being done."""

    content: str = Field(min_length=1)
    status: Literal["pending", "in_progress", "completed"] = "pending"
    active_form: str = ""


_TODOS = TypeAdapter(Annotated[list[TodoItem], Field(max_length=MAX_TODOS)])


class TodosTool(BaseTool):
    """A tool named `todos`: writes the whole list when given one, else reads it.

    The list, in session state under the agent's name, stands beside each summary.
    """

    def __init__(self) -> None:
        super().__init__(
            name=TOOL_NAME,
            description="Keeps your todo list. Give the whole list in `todos` to "
            "replace it; give nothing to read it.",
        )

    def _get_declaration(self) -> types.FunctionDeclaration:
        schema = TodoItem.model_json_schema()
        schema.pop("description", None)  # Not there under `python -OO`.
        return declare(self, todos={"type": "array", "items": schema})

    async def run_async(
        self, *, args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, Any]:
        """Writes or reads the list; explains what is wrong with a list it refuses."""
        is_namespaced = _needs_namespaced_keys(tool_context)
        name = tool_context.agent_name
        state = AgentState(tool_context.state, name, is_namespaced)
        if args.get("todos") is None:
            todos = read_todos(state)
            return {"todos": [{"content": text, "status": s} for s, text in todos]}

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
        tool_context.state[state.key(SHARED_TODOS_KEY)] = [
            {"status": "pending", **item.model_dump(exclude_defaults=True)}
            for item in items
        ]
        open_count = sum(1 for item in items if item.status != "completed")
        return {"result": f"{len(items)} todos are stored, {open_count} of them open."}


def _needs_namespaced_keys(tool_context: ToolContext) -> bool:
    """Whether a plain key could end the turn, because a `state_schema` is declared."""
    invocation = tool_context.get_invocation_context()
    plugins = getattr(invocation.plugin_manager, "plugins", ())
    if any(getattr(plugin, "has_namespaced_keys", False) for plugin in plugins):
        return True
    root = getattr(invocation.agent, "root_agent", None)
    return root is None or declares_state_schema(root)


class Todos(Section):
    """Shows the todo list that the agent keeps in session state."""

    name = "todo-list"
    label = "the todo list"
    heading = TODO_LIST
    listed_tools = (TOOL_NAME,)
    is_briefed = True

    def write(
        self, turn: Turn, covered: frozenset[int], known: JsonValue, room_tokens: int
    ) -> JsonValue:
        """Returns the list, as far as it has room."""
        budget_tokens = min(2_500, turn.budgets.summary_tokens // 2, room_tokens // 2)
        return render_todos(read_todos(turn.state), budget_tokens, turn.count)

    def brief(self, turn: Turn) -> str:
        """Returns the list, at most 8,000 characters of it."""
        return render_todos(read_todos(turn.state), 8_000, len)

    def describe(self, state: AgentState) -> str:
        """Counts the tasks, the completed ones included."""
        return f"{len(read_todos(state))} todos"


def read_todos(state: AgentState) -> list[tuple[str, str]]:
    """Reads status and content of each task: under the agent's key, else `todos`."""
    stored = state.read("todos")
    if stored is None:
        stored = state.read_at(SHARED_TODOS_KEY, "todos")

    todos = []
    left_chars = MAX_CHARS
    for stored_item in stored or ():
        item = _read_item(stored_item)
        if item is None:
            continue
        left_chars -= len(item[1])
        if left_chars < 0:
            break
        todos.append(item)
    return todos


def _read_item(item: object) -> tuple[str, str] | None:
    """Reads a dict, or an object with attributes; None for what is no task."""
    if isinstance(item, Mapping):
        content = item.get("content")
        status = item.get("status")
    else:
        content = getattr(item, "content", None)
        status = getattr(item, "status", None)

    if not isinstance(content, str) or not content.strip():
        return None
    return (status[:20] if isinstance(status, str) else "pending", content)


def render_todos(
    items: Sequence[tuple[str, str]], budget_tokens: int, count: TokenCounter
) -> str:
    """Renders a list; completed tasks are left out first, the oldest before others."""
    if not items:
        return ""
    lines = [quote_line(f"- [{status}] {content}") for status, content in items]
    whole = "\n".join([TODO_LIST, *lines])
    if count(whole) <= budget_tokens:
        return whole

    done = [i for i, (status, _) in enumerate(items) if status == "completed"]
    still_open = [i for i, (status, _) in enumerate(items) if status != "completed"]
    short = [line[:500] for line in lines]
    note = "- … and {} more tasks that are not shown"
    left_tokens = budget_tokens - count(f"{TODO_LIST}\n{note}") - 1
    kept = []
    for i in [*still_open, *reversed(done)]:
        cost_tokens = count(short[i]) + 1
        if cost_tokens <= left_tokens:
            left_tokens -= cost_tokens
            kept.append(i)
    if not kept:
        return ""

    shown = [short[i] for i in sorted(kept)]
    missing_count = len(items) - len(kept)
    if missing_count:
        shown.append(note.format(missing_count))
    return "\n".join([TODO_LIST, *shown])
