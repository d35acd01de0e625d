"""What listeners, events, traces and the log say of each call and each compaction."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents.callback_context import CallbackContext
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import DatabaseSessionService
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from contextguard_adk import (
    CallRecord,
    CompactionRecord,
    ContextGuardPlugin,
    SlidingWindow,
    Strategy,
    Threshold,
)
from contextguard_adk.telemetry import METADATA_KEY, SPAN_NAME, describe_call
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import Chat, call_part, guarded_agent, model, queued_tool

WINDOW = 4_000
"""Threshold 3,200 tokens, summaries of 400."""

SECRET = "xyzzy-4711"
FINDING = "Hall B holds part 7f3a of the old press, says the inventory. " * 40
TURNS = 6


class Recorded:
    """A guarded chat whose agent searches twice a turn, and what listeners heard."""

    def __init__(
        self,
        llm: SimulatedLlm,
        strategy: Strategy | None = None,
        *,
        after: Sequence[BasePlugin] = (),
        guard: dict[str, Any] | None = None,
        finding: str = FINDING,
        **settings: Any,
    ) -> None:
        self.llm = llm
        self.calls: list[CallRecord] = []
        self.compactions: list[CompactionRecord] = []
        plugin = ContextGuardPlugin(
            default=strategy or Threshold(context_window=WINDOW),
            on_call=self.calls.append,
            on_compaction=self.compactions.append,
            **(guard or {}),
        )
        agent = guarded_agent(llm, [queued_tool("search", [finding])])
        self.chat = Chat(agent, [plugin, *after], **settings)
        self.events: list[Event] = []

    async def work(self, turns: int = TURNS, question: str = "Where is it?") -> None:
        """Has some turns."""
        for _ in range(turns):
            self.events += await self.chat.say(question)

    @property
    def answers(self) -> list[Event]:
        """The complete responses of the model."""
        return [
            event
            for event in self.events
            if event.content and event.content.role == "model" and not event.partial
        ]

    @property
    def real_tokens(self) -> list[int]:
        """What the provider counted in the agent's requests that it answered."""
        return [
            request.prompt_tokens
            for request in self.llm.requests
            if not request.is_summary and request.response is not None
        ]


def searching(turns: int = TURNS) -> list[Reply]:
    """Two searches and an answer, turn by turn."""
    script: list[Reply] = []
    for turn in range(turns):
        script += [call_part("search"), call_part("search"), f"In hall B, {turn}."]
    return script


def metadata(event: Event) -> Any:
    """What the guard put on an event."""
    return (event.custom_metadata or {}).get(METADATA_KEY)


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "strategy",
    [Threshold(context_window=WINDOW), SlidingWindow(context_window=WINDOW)],
    ids=["threshold", "sliding window"],
)
async def test_each_call_is_recorded_once(
    strategy: Strategy, is_streaming: bool
) -> None:
    """Listener and event say the same: estimate, real count, and any compaction."""
    llm = SimulatedLlm(context_window=WINDOW, script=searching())
    recorded = Recorded(llm, strategy, is_streaming=is_streaming)
    await recorded.work()

    calls = recorded.calls
    assert [record.real_tokens for record in calls] == recorded.real_tokens
    assert len(calls) == TURNS * 3
    assert [metadata(event) for event in recorded.answers] == [
        describe_call(record) for record in calls
    ]
    assert not any(metadata(event) for event in recorded.events if event.partial)
    assert any(event.partial for event in recorded.events) is is_streaming
    for record in calls[1:]:
        assert record.real_tokens is not None
        assert record.estimated_tokens >= 0.9 * record.real_tokens
    assert {(c.agent, c.session_id, c.window_tokens) for c in calls} == {
        ("agent", "session", WINDOW)
    }
    assert all(c.pressure == c.estimated_tokens / WINDOW for c in calls)
    compactions = [c.compaction for c in calls if c.compaction is not None]
    assert len(compactions) >= 2
    assert compactions == recorded.compactions


