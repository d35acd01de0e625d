"""The pipeline: its order, where it stops, what is relaxed, and what it costs."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from google.genai import types

from benchmarks.pipeline_figures import PROMISED, TOOL_HEAVY, find_broken
from contextguard_adk import (
    Compaction,
    MessageWindow,
    Pipeline,
    Reducer,
    Reduction,
    Strategy,
    StrategyResult,
    SummaryCompaction,
    Threshold,
    TokenWindow,
    ToolOutputTruncation,
)
from contextguard_adk.strategies.reduction import Relaxed
from contextguard_adk.testing import SimulatedLlm
from tests.builders import (
    Conversation,
    KeptSessions,
    Played,
    ToolUse,
    Turn,
    call,
    play,
    response,
    user,
)
from tests.scenarios import (
    LARGEST_BPE_WINDOW_TOKENS,
    SCENARIOS,
    find_obstacle,
    total_tokens,
    write_conversation,
)
from tests.test_prefix_stability import to_bytes
from tests.test_scenarios import (
    _summarize_briefly,
    check_answers,
    check_live_requests,
    check_pauses,
    check_provider,
)
from tests.test_strategies import context, small_talk, words

WINDOWS_TOKENS = (4_000, 8_000, 32_000, 200_000)
FAST = ("kubernetes", "parallel bursts", "empty results", "rapid short")


@pytest.fixture(autouse=True)
def _lean_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps ADK from copying every request into its spans."""
    monkeypatch.setenv("ADK_TELEMETRY_SCHEMA_VERSION_OPT_IN", "1")
    monkeypatch.setenv("ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS", "false")


