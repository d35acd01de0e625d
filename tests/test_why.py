"""`contextguard why`: what it says of a session is what the model was sent."""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path

import pytest
from google.adk.runners import Runner
from google.adk.sessions import Session
from google.adk.tools.long_running_tool import LongRunningFunctionTool
from google.genai import types

from contextguard_adk import (
    ContextGuardPlugin,
    Pipeline,
    SlidingWindow,
    Threshold,
    TodosTool,
)
from contextguard_adk._tools.cli import main
from contextguard_adk.config import CONFIG_VARIABLE
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import Chat, call_part, guarded_agent, model, queued_tool, user
from tests.chats import agent_requests, slow
from tests.recordings import save

WINDOW = 8_000
TURNS = 9
SHORT = 60
LONG = 150
"""The rows of a result, and of one that is shown as a preview."""

Output = pytest.CaptureFixture[str]
STRATEGIES = [
    Threshold(context_window=WINDOW),
    SlidingWindow(context_window=WINDOW, max_messages=20),
    Pipeline(context_window=WINDOW),
]


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


async def talk(strategy: Strategy, turns: int = TURNS) -> tuple[Session, SimulatedLlm]:
    """Talks with an agent that searches twice a turn; each part has its own name."""
    found = [
        {"rows": [{"part": f"part {turn}-{row};"} for row in range(rows)]}
        for turn in range(2 * turns)
        for rows in [LONG if turn % 7 == 3 else SHORT]
    ]
    script: list[Reply] = []
    for turn in range(turns):
        script += [call_part("search")] * 2 + [f"It is in hall {turn}, I think."]
    llm = SimulatedLlm(context_window=WINDOW, script=script)
    agent = guarded_agent(llm, [queued_tool("search", found)])
    chat = Chat(agent, [ContextGuardPlugin(default=strategy)])
    for turn in range(turns):
        await chat.say(f"Where is the press of order {turn * 7919};?")
    return await chat.session(), llm


@functools.cache
def talk_once() -> tuple[Session, SimulatedLlm]:
    """A talk with the first strategy."""
    return asyncio.run(talk(STRATEGIES[0]))


def capsys_out(output: Output) -> str:
    """What was printed since the last time."""
    return output.readouterr().out


@pytest.mark.parametrize(
    "strategy",
    [STRATEGIES[0], *slow(*STRATEGIES[1:])],
    ids=lambda s: type(s).__name__,
)
def test_it_tells_which_requests_had_the_words(
    strategy: Strategy, tmp_path: Path, capsys: Output
) -> None:
    """Of messages, results, long results and answers, early and late ones."""
    is_first = strategy is STRATEGIES[0]
    session, llm = talk_once() if is_first else asyncio.run(talk(strategy))
    requests = agent_requests(llm)
    assert not llm.rejections

    config = tmp_path / "guard.toml"
    name = {"Threshold": "threshold", "Pipeline": "pipeline"}
    kind = name.get(type(strategy).__name__, "sliding_window")
    config.write_text(f'[default]\nstrategy = "{kind}"\n')
    source = str(save(session, tmp_path))

    compacted = 0
    for words in (
        "order 0;",
        f"order {(TURNS - 1) * 7919};",
        "part 0-5;",
        "part 3-5;",
        "part 3-70;",
        "part 10-140;",
        "hall 2,",
        "HALL   6, i",
    ):
        arguments = ["--json", "--context-window", str(WINDOW), "--config", str(config)]
        assert main(["why", source, words, *arguments]) == 0
        found = json.loads(capsys_out(capsys))
        plain = " ".join(words.casefold().split())
        had = {
            number
            for number, request in enumerate(requests, 1)
            if plain in " ".join(request.text.casefold().split())
        }
        said = {
            number
            for period in found["calls"]
            if period["holders"]
            for number in range(period["first_call"], period["last_call"] + 1)
        }
        assert said == had, words
        compacted += any(period["compaction"] for period in found["calls"])

    assert compacted > 3


def test_it_is_told_in_a_few_lines(tmp_path: Path, capsys: Output) -> None:
    """Where the words stood, which compaction took them, and what to do."""
    session, _ = talk_once()
    source = str(save(session, tmp_path))
    assert main(["why", source, "part 2-5;", "--agent", "agent"]) == 0

    _, head, place, agent, *periods, hint, page = capsys_out(capsys).splitlines()
    assert head == "'part 2-5;' stands in:"
    assert place.startswith("  event 9, ")
    assert place.endswith(" UTC: result of search")
    assert agent == "Requests of agent:"
    assert periods[0].startswith("  calls 5 to ")
    assert periods[0].endswith(": in the request: the message itself")
    assert " was compacted: the request reached the threshold, " in periods[1]
    assert periods[-1].endswith(": the messages with it were left out")
    assert "recall_history" in hint
    assert page.startswith("What to do: https://")


