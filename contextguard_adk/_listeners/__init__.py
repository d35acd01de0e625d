"""Those that are told what the guard did with a call; a file holds one or a few."""

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

WATCHERS = tuple(each for each in LISTENERS if type(each).sent is not Listener.sent)
"""The listeners that look at requests; most do not, and each request has to be fast."""
