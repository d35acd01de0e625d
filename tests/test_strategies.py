"""What the strategies decide, alone and behind a real Runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from contextguard_adk.summarizing.summary_call import SummaryModel
from google.genai import types
from pydantic import ValidationError

from contextguard_adk import (
    Budgets,
    Compaction,
    CompactionContext,
    ContextGuardPlugin,
    SlidingWindow,
    Strategy,
    Threshold,
)
from contextguard_adk.history.view import HistoryView
from contextguard_adk.measuring.budgets import summary_budget_tokens, threshold_tokens
from contextguard_adk.summarizing.context import Reason
from contextguard_adk.testing import RecordedRequest, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import (
    Chat,
    answer_text,
    call,
    event,
    guarded_agent,
    model,
    queued_tool,
    user,
)

WINDOW = 4_000


def words(token_count: int, name: str = "") -> str:
    """Prose of four bytes for each token, recognisable by its name."""
    return f"{name} {'notebooks ' * token_count}"[: 4 * token_count]


def texts(contents: Sequence[types.Content]) -> list[str]:
    """The first text of each content, or "" for calls and results."""
    return [(content.parts or [types.Part()])[0].text or "" for content in contents]


def names(contents: Sequence[types.Content]) -> list[str]:
    """The first word of each content."""
    return [(text.split() or [""])[0] for text in texts(contents)]


def agent_requests(llm: SimulatedLlm) -> list[RecordedRequest]:
    """The requests for answers, without those for summaries."""
    return [request for request in llm.requests if not request.is_summary]


def guarded_chat(llm: SimulatedLlm, strategy: Strategy, **settings: Any) -> Chat:
    """A chat with one agent of this strategy."""
    return Chat(guarded_agent(llm, **settings), [ContextGuardPlugin(default=strategy)])


def context(
    contents: Sequence[types.Content],
    llm: SimulatedLlm | None = None,
    *,
    window_tokens: int = WINDOW,
    tokens: int = 0,
    fixed_tokens: int = 0,
    reason: Reason = "tokens",
) -> CompactionContext:
    """What a strategy reads when these contents are the whole history."""
    summary_model = SummaryModel(llm, 1_000_000) if llm else None
    view = HistoryView(
        contents,
        events=[event(content) for content in contents],
        user_content=contents[-1] if contents else None,
        invocation_id="now",
    )
    return CompactionContext(
        agent="agent",
        reason=reason,
        tokens=tokens,
        config_heuristic_tokens=fixed_tokens,
        correction=1.0,
        budgets=Budgets(
            window_tokens=window_tokens,
            threshold_tokens=threshold_tokens(window_tokens),
            summary_tokens=summary_budget_tokens(window_tokens),
        ),
        view=view,
        load_summary_model=lambda: summary_model,
    )


async def compact(
    strategy: Strategy, contents: Sequence[types.Content], llm: Any, **settings: Any
) -> Compaction:
    """What a strategy decides where it has to decide something."""
    compaction = await strategy.compact(context(contents, llm, **settings))
    assert compaction is not None
    return compaction


def small_talk(count: int, size_tokens: int = 1) -> list[types.Content]:
    """Alternating messages, the last of them the user's."""
    return [
        (user if (count - number) % 2 else model)(words(size_tokens, f"m{number}"))
        for number in range(count)
    ]


# --- Settings ---------------------------------------------------------------------


def test_settings_have_documented_defaults() -> None:
    """A strategy without arguments asks the registry and the agent's own model."""
    assert Threshold() == Threshold(
        context_window=None,
        summarizer=None,
        summarizer_context_window=None,
        max_compaction_attempts=3,
        summary_timeout_seconds=60.0,
        summary_instruction=None,
        reuse_prompt_cache="auto",
        recall="auto",
        recall_page_tokens=2_000,
    )
    assert SlidingWindow() == SlidingWindow(max_turns=20)


