"""`--all-sessions` of `replay` and `report`: every session of a database, by agent."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from google.adk.sessions import Session
from google.adk.sessions.sqlite_session_service import SqliteSessionService

from benchmarks import fleet
from contextguard_adk._tools.cli import main
from contextguard_adk._tools.recordings import SessionKey, load_session
from contextguard_adk._tools.replay import ReplaySettings, replay_session
from tests.stores import own_database, store_marks

MODULE = "contextguard_adk._tools.fleet"
"""What runs the commands; they import it when it is needed."""

WINDOW = 7_000
COUNT = 8
CASES = [
    ("sqlite", False),
    pytest.param("sqlite", True, marks=pytest.mark.slow),
    pytest.param("postgres", False, marks=store_marks("postgres", is_slow=True)),
]
SUMS = "over_window", "compactions", "tokens"


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """To start a process takes longer than its work."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)


class Threads(ThreadPoolExecutor):
    """Does in a thread what is meant for a process."""

    def __init__(self, count: int, context: object) -> None:
        super().__init__(count)


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The commands start no process at all; the case without this has one."""
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", Threads)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield
    sys.modules.pop(MODULE, None)


@pytest.mark.parametrize(("kind", "has_processes"), CASES)
async def test_all_sessions_are_added_up_by_agent(
    kind: str,
    has_processes: bool,
    tmp_path: Path,
    capsys: Any,
    request: pytest.FixtureRequest,
) -> None:
    """As each of them is replayed alone; one that cannot be read is a line."""
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import create_async_engine

    if not has_processes:
        request.getfixturevalue("no_process")
    async with own_database(kind, tmp_path) as store:
        await fleet.fill(store.url, COUNT, 10)
        engine = create_async_engine(store.url)
        async with engine.begin() as connection:
            ask = text("SELECT app_name, user_id, id FROM sessions")
            names = [tuple(row) for row in (await connection.execute(ask)).all()]
            broken = {"id": names[0][2]}
            spoil = 'UPDATE events SET event_data = \'{"actions": "secret"}\' WHERE '
            await connection.execute(text(spoil + "session_id = :id"), broken)
        await engine.dispose()
        arguments = [store.url, "--all-sessions", "--window", str(WINDOW)]
        found = json.loads(await run("replay", *arguments, "--json", capsys=capsys))
        [failed] = found["failed"]
        assert failed["session"] == broken["id"]
        assert "secret" not in failed["failed"]
        rows = {row["session"]: row for row in found["sessions"]}
        assert len(rows) == COUNT - 1
        acted = [row for row in rows.values() if row["compactions"]]
        assert 1 <= len(acted) < COUNT - 1
        settings = ReplaySettings(window_tokens=WINDOW)
        for row in (*acted[:1], next(r for r in rows.values() if r not in acted)):
            key = SessionKey(row["app"], row["user"], row["session"])
            session: Session = await load_session(store.url, key)
            alone = await replay_session(session, settings)
            assert row["calls"] == len(alone.calls)
            assert row["over_window"] == alone.without_guard.over_window
            assert row["over_window_guarded"] == alone.with_guard.over_window
            # From a later call on the guard knows less of how large tokens are.
            assert abs(row["compactions"] - alone.with_guard.compactions) <= 1
            assert row["tokens"] == pytest.approx(alone.without_guard.tokens, rel=0.01)
            guarded = alone.with_guard.tokens
            # It may compact a call earlier or later.
            assert row["tokens_guarded"] == pytest.approx(guarded, rel=0.15)
        *agents, total = found["agents"]
        assert {row["agent"] for row in agents} == {f"agent_{n}" for n in range(5)}
        for name in SUMS:
            assert total[name] == sum(row[name] for row in rows.values())
        assert (total["sessions"], total["app"]) == (COUNT - 1, "all")


async def run(*arguments: str, capsys: Any) -> str:
    """Runs a command beside the loop of the test; returns what it prints."""
    assert await asyncio.to_thread(main, arguments) == 0
    printed: str = capsys.readouterr().out
    return printed


@pytest.mark.usefixtures("no_process")
async def test_the_report_of_all_sessions_is_a_page(
    tmp_path: Path, capsys: Any
) -> None:
    """With the table that is printed; what sessions are called is escaped."""
    path = tmp_path / "sessions.db"
    page = tmp_path / "page.html"

    service = SqliteSessionService(str(path))
    for user in ("ann", "<b>"):
        session = await service.create_session(app_name="app", user_id=user)
        for event in fleet.write_events("agent_1", "gpt-4o", 8, user):
            await service.append_event(session, event)
    for app in ("app", "other"):
        await service.create_session(app_name=app, user_id=f"idle-{app}")

    options = [str(path), "--all-sessions", "--output", str(page), "--app", "app"]
    printed = await run("report", *options, capsys=capsys)
    [line] = [line for line in printed.splitlines() if line.startswith("app  agent_1")]
    assert line.split()[2] == "2"
    assert "user idle-app" in printed
    assert "idle-other" not in printed
    assert "no model response with a recorded prompt token count" in printed

    html = page.read_text("utf-8")
    assert "<td>&lt;b&gt;</td>" in html
    assert "<td>ann</td>" in html
    assert "script-src" not in html


@pytest.mark.parametrize("option", ["--list", "--compare", "--all"])
def test_it_goes_with_no_option_for_one_session(
    option: str, tmp_path: Path, capsys: Any
) -> None:
    """Which is a usage error."""
    assert main(["replay", str(tmp_path), "--all-sessions", option]) == 2
    assert "--all-sessions: no --list" in capsys.readouterr().err
