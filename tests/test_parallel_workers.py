"""One agent at work on several items at once: each worker keeps its own summary."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.adk.sessions import InMemorySessionService

from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat, guarded_agent
from tests.stores import own_database, store_marks
from tests.workers import shows_own_items, work

pytestmark = shows_own_items


@pytest.mark.quick("memory-2-12-90-3")
@pytest.mark.parametrize(
    ("kind", "item_count", "call_count", "words", "alone"),
    [
        ("memory", 2, 12, 90, 3),
        ("memory", 17, 5, 250, 2),
        pytest.param(
            "postgres", 2, 12, 90, 3, marks=store_marks("postgres", is_slow=True)
        ),
    ],
)
async def test_workers_at_once_cost_no_more_summaries(
    kind: str, item_count: int, call_count: int, words: int, alone: int, tmp_path: Path
) -> None:
    """Also of more workers than scopes are kept none loses its summary meanwhile;
    `alone` are the summaries of one that works alone."""
    summaries = []
    for count in (1, item_count):
        folder = tmp_path / str(count)
        folder.mkdir()
        async with own_database(kind, folder) as store, store.open() as sessions:
            llm = await work(count, call_count, words, sessions)
        summaries.append(llm.summaries)

    assert summaries[0] == alone
    assert summaries[1] <= 1.2 * item_count * alone


async def test_of_items_done_in_one_run_16_are_kept() -> None:
    """However many an agent works through, those that are done make room."""
    sessions = InMemorySessionService()
    await work(20, 2, 60, sessions, max_workers=2)
    chat = Chat(guarded_agent(SimulatedLlm()), session_service=sessions)
    live = [key for key, value in (await chat.state()).items() if value is not None]
    assert len({key.partition("@")[2] for key in live} - {""}) == 16
