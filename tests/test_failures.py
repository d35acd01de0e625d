"""Whatever breaks beside the agent, the user's turn ends with an answer.

Every collaborator of the guard fails in turn: session state, the summarizer, the
todo list, a strategy, other plugins, and the contents themselves.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions.state import State
from google.genai import types

from contextguard_adk import (
    Compaction,
    CompactionContext,
    ContextGuardPlugin,
    Pipeline,
    SlidingWindow,
    Strategy,
    SummaryCompaction,
    Threshold,
)
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import (
    SUMMARY_BEGIN,
    Chat,
    answer_text,
    call_part,
    guarded_agent,
    model,
    queued_tool,
    user,
)
from tests.chats import REAL, SUMMARY, Changing, Registry
from tests.guarded import guarded_chat

WINDOW_TOKENS = 8_000
FINDING = "The scanner found part 7f3a of the old press in hall B. " * 130

STRATEGIES: list[Strategy] = [
    Threshold(context_window=WINDOW_TOKENS),
    SlidingWindow(context_window=WINDOW_TOKENS, max_messages=8),
    Pipeline(
        context_window=WINDOW_TOKENS,
        window=None,
        tool_output=None,
        summary=SummaryCompaction(min_messages_for_summary=4, preserve_recent_count=3),
    ),
]


def each(name: str, values: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Each value with one of the strategies, whole or streamed, in turn."""
    modes = itertools.cycle(zip(STRATEGIES * 2, (True, False) * 3, strict=True))
    cells = [
        pytest.param(strategy, is_streaming, value, id=value_id)
        for (value_id, value), (strategy, is_streaming) in zip(
            values.items(), modes, strict=False
        )
    ]
    return pytest.mark.parametrize(("strategy", "is_streaming", name), cells)


@dataclass
class Session:
    """A chat whose agent searches twice in every turn and then answers."""

    llm: SimulatedLlm
    chat: Chat
    turns: int = 0

    async def work(self, turns: int = 2) -> None:
        """Has some turns; each must end with its answer, nothing may be refused."""
        for _ in range(turns):
            events = await self.chat.say(f"Question {self.turns}?")
            assert answer_text(events) == f"Answer {self.turns}."
            self.turns += 1
        assert (self.llm.rejections, self.llm.violations) == (0, 0)

    def restarted(self) -> Chat:
        """The same chat in another process."""
        plugin = ContextGuardPlugin(default=STRATEGIES[0])
        agent, sessions = self.chat.app.root_agent, self.chat.sessions
        return Chat(agent, [plugin], session_service=sessions)

    async def summary(self) -> str:
        """The stored summary."""
        return str((await self.chat.state()).get(SUMMARY) or "")


def open_session(
    strategy: Strategy = STRATEGIES[0],
    is_streaming: bool = False,
    *,
    results: Sequence[Any] = (FINDING,),
    before: Sequence[Any] = (),
    guard: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
    **llm_settings: Any,
) -> Session:
    """Opens a session with the guard and a provider that counts a third more."""
    script: list[Reply] = []
    for turn in range(8):
        search = call_part("search", **(args or {}))
        script += [search, search, f"Answer {turn}."]
    settings = {"context_window": WINDOW_TOKENS, "script": script, **llm_settings}
    llm = SimulatedLlm(token_ratio=1.3, **settings)
    agent = guarded_agent(llm, [queued_tool("search", results)])
    guarding = ContextGuardPlugin(default=strategy, **(guard or {}))
    plugins = surround(guarding, before)
    return Session(llm, Chat(agent, plugins, is_streaming=is_streaming))


def surround(guard: ContextGuardPlugin, before: Sequence[Any]) -> list[BasePlugin]:
    """The guard, after odd contents are put into the request and before a repair."""

    def intrude(request: LlmRequest) -> None:
        request.contents[:0] = before

    return [Changing(intrude), guard, Changing(repair)]


# --- Session state ----------------------------------------------------------------


def break_state(patch: pytest.MonkeyPatch, reads: str = "", writes: str = "") -> None:
    """Has reads or writes of the guard's keys raise; the patterns say which."""
    get, put = State.get, State.__setitem__

    def check(key: str, pattern: str) -> None:
        if pattern and "context_guard" in key and re.search(pattern, key):
            raise ConnectionError("the database is gone")

    def failing_get(state: State, key: str, default: Any = None) -> Any:
        check(key, reads)
        return get(state, key, default)

    def failing_put(state: State, key: str, value: Any) -> None:
        check(key, writes)
        put(state, key, value)

    patch.setattr(State, "get", failing_get)
    patch.setattr(State, "__setitem__", failing_put)


