"""The agent's todo list: the tool that keeps it, and how models are shown it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

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
MAX_LINE_CHARS = 500  # Of a task, where not all tasks have room.
MAX_SECTION_TOKENS = 2_500
MAX_BRIEF_CHARS = 8_000


class Task(NamedTuple):
    """A task as it was stored, by this tool or by the app."""

    status: str
    content: str


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
            tasks = read_todos(state)
            todos = [{"content": task.content, "status": task.status} for task in tasks]
            return {"todos": todos}

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
        budget_tokens = min(
            MAX_SECTION_TOKENS, turn.budgets.summary_tokens // 2, room_tokens // 2
        )
        return render_todos(read_todos(turn.state), budget_tokens, turn.count)

    def brief(self, turn: Turn) -> str:
        """Returns the list, at most 8,000 characters of it."""
        return render_todos(read_todos(turn.state), MAX_BRIEF_CHARS, len)

    def describe(self, state: AgentState) -> str:
        """Counts the tasks, the completed ones included."""
        return f"{len(read_todos(state))} todos"


def read_todos(state: AgentState) -> list[Task]:
    """Reads the tasks under the agent's key; without this key, those under `todos`."""
    stored = state.read("todos")
    if stored is None:
        stored = state.read_at(SHARED_TODOS_KEY, "todos")

    tasks = []
    left_chars = MAX_CHARS
    for item in stored or ():
        task = _read_item(item)
        if task is None:
            continue
        left_chars -= len(task.content)
        if left_chars < 0:
            break
        tasks.append(task)
    return tasks


def _read_item(item: object) -> Task | None:
    """Reads a dict, or an object with attributes; None for any other value."""
    if isinstance(item, Mapping):
        content = item.get("content")
        status = item.get("status")
    else:
        content = getattr(item, "content", None)
        status = getattr(item, "status", None)

    if not isinstance(content, str) or not content.strip():
        return None
    known_status = status[:20] if isinstance(status, str) else "pending"
    return Task(known_status, content)


def render_todos(tasks: Sequence[Task], budget: int, count: TokenCounter) -> str:
    """Renders a list of tasks in their order.

    Where not all of them have room, long tasks are cut, open tasks have priority, and
    of the completed ones the newest. A last line counts the tasks that are missing.

    Args:
        tasks: The tasks, the oldest first.
        budget: The most that the list may take, in the unit of `count`.
        count: Measures a text.

    Returns:
        The list; "" where there is no task, or room for none.
    """
    if not tasks:
        return ""
    lines = [quote_line(f"- [{task.status}] {task.content}") for task in tasks]
    whole = "\n".join([TODO_LIST, *lines])
    if count(whole) <= budget:
        return whole

    open_places = []
    completed_places = []
    for place, task in enumerate(tasks):
        if task.status == "completed":
            completed_places.append(place)
        else:
            open_places.append(place)

    short_lines = [line[:MAX_LINE_CHARS] for line in lines]
    note = "- … and {} more tasks that are not shown"
    left = budget - count(f"{TODO_LIST}\n{note}") - 1
    shown_places = []
    for place in [*open_places, *reversed(completed_places)]:
        cost = count(short_lines[place]) + 1  # One for the line break.
        if cost <= left:
            left -= cost
            shown_places.append(place)
    if not shown_places:
        return ""

    shown_lines = [short_lines[place] for place in sorted(shown_places)]
    missing_count = len(tasks) - len(shown_places)
    if missing_count:
        shown_lines.append(note.format(missing_count))
    return "\n".join([TODO_LIST, *shown_lines])
