"""The agent's todo list: the tool that keeps it, and how models are shown it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from contextguard_adk._history.stored import MAX_TODOS
from contextguard_adk._measuring.budgets import TokenCounter
from contextguard_adk._runtime.adk_tree import declares_state_schema
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._support.phrases import TODO_LIST, quote_line
from contextguard_adk._turn.room import Room
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section, declare

TOOL_NAME = "todos"

STATE_NAME = "todos"
"""The field of `StateValues` for the list, from which `AgentState.key` makes a key."""

SHARED_TODOS_KEY = "todos"
"""The key of an app's own list, for all agents; an agent's own list has priority."""

MAX_CHARS = 100_000
"""Only this many characters of all tasks together are read; the first tasks stay."""

MAX_LINE_CHARS = 500
"""If not all tasks have room, each line is cut to this length."""

MAX_SECTION_TOKENS = 2_500
"""The list beside a summary takes at most this, however large the window is."""

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
    """A task as an agent gives it to the tool.

    Attributes:
        content: The text of the task: "Run the tests".
        status: The status of the task.
        active_form: The text while the task is in progress: "Running the tests".
    """

    content: str = Field(min_length=1)
    status: Literal["pending", "in_progress", "completed"] = "pending"
    active_form: str = ""


_TODOS = TypeAdapter(Annotated[list[TodoItem], Field(max_length=MAX_TODOS)])


class TodosTool(BaseTool):
    """A tool named `todos`: replaces the agent's todo list, or reads it.

    The list is kept in session state under the agent's name, and stands beside each
    summary.
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
        """Replaces the stored list if `args` has a list; otherwise reads the list.

        If the list in `args` is malformed, the stored list stays, and the result has
        the reason as `error`.
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

        # An empty list is stored, too. If the key was deleted instead, the next call
        # would read an older list under the other form of the key, or the app's list.
        # An item without an `active_form` is stored without this field.
        tool_context.state[state.key(STATE_NAME)] = [
            {
                "status": item.status,
                **item.model_dump(exclude={"status"}, exclude_defaults=True),
            }
            for item in items
        ]
        open_count = sum(1 for item in items if item.status != "completed")
        return {"result": f"{len(items)} todos are stored, {open_count} of them open."}


def _explain_malformed(error: ValidationError) -> str:
    """Returns a text with the first mistake in a list, and the form of a list."""
    first = error.errors(include_input=False, include_url=False)[0]
    path = ".".join(str(step) for step in first["loc"])  # For example: "0.content".
    return (
        f"The list was not stored: todos.{path}: {first['msg']}. "
        "Each item needs `content`, and may have `status` (pending, "
        "in_progress or completed) and `active_form`."
    )


def _needs_namespaced_keys(tool_context: ToolContext) -> bool:
    """Whether the keys in session state must have the namespaced form.

    They must if an agent of the app has a `state_schema`: ADK then ends the turn if a
    key has the plain form.
    """
    invocation = tool_context.get_invocation_context()
    plugins = getattr(invocation.plugin_manager, "plugins", ())
    if any(getattr(plugin, "has_namespaced_keys", False) for plugin in plugins):
        # The guard's plugin has found a schema, or its settings ask for this form.
        return True

    root = getattr(invocation.agent, "root_agent", None)
    # Without a root agent, the agents cannot be searched for a schema.
    return root is None or declares_state_schema(root)


class Todos(Section):
    """Shows the todo list that the agent keeps in session state."""

    name = "todo-list"
    label = "the todo list"
    heading = TODO_LIST
    listed_tools = (TOOL_NAME,)
    state_ratio = 0.5
    is_briefed = True

    def most_tokens(self, turn: Turn, covered: frozenset[int]) -> float:
        """Returns the limit of the list, or half of a summary's if that is lower."""
        return min(MAX_SECTION_TOKENS, turn.budgets.summary_tokens // 2)

    def write(self, turn: Turn, covered: frozenset[int], known: str, room: Room) -> str:
        """Returns the list, or the tasks that have room; "" for none."""
        # Four bytes of session state count as one token here.
        most_tokens = min(int(room.tokens), room.state_bytes // 4)
        text = render_todos(read_todos(turn.state), most_tokens, turn.count)
        return turn.history.redactor.redact_text(text)

    def brief(self, turn: Turn) -> str:
        """Returns the list for the summarizer, or the tasks that have room.

        The list has at most 8,000 characters. Returns "" if there is no task.
        """
        return render_todos(read_todos(turn.state), MAX_BRIEF_CHARS, len)

    def describe(self, state: AgentState) -> str:
        """Returns the number of tasks, open or completed, such as "3 todos"."""
        return f"{len(read_todos(state))} todos"


def read_todos(state: AgentState) -> list[Task]:
    """Reads the tasks of an agent, the oldest first.

    They are from the agent's own list or, if there is none, from the app's list for all
    agents. Items that are no tasks are left out.
    """
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

    Returns None if the `content` is empty or no text.
    """
    if isinstance(item, Mapping):
        content = item.get("content")
        status = item.get("status")
    else:
        content = getattr(item, "content", None)
        status = getattr(item, "status", None)

    if not isinstance(content, str) or not content.strip():
        return None
    # An app may store any value as the status, also a long text.
    short_status = status[:20] if isinstance(status, str) else "pending"
    return Task(short_status, content)


def render_todos(tasks: Sequence[Task], budget: int, count: TokenCounter) -> str:
    """Renders a list of tasks in their order.

    If not all tasks have room, the lines of long tasks are cut. The tasks get room in
    the order of `_rank_positions`; those without room are left out. A last line counts
    the tasks that are left out.

    Args:
        tasks: The tasks, the oldest first.
        budget: The most that the list may take, in the unit of `count`.
        count: Measures a text, in tokens or in characters.

    Returns:
        The list; "" if there is no task, or no room for any task.
    """
    if not tasks:
        return ""
    lines = [quote_line(f"- [{task.status}] {task.content}") for task in tasks]
    whole = "\n".join([TODO_LIST, *lines])
    if count(whole) <= budget:
        return whole

    short_lines = [line[:MAX_LINE_CHARS] for line in lines]
    heading_and_note = f"{TODO_LIST}\n{_MISSING_NOTE}"
    # A line break counts as one, here and after each line.
    left = budget - count(heading_and_note) - 1
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
    """Returns the positions of the tasks, in the order in which they get room.

    The open tasks come first, in their order. The completed tasks follow, the newest
    first.
    """
    open_positions = []
    completed_positions = []
    for position, task in enumerate(tasks):
        if task.status == "completed":
            completed_positions.append(position)
        else:
            open_positions.append(position)
    return [*open_positions, *reversed(completed_positions)]
