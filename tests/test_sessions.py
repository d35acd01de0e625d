"""`contextguard sessions`, and the same as functions, on sessions of a database."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.adk.apps.app import EventsCompactionConfig
from google.adk.apps.llm_event_summarizer import LlmEventSummarizer
from google.adk.artifacts import FileArtifactService
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions import BaseSessionService, InMemorySessionService, Session
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Threshold, pin, sessions
from contextguard_adk._tools.cli import main
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests.builders import (
    SUMMARY_BEGIN,
    Chat,
    answer_text,
    call_part,
    guarded_agent,
    user,
)
from tests.chats import (
    KEY,
    SUMMARY,
    Changing,
    agent_requests,
    begin_as_user,
    text_of,
)

WINDOW = 6_000
TOLD = "Shelves were counted: summary-1."
RULE = "Rule 1: count every shelf twice."
Output = pytest.CaptureFixture[str]


def rules() -> str:
    """Returns the rules."""
    return RULE


def look(shelf: int) -> str:
    """Tells what stands on a shelf."""
    count = 120 if shelf < 50 else 8
    return f"Shelf {shelf}: " + f"crate {shelf} for Lisbon, " * count


def make_llm() -> SimulatedLlm:
    """A model that reads the rules at first, and then looks once in each turn."""

    def script(request: LlmRequest) -> Reply:
        *_, part = request.contents[-1].parts or []
        if part.function_response:
            return "Counted."
        asked = str(part.text).partition(".")[0].split()
        return (
            call("look", shelf=int(asked[-1])) if asked[-1].isdigit() else call("rules")
        )

    return SimulatedLlm(
        context_window=WINDOW, script=script, summary_replies=lambda _: TOLD
    )


def make_chat(
    llm: SimulatedLlm, service: BaseSessionService, is_guarded: bool = True, **app: Any
) -> Chat:
    """A process that has just started, with a guard or without one."""
    strategy = Threshold(context_window=WINDOW, keep_tools=("rules",), keep=0.1)
    plugins = app.pop("plugins", [])
    plugins += [ContextGuardPlugin(default=strategy)] if is_guarded else []
    agent = guarded_agent(llm, [rules, look])
    return Chat(agent, plugins, session_service=service, **app)


async def ask(chat: Chat, numbers: range) -> None:
    """Asks for shelves, each in a turn."""
    for number in numbers:
        events = await chat.say(f"Count shelf {number}. {'Take your time. ' * 8}")
        assert answer_text(events) == "Counted."


async def fill(path: Path) -> None:
    """Plays a session in which something is summarized, and writes it to a file."""
    llm = make_llm()
    chat = make_chat(llm, InMemorySessionService())
    delta: dict[str, Any] = {"todos": [{"content": "Count shelf 99"}]}
    pin(delta, "Never open a crate.")
    await chat.set_state(delta)
    await chat.say("Read the rules.")
    await ask(chat, range(12))
    assert llm.summaries >= 1
    assert llm.rejections == 0
    service = SqliteSessionService(str(path))
    session = await Chat(chat.app.root_agent, session_service=service).session()
    for event in await chat.events():
        await service.append_event(session, event)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file as `adk web` writes it, made once in a process."""
    path = tmp_path_factory.mktemp("sessions") / "session.db"
    asyncio.run(fill(path))
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    """A copy of that file."""
    return Path(shutil.copy(template, tmp_path))


async def load(path: Path) -> tuple[BaseSessionService, Session]:
    """Opens the only session of a file."""
    service = SqliteSessionService(str(path))
    place: Any = {"app_name": "app", "user_id": "user", "session_id": "session"}
    session = await service.get_session(**place)
    assert session is not None
    return service, session


@pytest.mark.parametrize("way", ["no plugin", "ADK's compaction", "the guard"])
async def test_a_session_goes_on_after_leave(path: Path, way: str) -> None:
    """For seven turns without a rejection, the summary's text in the request."""
    service, session = await load(path)
    said = await sessions.leave(service, session)
    assert "events give way to the summary of agent" in said

    llm = make_llm()
    app = dict[str, Any]()
    if way == "ADK's compaction":
        # Of its own summaries it makes what a model has said first.
        app["plugins"] = [Changing(begin_as_user)]
        app["events_compaction_config"] = EventsCompactionConfig(
            summarizer=LlmEventSummarizer(llm),
            compaction_interval=4,
            overlap_size=1,
        )
    chat = make_chat(llm, SqliteSessionService(str(path)), way == "the guard", **app)

    left = {k for k, v in (await chat.state()).items() if v is not None}
    assert left == {"todos", *(key for key in left if "pin" in key)}
    await ask(chat, range(50, 57))
    assert (llm.rejections, llm.violations) == (0, 0)
    assert llm.summaries == 0 or way == "ADK's compaction"

    requests = agent_requests(llm)
    assert len(requests) == 14
    for text in (TOLD, RULE, "Never open a crate.", "Count shelf 99", "Count shelf 0."):
        assert text in requests[0].text
    assert "recall_history" not in requests[0].text
    assert all("summary-1" in request.text for request in requests)
    # Nothing of what the summary covers is there a second time.
    assert "Shelf 0: crate" not in requests[0].text
    assert "Shelf 11: crate" in requests[0].text


