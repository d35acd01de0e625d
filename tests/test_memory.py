"""What a guard remembers in process: nothing of a conversation once its run is over."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import time
import types as python_types
from contextlib import suppress

import pytest
from google.adk.models.llm_request import LlmRequest

from contextguard_adk import ContextGuardPlugin, Strategy, Threshold
from contextguard_adk._history.shown import RECALL_TOOL
from contextguard_adk._history.stored import StoredSummary
from contextguard_adk._memory import UNSAVED_SECONDS, BoundedDict, Memory, Unsaved
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import (
    Chat,
    answer_text,
    guarded_agent,
    model,
    queued_tool,
    user,
)
from tests.chats import DEMAND, SUMMARY, seed, words
from tests.guarded import SMALL

SAID = "what-the-model-said"
SUMMED_UP = "what-the-summary-says"
NOT_OURS = (type, python_types.ModuleType, python_types.FunctionType)


def holds(plugin: ContextGuardPlugin, text: str) -> bool:
    """Whether a text is in anything that a plugin holds."""
    gc.collect()
    seen, waiting = set[int](), list[object]([plugin])
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, NOT_OURS):
            continue
        seen.add(id(found))
        if isinstance(found, str) and text in found:
            return True
        waiting.extend(gc.get_referents(found))
    return False


class Talk:
    """A conversation that is compacted with its first message."""

    def __init__(self, strategy: Strategy = SMALL) -> None:
        self.reply: Reply | None = "Done."
        self.was_asked = asyncio.Event()
        self.llm = SimulatedLlm(
            context_window=100_000,
            script=self._answer,
            summary_replies=lambda _: f"A summary: {SUMMED_UP}.",
        )
        self.plugin = ContextGuardPlugin(default=strategy)
        self.chat = Chat(guarded_agent(self.llm), [self.plugin])

    async def _answer(self, request: LlmRequest) -> Reply:
        self.was_asked.set()
        if self.reply is None:
            await asyncio.Event().wait()
        assert self.reply is not None
        return self.reply

    async def begin(self) -> None:
        """Puts a history into the session that is compacted with the next message."""
        await seed(self.chat, user("Do it."), model(words(2_500, SAID)), state=DEMAND)

    async def break_off(self, is_cancelled: bool) -> None:
        """Says something; the run fails, or is cancelled while the model works."""
        self.reply = None if is_cancelled else ConnectionError("reset")
        self.was_asked.clear()
        turn = asyncio.create_task(self.chat.say("Go on."))
        await asyncio.wait_for(self.was_asked.wait(), 5)
        if is_cancelled:
            turn.cancel()
        with suppress(ConnectionError, asyncio.CancelledError):
            await turn
        for _ in range(10):  # ADK's own tasks end a little later.
            await asyncio.sleep(0)
        self.reply = "Done."


async def test_nothing_stays_of_a_run_that_has_ended() -> None:
    """Its contents and its summary are the session's alone, and go with that."""
    talk = Talk()
    await talk.begin()
    assert answer_text(await talk.chat.say("Go on.")) == "Done."
    assert SUMMED_UP in (await talk.chat.state())[SUMMARY]
    assert not holds(talk.plugin, SAID)
    assert not holds(talk.plugin, SUMMED_UP)


