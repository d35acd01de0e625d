"""When an agent is offered the recall tool, and what the tool may read."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions.base_session_service import GetSessionConfig
from google.adk.tools.base_tool import BaseTool
from google.genai import types

from contextguard_adk._history.adk_events import (
    RECALL_TOOL,
    compacted_spans,
    is_visible,
    is_within,
    without_rewound,
)
from contextguard_adk._history.history import History
from contextguard_adk._history.text import Item, list_items
from contextguard_adk._providers.clients import answers_freely
from contextguard_adk._providers.thinkers import Thinker
from contextguard_adk._recall.tool import DECLARATION, RecallHistoryTool
from contextguard_adk._support.log import warn_once
from contextguard_adk._support.redaction import Redactor
from contextguard_adk._turn.settings import StrategySettings
from contextguard_adk._turn.turn import Turn

logger = logging.getLogger("contextguard_adk.recall")


class Recall:
    """Offers `recall_history`, once something was compacted or shortened."""

    declaration = DECLARATION

    def is_possible(
        self, request: LlmRequest, agent: Any, settings: StrategySettings
    ) -> bool:
        """Returns whether a request may be given the tool."""
        present = request.tools_dict.get(RECALL_TOOL)
        if not settings.recall or request.config.cached_content:
            return False  # A cache that the app has made holds all tools there are.
        if not (present is None or isinstance(present, RecallHistoryTool)):
            message = "Agent %r has its own tool %r, so it is not offered the guard's."
            warn_once(logger, message, str(getattr(agent, "name", "")), RECALL_TOOL)
            return False
        has_functions = bool(request.tools_dict and request.config.tools)
        is_harmless = has_functions and answers_freely(request, agent)
        return settings.recall is True or is_harmless

    def is_wanted(self, turn: Turn) -> bool:
        """Returns whether to declare the tool: once there is something to read."""
        if not turn.has_recall or turn.record.has_recall:
            return turn.has_recall
        return self._has_more(turn) or self.must_stay_declared(turn)

    def must_stay_declared(self, turn: Turn) -> bool:
        """Returns whether every later request has to declare it as well.

        Where a tool that comes later would change what thoughts or a cache stand on, it
        is declared from the first request on, and in older sessions from then on.
        """
        binds = turn.settings.binds_thoughts
        model = turn.model
        thinker = Thinker.of(model.llm, model.name, binds, turn.record.helped)
        if not (thinker.may_bind or turn.request.cache_config):
            return False
        is_first = all(content.role != "model" for content in turn.messages)
        return is_first or self._has_more(turn)

    def _has_more(self, turn: Turn) -> bool:
        return turn.history.stored is not None or bool(turn.history.previewed)

    def make(self, turn: Turn, invocation: InvocationContext) -> BaseTool:
        """Returns the tool that reads what this request leaves out."""
        history = turn.history
        # It holds what it reads until the next request, and not this one.
        load = functools.partial(_load_items, history, invocation)
        page_tokens = turn.settings.recall_page_tokens
        window_tokens = turn.budgets.window_tokens
        return RecallHistoryTool(
            load, window_tokens, page_tokens, turn.correction, turn.media_mover
        )


async def _load_items(
    history: History, invocation: InvocationContext
) -> tuple[list[Item], list[Item]]:
    """Lists all items, and those that the request does not show; newest first."""
    older = await _load_older(invocation, history.loads_part)
    # Megabytes take a while, in which nothing else would run.
    return await asyncio.to_thread(_list_items, history, older)


def _list_items(
    history: History, contents: Sequence[types.Content]
) -> tuple[list[Item], list[Item]]:
    told = history.redactor.contents(contents, history.memo.remember)
    stored = history.stored
    older = list_items(told, range(len(told)), wholes=contents)
    indexes = history.indexes
    wholes = history.contents
    items = list_items(history.told, indexes, history.outputs, wholes)[::-1]
    hidden = {-1, *history.covered, *history.previewed}
    if history.request_index is not None and stored and stored.request_chars < 0:
        hidden.discard(history.request_index)  # The continuation quotes it.
    if stored:
        hidden.update(history.shortened_results(stored))

    known = {item.handle for item in items}
    # Those that ADK did not put into the request.
    missing = (item for item in reversed(older) if item.handle not in known)
    items += [replace(item, content_index=-1) for item in missing]
    items = [_redact_file(history.redactor, item) for item in items]
    unseen = [item for item in items if item.content_index in hidden]
    first = {item.handle: item for item in reversed(unseen)}
    return items, [item for item in unseen if first[item.handle] is item]


def _redact_file(redactor: Redactor, item: Item) -> Item:
    """An item as it may leave: what contents say was changed before, but in files."""
    if item.media is None or not redactor:
        return item
    return replace(item, text=redactor.text(item.text))


async def _load_older(
    invocation: InvocationContext, loads_part: bool
) -> list[types.Content]:
    """Contents of events that a run does not load, or that ADK itself has compacted."""
    # No others: what plugins have masked must not come back from here.
    session = invocation.session
    agent = invocation.agent
    is_own = getattr(agent, "include_contents", "default") == "none"
    if is_own or _may_be_rewritten(invocation):
        return []
    events: Sequence[Event] = session.events
    loaded = {event.id for event in events}
    if loads_part:
        whole = await invocation.session_service.get_session(
            app_name=session.app_name,
            user_id=session.user_id,
            session_id=session.id,
            config=GetSessionConfig(),  # A service of the app's own knows by it.
        )
        events = whole.events if whole else events
    standing = without_rewound(events)
    spans = compacted_spans(standing)
    older = (
        event
        for event in standing
        if event.id not in loaded or is_within(event.timestamp, spans)
    )
    return [e.content for e in older if e.content and is_visible(e, invocation)]


def _may_be_rewritten(invocation: InvocationContext) -> bool:
    """Whether a plugin may have masked what the agent was shown of other requests."""
    known = "google.adk.", "contextguard_adk."
    return not all(
        type(plugin).before_model_callback.__module__.startswith(known)
        # That of ADK's filter is anybody's.
        and getattr(plugin, "_custom_filter", None) is None
        for plugin in invocation.plugin_manager.plugins
    )
