"""Whatever breaks beside the agent, the user's turn ends with an answer.

Every collaborator of the guard fails in turn: session state, the model registry, the
summariser, the todo list, and the contents themselves. A real Runner drives both
strategies, streaming or not, against a strict provider.
"""

from __future__ import annotations

import asyncio
import json
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
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions.state import State
from google.adk.tools.base_tool import BaseTool
from google.genai import types

from contextguard_adk import ContextGuardPlugin, SlidingWindow, Threshold
from contextguard_adk.history.coverage import decode_covered
from contextguard_adk.history.stored_summary import SummaryMark
from contextguard_adk.measuring.budgets import summary_budget_tokens
from contextguard_adk.measuring.tokens import text_bytes
from contextguard_adk.providers.windows import DEFAULT_CONTEXT_WINDOW
from contextguard_adk.strategies import Pipeline, Strategy, SummaryCompaction
from contextguard_adk.summarizing.context import Compaction, CompactionContext
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

WINDOW_TOKENS = 8_000
TURNS = 2
FINDING = "The scanner found part 7f3a of the old press in hall B. " * 130
TEXT_KEYS = ("summary", "covered", "mark", "ledger")
COUNT_KEYS = (
    *("real_tokens", "last_heuristic", "summarized_at"),
    *("learned_window", "learned_correction"),
)

MakeStrategy = Callable[..., Strategy]


def make_sliding_window(**settings: Any) -> SlidingWindow:
    """A sliding window that its count of contents triggers as well as tokens do."""
    return SlidingWindow(max_turns=8, **settings)


@pytest.fixture(autouse=True)
def _no_contents_in_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps ADK 2.0 from failing itself on contents that it copies into its spans."""
    monkeypatch.setenv("ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS", "false")


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def is_streaming(request: pytest.FixtureRequest) -> bool:
    """Both ways in which a model's answer arrives."""
    return bool(request.param)


def make_pipeline(**settings: Any) -> Pipeline:
    """A pipeline whose summary comes as early as in a short history it can."""
    summary = SummaryCompaction(min_messages_for_summary=4, preserve_recent_count=3)
    return Pipeline(window=None, tool_output=None, summary=summary, **settings)


@pytest.fixture(
    params=[Threshold, make_sliding_window, make_pipeline],
    ids=["threshold", "sliding window", "pipeline"],
)
def make_strategy(request: pytest.FixtureRequest) -> MakeStrategy:
    """Each strategy."""
    make: MakeStrategy = request.param
    return make


class TolerantLlm(SimulatedLlm):
    """A provider that overlooks empty contents and parts, and knows every role."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers what is left of a request without its empty parts."""
        contents = [_tidy(content) for content in llm_request.contents]
        tidied = llm_request.model_copy(
            update={"contents": [content for content in contents if content.parts]}
        )
        async for response in super().generate_content_async(tidied, stream):
            yield response


def _tidy(content: types.Content) -> types.Content:
    known = ("text", "function_call", "function_response", "inline_data")
    parts = [
        part
        for part in content.parts or ()
        if part is not None and any(getattr(part, name) for name in known)
    ]
    role = "model" if content.role == "model" else "user"
    return types.Content(role=role, parts=parts)