class Spy(Reducer):
    """Notes that it ran, and returns what it was told to."""

    log: Any  # Pydantic would copy a list.
    result: StrategyResult = StrategyResult.NO_CHANGE

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Notes the run."""
        self.log.append((reduction.relaxed, len(reduction.kept)))
        return self.result


def tool_talk(count: int, size_chars: int) -> list[types.Content]:
    """So many calls with results of so many characters, and a question."""
    contents = [user("Task.")]
    for number in range(count):
        contents += [
            call("read", str(number)),
            response("read", f"{number} {'notebooks ' * size_chars}"[:size_chars]),
        ]
    return [*contents, user("Now?")]


def measured(
    contents: Sequence[types.Content], llm: SimulatedLlm, window_tokens: int
) -> Any:
    """A context whose tokens are those of the contents."""
    tokens = context(contents, llm, window_tokens=window_tokens).measure(contents)
    return context(contents, llm, window_tokens=window_tokens, tokens=tokens)


def large_llm(count: int = 9) -> SimulatedLlm:
    """A summariser that takes anything."""
    return SimulatedLlm(context_window=10_000_000, summary_replies=["Short."] * count)


async def compact(pipeline: Pipeline, talk: Any) -> Compaction:
    """What the pipeline decides where it has to decide something."""
    compaction = await pipeline.compact(talk)
    assert compaction is not None
    return compaction


# --- Order, target, what is relaxed ---


@pytest.mark.parametrize(
    ("tokens", "threshold", "is_run"),
    [
        (79_999, None, False),
        (80_000, None, True),
        (59_999, 0.6, False),
        (60_000, 0.6, True),
        (80_000, 0.9, True),
    ],
)
async def test_when_it_runs(tokens: int, threshold: float | None, is_run: bool) -> None:
    """At the threshold, or at `compression_threshold` where that comes first."""
    log: list[Any] = []
    pipeline = Pipeline(compression_threshold=threshold, reducers=(Spy(log=log),))
    talk = context(small_talk(5), large_llm(), window_tokens=100_000, tokens=tokens)
    await pipeline.compact(talk)
    assert bool(log) is is_run


async def test_the_window_comes_before_truncation() -> None:
    """What the window drops is not shortened first: with the window alone enough,
    the results that stay are whole."""
    contents = tool_talk(60, 6_000)
    talk = measured(contents, large_llm(), 105_000)
    assert talk.is_due
    compaction = await compact(
        Pipeline(window=MessageWindow(window_size=20, preserve_initial_task=False)),
        talk,
    )
    assert compaction.contents[-18:] == contents[-18:]
    assert compaction.attempts == 0


async def test_the_target_stops_later_reducers() -> None:
    """`TARGET_REACHED` is the end of the run."""
    log: list[Any] = []
    first = Spy(log=log, result=StrategyResult.TARGET_REACHED)
    talk = measured(small_talk(100, 900), large_llm(), 100_000)
    pipeline = Pipeline(
        window=None, tool_output=None, summary=None, reducers=(first, Spy(log=log))
    )
    await pipeline.compact(talk)
    assert len(log) == 3  # Once in each pass; the second one never.
    log.clear()
    await Pipeline(reducers=(Spy(log=log),)).compact(talk)
    assert log == []  # The window was enough.


async def test_settings_are_relaxed_in_order() -> None:
    """First lengths, then all preferences; then everything is summarized."""
    log: list[Any] = []
    llm = large_llm()
    talk = measured(small_talk(100, 900), llm, 100_000)
    compaction = await Pipeline(
        window=None, tool_output=None, summary=None, reducers=(Spy(log=log),)
    ).compact(talk)
    assert [relaxed for relaxed, _ in log] == [
        Relaxed(),
        Relaxed(lengths=True),
        Relaxed(lengths=True, preferences=True),
    ]
    assert compaction is not None
    assert compaction.covered == frozenset(range(100))
    assert llm.summaries == compaction.attempts == 1


@pytest.mark.parametrize(
    ("pipeline", "contents"),
    [
        (Pipeline(window=None, tool_output=None), small_talk(100, 850)),
        (Pipeline(), small_talk(19, 4_500)),
        (Pipeline(summary=None), tool_talk(1, 340_000)),
        (
            Pipeline(summary=SummaryCompaction(preserve_recent_count=90)),
            small_talk(45, 1_900),
        ),
        (
            Pipeline(window=TokenWindow(budget_tokens=99_000), summary=None),
            small_talk(45, 1_900),
        ),
    ],
    ids=["trigger", "minima", "last-tool-result", "preserved-messages", "large-budget"],
)
async def test_no_preference_keeps_a_request_too_large(
    pipeline: Pipeline, contents: list[types.Content]
) -> None:
    """What leaves is below the threshold, whatever was preferred."""
    talk = measured(contents, large_llm(), 100_000)
    assert talk.is_due
    compaction = await compact(pipeline, talk)
    assert compaction.tokens < talk.budgets.threshold_tokens
    assert compaction.attempts <= 1


async def test_a_summary_starts_from_the_originals() -> None:
    """What was shortened or dropped before is shown to the summarizer whole."""
    contents = tool_talk(30, 9_000)
    contents[2] = response("read", "y" * 6_000 + " the needle " + "y" * 3_000)
    llm = large_llm()
    talk = measured(contents, llm, 20_000)
    await Pipeline(context_window=20_000).compact(talk)
    assert llm.summaries
    assert any("the needle" in request.text for request in llm.requests)


async def test_what_was_paid_for_is_shortened_before_another_summary() -> None:
    """A summary that does not fit beside a large instruction and request is cut."""
    llm = SimulatedLlm(
        context_window=10_000_000, summary_replies=["word " * 90_000] * 9
    )
    contents = [*small_talk(40, 1_000), user(words(27_000, "live"))]
    talk = measured(contents, llm, 100_000)
    talk = replace(talk, config_heuristic_tokens=44_000, tokens=talk.tokens + 44_000)
    compaction = await compact(Pipeline(window=None, tool_output=None), talk)
    assert talk.fits(compaction)
    assert llm.summaries == compaction.attempts == 1


async def test_nesting_10_000_deep_does_not_overflow_the_stack() -> None:
    """What a tool returned is measured, shortened and covered however deep it is."""
    deep: Any = "y" * 50
    for _ in range(10_000):
        deep = [deep]
    response = types.FunctionResponse.model_construct(name="dump")
    response.response = {"deep": deep, "text": "y" * 200_000}
    part = types.Part.model_construct(function_response=response)
    content = types.Content.model_construct(role="user", parts=[part])
    contents = [user("Task."), call("dump"), content, *tool_talk(40, 8_000)]
    talk = measured(contents, large_llm(), 100_000)
    assert talk.is_due
    compaction = await compact(Pipeline(window=None, summary=None), talk)
    assert talk.fits(compaction)


async def test_a_summarizer_that_is_down_is_asked_once() -> None:
    """The mechanical summary takes its place, and the request fits."""
    llm = SimulatedLlm(
        context_window=10_000_000, summary_replies=[RuntimeError("down")] * 9
    )
    talk = measured(small_talk(100, 950), llm, 100_000)
    compaction = await compact(Pipeline(window=None, tool_output=None), talk)
    assert compaction.stored.is_mechanical
    assert talk.fits(compaction)
    assert llm.summaries == 1


async def test_an_early_run_must_be_worth_a_new_prefix() -> None:
    """Before the threshold a gain of a few tokens does not break prompt caches."""
    pipeline = Pipeline(compression_threshold=0.6, window=None, summary=None)
    little = measured(tool_talk(13, 4_300), large_llm(), 20_000)
    assert 12_000 <= little.tokens < 16_000
    assert await pipeline.compact(little) is None
    much = measured(tool_talk(4, 12_000), large_llm(), 20_000)
    assert not much.is_due
    compaction = await compact(pipeline, much)
    assert compaction.attempts == 0


@pytest.mark.parametrize(
    ("count", "size_chars", "longest"),
    [(37, 9_000, 4_000), (75, 4_400, 1_000)],
    ids=["enough-gained", "little-gained"],
)
async def test_a_run_that_gains_little_shortens_further(
    count: int, size_chars: int, longest: int
) -> None:
    """Results become shorter than set where the next run would follow soon."""
    contents = tool_talk(count, size_chars)
    talk = measured(contents, large_llm(), 100_000)
    assert talk.is_due
    pipeline = Pipeline(
        window=None,
        summary=None,
        tool_output=ToolOutputTruncation(show_truncation_notice=False),
    )
    compaction = await compact(pipeline, talk)
    assert compaction.attempts == 0
    assert compaction.tokens <= 65_000  # Half-way between target and threshold.
    results = [
        part.function_response.response["result"]
        for content in compaction.contents
        for part in content.parts or []
        if part.function_response and part.function_response.response
    ]
    assert [len(result) for result in results] == [*[longest] * (count - 1), size_chars]


async def test_nothing_can_be_done_about_open_calls() -> None:
    """Without anything to remove nothing is decided, and nothing paid for."""
    llm = large_llm()
    talk = context([call("read")], llm, window_tokens=1_000, tokens=990)
    assert await Pipeline().compact(talk) is None
    assert llm.summaries == 0


# --- Behind a Runner ----------------------------------------------------------------


async def play_scenario(name: str, window_tokens: int, strategy: Strategy) -> Played:
    """Plays a scenario; skips what no guard can keep inside the window."""
    conversation = write_conversation(name, window_tokens)
    if obstacle := find_obstacle(conversation, window_tokens):
        pytest.skip(obstacle)
    is_large = window_tokens > LARGEST_BPE_WINDOW_TOKENS
    llm = SimulatedLlm(
        context_window=window_tokens,
        token_ratio=conversation.token_ratio,
        media_tokens=conversation.media_tokens,
        usage=conversation.usage,
        summary_replies=_summarize_briefly if is_large else None,
    )
    return await play(conversation, strategy, llm, session_service=KeptSessions())


def list_cells() -> list[Any]:
    """Every scenario on every window; all but a few are slow."""
    return [
        pytest.param(
            name,
            window_tokens,
            id=f"{name}-{window_tokens // 1000}k",
            marks=()
            if name in FAST and window_tokens == 8_000
            else (pytest.mark.slow,),
        )
        for name, scenario in SCENARIOS.items()
        for window_tokens in WINDOWS_TOKENS
        if not scenario.is_long or window_tokens == 32_000
    ]


@pytest.mark.parametrize(("name", "window_tokens"), list_cells())
async def test_a_conversation_stays_inside_the_window(
    name: str, window_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No request is refused, no pair broken, no answer lost, and on two calls running
    it compacts only where it must."""
    caplog.set_level(logging.ERROR, "contextguard_adk")
    played = await play_scenario(
        name, window_tokens, Pipeline(context_window=window_tokens)
    )
    conversation = write_conversation(name, window_tokens)
    cell = f"{name!r} on {window_tokens:,} tokens"
    assert not caplog.records, cell
    check_provider(cell, played)
    check_answers(cell, played, [turn.answer for turn in conversation.turns])
    check_live_requests(cell, played.calls)
    check_pauses(cell, played.calls, window_tokens)
    if total_tokens(conversation) > window_tokens:
        assert any(call.is_compacted for call in played.calls), cell


