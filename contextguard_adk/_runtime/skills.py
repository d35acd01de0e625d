"""Reads from session state which skills of ADK's `SkillToolset` are active."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from contextguard_adk._history.skills import list_skill_tools
from contextguard_adk._runtime.state import AgentState

_ACTIVE_KEY = "_adk_activated_skill_"
"""The beginning of ADK's key for the names of active skills; the agent follows."""

_LIFECYCLES_KEY = "_adk_skill_meta_"
"""The beginning of ADK's key for the lifecycles of skills; the agent follows."""

_EPHEMERAL = "ephemeral"
"""The lifecycle of a skill that is active only in the run that has loaded it."""


def find_skill_tools(state: AgentState, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the tools that return documents of skills.

    Returns () if ADK has never counted a skill as active for this agent: a tool of such
    a name is then a tool of the user's.

    Args:
        state: The agent's values in session state.
        names: The names of the tools that the request declares.
    """
    return () if _read_names(state) is None else list_skill_tools(names)


def find_active_skills(state: AgentState, run_id: str) -> frozenset[str]:
    """Returns the names of the skills that ADK counts as active for this agent.

    Args:
        state: The agent's values in session state.
        run_id: ADK's id of the run; "" outside of runs.
    """
    records = state.read_at(f"{_LIFECYCLES_KEY}{state.agent}", "skill_lifecycles")
    lifecycles = records or {}
    return frozenset(
        name
        for name in _read_names(state) or ()
        if isinstance(name, str) and not _is_expired(lifecycles.get(name), run_id)
    )


def _read_names(state: AgentState) -> list[Any] | None:
    """Returns what ADK has stored as the names of active skills; None for nothing."""
    key = f"{_ACTIVE_KEY}{state.agent}"
    names: list[Any] | None = state.read_at(key, "active_skills")
    return names


def _is_expired(record: object, run_id: str) -> bool:
    """Whether a skill was active only in another run.

    Args:
        record: What ADK has stored of the skill's lifecycle; None for nothing.
        run_id: ADK's id of the run; "" outside of runs.
    """
    if not isinstance(record, dict) or record.get("lifecycle") != _EPHEMERAL:
        return False
    loaded_by = record.get("activated_in")
    return bool(loaded_by) and loaded_by != run_id
