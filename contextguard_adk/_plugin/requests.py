"""Decides which requests are guarded, and with which strategy; compacts or cuts them.

A request that is cut loses older messages without a summary, and no state is written.
"""

from __future__ import annotations

import logging
import os

from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_request import LlmRequest

from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._core.fit import cut_request
from contextguard_adk._core.loop import look_and_act, prepare_request
from contextguard_adk._core.unguarded import warn_of_whole_history
from contextguard_adk._measuring.budgets import threshold_tokens
from contextguard_adk._plugin.base import GuardPlugin
from contextguard_adk._plugin.sources import GUARD_ALL
from contextguard_adk._plugin.summary_budget import is_budget_spent
from contextguard_adk._providers.clients import find_llm, find_set_model
from contextguard_adk._providers.native_compaction import (
    LOST_COMPACTION,
    loses_compaction,
)
from contextguard_adk._providers.registry import resolve_context_window
from contextguard_adk._runtime.runs import Guard
from contextguard_adk._runtime.state import OFF_KEY, SUMMARIES_KEY
from contextguard_adk._support.log import log_failures, log_traceback, warn_once
from contextguard_adk.config import Chooser
from contextguard_adk.strategies.base import Strategy

logger = logging.getLogger("contextguard_adk.plugin")

_TWO_GUARDS = (
    "App %r has two guards for the same agents, perhaps one in the App and one "
    "on --extra_plugins: %r does the work, %r is idle."
)

_TWO_COMPACTIONS = (
    "App %r also has an events_compaction_config: ADK's compaction and the "
    "guard both pay for summaries of the same history. Remove it from the App "
    "to leave the history to the guard."
)


def find_strategy(
    plugin: GuardPlugin, context: CallbackContext, request: LlmRequest
) -> Strategy | None:
    """Returns the strategy for a request; None leaves the request as it is.

    The result is None in three cases:

    - If the settings do not guard the agent.
    - If the plugin may not change the request.
    - If the user's function has chosen None.

    If the plugin or the session wants no new summaries, or if the budget for summaries
    is spent, the result is a copy of the strategy that writes none.
    """
    settings = plugin.settings
    configured = settings.agents.get(context.agent_name, settings.default)
    if configured is None or not _may_guard(plugin, context, request):
        return None

    strategy: Strategy | None
    if isinstance(configured, Strategy):
        strategy = configured
    else:
        strategy = _ask_chooser(configured, context)
    if strategy is None:
        return None

    # Session state is untrusted: the value may be anything.
    session_summaries = context.session.state.get(SUMMARIES_KEY)
    if session_summaries not in (None, "stored", "write"):
        message = 'Session state %r is neither "stored" nor "write": ignored.'
        warn_once(logger, message, SUMMARIES_KEY)
    is_stored_only = "stored" in (settings.summaries, session_summaries)
    is_over_budget = not is_stored_only and is_budget_spent(plugin._guard, context)
    spending = plugin._guard.session_spending(context.get_invocation_context())
    spending.is_over = is_over_budget
    if is_stored_only or is_over_budget:
        return strategy.model_copy(update={"summaries": "stored"})
    return strategy


def _may_guard(
    plugin: GuardPlugin, context: CallbackContext, request: LlmRequest
) -> bool:
    """Whether this plugin may change the history of a request.

    The plugin may not in these cases:

    - The session switches the guard off.
    - The run is a live one (`run_live`).
    - The request has only new messages, because the provider stores the earlier ones.
    - An earlier plugin of the app guards this agent. A warning says so, if the settings
      of this plugin name a strategy for the agent, too.

    A warning also says if ADK's own compaction and this plugin both write summaries.
    """
    invocation = context.get_invocation_context()
    is_off = invocation.session.state.get(OFF_KEY) is True
    is_live = invocation.live_request_queue is not None
    # By this id, the provider finds the earlier messages and adds them itself.
    is_stored_by_provider = bool(getattr(request, "previous_interaction_id", None))
    if is_off or is_live or is_stored_by_provider:
        return False

    # ADK calls all plugins of the app in this order. The first guard whose settings
    # name a strategy for the agent does the work.
    app = invocation.session.app_name
    agent = context.agent_name
    plugins = invocation.plugin_manager.plugins
    guards = [each for each in plugins if isinstance(each, GuardPlugin)]
    guards_of_agent = [
        guard
        for guard in guards
        if guard.settings.agents.get(agent, guard.settings.default) is not None
    ]
    own_settings = plugin.settings
    is_guarding = own_settings.agents.get(agent, own_settings.default) is not None
    if guards_of_agent and guards_of_agent[0] is not plugin:
        if is_guarding:
            working_name = guards_of_agent[0].name
            warn_once(logger, _TWO_GUARDS, app, working_name, plugin.name)
        return False

    # A guard that only observes writes no summaries.
    writes_summaries = is_guarding and not own_settings.observe
    has_adk_compaction = getattr(invocation, "events_compaction_config", None)
    if has_adk_compaction and writes_summaries:
        warn_once(logger, _TWO_COMPACTIONS, app)
    return True


