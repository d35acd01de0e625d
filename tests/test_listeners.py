"""The time limit of listeners: late ones are left alone, and no turn waits for them."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from contextguard_adk import ContextGuardPlugin
from contextguard_adk.testing import SimulatedLlm, call
from tests.builders import Chat, answer_text, queued_tool
from tests.guarded import NOW, SMALL, guarded_chat

LIMIT_SECONDS = 0.1
MARGIN_SECONDS = 10
"""For a machine that may be slow; a turn that waits for the listener has no end."""
KINDS = {
    "on_call": "CallRecord",
    "on_compaction": "CompactionRecord",
    "on_pressure": "PressureRecord",
}
SECRET = "xyzzy-4711"


class Late:
    """A listener whose first calls wait until the test releases them."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.ended = 0
        self.may_end = threading.Event()

    def block(self, record: Any) -> None:
        """Blocks the thread in which it is called."""
        self.told.append(record)
        self.may_end.wait(2 * MARGIN_SECONDS)
        self.ended += 1

    async def wait(self, record: Any) -> None:
        """Waits, and lets the event loop work."""
        self.told.append(record)
        while not self.may_end.is_set():
            await asyncio.sleep(0.01)
        self.ended += 1

    def returns_awaitable(self, record: Any) -> Any:
        """Returns at once what does not end."""
        return self.wait(record)


@pytest.fixture(params=["block", "wait", "returns_awaitable"])
def late(request: pytest.FixtureRequest) -> Any:
    """Yields the object and the listener; lets all its calls end after the test."""
    made = Late()
    yield made, getattr(made, request.param)
    made.may_end.set()


def chat_with(**guard: Any) -> Chat:
    """A chat in which every request is under pressure."""
    limits = {"listener_timeout_seconds": LIMIT_SECONDS, "warning_threshold": 0.001}
    llm = SimulatedLlm(context_window=100_000)
    return guarded_chat(llm, SMALL, guard={**limits, **guard})


async def talk(chat: Chat, turns: int) -> None:
    """Has each turn compact, and end with an answer."""
    for turn in range(turns):
        await chat.set_state(NOW)
        assert answer_text(await chat.say(f"Question {turn}. " + "word " * 300))


async def until(is_so: Callable[[], bool]) -> None:
    """Waits until something is so, for a machine that may be slow."""
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_listeners_that_never_return_end_no_turn(
    late: tuple[Late, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Each is called once, and named once in the log; the session goes on."""
    made, listener = late
    await talk(chat_with(**dict.fromkeys(KINDS, listener)), turns=3)
    told = [type(record).__name__ for record in made.told]
    assert sorted(told) == sorted(KINDS.values())
    said = [r for r in caplog.records if "takes longer than" in r.getMessage()]
    assert {r.levelno for r in said} == {logging.WARNING}
    assert len(said) == len(KINDS)
    for name in told:
        assert sum(name in r.getMessage() for r in said) == 1
    assert not [r for r in said if "Question" in r.getMessage()]


async def test_a_turn_waits_for_a_late_listener_no_longer_than_the_limit(
    late: tuple[Late, Any],
) -> None:
    """Once, however many model calls the turn has."""
    made, listener = late
    steps = [call("look", step=step) for step in range(3)]
    llm = SimulatedLlm(script=[*steps, "Done."], context_window=100_000)
    guard = {"on_call": listener, "listener_timeout_seconds": LIMIT_SECONDS}
    tools = [queued_tool("look", ["Nothing."])]
    chat = guarded_chat(llm, SMALL, guard=guard, tools=tools)
    async with asyncio.timeout(LIMIT_SECONDS + MARGIN_SECONDS):
        assert answer_text(await chat.say("Look.")) == "Done."
    assert (len(llm.requests), len(made.told)) == (4, 1)


async def test_a_late_call_ends_and_the_listener_is_called_again(
    late: tuple[Late, Any],
) -> None:
    """It is not cancelled; later records are delivered."""
    made, listener = late
    chat = chat_with(on_call=listener)
    await talk(chat, turns=2)
    assert (len(made.told), made.ended) == (1, 0)
    made.may_end.set()
    await until(lambda: made.ended == 1)
    await asyncio.sleep(0.05)
    await talk(chat, turns=2)
    assert (len(made.told), made.ended) == (3, 3)


async def test_a_late_failure_is_logged_as_any_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By type and place, without its text."""
    may_fail = asyncio.Event()

    async def listen(_: object) -> None:
        await may_fail.wait()
        raise RuntimeError(SECRET)

    await talk(chat_with(on_call=listen), turns=1)
    assert "failed" not in caplog.text
    may_fail.set()
    said = "A listener for CallRecord failed: RuntimeError at "
    await until(lambda: said in caplog.text)
    visible = [r for r in caplog.records if r.levelno >= logging.INFO]
    assert SECRET not in "".join(r.getMessage() for r in visible)


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["closed", "cancelled"])
def test_an_event_loop_ends_with_a_late_call_under_way(
    late: tuple[Late, Any], is_cancelled: bool
) -> None:
    """A call ends with its loop, a thread does not; the next loop's is heard of, also
    where nobody cancelled the one before."""
    made, listener = late
    chat = chat_with(on_call=listener)
    for _ in range(2):
        if is_cancelled:
            asyncio.run(talk(chat, turns=1))
            continue
        loop = asyncio.new_event_loop()
        loop.run_until_complete(talk(chat, turns=1))
        loop.close()
    is_thread = listener.__name__ == "block"
    assert len(made.told) == (1 if is_thread else 2)


async def test_a_turn_that_is_cancelled_leaves_the_listener_at_work() -> None:
    """The call under way ends, and later ones are made."""
    made = Late()
    chat = chat_with(on_call=made.wait, listener_timeout_seconds=60)
    turn = asyncio.create_task(talk(chat, turns=1))
    await until(lambda: bool(made.told))
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    made.may_end.set()
    await until(lambda: made.ended == 1)
    await talk(chat, turns=1)
    assert made.ended == 2


async def test_sync_listeners_have_a_thread_and_the_context_of_the_call() -> None:
    """The thread's end is waited for, so that records come in order."""
    place = contextvars.ContextVar("place", default="")
    heard: list[tuple[str, bool]] = []

    def listen(_: object) -> None:
        time.sleep(0.01)
        is_main = threading.current_thread() is threading.main_thread()
        heard.append((place.get(), is_main))

    place.set("here")
    await talk(chat_with(on_call=listen, listener_timeout_seconds=60), turns=2)
    assert heard == [("here", False)] * 2


@pytest.mark.parametrize("seconds", [0, -1, 3_601, float("nan"), float("inf"), "5"])
def test_a_wrong_limit_is_refused(seconds: Any) -> None:
    """More than 0 and at most 3,600 seconds are accepted."""
    with pytest.raises(ValidationError, match="listener_timeout_seconds"):
        ContextGuardPlugin(listener_timeout_seconds=seconds)
