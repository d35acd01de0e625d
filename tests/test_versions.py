"""Versions of what is stored: older releases and later ones work on one session."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions import BaseSessionService

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk._support.phrases import VALUES
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm, call
from tests import stored_states
from tests.builders import SUMMARY_BEGIN, Chat, answer_text, guarded_agent, model, user
from tests.chats import DEMAND, KEY, agent_requests, seed, words
from tests.guarded import SMALL, WINDOW, guarded_chat
from tests.stores import own_database

RECORD = KEY.format("record")
AHEAD = SMALL.model_copy(update={"ahead": 0.5})
FILES = sorted(stored_states.FOLDER.glob("version-*.json"))
pytestmark = pytest.mark.filterwarnings(
    r"ignore:\w+Agent is deprecated:DeprecationWarning"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
async def test_stored_sessions_go_on_without_a_new_summary(path: Path) -> None:
    """What an earlier release has stored is read, and its summary is used."""
    llm = stored_states.make_llm()
    chat = stored_states.make_chat(path.stem.split("-", 2)[2], llm)
    await stored_states.load(chat, path)
    events = await chat.say("Which shelf comes next?")
    assert answer_text(events) == "Counted."
    assert llm.summaries == llm.rejections == 0

    for request in agent_requests(llm):
        head = request.text.split("[End of summary")[0]
        assert head.startswith(f"{SUMMARY_BEGIN}\n{stored_states.SUMMARY}")
        assert "- Never open a crate." in head
        if "scopes" not in path.stem:
            assert "- Shelf 3 is locked." in head
            assert "- [in_progress] Count shelf 7" in head
        if path.stem.endswith(("plain", "namespaced", "excerpts", "texts")):
            assert "\n- Count shelf 0, please. Take your time." in head
            assert f"{VALUES}\n- " in head


async def compacted(llm: SimulatedLlm) -> Chat:
    """A chat whose history was compacted."""
    chat = guarded_chat(llm)
    await seed(chat, user("The task."), model(words(2_000, "OLD")), state=DEMAND)
    await chat.say("Go on.")
    return chat


async def change_record(chat: Chat, **fields: Any) -> str:
    """Writes a record as a later release might."""
    record = json.loads((await chat.state())[RECORD])
    text = json.dumps(record | fields, separators=(",", ":"))
    await chat.set_state({RECORD: text})
    return text


async def test_fields_of_a_later_release_stay() -> None:
    """Where a process of this one writes the record again."""
    llm = SimulatedLlm(context_window=WINDOW, summary_replies=lambda _: "A summary.")
    chat = await compacted(llm)
    await change_record(chat, later=["a", {"b": 1}])
    await seed(chat, model(words(2_000, "NEW")))
    await chat.set_state(DEMAND)
    await chat.say("Go on.")
    assert llm.summaries == 2

    record = json.loads((await chat.state())[RECORD])
    assert record["later"] == ["a", {"b": 1}]


def guard_keys(state: dict[str, Any]) -> dict[str, Any]:
    """What the guard keeps in session state."""
    return {key: value for key, value in state.items() if "context_guard" in key}


async def grow(chat: Chat, llm: SimulatedLlm) -> list[RecordedRequest]:
    """Plays turns up to three windows; returns what the agent's model was sent."""
    count = len(llm.requests)
    for number in range(12):
        answer = words(900, f"answer-{number}")
        llm.script = [*[""] * len(agent_requests(llm)), answer]
        events = await chat.say(f"Question {number}. {words(60)}")
        assert answer_text(events) == answer
    return llm.requests[count:]


