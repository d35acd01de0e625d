"""`contextguard report`: what its page says, also of recordings with bad intent."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import json
import pickle
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import Session
from google.genai import types

from contextguard_adk import (
    CallRecord,
    CompactionRecord,
    ContextGuardPlugin,
    Threshold,
)
from contextguard_adk._tools.cli import main
from contextguard_adk._tools.recordings import SessionKey, load_session
from contextguard_adk.config import CONFIG_VARIABLE
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import Chat, call_part, guarded_agent, model, queued_tool
from tests.chats import some_slow
from tests.recordings import CALLS, PRICES, WINDOW, record, save
from tests.stores import own_database

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028`${1}"
GUARD = Threshold(context_window=WINDOW)
Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


def write_page(session: Session, folder: Path, *arguments: str) -> str:
    """Has the command write the page about a session; returns it."""
    source = save(session, folder)
    page = folder / "page.html"
    assert main(["report", str(source), "-o", str(page), *arguments]) == 0
    return page.read_text("utf-8")


def read_raw_data(page: str) -> str:
    """The text of the JSON in a page."""
    return page.partition('id="data">')[2].partition("</script>")[0]


def read_data(page: str) -> dict[str, Any]:
    """What the charts of a page show."""
    data: dict[str, Any] = json.loads(read_raw_data(page), parse_constant=pytest.fail)
    return data


@pytest.fixture(scope="module")
def guarded() -> tuple[Session, list[CallRecord]]:
    """A session with a guard, and the guard's records."""
    records: list[CallRecord] = []
    guard = ContextGuardPlugin(default=GUARD, on_call=records.append)
    return asyncio.run(record([guard], has_cache=True))[0], records


def test_the_page_tells_what_the_guard_did(
    guarded: tuple[Session, list[CallRecord]], tmp_path: Path, capsys: Output
) -> None:
    """Calls, window, tokens, money and each compaction are those of the recording."""
    session, records = guarded
    for event in session.events:
        if event.usage_metadata:
            event.model_version = "simulated"
    config = tmp_path / "guard.toml"
    config.write_text(PRICES)
    page = write_page(session, tmp_path, "--config", str(config))
    data = read_data(page)

    compactions = [record.compaction for record in records if record.compaction]
    assert len(compactions) >= 2
    counts = f"model calls: {CALLS}, compactions: {len(compactions)}"
    assert counts in capsys.readouterr().out
    check_calls(data, records)
    check_money(data, compactions)
    check_growth(data)
    cards = page.split("<article")[1:]
    check_cards(cards, compactions)
    stored = session.state["__context_guard_summary_agent"]
    assert stored in html.unescape(cards[-1])
    check_kinds(data)
    assert "The agents never called <code>recall_history</code>" in page


def check_calls(data: dict[str, Any], records: list[CallRecord]) -> None:
    """Tokens, window and compactions are those of the records."""
    assert data["prompt"] == [record.real_tokens for record in records]
    assert data["cached"] == [record.usage.cached_tokens for record in records]
    assert data["output"] == [record.usage.output_tokens for record in records]
    assert data["compactions"] == [record.compaction is not None for record in records]
    assert {*data["window"]} == {WINDOW}
    assert {*data["threshold"]} == {0.8 * WINDOW}


def check_money(data: dict[str, Any], compactions: list[CompactionRecord]) -> None:
    """Calls and summaries cost what their tokens do."""
    used = [done.usage for done in compactions]
    summaries = [usage.prompt_tokens + usage.output_tokens for usage in used]
    assert [tokens for tokens in data["summaries"] if tokens] == summaries

    uncached = sum(data["uncached"]) + sum(
        usage.prompt_tokens - usage.cached_tokens for usage in used
    )
    cached = sum(data["cached"]) + sum(usage.cached_tokens for usage in used)
    output = sum(data["output"]) + sum(usage.output_tokens for usage in used)
    dollars = (uncached + 0.25 * cached + 4 * output) / 1e6
    assert data["money"][-1] == pytest.approx(dollars)
    assert data["isGuarded"]


def check_growth(data: dict[str, Any]) -> None:
    """Without a guard, requests would have grown on from the first compaction."""
    first = data["compactions"].index(True)
    assert data["other"][:first] == data["prompt"][:first]
    pairs = list(zip(data["other"], data["prompt"], strict=True))
    assert all(without > sent for without, sent in pairs[first:])


