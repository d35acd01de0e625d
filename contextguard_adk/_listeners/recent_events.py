"""Says in session state since when events are needed, for sessions loaded in part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from contextguard_adk._history.contents import is_user_text
from contextguard_adk._runtime.state import EVENTS_SINCE_KEY
from contextguard_adk._summaries.compose import find_quoted
from contextguard_adk._turn.units import Answered, Compacted, Listener


class RecentEvents(Listener):
    """Notes the time for each agent; what all of them need is the oldest one."""

    async def compacted(self, event: Compacted) -> None:
        if not event.guard.loads_recent:
            return
        state, agent = event.state, event.turn.agent
        found = state.find(f"{EVENTS_SINCE_KEY}:")
        # A branch of one run tells nothing of the next run's.
        is_branch = state.owner != agent
        since = None if is_branch else _find_start(event) or found.get(agent)
        found[agent] = since
        state.set(f"{EVENTS_SINCE_KEY}:{agent}", since)
        root = getattr(event.context.get_invocation_context().agent, "root_agent", None)
        times = [found.get(name) for name in _list_readers(root)]
        known = [each for each in times if isinstance(each, float)]
        is_complete = known and len(known) == len(times)
        state.set(EVENTS_SINCE_KEY, min(known) if is_complete else None)

    def answered(self, event: Answered) -> None:
        """Has all loaded again where an agent that reads it has no summary."""
        agent, state = event.context.get_invocation_context().agent, event.state
        is_reader = event.context.agent_name in _list_readers(agent)
        has_less = event.guard.loads_recent and "" in state.find(EVENTS_SINCE_KEY)
        if has_less and is_reader and not state.record.summary:
            state.set(EVENTS_SINCE_KEY, None)


def _find_start(event: Compacted) -> float | None:
    """The time of a message of the user, 32 events before what is still needed."""
    history, stored = event.turn.history, event.outcome.stored
    covered = event.outcome.draft.covered
    quoted = find_quoted(history, stored, covered)
    left = [i for i in history.history if i not in covered or i == quoted]
    before = frozenset(range(min(left, default=len(history.contents))))
    newest, events = history.last_event(before), history.events
    place = next((i for i, each in enumerate(events) if each.id == newest), 0)
    # The events before what is needed show what is covered.
    pairs = itertools.pairwise(reversed(events[: max(0, place - 32)]))
    for each, older in pairs:
        is_said = each.author == "user" and each.content and is_user_text(each.content)
        seconds = each.timestamp - 1e-5  # Databases keep microseconds.
        if is_said and older.timestamp < seconds:
            return seconds
    return None


def _list_readers(agent: object) -> Iterator[str]:
    """The names of the agents that read the history of a session; none of workflows."""
    if getattr(agent, "include_contents", "none") != "none":
        yield str(getattr(agent, "name", ""))
    for child in getattr(agent, "sub_agents", ()):
        yield from _list_readers(child)
