"""What ADK's `SkillToolset` returns of a skill: its instructions and its resources.

A document is a text that an agent works by: the instructions of a skill, or a resource
of it, such as "references/prices.md".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from google.genai import types

INSTRUCTIONS_TOOL = "load_skill"
"""The tool of ADK that returns the instructions of a skill."""

RESOURCE_TOOL = "load_skill_resource"
"""The tool of ADK that returns a resource of a skill."""


class DocumentKey(NamedTuple):
    """Which document a text is.

    Attributes:
        skill: The name of the skill.
        path: The path of the resource in the skill; "" for the instructions.
    """

    skill: str
    path: str


class Document(NamedTuple):
    """A document with its text."""

    key: DocumentKey
    text: str


def list_skill_tools(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the tools that return documents of skills, in alphabetical order.

    ADK's own two names are always in the result, and with them all names of `names`
    that are these with a prefix.

    Args:
        names: The names of the tools that a request declares.
    """
    prefixed = {
        name
        for name in names
        if _is_named(name, INSTRUCTIONS_TOOL) or _is_named(name, RESOURCE_TOOL)
    }
    return tuple(sorted({INSTRUCTIONS_TOOL, RESOURCE_TOOL} | prefixed))


def _is_named(name: str, tool: str) -> bool:
    """Whether this is the name of a tool of ADK, perhaps with the prefix of a toolset.

    An example of a name with a prefix: "crm_load_skill".
    """
    return name == tool or name.endswith(f"_{tool}")


def read_document(response: types.FunctionResponse | None) -> Document | None:
    """Reads the document in the result of a tool; None if there is none."""
    if response is None or not isinstance(response.response, dict):
        return None
    result = response.response
    name = response.name or ""
    if _is_named(name, INSTRUCTIONS_TOOL):
        path: object = ""
        text = result.get("instructions")
    elif _is_named(name, RESOURCE_TOOL):
        path = result.get("file_path")
        text = result.get("content")
    else:
        return None

    skill = result.get("skill_name")
    if not isinstance(skill, str) or not isinstance(path, str):
        return None
    if not isinstance(text, str) or not text.strip():
        return None
    return Document(DocumentKey(skill, path), text)