class Intruder(BasePlugin):
    """Puts odd contents before every request; registered before the guard."""

    def __init__(self, contents: Sequence[types.Content]) -> None:
        super().__init__(name="intruder")
        self._contents = contents

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Changes the request that the guard will see."""
        llm_request.contents = [*self._contents, *llm_request.contents]


@dataclass
class Session:
    """A chat whose agent searches twice in every turn and then answers."""

    llm: SimulatedLlm
    chat: Chat
    turns: int = 0

    async def work(self, turns: int = TURNS) -> None:
        """Has some turns; each must end with its answer, nothing may be refused."""
        for _ in range(turns):
            events = await self.chat.say(f"Question {self.turns}?")
            assert answer_text(events) == f"Answer {self.turns}."
            self.turns += 1
        assert (self.llm.rejections, self.llm.violations) == (0, 0)

    async def stored(self) -> dict[str, Any]:
        """The guard's values by name, without those that were reset."""
        found = {}
        for key, value in (await self.chat.state()).items():
            match = re.fullmatch("__context_guard_(.+)_agent", key)
            if match and value is not None:
                found[match[1]] = value
        return found

    async def assert_state_is_valid(self) -> None:
        """Every value of the guard has its type and can be read back."""
        stored = await self.stored()
        assert set(stored) <= {*TEXT_KEYS, *COUNT_KEYS}
        for name in COUNT_KEYS:
            value = stored.get(name, 1)
            assert isinstance(value, int)
            assert value >= 1
        assert all(isinstance(stored.get(name, ""), str) for name in TEXT_KEYS)
        if "mark" in stored:
            covered = decode_covered(stored["covered"])
            mark = SummaryMark.from_json(stored["mark"])
            assert 0 <= mark.model_covered_count <= covered.content_count
            assert 0 <= mark.model_summary_chars <= len(stored["summary"])
            assert all(isinstance(text, str) for text in json.loads(stored["ledger"]))


def open_session(
    strategy: Strategy,
    is_streaming: bool,
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
    for turn in range(4 * TURNS):
        search = call_part("search", **(args or {}))
        script += [search, search, f"Answer {turn}."]
    llm = llm_class(token_ratio=1.3, **{"script": script, **llm_settings})
    agent = guarded_agent(llm, [queued_tool("search", results)])
    plugin = ContextGuardPlugin(default=strategy, **(guard or {}))
    return Session(llm, Chat(agent, [*plugins, plugin], is_streaming=is_streaming))


def is_guard_key(key: str) -> bool:
    """Tells whether a key of session state is the guard's."""
    return key.startswith(("__context_guard_", "context_guard:"))


def break_state(
    monkeypatch: pytest.MonkeyPatch, *, reads: str = "", writes: str = ""
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

    monkeypatch.setattr(State, "get", failing_get)
    monkeypatch.setattr(State, "__setitem__", failing_put)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param({"reads": "."}, id="every read"),
        pytest.param({"writes": "."}, id="every write"),
        pytest.param({"reads": ".", "writes": "."}, id="reads and writes"),
        pytest.param({"writes": "covered"}, id="one write of a summary"),
        pytest.param({"writes": "_tokens"}, id="writes of the token count"),
        pytest.param({"reads": "todos"}, id="reads of the todo list"),
        pytest.param({"reads": "compact"}, id="reads of the request to compact"),
    ],
)
async def test_broken_state_costs_no_turn(
    monkeypatch: pytest.MonkeyPatch,
    make_strategy: MakeStrategy,
    is_streaming: bool,
    broken: dict[str, str],
) -> None:
    """While state fails the history is cut to what fits; then the guard carries on."""
    session = open_session(make_strategy(context_window=WINDOW_TOKENS), is_streaming)
    with monkeypatch.context() as patch:
        break_state(patch, **broken)
        await session.work()
    await session.work()
    await session.assert_state_is_valid()
    assert (await session.stored())["summary"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, id=f"{name} is {kind}")
        for name in (*TEXT_KEYS, *COUNT_KEYS)
        for kind, value in {
            "a list": [[1], {"a": None}],
            "garbage": "\x00 not {json",
            "negative": -1,
            "one": 1,
        }.items()
    ],
)
async def test_values_of_others_under_the_guards_keys_cost_no_turn(
    make_strategy: MakeStrategy, name: str, value: Any
) -> None:
    """What a tool or an old release left under the guard's keys is written over."""
    session = open_session(make_strategy(context_window=WINDOW_TOKENS), False)
    key = f"__context_guard_{name}_agent"
    await session.chat.set_state({key: value, "context_guard:compact": "yes"})
    await session.work(1)
    await session.work(1)
    stored = await session.stored()
    assert stored["summary"]
    if not name.startswith("learned_"):  # Nothing was learned in this session.
        await session.assert_state_is_valid()


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


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(RuntimeError("no registry"), id="raises"),
        pytest.param(None, id="knows nothing"),
        pytest.param("128k", id="gives a text"),
        pytest.param(-5, id="gives a negative number"),
        pytest.param(0, id="gives zero"),
        pytest.param(True, id="gives a bool"),
        pytest.param(float("nan"), id="gives no number"),
        pytest.param([128_000], id="gives a list"),
        pytest.param(1, id="gives one token"),
    ],
)
async def test_broken_registry_means_the_default_window(
    make_strategy: MakeStrategy, is_streaming: bool, answer: Any
) -> None:
    """Whatever else than a token count comes, 128,000 tokens are assumed."""
    session = open_session(
        make_strategy(),
        is_streaming,
        results=[FINDING * 14],
        guard={"registry": BrokenRegistry(answer)},
        context_window=DEFAULT_CONTEXT_WINDOW,
    )
    await session.work()
    await session.assert_state_is_valid()
    assert session.llm.summaries


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


