"""What providers, clients and callbacks make of a token count, and what it may do."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.context_filter_plugin import ContextFilterPlugin
from google.adk.sessions import InMemorySessionService
from google.genai import types
from pydantic import Field

from contextguard_adk import (
    CallRecord,
    Pipeline,
    SlidingWindow,
    Threshold,
)
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply, SimulatedLlm, call
from contextguard_adk.testing.provider import (
    count_request_tokens,
    count_tokens,
)
from tests.builders import Chat, answer_text, model, queued_tool, user
from tests.chats import HEURISTIC, REAL, guarded_chat, seed, slow, words

STRATEGIES = [Threshold, SlidingWindow, Pipeline]
WIDE: dict[str, Any] = {"context_window": 200_000}
FEW: dict[Any, dict[str, Any]] = {SlidingWindow: {"max_messages": 1_000}}
UNKNOWN_TOKENS = 128_000
CUT_AT = 4_096
FILLING: dict[str, Any] = {"turns": 10, "result_tokens": 1_900, "growth_tokens": -20}
"""A session of far more than `CUT_AT` tokens, whose end takes nearly as many."""

Count = Callable[["Counting", LlmRequest, int], int]


class Counting(SimulatedLlm):
    """A model that reports what `report` makes of its true count."""

    report: Any = None
    cached_tokens: int | None = None
    numbers: list[int] = Field(default_factory=list)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers as ever, with another count."""
        true = count_request_tokens(llm_request, self.token_ratio, 258)
        async for response in super().generate_content_async(llm_request, stream):
            self.numbers.append(true)
            usage = types.GenerateContentResponseUsageMetadata(
                prompt_token_count=self.report(self, llm_request, true),
                cached_content_token_count=self.cached_tokens,
            )
            yield response.model_copy(update={"usage_metadata": usage})


def newest_alone(llm: Counting, request: LlmRequest, true: int) -> int:
    """Without what a cache has served: all but the last two messages."""
    rest = request.model_copy(update={"contents": request.contents[-2:]})
    return true if len(llm.numbers) == 1 else count_request_tokens(rest, 1.0, 258)


def without_old_results(llm: Counting, request: LlmRequest, true: int) -> int:
    """As a server that clears all results but the newest three, beyond 6,000 tokens."""
    if true < 6_000:
        return true
    kept = list[types.Content]()
    left = 3
    for content in reversed(request.contents):
        part = (content.parts or [types.Part()])[0]
        if part.function_response:
            left -= 1
            if left < 0:
                cleared = {"response": {"result": "[Old tool result content cleared]"}}
                response = part.function_response.model_copy(update=cleared)
                content = types.Content(
                    role="user", parts=[types.Part(function_response=response)]
                )
        kept.append(content)

    edited = request.model_copy(update={"contents": kept[::-1]})
    return count_request_tokens(edited, 1.0, 258)


def sums(llm: Counting, request: LlmRequest, true: int) -> int:
    """One answer in six has come in six passes, all of which are counted."""
    return true * (6 if len(llm.numbers) % 6 == 3 else 1)


def all_so_far(llm: Counting, request: LlmRequest, true: int) -> int:
    """What the whole session has taken."""
    return sum(llm.numbers)


def absurd(llm: Counting, request: LlmRequest, true: int) -> int:
    """A number that no window holds."""
    return 10**9


def below_zero(llm: Counting, request: LlmRequest, true: int) -> int:
    """No count at all."""
    return -true


def sometimes_below_zero(llm: Counting, request: LlmRequest, true: int) -> int:
    """Every other answer has a true count."""
    return true if len(llm.numbers) % 2 else -1


def true_count(llm: Counting, request: LlmRequest, true: int) -> int:
    """What was sent."""
    return true


async def play(
    report: Count,
    strategy: Strategy | None = None,
    turns: int = 20,
    result_tokens: int = 700,
    growth_tokens: int = 37,
    **settings: Any,
) -> tuple[Counting, list[CallRecord], Chat]:
    """A long session of searches with results of different sizes."""
    script = list[Reply]()
    for turn in range(turns):
        script += [call("search", query=f"{turn}"), f"Answer {turn}."]

    llm = Counting(
        context_window=10**6,
        token_ratio=1.0,
        report=report,
        numbers=[],
        script=script,
        **settings.pop("llm", {}),
    )

    sizes = [result_tokens + growth_tokens * (turn % 11) for turn in range(turns)]
    found = [words(size, f"Found {turn}.") for turn, size in enumerate(sizes)]
    records = list[CallRecord]()
    chat = guarded_chat(
        llm,
        strategy or Threshold(),
        guard={"on_call": records.append, **settings.pop("guard", {})},
        agent={"tools": [queued_tool("search", found)], **settings.pop("agent", {})},
        **settings,
    )

    for turn in range(turns):
        text = answer_text(await chat.say(f"Question {turn}, about the notebooks."))
        assert text == f"Answer {turn}."
    return llm, records, chat


