"""Reads the text of a TOML or YAML file as one table."""

from __future__ import annotations

from typing import Any


def read_table(text: str, is_toml: bool) -> dict[str, Any]:
    """Reads a TOML or a YAML text as a table; an empty text is an empty table.

    Args:
        text: The text.
        is_toml: Whether the text must be TOML. Otherwise it must be YAML.

    Raises:
        ValueError: The text is no table in its format. If it is a table in the other
            format, the error says so.
    """
    read = _load_toml if is_toml else _load_yaml
    try:
        table = read(text)
    except ValueError:
        hint = _find_hint(text, is_toml)
        if hint:
            raise ValueError(hint) from None
        raise

    if table is None:  # YAML reads an empty text as null.
        return {}
    if isinstance(table, dict):
        return table

    # YAML reads many a TOML text as one string, without an error.
    hint = _find_hint(text, is_toml)
    raise ValueError(hint or "a table of settings is expected")


def _find_hint(text: str, is_toml: bool) -> str:
    """Says that a text has the other format: YAML in place of TOML, or the reverse.

    Returns "" if the text is no table in the other format, or an empty table. `is_toml`
    tells the format that the text should have.
    """
    if is_toml:
        read_other = _load_yaml
        hint = "it holds YAML, so its name must end in .yaml or .yml"
    else:
        read_other = _load_toml
        hint = "it holds TOML, so its name must end in .toml"

    try:
        table = read_other(text)
    except (ValueError, RecursionError):
        return ""
    has_settings = isinstance(table, dict) and len(table) > 0
    return hint if has_settings else ""


def _load_toml(text: str) -> object:
    """Reads TOML; raises a ValueError if the text is no TOML."""
    # To import a reader takes about as long as to import all of this package, so only
    # the reader that is needed is imported.
    import tomllib

    return tomllib.loads(text)


def _load_yaml(text: str) -> object:
    """Reads YAML, and refuses a key that stands twice in one table, as TOML does.

    Returns the value of the text, which may be anything, such as None.

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
                # A key may be a list or a table, as in "? [a, b]". Such a key has no
                # text to compare, and it cannot be the name of a setting.
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
        # PyYAML raises these errors for a value that does not fit its tag: `!!int x`.
        raise ValueError("a value does not fit its tag") from error