@pytest.mark.slow
async def test_fewer_summaries_than_threshold() -> None:
    """On tool-heavy conversations it never pays for more, and altogether for fewer."""
    totals = {Pipeline: 0, Threshold: 0}
    for name in TOOL_HEAVY:
        paid = {}
        for kind in totals:
            played = await play_scenario(name, 8_000, kind(context_window=8_000))
            paid[kind] = sum(bool(call.summary_count) for call in played.calls)
            totals[kind] += paid[kind]
        assert paid[Pipeline] <= paid[Threshold], name
    assert totals[Pipeline] < totals[Threshold]


def test_the_benchmark_finds_figures_that_are_not_as_promised() -> None:
    """Each is wrong on its own, when it is too small, too large or not there."""
    right = {
        name: max(least, min(1.0, most)) for name, (least, most) in PROMISED.items()
    }
    assert find_broken(right) == []
    assert find_broken({}) == list(PROMISED)
    for name, (least, most) in PROMISED.items():
        assert find_broken({**right, name: least - 0.01}) == [name]
        assert find_broken({**right, name: most + 1}) == [name] or most == math.inf


def check_prefixes(played: Played) -> None:
    """Between runs each request begins with the bytes of the one before."""
    assert played.llm.rejections == 0
    assert sum(call.is_compacted for call in played.calls) >= 2
    for before, after in itertools.pairwise(played.calls):
        if not after.is_compacted:
            sent, resent = to_bytes(before.contents), to_bytes(after.contents)
            assert resent[: len(sent)] == sent, f"call {after.number}"