def check_cards(cards: list[str], compactions: list[CompactionRecord]) -> None:
    """Each compaction has a card with its sizes and what was left out."""
    assert len(cards) == len(compactions)
    for card, done in zip(cards, compactions, strict=True):
        for words in (
            f"<dd>{done.tokens_before:,} → {done.tokens_after:,}</dd>",
            f"<dd>{done.contents_before} → {done.contents_after}</dd>",
            "<dd>Threshold</dd>",
            "result of search, ",
            "The summary, ",
        ):
            assert words in card


def check_kinds(data: dict[str, Any]) -> None:
    """Each request is made of what was counted, and of summaries from then on."""
    first = data["compactions"].index(True)
    made = data["kinds"]
    sums = [sum(tokens) for tokens in zip(*made.values(), strict=True)]
    assert sums == pytest.approx(data["prompt"], abs=len(made))
    assert [bool(tokens) for tokens in made["the summary"]] == [
        number >= first for number in range(CALLS)
    ]
    assert sum(made["results of search"]) > sum(made["tool calls"]) > 0


IDS = [f"inv-{number * 7919}" for number in range(60)]


async def pay() -> Session:
    """Pays two invoices from a list that was left out, then one that recall names."""
    script: list[Reply] = [call_part("search"), "Found.", *["Noted."] * 8]
    script += [call_part("pay", id=IDS[0]), call_part("pay", id=IDS[31]), "Paid."]
    script += [call_part("recall_history", query=IDS[31]), "Here it is."]
    script += [call_part("pay", id=IDS[31]), "Paid again."]
    llm = SimulatedLlm(context_window=8_000, script=script)
    llm.summary_replies = ["The user wants invoices to be paid. All were found."] * 9
    tools = [queued_tool("search", [{"rows": IDS}]), queued_tool("pay", ["Done."] * 3)]
    guard = Threshold(context_window=8_000, preview_tokens=None)
    chat = Chat(guarded_agent(llm, tools), [ContextGuardPlugin(default=guard)])
    for text in ("Find them.", *["Note this. " + "And so on. " * 500] * 8):
        await chat.say(text)
    for text in ("Pay two.", "Which?", "Pay it again."):
        await chat.say(text)
    return await chat.session()


def test_the_page_tells_what_was_needed_later_and_what_recall_brought_back(
    tmp_path: Path,
) -> None:
    """Of what a compaction left out, what later requests had and what they had not."""
    page = write_page(asyncio.run(pay()), tmp_path, "--context-window", "8000")
    card = page.partition("<article")[2].partition("</article")[0]
    _, _, needed = card.partition("Of that, needed later")
    assert IDS[0] in needed
    assert IDS[31] in needed
    recalled = page.partition("What recall brought back")[2].partition("</section")[0]
    assert "agent asked <code>" in recalled
    assert f"<li>{IDS[31]}</li>" in recalled


def test_what_calls_needed_is_left_out_where_they_needed_nothing(
    guarded: tuple[Session, list[CallRecord]], tmp_path: Path
) -> None:
    """A page about calls that took no value from the conversation has no figure."""
    session = guarded[0]
    page = write_page(session, tmp_path)
    need = "of 5 values that the calls took from the conversation were in the requests."
    assert f"<strong>Need:</strong> 100.0% {need}" in page

    start = session.model_copy(update={"events": session.events[:2]})
    assert "<strong>Need" not in write_page(start, tmp_path)


def test_without_a_guard_the_page_shows_a_simulation(tmp_path: Path) -> None:
    """What the replay finds stands beside what was recorded, and is labelled."""
    session, _ = asyncio.run(record())
    page = write_page(session, tmp_path, "--context-window", str(WINDOW))
    data = read_data(page)
    assert not data["isGuarded"]
    assert max(data["prompt"]) > WINDOW >= max(data["other"])
    assert not any(data["summaries"])

    cards = page.split("<article")[1:]
    assert len(cards) == sum(data["compactions"]) >= 2

    for card in cards:
        assert "(simulated)</h3>" in card
        assert "What it took out: " in card
        assert "What the summary says" not in card

    assert "compactions are a simulation" in page


