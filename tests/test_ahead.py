"""Summaries that are written in the background: ahead of time, or of a turn that was
cancelled, which the next turn has."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.plugin_manager import PluginManager
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

import contextguard_adk as cg
from contextguard_adk import strategies
from contextguard_adk.records import Usage
from contextguard_adk.testing import (
    Reply,
    SimulatedLlm,
    call,
)
from tests.background import (
    ANOTHER,
    OLD,
    SIZES,
    STRATEGY,
    Talk,
    in_virtual_time,
    settle,
)
from tests.builders import (
    SUMMARY_BEGIN,
    Chat,
    KeptSessions,
    answer_text,
    model,
    queued_tool,
    user,
)
from tests.chats import (
    DEMAND,
    EXACT,
    SUMMARY,
    agent_requests,
    seed,
    summary_requests,
    words,
)
from tests.guarded import is_compacted
from tests.stores import own_database, store_marks

pytestmark = pytest.mark.filterwarnings(
    "ignore:The `plugins` argument:DeprecationWarning"  # By ADK's own AgentTool.
)
closes_at_last = pytest.mark.skipif(
    not hasattr(PluginManager, "set_skip_closing_plugins"),
    reason="its AgentTool closes all plugins",
)


LARGE = words(3_000, "LARGE")
"""Behind 6,100 tokens it leaves no room: a call waits for a summary."""


async def go_as_far_as_possible() -> None:
    """Lets all tasks go on until each waits for something."""
    for _ in range(500):  # Nothing here waits for a thread or for time.
        await asyncio.sleep(0)


def stop_all() -> None:
    """Ends all other tasks, as a process does that is killed."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


def takes(seconds: float) -> Callable[[LlmRequest], Awaitable[Reply]]:
    """A summarizer that is slow."""

    async def write(request: LlmRequest) -> Reply:
        await asyncio.sleep(seconds)
        return "Of all before."

    return write


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
    assert (record.was_ahead, record.reason) == (True, "tokens")
    assert record.usage.prompt_tokens == summary_requests(talk.llm)[0].prompt_tokens
    assert record.model == "simulated"
    assert min(record.waited_seconds, record.duration_seconds) > 0

    assert (await talk.chat.state())[SUMMARY] == "Summary number 1, of all before."
    assert [each.compaction for each in talk.calls] == [None, None, None, record]
    paid = sum(each.summary_usage.prompt_tokens for each in talk.calls)
    assert paid == record.usage.prompt_tokens


async def test_while_there_is_room_a_call_does_not_wait(talk: Talk) -> None:
    """Above the trigger requests go out as they are, with room for an answer."""
    assert not is_compacted(await talk.say(words(2_000, "SECOND")))
    message = words(1_000, "SECOND")
    last = [asyncio.create_task(talk.say(message)) for _ in range(2)]
    await go_as_far_as_possible()
    await asyncio.sleep(0.01)
    assert len(agent_requests(talk.llm)) == 2

    await talk.writer.end()
    for sent in await asyncio.gather(*last):
        assert "Summary number 1" in sent.text
        assert "SECOND" in sent.text

    assert talk.told[0].was_ahead
    assert talk.told[0].waited_seconds >= 0.009
    assert (talk.llm.summaries, talk.writer.most) == (1, 1)


async def test_the_next_one_covers_what_came_since(talk: Talk) -> None:
    """It is made of the one before, and is written ahead as well."""
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
    assert talk.were_ahead == [True, True]
    assert talk.llm.summaries == 2


