"""The base of all models of settings: frozen values, and errors that help.

Pydantic finds what is wrong with settings. An error of ours says it in one line:
"Threshold: keep = -1: tokens as an int, at least 0, … are expected".
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import json
import reprlib
import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

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

Problem: TypeAlias = tuple[str, str]
"""A place and a message, as ("keep = -1", "tokens as an int, … are expected").

The place is a key, mostly with the value that was given. The message names the accepted
values.
"""

Summaries = Literal["write", "stored"]
"""Whether summaries are written, or only those that are stored are used."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = 80
_SHORT.maxother = 80
_SHORT.maxlevel = 2
short_repr = _SHORT.repr
"""Returns the text of a value for a message of one line."""

_FOREIGN_NAMES = {
    "keep": "keep_messages keep_recent messages_to_keep event_retention_size",
    "trigger": "threshold token_threshold max_tokens_before_summary trigger_tokens",
    "context_window": "max_input_tokens window window_tokens context_length num_ctx",
    "max_messages": "compaction_interval window_size max_history",
    "summarizer": "model summary_model summarization_model summarizer_model",
    "summary_instruction": "prompt summary_prompt summary_system_prompt",
    "keep_tools": "exclude_tools preserve_tools",
}
"""Our settings, each with the names that other packages, or users, have for it."""

_OWN_NAMES = {
    foreign_name: own_name
    for own_name, foreign_names in _FOREIGN_NAMES.items()
    for foreign_name in foreign_names.split()
}

_LEAST_PART_CHARS = 4
"""A shorter text than this is a part of too many names to suggest one of them."""

_WORDS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
    "a valid ": "a ",
    "a integer": "an integer",
    "Field required": "it is required",
}
"""Words of pydantic's messages, each with ours."""


def suggest(name: object, known: Iterable[str]) -> str:
    """Returns a question for a sentence's end, such as " Did you mean 'keep'?".

    The question has the known name that is nearest to `name`. If none is near, the
    result is "".
    """
    unknown_name = str(name)
    own_name = _OWN_NAMES.get(unknown_name)
    shortest_first = sorted(known, key=len)
    if own_name in shortest_first:
        return f" Did you mean {own_name!r}?"

    near = difflib.get_close_matches(unknown_name, shortest_first, n=1)
    if not near and len(unknown_name) >= _LEAST_PART_CHARS:
        # A name of which it is a part is near: "messages" to "user_messages".
        near = [each for each in shortest_first if unknown_name in each]
    return f" Did you mean {near[0]!r}?" if near else ""


def size(
    least_tokens: int, *other_values: object, may_be_all: bool = False
) -> BeforeValidator:
    """Returns a validator of sizes.

    A size is an int, a number of tokens, or a float, a part of the context window.
    `resolve_size` of `_measuring/budgets.py` turns a size into tokens.

    Args:
        least_tokens: The smallest accepted int. If it is 0, the float 0.0 is accepted
            too.
        other_values: Further values that are accepted. An error names only the last
            one. If False is among them, it is read as None, which TOML cannot write.
        may_be_all: Whether the float 1.0, the whole window, is accepted.
    """
    last_value = other_values[-1] if other_values else None
    message = _describe_sizes(least_tokens, may_be_all, last_value)

    def validate(value: object) -> object:
        """Returns the value to store; raises a ValueError if it is not accepted."""
        # The types are compared because False == 0 and True == 1.
        is_other = any(
            type(value) is type(other) and value == other for other in other_values
        )
        if not is_other and not _is_size(value, least_tokens, may_be_all):
            raise ValueError(message)
        return None if value is False else value

    return BeforeValidator(validate)


def _is_size(value: object, least_tokens: int, may_be_all: bool) -> bool:
    """Whether a value is a float of the accepted range, or a large enough int."""
    if isinstance(value, float):
        if value == 0:
            return least_tokens == 0
        if value == 1:
            return may_be_all
        return 0 < value < 1
    # The type is compared because a bool is an instance of int, too.
    return type(value) is int and value >= least_tokens


