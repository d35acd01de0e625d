"""The agent's todo list, as the summariser is shown it."""

from __future__ import annotations

from collections.abc import Mapping

from contextguard_adk.state import GuardState, StateLike

SHARED_TODOS_KEY = "todos"
MAX_TODO_CHARS = 500
"""A single item longer than this is cut."""

MAX_TODOS_CHARS = 8_000
"""A list longer than this is cut at the end of an item."""


def load_todos(
    state: StateLike, agent: str, is_namespaced: bool = False
) -> list[tuple[str, str]]:
    """Reads the todo list of an agent from session state.

    The agent's own key is read first, then the plain `todos` key that other tools
    write. Items may be dicts or models with `content` and `status`; anything else
    is left out.

    Returns:
        `(status, content)` pairs; empty when there is no list.
    """
    stored = GuardState(state, agent, is_namespaced).read(SHARED_TODOS_KEY)
    if not isinstance(stored, list):
        stored = state.get(SHARED_TODOS_KEY)
    if not isinstance(stored, list):
        return []
    return [item for item in map(_read_item, stored) if item]


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
