"""Token pressure: what is measured, and when somebody is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from contextguard_adk import (
    CompactionRecord,
    ContextGuardPlugin,
    Pipeline,
    PressureRecord,
    Strategy,
    Threshold,
    ToolOutputTruncation,
)
from contextguard_adk.summarizing.context import Compaction, CompactionContext
from contextguard_adk.testing import SimulatedLlm, call
from tests.builders import Chat, guarded_agent, queued_tool

# Four bytes are a token here, for the guard and for the provider.
WINDOW = 128_000


class Idle(Strategy):
    """Never compacts."""

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Does nothing."""
        return None


def tokens(count: int, name: str) -> str:
    """Prose of so many tokens."""
    return f"{name} {'he is up at six now ' * count}"[: 4 * count]


class Late(Strategy):
    """Compacts everything, but only at 95 % of the window."""

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Compacts late."""
        if context.tokens < 0.95 * context.budgets.window_tokens:
            return None
        return await context.summarize(context.older_than(0))


class Watched:
    """A guarded chat, and what its listeners were told."""

    def __init__(self, strategy: Strategy, llm: SimulatedLlm, **settings: Any) -> None:
        self.pressures: list[PressureRecord] = []
        self.compactions: list[CompactionRecord] = []
        plugin = ContextGuardPlugin(
            default=strategy,
            on_pressure=self.pressures.append,
            on_compaction=self.compactions.append,
            **settings,
        )
        tool = queued_tool("read", [tokens(30_000, "result")])
        self.llm = llm
        self.chat = Chat(guarded_agent(llm, [tool]), [plugin])

    async def say(self, count: int, name: str = "message") -> None:
        """Sends a message of so many tokens."""
        await self.chat.say(tokens(count, name))


def provider(**settings: Any) -> SimulatedLlm:
    """A provider that counts four bytes as a token."""
    defaults: dict[str, Any] = {
        "context_window": WINDOW,
        "token_ratio": 1.0,
        "script": lambda _: "ok",
    }
    return SimulatedLlm(**{**defaults, **settings})


async def test_the_estimate_is_of_the_request_not_of_the_last_response() -> None:
    """After a response of 70K a conversation of 120K counts 120K."""
    watched = Watched(Idle(context_window=WINDOW), provider())
    await watched.say(20_000)  # Now the guard knows how the provider counts.
    await watched.say(50_000)
    assert watched.pressures == []
    await watched.say(50_000)
    (record,) = watched.pressures
    assert record.tokens == pytest.approx(120_000, rel=0.03)
    assert record.pressure_before == record.pressure == pytest.approx(0.9375, rel=0.03)
    assert record.window_tokens == WINDOW


async def test_no_warning_when_compaction_helped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """100K of 128K brought down to 80K is 62 %, which is below 70 %."""
    llm = provider(script=["ok", call("read"), "ok", "ok", "ok"])
    strategy = Pipeline(
        context_window=WINDOW,
        compression_threshold=0.75,
        window=None,
        summary=None,
        tool_output=ToolOutputTruncation(
            max_length=40_000, preserve_last_tool_result=False
        ),
    )
    watched = Watched(strategy, llm)
    await watched.say(20_000)
    await watched.say(25_000)
    await watched.say(25_000)
    (compaction,) = watched.compactions
    assert compaction.tokens_before == pytest.approx(100_000, rel=0.03)
    assert compaction.tokens_after == pytest.approx(80_000, rel=0.05)
    assert watched.pressures == []
    assert "pressure" not in caplog.text


@pytest.mark.parametrize(
    ("threshold", "warnings"),
    [pytest.param(0.70, 0, id="0.70"), pytest.param(0.05, 1, id="0.05")],
)
async def test_the_pressure_after_compaction_counts(
    threshold: float, warnings: int
) -> None:
    """What is sent decides; both values are told."""
    llm = provider(summary_replies=[tokens(9_000, "summary")])
    watched = Watched(
        Threshold(context_window=WINDOW), llm, warning_threshold=threshold
    )
    await watched.say(60_000)
    await watched.say(50_000)
    assert len(watched.pressures) == warnings
    for record in watched.pressures:
        assert record.pressure_before > 0.8
        assert record.pressure < 0.6
        assert record.warning_threshold == threshold


async def test_an_early_run_says_that_tokens_were_the_reason() -> None:
    """Below the threshold it is `compression_threshold` that fires; and what is still
    above the warning threshold afterwards is reported."""
    strategy = Pipeline(
        context_window=WINDOW,
        compression_threshold=0.6,
        window=None,
        summary=None,
        tool_output=ToolOutputTruncation(max_length=1_000),
    )
    llm = provider(script=["ok", call("read"), "ok", call("read"), "ok"])
    watched = Watched(strategy, llm, warning_threshold=0.3)
    for _ in range(3):
        await watched.say(8_000)
    (compaction,) = watched.compactions
    assert compaction.reason == "tokens"
    assert compaction.tokens_before < 0.8 * WINDOW
    (record,) = watched.pressures
    assert record.tokens == compaction.tokens_after
    assert record.pressure_before == compaction.tokens_before / WINDOW


async def test_observing_reports_pressure(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing will be compacted, so what exceeds the warning threshold is told."""
    llm = provider(context_window=10 * WINDOW)
    watched = Watched(Threshold(context_window=WINDOW), llm, observe=True)
    await watched.say(20_000)
    await watched.say(60_000)
    assert watched.pressures == []
    await watched.say(14_000)
    await watched.say(30_000)
    (record,) = watched.pressures
    assert record.pressure == record.pressure_before == pytest.approx(0.734, rel=0.03)
    assert caplog.text.count("is under pressure") == 1
    assert not watched.compactions
    assert not llm.summaries