def _ask_chooser(choose: Chooser, context: CallbackContext) -> Strategy | None:
    """Returns what a user's function chooses for a request: a strategy or None.

    If the function raises an error, or returns another kind of value, the result is
    `Threshold()`. A warning then names the type of the error or of the value.
    """
    chosen: object
    try:
        chosen = choose(context)
    except Exception as error:  # noqa: BLE001 - anyone's code may raise anything
        log_traceback(logger, "No strategy was chosen", error)
        wrong_type = type(error).__name__
    else:
        if chosen is None or isinstance(chosen, Strategy):
            return chosen
        wrong_type = type(chosen).__name__

    message = (
        "The function that chooses a strategy for agent %r gave %s in place of one; "
        "the agent is guarded with Threshold()."
    )
    warn_once(logger, message, context.agent_name, wrong_type)
    return GUARD_ALL


async def guard_request(
    guard: Guard, context: CallbackContext, request: LlmRequest, strategy: Strategy
) -> None:
    """Puts the stored summary into a request; compacts if a compaction is due.

    In two cases, a request that is too large is cut instead:

    - If the guard has failed: the failure is logged.
    - If the request is one of a recorded test: no state may be written in such a test.

    A guard that only observes changes no request.
    """
    is_observed = guard.settings.observe
    if not is_recorded_test():
        consequence = "" if is_observed else ", whose history is cut to fit"
        message = f"The guard failed for agent {context.agent_name!r}{consequence}"
        # An error ends this block, and the code below goes on.
        with log_failures(logger, message):
            call = Call(guard, context, request, strategy, is_observed)
            turn = await look_and_act(call, Bounds())
            await prepare_request(call, turn)
            return  # Without a failure, nothing is cut.

    # The guard has failed, or the request is one of a recorded test.
    if is_observed:
        return
    window = resolve_context_window(
        request.model or "",
        configured=strategy.context_window,
        registry=guard.registry,
    )
    llm = find_llm(context.get_invocation_context().agent)
    cut_request(request, threshold_tokens(window.tokens), llm)


def is_recorded_test() -> bool:
    """Whether `adk test` records a conversation or replays one.

    A replay compares session state with the recorded one. But a replay reports no usage
    and answers no request for a summary, so the state after a compaction would differ.
    """
    # `adk test` sets the variable to "rebuild" while it records. A replay is a test of
    # pytest, which sets the variable to the name of the test.
    test_name = os.environ.get("PYTEST_CURRENT_TEST", "")
    return test_name == "rebuild" or "::test_agent_replay[" in test_name


def warn_of_lost_compaction(context: CallbackContext, request: LlmRequest) -> None:
    """Warns once if the provider is to compact, and ADK loses the compaction.

    An agent that is not guarded has the same loss, so it gets the same warning.
    """
    # Not at the first run of the app: the agents of a workflow are not seen there.
    model = find_set_model(context.get_invocation_context().agent)
    if loses_compaction(model, request.config):
        message = f"Agent %r: {LOST_COMPACTION}."
        warn_once(logger, message, context.agent_name)


def warn_of_switch(
    plugin: GuardPlugin, context: CallbackContext, request: LlmRequest
) -> None:
    """Warns if a compacted session sends its whole history because of a switch.

    A switch is anything by which a user keeps the guard from changing a request.
    """
    switch = _name_switch(plugin, context, request)
    if switch:
        warn_of_whole_history(plugin._guard, context, request, switch)


def _name_switch(
    plugin: GuardPlugin, context: CallbackContext, request: LlmRequest
) -> str:
    """Names the user's switch that keeps the guard from changing this request.

    Returns "" if the reason is no switch, but for example a live run. The name is a
    clause for a message, such as "where the guard only observes".
    """
    if plugin.settings.observe:
        return "where the guard only observes"
    if context.session.state.get(OFF_KEY) is True:
        return f"where {OFF_KEY} is set"

    # If the plugin may change the request, but does not change it, the settings or the
    # user's function exempt the agent.
    has_other_reason = not _may_guard(plugin, context, request)
    return "" if has_other_reason else "where the agent is not guarded"
