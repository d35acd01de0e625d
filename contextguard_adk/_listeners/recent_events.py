"""Notes in session state since when an agent needs events.

With this time, an app can load long sessions in part (`load_recent`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from google.adk.events.event import Event

from contextguard_adk._history.contents import is_user_text
from contextguard_adk._runtime.state import EVENTS_SINCE_KEY
from contextguard_adk._summaries.compose import find_quoted
from contextguard_adk._turn.units import Answered, Compacted, Listener

# So many events before the first one that is needed are loaded as well. They show which
# messages the summary covers.
_SPARE_EVENTS = 32


class RecentEvents(Listener):
    """Notes the time at each compaction; None where the agent needs all events."""

    setting = "recent_events"

    async def compacted(self, event: Compacted) -> None:
        """Notes the time since when the agent needs events after a compaction.

        There are three cases:
        - The agent has lost its summary, or works in a branch: it needs all events. The
          branches of one run tell nothing of the branches of the next run.
        - The loaded events show the time: that time is noted.
        - They do not show it: the time that was noted before still holds, because the
          session may have been loaded from there on.
        """
        state = event.state
        key = EVENTS_SINCE_KEY + event.turn.agent
        noted_seconds = state.find(key).get("")
        has_no_summary = event.turn.history.stored is None
        has_lost_summary = noted_seconds is not None and has_no_summary
        is_in_branch = state.owner != event.turn.agent

        if has_lost_summary or is_in_branch:
            state.set(key, None)
        else:
            state.set(key, _find_start(event) or noted_seconds)

    def answered(self, event: Answered) -> None:
        """Clears the time if the agent has lost its summary, so it needs all events."""
        state = event.state
        key = EVENTS_SINCE_KEY + event.context.agent_name
        # `find` returns the value under this very key by the name "".
        has_time = "" in state.find(key)
        if has_time and state.record.summary is None:
            state.set(key, None)


def _find_start(event: Compacted) -> float | None:
    """Returns the time since when the agent needs events, in seconds since the epoch.

    It is the time of the user's newest message that stands at least 32 events before
    the first event that is needed. None if there is no such message.
    """
    events = event.turn.history.events
    needed_index = min(_find_needed(event), _find_waiting(events))
    earlier_events = events[: max(0, needed_index - _SPARE_EVENTS)]

    for each, older in itertools.pairwise(reversed(earlier_events)):
        is_user_message = (
            each.author == "user" and each.content and is_user_text(each.content)
        )
        start_seconds = each.timestamp - 1e-5  # Databases keep microseconds.
        # Otherwise the older event would be loaded as well.
        if is_user_message and older.timestamp < start_seconds:
            return start_seconds
    return None


def _find_needed(event: Compacted) -> int:
    """Returns the index of the last event before all messages that are needed.

    Messages are needed if no summary covers them, or if the summary quotes them. The
    index is 0 if there is no such event.
    """
    history = event.turn.history
    covered = event.outcome.draft.covered
    quoted_index = find_quoted(history, event.outcome.stored, covered)
    needed_messages = [
        message_index
        for message_index in history.indexes
        if message_index not in covered or message_index == quoted_index
    ]
    first_needed = min(needed_messages, default=len(history.contents))

    last_event_id = history.last_event(frozenset(range(first_needed)))
    for event_index, each in enumerate(history.events):
        if each.id == last_event_id:
            return event_index
    return 0


def _find_waiting(events: Sequence[Event]) -> int:
    """Returns the index of the first event with a call that awaits the user's answer.

    The call may be one of any agent. Without such a call, the number of events is
    returned.
    """
    answered_ids = {
        response.id
        for event in events
        if event.author == "user"
        for response in event.get_function_responses()
    }
    for event_index, event in enumerate(events):
        waiting_ids = set(event.long_running_tool_ids or ()) - answered_ids
        if waiting_ids:
            return event_index
    return len(events)
