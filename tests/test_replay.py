"""The command line: `contextguard replay` on real recordings, and on what is none."""

from __future__ import annotations

import asyncio
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
from google.adk.sessions import BaseSessionService, Session
from google.genai import types

from contextguard_adk import CallRecord, ContextGuardPlugin, Costs, Threshold
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._tools.cli import main
from contextguard_adk._tools.recordings import SessionKey, list_sessions, load_session
from contextguard_adk._tools.replay import ReplaySettings, replay_session
from contextguard_adk._tools.terminal import CommandError
from contextguard_adk.config import (
    CONFIG_VARIABLE,
    STRATEGIES,
    PluginSettings,
    load_settings,
)
from contextguard_adk.records import Usage
from tests.builders import (
    call,
    model,
    response,
    user,
)
from tests.recordings import (
    CALLS,
    EVENTS,
    INSTRUCTION,
    PRICES,
    WINDOW,
    Recorded,
    record,
    save,
)
from tests.stores import own_database

Output = pytest.CaptureFixture[str]

PLACE: dict[str, Any] = {"app_name": "app", "user_id": "user", "session_id": "session"}


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """An unguarded session, and the model that counted its prompts."""
    return asyncio.run(record())


@pytest.fixture(scope="module")
def with_cache() -> Session:
    """One at a provider with a prompt cache, which a late summary can use."""
    return asyncio.run(record(has_cache=True, turns=8))[0]


@pytest.fixture
def export(recorded: Recorded, tmp_path: Path) -> Path:
    """The export of a session, as `adk run --save_session` writes it."""
    return save(recorded[0], tmp_path)


