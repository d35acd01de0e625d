"""Says what is wrong with a setting: its key, its value, and what is accepted."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic.fields import FieldInfo

from contextguard_adk.strategies.base import import_subclass
from contextguard_adk.strategies.reducers import Reducer

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlevel = _short.maxlist = _short.maxdict = 3

BOUNDS = {Gt: "more than", Ge: "at least", Lt: "less than", Le: "at most"}


def describe_problems(
    error: ValidationError, key: str, model: type[BaseModel], values: Mapping[str, Any]
) -> str:
    """Says for each wrong key which value it has, and what is accepted.

    Args:
        error: What pydantic says.
        key: Where the table stands in the file; "" for the top.
        model: The settings that the table should be.
        values: The table.
    """
    problems: dict[str, list[str]] = {}
    for problem in error.errors():
        names, parents = _follow(model, values, problem)
        place = ".".join([key, *names] if key else names) or "(top level)"
        value = problem["input"]
        has_value = problem["type"] != "missing" and not isinstance(value, Mapping)
        label = f"{place} = {show_value(value)}" if has_value else place
        problems.setdefault(label, []).append(_explain(problem, names, parents))
    told = []
    for label, (first, *others) in problems.items():
        # What fits none of several kinds is said once for each.
        ways = [first, *(other.removeprefix("Input should be ") for other in others)]
        told.append(f"{label}: {' or '.join(dict.fromkeys(ways))}")
    return "; ".join(told)


def show_value(value: object) -> str:
    """A value as it is quoted in a message: never long."""
    return _short.repr(value)


def _explain(
    problem: Any, names: Sequence[str], parents: Sequence[type[BaseModel]]
) -> str:
    name = names[-1] if names else ""
    if problem["type"] == "extra_forbidden":
        # Of two kinds of window it is the other one that lacks the key.
        kinds = [kind for kind in parents if name not in kind.model_fields]
        known = {key for kind in kinds for key in kind.model_fields}
        return f"unknown key; known here: {', '.join(sorted(known))}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    fields = [found for kind in parents if (found := _find_field(kind, name))]
    accepted = _accepted_range(fields[0]) if fields else ""
    return f"{message} (accepted: {accepted})" if accepted else message


def _follow(
    model: type[BaseModel], values: Mapping[str, Any], problem: Any
) -> tuple[list[str], list[type[BaseModel]]]:
    """The keys of the file that lead to a problem, and whose field the last is.

    Pydantic names classes and kinds of a union as well, which are no keys.
    """
    names: list[str] = []
    parents, models = [model], [model]
    value: Any = values
    for item in problem["loc"]:
        if Reducer in models and isinstance(value, Mapping) and "reducer" in value:
            kind = import_subclass(
                value["reducer"],
                Reducer,  # type: ignore[type-abstract]
            )
            models = [kind]
        if isinstance(value, Mapping) and item in value:
            parents = models
            fields = [found for kind in models if (found := _find_field(kind, item))]
            models = [kind for field in fields for kind in _models_in(field.annotation)]
        elif not (isinstance(value, list) and isinstance(item, int)):
            continue
        names.append(str(item))
        value = value[item]
    if problem["type"] == "missing":
        return [*names, str(problem["loc"][-1])], models
    return names, parents


def _find_field(model: type[BaseModel], name: object) -> FieldInfo | None:
    for field_name, field in model.model_fields.items():
        alias = field.validation_alias
        choices = alias.choices if isinstance(alias, AliasChoices) else []
        if name == field_name or name in choices:
            return field
    return None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for part in get_args(annotation) for m in _models_in(part)]


def _accepted_range(field: FieldInfo) -> str:
    """The bounds of a number in words; "" where it has none."""
    return " and ".join(
        f"{words} {getattr(bound, kind.__name__.lower()):,}"
        for bound in field.metadata
        for kind, words in BOUNDS.items()
        if isinstance(bound, kind)
    )
