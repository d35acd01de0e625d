"""What all models of settings share: frozen values that explain themselves."""

from __future__ import annotations

import difflib
import inspect
import itertools
import json
import reprlib
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from contextguard_adk.errors import ConfigError

Count = Annotated[int, Field(ge=0, strict=True)]
PositiveCount = Annotated[int, Field(ge=1, strict=True)]
WindowTokens = Annotated[int, Field(ge=1_000, strict=True)]
Ratio = Annotated[float, Field(gt=0, le=1, strict=True)]
Seconds = Annotated[float, Field(gt=0, le=3_600, strict=True)]

Summaries = Literal["write", "stored"]
"""Whether summaries are written, or only those that are stored are used."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 2
short_repr = _SHORT.repr
"""The text of a value for a message of one line."""


_ELSEWHERE = {
    "keep": "keep_messages keep_recent messages_to_keep event_retention_size",
    "trigger": "threshold token_threshold max_tokens_before_summary trigger_tokens",
    "context_window": "max_input_tokens window window_tokens context_length num_ctx",
    "max_messages": "compaction_interval window_size max_history",
    "summarizer": "model summary_model summarization_model summarizer_model",
    "summary_instruction": "prompt summary_prompt summary_system_prompt",
    "keep_tools": "exclude_tools preserve_tools",
}
"""What other packages, or users, call a setting."""

_WORDS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
    "a valid ": "a ",
    "a integer": "an integer",
    "Field required": "it is required",
}
_SYNONYMS = {name: own for own, names in _ELSEWHERE.items() for name in names.split()}


def suggest(name: object, known: Iterable[str]) -> str:
    """The nearest known name as a question after a sentence; "" if none is near."""
    text = str(name)
    names = sorted(known, key=len)
    if (own := _SYNONYMS.get(text)) in names:
        return f" Did you mean {own!r}?"
    near = difflib.get_close_matches(text, names, 1)
    near = near or [each for each in names if len(text) > 3 and text in each]
    return f" Did you mean {near[0]!r}?" if near else ""


def size(least_tokens: int, *also: object, may_be_all: bool = False) -> BeforeValidator:
    """Reads tokens as an int, a part of the window as a float, or one of `also`.

    False is None, which TOML cannot write. `resolve_size` tells what a size comes to.
    """
    least = "more than 0" if least_tokens else "at least 0"
    most = "at most 1" if may_be_all else "less than 1"
    part = f"a part of the window as a float, {least} and {most},"
    rest = f"{part} or {json.dumps(also[-1])}" if also else f"or {part}"
    start = f"tokens as an int, at least {least_tokens:,},"
    ends = [0] * (not least_tokens) + [1] * may_be_all

    def read(value: object) -> object:
        if isinstance(value, float):
            is_size = 0 < value < 1 or value in ends
        else:
            is_size = type(value) is int and value >= least_tokens
        if not is_size and (type(value), value) not in [(type(a), a) for a in also]:
            raise ValueError(f"{start} {rest} are expected")
        return None if value is False else value

    return BeforeValidator(read)


def resolve_size(size: int | float, window_tokens: float) -> int:
    """Tokens as they are, or as a part of the window."""
    return int(size * window_tokens) if isinstance(size, float) else size


def find_problems(error: ValidationError, values: Any) -> list[tuple[str, str]]:
    """Lists what is wrong: a key with its value, as it was given, and what is accepted.

    Every message about settings is made of these, in code and in files.
    """
    problems = defaultdict[str, list[str]](list)
    for problem in error.errors():
        names = list[str]()
        value = values
        for item in problem["loc"]:
            try:
                value = value[item]
            except (LookupError, TypeError):
                if problem["type"] != "missing":
                    break  # Where a value may have several types, pydantic names one.
            names.append(str(item))
        place = ".".join(names)
        inner = (problem.get("ctx") or {}).get("error")
        for where, said in getattr(inner, "problems", ()):
            problems[f"{place}.{where}".strip(".")].append(said)
        if not getattr(inner, "problems", ()):
            if not isinstance(problem["input"], Mapping):
                place += f" = {short_repr(problem['input'])}"
            message = _say(str(problem["msg"]))
            problems[place].append(message)
    # There is a message for each type that a value may have.
    return [(place, " or ".join(all_)) for place, all_ in problems.items()]


def _say(message: str) -> str:
    """Says in our words what pydantic says."""
    message = message.removeprefix("Value error, ")
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    if said := message.removeprefix("Input should be "):
        message = message if said == message else f"{said} is expected"
    return message


def join_problems(problems: Iterable[tuple[str, str]], key: str = "") -> str:
    """Writes problems as one line, each with its place below a key."""
    lines = (((f"{key}.{place}").strip("."), said) for place, said in problems)
    return "; ".join(f"{place}: {said}" if place else said for place, said in lines)


class Settings(BaseModel):
    """Settings that do not change; the docstring lists them with their defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    made_for: ClassVar[str] = ""
    """The class that users name, where it is not this one."""

    if not TYPE_CHECKING:  # Checkers know the settings as arguments.

        def __init__(self, *args: object, **values: Any) -> None:
            name = self.made_for or type(self).__name__
            if args:
                first = next(iter(type(self).model_fields))
                said = f"settings are given by name, as in {name}({first}=…)"
                raise TypeError(f"{name}: {said}, not {short_repr(args[0])}")
            try:
                super().__init__(**values)
            except ValidationError as error:
                problems = find_problems(error, values)
                said = join_problems(problems)
                raise ConfigError(f"{name}: {said}", problems) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if cls.model_fields:
            lines = [inspect.cleandoc(cls.__doc__ or ""), "", "Settings:"]
            cls.__doc__ = "\n".join([*lines, *_list_settings(cls)]).lstrip()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_names(cls, values: object) -> object:
        """Refuses one setting under two names; says which name may have been meant."""
        if isinstance(values, dict) and cls.model_config.get("extra") == "forbid":
            aliases = [*map(_list_aliases, cls.model_fields.values())]
            for names in aliases:
                if len(values.keys() & names) > 1:
                    raise ValueError(f"{' and '.join(names)} mean the same: give one")
            accepted = {*cls.model_fields, *itertools.chain(*aliases)}
            known = ", ".join(sorted(cls.model_fields))
            if unknown := [
                InitErrorDetails(
                    type=PydanticCustomError(
                        "unknown_setting",
                        "unknown key.{hint} Known here: {known}",
                        {"hint": suggest(name, accepted), "known": known},
                    ),
                    loc=(name if isinstance(name, int) else str(name),),
                    input=values[name],
                )
                for name in values
                if name not in accepted
            ]:
                raise ValidationError.from_exception_data(cls.__name__, unknown)
        return values


def _list_aliases(field: FieldInfo) -> list[str]:
    alias = field.validation_alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
    firsts = [each.path[0] if isinstance(each, AliasPath) else each for each in choices]
    return [first for first in firsts if isinstance(first, str)]


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
    if field.default_factory:  # Not called: it may raise, or read a secret.
        return f"default {getattr(field.default_factory, '__name__', '…')}()"
    if isinstance(default := field.default, BaseModel):
        given = {k: v for k, v in default if k in default.model_fields_set}
        text = ", ".join(f"{k}={short_repr(v)}" for k, v in given.items())
        return f"default {type(default).__name__}({text})"
    return f"default {short_repr(default)}"
