"""One line that tells the agent how to read what the summary leaves out."""

from __future__ import annotations

from contextguard_adk._support.phrases import RECALL
from contextguard_adk._turn.room import Room
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section


class RecallNote(Section):
    """Tells of the recall tool, if the agent has it."""

    name = "recall"
    heading = RECALL
    goes_at = None
    needs_recall = True

    def write(self, turn: Turn, covered: frozenset[int], known: str, room: Room) -> str:
        """Returns the note; "" if the request does not declare the tool."""
        return RECALL if turn.has_recall else ""