@pytest.mark.parametrize("is_readable", [True, False])
async def test_a_later_record_is_left_as_it_is(
    is_readable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is worked from where it can be read; no call pays, and every one fits."""
    llm = SimulatedLlm(context_window=WINDOW, summary_replies=["A summary."])
    chat = await compacted(llm)
    changes = {"later": 1} if is_readable else {"summary": [1]}
    stored = await change_record(chat, version=3, **changes)
    await chat.set_state(DEMAND)  # For whoever can serve it.
    before = guard_keys(await chat.state())
    assert before[RECORD] == stored

    ahead = guarded_chat(llm, AHEAD, chat={"session_service": chat.sessions})
    requests = await grow(ahead, llm)
    assert guard_keys(await chat.state()) == before
    assert len(requests) == 12

    for number, request in enumerate(requests):
        assert not request.is_summary
        assert request.rejected is None
        assert f"Question {number}." in request.text
        assert ("A summary." in request.text) == is_readable
    assert "answer-10" in requests[-1].text

    what_follows = "is used" if is_readable else "cannot be read"
    said = f"version 3, from a later release, and its summary {what_follows}"
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
        and record.name.startswith("contextguard_adk.state")
    ]
    assert [said in warning for warning in warnings] == [True]


# --- Processes of two releases on one session ---------------------------------------

BEFORE = "33d44f9"
"""The commit before records were kept across releases."""
TURNS = 60
SERVER_WINDOW = 12_000
ROOT = Path(__file__).parent.parent


def make_process(sessions: BaseSessionService) -> tuple[Chat, SimulatedLlm]:
    """A guarded agent of a process that has just started."""

    def look_up(ref: int) -> str:
        """Looks something up."""
        return f"fact-{ref} " + "words " * 300

    def script(request: LlmRequest) -> Reply:
        *_, part = request.contents[-1].parts or []
        if part.function_response:
            return "Found."
        return call("look_up", ref=int(re.findall(r"Find (\d+)", str(part.text))[-1]))

    def summarize(request: LlmRequest) -> str:
        facts = re.findall(r"fact-\d+", request.model_dump_json(include={"contents"}))
        return "Known: " + " ".join(dict.fromkeys(facts))

    llm = SimulatedLlm(
        context_window=SERVER_WINDOW, script=script, summary_replies=summarize
    )
    strategy = Threshold(context_window=WINDOW, summarizer_context_window=SERVER_WINDOW)
    guard = ContextGuardPlugin(default=strategy)
    return Chat(guarded_agent(llm, [look_up]), [guard], session_service=sessions), llm


async def ask(chat: Chat, llm: SimulatedLlm, number: int) -> int:
    """Plays a turn; returns how many summaries it took."""
    count = llm.summaries
    place = len(llm.requests)
    events = await chat.say(f"Find {number}. {'Please. ' * 20}")
    assert answer_text(events) == "Found."

    for request in llm.requests[place:]:
        assert request.rejected is None
        if not request.is_summary:
            assert request.prompt_tokens <= WINDOW
            facts = {int(fact) for fact in re.findall(r"fact-(\d+)", request.text)}
            missing = set(range(number)) - facts
            assert not missing

    return llm.summaries - count


async def serve(url: str) -> None:
    """Plays the turns whose numbers stand on stdin; prints what each has cost."""
    from google.adk.sessions import DatabaseSessionService

    sessions = DatabaseSessionService(url)
    chat, llm = make_process(sessions)
    for line in sys.stdin:
        print(await ask(chat, llm, int(line)), flush=True)
    await sessions.close()


SERVE = (
    "import asyncio, sys; from tests.test_versions import serve; "
    "asyncio.run(serve(sys.argv[1]))"
)


def start(url: str, package: Path) -> subprocess.Popen[str]:
    """Starts a process with the package of a folder."""
    path = os.pathsep.join(str(folder) for folder in (package, ROOT))
    command = [sys.executable, "-P", "-W", "ignore", "-c", SERVE, url]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def play(process: subprocess.Popen[str], number: int) -> int:
    """Has a process play a turn; returns how many summaries it took."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(f"{number}\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def end(process: subprocess.Popen[str]) -> None:
    """Ends a process that has played all its turns."""
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The package as it was at the commit before."""
    command = ["git", "-C", str(ROOT), "archive", BEFORE, "contextguard_adk"]
    try:
        made = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"needs git and the commit {BEFORE}")

    folder = tmp_path / "before"
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=made, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.postgres
async def test_releases_alternate_without_a_summary_twice(
    before: Path, tmp_path: Path
) -> None:
    """One process is of the release before, the other is started anew midway."""
    counts = []
    for packages in ((ROOT,), (ROOT, before)):
        async with own_database("postgres", tmp_path) as store:
            processes = [start(store.url, package) for package in packages]
            count = 0
            for number in range(TURNS):
                if number == TURNS // 2:
                    end(processes[0])
                    processes[0] = start(store.url, ROOT)
                count += play(processes[number % len(processes)], number)
            for process in processes:
                end(process)
            counts.append(count)

    assert counts[0] >= 5
    assert counts[1] <= counts[0]
