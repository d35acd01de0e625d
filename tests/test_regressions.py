"""What others add or end at an odd moment costs no summary, no thought and no tool."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import suppress

import pytest
from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_request import LlmRequest
from google.adk.tools.function_tool import FunctionTool
from google.genai import types

from contextguard_adk import ContextGuardPlugin, PressureRecord, Threshold
from contextguard_adk.strategies import Ask, Draft, Turn
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as tool_call
from tests.builders import SUMMARY_BEGIN, Chat, answer_text, guarded_agent, queued_tool
from tests.chats import guarded_chat, words


def calling(count: int) -> list[Reply]:
    """A script that calls a tool so many times, and then answers."""
    return [*(tool_call("search", step=step) for step in range(count)), "Done."]


async def test_a_recovery_declares_the_tool_that_its_summary_names() -> None:
    """The model may call it at once."""
    llm = SimulatedLlm(context_window=8_000, token_ratio=1.0, script=calling(10))
    agent = {"tools": [queued_tool("search", [words(1_600)] * 10)]}
    chat = guarded_chat(llm, Threshold(context_window=100_000), agent=agent)
    assert answer_text(await chat.say("Find it.")) == "Done."
    assert llm.rejections == 1
    resent = next(each for each in llm.requests if SUMMARY_BEGIN in each.text)
    assert "recall_history" in resent.config.model_dump_json()


def late(step: int = 0) -> str:
    """A tool that a callback adds."""
    return str(step)


def add_tool(callback_context: CallbackContext, llm_request: LlmRequest) -> None:
    """Adds a tool in place, after the guard."""
    llm_request.append_tools([FunctionTool(late)])


async def test_a_tool_that_comes_late_costs_no_thoughts() -> None:
    """Nothing has changed between calls: all thoughts go out again."""
    numbers = itertools.count(1)

    def think(request: LlmRequest) -> Reply:
        number = next(numbers)
        signature = b"signed %d" % number
        thought = types.Part(text="Hm.", thought=True, thought_signature=signature)
        said = tool_call("search", step=number) if number % 4 else "Done."
        return [thought, types.Part(text=said) if isinstance(said, str) else said]

    llm = SimulatedLlm(context_window=80_000, model="claude-opus-6", script=think)
    tools = [queued_tool("search", ["a result"])]
    agent = guarded_agent(llm, tools, before_model_callback=add_tool)
    chat = Chat(agent, [ContextGuardPlugin()])
    for turn in range(2):
        await chat.say(f"Find {turn}.")
    sent = [
        sum(
            bool(part.thought) for each in request.contents for part in each.parts or ()
        )
        for request in llm.requests
    ]
    assert sent == [*range(8)]


class Halving(Threshold):
    """Covers half of the history, wherever that ends."""

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Ends between a call and its result."""
        half = len(turn.messages) // 2 // 2 * 2
        covered = frozenset(range(half))
        return Draft("In short.", covered, covered, 9, turn.reason)


async def test_a_draft_that_splits_a_pair_is_put_in_without_it() -> None:
    """It is not asked for again on every call."""
    llm = SimulatedLlm(context_window=12_000, token_ratio=1.0, script=calling(19))
    agent = {"tools": [queued_tool("search", [words(600)])]}
    records = list[object]()
    chat = guarded_chat(
        llm,
        Halving(context_window=8_000),
        guard={"on_compaction": records.append},
        agent=agent,
    )

    assert answer_text(await chat.say("Find it.")) == "Done."
    assert (llm.rejections, llm.violations) == (0, 0)
    assert len(records) >= 2
    assert SUMMARY_BEGIN in llm.requests[-1].text


async def test_a_summary_that_waited_long_outlives_a_cancelled_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was written in the background eleven minutes before it was put in."""
    hangs = asyncio.Event()

    async def answer(request: LlmRequest) -> Reply:
        if "Hang." in str(request.contents[-1]):
            hangs.set()
            await asyncio.Event().wait()
        return "Yes."

    llm = SimulatedLlm(context_window=20_000, token_ratio=1.0, script=answer)
    chat = guarded_chat(llm, Threshold(context_window=10_000, ahead=0.75))
    for number in itertools.count():
        await chat.say(words(900, f"Message {number}."))
        await asyncio.sleep(0.02)
        if llm.summaries:
            break
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 700)
    turn = asyncio.create_task(chat.say(words(2_500, "Hang.")))
    await hangs.wait()
    turn.cancel()
    with suppress(asyncio.CancelledError):
        await turn
    assert SUMMARY_BEGIN in llm.requests[-1].text
    await chat.say("And now?")
    assert SUMMARY_BEGIN in llm.requests[-1].text
    assert llm.summaries == 1


class Silent(Threshold):
    """Does not say how near it is, so it is asked on every call."""

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Decides as its base does."""
        return await super().compact(turn, ask)


async def test_nothing_is_under_pressure_before_its_compaction() -> None:
    """A strategy that was asked and has nothing to do is no reason to warn."""
    seen = list[PressureRecord]()
    llm = SimulatedLlm(context_window=10_000)
    strategy = Silent(context_window=10_000)
    guard = {"on_pressure": seen.append}
    chat = guarded_chat(llm, strategy, guard=guard)
    while not llm.summaries:
        await chat.say(words(700))
        assert not seen
