"""`contextguard check`: what a settings file means for agents and models."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from contextguard_adk import config
from contextguard_adk._measuring.budgets import plan_budgets
from contextguard_adk._providers.registry import (
    LitellmRegistry,
    resolve_context_window,
    resolve_costs,
)
from contextguard_adk._tools.terminal import CommandError, print_line, quiet_logs
from contextguard_adk.strategies import Pipeline, Strategy


def run_check(arguments: argparse.Namespace) -> None:
    """Reads a settings file and prints what it means."""
    for model in arguments.model:
        if model.lower().endswith(config.SETTINGS_SUFFIXES):
            text = f"{model!r} stands among the models; name the file before --model"
            raise CommandError(text)
    path = arguments.config or None
    with quiet_logs(Console(quiet=True)):
        settings = config.load_settings(path) if path else config.PluginSettings()
        agents = {"(default)": settings.default, **settings.agents}
        report = {
            "config": path,
            **settings.model_dump(exclude={"agents", "default"}),
            "agents": [
                {"agent": name, **_describe(strategy, arguments.model, settings)}
                for name, strategy in agents.items()
            ],
        }
    if arguments.json:
        print(json.dumps(report, indent=2, default=str))
    else:
        for line in _list_lines(report):
            style = "" if line.startswith(" ") else "bold"
            print_line(Console(highlight=False), line, style)


def _describe(
    strategy: Strategy | None, models: list[str], plugin: config.PluginSettings
) -> dict[str, Any]:
    """Describes how an agent is guarded."""
    if strategy is None:
        return {"strategy": None, "settings": {}, "summarizer": None, "budgets": []}
    shown = {"context_window", "summarizer"}
    settings = strategy.model_dump(
        exclude_unset=True, exclude=shown, serialize_as_any=True
    )
    reducers = strategy.reducers if isinstance(strategy, Pipeline) else ()
    for reducer, items in zip(reducers, settings.get("reducers", ()), strict=False):
        items["reducer"] = f"{type(reducer).__module__}.{type(reducer).__name__}"
    return {
        "strategy": type(strategy).__name__,
        "settings": settings,
        "summarizer": getattr(strategy.summarizer, "model", strategy.summarizer),
        "budgets": list(_list_budgets(strategy, models, plugin)),
    }


def _list_budgets(
    strategy: Strategy, models: list[str], plugin: config.PluginSettings
) -> Iterator[dict[str, Any]]:
    """Yields sizes and prices for each model; without models those of a set window."""
    registry, fixed = LitellmRegistry(), strategy.context_window
    for model in models or ([""] if fixed else []):
        window = resolve_context_window(model, configured=fixed, registry=registry)
        trigger = strategy.trigger_tokens(window.tokens)
        planned = plan_budgets(window.tokens, trigger_tokens=trigger)
        due_tokens = planned.threshold_tokens
        if isinstance(strategy, Pipeline) and strategy.compression_threshold:
            early_tokens = strategy.compression_threshold * planned.working_tokens
            due_tokens = min(due_tokens, math.ceil(early_tokens))
        is_known = window.source == "registry"
        costs = resolve_costs(model, plugin.prices, registry)
        yield {
            "model": model or None,
            "window_tokens": window.tokens,
            "source": window.source,
            "registry_entry": registry.entry_name(model) if is_known else None,
            "buffer_tokens": window.tokens - planned.full_tokens,
            "threshold_tokens": due_tokens,
            "summary_tokens": planned.summary_tokens,
            "costs": costs.model_dump() if costs else None,
        }


def _list_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yields the report for people; agents begin a line, all of theirs is indented."""
    path = report["config"]
    yield f"{path}: good" if path else "no file: the built-in settings"
    does = "observes only" if report["observe"] else "compacts"
    warns = f"warns from {report['warning_threshold']:.0%} of the window"
    yield f"{does}, {warns}, state keys {report['state_keys']}"
    for agent in report["agents"]:
        yield f"{agent['agent']}: {agent['strategy'] or 'not guarded'}"
        for key, value in agent["settings"].items():
            text = json.dumps(False if value is None else value, default=str)
            yield f"  {key} = {text}"
        if agent["strategy"]:
            yield f"  summaries by {agent['summarizer'] or 'the model of the agent'}"
            if not agent["budgets"]:
                yield "  window of the agent's model: name models with --model"
        for row in agent["budgets"]:
            sources = {"configured": "config", "default": "unknown model: assumed"}
            source = sources.get(row["source"], f"registry: {row['registry_entry']}")
            yield (
                f"  {row['model'] or 'any model'}: window {row['window_tokens']:,} "
                f"({source}), buffer {row['buffer_tokens']:,}, threshold "
                f"{row['threshold_tokens']:,}, summary {row['summary_tokens']:,}"
            )
            if row["model"]:
                yield f"    dollars per million tokens: {_list_prices(row['costs'])}"


def _list_prices(costs: dict[str, float | None] | None) -> str:
    """Writes prices in one line; where nobody knows them, it says so."""
    named = (costs or {}).items()
    return ", ".join(f"{k} {v:g}" for k, v in named if v is not None) or "unknown"