def compactions(records: Sequence[CallRecord]) -> int:
    """How many there were."""
    return sum(record.compaction is not None for record in records)


@pytest.mark.parametrize("strategy", [Threshold, *slow(SlidingWindow, Pipeline)])
@pytest.mark.parametrize("report", [newest_alone, without_old_results])
async def test_a_low_count_never_narrows_a_configured_window(
    report: Count, strategy: type[Strategy]
) -> None:
    """It leaves something out, a cache or old results; no compaction is due."""
    kind: Any = strategy
    llm, records, _ = await play(report, kind(**{**WIDE, **FEW.get(kind, {})}))
    assert {record.window_tokens for record in records} == {200_000}
    assert llm.summaries == 0


@pytest.mark.parametrize("result_tokens", [*slow(300, 700), 2_000])
async def test_an_editing_server_is_no_truncating_one(result_tokens: int) -> None:
    """Its counts go on rising, though slowly: an unknown window stays as assumed."""
    llm, records, _ = await play(
        without_old_results, turns=16, result_tokens=result_tokens
    )
    assert {record.window_tokens for record in records} == {UNKNOWN_TOKENS}
    assert llm.summaries == 0


@pytest.mark.parametrize("result_tokens", [*slow(700), 7_000])
async def test_results_of_one_size_are_no_ceiling(result_tokens: int) -> None:
    """Each call leaves a little more, however large the newest results are."""
    _, records, _ = await play(
        without_old_results, None, 15, result_tokens, growth_tokens=0
    )
    assert {record.window_tokens for record in records} == {UNKNOWN_TOKENS}


def keep_newest(callback_context: CallbackContext, llm_request: LlmRequest) -> None:
    """Keeps the newest messages alone, as an agent's own callback."""
    texts = [i for i, c in enumerate(llm_request.contents) if (c.parts or [])[0].text]
    users = [i for i in texts if llm_request.contents[i].role == "user"]
    del llm_request.contents[: users[-3:][0]]


@pytest.mark.parametrize("window", [None, *slow(200_000)])
@pytest.mark.parametrize("way", ["callback", "plugin"])
async def test_who_trims_behind_the_guard_is_no_server(
    way: str, window: int | None
) -> None:
    """What was really sent is read; its count is that of a small request."""
    settings: dict[str, Any] = {"agent": {"before_model_callback": keep_newest}}
    if way == "plugin":
        settings = {"plugins": [ContextFilterPlugin(num_invocations_to_keep=2)]}
    strategy = Threshold(context_window=window)
    llm, records, chat = await play(true_count, strategy, 15, **settings)
    assert max(llm.numbers) < 4_000
    assert {record.window_tokens for record in records} == {window or UNKNOWN_TOKENS}
    assert llm.summaries == 0

    state = await chat.state()
    assert state[REAL] == llm.numbers[-1]
    assert state[HEURISTIC] == pytest.approx(llm.numbers[-1], rel=0.1)


async def play_small(
    report: Count, strategy: type[Strategy]
) -> tuple[Counting, list[CallRecord]]:
    """Plays a session with several compactions; no request is refused."""
    kind: Any = strategy
    llm, records, _ = await play(
        report,
        kind(context_window=4_000),
        turns=18,
        result_tokens=350,
        growth_tokens=18,
        llm={"summary_replies": None},
    )
    assert llm.rejections == 0
    return llm, records


@functools.cache
def count_due(strategy: type[Strategy]) -> int:
    """How many compactions that session takes where counts are true."""
    _, records = asyncio.run(play_small(true_count, strategy))
    return compactions(records)


@pytest.fixture
def due(strategy: type[Strategy]) -> int:
    """That number, which is found before the event loop of a test runs."""
    return count_due(strategy)


@pytest.mark.quick("Threshold-absurd")
@pytest.mark.parametrize(
    ("strategy", "report"),
    [
        *((Threshold, report) for report in (sums, all_so_far, absurd)),
        *(
            pytest.param(strategy, all_so_far, marks=pytest.mark.slow)
            for strategy in (SlidingWindow, Pipeline)
        ),
    ],
)
async def test_what_is_no_size_brings_no_compaction_about(
    strategy: type[Strategy], report: Count, due: int
) -> None:
    """As many compactions as with true counts, and the calls are estimated as well."""
    llm, records = await play_small(report, strategy)
    assert due >= 2
    assert compactions(records) <= due + 1
    agents = [each.prompt_tokens for each in llm.requests if not each.is_summary]
    for record, true in zip(records[8:], agents[8:], strict=True):
        assert 0.8 * true <= record.estimated_tokens <= 1.35 * true


