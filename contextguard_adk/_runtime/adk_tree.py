"""Walks the tree of an ADK app: agents, tools, agents as tools, and workflow nodes."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

# The attributes in which objects of ADK have the nodes below them. The value of an
# attribute is one node, or a list or tuple of nodes.
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
    """Returns whether any node of a tree declares a `state_schema`."""
    tree = walk_tree(root)
    return any(getattr(node, "state_schema", None) is not None for node in tree)


def walk_tree(root: object) -> Iterator[object]:
    """Yields the root and every node below the root, each node once.

    Args:
        root: An app, an agent or any other node; None yields nothing.
    """
    waiting = [root]
    seen_ids = set[int]()
    while waiting:
        node = waiting.pop()
        # An attribute may be None. Nodes may stand in a circle.
        if node is None or id(node) in seen_ids:
            continue
        seen_ids.add(id(node))
        yield node

        for name in _CHILD_FIELDS:
            value = getattr(node, name, None)
            if isinstance(value, list | tuple):
                waiting.extend(value)
            else:
                waiting.append(value)
        # The class of a user may have agents in fields of its own.
        if isinstance(node, BaseModel):
            waiting.extend(_agents_in_fields(node))


def _agents_in_fields(node: BaseModel) -> list[BaseModel]:
    """Returns the agents that are values of a node's fields, whatever their names."""
    models = [value for value in vars(node).values() if isinstance(value, BaseModel)]
    # Each agent of ADK has this field.
    return [model for model in models if hasattr(model, "sub_agents")]
