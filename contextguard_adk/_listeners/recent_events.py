"""Notes in session state since when an agent needs events: its start time.

With the start times of all agents, an app can load long sessions in part
(`load_recent`). A start time is in seconds since the epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from google.adk.events.event import Event

from contextguard_adk._history.contents import is_user_text
from contextguard_adk._runtime.state import EVENTS_SINCE_KEY, AgentState
from contextguard_adk._summaries.compose import find_quoted
from contextguard_adk._turn.units import Answered, Compacted, Listener

_SPARE_EVENTS = 32
"""So many events before the first one that is needed are loaded as well.

They show which messages the summary covers.
"""

_MARGIN_SECONDS = 1e-5
"""A start time lies this much before its event: databases round to microseconds."""


class RecentEvents(Listener):
    """Notes the start time of an agent; None while the agent needs all events."""

    setting = "recent_events"

    async def compacted(self, event: Compacted) -> None:
        """Notes the start time after a compaction.

        There are three cases:

        - The agent has lost its summary, or works in a branch: it needs all events. The
          branches of one run tell nothing of the branches of the next run.
        - The loaded events show a start time: it is noted.
        - They show none: the one that was noted before still holds, because the session
          may have been loaded from there on.
        """
        state = event.state
        agent = event.turn.agent
        noted_seconds = _read_start(state, agent)
        has_no_summary = event.turn.history.stored is None
        has_lost_summary = noted_seconds is not None and has_no_summary
        is_in_branch = state.owner != agent

        start_seconds: float | None = None
        if not has_lost_summary and not is_in_branch:
            start_seconds = _find_start(event) or noted_seconds
        state.set(EVENTS_SINCE_KEY + agent, start_seconds)

    def answered(self, event: Answered) -> None:
        """Clears the start time if the agent has lost its summary.

        The agent then needs all events.
        """
        state = event.state
        agent = event.context.agent_name
        has_start = _read_start(state, agent) is not None
        if has_start and state.record.summary is None:
            state.set(EVENTS_SINCE_KEY + agent, None)


def _read_start(state: AgentState, agent: str) -> Any:
    """Returns the start time that is noted for an agent; None if there is none."""
    # `find` names a value by the part of its key behind the prefix. This prefix is the
    # whole key.
    return state.find(EVENTS_SINCE_KEY + agent).get("")


def _find_start(event: Compacted) -> float | None:
    """Returns the start time of an agent, as far as the loaded events show one.

    It is the time of the user's newest message that stands at least 32 events before
    the first event that is needed. None if there is no such message.
    """
    events = event.turn.history.events
    needed_position = min(_find_needed(event), _find_waiting(events))
    earlier_events = events[: max(0, needed_position - _SPARE_EVENTS)]

    for newer, older in itertools.pairwise(reversed(earlier_events)):
        is_user_message = (
            newer.author == "user" and newer.content and is_user_text(newer.content)
        )
        start_seconds = newer.timestamp - _MARGIN_SECONDS
        # An older event of the same time would be loaded as well.
        has_own_time = older.timestamp < start_seconds
        if is_user_message and has_own_time:
            return start_seconds
    return None


def _find_needed(event: Compacted) -> int:
    """Returns the position of the last event before all messages that are needed.

    A message is needed if no summary covers it, or if the summary quotes it. The
    position is one in the session's events; it is 0 if there is no such event.
    """
    history = event.turn.history
    covered = event.outcome.draft.covered
    quoted_index = find_quoted(history, event.outcome.stored, covered)
    needed_indexes = [
        index
        for index in history.indexes
        if index not in covered or index == quoted_index
    ]
    first_needed_index = min(needed_indexes, default=len(history.contents))

    older_indexes = frozenset(range(first_needed_index))
    last_event_id = history.last_event(older_indexes)
    for position, each in enumerate(history.events):
        if each.id == last_event_id:
            return position
    return 0


def _find_waiting(events: Sequence[Event]) -> int:
    """Returns the position of the first event with a call that awaits a user's answer.

    The call may be one of any agent. Without such a call, the number of events is
    returned.
    """
    answered_ids = {
        response.id
        for event in events
        if event.author == "user"
        for response in event.get_function_responses()
    }
    for position, event in enumerate(events):
        waiting_ids = set(event.long_running_tool_ids or ()) - answered_ids
        if waiting_ids:
            return position
    return len(events)
