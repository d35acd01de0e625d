"""Writes the tables of settings in docs/configuration.md from the models themselves.

    python docs/tables.py

Between `<!-- settings: Threshold -->` and `<!-- end -->` stands what this model has
beyond its base class.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

import contextguard_adk
from contextguard_adk import strategies
from contextguard_adk.config import PluginSettings

PUBLIC = {
    **vars(contextguard_adk),
    **vars(strategies),
    "PluginSettings": PluginSettings,
}
"""Where a marker's name is looked up; base classes in it have tables of their own."""

PAGE = Path(__file__).with_name("configuration.md")
MARKER = re.compile(r"(<!-- settings: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def update(page: str) -> str:
    """Replaces what stands between the markers of a page by the tables of today."""

    def write(match: re.Match[str]) -> str:
        return f"{match[1]}\n{write_table(find_model(match[2]))}\n\n{match[3]}"

    return MARKER.sub(write, page)


def find_model(name: str) -> type[BaseModel]:
    """Returns a public model by its name."""
    found = PUBLIC.get(name)
    if not (isinstance(found, type) and issubclass(found, BaseModel)):
        raise ValueError(f"<!-- settings: {name} -->: there is no such model")
    return found


def write_table(model: type[BaseModel]) -> str:
    """Writes a table of a model's own settings."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in own_fields(model):
        text = " ".join((field.description or "").split())
        if not text:
            raise ValueError(f"{model.__name__}.{name} has no description")
        cells = (describe_name(name, field), describe_default(field), text)
        rows.append(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        )
    table = "\n".join(rows)
    return f'<div class="settings" markdown>\n\n{table}\n\n</div>'


def own_fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yields a model's fields, without those of public base classes.

    Fields of a base class that is not public follow those of the model itself.
    """
    for kind in model.__mro__:
        if kind is not model and PUBLIC.get(kind.__name__) is kind:
            return
        for name in inspect.get_annotations(kind):
            if name in model.model_fields:
                yield name, model.model_fields[name]


def describe_name(name: str, field: FieldInfo) -> str:
    """Writes the name of a setting, and its other name where it has one."""
    names = [name]
    if isinstance(alias := field.validation_alias, AliasChoices):
        names += [str(other) for other in alias.choices if other != name]
    return " or ".join(f"`{each}`" for each in names)


def describe_default(field: FieldInfo) -> str:
    """Writes a default as it stands in Python."""
    if field.is_required():
        return "required"
    return f"`{describe_value(field.get_default(call_default_factory=True))}`"


def describe_value(value: object) -> str:
    """Writes a value; of a model only what is not the default of its class."""
    if isinstance(value, BaseModel):
        names = (n for n in type(value).model_fields if n in value.model_fields_set)
        said = {name: getattr(value, name) for name in names}
        inner = ", ".join(f"{name}={describe_value(v)}" for name, v in said.items())
        return f"{type(value).__name__}({inner})"
    if type(value) is int and value >= 1_000:
        return f"{value:_}"
    return repr(value)


if __name__ == "__main__":
    PAGE.write_text(update(PAGE.read_text("utf-8")), "utf-8")
