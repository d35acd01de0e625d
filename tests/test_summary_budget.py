"""`summary_budget`: beyond it summaries are excerpts, and the session goes on."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from google.adk.artifacts import InMemoryArtifactService
from google.adk.models.llm_request import LlmRequest
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

from contextguard_adk import (
    CompactionRecord,
    ConfigError,
    ContextGuardPlugin,
    Costs,
    SummaryBudget,
    Threshold,
    sessions,
)
from contextguard_adk._runtime import spending
from contextguard_adk._tools.cli import main
from contextguard_adk.config import load_settings
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import Chat, KeptSessions, call_part, guarded_agent
from tests.chats import agent_requests
from tests.meters import Meters, keep_metrics

WINDOW = 4_000
STRATEGY = Threshold(context_window=WINDOW)
PRICES = {"simulated": Costs(input=10.0, output=40.0)}
SPENT = "context_guard:summary_spent"
HOUR = 3_600.0
Log = pytest.LogCaptureFixture


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock, in seconds since the epoch, that goes only if a test sets it."""
    now = [1_800_000_000.0]
    monkeypatch.setattr(spending, "read_clock", lambda: now[0])
    return now


@pytest.fixture
def meters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meters]:
    """Keeps the metrics of one test."""
    yield from keep_metrics(monkeypatch)


def make_llm() -> SimulatedLlm:
    """A model that answers, and reports the tokens of each call."""
    return SimulatedLlm(context_window=WINDOW, token_ratio=1.0)


class Players:
    """Sessions of one process whose guard has a budget."""

    def __init__(self, budget: SummaryBudget, **settings: Any) -> None:
        self.llm = make_llm()
        self.records: list[CompactionRecord] = []
        self.sessions = KeptSessions()
        settings.setdefault("prices", {self.llm.model: PRICES["simulated"]})
        self.plugin = ContextGuardPlugin(
            default=STRATEGY,
            summary_budget=budget,
            on_compaction=self.records.append,
            **settings,
        )

    def chat(self, session_id: str = "one") -> Chat:
        """Opens a session."""
        agent = guarded_agent(self.llm, [])
        return Chat(
            agent, [self.plugin], session_service=self.sessions, session_id=session_id
        )

    async def play(self, turns: int, session_id: str = "one") -> int:
        """Takes turns in a session; returns how many summaries were paid for."""
        before = self.llm.summaries
        chat = self.chat(session_id)
        for number in range(turns):
            events = await chat.say(f"Question {number}? " + "And so on. " * 150)
            assert not any(event.error_code for event in events)
        return self.llm.summaries - before


def warnings_of(log: Log) -> list[str]:
    """The lines at WARNING and above that are about the budget."""
    return [
        record.getMessage()
        for record in log.records
        if record.name == "contextguard_adk.spending"
        and record.levelno >= logging.WARNING
    ]


@pytest.mark.parametrize(
    "turns", [8, pytest.param(100, marks=pytest.mark.slow, id="a hundred")]
)
async def test_a_session_whose_budget_is_spent_goes_on(turns: int, caplog: Log) -> None:
    """With excerpts; nothing is paid for, no turn is lost, and one WARNING says so."""
    players = Players(SummaryBudget(tokens_per_session=1))
    assert await players.play(10) == 1
    paid = len(players.records)

    assert await players.play(turns) == 0
    assert (players.llm.rejections, players.llm.violations) == (0, 0)
    later = players.records[paid:]
    assert later
    assert {record.failure for record in later} == {"over_budget"}
    assert all(record.is_mechanical and record.cost == 0 for record in later)
    assert "Question 0?" in agent_requests(players.llm)[-1].text
    [said] = warnings_of(caplog)
    assert " UTC, session 'one' of user '" in said
    assert "'user'" not in said  # Users are named by a hash.
    assert "of 1 tokens. Until the period ends, summaries are excerpts" in said


async def test_a_period_begins_anew(clock: list[float], caplog: Log) -> None:
    """A new period pays again, and warns again when it is spent."""
    players = Players(SummaryBudget(dollars_per_session=0.000001, period_hours=2))
    assert await players.play(12) == 1
    clock[0] += 2 * HOUR - 1
    assert await players.play(6) == 0
    clock[0] += 2
    assert await players.play(10) == 1
    assert len(warnings_of(caplog)) == 2
    assert "In the period until 2027-01-15 10:00 UTC, " in warnings_of(caplog)[0]


async def test_a_period_of_the_process_begins_anew(
    clock: list[float], caplog: Log
) -> None:
    """For all its sessions."""
    budget = SummaryBudget(dollars_per_process=0.000001, period_hours=2)
    players = Players(budget)
    assert await players.play(10, "one") == 1
    clock[0] += 2 * HOUR - 1
    assert await players.play(10, "two") == 0
    clock[0] += 2
    assert await players.play(10, "three") == 1
    assert await players.play(10, "four") == 0
    ends = [said.partition(" UTC")[0][-5:] for said in warnings_of(caplog)]
    assert ends == ["10:00", "12:00"]


