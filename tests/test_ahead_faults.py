"""Whatever becomes of a summary written ahead: no turn is lost, and no task is left."""

from __future__ import annotations

import asyncio
import gc
import logging
import tracemalloc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.plugin_manager import PluginManager
from google.adk.sessions import BaseSessionService, InMemorySessionService
from google.genai import types

from contextguard_adk import ContextGuardPlugin
from contextguard_adk._memory import BoundedDict
from contextguard_adk.testing import Reply, SimulatedLlm, VirtualTimeLoop
from tests.builders import Chat, answer_text, guarded_agent, model, user
from tests.chats import EXACT, SUMMARY, agent_requests, guarded_chat, seed, words
from tests.guarded import is_compacted
from tests.test_ahead import (
    STRATEGY,
    Talk,
    Writer,
    go_as_far_as_possible,
    settle,
)
from tests.test_databases import own_database, store_marks

closes_at_last = pytest.mark.skipif(
    not hasattr(PluginManager, "set_skip_closing_plugins"),
    reason="its AgentTool closes all plugins",
)
STORES = [pytest.param(kind, marks=store_marks(kind)) for kind in ("file", "postgres")]
LARGE = words(3_000, "LARGE")
"""Behind 6,100 tokens it leaves no room: a call waits for a summary."""


def stop_all() -> None:
    """Ends all other tasks, as a process does that is killed."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize(
    ("killed", "paid"),
    [("under way", 1), ("written", 1), ("sent", 1), ("put in", 0)],
)
async def test_a_process_may_be_killed_at_any_step(
    kind: str, killed: str, paid: int, tmp_path: Path
) -> None:
    """A summary is there once an event has put it in; until then it is paid again."""
    async with own_database(kind, tmp_path) as store:
        async with store.open() as service:
            await work_until(killed, Talk(session_service=service))
            stop_all()
        async with store.open() as service:
            other = Talk(session_service=service)
            other.writer.may_end.set()
            sent = await other.say(words(3_000, "LATER"))
            assert is_compacted(sent)
            assert "ORIGINAL" not in sent.text
            assert "LATER" in sent.text
            assert other.llm.summaries == paid
            state = await other.chat.state()
            assert state[SUMMARY] == "Summary number 1, of all before."
            stop_all()


async def work_until(step: str, talk: Talk) -> None:
    """Goes on until a summary has come so far."""
    await talk.begin()
    if step == "under way":
        return
    await talk.writer.end()
    if step == "written":
        return
    await talk.say("Second.")
    if step == "put in":
        await talk.say(words(1_900, "THIRD"))
        return

    was_asked = asyncio.Event()

    async def hang(request: LlmRequest) -> Reply:
        was_asked.set()
        await asyncio.Event().wait()
        return "Never said."

    talk.llm.script = hang
    turn = asyncio.create_task(talk.chat.say(words(1_900, "THIRD")))
    await was_asked.wait()
    turn.cancel()
    await asyncio.wait([turn])
    assert is_compacted(agent_requests(talk.llm)[-1])


class Loops:
    """Turns of one session, each on an event loop of its own."""

    def __init__(self) -> None:
        self.llm = SimulatedLlm(
            context_window=100_000, summary_replies=self.write, token_ratio=1.0
        )
        self.plugin = ContextGuardPlugin(default=STRATEGY)
        self.chat = Chat(guarded_agent(self.llm), [self.plugin])
        self.begun = 0

    async def write(self, request: LlmRequest) -> Reply:
        """Takes longer than the first event loop lives."""
        self.begun += 1
        if self.begun == 1:
            await asyncio.sleep(3_600)
        return "A summary of another try."

    async def begin(self) -> None:
        """A turn after which a summary is being written."""
        told = user("The task."), model(words(6_100, "ORIGINAL"))
        await seed(self.chat, *told, state=EXACT)
        await self.chat.say("First.")
        await asyncio.sleep(0)
        assert self.begun == 1

    async def go_on(self) -> None:
        """A turn that needs one."""
        assert answer_text(await self.chat.say(LARGE))
        assert "A summary of another try." in self.llm.requests[-1].text


def run_and_close(work: Coroutine[Any, Any, None]) -> None:
    """Runs something on an event loop that is closed, whatever is under way on it."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(work)
    loop.close()