def test_max_tokens_is_another_name_of_the_context_window() -> None:
    """A window from a configuration may carry either name."""
    settings = Threshold.model_validate({"max_tokens": 32_000})
    assert settings.context_window == 32_000
    assert settings == Threshold(context_window=32_000)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"context_window": 999}, "1000"),
        ({"max_tokens": 999}, "1000"),
        ({"context_window": "big"}, "integer"),
        ({"contextwindow": 8_000}, "contextwindow"),
        ({"summarizer_context_window": 10}, "1000"),
        ({"max_compaction_attempts": 0}, "1"),
        ({"max_compaction_attempts": 11}, "10"),
        ({"summary_timeout_seconds": 0}, "0"),
        ({"summarizer": 7}, "summarizer"),
        ({"max_turns": 3}, "4"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    """A mistake is an error at start that names the setting and its bound."""
    with pytest.raises(ValidationError) as caught:
        SlidingWindow(**settings)
    assert complaint in str(caught.value)
    name = next(iter(settings))
    assert name in str(caught.value) or "context_window" in str(caught.value)


def test_settings_are_frozen() -> None:
    """A strategy may serve many agents at once: it cannot change."""
    settings = Threshold()
    with pytest.raises(ValidationError, match="frozen"):
        settings.context_window = 8_000


def test_a_strategy_needs_its_method() -> None:
    """The base class decides nothing."""
    with pytest.raises(TypeError, match="abstract"):
        Strategy()  # type: ignore[abstract]


# --- Threshold --------------------------------------------------------------------


async def test_threshold_leaves_a_small_request_alone() -> None:
    """Below the threshold, or without a history, nothing is decided."""
    llm = SimulatedLlm()
    small = context(small_talk(5), llm, tokens=3_199)
    assert await Threshold().compact(small) is None
    assert await Threshold().compact(context([], llm, tokens=9_999)) is None
    assert llm.calls == 0


@pytest.mark.parametrize(
    ("reason", "tokens"), [("tokens", 3_200), ("requested", 300), ("overflow", 300)]
)
async def test_threshold_summarizes_everything(reason: Reason, tokens: int) -> None:
    """At the threshold, or when asked, into one summary and the continuation."""
    llm = SimulatedLlm(summary_replies=["Short."])
    contents = small_talk(5, 100)
    compaction = await compact(Threshold(), contents, llm, tokens=tokens, reason=reason)
    assert compaction.stored.text == "Short."
    assert compaction.covered == frozenset(range(5))
    assert compaction.attempts == llm.summaries == 1
    assert names(compaction.contents) == ["[Previous", "[System:"]


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
async def test_more_attempts_only_while_over_the_threshold(max_attempts: int) -> None:
    """Each further attempt asks for half the length, up to the setting."""
    llm = SimulatedLlm(summary_replies=lambda request: "fact 4711. " * 1_000)
    # The live request and the fixed part leave no room for a summary of 200.
    contents = [*small_talk(4, 300)[:-1], user(words(1_100, "live"))]
    strategy = Threshold(max_compaction_attempts=max_attempts)
    compaction = await compact(
        strategy, contents, llm, tokens=4_000, fixed_tokens=1_780
    )
    assert llm.summaries == compaction.attempts == max_attempts
    budgets = [request.config.max_output_tokens for request in llm.requests]
    assert budgets == [400, 200, 100][:max_attempts]
    assert compaction.tokens <= 3_200


@pytest.mark.parametrize(
    ("reply", "fixed_tokens"),
    [("Short.", 2_300), (RuntimeError("down"), 1_700)],
    ids=["a shorter one would not help", "the summarizer is down"],
)
async def test_another_summary_is_not_asked_for(reply: Any, fixed_tokens: int) -> None:
    """Where it would not help, the request is shortened in another way."""
    llm = SimulatedLlm(summary_replies=lambda request: reply)
    contents = [*small_talk(4, 300)[:-1], user(words(1_100, "live"))]
    compaction = await compact(
        Threshold(), contents, llm, tokens=4_000, fixed_tokens=fixed_tokens
    )
    assert llm.summaries == compaction.attempts == 1
    assert compaction.stored.is_mechanical is isinstance(reply, Exception)
    assert compaction.tokens <= 3_200


async def test_threshold_summarizes_once_over_a_long_conversation() -> None:
    """The summary stays in place; what follows is only appended to it."""
    llm = SimulatedLlm(context_window=WINDOW)
    chat = guarded_chat(llm, Threshold(context_window=WINDOW))
    for number in range(12):
        await chat.say(words(250, f"turn{number}"))
    requests = agent_requests(llm)
    assert llm.rejections == 0
    assert llm.summaries in (1, 2)
    firsts = [number for number in range(12) if len(requests[number].contents) == 2]
    assert len(firsts) == 1
    for earlier, later in zip(
        requests[firsts[0] :], requests[firsts[0] + 1 :], strict=False
    ):
        assert later.contents[: len(earlier.contents)] == earlier.contents


# --- SlidingWindow ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_turns", "count", "kept_count"),
    [(20, 21, 7), (20, 41, 13), (4, 5, 3)],
    ids=["one too many", "30 percent", "at least 3"],
)
async def test_sliding_window_fires_beyond_its_turns(
    max_turns: int, count: int, kept_count: int
) -> None:
    """With more contents than `max_turns` about 30 % of them stay, word for word."""
    llm, contents = SimulatedLlm(), small_talk(count, 60)
    strategy, window_tokens = SlidingWindow(max_turns=max_turns), 100_000
    right = context(contents[-max_turns:], llm, window_tokens=window_tokens)
    assert await strategy.compact(right) is None
    compaction = await compact(strategy, contents, llm, window_tokens=window_tokens)
    kept = compaction.contents[1:]
    assert kept == contents[count - len(kept) :]
    assert len(kept) == pytest.approx(kept_count, abs=1)
    assert len(kept) >= 3
    assert len(compaction.covered) == count - len(kept)
    assert not compaction.stored.mark.has_continuation