@pytest.mark.parametrize("is_written", [True, False], ids=["waits", "is under way"])
async def test_other_sessions_do_not_push_it_out(
    is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is paid for once, however many sessions call in between."""
    monkeypatch.setattr("contextguard_adk._runtime.runs.MAX_IDLE_SESSIONS", 10)
    talk = Talk(session_service=KeptSessions())
    await talk.begin(is_written=is_written)
    session_id = talk.chat.session_id
    for number in range(25):
        talk.chat.session_id = f"other {number}"
        await talk.say("Hello.")

    await talk.writer.end()
    talk.chat.session_id = session_id

    assert is_compacted(await talk.say(words(2_000, "SECOND")))
    assert talk.llm.summaries == 1


@pytest.mark.parametrize(
    ("reserved_tokens", "tokens", "were_ahead"),
    [
        (None, 8_300, [True]),
        (2_000, 8_300, [True, False]),
        (None, 9_000, [True, False]),
    ],
    ids=["room for the answer", "none with what is reserved", "none"],
)
async def test_a_second_summary_only_where_what_came_since_is_too_much(
    reserved_tokens: int | None, tokens: int, were_ahead: list[bool]
) -> None:
    """It builds upon the first, which is not paid for again."""
    config = types.GenerateContentConfig(max_output_tokens=reserved_tokens)
    talk = Talk(agent={"generate_content_config": config})
    await talk.begin(is_written=True)
    await seed(talk.chat, model(words(tokens, "GIANT")))
    sent = await talk.say("Go on.")
    assert talk.were_ahead == were_ahead
    assert talk.calls[-1].summary_usage.prompt_tokens > 0
    assert f"Summary number {len(were_ahead)}" in sent.text
    assert ("GIANT" in sent.text) == (len(were_ahead) == 1)
    assert talk.told[0].tokens_after > 8_000
    assert talk.calls[-1].compaction is talk.told[-1]

    for request in summary_requests(talk.llm)[1:]:
        assert "Summary number 1" in request.text
        assert "ORIGINAL" not in request.text


async def test_one_that_fails_is_written_the_usual_way() -> None:
    """It is not tried again before the trigger, where the call waits for one."""
    talk = Talk()
    talk.writer.error = RuntimeError("no")
    await talk.begin(is_written=True)
    tries = talk.llm.summaries
    await talk.say(words(500, "SECOND"))
    await settle()
    assert talk.llm.summaries == tries > 0

    talk.writer.error = None
    assert is_compacted(await talk.say(words(1_500, "THIRD")))
    assert talk.llm.summaries == tries + 1
    assert talk.were_ahead == [False]
    assert not talk.told[0].is_mechanical


@pytest.mark.parametrize("is_stubborn", [False, True])
@in_virtual_time
async def test_one_that_hangs_is_given_up_after_its_timeout(is_stubborn: bool) -> None:
    """A call waits no longer for a model that cannot be stopped, and has its own."""
    talk = Talk()
    loop = asyncio.get_running_loop()
    talk.hang_once(is_stubborn)
    await talk.begin()
    if not is_stubborn:
        await settle()
    before = loop.time()
    sent = await talk.say(words(4_000 if is_stubborn else 2_500, "SECOND"))
    assert ANOTHER in sent.text
    # A summary takes three calls at most.
    assert loop.time() - before <= 3 * STRATEGY.summary_timeout_seconds

    await settle()
    assert "Too late" not in (await talk.say("Go on.")).text
    assert talk.were_ahead == [False]


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
    talk: Talk, change: Callable[[Talk], Any], is_done: bool
) -> None:
    """After a rewind or an edit one is written the usual way."""
    if is_done:
        await talk.writer.end()
    await change(talk)
    await talk.writer.end()
    sent = await talk.say(words(4_000, "SECOND"))
    assert "Summary number 2" in sent.text
    assert talk.were_ahead == [False]


@pytest.mark.parametrize(
    ("killed", "paid", "kind"),
    [
        ("under way", 1, "file"),
        ("written", 1, "file"),
        ("sent", 1, "file"),
        ("put in", 0, "file"),
        pytest.param("sent", 1, "postgres", marks=store_marks("postgres")),
        *(
            pytest.param(*row, "postgres", marks=store_marks("postgres", is_slow=True))
            for row in (("under way", 1), ("written", 1), ("put in", 0))
        ),
    ],
)
async def test_a_process_may_be_killed_at_any_step(
    kind: str, killed: str, paid: int, tmp_path: Path
) -> None:
    """Until an event has put a summary in, another process pays for it again."""
    async with own_database(kind, tmp_path) as store:
        async with store.open() as service:
            talk = Talk(session_service=service)
            await talk.begin()
            if killed != "under way":
                await talk.writer.end()
            if killed in ("sent", "put in"):
                talk.llm.script = takes(3_600) if killed == "sent" else None
                turn = asyncio.create_task(talk.say(words(2_100, "THIRD")))
                while not is_compacted(agent_requests(talk.llm)[-1]):
                    await asyncio.wait([turn], timeout=0.01)
                if killed == "put in":
                    await turn
                assert talk.told

            is_stored = "Summary number 1" in str(await talk.chat.state())
            assert is_stored is (killed == "put in")
            stop_all()

        async with store.open() as service:
            other = Talk(session_service=service)
            other.writer.may_end.set()
            sent = await other.say(words(3_000, "LATER"))
            assert is_compacted(sent)
            assert "ORIGINAL" not in sent.text
            assert "LATER" in sent.text
            assert other.llm.summaries == paid
            assert other.were_ahead == [False] * paid
            state = await other.chat.state()
            assert state[SUMMARY] == "Summary number 1, of all before."
            stop_all()


async def test_a_caller_that_runs_out_of_time_does_not_end_it(talk: Talk) -> None:
    """The next turn has the summary."""
    await talk.interrupt(LARGE)
    assert talk.writer.now == 1
    await talk.writer.end()
    assert "Summary number 1" in (await talk.say("Go on.")).text
    assert talk.were_ahead == [True]
    assert talk.llm.summaries == 1


@pytest.mark.parametrize("focus", ["", "Names."])
async def test_a_compaction_that_is_asked_for_takes_it(talk: Talk, focus: str) -> None:
    """One with a focus is written anew: what is there does not know of it."""
    await talk.writer.end()
    await talk.chat.set_state({**DEMAND, "context_guard:compact_focus": focus})
    number = 2 if focus else 1
    assert f"Summary number {number}" in (await talk.say("Second.")).text
    (record,) = talk.told
    assert (record.was_ahead, record.reason) == (not focus, "requested")
    assert not (await talk.chat.state())["context_guard:compact"]


async def test_a_rejected_request_takes_it() -> None:
    """The window is smaller than anybody knew."""
    strategy = STRATEGY.model_copy(update={"context_window": 12_000})
    talk = Talk(strategy, provider_window=8_500)
    await talk.begin(7_210)
    await talk.writer.end()
    sent = await talk.say(words(1_300, "SECOND"))
    assert "Summary number 1" in sent.text
    assert talk.llm.rejections == 1
    assert talk.were_ahead == [True]


async def test_a_result_that_came_since_is_not_cut() -> None:
    """Nobody would have seen what is left out, neither agent nor summarizer."""
    large = f"{words(1_900, 'HEAD')} THE-FACT {words(2_400)}"
    talk = Talk(agent={"tools": [queued_tool("lookup", [large])]})
    talk.llm.script = ["First.", call("lookup"), "Done."]
    await talk.begin(is_written=True)
    await talk.say("Second.")
    assert talk.were_ahead == [True]
    assert any("THE-FACT" in request.text for request in talk.llm.requests)


@pytest.mark.parametrize(("ahead", "tokens"), [(0.75, 6_100), (None, 8_100)])
async def test_an_agent_tool_of_another_session_does_not_end_it(
    ahead: float | None, tokens: int
) -> None:
    """The runner of such a tool closes all plugins on some versions of ADK."""
    talk = Talk(STRATEGY.model_copy(update={"ahead": ahead}))
    turn = asyncio.create_task(talk.begin(tokens))
    await go_as_far_as_possible()
    assert talk.writer.now == 1

    child = LlmAgent(name="child", model=SimulatedLlm(token_ratio=1.0))
    llm = SimulatedLlm(token_ratio=1.0, script=[call("child", request="Go."), "Done."])
    root = LlmAgent(name="root", model=llm, tools=[AgentTool(child)])
    await Chat(root, talk.chat.app.plugins, session_id="other").say("Go.")
    assert talk.writer.now == 1

    await talk.writer.end()
    await turn
    assert is_compacted(await talk.say(words(2_500, "SECOND")))
    assert talk.llm.summaries == 1


def test_settings() -> None:
    """True is three quarters; anything but a part is refused."""
    assert cg.Threshold(ahead=True).ahead == 0.75
    assert cg.Threshold(ahead=False).ahead is None
    assert cg.SlidingWindow(ahead=0.9).ahead == 0.9
    assert cg.Pipeline().ahead is None
    for value in (0.0, 1.0, 1, -0.5, "0.75", float("nan")):
        with pytest.raises(ValueError, match="more than 0 and less than 1"):
            cg.Threshold.model_validate({"ahead": value})


EARLY = strategies.SummaryCompaction(trigger_threshold=0.55)


@pytest.mark.parametrize(
    ("settings", "count"),
    [({"window": None, "tool_output": None}, 1), ({"summary": EARLY}, 0)],
    ids=["summarizes", "drops"],
)
async def test_a_pipeline_has_written_ahead_what_it_would_pay_for(
    settings: dict[str, Any], count: int
) -> None:
    """One that gets along without a summary writes none."""
    talk = Talk(cg.Pipeline(**SIZES, **settings))
    talk.writer.may_end.set()
    told = [user(words(290, "ORIGINAL")), model(words(290))] * 11
    await seed(talk.chat, *told, state=EXACT)
    await talk.say("First.")
    await settle()
    assert talk.llm.summaries == count

    await talk.say(words(2_500))
    assert [(r.was_ahead, r.reason) for r in talk.told] == [(bool(count), "tokens")]


async def test_of_many_sessions_four_are_summarized_at_once() -> None:
    """The others have their turn later."""
    talk = Talk(sessions=9)
    await talk.begin()
    assert talk.writer.now == 4

    await talk.writer.end()
    assert (talk.writer.begun, talk.writer.most) == (9, 4)

    message = words(2_000, "SECOND")
    turns = await asyncio.gather(*(chat.say(message) for chat in talk.chats))
    assert all(answer_text(events) for events in turns)
    assert talk.llm.summaries == 9
    assert all(is_compacted(request) for request in agent_requests(talk.llm)[9:])


async def test_a_call_does_not_wait_for_one_that_waits_itself() -> None:
    """At the trigger it has its own written, and the other one is never begun."""
    talk = Talk(sessions=2, guard={"max_background_summaries": 1})
    await talk.begin()
    assert talk.writer.begun == 1

    turn = asyncio.create_task(talk.chats[1].say(LARGE))
    await go_as_far_as_possible()
    assert talk.writer.now == 2

    await talk.writer.end()
    assert answer_text(await turn)
    assert is_compacted(agent_requests(talk.llm)[-1])
    assert talk.llm.summaries == 2


def run_and_close(work: Coroutine[Any, Any, None]) -> None:
    """Runs something on an event loop that is closed, whatever is under way on it."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(work)
    loop.close()


@pytest.mark.usefixtures("young_heap")
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["ahead", "cancelled turn"])
@pytest.mark.parametrize("run", [asyncio.run, run_and_close])
def test_it_ends_with_its_event_loop(
    run: Callable[[Coroutine[Any, Any, None]], None],
    is_cancelled: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Quietly; the next turn goes the usual way."""
    caplog.set_level(logging.DEBUG)
    talk = Talk(
        STRATEGY.model_copy(update={"ahead": None}) if is_cancelled else STRATEGY
    )
    talk.hang_once()

    async def begin() -> None:
        work = asyncio.create_task(talk.begin(9_000 if is_cancelled else 6_100))
        await go_as_far_as_possible()
        work.cancel()
        await asyncio.wait([work])

    async def go_on() -> None:
        assert ANOTHER in (await talk.say(LARGE)).text

    run(begin())
    gc.collect()
    assert talk.llm.summaries == 1
    run(go_on())
    gc.collect()
    assert talk.llm.summaries == 2
    loud = [r for r in caplog.records if r.levelno > logging.DEBUG]
    ours = [r for r in loud if r.name.startswith(("asyncio", "contextguard_adk"))]
    told = [r.getMessage() for r in ours]
    usual = ("Compacted agent", "Guarding app")
    assert not [message for message in told if not message.startswith(usual)]


@closes_at_last
@pytest.mark.parametrize("summary", ["hangs", "cannot be stopped", "ends in time"])
@in_virtual_time
async def test_a_runner_that_closes_waits_a_second_at_most(summary: str) -> None:
    """What ends within it is kept for later turns; what does not is cancelled."""
    talk = Talk()
    loop = asyncio.get_running_loop()
    if summary == "ends in time":
        talk.llm.summary_replies = takes(0.5)
    else:
        talk.hang_once(is_stubborn=summary != "hangs")
    await talk.begin()
    before = loop.time()
    await talk.chat.runner.close()
    assert 0 < loop.time() - before <= 1

    if summary == "cannot be stopped":
        await settle()
    else:
        kept = summary == "ends in time"
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert ("Of all before." if kept else ANOTHER) in (await talk.say(LARGE)).text
        assert talk.llm.summaries == (1 if kept else 2)
        assert asyncio.all_tasks() == {asyncio.current_task()}


WAITS = cg.Threshold(**{**SIZES, "ahead": None})


@pytest.mark.parametrize(("kind", "waits"), [("memory", 2), ("sqlite", 1)])
async def test_the_turn_after_a_cancelled_one_has_its_summary(
    kind: str, waits: int, tmp_path: Path
) -> None:
    """One is paid for, never two at once; told of once, with the call that has it."""
    async with own_database(kind, tmp_path) as store, store.open() as service:
        talk = Talk(WAITS, session_service=service)
        await seed(talk.chat, *OLD, state=EXACT | (DEMAND if waits == 1 else {}))
        for number in range(1 + waits):
            await talk.interrupt(f"Message {number}.")

        assert not (await talk.chat.state()).get(SUMMARY)
        assert (talk.writer.now, talk.told, talk.calls) == (1, [], [])

        await talk.writer.end()
        sent = await talk.say("Go on.")
        assert is_compacted(sent)
        assert "Go on." in sent.text
        assert "ORIGINAL" not in sent.text
        state = await talk.chat.state()
        assert state[SUMMARY] == "Summary number 1, of all before."
        assert not state.get("context_guard:compact_refused")
        assert not any(state.get(key) for key in DEMAND)
        assert is_compacted(await talk.say("Well done."))

    assert (talk.llm.summaries, talk.writer.most) == (1, 1)
    (record,) = talk.told
    assert record.usage.prompt_tokens > 0
    assert [each.compaction for each in talk.calls] == [record, None]
    assert [each.summary_usage for each in talk.calls] == [record.usage, Usage()]


@pytest.mark.parametrize("kind", [cg.Threshold, cg.SlidingWindow, cg.Pipeline])
async def test_a_turn_that_comes_in_between_waits_for_it(
    kind: type[strategies.Strategy],
) -> None:
    """It has time enough, and pays for no summary of its own."""
    window: Any = {"window": strategies.MessageWindow()} if kind is cg.Pipeline else {}
    talk = Talk(kind(**{**SIZES, "ahead": None}, **window))
    small = [user("Hello."), model("Hello.")] * 12
    await seed(talk.chat, *small, *OLD, *small, state=EXACT)
    await talk.interrupt("First.")
    turn = asyncio.create_task(talk.say("Go on."))
    await go_as_far_as_possible()
    await talk.writer.end()

    assert SUMMARY_BEGIN in (await turn).text
    assert (talk.llm.summaries, talk.writer.most) == (1, 1)


async def test_a_turn_that_fits_does_not_wait() -> None:
    """A deadline shorter than a summary costs one turn, however long that takes."""
    talk = Talk(WAITS)
    await talk.begin()
    await seed(talk.chat, user("More."), model(words(2_000)))
    await talk.interrupt("First.")
    for message in ("Go on.", "And on."):
        assert "ORIGINAL" in (await talk.say(message)).text
    await talk.writer.end()

    assert is_compacted(await talk.say("Well done."))
    assert (talk.llm.summaries, talk.llm.rejections, len(talk.told)) == (1, 0, 1)


async def test_a_resend_has_one_too() -> None:
    """What is summarized after a rejection is not lost either."""
    summarizer = SimulatedLlm(context_window=100_000, token_ratio=1.0)
    sizes = {**SIZES, "ahead": None, "context_window": 20_000}
    talk = Talk(cg.Threshold(**sizes, summarizer=summarizer), provider_window=8_500)
    summarizer.summary_replies = talk.writer.write
    await seed(talk.chat, *OLD, state=EXACT)
    await talk.interrupt("First.")
    assert talk.llm.rejections == 1

    await talk.writer.end()
    assert is_compacted(await talk.say("Go on."))
    assert (talk.llm.rejections, summarizer.summaries, talk.writer.most) == (1, 1, 1)
