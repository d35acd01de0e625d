"""The command line: `contextguard replay` on real recordings, and on what is none."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.adk.events.event import Event
from google.adk.models.registry import LLMRegistry
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import BaseSessionService, DatabaseSessionService, Session
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.genai import types
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from contextguard_adk import CallRecord, ContextGuardPlugin, Threshold
from contextguard_adk.config import CONFIG_VARIABLE, PluginSettings
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.tools.cli import main
from contextguard_adk.tools.recordings import SessionKey, fit_counts, load_session
from contextguard_adk.tools.replay import ReplaySettings, replay_session
from contextguard_adk.tools.terminal import CommandError
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


async def record(plugins: Sequence[BasePlugin] = ()) -> tuple[Session, SimulatedLlm]:
    """Has a real conversation with two searches a turn; returns its session."""
    script: list[Reply] = []
    for turn in range(TURNS):
        script += [call_part("search")] * 2
        script.append(f"Part {turn} is in hall B, says the scanner.")
    llm = SimulatedLlm(model="simulated", context_window=100_000, script=script)
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


# --- What it finds ----------------------------------------------------------------


def test_every_recorded_call_is_replayed(
    recorded: tuple[Session, SimulatedLlm],
    export: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the provider's count, an estimate near it, and what would have been sent."""
    _, llm = recorded
    found = replay_json(capsys, export)
    calls = found["calls"]
    assert [item["real_tokens"] for item in calls] == [
        request.prompt_tokens for request in llm.requests
    ]
    assert [item["contents"] for item in calls] == [
        len(request.contents) for request in llm.requests
    ]
    assert found["accuracy"]["calls"] == CALLS - 1
    assert found["accuracy"]["median_error_ratio"] < 0.03
    assert found["accuracy"]["misses"] == 0
    assert found["fixed_tokens"]["agent"] == pytest.approx(
        len(INSTRUCTION) / 4 + 20, rel=0.4
    )
    compacted = [item for item in calls if item["compaction"]]
    assert found["compactions"] == len(compacted) >= 2
    for item in compacted:
        assert item["compaction"]["tokens_before"] >= item["threshold_tokens"] == 3_200
        assert item["sent_tokens"] < item["threshold_tokens"]
        assert item["sent_contents"] < item["contents"]
    assert all(item["sent_tokens"] <= WINDOW for item in calls)
    assert found["over_window_without_guard"] > 0 == found["over_window_with_guard"]
    assert (
        found["saved_tokens"]
        == found["tokens_without_guard"]
        - found["tokens_with_guard"]
        - found["summary_tokens"]
        > 0
    )
    first = next(item["number"] for item in compacted)
    for item in calls[: first - 1]:
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
    recorded: tuple[Session, SimulatedLlm],
    guarded: tuple[Session, list[CallRecord]],
) -> None:
    """Nearly on the same calls: instruction and tools are inferred, and summaries have
    another length. The recording stays as it is."""
    session, _ = recorded
    before = session.model_dump_json()
    replayed = await replay_session(session, GUARD)
    assert session.model_dump_json() == before
    real = [n for n, item in enumerate(guarded[1], 1) if item.compaction]
    found = [item.number for item in replayed.calls if item.compaction]
    assert abs(found[0] - real[0]) <= 1
    assert abs(found[1] - real[1]) <= 3
    sent = [item.sent_tokens for item in replayed.calls[: min(found[1], real[1]) - 1]]
    counted = [item.real_tokens or 0 for item in guarded[1][: len(sent)]]
    assert sent == pytest.approx(counted, abs=400)  # A summary.


async def test_a_guarded_recording_is_not_compared_after_its_compaction(
    guarded: tuple[Session, list[CallRecord]],
) -> None:
    """What was counted then is not the whole history; the replay still runs."""
    session, records = guarded
    first = next(n for n, item in enumerate(records, 1) if item.compaction)
    replayed = await replay_session(session, GUARD)
    found = replayed.to_json()
    assert found["uncompared_calls"] == CALLS - first + 1
    calls = replayed.calls
    compared = [item.real_tokens for item in calls[: first - 1]]
    assert compared == [item.real_tokens for item in records[: first - 1]]
    assert calls[-1].whole_tokens > 1.5 * calls[first - 2].whole_tokens
    assert found["compactions"] >= 2


@pytest.mark.parametrize("form", ["snake case", "web UI", "events only"])
async def test_any_export_gives_the_same_session(
    recorded: tuple[Session, SimulatedLlm], tmp_path: Path, form: str
) -> None:
    """However it was written, with what only the web page knows, or only the events."""
    session, _ = recorded
    raw = json.loads(session.model_dump_json(by_alias=form == "web UI"))
    path = tmp_path / "session.json"
    if form == "events only":
        raw = {"events": raw["events"]}
    path.write_text(json.dumps({**raw, "selected": True}))
    loaded = await load_session(str(path), SessionKey())
    assert loaded.events == session.events
    if form != "events only":
        assert (loaded.id, loaded.state) == (session.id, session.state)


