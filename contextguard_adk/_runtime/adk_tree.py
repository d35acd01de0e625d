"""Walks the tree of an ADK app: agents, their tools, and the agents of these."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

_CHILD_FIELDS = (
    "graph",
    "agent",
    "node",
    "_node",
    "_inner_node",
    "sub_agents",
    "nodes",
    "tools",
)


def declares_state_schema(root: object) -> bool:
    """Returns whether any agent of a tree, or of its tools, has a state schema."""
    tree = walk_tree(root)
    return any(getattr(node, "state_schema", None) is not None for node in tree)


def walk_tree(root: object) -> Iterator[object]:
    """Yields agents, their tools, the agents of these tools, and workflow nodes."""
    waiting = [root]
    seen = set[int]()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield node

        for name in _CHILD_FIELDS:
            child = getattr(node, name, None)
            if isinstance(child, list | tuple):
                waiting.extend(child)
            else:
                waiting.append(child)
        if isinstance(node, BaseModel):
            waiting.extend(_find_own_agents(node))


def _find_own_agents(node: BaseModel) -> list[BaseModel]:
    """Returns the agents in any field: a user's own class may hold some in its own."""
    models = [value for value in vars(node).values() if isinstance(value, BaseModel)]
    return [model for model in models if hasattr(model, "sub_agents")]
