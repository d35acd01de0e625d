"""Reads the text of a TOML or YAML file as one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def read_table(text: str, is_toml: bool) -> dict[str, Any]:
    """Reads a text as a table; an empty text is an empty table.

    Raises:
        ValueError: The text is no table in its format. If it is a table in the other
            format, the error says so.
    """
    import tomllib  # Both readers take as long to import as all of this package.

    read: Callable[[str], object]
    read_other: Callable[[str], object]
    if is_toml:
        read = tomllib.loads
        read_other = _load_yaml
        hint = "it holds YAML, so its name must end in .yaml or .yml"
    else:
        read = _load_yaml
        read_other = tomllib.loads
        hint = "it holds TOML, so its name must end in .toml"

    problem = ValueError("a table of settings is expected")
    try:
        table = read(text)
    except ValueError as error:
        problem = error
    else:
        if table is None:  # YAML reads an empty text as null.
            return {}
        if isinstance(table, dict):
            return table

    if _has_settings(text, read_other):
        raise ValueError(hint)
    raise problem


def _has_settings(text: str, read: Callable[[str], object]) -> bool:
    """Returns whether a reader finds a table in a text that is not empty."""
    try:
        table = read(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(table, dict) and bool(table)


def _load_yaml(text: str) -> object:
    """Reads YAML, and refuses a key that stands twice in one table, as TOML does.

    Raises:
        ValueError: The text is no YAML, or has a key twice.
    """
    import yaml

    class UniqueKeysLoader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            """Returns the node of a table; raises a ValueError for a repeated key."""
            node = super().compose_mapping_node(anchor)
            seen_keys = set[str]()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                if key.value in seen_keys:
                    line = key.start_mark.line + 1
                    raise ValueError(
                        f"{key.value!r} stands twice, again in line {line}"
                    )
                seen_keys.add(key.value)
            return node

    try:
        return yaml.load(text, Loader=UniqueKeysLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except (AttributeError, LookupError, TypeError) as error:
        # PyYAML raises these for a value that does not fit its tag, as `!!int x`.
        raise ValueError("a value does not fit its tag") from error
