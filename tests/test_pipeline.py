"""The pipeline: its order, where it stops, what is relaxed, and what it costs."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
from google.genai import types

from contextguard_adk import (
    Compaction,
    CompactionContext,
    CompactionRecord,
    MessageWindow,
    Pipeline,
    Reducer,
    Reduction,
    Strategy,
    StrategyResult,
    TokenWindow,
    ToolOutputTruncation,
)
from contextguard_adk.strategies.reducers import Relaxed
from contextguard_adk.testing import SimulatedLlm
from tests.builders import (
    Conversation,
    KeptSessions,
    Played,
    ToolUse,
    Turn,
    call,
    model,
    play,
    response,
    user,
)
from tests.chats import seed
from tests.guarded import guarded_chat
from tests.scenarios import (
    LARGEST_BPE_WINDOW_TOKENS,
    SCENARIOS,
    find_obstacle,
    total_tokens,
    write_conversation,
)
from tests.test_scenarios import (
    check_answers,
    check_live_requests,
    check_pauses,
    check_provider,
)
from tests.test_strategies import context, small_talk

WINDOWS_TOKENS = (4_000, 8_000, 32_000, 200_000)
FAST = [("kubernetes", 8_000), ("empty results", 8_000)]


class Spy(Reducer):
    """Notes which settings it was told to relax, and returns what it was told to."""

    log: Any  # Pydantic would copy a list.
    result: StrategyResult = StrategyResult.NO_CHANGE

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Notes the run."""
        self.log.append(reduction.relaxed)
        return self.result


def spying(*spies: Spy, **settings: Any) -> Pipeline:
    """A pipeline of spies alone."""
    none: dict[str, Any] = {"window": None, "tool_output": None, "summary": None}
    return Pipeline(reducers=spies, **none, **settings)


def tool_talk(count: int, size_chars: int) -> list[types.Content]:
    """So many calls with results of so many characters, and a question."""
    contents = [user("Task.")]
    for number in range(count):
        contents += [
            call("read", str(number)),
            response("read", f"{number} {'notebooks ' * size_chars}"[:size_chars]),
        ]
    return [*contents, user("Now?")]


def result_lengths(contents: list[types.Content]) -> list[int]:
    """How long the tool results are."""
    found = [p.function_response for c in contents for p in c.parts or []]
    return [len(item.response["result"]) for item in found if item and item.response]


def large_llm() -> SimulatedLlm:
    """A summarizer that takes anything."""
    return SimulatedLlm(
        context_window=10_000_000, summary_replies=lambda request: "Short enough."
    )


async def compact(pipeline: Pipeline, talk: CompactionContext) -> Compaction:
    """What the pipeline decides where it has to decide something."""
    compaction = await pipeline.compact(talk)
    assert compaction is not None
    return compaction


# --- Order, target, what is relaxed ---


@pytest.mark.parametrize(
    ("tokens", "threshold", "is_run"),
    [
        (79_999, None, False),
        (80_000, 0.9, True),
        (59_999, 0.6, False),
        (60_000, 0.6, 1),
    ],
)
async def test_when_it_runs(tokens: int, threshold: float | None, is_run: bool) -> None:
    """At the threshold, or at `compression_threshold` where that comes first."""
    log: list[Any] = []
    pipeline = spying(Spy(log=log), compression_threshold=threshold)
    talk = await context(small_talk(5), window_tokens=100_000, tokens=tokens)
    await pipeline.compact(talk)
    assert bool(log) is bool(is_run)


async def test_the_window_comes_before_truncation() -> None:
    """What the window drops is not shortened first: with the window alone enough,
    the results that stay are whole."""
    contents = tool_talk(60, 6_000)
    talk = await context(contents, large_llm(), window_tokens=105_000)
    window = MessageWindow(window_size=20, preserve_initial_task=False)
    compaction = await compact(Pipeline(window=window), talk)
    assert compaction.contents[-18:] == contents[-18:]
    assert compaction.attempts == 0


async def test_settings_are_relaxed_in_order() -> None:
    """First lengths, then all preferences; then everything is summarized."""
    log: list[Any] = []
    llm = large_llm()
    talk = await context(small_talk(100, 900), llm, window_tokens=100_000)
    compaction = await compact(spying(Spy(log=log)), talk)
    tight = Relaxed(lengths=True)
    assert log == [Relaxed(), tight, Relaxed(lengths=True, preferences=True)]
    assert compaction.covered == frozenset(range(100))
    assert llm.summaries == compaction.attempts == 1


