"""What a settings file means for agents and models: windows, thresholds, summaries."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from contextguard_adk.config import CONFIG_VARIABLE, PluginSettings, load_settings
from contextguard_adk.measuring.budgets import (
    buffer_tokens,
    summary_budget_tokens,
    threshold_tokens,
)
from contextguard_adk.providers.windows import LitellmRegistry, resolve_context_window
from contextguard_adk.strategies import Pipeline, Strategy
from contextguard_adk.tools.terminal import clean_text, print_whole, quiet_logs

WIDE_COLUMNS = 160
"""How wide a table may be that is written to a file."""

DEFAULT = "(default)"
"""Stands for the agents that have no table of their own."""

_SHOWN_ELSEWHERE = {"context_window", "summarizer"}

Source = Literal["configured", "registry", "default"]


@dataclass(frozen=True)
class ModelBudgets:
    """What one strategy keeps to with one model, in tokens.

    Attributes:
        model: The model's name; None where the file says the window of any.
        window_tokens: The context window.
        source: Where it comes from: the settings, litellm's table, or nowhere.
        registry_entry: The entry of that table.
        buffer_tokens: What is kept free.
        threshold_tokens: From here on a compaction is due, or a pipeline tries one.
        summary_tokens: What a summary may take.
    """

    model: str | None
    window_tokens: int
    source: Source
    registry_entry: str | None
    buffer_tokens: int
    threshold_tokens: int
    summary_tokens: int


@dataclass(frozen=True)
class AgentReport:
    """How one agent is guarded.

    Attributes:
        agent: The agent's name; `DEFAULT` for those that are not named.
        strategy: The class of its strategy; None where it is not guarded.
        settings: What the file sets of it.
        summarizer: The model that writes summaries; None is the agent's own.
        budgets: For each model.
    """

    agent: str
    strategy: str | None
    settings: dict[str, Any]
    summarizer: str | None
    budgets: tuple[ModelBudgets, ...]


def run_check(path: str | None, models: Sequence[str], is_json: bool) -> int:
    """Reads a settings file and prints what it means.

    Args:
        path: The file; None takes the one that `CONTEXTGUARD_CONFIG` names, else the
            built-in settings.
        models: Names of models, as agents have them.
        is_json: Whether to print JSON.

    Returns:
        0.

    Raises:
        ConfigError: The file cannot be read, or a setting in it is wrong.
    """
    path = path or os.environ.get(CONFIG_VARIABLE) or None
    with quiet_logs(None):
        settings = load_settings(path) if path else PluginSettings()
        reports = list(examine_settings(settings, models))
    if is_json:
        print(json.dumps(_describe(path, settings, reports), indent=2, default=str))
    else:
        _print(path, settings, reports)
    return 0


def examine_settings(
    settings: PluginSettings, models: Sequence[str]
) -> Iterator[AgentReport]:
    """Works out how the default and each named agent are guarded."""
    strategies = {DEFAULT: settings.default, **settings.agents}
    for agent, strategy in strategies.items():
        if strategy is None:
            yield AgentReport(agent, None, {}, None, ())
            continue
        summarizer = strategy.summarizer
        name = summarizer if isinstance(summarizer, str | None) else summarizer.model
        yield AgentReport(
            agent=agent,
            strategy=type(strategy).__name__,
            settings=_dump_settings(strategy),
            summarizer=name,
            budgets=tuple(_list_budgets(strategy, models)),
        )


def _dump_settings(strategy: Strategy) -> dict[str, Any]:
    settings = strategy.model_dump(
        exclude_unset=True, exclude=_SHOWN_ELSEWHERE, serialize_as_any=True
    )
    if isinstance(strategy, Pipeline) and "reducers" in settings:
        settings["reducers"] = [
            {"reducer": f"{type(reducer).__module__}.{type(reducer).__name__}", **items}
            for reducer, items in zip(
                strategy.reducers, settings["reducers"], strict=True
            )
        ]
    return settings


def _list_budgets(strategy: Strategy, models: Sequence[str]) -> Iterator[ModelBudgets]:
    if models:
        yield from (_find_budgets(strategy, model) for model in models)
    elif strategy.context_window is not None:
        yield _find_budgets(strategy, None)


def _find_budgets(strategy: Strategy, model: str | None) -> ModelBudgets:
    registry = LitellmRegistry()
    window = resolve_context_window(
        model or "", configured=strategy.context_window, registry=registry
    )
    is_listed = model and window.source == "registry"
    due_tokens = threshold_tokens(window.tokens)
    if isinstance(strategy, Pipeline) and strategy.compression_threshold:
        early_tokens = math.ceil(strategy.compression_threshold * window.tokens)
        due_tokens = min(due_tokens, early_tokens)
    return ModelBudgets(
        model=model,
        window_tokens=window.tokens,
        source=window.source,
        registry_entry=registry.entry_name(model) if model and is_listed else None,
        buffer_tokens=buffer_tokens(window.tokens),
        threshold_tokens=due_tokens,
        summary_tokens=summary_budget_tokens(window.tokens),
    )


def _describe(
    path: str | None, settings: PluginSettings, reports: Sequence[AgentReport]
) -> dict[str, Any]:
    return {
        "config": path,
        "observe": settings.observe,
        "state_keys": settings.state_keys,
        "warning_threshold": settings.warning_threshold,
        "agents": [asdict(report) for report in reports],
    }


def _print(
    path: str | None, settings: PluginSettings, reports: Sequence[AgentReport]
) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDE_COLUMNS)
    _line(console, f"{path}: good" if path else "no file: the built-in settings")
    _line(
        console,
        f"{'observes only' if settings.observe else 'compacts'}, warns from "
        f"{settings.warning_threshold:.0%} of the window, state keys "
        f"{settings.state_keys}",
    )
    for report in reports:
        console.print()
        _line(console, report.agent, "bold")
        for text in _list_facts(report):
            _line(console, f"  {text}")
        if report.budgets:
            table = Padding(_tabulate(report.budgets), (0, 0, 0, 2), expand=False)
            print_whole(console, table)


def _list_facts(report: AgentReport) -> Iterator[str]:
    if report.strategy is None:
        yield "not guarded"
        return
    yield f"strategy {report.strategy}"
    for key, value in report.settings.items():
        yield f"  {key} = {_write_value(value)}"
    yield f"summaries by {report.summarizer or 'the model of the agent'}"
    if not report.budgets:
        yield "window of the agent's model: name models with --model"


def _write_value(value: object) -> str:
    """Writes a setting as TOML would, and None as false."""
    if isinstance(value, dict):
        items = ", ".join(f"{k} = {_write_value(v)}" for k, v in value.items())
        return f"{{ {items} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_write_value, value))}]"
    return json.dumps(False if value is None else value, default=str)


def _tabulate(budgets: Sequence[ModelBudgets]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 2))
    table.add_column("model", overflow="fold")
    table.add_column("window", justify="right", no_wrap=True)
    table.add_column("from", overflow="fold")
    for name in ("buffer", "threshold", "summary"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in budgets:
        table.add_row(
            Text(row.model or "any"),
            f"{row.window_tokens:,}",
            Text(_name_source(row)),
            f"{row.buffer_tokens:,}",
            f"{row.threshold_tokens:,}",
            f"{row.summary_tokens:,}",
        )
    return table


def _name_source(row: ModelBudgets) -> str:
    if row.source == "registry":
        return f"registry: {row.registry_entry}"
    return "config" if row.source == "configured" else "unknown model: assumed"


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(clean_text(console, text), style), soft_wrap=True)
