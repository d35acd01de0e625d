"""Warns when a session that was compacted sends its whole history again."""

from __future__ import annotations

import logging

from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_request import LlmRequest

from contextguard_adk._measuring.calibration import DEFAULT_CORRECTION
from contextguard_adk._measuring.tokens import estimate_config_tokens
from contextguard_adk._runtime.runs import Guard
from contextguard_adk._support.log import warn_once

logger = logging.getLogger("contextguard_adk.plugin")


def warn_of_whole_history(
    guard: Guard, context: CallbackContext, request: LlmRequest, why: str
) -> None:
    """Warns once if a request is at least as large as the last one that was compacted.

    Args:
        guard: The memory of the plugin.
        context: The context of ADK's callback.
        request: The request. The guard leaves it as it is, so it has no summary.
        why: The reason why the guard leaves the request as it is, for example "where
            the guard only observes". The warning begins with "Agent 'a' in session
            's', " and this reason.
    """
    state = guard.state(context)
    # The size of the last request that was compacted, before its compaction.
    compacted_tokens = state.read("summarized_at")
    if compacted_tokens is None or state.record.summary is None:
        # The session was never compacted.
        return

    invocation = context.get_invocation_context()
    memo = guard.run(invocation).memo(invocation)
    contents_tokens = memo.estimate_tokens(request.contents)
    heuristic_tokens = contents_tokens + estimate_config_tokens(request.config)
    tokens = int(heuristic_tokens * DEFAULT_CORRECTION)
    if tokens < compacted_tokens:
        return

    message = (
        "%s: its stored summary is left aside, and the whole history is sent, about %s "
        "tokens; it was compacted at %s. If the model takes less, the session ends "
        "here. To stop paying for summaries and keep what is compacted, use "
        'summaries="stored" instead.'
    )
    session = invocation.session.id
    about = f"Agent {context.agent_name!r} in session {session!r}, {why}"
    sent_figure = f"{tokens:,}"
    compacted_figure = f"{compacted_tokens:,.0f}"
    warn_once(logger, message, about, sent_figure, compacted_figure)
