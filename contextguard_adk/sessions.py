"""What an app does with a session between its turns."""

from __future__ import annotations

import math
from typing import Any

from google.adk.sessions.base_session_service import (
    BaseSessionService,
    GetSessionConfig,
)

from contextguard_adk._runtime.state import EVENTS_SINCE_KEY, OFF_KEY


async def load_recent(
    service: BaseSessionService, *, app_name: str, user_id: str, session_id: str
) -> GetSessionConfig | None:
    """Returns how to load a session without the events that no agent needs any more.

    For `RunConfig(get_session_config=…)`. The plugin has to have `recent_events=True`,
    which has it note since when events are needed.

    Returns:
        None where all events are needed: the session is short or there is none, an
        agent of the app has had no compaction yet, or the guard leaves it alone.
    """
    newest = GetSessionConfig(num_recent_events=1)  # It has all of the state.
    session = await service.get_session(
        app_name=app_name, user_id=user_id, session_id=session_id, config=newest
    )
    state = session.state if session else {}
    since: Any = state.get(EVENTS_SINCE_KEY)
    is_number = isinstance(since, int | float) and not isinstance(since, bool)
    if not is_number or not 0 < since < math.inf or state.get(OFF_KEY) is True:
        return None
    return GetSessionConfig(after_timestamp=since)
