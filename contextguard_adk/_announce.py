"""What agents are guarded with: checked once, told of, or chosen for each call."""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches

from google.adk.agents.base_agent import BaseAgent
from google.adk.agents.callback_context import CallbackContext

from contextguard_adk._measuring.budgets import Budgets, plan_budgets
from contextguard_adk._providers.costs import Costs
from contextguard_adk._providers.registry import (
    ModelRegistry,
    resolve_context_window,
    resolve_costs,
)
from contextguard_adk._runtime.adk_tree import walk_tree
from contextguard_adk._support.log import log_traceback, one_line, warn_once
from contextguard_adk._support.settings import short_repr, suggest
from contextguard_adk.config import (
    CONFIG_VARIABLE,
    STRATEGIES,
    STRICT_VARIABLE,
    Chooser,
    PluginSettings,
    load_settings,
)
from contextguard_adk.errors import ConfigError
from contextguard_adk.records import Usage
from contextguard_adk.strategies.base import Strategy, Threshold

logger = logging.getLogger("contextguard_adk.plugin")

GUARD_ALL = Threshold()
"""The strategy of every agent where nothing else is said."""

FROM_FILE = Threshold()
"""Stands for settings that `from_file` reads."""

TWO_GUARDS = (
    "App %r has two guards for the same agents, perhaps one in the App and one on "
    "--extra_plugins: %r does the work, %r is idle."
)
TWO_COMPACTIONS = (
    "App %r also has an events_compaction_config: ADK's compaction and the guard both "
    "pay for summaries of the same history. Remove it from the App to leave the "
    "history to the guard."
)

_MAX_AGENTS = 12
_OFF = ("", "0", "false", "no", "off")
_SOURCES = {"configured": "configured", "registry": "model registry"}


def check_arguments(agents: object, default: object, registry: object) -> None:
    """Raises a TypeError that says what is expected in place of a wrong object."""
    if not isinstance(agents, Mapping | None):
        raise TypeError(
            "agents must be a mapping of agent names to strategies, such as "
            f"{{'writer': Threshold()}}, not {type(agents).__name__}: "
            f"{short_repr(agents)}"
        )
    named = [(f"agents[{name!r}]", each) for name, each in (agents or {}).items()]
    for place, strategy in (*named, ("default", default)):
        is_function = callable(strategy) and not isinstance(strategy, type)
        is_function = is_function and not inspect.iscoroutinefunction(strategy)
        if not (is_function or isinstance(strategy, Strategy | None)):
            message = f"{place} must be a Strategy, a sync function of the callback "
            message += f"context, or None, not {_describe_wrong(strategy)}"
            raise TypeError(message)
    if registry is not None and not hasattr(registry, "context_window"):
        raise TypeError(
            "registry must have a method context_window(model) that returns tokens or "
            f"None, not {type(registry).__name__}: {short_repr(registry)}"
        )


def _describe_wrong(value: object) -> str:
    if isinstance(value, type):
        call = f"{value.__name__}()"
        hint = f". Did you mean {call}?" if issubclass(value, Strategy) else ""
        return f"the class {value.__name__}{hint}"
    given = f"{type(value).__name__}: {short_repr(value)}"
    if isinstance(value, str):
        kind = STRATEGIES.get(value, Threshold).__name__
        return f"{given}. Did you mean {kind}()? Names of strategies are for files"
    if isinstance(value, dict):
        return f"{given}. Did you mean Threshold(…) with these settings?"
    return given


def choose_settings(
    given: PluginSettings, default: Strategy | Chooser | None, is_strict: bool
) -> PluginSettings:
    """Takes the settings given as arguments, or those of the file in the environment.

    Raises:
        ConfigError: The file is wrong, and the plugin is to be strict.
    """
    path = os.environ.get(CONFIG_VARIABLE)
    if default is FROM_FILE or not path:
        return given
    usual = PluginSettings()
    names = [name for name, value in given if value != getattr(usual, name)]
    if default is not GUARD_ALL and "default" not in names:
        names.append("default")
    if names:
        message = (
            f"{CONFIG_VARIABLE} names %s, which is not read because ContextGuardPlugin "
            "was given %s in code. To read the file, give none of these, or use "
            "ContextGuardPlugin.from_file(%r)."
        )
        warn_once(logger, message, path, ", ".join(names), path)
        return given
    try:
        return load_settings(path)
    except ConfigError as error:
        if is_strict or os.environ.get(STRICT_VARIABLE, "").lower() not in _OFF:
            message = "Nothing is guarded: ADK only logs this under --extra_plugins."
            raise ConfigError(f"{error} {message}") from error
        message = "%s Every agent is guarded with the defaults until this is mended."
        warn_once(logger, message, str(error), level=logging.ERROR)
        return given


def choose_strategy(choose: object, context: CallbackContext) -> Strategy | None:
    """Returns a strategy, or what a function chooses; `Threshold()` where it fails."""
    chosen = choose
    try:
        if not isinstance(choose, Strategy) and callable(choose):
            chosen = choose(context)
    except Exception as error:  # noqa: BLE001 - anyone's code may raise anything
        log_traceback(logger, "No strategy was chosen", error)
        chosen = error
    if chosen is None or isinstance(chosen, Strategy):
        return chosen
    message = "The function that chooses a strategy for agent %r gave %s in place of "
    message += "one; the agent is guarded with Threshold()."
    warn_once(logger, message, context.agent_name, type(chosen).__name__)
    return GUARD_ALL


