"""The sections: texts beside every summary that no model writes; one file each."""

from __future__ import annotations

from contextguard_adk._sections.done import DoneCalls
from contextguard_adk._sections.lines import Lines
from contextguard_adk._sections.open_calls import OpenCalls
from contextguard_adk._sections.pins import Pins
from contextguard_adk._sections.recall_note import RecallNote
from contextguard_adk._sections.skills import Skills
from contextguard_adk._sections.todos import Todos
from contextguard_adk._sections.user_messages import UserMessages
from contextguard_adk._sections.values import Values
from contextguard_adk._turn.units import Section

_BEFORE_CALLS: tuple[Section, ...] = (
    Pins(),
    Skills(),
    UserMessages(),
    Todos(),
    Values(),
)
"""Their `listed_tools` are left out of the list of done calls."""

SECTIONS: tuple[Section, ...] = (
    *_BEFORE_CALLS,
    DoneCalls(beside=_BEFORE_CALLS),
    OpenCalls(),
    Lines(),
    RecallNote(),
)
"""All sections, in the order in which their texts stand after the summary."""
