"""The base of all models of settings: frozen values, and errors that help.

Pydantic finds what is wrong with settings. An error of ours says it in one line:
"Threshold: keep = -1: tokens as an int, at least 0, … are expected".
"""

from __future__ import annotations

import difflib
import inspect
import json
import reprlib
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeAlias,
    TypeVar,
)

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

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
"""By a name of other packages, the name of our setting."""

_LEAST_PART_CHARS = 4
"""A text of fewer characters is a part of too many names to suggest one of them."""


MIN_SIMILARITY = 0.8
"""From this ratio of difflib on, two names differ by a slip of the keyboard."""


def suggest(name: object, known: Iterable[str]) -> str:
    """Returns a question to put after a message, such as " Did you mean 'keep'?".

    The question suggests one of the known names for an unknown one. The first of these
    that is found is suggested:

    - our name for a setting that other packages call `name`
    - a name with nearly the same spelling
    - the shortest name of which `name` is a part: "messages" -> "user_messages"

    Returns "" if none of them is found.
    """
    unknown_name = str(name)
    own_name = _OWN_NAMES.get(unknown_name)
    shortest_first = sorted(known, key=len)
    if own_name in shortest_first:
        return f" Did you mean {own_name!r}?"

    similar = difflib.get_close_matches(unknown_name, shortest_first, n=1)
    if not similar and len(unknown_name) >= _LEAST_PART_CHARS:
        similar = [each for each in shortest_first if unknown_name in each]
    return f" Did you mean {similar[0]!r}?" if similar else ""


def _read_items(value: object) -> object:
    """Returns the items of a list, or of another collection, as a tuple.

    Raises:
        ValueError: The value is a text, a mapping or no collection.
    """
    if isinstance(value, str):
        raise ValueError(f"a list is expected, such as [{short_repr(value)}]")
    if isinstance(value, Mapping | bytes) or not isinstance(value, Iterable):
        raise ValueError("a list is expected")
    return tuple(value)


Item = TypeVar("Item")

Items = Annotated[Sequence[Item], BeforeValidator(_read_items)]
"""A setting with several items: a list is accepted, and becomes a tuple.

So settings do not change, and have a hash.
"""


def size(
    least_tokens: int, *other_values: object, may_be_all: bool = False
) -> BeforeValidator:
    """Returns a validator for a setting whose value is a size.

    An int is a number of tokens: 4_000. A float is a part of the context window: 0.25.
    `resolve_size` in `_measuring/budgets.py` turns both into tokens. The validator
    accepts

    - an int from `least_tokens` on
    - a float between 0 and 1
    - the float 0.0 if `least_tokens` is 0
    - the float 1.0 if `may_be_all` is true
    - each of the `other_values`

    Args:
        least_tokens: The smallest accepted int.
        other_values: Accepted values that are no sizes, such as "auto". The error
            message names only the last of them. The setting is None for the value
            False, because a TOML file cannot have None.
        may_be_all: Whether 1.0, the whole window, is accepted.
    """
    named_value = other_values[-1] if other_values else None
    message = _describe_sizes(least_tokens, may_be_all, named_value)

    def validate(value: object) -> object:
        """Returns the value of the setting; raises a ValueError for a wrong value."""
        # The types are compared because False == 0 and True == 1.
        is_other_value = any(
            type(value) is type(other) and value == other for other in other_values
        )
        if not is_other_value and not _is_size(value, least_tokens, may_be_all):
            raise ValueError(message)
        return None if value is False else value

    return BeforeValidator(validate)


def _is_size(value: object, least_tokens: int, may_be_all: bool) -> bool:
    """Whether a value is a size that `size` accepts: a float or an int."""
    if isinstance(value, float):
        if value == 0:
            return least_tokens == 0
        if value == 1:
            return may_be_all
        return 0 < value < 1
    # The type is compared because a bool is an instance of int, too.
    return type(value) is int and value >= least_tokens


def _describe_sizes(least_tokens: int, may_be_all: bool, other_value: object) -> str:
    """Returns the message of an error, which names the values that `size` accepts.

    `size(0)` has the message "tokens as an int, at least 0, or a part of the window as
    a float, at least 0 and less than 1, are expected".

    Args:
        least_tokens: The smallest accepted int.
        may_be_all: Whether 1.0 is accepted.
        other_value: One more accepted value that the message names; None for none.
    """
    ints = f"tokens as an int, at least {least_tokens:,}"
    lower_bound = "at least 0" if least_tokens == 0 else "more than 0"
    upper_bound = "at most 1" if may_be_all else "less than 1"
    floats = f"a part of the window as a float, {lower_bound} and {upper_bound}"

    if other_value is None:
        return f"{ints}, or {floats}, are expected"
    return f"{ints}, {floats}, or {json.dumps(other_value)} are expected"


def find_problems(
    error: ValidationError, values: Any, model: type[BaseModel]
) -> list[Problem]:
    """Lists what pydantic has found wrong with settings, one problem for each place.

    Args:
        error: The error.
        values: The settings by name, as a user has given them.
        model: The class of the settings.
    """
    messages_by_place = defaultdict[str, list[str]](list)
    for details in error.errors():
        for place, message in _list_problems(details, values, model):
            messages_by_place[place].append(message)

    # If a setting accepts several types, pydantic has a message for each type.
    return [
        (place, " or ".join(messages)) for place, messages in messages_by_place.items()
    ]