def test_it_prints_calls_and_sums(
    export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row for each call, then accuracy, overflows and tokens; no other output."""
    assert main(["replay", str(export), "--window", str(WINDOW)]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    rows = [line.split() for line in output.out.splitlines()]
    assert rows[0] == [
        *("call", "contents", "estimate", "real"),
        *("error", "pressure", "sent", "compaction"),
    ]
    assert [row[0] for row in rows[1 : CALLS + 1]] == [
        str(number) for number in range(1, CALLS + 1)
    ]
    assert "tokens: " in output.out
    assert "Accuracy from the second call on: median error" in output.out
    assert f"0 of {CALLS - 1} estimates more than 10% too low" in output.out
    assert ") saved." in output.out


def test_no_number_is_cut_on_a_narrow_terminal(
    export: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a compaction did takes several lines; every number stays whole."""
    calls = replay_json(capsys, export)["calls"]
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["replay", str(export), "--window", str(WINDOW)]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed
    for each in calls:
        assert f"{each['estimated_tokens']:,}" in printed
        assert f"{each['real_tokens']:,}" in printed


def test_a_long_table_is_shortened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ends are shown; `--all` shows it whole."""
    events = [answered(model("In hall B."), "scout", 300 + n) for n in range(60)]
    session = Session(id="s", app_name="app", user_id="user", events=events)
    session.events.insert(0, Event(author="user", content=user("Where?")))
    path = tmp_path / "long.json"
    path.write_text(session.model_dump_json())
    main(["replay", str(path)])
    short = capsys.readouterr().out
    main(["replay", str(path), "--all"])
    whole = capsys.readouterr().out
    assert (short.count("..."), whole.count("...")) == (1, 0)
    assert len(whole.splitlines()) - len(short.splitlines()) == 60 - 2 * 5 - 1


# --- Agents, models, settings -----------------------------------------------------


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
    asked = Event(author="user", content=user("Where is it?"), invocation_id="one")
    found = Event(author="scout", content=response("look"), invocation_id="one")
    return Session(
        id="s",
        app_name="app",
        user_id="user",
        events=[
            asked,
            answered(call("look"), "scout", 300),
            found,
            # Some streams give text and calls as two events of one response.
            answered(model("It is in"), "scout", 320, partial=True),
            answered(model("In hall B."), "scout", 320),
            answered(model("In hall B."), "scout", 320),
            answered(model("Fetch it there."), "writer", 500, model_version="gpt-4o"),
        ],
    )


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
    exempt = PluginSettings(agents={"writer": None})
    last = (await replay_session(two_agents(), ReplaySettings(exempt))).calls[-1]
    assert (last.estimated_tokens, last.window_tokens, last.pressure) == (None,) * 3
    assert (last.real_tokens, last.sent_tokens) == (500, 500)


async def test_an_agent_of_one_turn_is_recognised() -> None:
    """A recording does not say `include_contents`; counts that do not grow do."""
    llm = SimulatedLlm(context_window=100_000)
    chat = Chat(guarded_agent(llm, include_contents="none"))
    for turn in range(12):
        await chat.say(f"Tell me of machine {turn}. " * (10 + turn * 5 % 7))
    session = await chat.sessions.get_session(**PLACE)
    assert session is not None
    replayed = await replay_session(session, ReplaySettings())
    assert [c.contents for c in replayed.calls] == [1] * 12
    assert [c.real_tokens for c in replayed.calls] == [
        request.prompt_tokens for request in llm.requests
    ]


def test_the_table_names_agents_where_there_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And shows a dash for what is unknown."""
    path = tmp_path / "two.json"
    path.write_text(two_agents().model_dump_json())
    config = tmp_path / "guard.toml"
    config.write_text('[agents]\nwriter = "none"\n')
    assert main(["replay", str(path), "--config", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-1] == "agent"
    number, _, *cells = lines[3].split()
    assert number == "3"
    assert cells == ["-", "500", "-", "-", "500", "writer"]


async def test_a_named_model_decides_the_window() -> None:
    """Whatever the recording names."""
    settings = ReplaySettings(model="gemini-2.5-flash")
    replayed = await replay_session(two_agents(), settings)
    assert {c.window_tokens for c in replayed.calls} == {1_048_576}


async def test_no_model_is_asked(
    recorded: tuple[Session, SimulatedLlm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A summariser that the settings name is played offline like any other."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(LLMRegistry, "new_llm", staticmethod(refuse))
    strategy = Threshold(context_window=WINDOW, summarizer="gemini-2.5-flash")
    settings = ReplaySettings(PluginSettings(default=strategy))
    replayed = await replay_session(recorded[0], settings)
    compactions = [c.compaction for c in replayed.calls if c.compaction]
    assert len(compactions) >= 2
    assert not any(compaction.is_mechanical for compaction in compactions)


@pytest.mark.parametrize(
    ("pairs", "tokens"),
    [
        pytest.param([], 0, id="nothing"),
        pytest.param([(100, 400)], 300, id="one call"),
        pytest.param([(100, 90)], 0, id="lighter than bytes / 4"),
        pytest.param([(h, h + 500) for h in range(100, 2_000, 300)], 500, id="line"),
        pytest.param([(h, 2 * h + 600) for h in range(9, 999, 90)], 300, id="weight"),
        pytest.param([(1_000, 1_300), (1_001, 1_390)], 344, id="no growth"),
    ],
)
def test_the_fixed_part_is_inferred(pairs: list[tuple[int, int]], tokens: int) -> None:
    """It is where the line of the counts begins, by bytes / 4."""
    assert fit_counts(pairs)[0] == pytest.approx(tokens, abs=1)


# --- Databases --------------------------------------------------------------------


def digest(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def store_in(service: BaseSessionService, session: Session) -> None:
    """Writes a recorded session as a run would have."""
    stored = await service.create_session(**PLACE)
    for event in session.events:
        await service.append_event(stored, event.model_copy(deep=True))


@pytest.fixture(scope="module")
def database(
    recorded: tuple[Session, SimulatedLlm], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The session in a database of `DatabaseSessionService`, without its indexes."""
    path = tmp_path_factory.mktemp("database") / "sessions.db"

    async def fill() -> None:
        service = DatabaseSessionService(f"sqlite+aiosqlite:///{path}")
        await store_in(service, recorded[0])
        await service.db_engine.dispose()

    asyncio.run(fill())
    with closing(sqlite3.connect(path)) as connection:
        names = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
        ).fetchall()
        for (name,) in names:
            connection.execute(f'DROP INDEX "{name}"')  # As an old release left it.
        connection.commit()
    return path


def test_a_database_is_read_and_not_written(
    database: Path, export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ADK's service would add what an old database lacks; here nothing changes."""
    before = digest(database)
    url = f"sqlite+aiosqlite:///{database}"
    found = replay_json(capsys, url, *OF_SESSION)
    assert digest(database) == before
    real = [item["real_tokens"] for item in found["calls"]]
    assert real == [
        item["real_tokens"] for item in replay_json(capsys, export)["calls"]
    ]


@pytest.mark.parametrize("form", ["{}", "sqlite:///{}"])
async def test_the_file_of_adk_web_is_read_and_not_written(
    recorded: tuple[Session, SimulatedLlm], tmp_path: Path, form: str
) -> None:
    """It has tables of its own; a path or ADK's form of a URL names it."""
    path = tmp_path / "session.db"
    await store_in(SqliteSessionService(str(path)), recorded[0])
    before = digest(path)
    key = SessionKey("app", "user", "session")
    session = await load_session(form.format(path), key)
    assert len([e for e in session.events if e.usage_metadata]) == CALLS
    assert digest(path) == before
    assert [item.name for item in tmp_path.iterdir()] == ["session.db"]


def test_a_database_needs_to_know_the_session(
    database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is missing or not there is named."""
    url = f"sqlite+aiosqlite:///{database}"
    assert "needs --app, --user, --session" in fail(capsys, url)
    assert "needs --session" in fail(capsys, url, *OF_SESSION[:4])
    line = fail(capsys, url, *OF_SESSION[:4], "--session", "other")
    assert "there is no session 'other' of user 'user' and app 'app'" in line


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
    before = digest(path)
    fail(capsys, form.format(path), *OF_SESSION)
    assert digest(path) == before


@pytest.mark.postgres
async def test_a_server_is_read_and_not_written(
    recorded: tuple[Session, SimulatedLlm], tmp_path: Path
) -> None:
    """Nor does it get an index that an older release did not make."""
    async with own_database("postgres", tmp_path) as store:
        async with store.open() as service:
            await store_in(service, recorded[0])
        engine = create_async_engine(store.url)
        catalogue = text(
            "SELECT indexname FROM pg_indexes WHERE schemaname = 'public' "
            "AND indexname NOT LIKE '%_pkey' ORDER BY 1"
        )
        async with engine.begin() as connection:
            for name in (await connection.execute(catalogue)).scalars().all():
                await connection.execute(text(f'DROP INDEX "{name}"'))
        session = await load_session(store.url, SessionKey("app", "user", "session"))
        assert len([e for e in session.events if e.usage_metadata]) == CALLS
        async with engine.connect() as connection:
            assert (await connection.execute(catalogue)).scalars().all() == []
        await engine.dispose()
        missing = store.url.rpartition("/")[0] + "/no_such_database"
        with pytest.raises(CommandError, match="no_such_database"):
            await load_session(missing, SessionKey("app", "user", "session"))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+asyncpg://me:hunter2@127.0.0.1:1/none",
        "nonsense://me:hunter2@host/none",
        "://",
    ],
)
def test_an_unusable_url_is_one_line(
    capsys: pytest.CaptureFixture[str], url: str
) -> None:
    """Without the password in it."""
    assert "hunter2" not in fail(capsys, url, *OF_SESSION)


# --- What cannot be replayed ------------------------------------------------------


def two_agents_with(prompt_tokens: int | None) -> str:
    """The export of a session whose first response has another count."""
    dumped = json.loads(two_agents().model_dump_json())
    counts = [event["usage_metadata"] for event in dumped["events"]]
    for usage in filter(None, counts if prompt_tokens is None else counts[:2]):
        usage["prompt_token_count"] = prompt_tokens
    return json.dumps(dumped)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("{broken", "not JSON", id="broken"),
        pytest.param("", "not JSON", id="empty file"),
        pytest.param("[1, 2]", "not an ADK session", id="list"),
        pytest.param('{"messages": []}', "no list of events", id="foreign"),
        pytest.param('{"events": [{"content": 3}]}', "content", id="foreign events"),
        pytest.param('{"events": [7]}', "not an ADK session", id="numbers"),
        pytest.param('{"events": [], "state": 3}', "state", id="foreign state"),
        pytest.param(
            '{"id": "s1", "events": []}', "session 's1' has no model", id="no events"
        ),
        pytest.param(
            two_agents_with(None), "recorded prompt token count", id="no counts"
        ),
        *[
            pytest.param(
                two_agents_with(tokens), f"prompt_token_count is {tokens:,}", id=name
            )
            for name, tokens in (("negative", -5), ("huge", 10**8), ("giant", 10**30))
        ],
        pytest.param(None, "cannot be read", id="missing"),
    ],
)
def test_what_is_no_recording_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    reason: str,
) -> None:
    """With the reason, on stderr, and exit code 2; no request of such a size is made
    up."""
    path = tmp_path / "session.json"
    if text is not None:
        path.write_text(text)
    assert reason in fail(capsys, str(path))


def test_wrong_options_are_one_line(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent that never spoke, a folder, a wrong config, an unusable drawing."""
    assert "of agent 'agnet'" in fail(capsys, str(export), "--agent", "agnet")
    assert "cannot be read" in fail(capsys, str(tmp_path))
    config = tmp_path / "guard.toml"
    config.write_text("[default]\nmax_turn = 3")
    assert "max_turn" in fail(capsys, str(export), "--config", str(config))
    assert ".svg, .png, .pdf" in fail(capsys, str(export), "--plot", "out.txt")
    plot = tmp_path / "none" / "out.svg"
    assert "cannot be written" in fail(capsys, str(export), "--plot", str(plot))


async def test_a_result_without_its_call_is_left_to_adk() -> None:
    """Its older releases refuse to build such a request, newer ones drop the result."""
    session = two_agents()
    del session.events[1]
    session.events[1].content = response("look", call_id="lost")
    try:
        replayed = await replay_session(session, ReplaySettings(agent="scout"))
    except CommandError as error:
        assert "ADK cannot build" in str(error)  # noqa: PT017 - either will do.
    else:
        assert len(replayed.calls) == 1


async def test_a_strange_author_is_one_line() -> None:
    """No agent can have such a name."""
    session = two_agents()
    session.events[-1].author = "a writer!"
    with pytest.raises(CommandError, match="not a name of an agent"):
        await replay_session(session, ReplaySettings())


# --- The drawing ------------------------------------------------------------------


def test_a_plot_is_drawn(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As SVG, with a legend, beside the usual output."""
    plot = tmp_path / "out.svg"
    replay_json(capsys, export, "--plot", str(plot))
    text = plot.read_text()
    assert "<svg" in text
    for label in ("with the guard", "without the guard", "threshold", "compaction"):
        assert f"<!-- {label} -->" in text


def test_a_plot_without_matplotlib_is_one_line(
    export: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the extra, before any work is done."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "matplotlib" else find(name, *more),
    )
    line = fail(capsys, str(export), "--plot", "out.svg")
    assert "pip install 'contextguard-adk[plot]'" in line
