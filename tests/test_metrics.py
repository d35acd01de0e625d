"""What is counted for dashboards and alerts, and who it was."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.adk.apps.app import EventsCompactionConfig
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from opentelemetry import metrics
from opentelemetry.trace import StatusCode
from pydantic import Field

from contextguard_adk import CallRecord, Costs, Threshold
from contextguard_adk.strategies import Turn
from contextguard_adk.testing import (
    ContextOverflowError,
    Reply,
    SimulatedLlm,
    SimulatedProviderError,
    call,
)
from tests.builders import answer_text, model, user
from tests.chats import DEMAND, EXACT, guarded_chat, seed, words
from tests.guarded import long_chat
from tests.meters import Meters, keep_metrics
from tests.payloads import image, open_payload
from tests.recorded import Recorded, metadata, own_lines
from tests.refusing import (
    INPUT_PLUS_OUTPUT,
    RESERVING,
    make_llm,
    open_chat,
    overflow,
    work,
    working_script,
)
from tests.written import GOOD, Written, ended

FILES = Path(__file__).parent.parent / "docs" / "observability"
OWN = "context_guard."
PRICES = {"prices": {"simulated": Costs(input=1_000, output=1_000)}}
ABOUT = {
    "context_guard.app": "app",
    "context_guard.strategy": "Threshold",
    "gen_ai.agent.name": "agent",
    "gen_ai.request.model": "simulated",
}
"""What each metric is counted by."""


@pytest.fixture
def meters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meters]:
    """Keeps the metrics of one test."""
    yield from keep_metrics(monkeypatch)


async def test_compactions_are_counted(meters: Meters) -> None:
    """With sizes, waiting, cost and tokens: the sums are those of the records."""
    recorded = Recorded(guard=PRICES)
    recorded.llm.latency_seconds = 0.01
    await recorded.work(5)
    records = recorded.compactions
    assert len(records) >= 2
    of_tokens = {**ABOUT, "context_guard.reason": "tokens"}
    assert meters.points(OWN + "compactions") == [(of_tokens, len(records))]

    sizes: dict[str, list[Any]] = {
        "tokens_before": [record.tokens_before for record in records],
        "tokens_after": [record.tokens_after for record in records],
        "wait": [record.waited_seconds for record in records],
    }
    for name, figures in sizes.items():
        [(said, (count, total))] = meters.points(f"{OWN}compaction.{name}")
        assert (said, count) == (of_tokens, len(records))
        assert total == pytest.approx(sum(figures)) != 0

    [(said, cost)] = meters.points(OWN + "summary.cost")
    assert said == ABOUT
    assert cost == pytest.approx(sum(record.cost or 0 for record in records)) != 0

    used = meters.points("gen_ai.client.token.usage")
    for (said, (count, total)), kind in zip(used, ("input", "output"), strict=True):
        names = {"gen_ai.operation.name": "summarize", "gen_ai.token.type": kind}
        assert (said, count) == ({**ABOUT, **names}, len(records))
        usages = [vars(record.usage) for record in records]
        name = {"input": "prompt_tokens", "output": "output_tokens"}[kind]
        assert total == sum(usage[name] for usage in usages) > 0

    [(said, (count, total))] = meters.points(OWN + "window.usage")
    assert (said, count) == (ABOUT, len(recorded.calls))
    assert total == pytest.approx(sum(call.pressure for call in recorded.calls))
    assert not meters.points(OWN + "summary.failures")


async def test_buckets_fit_what_is_counted(meters: Meters) -> None:
    """Tokens of a call have the convention's; a ratio goes up to the whole window."""
    await Recorded().work(3)
    buckets = meters.buckets()
    assert buckets["gen_ai.client.token.usage"] == [4**n for n in range(14)]
    assert buckets[OWN + "window.usage"] == [n / 10 for n in range(1, 11)]
    assert buckets[OWN + "compaction.wait"][-1] >= 3 * 60  # What a summary may take.
    for name in ("tokens_before", "tokens_after"):
        assert buckets[f"{OWN}compaction.{name}"][-1] >= 2_000_000


async def test_labels_stay_apart_from_those_of_adk(meters: Meters) -> None:
    """ADK counts tokens by the same name, with attributes of its own."""
    meter = meters.provider.get_meter("adk")
    said = "Number of input and output tokens used."
    adk = meter.create_histogram("gen_ai.client.token.usage", "{token}", said)
    adk.record(7, {"gen_ai.operation.name": "chat", "gen_ai.response.model": "other"})
    await Recorded().work(3)
    lines = [
        line
        for line in meters.exposition.splitlines()
        if line.startswith("gen_ai_client_token_usage_count")
    ]
    ours = [line for line in lines if 'gen_ai_operation_name="summarize"' in line]
    assert len(ours) == len(lines) - 1 == 2

    for line in ours:
        assert 'gen_ai_agent_name="agent"' in line
        assert 'gen_ai_request_model="simulated"' in line


