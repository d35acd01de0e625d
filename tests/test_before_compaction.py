"""The function that is asked before a compaction: what it is told, what it decides,
and that nothing it does harms a turn."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from google.adk.models.llm_request import LlmRequest

from contextguard_adk import (
    CompactionRecord,
    ContextGuardPlugin,
    Pipeline,
    PlannedCompaction,
    SlidingWindow,
    Threshold,
)
from contextguard_adk.strategies import Ask, Draft, MessageWindow, Strategy, Turn
from contextguard_adk.testing import SimulatedLlm, SimulatedProviderError, call
from tests.builders import Chat, answer_text, guarded_agent, model, user
from tests.chats import (
    EXACT,
    HEURISTIC,
    REAL,
    Doing,
    agent_requests,
    seed,
    summary_requests,
    words,
)
from tests.guarded import NOW, SMALL, WINDOW, is_compacted, long_chat, original
from tests.holding import holds
from tests.pages import find_python

REFUSED = "context_guard:compact_refused"
LIMIT_SECONDS = 0.1
SECRET = "xyzzy-4711"
NO_ROOM = 3_650
"""From 3,600 tokens on a request leaves no room for its answer."""


class Asked:
    """A function that remembers what it was given, and says what a test wants."""

    def __init__(self, said: Any = None) -> None:
        self.said = said
        self.planned: list[PlannedCompaction] = []

    def __call__(self, planned: PlannedCompaction) -> Any:
        self.planned.append(planned)
        return self.said

    @property
    def reasons(self) -> list[str]:
        """Of each time that it was asked."""
        return [each.reason for each in self.planned]


def large() -> SimulatedLlm:
    """A model that takes whatever it is sent."""
    return SimulatedLlm(context_window=100_000, token_ratio=1.0)


def counted(tokens: int) -> dict[str, Any]:
    """The last count was right, and nearly all of the request is counted."""
    return {REAL: tokens, HEURISTIC: tokens}


async def talk(
    before: Any, tokens: int = 3_300, llm: SimulatedLlm | None = None, **settings: Any
) -> tuple[SimulatedLlm, Chat]:
    """A turn whose request reaches the threshold; the function is asked before."""
    llm = llm or large()
    guard = settings.pop("guard", {})
    guard = {"before_compaction": before, **guard}
    state = {**counted(tokens), **settings.pop("state", {})}
    return llm, await long_chat(llm, tokens, guard=guard, state=state, **settings)


def check_compacted(llm: SimulatedLlm) -> None:
    """Sees to it that the newest request stands behind a summary of a model."""
    assert llm.summaries == 1
    assert is_compacted(agent_requests(llm)[-1])
    assert "A summary." in agent_requests(llm)[-1].text


async def grow(chat: Chat) -> None:
    """Has the request reach the threshold once more, a call after a compaction."""
    await chat.say("Well.")
    await chat.tell([original(3_300)])
    await chat.say("And on.")


async def until(is_so: Callable[[], bool]) -> None:
    """Waits until something is so, for a machine that may be slow."""
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_it_is_told_what_may_be_left_out() -> None:
    """Before it is: what is in the request, and the sizes; what it may say is all."""
    asked = Asked()
    llm, chat = await talk(asked, say="Go on.")
    check_compacted(llm)

    [planned] = asked.planned
    assert (planned.agent, planned.session_id) == ("agent", "session")
    assert (planned.app, planned.strategy) == ("app", "Threshold")
    assert planned.is_ahead is False
    assert (planned.reason, planned.window_tokens) == ("tokens", WINDOW)
    assert planned.threshold_tokens == 3_200 <= planned.tokens < 3_500
    assert 200 <= planned.summary_tokens <= 400

    said = [
        content.parts[0].text or "" for content in planned.messages if content.parts
    ]
    assert said[0] == "The task."
    assert said[1].startswith("ORIGINAL")

    await grow(chat)
    later = asked.planned[1].messages
    assert "The task." not in str(later)  # A summary covers it already.
    assert "ORIGINAL" in str(later)


SHORT = [user("Hello."), model(words(40))] * 12
FOUR = MessageWindow(window_size=4, min_messages_before_windowing=4)
STRATEGIES: dict[str, tuple[Strategy, int, str]] = {
    "turns": (SlidingWindow(context_window=WINDOW), 100, "turns"),
    "window": (SlidingWindow(context_window=WINDOW), 2_800, "tokens"),
    "pipeline": (Pipeline(context_window=WINDOW, window=FOUR), 2_800, "tokens"),
}


@pytest.mark.parametrize(
    ("strategy", "tokens", "reason"), STRATEGIES.values(), ids=STRATEGIES
)
async def test_every_strategy_is_asked_about(
    strategy: Strategy, tokens: int, reason: str
) -> None:
    """Once, with the reason that the record will name; what it puts off stays."""
    for said, compacted_for in ((None, [reason]), (False, [])):
        asked = Asked(said)
        told = list[CompactionRecord]()
        guard = {"before_compaction": asked, "on_compaction": told.append}
        plugin = ContextGuardPlugin(default=strategy, **guard)  # type: ignore[arg-type]
        llm = large()
        chat = Chat(guarded_agent(llm), [plugin])
        messages = *SHORT, original(tokens), *SHORT[:2]
        await seed(chat, *messages, state=counted(tokens + 600))
        await chat.say("Go on.")
        assert asked.reasons == [reason]
        assert [record.reason for record in told] == compacted_for
        await chat.say("And on.")
        assert asked.reasons == [reason]


async def test_it_puts_a_compaction_off(caplog: pytest.LogCaptureFixture) -> None:
    """It is asked again when the request has grown, and not on each call before."""
    caplog.set_level(logging.INFO)
    asked = Asked(False)
    llm, chat = await talk(asked)
    for _ in range(3):
        assert answer_text(await chat.say("Go on."))
    assert (llm.summaries, asked.reasons) == (0, ["tokens"])
    assert "ORIGINAL" in llm.requests[-1].text
    assert "A compaction of agent 'agent' is put off; app 'app'" in caplog.text
    assert "asked for" not in caplog.text  # By nobody.
    assert "ORIGINAL" not in caplog.text

    asked.said = None
    await chat.say(words(210))  # More than half of a summary.
    assert asked.reasons == ["tokens"] * 2
    check_compacted(llm)


async def test_what_would_not_fit_is_not_put_off() -> None:
    """A request without room for its answer is compacted, whatever it says."""
    asked = Asked(False)
    llm, _ = await talk(asked, NO_ROOM)
    assert asked.reasons == ["tokens"]
    check_compacted(llm)


async def test_what_was_rejected_is_not_put_off() -> None:
    """The provider's window is smaller than anybody knew; a focus is taken."""
    for said in (False, "Ship names."):
        asked = Asked(said)
        llm = SimulatedLlm(context_window=2_500, token_ratio=1.0)
        summarizer = SimulatedLlm(context_window=100_000, summary_replies=["Of old."])
        strategy = SMALL.model_copy(update={"summarizer": summarizer})
        await talk(asked, 2_700, llm, strategy=strategy)
        assert llm.rejections == 1
        assert asked.reasons == ["overflow"]
        assert is_compacted(llm.requests[-1])
        assert (said is False) != ("Ship names." in summarizer.requests[-1].text)


