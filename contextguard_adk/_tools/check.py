"""`contextguard check`: validates a settings file or a folder of agents.

A report is a dict, which `--json` prints as it is. It has one of two forms:

- That of a file has its path as "config", the settings of the plugin, and "agents".
- That of a folder has its "path" and "apps". Each app has its name as "app", "agents"
  and "problems".

Each agent has its name as "agent", and the items of `_describe_strategy`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from google.adk.agents import LlmAgent
from google.adk.cli.utils.agent_loader import AgentLoader
from google.adk.models.base_llm import BaseLlm
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

# Stands, among the names of tools, for those that a toolset learns from a server.
UNKNOWN_TOOLS = "*"


def run_check(config: str | None, models: Sequence[str], as_json: bool) -> int:
    """Checks a settings file or a folder of agents, and prints a report.

    Args:
        config: The path of the file or folder; None for the built-in settings.
        models: The models to plan budgets for; not with a folder.
        as_json: Whether the report is printed as JSON.

    Returns:
        The exit code: 1 if an agent or an app has a problem, else 0.
    """
    # `--model` takes all names that follow it, also that of the file.
    files = [each for each in models if each.lower().endswith(SETTINGS_SUFFIXES)]
    if files:
        text = f"{files[0]!r} stands among the models; name the file before --model"
        raise CommandError(text)

    folder = None
    if config is not None and Path(config).is_dir():
        folder = Path(config).resolve()
    if folder and models:
        raise CommandError("--model is for a file: the agents in a folder have models")

    with quiet_logs(Console(quiet=True)):
        report = _check_folder(folder) if folder else _check_file(config, models)

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
    """Returns a report on a settings file; without a file, on the built-in settings."""
    guard = ContextGuardPlugin.from_file(config) if config else ContextGuardPlugin()
    plugin_settings = guard.settings.model_dump(exclude={"agents", "default"})
    strategies = {"(default)": guard.settings.default, **guard.settings.agents}
    agents = [
        {"agent": name, **_describe_strategy(strategy, models, guard)}
        for name, strategy in strategies.items()
    ]
    return {"config": config or None, **plugin_settings, "agents": agents}


def _check_folder(folder: Path) -> dict[str, Any]:
    """Returns a report on the apps in a folder, loaded as `adk web` loads them.

    The folder may be that of a single app.
    """
    app_folders = _find_app_folders(folder)
    loader = AgentLoader(str(app_folders[0].parent))
    apps = {each.name: _load(loader, each.name) for each in app_folders}
    all_names = set[str]()
    for app in apps.values():
        all_names |= _list_names(app)

    app_reports = list[dict[str, Any]]()
    for name, app in apps.items():
        if isinstance(app, BaseException):
            app_reports.append(_report_failure(name, app))
        else:
            app_reports.append(_check_app(name, app, all_names))

    # All apps may share the settings file that the environment names, so a name in the
    # file is wrong only if no app has it.
    shared_file = os.environ.get(CONFIG_VARIABLE)
    if shared_file:
        shared_agents = load_settings(shared_file).agents
        problems = _list_unknown("agents", shared_agents, all_names)
        app_reports.append({"app": shared_file, "agents": [], "problems": problems})
    return {"path": str(folder), "apps": app_reports}


def _find_app_folders(folder: Path) -> list[Path]:
    """Returns a folder if it is an app, else the folders of apps in it."""
    if _is_app(folder):
        return [folder]

    # ADK also takes every Python package in the folder for an app.
    inner_folders = [
        each
        for each in sorted(folder.iterdir())
        if _is_app(each) or (each / "__init__.py").is_file()
    ]
    # An attempt to load a folder without apps tells what is wrong with it.
    return inner_folders or [folder]


def _is_app(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("agent.py", "root_agent.yaml"))


def _load(loader: AgentLoader, name: str) -> object:
    """Returns an app, or the root agent of one; the error if it cannot be loaded."""
    try:
        # An agent's module may print, but stdout may carry JSON for programs.
        with redirect_stdout(sys.stderr):
            return loader.load_agent(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of anyone's code
        return error


def _walk_app(app: object) -> Iterator[object]:
    """Yields the agents and tools of an app, which may be given by its root agent."""
    return walk_tree(getattr(app, "root_agent", app))


def _list_names(app: object) -> set[str]:
    """Returns the names of an app's agents and tools, perhaps with `UNKNOWN_TOOLS`."""
    names = set[str]()
    for node in _walk_app(app):
        # A tool may be a plain function, which has only a `__name__`.
        function_name = getattr(node, "__name__", "")
        names.add(getattr(node, "name", function_name) or "")
        if isinstance(node, BaseToolset):
            names.add(UNKNOWN_TOOLS)
    return names