@each(
    "broken",
    {
        "every read": {"reads": "."},
        "every write": {"writes": "."},
        "writes of the token count": {"writes": "_tokens"},
        "reads of the todo list": {"reads": "todos"},
    },
)
async def test_broken_state_costs_no_turn(
    monkeypatch: pytest.MonkeyPatch,
    strategy: Strategy,
    is_streaming: bool,
    broken: dict[str, str],
) -> None:
    """While state fails the history is cut to what fits; then the guard carries on."""
    session = open_session(strategy, is_streaming)
    with monkeypatch.context() as patch:
        break_state(patch, **broken)
        await session.work()
    await session.work(1)
    session.chat = session.restarted()
    await session.work(1)
    assert await session.summary()
    assert SUMMARY_BEGIN in session.llm.requests[-1].text


class OddSummarizer(BaseLlm):
    """A model that breaks off in mid-stream, or gives nothing to iterate over."""

    model: str = "odd"
    error: Exception | None = None

    def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Returns the stream."""
        return self._break_off() if self.error else object()  # type: ignore[return-value]

    async def _break_off(self) -> AsyncGenerator[LlmResponse, None]:
        yield LlmResponse(content=model("The us"), partial=True)
        assert self.error
        raise self.error


BAD_SUMMARIZERS = {
    "breaks off": OSError("connection reset"),
    "raises a time-out of its own": TimeoutError(),
    "raises a group": ExceptionGroup("many", [ValueError("one")]),
    "finds its input too long": RuntimeError("maximum context length is 512 tokens"),
    "is no generator": None,
}


@each("error", BAD_SUMMARIZERS)
async def test_summarizer_that_gives_nothing_usable_is_replaced(
    strategy: Strategy, is_streaming: bool, error: Exception | None
) -> None:
    """A mechanical summary takes its place, whatever the strategy."""
    # The time is too short to wait for another try.
    settings = {
        "summarizer": OddSummarizer(error=error),
        "summary_timeout_seconds": 0.9,
        "preview_tokens": None,
    }
    odd = strategy.model_copy(update=settings)
    records: list[Any] = []
    session = open_session(odd, is_streaming, guard={"on_compaction": records.append})
    await session.work()
    assert {record.is_mechanical for record in records} == {True}
    assert (await session.summary()).startswith("user:\n  Question 0?")


async def test_cancelled_turn_leaves_the_session_usable() -> None:
    """A caller who gives up while a summary is written gets no answer, but a next."""
    entered = asyncio.Event()

    async def stall(request: LlmRequest) -> Reply:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    hasty = Threshold(
        context_window=WINDOW_TOKENS, summary_timeout_seconds=2.0, preview_tokens=None
    )
    session = open_session(hasty, is_streaming=True, summary_replies=stall)
    work = asyncio.create_task(session.work())
    await asyncio.wait_for(entered.wait(), 5)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(work, 5)
    session.llm.summary_replies = None
    await session.chat.say("Are you still there?")
    assert await session.summary()
    assert (session.llm.rejections, session.llm.violations) == (0, 0)


# --- Contents, results, todos, messages, arguments --------------------------------


def repair(request: LlmRequest) -> None:
    """Removes what no provider takes, behind the guard."""
    contents = []
    for content in request.contents:
        parts = [
            part
            for part in getattr(content, "parts", None) or ()
            if part and (part.text or part.function_call or part.function_response)
        ]
        role = "model" if getattr(content, "role", "") == "model" else "user"
        contents += [types.Content(role=role, parts=parts)] if parts else []
    request.contents = contents


def odd(*parts: types.Part | None, role: str = "user") -> types.Content:
    """A content as nothing but a careless callback would make it."""
    return types.Content.model_construct(role=role, parts=list(parts))


CODE = types.ExecutableCode(code="1 / 0")
ODD: dict[str, dict[str, Any]] = {
    "no parts": {"before": [types.Content(role="user", parts=None), odd()]},
    "a part that is None": {"before": [odd(None), odd(None, types.Part())]},
    "another role": {"before": [odd(types.Part(text="Hello."), role="system")]},
    "blob without data": {"before": [odd(types.Part(inline_data=types.Blob()))]},
    "code that never ran": {"before": [odd(types.Part(executable_code=CODE))]},
    "call without a name": {
        "before": [
            user("Hello."),
            odd(types.Part(function_call=types.FunctionCall()), role="model"),
            odd(types.Part(function_response=types.FunctionResponse())),
        ]
    },
    "result without a blank": {"result": "QUJDREVG" * 25_000},
    "long result in JSON": {"result": {"rows": [{"cell": FINDING * 28}]}},
    "lone surrogates": {"result": {"\ud800": FINDING, "list": [f"\udfff {FINDING}"]}},
    "control characters": {"result": "\x00\x1b[31m" + FINDING},
    "objects": {"result": {"b": b"\xff" * 3_000, "c": Chat, "d": {1}, "e": KeyError()}},
    "odd numbers": {"result": {"nan": float("nan"), "number": 10**6_000}},
    "keys that are no texts": {"result": {"rows": {1: "a", (2, 3): FINDING}}},
    "todos: a text": {"todos": "buy milk"},
    "todos: no items": {"todos": [None, 3, [], {}, {"content": 7}]},
    "todos: very many items": {"todos": [{"content": "milk"}] * 5_000},
    "message: very long": {"message": FINDING * 28},
    "message: odd characters": {"message": "\ud800\x00" + "🏭" * 5_000},
    "arguments: too long": {"args": {"text": FINDING * 20}},
}


@pytest.mark.parametrize("preview_tokens", [0.2, None], ids=["cut", "whole"])
@each("given", ODD)
async def test_odd_inputs_cost_no_turn(
    caplog: pytest.LogCaptureFixture,
    strategy: Strategy,
    is_streaming: bool,
    given: dict[str, Any],
    preview_tokens: float | None,
) -> None:
    """Whatever comes from plugins, tools and users is measured, and sent as it fits."""
    session = open_session(
        strategy.model_copy(update={"preview_tokens": preview_tokens}),
        is_streaming,
        results=[given.get("result", FINDING), FINDING],
        before=given.get("before", ()),
        args=given.get("args"),
    )
    await session.chat.set_state({"todos": given.get("todos")})
    await session.work(1)
    assert answer_text(await session.chat.say(given.get("message", "And?")))
    session.turns += 1
    await session.work(1)
    assert session.llm.summaries
    assert "The guard failed" not in caplog.text


# --- The guard itself -------------------------------------------------------------


class BrokenStrategy(Strategy):
    """A user's own strategy, with a mistake in it."""

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Fails on all but the first call, whether a compaction is due or not."""
        if context.tokens < 500:
            return None
        raise KeyError("a mistake")


@pytest.mark.parametrize(
    ("configured", "known"), [(WINDOW_TOKENS, None), (None, WINDOW_TOKENS)]
)
async def test_broken_strategy_costs_no_turn(
    caplog: pytest.LogCaptureFixture, configured: int | None, known: int | None
) -> None:
    """If a strategy raises, the history is cut mechanically and that is logged; what
    the provider counts then is not taken for the count of an earlier request."""
    broken = BrokenStrategy(context_window=configured)
    session = open_session(broken, guard={"registry": Registry(known)})
    await session.work()
    state = await session.chat.state()
    assert state[REAL] == session.llm.requests[0].prompt_tokens
    failures = [r for r in caplog.records if "The guard failed" in r.getMessage()]
    assert [r.levelno for r in failures] == [logging.ERROR] * 5
    assert "'agent'" in failures[0].getMessage()
    assert "KeyError" in failures[0].getMessage()
    assert "mistake" not in caplog.text
    assert "Earlier messages were left out" in session.llm.requests[-1].text
    assert "Question 1?" in session.llm.requests[-1].text


@pytest.mark.parametrize("observe", [False, True], ids=["odd content", "observing"])
async def test_where_nothing_helps_the_request_goes_out_as_it_came(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, observe: bool
) -> None:
    """Whatever fails in a callback is logged, and the turn goes on."""
    llm, strategy = SimulatedLlm(), Threshold(context_window=1_000)
    guard = ContextGuardPlugin(default=strategy, observe=observe)
    before = [] if observe else [object()]
    break_state(monkeypatch, reads="." if observe else "")
    chat = Chat(guarded_agent(llm), surround(guard, before))
    assert answer_text(await chat.say(FINDING))
    assert llm.requests[0].contents == [user(FINDING)]
    assert "The guard failed" in caplog.text


async def test_a_failing_recovery_leaves_the_error_as_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A mistake in the recovery does not replace the provider's error."""
    llm = SimulatedLlm(context_window=500)
    chat = guarded_chat(llm, BrokenStrategy(context_window=100_000))
    with pytest.raises(Exception, match="maximum context length"):
        await chat.say(FINDING)
    assert llm.calls == 1
    assert "The recovery failed for agent 'agent'" in caplog.text
