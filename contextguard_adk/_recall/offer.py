"""When an agent is offered the recall tool, and what the tool may read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk._history.rendering import shorten_results
from contextguard_adk._history.shown import (
    RECALL_TOOL,
    compacted_spans,
    is_visible,
    is_within,
    without_rewound,
)
from contextguard_adk._history.state import AgentState
from contextguard_adk._history.stored import StoredSummary
from contextguard_adk._history.view import HistoryView
from contextguard_adk._measuring.budgets import TokenCounter
from contextguard_adk._measuring.tokens import estimate_config_tokens
from contextguard_adk._recall.tool import DECLARATION, RecallHistoryTool
from contextguard_adk._summarizing.items import Item, list_items
from contextguard_adk._summarizing.model import answers_freely
from contextguard_adk.telemetry import warn_once

logger = logging.getLogger("contextguard_adk.recall")


class RecallOffer:
    """Offers the recall tool in one request, once something was compacted."""

    def __init__(
        self,
        invocation: InvocationContext,
        request: LlmRequest,
        recall: Literal["auto"] | bool,
        page_tokens: int,
        count: TokenCounter,
    ) -> None:
        self._invocation = invocation
        self._request = request
        self._page_tokens = page_tokens
        self._count = count
        self.is_possible = may_offer(request, invocation.agent, recall)

    def adapt(self, stored: StoredSummary | None) -> StoredSummary | None:
        """Takes the tool out of a summary: a call without it would end the turn."""
        if stored is None or self.is_possible or not stored.has_recall:
            return stored
        return stored.model_copy(update={"index": "", "has_recall": False})

    def is_wanted(self, view: HistoryView, state: AgentState, may_bind: bool) -> bool:
        """Whether to declare the tool: once there is something to read.

        Where a tool that comes later would change what thoughts or a cache stand on, it
        is declared from the first request on, and in older sessions from then on.
        """
        if not self.is_possible or state.record.has_recall:
            return self.is_possible
        has_more = view.stored is not None or bool(view.previewed)
        is_first = all(content.role != "model" for content in view.contents)
        if (may_bind or self._request.cache_config) and (has_more or is_first):
            state.note(has_recall=True)
            return True
        return has_more

    def make(
        self,
        view: HistoryView,
        stored: StoredSummary | None,
        covered: Collection[int],
        window_tokens: int,
    ) -> None:
        """Gives the agent the tool, to read what a summary covers."""
        if not self.is_possible:
            return
        source = RecallSource(view, stored, covered, self._invocation)
        tool = RecallHistoryTool(source, window_tokens, self._page_tokens, self._count)
        if RECALL_TOOL not in self._request.tools_dict:
            self._request.append_tools([tool])
        self._request.tools_dict[RECALL_TOOL] = tool

    @property
    def missing_tokens(self) -> int:
        """What the tool will take once it is offered, by bytes / 4."""
        if not self.is_possible or RECALL_TOOL in self._request.tools_dict:
            return 0
        tool = types.Tool(function_declarations=[DECLARATION])
        return estimate_config_tokens(types.GenerateContentConfig(tools=[tool]))


@dataclass(frozen=True)
class RecallSource:
    """Where the tool reads, until the next request; it must not hold this one."""

    view: HistoryView
    stored: StoredSummary | None
    covered: Collection[int]
    invocation: InvocationContext

    async def load(self) -> tuple[list[Item], list[Item]]:
        """Lists all items, and those that the request does not show; newest first."""
        view, stored = self.view, self.stored
        older = await _load_older_items(self.invocation)
        items = list_items(view.contents, view.history, view.outputs)[::-1]
        hidden = {-1, *self.covered, *view.previewed}
        if view.live_index is not None and stored and stored.request_chars < 0:
            hidden.discard(view.live_index)  # The continuation quotes it.
        if stored:
            hidden.update(shorten_results(view, stored))
        known = {item.handle for item in items}
        # Those that ADK did not put into the request.
        missing = (item for item in reversed(older) if item.handle not in known)
        items += [replace(item, content_index=-1) for item in missing]
        unseen = [item for item in items if item.content_index in hidden]
        first = {item.handle: item for item in reversed(unseen)}
        return items, [item for item in unseen if first[item.handle] is item]


def may_offer(
    request: LlmRequest, agent: object, recall: Literal["auto"] | bool
) -> bool:
    """Whether a request may be given the recall tool, which some settings refuse."""
    present = request.tools_dict.get(RECALL_TOOL)
    if not recall or request.config.cached_content:
        return False  # A cache that the app has made holds all tools there are.
    if not (present is None or isinstance(present, RecallHistoryTool)):
        message = "Agent %r has a tool %r of its own, so it is not offered the guard's."
        warn_once(logger, message, str(getattr(agent, "name", "")), RECALL_TOOL)
        return False
    has_functions = bool(request.tools_dict and request.config.tools)
    return recall is True or (has_functions and answers_freely(request, agent))


async def _load_older_items(invocation: InvocationContext) -> list[Item]:
    """Items of events that a run does not load, or that ADK itself has compacted."""
    # No others: what plugins have masked must not come back from here.
    session = invocation.session
    if getattr(invocation.agent, "include_contents", "default") == "none":
        return []
    events: Sequence[Event] = session.events
    loaded = {event.id for event in events}
    if getattr(invocation.run_config, "get_session_config", None) is not None:
        whole = await invocation.session_service.get_session(
            app_name=session.app_name, user_id=session.user_id, session_id=session.id
        )
        events = whole.events if whole else events
    standing = without_rewound(events)
    spans = compacted_spans(standing)
    older = (
        event
        for event in standing
        if event.id not in loaded or is_within(event.timestamp, spans)
    )
    contents = [e.content for e in older if e.content and is_visible(e, invocation)]
    return list_items(contents, range(len(contents)))