def announce_app(
    app: str,
    root: object,
    settings: PluginSettings,
    registry: ModelRegistry | None,
    is_shared: bool,
) -> None:
    """Tells what is guarded, and warns of settings for agents that the app lacks.

    Where the settings may be shared with other apps, it warns of misspelled names only.
    """
    if root is not None and settings.agents:
        _check_names(app, root, settings, is_shared)
    if logger.isEnabledFor(logging.INFO):
        verb = "Observing" if settings.observe else "Guarding"
        said = _list_agents(root, settings, registry)
        if settings.summaries == "stored":
            said.append("no new summary is paid for")
        logger.info("%s app %r: %s.", verb, app, one_line("; ".join(said)))


def tell_callbacks(app: str, root: object) -> None:
    """Tells whose callbacks may mask what the summarizer then sees all the same."""
    tree = (node for node in walk_tree(root) if isinstance(node, BaseAgent))
    names = [agent.name for agent in tree if getattr(agent, "before_model_callback", 0)]
    if names:
        message = "App %r: summarizer and session state get texts as they are before a "
        message += "before_model_callback of %s changes them; see `redact`."
        logger.info(message, app, one_line(", ".join(sorted(names)[:_MAX_AGENTS])))


def _check_names(
    app: str, root: object, settings: PluginSettings, is_shared: bool
) -> None:
    known = {node.name for node in walk_tree(root) if isinstance(node, BaseAgent)}
    default = settings.default
    kind = getattr(default, "__name__", type(default).__name__)  # Or of a function.
    others = f"guarded by {kind}" if default is not None else "not guarded"
    unnamed = known - settings.agents.keys()
    for name in sorted(settings.agents.keys() - known):
        if is_shared and not get_close_matches(name, unnamed, 1, 0.8):
            continue  # Another app may have it.
        message = "`agents` names %r, but app %r has no agent of that name.%s "
        message += "Agents that `agents` does not name are %s."
        warn_once(logger, message, name, app, suggest(name, known), others)


def _list_agents(
    root: object, settings: PluginSettings, registry: ModelRegistry | None
) -> list[str]:
    """Says of each agent how it is guarded, of a large app's first dozen."""
    from google.adk.agents.llm_agent import LlmAgent  # ADK has it by now.

    agents: dict[str, object] = dict.fromkeys(settings.agents if root is None else ())
    tree = (node for node in walk_tree(root) if isinstance(node, LlmAgent))
    agents |= {agent.name: agent for agent in tree}
    named_first = sorted(agents, key=lambda name: (name not in settings.agents, name))
    said = [
        f"{name}: {_describe_agent(name, agents[name], settings, registry)}"
        for name in named_first[:_MAX_AGENTS]
    ]
    if (more := len(agents) - _MAX_AGENTS) > 0:
        said.append(f"and {more} more")
    if root is None:  # ADK shows no plugin a workflow at the root.
        others = _describe_agent("", None, settings, registry)
        said.append(f"every {'other ' * bool(agents)}agent of the workflow: {others}")
    return said or ["it has no LLM agent"]


def _describe_agent(
    name: str, agent: object, settings: PluginSettings, registry: ModelRegistry | None
) -> str:
    strategy = settings.agents.get(name, settings.default)
    if strategy is None:
        return "not guarded"
    if not isinstance(strategy, Strategy):
        return "chosen by a function"
    kind = type(strategy).__name__
    fixed = strategy.context_window
    if not (model := _find_model_name(agent)) and fixed is None:
        return kind
    window = resolve_context_window(
        model, configured=fixed, registry=registry, is_quiet=True
    )
    source = _SOURCES.get(window.source, f"assumed: unknown model {model!r}")
    costs = resolve_costs(model, settings.prices, registry)
    _, where = plan_strategy(strategy, window.tokens, costs)
    return f"{kind}, window {window.tokens:,} tokens ({source}){where}"


def plan_strategy(
    strategy: Strategy, window_tokens: int, costs: Costs | None
) -> tuple[Budgets, str]:
    """Returns sizes and, for a large window, where compactions begin, at what cost."""
    trigger = strategy.trigger_tokens(window_tokens)
    planned = plan_budgets(window_tokens, trigger_tokens=trigger)
    early = getattr(strategy, "compression_threshold", None) or math.inf  # A Pipeline.
    due_tokens = min(planned.threshold_tokens, early * planned.working_tokens)
    planned = replace(planned, threshold_tokens=(tokens := math.ceil(due_tokens)))
    cost = f"${costs.price(Usage(tokens)):,.2f}" if costs else "an unknown amount"
    said = f", compacts at {tokens:,} tokens, a prompt of that size costs {cost}"
    return planned, said if window_tokens > 200_000 else ""


def _find_model_name(agent: object) -> str:
    """The name of an agent's model, or its parent's; making one may take seconds."""
    while agent is not None:
        if model := getattr(agent, "model", None):
            return model if isinstance(model, str) else getattr(model, "model", "")
        agent = getattr(agent, "parent_agent", None)
    return ""
