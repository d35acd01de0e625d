"""Reads YAML strictly; imported only where there is some to read."""

from __future__ import annotations

from typing import Any

import yaml


def load_yaml(text: str) -> object:
    """Reads a YAML document.

    Raises:
        ValueError: It is not valid, or a key stands twice in one table.
    """
    try:
        return yaml.load(text, Loader=_UniqueKeysLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except (AttributeError, LookupError, TypeError) as error:
        # What PyYAML's readers of !!int, !!bool and the like raise for other text.
        raise ValueError("a value does not fit its tag") from error


class _UniqueKeysLoader(yaml.SafeLoader):
    """Refuses keys that stand twice in one table, as TOML does."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(
                    f"{key.value!r} stands twice, again in line {line}"
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return node