async def test_each_call_for_a_summary_counts() -> None:
    """Also one whose answer is no summary, after which the model is asked again."""
    players = Players(SummaryBudget(dollars_per_session=9.0))
    answers = itertools.cycle(["No.", "All the chapters were told. " * 20])
    players.llm.summary_replies = lambda _: next(answers)
    await players.play(10)
    [record] = players.records
    assert players.llm.summaries == 2
    state = await players.chat().state()
    assert state[SPENT]["dollars"] == pytest.approx(record.cost)


async def test_without_a_budget_no_compaction_is_beyond_it(tmp_path: Path) -> None:
    """The summarizer may fail later: that is no matter of the budget."""
    path = tmp_path / "guard.toml"
    strategy = "[default]\ncontext_window = 4_000\nsummarizer_context_window = 4_000\n"
    path.write_text(f"[summary_budget]\ntokens_per_session = 1\n{strategy}")
    records = list[CompactionRecord]()
    plugin = ContextGuardPlugin.from_file(path, on_compaction=records.append)
    players = Players(SummaryBudget(tokens_per_session=1))
    players.plugin = plugin
    await players.play(14)
    assert records[-1].failure == "over_budget"

    path.write_text(f'summaries = "write"\n{strategy}')
    assert plugin.reload()
    players.llm.summary_replies = lambda _: ""
    await players.play(14)
    assert records[-1].failure != "over_budget"


async def test_what_a_session_has_spent_holds_in_other_processes() -> None:
    """It stands in session state, with the sum of all agents and periods."""
    first = Players(SummaryBudget(tokens_per_session=1))
    await first.play(10)
    state = await first.chat().state()
    usages = [record.usage for record in first.records]
    assert state[SPENT]["tokens"] == sum(
        usage.prompt_tokens + usage.output_tokens for usage in usages
    )
    assert state[SPENT]["dollars"] == pytest.approx(
        sum(record.cost or 0.0 for record in first.records)
    )

    second = Players(SummaryBudget(tokens_per_session=1))
    second.sessions = first.sessions
    assert await second.play(10) == 0
    other = Players(SummaryBudget(tokens_per_session=10**9))
    other.sessions = first.sessions
    assert await other.play(10) >= 1
    assert (await other.chat().state())[SPENT]["tokens"] > state[SPENT]["tokens"]


async def test_the_process_has_a_budget_for_all_sessions(caplog: Log) -> None:
    """Nothing of it is stored; one WARNING is for all sessions."""
    players = Players(SummaryBudget(tokens_per_process=1))
    assert await players.play(10, "one") == 1
    assert await players.play(10, "two") == 0
    assert await players.play(10, "three") == 0
    assert SPENT not in await players.chat().state()
    [said] = warnings_of(caplog)
    assert " UTC, this process has spent its summary_budget: $" in said


async def test_all_guards_of_a_process_share_its_budget(caplog: Log) -> None:
    """As `adk web` makes one for each app."""
    budget = SummaryBudget(tokens_per_process=1)
    assert await Players(budget).play(10) == 1
    assert await Players(budget).play(10) == 0
    assert len(warnings_of(caplog)) == 1


@pytest.mark.filterwarnings("ignore:The `plugins` argument:DeprecationWarning")
async def test_agents_as_tools_count_for_the_session_that_calls_them(
    caplog: Log,
) -> None:
    """Their own sessions end with the call; at once they add up, with one WARNING."""
    texts = itertools.count()

    def look() -> str:
        """Looks something up."""
        return f"row {next(texts)} " + "word " * 250

    def read(request: LlmRequest) -> Reply:
        has_read_all = "row" in str(request.contents) and next(turns) % 12 == 0
        return "Finished." if has_read_all else scripted_call("look")

    def ask(request: LlmRequest) -> Reply:
        if any(part.function_response for part in request.contents[-1].parts or []):
            return "Done."
        calls = [
            call_part("reader", f"call-{n}", request=f"Read {n}") for n in range(3)
        ]
        return types.Content(role="model", parts=calls)

    turns = itertools.count(1)
    reader = guarded_agent(
        SimulatedLlm(context_window=3_000, token_ratio=1.0, script=read), [look]
    )
    reader.name = "reader"
    asker = SimulatedLlm(context_window=60_000, token_ratio=1.0, script=ask)
    records = list[CompactionRecord]()
    plugin = ContextGuardPlugin(
        agents={"reader": Threshold(context_window=3_000)},
        summary_budget=SummaryBudget(tokens_per_session=4_000),
        on_compaction=records.append,
    )
    chat = Chat(guarded_agent(asker, [AgentTool(reader)]), [plugin])
    for _ in range(3):
        await chat.say("Read it all.")

    paid = sum(each.usage.prompt_tokens + each.usage.output_tokens for each in records)
    largest = max(each.usage.prompt_tokens for each in records)
    assert 4_000 <= paid <= 4_000 + 3 * largest
    assert (await chat.state())[SPENT]["tokens"] == paid
    [said] = warnings_of(caplog)
    assert "session 'session' of user " in said