def test_what_never_left_is_not_the_guards_fault(
    tmp_path: Path, capsys: Output
) -> None:
    """Nor is what nobody has said; without a guard nothing is left out."""
    session, _ = asyncio.run(talk(Threshold(context_window=200_000), turns=2))
    source = str(save(session, tmp_path))
    assert main(["why", source, "order 0;"]) == 0
    assert "the guard has taken nothing away" in capsys_out(capsys)
    assert main(["why", source, "no such thing\x1b[2J[/bold]"]) == 0
    *_, line = capsys_out(capsys).splitlines()
    assert line.startswith("'no such thing?[2J[/bold]' stands in no event")


async def take_back() -> tuple[Session, SimulatedLlm]:
    """A talk in which the user takes a message back."""
    llm = SimulatedLlm(context_window=WINDOW)
    chat = Chat(guarded_agent(llm), [ContextGuardPlugin()])
    await chat.say("Hello.")
    events = await chat.say("The code is zq-77.")
    await chat.runner.rewind_async(
        user_id="user",
        session_id=(await chat.session()).id,
        rewind_before_invocation_id=events[-1].invocation_id,
    )
    await chat.say("What is the code?")
    return await chat.session(), llm


@pytest.mark.skipif(
    not hasattr(Runner, "rewind_async"), reason="this google-adk cannot rewind"
)
def test_a_rewind_is_no_compaction(tmp_path: Path, capsys: Output) -> None:
    """What the user has taken back is in no request, and the guard has not taken it."""
    session, llm = asyncio.run(take_back())
    assert "zq-77" not in agent_requests(llm)[-1].text
    source = str(save(session, tmp_path))
    assert main(["why", source, "zq-77"]) == 0
    lines = capsys_out(capsys).splitlines()
    assert "  call 2: in the request: the message itself" in lines
    assert "Not the guard's doing" in lines[-2]


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        (" \n", (), 'give the words to look for: why SESSION "words"'),
        ("Hi", ("--agent", "other"), "no model call of agent 'other' is recorded"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    words: str, options: tuple[str, ...], said: str, tmp_path: Path, capsys: Output
) -> None:
    """And the exit code is that of wrong arguments."""
    event = {"author": "agent", "usageMetadata": {"promptTokenCount": 50}}
    event["content"] = model("Hi.").model_dump(mode="json", exclude_none=True)
    asked = {"author": "user", "content": user("Hi?").model_dump(exclude_none=True)}
    source = tmp_path / "session.json"
    source.write_text(json.dumps({"events": [asked, event]}))
    assert main(["why", str(source), words, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"contextguard why: error: {said}"


def approve(what: str) -> None:
    """Asks a person, who says nothing."""


@pytest.mark.parametrize(
    ("asked", "holders"),
    [
        (
            call_part("todos", todos=[{"content": "ring the zebra keeper"}]),
            ["the todo list"],
        ),
        (
            call_part("approve", what="ring the zebra keeper"),
            ["the list of values", "the list of calls that had no answer yet"],
        ),
    ],
    ids=["todo list", "open calls"],
)
async def test_words_beside_the_summary_are_found(
    asked: types.Part, holders: list[str], tmp_path: Path, capsys: Output
) -> None:
    """Whatever the section they stand in, it is named."""
    replies: list[Reply] = [asked, *["Noted."] * 30]
    llm = SimulatedLlm(
        context_window=WINDOW,
        script=replies,
        summary_replies=["Nothing of note was said."] * 20,
    )
    agent = guarded_agent(llm, [TodosTool(), LongRunningFunctionTool(approve)])
    strategy = Threshold(context_window=WINDOW, user_messages=0)
    chat = Chat(agent, [ContextGuardPlugin(default=strategy)])
    await chat.say("Please plan.")
    for number in range(9):
        await chat.say(f"Chapter {number}. " + "And so on. " * 300)
    assert "ring the zebra keeper" in agent_requests(llm)[-1].text

    source = str(save(await chat.session(), tmp_path))
    arguments = ["ring the zebra keeper", "--json", "--context-window", str(WINDOW)]
    found = await asyncio.to_thread(main, ["why", source, *arguments])
    assert found == 0
    last = json.loads(capsys_out(capsys))["calls"][-1]
    assert last["holders"] == holders


def test_words_are_found_in_another_spelling(tmp_path: Path, capsys: Output) -> None:
    """An accent that is a character of its own does not hide a word."""
    decomposed = "L\u2019entrepo\u0302t est ferme\u0301."
    agent = guarded_agent(SimulatedLlm(context_window=WINDOW))
    chat = Chat(agent, [ContextGuardPlugin(default=STRATEGIES[0])])
    asyncio.run(chat.say(decomposed))
    source = str(save(asyncio.run(chat.session()), tmp_path))

    arguments = ["l'entrepôt", "--json", "--context-window", str(WINDOW)]
    assert main(["why", source, *arguments]) == 0
    [place, *_] = json.loads(capsys_out(capsys))["places"]
    assert place["event"] == 1
