"""A summary is written while the agent goes on, and put in when it is due."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.genai import types
from pydantic import ValidationError

from contextguard_adk import (
    CallRecord,
    Compaction,
    CompactionContext,
    CompactionRecord,
    Pipeline,
    SlidingWindow,
    Strategy,
    SummaryCompaction,
    Threshold,
)
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm
from tests.builders import Chat, answer_text, guarded_agent, model, user
from tests.chats import (
    DEMAND,
    EXACT,
    SUMMARY,
    agent_requests,
    guarded_chat,
    seed,
    summary_requests,
    words,
)
from tests.guarded import is_compacted

WINDOW = 10_000
"""Threshold 8,000 tokens; up to 9,000 a request leaves room for its answer."""

STRATEGY = Threshold(
    context_window=WINDOW, summarizer_context_window=100_000, ahead=0.75, recall=False
)
"""From 6,000 tokens on summaries are written."""


class Writer:
    """Writes summaries once it may."""

    def __init__(self) -> None:
        self.now = self.most = self.begun = 0
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def write(self, request: LlmRequest) -> Reply:
        """Writes one, or fails."""
        self.begun += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.may_end.wait()
        finally:
            self.now -= 1
        return self.error or f"Summary number {self.begun}, of all before."

    async def end(self) -> None:
        """Lets those end that are under way."""
        self.may_end.set()
        await settle()


async def go_as_far_as_possible() -> None:
    """Lets all tasks go on until each waits for something."""
    for _ in range(500):  # Nothing here waits for a thread or for time.
        await asyncio.sleep(0)


async def settle() -> None:
    """Waits for all other tasks."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


class Talk:
    """A guarded chat whose summaries are let go by hand."""

    def __init__(self, strategy: Strategy = STRATEGY, **settings: Any) -> None:
        self.writer = Writer()
        self.told, self.calls = list[CompactionRecord](), list[CallRecord]()
        self.llm = SimulatedLlm(
            context_window=settings.pop("provider_window", 100_000),
            summary_replies=self.writer.write,
            token_ratio=1.0,
        )
        guard = settings.pop("guard", {})
        guard |= {"on_compaction": self.told.append, "on_call": self.calls.append}
        self.chat = guarded_chat(self.llm, strategy, guard=guard, **settings)

    async def begin(self, tokens: int = 6_100) -> None:
        """Says so much that a summary is begun."""
        told = user("The task."), model(words(tokens, "ORIGINAL"))
        await seed(self.chat, *told, state=EXACT)
        await self.say("First.")
        await asyncio.sleep(0)

    async def say(self, message: str) -> RecordedRequest:
        """Says something; returns what the agent's model was sent."""
        assert answer_text(await self.chat.say(message))
        return agent_requests(self.llm)[-1]


@pytest.fixture
async def talk() -> Talk:
    """A talk in which a summary is being written."""
    talk = Talk()
    await talk.begin()
    assert talk.writer.now == 1
    return talk


async def test_it_is_put_in_at_the_trigger_and_nobody_waits(talk: Talk) -> None:
    """Before the trigger requests stay whole; what came since stays word for word."""
    assert not is_compacted(await talk.say(words(500, "SECOND")))
    await talk.writer.end()
    assert not is_compacted(await talk.say(words(500, "THIRD")))
    sent = await talk.say(words(1_000, "FOURTH"))
    assert is_compacted(sent)
    assert "Summary number 1, of all before." in sent.text
    assert "ORIGINAL" not in sent.text
    said = [p.text or "" for c in sent.contents for p in c.parts or ()]
    for message in (words(500, "SECOND"), words(500, "THIRD"), words(1_000, "FOURTH")):
        assert said.count(message) == 1
    assert talk.llm.summaries == 1
    (record,) = talk.told
    assert record.was_ahead
    assert record.reason == "tokens"
    assert record.usage.prompt_tokens == summary_requests(talk.llm)[0].prompt_tokens
    assert record.model == "simulated"
    assert min(record.waited_seconds, record.duration_seconds) > 0
    state = await talk.chat.state()
    assert state[SUMMARY] == "Summary number 1, of all before."
    assert [call.compaction for call in talk.calls] == [None, None, None, record]
    paid = sum((call.summary_usage.prompt_tokens for call in talk.calls), 0)
    assert paid == record.usage.prompt_tokens
    events = [event.custom_metadata or {} for event in await talk.chat.events()]
    (told,) = [each["context_guard"] for each in events if "context_guard" in each]
    assert told["compaction"]["was_ahead"] is True
    assert told["compaction"]["waited_seconds"] == round(record.waited_seconds, 3)


