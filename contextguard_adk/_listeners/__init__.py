"""The listeners: objects that are told what the guard did with a model call."""

from __future__ import annotations

from contextguard_adk._listeners.announcements import LogLine, Spans, StateLines
from contextguard_adk._listeners.artifacts import Artifacts
from contextguard_adk._listeners.metrics import Metrics
from contextguard_adk._listeners.recent_events import RecentEvents
from contextguard_adk._listeners.spending import StoredSpending
from contextguard_adk._listeners.truncating_servers import TruncatingServers
from contextguard_adk._shapes.sealed_thoughts import Seals
from contextguard_adk._turn.units import Listener

LISTENERS: tuple[Listener, ...] = (
    Metrics(),
    Spans(),
    LogLine(),
    StateLines(),
    RecentEvents(),
    StoredSpending(),
    Artifacts(),
    Seals(),
    TruncatingServers(),
)
"""All listeners, in the order in which they are told of an event."""


def _find_concerned(event: str) -> tuple[Listener, ...]:
    """Returns the listeners that do something at an event.

    These listeners override the method of `Listener` that has the name of the event.
    """
    empty_method = getattr(Listener, event)
    return tuple(
        each for each in LISTENERS if getattr(type(each), event) is not empty_method
    )


SENT = _find_concerned("sent")
SUMMARIZED = _find_concerned("summarized")
COMPACTED = _find_concerned("compacted")
ANSWERED = _find_concerned("answered")
RECOVERED = _find_concerned("recovered")
"""The listeners of each event.

Most events concern few listeners, and the others would take time at each call.
"""