def _describe_sizes(least_tokens: int, may_be_all: bool, other_value: object) -> str:
    """Returns the message of an error, which names the sizes that are accepted.

    For `size(0)` it is "tokens as an int, at least 0, or a part of the window as a
    float, at least 0 and less than 1, are expected". `other_value` is a further value
    that the message names; None for none.
    """
    ints = f"tokens as an int, at least {least_tokens:,}"
    lower_bound = "at least 0" if least_tokens == 0 else "more than 0"
    upper_bound = "at most 1" if may_be_all else "less than 1"
    floats = f"a part of the window as a float, {lower_bound} and {upper_bound}"

    if other_value is None:
        return f"{ints}, or {floats}, are expected"
    return f"{ints}, {floats}, or {json.dumps(other_value)} are expected"


def find_problems(error: ValidationError, values: Any) -> list[Problem]:
    """Lists what pydantic has found wrong with settings.

    `values` are the settings by name, as a user has given them.
    """
    messages_by_place = defaultdict[str, list[str]](list)
    for details in error.errors():
        for place, message in _list_problems(details, values):
            messages_by_place[place].append(message)

    # A setting that accepts several types has a message for each type.
    return [
        (place, " or ".join(messages)) for place, messages in messages_by_place.items()
    ]


def _list_problems(details: ErrorDetails, values: Any) -> list[Problem]:
    """Returns one error of pydantic as a problem.

    There are several problems if the setting has settings of its own, such as a
    strategy: then their `ConfigError` is the cause of the error.
    """
    key = _name_key(details, values)
    cause = (details.get("ctx") or {}).get("error")
    if isinstance(cause, ConfigError) and cause.problems:
        return [(_join_keys(key, place), message) for place, message in cause.problems]

    given = details["input"]
    message = _reword(details["msg"])
    if isinstance(given, Mapping):  # A table would be too long to name.
        return [(key, message)]
    return [(f"{key} = {short_repr(given)}", message)]


def _name_key(details: ErrorDetails, values: Any) -> str:
    """Returns the key of a wrong setting among the values, such as "window.keep".

    Pydantic says the place of the setting in `loc`. If the setting accepts several
    types, `loc` ends with the name of one of them: ("keep", "int") -> "keep".
    """
    is_missing = details["type"] == "missing"
    keys = list[str]()
    value = values
    for item in details["loc"]:
        try:
            value = value[item]
        except (LookupError, TypeError):
            # The values do not have this item. It is either the name of a type, or the
            # key of a missing setting.
            if not is_missing:
                break
        keys.append(str(item))
    return ".".join(keys)


def _reword(message: str) -> str:
    """Writes a message of pydantic in our words.

    "Input should be greater than 0" -> "more than 0 is expected"
    """
    reworded = message.removeprefix("Value error, ")
    for theirs, ours in _WORDS.items():
        reworded = reworded.replace(theirs, ours)

    prefix = "Input should be "
    if not reworded.startswith(prefix):
        return reworded
    return f"{reworded.removeprefix(prefix)} is expected"


def _join_keys(outer: str, inner: str) -> str:
    """Joins two keys by a dot: "agents", "writer" -> "agents.writer"; "" adds none."""
    return f"{outer}.{inner}".strip(".")


def join_problems(problems: Iterable[Problem], key: str = "") -> str:
    """Writes problems as one line, "place: message; place: message".

    `key` is put before each place, as "agents.writer" before "keep = -1".
    """
    texts = list[str]()
    for place, message in problems:
        full_place = _join_keys(key, place)
        texts.append(f"{full_place}: {message}" if full_place else message)
    return "; ".join(texts)


