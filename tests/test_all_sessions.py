"""`contextguard sessions … --all`: changes each session of an app, or says why not."""

from __future__ import annotations

import asyncio
import random
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.artifacts import FileArtifactService
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.runners import Runner
from google.adk.sessions import BaseSessionService, Session
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Threshold, sessions
from contextguard_adk._tools.all_sessions import change_stored, find_sessions
from contextguard_adk._tools.cli import main
from contextguard_adk._tools.recordings import SessionKey
from contextguard_adk.testing import SimulatedLlm
from tests.builders import user
from tests.stores import Store, own_database, store_marks

WINDOW = 3_000
TURN = "Tell me more about shelf {}. " + "And so on. " * 200
Place = tuple[str, str]
"""A user, and the id of a session."""

COMPACTED: Sequence[Place] = (("ann", "one"), ("ann", "two"), ("bob", "one"))
Output = pytest.CaptureFixture[str]


def make_runner(service: BaseSessionService, is_guarded: bool = True) -> Runner:
    """A process that has just started, with a guard or without one."""
    llm = SimulatedLlm(context_window=WINDOW, token_ratio=1.0)
    strategy = Threshold(context_window=WINDOW)
    plugins = [ContextGuardPlugin(default=strategy)] if is_guarded else []
    agent = LlmAgent(name="agent", model=llm, instruction="Help.")
    app = App(name="shop", root_agent=agent, plugins=[*plugins])
    return Runner(app=app, session_service=service)


async def take_turn(runner: Runner, place: Place, number: int) -> None:
    """Takes a turn in a session; the model answers."""
    user_id, session_id = place
    async for event in runner.run_async(
        user_id=user_id,
        session_id=session_id,
        new_message=user(TURN.format(number)),
    ):
        assert event.error_code is None, event.error_message


async def load(service: BaseSessionService, place: Place) -> Session:
    """Loads a session."""
    user_id, session_id = place
    session = await service.get_session(
        app_name="shop", user_id=user_id, session_id=session_id
    )
    assert session is not None
    return session


async def create(
    service: BaseSessionService, places: Sequence[Place], turn_count: int
) -> None:
    """Fills sessions, so that the guard compacts them."""
    runner = make_runner(service)
    for user_id, session_id in places:
        await service.create_session(
            app_name="shop", user_id=user_id, session_id=session_id
        )
        for number in range(turn_count):
            await take_turn(runner, (user_id, session_id), number)


async def create_shop(service: BaseSessionService) -> None:
    """Three compacted sessions, one at work, a new one, and one of another app."""
    await create(service, COMPACTED, 6)
    await create(service, [("bob", "new")], 1)
    asked = Event(author="user", content=user("And now?"))
    await service.append_event(await load(service, ("ann", "two")), asked)
    await service.create_session(app_name="other", user_id="ann", session_id="one")


async def change(source: str, *words: str) -> int:
    """Runs the command in a thread, as it has an event loop of its own."""
    return await asyncio.to_thread(main, ["sessions", words[0], source, *words[1:]])


STORES = [
    pytest.param("file"),
    pytest.param("sqlite"),
    pytest.param("postgres", marks=store_marks("postgres")),
]


