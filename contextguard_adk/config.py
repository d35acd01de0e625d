"""The settings of the whole plugin, and the reader of settings files."""

from __future__ import annotations

import os
import re
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
"""The environment variable that names a file where no arguments are given."""

STRICT_VARIABLE = "CONTEXTGUARD_STRICT"
"""The environment variable that has a wrong file raise, unless it says 0 or false."""

SETTINGS_SUFFIXES = (".toml", ".yaml", ".yml")

_TOP_LEVEL = "(top level)"
"""The place of a problem that is about a whole file."""

STRATEGIES: Mapping[str, type[Strategy]] = {
    "threshold": Threshold,
    "sliding_window": SlidingWindow,
    "pipeline": Pipeline,
}
"""Short names of strategies in a file; any other is a dotted path to a class."""

M = TypeVar("M", bound=BaseModel)

Chooser = Callable[[CallbackContext], Strategy | None]
"""A function that chooses the strategy for each model call; None leaves it alone."""


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


def load_settings(path: str | os.PathLike[str]) -> PluginSettings:
    """Reads settings from a TOML (`.toml`) or YAML (`.yaml`, `.yml`) file.

    A table `[default]` and tables `[agents.<name>]` each name a `strategy` and its
    settings, tables `[prices."<model>"]` prices; all else stands at the top.

    Raises:
        ConfigError: The file cannot be read, or a setting is wrong; it names the file,
            the key, the value and what is accepted.
    """
    try:
        return _read_settings(Path(path))
    except OSError as error:
        said = f"cannot be read: {error.strerror or type(error).__name__}"
        raise _complain(path, said) from error
    except RecursionError as error:
        raise _complain(path, "the values are nested too deeply") from error
    except ValueError as error:
        raise _complain(path, str(error)) from error


def _read_settings(file: Path) -> PluginSettings:
    """Reads a file; a ValueError says what is wrong in it."""
    suffix = file.suffix.lower()
    if suffix not in SETTINGS_SUFFIXES:
        raise ValueError("the name must end in .toml, .yaml or .yml")
    text = file.read_text("utf-8-sig")  # Some editors begin files with a mark.
    table = read_table(text, is_toml=suffix == ".toml")

    agents = table.get("agents", {})
    if not isinstance(agents, dict):
        raise _wrong("agents", agents, "a table of agents is expected")
    strategies = dict[str, Strategy | None]()
    for name, described in agents.items():
        key = f"agents.{name}"
        if not isinstance(name, str):
            expected = f"a name in quotes is expected, not {type(name).__name__}"
            raise _wrong(key, described, expected)
        strategies[name] = _build_strategy(key, described)

    settings = {**table, "agents": strategies}
    if "default" in table:
        settings["default"] = _build_strategy("default", table["default"])
    return _validate("", PluginSettings, settings)


def _build_strategy(key: str, described: object) -> Strategy | None:
    """Makes a strategy of a table, or of its name alone; None for "none" and False."""
    if described is False:
        return None
    settings: dict[Any, Any] = {}
    name: object
    if isinstance(described, str):
        name = described
    elif isinstance(described, dict):
        settings.update(described)
        name = settings.pop("strategy", "threshold")
    else:
        expected = 'a table, the name of a strategy or "none" is expected'
        raise _wrong(key, described, expected)

    if name == "none":
        if settings:
            setting, value = next(iter(settings.items()))
            raise _wrong(f"{key}.{setting}", value, 'strategy "none" has no settings')
        return None

    kind = _find_class(f"{key}.strategy", name)
    strategy = _validate(key, kind, settings)
    if isinstance(strategy.summarizer, str):
        _check_summarizer(f"{key}.summarizer", strategy.summarizer)
    return strategy


def _find_class(key: str, name: Any) -> type[Strategy]:
    """Finds the class of a strategy by its short name or its dotted path."""
    base: type[Any] = Strategy  # mypy allows no abstract class as an argument.
    try:
        return STRATEGIES.get(name) or import_subclass(name, base)
    except (ValueError, TypeError) as error:
        if "." in str(name):
            raise _wrong(key, name, str(error)) from error
        known = ", ".join((*STRATEGIES, "none"))
        hint = suggest(name, STRATEGIES)
        expected = f"one of {known}, or the path of a Strategy is expected.{hint}"
        raise _wrong(key, name, expected) from error


def _check_summarizer(key: str, name: str) -> None:
    """Finds a mistyped name of a model now, and not at the first summary."""
    try:
        LLMRegistry.resolve(name)
    except Exception as error:  # A client may raise anything on import.
        expected = f"a name that ADK's LLMRegistry resolves is expected ({error})"
        raise _wrong(key, name, expected) from error


def _validate(key: str, model: type[M], values: Mapping[Any, Any]) -> M:
    """Makes a model of a table; a ValueError names the place of what is wrong."""
    try:
        return model(**{str(name): value for name, value in values.items()})
    except ConfigError as error:
        if not error.problems:
            raise
        problems = [
            (place if place or key else _TOP_LEVEL, _name_table(place, problem))
            for place, problem in error.problems
        ]
        raise ValueError(join_problems(problems, key)) from error
    except Exception as error:  # A class of the user's own may raise anything.
        raised = f"{model.__name__} raised {type(error).__name__}: {error}"
        raise ValueError(f"{key or _TOP_LEVEL}: {raised}") from error


def _name_table(place: str, problem: str) -> str:
    """Adds the table in which a setting belongs, if it is one of another strategy."""
    if not problem.startswith("unknown key."):
        return problem
    name = place.partition(" = ")[0].rpartition(".")[2]
    for strategy, kind in STRATEGIES.items():
        if name in kind.model_fields:
            unknown = re.sub(" Did you mean [^?]{1,100}[?]", "", problem)
            return (
                f"{unknown}. It belongs in a table [default] or [agents.<name>] with "
                f"strategy = {strategy!r}"
            )
    return problem


def _wrong(key: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{key} = {short_repr(value)}: {expected}")


def _complain(path: str | os.PathLike[str], problem: str) -> ConfigError:
    """Returns an error of one line, however many a parser has to say."""
    said = f"{Path(path)}: {problem}"
    reason = textwrap.shorten(said, 2_000, placeholder=" …").rstrip(".")
    if not reason.endswith(("?", "…")):
        return ConfigError(f"{reason}.")
    return ConfigError(reason)