async def test_an_unknown_price_is_not_0(
    meters: Meters, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is counted where no price is known."""
    recorded = Recorded()
    await recorded.work(3)
    assert [record.cost for record in recorded.compactions][:1] == [None]
    assert meters.points(OWN + "compactions")
    assert not meters.points(OWN + "summary.cost")
    assert not own_lines(caplog)


class Stuttering(SimulatedLlm):
    """A client that gives its whole answer twice."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers."""
        async for response in super().generate_content_async(llm_request, stream):
            yield response
            yield response.model_copy(deep=True)


async def test_a_call_is_counted_once(meters: Meters) -> None:
    """However often its answer comes."""
    recorded = Recorded(Stuttering(context_window=100_000))
    await recorded.work(1)
    assert len(recorded.calls) == 1
    [(_, (count, _))] = meters.points(OWN + "window.usage")
    assert count == 1


class StatusError(Exception):
    """An error of a provider's client."""

    def __init__(self, status: int, said: str = "It quotes zq-77.") -> None:
        super().__init__(said)
        self.status_code = status


class ReadTimeout(Exception):  # noqa: N818 - as httpx spells it.
    """What a client raises that has no status."""


FAILURES: dict[str, tuple[Sequence[Reply], str]] = {
    "late": ([TimeoutError()] * 3, "timeout"),
    "no answer of a client": ([ReadTimeout()] * 3, "timeout"),
    "gateway": ([StatusError(504)] * 3, "timeout"),
    "quota": ([StatusError(429)] * 3, "rate_limit"),
    "down": ([StatusError(503)] * 3, "unavailable"),
    "key": ([StatusError(401)], "refused"),
    "too long": ([overflow()] * 2, "overflow"),
    "filter": ([ended(GOOD, "SAFETY")], "blocked"),
    "no summary": (["The", "The"], "unusable"),
    "anything": ([RuntimeError("zq-77")], "other"),
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a retry follow at once."""
    wait = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda *_: wait(0))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", FAILURES)
async def test_a_failed_summary_is_counted_by_its_kind(
    name: str, meters: Meters, exporter: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Metric, span and record have one word, the log says who it was."""
    replies, kind = FAILURES[name]
    written = Written(*replies, model="simulated")
    assert not await written.compact()
    assert meters.by(OWN + "summary.failures", "error.type") == {kind: 1}

    [span] = [s for s in exporter.get_finished_spans() if "context_guard" in s.name]
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == span.attributes["error.type"] == kind

    [record] = written.records
    assert (record.failure, record.is_mechanical) == (kind, True)

    [line] = [each for each in own_lines(caplog) if "The summarizer of" in each]
    assert record.place in line
    assert "zq-77" not in span.to_json() + line + meters.everything


async def test_a_summarizer_that_is_left_alone_counts_as_failed(
    meters: Meters,
) -> None:
    """After two failures it is not asked, which is no better for the summary."""
    written = Written(*[RuntimeError()] * 9, model="simulated", context_window=20_000)
    for _ in range(3):
        await seed(written.chat, user(words(600)), model(words(600)), state=DEMAND)
        await written.chat.say(words(225))
    counted = meters.by(OWN + "summary.failures", "error.type")
    assert counted == {"other": 2, "not_asked": 1}


async def test_a_failure_without_a_compaction_is_counted(meters: Meters) -> None:
    """The request still fits, and goes out as it is."""
    llm = SimulatedLlm(context_window=100_000, token_ratio=1.0)
    llm.summary_replies = [RuntimeError()]
    chat = await long_chat(llm, 3_250, state=EXACT)
    assert answer_text(await chat.events())
    assert not meters.points(OWN + "compactions")
    assert meters.by(OWN + "summary.failures", "error.type") == {"other": 1}


async def recover_media() -> None:
    """A request whose images take too many bytes."""
    chat, _ = open_payload()
    for number in range(4):
        await chat.say(image(number, 3_000))


async def recover_form() -> None:
    """A request that the provider finds to be in a wrong form."""
    refusal = SimulatedProviderError("Please ensure: roles must alternate.")
    llm = make_llm(["Hello.", refusal, "Fine."])
    chat = open_chat(llm)
    await chat.tell([model("One."), model("Two.")])
    await chat.say("Hello.")
    await chat.say("How are you?")


async def recover_from(script: Sequence[Reply], turns: int, **agent: Any) -> None:
    """Turns, the last of which is rejected."""
    await work(open_chat(make_llm(script), agent=agent), turns)


async def fail() -> None:
    """A turn that nothing saves."""
    with pytest.raises(Exception, match="too long"):
        await recover_from([*working_script(1)[:-1], *[overflow()] * 9], 1)


LONG = [*working_script(1, 4), *working_script(1, 4)[:-1]]
RECOVERIES = {
    "output": lambda: recover_from([INPUT_PLUS_OUTPUT, "Answer 0."], 1, **RESERVING),
    "media": recover_media,
    "compaction": lambda: recover_from([*LONG, overflow(), "Answer 1."], 2),
    "minimal": lambda: recover_from([*LONG, *[overflow()] * 2, "Answer 1."], 2),
    "form": recover_form,
    "failed": fail,
}


@pytest.mark.parametrize("kind", RECOVERIES)
async def test_a_recovery_is_counted_by_what_helped(kind: str, meters: Meters) -> None:
    """Also one that failed."""
    await RECOVERIES[kind]()
    assert meters.by(OWN + "recoveries", "context_guard.kind") == {kind: 1}
    [(said, _)] = meters.points(OWN + "recoveries")
    assert said == {**ABOUT, "context_guard.kind": kind}


async def test_an_sdk_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls before it cost nothing; from then on they are counted."""
    recorded = Recorded()
    await recorded.work(1)
    for meters in keep_metrics(monkeypatch):
        await recorded.work(1)
        [(_, (count, _))] = meters.points(OWN + "window.usage")
        assert count == 3


async def test_an_sdk_that_fails_ends_no_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a compaction nor a recovery needs it; the log tells by type and place."""

    def fail_to_load() -> None:
        raise RuntimeError("zq-77")

    monkeypatch.setattr(metrics, "get_meter_provider", fail_to_load)
    recorded = Recorded()
    await recorded.work(3)
    assert recorded.compactions
    await RECOVERIES["compaction"]()
    lines = own_lines(caplog)
    assert any(line.startswith("Nothing is counted: RuntimeError") for line in lines)
    assert "zq-77" not in "".join(lines)


# --- who it was ---


async def test_records_spans_and_lines_tell_who_it_was(
    exporter: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """App, user, session and run, the user by a hash; events do not grow."""
    caplog.set_level(logging.INFO, "contextguard_adk")
    planned: list[Any] = []
    guard = {"before_compaction": planned.append, "warning_threshold": 0.1}
    recorded = Recorded(guard=guard, user_id="jane@example.org")
    await recorded.work(3)

    runs = {event.invocation_id for event in recorded.events}
    told = [planned, recorded.calls, recorded.compactions, recorded.pressures]
    assert all(told)

    [user] = {record.user for records in told for record in records}
    assert re.fullmatch("[0-9a-f]{16}", user)
    place = ("agent", "app", "session")
    for record in itertools.chain.from_iterable(told):
        assert (record.agent, record.app, record.session_id) == place
        assert record.strategy == "Threshold"
        assert record.invocation_id in runs

    [record, *_] = recorded.compactions
    begin_of_place = f"app 'app', user '{user}', session 'session', invocation "
    assert record.place == f"{begin_of_place}'{record.invocation_id}'"
    lines = own_lines(caplog)
    for begin in ("Compacted agent", "Agent 'agent' is under pressure"):
        found = [line for line in lines if line.startswith(begin)]
        assert any(begin_of_place in line for line in found)

    [span, *_] = [s for s in exporter.get_finished_spans() if "context_gu" in s.name]
    for name in ("app", "user", "session_id", "invocation_id"):
        assert span.attributes[OWN + name] == getattr(record, name)
    events = [metadata(event) for event in recorded.events]
    assert "jane" not in repr((told, lines, span.to_json(), events))
    assert not any(user in str(said) or "failure" in str(said) for said in events)


async def say_nothing() -> None:
    """A model that answers nothing to a large request."""
    nothing = LlmResponse(content=types.Content(role="model", parts=[]))
    llm = make_llm([nothing], 4_000, usage="never")
    await guarded_chat(llm, Threshold(context_window=4_000)).say(words(2_500))


ANSWERED_NOTHING = pytest.param(
    "The model of agent 'agent' answered nothing",
    say_nothing,
    marks=pytest.mark.skipif(
        EventsCompactionConfig.model_fields["compaction_interval"].is_required(),
        reason="this google-adk does not tell when a run ends",
    ),
)


@pytest.mark.parametrize(
    ("begin", "play"),
    [
        ANSWERED_NOTHING,
        ("The provider rejected every request for agent 'agent'", fail),
        ("The provider refused a request of agent 'agent'", recover_form),
    ],
    ids=["nothing", "rejected", "refused"],
)
async def test_what_is_wrong_with_a_call_is_logged_with_its_place(
    begin: str, play: Callable[[], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """So that it can be found: app, user, session and run."""
    await play()
    [line] = [each for each in own_lines(caplog) if each.startswith(begin)]
    assert re.search(r"; app 'app', user '\w{16}', session 'session', inv\w+ 'e-", line)


class Flaky(Threshold):
    """A strategy that fails at first."""

    failures: list[str] = Field(default_factory=lambda: ["once"])

    def fullness(self, turn: Turn) -> float:
        """Fails, once."""
        if self.failures:
            raise KeyError(self.failures.pop())
        return super().fullness(turn)


async def test_a_recovered_call_tells_who_it_was() -> None:
    """Even if the guard had failed before, and had not measured it."""
    calls: list[CallRecord] = []
    llm = make_llm([overflow(), "Answer 0."])
    chat = open_chat(llm, Flaky(), guard={"on_call": calls.append})
    await chat.tell([user(words(2_000)), model(words(6_000))])
    await chat.say("Question 0?")
    [record] = calls
    assert (record.is_recovered, record.app, record.agent) == (True, "app", "agent")


async def test_users_are_told_apart_by_app_and_id() -> None:
    """The same user has the same hash in all sessions; the id is shown if asked for."""
    found = []
    for name, settings_ in (("a", {}), ("a", {}), ("b", {}), ("a", PLAIN)):
        recorded = Recorded(user_id=name, guard=settings_)
        await recorded.work(1)
        found.append(recorded.calls[0].user)
    assert found[0] == found[1] != found[2]
    assert found[3] == "a"


PLAIN = {"user_ids": "plain"}


async def test_a_name_breaks_no_line(caplog: pytest.LogCaptureFixture) -> None:
    """What is in a session's id is quoted in the log."""
    caplog.set_level(logging.INFO, "contextguard_adk")
    recorded = Recorded(session_id="s\nERROR all is lost\x1b[2J")
    await recorded.work(3)
    lines = own_lines(caplog)
    assert "ERROR" in "".join(lines)
    assert all(line.isprintable() for line in lines)


# --- no text of a conversation ---


class Lines(logging.Handler):
    """Keeps what is logged at INFO and above, with the texts of errors."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps it."""
        self.kept.append(self.format(record))


FAULTS: dict[str, Callable[[str], Reply]] = {
    "error": RuntimeError,
    "status": lambda said: StatusError(429, said),
    "refusal": lambda said: StatusError(400, said),
    "code": lambda said: LlmResponse(error_code=said, error_message=said),
    "too long": lambda said: ContextOverflowError(f"prompt is too long: {said}"),
    "none": lambda said: f"They spoke of {said}.",
}


@dataclass(frozen=True)
class Talk:
    """What is said, each with a word that must not be told on, and what goes wrong."""

    around: str
    word: str
    fault: str
    is_rejected: bool
    is_raising: bool

    def say(self, name: str) -> str:
        """A text that tells where it was said."""
        return f"{self.around}{name}-zq{self.word}{self.around}"


TALKS = st.builds(
    Talk,
    around=st.sampled_from(["", " ", "\n", "%s ", "{0}", "ERROR: ", "'", "\x1b[2J"]),
    word=st.text("abcdefgh0123456789", min_size=1, max_size=8),
    fault=st.sampled_from([*FAULTS]),
    is_rejected=st.booleans(),
    is_raising=st.booleans(),
)


@pytest.mark.usefixtures("quick")
@settings(
    max_examples=settings().max_examples // 8,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(talk=TALKS)
@example(Talk(" ", "1", "error", is_rejected=True, is_raising=True))
@example(Talk(" ", "1", "code", is_rejected=False, is_raising=False))
async def test_no_text_of_a_conversation_is_told(
    meters: Meters, exporter: Any, talk: Talk
) -> None:
    """Neither what is said, found, summarized or quoted by errors, nor who the user is,
    stands in metrics, spans, records or lines of the log at INFO and above."""
    told: list[Any] = []

    def listen(record: Any) -> str:
        told.append(record)
        if talk.is_raising:
            raise RuntimeError(talk.say("listener"))
        return talk.say("focus")

    names = ("on_call", "on_compaction", "on_pressure", "before_compaction")
    guard: dict[str, Any] = dict.fromkeys(names, listen)
    finding = talk.say("finding") + words(700)
    rejected = ContextOverflowError(f"prompt is too long: {talk.say('rejection')}")
    script: list[Reply] = [call("search"), call("search"), talk.say("answer")] * 2
    script[4:4] = [rejected] * talk.is_rejected
    llm = SimulatedLlm(context_window=100_000, script=script)
    llm.summary_replies = [FAULTS[talk.fault](talk.say("summarizer"))] * 9
    lines = Lines()
    logger = logging.getLogger("contextguard_adk")
    logger.addHandler(lines)
    level = logger.level
    logger.setLevel(logging.INFO)
    exporter.clear()
    try:
        recorded = Recorded(
            llm,
            Threshold(context_window=2_000, preview_tokens=None),
            finding=finding,
            guard={**guard, "warning_threshold": 0.1},
            user_id=talk.say("user"),
        )
        await recorded.work(2, talk.say("question"))
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
    kinds = {type(record).__name__ for record in told}
    assert kinds == {
        "CallRecord",
        "CompactionRecord",
        "PressureRecord",
        "PlannedCompaction",
    }
    spans = [s for s in exporter.get_finished_spans() if "context_guard" in s.name]
    assert spans
    assert lines.kept
    shown = [replace(r, messages=()) if hasattr(r, "messages") else r for r in told]
    everything = [*lines.kept, *[span.to_json() for span in spans], meters.everything]
    assert f"zq{talk.word}" not in repr(shown) + "".join(everything)


# --- files for Prometheus and Grafana ---

NAME = re.compile(r"\b(?:context_guard|gen_ai)_\w+")


def expressions(node: Any) -> Iterator[str]:
    """All PromQL in a file."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if key in ("expr", "query") and isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            yield from expressions(value)


def without_ending(names: set[str]) -> set[str]:
    """The names of metrics, of the names of series."""
    return {re.sub("_(bucket|count|created|sum|total)$", "", name) for name in names}


async def test_rules_and_dashboard_name_what_is_exported(meters: Meters) -> None:
    """A session with a compaction, a failed summary and a recovery has all of it."""
    recorded = Recorded(guard=PRICES)
    recorded.llm.summary_replies = ["They spoke of a press.", RuntimeError()]
    await recorded.work(5)
    await RECOVERIES["compaction"]()
    await RECOVERIES["failed"]()

    series = meters.series()
    labels = {*re.findall(r'[{,](\w+)="', meters.exposition)}
    shown = dict[str, set[str]]()

    for name in ("prometheus-rules.yaml", "grafana-dashboard.json"):
        texts = [*expressions(yaml.safe_load((FILES / name).read_text("utf-8")))]
        named = {each for text in texts for each in NAME.findall(text)}
        shown[name] = named - labels
        assert shown[name] <= series
        by = {each for text in texts for each in re.findall(r"by \(([^)]*)\)", text)}
        assert {label for each in by for label in each.split(", ")} <= labels

    own = {name for name in series if NAME.fullmatch(name)}
    assert without_ending(own) == without_ending(shown["grafana-dashboard.json"])
    alerted = without_ending(shown["prometheus-rules.yaml"])
    assert len(alerted) == 5


def test_the_rules_have_the_form_that_prometheus_reads() -> None:
    """Groups of alerts, each with an expression and what to tell people."""
    rules = yaml.safe_load((FILES / "prometheus-rules.yaml").read_text("utf-8"))
    [group] = rules.pop("groups")
    assert (rules, {*group}) == ({}, {"name", "rules"})

    names = [rule["alert"] for rule in group["rules"]]
    assert len({*names}) == len(names) == 6

    for rule in group["rules"]:
        assert {*rule} - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "0m"))
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {*rule["annotations"]} == {"summary", "description"}
        used = {*re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])}
        assert used <= {*re.findall(r"\w+", rule["expr"])}


def test_the_dashboard_has_the_form_that_grafana_reads() -> None:
    """Panels side by side, each with a source, a unit and a query."""
    board = json.loads((FILES / "grafana-dashboard.json").read_text("utf-8"))
    assert board["uid"]
    assert board["title"]
    assert board["schemaVersion"] >= 36

    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len({*places}) == len(places) == 8

    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
        assert panel["fieldConfig"]["defaults"]["unit"]
