"""The ways to switch the guard off: what sessions that it has compacted then send."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest

from contextguard_adk import (
    ConfigError,
    ContextGuardPlugin,
    Pipeline,
    SlidingWindow,
    Threshold,
)
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import Chat, KeptSessions, guarded_agent
from tests.chats import DEMAND, agent_requests

WINDOW = 4_000
SUMMARY = "The stored summary: KX-42 is paid."
LEFT_ASIDE = "its stored summary is left aside"
TOP = 'summaries = "stored"\n[default]\nstrategy = "threshold"\ncontext_window = 4000\n'
TABLE = (
    '[default]\nstrategy = "threshold"\ncontext_window = 4000\nsummaries = "stored"\n'
)

STRATEGIES: dict[str, Strategy] = {
    "threshold": Threshold(context_window=WINDOW),
    "sliding": SlidingWindow(context_window=WINDOW),
    "pipeline": Pipeline(context_window=WINDOW, window=None),
}
IN_FILES = {
    "threshold": "threshold",
    "sliding": "sliding_window",
    "pipeline": "pipeline",
}


def look(step: int) -> str:
    """Looks something up."""
    return f"row {step}: " + "notebooks " * 150


def make_llm() -> SimulatedLlm:
    """A model that looks something up in each turn."""
    numbers = itertools.count()

    def reply(request: LlmRequest) -> Reply:
        newest = request.contents[-1].parts or []
        if any(part.function_response for part in newest):
            return "It is there."
        return scripted_call("look", step=next(numbers))

    return SimulatedLlm(
        context_window=WINDOW,
        token_ratio=1.0,
        script=reply,
        summary_replies=lambda request: SUMMARY,
    )


async def compacted_session() -> KeptSessions:
    """Sessions with one that a guard has compacted."""
    sessions = KeptSessions()
    llm = make_llm()
    plugin = ContextGuardPlugin(default=STRATEGIES["threshold"])
    chat = Chat(guarded_agent(llm, [look]), [plugin], session_service=sessions)

    number = 0
    while not any(SUMMARY in request.text for request in agent_requests(llm)):
        await chat.say(f"Question {number}?")
        number += 1
        assert number < 60

    return sessions


async def talk(
    plugin: ContextGuardPlugin, sessions: KeptSessions, turns: int, **state: Any
) -> SimulatedLlm:
    """Goes on in the session with this guard, as after a restart."""
    llm = make_llm()
    chat = Chat(guarded_agent(llm, [look]), [plugin], session_service=sessions)
    if state:
        await chat.set_state(state)
    for number in range(turns):
        await chat.say(f"Question {100 + number}?")
    return llm


PLACES = ("plugin", "agent", "state", "file", "table")
CELLS = [("plugin", name) for name in STRATEGIES]
CELLS += [(place, "threshold") for place in PLACES[1:]]


def make_plugin(place: str, name: str, folder: Path) -> ContextGuardPlugin:
    """A guard that is told to pay for nothing, or that state will tell."""
    strategy = STRATEGIES[name]
    if place == "plugin":
        return ContextGuardPlugin(default=strategy, summaries="stored")
    if place == "agent":
        stored = strategy.model_copy(update={"summaries": "stored"})
        return ContextGuardPlugin(agents={"agent": stored})
    if place == "state":
        return ContextGuardPlugin(default=strategy)

    file = folder / "guard.toml"
    text = TOP if place == "file" else TABLE
    file.write_text(text.replace("threshold", IN_FILES[name]))
    return ContextGuardPlugin.from_file(file)


@pytest.mark.quick("plugin-sliding-6", "plugin-pipeline-6", "table-threshold-6")
@pytest.mark.parametrize(
    ("place", "name", "turns"),
    [
        *((place, name, 6) for place, name in CELLS),
        *(
            pytest.param(place, name, 50, marks=pytest.mark.slow)
            for place in PLACES
            for name in STRATEGIES
        ),
    ],
)
async def test_stored_summaries_stay_and_nothing_is_paid(
    place: str, name: str, turns: int, tmp_path: Path
) -> None:
    """Whatever says so, no turn is lost and no summary is asked for."""
    plugin = make_plugin(place, name, tmp_path)
    in_state = {"context_guard:summaries": "stored"}
    state: dict[str, Any] = in_state if place == "state" else {}

    llm = await talk(plugin, await compacted_session(), turns, **state)
    assert (llm.rejections, llm.violations, llm.summaries) == (0, 0, 0)
    assert all(SUMMARY in request.text for request in llm.requests)
    assert f"Question {99 + turns}?" in llm.requests[-1].text


async def test_what_else_pays_for_summaries_does_not() -> None:
    """Neither one that was asked for, nor one ahead of time, nor a recovery."""
    sessions = await compacted_session()
    strategy = Threshold(context_window=2 * WINDOW, ahead=0.5, summaries="stored")
    plugin = ContextGuardPlugin(default=strategy)
    llm = await talk(plugin, sessions, 16, **DEMAND)
    assert llm.rejections > 0
    assert llm.summaries == 0
    assert "Question 115?" in llm.requests[-1].text


async def test_a_window_of_messages_is_no_reason_to_cut() -> None:
    """Only what does not fit is cut."""
    sessions = await compacted_session()
    strategy = SlidingWindow(context_window=100_000, max_messages=4, summaries="stored")
    llm = await talk(ContextGuardPlugin(default=strategy), sessions, 6)
    text = llm.requests[-1].text
    assert all(f"Question {100 + number}?" in text for number in range(6))


async def test_summaries_are_written_again_afterwards() -> None:
    """The next compaction covers what was cut to excerpts."""
    sessions = await compacted_session()
    strategy = STRATEGIES["threshold"]
    await talk(ContextGuardPlugin(default=strategy, summaries="stored"), sessions, 12)
    llm = await talk(ContextGuardPlugin(default=strategy), sessions, 12)
    assert llm.summaries > 0
    assert (llm.rejections, llm.violations) == (0, 0)


async def test_another_word_in_state_is_told_and_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Summaries are then written as usual."""
    sessions = await compacted_session()
    plugin = ContextGuardPlugin(default=STRATEGIES["threshold"])
    llm = await talk(plugin, sessions, 14, **{"context_guard:summaries": "off"})
    assert llm.summaries > 0
    told = [r for r in caplog.records if "context_guard:summaries" in r.getMessage()]
    assert len(told) == 1


