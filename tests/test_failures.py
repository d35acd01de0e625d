"""Whatever breaks beside the agent, the user's turn ends with an answer.

Every collaborator of the guard fails in turn: session state, the model registry, the
summarizer, the todo list, a strategy, listeners, other plugins, and the contents
themselves. A real Runner drives every strategy, streaming or not, against a strict
provider.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.models.registry import LLMRegistry
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions.state import State
from google.adk.tools.base_tool import BaseTool
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
    Chat,
    answer_text,
    call_part,
    guarded_agent,
    model,
    queued_tool,
    user,
)
from tests.guarded import (
    NOW,
    SUMMARY,
    SUMMARY_BEGINS,
    guarded_chat,
    summary_requests,
)

WINDOW_TOKENS = 8_000
FINDING = "The scanner found part 7f3a of the old press in hall B. " * 130
MakeStrategy = Callable[..., Strategy]


def sliding_window(**settings: Any) -> SlidingWindow:
    """A sliding window that its count of contents triggers as well as tokens do."""
    return SlidingWindow(max_turns=8, **settings)


def pipeline(**settings: Any) -> Pipeline:
    """A pipeline that summarizes in a short history."""
    summary = SummaryCompaction(min_messages_for_summary=4, preserve_recent_count=3)
    return Pipeline(window=None, tool_output=None, summary=summary, **settings)


def each(name: str, values: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Each value with one of the strategies, whole or streamed, in turn."""
    modes = itertools.cycle(
        zip((Threshold, sliding_window, pipeline) * 2, (True, False) * 3, strict=True)
    )
    cells = [
        pytest.param(make, is_streaming, value, id=value_id)
        for (value_id, value), (make, is_streaming) in zip(
            values.items(), modes, strict=False
        )
    ]
    return pytest.mark.parametrize(("make", "is_streaming", name), cells)


every_mode = pytest.mark.parametrize(
    ("make", "is_streaming"),
    [
        pytest.param(Threshold, False, id="threshold"),
        pytest.param(sliding_window, True, id="sliding window, streamed"),
        pytest.param(pipeline, False, id="pipeline"),
    ],
)


@pytest.fixture(autouse=True)
def _no_contents_in_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps ADK 2.0 from failing itself on contents that it copies into its spans."""
    monkeypatch.setenv("ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS", "false")


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

    async def summary(self) -> str:
        """The stored summary."""
        return str((await self.chat.state()).get(SUMMARY) or "")

    async def assert_carries_on(self) -> None:
        """A new process reads the state without a complaint, and compacts."""
        state = await self.chat.state()
        for name in ("real_tokens", "last_heuristic", "summarized_at"):
            value = state.get(f"__context_guard_{name}_agent") or 1
            assert isinstance(value, int)
            assert value >= 1
        plugin = ContextGuardPlugin(default=Threshold(context_window=WINDOW_TOKENS))
        agent = self.chat.app.root_agent
        self.chat = Chat(agent, [plugin], session_service=self.chat.sessions)
        await self.work(1)
        assert await self.summary()
        assert SUMMARY_BEGINS in self.llm.requests[-1].text


def open_session(
    strategy: Strategy,
    is_streaming: bool = False,
    *,
    results: Sequence[Any] = (FINDING,),
    plugins: Sequence[BasePlugin] = (),
    llm_class: type[SimulatedLlm] = SimulatedLlm,
    guard: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
    **llm_settings: Any,
) -> Session:
    """Opens a session with the guard and a provider that counts a third more."""
    llm_settings.setdefault("context_window", WINDOW_TOKENS)
    script: list[Reply] = []
    for turn in range(8):
        search = call_part("search", **(args or {}))
        script += [search, search, f"Answer {turn}."]
    llm = llm_class(token_ratio=1.3, **{"script": script, **llm_settings})
    agent = guarded_agent(llm, [queued_tool("search", results)])
    plugin = ContextGuardPlugin(default=strategy, **(guard or {}))
    return Session(llm, Chat(agent, [*plugins, plugin], is_streaming=is_streaming))


# --- Session state ----------------------------------------------------------------


def is_guard_key(key: str) -> bool:
    """Whether a key of session state is the guard's."""
    return key.startswith(("__context_guard_", "context_guard:"))