async def test_what_was_rejected_for_its_bytes_is_not_put_off() -> None:
    """Even where its tokens would have room."""
    asked = Asked(False)
    llm = large()
    error = SimulatedProviderError(
        "Request payload size exceeds the limit: 9000 bytes."
    )
    llm.script = [error, "Done."]
    await talk(asked, 2_000, llm)
    assert asked.reasons == ["overflow"]
    check_compacted(llm)


@pytest.mark.parametrize("tokens", [2_000, NO_ROOM])
async def test_one_that_was_asked_for_is_refused_with_a_reason(tokens: int) -> None:
    """Where the request may go out as it is; whoever asked can read why."""
    asked = Asked(False)
    told = list[CompactionRecord]()
    guard = {"on_compaction": told.append}
    llm, chat = await talk(asked, tokens, guard=guard, state=NOW)
    state = await chat.state()
    assert asked.reasons == ["requested"]
    assert state["context_guard:compact"] is False

    if tokens == NO_ROOM:
        check_compacted(llm)
        assert not state.get(REFUSED)
    else:
        assert (llm.summaries, told) == (0, [])
        assert state[REFUSED] == "before_compaction put it off"
        await chat.say("And on.")
        assert asked.reasons == ["requested"]


async def test_a_focus_reaches_the_summarizer() -> None:
    """Beside one that was asked for; up to 1,000 characters."""
    focus = {"context_guard:compact_focus": "Names of ports."}
    llm, _ = await talk(Asked("Prices. " + "x" * 2_000), 2_000, state={**NOW, **focus})
    check_compacted(llm)
    [asked] = summary_requests(llm)
    assert "\nNames of ports.\nPrices. x" in asked.text
    assert asked.text.count("x" * 992) == 1
    assert "x" * 993 not in asked.text


