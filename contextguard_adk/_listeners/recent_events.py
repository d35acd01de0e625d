"""Notes in session state since when an agent needs events: its start time.

With the start times of all agents, an app can load long sessions in part
(`load_recent`). A start time is in seconds since the epoch. An agent without a start
time needs all events.

A message is covered if the summary replaces it. An index is the position of a message
among the contents of the request; a position is one among the session's events.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from google.adk.events.event import Event

from contextguard_adk._history.contents import is_user_text
from contextguard_adk._runtime.state import EVENTS_SINCE_KEY, AgentState
from contextguard_adk._turn.units import Answered, Compacted, Listener

_SPARE_EVENTS = 32
"""At least this many events before the first needed event are loaded as well.

By these events, the guard recognizes the messages that the summary covers.
"""

_MARGIN_SECONDS = 1e-5
"""A start time is this much before its event, because databases round to microseconds.
"""


class RecentEvents(Listener):
    """Notes the start time of an agent; None takes the place of a wrong start time."""

    setting = "recent_events"

    async def compacted(self, event: Compacted) -> None:
        """Notes the start time after a compaction.

        There are four cases:

        - If the agent works in a branch: it needs all events, so None is noted. The
          branches of one run tell nothing of the branches of the next run.
        - If a start time was noted, but the agent had no summary before this
          compaction: it has lost the summary and needs all events, so None is noted.
        - If the loaded events show a new start time: that time is noted.
        - Otherwise: the earlier start time stays. The session may have been loaded
          since that time.
        """
        state = event.state
        agent = event.turn.agent
        noted_seconds = _read_start(state, agent)
        had_no_summary = event.turn.history.stored is None
        has_lost_summary = noted_seconds is not None and had_no_summary
        # In a branch, the owner of the values is more than the agent's name.
        is_in_branch = state.owner != agent

        start_seconds: float | None = None
        if not has_lost_summary and not is_in_branch:
            start_seconds = _find_start(event) or noted_seconds
        state.set(EVENTS_SINCE_KEY + agent, start_seconds)

    def answered(self, event: Answered) -> None:
        """Clears the start time if the agent has lost its summary.

        Without a summary, the agent needs all events.
        """
        state = event.state
        agent = event.context.agent_name
        has_start = _read_start(state, agent) is not None
        if has_start and state.record.summary is None:
            state.set(EVENTS_SINCE_KEY + agent, None)


def _read_start(state: AgentState, agent: str) -> Any:
    """Returns the start time that is noted for an agent; None if there is none.

    Session state is untrusted: the result may be anything.
    """
    # `find` returns values by the part of the key after the prefix. Here the prefix is
    # the whole key, and the part is "".
    return state.find(EVENTS_SINCE_KEY + agent).get("")


def _find_start(event: Compacted) -> float | None:
    """Returns the start time of an agent; None if the loaded events show none.

    The start time is just before the user's newest message that stands at least 32
    events before the first needed event. The event before this message has to be older
    than the start time, because ADK loads all events since that time.
    """
    events = event.turn.history.events
    end_position = min(_find_last_unneeded(event), _find_waiting(events))
    earlier_events = events[: max(0, end_position - _SPARE_EVENTS)]

    for newer, older in itertools.pairwise(reversed(earlier_events)):
        is_user_message = (
            newer.author == "user" and newer.content and is_user_text(newer.content)
        )
        start_seconds = newer.timestamp - _MARGIN_SECONDS
        has_own_time = older.timestamp < start_seconds
        if is_user_message and has_own_time:
            return start_seconds
    return None


def _find_last_unneeded(event: Compacted) -> int:
    """Returns the position of the last event before all needed messages.

    A message is needed if no summary covers it, or if the summary quotes it. The
    position is 0 if no such event is found.
    """
    history = event.turn.history
    covered = event.outcome.draft.covered
    quoted_index = history.find_quoted(event.outcome.stored, covered)
    needed_indexes = [
        index
        for index in history.indexes
        if index not in covered or index == quoted_index
    ]
    first_needed_index = min(needed_indexes, default=len(history.contents))

    unneeded_indexes = frozenset(range(first_needed_index))
    last_event_id = history.last_event(unneeded_indexes)
    for position, each in enumerate(history.events):
        if each.id == last_event_id:
            return position
    return 0


def _find_waiting(events: Sequence[Event]) -> int:
    """Returns the position of the first event with a call that awaits a user's answer.

    The call may be of any agent. Without such a call, the result is the number of
    events.
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