@pytest.mark.parametrize(
    ("pipeline", "contents"),
    [
        (Pipeline(window=None, tool_output=None), small_talk(100, 850)),
        (Pipeline(), small_talk(19, 4_500)),
        (Pipeline(summary=None), tool_talk(1, 340_000)),
        (
            Pipeline(window=TokenWindow(budget_tokens=99_000), summary=None),
            small_talk(45, 1_900),
        ),
    ],
    ids=["trigger", "minima", "last-tool-result", "large-budget"],
)
async def test_no_preference_keeps_a_request_too_large(
    pipeline: Pipeline, contents: list[types.Content]
) -> None:
    """What leaves is below the threshold, whatever was preferred."""
    talk = await context(contents, large_llm(), window_tokens=100_000)
    assert talk.is_due
    compaction = await compact(pipeline, talk)
    assert compaction.tokens < talk.budgets.threshold_tokens
    assert compaction.attempts <= 1


async def test_a_summary_starts_from_the_originals() -> None:
    """What was shortened or dropped before is shown to the summarizer whole."""
    contents = tool_talk(30, 9_000)
    contents[2] = response("read", "y" * 6_000 + " the needle " + "y" * 3_000)
    llm = large_llm()
    talk = await context(contents, llm, window_tokens=20_000)
    window, tool_output = MessageWindow(), ToolOutputTruncation()
    await Pipeline(window=window, tool_output=tool_output).compact(talk)
    assert any("the needle" in request.text for request in llm.requests)


async def test_nesting_10_000_deep_does_not_overflow_the_stack() -> None:
    """What a tool returned is measured, shortened and covered however deep it is."""
    deep: Any = "y" * 50
    for _ in range(10_000):
        deep = [deep]
    answer = types.FunctionResponse.model_construct(name="dump")
    answer.response = {"deep": deep, "text": "y" * 200_000}
    part = types.Part.model_construct(function_response=answer)
    content = types.Content.model_construct(role="user", parts=[part])
    contents = [user("Task."), call("dump"), content, *tool_talk(40, 8_000)]
    talk = await context(contents, large_llm(), window_tokens=100_000)
    compaction = await compact(Pipeline(window=None, summary=None), talk)
    assert talk.fits(compaction)


async def test_a_summarizer_that_is_down_is_asked_once() -> None:
    """The mechanical summary takes its place, and the request fits."""
    llm = SimulatedLlm(summary_replies=lambda request: RuntimeError("down"))
    llm.context_window = 10**7
    talk = await context(small_talk(100, 950), llm, window_tokens=100_000)
    compaction = await compact(Pipeline(window=None, tool_output=None), talk)
    assert compaction.stored.is_mechanical
    assert talk.fits(compaction)
    assert llm.summaries == 1


async def test_an_early_run_must_be_worth_a_new_prefix() -> None:
    """Before the threshold a gain of a few tokens does not break prompt caches."""
    pipeline = Pipeline(
        compression_threshold=0.6,
        window=None,
        tool_output=ToolOutputTruncation(),
        summary=None,
    )
    little = await context(tool_talk(13, 4_300), window_tokens=20_000)
    assert 12_000 <= little.tokens < 16_000
    assert await pipeline.compact(little) is None
    much = await context(tool_talk(4, 12_000), window_tokens=20_000)
    assert not much.is_due
    assert (await compact(pipeline, much)).attempts == 0


@pytest.mark.parametrize(
    ("count", "size_chars", "longest"),
    [(37, 9_000, 4_000), (75, 4_400, 1_000)],
    ids=["enough-gained", "little-gained"],
)
async def test_a_run_that_gains_little_shortens_further(
    count: int, size_chars: int, longest: int
) -> None:
    """Results become shorter than set where the next run would follow soon."""
    talk = await context(tool_talk(count, size_chars), window_tokens=100_000)
    assert talk.is_due
    tool_output = ToolOutputTruncation(show_truncation_notice=False)
    pipeline = Pipeline(window=None, summary=None, tool_output=tool_output)
    compaction = await compact(pipeline, talk)
    assert compaction.attempts == 0
    assert compaction.tokens <= 65_000  # Half-way between target and threshold.
    lengths = result_lengths(compaction.contents)
    assert lengths == [*[longest] * (count - 1), size_chars]


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
        summary_replies=(lambda request: "They talked.") if is_large else None,
    )
    return await play(conversation, strategy, llm, session_service=KeptSessions())


CELLS = [
    (name, window_tokens)
    for name, scenario in SCENARIOS.items()
    for window_tokens in WINDOWS_TOKENS
    if not scenario.is_long or window_tokens == 32_000
]
SLOW = [cell for cell in CELLS if cell not in FAST]


