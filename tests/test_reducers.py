"""What each reducer of a pipeline does alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from google.genai import types
from pydantic import ValidationError

from contextguard_adk import (
    MessageWindow,
    Reducer,
    Reduction,
    StrategyResult,
    SummaryCompaction,
    TokenWindow,
    ToolOutputTruncation,
)
from contextguard_adk.history.view import HistoryView
from contextguard_adk.strategies.reduction import Relaxed
from contextguard_adk.testing import SimulatedLlm
from tests.builders import call, event, model, response, user
from tests.test_strategies import context, names, small_talk, words

NO_CHANGE, APPLIED, TARGET_REACHED = StrategyResult
RELAXED = Relaxed(lengths=True, preferences=True)


def reduction(
    contents: Sequence[types.Content],
    llm: SimulatedLlm | None = None,
    *,
    target_tokens: int = 1,
    relaxed: Relaxed = Relaxed(),  # noqa: B008 - frozen.
    window_tokens: int = 100_000,
) -> Reduction:
    """The start of a pipeline run over these contents, which are all history."""
    tokens = context(contents).measure(contents)
    made = context(contents, llm, window_tokens=window_tokens, tokens=tokens)
    run = Reduction(made, target_tokens)
    run.relaxed = relaxed
    return run


def sent(run: Reduction) -> list[types.Content]:
    """The contents as the reducers left them, without the head of a summary."""
    if run.compaction is None:
        return list(run.context.view.contents)
    contents = run.compaction.contents
    heads = ("[Previous", "[System:")
    return [c for c in contents if not names([c])[0].startswith(heads)]


def instruction(text: str) -> types.Content:
    """A history content that is neither the user's nor the model's."""
    return types.Content(role="system", parts=[types.Part(text=text)])


# --- Windows ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "settings", "kept"),
    [
        (49, {}, 49),
        (50, {}, 40),
        (100, {"window_size": 10}, 10),
        (9, {"window_size": 10, "min_messages_before_windowing": 0}, 9),
    ],
    ids=["fewer-than-the-minimum", "the-minimum", "small-window", "all-fit"],
)
async def test_a_message_window_keeps_the_newest(
    count: int, settings: dict[str, Any], kept: int
) -> None:
    """So many stay, the first task and the newest, and nothing is dropped below the
    minimum."""
    run = reduction(small_talk(count, 20))
    result = await MessageWindow(**settings).reduce(run)
    assert len(run.kept) == kept
    assert result is (NO_CHANGE if kept == count else APPLIED)
    if kept < count:
        first = run.context.view.first_task_index
        assert run.kept == [first, *range(count - kept + 1, count)]


@pytest.mark.parametrize(
    ("is_strict", "kept"), [(True, 10), (False, 15)], ids=["strict", "not strict"]
)
async def test_protected_messages_against_a_strict_window(
    is_strict: bool, kept: int
) -> None:
    """15 protected messages and a window of 10 leave 10 strict, and 15 not."""
    # The user's only message is the first task and the current request.
    rules = [instruction(f"Rule{number} holds.") for number in range(14)]
    talk = [model(words(20, f"m{number}")) for number in range(60)]
    run = reduction([*rules, *talk, user("Task.")])
    window = MessageWindow(window_size=10, strict_window_size=is_strict)
    await window.reduce(run)
    assert names(sent(run)) == [
        *(f"Rule{number}" for number in range(15 - kept, 14)),
        "Task.",
    ]


@pytest.mark.parametrize(
    ("settings", "relaxed", "has_system", "has_task"),
    [
        ({}, Relaxed(), True, True),
        ({"preserve_system": False}, Relaxed(), False, True),
        ({"preserve_initial_task": False}, Relaxed(), True, False),
        ({}, RELAXED, False, False),
    ],
    ids=["defaults", "system", "task", "relaxed"],
)
@pytest.mark.parametrize(
    "window",
    [
        pytest.param((MessageWindow, {"window_size": 5}), id="messages"),
        pytest.param((TokenWindow, {"budget_tokens": 100}), id="tokens"),
    ],
)
async def test_what_a_window_preserves(
    window: tuple[type[Reducer], dict[str, Any]],
    settings: dict[str, Any],
    relaxed: Relaxed,
    has_system: bool,
    has_task: bool,
) -> None:
    """Instructions in the history and the first task stay, if asked and if possible."""
    talk = [user("Task."), instruction("Rule."), *small_talk(60, 20)]
    run = reduction(talk, relaxed=relaxed)
    kind, own = window
    await kind(**own, **settings).reduce(run)
    texts = names(sent(run))
    assert ("Rule." in texts) is has_system
    assert ("Task." in texts) is has_task
    assert texts[-1] == "m59"


@pytest.mark.parametrize(
    ("count", "size_tokens", "kept"),
    [(100, 100, 100), (10, 10_000, 5)],
    ids=["small-ones-all-fit", "large-ones-of-which-5-fit"],
)
async def test_a_token_window_counts_tokens(
    count: int, size_tokens: int, kept: int
) -> None:
    """Not the number of messages counts but what they take."""
    run = reduction(small_talk(count, size_tokens), window_tokens=200_000)
    await TokenWindow(budget_tokens=50_000).reduce(run)
    assert len(run.kept) == kept
    assert run.measure(run.kept) <= 50_000


async def test_windows_keep_pairs_whole() -> None:
    """A call that would lose its result to the cut leaves with it."""
    contents = [user("Task.")]
    for number in range(40):
        contents += [call("read", str(number)), response("read", "ok", str(number))]
    run = reduction([*contents, user("Now?")])
    await MessageWindow(window_size=10).reduce(run)
    kept = sent(run)
    calls = [p for c in kept for p in c.parts or [] if p.function_call]
    results = [p for c in kept for p in c.parts or [] if p.function_response]
    assert len(calls) == len(results)
    assert abs(len(kept) - 10) <= 1


async def test_a_token_window_drops_nothing_that_is_preserved() -> None:
    """Instructions and the current request stay, even beyond the budget."""
    rules = [instruction(words(100, f"Rule{number}")) for number in range(3)]
    run = reduction([*rules, user(words(100, "Now"))])
    assert await TokenWindow(budget_tokens=100).reduce(run) is NO_CHANGE
    assert run.kept == [0, 1, 2, 3]


async def test_a_token_window_measures_what_is_sent() -> None:
    """A result that was shortened before counts as short."""
    contents = [
        user("Task."),
        call("read"),
        response("read", "y" * 40_000),
        call("read"),
        response("read", "ok"),
        user("Now?"),
    ]
    run = reduction(contents)
    await ToolOutputTruncation(max_length=1_000).reduce(run)
    assert await TokenWindow(budget_tokens=1_000).reduce(run) is NO_CHANGE
    assert len(run.kept) == 6


# --- Tool results -----------------------------------------------------------------


def read_twice(size_chars: int = 9_000) -> list[types.Content]:
    """Two calls with long results, and a question."""
    return [
        user("Task."),
        call("read"),
        response("read", "a" * size_chars),
        call("read"),
        response("read", "b" * size_chars),
        user("Now?"),
    ]


def result_lengths(run: Reduction) -> list[int]:
    """How long the tool results are that are sent."""
    results = [p.function_response for c in sent(run) for p in c.parts or []]
    return [len(str((r.response or {})["result"])) for r in results if r]


@pytest.mark.parametrize(
    ("preserve", "relaxed", "lengths"),
    [
        (True, Relaxed(), [4_000, 9_000]),
        (False, Relaxed(), [4_000, 4_000]),
        (True, Relaxed(lengths=True), [1_000, 9_000]),
        (True, RELAXED, [1_000, 1_000]),
    ],
    ids=["kept", "shortened-when-asked", "tight", "relaxed"],
)
async def test_the_last_tool_result(
    preserve: bool, relaxed: Relaxed, lengths: list[int]
) -> None:
    """It stays whole unless told otherwise, or the request would not fit."""
    run = reduction(read_twice(), relaxed=relaxed)
    truncation = ToolOutputTruncation(
        preserve_last_tool_result=preserve, show_truncation_notice=False
    )
    assert await truncation.reduce(run) is APPLIED
    assert result_lengths(run) == lengths


@pytest.mark.parametrize(
    "contents",
    [small_talk(5), read_twice()[3:], read_twice(100)],
    ids=["no-results", "one-result", "short-results"],
)
async def test_nothing_to_shorten(contents: list[types.Content]) -> None:
    """Without long results before the last one nothing happens."""
    run = reduction(contents)
    assert await ToolOutputTruncation().reduce(run) is NO_CHANGE


async def test_a_shortened_result_does_not_grow_again() -> None:
    """Settings that are looser than what was decided do not undo it."""
    run = reduction(read_twice(), relaxed=RELAXED)
    truncation = ToolOutputTruncation(show_truncation_notice=False)
    await truncation.reduce(run)
    decided = run.truncation
    run.relaxed = Relaxed()
    assert await truncation.reduce(run) is NO_CHANGE
    assert run.truncation == decided
    assert result_lengths(run) == [1_000, 1_000]


@pytest.mark.parametrize(
    ("max_length", "wanted"),
    [(400, 400), (2_000, 1_000), (4_000, 1_000), (40_000, 10_000)],
)
async def test_tightening_leaves_a_quarter(max_length: int, wanted: int) -> None:
    """To a quarter, to 1,000 characters at most, and never to more than was set."""
    run = reduction(read_twice(90_000), relaxed=Relaxed(lengths=True))
    truncation = ToolOutputTruncation(
        max_length=max_length, show_truncation_notice=False
    )
    await truncation.reduce(run)
    assert result_lengths(run) == [wanted, 90_000]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"smart_truncate": True, "max_length": 3_999}, "4000"),
        ({"max_length": 0}, "max_length"),
        ({"maxlength": 10}, "maxlength"),
    ],
    ids=["head-and-tail", "nothing-left", "unknown"],
)
def test_impossible_lengths_are_refused(
    settings: dict[str, Any], complaint: str
) -> None:
    """A mistake is an error at start."""
    with pytest.raises(ValidationError, match=complaint):
        ToolOutputTruncation(**settings)


# --- Summaries --------------------------------------------------------------------


SUMMARIES = {
    "below the trigger": (100, 800, Relaxed(), 0),
    "above the trigger": (100, 950, Relaxed(), 1),
    "trigger relaxed": (100, 800, RELAXED, 1),
    "too few messages": (19, 5_000, Relaxed(), 0),
    "minimum relaxed": (19, 5_000, RELAXED, 1),
    "what is kept leaves no room": (20, 9_000, Relaxed(), 0),
    "number kept relaxed": (20, 9_000, RELAXED, 1),
}


@pytest.mark.parametrize(
    ("count", "size_tokens", "relaxed", "summaries"),
    SUMMARIES.values(),
    ids=SUMMARIES,
)
async def test_when_a_summary_is_paid_for(
    count: int, size_tokens: int, relaxed: Relaxed, summaries: int
) -> None:
    """Only where the settings, or the need, ask for one, and where it helps."""
    llm = SimulatedLlm(context_window=1_000_000, summary_replies=["Short."] * 3)
    run = reduction(
        small_talk(count, size_tokens), llm, target_tokens=50_000, relaxed=relaxed
    )
    await SummaryCompaction().reduce(run)
    assert llm.summaries == run.attempts == summaries


async def test_the_newest_messages_stay_word_for_word() -> None:
    """100 messages over 90 % become the summary first, then the last 10."""
    llm = SimulatedLlm(context_window=1_000_000, summary_replies=["Short."])
    contents = small_talk(100, 950)
    run = reduction(contents, llm, target_tokens=50_000)
    assert await SummaryCompaction().reduce(run) is TARGET_REACHED
    assert run.compaction
    first, *rest = run.compaction.contents
    assert "Short." in str(first.parts and first.parts[0].text)
    assert rest == contents[-10:]


async def test_a_failed_summarizer_is_not_asked_again() -> None:
    """One failure is enough for one run: each may take its whole timeout."""
    llm = SimulatedLlm(
        context_window=1_000_000, summary_replies=[RuntimeError("down")] * 3
    )
    run = reduction(small_talk(100, 950), llm, target_tokens=50_000)
    await SummaryCompaction().reduce(run)
    run.relaxed = RELAXED
    assert await SummaryCompaction().reduce(run) is NO_CHANGE
    assert llm.summaries == 1
    assert run.compaction
    assert run.compaction.stored.is_mechanical


def test_a_trigger_below_the_target_is_refused() -> None:
    """Such a summary could never be due."""
    with pytest.raises(ValidationError, match="must be larger"):
        SummaryCompaction(trigger_threshold=0.5, target_token_ratio=0.5)


# --- The working state ------------------------------------------------------------


def test_nothing_is_dropped_twice_and_the_live_request_never() -> None:
    """What a reducer asks for is bounded by what must stay."""
    run = reduction([user("old"), model(words(500, "m")), user("live")])
    assert run.drop([0, 1, 2]) is APPLIED
    assert run.kept == [2]
    assert run.drop([0, 2]) is NO_CHANGE


@pytest.mark.parametrize(
    "change",
    [
        {"truncation": "{"},
        {"truncation": "[1]"},
        {"truncation": "[" * 100_000},
        {"truncated_upto": "00"},
    ],
    ids=["no-json", "other-settings", "deep", "unknown-content"],
)
async def test_broken_settings_in_state_count_as_none(change: dict[str, Any]) -> None:
    """State is untrusted: what is no truncation is not applied, and not taken up."""
    run = reduction(read_twice())
    assert await ToolOutputTruncation(max_length=1_000).reduce(run) is APPLIED
    assert run.compaction
    stored = run.compaction.stored
    stored = replace(stored, mark=replace(stored.mark, **change))
    view = HistoryView(
        read_twice(),
        events=[event(content) for content in read_twice()],
        user_content=user("Now?"),
        invocation_id="now",
        stored=stored,
    )
    again = Reduction(replace(run.context, view=view), 1)
    assert again.truncation is None
    assert await ToolOutputTruncation(max_length=1_000).reduce(again) is APPLIED
    assert again.truncation


def test_a_reducer_needs_its_method() -> None:
    """The base class does nothing."""
    with pytest.raises(TypeError, match="abstract"):
        Reducer()  # type: ignore[abstract]