def _list_unknown(setting: str, used: Iterable[str], known: set[str]) -> list[str]:
    """Returns a problem for each name that a setting uses and that is not known."""
    return [
        f"`{setting}` names {name!r}, which is not there.{suggest(name, known)}"
        for name in sorted(set(used) - known)
    ]


def _report_failure(name: str, error: BaseException) -> dict[str, Any]:
    """Returns a report on an app that cannot be loaded."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())  # In one line.
    problem = f"cannot be loaded: {reason}"
    return {"app": name, "agents": [], "problems": [problem]}


def _check_app(name: str, app: object, all_names: set[str]) -> dict[str, Any]:
    """Returns a report on an app.

    `all_names` are the names of the agents and tools of all apps in the folder.
    """
    plugins = getattr(app, "plugins", ())  # A root agent alone has no plugins.
    guards = [each for each in plugins if isinstance(each, ContextGuardPlugin)]
    # An app without a guard is checked with the settings that a guard would have.
    guard = guards[0] if guards else ContextGuardPlugin(strict=True)

    problems = list[str]()
    known_names = all_names
    has_own_settings = bool(guards) and not guard.is_shared
    if has_own_settings:
        known_names = _list_names(app)
        problems += _list_unknown("agents", guard.settings.agents, known_names)
    if len(guards) > 1:
        problems.append("two guards: where both guard an agent, the second is idle")
    if getattr(app, "events_compaction_config", None):
        problems.append("events_compaction_config: ADK pays for summaries as well")

    agents = list[dict[str, Any]]()
    for agent in _walk_app(app):
        if isinstance(agent, LlmAgent):
            checked = _check_agent(agent, guard, known_names)
            agents.append({"agent": agent.name, **checked.description})
            problems += [f"{agent.name}: {problem}" for problem in checked.problems]
    return {"app": name, "agents": agents, "problems": problems}


class _CheckedAgent(NamedTuple):
    """The items of `_describe_strategy` for an agent, and the problems with them."""

    description: dict[str, Any]
    problems: list[str]


def _check_agent(
    agent: LlmAgent, guard: ContextGuardPlugin, known_names: set[str]
) -> _CheckedAgent:
    """Checks the strategy that guards an agent, and the agent's model.

    `known_names` are the names of tools that `keep_tools` may have.
    """
    # A function that chooses a strategy has no settings; nor has None.
    strategy: Any = guard.settings.agents.get(agent.name, guard.settings.default)

    problems = list[str]()
    if UNKNOWN_TOOLS not in known_names:
        kept_tools = getattr(strategy, "keep_tools", ())
        problems += _list_unknown("keep_tools", kept_tools, known_names)

    models = list[str]()
    try:
        models.append(agent.canonical_model.model)
    except Exception as error:  # noqa: BLE001 - a client may raise anything
        problems.append(f"ADK cannot resolve its model: {error}")
    else:
        summarizer = getattr(strategy, "summarizer", None)
        problems += _list_summarizer_problems(summarizer)

    description = _describe_strategy(strategy, models, guard)
    if any(budget["source"] == "default" for budget in description["budgets"]):
        problems.append(f"the window of {models[0]!r} is unknown: set context_window")
    return _CheckedAgent(description, problems)


def _list_summarizer_problems(summarizer: BaseLlm | str | None) -> list[str]:
    """Returns a problem if the summarizer is a name that ADK does not know."""
    if not isinstance(summarizer, str):
        return []
    try:
        LLMRegistry.resolve(summarizer)
    except Exception as error:  # noqa: BLE001 - a client may raise anything
        return [f"ADK cannot resolve its summarizer: {error}"]
    return []


def _describe_strategy(
    strategy: object, models: Sequence[str], guard: ContextGuardPlugin
) -> dict[str, Any]:
    """Returns the name, settings, summarizer and budgets of a strategy.

    The settings are those that the user has set. There is a budget for each model. A
    function that chooses a strategy for each call has no settings and budgets, nor has
    None, which leaves an agent unguarded.
    """
    if not isinstance(strategy, Strategy):
        name = "chosen by a function" if strategy else None
        return {"strategy": name, "settings": {}, "summarizer": None, "budgets": []}

    summarizer = strategy.summarizer
    if isinstance(summarizer, BaseLlm):
        summarizer = summarizer.model

    budgeted_models = models
    if not models and strategy.context_window:
        budgeted_models = [""]  # A configured window needs no model.
    return {
        "strategy": type(strategy).__name__,
        "settings": _dump_settings(strategy),
        "summarizer": summarizer,
        "budgets": [_plan_budget(strategy, model, guard) for model in budgeted_models],
    }


def _dump_settings(strategy: Strategy) -> dict[str, Any]:
    """Returns the settings that the user has set, but for those shown elsewhere."""
    settings = strategy.model_dump(
        exclude_unset=True,
        exclude={"context_window", "summarizer"},
        serialize_as_any=True,
    )
    # A dumped reducer lacks the name of its class, which a settings file has.
    if isinstance(strategy, Pipeline) and "reducers" in settings:
        dumped_reducers = settings["reducers"]
        for reducer, dumped in zip(strategy.reducers, dumped_reducers, strict=True):
            dumped["reducer"] = f"{type(reducer).__module__}.{type(reducer).__name__}"
    return settings


def _plan_budget(
    strategy: Strategy, model: str, guard: ContextGuardPlugin
) -> dict[str, Any]:
    """Returns the window, budgets and costs of a strategy for a model, by name.

    `model` is "" for a configured window, which holds for any model.
    """
    registry = guard.registry
    window = resolve_context_window(
        model, configured=strategy.context_window, registry=registry
    )
    costs = resolve_costs(model, guard.settings.prices, registry)
    planned = plan_strategy(strategy, window.tokens)

    # Only litellm's table, which a registry of the user's own replaces, has entries.
    litellm_entry = None
    if window.source == "registry" and registry is None:
        litellm_entry = LitellmRegistry().entry_name(model)
    return {
        "model": model or None,
        "window_tokens": window.tokens,
        "source": window.source,
        "registry_entry": litellm_entry,
        "buffer_tokens": window.tokens - planned.full_tokens,
        "threshold_tokens": planned.threshold_tokens,
        "summary_tokens": planned.summary_tokens,
        "costs": costs.model_dump(exclude_defaults=True) if costs else None,
        "trigger": describe_start(window.tokens, planned.threshold_tokens, costs),
    }


def _list_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of a report for people; only headings are not indented."""
    if "apps" in report:
        for app in report["apps"]:
            yield from _list_app_lines(app)
    else:
        yield from _list_file_lines(report)