def says(*texts: str, **settings: Any) -> LlmResponse:
    """A response of a summariser."""
    return LlmResponse(content=model(*texts), **settings)


BAD_REPLIES: dict[str, Callable[[LlmRequest], Any]] = {
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
    "returns an image": lambda _: types.Part(
        inline_data=types.Blob(data=b"png", mime_type="image/png")
    ),
}
BAD_SUMMARIZERS: dict[str, BaseLlm] = {
    "yields nothing": OddSummarizer(),
    "breaks off": OddSummarizer(
        replies=[says("The us", partial=True), OSError("connection reset")]
    ),
    "yields chunks only": OddSummarizer(replies=[says("The us", partial=True)]),
    "holds a part that is None": OddSummarizer(
        replies=[
            LlmResponse.model_construct(
                content=types.Content.model_construct(role="model", parts=[None]),
                partial=False,
                error_code=None,
            )
        ]
    ),
    "is no generator": NoGenerator(),
}


async def assert_summaries_are_mechanical(session: Session) -> None:
    """The turns are answered with summaries that no model has written."""
    await session.work()
    await session.assert_state_is_valid()
    stored = await session.stored()
    assert SummaryMark.from_json(stored["mark"]).model_summary_chars == 0
    assert "user: Question 0?" in stored["summary"]


@pytest.mark.parametrize("name", BAD_REPLIES)
async def test_summariser_that_gives_nothing_usable_is_replaced(
    make_strategy: MakeStrategy, is_streaming: bool, name: str
) -> None:
    """A mechanical summary stands in for one that failed, hung or says nothing."""
    strategy = make_strategy(context_window=WINDOW_TOKENS, summary_timeout_seconds=0.02)
    session = open_session(strategy, is_streaming, summary_replies=BAD_REPLIES[name])
    await assert_summaries_are_mechanical(session)
    assert session.llm.summaries


@pytest.mark.parametrize("name", BAD_SUMMARIZERS)
async def test_summariser_that_breaks_its_contract_is_replaced(
    make_strategy: MakeStrategy, is_streaming: bool, name: str
) -> None:
    """A summariser whose call itself is broken costs no turn either."""
    strategy = make_strategy(
        context_window=WINDOW_TOKENS, summarizer=BAD_SUMMARIZERS[name]
    )
    await assert_summaries_are_mechanical(open_session(strategy, is_streaming))


