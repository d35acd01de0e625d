"""Finds the items of a history that an agent may read back.

An item is a message, a tool call, a tool's result or a file. Each has a handle, a short
name by which the agent asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

from contextguard_adk._history.adk_events import (
    compacted_spans,
    is_visible,
    is_within,
    without_rewound,
)
from contextguard_adk._history.history import History
from contextguard_adk._history.text import Item, list_items
from contextguard_adk._support.redaction import Redactor

_NOT_IN_REQUEST = -1  # The content index of an item that the request does not have.


@dataclass(frozen=True)
class Items:
    """The items of a history, newest first.

    Attributes:
        all: Every item, whether the request shows it or not.
        hidden: The items that the request does not show, one for each handle.
    """

    all: list[Item]
    hidden: list[Item]


@dataclass(frozen=True)
class ItemSource:
    """Lists the items of a history when a tool asks for them."""

    history: History
    invocation: InvocationContext

    async def load(self) -> Items:
        """Lists the items, also those of events that this run has not loaded."""
        older = await _load_older(self.invocation, self.history.loads_part)
        # Megabytes take a while, in which nothing else would run.
        return await asyncio.to_thread(_list_items, self.history, older)


def _list_items(history: History, older_contents: Sequence[types.Content]) -> Items:
    """Lists the items of a request and of older contents, from the newest on.

    An older content that the request has too makes no second item.
    """
    redactor = history.redactor
    request_items = list_items(
        history.told, history.indexes, history.outputs, history.contents
    )
    redacted_contents = redactor.redact_contents(older_contents, history.memo.remember)
    older_items = list_items(
        redacted_contents, range(len(redacted_contents)), wholes=older_contents
    )

    request_handles = {item.handle for item in request_items}
    missing_items = [
        replace(item, content_index=_NOT_IN_REQUEST)
        for item in older_items
        if item.handle not in request_handles
    ]
    newest_first = [*reversed(request_items), *reversed(missing_items)]
    all_items = [_redact_file(redactor, item) for item in newest_first]

    hidden_indexes = _find_hidden(history)
    hidden_by_handle = dict[str, Item]()
    for item in all_items:
        if item.content_index in hidden_indexes:
            hidden_by_handle.setdefault(item.handle, item)
    return Items(all=all_items, hidden=list(hidden_by_handle.values()))


def _find_hidden(history: History) -> set[int]:
    """Returns the indexes of contents that a request does not show as a whole.

    `_NOT_IN_REQUEST` is among them.
    """
    stored = history.stored
    hidden = {_NOT_IN_REQUEST, *history.covered, *history.shown_in_part}
    if stored is None:
        return hidden

    request_index = history.request_index
    if request_index is not None and stored.request_chars < 0:
        # The continuation, a text after the summary, quotes the user's request whole.
        hidden.discard(request_index)
    return hidden.union(history.shortened_results(stored))


def _redact_file(redactor: Redactor, item: Item) -> Item:
    """Returns an item with the text of its file redacted; other texts already are."""
    if item.media is None or not redactor:
        return item
    return replace(item, text=redactor.redact_text(item.text))


async def _load_older(
    invocation: InvocationContext, loads_part: bool
) -> list[types.Content]:
    """Returns contents of events that a run does not load, or that ADK has compacted.

    The list is empty in two cases:

    - The agent gets no history from ADK.
    - A plugin may have masked messages: the events still have the unmasked texts.
    """
    is_without_history = (
        getattr(invocation.agent, "include_contents", "default") == "none"
    )
    if is_without_history or _may_be_rewritten(invocation):
        return []

    session = invocation.session
    loaded_ids = {event.id for event in session.events}
    events: Sequence[Event] = session.events
    if loads_part:
        # The config tells a service of the app's own that all events are wanted.
        whole_session = await invocation.session_service.get_session(
            app_name=session.app_name,
            user_id=session.user_id,
            session_id=session.id,
            config=GetSessionConfig(),
        )
        if whole_session is not None:
            events = whole_session.events

    valid_events = without_rewound(events)
    compacted = compacted_spans(valid_events)
    contents = list[types.Content]()
    for event in valid_events:
        is_left_out = event.id not in loaded_ids or is_within(
            event.timestamp, compacted
        )
        if is_left_out and event.content and is_visible(event, invocation):
            contents.append(event.content)
    return contents


def _may_be_rewritten(invocation: InvocationContext) -> bool:
    """Whether a plugin may have masked messages before the agent saw them."""
    for plugin in invocation.plugin_manager.plugins:
        # The module of the class that defines the callback: ADK's for one without.
        module = type(plugin).before_model_callback.__module__
        is_known = module.startswith(("google.adk.", "contextguard_adk."))
        # The function that an app gives to ADK's filter may do anything.
        has_own_filter = getattr(plugin, "_custom_filter", None) is not None
        if has_own_filter or not is_known:
            return True
    return False
