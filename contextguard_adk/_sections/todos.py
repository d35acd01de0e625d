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

STATE_NAME = "todos"
"""The name of the list in session state: the name of its field in `StateValues`."""

SHARED_TODOS_KEY = "todos"
"""The key of an app's own list, for all agents; an agent's own list has priority."""

MAX_CHARS = 100_000
"""Only this many characters of all tasks are read; later tasks are left out."""

MAX_LINE_CHARS = 500
"""If not all tasks have room, the line of a task is cut to this."""

MAX_SECTION_TOKENS = 2_500
"""The list beside a summary takes at most this, whatever the window."""

MAX_BRIEF_CHARS = 8_000
"""The list for the summarizer takes at most this."""

_MISSING_NOTE = "- … and {} more tasks that are not shown"


class Task(NamedTuple):
    """A task as this tool or the app has stored it.

    Attributes:
        status: "pending", "in_progress", "completed", or another word of the app.
        content: The text of the task.
    """

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
        """Stores the list if there is one in `args`, and reads the list otherwise.

        If the list is malformed, returns what is wrong as `error`.
        """
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
            return {"error": _explain_malformed(error)}

        # An empty list is stored, too. Otherwise an older list, which may be under the
        # other form of the key, would be read.
        tool_context.state[state.key(STATE_NAME)] = [
            {"status": "pending", **item.model_dump(exclude_defaults=True)}
            for item in items
        ]
        open_count = sum(1 for item in items if item.status != "completed")
        return {"result": f"{len(items)} todos are stored, {open_count} of them open."}


def _explain_malformed(error: ValidationError) -> str:
    """Names the first mistake in a list, and tells what a list looks like."""
    first = error.errors(include_input=False, include_url=False)[0]
    path = ".".join(str(step) for step in first["loc"])  # For example: "0.content".
    return (
        f"The list was not stored: todos.{path}: {first['msg']}. "
        "Each item needs `content`, and may have `status` (pending, "
        "in_progress or completed) and `active_form`."
    )


def _needs_namespaced_keys(tool_context: ToolContext) -> bool:
    """Whether the keys in session state must have the namespaced form.

    With a `state_schema`, ADK ends the turn if a key has the plain form.
    """
    invocation = tool_context.get_invocation_context()
    plugins = getattr(invocation.plugin_manager, "plugins", ())
    if any(getattr(plugin, "has_namespaced_keys", False) for plugin in plugins):
        return True  # The guard's plugin has found a schema, or is set to this form.

    root = getattr(invocation.agent, "root_agent", None)
    # Without a root, a schema may be anywhere.
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
        """Returns the list, or as much of the list as has room."""
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
    """Reads the tasks of an agent; without a list of its own, the app's list."""
    stored = state.read(STATE_NAME)
    if stored is None:
        stored = state.read_at(SHARED_TODOS_KEY, STATE_NAME)

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
    """Reads a task that is stored as a dict, or as an object with attributes.

    Returns None for a value that has no text as `content`.
    """
    if isinstance(item, Mapping):
        content = item.get("content")
        status = item.get("status")
    else:
        content = getattr(item, "content", None)
        status = getattr(item, "status", None)

    if not isinstance(content, str) or not content.strip():
        return None
    # An app may store any status.
    known_status = status[:20] if isinstance(status, str) else "pending"
    return Task(known_status, content)


def render_todos(tasks: Sequence[Task], budget: int, count: TokenCounter) -> str:
    """Renders a list of tasks in their order.

    If not all tasks have room, long tasks are cut. Open tasks have priority, and among
    the completed tasks the newest. A last line counts the tasks that are missing.

    Args:
        tasks: The tasks, the oldest first.
        budget: The most that the list may take, in the unit of `count`.
        count: Measures a text.

    Returns:
        The list; "" if there is no task, or room for none.
    """
    if not tasks:
        return ""
    lines = [quote_line(f"- [{task.status}] {task.content}") for task in tasks]
    whole = "\n".join([TODO_LIST, *lines])
    if count(whole) <= budget:
        return whole

    short_lines = [line[:MAX_LINE_CHARS] for line in lines]
    heading_and_note = f"{TODO_LIST}\n{_MISSING_NOTE}"
    left = budget - count(heading_and_note) - 1  # One for the line break.
    shown_positions = []
    for position in _rank_positions(tasks):
        cost = count(short_lines[position]) + 1
        if cost <= left:
            left -= cost
            shown_positions.append(position)
    if not shown_positions:
        return ""

    shown_lines = [short_lines[position] for position in sorted(shown_positions)]
    missing_count = len(tasks) - len(shown_lines)
    if missing_count:
        shown_lines.append(_MISSING_NOTE.format(missing_count))
    return "\n".join([TODO_LIST, *shown_lines])


def _rank_positions(tasks: Sequence[Task]) -> list[int]:
    """Returns the positions of open tasks, then of completed ones, the newest first."""
    open_positions = []
    completed_positions = []
    for position, task in enumerate(tasks):
        if task.status == "completed":
            completed_positions.append(position)
        else:
            open_positions.append(position)
    return [*open_positions, *reversed(completed_positions)]
