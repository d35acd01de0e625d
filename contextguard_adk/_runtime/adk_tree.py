"""Walks the tree of an ADK app: agents, tools, agents as tools, and workflow nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class AppTools:
    """The names of the agents and tools of an app, as far as its tree tells.

    Attributes:
        names: The names.
        are_all_known: Whether no other names can be right.
    """

    names: frozenset[str] = frozenset()
    are_all_known: bool = False


def find_tools(root: object) -> AppTools:
    """Finds the tools of an app; `root` is None if ADK hides the tree.

    A toolset may learn the names of its tools from a server.
    """
    # This import is slow, unless ADK has imported the module before.
    from google.adk.tools.base_toolset import BaseToolset

    nodes = list(walk_tree(root))
    has_toolset = any(isinstance(node, BaseToolset) for node in nodes)
    return AppTools(names_of(nodes), are_all_known=bool(nodes) and not has_toolset)


def names_of(nodes: Iterable[object]) -> frozenset[str]:
    """Returns the names of nodes; a tool may be a function with only a `__name__`."""
    names = [getattr(node, "name", getattr(node, "__name__", "")) for node in nodes]
    return frozenset(name for name in names if name and isinstance(name, str))


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
