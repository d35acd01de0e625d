"""Recorded sessions, as they are exported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import Session

from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import (
    Chat,
    call_part,
    guarded_agent,
    queued_tool,
)

Recorded = tuple[Session, SimulatedLlm]
WINDOW = 4_000
"""Threshold 3,200 tokens, summaries of 400."""

TURNS = 6
CALLS = 3 * TURNS
EVENTS = 6 * TURNS
FINDINGS = [
    {"rows": [{"id": number * 7919, "hall": "B", "part": f"7f{number}a"}] * 16}
    if number % 2
    else f"The scanner found part 7f{number}a of the old press in hall B. " * 42
    for number in range(7)
]

INSTRUCTION = "You help people find the parts of old machines in many halls. " * 20
PRICES = "[prices.simulated]\ninput = 1.0\ncached_input = 0.25\noutput = 4.0\n"


async def record(
    plugins: Sequence[BasePlugin] = (), has_cache: bool = False, turns: int = TURNS
) -> Recorded:
    """Has a real conversation with two searches a turn; returns its session.

    The second search names a part that the second search of the turn before has found.
    """
    script: list[Reply] = []
    for turn in range(turns):
        known = f"7f{(2 * turn - 1) % len(FINDINGS)}a"
        script += [call_part("search"), call_part("search", part=known)]
        script.append(f"Part {turn} is in hall B, says the scanner.")

    llm = SimulatedLlm(context_window=100_000, script=script, prompt_cache=has_cache)
    tools = [queued_tool("search", FINDINGS)]
    chat = Chat(guarded_agent(llm, tools, instruction=INSTRUCTION), plugins)
    for turn in range(turns):
        await chat.say(f"Where is part {turn} of the old press?")
    return await chat.session(), llm


def save(session: Session, folder: Path) -> Path:
    """Writes the export of a session."""
    path = folder / "session.json"
    path.write_text(session.model_dump_json(exclude_none=True, by_alias=True))
    return path
