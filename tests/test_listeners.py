"""The time limit of listeners: late ones are left alone, and no turn waits for them."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from contextguard_adk import ContextGuardPlugin
from contextguard_adk.errors import ConfigError
from contextguard_adk.testing import SimulatedLlm, VirtualTimeLoop
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


async def test_the_event_loop_goes_on_while_a_listener_blocks() -> None:
    """From the start: the loop does what the listener waits for."""
    loop = asyncio.get_running_loop()
    seen = list[bool]()

    def listen(_: object) -> None:
        has_run = threading.Event()
        loop.call_soon_threadsafe(has_run.set)
        seen.append(has_run.wait(0.05))

    await talk(chat_with(**dict.fromkeys(KINDS, listen)), turns=3)
    assert len(seen) >= 3
    assert any(seen)  # Not all, on a machine that is busy.


async def test_sessions_do_not_wait_for_each_others_listeners() -> None:
    """Twenty at once are told at once, each in a thread that ends with the process."""
    together = threading.Barrier(20)
    told = list[bool]()

    def listen(_: object) -> None:
        together.wait(MARGIN_SECONDS)
        told.append(threading.current_thread().daemon)

    limits = {"listener_timeout_seconds": MARGIN_SECONDS, "on_call": listen}
    chats = [chat_with(**limits) for _ in range(20)]
    await asyncio.gather(*(chat.say("Hello.") for chat in chats))
    assert told == [True] * 20


async def test_a_full_thread_pool_of_the_app_holds_up_no_listener() -> None:
    """Nor does a listener that blocks take a place in it."""
    loop = asyncio.get_running_loop()
    may_end = threading.Event()
    told = list[object]()
    with ThreadPoolExecutor(1) as pool:
        loop.set_default_executor(pool)
        blocks = loop.run_in_executor(None, may_end.wait, 2 * MARGIN_SECONDS)
        limit = {"listener_timeout_seconds": MARGIN_SECONDS}
        await talk(chat_with(on_call=told.append, **limit), turns=2)
        assert len(told) == 2
        may_end.set()
        await blocks


class AsyncObject:
    """A listener that is an object with an async method."""

    def __init__(self) -> None:
        self.threads = list[int]()

    async def __call__(self, _: object) -> None:
        self.threads.append(threading.get_ident())


def test_virtual_time_does_not_pass_while_a_listener_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A function that takes a while is not late on an event loop that skips waits."""
    limit_seconds = 60.0
    chat = chat_with(
        on_call=lambda record: time.sleep(0.1), listener_timeout_seconds=limit_seconds
    )
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(talk(chat, turns=2))
        assert runner.get_loop().time() < limit_seconds

    assert "takes longer than" not in caplog.text


async def test_whatever_can_be_awaited_runs_on_the_event_loop() -> None:
    """An async function, an object, a partial function, a function that returns one."""
    listen = AsyncObject()
    forms: list[Callable[[Any], Any]] = [
        listen,
        listen.__call__,
        functools.partial(AsyncObject.__call__, listen),
        lambda record: listen(record),
    ]
    for form in forms:
        await talk(chat_with(on_call=form), turns=1)

    assert listen.threads == [threading.get_ident()] * len(forms)


@pytest.mark.parametrize(
    "error", [StopIteration, CancelledError, SystemExit, MemoryError]
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_whatever_a_listener_raises_is_logged_once(
    error: type[BaseException], is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Odd errors are no end of a turn, and no lateness."""
    told = list[object]()

    def fail(record: object) -> None:
        told.append(record)
        raise error(SECRET)

    async def fail_later(record: object) -> None:
        fail(record)

    await talk(chat_with(on_call=fail_later if is_async else fail), turns=2)
    assert len(told) == 2
    visible = [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]
    assert sum("A listener for CallRecord failed" in text for text in visible) == 1
    assert not any("takes longer" in text for text in visible)


async def test_too_many_threads_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The turn goes on, and the listener is called once there are fewer."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told = list[object]()
    chat = chat_with(on_call=told.append)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        await talk(chat, turns=2)
    assert caplog.text.count("A listener for CallRecord failed: RuntimeError") == 1
    assert told == []
    await talk(chat, turns=1)
    assert len(told) == 1


@pytest.mark.parametrize("seconds", [0, 3_601, float("nan"), "5"])
def test_a_wrong_limit_is_refused(seconds: Any) -> None:
    """More than 0 and at most 3,600 seconds are accepted."""
    with pytest.raises(ConfigError, match="listener_timeout_seconds"):
        ContextGuardPlugin(listener_timeout_seconds=seconds)


class Told:
    """Listeners that are methods and objects."""

    def __call__(self, record: object, log: object = None) -> None:
        """Takes a record, and one more if it is given."""

    def told(self, record: object) -> None:
        """Takes a record."""

    def told_nothing(self) -> None:
        """Takes no record."""

    async def told_twice(self, record: object, again: object) -> None:
        """Takes too many."""


def hand_on(function: Callable[..., object]) -> Callable[[object], object]:
    """Decorates a function of two values: the second is the decorator's."""

    @functools.wraps(function)
    def wrapper(record: object) -> object:
        return function(record, "log")

    return wrapper


def tell_log(record: object, log: object) -> None:
    """Needs two values."""


WRONG: dict[str, tuple[object, str]] = {
    "text": ("tell", "not str: 'tell'"),
    "no parameter": (Told().told_nothing, r"not told_nothing\(\)"),
    "two parameters": (tell_log, r"not tell_log\(record, log\)"),
    "async": (Told().told_twice, r"not async told_twice\(record, again\)"),
    "keyword": (lambda *, record: None, r"not <lambda>\(record\)"),
    "partial": (functools.partial(tell_log, 1, 2), r"not partial\(\)"),
    "class": (Late, r"not Late\(\)"),
}
RIGHT: dict[str, Callable[..., Any]] = {
    "method": Told().told,
    "object": Told(),
    "more by default": lambda record, log=None: None,
    "any": lambda *records: None,
    "partial": functools.partial(tell_log, log=1),
    "decorated": hand_on(tell_log),
    "builtin": [].append,
    "unknown": {}.update,
    "mock": Mock(),
    "async mock": AsyncMock(),
}
FUNCTIONS = {
    **KINDS,
    "before_compaction": "PlannedCompaction",
    "after_summary": "PlannedSummary",
    "redact": "text",
}


@pytest.mark.parametrize(("wrong", "given"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_called_with_one_argument_is_refused(
    wrong: Any, given: str
) -> None:
    """When the plugin is made, with the argument, what it takes, and what was given."""
    for name, taken in FUNCTIONS.items():
        kind = "a sync function" if name == "redact" else "a function"
        expected = f"{name} must be {kind} of one argument, a {taken}, {given}"
        with pytest.raises(TypeError, match=expected):
            ContextGuardPlugin(**{name: wrong})
    with pytest.raises(TypeError, match="default must be a Strategy, a sync function"):
        ContextGuardPlugin(default=wrong)


@pytest.mark.parametrize("right", RIGHT.values(), ids=RIGHT)
def test_whatever_can_be_called_with_one_argument_is_accepted(right: Any) -> None:
    """Also where Python does not know its parameters."""
    for name in FUNCTIONS:
        if name == "redact" and isinstance(right, AsyncMock):
            continue
        assert ContextGuardPlugin(**{name: right})