@pytest.mark.parametrize("kind", STORES)
async def test_all_sessions_of_an_app_are_left(
    kind: str, tmp_path: Path, capsys: Output
) -> None:
    """One that seems to be at work is named, and left by force; no turn is lost."""
    async with own_database(kind, tmp_path) as store, store.open() as service:
        await create_shop(service)
        assert await change(store.url, "leave", "--all") == 2
        assert "which app? Give --app, one of other, shop" in capsys.readouterr().err

        assert await change(store.url, "leave", "--all", "--app=shop") == 1
        said = capsys.readouterr().out
        lines = said.splitlines()
        assert sum("events give way to the summary of agent" in x for x in lines) == 2
        assert (
            "Session 'two' of user 'ann': skipped: a run seems to be under way: wait, "
            "or force the change." in lines
        )
        assert re.search(
            r"'new' of user 'bob': there is no summary of any agent; about \d+ tokens "
            r"of messages remain\.",
            said,
        )
        assert lines[-2].startswith("4 sessions of app 'shop': ")
        assert "2 changed" in lines[-2]
        assert "1 skipped" in lines[-2]

        words = ("leave", "--all", "--app=shop", "--force")
        assert await change(store.url, *words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "4 sessions of app 'shop': 3 without a summary, 1 changed."

        bare = make_runner(service, is_guarded=False)
        for place in COMPACTED:
            await take_turn(bare, place, 7)


async def test_a_user_s_sessions_are_compacted_and_reset(
    tmp_path: Path, capsys: Output
) -> None:
    """The sessions of others stay as they are."""
    async with own_database("file", tmp_path) as store, store.open() as service:
        await create(service, COMPACTED, 6)
        here = ("--all", "--user=ann")
        assert await change(store.url, "compact", *here, "--focus=shelves") == 0
        states = [(await load(service, place)).state for place in COMPACTED]
        assert [state.get("context_guard:compact_focus") for state in states] == [
            "shelves",
            "shelves",
            None,
        ]

        assert await change(store.url, "reset", *here) == 0
        assert "2 sessions of app 'shop': 2 changed." in capsys.readouterr().out
        states = [(await load(service, place)).state for place in COMPACTED]
        has_summary = [
            bool(each.get("__context_guard_summary_agent")) for each in states
        ]
        assert has_summary == [False, False, True]


async def test_a_session_that_cannot_be_read_does_not_stop_the_others(
    tmp_path: Path, capsys: Output
) -> None:
    """It is named with the kind of the error."""
    async with own_database("file", tmp_path) as store, store.open() as service:
        await create(service, COMPACTED[:2], 6)
        with closing(sqlite3.connect(store.url)) as connection, connection:
            connection.execute(
                "UPDATE events SET event_data = '{' WHERE session_id = 'one'"
            )
        assert await change(store.url, "leave", "--all") == 1
        lines = capsys.readouterr().out.splitlines()
        assert "Session 'one' of user 'ann': skipped: ValidationError: " in lines[0]
        assert "events give way" in lines[1]


async def test_a_session_that_was_deleted_meanwhile_is_named(
    tmp_path: Path, capsys: Output
) -> None:
    """The others are changed all the same."""
    async with own_database("file", tmp_path) as store, store.open() as service:
        await create(service, COMPACTED[:2], 6)
        listed = await find_sessions(store.url, SessionKey())
        await service.delete_session(
            app_name="shop", user_id=listed[0].user, session_id=listed[0].session
        )
        assert await change_stored(service, listed, sessions.leave, force=False) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].endswith("skipped: it was deleted meanwhile.")
        assert "events give way" in lines[1]