async def test_while_there_is_room_a_call_does_not_wait(talk: Talk) -> None:
    """Above the trigger requests go out as they are, with room for an answer."""
    assert not is_compacted(await talk.say(words(2_000, "SECOND")))
    assert talk.writer.now == 1
    last = asyncio.create_task(talk.say(words(2_000, "THIRD")))
    await go_as_far_as_possible()
    before, seconds = len(talk.llm.requests), asyncio.get_running_loop().time()
    await asyncio.sleep(0.01)
    assert len(talk.llm.requests) == before
    waited_seconds = asyncio.get_running_loop().time() - seconds
    await talk.writer.end()
    sent = await last
    assert is_compacted(sent)
    assert "SECOND" in sent.text
    (record,) = talk.told
    assert record.was_ahead
    assert record.waited_seconds >= round(waited_seconds, 3)
    assert (talk.llm.summaries, talk.writer.most) == (1, 1)


async def test_what_an_answer_may_take_is_left_free() -> None:
    """A request that reserves much output waits at the trigger."""
    config = types.GenerateContentConfig(max_output_tokens=2_000)
    talk = Talk(agent={"generate_content_config": config})
    await talk.begin()
    last = asyncio.create_task(talk.say(words(2_000, "SECOND")))
    await go_as_far_as_possible()
    assert len(agent_requests(talk.llm)) == 1
    await talk.writer.end()
    assert is_compacted(await last)


async def test_the_next_one_covers_what_came_since(talk: Talk) -> None:
    """And is written ahead as well."""
    await talk.writer.end()
    await talk.say(words(2_000, "SECOND"))
    await talk.say(words(5_000, "THIRD"))
    await settle()
    assert talk.llm.summaries == 2
    transcript = summary_requests(talk.llm)[-1].text
    assert "Summary number 1" in transcript
    assert "ORIGINAL" not in transcript
    sent = await talk.say(words(1_500, "FOURTH"))
    assert "Summary number 2" in sent.text
    assert words(5_000, "THIRD") not in sent.text
    assert [record.was_ahead for record in talk.told] == [True, True]
    assert talk.llm.summaries == 2


async def test_a_second_summary_only_where_what_came_since_is_too_much(
    talk: Talk,
) -> None:
    """It builds upon the first, which is not paid for again."""
    await talk.writer.end()
    await talk.say(words(1_000, "SECOND"))
    await seed(talk.chat, model(words(9_000, "GIANT")))
    sent = await talk.say("Go on.")
    assert "Summary number 2" in sent.text
    assert "GIANT" not in sent.text
    assert "Summary number 1" in summary_requests(talk.llm)[-1].text
    assert "ORIGINAL" not in summary_requests(talk.llm)[-1].text
    assert [record.was_ahead for record in talk.told] == [True, False]
    assert talk.calls[-1].compaction is talk.told[-1]
    assert talk.llm.summaries == 2


async def test_one_that_fails_is_written_the_usual_way() -> None:
    """It is not tried again before the trigger, where the call waits for one."""
    talk = Talk()
    talk.writer.error = RuntimeError("no")
    talk.writer.may_end.set()
    await talk.begin()
    await settle()
    tries = talk.llm.summaries
    await talk.say(words(500, "SECOND"))
    await settle()
    assert talk.llm.summaries == tries > 0
    talk.writer.error = None
    assert is_compacted(await talk.say(words(1_500, "THIRD")))
    assert talk.llm.summaries == tries + 1
    assert [record.was_ahead for record in talk.told] == [False]
    assert not talk.told[0].is_mechanical


