"""What listeners, events, traces and the log say of calls, compactions and pressure."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.apps.app import EventsCompactionConfig
from google.adk.models.llm_request import LlmRequest

from contextguard_adk import (
    CallRecord,
    CompactionRecord,
    Costs,
    PressureRecord,
    SlidingWindow,
    Threshold,
)
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import Chat
from tests.chats import (
    Changing,
    begin_as_user,
    guarded_chat,
    words,
)
from tests.recorded import (
    FINDING,
    TURNS,
    WINDOW,
    Recorded,
    metadata,
    own_lines,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
        InMemorySpanExporter,
    )

SECRET = "xyzzy-4711"
NAMED_BY_ADK_ALONE = {
    "gen_ai.compaction.event_retention_size",
    "gen_ai.compaction.compaction_interval",
    "gen_ai.compaction.overlap_size",
    "gen_ai.compaction.result_event_id",
}
"""Settings that only ADK has, and the id of an event that only ADK makes."""


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_each_call_is_recorded_once(is_streaming: bool) -> None:
    """The listener is told of every call, and the event tells of any compaction."""
    strategy = (SlidingWindow if is_streaming else Threshold)(context_window=WINDOW)
    recorded = Recorded(strategy=strategy, is_streaming=is_streaming)
    await recorded.work()

    calls = recorded.calls
    assert [record.real_tokens for record in calls] == recorded.real_tokens
    assert len(calls) == TURNS * 3
    assert not any(metadata(event) for event in recorded.events if event.partial)
    assert any(event.partial for event in recorded.events) is is_streaming
    # Of the first, how the provider spells tools is not known yet.
    assert all(c.estimated_tokens >= 0.9 * (c.real_tokens or 0) for c in calls[1:])
    assert {(c.agent, c.session_id) for c in calls} == {("agent", "session")}

    compactions = [c.compaction for c in calls if c.compaction is not None]
    assert len(compactions) >= 2
    assert compactions == recorded.compactions

    for event, told in zip(recorded.answers, calls, strict=True):
        described = metadata(event)
        record = told.compaction
        assert (described is None) is (record is None)
        if record is None:
            continue
        assert len(json.dumps(described)) < 450
        compaction = described.pop("compaction")
        assert described == {
            "estimate": told.estimated_tokens,
            "real": told.real_tokens,
            "window": WINDOW,
            "pressure": round(told.estimated_tokens / WINDOW, 3),
        }
        assert compaction["strategy"] == type(strategy).__name__
        assert compaction["tokens_before"] == record.tokens_before
        assert compaction["contents_after"] == record.contents_after
        assert (compaction["summaries"], compaction["mechanical"]) == (1, False)


async def test_a_recovered_call_is_recorded() -> None:
    """It counts as one call, of the request that was answered."""
    recorded = Recorded(strategy=Threshold(context_window=100_000), is_streaming=True)
    await recorded.work()
    assert recorded.llm.rejections == 1
    assert [record.real_tokens for record in recorded.calls] == recorded.real_tokens

    (recovered,) = [record for record in recorded.calls if record.is_recovered]
    assert recovered.window_tokens == WINDOW
    assert recovered.real_tokens is not None
    assert 0.8 < recovered.estimated_tokens / recovered.real_tokens < 1.5
    assert recovered.compaction is not None
    assert recovered.compaction.is_recovery

    (event,) = [e for e in recorded.answers if "recovered" in (metadata(e) or {})]
    assert metadata(event)["compaction"]["reason"] == "overflow"


async def test_a_failing_listener_ends_no_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Sync or async, it is told; the log has its error's type and place, no text."""
    told: list[object] = []

    def listen(record: object) -> None:
        told.append(record)
        raise RuntimeError(SECRET)

    async def listen_later(record: object) -> None:
        listen(record)

    guard = {"on_call": listen, "on_compaction": listen_later, "on_pressure": listen}
    llm = SimulatedLlm(context_window=WINDOW)
    chat = guarded_chat(llm, guard={**guard, "warning_threshold": 0.01})
    for name in "abcd":
        events = await chat.say(words(1_300, name))
        assert events[-1].content
    for kind in (CallRecord, CompactionRecord, PressureRecord):
        assert any(isinstance(record, kind) for record in told)
        said = f"A listener for {kind.__name__} failed: RuntimeError at "
        place = r".* > tests/test_records\.py:\d+ in listen"
        assert re.search(said + place, caplog.text)
    assert SECRET not in "".join(own_lines(caplog))


def forget(request: LlmRequest) -> None:
    """Leaves the newest message alone."""
    del request.contents[:-1]


async def test_a_warning_for_each_crossing(caplog: pytest.LogCaptureFixture) -> None:
    """It is not repeated while pressure stays high, and comes again after a fall."""
    # Four bytes are a token here, for the guard and for the provider.
    llm = SimulatedLlm(context_window=128_000, token_ratio=1.0)
    before = [Changing(forget)]
    strategy = Threshold(context_window=128_000)
    guard = {"observe": True}
    recorded = Recorded(llm, strategy, guard=guard, before=before)
    await recorded.work(1, "Hello.")
    for number, size in enumerate([95_000, 95_000, 100, 95_000]):
        await recorded.work(1, words(size, str(number)))
    assert max(record.pressure for record in recorded.calls) > 0.7
    assert len(recorded.pressures) == 2
    assert not llm.rejections

    lines = [r for r in caplog.records if "is under pressure" in r.getMessage()]
    assert [line.levelno for line in lines] == [logging.WARNING] * 2


