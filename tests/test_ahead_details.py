"""What a summary written ahead must not disturb, and what must not disturb it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LlmAgent
from google.adk.models.llm_request import LlmRequest
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

from contextguard_adk import (
    Compaction,
    CompactionContext,
    CompactionRecord,
    ContextGuardPlugin,
    Pipeline,
    SummaryCompaction,
    Threshold,
    ToolOutputTruncation,
)
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm
from contextguard_adk.testing import call as call_tool
from tests.builders import Chat, call, model, queued_tool, response, user
from tests.chats import EXACT, Changing, agent_requests, guarded_chat, seed, words
from tests.guarded import is_compacted
from tests.test_ahead import STRATEGY, Talk, go_as_far_as_possible, settle
from tests.test_ahead_faults import Sessions, closes_at_last, in_virtual_time

pytestmark = pytest.mark.filterwarnings(
    "ignore:The `plugins` argument:DeprecationWarning"  # By ADK's own AgentTool.
)

SIZES: dict[str, Any] = {
    name: getattr(STRATEGY, name)
    for name in ("context_window", "summarizer_context_window", "ahead", "recall")
}


def wrap(agent: BaseAgent) -> LlmAgent:
    """An agent that has another do its work."""
    script: list[Reply] = [call_tool(agent.name, request="Go."), "Done."]
    llm = SimulatedLlm(context_window=100_000, script=3 * script)
    return LlmAgent(name="root", model=llm, tools=[AgentTool(agent)])


def takes(seconds: float) -> Callable[[LlmRequest], Awaitable[Reply]]:
    """A summarizer that is slow."""

    async def write(request: LlmRequest) -> Reply:
        await asyncio.sleep(seconds)
        return "Of all before."

    return write


def results(request: RecordedRequest) -> list[str]:
    """The tool results in a request."""
    parts = [part for each in request.contents for part in each.parts or ()]
    return [str(p.function_response.response) for p in parts if p.function_response]


@pytest.mark.parametrize(("ahead", "tokens"), [(0.75, 6_100), (None, 8_100)])
async def test_an_agent_tool_of_another_session_does_not_end_it(
    ahead: float | None, tokens: int
) -> None:
    """The runner of such a tool closes all plugins on some versions of ADK."""
    talk = Talk(STRATEGY.model_copy(update={"ahead": ahead}))
    turn = asyncio.create_task(talk.begin(tokens))
    await go_as_far_as_possible()
    assert talk.writer.now == 1
    child = LlmAgent(name="child", model=SimulatedLlm(context_window=100_000))
    await Chat(wrap(child), talk.chat.app.plugins, session_id="other").say("Go.")
    assert talk.writer.now == 1
    await talk.writer.end()
    await turn
    assert is_compacted(await talk.say(words(2_500, "SECOND")))
    assert talk.llm.summaries == 1


@pytest.mark.parametrize("case", ["ahead", "cancelled", "two runs"])
def test_a_summary_of_several_calls_is_waited_for(case: str) -> None:
    """The timeout is that of one call; nothing is paid for twice."""

    async def work() -> None:
        llm = SimulatedLlm(
            context_window=100_000, summary_replies=takes(25), token_ratio=1.0
        )
        ahead, tokens = (0.75, 1_800) if case == "ahead" else (None, 2_500)
        update = {"ahead": ahead, "summarizer_context_window": 3_000}
        chat = guarded_chat(llm, STRATEGY.model_copy(update=update))
        told = [user("Go on."), model(words(tokens, "ORIGINAL"))] * 4
        await seed(chat, *told, state=EXACT)
        first = asyncio.create_task(chat.say("First."))
        await asyncio.sleep(1)
        if case == "cancelled":
            first.cancel()
        second = chat.say(words(2_000, "SECOND"))
        await asyncio.gather(first, second, return_exceptions=True)
        assert 60 < asyncio.get_running_loop().time() <= 76
        assert llm.summaries == 3
        sent = agent_requests(llm)[case == "ahead" :]
        assert all(map(is_compacted, sent))

    in_virtual_time(work())


@pytest.mark.parametrize("fixed_tokens", [3_200, 3_900])
async def test_a_long_instruction_does_not_prevent_it(fixed_tokens: int) -> None:
    """It takes nearly half of the trigger."""
    talk = Talk(agent={"instruction": words(fixed_tokens, "You help.")})
    talk.writer.may_end.set()
    await seed(talk.chat, state=EXACT)
    while len(talk.told) < 3:
        await talk.say(words(300, f"Message {len(talk.calls)}."))
        await settle()
    assert [record.was_ahead for record in talk.told] == [True] * 3
    assert talk.llm.largest_request_tokens < 8_000


async def test_a_result_that_came_since_is_not_cut() -> None:
    """Nobody would have seen what is left out, neither agent nor summarizer."""
    large = f"{words(1_900, 'HEAD')} THE-FACT {words(2_400)}"
    talk = Talk(agent={"tools": [queued_tool("lookup", [large])]})
    talk.llm.script = ["First.", call_tool("lookup"), "Done."]
    talk.writer.may_end.set()
    await talk.begin()
    await settle()
    await talk.say("Second.")
    assert [record.was_ahead for record in talk.told] == [True]
    assert any("THE-FACT" in request.text for request in talk.llm.requests)


@pytest.mark.parametrize(
    ("reserved_tokens", "ahead"), [(2_000, [True, False]), (None, [True])]
)
async def test_what_is_too_large_with_it_is_compacted_once_more(
    reserved_tokens: int | None, ahead: list[bool]
) -> None:
    """Above the trigger, unless there is room for the answer."""
    config = types.GenerateContentConfig(max_output_tokens=reserved_tokens)
    talk = Talk(agent={"generate_content_config": config})
    talk.writer.may_end.set()
    await talk.begin()
    await settle()
    await seed(talk.chat, model(words(8_300, "LARGE")))
    sent = await talk.say("Go on.")
    assert [record.was_ahead for record in talk.told] == ahead
    assert ("LARGE" in sent.text) == (reserved_tokens is None)
    assert talk.told[0].tokens_after > 8_000


def test_below_the_trigger_no_call_waits() -> None:
    """However uncertain the estimate is: the provider reports no usage."""

    async def work() -> None:
        talk = Talk()
        talk.llm.usage = "never"
        await seed(talk.chat, user("The task."), model(words(4_500, "ORIGINAL")))
        await talk.say("First.")
        await talk.say(words(700, "SECOND"))
        assert asyncio.get_running_loop().time() == 0
        assert 7_750 < talk.calls[-1].estimated_tokens < 8_000
        assert talk.writer.now == 1
        assert not talk.told

    in_virtual_time(work())


class Early(Threshold):
    """Has its own idea of when, and tells nobody."""

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Compacts from 0.4 of the threshold on."""
        if context.fullness < 0.4:
            return None
        return await context.summarize_all(1)