async def test_an_event_describes_its_compaction() -> None:
    """Small, safe as JSON, and with the numbers of the compaction's record."""
    llm = SimulatedLlm(context_window=WINDOW, script=searching())
    recorded = Recorded(llm)
    await recorded.work()

    described = next(
        value for e in recorded.answers if "compaction" in (value := metadata(e))
    )
    record = recorded.compactions[0]
    assert described["compaction"] == {
        "strategy": "Threshold",
        "reason": "tokens",
        "tokens_before": record.tokens_before,
        "tokens_after": record.tokens_after,
        "contents_before": record.contents_before,
        "contents_after": record.contents_after,
        "summaries": 1,
        "mechanical": False,
    }
    assert record.tokens_before >= 3_200 > record.tokens_after
    assert described["estimate"] == record.tokens_after
    assert not record.is_recovery
    assert len(json.dumps(described)) < 400


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
async def test_a_recovered_call_is_recorded(is_streaming: bool) -> None:
    """It counts as one call: of the request that was answered, against what was
    learned."""
    llm = SimulatedLlm(context_window=WINDOW, script=searching())
    strategy = Threshold(context_window=100_000)
    recorded = Recorded(llm, strategy, is_streaming=is_streaming)
    await recorded.work()

    assert llm.rejections == 1
    assert [record.real_tokens for record in recorded.calls] == recorded.real_tokens
    (recovered,) = [record for record in recorded.calls if record.is_recovered]
    assert recovered.window_tokens == WINDOW
    assert recovered.real_tokens is not None
    assert 0.8 < recovered.estimated_tokens / recovered.real_tokens < 1.5
    assert recovered.compaction is not None
    assert recovered.compaction.is_recovery
    assert recovered.compaction.duration_seconds > 0
    (event,) = [e for e in recorded.answers if "recovered" in metadata(e)]
    assert metadata(event)["compaction"]["reason"] == "overflow"


async def test_a_provider_may_not_count() -> None:
    """Then the real count is unknown, and the estimate is there all the same."""
    llm = SimulatedLlm(context_window=WINDOW, script=searching(1), usage="never")
    recorded = Recorded(llm)
    await recorded.work(1)
    assert [record.real_tokens for record in recorded.calls] == [None] * 3
    assert metadata(recorded.answers[-1])["real"] is None
    assert all(record.estimated_tokens > 0 for record in recorded.calls)


async def test_observing_reports_as_well() -> None:
    """A first rollout sees estimate and pressure of what would be compacted."""
    llm = SimulatedLlm(context_window=100_000, script=searching())
    recorded = Recorded(llm, guard={"observe": True})
    await recorded.work()
    assert [record.real_tokens for record in recorded.calls] == recorded.real_tokens
    assert recorded.calls[-1].pressure > 1
    assert recorded.calls[-1].estimated_tokens > recorded.calls[-1].threshold_tokens
    assert all("compaction" not in metadata(event) for event in recorded.answers)
    assert not recorded.compactions


async def test_what_others_put_on_a_response_stays() -> None:
    """The guard adds one key."""
    answer = LlmResponse(content=model("Hello."), custom_metadata={"mine": [1]})
    recorded = Recorded(SimulatedLlm(context_window=WINDOW, script=[answer]))
    await recorded.work(1)
    (event,) = recorded.answers
    assert event.custom_metadata is not None
    assert event.custom_metadata["mine"] == [1]
    assert metadata(event) == describe_call(recorded.calls[0])
    assert answer.custom_metadata == {"mine": [1]}


class Cache(BasePlugin):
    """Answers every second request in place of the model."""

    def __init__(self) -> None:
        super().__init__(name="cache")
        self.count = 0

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> LlmResponse | None:
        """Answers, or lets the model answer."""
        self.count += 1
        return LlmResponse(content=model("Cached.")) if self.count % 2 == 0 else None


async def test_a_call_that_somebody_else_answered_is_no_call() -> None:
    """There is nothing to compare the estimate with, and no model was asked."""
    llm = SimulatedLlm(context_window=WINDOW)
    recorded = Recorded(llm, after=[Cache()])
    await recorded.work(4)
    assert [bool(metadata(event)) for event in recorded.answers] == [True, False] * 2
    assert [record.real_tokens for record in recorded.calls] == recorded.real_tokens