def test_what_a_session_says_cannot_act(
    guarded: tuple[Session, list[CallRecord]], tmp_path: Path
) -> None:
    """Markup in ids, texts, tools, summaries and metadata is shown as it stands."""
    session = guarded[0].model_copy(deep=True)
    session.id = session.app_name = session.user_id = EVIL
    asked = types.ModelContent([call_part(EVIL, path=EVIL), types.Part(text=EVIL)])

    for event in session.events:
        event.model_version = event.model_version and EVIL
        if "__context_guard_summary_agent" in event.actions.state_delta:
            event.actions.state_delta["__context_guard_summary_agent"] = EVIL
        note = (event.custom_metadata or {}).get("context_guard")
        if note:
            fields = ("strategy", "reason", "model", "mechanical", "tokens_before")
            note["compaction"].update(dict.fromkeys(fields, EVIL), usage=EVIL)

    usage = session.events[-1].usage_metadata
    session.events.append(Event(author="agent", content=asked, usage_metadata=usage))
    page = write_page(session, tmp_path)

    assert page.count("<script") == page.count("</script>") == 3
    assert "<img" not in page
    assert "\u2028" not in read_raw_data(page)
    assert page.count(html.escape(EVIL)) > 5
    assert read_data(page)["facts"][-1]["tools called"] == EVIL

    # The policy names our scripts and style by what is in them, and nothing else.
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    texts = re.findall(r"(?s)<script>(.*?)</script>", page)
    texts += re.findall(r"(?s)<style>(.*?)</style>", page)
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    names = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    assert policy[1] == (
        f"default-src 'none'; script-src {names[0]} {names[1]}; style-src {names[2]}; "
        "base-uri 'none'; form-action 'none'"
    )

    assert "http://" not in re.sub(r"(?s)<script.*?</script>", "", page)
    assert "sourceMappingURL" not in page


STRANGE = [10**400, float("nan"), -5, "\ud800", [{}]]
COUNTS = "promptTokenCount", "candidatesTokenCount", "cachedContentTokenCount"
OF_COMPACTION = ("tokens_before", "cost", "waited_seconds", "reason", "model")


@pytest.mark.quick("10000000")
@pytest.mark.parametrize(
    "value", some_slow(STRANGE, -5, [{}]), ids=lambda value: ascii(value)[:8]
)
def test_strange_values_make_no_crash(
    tmp_path: Path, capsys: Output, value: Any
) -> None:
    """Wherever they stand; the page is written, or one line says why not."""
    source = tmp_path / "session.json"
    page = tmp_path / "page.html"
    facts: dict[str, Any] = dict.fromkeys((*OF_COMPACTION, "contents_after"), value)
    places = ("text", "author", "branch", "timestamp", "state", *COUNTS)
    rows = [(place, found) for place in places for found in (facts, {})]

    for place, found in (*rows, ("", {"usage": {"prompt_tokens": value}})):
        event: dict[str, Any] = {
            "author": "agent",
            "content": model("Hi.").model_dump(mode="json", exclude_none=True),
            "usageMetadata": {"promptTokenCount": 50},
            "customMetadata": {"context_guard": {"compaction": found, "window": value}},
        }
        if place == "text":
            event["content"]["parts"][0]["text"] = value
        elif place == "state":
            keys = ("__context_guard_summary_agent", "__context_guard_record_agent")
            event["actions"] = {"stateDelta": dict.fromkeys(keys, value)}
        elif place in COUNTS:
            event["usageMetadata"][place] = value
        elif place:
            event[place] = value

        source.write_text(json.dumps({"events": [event]}))
        code = main(["report", str(source), "-o", str(page)])
        error = capsys.readouterr().err
        assert code == 0 or (code == 2 and error.count("\n") == 1)
        if code == 0:
            assert read_data(page.read_text("utf-8"))