class EarlyTelling(Early):
    """Says as well how near that is."""

    def fullness(self, context: CompactionContext) -> float:
        """As `compact` sees it."""
        return context.fullness / 0.4


@pytest.mark.parametrize(("kind", "is_ahead"), [(Early, False), (EarlyTelling, True)])
async def test_a_subclass_may_compact_early(
    kind: type[Threshold], is_ahead: bool
) -> None:
    """It is called for every request, whatever its base class says."""
    talk = Talk(kind(**SIZES))
    talk.writer.may_end.set()
    await talk.begin(2_600)
    await settle()
    assert talk.llm.summaries == is_ahead
    assert is_compacted(await talk.say(words(1_000, "SECOND")))
    assert [record.was_ahead for record in talk.told] == [is_ahead]
    assert talk.llm.summaries == 1


async def test_what_a_pipeline_has_shortened_stays_short() -> None:
    """Also in the request with the summary, and in the next one."""
    strategy = Pipeline(
        window=None,
        tool_output=ToolOutputTruncation(max_length=800),
        summary=SummaryCompaction(trigger_threshold=0.55, preserve_recent_count=14),
        **SIZES,
    )
    talk = Talk(strategy)
    talk.writer.may_end.set()
    told = [user("The task."), model(words(1_000)), user("More.")]
    for step in range(10):
        result = response("look", words(600, f"Result {step}."))
        told += [call("look", step=step), result]
    await seed(talk.chat, *told, model("Done."), state=EXACT)
    while len(talk.told) < 2:
        sent = await talk.say(words(600, f"Message {len(talk.calls)}."))
        await settle()
    assert [record.was_ahead for record in talk.told] == [False, True]
    *short, last = results(sent)
    assert short
    assert len(last) > 2_000 > max(map(len, short))
    assert results(await talk.say("Go on.")) == [*short, last]
    assert len(talk.told) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda request: request.contents[-1].parts.append(types.Part(text="And now?")),
        lambda request: request.contents.insert(0, user("The context of the day.")),
    ],
    ids=["adds a part", "inserts a content"],
)
async def test_who_changes_the_request_later_does_not_spoil_it(
    change: Callable[[LlmRequest], None],
) -> None:
    """A plugin behind the guard, while a tool's result is the last content."""
    tools = [queued_tool("lookup", [words(300)])]
    talk = Talk(agent={"tools": tools}, plugins=[Changing(change)])
    talk.llm.script = [call_tool("lookup"), "Done.", "Done.", "Done."]
    talk.writer.may_end.set()
    await talk.begin(5_800)
    await settle()
    await talk.say("Second.")
    assert talk.llm.summaries == 1
    await talk.say(words(2_500, "THIRD"))
    assert [record.was_ahead for record in talk.told] == [True]
    assert talk.llm.summaries == 1


