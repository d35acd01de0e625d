"""Walks the tree of an ADK app: agents, their tools, and what is behind these."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel


def declares_state_schema(root: object) -> bool:
    """Returns whether anything in an agent tree, behind tools too, has a schema."""
    tree = walk_tree(root)
    return any(getattr(node, "state_schema", None) is not None for node in tree)


def walk_tree(root: object) -> Iterator[object]:
    """Yields agents, tools and what is behind them, and workflow nodes."""
    waiting = [root]
    seen = set[int]()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        names = ("graph", "agent", "node", "_node", "_inner_node")
        for name in (*names, "sub_agents", "nodes", "tools"):
            child = getattr(node, name, None)
            waiting.extend(child if isinstance(child, list | tuple) else [child])
        # An agent of the user's own class may hold agents in other fields.
        fields = vars(node).values() if isinstance(node, BaseModel) else ()
        models = (child for child in fields if isinstance(child, BaseModel))
        waiting.extend(child for child in models if hasattr(child, "sub_agents"))