@pytest.mark.parametrize("run", [asyncio.run, run_and_close])
def test_it_ends_with_its_event_loop(
    run: Callable[[Coroutine[Any, Any, None]], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Quietly; the next turn goes the usual way."""
    caplog.set_level(logging.DEBUG)
    loops = Loops()
    run(loops.begin())
    gc.collect()
    run(loops.go_on())
    gc.collect()
    assert loops.begun == 2
    loud = [r for r in caplog.records if r.levelno > logging.DEBUG]
    ours = [r for r in loud if r.name.startswith(("asyncio", "contextguard_adk"))]
    told = [r.getMessage() for r in ours]
    usual = ("Compacted agent", "Guarding app")
    assert not [message for message in told if not message.startswith(usual)]


def test_a_runner_in_a_thread_goes_on() -> None:
    """`Runner.run` has an event loop for each turn."""
    loops = Loops()
    asyncio.run(seed(loops.chat, user("The task."), model(words(6_100)), state=EXACT))
    place: Any = {"user_id": loops.chat.user_id, "session_id": loops.chat.session_id}
    for message in ("First.", LARGE, "Last."):
        content = types.UserContent(message)
        assert answer_text([*loops.chat.runner.run(**place, new_message=content)])
    assert "A summary of another try." in loops.llm.requests[-1].text


class Sessions:
    """Many sessions of one guarded app."""

    def __init__(self, count: int, most: int = 4) -> None:
        self.writer = Writer()
        self.llm = SimulatedLlm(
            context_window=100_000, summary_replies=self.writer.write, token_ratio=1.0
        )
        self.plugin = ContextGuardPlugin(
            default=STRATEGY, max_background_summaries=most
        )
        service: BaseSessionService = InMemorySessionService()
        agent = guarded_agent(self.llm)
        self.chats = [
            Chat(agent, [self.plugin], session_service=service, session_id=str(number))
            for number in range(count)
        ]

    async def begin(self) -> None:
        """A turn of each, one after the other, that has a summary written ahead."""
        for chat in self.chats:
            told = user("The task."), model(words(6_100, "ORIGINAL"))
            await seed(chat, *told, state=EXACT)
            assert answer_text(await chat.say("First."))
        await asyncio.sleep(0)

    async def say(self, message: str) -> None:
        """Says something in all of them at once."""
        turns = await asyncio.gather(*(chat.say(message) for chat in self.chats))
        assert all(map(answer_text, turns))


async def test_of_a_hundred_sessions_four_are_summarized_at_once() -> None:
    """The others have their turn later."""
    sessions = Sessions(100)
    await sessions.begin()
    assert sessions.writer.now == 4
    await sessions.writer.end()
    assert (sessions.writer.begun, sessions.writer.most) == (100, 4)
    await sessions.say(words(2_000, "SECOND"))
    assert sessions.llm.summaries == 100
    assert all(map(is_compacted, agent_requests(sessions.llm)[100:]))


async def test_a_call_does_not_wait_for_one_that_waits_itself() -> None:
    """At the trigger it has its own written, and the other one is never begun."""
    sessions = Sessions(2, most=1)
    await sessions.begin()
    assert sessions.writer.begun == 1
    turn = asyncio.create_task(sessions.chats[1].say(LARGE))
    await go_as_far_as_possible()
    assert sessions.writer.now == 2
    await sessions.writer.end()
    assert answer_text(await turn)
    assert is_compacted(agent_requests(sessions.llm)[-1])
    assert sessions.llm.summaries == 2


async def test_a_caller_that_runs_out_of_time_does_not_end_it() -> None:
    """The next turn has the summary."""
    talk = Talk()
    await talk.begin()
    turn = asyncio.create_task(talk.chat.say(LARGE))
    await go_as_far_as_possible()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(turn, 0.01)
    assert talk.writer.now == 1
    await talk.writer.end()
    assert "Summary number 1" in (await talk.say("Go on.")).text
    assert talk.told[0].was_ahead
    assert talk.llm.summaries == 1


def in_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    """Runs something without waiting for real."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(work)


@closes_at_last
def test_a_runner_that_closes_waits_a_second_at_most() -> None:
    """Then what is under way is cancelled; nothing is left."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loops = Loops()
        await loops.begin()
        before = loop.time()
        await loops.chat.runner.close()
        assert 0 < loop.time() - before <= 1
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await loops.go_on()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    in_virtual_time(work())


@closes_at_last
def test_what_ends_within_that_second_is_kept() -> None:
    """A turn that comes behind it, of another runner, puts it in."""

    async def write(request: LlmRequest) -> Reply:
        await asyncio.sleep(0.5)
        return "Just in time."

    async def work() -> None:
        llm = SimulatedLlm(
            context_window=100_000, summary_replies=write, token_ratio=1.0
        )
        chat = guarded_chat(llm, STRATEGY)
        told = user("The task."), model(words(6_100, "ORIGINAL"))
        await seed(chat, *told, state=EXACT)
        await chat.say("First.")
        await chat.runner.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await chat.say(LARGE)
        assert "Just in time." in llm.requests[-1].text
        assert llm.summaries == 1

    in_virtual_time(work())


@closes_at_last
def test_a_model_that_cannot_be_stopped_does_not_stop_the_shutdown() -> None:
    """It is waited for no longer than others."""

    async def write(request: LlmRequest) -> Reply:
        for _ in range(3):
            try:
                await asyncio.sleep(3_600)
            except asyncio.CancelledError:
                continue
        return "Too late."

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loops = Loops()
        loops.llm.summary_replies = write
        told = user("The task."), model(words(6_100, "ORIGINAL"))
        await seed(loops.chat, *told, state=EXACT)
        await loops.chat.say("First.")
        before = loop.time()
        await loops.chat.runner.close()
        assert loop.time() - before <= 1
        await settle()

    in_virtual_time(work())


@pytest.mark.slow
async def test_forgotten_sessions_leave_no_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sessions beyond the newest, here 64, nothing is left."""
    monkeypatch.setattr(BoundedDict.__init__, "__defaults__", (64,))
    caplog.set_level(logging.CRITICAL + 1, "google_adk")  # pytest keeps what is logged.
    sessions = Sessions(1)
    sessions.writer.may_end.set()
    sessions.llm.keep_requests = 0
    (chat,) = sessions.chats
    tracemalloc.start()
    for number in range(200):
        if number == 100:
            gc.collect()
            before = tracemalloc.take_snapshot()
        chat.session_id = str(number)
        told = user("The task."), model(words(6_100, f"ORIGINAL {number}"))
        await seed(chat, *told, state=EXACT)
        await chat.say("First.")
        await settle()
        place = {"user_id": chat.user_id, "session_id": chat.session_id}
        await chat.sessions.delete_session(app_name="app", **place)
    gc.collect()
    grown = tracemalloc.take_snapshot().compare_to(before, "filename")
    tracemalloc.stop()
    assert sessions.llm.summaries == 200
    assert sum(each.size_diff for each in grown) < 100 * 250  # Of 24 KB a request.
