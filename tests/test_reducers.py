"""What each reducer of a pipeline does alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from google.genai import types
from pydantic import ValidationError

from contextguard_adk import (
    MessageWindow,
    Pipeline,
    Reducer,
    Reduction,
    StrategyResult,
    SummaryCompaction,
    TokenWindow,
    ToolOutputTruncation,
)
from contextguard_adk.strategies.reducers import Relaxed
from contextguard_adk.testing import SimulatedLlm
from tests.builders import (
    call,
    call_part,
    model,
    queued_tool,
    response,
    user,
)
from tests.chats import KEY, guarded_chat, without_head, words
from tests.test_strategies import context, names, small_talk

NO_CHANGE, APPLIED, TARGET_REACHED = StrategyResult
RELAXED = Relaxed(lengths=True, preferences=True)


async def reduction(
    contents: Sequence[types.Content],
    llm: SimulatedLlm | None = None,
    *,
    target_tokens: int = 1,
    relaxed: Relaxed = Relaxed(),  # noqa: B008 - frozen.
    window_tokens: int = 100_000,
) -> Reduction:
    """The start of a pipeline run over these contents, which are all history."""
    made = await context(contents, llm, window_tokens=window_tokens)
    run = Reduction(made, target_tokens)
    run.relaxed = relaxed
    return run


def sent(run: Reduction) -> list[types.Content]:
    """The contents as the reducers left them, without the head of a summary."""
    if run.compaction is None:
        return list(run.context.view.contents)
    return without_head(run.compaction.contents)


def instruction(text: str) -> types.Content:
    """A history content that is neither the user's nor the model's."""
    return types.Content(role="system", parts=[types.Part(text=text)])


# --- Windows ----------------------------------------------------------------------


async def test_a_message_window_keeps_the_newest() -> None:
    """The first task and the newest stay; nothing is dropped below the minimum."""
    run = await reduction(small_talk(49, 20))
    assert await MessageWindow().reduce(run) is NO_CHANGE
    assert len(run.kept) == 49
    run = await reduction(small_talk(50, 20))
    assert await MessageWindow().reduce(run) is APPLIED
    assert run.kept == [run.context.view.first_task_index, *range(11, 50)]


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
    run = await reduction([*rules, *talk, user("Task.")])
    await MessageWindow(window_size=10, strict_window_size=is_strict).reduce(run)
    rules_kept = [f"Rule{number}" for number in range(15 - kept, 14)]
    assert names(sent(run)) == [*rules_kept, "Task."]


@pytest.mark.parametrize(("correction", "kept"), [(1.0, 20), (2.0, 10)])
async def test_a_part_of_the_window_is_in_tokens_of_the_model(
    correction: float, kept: int
) -> None:
    """What the model counts twice as high, half as much of it fits."""
    run = await reduction(small_talk(60, 1_000))
    run.context = replace(run.context, correction=correction)
    window = TokenWindow(budget_tokens=0.2, preserve_initial_task=False)
    await window.reduce(run)
    assert kept - 1 <= len(run.kept) <= kept


@pytest.mark.parametrize(
    ("window", "relaxed", "has_system", "has_task"),
    [
        (MessageWindow(window_size=5), Relaxed(), True, True),
        (MessageWindow(window_size=5, preserve_system=False), Relaxed(), False, True),
        (TokenWindow(budget_tokens=100), RELAXED, False, False),
    ],
    ids=["defaults", "system", "relaxed"],
)
async def test_what_a_window_preserves(
    window: Reducer, relaxed: Relaxed, has_system: bool, has_task: bool
) -> None:
    """Instructions in the history and the first task stay, if asked and if possible."""
    talk = [user("Task."), instruction("Rule."), *small_talk(60, 20)]
    run = await reduction(talk, relaxed=relaxed)
    await window.reduce(run)
    texts = names(sent(run))
    assert ("Rule." in texts) is has_system
    assert ("Task." in texts) is has_task
    assert texts[-1] == "m59"


async def test_windows_keep_pairs_whole() -> None:
    """A call that would lose its result to the cut leaves with it."""
    contents = [user("Task.")]
    for number in range(40):
        contents += [call("read", str(number)), response("read", "ok", str(number))]
    run = await reduction([*contents, user("Now?")])
    await MessageWindow(window_size=10).reduce(run)
    parts = [part for content in sent(run) for part in content.parts or []]
    assert sum(bool(p.function_call) for p in parts) == 4
    assert sum(bool(p.function_response) for p in parts) == 4


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
    ("settings", "relaxed", "lengths"),
    [
        ({}, Relaxed(), [4_000, 9_000]),
        ({"preserve_last_tool_result": False}, Relaxed(), [4_000, 4_000]),
        ({}, Relaxed(lengths=True), [1_000, 9_000]),
        ({"max_length": 400}, Relaxed(lengths=True), [400, 9_000]),
        ({"max_length": 8_000}, Relaxed(lengths=True), [2_000, 9_000]),
        ({}, RELAXED, [1_000, 1_000]),
    ],
    ids=["kept", "asked", "tight", "short-as-set", "a-quarter", "relaxed"],
)
async def test_how_far_results_are_shortened(
    settings: dict[str, Any], relaxed: Relaxed, lengths: list[int]
) -> None:
    """As set; to a quarter but at least 1,000, the last one too, where need be."""
    run = await reduction(read_twice(), relaxed=relaxed)
    truncation = ToolOutputTruncation(show_truncation_notice=False, **settings)
    assert await truncation.reduce(run) is APPLIED
    assert result_lengths(run) == lengths


async def test_a_shortened_result_does_not_grow_again() -> None:
    """Settings that are looser than what was decided do not undo it."""
    run = await reduction(read_twice(), relaxed=RELAXED)
    truncation = ToolOutputTruncation(show_truncation_notice=False)
    await truncation.reduce(run)
    run.relaxed = Relaxed()
    assert await truncation.reduce(run) is NO_CHANGE
    assert result_lengths(run) == [1_000, 1_000]


async def test_an_unknown_content_in_state_counts_as_none() -> None:
    """State is untrusted: what was shortened up to nowhere is shortened anew."""
    llm = SimulatedLlm(context_window=8_000)
    tool_output = ToolOutputTruncation()
    strategy = Pipeline(context_window=8_000, window=None, tool_output=tool_output)
    read = queued_tool("read", [f"{n} {'notebooks ' * 900}" for n in range(99)])
    chat = guarded_chat(llm, strategy, agent={"tools": [read]})
    llm.script = lambda request: (
        [call_part("read")] if len(request.contents) % 4 == 1 else "Done."
    )
    key = KEY.format("record")
    while key not in await chat.state():
        await chat.say("Read on.")
    record = json.loads((await chat.state())[key])
    assert record["summary"]["truncation"]
    record["summary"]["truncated_upto"] = "00"
    await chat.set_state({key: json.dumps(record)})
    for _ in range(3):
        await chat.say("Read on.")
    assert llm.rejections == llm.violations == 0
    assert (await chat.state())[key] != json.dumps(record)


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
    ("count", "size_tokens", "relaxed", "summaries"), SUMMARIES.values(), ids=SUMMARIES
)
async def test_when_a_summary_is_paid_for(
    count: int, size_tokens: int, relaxed: Relaxed, summaries: int
) -> None:
    """Only where the settings, or the need, ask for one, and where it helps."""
    llm = SimulatedLlm(context_window=1_000_000, summary_replies=["Short enough."])
    contents = small_talk(count, size_tokens)
    run = await reduction(contents, llm, target_tokens=50_000, relaxed=relaxed)
    await SummaryCompaction().reduce(run)
    assert llm.summaries == run.attempts == summaries


@pytest.mark.parametrize(
    ("kind", "settings", "complaint"),
    [
        (ToolOutputTruncation, {"smart_truncate": True, "max_length": 3_999}, "4000"),
        (ToolOutputTruncation, {"max_length": 0}, "max_length"),
        (ToolOutputTruncation, {"maxlength": 10}, "maxlength"),
        (SummaryCompaction, {"trigger_threshold": 0.5}, "must be larger"),
        (TokenWindow, {"budget_tokens": 99}, "at least 100"),
        (TokenWindow, {"budget_tokens": 1.0}, "less than 1"),
    ],
    ids=["head-tail", "nothing-left", "unknown", "trigger", "few-tokens", "all"],
)
def test_impossible_settings_are_refused(
    kind: type[Reducer], settings: dict[str, Any], complaint: str
) -> None:
    """A mistake is an error at start."""
    with pytest.raises(ValidationError, match=complaint):
        kind(**settings)
