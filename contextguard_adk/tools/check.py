"""`contextguard check`: what a settings file means for agents and models."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from google.adk.models.base_llm import BaseLlm
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from contextguard_adk.config import (
    CONFIG_VARIABLE,
    SETTINGS_SUFFIXES,
    PluginSettings,
    load_settings,
)
from contextguard_adk.measuring.budgets import (
    buffer_tokens,
    summary_budget_tokens,
    threshold_tokens,
)
from contextguard_adk.providers.windows import LitellmRegistry, resolve_context_window
from contextguard_adk.strategies import Pipeline, Strategy
from contextguard_adk.tools.terminal import (
    CommandError,
    make_console,
    print_line,
    print_whole,
    quiet_logs,
)

WIDE_COLUMNS = 160
"""How wide a table may be that is written to a file."""

DEFAULT = "(default)"
"""Stands for the agents that have no table of their own."""


def run_check(arguments: argparse.Namespace) -> int:
    """Reads a settings file and prints what it means.

    Args:
        arguments: `config`, `model` and `json` of the command line.

    Returns:
        0.

    Raises:
        CommandError: A file is named among the models.
        ConfigError: The file cannot be read, or a setting in it is wrong.
    """
    for model in arguments.model:
        if model.lower().endswith(SETTINGS_SUFFIXES):
            raise CommandError(
                f"{model!r} stands among the models; name the file before --model"
            )
    path = arguments.config or os.environ.get(CONFIG_VARIABLE) or None
    with quiet_logs(None):
        settings = load_settings(path) if path else PluginSettings()
        strategies = {DEFAULT: settings.default, **settings.agents}
        report = {
            "config": path,
            **settings.model_dump(exclude={"agents", "default"}),
            "agents": [
                _describe_agent(agent, strategy, arguments.model)
                for agent, strategy in strategies.items()
            ],
        }
    if arguments.json:
        print(json.dumps(report, indent=2, default=str))
    else:
        _print(report)
    return 0


def _describe_agent(
    agent: str, strategy: Strategy | None, models: Sequence[str]
) -> dict[str, Any]:
    """Describes how one agent is guarded."""
    summarizer = strategy.summarizer if strategy else None
    if isinstance(summarizer, BaseLlm):
        summarizer = summarizer.model
    return {
        "agent": agent,
        "strategy": type(strategy).__name__ if strategy else None,
        "settings": _dump_settings(strategy) if strategy else {},
        "summarizer": summarizer,
        "budgets": list(_list_budgets(strategy, models)) if strategy else [],
    }


def _dump_settings(strategy: Strategy) -> dict[str, Any]:
    """Returns what the file sets, without what the report shows elsewhere."""
    settings = strategy.model_dump(
        exclude_unset=True,
        exclude={"context_window", "summarizer"},
        serialize_as_any=True,
    )
    if isinstance(strategy, Pipeline) and "reducers" in settings:
        settings["reducers"] = [
            {"reducer": f"{type(reducer).__module__}.{type(reducer).__name__}", **items}
            for reducer, items in zip(
                strategy.reducers, settings["reducers"], strict=True
            )
        ]
    return settings


def _list_budgets(
    strategy: Strategy, models: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yields the sizes for each model; without models those of a configured window."""
    registry = LitellmRegistry()
    any_model = [None] if strategy.context_window else []
    for model in models or any_model:
        window = resolve_context_window(
            model or "", configured=strategy.context_window, registry=registry
        )
        due_tokens = threshold_tokens(window.tokens)
        if isinstance(strategy, Pipeline) and strategy.compression_threshold:
            early_tokens = math.ceil(strategy.compression_threshold * window.tokens)
            due_tokens = min(due_tokens, early_tokens)
        entry = registry.entry_name(model) if model else None
        yield {
            "model": model,
            "window_tokens": window.tokens,
            "source": window.source,
            "registry_entry": entry if window.source == "registry" else None,
            "buffer_tokens": buffer_tokens(window.tokens),
            "threshold_tokens": due_tokens,
            "summary_tokens": summary_budget_tokens(window.tokens),
        }


def _print(report: dict[str, Any]) -> None:
    console = make_console(WIDE_COLUMNS)
    path = report["config"]
    print_line(console, f"{path}: good" if path else "no file: the built-in settings")
    print_line(
        console,
        f"{'observes only' if report['observe'] else 'compacts'}, warns from "
        f"{report['warning_threshold']:.0%} of the window, state keys "
        f"{report['state_keys']}",
    )
    for agent in report["agents"]:
        print_line(console, "")
        print_line(console, agent["agent"], "bold")
        for text in _list_facts(agent):
            print_line(console, f"  {text}")
        if agent["budgets"]:
            table = Padding(_tabulate(agent["budgets"]), (0, 0, 0, 2), expand=False)
            print_whole(console, table)


def _list_facts(agent: dict[str, Any]) -> Iterator[str]:
    if agent["strategy"] is None:
        yield "not guarded"
        return
    yield f"strategy {agent['strategy']}"
    for key, value in agent["settings"].items():
        yield f"  {key} = {json.dumps(False if value is None else value, default=str)}"
    yield f"summaries by {agent['summarizer'] or 'the model of the agent'}"
    if not agent["budgets"]:
        yield "window of the agent's model: name models with --model"


def _tabulate(budgets: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 2))
    sources = {"configured": "config", "default": "unknown model: assumed"}
    for name in ("model", "window", "from", "buffer", "threshold", "summary"):
        if name in ("model", "from"):
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for row in budgets:
        table.add_row(
            Text(row["model"] or "any"),
            f"{row['window_tokens']:,}",
            Text(sources.get(row["source"], f"registry: {row['registry_entry']}")),
            f"{row['buffer_tokens']:,}",
            f"{row['threshold_tokens']:,}",
            f"{row['summary_tokens']:,}",
        )
    return table