def test_the_commands_close_what_they_open(
    path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ADK's own service leaves open in the file."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def note(*args: Any, **settings: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **settings)
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith("contextguard_adk"):
            opened.append(connection)
        return connection

    monkeypatch.setattr(sqlite3, "connect", note)
    assert main(["sessions", "show", str(path)]) == 0
    assert main(["replay", str(path)]) == 0
    assert len(opened) > 2
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
            connection.execute("SELECT 1")


def change(path: Path, capsys: Output, *words: str) -> str:
    """Changes the session by the command; one event was added."""
    with closing(sqlite3.connect(path)) as file:
        query = "SELECT COUNT(*) FROM events"
        [[before]] = file.execute(query).fetchall()
        code = main(["sessions", *words[:1], str(path), *words[1:]])
        [[after]] = file.execute(query).fetchall()
    done = capsys.readouterr()
    assert after - before == (code == 0 and words[0] != "show")
    return done.out or done.err


async def go_on(path: Path, is_guarded: bool = True) -> SimulatedLlm:
    """Has another process go on for a turn; returns the model."""
    llm = make_llm()
    await ask(
        make_chat(llm, SqliteSessionService(str(path)), is_guarded), range(90, 91)
    )
    assert (llm.rejections, llm.violations) == (0, 0)
    return llm


def test_show_lists_what_is_stored(path: Path, capsys: Output) -> None:
    """Of each agent, in one line; the text of the summary where it is asked for."""
    line = change(path, capsys, "show")
    assert re.fullmatch(
        r"agent: [\d,]+ of 6,000 tokens, \d+ %; \d+ messages summarized in "
        rf"{len(TOLD)} characters; 1 pins, 1 todos\n",
        line,
    )
    assert change(path, capsys, "show", "--full").startswith(f"{line}{TOLD}\n\n")
    assert "nothing is stored" in change(path, capsys, "show", "--agent", "other")


def test_the_same_texts_stand_everywhere(path: Path, capsys: Output) -> None:
    """In the request, in session state, and in what two commands show of them."""
    line = change(path, capsys, "show")
    shown = change(path, capsys, "show", "--full").removeprefix(line).strip()
    service = SqliteSessionService(str(path))
    session = asyncio.run(
        service.get_session(app_name="app", user_id="user", session_id="session")
    )
    assert session is not None
    record = json.loads(session.state[KEY.format("record")])
    beside = record["summary"]["beside"]
    assert len(beside) >= 4
    assert sorted(shown.split("\n\n")) == sorted([TOLD, *beside.values()])

    words = "Count shelf 0."
    assert words in shown
    assert main(["why", str(path), words, "--json", "--context-window", "6000"]) == 0
    [*_, last] = json.loads(capsys.readouterr().out)["calls"]
    assert "the user's messages beside the summary" in last["holders"]

    told = asyncio.run(go_on(path)).requests[0].text
    assert f"{SUMMARY_BEGIN}\n{shown}\n[End of summary" in told


def test_compact_is_for_the_next_model_call(path: Path, capsys: Output) -> None:
    """It is told what the summary should keep."""
    said = change(path, capsys, "compact", "--agent", "agent", "--focus", "lemons")
    assert said == (
        "Session 'session' of user 'user': the next model call of agent compacts.\n"
    )
    llm = asyncio.run(go_on(path))
    assert llm.requests[0].is_summary
    assert "lemons" in llm.requests[0].text


def test_reset_starts_from_the_whole_history(path: Path, capsys: Output) -> None:
    """The summary is not used any more; what is too long is compacted anew."""
    said = change(path, capsys, "reset")
    assert "the summary of agent is gone; the next call has all messages" in said
    assert "no summary; 1 pins, 1 todos" in change(path, capsys, "show")

    llm = asyncio.run(go_on(path))
    [summary] = [each for each in llm.requests if each.is_summary]
    assert "Count shelf 0." in summary.text
    assert TOLD not in summary.text

    again = change(path, capsys, "reset", "--agent", "other")
    assert "nothing is changed: there is no summary of other" in again


@pytest.mark.parametrize("is_editor", [False, True])
def test_an_edited_summary_is_what_the_next_request_holds(
    path: Path, tmp_path: Path, capsys: Output, monkeypatch: Any, is_editor: bool
) -> None:
    """From a file or the editor; what stands beside it stays."""
    new = tmp_path / "new.md"
    new.write_text("Corrected: shelf 3 is empty.\n")
    words = ["edit"] if is_editor else ["edit", "--text", str(new)]
    if is_editor:
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setenv("VISUAL", f"cp {new}")
    said = change(path, capsys, *words)
    assert f"the summary of agent has 28 characters, it had {len(TOLD)}" in said

    llm = asyncio.run(go_on(path))
    assert llm.summaries == 0
    [request, *_] = agent_requests(llm)
    begin = f"{SUMMARY_BEGIN}\nCorrected: shelf 3 is empty.\n\n[Pinned"
    assert text_of(request.contents[0]).startswith(begin)
    assert "Count shelf 0." in request.text
    assert "[pending] Count shelf 99" in request.text
    assert TOLD not in request.text
    assert "1 to 262,144 characters" in change(
        path, capsys, "edit", "--text", os.devnull
    )


def test_leave_by_the_command(path: Path, capsys: Output) -> None:
    """It says how many events give way; there is nothing to leave a second time."""
    said = change(path, capsys, "leave")
    assert re.search(r"\d+ events give way to the summary of agent, as ADK's own", said)
    again = change(path, capsys, "leave")
    assert "there is no summary of any agent" in again
    # What is sent without a guard is the same, so the second line has the same figure.
    remaining = re.compile(r"about [\d,]+ tokens of messages remain")
    assert remaining.findall(said) == remaining.findall(again) != []
    assert "nothing is stored" in change(path, capsys, "show")
    assert TOLD in asyncio.run(go_on(path, is_guarded=False)).requests[0].text


async def test_a_session_at_work_is_left_alone(path: Path) -> None:
    """A message without an answer is a run, unless it is old or one knows better."""
    service, session = await load(path)
    asked = Event(author="user", content=user("And now?"))
    await service.append_event(session, asked)
    for act in (sessions.compact, sessions.reset, sessions.leave):
        with pytest.raises(sessions.SessionError, match="a run seems to be under way"):
            await act(service, session)

    asked.timestamp -= 700
    assert "compacts" in await sessions.compact(service, session)

    asked.timestamp += 700
    assert "is gone" in await sessions.reset(service, session, force=True)


async def test_leave_splits_no_call_from_its_result(path: Path) -> None:
    """A call that waits stays, and all that came after it."""
    service, session = await load(path)
    place = next(
        i for i, e in enumerate(session.events) if "shelf 1." in str(e.content)
    )
    waiting = Event(
        author="agent",
        content=types.ModelContent(call_part("look", "late", shelf=7)),
        long_running_tool_ids={"late"},
        timestamp=session.events[place].timestamp - 1e-6,
    )
    session.events.insert(place, waiting)
    said = await sessions.leave(service, session)

    assert f" {place:,} events give way" in said


async def test_leave_says_why_no_event_can_go(path: Path) -> None:
    """The first call waits for its result, or the messages are not there any more."""
    service, session = await load(path)
    waiting = Event(
        author="agent",
        content=types.ModelContent(call_part("look", "late", shelf=7)),
        long_running_tool_ids={"late"},
        timestamp=session.events[0].timestamp - 1,
    )
    session.events.insert(0, waiting)
    with pytest.raises(sessions.SessionError, match="waits for its result"):
        await sessions.leave(service, session, force=True)

    session.events.clear()
    with pytest.raises(sessions.SessionError, match="are gone"):
        await sessions.leave(service, session, force=True)


async def test_leave_knows_calls_whose_ids_come_again(path: Path) -> None:
    """Some servers number the calls of each turn anew."""
    service, session = await load(path)
    said = await sessions.leave(service, session)
    _, again = await load(path)
    again.events = [each for each in again.events if not each.actions.compaction]
    for event in again.events:
        for part in (event.content and event.content.parts) or ():
            for tool in (part.function_call, part.function_response):
                if tool:
                    tool.id = "call_0"

    again.state.update(session.state)
    other = InMemorySessionService()
    named = await other.create_session(
        app_name="app", user_id="user", session_id="session", state=session.state
    )
    for event in again.events:
        await other.append_event(named, event)

    # The texts may differ: some releases of ADK show such calls in another way.
    removed, _, _ = (await sessions.leave(other, named)).partition(";")
    assert said.startswith(removed)


async def test_what_was_written_before_an_edit_is_dropped(path: Path) -> None:
    """A summary that waits for its trigger would bring the mistake back."""
    llm = make_llm()
    service = SqliteSessionService(str(path))
    strategy = Threshold(context_window=WINDOW, ahead=0.1)
    guard = ContextGuardPlugin(default=strategy)
    chat = Chat(guarded_agent(llm, [rules, look]), [guard], session_service=service)
    await ask(chat, range(50, 53))
    await asyncio.sleep(0.01)
    count = llm.summaries
    assert count

    await sessions.edit(service, await chat.session(), "Corrected.")
    llm.summary_replies = lambda request: f"Known: {'Corrected.' in str(request)}"
    await chat.set_state({"context_guard:compact": True})
    await ask(chat, range(53, 54))
    assert llm.summaries == count + 1
    assert (await chat.state())[SUMMARY].startswith("Known: True")


async def test_state_of_a_later_release_is_not_changed(path: Path) -> None:
    """The command of that release knows what it means."""
    service, session = await load(path)
    key = KEY.format("record")
    session.state[key] = session.state[key].replace('"version":2', '"version":3')
    for act in (sessions.reset, sessions.leave):
        with pytest.raises(sessions.SessionError, match="a later release"):
            await act(service, session)


async def test_leave_names_the_summaries_that_stay(path: Path) -> None:
    """An agent in a branch has no message that ADK could replace for it alone."""
    service, session = await load(path)
    of_branch = {
        key.replace("_agent", "_agent@branch"): value
        for key, value in session.state.items()
        if key.startswith("__context_guard_")
    }
    actions = EventActions(state_delta=of_branch)
    await service.append_event(session, Event(author="app", actions=actions))

    said = await sessions.leave(service, session)
    assert "; the summary of agent@branch stays stored, for a guard." in said
    left = [key for key, value in session.state.items() if value is not None]
    assert "__context_guard_record_agent@branch" in left
    assert "__context_guard_record_agent" not in left


async def test_of_several_agents_all_have_a_text(path: Path) -> None:
    """For a change of one it has to be named."""
    service, session = await load(path)
    record = json.loads(session.state[KEY.format("record")])
    record["summary"]["last_event"] = session.events[9].id
    session.state["__context_guard_record_other"] = json.dumps(record)
    session.state["__context_guard_summary_other"] = "Other: summary-2."
    with pytest.raises(sessions.SessionError, match="agent, other: name one agent"):
        await sessions.edit(service, session, "New.")
    await sessions.leave(service, session)
    request = (await go_on(path, is_guarded=False)).requests[0]

    assert TOLD in request.text
    assert "Other: summary-2." in request.text


async def test_purge_deletes_the_artifacts_of_a_session(
    tmp_path: Path, capsys: Output
) -> None:
    """ADK deletes none with its session; those of the app and of others stay."""
    service = FileArtifactService(root_dir=tmp_path)
    place: Any = {"app_name": "app", "user_id": "user"}
    part = types.Part.from_bytes(data=b"text", mime_type="text/markdown")
    names = ["compaction-a.md", "compaction-b.md", "notes.md"]
    for session_id, name in itertools.product(("one", "two"), names):
        here = {**place, "session_id": session_id, "filename": name}
        await service.save_artifact(**here, artifact=part)
    assert await sessions.purge(service, **place, session_id="one") == 2
    assert await service.list_artifact_keys(**place, session_id="one") == ["notes.md"]
    words = ["purge", tmp_path.as_uri(), "--app=app", "--user=user"]

    async def run(words: list[str]) -> int:
        return await asyncio.to_thread(main, words)

    assert await run(["sessions", *words, "--session=two"]) == 0
    assert capsys.readouterr().out == "Session 'two': 2 artifacts are deleted.\n"
    assert await service.list_artifact_keys(**place, session_id="two") == ["notes.md"]
    assert await run(["sessions", *words]) == 2
    assert "give an artifact service as SESSION" in capsys.readouterr().err


def test_of_several_sessions_one_has_to_be_named(path: Path, capsys: Output) -> None:
    """Another user may have one of the same id."""
    service = SqliteSessionService(str(path))
    place: Any = {"app_name": "app", "user_id": "bob", "session_id": "session"}
    asyncio.run(service.create_session(**place))
    assert "which session?" in change(path, capsys, "reset", "--session=session")
    assert "is gone" in change(path, capsys, "reset", "--user=user")


def test_what_is_no_database_is_said_in_one_line(
    tmp_path: Path, capsys: Output
) -> None:
    """An export is only shown."""
    path = tmp_path / "session.json"
    path.write_text('{"events": []}')
    assert main(["sessions", "compact", str(path)]) == 2
    assert "sessions: error: nothing is changed: " in capsys.readouterr().err
