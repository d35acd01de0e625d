"""The settings of the whole plugin, and how they are read from a file."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from google.adk.agents.callback_context import CallbackContext
from google.adk.models.registry import LLMRegistry
from pydantic import BaseModel, Field

from contextguard_adk._runtime.settings import GuardSettings
from contextguard_adk._support.settings import join_problems, short_repr, suggest
from contextguard_adk.errors import ConfigError
from contextguard_adk.strategies.base import Strategy, Threshold, import_subclass
from contextguard_adk.strategies.pipeline import Pipeline
from contextguard_adk.strategies.sliding_window import SlidingWindow

CONFIG_VARIABLE = "CONTEXTGUARD_CONFIG"
"""The environment variable that names a file where no arguments are given."""

STRICT_VARIABLE = "CONTEXTGUARD_STRICT"
"""The environment variable that has a wrong file raise, unless it says 0 or false."""

SETTINGS_SUFFIXES = (".toml", ".yaml", ".yml")

STRATEGIES: Mapping[str, type[Strategy]] = {
    "threshold": Threshold,
    "sliding_window": SlidingWindow,
    "pipeline": Pipeline,
}
"""Short names of strategies in a file; any other is a dotted path to a class."""

M = TypeVar("M", bound=BaseModel)

Chooser = Callable[[CallbackContext], Strategy | None]
"""A function that says before each model call how it is guarded; None: not at all."""


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
    if (suffix := file.suffix.lower()) not in SETTINGS_SUFFIXES:
        raise ValueError("the name must end in .toml, .yaml or .yml")
    # Some editors begin files with a mark.
    raw = _read_table(file.read_text("utf-8-sig"), suffix == ".toml")
    agents = raw.get("agents", {})
    if not isinstance(agents, dict):
        raise _wrong("agents", agents, "a table of agents is expected")
    values = {**raw, "agents": {}}
    for name, table in agents.items():
        if not isinstance(name, str):
            expected = f"a name in quotes is expected, not {type(name).__name__}"
            raise _wrong(f"agents.{name}", table, expected)
        values["agents"][name] = _build_strategy(f"agents.{name}", table)
    if "default" in raw:
        values["default"] = _build_strategy("default", raw["default"])
    return _validate("", PluginSettings, values)


def _read_table(text: str, is_toml: bool) -> dict[str, Any]:
    """Reads a text; says so where it holds the format that its name does not say."""
    import tomllib  # Both readers take as long to import as all of this package.

    readers = (tomllib.loads, _load_yaml)
    read, read_other = readers if is_toml else reversed(readers)
    problem = ValueError("a table of settings is expected")
    try:
        if isinstance(raw := read(text), dict | None):
            return raw or {}
    except ValueError as error:
        problem = error
    with suppress(ValueError, RecursionError):
        if isinstance(found := read_other(text), dict) and found:
            named = "YAML, so its name must end in .yaml or .yml"
            named = named if is_toml else "TOML, so its name must end in .toml"
            problem = ValueError(f"it holds {named}")
    raise problem


def _load_yaml(text: str) -> object:
    """Reads YAML, and refuses keys that stand twice in one table, as TOML does."""
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            seen: set[str] = set()
            for key in (x for x, _ in node.value if isinstance(x, yaml.ScalarNode)):
                if key.value in seen:
                    place = f"again in line {key.start_mark.line + 1}"
                    raise ValueError(f"{key.value!r} stands twice, {place}")
                seen.add(key.value)
            return node

    try:
        return yaml.load(text, Loader=UniqueKeys)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except (AttributeError, LookupError, TypeError) as error:
        # What PyYAML's readers of !!int, !!bool and the like raise for other text.
        raise ValueError("a value does not fit its tag") from error


def _build_strategy(key: str, table: object) -> Strategy | None:
    if table is False:
        return None
    if not isinstance(table, dict | str):
        expected = 'a table, the name of a strategy or "none" is expected'
        raise _wrong(key, table, expected)
    settings = {"strategy": table} if isinstance(table, str) else dict(table)
    name = settings.pop("strategy", "threshold")
    if name == "none":
        for setting, value in settings.items():
            raise _wrong(f"{key}.{setting}", value, 'strategy "none" has no settings')
        return None
    try:
        base: type[Any] = Strategy  # mypy allows no abstract class as an argument.
        strategy = STRATEGIES.get(name) or import_subclass(name, base)
    except (ValueError, TypeError) as error:
        known = ", ".join((*STRATEGIES, "none"))
        hint = suggest(name, STRATEGIES)
        expected = f"one of {known}, or the path of a Strategy is expected.{hint}"
        expected = str(error) if "." in str(name) else expected
        raise _wrong(f"{key}.strategy", name, expected) from error
    built = _validate(key, strategy, settings)
    if isinstance(built.summarizer, str):
        try:  # A mistyped name is found here, not at the first summary.
            LLMRegistry.resolve(built.summarizer)
        except Exception as error:  # A client may raise anything on import.
            expected = f"a name that ADK's LLMRegistry resolves is expected ({error})"
            raise _wrong(f"{key}.summarizer", built.summarizer, expected) from error
    return built


def _validate(key: str, model: type[M], values: Mapping[str, Any]) -> M:
    try:
        return model(**{str(name): value for name, value in values.items()})
    except ConfigError as error:
        if not error.problems:
            raise
        problems = [(place, _name_table(place, said)) for place, said in error.problems]
        said = join_problems(problems, key or "(top level)")
        raise ValueError(said.replace("(top level).", "")) from error
    except Exception as error:  # A class of the user's own may raise anything.
        raised = f"{model.__name__} raised {type(error).__name__}: {error}"
        raise ValueError(f"{key or '(top level)'}: {raised}") from error


def _name_table(place: str, problem: str) -> str:
    """Says which table a setting belongs to that another strategy has."""
    name = place.partition(" = ")[0].rpartition(".")[2]
    for strategy, kind in STRATEGIES.items():
        if problem.startswith("unknown key.") and name in kind.model_fields:
            problem = re.sub(" Did you mean [^?]{1,100}[?]", "", problem)
            table = "a table [default] or [agents.<name>] with strategy ="
            return f"{problem}. It belongs in {table} {strategy!r}"
    return problem


def _wrong(key: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{key} = {short_repr(value)}: {expected}")


def _complain(path: str | os.PathLike[str], problem: str) -> ConfigError:
    """Returns an error of one line, however many a parser has to say."""
    said = f"{Path(path)}: {problem}"
    reason = textwrap.shorten(said, 2_000, placeholder=" …").rstrip(".")
    return ConfigError(reason if reason.endswith(("?", "…")) else f"{reason}.")
