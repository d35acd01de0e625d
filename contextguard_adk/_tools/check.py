"""`contextguard check`: validates a settings file or a folder of agents.

A report is a dict, which `--json` prints unchanged. There are two forms:

- The report on a file has the path of the file as "config", the settings of the plugin
  by name, and a list "agents".
- The report on a folder has the path of the folder as "path", and a list "apps". An app
  is a dict with the app's name as "app", and the lists "agents" and "problems".

An agent in a list "agents" is a dict with the agent's name as "agent", and the items
that `_describe_strategy` returns. A problem is a text.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from google.adk.agents import LlmAgent
from google.adk.models.base_llm import BaseLlm
from google.adk.models.registry import LLMRegistry
from google.adk.tools.base_toolset import BaseToolset
from rich.console import Console

from contextguard_adk._plugin.plans import describe_start, plan_strategy
from contextguard_adk._plugin.summary_budget import describe_budget
from contextguard_adk._providers.costs import Costs
from contextguard_adk._providers.native_compaction import (
    LOST_COMPACTION,
    loses_compaction,
)
from contextguard_adk._providers.registry import (
    LitellmRegistry,
    resolve_context_window,
    resolve_costs,
)
from contextguard_adk._runtime.adk_tree import names_of, walk_tree
from contextguard_adk._runtime.settings import SummaryBudget
from contextguard_adk._support.settings import suggest
from contextguard_adk._tools.terminal import CommandError, print_line, quiet_logs
from contextguard_adk.config import CONFIG_VARIABLE, SETTINGS_SUFFIXES, load_settings
from contextguard_adk.plugin import ContextGuardPlugin
from contextguard_adk.strategies import Pipeline, Strategy

if TYPE_CHECKING:
    from google.adk.cli.utils.agent_loader import AgentLoader

# A set of known names has this entry if an app has a toolset: a toolset may learn the
# names of its tools from a server, so an unknown name may be right.
UNKNOWN_TOOLS = "*"


def run_check(config: str | None, models: Sequence[str], as_json: bool) -> int:
    """Checks a settings file or a folder of agents, and prints a report.

    Args:
        config: The path of the file or folder; None for the built-in settings.
        models: The names of models. The report on a file has, for each strategy, a
            budget with each of these models. With a folder, the list must be empty.
        as_json: Whether the report is printed as JSON.

    Returns:
        The exit code: 1 if an app in a folder has a problem, else 0. A settings file
        that is wrong raises an error.
    """
    # All words after `--model` are taken for models, also the path of a file.
    files = [each for each in models if each.lower().endswith(SETTINGS_SUFFIXES)]
    if files:
        text = f"{files[0]!r} stands among the models; name the file before --model"
        raise CommandError(text)

    folder = None
    if config is not None and Path(config).is_dir():
        folder = Path(config).resolve()
    if folder and models:
        raise CommandError("--model is for a file: the agents in a folder have models")

    # A quiet console prints nothing, so no warning of a log interrupts the report.
    with quiet_logs(Console(quiet=True)):
        report = _check_folder(folder) if folder else _check_file(config, models)

    if as_json:
        print(json.dumps(report, indent=2, default=str))
    else:
        _print_report(report)

    # Only the report on a folder has apps.
    has_problems = any(app["problems"] for app in report.get("apps", ()))
    return 1 if has_problems else 0


def _print_report(report: dict[str, Any]) -> None:
    for line in _list_lines(report):
        is_heading = not line.startswith(" ")
        print_line(line, "bold" if is_heading else "")


def _check_file(config: str | None, models: Sequence[str]) -> dict[str, Any]:
    """Returns a report on a settings file; without a file, on the built-in settings.

    The agents of the report are those that the file names, and before them "(default)",
    which stands for all other agents.
    """
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

    The folder holds the folders of apps, or is itself the folder of one app.
    """
    app_folders = _find_app_folders(folder)
    # ADK's loader needs the folder above those of the apps.
    loader = _make_loader(app_folders[0].parent)
    # By the name of its folder, each app or the error that stopped its loading.
    apps = {each.name: _load(loader, each.name) for each in app_folders}
    # The names of the agents and tools of all apps. An error has no agents or tools.
    all_names = set[str]()
    for app in apps.values():
        all_names |= _list_names(app)

    app_reports = list[dict[str, Any]]()
    for name, app in apps.items():
        if isinstance(app, BaseException):
            app_reports.append(_report_failure(name, app))
        else:
            app_reports.append(_check_app(name, app, all_names))

    # All apps may share the settings file that the environment names. So the name of an
    # agent in the file is wrong only if no app has an agent or tool with the name.
    shared_file = os.environ.get(CONFIG_VARIABLE)
    if shared_file:
        shared_agents = load_settings(shared_file).agents
        problems = _list_unknown("agents", shared_agents, all_names)
        app_reports.append({"app": shared_file, "agents": [], "problems": problems})
    return {"path": str(folder), "apps": app_reports}