async def test_a_warning_once_per_crossing(caplog: pytest.LogCaptureFixture) -> None:
    """It is not repeated while pressure stays high, and comes again after a fall."""
    replies = ["Short."] * 4
    llm = provider(context_window=10 * WINDOW, summary_replies=replies)
    watched = Watched(Idle(context_window=WINDOW), llm)
    for name in "abc":
        await watched.say(50_000, name)
    await watched.say(1_000, "d")
    assert len(watched.pressures) == 1
    assert caplog.text.count("is under pressure") == 1
    assert caplog.records[-1].levelno == logging.WARNING


async def test_a_warning_again_after_a_fall() -> None:
    """Pressure that fell and rose again is told again."""
    llm = provider(summary_replies=["Short."] * 9)
    watched = Watched(Late(context_window=WINDOW), llm)
    await watched.say(10)
    for name in "abcdefghijkl":  # 84 %, compacted at 98 %, and 86 % again.
        await watched.say(18_000, name)
    assert watched.compactions
    assert len(watched.pressures) == 2
    assert not watched.llm.rejections


async def test_no_warning_below_the_threshold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On the way up nobody is told: compaction has not had its turn."""
    watched = Watched(Threshold(context_window=WINDOW), provider())
    await watched.say(20_000)
    for name in "abc":
        await watched.say(24_000, name)
    assert watched.llm.requests[-1].prompt_tokens > 0.7 * WINDOW
    assert not watched.pressures
    assert not watched.compactions
    assert "pressure" not in caplog.text


async def test_a_failing_listener_ends_no_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its type is logged, its text is not."""

    async def fail(record: object) -> None:
        raise RuntimeError("secret")

    llm = provider(summary_replies=["Short."])
    plugin = ContextGuardPlugin(
        default=Threshold(context_window=WINDOW),
        on_compaction=fail,
        on_pressure=fail,
        warning_threshold=0.01,
    )
    chat = Chat(guarded_agent(llm), [plugin])
    await chat.say(tokens(60_000, "a"))
    events = await chat.say(tokens(60_000, "b"))
    assert events[-1].content
    messages = [record.getMessage() for record in caplog.records]
    assert "A listener for CompactionRecord failed: RuntimeError." in messages
    assert "A listener for PressureRecord failed: RuntimeError." in messages
    assert "secret" not in caplog.text
