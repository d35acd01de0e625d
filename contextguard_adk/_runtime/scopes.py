"""Names of runs, calls and sessions: where a summary or a count is valid."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event

from contextguard_adk._history.adk_events import name_run

CallKey = tuple[str, str]  # Agent, scope.


def name_session(invocation: InvocationContext) -> str:
    """Names a session; its id alone does not, every user may have one of that id."""
    session = invocation.session
    return "\0".join((session.app_name, session.user_id, session.id))


def call_key(context: CallbackContext) -> CallKey:
    """Identifies the model call that a callback is about, in its run."""
    return context.agent_name, branch_scope(context.get_invocation_context())


def summary_scope(invocation: InvocationContext) -> str:
    """Names where a summary is valid: without history only in one run."""
    place = _branch_and_isolation(invocation)
    return digest([invocation.session.id, *place, *name_run(invocation)])


def branch_scope(place: InvocationContext | Event) -> str:
    """Names branch and isolation scope; "" where there are none."""
    names = _branch_and_isolation(place)
    return digest(names) if any(names) else ""


def _branch_and_isolation(place: Any) -> list[str]:
    return [place.branch or "", getattr(place, "isolation_scope", "") or ""]


def digest(names: Sequence[str]) -> str:
    return hashlib.blake2b("\0".join(names).encode(), digest_size=8).hexdigest()