@pytest.mark.parametrize("factor", [2, 50], ids=["twice", "fifty times"])
async def test_summary_beyond_its_budget_is_clipped(
    make_strategy: MakeStrategy, is_streaming: bool, factor: int
) -> None:
    """A summariser that ignores its limit cannot fill the window."""

    def ramble(request: LlmRequest) -> str:
        words = (request.config.max_output_tokens or 0) * factor
        return "The old press stands in hall B. " * (words // 7)

    strategy = make_strategy(context_window=WINDOW_TOKENS)
    session = open_session(strategy, is_streaming, summary_replies=ramble)
    await session.work()
    await session.assert_state_is_valid()
    summary = (await session.stored())["summary"]
    assert text_bytes(summary) / 4 <= summary_budget_tokens(WINDOW_TOKENS)
    assert "middle left out" in summary


async def test_failing_summariser_is_spared_for_a_while(
    make_strategy: MakeStrategy, is_streaming: bool
) -> None:
    """After three failures five compactions cost no summary, then it is tried again."""
    errors = iter([RuntimeError("out of order")] * 3)
    session = open_session(
        make_strategy(context_window=WINDOW_TOKENS),
        is_streaming,
        summary_replies=lambda _: next(errors, "They spoke of a press."),
        script=None,
    )
    asked = []
    for _ in range(9):
        before = session.llm.summaries
        await session.chat.set_state({"context_guard:compact": True})
        await session.chat.say(FINDING[:900])
        asked.append(session.llm.summaries - before)
    assert asked == [1, 1, 1, 0, 0, 0, 0, 0, 1]
    summary = (await session.stored())["summary"]
    assert summary.startswith("They spoke of a press.\n\n[Items left out")
    await session.assert_state_is_valid()


class LosingLlm(SimulatedLlm):
    """A provider that loses its next answer in one way or another."""

    loss: str = ""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers, but for the one answer that is lost."""
        loss = "" if self.is_summary_request(llm_request) else self.loss
        async for response in super().generate_content_async(llm_request, stream):
            if not loss:
                yield response
            elif loss == "breaks off":
                self.loss = ""
                raise ConnectionError("connection reset")
            else:
                self.loss = ""
                if loss == "ends with a chunk":
                    yield LlmResponse(content=model("A"), partial=True)
                return


@pytest.mark.parametrize("loss", ["breaks off", "ends with a chunk", "is empty"])
async def test_paid_summary_outlives_the_answer_it_was_made_for(
    make_strategy: MakeStrategy, is_streaming: bool, loss: str
) -> None:
    """Where a model call fails, so that its state is lost, the next one has it."""
    session = open_session(
        make_strategy(context_window=WINDOW_TOKENS),
        is_streaming,
        llm_class=LosingLlm,
    )
    assert isinstance(session.llm, LosingLlm)
    await session.work(1)
    session.llm.loss = loss
    with suppress(ConnectionError):
        await session.chat.say(FINDING)
    assert session.llm.loss == ""
    paid_count = session.llm.summaries
    assert paid_count
    assert "summary" not in await session.stored()
    await session.chat.say("Are you there?")
    await session.assert_state_is_valid()
    assert (await session.stored())["summary"]
    assert session.llm.summaries == paid_count
    assert "[Previous conversation summary]" in session.llm.requests[-1].text


async def test_cancelled_turn_leaves_the_session_usable(
    make_strategy: MakeStrategy, is_streaming: bool
) -> None:
    """A caller who gives up while a summary is written gets no answer, but a next."""
    entered = asyncio.Event()

    async def stall(_: LlmRequest) -> Reply:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    strategy = make_strategy(context_window=WINDOW_TOKENS)
    session = open_session(strategy, is_streaming, summary_replies=stall)
    work = asyncio.create_task(session.work())
    await asyncio.wait_for(entered.wait(), 5)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    session.llm.summary_replies = None
    await session.chat.say("Are you still there?")
    await session.assert_state_is_valid()
    assert (await session.stored())["summary"]
    assert (session.llm.rejections, session.llm.violations) == (0, 0)


@pytest.mark.parametrize(
    "todos",
    [
        pytest.param("buy milk", id="a text"),
        pytest.param(42, id="a number"),
        pytest.param({"content": "buy milk"}, id="a dict"),
        pytest.param([None, 3, [], "buy milk", {}], id="items without content"),
        pytest.param([{"content": 7, "status": "open"}], id="content of another type"),
        pytest.param([{"content": "milk", "status": 7}], id="status of another type"),
        pytest.param([{"content": "milk " * 50_000}], id="a very long item"),
        pytest.param([{"content": "milk"}] * 20_000, id="very many items"),
    ],
)
async def test_todos_of_a_wrong_kind_cost_no_turn(
    make_strategy: MakeStrategy, is_streaming: bool, todos: Any
) -> None:
    """What is no todo list is left out of the summary."""
    session = open_session(make_strategy(context_window=WINDOW_TOKENS), is_streaming)
    await session.chat.set_state({"todos": todos})
    await session.work()
    await session.assert_state_is_valid()
    assert session.llm.summaries


def part_with_none(*parts: types.Part | None) -> types.Content:
    """A content as nothing but a careless callback would make it."""
    return types.Content.model_construct(role="user", parts=list(parts))


ODD_CONTENTS: dict[str, list[types.Content]] = {
    "no parts": [types.Content(role="user", parts=None)],
    "empty parts": [types.Content(role="user", parts=[])],
    "a part that is None": [part_with_none(None), part_with_none(None, types.Part())],
    "empty part": [types.Content(role="user", parts=[types.Part()])],
    "empty text": [user("")],
    "no role": [types.Content(parts=[types.Part(text="Hello.")])],
    "another role": [types.Content(role="system", parts=[types.Part(text="Hello.")])],
    "metadata only": [
        types.Content(
            role="user",
            parts=[types.Part(video_metadata=types.VideoMetadata(fps=1.0))],
        )
    ],
    "blob without data": [
        types.Content(role="user", parts=[types.Part(inline_data=types.Blob())])
    ],
    "file without address": [
        types.Content(role="user", parts=[types.Part(file_data=types.FileData())])
    ],
    "code that never ran": [
        types.Content(
            role="user",
            parts=[types.Part(executable_code=types.ExecutableCode(code="1 / 0"))],
        )
    ],
    "call without a name": [
        user("Hello."),
        types.Content(
            role="model", parts=[types.Part(function_call=types.FunctionCall())]
        ),
        types.Content(
            role="user", parts=[types.Part(function_response=types.FunctionResponse())]
        ),
    ],
    "all at once": [
        part_with_none(
            None,
            types.Part(),
            types.Part(text=""),
            types.Part(text="Hello."),
            types.Part(thought=True),
            types.Part(inline_data=types.Blob(data=b"", mime_type="image/png")),
        )
    ],
}


@pytest.mark.parametrize("name", ODD_CONTENTS)
async def test_odd_contents_of_another_plugin_cost_no_turn(
    caplog: pytest.LogCaptureFixture,
    make_strategy: MakeStrategy,
    is_streaming: bool,
    name: str,
) -> None:
    """Contents that no event stands behind are measured, left alone and sent on."""
    session = open_session(
        make_strategy(context_window=WINDOW_TOKENS),
        is_streaming,
        plugins=[Intruder(ODD_CONTENTS[name])],
        llm_class=TolerantLlm,
    )
    await session.work()
    await session.assert_state_is_valid()
    assert session.llm.summaries
    assert "The guard failed" not in caplog.text


class Plain:
    """A value that no JSON has."""


def nested(depth: int) -> dict[str, Any]:
    """A value of this depth, with text at every level."""
    value: Any = "The bottom."
    for level in range(depth // 2):
        value = {"level": level, "text": "The old press. " * 5, "below": [value]}
    return {"nested": value}


ODD_RESULTS: dict[str, Any] = {
    "one megabyte of prose": FINDING * (1_000_000 // len(FINDING)),
    "one megabyte without a blank": "QUJDREVG" * 125_000,
    "one megabyte of one character": "a" * 1_000_000,
    "one megabyte deep in JSON": {"rows": [{"cell": FINDING * 140}]},
    "two hundred levels": nested(200),
    "lone surrogates": f"\ud800 {FINDING} \udfff",
    "lone surrogates in keys": {"\ud800": FINDING, "list": ["\udfff"]},
    "control characters": "\x00\x1b[31m" + FINDING,
    "bytes": {"raw": b"\xff\xfe\x00" * 1_000, "text": FINDING},
    "an object": {"object": Plain(), "text": FINDING},
    "an exception": {"error": ValueError("no"), "text": FINDING},
    "a class": {"class": Plain, "text": FINDING},
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


@pytest.mark.parametrize("name", ODD_RESULTS)
async def test_odd_tool_results_cost_no_turn(
    caplog: pytest.LogCaptureFixture,
    make_strategy: MakeStrategy,
    is_streaming: bool,
    name: str,
) -> None:
    """Whatever a tool returns is measured, summarised and sent as far as it fits."""
    result = ODD_RESULTS[name]
    strategy = make_strategy(context_window=WINDOW_TOKENS)
    session = open_session(strategy, is_streaming, results=[result, FINDING])
    await session.work(1 if name.startswith("one megabyte") else 2)
    await session.assert_state_is_valid()
    assert "The guard failed" not in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(FINDING * 140, id="one megabyte"),
        pytest.param("\ud800" + FINDING * 3, id="a lone surrogate"),
        pytest.param("\x00" * 10_000, id="null characters"),
        pytest.param("🏭" * 5_000, id="emoji"),
        pytest.param("` [End of conversation] `" * 400, id="back-ticks"),
    ],
)
async def test_odd_messages_of_the_user_cost_no_turn(
    make_strategy: MakeStrategy, is_streaming: bool, text: str
) -> None:
    """A message that does not fit is quoted as far as it does, and is answered."""
    strategy = make_strategy(context_window=WINDOW_TOKENS)
    session = open_session(strategy, is_streaming)
    await session.work(1)
    assert answer_text(await session.chat.say(text)) == "Answer 1."
    session.turns += 1
    await session.work(1)
    await session.assert_state_is_valid()


@pytest.mark.parametrize("size", [5, 140], ids=["fills the window", "a megabyte"])
async def test_long_arguments_of_a_call_cost_no_turn(
    make_strategy: MakeStrategy, is_streaming: bool, size: int
) -> None:
    """A call that the model itself made too long leaves the request again."""
    strategy = make_strategy(context_window=WINDOW_TOKENS)
    args = {"text": FINDING * size}
    session = open_session(strategy, is_streaming, results=["Fine."], args=args)
    await session.work(1)
    await session.assert_state_is_valid()


def raise_at_once(_: object) -> None:
    """A listener that fails."""
    raise RuntimeError("no metrics today")


async def raise_later(_: object) -> None:
    """An async listener that fails."""
    await asyncio.sleep(0)
    raise RuntimeError("no metrics today")


@pytest.mark.parametrize("listener", [raise_at_once, raise_later, 7])
async def test_broken_listeners_cost_no_turn(
    caplog: pytest.LogCaptureFixture,
    make_strategy: MakeStrategy,
    is_streaming: bool,
    listener: Any,
) -> None:
    """What a listener raises is logged; the compaction stands."""
    session = open_session(
        make_strategy(context_window=WINDOW_TOKENS),
        is_streaming,
        guard={"on_compaction": listener, "on_pressure": listener},
    )
    await session.work()
    await session.assert_state_is_valid()
    assert (await session.stored())["summary"]
    assert "A listener for CompactionRecord failed" in caplog.text


class OddTool(BaseTool):
    """A tool that does not like to be looked at."""

    @property
    def agent(self) -> object:
        """Raises."""
        raise RuntimeError("not yet connected")


async def test_agent_tree_that_cannot_be_searched_costs_no_turn(
    make_strategy: MakeStrategy, is_streaming: bool
) -> None:
    """Where no `state_schema` can be looked for, keys are used that always pass."""
    session = open_session(make_strategy(context_window=WINDOW_TOKENS), is_streaming)
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


async def test_broken_strategy_costs_no_turn(
    caplog: pytest.LogCaptureFixture, is_streaming: bool
) -> None:
    """Where a strategy raises, the history is cut mechanically and that is logged."""
    session = open_session(BrokenStrategy(context_window=WINDOW_TOKENS), is_streaming)
    await session.work()
    failures = [r for r in caplog.records if "The guard failed" in r.getMessage()]
    assert len(failures) == 3 * TURNS
    assert {r.levelno for r in failures} == {logging.ERROR}
    assert "Question 1?" in session.llm.requests[-1].text
