"""A summary goes on when its turn is cancelled, and the next turn has it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent
from google.adk.models.llm_request import LlmRequest

from contextguard_adk import (
    CallRecord,
    Compaction,
    CompactionContext,
    CompactionRecord,
    ContextGuardPlugin,
    MessageWindow,
    Pipeline,
    SlidingWindow,
    Strategy,
    Threshold,
    Usage,
)
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import SUMMARY_BEGIN, Chat, answer_text, model, user
from tests.chats import DEMAND, SUMMARY, Doing, guarded_chat, seed, words
from tests.guarded import SMALL, WINDOW, is_compacted
from tests.test_databases import own_database

OLD = [user("The task."), model(words(3_000, "ORIGINAL"))]


class Slow:
    """Writes summaries once it is let go; before, whoever waits runs out of time."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def write(self, request: LlmRequest) -> Reply:
        """Writes one."""
        self.now += 1
        self.most = max(self.most, self.now)
        self.has_begun.set()
        try:
            await self.may_end.wait()
        finally:
            self.now -= 1
        return "What they have said."

    async def end(self) -> None:
        """Lets it be written, while nobody waits."""
        self.may_end.set()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})

    async def interrupt(self, chat: Chat, message: str) -> None:
        """Sends a message whose turn has no more time once it waits for a summary."""
        turn = asyncio.ensure_future(chat.say(message))
        begun = asyncio.ensure_future(self.has_begun.wait())
        await asyncio.wait([begun, turn], return_when="FIRST_COMPLETED")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(turn, 0.05)


def slow_llm(slow: Slow, **settings: Any) -> SimulatedLlm:
    """A model whose summaries are slow."""
    settings.setdefault("context_window", 100_000)
    return SimulatedLlm(summary_replies=slow.write, **settings)


STRATEGIES: dict[str, Strategy] = {
    "threshold": SMALL,
    "sliding": SlidingWindow(context_window=WINDOW, summarizer_context_window=100_000),
    "pipeline": Pipeline(
        context_window=WINDOW,
        summarizer_context_window=100_000,
        window=MessageWindow(),
    ),
}


@pytest.mark.parametrize("waits", [0, 1, 2], ids=lambda count: f"{count} wait for it")
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_the_next_turn_has_the_summary(
    kind: str, waits: int, tmp_path: Path
) -> None:
    """One is paid for, never two at once; told of once, with the call that has it."""
    slow, told, calls = Slow(), list[CompactionRecord](), list[CallRecord]()
    llm = slow_llm(slow)
    listeners = {"on_compaction": told.append, "on_call": calls.append}
    async with own_database(kind, tmp_path) as store, store.open() as service:
        chat = guarded_chat(llm, SMALL, guard=listeners, session_service=service)
        await seed(chat, *OLD)
        await slow.interrupt(chat, "First.")
        for number in range(waits):
            await slow.interrupt(chat, f"Again {number}.")
        assert not (await chat.state()).get(SUMMARY)
        assert (slow.now, told, calls) == (1, [], [])
        await slow.end()
        assert answer_text(await chat.say("Go on.")) == "Acknowledged: Go on."
        assert (await chat.state())[SUMMARY] == "What they have said."
        await chat.say("Well done.")
    assert (llm.summaries, slow.most) == (1, 1)
    assert all(is_compacted(request) for request in llm.requests[-2:])
    assert "Go on." in llm.requests[-2].text
    assert "ORIGINAL" not in llm.requests[-2].text
    assert len(told) == 1
    assert [call.compaction for call in calls] == [told[0], None]
    assert told[0].usage.prompt_tokens > 0
    assert [call.summary_usage for call in calls] == [told[0].usage, Usage()]


@pytest.mark.parametrize("name", STRATEGIES)
async def test_a_turn_that_comes_in_between_waits_for_it(name: str) -> None:
    """It has time enough, and pays for no summary of its own."""
    slow = Slow()
    llm = slow_llm(slow)
    chat = guarded_chat(llm, STRATEGIES[name])
    talk = [user("Hello."), model("Hello.")] * 12
    await seed(chat, *talk, *OLD, *talk)
    await slow.interrupt(chat, "First.")
    turn = asyncio.ensure_future(chat.say("Go on."))
    await asyncio.sleep(0.05)
    await slow.end()
    assert answer_text(await turn) == "Acknowledged: Go on."
    assert (llm.summaries, slow.most) == (1, 1)
    assert SUMMARY_BEGIN in llm.requests[-1].text


async def test_a_turn_that_fits_does_not_wait() -> None:
    """A deadline shorter than a summary costs one turn, however long that takes."""
    slow, told = Slow(), list[CompactionRecord]()
    llm = slow_llm(slow, token_ratio=1.0)
    strategy = Threshold(context_window=10_000, summarizer_context_window=100_000)
    chat = guarded_chat(llm, strategy, guard={"on_compaction": told.append})
    await seed(chat, user("The task."), model(words(5_000, "ORIGINAL")))
    await chat.say("Hello.")
    await seed(chat, user("More."), model(words(3_200)))
    await slow.interrupt(chat, "First.")
    for message in ("Go on.", "And on."):
        assert answer_text(await chat.say(message)) == f"Acknowledged: {message}"
        assert "ORIGINAL" in llm.requests[-1].text
    await slow.end()
    await chat.say("Well done.")
    assert is_compacted(llm.requests[-1])
    assert (llm.summaries, llm.rejections, len(told)) == (1, 0, 1)


