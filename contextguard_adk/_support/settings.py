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
    if not near and len(unknown_name) > 3:
        # A part of a name is near too, such as "messages"; shorter ones fit anywhere.
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
        other_values: Further values that are accepted; an error names the last one.
            False, if it is among them, is read as None, which TOML cannot write.
        may_be_all: Whether the float 1.0, the whole window, is accepted.
    """
    accepted = _describe_sizes(least_tokens, other_values, may_be_all)

    def validate(value: object) -> object:
        # The types are compared because False == 0 and True == 1.
        is_other = any(
            type(value) is type(other) and value == other for other in other_values
        )
        if not is_other and not _is_size(value, least_tokens, may_be_all):
            raise ValueError(f"{accepted} are expected")
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
    return type(value) is int and value >= least_tokens


def _describe_sizes(
    least_tokens: int, other_values: Sequence[object], may_be_all: bool
) -> str:
    """Returns the subject of the sentence "… are expected": all accepted sizes.

    Of the other values, only the last one is named.
    """
    lower_bound = "more than 0" if least_tokens else "at least 0"
    upper_bound = "at most 1" if may_be_all else "less than 1"
    ints = f"tokens as an int, at least {least_tokens:,}"
    floats = f"a part of the window as a float, {lower_bound} and {upper_bound}"
    if other_values:
        return f"{ints}, {floats}, or {json.dumps(other_values[-1])}"
    return f"{ints}, or {floats},"


def find_problems(error: ValidationError, values: Any) -> list[tuple[str, str]]:
    """Lists the problems that pydantic has found in settings.

    Every message about settings is made of these, in code and in files.

    Returns:
        Pairs of a place and a message. The place is a key with the value that was
        given, such as "keep = -1"; the message names the accepted values.
    """
    messages_by_place = defaultdict[str, list[str]](list)
    for details in error.errors():
        key = _name_key(details, values)
        cause = (details.get("ctx") or {}).get("error")

        # Settings within these settings have raised a `ConfigError` of their own.
        inner_problems = getattr(cause, "problems", ())
        for inner_place, message in inner_problems:
            messages_by_place[_join_keys(key, inner_place)].append(message)

        if not inner_problems:
            place = key
            if not isinstance(details["input"], Mapping):
                place = f"{key} = {short_repr(details['input'])}"
            messages_by_place[place].append(_reword(details["msg"]))

    # A setting that accepts several types has a message for each type.
    return [
        (place, " or ".join(messages)) for place, messages in messages_by_place.items()
    ]


def _name_key(details: ErrorDetails, values: Any) -> str:
    """Joins the keys that lead to a wrong setting: ("window", "keep") -> "window.keep".

    Pydantic puts further items behind these keys: the names of types, for a setting
    that accepts several ones. The values have no such key, so the keys end there. Only
    a missing setting has a key that the values do not have.
    """
    keys = list[str]()
    value = values
    for item in details["loc"]:
        try:
            value = value[item]
        except (LookupError, TypeError):
            if details["type"] != "missing":
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

    expected = reworded.removeprefix("Input should be ")
    has_prefix = expected != reworded
    if has_prefix and expected:
        return f"{expected} is expected"
    return reworded


def _join_keys(outer: str, inner: str) -> str:
    """Joins two keys by a dot: "agents", "writer" -> "agents.writer"; "" adds none."""
    return f"{outer}.{inner}".strip(".")


def join_problems(problems: Iterable[tuple[str, str]], key: str = "") -> str:
    """Writes pairs of a place and a message as one line, "place: message; …".

    Each place is written below `key`, as in "agents.writer.keep = -1".
    """
    lines = list[str]()
    for place, message in problems:
        full_place = _join_keys(key, place)
        lines.append(f"{full_place}: {message}" if full_place else message)
    return "; ".join(lines)


class Settings(BaseModel):
    """Settings that do not change; the docstring of each subclass lists its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    made_for: ClassVar[str] = ""
    """The class that errors name; "" for the class of the settings itself."""

    if not TYPE_CHECKING:  # Checkers know the settings as arguments.

        def __init__(self, *args: object, **values: Any) -> None:
            class_name = self.made_for or type(self).__name__
            if args:
                setting = next(iter(type(self).model_fields))
                raise TypeError(
                    f"{class_name}: settings are given by name, as in "
                    f"{class_name}({setting}=…), not {short_repr(args[0])}"
                )

            try:
                super().__init__(**values)
            except ValidationError as error:
                problems = find_problems(error, values)
                message = f"{class_name}: {join_problems(problems)}"
                raise ConfigError(message, problems) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if cls.model_fields:
            description = inspect.cleandoc(cls.__doc__ or "")
            lines = [description, "", "Settings:", *_list_settings(cls)]
            cls.__doc__ = "\n".join(lines).lstrip()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_names(cls, values: object) -> object:
        """Refuses a setting that is given under two names, and every unknown name.

        The error about an unknown name suggests the nearest name that is accepted.
        """
        if not isinstance(values, dict) or cls.model_config.get("extra") != "forbid":
            return values

        aliases_by_field = [_list_aliases(field) for field in cls.model_fields.values()]
        for aliases in aliases_by_field:
            if len(values.keys() & aliases) > 1:
                raise ValueError(f"{' and '.join(aliases)} mean the same: give one")

        accepted = {*cls.model_fields, *itertools.chain(*aliases_by_field)}
        listing = ", ".join(sorted(cls.model_fields))
        unknown = [
            _describe_unknown(name, value, accepted, listing)
            for name, value in values.items()
            if name not in accepted
        ]
        if unknown:
            raise ValidationError.from_exception_data(cls.__name__, unknown)
        return values


def _describe_unknown(
    name: object, value: object, accepted: Collection[str], listing: str
) -> InitErrorDetails:
    """Returns pydantic's form of an error about an unknown name of a setting.

    Args:
        name: The unknown name.
        value: The value that was given under it.
        accepted: All names that are accepted, aliases included; one is suggested.
        listing: The names that the message lists.
    """
    return InitErrorDetails(
        type=PydanticCustomError(
            "unknown_setting",
            "unknown key.{hint} Known here: {known}",
            {"hint": suggest(name, accepted), "known": listing},
        ),
        loc=(name if isinstance(name, int) else str(name),),
        input=value,
    )


def _list_aliases(field: FieldInfo) -> list[str]:
    """Lists the names that the `validation_alias` of a setting accepts; [] for none."""
    alias = field.validation_alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias]

    names = list[str]()
    for choice in choices:
        # A path leads into a nested value; its first step is a name of the setting.
        name = choice.path[0] if isinstance(choice, AliasPath) else choice
        if isinstance(name, str):
            names.append(name)
    return names


def _list_settings(model: type[BaseModel]) -> list[str]:
    """Returns the lines of the docstring that describe the settings of a class.

    The settings that the class adds to those of its bases stand first.
    """
    classes = [each for each in model.__mro__ if issubclass(each, BaseModel)]

    def count_owners(name: str) -> int:
        """Counts the classes that have a setting; a subclass's own has the fewest."""
        return sum(1 for each in classes if name in each.model_fields)

    lines = list[str]()
    for name in sorted(model.model_fields, key=count_owners):
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