@pytest.mark.parametrize(
    ("name", "window_tokens"),
    [*FAST, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in SLOW)],
)
async def test_a_conversation_stays_inside_the_window(
    name: str, window_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No request is refused, no pair broken, no answer lost, and on two calls running
    it compacts only where it must."""
    caplog.set_level(logging.ERROR, "contextguard_adk")
    strategy = Pipeline(context_window=window_tokens)
    played = await play_scenario(name, window_tokens, strategy)
    conversation = write_conversation(name, window_tokens)
    cell = f"{name!r} on {window_tokens:,} tokens"
    assert not caplog.records, cell
    check_provider(cell, played)
    check_answers(cell, played, [turn.answer for turn in conversation.turns])
    check_live_requests(cell, played.calls)
    check_pauses(cell, played.calls, window_tokens)
    if total_tokens(conversation) > window_tokens:
        assert any(call.is_compacted for call in played.calls), cell


async def test_a_task_that_stays_does_not_undo_a_summary_of_a_long_history() -> None:
    """What is covered behind it, over 512 contents, is not summarized once more."""
    done: list[CompactionRecord] = []
    guard = {"on_compaction": done.append}
    chat = guarded_chat(large_llm(), Pipeline(context_window=32_000), guard=guard)
    talk = [user("word " * 80), model("word " * 80)]
    await seed(chat, user("The first task."), *talk * 450)
    for _ in range(3):
        await chat.say("Go on.")
    assert [record.contents_before for record in done] == [902]


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({}, 16_000),
        ({"tool_output": ToolOutputTruncation()}, 24_000),
        ({"tool_output": None}, 24_000),
        ({"tool_output": ToolOutputTruncation(preserve_last_tool_result=False)}, 4_000),
    ],
    ids=["default", "newest-whole", "off", "documented-lengths"],
)
async def test_long_strings_are_short_from_the_first_request_on(
    settings: dict[str, Any], length: int
) -> None:
    """In the same bytes ever after, unless the newest result is to stay whole."""
    steps = [
        [ToolUse("read", f"{number} {'note ' * 5_000}"[:24_000])] for number in (1, 2)
    ]
    llm = SimulatedLlm(context_window=100_000)
    strategy = Pipeline(context_window=100_000, **settings)
    played = await play(Conversation([Turn("Read on.", steps)]), strategy, llm)
    lengths = [result_lengths(list(call.contents)) for call in played.calls]
    assert [len(found) for found in lengths] == [0, 1, 2]
    assert all(length <= n < length + 100 for found in lengths for n in found)
    assert played.calls[2].contents[:3] == played.calls[1].contents


async def test_a_compaction_that_is_asked_for_frees_half() -> None:
    """Below the target as well, and however often it is asked for."""
    found: list[CompactionRecord] = []
    llm = SimulatedLlm(context_window=100_000)
    chat = guarded_chat(
        llm, Pipeline(context_window=100_000), guard={"on_compaction": found.append}
    )
    steps = [model("I look. " * 300), call("read", step=1)]
    steps.append(response("read", {"text": "notebooks " * 200}))
    for number in range(2):
        state = {"context_guard:compact": True}
        await seed(chat, user(f"Read it, {number}."), *steps, *steps, state=state)
        await chat.say("What did it say?")
        assert len(found) == number + 1
        assert found[-1].tokens_after < found[-1].tokens_before / 2


async def test_by_default_it_drops_deep_and_pays_for_nothing() -> None:
    """Far below half of the window, so that the new prefix lives long."""
    talk = await context(small_talk(100, 900), large_llm(), window_tokens=100_000)
    compaction = await compact(Pipeline(), talk)
    assert compaction.attempts == 0
    assert 25_000 <= compaction.tokens <= 40_000


async def test_equal_results_do_not_move_what_was_decided() -> None:
    """Between runs each request begins with the bytes of the one before, and a later
    result with the same bytes is not taken for the one shortened last."""
    results = ["notebooks " * 600, "ok", "ok"]
    steps = [[ToolUse("read", results[number % 3])] for number in range(40)]
    llm = SimulatedLlm(context_window=8_000, token_ratio=1.0)
    strategy = Pipeline(context_window=8_000, window=None)
    played = await play(Conversation([Turn("Read on.", steps)]), strategy, llm)
    assert played.llm.rejections == 0
    assert sum(call.is_compacted for call in played.calls) >= 2
    for before, after in itertools.pairwise(played.calls):
        if not after.is_compacted:
            assert after.contents[: len(before.contents)] == before.contents
