"""The base of all models of settings: frozen values, and errors that help."""

from __future__ import annotations

import difflib
import inspect
import itertools
import json
import reprlib
import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from contextguard_adk.errors import ConfigError

Count = Annotated[int, Field(ge=0, strict=True)]
PositiveCount = Annotated[int, Field(ge=1, strict=True)]
WindowTokens = Annotated[int, Field(ge=1_000, strict=True)]
Ratio = Annotated[float, Field(gt=0, le=1, strict=True)]
Seconds = Annotated[float, Field(gt=0, le=3_600, strict=True)]

Summaries = Literal["write", "stored"]
"""Whether summaries are written, or only those that are stored are used."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = 80
_SHORT.maxother = 80
_SHORT.maxlevel = 2
short_repr = _SHORT.repr
"""Returns the text of a value for a message of one line."""

_ELSEWHERE = {
    "keep": "keep_messages keep_recent messages_to_keep event_retention_size",
    "trigger": "threshold token_threshold max_tokens_before_summary trigger_tokens",
    "context_window": "max_input_tokens window window_tokens context_length num_ctx",
    "max_messages": "compaction_interval window_size max_history",
    "summarizer": "model summary_model summarization_model summarizer_model",
    "summary_instruction": "prompt summary_prompt summary_system_prompt",
    "keep_tools": "exclude_tools preserve_tools",
}
"""Our settings, each with the names that other packages, or users, have for it."""

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
    """Asks for the nearest known name, after a sentence; "" if none is near."""
    text = str(name)
    names = sorted(known, key=len)
    own = _SYNONYMS.get(text)
    if own in names:
        return f" Did you mean {own!r}?"

    near = difflib.get_close_matches(text, names, n=1)
    if not near and len(text) > 3:
        near = [each for each in names if text in each]
    return f" Did you mean {near[0]!r}?" if near else ""


def size(least_tokens: int, *also: object, may_be_all: bool = False) -> BeforeValidator:
    """Returns what reads a size: an int of tokens, or a float, a part of the window.

    `resolve_size` of `_measuring/budgets.py` turns a size into tokens.

    Args:
        least_tokens: The smallest int. Where it is 0, so may the float be.
        also: Other values that are accepted; errors name the last one. False is read as
            None, which TOML cannot write.
        may_be_all: Whether the float may be 1, the whole window.
    """
    accepted = _describe_sizes(least_tokens, also, may_be_all)

    def read(value: object) -> object:
        # False is no 0, and True is no 1.
        is_other = any(type(value) is type(each) and value == each for each in also)
        if not is_other and not _is_size(value, least_tokens, may_be_all):
            raise ValueError(f"{accepted} are expected")
        return None if value is False else value

    return BeforeValidator(read)


def _is_size(value: object, least_tokens: int, may_be_all: bool) -> bool:
    if isinstance(value, float):
        if value == 0:
            return least_tokens == 0
        if value == 1:
            return may_be_all
        return 0 < value < 1
    return type(value) is int and value >= least_tokens


def _describe_sizes(least_tokens: int, also: Sequence[object], may_be_all: bool) -> str:
    """Says what a size may be; of several other values the last is named."""
    least_ratio = "more than 0" if least_tokens else "at least 0"
    most_ratio = "at most 1" if may_be_all else "less than 1"
    tokens = f"tokens as an int, at least {least_tokens:,}"
    part = f"a part of the window as a float, {least_ratio} and {most_ratio}"
    if also:
        return f"{tokens}, {part}, or {json.dumps(also[-1])}"
    return f"{tokens}, or {part},"


def find_problems(error: ValidationError, values: Any) -> list[tuple[str, str]]:
    """Lists the problems of settings, each with its place.

    Every message about settings is made of these, in code and in files.

    Returns:
        Pairs of a key with its value, as it was given, and what is accepted.
    """
    problems = defaultdict[str, list[str]](list)
    for problem in error.errors():
        key = _name_key(problem, values)
        cause = (problem.get("ctx") or {}).get("error")
        inner = getattr(cause, "problems", ())  # Of a `ConfigError`.
        for inner_place, said in inner:
            problems[f"{key}.{inner_place}".strip(".")].append(said)

        if not inner:
            place = key
            if not isinstance(problem["input"], Mapping):
                place = f"{key} = {short_repr(problem['input'])}"
            problems[place].append(_reword(problem["msg"]))

    # There is a message for each type that a value may have.
    return [(place, " or ".join(said)) for place, said in problems.items()]


def _name_key(problem: ErrorDetails, values: Any) -> str:
    """Names the setting that a problem is about, by all keys that lead to it."""
    names = list[str]()
    value = values
    for item in problem["loc"]:
        try:
            value = value[item]
        except (LookupError, TypeError):
            # Where a value may have several types, pydantic adds the type's name.
            if problem["type"] != "missing":
                break
        names.append(str(item))
    return ".".join(names)


def _reword(message: str) -> str:
    """Says in our words what pydantic says."""
    said = message.removeprefix("Value error, ")
    for theirs, ours in _WORDS.items():
        said = said.replace(theirs, ours)

    expected = said.removeprefix("Input should be ")
    if expected in ("", said):
        return said
    return f"{expected} is expected"


def join_problems(problems: Iterable[tuple[str, str]], key: str = "") -> str:
    """Writes problems as one line, each with its place below a key."""
    lines = list[str]()
    for place, said in problems:
        full_place = f"{key}.{place}".strip(".")
        lines.append(f"{full_place}: {said}" if full_place else said)
    return "; ".join(lines)


class Settings(BaseModel):
    """Settings that do not change; the docstring of a class lists them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    made_for: ClassVar[str] = ""
    """The class that users name, where it is not this one."""

    if not TYPE_CHECKING:  # Checkers know the settings as arguments.

        def __init__(self, *args: object, **values: Any) -> None:
            name = self.made_for or type(self).__name__
            if args:
                first = next(iter(type(self).model_fields))
                raise TypeError(
                    f"{name}: settings are given by name, as in {name}({first}=…), "
                    f"not {short_repr(args[0])}"
                )

            try:
                super().__init__(**values)
            except ValidationError as error:
                problems = find_problems(error, values)
                said = join_problems(problems)
                raise ConfigError(f"{name}: {said}", problems) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if cls.model_fields:
            about = inspect.cleandoc(cls.__doc__ or "")
            lines = [about, "", "Settings:", *_list_settings(cls)]
            cls.__doc__ = "\n".join(lines).lstrip()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_names(cls, values: object) -> object:
        """Refuses one setting under two names; says which name may have been meant."""
        if not isinstance(values, dict) or cls.model_config.get("extra") != "forbid":
            return values
        aliases = [_list_aliases(field) for field in cls.model_fields.values()]
        for names in aliases:
            if len(values.keys() & names) > 1:
                raise ValueError(f"{' and '.join(names)} mean the same: give one")

        accepted = {*cls.model_fields, *itertools.chain(*aliases)}
        known = ", ".join(sorted(cls.model_fields))
        unknown = [
            _describe_unknown(name, value, accepted, known)
            for name, value in values.items()
            if name not in accepted
        ]
        if unknown:
            raise ValidationError.from_exception_data(cls.__name__, unknown)
        return values


