"""`contextguard check`: what a settings file means for agents and models."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.cli.utils.agent_loader import AgentLoader
from google.adk.models.registry import LLMRegistry
from google.adk.tools.base_toolset import BaseToolset
from rich.console import Console

from contextguard_adk._plugin.plans import describe_start, plan_strategy
from contextguard_adk._providers.costs import Costs
from contextguard_adk._providers.registry import (
    LitellmRegistry,
    resolve_context_window,
    resolve_costs,
)
from contextguard_adk._runtime.adk_tree import walk_tree
from contextguard_adk._support.settings import suggest
from contextguard_adk._tools.terminal import CommandError, print_line, quiet_logs
from contextguard_adk.config import CONFIG_VARIABLE, SETTINGS_SUFFIXES, load_settings
from contextguard_adk.plugin import ContextGuardPlugin
from contextguard_adk.strategies import Pipeline, Strategy


def run_check(config: str | None, models: Sequence[str], as_json: bool) -> int:
    """Checks a file, or the agents in a folder; returns 1 if one of them is wrong."""
    for model in models:
        if model.lower().endswith(SETTINGS_SUFFIXES):
            text = f"{model!r} stands among the models; name the file before --model"
            raise CommandError(text)
    is_folder = config is not None and Path(config).is_dir()
    if is_folder and models:
        raise CommandError("--model is for a file: the agents in a folder have models")
    with quiet_logs(Console(quiet=True)):
        report = _check_folder(config) if is_folder else _check_file(config, models)
    if as_json:
        print(json.dumps(report, indent=2, default=str))
    else:
        for line in _list_lines(report):
            print_line(line, "" if line.startswith(" ") else "bold")
    return int(any(app["problems"] for app in report.get("apps", ())))


def _check_file(config: str | None, models: Sequence[str]) -> dict[str, Any]:
    guard = ContextGuardPlugin.from_file(config) if config else ContextGuardPlugin()
    settings = guard.settings
    agents = {"(default)": settings.default, **settings.agents}
    return {
        "config": config or None,
        **settings.model_dump(exclude={"agents", "default"}),
        "agents": [
            {"agent": name, **_describe(strategy, models, guard)}
            for name, strategy in agents.items()
        ],
    }


def _check_folder(folder: str | None) -> dict[str, Any]:
    """Loads the agents in a folder, or the one that it is, as `adk web` does."""
    path = Path(folder or "").resolve()
    found = [each for each in sorted(path.iterdir()) if _is_app(each, "__init__.py")]
    found = [path] if _is_app(path) or not found else found
    loader = AgentLoader(str(found[0].parent))
    loaded = {each.name: _load(loader, each.name) for each in found}
    names = set[str]().union(*map(_list_names, loaded.values()))
    apps = [_check_app(name, app, names) for name, app in loaded.items()]
    if file := os.environ.get(CONFIG_VARIABLE):  # What no app has is misspelled.
        problems = _list_misses("agents", load_settings(file).agents, names)
        apps.append({"app": file, "agents": [], "problems": problems})
    return {"path": str(path), "apps": apps}


def _is_app(folder: Path, *more: str) -> bool:
    marks = ("agent.py", "root_agent.yaml", *more)
    return any((folder / mark).is_file() for mark in marks)


def _load(loader: AgentLoader, name: str) -> object:
    """Loads an app or its root agent; an error is returned."""
    try:
        with redirect_stdout(sys.stderr):  # It may print; JSON is for programs.
            return loader.load_agent(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of anyone's code
        return error


def _list_names(app: object) -> set[str]:
    """Names of agents and tools; "*" for those that a toolset learns from a server."""
    nodes = [*walk_tree(getattr(app, "root_agent", app))]
    names = {getattr(n, "name", getattr(n, "__name__", "")) or "" for n in nodes}
    return names | {"*"} if any(isinstance(n, BaseToolset) for n in nodes) else names


def _list_misses(setting: str, used: Iterable[str], known: set[str]) -> list[str]:
    return [
        f"`{setting}` names {name!r}, which is not there.{suggest(name, known)}"
        for name in sorted(set(used) - known)
    ]


def _check_app(name: str, app: Any, names: set[str]) -> dict[str, Any]:
    agents = list[dict[str, Any]]()
    problems = list[str]()
    if isinstance(app, BaseException):
        reason = " ".join(f"{type(app).__name__}: {app}".split())
        problems.append(f"cannot be loaded: {reason}")
        app = None
    guards = [
        p for p in getattr(app, "plugins", ()) if isinstance(p, ContextGuardPlugin)
    ]
    guard = guards[0] if guards else ContextGuardPlugin(strict=True)
    if guards and not guard.is_shared:
        names = _list_names(app)
        problems += _list_misses("agents", guard.settings.agents, names)
    if len(guards) > 1:
        problems.append("two guards: where both guard an agent, the second is idle")
    if getattr(app, "events_compaction_config", None):
        problems.append("events_compaction_config: ADK pays for summaries as well")
    for agent in walk_tree(getattr(app, "root_agent", app)):
        if isinstance(agent, LlmAgent):
            found, wrong = _check_agent(agent, guard, names)
            agents.append({"agent": agent.name, **found})
            problems += [f"{agent.name}: {each}" for each in wrong]
    return {"app": name, "agents": agents, "problems": problems}


def _check_agent(
    agent: LlmAgent, guard: ContextGuardPlugin, names: set[str]
) -> tuple[dict[str, Any], list[str]]:
    strategy: Any = guard.settings.agents.get(agent.name, guard.settings.default)
    kept = () if "*" in names else getattr(strategy, "keep_tools", ())
    problems = _list_misses("keep_tools", kept, names)
    models = list[str]()
    try:
        models.append(agent.canonical_model.model)
        if isinstance(summarizer := getattr(strategy, "summarizer", None), str):
            LLMRegistry.resolve(summarizer)
    except Exception as error:  # noqa: BLE001 - a client may raise anything
        what = "summarizer" if models else "model"
        problems.append(f"ADK cannot resolve its {what}: {error}")
    found = _describe(strategy, models, guard)
    if any(row["source"] == "default" for row in found["budgets"]):
        problems.append(f"the window of {models[0]!r} is unknown: set context_window")
    return found, problems


def _describe(
    strategy: object, models: Sequence[str], guard: ContextGuardPlugin
) -> dict[str, Any]:
    if not isinstance(strategy, Strategy):
        kind = "chosen by a function" if strategy else None
        return {"strategy": kind, "settings": {}, "summarizer": None, "budgets": []}
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
        "budgets": [_budget(strategy, model, guard) for model in models],
    }


def _budget(
    strategy: Strategy, model: str, guard: ContextGuardPlugin
) -> dict[str, Any]:
    registry = guard.registry
    fixed = strategy.context_window
    window = resolve_context_window(model, configured=fixed, registry=registry)
    costs = resolve_costs(model, guard.settings.prices, registry)
    planned = plan_strategy(strategy, window.tokens)
    start = describe_start(window.tokens, planned.threshold_tokens, costs)
    is_known = window.source == "registry" and registry is None
    return {
        "model": model or None,
        "window_tokens": window.tokens,
        "source": window.source,
        "registry_entry": LitellmRegistry().entry_name(model) if is_known else None,
        "buffer_tokens": window.tokens - planned.full_tokens,
        "threshold_tokens": planned.threshold_tokens,
        "summary_tokens": planned.summary_tokens,
        "costs": costs.model_dump(exclude_defaults=True) if costs else None,
        "trigger": start.strip(", "),
    }


def _list_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yields the report for people; agents begin a line, all of theirs is indented."""
    for app in report.get("apps", ()):
        yield f"{app['app']}: {'wrong' if app['problems'] else 'good'}"
        yield from (f"  wrong: {problem}" for problem in app["problems"])
        yield from (f"  {line}" for line in _list_agents(app["agents"]))
    if "config" in report:
        path = report["config"]
        yield f"{path}: good" if path else "no file: the built-in settings"
        does = "observes only" if report["observe"] else "compacts"
        warns = f"warns from {report['warning_threshold']:.0%} of the window"
        yield f"{does}, {warns}, state keys {report['state_keys']}"
        yield from _list_agents(report["agents"])


def _list_agents(agents: list[dict[str, Any]]) -> Iterator[str]:
    for agent in agents:
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
            if row["trigger"]:
                yield f"    {row['trigger']}"
            if row["model"]:
                costs = row["costs"]
                known = _list_prices(Costs(**costs)) if costs else "unknown"
                yield f"    dollars per million tokens: {known}"


def _list_prices(costs: Costs) -> str:
    prices = costs.model_dump(exclude={"above", "above_tokens"}, exclude_none=True)
    said = ", ".join(f"{name} {price:g}" for name, price in prices.items())
    if not costs.above:
        return said
    return f"{said}; above {costs.above_tokens:,} tokens {_list_prices(costs.above)}"