@pytest.mark.parametrize("is_tool", [False, True], ids=["agent", "agent tool"])
async def test_each_run_of_an_agent_without_memory_has_its_own(is_tool: bool) -> None:
    """One that an earlier run has left is of no use, and no hindrance."""
    left, told = 0, list[CompactionRecord]()

    def script(request: LlmRequest) -> Reply:
        nonlocal left
        left -= 1
        return call_tool("lookup", step=left) if left >= 0 else "Done."

    async def lookup(step: int) -> str:
        """Looks up much."""
        await go_as_far_as_possible()
        return words(550, f"Step {step}.")

    llm = SimulatedLlm(context_window=100_000, script=script, token_ratio=1.0)
    agent = LlmAgent(name="agent", model=llm, tools=[lookup], include_contents="none")
    guard = ContextGuardPlugin(agents={"agent": STRATEGY}, on_compaction=told.append)
    chat = Chat(wrap(agent) if is_tool else agent, [guard])
    for run, steps in enumerate((12, 16, 16)):
        left = steps
        await chat.say("Go.")
        await settle()
        assert llm.summaries == run + 1
        assert [record.was_ahead for record in told] == [True] * run
        assert llm.largest_request_tokens < 8_000


def test_event_loops_that_were_left_hold_no_places() -> None:
    """They were stopped, never closed, each with a summary under way."""
    sessions = Sessions(6)
    sessions.llm.summary_replies = takes(3_600)
    loops = [asyncio.new_event_loop() for _ in sessions.chats]
    for loop, chat in zip(loops, sessions.chats, strict=True):
        sessions.chats = [chat]
        loop.run_until_complete(sessions.begin())
    for loop in loops:
        loop.close()
    assert sessions.llm.summaries == 6


@closes_at_last
def test_who_closes_has_none_begun() -> None:
    """What waits for its place never has one."""

    async def work() -> None:
        sessions = Sessions(6, most=2)
        sessions.llm.summary_replies = takes(0.3)
        await sessions.begin()
        await sessions.plugin.close()
        assert sessions.llm.summaries == 2
        assert asyncio.all_tasks() == {asyncio.current_task()}

    in_virtual_time(work())


@pytest.mark.parametrize("ahead", [0.75, None])
async def test_a_pipeline_that_runs_early_has_one_reason(ahead: float | None) -> None:
    """Whether its summary is written ahead of time or not."""
    strategy = Pipeline(
        window=None,
        tool_output=None,
        summary=SummaryCompaction(trigger_threshold=0.55),
        compression_threshold=0.6,
        **{**SIZES, "ahead": ahead},
    )
    talk = Talk(strategy)
    talk.writer.may_end.set()
    await seed(talk.chat, *[user(words(200)), model(words(200))] * 12, state=EXACT)
    while not talk.told:
        await talk.say(words(300, f"Message {len(talk.calls)}."))
        await settle()
    (record,) = talk.told
    assert (record.was_ahead, record.reason) == (ahead is not None, "tokens")
    assert record.tokens_before < 8_000