def _without_adks(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    """The attributes that are not also those of ADK's own compactions."""
    adks = ("gen_ai.compaction.", "gen_ai.conversation.")
    found = attributes or {}
    return {name: found[name] for name in found if not name.startswith(adks)}


async def test_a_compaction_has_a_span_below_adks(
    exporter: InMemorySpanExporter,
) -> None:
    """It carries the record: names and numbers, some by OpenTelemetry's names."""
    recorded = Recorded(guard={"prices": {"simulated": Costs(input=1, output=8)}})
    await recorded.work()
    spans = exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in spans if span.context}
    compacts = [span for span in spans if span.name == "context_guard.compact"]
    assert len(compacts) == len(recorded.compactions) >= 2

    for span, record in zip(compacts, recorded.compactions, strict=True):
        own = asdict(record)
        usage = own.pop("usage")
        _ = own.pop("model")
        assert own.pop("failure") == ""
        own["cost_usd"] = own.pop("cost")
        assert _without_adks(span.attributes) == {
            **{f"context_guard.{key}": value for key, value in own.items()},
            "gen_ai.operation.name": "summarize",
            "gen_ai.request.model": "simulated",
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.cache_read.input_tokens": usage["cached_tokens"],
            "gen_ai.usage.output_tokens": usage["output_tokens"],
        }
        assert span.parent
        # It depends on ADK's release and settings which span is open there.
        assert by_id[span.parent.span_id].name in ("call_llm", "invoke_agent agent")


async def test_a_span_has_the_names_of_adks_own_compactions(
    exporter: InMemorySpanExporter,
) -> None:
    """A dashboard of ADK's compactions shows those of the guard, by the same names."""
    without_guard = Chat(
        LlmAgent(name="agent", model=SimulatedLlm()),
        [Changing(begin_as_user)],
        events_compaction_config=EventsCompactionConfig(
            token_threshold=100,
            event_retention_size=1,
            compaction_interval=100,
            overlap_size=1,
        ),
    )
    for question in ("Who is it?", words(600), words(600)):
        await without_guard.say(question)
    await Recorded().work()

    own = find_attributes(exporter, "context_guard.compact")
    adks = find_attributes(exporter, "compact_events")
    assert own
    named = {name for found in adks for name in found if "compaction" in name}
    assert len(named) >= 7
    assert all(named - {*found} <= NAMED_BY_ADK_ALONE for found in own)


async def test_a_span_says_what_the_summary_stands_for(
    exporter: InMemorySpanExporter,
) -> None:
    """By ADK's attributes: how many events, from when to when, and what it saves."""
    recorded = Recorded()
    await recorded.work()
    times = [event.timestamp for event in await recorded.chat.events()]
    spans = find_attributes(exporter, "context_guard.compact")
    assert len(spans) >= 2

    ends = [span["gen_ai.compaction.end_timestamp"] for span in spans]
    assert times[0] < ends[0]
    assert ends == sorted({*ends})
    for span, end in zip(spans, ends, strict=True):
        own = {name.removeprefix("gen_ai.compaction."): span[name] for name in span}
        assert own["prompt_chars_saved"] > 1_000
        assert {name: own[name] for name in ("trigger", "summarizer_type")} == {
            "trigger": "token_threshold",
            "summarizer_type": "Threshold",
        }
        assert own["token_threshold"] == WINDOW * 0.8
        assert own["gen_ai.conversation.id"] == "session"
        assert own["start_timestamp"] == times[0]
        assert own["event_count"] == times.index(end) + 1


async def test_a_compaction_by_messages_is_named_as_adk_names_it(
    exporter: InMemorySpanExporter,
) -> None:
    """ADK calls it `sliding_window` if a number of messages is the reason."""
    llm = SimulatedLlm(script=[words(600)] * TURNS)
    recorded = Recorded(llm, SlidingWindow(max_messages=6, context_window=32_000))
    await recorded.work()
    assert {record.reason for record in recorded.compactions} == {"turns"}

    spans = find_attributes(exporter, "context_guard.compact")
    triggers = [span["gen_ai.compaction.trigger"] for span in spans]
    assert triggers == ["sliding_window"] * len(recorded.compactions)


def find_attributes(exporter: InMemorySpanExporter, name: str) -> list[dict[str, Any]]:
    """The attributes of each span whose name begins so."""
    return [
        {**(span.attributes or {})}
        for span in exporter.get_finished_spans()
        if span.name.startswith(name)
    ]


async def test_no_message_text_is_reported(
    exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    """No record, span, event or log line has what anybody said."""
    caplog.set_level(logging.INFO, "contextguard_adk")
    recorded = Recorded(finding=f"{SECRET} {FINDING}")
    replies: list[Reply] = [RuntimeError(SECRET), f"The {SECRET} summary."]
    recorded.llm.summary_replies = replies
    await recorded.work(question=f"Where is {SECRET}?")
    assert any(SECRET in r.text for r in recorded.llm.requests if r.is_summary)
    assert len(recorded.compactions) >= 2

    ours = [s for s in exporter.get_finished_spans() if "context_guard" in s.name]
    assert len(ours) == len(recorded.compactions)

    lines = own_lines(caplog)
    assert len(lines) >= 3

    told = [metadata(event) for event in recorded.answers]
    shown = recorded.calls, recorded.compactions, told, [s.to_json() for s in ours]
    assert SECRET not in repr((shown, lines))