def _find_app_folders(folder: Path) -> list[Path]:
    """Returns the folders of the apps to check, which all have the same parent.

    - [folder] if the folder is an app
    - the folders in it that are apps, if there are any
    - [folder] if there are none: the attempt to load it tells what is wrong with it
    """
    if _is_app(folder):
        return [folder]

    # ADK takes every Python package in a folder of apps for an app.
    inner_folders = [
        each
        for each in sorted(folder.iterdir())
        if _is_app(each) or (each / "__init__.py").is_file()
    ]
    return inner_folders or [folder]


def _is_app(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("agent.py", "root_agent.yaml"))


def _make_loader(folder: Path) -> AgentLoader:
    """Returns ADK's loader of the apps in a folder.

    Raises:
        CommandError: This google-adk has no such loader.
    """
    try:
        from google.adk.cli.utils.agent_loader import AgentLoader
    except ImportError as error:
        text = "this google-adk has no AgentLoader, so no folder can be checked"
        raise CommandError(text) from error
    return AgentLoader(str(folder))


def _load(loader: AgentLoader, name: str) -> object:
    """Loads an app: returns the app, its root agent, or the error that stopped it.

    A module without an `App` defines only a root agent.
    """
    try:
        # An agent's module may print, but stdout may carry JSON for programs.
        with redirect_stdout(sys.stderr):
            return loader.load_agent(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of anyone's code
        return error


def _walk_app(app: object) -> Iterator[object]:
    """Yields the agents and tools of an app; `app` may be the root agent of the app."""
    return walk_tree(getattr(app, "root_agent", app))


def _list_names(app: object) -> set[str]:
    """Returns the names of the agents and tools of an app.

    `UNKNOWN_TOOLS` is among the names if the app has a toolset.
    """
    nodes = list(_walk_app(app))
    names = set(names_of(nodes))
    if any(isinstance(node, BaseToolset) for node in nodes):
        names.add(UNKNOWN_TOOLS)
    return names


def _list_unknown(setting: str, used: Iterable[str], known: set[str]) -> list[str]:
    """Returns a problem for each used name that is not among the known names.

    `setting` is the setting that uses the names: "agents" or "keep_tools".
    """
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
    """Returns the report on an app in a folder.

    Args:
        name: The name of the app's folder.
        app: The app, or the root agent of a module without an app.
        all_names: The names of the agents and tools of all apps in the folder.
    """
    plugins = getattr(app, "plugins", ())  # A root agent alone has no plugins.
    guards = [each for each in plugins if isinstance(each, ContextGuardPlugin)]
    # An app without a guard is checked with the settings that a guard would have.
    # `strict` raises an error if the settings file in the environment is wrong.
    guard = guards[0] if guards else ContextGuardPlugin(strict=True)

    problems = list[str]()
    has_own_settings = bool(guards) and not guard.is_shared
    if has_own_settings:
        known_names = _list_names(app)
        problems += _list_unknown("agents", guard.settings.agents, known_names)
    else:
        # The settings may be shared by all apps. Then `_check_folder` checks the names
        # of agents in them once, with the names of all apps.
        known_names = all_names
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

    Args:
        agent: The agent.
        guard: The guard of the agent's app.
        known_names: The names that the setting `keep_tools` may have, perhaps with
            `UNKNOWN_TOOLS`.
    """
    # A strategy, a function that chooses one for each call, or None. A function and
    # None have no settings, which is why settings are read with a default below.
    strategy: Any = guard.settings.agents.get(agent.name, guard.settings.default)

    problems = list[str]()
    if UNKNOWN_TOOLS not in known_names:
        kept_tools = getattr(strategy, "keep_tools", ())
        problems += _list_unknown("keep_tools", kept_tools, known_names)

    models = list[str]()
    try:
        llm = agent.canonical_model
        models.append(llm.model)
    except Exception as error:  # noqa: BLE001 - a client may raise anything
        problems.append(f"ADK cannot resolve its model: {error}")
    else:
        if loses_compaction(llm, agent.generate_content_config):
            problems.append(LOST_COMPACTION)
        # The summarizer may fail for the same reason as the model, such as a missing
        # package, and the reason is reported once.
        summarizer = getattr(strategy, "summarizer", None)
        problems += _list_summarizer_problems(summarizer)

    description = _describe_strategy(strategy, models, guard)
    # An assumed window is that of a model, so `models` is not empty.
    if any(budget["source"] == "default" for budget in description["budgets"]):
        problems.append(f"the window of {models[0]!r} is unknown: set context_window")
    return _CheckedAgent(description, problems)


def _list_summarizer_problems(summarizer: BaseLlm | str | None) -> list[str]:
    """Returns a problem if the summarizer is a name that ADK does not know.

    A summarizer is the name of a model, a model, or None for the agent's own model.
    Only a name has to be resolved.
    """
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

    Args:
        strategy: A strategy; a function that chooses one for each call; or None, which
            leaves an agent unguarded. The last two have no settings and no budgets.
        models: The names of the models, one budget for each.
        guard: The guard, which has the prices and perhaps a registry of models.

    Returns:
        - "strategy": the name of the class, or None for an unguarded agent
        - "settings": those that the user has set
        - "summarizer": the name of a model; None for the agent's own model
        - "budgets": one result of `_plan_budget` for each model
    """
    if not isinstance(strategy, Strategy):
        name = "chosen by a function" if strategy else None
        return {"strategy": name, "settings": {}, "summarizer": None, "budgets": []}

    summarizer = strategy.summarizer
    if isinstance(summarizer, BaseLlm):
        summarizer = summarizer.model

    budgeted_models = models
    if not models and strategy.context_window:
        # A budget needs the window alone. "" stands for any model: see `_plan_budget`.
        budgeted_models = [""]
    return {
        "strategy": type(strategy).__name__,
        "settings": _dump_settings(strategy),
        "summarizer": summarizer,
        "budgets": [_plan_budget(strategy, model, guard) for model in budgeted_models],
    }


def _dump_settings(strategy: Strategy) -> dict[str, Any]:
    """Returns the settings that the user has set.

    The context window and the summarizer are left out: `_describe_strategy` reports
    them apart.
    """
    settings = strategy.model_dump(
        exclude_unset=True,
        exclude={"context_window", "summarizer"},
        # Fields of a subclass are dumped as well, such as those of a reducer.
        serialize_as_any=True,
    )
    # A settings file has the class of a reducer as "reducer", but a dump has not.
    if isinstance(strategy, Pipeline) and "reducers" in settings:
        dumped_reducers = settings["reducers"]
        for reducer, dumped in zip(strategy.reducers, dumped_reducers, strict=True):
            dumped["reducer"] = f"{type(reducer).__module__}.{type(reducer).__name__}"
    return settings


def _plan_budget(
    strategy: Strategy, model: str, guard: ContextGuardPlugin
) -> dict[str, Any]:
    """Returns the window, budgets and costs of a strategy for a model, by name.

    `model` is the name of the model; "" for any model, if the strategy has a configured
    window.
    """
    registry = guard.registry
    window = resolve_context_window(
        model, configured=strategy.context_window, registry=registry
    )
    costs = resolve_costs(model, guard.settings.prices, registry)
    planned = plan_strategy(strategy, window.tokens)

    # A window from a registry comes from litellm's table, unless the guard has a
    # registry of the user's own. Only litellm's table has entries to name.
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
    """Yields the lines of a report for people; all lines but headings are indented."""
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
    if report["summaries"] == "stored":
        yield 'summaries = "stored": no model is asked for a summary'
    if report["reload_on_change"]:
        yield "read again when the file changes"
    if report["summary_budget"]:
        budget = SummaryBudget(**report["summary_budget"])
        yield f"summaries may cost {describe_budget(budget)}"
    for agent in report["agents"]:
        yield from _list_agent_lines(agent)


def _list_agent_lines(agent: dict[str, Any]) -> Iterator[str]:
    """Yields a heading, such as "writer: Threshold", and lines on the strategy.

    `agent` is an agent of a report: see the head of this file.
    """
    yield f"{agent['agent']}: {agent['strategy'] or 'not guarded'}"
    for name, value in agent["settings"].items():
        # A settings file has `false` where a setting is None.
        file_value = False if value is None else value
        yield f"  {name} = {json.dumps(file_value, default=str)}"

    if agent["strategy"]:
        yield f"  summaries by {agent['summarizer'] or 'the model of the agent'}"
        if not agent["budgets"]:
            yield "  window of the agent's model: name models with --model"
    for budget in agent["budgets"]:
        yield from _list_budget_lines(budget)


def _list_budget_lines(budget: dict[str, Any]) -> Iterator[str]:
    """Yields the lines on a budget, which is a result of `_plan_budget`."""
    source = _describe_source(budget)
    yield (
        f"  {budget['model'] or 'any model'}: window {budget['window_tokens']:,} "
        f"({source}), buffer {budget['buffer_tokens']:,}, threshold "
        f"{budget['threshold_tokens']:,}, summary {budget['summary_tokens']:,}"
    )

    # `describe_start` has written this text: at how many tokens the strategy compacts,
    # and what such a prompt costs. The text is "" for a small window.
    if budget["trigger"]:
        yield f"    {budget['trigger']}"
    if budget["model"]:  # Prices are those of a model.
        costs = budget["costs"]
        prices = _list_prices(Costs(**costs)) if costs else "unknown"
        yield f"    dollars per million tokens: {prices}"


def _describe_source(budget: dict[str, Any]) -> str:
    """Says where the context window of a budget comes from."""
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