@pytest.mark.parametrize("has_recall", [False, True])
async def test_nothing_stays_of_a_run_that_planned_a_summary(has_recall: bool) -> None:
    """It is cancelled before the summary that would be written ahead of time."""
    talk = Talk(Threshold(context_window=10_000, ahead=0.5))
    if has_recall:
        tools = [queued_tool("look", [])]
        talk.chat = Chat(guarded_agent(talk.llm, tools), [talk.plugin])
        old = user("Do it."), model(words(4_500))
        await seed(talk.chat, *old, state=DEMAND)
        await talk.chat.say("Go on.")
    await seed(talk.chat, user("Do it."), model(words(4_500, SAID)))
    await talk.break_off(is_cancelled=True)
    assert talk.llm.summaries == has_recall
    declared = talk.llm.requests[-1].config.model_dump_json()
    assert (RECALL_TOOL in declared) is has_recall
    assert not holds(talk.plugin, SAID)


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["failed", "cancelled"])
async def test_only_the_paid_summary_stays_of_a_run_that_was_broken_off(
    is_cancelled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The next call uses it, and it is paid for once; after that it is the session's
    alone."""
    # What ADK logs of a failure would hold the whole run.
    caplog.set_level(logging.CRITICAL + 1, "google_adk")
    talk = Talk()
    await talk.begin()
    await talk.break_off(is_cancelled)
    assert not holds(talk.plugin, SAID)
    # The event that tells of a failure may have brought it to the session.
    is_stored = bool((await talk.chat.state()).get(SUMMARY))
    assert holds(talk.plugin, SUMMED_UP) is not is_stored
    assert answer_text(await talk.chat.say("Are you there?")) == "Done."
    assert talk.llm.summaries == 1
    assert SUMMED_UP in talk.llm.requests[-1].text
    assert not holds(talk.plugin, SUMMED_UP)
    assert not holds(talk.plugin, SAID)


async def test_a_cancelled_turn_later_takes_no_summary_back() -> None:
    """What a session has already is not kept again."""
    talk = Talk()
    await talk.begin()
    await talk.chat.say("Go on.")
    await talk.break_off(is_cancelled=True)
    assert not holds(talk.plugin, SAID)
    assert not holds(talk.plugin, SUMMED_UP)


def test_a_paid_summary_waits_for_ten_minutes() -> None:
    """Its session may have been deleted."""
    memory, summary = Memory(), StoredSummary(text=SUMMED_UP)
    session = memory.session(("session", "agent", "scope"))
    session.unsaved = Unsaved(summary, 1, None, "run")
    memory.drop_unsaved(time.monotonic() + UNSAVED_SECONDS - 1)
    assert session.unsaved is not None
    memory.drop_unsaved(time.monotonic() + UNSAVED_SECONDS + 1)
    assert session.unsaved is None


def test_a_bounded_dict_forgets_the_oldest() -> None:
    """What was written last is the newest, also when it was there before."""
    numbers = BoundedDict[str, int](2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        numbers[key] = value
    assert numbers.snapshot() == [3, 4]


def talk_in_threads(seconds: float) -> tuple[list[Exception], int]:
    """Has 16 threads talk to agents of one guard; returns what failed, and how many
    turns there were."""
    plugin = ContextGuardPlugin(default=SMALL)
    failures, turns = list[Exception](), list[int]()
    end = time.monotonic() + seconds

    def talk(thread: int) -> None:
        llm = SimulatedLlm(context_window=4_000, script=lambda _: words(300))
        chat = Chat(guarded_agent(llm), [plugin])
        while time.monotonic() < end:
            chat.session_id = f"{thread} {len(turns) // 100}"
            deadline = 0.05 if len(turns) % 5 == 0 else 60
            try:
                with suppress(TimeoutError):
                    asyncio.run(asyncio.wait_for(chat.say(words(300)), deadline))
            except Exception as error:  # noqa: BLE001 - it is what is looked for.
                failures.append(error)
            turns.append(thread)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures, len(turns)


@pytest.mark.slow
def test_threads_may_share_a_guard(caplog: pytest.LogCaptureFixture) -> None:
    """No turn ends by it, and nothing of its own fails, whatever is cancelled."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        failures, turns = talk_in_threads(8)
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert turns > 50
    assert not [r for r in caplog.records if r.name == "contextguard_adk.plugin"]


CANCEL = """
import asyncio, gc, sys, tracemalloc
from google.adk.agents import LlmAgent
from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat

async def wait(request):
    was_asked.set()
    await asyncio.Event().wait()

async def main(plugins):
    llm = SimulatedLlm(context_window=1_000_000, script=wait, keep_requests=0)
    chat = Chat(LlmAgent(name="agent", model=llm), plugins)
    for number in range(300):
        was_asked.clear()
        chat.session_id = str(number)
        turn = asyncio.create_task(chat.say(f"{number} " + "word " * 80_000))
        await was_asked.wait()
        turn.cancel()
        await asyncio.wait([turn])
        del turn
        place = {"app_name": "app", "user_id": "user", "session_id": chat.session_id}
        await chat.sessions.delete_session(**place)
    await asyncio.sleep(0.1)
    gc.collect()
    print(tracemalloc.get_traced_memory()[0])

tracemalloc.start()
was_asked = asyncio.Event()
guard = ContextGuardPlugin(default=Threshold(context_window=1_000_000))
asyncio.run(main([guard] if sys.argv[1:] else []))
"""


@pytest.mark.slow
def test_cancelled_turns_take_no_memory() -> None:
    """After 300 of them, of 400 KB each, it is within 10 % of that without a guard."""
    without, guarded = (
        int(subprocess.check_output([sys.executable, "-c", CANCEL, *options]))
        for options in ([], ["guarded"])
    )
    assert guarded == pytest.approx(without, rel=0.1)