async def test_a_database_keeps_what_events_say(tmp_path: Path) -> None:
    """Read anew, each event has what the runner yielded."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"
    service = DatabaseSessionService(url)
    try:
        llm = SimulatedLlm(context_window=WINDOW, script=searching())
        recorded = Recorded(llm, session_service=service)
        await recorded.work()
    finally:
        await service.close()
    reader = DatabaseSessionService(url)
    try:
        session = await reader.get_session(
            app_name="app", user_id="user", session_id="session"
        )
    finally:
        await reader.close()
    assert session is not None
    stored = [value for event in session.events if (value := metadata(event))]
    assert stored == [describe_call(record) for record in recorded.calls]
    assert sum("compaction" in value for value in stored) >= 2


# --- Traces -----------------------------------------------------------------------


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Collects the spans of ADK and the guard, for one test."""
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("test")
    # The provider of the process can be set only once; every tracer made before it is
    # was set is such a proxy, ADK's own included.
    monkeypatch.setattr(trace.ProxyTracer, "_tracer", property(lambda _: tracer))
    return kept


async def test_a_compaction_has_a_span_below_adks(
    exporter: InMemorySpanExporter,
) -> None:
    """It covers the summary, and carries the record: names and numbers."""
    llm = SimulatedLlm(context_window=WINDOW, script=searching(), latency_seconds=0.002)
    recorded = Recorded(llm)
    await recorded.work()

    spans = exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in spans if span.context}
    compacts = [span for span in spans if span.name == SPAN_NAME]
    assert len(compacts) == len(recorded.compactions) >= 2
    for span, record in zip(compacts, recorded.compactions, strict=True):
        assert dict(span.attributes or {}) == {
            f"context_guard.{key}": value for key, value in asdict(record).items()
        }
        parent = by_id[span.parent.span_id] if span.parent else span
        assert parent is not span
        # It depends on ADK's release and settings which span is open there.
        assert parent.name in ("call_llm", "invoke_agent agent")
        assert duration(span) >= 2_000_000  # The summary's.
        assert span.start_time is not None
        assert parent.start_time is not None
        assert span.start_time >= parent.start_time - 1_000_000


def duration(span: ReadableSpan) -> int:
    """Nanoseconds from its start to its end."""
    assert span.start_time is not None
    assert span.end_time is not None
    return span.end_time - span.start_time


@pytest.mark.parametrize("limit_tokens", [WINDOW, 100_000], ids=["guard", "recovery"])
async def test_no_message_text_is_told(
    exporter: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
    limit_tokens: int,
) -> None:
    """What a user or a tool said is in no record, span, event metadata or log line."""
    caplog.set_level(logging.INFO, "contextguard_adk")
    llm = SimulatedLlm(context_window=WINDOW, script=searching())
    strategy = Threshold(context_window=limit_tokens)
    recorded = Recorded(llm, strategy, finding=f"{SECRET} {FINDING}")
    await recorded.work(question=f"Where is {SECRET}?")

    assert any(SECRET in request.text for request in llm.requests if request.is_summary)
    assert len(recorded.compactions) >= 2
    assert SECRET not in repr((recorded.calls, recorded.compactions))
    assert SECRET not in repr([metadata(event) for event in recorded.answers])
    ours = [s for s in exporter.get_finished_spans() if s.name == SPAN_NAME]
    assert len(ours) == len(recorded.compactions)
    assert SECRET not in repr([span.to_json() for span in ours])
    assert "Compacted agent 'agent'" in caplog.text
    told = [r.getMessage() for r in caplog.records if r.name.startswith("contextg")]
    assert SECRET not in repr(told)


async def test_calls_are_logged_for_debugging_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At INFO there is no line for each call."""
    caplog.set_level(logging.DEBUG, "contextguard_adk.telemetry")
    recorded = Recorded(SimulatedLlm(context_window=WINDOW))
    await recorded.work(1)
    (line,) = [r for r in caplog.records if "were sent" in r.getMessage()]
    assert line.levelno == logging.DEBUG
    (record,) = recorded.calls
    assert f"about {record.estimated_tokens} tokens" in line.getMessage()
    assert f"{record.real_tokens} counted" in line.getMessage()