async def test_sliding_window_halves_what_it_keeps() -> None:
    """Where 30 % would not fit, fewer are kept; one summary is paid for."""
    llm = SimulatedLlm()
    contents = small_talk(21, 450)
    compaction = await compact(SlidingWindow(max_turns=40), contents, llm, tokens=9_450)
    assert llm.summaries == 1
    kept = compaction.contents[1:]
    assert kept == contents[-3:]
    assert compaction.tokens <= 3_200


async def test_sliding_window_falls_back_to_a_full_summary() -> None:
    """Where not even three contents fit, everything is summarized."""
    llm = SimulatedLlm()
    contents = [*small_talk(9, 1_500), user("live request")]
    compaction = await compact(
        SlidingWindow(max_turns=40), contents, llm, tokens=13_500
    )
    assert llm.summaries == 1
    assert len(compaction.contents) == 2
    assert "`live request`" in texts(compaction.contents)[1]


async def test_sliding_window_keeps_little_once_tokens_ran_out() -> None:
    """What stays must not soon fill the window again."""
    llm = SimulatedLlm(summary_replies=["Short."])
    contents = small_talk(31, 150)
    strategy = SlidingWindow(max_turns=40)
    due = await compact(strategy, contents, llm, tokens=4_650)
    assert due.contents[1:] == contents[-3:]
    by_turns = await compact(
        SlidingWindow(max_turns=30),
        contents,
        SimulatedLlm(summary_replies=["Short."]),
        tokens=3_000,
    )
    assert by_turns.contents[1:] == contents[-9:]


@pytest.mark.parametrize(
    ("max_attempts", "attempts"), [(1, 1), (3, 2)], ids=["squeezed", "halved"]
)
async def test_sliding_window_fits_without_its_summarizer(
    max_attempts: int, attempts: int
) -> None:
    """A mechanical summary that is too large costs no second call to a model."""
    llm = SimulatedLlm(summary_replies=lambda request: RuntimeError("down"))
    strategy = SlidingWindow(max_compaction_attempts=max_attempts)
    compaction = await compact(
        strategy, small_talk(21, 140), llm, tokens=3_140, fixed_tokens=200
    )
    assert compaction.attempts == attempts
    assert compaction.tokens <= 3_200
    assert llm.calls == 1


async def test_sliding_window_has_nothing_left_to_summarize() -> None:
    """A history of three contents stays, even at the threshold, if it must."""
    llm = SimulatedLlm()
    contents = [*small_talk(1), call("ask"), call("wait")]
    open_calls = context(contents, llm)
    assert await SlidingWindow(max_turns=4).compact(open_calls) is None
    assert llm.calls == 0


async def test_sliding_window_never_splits_a_call_from_its_result() -> None:
    """The cut moves to where every kept result still has its call."""
    llm = SimulatedLlm(
        context_window=32_000,
        script=[scripted_call("look", step=number) for number in range(20)],
    )
    tool = queued_tool("look", [words(400, "found")])
    strategy = SlidingWindow(context_window=32_000, max_turns=6)
    chat = guarded_chat(llm, strategy, tools=[tool])
    events = await chat.say("Search everywhere.")
    assert answer_text(events) == "Done."
    assert llm.violations == 0
    assert llm.summaries >= 3


async def test_sliding_window_merges_its_own_summary() -> None:
    """The next summary is made of the previous one and of what came since."""
    llm = SimulatedLlm(context_window=32_000, summary_replies=["FIRST", "SECOND"])
    chat = guarded_chat(llm, SlidingWindow(context_window=32_000, max_turns=6))
    for number in range(6):
        await chat.say(words(400, f"turn{number}"))
    first, second = (request for request in llm.requests if request.is_summary)
    assert "turn0" in first.text
    assert "FIRST" in second.text
    assert "user: turn0" not in second.text
    assert "user: turn2" in second.text
    sent = texts(llm.requests[-1].contents)
    assert sent[0].startswith("[Previous conversation summary]\nSECOND")
    assert (await chat.state())["__context_guard_summary_agent"] == "SECOND"