def _list_app_lines(app: dict[str, Any]) -> Iterator[str]:
    """Yields the lines on one app in the report on a folder."""
    yield f"{app['app']}: {'wrong' if app['problems'] else 'good'}"
    for problem in app["problems"]:
        yield f"  wrong: {problem}"
    for agent in app["agents"]:
        for line in _list_agent_lines(agent):
            yield f"  {line}"


def _list_file_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of a report on a settings file."""
    path = report["config"]
    yield f"{path}: good" if path else "no file: the built-in settings"

    action = "observes only" if report["observe"] else "compacts"
    warning = f"warns from {report['warning_threshold']:.0%} of the window"
    yield f"{action}, {warning}, state keys {report['state_keys']}"
    for agent in report["agents"]:
        yield from _list_agent_lines(agent)


def _list_agent_lines(agent: dict[str, Any]) -> Iterator[str]:
    """Yields an agent's name, settings and budgets, as "writer: Threshold"."""
    yield f"{agent['agent']}: {agent['strategy'] or 'not guarded'}"
    for name, value in agent["settings"].items():
        # Shown as in a settings file, which has `false` in place of None.
        file_value = False if value is None else value
        yield f"  {name} = {json.dumps(file_value, default=str)}"

    if agent["strategy"]:
        yield f"  summaries by {agent['summarizer'] or 'the model of the agent'}"
        if not agent["budgets"]:
            yield "  window of the agent's model: name models with --model"
    for budget in agent["budgets"]:
        yield from _list_budget_lines(budget)


def _list_budget_lines(budget: dict[str, Any]) -> Iterator[str]:
    """Yields the lines on a budget, which `_plan_budget` has returned."""
    source = _describe_source(budget)
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


def _describe_source(budget: dict[str, Any]) -> str:
    """Says who has told the context window of a budget."""
    if budget["source"] == "configured":
        return "config"
    if budget["source"] == "default":
        return "unknown model: assumed"
    return f"registry: {budget['registry_entry']}"


def _list_prices(costs: Costs) -> str:
    """Lists prices: "input 2, output 8; above 200,000 tokens input 4, output 12"."""
    prices = costs.model_dump(exclude={"above", "above_tokens"}, exclude_none=True)
    base_prices = ", ".join(f"{name} {price:g}" for name, price in prices.items())
    if not costs.above:
        return base_prices

    long_prices = _list_prices(costs.above)
    return f"{base_prices}; above {costs.above_tokens:,} tokens {long_prices}"