async def test_all_saved_summaries_of_a_user_are_deleted(
    tmp_path: Path, capsys: Output
) -> None:
    """An artifact service lists no sessions, so a database does."""
    artifacts = FileArtifactService(root_dir=tmp_path / "artifacts")
    part = types.Part.from_bytes(data=b"text", mime_type="text/markdown")
    async with own_database("file", tmp_path) as store, store.open() as service:
        for user_id, session_id in [*COMPACTED, ("ann", "new")]:
            place: Any = {
                "app_name": "shop",
                "user_id": user_id,
                "session_id": session_id,
            }
            await service.create_session(**place)
            if session_id == "new":
                continue
            await artifacts.save_artifact(
                **place, filename="compaction-agent.md", artifact=part
            )

        uri = artifacts.root_dir.as_uri()
        assert await change(uri, "purge", "--all") == 2
        assert "with --database the database" in capsys.readouterr().err
        words = ("--all", "--user=ann", f"--database={store.url}")
        assert await change(uri, "purge", *words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "Session 'one' of user 'ann': 1 artifact is deleted." in lines
        assert "Session 'new' of user 'ann': there is no saved summary." in lines
        assert lines[-1] == "3 sessions of app 'shop': 2 changed, 1 without a summary."
        kept = [
            await artifacts.list_artifact_keys(
                app_name="shop", user_id=user_id, session_id=session_id
            )
            for user_id, session_id in COMPACTED
        ]
        assert kept == [[], [], ["compaction-agent.md"]]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("leave", "--all", "--session=one"), "--all is for all: give one"),
        (("leave", "--all", "--app=shop"), "there is no session of app 'shop'"),
        (("show", "--all"), "--all is for compact, leave, purge, reset"),
        (("edit", "--all"), "--all is for compact, leave, purge, reset"),
    ],
)
async def test_what_all_cannot_mean_is_refused(
    words: tuple[str, ...], reason: str, tmp_path: Path, capsys: Output
) -> None:
    """In one line; nothing is changed."""
    path = tmp_path / "sessions.db"
    service = SqliteSessionService(str(path))
    await service.create_session(app_name="other", user_id="ann", session_id="one")
    assert await change(str(path), *words) == 2
    assert reason in capsys.readouterr().err


def sets_its_own_time() -> bool:
    """Whether a database of ADK sets the time of a session with each change."""
    from google.adk.sessions.schemas.v1 import StorageSession

    return StorageSession.__table__.c.update_time.onupdate is not None


@pytest.mark.parametrize("kind", STORES[:2])
async def test_a_change_does_not_end_a_turn_that_has_just_begun(
    kind: str, tmp_path: Path
) -> None:
    """A run that has loaded the session before the change can still append to it."""
    if kind == "sqlite" and sets_its_own_time():
        pytest.skip("this ADK sets the time of a session anew")
    async with own_database(kind, tmp_path) as store, store.open() as service:
        await create(service, COMPACTED[:1], 6)
        loaded_by_run = await load(service, COMPACTED[0])

        await sessions.leave(service, await load(service, COMPACTED[0]))

        asked = Event(author="user", content=user("And now?"))
        asked.actions = EventActions(state_delta={"asked": True})
        await service.append_event(loaded_by_run, asked)
        assert (await load(service, COMPACTED[0])).state["asked"]


FLEET = [(f"user-{number % 7}", f"session-{number}") for number in range(50)]


async def work(store: Store, places: Sequence[Place], turn_count: int) -> None:
    """A worker whose users take turns at any time, all at once."""
    chance = random.Random(len(places))

    async def take_turns(runner: Runner, place: Place) -> None:
        for number in range(turn_count):
            await asyncio.sleep(chance.random() / 2)
            await take_turn(runner, place, number)

    async with store.open() as service:
        runner = make_runner(service)
        await asyncio.gather(*(take_turns(runner, place) for place in places))


@pytest.mark.slow
@pytest.mark.postgres
async def test_a_fleet_is_left_while_turns_run(tmp_path: Path, capsys: Output) -> None:
    """Of two workers; no turn is lost, and no session is left behind without a line."""
    async with own_database("postgres", tmp_path) as store, store.open() as service:
        await create(service, FLEET, 5)
        workers = [
            asyncio.create_task(work(store, places, 4))
            for places in (FLEET[::2], FLEET[1::2])
        ]
        for _ in range(2):
            await change(store.url, "leave", "--all")
            lines = capsys.readouterr().out.splitlines()
            for user_id, session_id in FLEET:
                name = f"Session '{session_id}' of user '{user_id}': "
                assert sum(line.startswith(name) for line in lines) == 1
        await asyncio.gather(*workers)

        assert await change(store.url, "leave", "--all", "--force") == 0
        bare = make_runner(service, is_guarded=False)
        for place in FLEET:
            await take_turn(bare, place, 9)
