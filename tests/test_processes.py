"""Correctness needs session state alone: processes take turns, and die in between."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.adk.flows.llm_flows import contents as adk_contents
from google.adk.sessions import Session

from tests.process_worker import APP, POINTS, SESSION, USER, WINDOW
from tests.test_databases import Store, check_state, own_database, store_marks

SCRIPT = Path(__file__).with_name("process_worker.py")
TURN_SECONDS = 60
"""After this a worker counts as stuck."""

SETTLES_CALLS = hasattr(adk_contents, "drop_orphaned_function_calls")
"""Whether ADK leaves out calls that a process did not live to answer."""


class Process:
    """A worker process, spoken to line by line.

    Args:
        errors: A file for what it writes to standard error.
        arguments: Its command line.
    """

    def __init__(self, errors: Path, *arguments: str) -> None:
        self.errors = errors
        with errors.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
            )

    def write(self, value: object) -> None:
        """Sends a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(value)}\n")
        self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """Receives a line."""
        assert self._process.stdout is not None
        timer = threading.Timer(TURN_SECONDS, self._process.terminate)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        assert line, self.errors.read_text()[-3_000:]
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Lets it end."""
        self._process.communicate()


@dataclass
class Scene:
    """One session, and a log of the requests that a provider got for it."""

    store: Store
    log: Path

    def requests(self) -> list[dict[str, Any]]:
        """The requests, oldest first."""
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def turns(self, *numbers: int) -> list[dict[str, str]]:
        """What a worker is told to do for these questions."""
        place = {"url": self.store.url, "log": str(self.log)}
        return [{**place, "message": write_message(number)} for number in numbers]

    async def load(self) -> Session:
        """The session as the database has it."""
        async with self.store.open() as service:
            session = await service.get_session(
                app_name=APP, user_id=USER, session_id=SESSION
            )
        assert session is not None
        return session


@pytest.fixture
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    """A database of the kind that the test is parametrised with."""
    async with own_database(request.param, tmp_path) as store:
        yield Scene(store, tmp_path / "requests.jsonl")


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A process that makes others."""
    process = Process(tmp_path_factory.mktemp("nursery") / "errors.txt", "--breed")
    yield process
    process.close()


def run_process(
    nursery: Process, turns: Sequence[Mapping[str, str]], *arguments: str
) -> tuple[list[str], int]:
    """Runs turns in a process of their own; returns the answers and the exit code."""
    nursery.write({"arguments": arguments, "turns": turns})
    answers = []
    while "answer" in (line := nursery.read()):
        answers.append(line["answer"])
    return answers, line["code"]


def write_message(number: int) -> str:
    """Asks for two things that were not asked for before."""
    return f"Question {number}, please. Look up: {number}a {number}b."


def expected_answer(number: int) -> str:
    """What the model answers once it has seen both."""
    return f"Found all of {number}a {number}b."


def stored_facts(session: Session) -> set[str]:
    """The facts that tools have returned and the database has."""
    facts: set[str] = set()
    for event in session.events:
        for response in event.get_function_responses():
            facts.update(re.findall(r"fact-\w+", json.dumps(response.response)))
    return facts


def check_requests(requests: list[dict[str, Any]]) -> None:
    """The provider took every request, and none forgot what an earlier one knew."""
    known: set[str] = set()
    for request in requests:
        assert request["rejected"] is None
        if not request["is_summary"]:
            assert request["tokens"] <= WINDOW
            assert known <= set(request["facts"])
            known = set(request["facts"])


def count_summaries(requests: list[dict[str, Any]]) -> int:
    """How many summaries were written."""
    return sum(request["is_summary"] for request in requests)


def count_compactions(session: Session) -> int:
    """How many summaries reached the database."""
    deltas = (event.actions.state_delta for event in session.events)
    return sum("__context_guard_summary_agent" in delta for delta in deltas)


@pytest.mark.parametrize(
    "scene",
    [
        "sqlite",
        pytest.param("postgres", marks=[pytest.mark.slow, pytest.mark.postgres]),
    ],
    indirect=True,
)
async def test_two_processes_take_turns(scene: Scene, tmp_path: Path) -> None:
    """Each finds the other's summaries in session state and pays for none twice."""
    processes = [Process(tmp_path / f"errors-{number}.txt") for number in range(2)]
    try:
        for number in range(12):
            process = processes[number % 2]
            process.write(*scene.turns(number))
            assert process.read() == {"answer": expected_answer(number)}
    finally:
        for process in processes:
            process.close()
    session = await scene.load()
    requests = scene.requests()
    check_requests(requests)
    check_state(session.state)
    assert count_summaries(requests) == count_compactions(session) >= 2
    assert set(requests[-1]["facts"]) == stored_facts(session)
    assert len(stored_facts(session)) == 24


KILLS = (
    *(("sqlite", point, 1) for point in POINTS),
    ("sqlite", "after the guard", 0),
    ("sqlite", "result stored", 2),
    ("postgres", "after the guard", 1),
    ("postgres", "after the model", 1),
    ("postgres", "result stored", 1),
)
"""The database, where the process dies, and after how many summaries."""

POINTS_BY_DEFAULT = (
    "summary written",
    "after the guard",
    "call stored",
    "result stored",
)
"""The others differ from one of these in nothing that is stored."""

DEFAULT_KILLS = [("sqlite", point, 1) for point in POINTS_BY_DEFAULT]


@pytest.mark.parametrize(
    ("scene", "point", "after_summaries"),
    [
        pytest.param(
            *kill,
            id="-".join(map(str, kill)),
            marks=[
                *store_marks(kill[0]),
                *([] if kill in DEFAULT_KILLS else [pytest.mark.slow]),
            ],
        )
        for kill in KILLS
    ],
    indirect=["scene"],
)
async def test_a_killed_process_costs_at_most_one_summary(
    scene: Scene, nursery: Process, point: str, after_summaries: int
) -> None:
    """Wherever a process dies, the next one goes on with all that was stored."""
    if not SETTLES_CALLS and point == "after the run":
        pytest.skip("this ADK does not tell when a run ends")
    answers, code = run_process(
        nursery,
        scene.turns(*range(10)),
        *("--kill-at", point, "--after-summaries", str(after_summaries)),
    )
    assert code == -signal.SIGKILL, nursery.errors.read_text()[-3_000:]
    left = await scene.load()
    if not SETTLES_CALLS and left.events[-1].get_function_calls():
        pytest.skip("this ADK sends calls that were never answered")
    before = scene.requests()
    goes_on = range(len(answers), len(answers) + 5)
    answers, code = run_process(nursery, scene.turns(*goes_on))
    assert code == 0, nursery.errors.read_text()[-3_000:]
    assert answers == [expected_answer(number) for number in goes_on]
    session = await scene.load()
    requests = scene.requests()
    check_requests(requests)
    check_state(session.state)
    first = next(r for r in requests[len(before) :] if not r["is_summary"])
    assert stored_facts(left) <= set(first["facts"])
    assert set(requests[-1]["facts"]) == stored_facts(session)
    lost = count_summaries(requests) - count_compactions(session)
    assert 0 <= lost <= 1