def truncated(llm: Counting, request: LlmRequest, true: int) -> int:
    """As a server that cuts a prompt to `CUT_AT` tokens."""
    return min(true, CUT_AT)


def truncated_by_messages(llm: Counting, request: LlmRequest, true: int) -> int:
    """As one that drops whole messages: it counts what is left of them."""
    contents = list(request.contents)
    while true > CUT_AT and len(contents) > 1:
        del contents[0]
        rest = request.model_copy(update={"contents": contents})
        true = count_request_tokens(rest, 1.0, 258)
    return true


def nearly_truncated(llm: Counting, request: LlmRequest, true: int) -> int:
    """Counts that differ by a token."""
    return min(true, CUT_AT) - len(llm.numbers) % 2


def always_small(llm: Counting, request: LlmRequest, true: int) -> int:
    """A stand-in's usage: one figure, whatever is sent."""
    return 2_000


def always_large(llm: Counting, request: LlmRequest, true: int) -> int:
    """The same, far above what is sent."""
    return 60_000


def tell_cuts(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of a server that cuts."""
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [each for each in told if "without a word" in each]


@pytest.mark.parametrize("strategy", [Threshold, *slow(SlidingWindow, Pipeline)])
@pytest.mark.parametrize("window", [None, 100_000])
async def test_a_server_that_cuts_is_found_by_equal_counts(
    strategy: type[Strategy], window: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Three requests are cut, one warning names both figures, state is not written."""
    kind: Any = strategy
    settings = {"context_window": window, **FEW.get(kind, {})}
    llm, records, chat = await play(truncated, kind(**settings), **FILLING)
    assert sum(true > CUT_AT for true in llm.numbers) <= 4
    assert records[-1].window_tokens == CUT_AT
    assert "window_tokens" not in str(await chat.state())

    [said] = tell_cuts(caplog)
    figures = "4,096", f"{window or UNKNOWN_TOKENS:,}", "context_window=4096", "num_ctx"
    assert all(each in said for each in figures)


async def test_other_sessions_of_the_process_are_not_cut() -> None:
    """One session shows the figure, all keep to it."""
    llm, records, chat = await play(truncated, **FILLING)
    shown = len(records)
    other = Chat(chat.app.root_agent, chat.app.plugins, session_id="other")
    llm.script = None
    llm.numbers = []
    for turn in range(12):
        assert answer_text(await other.say(words(900, f"Question {turn}.")))

    assert max(llm.numbers) <= CUT_AT
    assert {record.window_tokens for record in records[shown:]} == {CUT_AT}


@pytest.mark.parametrize("result_tokens", [600, *slow(2_700, 9_000)])
async def test_a_cut_is_found_whatever_the_steps(result_tokens: int) -> None:
    """Small ones, large ones, and those of twice the server's window."""
    llm, records, _ = await play(
        truncated, turns=12, result_tokens=result_tokens, growth_tokens=0
    )
    assert records[-1].window_tokens == CUT_AT
    assert sum(true > CUT_AT for true in llm.numbers) <= 5


NO_CUTS: dict[str, tuple[Count, dict[str, Any]]] = {
    "whole messages": (truncated_by_messages, FILLING),
    "a token more or less": (nearly_truncated, FILLING),
    "always 2,000": (always_small, FILLING),
    "always 60,000": (always_large, {"turns": 10}),
    "a cache": (truncated, {**FILLING, "llm": {"cached_tokens": 500}}),
    "what is new": (newest_alone, {"result_tokens": 3_000, "growth_tokens": 0}),
    "observed": (truncated, {**FILLING, "guard": {"observe": True}}),
}


@pytest.mark.quick("a token more or less", "always 2,000", "a cache")
@pytest.mark.parametrize(("report", "settings"), NO_CUTS.values(), ids=NO_CUTS)
async def test_other_counts_show_no_cut(
    report: Count, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """They differ, are small or far above what is sent, or leave something out."""
    _, records, chat = await play(report, **settings)
    assert {record.window_tokens for record in records} == {UNKNOWN_TOKENS}
    assert "window_tokens" not in str(await chat.state())
    assert not tell_cuts(caplog)


async def test_one_request_sent_again_shows_no_cut() -> None:
    """Its counts are equal because it is the same."""
    records = list[CallRecord]()
    llm = Counting(report=true_count, context_window=10**6, token_ratio=1.0)
    agent = {"include_contents": "none"}
    chat = guarded_chat(
        llm, Threshold(), guard={"on_call": records.append}, agent=agent
    )
    for _ in range(5):
        await chat.say(words(5_000))

    assert len(set(llm.numbers)) == 1
    assert {record.window_tokens for record in records} == {UNKNOWN_TOKENS}


async def test_a_figure_that_is_passed_is_forgotten() -> None:
    """The server may have been started anew, with a larger window."""
    llm, records, chat = await play(truncated, **FILLING)
    assert records[-1].window_tokens == CUT_AT

    llm.script = ["Well."] * 20
    while records[-1].estimated_tokens < 2_200:
        await chat.say(f"{words(200)} What else?")
    llm.report = lambda _, __, true: 2 * true  # Another vocabulary.
    await chat.say("What else?")
    assert records[-1].window_tokens == CUT_AT
    assert (records[-1].real_tokens or 0) > CUT_AT

    await chat.say("What else?")
    assert records[-1].window_tokens == UNKNOWN_TOKENS


@pytest.mark.parametrize("report", [below_zero, sometimes_below_zero])
async def test_counts_below_zero_are_none(report: Count) -> None:
    """Neither in records nor in session state, and what a cache served is none."""
    llm, records, chat = await play(
        report, Threshold(context_window=4_000), 8, 350, llm={"cached_tokens": -100}
    )
    assert llm.rejections == 0
    assert compactions(records) >= 1

    for record in records:
        assert record.real_tokens is None or record.real_tokens > 0
        assert record.usage.cached_tokens == 0
        assert record.usage.prompt_tokens >= 0
        assert (record.cost or 0) >= 0

    assert ((await chat.state()).get(REAL) or 1) > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_first_message_that_fits_is_not_cut(strategy: type[Strategy]) -> None:
    """JSON of three quarters of the window, before anything was counted."""
    kind: Any = strategy
    rows = [{"id": n * 7_919, "name": f"item-{n}", "ok": True} for n in range(2_000)]
    llm = SimulatedLlm(context_window=16_000)
    chat = guarded_chat(llm, kind(context_window=16_000))
    text = json.dumps(rows)[:25_500]
    assert answer_text(await chat.say(text))

    [request] = llm.requests
    assert text in request.text
    assert request.prompt_tokens > 0.65 * 16_000


async def test_limits_of_two_models_that_take_turns_are_kept() -> None:
    """Each is rejected once, however often the other one is."""
    sessions = InMemorySessionService()
    llms = [
        SimulatedLlm(model=name, context_window=window, token_ratio=1.0)
        for name, window in (("small", 3_000), ("medium", 4_500))
    ]
    strategy = Threshold(context_window=40_000)
    small, medium = (guarded_chat(x, strategy, session_service=sessions) for x in llms)
    for turn, chat in enumerate([*[medium] * 6, *[small] * 3] * 3):
        assert answer_text(await chat.say(words(700, f"Question {turn}.")))

    assert [llm.rejections for llm in llms] == [1, 1]


async def test_what_a_gateway_adds_to_every_request_is_counted() -> None:
    """Far more than was sent, but each time as much."""
    hidden_tokens = 20_000

    def gateway(llm: Counting, request: LlmRequest, true: int) -> int:
        return true + hidden_tokens

    strategy = Threshold(context_window=32_000)
    llm, records, _ = await play(gateway, strategy, 8, result_tokens=900)
    assert llm.summaries
    assert max(llm.numbers) + hidden_tokens <= 0.8 * 32_000
    for record in records[2:10]:
        assert record.estimated_tokens == pytest.approx(record.real_tokens, rel=0.25)


@pytest.mark.quick("1.0-200000", "1.35-1000000")
@pytest.mark.parametrize(
    ("factor", "window_tokens"),
    [
        (1.0, 32_000),
        (1.0, 200_000),
        pytest.param(1.0, 1_000_000, marks=pytest.mark.slow),
        (1.35, 32_000),
        (1.35, 200_000),
        (1.35, 1_000_000),
    ],
)
async def test_no_first_request_is_rejected(window_tokens: int, factor: float) -> None:
    """Whatever part of the window it takes, and whatever the vocabulary."""
    text = "The committee met on Tuesday to discuss the budget of the new library. "
    one = count_tokens([text * 100], None) / 100
    ratio = one / len(text) * 4 * factor
    for part in (0.78, 0.88, 0.99):
        llm = SimulatedLlm(context_window=window_tokens, token_ratio=ratio)
        chat = guarded_chat(llm, Threshold(context_window=window_tokens))
        said = text * int(window_tokens * part / one / factor)
        await seed(chat, user("Read this."), model(said))
        assert answer_text(await chat.say("What does it say?"))
        assert llm.rejections == 0


def in_blocks(size_tokens: int) -> Count:
    """A gateway that rounds what was used up to whole blocks, and cuts nothing."""
    return lambda llm, request, true: -(-true // size_tokens) * size_tokens


@pytest.mark.parametrize("size_tokens", [2_048, *slow(512, 4_096, 8_192)])
async def test_counts_in_blocks_show_no_cut(size_tokens: int) -> None:
    """Nothing beyond the figure was ever sent."""
    _, records, _ = await play(in_blocks(size_tokens), result_tokens=200)
    assert len({record.window_tokens for record in records}) == 1