async def test_one_that_hangs_is_given_up_after_its_timeout() -> None:
    """The call that reaches the trigger has a summary from another try."""
    strategy = STRATEGY.model_copy(update={"summary_timeout_seconds": 0.2})
    talk = Talk(strategy)
    await talk.begin()
    await settle()
    assert (talk.writer.begun, talk.writer.now) == (1, 0)
    talk.writer.may_end.set()
    assert is_compacted(await talk.say(words(2_500, "SECOND")))
    assert [record.was_ahead for record in talk.told] == [False]


async def test_a_model_that_cannot_be_stopped_holds_nobody_up() -> None:
    """A call waits for it no longer than the timeout, and has its own then."""
    strategy = STRATEGY.model_copy(update={"summary_timeout_seconds": 0.2})
    talk, stubborn = Talk(strategy), asyncio.Event()

    async def write(request: LlmRequest) -> Reply:
        talk.llm.summary_replies = ["A summary of another try."]
        while not stubborn.is_set():
            try:
                await stubborn.wait()
            except asyncio.CancelledError:
                continue
        return "Too late, and of no use."

    talk.llm.summary_replies = write
    await talk.begin()
    sent = await talk.say(words(4_000, "SECOND"))
    assert "A summary of another try." in sent.text
    stubborn.set()
    await settle()
    assert not is_compacted(talk.llm.requests[0])
    assert "Too late" not in (await talk.say("Go on.")).text


async def rewind(talk: Talk) -> None:
    """Takes the session back before the last turn."""
    turns = [e.invocation_id for e in await talk.chat.events() if e.author == "user"]
    await talk.chat.runner.rewind_async(
        user_id=talk.chat.user_id,
        session_id=talk.chat.session_id,
        rewind_before_invocation_id=turns[-1],
    )


async def edit(talk: Talk) -> None:
    """Has the app change what was said, as one does that hides a name."""
    session = await talk.chat.session()
    storage: Any = talk.chat.sessions
    kept = storage.sessions[session.app_name][session.user_id][session.id]
    for event in kept.events:
        for part in (event.content.parts if event.content else None) or ():
            part.text = part.text and part.text.replace("ORIGINAL", "EDITED")


@pytest.mark.parametrize("is_done", [True, False], ids=["written", "under way"])
@pytest.mark.parametrize("change", [rewind, edit])
async def test_what_does_not_hold_any_more_is_dropped(
    change: Callable[[Talk], Any], is_done: bool
) -> None:
    """After a rewind or an edit one is written the usual way."""
    talk = Talk()
    await talk.begin()
    if is_done:
        await talk.writer.end()
    await change(talk)
    await talk.writer.end()
    sent = await talk.say(words(4_000, "SECOND"))
    assert "Summary number 2" in sent.text
    assert [record.was_ahead for record in talk.told] == [False]


async def test_an_agent_that_changes_its_model_has_it_too(talk: Talk) -> None:
    """What was paid for is put in, as a summary of earlier turns is."""
    await talk.writer.end()
    other = SimulatedLlm(model="another", context_window=100_000, token_ratio=1.0)
    agent: Any = talk.chat.app.root_agent
    agent.model = other
    await talk.chat.say(words(3_000, "SECOND"))
    assert "Summary number 1" in other.requests[-1].text
    assert (talk.llm.summaries, other.summaries) == (1, 0)
    assert [(r.was_ahead, r.model) for r in talk.told] == [(True, "simulated")]


async def test_a_compaction_that_is_asked_for_takes_it(talk: Talk) -> None:
    """Unless it should keep something above all."""
    await talk.writer.end()
    await talk.chat.set_state(DEMAND)
    assert "Summary number 1" in (await talk.say("Second.")).text
    assert talk.told[0].was_ahead
    assert talk.told[0].reason == "requested"
    assert not (await talk.chat.state())["context_guard:compact"]


