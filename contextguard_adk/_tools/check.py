"""`contextguard check`: validates a settings file or a folder of agents."""

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
    """Checks a file, or the agents in a folder; prints what they mean.

    Returns the exit code: 1 if an agent or an app has a problem, else 0.
    """
    files = [each for each in models if each.lower().endswith(SETTINGS_SUFFIXES)]
    if files:
        text = f"{files[0]!r} stands among the models; name the file before --model"
        raise CommandError(text)
    is_folder = config is not None and Path(config).is_dir()
    if is_folder and models:
        raise CommandError("--model is for a file: the agents in a folder have models")

    with quiet_logs(Console(quiet=True)):
        report = _check_folder(config) if is_folder else _check_file(config, models)

    if as_json:
        print(json.dumps(report, indent=2, default=str))
    else:
        _print_report(report)

    has_problems = any(app["problems"] for app in report.get("apps", ()))
    return 1 if has_problems else 0


def _print_report(report: dict[str, Any]) -> None:
    for line in _list_lines(report):
        is_heading = not line.startswith(" ")
        print_line(line, "bold" if is_heading else "")


def _check_file(config: str | None, models: Sequence[str]) -> dict[str, Any]:
    """Describes the settings of a file, or the built-in ones, for some models."""
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
    """Checks the agents in a folder, loaded as `adk web` loads them.

    The folder may be that of a single agent.
    """
    path = Path(folder or "").resolve()
    app_folders = _find_app_folders(path)

    loader = AgentLoader(str(app_folders[0].parent))
    loaded = {each.name: _load(loader, each.name) for each in app_folders}
    all_names = set[str]()
    for app in loaded.values():
        all_names |= _list_names(app)
    reports = [_check_app(name, app, all_names) for name, app in loaded.items()]

    # A name in the settings file is misspelled only if no app has it.
    shared_file = os.environ.get(CONFIG_VARIABLE)
    if shared_file:
        problems = _list_misses("agents", load_settings(shared_file).agents, all_names)
        reports.append({"app": shared_file, "agents": [], "problems": problems})
    return {"path": str(path), "apps": reports}


def _find_app_folders(path: Path) -> list[Path]:
    """Returns the folders of apps in a folder, or the folder itself if it is an app.

    A folder without apps is returned as well: to load it gives the reason.
    """
    inner = [each for each in sorted(path.iterdir()) if _is_app(each, "__init__.py")]
    if _is_app(path) or not inner:
        return [path]
    return inner


def _is_app(folder: Path, *more: str) -> bool:
    marks = ("agent.py", "root_agent.yaml", *more)
    return any((folder / mark).is_file() for mark in marks)


