"""Whatever interrupts a turn, the turns after it are answered and know all that was
said, no call is made again, no summary is wrong, and few are paid for twice."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.sessions import BaseSessionService, InMemorySessionService

from contextguard_adk.strategies import Strategy
from tests.interruptions import (
    COURSES,
    editing_plugins,
    greet,
    load_newest,
    load_what_is_needed,
    play_at_once,
    play_cancelled,
    play_failing,
    play_in_turn,
    play_rewound,
    run_process,
)
from tests.shifts import AHEAD, SHIFT, Notes, Worker
from tests.stores import own_database, store_marks

TURNS = 12
"""By then a request has lost the first jobs, but for its summary."""


async def play_alone(
    folder: Path,
    play: Callable[[Worker], Awaitable[Any]],
    strategy: Strategy = SHIFT,
    **settings: Any,
) -> Notes:
    """Plays a shift with one worker in memory."""
    notes = Notes(folder / f"notes {len([*folder.iterdir()])}")
    await play(Worker(InMemorySessionService(), notes, strategy, **settings))
    return notes


async def play_long(worker: Worker) -> None:
    """Plays a shift that nobody interrupts."""
    await play_in_turn([worker], TURNS)


def check(notes: Notes, undisturbed: Notes, beyond: int) -> None:
    """Nothing went wrong, and no more was paid for than an interruption may cost.

    Args:
        notes: What happened.
        undisturbed: What happens in the same shift without interruptions.
        beyond: How many more summaries may be paid for.
    """
    assert undisturbed.faults() == {}
    assert notes.faults() == {}
    usual = undisturbed.count()
    assert (usual.paid > 0, usual.interrupted) == (True, 0)
    assert notes.count().paid <= usual.paid + beyond


@pytest.mark.quick("inline", "taken back")
@pytest.mark.parametrize(
    ("name", "worker_count", "is_taken_back", "beyond"),
    [
        pytest.param("inline", 1, False, 1, id="inline"),
        pytest.param("ahead", 1, False, 1, id="ahead"),
        pytest.param("inline", 2, False, 1, id="another worker"),
        pytest.param("inline", 1, True, 1, id="taken back"),
        pytest.param("ahead", 2, False, 1, id="ahead, another", marks=pytest.mark.slow),
        pytest.param("ahead", 1, True, 2, id="ahead, back", marks=pytest.mark.slow),
    ],
)
async def test_a_turn_may_be_cancelled_wherever_it_waits(
    name: str, worker_count: int, is_taken_back: bool, beyond: int, tmp_path: Path
) -> None:
    """Whether the same is said again, to this worker or to another one, or the turn is
    taken back, with all that it has paid for."""
    course = COURSES[name]
    begun = InMemorySessionService()
    await Worker(begun, Notes(tmp_path / "begun")).say(0, course.before)

    async def play(point: int) -> tuple[int, Notes]:
        notes = Notes(tmp_path / str(point))
        sessions = copy.deepcopy(begun)
        settings: Any = {"strategy": course.strategy, "summary_seconds": 0.003}
        workers = [Worker(sessions, notes, **settings) for _ in range(worker_count)]
        back = is_taken_back and point > 0
        return await play_cancelled(course, workers, point, is_taken_back=back), notes

    waits, undisturbed = await play(0)
    assert waits > 10
    for point in range(1, waits + 1):
        _, notes = await play(point)
        assert notes.count().interrupted == 1
        check(notes, undisturbed, beyond)


@contextlib.asynccontextmanager
async def open_twice(
    kind: str, folder: Path
) -> AsyncIterator[tuple[BaseSessionService, ...]]:
    """Opens a new database as two processes do."""
    async with (
        own_database(kind, folder) as store,
        store.open() as first,
        store.open() as second,
    ):
        yield first, second


@pytest.mark.quick("memory")
@pytest.mark.parametrize(
    ("kind", "strategy", "beyond"),
    [
        ("memory", SHIFT, 0),
        ("file", SHIFT, 0),
        ("memory", SHIFT.model_copy(update={"ahead": 0.7}), 4),
    ],
    ids=["memory", "file", "ahead"],
)
async def test_two_workers_take_turns(
    kind: str, strategy: Strategy, beyond: int, tmp_path: Path
) -> None:
    """One does not know of what the other has written ahead, and pays for its own."""
    undisturbed = await play_alone(tmp_path, play_long, strategy)
    notes = Notes(tmp_path / "notes")
    async with open_twice(kind, tmp_path) as services:
        await play_in_turn([Worker(s, notes, strategy) for s in services], TURNS)

    check(notes, undisturbed, beyond)


@pytest.mark.quick("memory")
@pytest.mark.parametrize(
    "kind",
    [
        "memory",
        "file",
        pytest.param("postgres", marks=store_marks("postgres", is_slow=True)),
    ],
)
async def test_two_workers_work_at_once(kind: str, tmp_path: Path) -> None:
    """Each pays for its own summaries, and says again what came too late."""
    turns = 6  # A request has room for so many messages, each of them several times.

    async def play_half(worker: Worker) -> None:
        await play_in_turn([worker], turns)

    undisturbed = await play_alone(tmp_path, play_half)
    notes = Notes(tmp_path / "notes")
    async with open_twice(kind, tmp_path) as services:
        await play_at_once([Worker(service, notes) for service in services], turns)

    interrupted = notes.count().interrupted
    assert (interrupted > 0) == (kind != "memory")
    check(notes, undisturbed, beyond=undisturbed.count().paid + interrupted)


@pytest.mark.quick("2-inline", "3-inline")
@pytest.mark.parametrize("strategy", [SHIFT, AHEAD], ids=["inline", "ahead"])
@pytest.mark.parametrize("back_to", [1, 2, 3])
async def test_a_turn_may_be_taken_back(
    back_to: int, strategy: Strategy, tmp_path: Path
) -> None:
    """With its compaction, if it had one; a summary ahead of it may be lost by that."""
    taken_back = 0

    async def play_straight(worker: Worker) -> None:
        await play_in_turn([worker], 6)

    async def rewound(worker: Worker) -> None:
        nonlocal taken_back
        taken_back = await play_rewound(worker, back_to, turns=4)

    notes = await play_alone(tmp_path, rewound, strategy)
    undisturbed = await play_alone(tmp_path, play_straight, strategy)
    written_ahead = 1 if strategy is AHEAD else 0
    check(notes, undisturbed, beyond=taken_back + written_ahead)


@pytest.mark.quick("inline")
@pytest.mark.parametrize("strategy", [SHIFT, AHEAD], ids=["inline", "ahead"])
async def test_other_plugins_may_edit_messages(
    strategy: Strategy, tmp_path: Path
) -> None:
    """They stamp each one anew on each call, and mask a secret."""
    undisturbed = await play_alone(tmp_path, play_long, strategy)
    before = editing_plugins()
    notes = await play_alone(tmp_path, play_long, strategy, before=before)
    check(notes, undisturbed, beyond=0)


@pytest.mark.quick("newest")
@pytest.mark.parametrize("is_exact", [True, False], ids=["what is needed", "newest"])
async def test_a_session_may_be_loaded_in_part(is_exact: bool, tmp_path: Path) -> None:
    """As the guard says, or a number of events that has all since the last summary."""

    async def play_whole(worker: Worker) -> None:
        await greet(worker)
        await play_long(worker)

    async def play_part(worker: Worker) -> None:
        await greet(worker)
        load_what_is_needed(worker) if is_exact else load_newest(worker, 30)
        await play_long(worker)
        assert worker.chat.run_config.get_session_config

    undisturbed = await play_alone(tmp_path, play_whole)
    guard = {"recent_events": is_exact}
    notes = await play_alone(tmp_path, play_part, guard=guard)
    check(notes, undisturbed, beyond=0)


@pytest.mark.quick("inline")
@pytest.mark.parametrize(
    ("name", "worker_count"),
    [("inline", 1), ("ahead", 1), ("inline", 2)],
    ids=["inline", "ahead", "another worker"],
)
async def test_a_provider_that_fails_costs_no_summary(
    name: str, worker_count: int, tmp_path: Path
) -> None:
    """Three turns running fail right after a compaction; the fourth has its summary."""
    course = COURSES[name]
    played = []
    for is_failing in (False, True):
        sessions = InMemorySessionService()
        notes = Notes(tmp_path / str(is_failing))
        await Worker(sessions, notes).say(0, course.before)
        workers = [
            Worker(sessions, notes, course.strategy) for _ in range(worker_count)
        ]
        await play_failing(course, workers, is_failing)
        played.append(notes)

    undisturbed, failed = played
    check(failed, undisturbed, beyond=0)
    assert failed.count().interrupted == 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [SHIFT, AHEAD], ids=["inline", "ahead"])
@pytest.mark.parametrize(
    "kind", ["file", pytest.param("postgres", marks=store_marks("postgres"))]
)
def test_a_process_may_be_killed_at_any_time(
    kind: str, strategy: Strategy, tmp_path: Path
) -> None:
    """It is started again, and killed again; in the end the shift is done."""
    chance = random.Random(f"{kind} {strategy.ahead}")

    async def play(name: str, kills: int, seconds: float) -> tuple[Notes, float]:
        folder = tmp_path / name
        folder.mkdir()
        notes = Notes(folder / "notes")
        async with own_database(kind, folder) as store:
            for _ in range(kills):
                run_process(store, notes, 8, strategy, chance.uniform(0, seconds))
            return notes, run_process(store, notes, 8, strategy, None)

    undisturbed, seconds = asyncio.run(play("undisturbed", 0, 0.0))
    killed, _ = asyncio.run(play("killed", 4, seconds / 2))
    # With `ahead` one summary may wait while another is on its way to the session.
    summaries = 1 if strategy is SHIFT else 2
    interrupted = killed.count().interrupted
    assert interrupted > 0
    check(killed, undisturbed, beyond=summaries * interrupted)
