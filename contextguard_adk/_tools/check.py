"""`contextguard check`: what a settings file means for agents and models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from contextguard_adk._announce import (
    LARGE_WINDOW_TOKENS,
    describe_trigger,
    plan_strategy,
)
from contextguard_adk._providers.costs import Costs
from contextguard_adk._providers.registry import (
    LitellmRegistry,
    resolve_context_window,
    resolve_costs,
)
from contextguard_adk._tools.terminal import CommandError, print_line, quiet_logs
from contextguard_adk.config import SETTINGS_SUFFIXES, PluginSettings, load_settings
from contextguard_adk.strategies import Pipeline, Strategy


def run_check(config: str | None, models: Sequence[str], as_json: bool) -> None:
    for model in models:
        if model.lower().endswith(SETTINGS_SUFFIXES):
            text = f"{model!r} stands among the models; name the file before --model"
            raise CommandError(text)
    with quiet_logs(Console(quiet=True)):
        settings = load_settings(config) if config else PluginSettings()
        agents = {"(default)": settings.default, **settings.agents}
        report = {
            "config": config or None,
            **settings.model_dump(exclude={"agents", "default"}),
            "agents": [
                {"agent": name, **_describe(strategy, models, settings)}
                for name, strategy in agents.items()
            ],
        }
    if as_json:
        print(json.dumps(report, indent=2, default=str))
        return
    for line in _list_lines(report):
        print_line(line, "" if line.startswith(" ") else "bold")


def _describe(
    strategy: object, models: Sequence[str], plugin: PluginSettings
) -> dict[str, Any]:
    """Describes how an agent is guarded."""
    if not isinstance(strategy, Strategy):
        return {"strategy": None, "settings": {}, "summarizer": None, "budgets": []}
    settings = strategy.model_dump(
        exclude_unset=True,
        exclude={"context_window", "summarizer"},
        serialize_as_any=True,
    )
    reducers = strategy.reducers if isinstance(strategy, Pipeline) else ()
    for reducer, items in zip(reducers, settings.get("reducers", ()), strict=False):
        items["reducer"] = f"{type(reducer).__module__}.{type(reducer).__name__}"
    # A window that is set needs no model.
    models = models or ([""] if strategy.context_window else [])
    return {
        "strategy": type(strategy).__name__,
        "settings": settings,
        "summarizer": getattr(strategy.summarizer, "model", strategy.summarizer),
        "budgets": [_budget(strategy, model, plugin) for model in models],
    }


def _budget(strategy: Strategy, model: str, plugin: PluginSettings) -> dict[str, Any]:
    """Lists the sizes and prices of a model."""
    registry, fixed = LitellmRegistry(), strategy.context_window
    window = resolve_context_window(model, configured=fixed, registry=registry)
    planned = plan_strategy(strategy, window.tokens)
    is_known = window.source == "registry"
    costs = resolve_costs(model, plugin.prices, registry)
    return {
        "model": model or None,
        "window_tokens": window.tokens,
        "source": window.source,
        "registry_entry": registry.entry_name(model) if is_known else None,
        "buffer_tokens": window.tokens - planned.full_tokens,
        "threshold_tokens": planned.threshold_tokens,
        "summary_tokens": planned.summary_tokens,
        "costs": costs.model_dump(exclude_defaults=True) if costs else None,
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
            costs = Costs(**row["costs"]) if row["costs"] else None
            if row["window_tokens"] > LARGE_WINDOW_TOKENS:
                yield f"    {describe_trigger(row['threshold_tokens'], costs)}"
            if row["model"]:
                known = _list_prices(costs) if costs else "unknown"
                yield f"    dollars per million tokens: {known}"


def _list_prices(costs: Costs) -> str:
    prices = costs.model_dump(exclude={"above", "above_tokens"}, exclude_none=True)
    said = ", ".join(f"{name} {price:g}" for name, price in prices.items())
    if not costs.above:
        return said
    return f"{said}; above {costs.above_tokens:,} tokens {_list_prices(costs.above)}"