def begin(session: Session) -> Session:
    """A session's first turns, with a few requests above the window."""
    return session.model_copy(update={"events": session.events[: EVENTS * 2 // 3]})


@pytest.fixture
def short_export(recorded: Recorded, tmp_path: Path) -> Path:
    """The export of the first turns."""
    return save(begin(recorded[0]), tmp_path)


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


def replay(capsys: Output, *arguments: object) -> str:
    """What the command prints."""
    assert main(["replay", *(str(argument) for argument in arguments)]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def fail(capsys: Output, *arguments: object, command: str = "replay") -> str:
    """The one line that a failing command prints, on stderr."""
    assert main([command, *(str(argument) for argument in arguments)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith(f"contextguard {command}: error: ")
    return line


def test_every_recorded_call_is_replayed(
    recorded: Recorded, export: Path, capsys: Output
) -> None:
    """With the provider's count, an estimate near it, and what would have been sent."""
    requests = recorded[1].requests
    found = json.loads(replay(capsys, export, "--window", WINDOW, "--json"))
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
    without = found["without_guard"]
    guarded = found["with_guard"]
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


async def test_a_replay_compacts_where_the_guard_did(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly, and asks no model, also where a summarizer is named; of what a guard
    recorded all is compared, after a compaction by what the guard had measured."""
    monkeypatch.setattr(LLMRegistry, "new_llm", staticmethod(pytest.fail))
    named = Threshold(context_window=WINDOW, summarizer="gemini-flash-latest")
    settings = ReplaySettings(PluginSettings(default=named))

    records: list[CallRecord] = []
    default = Threshold(context_window=WINDOW)
    guard = ContextGuardPlugin(default=default, on_call=records.append)
    guarded, _ = await record([guard])
    before = recorded[0].model_dump_json()

    replayed = await replay_session(recorded[0], settings)
    assert recorded[0].model_dump_json() == before
    real = [n for n, item in enumerate(records, 1) if item.compaction]
    done = [item.compaction for item in replayed.calls if item.compaction]
    assert not any(compaction.is_mechanical for compaction in done)
    compacted = [item.number for item in replayed.calls if item.compaction]
    assert abs(compacted[0] - real[0]) <= 1
    assert abs(compacted[1] - real[1]) <= 3

    found = (await replay_session(guarded, settings)).to_json()
    assert found["uncompared_calls"] == 0
    compared = [item["real_tokens"] for item in found["calls"]]
    assert compared == [item.real_tokens for item in records]
    assert found["with_guard"]["compactions"] >= 2


async def test_any_export_gives_the_same_session(
    recorded: Recorded, tmp_path: Path
) -> None:
    """With what only the web page knows, in its spelling, or only the events."""
    session = recorded[0]
    path = tmp_path / "session.json"
    whole = json.loads(session.model_dump_json(by_alias=True))
    events = json.loads(session.model_dump_json())["events"]
    for exported in ({"events": events}, {**whole, "selected": True}):
        path.write_text(json.dumps(exported))
        loaded = await load_session(str(path), SessionKey())
        assert loaded.events == session.events

    assert (loaded.id, loaded.state) == (session.id, session.state)


def test_it_prints_calls_and_sums(export: Path, capsys: Output) -> None:
    """A row for each call, then accuracy, overflows and tokens."""
    printed = replay(capsys, export, "--window", WINDOW)
    named, headline, without, guarded, _, _, *lines = printed.splitlines()
    about = f"Session 'session' of user 'user', app 'app': {EVENTS} events, "
    assert named.startswith(about)
    assert re.match(r"Requests over the window: \d+ without .* → 0 with it", headline)
    assert (len(without), len(guarded)) == (19 + CALLS, 19 + CALLS)
    assert "\N{MULTIPLICATION X}" in without
    assert "\N{MULTIPLICATION X}" not in guarded

    numbers = [line.split()[:1] for line in lines[:CALLS]]
    assert numbers == [[str(number)] for number in range(1, CALLS + 1)]
    assert f"0 of {CALLS - 1} estimates more than 10% too low" in printed
    assert ") saved." in printed
    assert "The recording reports no cached tokens" in printed


def answered(content: types.Content, author: str, tokens: int, **more: Any) -> Event:
    """A model's response with usage."""
    usage = types.GenerateContentResponseUsageMetadata(prompt_token_count=tokens)
    more |= {"usage_metadata": usage, "invocation_id": "one"}
    return Event(author=author, content=content, **more)


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
        answered(
            model("Fetch it there."), "writer", 500, model_version="command-r-08-2024"
        ),
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

    named = ReplaySettings(model="gemini-flash-latest")
    calls = (await replay_session(two_agents(), named)).calls
    assert {c.window_tokens for c in calls} == {1_048_576}

    exempt = PluginSettings(agents={"writer": None})
    last = (await replay_session(two_agents(), ReplaySettings(exempt))).calls[-1]
    assert (last.estimated_tokens, last.threshold_tokens, last.pressure) == (None,) * 3
    assert last.window_tokens == 128_000
    assert (last.real_tokens, last.sent_tokens) == (500, 500)

    session = two_agents()
    del session.events[:4]  # Its requests have an instruction alone.
    calls = (await replay_session(session, ReplaySettings(agent="scout"))).calls
    assert [(call.contents, call.real_tokens) for call in calls] == [(0, 320)]


@pytest.mark.parametrize(
    ("branch", "owner"), [(None, "scout"), ("root.one", "scout@3953387702f8135b")]
)
async def test_an_empty_summary_shows_that_it_was_guarded(
    branch: str | None, owner: str
) -> None:
    """Messages were only dropped; another branch of the agent has its own summary."""
    session = two_agents()
    for event in session.events[1:3]:
        event.branch = branch
    session.events[0].actions.state_delta[f"__context_guard_summary_{owner}"] = ""
    calls = (await replay_session(session, ReplaySettings())).calls
    assert [c.real_tokens for c in calls] == [None, 320 if branch else None, 500]


INDEXES = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL",
    "postgres": "SELECT indexname FROM pg_indexes WHERE schemaname = 'public' "
    "AND indexname NOT LIKE '%_pkey'",
}


async def drop_indexes(url: str, kind: str) -> Sequence[str]:
    """Leaves a database as an old release made it; returns what was dropped."""
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(url)
    async with engine.begin() as connection:
        names = (await connection.execute(text(INDEXES[kind]))).scalars().all()
        for name in names:
            await connection.execute(text(f'DROP INDEX "{name}"'))
    await engine.dispose()
    return names


Place = tuple[str, str, str]
"""The names of an app, a user and a session."""
PLACES: list[Place] = [("a", "ann", "one"), ("a", "bob", "two"), ("b", "bob", "one")]
EMPTY_PLACE: Place = ("b", "eve", "new")
NEWEST = [
    (SessionKey(), PLACES[2]),
    (SessionKey("a"), PLACES[1]),
    (SessionKey(None, "ann"), PLACES[0]),
    (SessionKey(None, None, "two"), PLACES[1]),
    (SessionKey("b", "bob"), PLACES[2]),
    (SessionKey("a", "ann", "one"), PLACES[0]),
]


@pytest.mark.parametrize(
    "kind", ["file", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
)
async def test_a_database_is_read_and_not_written(
    recorded: Recorded, tmp_path: Path, kind: str
) -> None:
    """The newest session of the given names is taken, none without events; the indexes
    that an old database lacks, and ADK's service would add, are not added."""
    async with own_database(kind, tmp_path) as store:
        async with store.open() as service:
            for number, place in enumerate(PLACES):
                await copy_events(recorded[0].events[:4], service, place, number)
            await copy_events([], service, EMPTY_PLACE, len(PLACES))

        assert kind not in INDEXES or await drop_indexes(store.url, kind)
        before = [path.read_bytes() for path in tmp_path.iterdir()]

        await check_source(store.url)
        if kind == "sqlite":
            await check_source(str(tmp_path / "sessions.db"))

        assert [path.read_bytes() for path in tmp_path.iterdir()] == before
        assert kind not in INDEXES or not await drop_indexes(store.url, kind)


async def copy_events(
    events: list[Event], service: BaseSessionService, place: Place, number: int
) -> None:
    """Makes a session of these events, later with each number."""
    app, user, name = place
    stored = await service.create_session(app_name=app, user_id=user, session_id=name)
    for event in events:
        later = event.timestamp + 1_000 * number
        copied = event.model_copy(deep=True, update={"timestamp": later})
        await service.append_event(stored, copied)


async def check_source(source: str) -> None:
    """All sessions are listed, and the newest of each choice is loaded."""
    listed = await list_sessions(source, SessionKey())
    found = sorted((each.app, each.user, each.session) for each in listed)
    assert found == sorted([*PLACES, EMPTY_PLACE])
    updated = [each.updated for each in listed]
    assert updated == sorted(updated, reverse=True)
    assert {each.events for each in listed if each.session != "new"} == {4}

    for key, wanted in NEWEST:
        session = await load_session(source, key)
        assert (session.app_name, session.user_id, session.id) == wanted
        assert len(session.events) == 4

    missing = "no session of app 'app', session 'other'"
    with pytest.raises(CommandError, match=missing):
        await load_session(source, SessionKey("app", None, "other"))


def test_sessions_are_listed(export: Path, capsys: Output) -> None:
    """As a table, and as JSON; by both commands that read recordings."""
    for command in ("replay", "report"):
        assert main([command, str(export), "--list"]) == 0
        head, titles, row, _ = capsys.readouterr().out.splitlines()
        assert head == "Sessions: 1; times in UTC"
        assert titles.split() == ["app", "user", "session", "updated", "events"]
        assert row.split()[:3] == ["app", "user", "session"]
        assert main([command, str(export), "--list", "--json"]) == 0
        (listed,) = json.loads(capsys.readouterr().out)
        assert (listed["session"], listed["events"]) == ("session", EVENTS)


@pytest.mark.parametrize("form", ["{}", "sqlite:///{}", "sqlite+aiosqlite:///{}"])
def test_a_missing_or_foreign_database_is_one_line(
    tmp_path: Path, capsys: Output, form: str
) -> None:
    """Neither is it made, nor does it get tables of ADK."""
    path = tmp_path / "foreign.db"
    fail(capsys, form.format(path), "--session", "session")
    assert not path.exists()

    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE events (note TEXT)")
        connection.commit()

    before = path.read_bytes()
    fail(capsys, form.format(path), "--session", "session")
    assert path.read_bytes() == before


def two_agents_with(tokens: int | None) -> str:
    """The export of a session whose responses have another count."""
    dumped = json.loads(two_agents().model_dump_json())
    for event in dumped["events"]:
        if event["usage_metadata"]:
            event["usage_metadata"]["prompt_token_count"] = tokens
    return json.dumps(dumped)


STRANGE_AUTHOR = two_agents().model_dump_json().replace('"writer"', '"a writer!"')
NO_RECORDINGS = {
    "not JSON": ("{broken", ""),
    "an ADK session": ("[1, 2]", '{"events": [7]}'),
    "no list of events": ('{"messages": []}',),
    "content": ('{"events": [{"content": 3}]}',),
    "session 's1' has no model": ('{"id": "s1", "events": []}',),
    "recorded prompt token count": (two_agents_with(None), two_agents_with(-5)),
    f"prompt_token_count is {10**30:,}": (two_agents_with(10**30),),
    "not a name of an agent": (STRANGE_AUTHOR,),
}


def test_no_recordings_and_wrong_options_are_one_line(
    export: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason, on stderr, and exit code 2; a URL without its password."""
    folder = export.parent
    for reason, exports in NO_RECORDINGS.items():
        for exported in exports:
            (folder / "no.json").write_text(exported)
            assert reason in fail(capsys, folder / "no.json")

    config = folder / "guard.toml"
    lost = folder / "none" / "out.html"
    short = folder / "short.json"
    short.write_text(two_agents_with(500))
    config.write_text("[default]\nmax_turn = 3")
    for arguments, reason in (
        ((export, "--agent", "agnet"), "of agent 'agnet'"),
        ((folder,), "cannot be read"),
        ((folder / "missing.json",), "cannot be read"),
        ((export, "--config", config), "max_turn"),
        (("postgresql+asyncpg://me:hunter2@127.0.0.1:1/none",), ""),
        (("nonsense://me:hunter2@host/none",), ""),
        (("://",), ""),
    ):
        line = fail(capsys, *arguments)
        assert reason in line
        assert "hunter2" not in line

    line = fail(capsys, short, "--window", 4_000, "-o", lost, command="report")
    assert "out.html: cannot be written: No such file" in line


ROWS = [
    "threshold",
    "sliding_window",
    "pipeline",
    *(f"threshold, trigger {trigger}" for trigger in (0.5, 0.25, 0.1, "auto")),
]


def test_the_cheapest_row_is_marked_and_told(
    short_export: Path, capsys: Output
) -> None:
    """By tokens, weighted, where nobody knows the price; its settings can be loaded."""
    printed = replay(capsys, short_export, "--compare", "--window", WINDOW)
    _, head, *lines = printed.partition("\n\n")[0].splitlines()
    names = [line[2:].partition("  ")[0] for line in lines]
    assert names == ["no guard", *ROWS]

    columns = re.split(r"\s{2,}", head.strip())
    cells = [line.split()[-len(columns) :] for line in lines]
    rows = [dict(zip(columns, row, strict=True)) for row in cells]
    assert {row["cost"] for row in rows} == {"unknown"}
    assert "a tenth of the cached ones" in printed

    over = [int(row["over window"]) for row in rows]
    weighted = [int(row["weighted"].replace(",", "")) for row in rows]
    (best,) = [number for number, line in enumerate(lines) if line.startswith("*")]
    fitting = [number for number, count in enumerate(over) if number and not count]
    assert over[0] > 0
    assert best in fitting
    assert weighted[best] == min(weighted[number] for number in fitting)

    path = short_export.parent / "best.toml"
    path.write_text(printed[printed.index("[default]") :])
    kind, _, trigger = names[best].partition(", trigger ")
    wanted: Any = STRATEGIES[kind](context_window=WINDOW)
    if trigger:
        wanted = wanted.model_copy(update={"trigger": float(trigger)})
    assert load_settings(path).default == wanted


@pytest.mark.parametrize("has_cache", [False, True], ids=["no cache", "cache"])
async def test_a_cache_is_assumed_where_one_was_recorded(
    recorded: Recorded, with_cache: Session, has_cache: bool
) -> None:
    """As large as the recorded one; summaries at the end of the conversation use it."""
    session = with_cache if has_cache else recorded[0]
    usages = [read_usage(event.usage_metadata) for event in session.events]
    # In a larger window, the question has room behind the conversation.
    default = Threshold(context_window=7_500)
    settings = ReplaySettings(PluginSettings(default=default))
    replayed = await replay_session(session, settings)
    cached = replayed.without_guard.usage.cached_tokens
    assert cached == pytest.approx(sum(usages, Usage()).cached_tokens, rel=0.1)

    summaries = [c.compaction.usage for c in replayed.calls if c.compaction]
    assert summaries

    are_served = any(u.cached_tokens > u.prompt_tokens / 2 for u in summaries)
    assert are_served == replayed.has_cache == bool(cached) == has_cache


def test_prices_and_strategies_of_a_file_are_compared(
    with_cache: Session, tmp_path: Path, capsys: Output
) -> None:
    """In money; the file's own settings are one more row."""
    export = save(begin(with_cache), tmp_path)
    config = tmp_path / "guard.toml"
    config.write_text(f"[default]\ncontext_window = {WINDOW}\n{PRICES}")
    found = json.loads(
        replay(capsys, export, "--compare", "--config", config, "--json")
    )

    assert [row["name"] for row in found["rows"]] == [*ROWS, "your settings"]
    costs = Costs(input=1.0, cached_input=0.25, output=4.0)
    for row in (found["without_guard"], *found["rows"]):
        assert row["cost"] == pytest.approx(costs.price(Usage(**row["usage"])))

    default, *_, mine = found["rows"]
    # Equal settings, equal figures.
    assert mine == {**default, "name": "your settings"}
    (best,) = [row for row in found["rows"] if row["is_best"]]
    assert best["cost"] == min(row["cost"] for row in found["rows"])

    config.write_text("\n".join(found["toml"]))
    chosen = load_settings(config).default
    kind, _, trigger = best["name"].partition(", trigger ")
    assert type(chosen) is STRATEGIES[kind]
    assert str(chosen.trigger or "") == trigger


def test_the_settings_of_a_file_are_those_of_all_rows(
    short_export: Path, capsys: Output
) -> None:
    """Of the summarizer too, also in the settings that are told; where the file's own
    are the cheapest there is nothing to change."""
    config = short_export.parent / "guard.toml"
    config.write_text(
        f"[default]\ncontext_window = {WINDOW}\nsummarizer = 'gemini-flash-latest'\n"
        f"summarizer_context_window = 9000\n{PRICES}"
    )
    printed = replay(capsys, short_export, "--compare", "--config", config)
    assert "calls of recall_history are not played" in printed
    assert '"auto" is the usual threshold' in printed
    assert "windows differ" not in printed

    config.write_text(printed[printed.index("[default]") :])
    told = load_settings(config).default
    assert isinstance(told, Threshold)
    chosen = told.context_window, told.summarizer, told.summarizer_context_window
    assert chosen == (WINDOW, "gemini-flash-latest", 9_000)

    cheap = "strategy = 'pipeline'\ntrigger = 0.25\npreview_tokens = 100"
    config.write_text(f"[default]\ncontext_window = {WINDOW}\n{cheap}")
    printed = replay(capsys, short_export, "--compare", "--config", config)
    assert "* your settings  " in printed
    assert "* Your settings: the cheapest" in printed


async def test_a_summarizer_is_paid_by_its_own_price(with_cache: Session) -> None:
    """And reads transcripts: the cache is that of the agent's model."""
    own = Costs(input=2.0, output=2.0)
    prices = {"simulated": Costs(input=0.0, output=0.0), "writer": own}
    default = Threshold(
        context_window=WINDOW, summarizer="writer", summarizer_context_window=8_000
    )
    settings = ReplaySettings(PluginSettings(default=default, prices=prices))
    replayed = await replay_session(with_cache, settings)
    done = [call.compaction for call in replayed.calls if call.compaction]
    assert {item.model for item in done} == {"writer"}

    usage = sum((item.usage for item in done), Usage())
    assert usage.cached_tokens == 0
    assert replayed.with_guard.cost == pytest.approx(own.price(usage))


def test_windows_that_differ_and_what_fits_none_are_told(
    tmp_path: Path, capsys: Output
) -> None:
    """Each request is held against the window of its agent, an exempt one's too; where
    nothing fits no row is marked, and no settings are told."""
    path = tmp_path / "session.json"
    config = tmp_path / "guard.toml"
    path.write_text(two_agents_with(20_000))
    config.write_text("[agents.scout]\ncontext_window = 9_000")

    of_model = "--model", "command-r-08-2024"
    printed = replay(capsys, path, "--compare", *of_model, "--config", config)
    assert "differ, from 9,000 to 128,000 tokens" in printed
    assert "usual threshold" not in printed

    path.write_text(two_agents_with(300_000))
    config.write_text("[default]\nstrategy = 'none'")
    exempt = "--config", config
    for options in (of_model, (*of_model, *exempt), ("--window", 128_000, *exempt)):
        printed = replay(capsys, path, "--compare", *options)
        assert "*" not in printed
        assert "Each of them has requests over the window." in printed
        assert "[default]" not in printed or options != of_model