def break_state(
    patch: pytest.MonkeyPatch, *, reads: str = "", writes: str = ""
) -> None:
    """Has reads or writes of the guard's keys raise; the patterns say which."""
    get, put = State.get, State.__setitem__

    def failing_get(state: State, key: str, default: Any = None) -> Any:
        if is_guard_key(key) and reads and re.search(reads, key):
            raise ConnectionError("the database is gone")
        return get(state, key, default)

    def failing_put(state: State, key: str, value: Any) -> None:
        if is_guard_key(key) and writes and re.search(writes, key):
            raise ConnectionError("the database is gone")
        put(state, key, value)

    patch.setattr(State, "get", failing_get)
    patch.setattr(State, "__setitem__", failing_put)


BROKEN_STATE = {
    "every read": {"reads": "."},
    "every write": {"writes": "."},
    "reads and writes": {"reads": ".", "writes": "."},
    "one write of a summary": {"writes": "_summary_"},
    "writes of the token count": {"writes": "_tokens"},
    "reads of the todo list": {"reads": "todos"},
    "reads of the request to compact": {"reads": "compact"},
}


@each("broken", BROKEN_STATE)
async def test_broken_state_costs_no_turn(
    monkeypatch: pytest.MonkeyPatch,
    make: MakeStrategy,
    is_streaming: bool,
    broken: dict[str, str],
) -> None:
    """While state fails the history is cut to what fits; then the guard carries on."""
    session = open_session(make(context_window=WINDOW_TOKENS), is_streaming)
    with monkeypatch.context() as patch:
        break_state(patch, **broken)
        await session.work()
    await session.work()
    await session.assert_carries_on()


