"""The settings of the whole plugin, and how they are read from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from google.adk.models.registry import LLMRegistry
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contextguard_adk.config_problems import describe_problems, show_value
from contextguard_adk.errors import ConfigError
from contextguard_adk.strategies import Pipeline, SlidingWindow, Strategy, Threshold
from contextguard_adk.strategies.base import import_subclass

CONFIG_VARIABLE = "CONTEXTGUARD_CONFIG"
"""The environment variable that names a file where no arguments are given."""

SETTINGS_SUFFIXES = (".toml", ".yaml", ".yml")
"""How names of settings files end."""

STRATEGIES: Mapping[str, type[Strategy]] = {
    "threshold": Threshold,
    "sliding_window": SlidingWindow,
    "pipeline": Pipeline,
}
"""Short names of strategies in a file; any other is a dotted path to a class."""

NO_STRATEGY = "none"
"""The strategy of agents that are not guarded."""

UNGUARDED_NOTE = (
    "Nothing is guarded until this is mended: under --extra_plugins ADK only logs this "
    "error and runs the app without the guard."
)

StateKeys = Literal["auto", "plain", "namespaced"]

M = TypeVar("M", bound=BaseModel)


class PluginSettings(BaseModel):
    """All settings of the plugin.

    Attributes:
        agents: A strategy per agent name; None exempts an agent.
        default: The strategy of all other agents; None guards only the named ones.
        observe: Measures and reports, but changes no request.
        state_keys: Which form of session-state keys to write.
        warning_threshold: Of the context window; above it, after any compaction, a
            request counts as under pressure.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    agents: Mapping[str, Strategy | None] = Field(default_factory=dict)
    default: Strategy | None = Field(default_factory=Threshold)
    observe: bool = False
    state_keys: StateKeys = "auto"
    warning_threshold: float = Field(default=0.70, gt=0, le=1, strict=True)


def load_settings(path: str | os.PathLike[str]) -> PluginSettings:
    """Reads settings from a TOML (`.toml`) or YAML (`.yaml`, `.yml`) file.

    A table `[default]` and tables `[agents.<name>]` each name a `strategy` and its
    settings; everything else stands at the top.

    Raises:
        ConfigError: The file cannot be read, or a setting is wrong; it names the file,
            the key, the value and what is accepted.
    """
    file = Path(path)
    raw = _read_file(file)
    agents = raw.get("agents", {})
    if not isinstance(agents, dict):
        raise _error(file, "agents", agents, "a table of agents is expected")
    for name, table in agents.items():
        if not isinstance(name, str):
            expected = f"a name in quotes is expected, not {type(name).__name__}"
            raise _error(file, f"agents.{name}", table, expected)
    values = dict(raw)
    values["agents"] = {
        name: _build_strategy(file, f"agents.{name}", table)
        for name, table in agents.items()
    }
    if "default" in raw:
        values["default"] = _build_strategy(file, "default", raw["default"])
    return _validate(file, "", PluginSettings, values)


def settings_from_environment() -> PluginSettings | None:
    """Reads the file that `CONTEXTGUARD_CONFIG` names; None where it is not set.

    Raises:
        ConfigError: As `load_settings` does.
    """
    path = os.environ.get(CONFIG_VARIABLE)
    return load_settings(path) if path else None


def _read_file(file: Path) -> dict[str, Any]:
    suffix = file.suffix.lower()
    if suffix not in SETTINGS_SUFFIXES:
        raise _complain(file, "the name must end in .toml, .yaml or .yml")
    try:
        text = file.read_text("utf-8-sig")  # Some editors begin files with a mark.
        raw = _load_toml(text) if suffix == ".toml" else _load_yaml(text)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _complain(file, f"cannot be read: {reason}") from error
    except RecursionError as error:
        raise _complain(file, "the values are nested too deeply") from error
    except ValueError as error:
        raise _complain(file, str(error)) from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise _complain(file, "a table of settings is expected")
    return raw


# The readers take as long to import as all of this package.
def _load_toml(text: str) -> object:
    import tomllib

    return tomllib.loads(text)


def _load_yaml(text: str) -> object:
    from contextguard_adk._yaml import load_yaml

    return load_yaml(text)


def _build_strategy(file: Path, key: str, table: object) -> Strategy | None:
    """Builds one strategy from its table."""
    if table in (NO_STRATEGY, False):
        return None
    if isinstance(table, str):
        table = {"strategy": table}
    if not isinstance(table, dict):
        raise _error(
            file, key, table, 'a table, the name of a strategy or "none" is expected'
        )
    settings = {name: value for name, value in table.items() if name != "strategy"}
    name = table.get("strategy", "threshold")
    if name == NO_STRATEGY:
        if settings:
            setting, value = next(iter(settings.items()))
            expected = f'strategy "{NO_STRATEGY}" has no settings'
            raise _error(file, f"{key}.{setting}", value, expected)
        return None
    try:
        strategy = STRATEGIES.get(name) or import_subclass(
            name,
            Strategy,  # type: ignore[type-abstract]
        )
    except (ValueError, TypeError) as error:
        known = ", ".join((*STRATEGIES, NO_STRATEGY))
        expected = f"one of {known}, or the dotted path of a Strategy ({error})"
        raise _error(file, f"{key}.strategy", name, expected) from error
    built = _validate(file, key, strategy, settings)
    _check_summarizer(file, f"{key}.summarizer", built.summarizer)
    return built


def _check_summarizer(file: Path, key: str, model: object) -> None:
    """Finds a mistyped name here, not at the first summary."""
    if not isinstance(model, str):
        return
    try:
        LLMRegistry.resolve(model)
    except (ValueError, ImportError) as error:
        expected = f"a model name that ADK's LLMRegistry resolves is expected ({error})"
        raise _error(file, key, model, expected) from error


def _validate(file: Path, key: str, model: type[M], values: Mapping[str, Any]) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _complain(file, describe_problems(error, key, model, values)) from error


def _error(file: Path, key: str, value: object, expected: str) -> ConfigError:
    return _complain(file, f"{key} = {show_value(value)}: {expected}")


def _complain(file: Path, problem: str) -> ConfigError:
    """One line, however many a parser has to say."""
    reason = " ".join(problem.split()).rstrip(".")
    return ConfigError(f"{file}: {reason}. {UNGUARDED_NOTE}")
