"""The settings of the whole plugin, and the reader of settings files."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from google.adk.agents.callback_context import CallbackContext
from google.adk.models.registry import LLMRegistry
from pydantic import BaseModel, Field

from contextguard_adk._runtime.settings import GuardSettings
from contextguard_adk._runtime.settings import StateKeys as StateKeys
from contextguard_adk._support.settings import join_problems, short_repr, suggest
from contextguard_adk._support.tables import read_table
from contextguard_adk.errors import ConfigError
from contextguard_adk.strategies.base import Strategy, Threshold
from contextguard_adk.strategies.loading import import_subclass
from contextguard_adk.strategies.pipeline import Pipeline
from contextguard_adk.strategies.sliding_window import SlidingWindow

CONFIG_VARIABLE = "CONTEXTGUARD_CONFIG"
"""The environment variable that names a settings file.

If settings are given as arguments in code, the file is not read.
"""

STRICT_VARIABLE = "CONTEXTGUARD_STRICT"
"""The environment variable by which a wrong file raises an error.

Values such as "0" and "false" ask for no error.
"""

SETTINGS_SUFFIXES = (".toml", ".yaml", ".yml")

STRATEGIES: Mapping[str, type[Strategy]] = {
    "threshold": Threshold,
    "sliding_window": SlidingWindow,
    "pipeline": Pipeline,
}
"""Strategies by their short names; a file names other strategies by dotted paths."""

M = TypeVar("M", bound=BaseModel)

Chooser = Callable[[CallbackContext], Strategy | None]
"""A function that chooses a strategy for each model call.

