"""The listeners: objects that are told what the guard did with a model call."""

from __future__ import annotations

from contextguard_adk._listeners.announcements import LogLine, Spans, StateLines
from contextguard_adk._listeners.artifacts import Artifacts
from contextguard_adk._listeners.metrics import Metrics
from contextguard_adk._listeners.recent_events import RecentEvents
from contextguard_adk._listeners.truncating_servers import TruncatingServers
from contextguard_adk._shapes.sealed_thoughts import Seals
from contextguard_adk._turn.units import Listener

LISTENERS: tuple[Listener, ...] = (
    Metrics(),
    Spans(),
    LogLine(),
    StateLines(),
    RecentEvents(),
    Artifacts(),
    Seals(),
    TruncatingServers(),
)
"""In the order in which they are told."""


def _find_told(event: str) -> tuple[Listener, ...]:
    """Returns the listeners with a method of their own for an event."""
    empty = getattr(Listener, event)
    return tuple(each for each in LISTENERS if getattr(type(each), event) is not empty)


SENT = _find_told("sent")
SUMMARIZED = _find_told("summarized")
COMPACTED = _find_told("compacted")
ANSWERED = _find_told("answered")
RECOVERED = _find_told("recovered")
"""The listeners of each event: most events concern few of them, and have to be fast.
"""