class Evil:
    """What is called where its pickle is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("disguise", ["", "actions TO ACTIONS", "version"])
def test_no_pickle_in_a_file_is_read(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, disguise: str
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

    said = "old.db has events in the format of ADK before 1.22, pickles,"
    for command in ("replay", "report"):
        for source in ("old.db", "sqlite:///old.db"):
            assert main([command, source]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert said in line
            assert line.endswith("give it as sqlite+aiosqlite:///old.db")
    assert not trace.exists()


DISGUISES = {
    "view": """ALTER TABLE events RENAME TO real;
        CREATE VIEW events AS SELECT * FROM real WHERE 'a' REGEXP 'a';""",
    "trigger": """CREATE TRIGGER t AFTER INSERT ON events BEGIN SELECT 1; END;""",
    "virtual": """ALTER TABLE events RENAME TO real;
        CREATE VIRTUAL TABLE events USING fts5(id, actions);""",
    "computed": """ALTER TABLE events DROP COLUMN actions;
        ALTER TABLE events ADD COLUMN actions AS (x'80044e2e');""",
}


@pytest.mark.parametrize("script", DISGUISES.values(), ids=DISGUISES)
def test_a_file_that_is_more_than_tables_is_refused(
    tmp_path: Path, capsys: Output, script: str
) -> None:
    """What it is decides, and no query, which fails or not as the file wants."""
    path = tmp_path / "old.db"
    trace = tmp_path / "executed"
    write_old_file(path, pickle.dumps(Evil(trace)))
    with closing(sqlite3.connect(path)) as connection:
        connection.create_function("regexp", 2, lambda *_: True)
        connection.executescript(script)
        connection.commit()

    for command in ("replay", "report"):
        assert main([command, str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "is no plain table" in line

    assert not trace.exists()


async def test_pickles_that_are_trusted_are_read(tmp_path: Path) -> None:
    """By the URL of the same file."""
    actions = EventActions(state_delta={"colour": "green"})
    write_old_file(tmp_path / "old.db", pickle.dumps(actions))
    url = f"sqlite+aiosqlite:///{tmp_path / 'old.db'}"
    (event,) = (await load_session(url, SessionKey())).events
    assert event.actions.state_delta == {"colour": "green"}


def write_old_file(path: Path, pickled: bytes) -> None:
    """Writes a session of one event, as `DatabaseSessionService` did before 1.22."""
    from google.adk.sessions.schemas import v0
    from sqlalchemy import create_engine

    engine = create_engine(f"sqlite:///{path}")
    v0.Base.metadata.create_all(engine)
    engine.dispose()
    now = "2026-01-02 03:04:05.000000"
    place = {"app_name": "app", "user_id": "user"}
    session = {"id": "s", "state": "{}", "create_time": now, "update_time": now}
    event = {"id": "e", "session_id": "s", "invocation_id": "i", "author": "agent"}
    with closing(sqlite3.connect(path)) as connection:
        for table, row in (
            ("sessions", place | session),
            ("events", place | event | {"actions": pickled, "timestamp": now}),
        ):
            names = ", ".join(row)
            marks = ", ".join("?" * len(row))
            statement = f"INSERT INTO {table} ({names}) VALUES ({marks})"
            connection.execute(statement, [*row.values()])
        connection.commit()


def test_a_list_shows_the_newest_and_names_do_not_act(
    tmp_path: Path, capsys: Output
) -> None:
    """A hundred lines are enough for people, JSON has all."""

    async def write() -> str:
        async with own_database("file", tmp_path) as store, store.open() as service:
            for number, app in (0, "a"), (101, "\x1b[2J[/bold]\u202e[red]\x9b0m"):
                name = f"s{number}"
                await service.create_session(app_name=app, user_id="u", session_id=name)
        return str(store.url)

    source = asyncio.run(write())
    with closing(sqlite3.connect(source)) as connection:
        found = connection.execute("SELECT * FROM sessions ORDER BY update_time")
        names = [column for column, *_ in found.description]
        first = dict(zip(names, found.fetchone(), strict=True))
        copies = [first | {"id": f"s{number}"} for number in range(1, 101)]
        marks = ", ".join(f":{name}" for name in names)
        connection.executemany(f"INSERT INTO sessions VALUES ({marks})", copies)
        connection.commit()
    assert main(["replay", source, "--list"]) == 0
    head, _, *rows, more, _ = capsys.readouterr().out.splitlines()
    assert head == "Sessions: 102; times in UTC"
    assert len(rows) == 100
    assert rows[0].split()[0] == "?[2J[/bold]?[red]?0m"
    assert rows[0].split()[2] == "s101"
    assert more.startswith("... 2 older ones")
    assert main(["replay", source]) == 2
    assert "\x1b" not in capsys.readouterr().err
