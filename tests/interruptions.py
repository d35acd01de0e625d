"""Interruptions of a shift: cancelled and killed runs, other workers, changed histories
and failing providers. Each function plays a shift, and all is in its notes."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import multiprocessing
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.adk.sessions.base_session_service import GetSessionConfig

from contextguard_adk.sessions import load_recent
from contextguard_adk.strategies import Strategy
from tests.background import settle
from tests.builders import answer_text, model, user
from tests.chats import Changing
from tests.rewriting import masking, stamping
from tests.shifts import AHEAD, SHIFT, Notes, Worker, is_answer
from tests.stores import Store

# --- Cancelled runs -----------------------------------------------------------------


class _Stepped(Coroutine[Any, Any, Any]):
    """A coroutine that tells each time it waits for something."""

    def __init__(
        self, work: Coroutine[Any, Any, Any], tell: Callable[[], None]
    ) -> None:
        self._work = work
        self._tell = tell

    def send(self, value: Any) -> Any:
        """Goes on."""
        waits_for = self._work.send(value)
        self._tell()
        return waits_for

    def throw(self, *error: Any) -> Any:
        """Goes on with an error."""
        waits_for = self._work.throw(*error)
        self._tell()
        return waits_for

    def close(self) -> None:
        """Ends it."""
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()


async def cancel_at(point: int, run: Coroutine[Any, Any, Any]) -> int:
    """Cancels a run when it, or a task that it has begun, waits for the n-th time.

    Args:
        point: The number n; 0 cancels nothing.
        run: The run.

    Returns:
        How often they have waited.
    """
    count = 0

    def tell() -> None:
        nonlocal count
        count += 1
        if count == point:
            task.cancel()

    def make_task(
        loop: asyncio.AbstractEventLoop, work: Any, **settings: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(_Stepped(work, tell), loop=loop, **settings)

    loop = asyncio.get_running_loop()
    loop.set_task_factory(make_task)
    try:
        task = loop.create_task(run)
        await asyncio.wait([task])
    finally:
        loop.set_task_factory(None)
    if not task.cancelled():
        task.result()
    return count


@dataclass(frozen=True)
class Course:
    """Up to which place jobs are asked for, turn by turn.

    Attributes:
        before: In the turn before the cancelled one.
        cancelled: In the cancelled turn, which compacts.
        later: In the turns after it.
    """

    strategy: Strategy
    before: int
    cancelled: int
    later: Sequence[int]


COURSES = {
    "inline": Course(SHIFT, before=4, cancelled=5, later=(7,)),
    "ahead": Course(AHEAD, before=3, cancelled=5, later=(6,)),
}


async def play_cancelled(
    course: Course,
    workers: Sequence[Worker],
    point: int,
    *,
    is_taken_back: bool = False,
    is_patient: bool = False,
) -> int:
    """Cancels the turn at a point, says the same again, and goes on.

    Args:
        course: The turns.
        workers: Workers in a session with the turn before the cancelled one. The last
            plays the cancelled turn, and then all have their turns, the first first.
        point: See `cancel_at`.
        is_taken_back: Whether the session goes back to before the cancelled turn.
        is_patient: Whether the user waits until all other tasks are done.

    Returns:
        How often the cancelled turn has waited for something.
    """
    *_, worker = workers
    await worker.look(1)
    waits = await cancel_at(point, worker.attempt(1, course.cancelled))
    if point and waits >= point:
        worker.notes.add("interrupted")
    if is_patient:
        await settle()

    turns = list(enumerate(course.later, start=2))
    if is_taken_back:
        await worker.rewind(1)
        turns.insert(0, (101, course.cancelled))
    elif point:
        turns.insert(0, (1, course.cancelled))
    for (number, asked), each in zip(turns, itertools.cycle(workers), strict=False):
        await each.say(number, asked)
    return waits


# --- Several workers ----------------------------------------------------------------


def place_of(number: int) -> int:
    """Up to which place jobs are asked for in a turn of a long shift."""
    return 2 * number + 3


async def play_in_turn(workers: Sequence[Worker], turns: int) -> None:
    """One turn after the other, each by the next worker."""
    for number in range(turns):
        await workers[number % len(workers)].say(number, place_of(number))


async def play_at_once(workers: Sequence[Worker], turns: int) -> None:
    """After the first turn, as many turns at once as there are workers."""
    await workers[0].say(0, place_of(0))
    for begin in range(1, turns, len(workers)):
        numbers = range(begin, min(turns, begin + len(workers)))
        said = zip(workers, numbers, strict=False)
        await asyncio.gather(*(each.say(n, place_of(n)) for each, n in said))


# --- Histories that change ----------------------------------------------------------


async def play_rewound(worker: Worker, back_to: int, turns: int) -> int:
    """Takes the session back before a turn of the first ones, and plays others.

    Returns:
        The summaries that were paid for in the turns that were taken back.
    """
    paid = []
    for number in range(turns):
        await settle()
        paid.append(worker.notes.count().paid)
        await worker.say(number, place_of(number))
    await settle()
    taken_back = worker.notes.count().paid - paid[back_to]
    await worker.rewind(back_to)
    for number in range(back_to, turns + 2):
        await worker.say(100 + number, place_of(number))
    return taken_back


def editing_plugins() -> list[Changing]:
    """Plugins that stamp each message anew on each call, and mask a secret."""
    return [Changing(stamping()), Changing(masking())]


async def greet(worker: Worker) -> None:
    """Begins the session with many short messages."""
    await worker.chat.tell([user("Hello."), model("Hello.")] * 25)


def load_what_is_needed(worker: Worker) -> None:
    """Has the session be loaded from the event on that the guard names."""
    place = {"user_id": worker.chat.user_id, "session_id": worker.chat.session_id}
    worker.load = functools.partial(
        load_recent, worker.chat.sessions, worker.chat.app, **place
    )


def load_newest(worker: Worker, count: int) -> None:
    """Has the newest events of the session be loaded."""

    async def load() -> GetSessionConfig:
        return GetSessionConfig(num_recent_events=count)

    worker.load = load


# --- A provider that fails ----------------------------------------------------------


async def play_failing(
    course: Course, workers: Sequence[Worker], is_failing: bool
) -> None:
    """Says the same three times while the provider fails, then once more, and goes on.

    Args:
        course: The turns; the one to cancel fails as soon as it has compacted.
        workers: Workers in a session with the turn before that one. The first plays the
            turns that fail, the last those after them.
        is_failing: Whether the provider fails; if not, all are answered.
    """
    workers[0].is_failing = is_failing
    for number in (1, 2, 3):
        await workers[0].say(number, course.cancelled)

    workers[0].is_failing = False
    for number, asked in enumerate((course.cancelled, *course.later), start=4):
        await workers[-1].say(number, asked)


# --- Killed processes ---------------------------------------------------------------


async def play_on(worker: Worker, turns: int) -> None:
    """Plays the turns of a long shift that have no answer yet."""
    events = await worker.chat.events()
    answers = [answer_text([event]) for event in events]
    for number in range(turns):
        asked = place_of(number)
        if not any(is_answer(answer, asked) for answer in answers):
            await worker.say(number, asked)


def work(kind: str, url: str, path: Path, turns: int, strategy: Strategy) -> None:
    """What a process does: it plays on, and notes when it begins and ends."""
    logging.disable()  # The parent reads the notes.

    async def play() -> None:
        async with Store(kind, url).open() as sessions:
            notes = Notes(path)
            worker = Worker(sessions, notes, strategy, summary_seconds=0.05)
            await worker.chat.session()
            notes.add("begun", str(time.monotonic()))
            await play_on(worker, turns)
            notes.add("ended", str(time.monotonic()))

    asyncio.run(play())


def run_process(
    store: Store, notes: Notes, turns: int, strategy: Strategy, seconds: float | None
) -> float:
    """Has a process play a shift, or go on with it.

    Args:
        store: Where the session is.
        notes: What happened.
        turns: The turns of the shift.
        strategy: How the agent is guarded.
        seconds: After how many of its first turn it is killed; None for never.

    Returns:
        How many seconds it has played; 0 if it was killed.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.interruptions"])  # It imports for all.
    begun = len(notes.texts("begun"))
    args = (store.kind, store.url, notes.path, turns, strategy)
    process = processes.Process(target=work, args=args)
    process.start()
    if seconds is not None:
        while len(notes.texts("begun")) == begun and process.is_alive():
            time.sleep(0.002)
        process.join(seconds)
        process.kill()
    process.join()

    if process.exitcode == 0:
        return float(notes.texts("ended")[-1]) - float(notes.texts("begun")[-1])
    is_killed = seconds is not None and process.exitcode == -9
    notes.add("interrupted" if is_killed else "lost_turns", str(process.exitcode))
    return 0.0
