"""Repairs a history that does not begin with a user's message, or lacks a call.

Sessions that were loaded in part begin anywhere. Strict providers refuse that.
"""

from __future__ import annotations

from google.genai import types

from contextguard_adk._history.order import put_in_order
from contextguard_adk._turn.turn import Turn


def repair(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Puts a user's message first, and a text in place of each result without its call.

    Returns `contents` itself if it is in order.
    """
    return put_in_order(contents, turn.media_mover)