async def test_an_artifact_service_of_the_user_is_not_that_of_a_tool() -> None:
    """Though it has an attribute of the same name."""

    class Artifacts(InMemoryArtifactService):
        tool_context: ClassVar[object] = object()

    players = Players(SummaryBudget(tokens_per_session=1))
    chat = players.chat()
    chat.runner.artifact_service = Artifacts()
    for number in range(9):
        events = await chat.say(f"Question {number}? " + "And so on. " * 150)
        assert not any(event.error_code for event in events)
    assert players.llm.summaries == 1
    assert SPENT in await chat.state()


async def test_a_budget_that_is_not_spent_changes_nothing(caplog: Log) -> None:
    """As many summaries are paid for as without one."""
    players = Players(SummaryBudget(dollars_per_session=5, tokens_per_process=10**9))
    assert await players.play(20) >= 2
    assert not any(record.is_mechanical for record in players.records)
    assert warnings_of(caplog) == []


async def test_without_prices_dollars_are_not_counted(caplog: Log) -> None:
    """One WARNING says so, and what to do."""
    players = Players(SummaryBudget(dollars_per_process=0.000001), prices={})
    assert await players.play(20) >= 2
    told = [each for each in caplog.messages if "No prices are known for model" in each]
    assert len(told) == 1
    assert "Set `prices`, or limit the tokens." in told[0]


@pytest.mark.parametrize(
    "stored",
    [
        "much",
        {"since": -1},
        {"since": 1e300, "tokens": 5},
        {"tokens": 10**5_000},
        pytest.param([1], marks=pytest.mark.slow),
        pytest.param({"tokens": "x"}, marks=pytest.mark.slow),
        pytest.param(7, marks=pytest.mark.slow),
    ],
)
async def test_odd_amounts_in_state_end_no_turn(stored: object) -> None:
    """They count as nothing."""
    players = Players(SummaryBudget(tokens_per_session=1))
    await players.chat().set_state({SPENT: stored})
    assert await players.play(10) == 1


async def test_metrics_tell_summaries_beyond_the_budget(meters: Meters) -> None:
    """As failures of a kind of their own."""
    await Players(SummaryBudget(tokens_per_session=1)).play(14)
    counted = meters.points("context_guard.summary.failures")
    assert [attributes["error.type"] for attributes, _ in counted] == ["over_budget"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[summary_budget]\n", "summary_budget: give at least one of dollars_per_"),
        ("[summary_budget]\ndollars_per_session = 0\n", "dollars_per_session = 0"),
        ("[summary_budget]\ntokens_per_session = 1.5\n", "tokens_per_session = 1.5"),
        ("[summary_budget]\ndollars_per_day = 1\n", "dollars_per_day"),
        ("summary_budget = 5\n", "summary_budget = 5"),
        (
            "[summary_budget]\ntokens_per_session = 9\nperiod_hours = 0\n",
            "period_hours = 0",
        ),
    ],
)
def test_a_wrong_budget_in_a_file_is_named(
    text: str, message: str, tmp_path: Path
) -> None:
    """With file, key and value."""
    path = tmp_path / "guard.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_file_can_set_a_budget(tmp_path: Path) -> None:
    """As a table of its own."""
    path = tmp_path / "guard.toml"
    path.write_text("[summary_budget]\ndollars_per_session = 0.5\nperiod_hours = 24\n")
    budget = SummaryBudget(dollars_per_session=0.5)
    assert load_settings(path).summary_budget == budget


async def test_what_was_spent_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `sessions show`, and in the report."""
    players = Players(SummaryBudget(tokens_per_session=1))
    await players.play(9)
    session = await players.chat().session()
    spent = f"{session.state[SPENT]['tokens']:,} tokens since "
    shown = sessions.show(session)
    assert shown[-1].startswith("spent on summaries: $")
    assert spent in shown[-1]

    path = tmp_path / "session.json"
    path.write_text(session.model_dump_json())
    page = tmp_path / "report.html"
    words = ["report", str(path), "--output", str(page)]
    assert await asyncio.to_thread(main, words) == 0
    assert spent in page.read_text()
    capsys.readouterr()


def test_check_tells_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line."""
    path = tmp_path / "guard.toml"
    path.write_text(
        "[summary_budget]\ndollars_per_session = 0.5\ntokens_per_process = 100_000\n"
    )
    assert main(["check", str(path)]) == 0
    assert (
        "summaries may cost $0.5000 for each session, 100,000 tokens for the process, "
        "in 24 hours"
    ) in capsys.readouterr().out
