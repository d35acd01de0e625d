"""Repairs a history that does not begin with a user's message, or lacks a call.

Sessions that were loaded in part begin anywhere. Strict providers refuse that.
"""

from __future__ import annotations

from google.genai import types

from contextguard_adk._history.order import put_in_order
from contextguard_adk._turn.turn import Turn


def repair(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Has a user's message stand first, and tells results without their calls as texts.

    Contents that are in order are returned as they are.
    """
    return put_in_order(contents, turn.media_mover)
