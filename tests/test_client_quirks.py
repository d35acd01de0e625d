"""A client that ends its calls in odd ways, or not at all, ends no turn."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse

from contextguard_adk import CompactionRecord, SlidingWindow, Threshold
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import SimulatedLlm
from tests.background import in_virtual_time
from tests.builders import Chat, answer_text, model, user
from tests.chats import EXACT, guarded_chat, seed, words
from tests.guarded import NOW, is_compacted
from tests.refusing import open_chat, overflow

LIMIT_SECONDS = 2.0
SETTINGS: dict[str, Any] = {
    "context_window": 4_000,
    "summarizer_context_window": 100_000,
}
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "threshold": Threshold,
    "sliding window": SlidingWindow,
}
SECRET = "xyzzy-4711"

Answer = AsyncGenerator[LlmResponse, None]


class Odd(BaseException):
    """What no `except Exception` catches."""


def chunk(text: str = "") -> LlmResponse:
    """A piece of an answer."""
    return LlmResponse(content=model(text), partial=True)


class Quirky(SimulatedLlm):
    """A model whose summaries, or answers, another function gives."""

    summarize: Callable[[], Answer] | None = None
    answer: Callable[[], Answer] | None = None

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> Answer:
        """Yields what it is told to, else what the script says."""
        is_summary = self.is_summary_request(llm_request)
        quirk = self.summarize if is_summary else self.answer
        if quirk is None:
            async for response in super().generate_content_async(llm_request, stream):
                yield response
            return

        self._counts["calls"] += 1
        self._counts["summaries"] += is_summary
        async for response in quirk():
            yield response


def raising(error: BaseException, *, in_mid_stream: bool = False) -> Any:
    """A client that raises it, at once or after the first chunk."""

    async def quirk() -> Answer:
        if in_mid_stream:
            yield chunk("## Cur")
            await asyncio.sleep(0)
        raise error

    return quirk


async def cancel_itself() -> Answer:
    """Has the task cancelled in which it runs, as a library's scope does."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)
    yield chunk()


async def cancel_from_group() -> Answer:
    """Loses one of its own tasks, whose cancellation it passes on."""
    inner = asyncio.ensure_future(asyncio.sleep(3_600))
    asyncio.get_running_loop().call_soon(inner.cancel)
    await inner
    yield chunk()


async def swallow() -> Answer:
    """Goes on whatever happens to it."""
    yield chunk("## Cur")
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3_600)


async def swallow_once() -> Answer:
    """Answers in spite of its cancellation, long after."""
    try:
        await asyncio.sleep(3_600)
    except asyncio.CancelledError:
        await asyncio.sleep(20)
    yield LlmResponse(content=model("Too late."))


async def close_slowly() -> Answer:
    """Takes its time to close a connection."""
    try:
        yield chunk("## Cur")
        await asyncio.sleep(3_600)
    finally:
        await asyncio.sleep(3_600)


async def fail_when_cancelled() -> Answer:
    """Raises another error in place of its cancellation."""
    yield chunk("## Cur")
    try:
        await asyncio.sleep(3_600)
    except asyncio.CancelledError:
        raise RuntimeError(SECRET) from None


_SPAN: contextvars.ContextVar[str] = contextvars.ContextVar("span", default="")


async def leave_its_span() -> Answer:
    """Resets a context variable when it is closed, which another context forbids."""
    token = _SPAN.set("summary")
    try:
        yield chunk("## Cur")
        await asyncio.sleep(3_600)
    finally:
        _SPAN.reset(token)


MIXED = BaseExceptionGroup(SECRET, [RuntimeError("a"), asyncio.CancelledError()])
RAISED: dict[str, Any] = {
    "a cancellation of its own": raising(asyncio.CancelledError()),
    "a cancellation in mid-stream": raising(
        asyncio.CancelledError(), in_mid_stream=True
    ),
    "its own task cancelled": cancel_itself,
    "an inner task cancelled": cancel_from_group,
    "a generator's exit": raising(GeneratorExit()),
    "a mixed group": raising(MIXED),
    "a group in mid-stream": raising(MIXED, in_mid_stream=True),
    "a group of groups": raising(BaseExceptionGroup(SECRET, [MIXED])),
    "the end of an iteration": raising(StopAsyncIteration()),
    "the end of an iterator": raising(StopIteration()),
    "an exit": raising(SystemExit(1)),
    "another kind": raising(Odd(SECRET)),
}
HANGS: dict[str, Any] = {
    "goes on": swallow,
    "answers late": swallow_once,
    "closes slowly": close_slowly,
    "fails then": fail_when_cancelled,
    "leaves a span": leave_its_span,
}