async def test_one_with_a_focus_is_written_anew(talk: Talk) -> None:
    """The summary that is there does not know of it."""
    await talk.writer.end()
    await talk.chat.set_state({**DEMAND, "context_guard:compact_focus": "Names."})
    assert "Summary number 2" in (await talk.say("Second.")).text
    assert not talk.told[0].was_ahead


async def test_a_rejected_request_takes_it() -> None:
    """The window is smaller than anybody knew."""
    strategy = STRATEGY.model_copy(update={"context_window": 12_000})
    talk = Talk(strategy, provider_window=8_500)
    await talk.begin(7_210)
    await talk.writer.end()
    sent = await talk.say(words(1_300, "SECOND"))
    assert "Summary number 1" in sent.text
    assert talk.llm.rejections == 1
    assert [record.was_ahead for record in talk.told] == [True]


async def test_messages_are_counted_as_well() -> None:
    """Beyond 11 of them is too many; from the ninth on a summary is written."""
    strategy = SlidingWindow(max_messages=11, ahead=0.75)
    talk = Talk(strategy)
    talk.writer.may_end.set()
    begun_at = 0
    for number in range(7):
        await talk.say(words(100, f"Message {number}."))
        await settle()
        begun_at = begun_at or (len(talk.calls) if talk.writer.begun else 0)
    assert (begun_at, len(talk.calls)) == (5, 7)
    (record,) = talk.told
    assert (record.was_ahead, record.reason) == (True, "turns")
    sent = agent_requests(talk.llm)[-1]
    assert words(100, "Message 4.") not in sent.text
    for number in (5, 6):
        assert words(100, f"Message {number}.") in sent.text
    assert talk.llm.summaries == 1


EARLY = SummaryCompaction(trigger_threshold=0.55)


@pytest.mark.parametrize(
    ("strategy", "count"),
    [
        (Pipeline(window=None, tool_output=None, summary=EARLY), 1),
        (Pipeline(window=None, tool_output=None), 1),
        (Pipeline(summary=EARLY), 0),
    ],
    ids=["summarizes", "summarizes at the trigger", "drops"],
)
async def test_a_pipeline_has_written_ahead_what_it_would_pay_for(
    strategy: Pipeline, count: int
) -> None:
    """One that gets along without a summary writes none."""
    names = ("context_window", "summarizer_context_window", "ahead", "recall")
    update = {name: getattr(STRATEGY, name) for name in names}
    talk = Talk(strategy.model_copy(update=update))
    talk.writer.may_end.set()
    told = [user(words(200)), model(words(200))] * 15
    await seed(talk.chat, *told, state=EXACT)
    await talk.say("First.")
    await settle()
    assert talk.llm.summaries == count
    await talk.say(words(2_500))
    assert [record.was_ahead for record in talk.told] == [bool(count)]


class Own(Strategy):
    """Compacts when it is due."""

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Compacts everything."""
        if not context.is_due:
            return None
        return await context.summarize(context.older_than(0))


class Telling(Own):
    """Says as well how near that is."""

    def fullness(self, context: CompactionContext) -> float:
        """As the guard's own strategies do."""
        return context.fullness


@pytest.mark.parametrize(("kind", "is_ahead"), [(Own, False), (Telling, True)])
async def test_a_strategy_of_ones_own_says_how_near_it_is(
    kind: type[Strategy], is_ahead: bool
) -> None:
    """One that does not is asked on every call, and has nothing written ahead."""
    names = ("context_window", "summarizer_context_window", "ahead", "recall")
    talk = Talk(kind(**{name: getattr(STRATEGY, name) for name in names}))
    talk.writer.may_end.set()
    await talk.begin()
    await settle()
    assert talk.llm.summaries == is_ahead
    await talk.say(words(2_500, "SECOND"))
    assert [record.was_ahead for record in talk.told] == [is_ahead]
    assert talk.llm.summaries == 1


