"""Finds the items of a history that an agent may read back."""

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


@dataclass(frozen=True)
class Items:
    """The items of a history, newest first.

    Attributes:
        all: Every item that may be read by its handle.
        hidden: The items that the request does not show, each once.
    """

    all: list[Item]
    hidden: list[Item]


@dataclass(frozen=True)
class ItemSource:
    """Lists the items of a history when a tool asks for them."""

    history: History
    invocation: InvocationContext

    async def load(self) -> Items:
        """Lists the items, also of events that this run has not loaded."""
        older = await _load_older(self.invocation, self.history.loads_part)
        # Megabytes take a while, in which nothing else would run.
        return await asyncio.to_thread(_list_items, self.history, older)


def _list_items(history: History, older_contents: Sequence[types.Content]) -> Items:
    """Lists the items of a request and of older contents."""
    redactor = history.redactor
    in_request = list_items(
        history.told, history.indexes, history.outputs, history.contents
    )
    older_told = redactor.contents(older_contents, history.memo.remember)
    older = list_items(older_told, range(len(older_told)), wholes=older_contents)

    known = {item.handle for item in in_request}
    missing = [
        replace(item, content_index=-1) for item in older if item.handle not in known
    ]
    newest_first = [*reversed(in_request), *reversed(missing)]
    items = [_redact_file(redactor, item) for item in newest_first]

    hidden_indexes = _find_hidden(history)
    hidden = dict[str, Item]()
    for item in items:
        if item.content_index in hidden_indexes:
            hidden.setdefault(item.handle, item)
    return Items(items, list(hidden.values()))


def _find_hidden(history: History) -> set[int]:
    """Finds the contents that a request does not show, or shows shortened.

    -1 stands for all contents that are not in the request.
    """
    stored = history.stored
    hidden = {-1, *history.covered, *history.previews}
    if stored is None:
        return hidden

    request_index = history.request_index
    if request_index is not None and stored.request_chars < 0:
        hidden.discard(request_index)  # The continuation quotes it whole.
    return hidden.union(history.shortened_results(stored))


def _redact_file(redactor: Redactor, item: Item) -> Item:
    """Returns an item as it may leave; only files are not redacted before."""
    if item.media is None or not redactor:
        return item
    return replace(item, text=redactor.text(item.text))


async def _load_older(
    invocation: InvocationContext, loads_part: bool
) -> list[types.Content]:
    """Returns contents of events that a run does not load, or that ADK has compacted.

    No others: texts that plugins have masked must not come back from here.
    """
    is_without_history = (
        getattr(invocation.agent, "include_contents", "default") == "none"
    )
    if is_without_history or _may_be_rewritten(invocation):
        return []

    session = invocation.session
    loaded = {event.id for event in session.events}
    events: Sequence[Event] = session.events
    if loads_part:
        whole = await invocation.session_service.get_session(
            app_name=session.app_name,
            user_id=session.user_id,
            session_id=session.id,
            config=GetSessionConfig(),  # A service of the app's own knows by it.
        )
        if whole is not None:
            events = whole.events

    standing = without_rewound(events)
    spans = compacted_spans(standing)
    older = list[types.Content]()
    for event in standing:
        is_left_out = event.id not in loaded or is_within(event.timestamp, spans)
        if is_left_out and event.content and is_visible(event, invocation):
            older.append(event.content)
    return older


def _may_be_rewritten(invocation: InvocationContext) -> bool:
    """Returns whether a plugin may have masked messages before the agent saw them."""
    for plugin in invocation.plugin_manager.plugins:
        module = type(plugin).before_model_callback.__module__
        is_known = module.startswith(("google.adk.", "contextguard_adk."))
        # The function that an app gives to ADK's filter may do anything.
        has_own_filter = getattr(plugin, "_custom_filter", None) is not None
        if has_own_filter or not is_known:
            return True
    return False