def begin(
    quirk: Any, strategy: str = "threshold", limit_seconds: float = LIMIT_SECONDS
) -> tuple[Quirky, Chat, list[CompactionRecord]]:
    """A chat whose summaries are written by a client with a quirk."""
    llm = Quirky(context_window=4_000, token_ratio=1.0, summarize=quirk)
    made = STRATEGIES[strategy](summary_timeout_seconds=limit_seconds, **SETTINGS)
    records: list[CompactionRecord] = []
    chat = guarded_chat(llm, made, guard={"on_compaction": records.append})
    return llm, chat, records


async def talk(llm: Quirky, chat: Chat) -> None:
    """A turn that compacts, and one more."""
    await seed(chat, user("The task."), model(words(3_850)), state=EXACT)
    assert answer_text(await chat.say("Go on."))
    assert is_compacted(llm.requests[-1])
    assert answer_text(await chat.say("And on."))
    assert (llm.rejections, llm.violations) == (0, 0)


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    """Asyncio has nothing to report, and nobody is quoted."""
    assert not [r for r in caplog.records if r.name == "asyncio"]
    visible = [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]
    assert SECRET not in "".join(visible)


def others() -> set[asyncio.Task[Any]]:
    """The tasks beside the running one."""
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("quirk", RAISED.values(), ids=RAISED)
async def test_whatever_a_client_raises_the_summary_has_failed(
    quirk: Any, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Excerpts take its place, the turn goes on, and no other call is paid for."""
    llm, chat, records = begin(quirk, strategy)
    await talk(llm, chat)
    assert [record.is_mechanical for record in records] == [True]
    assert llm.summaries == 1
    assert not others()
    check_log(caplog)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("quirk", HANGS.values(), ids=HANGS)
@in_virtual_time
async def test_a_client_that_goes_on_holds_no_turn(
    quirk: Any, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The turn ends at the time limit; a moment later nothing is left of the call."""
    llm, chat, records = begin(quirk, strategy)
    loop = asyncio.get_running_loop()
    started = loop.time()
    await talk(llm, chat)
    assert loop.time() - started < LIMIT_SECONDS + 1
    assert [record.is_mechanical for record in records] == [True]
    assert llm.summaries == 1

    await asyncio.sleep(LIMIT_SECONDS)
    assert not others()
    check_log(caplog)


async def test_endless_empty_chunks_end_at_the_time_limit() -> None:
    """As long as the client lets the event loop work between them."""

    async def repeat() -> Answer:
        while True:
            yield chunk()
            await asyncio.sleep(0)

    llm, chat, records = begin(repeat, limit_seconds=0.05)
    await talk(llm, chat)
    assert [record.is_mechanical for record in records] == [True]
    assert not others()


@in_virtual_time
async def test_a_turn_is_cancelled_while_its_client_goes_on() -> None:
    """It ends at once, as cancelled; the next one compacts."""
    _, chat, records = begin(swallow)
    await seed(chat, user("The task."), model(words(3_850)), state=EXACT)
    turn = asyncio.create_task(chat.say("Go on."))
    await asyncio.sleep(1)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert asyncio.get_running_loop().time() < 1.5

    await asyncio.sleep(2 * LIMIT_SECONDS)
    assert not others()
    assert answer_text(await chat.say("Are you there?"))
    assert [record.is_mechanical for record in records] == [True]


def test_an_interrupt_is_passed_on() -> None:
    """Whoever presses Ctrl-C while a summary is written is obeyed."""
    llm, chat, _ = begin(raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(talk(llm, chat))


async def test_a_summary_on_demand_fails_as_well() -> None:
    """Asked for in the session's state, below the trigger."""
    _, chat, records = begin(raising(asyncio.CancelledError()))
    await seed(chat, user("The task."), model(words(1_500)), state=EXACT)
    await chat.set_state(NOW)
    assert answer_text(await chat.say("Go on."))
    assert [record.is_mechanical for record in records] == [True]


RESENT = {
    name: RAISED[name]
    for name in ("a cancellation of its own", "a generator's exit", "a mixed group")
}


@pytest.mark.parametrize("quirk", RESENT.values(), ids=RESENT)
async def test_a_request_that_is_sent_again_may_end_so(
    quirk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """After a rejection: the user sees an error, as ADK shows one, and can go on."""

    async def refuse_once() -> Answer:
        llm.answer = quirk
        raise overflow()
        yield chunk()

    llm = Quirky(context_window=200_000, token_ratio=1.0, answer=refuse_once)
    chat = open_chat(llm)
    await seed(chat, user("The task."), model(words(9_000)))
    events = await chat.say("Go on.")
    assert events[-1].error_code == "BrokenCallError"
    llm.answer = None
    assert answer_text(await chat.say("And on."))
    assert not others()
    check_log(caplog)