def _describe_unknown(
    name: object, value: object, accepted: Collection[str], known: str
) -> InitErrorDetails:
    """Says that a setting has an unknown name, and which name is near."""
    return InitErrorDetails(
        type=PydanticCustomError(
            "unknown_setting",
            "unknown key.{hint} Known here: {known}",
            {"hint": suggest(name, accepted), "known": known},
        ),
        loc=(name if isinstance(name, int) else str(name),),
        input=value,
    )


def _list_aliases(field: FieldInfo) -> list[str]:
    """Lists all names that a setting is accepted by, if there is more than one."""
    alias = field.validation_alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
    firsts = [each.path[0] if isinstance(each, AliasPath) else each for each in choices]
    return [first for first in firsts if isinstance(first, str)]


def _list_settings(model: type[BaseModel]) -> list[str]:
    """Lists settings for `help`, those that the class adds to its bases first."""
    kinds = [kind for kind in model.__mro__ if issubclass(kind, BaseModel)]

    def count_owners(name: str) -> int:
        return sum(1 for kind in kinds if name in kind.model_fields)

    lines = list[str]()
    for name in sorted(model.model_fields, key=count_owners):
        field = model.model_fields[name]
        text = f"    {name} ({_describe_default(field)}): {field.description or ''}"
        lines += textwrap.wrap(text, 80, subsequent_indent=" " * 8)
    return lines


def _describe_default(field: FieldInfo) -> str:
    """Says what a setting is where it is not given."""
    if field.is_required():
        return "required"
    if field.default_factory:  # Not called: it may raise, or read a secret.
        return f"default {getattr(field.default_factory, '__name__', '…')}()"

    default = field.default
    if not isinstance(default, BaseModel):
        return f"default {short_repr(default)}"
    given = [
        f"{name}={short_repr(value)}"
        for name, value in default
        if name in default.model_fields_set
    ]
    return f"default {type(default).__name__}({', '.join(given)})"