def _load(loader: AgentLoader, name: str) -> object:
    """Loads an app or its root agent; returns the error if it cannot be loaded."""
    try:
        # An agent's module may print, but stdout may carry JSON for programs.
        with redirect_stdout(sys.stderr):
            return loader.load_agent(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of anyone's code
        return error


def _list_names(app: object) -> set[str]:
    """Returns the names of agents and tools.

    "*" stands for the tools that a toolset learns from a server.
    """
    names = set[str]()
    for node in walk_tree(getattr(app, "root_agent", app)):
        own_name = getattr(node, "name", getattr(node, "__name__", ""))
        names.add(own_name or "")
        if isinstance(node, BaseToolset):
            names.add("*")
    return names


def _list_misses(setting: str, used: Iterable[str], known: set[str]) -> list[str]:
    return [
        f"`{setting}` names {name!r}, which is not there.{suggest(name, known)}"
        for name in sorted(set(used) - known)
    ]


def _check_app(name: str, loaded: Any, all_names: set[str]) -> dict[str, Any]:
    """Checks a loaded app, or reports the error that came instead of it.

    `all_names` are the names of the agents and tools of all apps.
    """
    if isinstance(loaded, BaseException):
        reason = " ".join(f"{type(loaded).__name__}: {loaded}".split())
        problem = f"cannot be loaded: {reason}"
        return {"app": name, "agents": [], "problems": [problem]}

    problems = list[str]()
    plugins = getattr(loaded, "plugins", ())
    guards = [each for each in plugins if isinstance(each, ContextGuardPlugin)]
    guard = guards[0] if guards else ContextGuardPlugin(strict=True)
    known_names = all_names
    if guards and not guard.is_shared:
        known_names = _list_names(loaded)
        problems += _list_misses("agents", guard.settings.agents, known_names)
    if len(guards) > 1:
        problems.append("two guards: where both guard an agent, the second is idle")
    if getattr(loaded, "events_compaction_config", None):
        problems.append("events_compaction_config: ADK pays for summaries as well")

    agents = list[dict[str, Any]]()
    for agent in walk_tree(getattr(loaded, "root_agent", loaded)):
        if isinstance(agent, LlmAgent):
            description, wrong = _check_agent(agent, guard, known_names)
            agents.append({"agent": agent.name, **description})
            problems += [f"{agent.name}: {each}" for each in wrong]
    return {"app": name, "agents": agents, "problems": problems}


def _check_agent(
    agent: LlmAgent, guard: ContextGuardPlugin, names: set[str]
) -> tuple[dict[str, Any], list[str]]:
    """Returns a description of an agent's settings, and the problems with them."""
    strategy: Any = guard.settings.agents.get(agent.name, guard.settings.default)

    problems = list[str]()
    if "*" not in names:
        kept_tools = getattr(strategy, "keep_tools", ())
        problems += _list_misses("keep_tools", kept_tools, names)

    models = list[str]()
    try:
        models.append(agent.canonical_model.model)
        summarizer = getattr(strategy, "summarizer", None)
        if isinstance(summarizer, str):
            LLMRegistry.resolve(summarizer)
    except Exception as error:  # noqa: BLE001 - a client may raise anything
        unresolved = "summarizer" if models else "model"
        problems.append(f"ADK cannot resolve its {unresolved}: {error}")

    description = _describe(strategy, models, guard)
    if any(row["source"] == "default" for row in description["budgets"]):
        problems.append(f"the window of {models[0]!r} is unknown: set context_window")
    return description, problems


def _describe(
    strategy: object, models: Sequence[str], guard: ContextGuardPlugin
) -> dict[str, Any]:
    """Describes a strategy, its settings, and its budgets for some models."""
    if not isinstance(strategy, Strategy):
        name = "chosen by a function" if strategy else None
        return {"strategy": name, "settings": {}, "summarizer": None, "budgets": []}

    settings = strategy.model_dump(
        exclude_unset=True,
        exclude={"context_window", "summarizer"},
        serialize_as_any=True,
    )
    reducers = strategy.reducers if isinstance(strategy, Pipeline) else ()
    # There are no settings of reducers if the user has not set any.
    reducer_settings = settings.get("reducers", ())
    for reducer, items in zip(reducers, reducer_settings, strict=False):
        items["reducer"] = f"{type(reducer).__module__}.{type(reducer).__name__}"

    budgeted_models = models
    if not models and strategy.context_window:
        budgeted_models = [""]  # A configured window needs no model.
    return {
        "strategy": type(strategy).__name__,
        "settings": settings,
        "summarizer": getattr(strategy.summarizer, "model", strategy.summarizer),
        "budgets": [_plan_budget(strategy, model, guard) for model in budgeted_models],
    }


def _plan_budget(
    strategy: Strategy, model: str, guard: ContextGuardPlugin
) -> dict[str, Any]:
    """Returns the window, budgets and costs of a strategy for a model, by name."""
    registry = guard.registry
    window = resolve_context_window(
        model, configured=strategy.context_window, registry=registry
    )
    costs = resolve_costs(model, guard.settings.prices, registry)
    planned = plan_strategy(strategy, window.tokens)

    # The name of the registry's entry tells nothing about a registry of the user's own.
    registry_entry = None
    if window.source == "registry" and registry is None:
        registry_entry = LitellmRegistry().entry_name(model)
    return {
        "model": model or None,
        "window_tokens": window.tokens,
        "source": window.source,
        "registry_entry": registry_entry,
        "buffer_tokens": window.tokens - planned.full_tokens,
        "threshold_tokens": planned.threshold_tokens,
        "summary_tokens": planned.summary_tokens,
        "costs": costs.model_dump(exclude_defaults=True) if costs else None,
        "trigger": describe_start(window.tokens, planned.threshold_tokens, costs),
    }


def _list_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yields the report for people; the lines below an agent's name are indented."""
    for app in report.get("apps", ()):
        yield f"{app['app']}: {'wrong' if app['problems'] else 'good'}"
        for problem in app["problems"]:
            yield f"  wrong: {problem}"
        for agent in app["agents"]:
            for line in _list_agent_lines(agent):
                yield f"  {line}"

    if "config" in report:
        path = report["config"]
        yield f"{path}: good" if path else "no file: the built-in settings"
        does = "observes only" if report["observe"] else "compacts"
        warns = f"warns from {report['warning_threshold']:.0%} of the window"
        yield f"{does}, {warns}, state keys {report['state_keys']}"
        for agent in report["agents"]:
            yield from _list_agent_lines(agent)


def _list_agent_lines(agent: dict[str, Any]) -> Iterator[str]:
    yield f"{agent['agent']}: {agent['strategy'] or 'not guarded'}"
    for key, value in agent["settings"].items():
        # A settings file writes `false` for None.
        text = json.dumps(False if value is None else value, default=str)
        yield f"  {key} = {text}"

    if agent["strategy"]:
        yield f"  summaries by {agent['summarizer'] or 'the model of the agent'}"
        if not agent["budgets"]:
            yield "  window of the agent's model: name models with --model"
    for budget in agent["budgets"]:
        yield from _list_budget_lines(budget)


def _list_budget_lines(budget: dict[str, Any]) -> Iterator[str]:
    """Yields the lines on a budget, which `_plan_budget` has returned."""
    sources = {"configured": "config", "default": "unknown model: assumed"}
    from_registry = f"registry: {budget['registry_entry']}"
    source = sources.get(budget["source"], from_registry)
    yield (
        f"  {budget['model'] or 'any model'}: window {budget['window_tokens']:,} "
        f"({source}), buffer {budget['buffer_tokens']:,}, threshold "
        f"{budget['threshold_tokens']:,}, summary {budget['summary_tokens']:,}"
    )

    if budget["trigger"]:
        yield f"    {budget['trigger']}"
    if budget["model"]:
        costs = budget["costs"]
        prices = _list_prices(Costs(**costs)) if costs else "unknown"
        yield f"    dollars per million tokens: {prices}"


def _list_prices(costs: Costs) -> str:
    """Lists prices: "input 2, output 8; above 200,000 tokens input 4, output 12"."""
    prices = costs.model_dump(exclude={"above", "above_tokens"}, exclude_none=True)
    base_prices = ", ".join(f"{name} {price:g}" for name, price in prices.items())
    if not costs.above:
        return base_prices

    long_prices = _list_prices(costs.above)
    return f"{base_prices}; above {costs.above_tokens:,} tokens {long_prices}"