async def test_a_demand_is_met_by_it() -> None:
    """A compaction that somebody asked for is not made a second time."""
    slow = Slow()
    llm = slow_llm(slow)
    chat = guarded_chat(llm, SMALL)
    await seed(chat, *OLD, state=DEMAND)
    await slow.interrupt(chat, "First.")
    await slow.end()
    await chat.say("Go on.")
    state = await chat.state()
    assert [state[key] for key in DEMAND] == [False]
    assert not state.get("context_guard:compact_refused")
    assert llm.summaries == 1


async def test_a_resend_has_one_too() -> None:
    """What is summarized after a rejection is not lost either."""
    slow = Slow()
    llm = SimulatedLlm(context_window=3_000, token_ratio=1.0)
    summarizer = slow_llm(slow)
    wide = SMALL.model_copy(update={"context_window": 50_000})
    chat = guarded_chat(llm, wide.model_copy(update={"summarizer": summarizer}))
    await seed(chat, *OLD)
    await slow.interrupt(chat, "First.")
    assert llm.rejections == 1
    await slow.end()
    assert answer_text(await chat.say("Go on.")) == "Acknowledged: Go on."
    assert (llm.rejections, summarizer.summaries, slow.most) == (1, 1, 1)


@pytest.mark.filterwarnings(r"ignore:\w+Agent is deprecated:DeprecationWarning")
async def test_each_agent_has_its_own() -> None:
    """Two agents at once are in nobody's way."""
    slow = Slow()
    llm = slow_llm(slow)
    agents: list[Any] = [LlmAgent(name=name, model=llm) for name in ("one", "two")]
    root = ParallelAgent(name="both", sub_agents=agents)
    chat = Chat(root, [ContextGuardPlugin(default=SMALL)])
    await seed(chat, *OLD)
    await slow.interrupt(chat, "First.")
    await slow.interrupt(chat, "Again.")
    assert (slow.now, llm.summaries) == (2, 2)
    await slow.end()
    await chat.say("Go on.")
    assert (slow.most, llm.summaries) == (2, 2)
    assert [is_compacted(request) for request in llm.requests[-2:]] == [True, True]


async def test_a_rewind_in_between() -> None:
    """A summary that knows of a message that was taken back is not used."""
    slow = Slow()
    llm = slow_llm(slow)
    chat = guarded_chat(llm, SMALL)
    await seed(chat, *OLD)
    await slow.interrupt(chat, "A secret.")
    rewound = (await chat.events())[-1].invocation_id
    await chat.runner.rewind_async(
        user_id="user", session_id="session", rewind_before_invocation_id=rewound
    )
    await slow.end()
    count = llm.calls
    await chat.say("Go on.")
    assert llm.summaries == 2
    assert "A secret." not in "".join(each.text for each in llm.requests[count:])


def run_and_leave(turn: Any) -> None:
    """Closes a loop with what is still under way, as `asyncio.run` does not."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(turn)
    loop.close()


@pytest.mark.parametrize("run", [asyncio.run, run_and_leave])
def test_a_loop_that_ends_takes_it_along(
    run: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    """No word of it in the log; a turn on another loop has a summary of its own."""
    slow = Slow()
    llm = slow_llm(slow)
    chat = guarded_chat(llm, SMALL)

    async def first() -> None:
        await seed(chat, *OLD)
        await slow.interrupt(chat, "First.")

    async def second() -> None:
        llm.summary_replies = ["What they have said."] * 2
        await chat.say("Go on.")

    run(first())
    asyncio.run(second())
    gc.collect()
    assert llm.summaries == 2
    assert is_compacted(llm.requests[-1])
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("outcome", ["a summary", "an error"])
async def test_nothing_of_the_conversation_stays(
    outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What a strategy was shown is let go of with its end, and an error is no noise."""
    seen: list[weakref.ref[Any]] = []
    slow = Slow()

    async def act(context: CompactionContext) -> Compaction | None:
        if context.is_due:
            compaction = await context.summarize_all(1)
            seen.extend(map(weakref.ref, (context.view, compaction)))
            if outcome == "an error":
                raise RuntimeError("boom")
            return compaction
        return None

    doing = Doing(act=act, **SMALL.model_dump(exclude={"reuse_prompt_cache"}))
    chat = guarded_chat(slow_llm(slow), doing)
    await seed(chat, *OLD)
    await slow.interrupt(chat, "First.")
    await slow.end()
    gc.collect()
    assert [each() for each in seen] == [None, None]
    assert not [record for record in caplog.records if record.name == "asyncio"]