async def count_tasks(work: Awaitable[object]) -> int:
    """How many tasks are started in the course of some work."""
    loop, started = asyncio.get_running_loop(), list[asyncio.Task[Any]]()

    def start(_: Any, work: Any, **settings: Any) -> asyncio.Task[Any]:
        started.append(asyncio.Task(work, loop=loop, **settings))
        return started[-1]

    loop.set_task_factory(start)
    await work
    loop.set_task_factory(None)
    return len(started)


async def test_nothing_is_started_without_it() -> None:
    """A guarded turn has no more tasks than any, but for the summary that is due."""
    told = user("The task."), model(words(7_000, "ORIGINAL"))
    bare = Chat(guarded_agent(SimulatedLlm(context_window=100_000, token_ratio=1.0)))
    talk = Talk(STRATEGY.model_copy(update={"ahead": None}))
    talk.writer.may_end.set()
    counts = []
    for chat in (bare, talk.chat):
        await seed(chat, *told, state=EXACT)
        for message in ("First.", words(1_500, "SECOND")):
            counts.append(await count_tasks(chat.say(message)))
            assert asyncio.all_tasks() == {asyncio.current_task()}
    assert counts[2:] == [counts[0], counts[1] + 1]
    (record,) = talk.told
    assert not record.was_ahead
    assert record.waited_seconds >= record.duration_seconds > 0


def test_settings() -> None:
    """True is three quarters; anything but a part is refused."""
    assert Threshold(ahead=True).ahead == 0.75
    assert Threshold(ahead=False).ahead is None
    assert SlidingWindow(ahead=0.9).ahead == 0.9
    assert Pipeline().ahead is None
    for value in (0.0, 1.0, 1, -0.5, "0.75", float("nan")):
        with pytest.raises(ValidationError, match="more than 0 and less than 1"):
            Threshold.model_validate({"ahead": value})


async def test_two_runs_of_one_session_share_it() -> None:
    """Both reach the trigger at once; one summary is paid for."""
    talk = Talk()
    await talk.begin(6_500)
    turns = [
        asyncio.create_task(talk.chat.say(words(2_600, name)))
        for name in ("SECOND", "THIRD")
    ]
    await go_as_far_as_possible()
    assert len(agent_requests(talk.llm)) == 1
    await talk.writer.end()
    await asyncio.gather(*turns)
    assert (talk.llm.summaries, talk.writer.most) == (1, 1)
    sent = agent_requests(talk.llm)[1:]
    assert len(sent) == 2
    assert all("Summary number 1" in request.text for request in sent)


async def test_another_process_writes_it_again(talk: Talk) -> None:
    """What waits for its trigger is in memory only, and nowhere in the session."""
    await talk.writer.end()
    await talk.say("Second.")
    assert "Summary number 1" not in str(await talk.chat.state())
    other = Talk(session_service=talk.chat.sessions)
    other.writer.may_end.set()
    sent = await other.say(words(3_000, "THIRD"))
    assert is_compacted(sent)
    assert "ORIGINAL" not in sent.text
    assert [record.was_ahead for record in other.told] == [False]
    assert (talk.llm.summaries, other.llm.summaries) == (1, 1)


async def test_a_request_that_jumps_over_the_trigger_does_not_wait_either() -> None:
    """It goes out while it has room; the summary is begun behind it."""
    talk = Talk(guard={"on_pressure": (pressed := list[Any]()).append})
    await talk.begin(5_500)
    assert not is_compacted(await talk.say(words(2_700, "SECOND")))
    await go_as_far_as_possible()
    assert (talk.writer.now, talk.told, pressed) == (1, [], [])
    await talk.writer.end()
    sent = await talk.say("Third.")
    assert "Summary number 1" in sent.text
    assert words(2_700, "SECOND") not in sent.text
    assert [record.was_ahead for record in talk.told] == [True]
    assert talk.llm.summaries == 1