@pytest.mark.parametrize("name", ["kubernetes", "rapid short"])
async def test_what_was_decided_stays(name: str) -> None:
    """Results that were shortened and messages that were dropped do not come back."""
    check_prefixes(await play_scenario(name, 8_000, Pipeline(context_window=8_000)))


async def test_equal_results_do_not_move_what_was_decided() -> None:
    """A later result with the same bytes is not taken for the one shortened last."""
    results = ["notebooks " * 600, "ok", "ok"]
    steps = [[ToolUse("read", results[number % 3])] for number in range(40)]
    llm = SimulatedLlm(context_window=8_000, token_ratio=1.0)
    strategy = Pipeline(context_window=8_000, window=None)
    check_prefixes(await play(Conversation([Turn("Read on.", steps)]), strategy, llm))


# --- Settings -----------------------------------------------------------------------


def test_documented_defaults() -> None:
    """Window, tool output, summary: as documented."""
    assert Pipeline() == Pipeline(
        window=MessageWindow(
            window_size=40,
            min_messages_before_windowing=50,
            preserve_system=True,
            preserve_initial_task=True,
            strict_window_size=False,
        ),
        tool_output=ToolOutputTruncation(
            max_length=4_000,
            show_truncation_notice=True,
            smart_truncate=False,
            head_length=3_000,
            tail_length=1_000,
            preserve_last_tool_result=True,
        ),
        summary=SummaryCompaction(
            trigger_threshold=0.90,
            target_token_ratio=0.50,
            min_messages_for_summary=20,
            preserve_recent_count=10,
        ),
    )