def _list_problems(
    details: ErrorDetails, values: Any, model: type[BaseModel]
) -> list[Problem]:
    """Returns one error of pydantic as a problem, or as several problems.

    The value of a setting may have settings of its own, such as a strategy. If they are
    wrong, a `ConfigError` with all their problems is the cause of the one error.

    Args:
        details: The error.
        values: The settings by name, as a user has given them.
        model: The class of the settings.
    """
    key = _name_key(details, values)
    cause = (details.get("ctx") or {}).get("error")  # Where pydantic stores the cause.
    if isinstance(cause, ConfigError) and cause.problems:
        return [(_join_keys(key, place), message) for place, message in cause.problems]

    given = details["input"]
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "extra_forbidden" and len(details["loc"]) == 1:
        message = _describe_unknown(key, model)
    if isinstance(given, Mapping):  # A whole table would be too long for a line.
        return [(key, message)]
    return [(f"{key} = {short_repr(given)}", message)]


def _name_key(details: ErrorDetails, values: Any) -> str:
    """Returns the key of a wrong setting among the values, such as "window.keep".

    Pydantic gives the place of the setting as `loc`, a path of keys. If the setting
    accepts several types, the name of a type may follow: ("keep", "int") -> "keep".

    Args:
        details: The error of pydantic.
        values: The settings by name, as a user has given them.
    """
    is_missing = details["type"] == "missing"
    keys = list[str]()
    value = values
    for item in details["loc"]:
        try:
            value = value[item]
        except (LookupError, TypeError):
            # The values have no such item. If the error is about a missing setting, the
            # item is the key of that setting. Otherwise it is the name of a type.
            if not is_missing:
                break
        keys.append(str(item))
    return ".".join(keys)


def _describe_unknown(name: str, model: type[BaseModel]) -> str:
    """Returns the message of an error about a name that `model` does not accept."""
    other_names = _list_aliases(model)
    if name in {*model.model_fields, *other_names}:
        return "this setting is given under another name as well: give one"

    hint = suggest(name, [*model.model_fields, *other_names])
    listed_names = ", ".join(sorted(model.model_fields))
    return f"unknown key.{hint} Known here: {listed_names}"


def _list_aliases(model: type[BaseModel]) -> list[str]:
    """Lists the names that `validation_alias` accepts, for all settings of a class.

    A setting with AliasChoices("keep", "keep_messages") adds both names.
    """
    names = list[str]()
    for field in model.model_fields.values():
        alias = field.validation_alias  # A text, a path, choices of both, or None.
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
        names += [choice for choice in choices if isinstance(choice, str)]
    return names


def _join_keys(outer: str, inner: str) -> str:
    """Joins keys by a dot: "agents", "writer" -> "agents.writer"; "", "a" -> "a"."""
    return f"{outer}.{inner}".strip(".")


def join_problems(problems: Iterable[Problem], key: str = "") -> str:
    """Returns problems as one line, "place: message; place: message".

    `key` stands before each place: "agents.writer" and "keep = -1" become
    "agents.writer.keep = -1". A problem without a place and a key is its message alone.
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
    """The name of a class, for errors; "" for the name of the settings class itself."""

    if not TYPE_CHECKING:  # Checkers know the settings as arguments.

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                problems = find_problems(error, values, type(self))
                class_name = self.made_for or type(self).__name__
                message = f"{class_name}: {join_problems(problems)}"
                # The message says all that pydantic's error says.
                raise ConfigError(message, problems) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Adds a list of the settings to the docstring of a subclass."""
        if cls.model_fields:
            description = inspect.cleandoc(cls.__doc__ or "")
            lines = [description, "", "Settings:", *_list_settings(cls)]
            # Without a description, the list begins the docstring.
            cls.__doc__ = "\n".join(lines).lstrip()


def _list_settings(model: type[BaseModel]) -> list[str]:
    """Returns lines for a docstring: the name, default and description of each setting.

    The settings that the class adds to those of its bases stand first.
    """
    classes = [each for each in model.__mro__ if issubclass(each, BaseModel)]

    def count_classes(name: str) -> int:
        """Counts the classes that have a setting: 1 for a setting that `model` adds."""
        return sum(1 for each in classes if name in each.model_fields)

    lines = list[str]()
    added_first = sorted(model.model_fields, key=count_classes)
    for name in added_first:
        field = model.model_fields[name]
        text = f"    {name} ({_describe_default(field)}): {field.description or ''}"
        lines += textwrap.wrap(text, 80, subsequent_indent=" " * 8)
    return lines


def _describe_default(field: FieldInfo) -> str:
    """Describes the default of a setting for a docstring.

    - "required" for a setting without a default
    - "default Threshold()" for a default that a function or a class makes
    - "default 'write'" for a plain value
    - "default TokenWindow(budget_tokens=0.1)" for a pydantic model. The values that
      the model was made with are named, but not its own defaults.
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
