"""The settings of the whole plugin, and how they are read from a file."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from google.adk.agents.callback_context import CallbackContext
from google.adk.models.registry import LLMRegistry
from pydantic import BaseModel, Field

from contextguard_adk._providers.costs import Costs
from contextguard_adk._support.settings import (
    PositiveCount,
    Ratio,
    Seconds,
    Settings,
    join_problems,
    short_repr,
    suggest,
)
from contextguard_adk._turn.settings import Summaries
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

StateKeys = Literal["auto", "plain", "namespaced"]
M = TypeVar("M", bound=BaseModel)

Chooser = Callable[[CallbackContext], Strategy | None]
"""A function that says before each model call how it is guarded; None: not at all."""


class PluginSettings(Settings):
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
    observe: bool = Field(
        default=False,
        description="True measures and reports, but changes no request and stores no "
        "summary.",
    )
    summaries: Summaries = Field(
        default="write",
        description='"stored" stops paying: a stored summary stays, no new one is '
        "asked for, and what does not fit is cut to excerpts without a model. Here it "
        'holds for all agents and sessions. "write": the strategy of each agent '
        "decides, and session state (`context_guard:summaries`).",
    )
    state_keys: StateKeys = Field(
        default="auto",
        description='The form of the session-state keys that are written. "plain": '
        '`__context_guard_summary_{agent}`; "namespaced": '
        '`context_guard:summary:{agent}`; "auto": namespaced where anything in the app '
        "declares a `state_schema`, else plain.",
    )
    warning_threshold: Ratio = Field(
        default=0.70,
        description="A request that is still above this part of the context window "
        "after compaction is reported as under pressure; more than 0 and at most 1.",
    )
    prices: Mapping[str, Costs] = Field(
        default_factory=dict,
        description="What models cost (`Costs`), by the model name that the agent's "
        "request carries. They go before the prices of the model registry.",
    )
    max_background_summaries: PositiveCount = Field(
        default=4,
        description="How many summaries are written ahead of time (see `ahead`) at "
        "once, at least 1; others wait for their turn.",
    )
    summary_artifacts: bool = Field(
        default=False,
        description="True saves the summary of each compaction as a version of the "
        "artifact `compaction-{agent}.md`, for people to read, where the app has an "
        "artifact service and no agent with ADK's `LoadArtifactsTool`, which would "
        "list it for the model. ADK does not delete them with the session: see "
        "`contextguard_adk.sessions.purge`.",
    )
    usage_in_state: bool = Field(
        default=True,
        description="True keeps one line about how full the window is in session state "
        "(`context_guard:usage:{agent}`), for people; `adk web` shows it.",
    )
    recent_events: bool = Field(
        default=False,
        description="True has session state say since when events are needed, so that "
        "long sessions can be loaded in part (`load_recent`). Of what a summary "
        "replaces, the user's words and the list of values then take at most 10 KB.",
    )
    user_ids: Literal["hashed", "plain"] = Field(
        default="hashed",
        description='How records, traces and the log name a user: "hashed" or "plain".',
    )
    listener_timeout_seconds: Seconds = Field(
        default=5.0,
        description="How long a model call waits for a listener, more than 0 and at "
        "most 3,600. One that is late goes on, and is not called again before it ends.",
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


def is_recorded_test() -> bool:
    """Whether `adk test` records a conversation or replays one.

    It compares session state, but its replay reports no usage and has no answers to
    requests for a summary: so nothing is stored, and what does not fit is cut.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    return test == "rebuild" or "::test_agent_replay[" in test


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
