"""Says in session state since when an agent needs events.

So an app can load long sessions in part (`load_recent`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from google.adk.events.event import Event

from contextguard_adk._history.contents import is_user_text
from contextguard_adk._runtime.state import EVENTS_SINCE_KEY
from contextguard_adk._summaries.compose import find_quoted
from contextguard_adk._turn.units import Answered, Compacted, Listener

_SPARE_EVENTS = 32


class RecentEvents(Listener):
    """Notes the time at each compaction; None where the agent needs all events."""

    setting = "recent_events"

    async def compacted(self, event: Compacted) -> None:
        state = event.state
        key = EVENTS_SINCE_KEY + event.turn.agent
        known = state.find(key).get("")
        has_lost_summary = known is not None and event.turn.history.stored is None
        # The branches of one run tell nothing of those of the next run.
        is_in_branch = state.owner != event.turn.agent

        if has_lost_summary or is_in_branch:
            state.set(key, None)
        else:
            # The known time still holds if the session was loaded from there on.
            state.set(key, _find_start(event) or known)

    def answered(self, event: Answered) -> None:
        """Has all events loaded again where an agent has lost its summary."""
        state = event.state
        key = EVENTS_SINCE_KEY + event.context.agent_name
        if state.record.summary is None and "" in state.find(key):
            state.set(key, None)


def _find_start(event: Compacted) -> float | None:
    """Finds the time from which on the agent needs events.

    Returns:
        The time of a message of the user, at least 32 events before the first event
        that is still needed, as the events before it show what is covered. It is in
        seconds since the epoch; None if there is no such message.
    """
    events = event.turn.history.events
    place = min(_find_needed(event), _find_waiting(events))
    before = events[: max(0, place - _SPARE_EVENTS)]

    for each, older in itertools.pairwise(reversed(before)):
        is_user_message = (
            each.author == "user" and each.content and is_user_text(each.content)
        )
        start_seconds = each.timestamp - 1e-5  # Databases keep microseconds.
        if is_user_message and older.timestamp < start_seconds:
            return start_seconds
    return None


def _find_needed(event: Compacted) -> int:
    """Returns the place of the last event before all that stays or is quoted."""
    history = event.turn.history
    covered = event.outcome.draft.covered
    quoted = find_quoted(history, event.outcome.stored, covered)
    staying = [i for i in history.indexes if i not in covered or i == quoted]
    first = min(staying, default=len(history.contents))

    last_event = history.last_event(frozenset(range(first)))
    for place, each in enumerate(history.events):
        if each.id == last_event:
            return place
    return 0


def _find_waiting(events: Sequence[Event]) -> int:
    """Returns the place of the first call of any agent that awaits the user's answer.

    It is the number of events where there is none.
    """
    answered = {
        response.id
        for event in events
        if event.author == "user"
        for response in event.get_function_responses()
    }
    for place, event in enumerate(events):
        waiting = set(event.long_running_tool_ids or ()) - answered
        if waiting:
            return place
    return len(events)
