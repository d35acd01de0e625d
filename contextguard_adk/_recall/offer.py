"""Decides when an agent is offered the recall tool.

A tool is offered by its declaration, which is sent with the request.
"""

from __future__ import annotations

import logging
from typing import Any

from google.adk.agents.invocation_context import InvocationContext
from google.adk.models.llm_request import LlmRequest
from google.adk.tools.base_tool import BaseTool

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._providers.clients import answers_freely
from contextguard_adk._providers.thinkers import Thinker
from contextguard_adk._recall.items import ItemSource
from contextguard_adk._recall.tool import DECLARATION, RecallHistoryTool
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.settings import StrategySettings
from contextguard_adk._turn.turn import Turn

logger = logging.getLogger("contextguard_adk.recall")


class Recall:
    """Offers `recall_history`, once something was compacted or shortened."""

    declaration = DECLARATION

    def is_possible(
        self, request: LlmRequest, agent: Any, settings: StrategySettings
    ) -> bool:
        """Whether a request may be given the tool.

        `settings.recall` decides:

        - True allows it for each request.
        - False allows it for none.
        - "auto" allows it for an agent that has functions, and is free not to call one.

        Two kinds of requests never get the tool: requests with a cache that the app has
        made, and requests with a tool of the app under the same name.
        """
        # The provider takes no further tools beside a cache that the app has made.
        if not settings.recall or request.config.cached_content:
            return False

        # The guard's own tool under this name is no obstacle.
        same_named = request.tools_dict.get(RECALL_TOOL)
        is_of_app = not isinstance(same_named, RecallHistoryTool)
        if same_named is not None and is_of_app:
            message = "Agent %r has its own tool %r, so it is not offered the guard's."
            warn_once(logger, message, str(getattr(agent, "name", "")), RECALL_TOOL)
            return False

        if settings.recall is True:
            return True
        has_functions = bool(request.tools_dict and request.config.tools)
        return has_functions and answers_freely(request, agent)

    def is_wanted(self, turn: Turn) -> bool:
        """Whether to declare the tool in this request.

        An agent has no use for the tool before a request is cut. So the first request
        that is cut declares the tool, or the first of all requests if the tools must
        stay the same. All later requests declare the tool as well.
        """
        if not turn.has_recall:  # `is_possible` has returned False.
            return False
        was_declared = turn.record.has_recall
        return was_declared or _is_cut(turn) or self.must_stay_declared(turn)

    def must_stay_declared(self, turn: Turn) -> bool:
        """Whether every request from this one on has to declare the tool.

        Some thoughts of a model, and some caches, are valid only while the tools before
        them stay the same. An agent with such thoughts or caches begins to declare the
        tool at one of two requests:

        - at the first request of the session
        - at the first request that is cut, if the first request did not declare it
        """
        thinker = Thinker.of(
            turn.model.llm,
            turn.model.name,
            turn.settings.binds_thoughts,
            turn.record.helped,
        )
        # With a `cache_config` ADK makes a cache that has the tools.
        needs_same_tools = thinker.may_bind or turn.request.cache_config
        if not needs_same_tools:
            return False
        # The first request has no answer of the model yet.
        roles = {content.role for content in turn.history.contents}
        is_first_request = "model" not in roles
        return is_first_request or _is_cut(turn)

    def make(self, turn: Turn, invocation: InvocationContext) -> BaseTool:
        """Returns the tool that reads the items that this request leaves out."""
        # The tool lives until the next request, but the turn should not. So the tool
        # gets only the values of the turn that it needs.
        return RecallHistoryTool(
            ItemSource(turn.history, invocation),
            window_tokens=turn.budgets.window_tokens,
            page_tokens=turn.settings.recall_page_tokens,
            correction=turn.correction,
            mover=turn.media_mover,
        )


def _is_cut(turn: Turn) -> bool:
    """Whether the request shows only a part of the history."""
    return turn.history.stored is not None or bool(turn.history.shown_in_part)
