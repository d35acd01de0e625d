"""Looks at an app before each of its runs; at the first run logs how it is guarded.

The root of an app is the agent above all others. It is None here if the app is a
workflow, because ADK hides workflows from plugins.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from difflib import get_close_matches

from google.adk.agents.base_agent import BaseAgent
from google.adk.agents.invocation_context import InvocationContext

from contextguard_adk._plugin.base import GuardPlugin
from contextguard_adk._plugin.plans import describe_start, plan_strategy
from contextguard_adk._providers.clients import find_set_model
from contextguard_adk._providers.registry import (
    ModelRegistry,
    resolve_context_window,
    resolve_costs,
)
from contextguard_adk._runtime.adk_tree import (
    declares_state_schema,
    find_tools,
    walk_tree,
)
from contextguard_adk._runtime.runs import Guard
from contextguard_adk._support.log import one_line, warn_once
from contextguard_adk._support.settings import MIN_SIMILARITY, suggest
from contextguard_adk.config import PluginSettings
from contextguard_adk.strategies.base import Strategy

logger = logging.getLogger("contextguard_adk.plugin")

_MAX_AGENTS = 12
"""The most agents that a log line names."""

_SOURCES = {"configured": "configured", "registry": "model registry"}
"""The words of the log for `ResolvedWindow.source`, if the window is not assumed."""


def look_at_app(plugin: GuardPlugin, invocation: InvocationContext) -> None:
    """Chooses the form of state keys; at an app's first run logs who is guarded."""
    guard = plugin._guard
    root = getattr(invocation.agent, "root_agent", None)
    _choose_key_form(guard, root)

    # Only the first run of an app is sure to show all agents. A later run may be that
    # of an AgentTool, which shows a part of the agents.
    app = invocation.session.app_name
    if app not in guard.seen_apps:
        guard.seen_apps.add(app)
        tools = find_tools(root)
        if plugin.is_shared:
            # A name in the settings may be that of a tool of another app.
            tools = replace(tools, are_all_known=False)
        guard.app_tools[app] = tools
        _log_guarding(app, root, plugin)


def _choose_key_form(guard: Guard, root: object) -> None:
    """Decides whether session-state keys are namespaced.

    With the setting "auto", the keys are namespaced if anything in the app declares a
    `state_schema`. Any other setting has decided already.
    """
    # Once chosen, namespaced keys stay: the run of an AgentTool may have no schema, but
    # its state goes back to a run that has one.
    if guard.settings.state_keys != "auto" or guard.has_namespaced_keys:
        return

    # If the search raises, the form that every app accepts is in place.
    guard.has_namespaced_keys = True
    # A workflow at the root, which ADK hides from plugins, may declare a schema.
    guard.has_namespaced_keys = root is None or declares_state_schema(root)


def _log_guarding(app: str, root: object, plugin: GuardPlugin) -> None:
    """Logs which agents of an app are guarded, and two facts that users may not expect.

    The first fact is a setting for an agent that the app does not have. The second fact
    is a callback that may mask texts too late for the guard.
    """
    settings = plugin.settings
    guard = plugin._guard
    if root is not None and settings.agents:
        _warn_of_missing_agents(app, root, plugin)
    if logger.isEnabledFor(logging.INFO):
        _log_agents(app, root, settings, guard.registry)
    if not guard.redactor:  # With `redact`, the guard masks texts itself.
        _log_callbacks(app, root)


def _warn_of_missing_agents(app: str, root: object, plugin: GuardPlugin) -> None:
    """Warns of each name in the setting `agents` that no agent of the app has.

    If other apps may use the same settings, only misspelled names are warned of: any
    other name may be that of an agent of another app.
    """
    settings = plugin.settings
    app_names = {node.name for node in walk_tree(root) if isinstance(node, BaseAgent)}
    names_without_setting = app_names - settings.agents.keys()
    guarding_of_others = _describe_guarding(settings.default)

    for name in sorted(settings.agents.keys() - app_names):
        # If a name is misspelled, the agent that was meant has a similar name, and no
        # setting.
        similar_names = get_close_matches(
            name, names_without_setting, n=1, cutoff=MIN_SIMILARITY
        )
        may_be_of_other_app = plugin.is_shared and not similar_names
        if may_be_of_other_app:
            continue
        warn_once(
            logger,
            "`agents` names %r, but app %r has no agent of that name.%s Agents that "
            "`agents` does not name are %s.",
            name,
            app,
            suggest(name, app_names),
            guarding_of_others,
        )