async def test_it_may_be_async_and_sees_context_variables() -> None:
    """As listeners are called; an async one runs on the event loop."""
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")
    tenant.set("harbor")

    async def wait(planned: PlannedCompaction) -> str:
        await asyncio.sleep(0)
        return f"Of the {tenant.get()}."

    llm, _ = await talk(wait)
    assert "Of the harbor." in summary_requests(llm)[0].text


class Odd(BaseException):
    """What no `except Exception` catches."""


@pytest.mark.parametrize(
    "error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError, Odd]
)
@pytest.mark.parametrize("is_slow", [False, True])
async def test_whatever_it_raises_the_compaction_goes_on(
    error: type[BaseException], is_slow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log names it, without its text."""

    def fail(planned: PlannedCompaction) -> None:
        threading.Event().wait(0.1 if is_slow else 0)
        raise error(SECRET)

    llm, chat = await talk(fail)
    check_compacted(llm)
    assert answer_text(await chat.say("And on."))
    visible = [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]
    assert sum("PlannedCompaction failed" in text for text in visible) == 1
    assert SECRET not in "".join(visible)


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError, Odd])
async def test_an_async_one_may_fail_as_well(error: type[BaseException]) -> None:
    """On the event loop itself."""

    async def fail(planned: PlannedCompaction) -> None:
        await asyncio.sleep(0)
        raise error(SECRET)

    llm, _ = await talk(fail)
    check_compacted(llm)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_late_one_is_not_waited_for(
    is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The compaction goes on without it; it is asked again once it has returned."""
    may_end = threading.Event()
    asked = list[int]()
    ended = list[int]()

    def block(planned: PlannedCompaction) -> bool:
        asked.append(planned.tokens)
        may_end.wait(60)
        ended.append(planned.tokens)
        return False

    async def wait(planned: PlannedCompaction) -> bool:
        asked.append(planned.tokens)
        while not may_end.is_set():
            await asyncio.sleep(0.01)
        ended.append(planned.tokens)
        return False

    guard = {"listener_timeout_seconds": LIMIT_SECONDS}
    llm, chat = await talk(wait if is_async else block, guard=guard)
    check_compacted(llm)
    await grow(chat)
    assert (llm.summaries, len(asked), ended) == (2, 1, [])
    late = [r for r in caplog.records if "takes longer than" in r.getMessage()]
    assert [r.levelname for r in late] == ["WARNING"]
    may_end.set()
    async with asyncio.timeout(60):
        while len(asked) < 2:
            await grow(chat)
    assert ended[0] == asked[0]


async def test_a_late_one_is_still_asked_about_other_sessions() -> None:
    """Where one user takes long to decide, others are not overruled."""
    llm = large()
    asked = list[str]()

    async def wait(planned: PlannedCompaction) -> Literal[False]:
        asked.append(planned.session_id)
        await asyncio.sleep(60 if planned.session_id == "slow" else 0)
        return False

    guard = ContextGuardPlugin(
        default=SMALL, before_compaction=wait, listener_timeout_seconds=LIMIT_SECONDS
    )
    for session in ("slow", "quick", "other"):
        chat = Chat(guarded_agent(llm), [guard], session_id=session)
        history = user("The task."), original(3_300)
        await seed(chat, *history, state=counted(3_300))
        await chat.say("Go on.")
    assert asked == ["slow", "quick", "other"]
    assert llm.summaries == 1


async def test_a_turn_may_be_cancelled_while_it_is_asked() -> None:
    """It ends at once; the next one waits for the summary, which is paid for once."""
    may_end = asyncio.Event()
    begun = asyncio.Event()
    count = 0

    async def wait(planned: PlannedCompaction) -> None:
        nonlocal count
        count += 1
        begun.set()
        await may_end.wait()

    llm = large()
    llm.summary_replies = ["A summary."]
    limits: Any = {"listener_timeout_seconds": 60, "before_compaction": wait}
    plugin = ContextGuardPlugin(default=SMALL, **limits)
    chat = Chat(guarded_agent(llm), [plugin])
    await seed(chat, user("The task."), original(3_700), state=EXACT)
    turn = asyncio.create_task(chat.say("Go on."))
    await asyncio.wait_for(begun.wait(), 30)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert llm.requests == []
    after = asyncio.create_task(chat.say("Are you there?"))
    await asyncio.sleep(0.05)
    may_end.set()
    assert answer_text(await after)
    check_compacted(llm)
    assert count == 1


AHEAD = Threshold(
    context_window=10_000, summarizer_context_window=100_000, ahead=0.75, recall=False
)
"""Threshold 8,000 tokens; from 6,000 on summaries are written."""


@pytest.mark.parametrize("said", [None, False, "Ship names."])
async def test_a_summary_in_the_background_is_asked_about(said: Any) -> None:
    """The answer does not wait for it; one that is put off is asked about when due."""
    may_end = asyncio.Event()
    asked = list[PlannedCompaction]()

    async def wait(planned: PlannedCompaction) -> Any:
        asked.append(planned)
        await may_end.wait()
        return said

    limits: Any = {"listener_timeout_seconds": 60}
    llm, chat = await talk(wait, 6_500, strategy=AHEAD, guard=limits)
    await until(lambda: len(asked) == 1)
    assert len(agent_requests(llm)) == 1  # Answered, while it has said nothing yet.
    assert llm.summaries == 0
    assert (asked[0].reason, asked[0].threshold_tokens) == ("tokens", 8_000)
    assert asked[0].is_ahead
    assert "ORIGINAL" in str(asked[0].messages)
    may_end.set()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait_for(asyncio.gather(*others), 30)
    assert llm.summaries == (said is not False)
    await chat.say("Go on.")
    assert len(asked) == 1
    if said is False:
        await chat.say(words(1_500))
        assert [each.reason for each in asked] == ["tokens"] * 2
        return
    assert ("Ship names." in summary_requests(llm)[0].text) is bool(said)
    await chat.say(words(1_800))
    check_compacted(llm)
    assert len(asked) == 1


async def test_a_page_can_say_that_a_user_has_to_wait() -> None:
    """The documented listener tells it before the summarizer has answered."""
    documented = find_python("Tidying up")
    may_end = asyncio.Event()
    signs = documented["signs"]

    async def summarize(request: LlmRequest) -> str:
        await may_end.wait()
        return "A summary."

    llm = large()
    llm.summary_replies = summarize
    guard = {"before_compaction": documented["before_compaction"]}
    state = counted(3_300)
    settings: dict[str, Any] = {"chat": {"session_id": "page-7"}, "guard": guard}
    turn = asyncio.create_task(long_chat(llm, state=state, **settings))
    sign = await asyncio.wait_for(signs["page-7"].get(), 30)
    assert sign.startswith("Tidying up")
    assert not turn.done()
    may_end.set()
    await turn
    check_compacted(llm)
    llm, _ = await talk(documented["before_compaction"], 6_500, strategy=AHEAD)
    await until(lambda: llm.summaries == 1)
    assert list(signs) == ["page-7"]  # Nobody has to wait for that one.


@pytest.mark.parametrize("said", [0, True, b"focus", ["focus"], object()])
async def test_another_value_is_a_warning(
    said: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, by its type; the compaction goes on."""
    llm, chat = await talk(Asked(said))
    check_compacted(llm)
    await grow(chat)
    assert llm.summaries == 2
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    [text] = [text for text in warnings if text.startswith("before_compaction")]
    assert type(said).__name__ in text


async def test_what_it_changes_stays_its_own() -> None:
    """It gets copies; the request and the summarizer have what was said."""

    def spoil(planned: PlannedCompaction) -> None:
        for content in planned.messages:
            for part in content.parts or ():
                part.text = "spoiled"
                if part.function_response and part.function_response.response:
                    part.function_response.response["result"] = "spoiled"
            content.parts = []

    def look_up() -> str:
        """Looks it up."""
        return "HARBOR"

    llm = large()
    llm.script = [call("look_up"), "Found.", "Done."]
    guard = {"before_compaction": spoil}
    llm.summary_replies = ["A summary."]
    plugin = ContextGuardPlugin(default=SMALL, **guard)  # type: ignore[arg-type]
    chat = Chat(guarded_agent(llm, [look_up]), [plugin])
    await chat.say("What is there?")
    await chat.set_state(NOW)
    await chat.tell([original(2_000)])
    await chat.say("Go on.")
    [asked] = summary_requests(llm)
    assert "HARBOR" in asked.text
    assert "ORIGINAL" in asked.text
    assert "spoiled" not in "".join(request.text for request in llm.requests)


async def fail_later(planned: PlannedCompaction) -> None:
    """Raises, with what it was given in its frame."""
    await asyncio.sleep(0)
    raise ValueError(planned.messages)


@pytest.mark.usefixtures("young_heap")
@pytest.mark.parametrize("before", [lambda _: None, lambda _: 1 / 0, fail_later])
async def test_nothing_of_it_stays_in_memory(before: Any) -> None:
    """Neither of what it was given, nor of its failure."""
    plugin = ContextGuardPlugin(default=SMALL, before_compaction=before)
    llm = large()
    llm.summary_replies = ["A summary."]
    chat = Chat(guarded_agent(llm), [plugin])
    await seed(chat, user("The task."), original(3_300), state=EXACT)
    await chat.say("Go on.")
    assert llm.summaries == 1
    assert not holds(plugin, "ORIGINAL")


async def test_it_is_not_asked_where_nothing_is_to_be_compacted() -> None:
    """Below the threshold, where nothing would be gained, under `observe`."""
    asked = Asked()
    llm, chat = await talk(asked, 1_000)
    await talk(asked, guard={"observe": True})
    bare = Chat(guarded_agent(llm), [ContextGuardPlugin(before_compaction=asked)])
    await bare.set_state(NOW)
    await bare.say("Hello.")

    async def nothing(turn: Turn, ask: Ask) -> Draft | None:
        return None

    # It may want one on each call, and does not say so before.
    await talk(asked, 1_000, strategy=Doing(act=nothing, context_window=WINDOW))
    assert asked.planned == []
    assert answer_text(await chat.say("Go on."))


async def test_a_guard_from_a_file_takes_it(tmp_path: Path) -> None:
    """As it takes listeners."""
    path = tmp_path / "guard.toml"
    path.write_text(f"[default]\ncontext_window = {WINDOW}\n")
    asked = Asked()
    plugin = ContextGuardPlugin.from_file(path, before_compaction=asked)
    llm = large()
    chat = Chat(guarded_agent(llm), [plugin])
    await seed(chat, user("The task."), original(3_300), state=EXACT)
    await chat.say("Go on.")

    assert asked.reasons == ["tokens"]
    assert llm.summaries == 1
