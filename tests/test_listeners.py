"""The time limit of listeners: late ones are left alone, and no turn waits for them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from contextguard_adk import ContextGuardPlugin
from contextguard_adk.errors import ConfigError
from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat, answer_text
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


@pytest.fixture(params=["block", "wait"])
def late(request: pytest.FixtureRequest) -> Any:
    """Yields the object and the listener; lets all its calls end after the test."""
    made = Late()
    yield made, getattr(made, request.param)
    made.may_end.set()


def chat_with(**guard: Any) -> Chat:
    """A chat in which every request is under pressure."""
    limits = {"listener_timeout_seconds": LIMIT_SECONDS, "warning_threshold": 0.001}
    llm = SimulatedLlm(context_window=100_000, token_ratio=1.0)
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
    """As one warning, by type and place, without its text."""
    may_fail = asyncio.Event()

    async def listen(_: object) -> None:
        await may_fail.wait()
        raise RuntimeError(SECRET)

    chat = chat_with(on_call=listen)
    await talk(chat, turns=1)
    assert "failed" not in caplog.text
    may_fail.set()
    said = "A listener for CallRecord failed: RuntimeError at "
    await until(lambda: said in caplog.text)
    await talk(chat, turns=2)
    visible = [r for r in caplog.records if r.levelno >= logging.INFO]
    assert SECRET not in "".join(r.getMessage() for r in visible)
    [failure] = [r for r in visible if "failed" in r.getMessage()]
    assert failure.levelno == logging.WARNING
    assert failure.exc_info is None


@pytest.mark.parametrize("seconds", [0, 3_601, float("nan"), "5"])
def test_a_wrong_limit_is_refused(seconds: Any) -> None:
    """More than 0 and at most 3,600 seconds are accepted."""
    with pytest.raises(ConfigError, match="listener_timeout_seconds"):
        ContextGuardPlugin(listener_timeout_seconds=seconds)
