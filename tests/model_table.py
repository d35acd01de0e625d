"""Makes `models.json`, the copy of litellm's table for those who have no litellm.

`python -m tests.model_table` makes it of the litellm that is installed. With `--check`
it prints in which models the copy differs from that litellm, and never fails: a test
that fails on a new release of litellm would break builds in which nothing has changed.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from tests.retiring_models import ROOT, load_table

COPY = ROOT / "contextguard_adk" / "_providers" / "models.json"

SOURCE = "_source"
"""The name of the entry that says where the copy comes from. It is no model."""

CHAT_MODES = ("chat", "responses", "completion")
_FIELD = re.compile(
    r"alias_of|mode|max_(input_|output_)?tokens|supports_reasoning"
    r"|(input_cost_per_token|output_cost_per_token|cache_read_input_token_cost)"
    r"(_above_\d+k_tokens)?"
)
"""The fields of an entry that the guard reads."""


def shorten(table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns aliases and the models that answer in text, with what the guard reads."""
    rows = dict[str, dict[str, Any]]()
    for name, fields in table.items():
        if not isinstance(fields, dict):
            continue
        if "alias_of" in fields or fields.get("mode") in CHAT_MODES:
            rows[name] = {key: fields[key] for key in fields if _is_read(key, fields)}
    return rows


def _is_read(key: str, fields: Mapping[str, Any]) -> bool:
    """Whether the guard reads a field; without a value it is as good as none."""
    is_empty = fields[key] is None or fields[key] is False  # 0 is a price.
    return bool(_FIELD.fullmatch(key)) and not is_empty


def write(table: Mapping[str, Any], source: str) -> str:
    """Writes the copy as JSON: a line for the source, and one for each model."""
    rows = {SOURCE: source, **shorten(table)}
    lines = [
        f"{json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}"
        for name, row in rows.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def find_differences(copy: Mapping[str, Any], table: Mapping[str, Any]) -> list[str]:
    """The models whose rows are not the same, or that only one of the two has."""
    rows = {name: row for name, row in copy.items() if name != SOURCE}
    shortened = shorten(table)
    return sorted(
        name
        for name in rows.keys() | shortened.keys()
        if rows.get(name) != shortened.get(name)
    )


def main() -> None:
    """Writes the copy; with `--check` prints what it would change."""
    table = load_table()
    version = importlib.metadata.version("litellm")
    source = f"litellm {version}, MIT License: see models.LICENSE.md"
    if "--check" not in sys.argv[1:]:
        COPY.write_text(write(table, source), "utf-8")
        return

    copy = json.loads(COPY.read_bytes())
    changed = find_differences(copy, table)
    if changed:
        print(f"{len(changed)} models, such as {', '.join(changed[:5])}")
        print(f"  copy: {copy[SOURCE]}")
        print(f"  here: {source}")


if __name__ == "__main__":
    main()