@each(
    "value",
    {
        "a list": [[1], {"a": None}],
        "garbage": "\x00 not {json",
        "half of it": ...,
        "negative": -1,
        "a huge number": 2**80,
        "a fraction": 1.5,
    },
)
async def test_values_of_others_under_the_guards_keys_cost_no_turn(
    make: MakeStrategy, is_streaming: bool, value: Any
) -> None:
    """What a tool or an old release left under any of them is written over."""
    names = ["real_tokens", "last_heuristic", "summarized_at", "todos"]
    keys = {SUMMARY, *(f"__context_guard_{name}_agent" for name in names)}
    first = open_session(make(context_window=WINDOW_TOKENS))
    await first.work()
    stored = {k: v for k, v in (await first.chat.state()).items() if is_guard_key(k)}
    for key in sorted(keys | stored.keys()):
        text = str(stored.get(key))
        state = {key: value}
        if value is ...:
            state = {**stored, key: text[: len(text) // 2]}
        session = open_session(make(context_window=WINDOW_TOKENS), is_streaming)
        await session.chat.set_state(state)
        await session.work()
        assert await session.summary()
        if value is not ... and "todos" not in key:
            assert (await session.chat.state())[key] != value


# --- The registry -----------------------------------------------------------------


class BrokenRegistry:
    """A registry that gives anything, or raises."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def context_window(self, model: str) -> int | None:
        """Returns or raises what it was made with."""
        if isinstance(self.answer, Exception):
            raise self.answer
        answer: int | None = self.answer
        return answer


@each(
    "answer",
    {
        "raises": RuntimeError("no registry"),
        "knows nothing": None,
        "gives a text": "128k",
        "gives a negative number": -5,
        "gives zero": 0,
        "gives a bool": True,
        "gives no number": float("nan"),
        "gives a list": [128_000],
        "gives one token": 1,
    },
)
async def test_broken_registry_means_the_default_window(
    make: MakeStrategy, is_streaming: bool, answer: Any
) -> None:
    """Whatever else than a token count comes, 128,000 tokens are assumed."""
    windows: list[int] = []
    session = open_session(
        make(),
        is_streaming,
        guard={
            "registry": BrokenRegistry(answer),
            "on_call": lambda record: windows.append(record.window_tokens),
        },
        context_window=128_000,
    )
    await session.work(1)
    assert set(windows) == {128_000}


# --- The summarizer ---------------------------------------------------------------


class OddSummarizer(BaseLlm):
    """A model that answers with whatever it was made with."""

    model: str = "odd"
    replies: Sequence[LlmResponse | BaseException] = ()

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Yields the replies, or raises them."""
        for reply in self.replies:
            if isinstance(reply, BaseException):
                raise reply
            yield reply.model_copy(deep=True)


class NoGenerator(BaseLlm):
    """A model whose call gives nothing to iterate over."""

    model: str = "odd"

    def generate_content_async(  # type: ignore[override]
        self, llm_request: LlmRequest, stream: bool = False
    ) -> object:
        """Returns no generator."""
        return object()


async def hang(_: LlmRequest) -> Reply:
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError


PART = LlmResponse(content=model("The us"), partial=True)
NO_PART = LlmResponse.model_construct(
    content=types.Content.model_construct(role="model", parts=[None]),
    partial=False,
    error_code=None,
)
IMAGE = types.Part(inline_data=types.Blob(data=b"png", mime_type="image/png"))
BAD_SUMMARIZERS: dict[str, Any] = {
    "raises": lambda _: RuntimeError("out of order"),
    "raises a time-out of its own": lambda _: TimeoutError(),
    "raises a group": lambda _: ExceptionGroup("many", [ValueError("one")]),
    "finds its input too long": lambda _: RuntimeError(
        "This model's maximum context length is 512 tokens."
    ),
    "hangs": hang,
    "returns nothing": lambda _: "",
    "returns blanks": lambda _: " \n\t ",
    "returns no content": lambda _: LlmResponse(),
    "returns an error": lambda _: LlmResponse(error_code="SAFETY"),
    "returns a tool call": lambda _: call_part("search"),
    "only thinks": lambda _: types.Part(text="Let me see …", thought=True),
    "returns an image": lambda _: IMAGE,
    "yields nothing": OddSummarizer(),
    "breaks off": OddSummarizer(replies=[PART, OSError("connection reset")]),
    "yields chunks only": OddSummarizer(replies=[PART]),
    "holds a part that is None": OddSummarizer(replies=[NO_PART]),
    "is no generator": NoGenerator(),
}


@each("bad", BAD_SUMMARIZERS)
async def test_summarizer_that_gives_nothing_usable_is_replaced(
    make: MakeStrategy, is_streaming: bool, bad: Any
) -> None:
    """A mechanical summary takes its place; the next one is of the originals."""
    summarizer = bad
    if not isinstance(bad, BaseLlm):
        summarizer = SimulatedLlm(model="odd", summary_replies=bad)
    settings: dict[str, Any] = {
        "summary_timeout_seconds": 0.02,
        "summarizer_context_window": 100_000,
    }
    strategy = make(context_window=WINDOW_TOKENS, summarizer=summarizer, **settings)
    records: list[Any] = []
    guard = {"on_compaction": records.append}
    session = open_session(strategy, is_streaming, guard=guard)
    await session.work()
    assert records
    assert all(record.is_mechanical for record in records)
    assert (await session.summary()).startswith("user: Question 0?")
    good = SimulatedLlm(model="odd", summary_replies=lambda _: "A good summary.")
    session.chat = guarded_chat(
        session.llm,
        Threshold(context_window=WINDOW_TOKENS, summarizer=good, **settings),
        chat={"session_service": session.chat.sessions},
        tools=[queued_tool("search", [FINDING])],
    )
    await session.chat.set_state(NOW)
    await session.work(1)
    assert (await session.summary()).startswith("A good summary.")
    asked = summary_requests(good)[0].text
    assert "Question 0?" in asked
    assert asked.count("7f3a") > 100


@every_mode
async def test_summary_beyond_its_budget_is_clipped(
    make: MakeStrategy, is_streaming: bool
) -> None:
    """A summarizer that ignores its limit cannot fill the window."""
    strategy = make(context_window=WINDOW_TOKENS)
    session = open_session(strategy, is_streaming)
    session.llm.summary_replies = lambda _: f"HEAD {'It is in hall B. ' * 4_000} TAIL"
    await session.work()
    summary = (await session.summary()).partition("\n\n[Items left out")[0]
    assert summary.startswith("HEAD")
    assert summary.endswith("TAIL")
    assert "middle left out" in summary
    assert len(summary) / 4 <= WINDOW_TOKENS * 0.2 * 0.5


class NamedLlm(SimulatedLlm):
    """A model that ADK finds by its name."""

    @classmethod
    def supported_models(cls) -> list[str]:
        """The names."""
        return [r"contextguard-failures-.*"]

    def model_post_init(self, context: Any) -> None:
        """Counts its construction."""
        super().model_post_init(context)
        made_models.append(self.model)
        if "bad" in self.model:
            self.summary_replies = lambda _: RuntimeError("out of order")


made_models: list[str] = []


class TwoSummaries(Strategy):
    """Asks for two summaries whenever a compaction is demanded."""

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Compacts a part, and then everything."""
        if context.reason != "requested":
            return None
        await context.summarize(context.older_than(3))
        return await context.summarize(context.older_than(0))


async def count_asked(strategy: Strategy, replies: Any, demands: int) -> list[int]:
    """How many summaries were asked for on each demand."""
    llm = SimulatedLlm(context_window=200_000, summary_replies=replies)
    chat = guarded_chat(llm, strategy)
    asked = []
    for number in range(demands):
        before = llm.summaries
        await chat.set_state(NOW)
        await chat.say(f"{number} {FINDING[:900]}")
        asked.append(llm.summaries - before)
    return asked


@pytest.mark.parametrize("make", [Threshold, sliding_window, pipeline])
async def test_failing_summarizer_is_left_alone_for_a_while(make: MakeStrategy) -> None:
    """After three failures five compactions cost no summary, then it is tried again."""
    errors = iter([RuntimeError("out of order")] * 3)
    strategy = make(context_window=100_000)
    asked = await count_asked(strategy, lambda _: next(errors, "They spoke."), 9)
    assert asked == [1, 1, 1, 0, 0, 0, 0, 0, 1]


async def test_a_success_ends_the_count_of_failures() -> None:
    """Only failures in a row count."""
    replies: list[Reply] = [RuntimeError("down"), RuntimeError("down"), "Good."]
    asked = await count_asked(Threshold(context_window=100_000), replies * 3, 9)
    assert asked == [1] * 9


@pytest.mark.xfail(strict=True, reason="the circuit breaker counts look-ups")
async def test_the_circuit_breaker_counts_compactions() -> None:
    """A strategy that asks twice in one compaction does not shorten the pause."""
    strategy = TwoSummaries(context_window=100_000)
    asked = await count_asked(strategy, lambda _: RuntimeError("down"), 9)
    assert asked == [1, 1, 1, 0, 0, 0, 0, 0, 1]


@pytest.mark.xfail(strict=True, reason="a model is also made to read its name")
@pytest.mark.parametrize("name", ["good", "bad"])
async def test_a_summarizer_by_name_is_made_once_for_a_compaction(name: str) -> None:
    """A client may cost a connection, so no other one is made to read its name."""
    LLMRegistry.register(NamedLlm)
    made_models.clear()
    strategy = Threshold(
        context_window=100_000, summarizer=f"contextguard-failures-{name}"
    )
    assert await count_asked(strategy, None, 2) == [0, 0]
    assert made_models == [strategy.summarizer] * 2


async def test_an_unknown_summarizer_leaves_it_to_the_agents_own_model() -> None:
    """A name that ADK cannot resolve does not leave the agent unguarded."""
    strategy = Threshold(context_window=100_000, summarizer="no-such-model")
    assert await count_asked(strategy, None, 2) == [1, 1]


# --- The agent's own call ---------------------------------------------------------


class LosingLlm(SimulatedLlm):
    """A provider that loses its next answer in one way or another."""

    loss: str = ""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers, but for the one answer that is lost."""
        loss = "" if self.is_summary_request(llm_request) else self.loss
        self.loss = "" if loss else self.loss
        async for response in super().generate_content_async(llm_request, stream):
            if not loss:
                yield response
                continue
            if loss == "breaks off":
                raise ConnectionError("connection reset")
            if loss == "ends with a chunk":
                yield LlmResponse(content=model("A"), partial=True)
            return


LOSSES = ("breaks off", "ends with a chunk", "is empty")


@each("loss", {loss: loss for loss in LOSSES})
async def test_paid_summary_outlives_the_answer_it_was_made_for(
    make: MakeStrategy, is_streaming: bool, loss: str
) -> None:
    """Where a model call fails, so that its state is lost, the next one has it."""
    strategy = make(context_window=WINDOW_TOKENS)
    session = open_session(strategy, is_streaming, llm_class=LosingLlm)
    assert isinstance(session.llm, LosingLlm)
    await session.work(1)
    session.llm.loss = loss
    with suppress(ConnectionError):
        await session.chat.say(FINDING)
    assert session.llm.loss == ""
    paid_count = session.llm.summaries
    assert paid_count
    assert not await session.summary()
    await session.chat.say("Are you there?")
    assert await session.summary()
    assert session.llm.summaries == paid_count
    assert SUMMARY_BEGINS in session.llm.requests[-1].text


@every_mode
async def test_cancelled_turn_leaves_the_session_usable(
    make: MakeStrategy, is_streaming: bool
) -> None:
    """A caller who gives up while a summary is written gets no answer, but a next."""
    entered = asyncio.Event()

    async def stall(request: LlmRequest) -> Reply:
        entered.set()
        return await hang(request)

    strategy = make(context_window=WINDOW_TOKENS)
    session = open_session(strategy, is_streaming, summary_replies=stall)
    work = asyncio.create_task(session.work())
    await asyncio.wait_for(entered.wait(), 5)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(work, 5)
    session.llm.summary_replies = None
    await session.chat.say("Are you still there?")
    assert await session.summary()
    assert (session.llm.rejections, session.llm.violations) == (0, 0)


# --- Todos, contents, results, messages -------------------------------------------


class TolerantLlm(SimulatedLlm):
    """A provider that overlooks empty contents and parts, and knows every role."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers what is left of a request without its empty parts."""
        known = ("text", "function_call", "function_response", "inline_data")
        contents = []
        for content in llm_request.contents:
            kept = [
                part
                for part in getattr(content, "parts", None) or ()
                if part is not None and any(getattr(part, name) for name in known)
            ]
            role = "model" if getattr(content, "role", "") == "model" else "user"
            contents += [types.Content(role=role, parts=kept)] if kept else []
        tidied = llm_request.model_copy(update={"contents": contents})
        async for response in super().generate_content_async(tidied, stream):
            yield response


class Intruder(BasePlugin):
    """Puts odd contents before every request; registered before the guard."""

    def __init__(self, *contents: Any) -> None:
        super().__init__(name="intruder")
        self._contents = contents

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Changes the request that the guard will see."""
        llm_request.contents[:0] = self._contents


def odd(*parts: types.Part | None, role: str = "user") -> types.Content:
    """A content as nothing but a careless callback would make it."""
    return types.Content.model_construct(role=role, parts=list(parts))


ODD_CONTENTS: dict[str, list[types.Content]] = {
    "no parts": [types.Content(role="user", parts=None)],
    "empty parts": [odd()],
    "a part that is None": [odd(None), odd(None, types.Part())],
    "empty part": [odd(types.Part())],
    "empty text": [user("")],
    "no role": [types.Content(parts=[types.Part(text="Hello.")])],
    "another role": [odd(types.Part(text="Hello."), role="system")],
    "metadata only": [odd(types.Part(video_metadata=types.VideoMetadata(fps=1.0)))],
    "blob without data": [odd(types.Part(inline_data=types.Blob()))],
    "file without address": [odd(types.Part(file_data=types.FileData()))],
    "code that never ran": [
        odd(types.Part(executable_code=types.ExecutableCode(code="1 / 0")))
    ],
    "call without a name": [
        user("Hello."),
        odd(types.Part(function_call=types.FunctionCall()), role="model"),
        odd(types.Part(function_response=types.FunctionResponse())),
    ],
}


@each("contents", ODD_CONTENTS)
async def test_odd_contents_of_another_plugin_cost_no_turn(
    caplog: pytest.LogCaptureFixture,
    make: MakeStrategy,
    is_streaming: bool,
    contents: list[types.Content],
) -> None:
    """Contents that no event stands behind are measured, left alone and sent on."""
    session = open_session(
        make(context_window=WINDOW_TOKENS),
        is_streaming,
        plugins=[Intruder(*contents)],
        llm_class=TolerantLlm,
    )
    await session.work()
    assert session.llm.summaries
    assert "The guard failed" not in caplog.text


def nested(depth: int) -> dict[str, Any]:
    """A value of this depth, with text at every level."""
    value: Any = "The bottom."
    for level in range(depth // 2):
        value = {"level": level, "text": "The old press. " * 5, "below": [value]}
    return {"nested": value}


ODD_RESULTS: dict[str, Any] = {
    "long prose": FINDING * 28,
    "long without a blank": "QUJDREVG" * 25_000,
    "one character": "a" * 200_000,
    "long and deep in JSON": {"rows": [{"cell": FINDING * 28}]},
    "two hundred levels": nested(200),
    "lone surrogates": f"\ud800 {FINDING} \udfff",
    "lone surrogates in keys": {"\ud800": FINDING, "list": ["\udfff"]},
    "control characters": "\x00\x1b[31m" + FINDING,
    "bytes": {"raw": b"\xff\xfe\x00" * 1_000, "text": FINDING},
    "an object": {"object": Chat, "item": object(), "text": FINDING},
    "an exception": {"error": ValueError("no"), "text": FINDING},
    "a set": {"set": {1, 2}, "text": FINDING},
    "dates and decimals": {
        "at": datetime(2025, 1, 1, tzinfo=UTC),
        "sum": Decimal("1.1"),
        "text": FINDING,
    },
    "no numbers": {"nan": float("nan"), "inf": float("-inf"), "text": FINDING},
    "a very long number": {"number": 10**6_000, "text": FINDING},
    "keys that are no texts": {"rows": {1: "a", (2, 3): "b", None: FINDING}},
    "nothing": None,
    "an empty text": "",
    "an empty dict": {},
    "a list": [FINDING, None, {}],
}


@each("result", ODD_RESULTS)
async def test_odd_tool_results_cost_no_turn(
    caplog: pytest.LogCaptureFixture,
    make: MakeStrategy,
    is_streaming: bool,
    result: Any,
) -> None:
    """Whatever a tool returns is measured, summarized and sent as far as it fits."""
    strategy = make(context_window=WINDOW_TOKENS)
    session = open_session(strategy, is_streaming, results=[result, FINDING])
    await session.work()
    assert "The guard failed" not in caplog.text


ODD_INPUTS: dict[str, dict[str, Any]] = {
    "todos: a text": {"todos": "buy milk"},
    "todos: a number": {"todos": 42},
    "todos: a dict": {"todos": {"content": "buy milk"}},
    "todos: items without content": {"todos": [None, 3, [], "buy milk", {}]},
    "todos: content of another type": {"todos": [{"content": 7, "status": "open"}]},
    "todos: status of another type": {"todos": [{"content": "milk", "status": 7}]},
    "todos: a very long item": {"todos": [{"content": "milk " * 50_000}]},
    "todos: very many items": {"todos": [{"content": "milk"}] * 5_000},
    "message: very long": {"message": FINDING * 28},
    "message: a lone surrogate": {"message": "\ud800" + FINDING * 3},
    "message: null characters": {"message": "\x00" * 10_000},
    "message: emoji": {"message": "🏭" * 5_000},
    "message: back-ticks": {"message": "` [End of conversation] `" * 400},
    "arguments: too long": {"args": {"text": FINDING * 20}},
}


@each("given", ODD_INPUTS)
async def test_odd_inputs_cost_no_turn(
    make: MakeStrategy, is_streaming: bool, given: dict[str, Any]
) -> None:
    """Todos of no known form are left out, and what is too long is shortened."""
    strategy = make(context_window=WINDOW_TOKENS)
    session = open_session(strategy, is_streaming, args=given.get("args"))
    await session.chat.set_state({"todos": given.get("todos")})
    await session.work(1)
    assert answer_text(await session.chat.say(given.get("message", "And?")))
    session.turns += 1
    await session.work(1)
    assert session.llm.summaries


# --- The guard itself -------------------------------------------------------------


class OddTool(BaseTool):
    """A tool that does not like to be looked at."""

    @property
    def agent(self) -> object:
        """Raises."""
        raise RuntimeError("not yet connected")


async def test_agent_tree_that_cannot_be_searched_costs_no_turn() -> None:
    """Where no `state_schema` can be looked for, keys are used that always pass."""
    session = open_session(Threshold(context_window=WINDOW_TOKENS))
    agent = session.chat.app.root_agent
    assert isinstance(agent, LlmAgent)
    agent.tools.append(OddTool(name="odd", description="Odd."))
    await session.work()
    assert (await session.chat.state())["context_guard:summary:agent"]


class BrokenStrategy(Strategy):
    """A user's own strategy, with a mistake in it."""

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Fails on every call, whether a compaction is due or not."""
        raise KeyError("a mistake")


@pytest.mark.parametrize(
    ("window_tokens", "registry"),
    [(WINDOW_TOKENS, None), (None, BrokenRegistry(WINDOW_TOKENS))],
    ids=["configured", "registry"],
)
async def test_broken_strategy_costs_no_turn(
    window_tokens: int | None, registry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a strategy raises, the history is cut mechanically and that is logged."""
    strategy = BrokenStrategy(context_window=window_tokens)
    session = open_session(strategy, guard={"registry": registry})
    await session.work()
    failures = [r for r in caplog.records if "The guard failed" in r.getMessage()]
    assert len(failures) == 6
    assert {r.levelno for r in failures} == {logging.ERROR}
    assert "'agent'" in failures[0].getMessage()
    assert "KeyError" in failures[0].getMessage()
    assert "mistake" not in caplog.text
    assert "Earlier messages were left out" in session.llm.requests[-1].text
    assert "Question 1?" in session.llm.requests[-1].text


class Repair(BasePlugin):
    """Removes what is no content, after the guard."""

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Changes the request that is sent."""
        kept = [c for c in llm_request.contents if isinstance(c, types.Content)]
        llm_request.contents = kept


@pytest.mark.parametrize("observe", [False, True], ids=["guarding", "observing"])
async def test_where_nothing_helps_the_request_goes_out_as_it_came(
    observe: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever fails in a callback is logged, and the turn goes on."""
    llm = SimulatedLlm()
    guard = ContextGuardPlugin(default=Threshold(context_window=1_000), observe=observe)
    chat = Chat(guarded_agent(llm), [Intruder(object()), guard, Repair("repair")])
    assert answer_text(await chat.say(FINDING))
    assert llm.requests[0].contents == [user(FINDING)]
    assert "The guard failed" in caplog.text
    assert ("goes out as it came" in caplog.text) is not observe


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
    assert "KeyError" in caplog.text