def _describe_guarding(default: object) -> str:
    """Describes how the setting `default` guards agents.

    - "not guarded" for None
    - "guarded by choose_strategy" for a function, with its name
    - "guarded by Threshold" for a strategy, with the name of its class
    """
    if default is None:
        return "not guarded"
    if isinstance(default, Strategy):
        return f"guarded by {type(default).__name__}"
    function_name = getattr(default, "__name__", type(default).__name__)
    return f"guarded by {function_name}"


def _log_agents(
    app: str, root: object, settings: PluginSettings, registry: ModelRegistry | None
) -> None:
    """Logs in one line how each agent of an app is guarded."""
    verb = "Observing" if settings.observe else "Guarding"
    descriptions = _describe_agents(root, settings, registry)
    if settings.summaries == "stored":
        descriptions.append("no new summary is paid for")
    logger.info("%s app %r: %s.", verb, app, one_line("; ".join(descriptions)))


def _log_callbacks(app: str, root: object) -> None:
    """Logs which agents have a before_model_callback, which may mask texts.

    ADK calls the plugin before such a callback, so the plugin reads unmasked texts. At
    most 12 agents are named.
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
    """Describes how each agent is guarded, such as "writer: not guarded".

    At most 12 agents are described. The agents with a setting of their own come first.
    """
    agents = _find_agents(root, settings)
    names_with_setting = agents.keys() & settings.agents.keys()
    other_names = agents.keys() - settings.agents.keys()
    sorted_names = [*sorted(names_with_setting), *sorted(other_names)]

    descriptions = list[str]()
    for name in sorted_names[:_MAX_AGENTS]:
        guarding = _describe_agent(name, agents[name], settings, registry)
        descriptions.append(f"{name}: {guarding}")

    more_count = len(agents) - _MAX_AGENTS
    if more_count > 0:
        descriptions.append(f"and {more_count} more")

    is_hidden_workflow = root is None
    if is_hidden_workflow:
        # The setting `default` guards all agents that `agents` does not name. The name
        # "", which no agent has, stands for these agents.
        others = "every other agent" if agents else "every agent"
        guarding = _describe_agent("", None, settings, registry)
        descriptions.append(f"{others} of the workflow: {guarding}")

    if not descriptions:
        return ["it has no LLM agent"]
    return descriptions


def _find_agents(root: object, settings: PluginSettings) -> dict[str, object]:
    """Returns the LLM agents of an app by their names.

    The agents of a workflow are unknown. For a workflow, the result has the names in
    the settings, each with None in place of its agent.
    """
    # This import is slow, unless ADK has imported the module before.
    from google.adk.agents.llm_agent import LlmAgent

    if root is None:
        return dict.fromkeys(settings.agents)
    return {node.name: node for node in walk_tree(root) if isinstance(node, LlmAgent)}


def _describe_agent(
    name: str, agent: object, settings: PluginSettings, registry: ModelRegistry | None
) -> str:
    """Describes the strategy of an agent and the context window of its model.

    "Threshold, window 128,000 tokens (model registry)"

    If the window cannot be known, because no model is named and the strategy sets no
    window, the description is the name of the strategy alone.

    Args:
        name: The name of the agent; "" for all agents that the settings do not name.
        agent: The agent; None if it is unknown.
        settings: The settings of the plugin.
        registry: Looks up windows and prices; None for the built-in table.
    """
    strategy = settings.agents.get(name, settings.default)
    if strategy is None:
        return "not guarded"
    if not isinstance(strategy, Strategy):
        return "chosen by a function"

    strategy_name = type(strategy).__name__
    model_name = _find_model_name(agent)
    if not model_name and strategy.context_window is None:
        return strategy_name

    window = resolve_context_window(
        model_name,
        configured=strategy.context_window,
        registry=registry,
        is_quiet=True,
    )
    source = _SOURCES.get(window.source, f"assumed: unknown model {model_name!r}")
    description = f"{strategy_name}, window {window.tokens:,} tokens ({source})"

    # In a large window, the prompt that starts a compaction may be expensive.
    due_tokens = plan_strategy(strategy, window.tokens).threshold_tokens
    costs = resolve_costs(model_name, settings.prices, registry)
    due_prompt = describe_start(window.tokens, due_tokens, costs)
    return f"{description}, {due_prompt}" if due_prompt else description


def _find_model_name(agent: object) -> str:
    """Returns the name of an agent's model; "" if the agent has none."""
    # The model is its name, or a `BaseLlm` with the name as `model`.
    model = find_set_model(agent)
    return model if isinstance(model, str) else getattr(model, "model", "")
