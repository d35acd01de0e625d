"""What all models of settings share: frozen values that explain themselves."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Settings(BaseModel):
    """Settings that do not change; the docstring lists them with their defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if cls.model_fields:
            lines = [inspect.cleandoc(cls.__doc__ or ""), "", "Settings:"]
            cls.__doc__ = "\n".join([*lines, *_list_settings(cls)]).lstrip()


def _list_settings(model: type[BaseModel]) -> list[str]:
    """Lists settings for `help`, those that the class adds to its bases first."""
    kinds = [kind for kind in model.__mro__ if issubclass(kind, BaseModel)]
    lines = list[str]()
    for name, field in sorted(
        model.model_fields.items(),
        key=lambda item: sum(item[0] in kind.model_fields for kind in kinds),
    ):
        text = f"    {name} ({_default_text(field)}): {field.description or ''}"
        lines += textwrap.wrap(text, 80, subsequent_indent=" " * 8)
    return lines


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        given = {k: v for k, v in default if k in default.model_fields_set}
        text = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"default {type(default).__name__}({text})"
    return f"default {default!r}"
