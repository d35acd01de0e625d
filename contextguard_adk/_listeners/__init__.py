"""Who is told of a compaction or of an answered call; one file each, or a few."""

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
