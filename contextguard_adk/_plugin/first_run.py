"""Looks at an app before its runs; at the first run logs how it is guarded."""

from __future__ import annotations

import logging
from difflib import get_close_matches

from google.adk.agents.base_agent import BaseAgent
from google.adk.agents.invocation_context import InvocationContext

from contextguard_adk._plugin.base import GuardPlugin
from contextguard_adk._plugin.plans import describe_start, plan_strategy
from contextguard_adk._providers.registry import (
    ModelRegistry,
    resolve_context_window,
    resolve_costs,
)
from contextguard_adk._runtime.adk_tree import declares_state_schema, walk_tree
from contextguard_adk._support.log import one_line, warn_once
from contextguard_adk._support.settings import suggest
from contextguard_adk.config import PluginSettings
from contextguard_adk.strategies.base import Strategy

logger = logging.getLogger("contextguard_adk.plugin")

_MAX_AGENTS = 12
_SOURCES = {"configured": "configured", "registry": "model registry"}


def look_at_app(plugin: GuardPlugin, invocation: InvocationContext) -> None:
    """Chooses the form of state keys; at an app's first run logs who is guarded."""
    settings = plugin.settings
    guard = plugin._guard
    root = getattr(invocation.agent, "root_agent", None)

    # Namespaced keys stay once chosen: the state of an AgentTool's run goes to its
    # caller.
    if settings.state_keys == "auto" and not guard.has_namespaced_keys:
        # Every app accepts them, so they stay if the search fails.
        guard.has_namespaced_keys = True
        # ADK hides a workflow at the root from plugins; it may declare a schema.
        guard.has_namespaced_keys = root is None or declares_state_schema(root)

    # Only the app's first run shows all its agents; that of an AgentTool shows a part.
    app = invocation.session.app_name
    if app in guard.seen_apps:
        return
    guard.seen_apps.add(app)

    if root is not None and settings.agents:
        _warn_of_missing_agents(app, root, plugin)
    if logger.isEnabledFor(logging.INFO):
        _log_agents(app, root, settings, guard.registry)
    if not guard.redactor:
        _log_callbacks(app, root)


def _warn_of_missing_agents(app: str, root: object, plugin: GuardPlugin) -> None:
    """Warns of each name in `agents` that no agent of the app has.

    Where other apps may share the settings, it warns of misspelled names only.
    """
    settings = plugin.settings
    present = {node.name for node in walk_tree(root) if isinstance(node, BaseAgent)}
    unnamed = present - settings.agents.keys()
    others = _describe_default(settings.default)

    for name in sorted(settings.agents.keys() - present):
        is_misspelled = bool(get_close_matches(name, unnamed, n=1, cutoff=0.8))
        if plugin.is_shared and not is_misspelled:
            continue  # Another app may have it.
        warn_once(
            logger,
            "`agents` names %r, but app %r has no agent of that name.%s Agents that "
            "`agents` does not name are %s.",
            name,
            app,
            suggest(name, present),
            others,
        )


def _describe_default(default: object) -> str:
    """Says how the agents are guarded that the settings do not name."""
    if default is None:
        return "not guarded"
    # A function has a name of its own.
    name = getattr(default, "__name__", type(default).__name__)
    return f"guarded by {name}"


def _log_agents(
    app: str, root: object, settings: PluginSettings, registry: ModelRegistry | None
) -> None:
    """Logs in one line how each agent of an app is guarded."""
    verb = "Observing" if settings.observe else "Guarding"
    said = _describe_agents(root, settings, registry)
    if settings.summaries == "stored":
        said.append("no new summary is paid for")
    logger.info("%s app %r: %s.", verb, app, one_line("; ".join(said)))


def _log_callbacks(app: str, root: object) -> None:
    """Logs which agents have callbacks that may mask texts.

    A plugin's callback runs before these, so the guard reads the texts unmasked.
    """
    agents = [node for node in walk_tree(root) if isinstance(node, BaseAgent)]
    names = [
        agent.name for agent in agents if getattr(agent, "before_model_callback", None)
    ]
    if names:
        logger.info(
            "App %r: summarizer and session state get texts as they are before a "
            "before_model_callback of %s changes them; see `redact`.",
            app,
            one_line(", ".join(sorted(names)[:_MAX_AGENTS])),
        )


def _describe_agents(
    root: object, settings: PluginSettings, registry: ModelRegistry | None
) -> list[str]:
    """Says how each agent is guarded, in a large app each of the first dozen."""
    agents = _find_agents(root, settings)
    named_first = sorted(agents, key=lambda name: (name not in settings.agents, name))
    said = list[str]()
    for name in named_first[:_MAX_AGENTS]:
        how = _describe_agent(name, agents[name], settings, registry)
        said.append(f"{name}: {how}")

    left_count = len(agents) - _MAX_AGENTS
    if left_count > 0:
        said.append(f"and {left_count} more")

    if root is None:
        others = "every other agent" if agents else "every agent"
        how = _describe_agent("", None, settings, registry)
        said.append(f"{others} of the workflow: {how}")
    return said or ["it has no LLM agent"]


def _find_agents(root: object, settings: PluginSettings) -> dict[str, object]:
    """Finds the LLM agents of an app by name.

    ADK hides a workflow at the root from plugins. Then the settings' own names are
    listed, each without its agent.
    """
    from google.adk.agents.llm_agent import LlmAgent  # ADK has it by now.

    if root is None:
        return dict.fromkeys(settings.agents)
    return {node.name: node for node in walk_tree(root) if isinstance(node, LlmAgent)}


def _describe_agent(
    name: str, agent: object, settings: PluginSettings, registry: ModelRegistry | None
) -> str:
    """Says by which strategy an agent is guarded, and in which context window."""
    strategy = settings.agents.get(name, settings.default)
    if strategy is None:
        return "not guarded"
    if not isinstance(strategy, Strategy):
        return "chosen by a function"

    kind = type(strategy).__name__
    model = _find_model_name(agent)
    if not model and strategy.context_window is None:
        return kind

    window = resolve_context_window(
        model, configured=strategy.context_window, registry=registry, is_quiet=True
    )
    source = _SOURCES.get(window.source, f"assumed: unknown model {model!r}")
    due_tokens = plan_strategy(strategy, window.tokens).threshold_tokens
    costs = resolve_costs(model, settings.prices, registry)
    start = describe_start(window.tokens, due_tokens, costs)
    return f"{kind}, window {window.tokens:,} tokens ({source}){start}"


def _find_model_name(agent: object) -> str:
    """Names an agent's model, or its parent's; making the model may take seconds."""
    while agent is not None:
        model = getattr(agent, "model", None)
        if isinstance(model, str) and model:
            return model
        if model:
            return getattr(model, "model", "")
        agent = getattr(agent, "parent_agent", None)
    return ""
