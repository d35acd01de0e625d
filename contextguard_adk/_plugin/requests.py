"""Which requests are guarded, with which strategy, and where one is only cut."""

from __future__ import annotations

import logging
import os

from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_request import LlmRequest

from contextguard_adk._core.call import Bounds, Call
from contextguard_adk._core.fit import cut_request
from contextguard_adk._core.loop import send, settle
from contextguard_adk._core.unguarded import warn_of_whole_history
from contextguard_adk._measuring.budgets import threshold_tokens
from contextguard_adk._plugin.base import GuardPlugin
from contextguard_adk._plugin.sources import GUARD_ALL
from contextguard_adk._providers.clients import find_llm
from contextguard_adk._providers.registry import resolve_context_window
from contextguard_adk._runtime.runs import Guard
from contextguard_adk._runtime.state import OFF_KEY, SUMMARIES_KEY
from contextguard_adk._support.log import log_failures, log_traceback, warn_once
from contextguard_adk.config import Chooser
from contextguard_adk.strategies.base import Strategy

logger = logging.getLogger("contextguard_adk.plugin")


def find_strategy(
    plugin: GuardPlugin, context: CallbackContext, request: LlmRequest
) -> Strategy | None:
    """Returns the strategy for a request; None leaves the request as it is."""
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

    session_summaries = context.session.state.get(SUMMARIES_KEY)
    if session_summaries not in (None, "stored", "write"):
        message = 'Session state %r is neither "stored" nor "write": ignored.'
        warn_once(logger, message, SUMMARIES_KEY)
    if settings.summaries == "stored" or session_summaries == "stored":
        return strategy.model_copy(update={"summaries": "stored"})
    return strategy


def _may_guard(
    plugin: GuardPlugin, context: CallbackContext, request: LlmRequest
) -> bool:
    """Whether a request carries a history that this plugin may change.

    It may not in these cases:

    - The session switches the guard off.
    - The provider holds the history.
    - The run is a live one.
    - Another guard of the app does the work. A warning says so.

    A warning also names an app that pays for ADK's own compaction beside the guard's.
    """
    invocation = context.get_invocation_context()
    if invocation.session.state.get(OFF_KEY) is True:
        return False
    is_held_by_provider = getattr(request, "previous_interaction_id", None)
    is_live = invocation.live_request_queue is not None
    if is_held_by_provider or is_live:
        return False

    # Of several plugins that guard the agent, the first one does the work.
    app = invocation.session.app_name
    agent = context.agent_name
    plugins = invocation.plugin_manager.plugins
    guards = [each for each in plugins if isinstance(each, GuardPlugin)]
    guards_of_agent = [
        guard
        for guard in guards
        if guard.settings.agents.get(agent, guard.settings.default) is not None
    ]
    if guards_of_agent and guards_of_agent[0] is not plugin:
        warn_once(
            logger,
            "App %r has two guards for the same agents, perhaps one in the App and one "
            "on --extra_plugins: %r does the work, %r is idle.",
            app,
            guards_of_agent[0].name,
            plugin.name,
        )
        return False

    has_adk_compaction = getattr(invocation, "events_compaction_config", None)
    if has_adk_compaction and not plugin.settings.observe:
        warn_once(
            logger,
            "App %r also has an events_compaction_config: ADK's compaction and the "
            "guard both pay for summaries of the same history. Remove it from the App "
            "to leave the history to the guard.",
            app,
        )
    return True


def _ask_chooser(choose: Chooser, context: CallbackContext) -> Strategy | None:
    """Returns the strategy that a user's function chooses for a request, or None.

    Returns `Threshold()` if the function raises an error, or returns something else.
    """
    chosen: object
    try:
        chosen = choose(context)
    except Exception as error:  # noqa: BLE001 - anyone's code may raise anything
        log_traceback(logger, "No strategy was chosen", error)
        chosen = error  # The warning below names its type.

    if chosen is None or isinstance(chosen, Strategy):
        return chosen
    warn_once(
        logger,
        "The function that chooses a strategy for agent %r gave %s in place of one; "
        "the agent is guarded with Threshold().",
        context.agent_name,
        type(chosen).__name__,
    )
    return GUARD_ALL


async def guard_request(
    guard: Guard, context: CallbackContext, request: LlmRequest, strategy: Strategy
) -> None:
    """Compacts a request; if that fails, cuts its contents without any state.

    In a recorded test the request is always cut, because state must not be written.
    """
    observe = guard.settings.observe
    consequence = "" if observe else ", whose history is cut to fit"
    with log_failures(
        logger, f"The guard failed for agent {context.agent_name!r}{consequence}"
    ):
        if not is_recorded_test():
            call = Call(guard, context, request, strategy, observe)
            turn = await settle(call, Bounds())
            await send(call, turn)
            return

    # Only a failure, which is logged by now, or a recorded test gets here.
    if observe:
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

    `adk test` compares session state, but its replay reports no usage and cannot answer
    a request for a summary. So no state is written, and a request that is too large is
    cut.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    return test == "rebuild" or "::test_agent_replay[" in test


def warn_of_switch(
    plugin: GuardPlugin, context: CallbackContext, request: LlmRequest
) -> None:
    """Warns if a compacted session sends its whole history because of a switch."""
    switch = _name_switch(plugin, context, request)
    if switch:
        warn_of_whole_history(plugin._guard, context, request, switch)


def _name_switch(
    plugin: GuardPlugin, context: CallbackContext, request: LlmRequest
) -> str:
    """Describes the user's switch that keeps the guard from changing this request.

    Returns "" if there is no such switch.
    """
    if plugin.settings.observe:
        return "where the guard only observes"
    if context.session.state.get(OFF_KEY) is True:
        return f"where {OFF_KEY} is set"
    if _may_guard(plugin, context, request):
        # Nothing else stands in the way, so the settings exempt the agent.
        return "where the agent is not guarded"
    return ""
