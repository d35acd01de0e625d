"""The command line on recordings that somebody else has made, with bad intent."""

from __future__ import annotations

import asyncio
import json
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.adk.sessions.schemas import v0
from sqlalchemy import create_engine

from contextguard_adk._tools.cli import main
from contextguard_adk._tools.recordings import SessionKey, load_session
from tests.builders import model
from tests.test_databases import own_database


class Evil:
    """What is called where its pickle is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("command", ["replay", "report"])
@pytest.mark.parametrize("disguise", ["", "actions TO ACTIONS", "version"])
def test_no_pickle_in_a_file_is_read(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    disguise: str,
) -> None:
    """The file is refused, whatever it pretends to be; one line says what to do."""
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "executed"
    write_old_file(tmp_path / "old.db", pickle.dumps(Evil(trace)))
    with closing(sqlite3.connect("old.db")) as connection:
        if disguise == "version":
            connection.execute("ALTER TABLE events ADD COLUMN event_data TEXT")
            connection.execute("CREATE TABLE adk_internal_metadata (key, value)")
            row = "('schema_version', '0')"
            connection.execute(f"INSERT INTO adk_internal_metadata VALUES {row}")
        elif disguise:
            connection.execute(f"ALTER TABLE events RENAME COLUMN {disguise}")
        connection.commit()
    for source in ("old.db", "sqlite:///old.db"):
        assert main([command, source]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "old.db has events in the format of ADK before 1.22, pickles," in line
        assert line.endswith("give it as sqlite+aiosqlite:///old.db")
    assert not trace.exists()


async def test_pickles_that_are_trusted_are_read(tmp_path: Path) -> None:
    """By the URL of the same file."""
    from google.adk.events.event_actions import EventActions

    path = tmp_path / "old.db"
    actions = EventActions(state_delta={"colour": "green"})
    write_old_file(path, pickle.dumps(actions))
    session = await load_session(f"sqlite+aiosqlite:///{path}", SessionKey())
    (event,) = session.events
    assert event.actions.state_delta == {"colour": "green"}


def write_old_file(path: Path, pickled: bytes) -> None:
    """Writes a session of one event, as `DatabaseSessionService` did before 1.22."""
    engine = create_engine(f"sqlite:///{path}")
    v0.Base.metadata.create_all(engine)
    engine.dispose()
    now = "2026-01-02 03:04:05.000000"
    place = {"app_name": "app", "user_id": "user"}
    session = {"id": "s", "state": "{}", "create_time": now, "update_time": now}
    event = {
        "id": "e",
        "session_id": "s",
        "invocation_id": "i",
        "author": "agent",
        "actions": pickled,
        "timestamp": now,
    }
    with closing(sqlite3.connect(path)) as connection:
        for table, row in (("sessions", session), ("events", event)):
            values = {**place, **row}
            names, marks = ", ".join(values), ", ".join("?" * len(values))
            statement = f"INSERT INTO {table} ({names}) VALUES ({marks})"
            connection.execute(statement, [*values.values()])
        connection.commit()


ESCAPES = "\x1b[2J[/bold]\u202e[red]\x9b0m"


def test_names_in_a_list_do_not_act(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Escape sequences are replaced, and Rich's markup is text."""

    async def write() -> str:
        async with own_database("file", tmp_path) as store, store.open() as service:
            await service.create_session(app_name=ESCAPES, user_id="u", session_id="s")
        return str(store.url)

    source = asyncio.run(write())
    assert main(["replay", source, "--list"]) == 0
    assert "?[2J[/bold]?[red]?0m" in capsys.readouterr().out
    assert main(["replay", source]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_a_long_list_shows_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hundred lines are enough for people; JSON has all."""

    async def write() -> str:
        async with own_database("file", tmp_path) as store, store.open() as service:
            for number in range(102):
                name = f"s{number}"
                await service.create_session(app_name="a", user_id="u", session_id=name)
        return str(store.url)

    source = asyncio.run(write())
    assert main(["replay", source, "--list"]) == 0
    head, _, *rows, more, _ = capsys.readouterr().out.splitlines()
    assert head == "Sessions: 102; times in UTC"
    assert len(rows) == 100
    assert rows[0].split()[2] == "s101"
    assert more.startswith("... 2 older ones")
    assert main(["replay", source, "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 102


STRANGE = [10**400, float("nan"), float("-inf"), -5, "12", "\ud800", [{}], True]


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: ascii(value)[:8])
def test_strange_values_make_no_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    """Wherever they stand; the page is written, or one line says why not."""
    names = (
        "tokens_before",
        "cost",
        "waited_seconds",
        "reason",
        "model",
        "contents_after",
    )
    counts = "promptTokenCount", "candidatesTokenCount", "cachedContentTokenCount"
    source, page = tmp_path / "session.json", tmp_path / "page.html"
    compactions: list[dict[str, Any]] = [
        dict.fromkeys(names, value),
        {"usage": {"prompt_tokens": value}},
        {},
    ]
    for facts in compactions:
        for field in ("text", "author", "branch", "timestamp", "state", *counts, ""):
            event: dict[str, Any] = {
                "author": "agent",
                "content": model("Hi.").model_dump(mode="json", exclude_none=True),
                "usageMetadata": {"promptTokenCount": 50},
                "customMetadata": {
                    "context_guard": {"compaction": facts, "window": value}
                },
            }
            if field == "text":
                event["content"]["parts"][0]["text"] = value
            elif field == "state":
                state = dict.fromkeys(("summary_agent", "record_agent"), value)
                prefixed = {f"__context_guard_{k}": v for k, v in state.items()}
                event["actions"] = {"stateDelta": prefixed}
            elif field in counts:
                event["usageMetadata"][field] = value
            elif field:
                event[field] = value
            source.write_text(json.dumps({"events": [event]}))
            code = main(["report", str(source), "-o", str(page)])
            error = capsys.readouterr().err
            assert code == 0 or (code == 2 and error.count("\n") == 1)
            if code == 0:
                data = page.read_text("utf-8").partition('id="data">')[2]
                json.loads(data.partition("</script>")[0], parse_constant=pytest.fail)
