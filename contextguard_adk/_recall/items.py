"""Finds the items of a history that an agent may read back.

An item is a message, a tool call, a tool's result or a file. A handle is the short name
by which the agent asks for an item; equal items have the same handle. An item is hidden
if the request does not show the content of the item as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.genai import types

from contextguard_adk._history.adk_events import (
    compacted_spans,
    is_visible,
    is_within,
    without_rewound,
)
from contextguard_adk._history.history import History
from contextguard_adk._history.text import Item, list_items
from contextguard_adk._runtime.adk_objects import make_session_config
from contextguard_adk._support.redaction import Redactor

_NOT_IN_REQUEST = -1  # The content index of an item that the request does not have.


@dataclass(frozen=True)
class Items:
    """The items of a history, newest first.

    Attributes:
        all: Every item, hidden or not.
        hidden: The hidden items. If several have the same handle, only the newest.
    """

    all: list[Item]
    hidden: list[Item]


@dataclass(frozen=True)
class ItemSource:
    """Lists the items of a history when a tool asks for them.

    Attributes:
        history: The history of the request.
        invocation: The run that the request belongs to.
    """

    history: History
    invocation: InvocationContext

    async def load(self) -> Items:
        """Lists the items, also those of events that this run has not loaded."""
        older_contents = await _load_older(self.invocation, self.history.loads_part)
        # To list the items of a long history takes a while. In this thread nothing
        # else would run meanwhile.
        return await asyncio.to_thread(_list_items, self.history, older_contents)


def _list_items(history: History, older_contents: Sequence[types.Content]) -> Items:
    """Lists the items of a request and of older contents.

    An item of an older content is left out if the request has an item with its handle.
    """
    request_items = list_items(
        history.told,  # The contents in their redacted form.
        indexes=history.indexes,
        outputs=history.outputs,
        wholes=history.contents,
    )
    request_handles = {item.handle for item in request_items}
    missing_items = [
        item
        for item in _list_older_items(history, older_contents)
        if item.handle not in request_handles
    ]
    oldest_first = [*missing_items, *request_items]
    newest_first = [
        _redact_file(history.redactor, item) for item in reversed(oldest_first)
    ]

    hidden_indexes = _find_hidden(history)
    hidden_by_handle = dict[str, Item]()
    for item in newest_first:
        if item.content_index in hidden_indexes:
            hidden_by_handle.setdefault(item.handle, item)
    return Items(all=newest_first, hidden=list(hidden_by_handle.values()))


def _list_older_items(
    history: History, older_contents: Sequence[types.Content]
) -> list[Item]:
    """Lists the items of contents that the request does not have, oldest first."""
    remember = history.memo.remember
    redacted = history.redactor.redact_contents(older_contents, remember)
    items = list_items(redacted, range(len(redacted)), wholes=older_contents)
    return [replace(item, content_index=_NOT_IN_REQUEST) for item in items]


def _find_hidden(history: History) -> set[int]:
    """Returns the indexes of contents that a request does not show as a whole.

    `_NOT_IN_REQUEST` is among them.
    """
    hidden = {_NOT_IN_REQUEST, *history.covered, *history.shown_in_part}
    stored = history.stored
    if stored is None:  # The history is not compacted.
        return hidden

    # The continuation, a text after the summary, quotes the user's current request.
    quotes_whole_request = stored.request_chars < 0  # -1 stands for all characters.
    request_index = history.request_index
    if quotes_whole_request and request_index is not None:
        hidden.discard(request_index)
    return hidden.union(history.shortened_results(stored))


def _redact_file(redactor: Redactor, item: Item) -> Item:
    """Returns an item with its text redacted, if the text is that of a file.

    The text of any other item comes from contents that are redacted already.
    """
    if item.media is None or not redactor:
        return item
    return replace(item, text=redactor.redact_text(item.text))


async def _load_older(
    invocation: InvocationContext, loads_part: bool
) -> list[types.Content]:
    """Returns contents of the session that the request of a run does not have.

    There are two kinds of such contents, oldest first: those of events that the run has
    not loaded, and those that a compaction of ADK has replaced. The list is empty in
    two cases:

    - The agent gets no history from ADK.
    - A plugin may have masked messages: the events still have the unmasked texts.

    `loads_part` says whether the run may have loaded only a part of the session.
    """
    include_contents = getattr(invocation.agent, "include_contents", "default")
    if include_contents == "none" or _may_be_rewritten(invocation):
        return []

    events: Sequence[Event] = invocation.session.events
    loaded_ids = {event.id for event in events}
    if loads_part:
        events = await _load_all_events(invocation)

    valid_events = without_rewound(events)
    compacted = compacted_spans(valid_events)
    contents = list[types.Content]()
    for event in valid_events:
        is_loaded = event.id in loaded_ids
        if is_loaded and not is_within(event.timestamp, compacted):
            continue  # The request has the content.
        if event.content and is_visible(event, invocation):
            contents.append(event.content)
    return contents


async def _load_all_events(invocation: InvocationContext) -> Sequence[Event]:
    """Loads all events of the session of a run.

    If the session has been deleted, returns the events that the run has loaded.
    """
    session = invocation.session
    # A service of the app may load only recent events, unless the config asks for all.
    whole_session = await invocation.session_service.get_session(
        app_name=session.app_name,
        user_id=session.user_id,
        session_id=session.id,
        config=make_session_config(),
    )
    return session.events if whole_session is None else whole_session.events


def _may_be_rewritten(invocation: InvocationContext) -> bool:
    """Whether a plugin may have masked messages before the agent saw them.

    Two kinds of plugins may:

    - A plugin of the app, if the plugin has a callback for requests.
    - ADK's `ContextFilterPlugin`, if the app has given it a function.
    """
    for plugin in invocation.plugin_manager.plugins:
        # For a plugin without such a callback, this is the module of ADK's base class.
        module = type(plugin).before_model_callback.__module__
        is_known = module.startswith(("google.adk.", "contextguard_adk."))
        # `ContextFilterPlugin` stores the function of the app under this name.
        has_filter_of_app = getattr(plugin, "_custom_filter", None) is not None
        if has_filter_of_app or not is_known:
            return True
    return False