class Settings(BaseModel):
    """Settings that do not change; the docstring of each subclass lists its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    made_for: ClassVar[str] = ""
    """The class that errors name; "" for the class of the settings itself."""

    if not TYPE_CHECKING:  # Checkers know the settings as arguments.

        def __init__(self, *args: object, **values: Any) -> None:
            class_name = self.made_for or type(self).__name__
            if args:
                first_setting = next(iter(type(self).model_fields))
                raise TypeError(
                    f"{class_name}: settings are given by name, as in "
                    f"{class_name}({first_setting}=…), not {short_repr(args[0])}"
                )

            try:
                super().__init__(**values)
            except ValidationError as error:
                problems = find_problems(error, values)
                message = f"{class_name}: {join_problems(problems)}"
                raise ConfigError(message, problems) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Adds a list of the settings to the docstring of a subclass."""
        if cls.model_fields:
            description = inspect.cleandoc(cls.__doc__ or "")
            lines = [description, "", "Settings:", *_list_settings(cls)]
            cls.__doc__ = "\n".join(lines).lstrip()

    @model_validator(mode="before")
    @classmethod
    def _refuse_wrong_names(cls, values: object) -> object:
        """Refuses unknown names, and a setting that is given under two names."""
        may_have_any_name = cls.model_config.get("extra") != "forbid"
        if not isinstance(values, dict) or may_have_any_name:
            return values  # Pydantic itself refuses values that are no dict.

        # Each list has all names of one setting, among them its own, or is empty.
        alias_lists = [_list_aliases(field) for field in cls.model_fields.values()]
        for aliases in alias_lists:
            if len(values.keys() & aliases) > 1:
                raise ValueError(f"{' and '.join(aliases)} mean the same: give one")

        known_names = {*cls.model_fields, *itertools.chain(*alias_lists)}
        listed_names = ", ".join(sorted(cls.model_fields))
        errors = [
            _make_unknown_error(name, value, known_names, listed_names)
            for name, value in values.items()
            if name not in known_names
        ]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return values


def _make_unknown_error(
    name: object, value: object, known_names: Collection[str], listed_names: str
) -> InitErrorDetails:
    """Returns an error of pydantic about an unknown name of a setting.

    Args:
        name: The unknown name.
        value: The value that was given for it.
        known_names: All names of settings, aliases too; the error suggests one of them.
        listed_names: The names that the error lists: those without aliases.
    """
    key = name if isinstance(name, int) else str(name)  # Pydantic accepts no others.
    return InitErrorDetails(
        type=PydanticCustomError(
            "unknown_setting",
            "unknown key.{hint} Known here: {known}",
            {"hint": suggest(name, known_names), "known": listed_names},
        ),
        loc=(key,),
        input=value,
    )


def _list_aliases(field: FieldInfo) -> list[str]:
    """Lists the names that the `validation_alias` of a setting accepts; [] for none.

    AliasChoices("keep", "keep_messages") -> ["keep", "keep_messages"]
    """
    alias = field.validation_alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias]

    names = list[str]()
    for choice in choices:
        # A path leads into a nested value; its first step is a name of the setting.
        name = choice.path[0] if isinstance(choice, AliasPath) else choice
        if isinstance(name, str):  # A setting without an alias has None.
            names.append(name)
    return names


def _list_settings(model: type[BaseModel]) -> list[str]:
    """Returns lines for a docstring: the name, default and description of each setting.

    The settings that the class adds to those of its bases stand first.
    """
    classes = [each for each in model.__mro__ if issubclass(each, BaseModel)]

    def count_classes(name: str) -> int:
        """Counts the class and its bases that have a setting: 1 if only the class."""
        return sum(1 for each in classes if name in each.model_fields)

    lines = list[str]()
    for name in sorted(model.model_fields, key=count_classes):
        field = model.model_fields[name]
        text = f"    {name} ({_describe_default(field)}): {field.description or ''}"
        lines += textwrap.wrap(text, 80, subsequent_indent=" " * 8)
    return lines


def _describe_default(field: FieldInfo) -> str:
    """Describes the default of a setting for a docstring.

    - "required" for a setting without a default
    - "default Threshold()" for a default that a function or class makes
    - "default 'write'" for a plain value
    - "default TokenWindow(budget_tokens=0.22)" for a model, with the settings that the
      model was given
    """
    if field.is_required():
        return "required"
    if field.default_factory:
        # The function is not called: it may raise, or read a secret.
        factory_name = getattr(field.default_factory, "__name__", "…")
        return f"default {factory_name}()"

    default = field.default
    if not isinstance(default, BaseModel):
        return f"default {short_repr(default)}"

    arguments = [
        f"{name}={short_repr(value)}"
        for name, value in default
        if name in default.model_fields_set
    ]
    return f"default {type(default).__name__}({', '.join(arguments)})"
