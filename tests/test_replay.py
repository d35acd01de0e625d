"""The command line: `contextguard replay` on real recordings, and on what is none."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.adk.events.event import Event
from google.adk.models.registry import LLMRegistry
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import Session
from google.genai import types
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from contextguard_adk import CallRecord, ContextGuardPlugin, Threshold
from contextguard_adk._memory import branch_scope
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._tools.cli import main
from contextguard_adk._tools.recordings import (
    SessionKey,
    list_sessions,
    load_session,
)
from contextguard_adk._tools.replay import ReplaySettings, replay_session
from contextguard_adk._tools.terminal import CommandError
from contextguard_adk.config import CONFIG_VARIABLE, PluginSettings
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import (
    Chat,
    call,
    call_part,
    guarded_agent,
    model,
    queued_tool,
    response,
    user,
)
from tests.test_databases import own_database

WINDOW = 4_000
"""Threshold 3,200 tokens, summaries of 400."""

TURNS = 8
CALLS = 3 * TURNS
FINDINGS = [
    {"rows": [{"id": number * 7919, "hall": "B", "part": f"7f{number}a"}] * 16}
    if number % 2
    else f"The scanner found part 7f{number}a of the old press in hall B. " * 42
    for number in range(7)
]
INSTRUCTION = "You help people find the parts of old machines in many halls. " * 20

PLACE: dict[str, Any] = {"app_name": "app", "user_id": "user", "session_id": "session"}
OF_SESSION = ("--app", "app", "--user", "user", "--session", "session")


async def record(
    plugins: Sequence[BasePlugin] = (), has_cache: bool = False
) -> tuple[Session, SimulatedLlm]:
    """Has a real conversation with two searches a turn; returns its session."""
    script: list[Reply] = []
    for turn in range(TURNS):
        script += [call_part("search")] * 2
        script.append(f"Part {turn} is in hall B, says the scanner.")
    llm = SimulatedLlm(
        model="simulated",
        context_window=100_000,
        script=script,
        prompt_cache=has_cache,
    )
    agent = guarded_agent(
        llm, [queued_tool("search", FINDINGS)], instruction=INSTRUCTION
    )
    chat = Chat(agent, plugins)
    for turn in range(TURNS):
        await chat.say(f"Where is part {turn} of the old press?")
    session = await chat.sessions.get_session(**PLACE)
    assert session is not None
    return session, llm


@pytest.fixture(scope="module")
def recorded() -> tuple[Session, SimulatedLlm]:
    """An unguarded session, and the model that counted its prompts."""
    return asyncio.run(record())


@pytest.fixture
def export(recorded: tuple[Session, SimulatedLlm], tmp_path: Path) -> Path:
    """Its export, as `adk run --save_session` writes it."""
    path = tmp_path / "session.json"
    path.write_text(
        recorded[0].model_dump_json(indent=2, exclude_none=True, by_alias=True)
    )
    return path


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


def replay_json(
    capsys: pytest.CaptureFixture[str], source: object, *arguments: str
) -> dict[str, Any]:
    """What the command prints as JSON, with the small window."""
    options = ("--window", str(WINDOW), "--json")
    assert main(["replay", str(source), *options, *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a failing command prints, on stderr."""
    assert main(["replay", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("contextguard replay: error: ")
    return line


def test_every_recorded_call_is_replayed(
    recorded: tuple[Session, SimulatedLlm],
    export: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the provider's count, an estimate near it, and what would have been sent."""
    requests = recorded[1].requests
    found = replay_json(capsys, export)
    items = found["calls"]
    assert [(item["real_tokens"], item["contents"]) for item in items] == [
        (request.prompt_tokens, len(request.contents)) for request in requests
    ]
    assert found["accuracy"]["calls"] == CALLS - 1
    assert found["accuracy"]["median_error_ratio"] < 0.03
    assert found["accuracy"]["misses"] == 0
    instruction_tokens = len(INSTRUCTION) / 4 + 20
    assert found["fixed_tokens"]["agent"] == pytest.approx(instruction_tokens, rel=0.4)
    compacted = [item for item in items if item["compaction"]]
    without, guarded = found["without_guard"], found["with_guard"]
    assert guarded["compactions"] == len(compacted) >= 2
    for item in compacted:
        assert item["compaction"]["tokens_before"] >= item["threshold_tokens"] == 3_200
        assert item["sent_tokens"] < item["threshold_tokens"]
        assert item["sent_contents"] < item["contents"]
    assert all(item["sent_tokens"] <= WINDOW for item in items)
    assert without["over_window"] > 0 == guarded["over_window"]
    assert without["usage"]["prompt_tokens"] == sum(r.prompt_tokens for r in requests)
    events = recorded[0].events
    answers = [read_usage(event.usage_metadata).output_tokens for event in events]
    assert without["usage"]["output_tokens"] == sum(answers)
    assert found["saved_tokens"] > 0
    for item in items[: compacted[0]["number"] - 1]:
        assert item["sent_tokens"] == item["real_tokens"]


GUARD = ReplaySettings(PluginSettings(default=Threshold(context_window=WINDOW)))


@pytest.fixture(scope="module")
def guarded() -> tuple[Session, list[CallRecord]]:
    """The same session with a guard, and the guard's records."""
    records: list[CallRecord] = []
    guard = ContextGuardPlugin(
        default=Threshold(context_window=WINDOW), on_call=records.append
    )
    return asyncio.run(record([guard]))[0], records


async def test_a_replay_compacts_where_the_guard_did(
    recorded: tuple[Session, SimulatedLlm], guarded: tuple[Session, list[CallRecord]]
) -> None:
    """Nearly: instruction, tools and summaries are inferred; the recording stays."""
    session, _ = recorded
    before = session.model_dump_json()
    replayed = await replay_session(session, GUARD)
    assert session.model_dump_json() == before
    real = [n for n, item in enumerate(guarded[1], 1) if item.compaction]
    found = [item.number for item in replayed.calls if item.compaction]
    assert abs(found[0] - real[0]) <= 1
    assert abs(found[1] - real[1]) <= 3


async def test_a_guarded_recording_is_not_compared_after_its_compaction(
    guarded: tuple[Session, list[CallRecord]],
) -> None:
    """What was counted then is not the whole history; the replay still runs."""
    session, records = guarded
    first = next(n for n, item in enumerate(records, 1) if item.compaction)
    found = (await replay_session(session, GUARD)).to_json()
    assert found["uncompared_calls"] == CALLS - first + 1
    compared = [item["real_tokens"] for item in found["calls"][: first - 1]]
    assert compared == [item.real_tokens for item in records[: first - 1]]
    assert found["with_guard"]["compactions"] >= 2


@pytest.mark.parametrize("is_whole", [True, False], ids=["web UI", "events only"])
async def test_any_export_gives_the_same_session(
    recorded: tuple[Session, SimulatedLlm], tmp_path: Path, is_whole: bool
) -> None:
    """With what only the web page knows, in its spelling, or only the events."""
    session, _ = recorded
    raw = json.loads(session.model_dump_json(by_alias=is_whole))
    path = tmp_path / "session.json"
    path.write_text(
        json.dumps({**raw, "selected": True} if is_whole else {"events": raw["events"]})
    )
    loaded = await load_session(str(path), SessionKey())
    assert loaded.events == session.events
    assert not is_whole or (loaded.id, loaded.state) == (session.id, session.state)


def test_it_prints_calls_and_sums(
    export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row for each call, then accuracy, overflows and tokens; no other output."""
    assert main(["replay", str(export), "--window", str(WINDOW)]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    named, headline, without, guarded, _, _, *lines = output.out.splitlines()
    assert named.startswith("Session 'session' of user 'user', app 'app': 48 events, ")
    assert re.match(r"Requests over the window: \d+ without .* → 0 with it", headline)
    assert (len(without), len(guarded)) == (19 + CALLS, 19 + CALLS)
    assert "\N{MULTIPLICATION X}" in without
    assert "\N{MULTIPLICATION X}" not in guarded
    numbers = [line.split()[:1] for line in lines[:CALLS]]
    assert numbers == [[str(number)] for number in range(1, CALLS + 1)]
    assert f"0 of {CALLS - 1} estimates more than 10% too low" in output.out
    assert ") saved." in output.out
    assert "The recording reports no cached tokens" in output.out


def answered(content: types.Content, author: str, tokens: int, **more: Any) -> Event:
    """A model's response with usage."""
    return Event(
        author=author,
        content=content,
        usage_metadata=types.GenerateContentResponseUsageMetadata(
            prompt_token_count=tokens
        ),
        invocation_id="one",
        **more,
    )


def two_agents() -> Session:
    """A session in which one agent hands over to another."""
    found = model("In hall B.")
    events = [
        Event(author="user", content=user("Where is it?"), invocation_id="one"),
        answered(call("look"), "scout", 300),
        Event(author="scout", content=response("look"), invocation_id="one"),
        # Some streams give text and calls as two events of one response.
        answered(model("It is in"), "scout", 320, partial=True),
        *[answered(found, "scout", 320) for _ in range(2)],
        answered(model("Fetch it there."), "writer", 500, model_version="gpt-4o"),
    ]
    return Session(id="s", app_name="app", user_id="user", events=events)


async def test_agents_are_replayed_each_for_itself() -> None:
    """Each has its history, its window and its strategy; `agent` chooses one."""
    guard = PluginSettings(
        agents={"scout": Threshold(context_window=9_000)}, default=Threshold()
    )
    replayed = await replay_session(two_agents(), ReplaySettings(guard))
    assert [(c.agent, c.real_tokens, c.window_tokens) for c in replayed.calls] == [
        ("scout", 300, 9_000),
        ("scout", 320, 9_000),
        ("writer", 500, 128_000),
    ]
    assert set(replayed.fixed_tokens) == {"scout", "writer"}
    only = await replay_session(two_agents(), ReplaySettings(guard, agent="writer"))
    assert [c.agent for c in only.calls] == ["writer"]
    named = ReplaySettings(model="gemini-2.5-flash")
    calls = (await replay_session(two_agents(), named)).calls
    assert {c.window_tokens for c in calls} == {1_048_576}
    exempt = PluginSettings(agents={"writer": None})
    last = (await replay_session(two_agents(), ReplaySettings(exempt))).calls[-1]
    assert (last.estimated_tokens, last.threshold_tokens, last.pressure) == (None,) * 3
    assert last.window_tokens == 128_000
    assert (last.real_tokens, last.sent_tokens) == (500, 500)


@pytest.mark.parametrize("branch", [None, "root.one"])
async def test_an_empty_summary_shows_that_it_was_guarded(branch: str | None) -> None:
    """Messages were only dropped; another branch of the agent has its own summary."""
    session = two_agents()
    for event in session.events[1:3]:
        event.branch = branch
    owner = f"scout@{branch_scope(session.events[1])}".removesuffix("@")
    session.events[0].actions.state_delta[f"__context_guard_summary_{owner}"] = ""
    calls = (await replay_session(session, ReplaySettings())).calls
    assert [c.real_tokens for c in calls] == [None, 320 if branch else None, 500]


async def test_an_agent_that_sees_no_message_is_replayed() -> None:
    """Its requests have an instruction alone."""
    session = two_agents()
    del session.events[:4]
    calls = (await replay_session(session, ReplaySettings(agent="scout"))).calls
    assert [(call.contents, call.real_tokens) for call in calls] == [(0, 320)]


async def test_no_model_is_asked(
    recorded: tuple[Session, SimulatedLlm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A summarizer that the settings name is played offline like any other."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(LLMRegistry, "new_llm", staticmethod(refuse))
    strategy = Threshold(context_window=WINDOW, summarizer="gemini-2.5-flash")
    settings = ReplaySettings(PluginSettings(default=strategy))
    replayed = await replay_session(recorded[0], settings)
    compactions = [c.compaction for c in replayed.calls if c.compaction]
    assert len(compactions) >= 2
    assert not any(compaction.is_mechanical for compaction in compactions)


INDEXES = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL",
    "postgres": "SELECT indexname FROM pg_indexes WHERE schemaname = 'public' "
    "AND indexname NOT LIKE '%_pkey'",
}


@pytest.mark.parametrize(
    "kind", ["file", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
)
async def test_a_database_is_read_and_not_written(
    recorded: tuple[Session, SimulatedLlm], tmp_path: Path, kind: str
) -> None:
    """ADK's service would add the indexes that an old database lacks."""
    async with own_database(kind, tmp_path) as store:
        async with store.open() as service:
            stored = await service.create_session(**PLACE)
            for event in recorded[0].events:
                await service.append_event(stored, event.model_copy(deep=True))
        if kind in INDEXES:
            assert await drop_indexes(store.url, INDEXES[kind])
        before = read_files(tmp_path)
        session = await load_session(store.url, SessionKey("app", "user", "session"))
        assert len([e for e in session.events if e.usage_metadata]) == CALLS
        missing = "no session of app 'app', session 'other'"
        with pytest.raises(CommandError, match=missing):
            await load_session(store.url, SessionKey("app", None, "other"))
        assert read_files(tmp_path) == before
        if kind in INDEXES:
            assert not await drop_indexes(store.url, INDEXES[kind])


@pytest.mark.parametrize(
    ("kind", "is_file"),
    [
        ("file", False),
        ("sqlite", False),
        ("sqlite", True),
        pytest.param("postgres", False, marks=pytest.mark.postgres),
    ],
)
async def test_the_newest_session_is_taken(
    recorded: tuple[Session, SimulatedLlm], tmp_path: Path, kind: str, is_file: bool
) -> None:
    """Of those with the names that are given; one without events is passed over."""
    async with own_database(kind, tmp_path) as store:
        async with store.open() as service:
            places = [("a", "ann", "one"), ("a", "bob", "two"), ("b", "bob", "one")]
            for number, (app, user, name) in enumerate([*places, ("b", "eve", "new")]):
                stored = await service.create_session(
                    app_name=app, user_id=user, session_id=name
                )
                for event in recorded[0].events[: 4 * (name != "new")]:
                    later = event.timestamp + 1_000 * number
                    copied = event.model_copy(deep=True, update={"timestamp": later})
                    await service.append_event(stored, copied)
        source = str(tmp_path / "sessions.db") if is_file else store.url
        listed = await list_sessions(source, SessionKey())
        found = sorted((each.app, each.user, each.session) for each in listed)
        assert found == sorted([*places, ("b", "eve", "new")])
        assert [each.updated for each in listed] == sorted(
            (each.updated for each in listed), reverse=True
        )
        assert {each.events for each in listed if each.session != "new"} == {4}
        for key, wanted in (
            (SessionKey(), places[2]),
            (SessionKey("a"), places[1]),
            (SessionKey(None, "ann"), places[0]),
            (SessionKey(None, None, "two"), places[1]),
            (SessionKey("b", "bob"), places[2]),
        ):
            session = await load_session(source, key)
            assert (session.app_name, session.user_id, session.id) == wanted
            assert len(session.events) == 4


def test_sessions_are_listed(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a table, and as JSON; by both commands that read recordings."""
    for command in ("replay", "report"):
        assert main([command, str(export), "--list"]) == 0
        head, titles, row, _ = capsys.readouterr().out.splitlines()
        assert head == "Sessions: 1; times in UTC"
        assert titles.split() == ["app", "user", "session", "updated", "events"]
        assert row.split()[:3] == ["app", "user", "session"]
        assert main([command, str(export), "--list", "--json"]) == 0
        (listed,) = json.loads(capsys.readouterr().out)
        assert (listed["session"], listed["events"]) == ("session", 48)


async def drop_indexes(url: str, catalogue: str) -> Sequence[str]:
    """Leaves a database as an old release made it; returns what was dropped."""
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        names = (await connection.execute(text(catalogue))).scalars().all()
        for name in names:
            await connection.execute(text(f'DROP INDEX "{name}"'))
    await engine.dispose()
    return names


def read_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("form", ["{}", "sqlite:///{}", "sqlite+aiosqlite:///{}"])
def test_a_missing_or_foreign_database_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """Neither is it made, nor does it get tables of ADK."""
    path = tmp_path / "foreign.db"
    fail(capsys, form.format(path), *OF_SESSION)
    assert not path.exists()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE events (note TEXT)")
        connection.commit()
    before = path.read_bytes()
    fail(capsys, form.format(path), *OF_SESSION)
    assert path.read_bytes() == before


def two_agents_with(tokens: int | None) -> str:
    """The export of a session whose responses have another count."""
    dumped = json.loads(two_agents().model_dump_json())
    for event in dumped["events"]:
        if event["usage_metadata"]:
            event["usage_metadata"]["prompt_token_count"] = tokens
    return json.dumps(dumped)


NO_RECORDINGS = {
    "broken": ("{broken", "not JSON"),
    "empty file": ("", "not JSON"),
    "list": ("[1, 2]", "not an ADK session"),
    "foreign": ('{"messages": []}', "no list of events"),
    "foreign events": ('{"events": [{"content": 3}]}', "content"),
    "numbers": ('{"events": [7]}', "not an ADK session"),
    "no events": ('{"id": "s1", "events": []}', "session 's1' has no model"),
    "no counts": (two_agents_with(None), "recorded prompt token count"),
    "negative": (two_agents_with(-5), "prompt_token_count is -5"),
    "giant": (two_agents_with(10**30), f"prompt_token_count is {10**30:,}"),
    "strange author": (
        two_agents().model_dump_json().replace('"writer"', '"a writer!"'),
        "not a name of an agent",
    ),
    "missing": (None, "cannot be read"),
}


@pytest.mark.parametrize(("text", "reason"), NO_RECORDINGS.values(), ids=NO_RECORDINGS)
def test_what_is_no_recording_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, reason: str
) -> None:
    """With the reason, on stderr, and exit code 2."""
    path = tmp_path / "session.json"
    if text is not None:
        path.write_text(text)
    assert reason in fail(capsys, str(path))


def test_wrong_options_are_one_line(
    export: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lost agent, a folder, a wrong config, drawing or URL, without its password."""
    config = tmp_path / "guard.toml"
    config.write_text("[default]\nmax_turn = 3")
    plot = str(tmp_path / "none" / "out.svg")
    for arguments, reason in (
        ((export, "--agent", "agnet"), "of agent 'agnet'"),
        ((tmp_path,), "cannot be read"),
        ((export, "--config", config), "max_turn"),
        ((export, "--plot", "out.txt"), ".svg, .png, .pdf"),
        ((export, "--window", 4_000, "--plot", plot), "cannot be written"),
        (("postgresql+asyncpg://me:hunter2@127.0.0.1:1/none", *OF_SESSION), ""),
        (("nonsense://me:hunter2@host/none", *OF_SESSION), ""),
        (("://", *OF_SESSION), ""),
    ):
        line = fail(capsys, *map(str, arguments))
        assert reason in line
        assert "hunter2" not in line
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    line = fail(capsys, str(export), "--plot", "out.svg")
    assert "pip install matplotlib" in line


def test_a_plot_is_drawn(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As SVG, with a legend, beside the usual output."""
    plot = tmp_path / "out.svg"
    replay_json(capsys, export, "--plot", str(plot))
    text = plot.read_text()
    assert "<svg" in text
    for label in ("with the guard", "rejected by the provider", "context window"):
        assert f"<!-- {label} -->" in text
