"""Says in session state since when an agent needs events: a session loads in part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from google.adk.events.event import Event

from contextguard_adk._history.contents import is_user_text
from contextguard_adk._runtime.state import EVENTS_SINCE_KEY
from contextguard_adk._summaries.compose import find_quoted
from contextguard_adk._turn.units import Answered, Compacted, Listener


class RecentEvents(Listener):
    """Notes the time at each compaction; None where the agent needs all events."""

    setting = "recent_events"

    async def compacted(self, event: Compacted) -> None:
        state = event.state
        key = EVENTS_SINCE_KEY + event.turn.agent
        known = state.find(key).get("")  # It holds where less than that is loaded.
        is_lost = known is not None and event.turn.history.stored is None
        # A branch of one run tells nothing of the next run's.
        is_whole = is_lost or state.owner != event.turn.agent
        state.set(key, None if is_whole else _find_start(event) or known)

    def answered(self, event: Answered) -> None:
        """Has all loaded again where an agent has lost its summary."""
        state = event.state
        key = EVENTS_SINCE_KEY + event.context.agent_name
        is_lost = state.record.summary is None
        if is_lost and "" in state.find(key):
            state.set(key, None)


def _find_start(event: Compacted) -> float | None:
    """The time of a message of the user, 32 events before what is still needed."""
    history = event.turn.history
    stored = event.outcome.stored
    covered = event.outcome.draft.covered
    quoted = find_quoted(history, stored, covered)
    left = [i for i in history.indexes if i not in covered or i == quoted]
    before = frozenset(range(min(left, default=len(history.contents))))
    newest = history.last_event(before)
    events = history.events
    place = next((i for i, each in enumerate(events) if each.id == newest), 0)
    place = min(place, _find_waiting(events))
    # The events before what is needed show what is covered.
    pairs = itertools.pairwise(reversed(events[: max(0, place - 32)]))
    for each, older in pairs:
        is_said = each.author == "user" and each.content and is_user_text(each.content)
        seconds = each.timestamp - 1e-5  # Databases keep microseconds.
        if is_said and older.timestamp < seconds:
            return seconds
    return None


def _find_waiting(events: Sequence[Event]) -> int:
    """Where the first call stands that the user may still answer, of any agent."""
    said = (event for event in events if event.author == "user")
    answered = {each.id for event in said for each in event.get_function_responses()}
    waiting = (
        i for i, e in enumerate(events) if {*(e.long_running_tool_ids or ())} - answered
    )
    return next(waiting, len(events))
