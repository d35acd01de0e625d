"""The settings of the whole plugin, and how they are read from a file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contextguard_adk.errors import ConfigError
from contextguard_adk.strategies import Pipeline, SlidingWindow, Strategy, Threshold
from contextguard_adk.strategies.base import import_subclass

CONFIG_VARIABLE = "CONTEXTGUARD_CONFIG"
"""The environment variable that names a file where no arguments are given."""

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
    warning_threshold: float = Field(default=0.70, gt=0, le=1)


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
    values = dict(raw)
    values["agents"] = {
        str(name): _build_strategy(file, f"agents.{name}", table)
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
    try:
        if file.suffix == ".toml":
            raw: object = tomllib.loads(file.read_text("utf-8"))
        elif file.suffix in (".yaml", ".yml"):
            raw = yaml.safe_load(file.read_text("utf-8"))
        else:
            raise ConfigError(
                f"{file}: the name must end in .toml, .yaml or .yml. {UNGUARDED_NOTE}"
            )
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(
            f"{file}: cannot be read: {reason}. {UNGUARDED_NOTE}"
        ) from error
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}. {UNGUARDED_NOTE}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: a table of settings is expected. {UNGUARDED_NOTE}")
    return raw


def _build_strategy(file: Path, key: str, table: object) -> Strategy | None:
    """Builds one strategy from its table."""
    if table in (NO_STRATEGY, False):
        return None
    if isinstance(table, str):
        table = {"strategy": table}
    if not isinstance(table, dict):
        raise _error(
            file, key, table, "a table, or the name of a strategy, is expected"
        )
    settings = {name: value for name, value in table.items() if name != "strategy"}
    name = table.get("strategy", "threshold")
    if name == NO_STRATEGY:
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
    return _validate(file, key, strategy, settings)


def _validate(file: Path, key: str, model: type[M], values: Mapping[str, Any]) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = [_describe(key, model, problem) for problem in error.errors()]
        raise ConfigError(f"{file}: {'; '.join(problems)}. {UNGUARDED_NOTE}") from error


def _describe(key: str, model: type[BaseModel], problem: Any) -> str:
    """Says which key has which value, and what is accepted."""
    # In a union pydantic names the class as well, which is no key of the file.
    names = [str(item) for item in problem["loc"] if not str(item)[:1].isupper()]
    full_key = ".".join([key, *names] if key else names) or "(top level)"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        known = ", ".join(sorted(_known_keys(model, names[:-1])))
        message = f"unknown key; known here: {known}"
    value = problem["input"]
    shown = "" if isinstance(value, dict | BaseModel) else f" = {value!r}"
    return f"{full_key}{shown}: {message}"


def _known_keys(model: type[BaseModel], names: Sequence[str]) -> set[str]:
    """The keys that a table may have, by the models behind it."""
    models: list[type[BaseModel]] = [model]
    for name in names:
        found = [
            m.model_fields[name].annotation for m in models if name in m.model_fields
        ]
        models = [inner for item in found for inner in _models_in(item)] or models
    return {name for inner in models for name in inner.model_fields}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for part in get_args(annotation) for m in _models_in(part)]


def _error(file: Path, key: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{file}: {key} = {value!r}: {expected}. {UNGUARDED_NOTE}")
