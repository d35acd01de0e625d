"""Who else works on the same history: a provider, ADK's compaction, other guards."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from google.adk.models.llm_request import LlmRequest

from contextguard_adk.memory import Memory

if TYPE_CHECKING:
    from google.adk.agents.invocation_context import InvocationContext

logger = logging.getLogger("contextguard_adk.neighbours")


def is_held_by_provider(invocation: InvocationContext, request: LlmRequest) -> bool:
    """Tells whether the history is not in the request: it is not ours to change."""
    is_live = invocation.live_request_queue is not None
    return is_live or bool(getattr(request, "previous_interaction_id", None))


def warn_of_native_compaction(invocation: InvocationContext, memory: Memory) -> None:
    """Says once for an app that ADK compacts its sessions as well."""
    if getattr(invocation, "events_compaction_config", None) is None:
        return
    app = invocation.session.app_name
    if _is_news(memory, "native compaction", app):
        logger.warning(
            "App %r also has an events_compaction_config: ADK's compaction and the "
            "guard both pay for summaries of the same history. Remove it from the App "
            "to leave the history to the guard.",
            app,
        )


def warn_of_second_guard(
    invocation: InvocationContext, working: str, idle: str, memory: Memory
) -> None:
    """Says once for an app that one of its guards has nothing to do.

    Args:
        invocation: The invocation.
        working: The name of the guard that does the work.
        idle: The name of the other one.
        memory: What the idle one remembers.
    """
    app = invocation.session.app_name
    if _is_news(memory, "second guard", app):
        logger.warning(
            "App %r has two guards for the same agents, perhaps one in the App and one "
            "on --extra_plugins: %r does the work, %r is idle.",
            app,
            working,
            idle,
        )


def _is_news(memory: Memory, what: str, app: str) -> bool:
    is_news = not memory.noticed.get((what, app))
    memory.noticed.put((what, app), True)
    return is_news