None leaves the call unguarded.
"""


class PluginSettings(GuardSettings):
    """All settings of the plugin that a file can hold."""

    made_for = "ContextGuardPlugin"

    agents: Mapping[str, Strategy | Chooser | None] = Field(
        default_factory=dict,
        description="A strategy for each agent name, or in Python a function that "
        'chooses one; None ("none" in a file) leaves the agent unguarded.',
    )
    default: Strategy | Chooser | None = Field(
        default_factory=Threshold,
        description="The strategy of all other agents, or in Python a function that "
        'chooses one; None ("none" in a file) guards only the agents that are named.',
    )
    reload_on_change: bool = Field(
        default=False,
        strict=True,
        description="Only in a file: True has a running guard read the file again "
        "after a change. At a model call, at most every 30 seconds, it looks whether "
        "the file has changed.",
    )


def load_settings(path: str | os.PathLike[str]) -> PluginSettings:
    """Reads settings from a TOML (`.toml`) or YAML (`.yaml`, `.yml`) file.

    The table `[default]` and the tables `[agents.<name>]` each name a `strategy` and
    its settings. The tables `[prices."<model>"]` hold prices. All other settings stand
    at the top of the file.

    Raises:
        ConfigError: The file cannot be read, or a setting is wrong. The message names
            the file, the key, the value and the accepted values.
    """
    try:
        return _read_settings(Path(path))
    except OSError as error:
        problem = f"cannot be read: {error.strerror or type(error).__name__}"
        raise _make_config_error(path, problem) from error
    except RecursionError as error:
        raise _make_config_error(path, "the values are nested too deeply") from error
    except ValueError as error:
        raise _make_config_error(path, str(error)) from error


def _read_settings(file: Path) -> PluginSettings:
    """Reads the settings of a file.

    Raises:
        ValueError: A setting is wrong; the message names its key, but not the file.
    """
    suffix = file.suffix.lower()
    if suffix not in SETTINGS_SUFFIXES:
        raise ValueError("the name must end in .toml, .yaml or .yml")
    text = file.read_text("utf-8-sig")  # Some editors put a byte order mark first.
    table = read_table(text, is_toml=suffix == ".toml")

    settings = dict(table)
    agents = table.get("agents")
    if isinstance(agents, dict):  # `PluginSettings` refuses anything else.
        settings["agents"] = _build_strategies(agents)
    if "default" in table:
        settings["default"] = _build_strategy("default", table["default"])
    return _validate("", PluginSettings, settings)


def _build_strategies(agents: Mapping[Any, object]) -> dict[str, Strategy | None]:
    """Makes a strategy of each value in the table `[agents]` of a file.

    Raises:
        ValueError: A name is no text, or a value stands for no strategy.
    """
    strategies = dict[str, Strategy | None]()
    for name, value in agents.items():
        key = f"agents.{name}"
        if not isinstance(name, str):  # YAML reads a bare `yes` or `1` as no text.
            raise _wrong(key, value, "the name of an agent must be in quotes")
        strategies[name] = _build_strategy(key, value)
    return strategies


def _build_strategy(key: str, value: object) -> Strategy | None:
    """Makes a strategy of a value in a file.

    The value is one of these:

    - a table with the name of a strategy as `strategy`, beside the strategy's settings;
      a table without a name is one for "threshold"
    - the name of a strategy, which gets its default settings
    - "none" or false, which stand for no strategy: the result is None

    Args:
        key: The key of the value in the file, for messages.
        value: The value, which may be anything.

    Raises:
        ValueError: The value is none of these, or a setting in the table is wrong.
    """
    if value is False:
        return None

    settings: dict[Any, Any] = {}
    strategy_name: object
    if isinstance(value, str):
        strategy_name = value
    elif isinstance(value, dict):
        settings.update(value)
        strategy_name = settings.pop("strategy", "threshold")
    else:
        expected = 'a table, the name of a strategy or "none" is expected'
        raise _wrong(key, value, expected)

    if strategy_name == "none":
        if settings:
            setting, setting_value = next(iter(settings.items()))
            expected = 'strategy "none" has no settings'
            raise _wrong(f"{key}.{setting}", setting_value, expected)
        return None

    strategy_class = _find_class(f"{key}.strategy", strategy_name)
    strategy = _validate(key, strategy_class, settings)
    if isinstance(strategy.summarizer, str):
        _check_summarizer(f"{key}.summarizer", strategy.summarizer)
    return strategy


def _find_class(key: str, name: Any) -> type[Strategy]:
    """Returns the class of a strategy with a short name or a dotted path.

    Args:
        key: The key of the name in the file, for messages.
        name: The value in the file. Only a text can be right, but the value may be
            anything.

    Raises:
        ValueError: There is no such strategy.
    """
    base: type[Any] = Strategy  # mypy allows no abstract class as an argument.
    try:
        return STRATEGIES.get(name) or import_subclass(name, base)
    except (ValueError, TypeError) as error:  # A list or a table has no hash.
        # The error of `import_subclass` is about a path. For a word without a dot, the
        # short names are of more help.
        is_path = "." in str(name)
        if is_path:
            raise _wrong(key, name, str(error)) from error

        short_names = ", ".join((*STRATEGIES, "none"))
        hint = suggest(name, STRATEGIES)
        expected = f"one of {short_names}, or the path of a Strategy is expected.{hint}"
        raise _wrong(key, name, expected) from error


def _check_summarizer(key: str, name: str) -> None:
    """Raises a ValueError if ADK knows no model of this name.

    Without this check, a mistyped name would fail at the first summary.

    Args:
        key: The key of the name in the file, for messages.
        name: The name of the model that writes summaries.
    """
    try:
        LLMRegistry.resolve(name)
    except Exception as error:  # A client may raise anything on import.
        expected = f"a name that ADK's LLMRegistry resolves is expected ({error})"
        raise _wrong(key, name, expected) from error


def _validate(key: str, model: type[M], values: Mapping[Any, Any]) -> M:
    """Makes settings of a class from the values of a table.

    Args:
        key: The key of the table in the file; "" for the whole file.
        model: The class of the settings.
        values: The table.

    Raises:
        ValueError: Values are wrong. The message has the place of each in the file.
    """
    arguments = {str(name): value for name, value in values.items()}
    try:
        return model(**arguments)
    except ConfigError as error:
        # Our classes always list problems. A class of the user's own may list none.
        if not error.problems:
            raise
        problems = [
            (place, _add_table(place, message)) for place, message in error.problems
        ]
        raise ValueError(join_problems(problems, key)) from error
    except Exception as error:  # A class of the user's own may raise anything.
        raised = f"{model.__name__} raised {type(error).__name__}: {error}"
        raise ValueError(join_problems([(key, raised)])) from error


def _add_table(place: str, message: str) -> str:
    """Names in a message about an unknown key the table in which the key belongs.

    Returns the message as it is in two cases: the message is not about an unknown key,
    or no strategy has a setting of that name.

    Args:
        place: The key with its value, such as "summary.max_messages = 3".
        message: The message, which says what is wrong with the key or the value.
    """
    if not message.startswith("unknown key."):
        return message

    # "summary.max_messages = 3" -> "max_messages"
    full_key, _, _ = place.partition(" = ")
    _, _, setting = full_key.rpartition(".")
    for short_name, strategy_class in STRATEGIES.items():
        if setting in strategy_class.model_fields:
            return (
                "unknown key. It belongs in a table [default] or [agents.<name>] with "
                f"strategy = {short_name!r}"
            )
    return message


def _wrong(key: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{key} = {short_repr(value)}: {expected}")


def _make_config_error(path: str | os.PathLike[str], problem: str) -> ConfigError:
    """Returns an error whose message names the file and the problem.

    A parser may describe the problem in several lines, or very long ones. The message
    has one line of at most 2,000 characters, so that a log stays readable.
    """
    line = textwrap.shorten(f"{Path(path)}: {problem}", 2_000, placeholder=" …")
    # The message ends with exactly one period, unless it has another end.
    sentence = line.rstrip(".")
    has_end = sentence.endswith(("?", "…"))
    return ConfigError(sentence if has_end else f"{sentence}.")