def test_another_word_in_code_or_file_is_refused(tmp_path: Path) -> None:
    """With the key, the value and what is accepted."""
    with pytest.raises(ConfigError, match=r"summaries = 'off'.*'write' or 'stored'"):
        ContextGuardPlugin(summaries="off")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"summaries = 'off'.*'write' or 'stored'"):
        Threshold(summaries="off")  # type: ignore[arg-type]
    file = tmp_path / "guard.toml"
    file.write_text('summaries = "off"\n')
    with pytest.raises(ConfigError, match=r"guard.toml: summaries = 'off'"):
        ContextGuardPlugin.from_file(file)


OFF: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "observe": ({"default": STRATEGIES["threshold"], "observe": True}, {}),
    "no default": ({"default": None}, {}),
    "a chooser": ({"default": lambda context: None}, {}),
    "no agent": ({"agents": {"agent": None}}, {}),
    "off": ({"default": STRATEGIES["threshold"]}, {"context_guard:off": True}),
}


@pytest.mark.quick("no default", "a chooser")
@pytest.mark.parametrize("how", OFF)
async def test_a_whole_history_that_goes_out_again_is_told_once(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the switch that keeps what was compacted; not where nothing was."""
    settings, state = OFF[how]
    caplog.set_level(logging.WARNING, "contextguard_adk.plugin")
    llm = make_llm()
    llm.context_window = 1_000_000
    chat = Chat(guarded_agent(llm, [look]), [ContextGuardPlugin(**settings)])
    if state:
        await chat.set_state(state)
    for number in range(4):
        await chat.say(f"Question {number}?")
    assert not [r for r in caplog.records if LEFT_ASIDE in r.getMessage()]

    chat.sessions = chat.runner.session_service = await compacted_session()
    if state:
        await chat.set_state(state)
    for number in range(2):
        await chat.say(f"Question {number}?")
    [told] = [r for r in caplog.records if LEFT_ASIDE in r.getMessage()]
    assert told.levelno == logging.WARNING
    assert 'summaries="stored"' in told.getMessage()
    assert "Question" not in told.getMessage()
