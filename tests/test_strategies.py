"""What the strategies decide, alone and behind a real Runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from pydantic import ValidationError

from contextguard_adk import (
    Compaction,
    CompactionContext,
    SlidingWindow,
    Strategy,
    Threshold,
)
from contextguard_adk.testing import SimulatedLlm
from tests.builders import call, model, user
from tests.chats import (
    DEMAND,
    SUMMARY,
    Changing,
    Doing,
    guarded_chat,
    seed,
    summary_requests,
    take_apart,
    text_of,
    without_head,
    words,
)

WINDOW = 4_000


async def context(
    contents: Sequence[types.Content],
    llm: SimulatedLlm | None = None,
    *,
    window_tokens: int = WINDOW,
    tokens: int | None = None,
    **known: Any,
) -> CompactionContext:
    """What a strategy is given when these contents are the whole history.

    Args:
        contents: The history.
        llm: The summarizer.
        window_tokens: The context window.
        tokens: The estimate of the request; None measures the contents.
        known: Further values of the context.
    """
    found: list[CompactionContext] = []

    def send(request: LlmRequest) -> None:
        request.contents = list(contents)

    async def act(real: CompactionContext) -> None:
        found.append(real)

    strategy = Doing(
        act=act,
        context_window=window_tokens,
        summarizer=llm or SimulatedLlm(),
        summarizer_context_window=1_000_000,
    )
    chat = guarded_chat(
        SimulatedLlm(),
        strategy,
        before=[Changing(send)],
        agent={"before_model_callback": lambda **_: LlmResponse(content=model("ok"))},
    )
    said = [content for content in contents if text_of(content)] or [user("Go on.")]
    *earlier, last = said
    await seed(chat, *earlier, state=DEMAND)
    await chat.say(last)
    fixed = {"config_heuristic_tokens": 0, "correction": 1.0, "reason": "tokens"}
    real = replace(found[0], **{**fixed, **known})
    return replace(real, tokens=real.measure(contents) if tokens is None else tokens)


async def compact(
    strategy: Strategy, contents: Sequence[types.Content], llm: Any, **settings: Any
) -> Compaction:
    """What a strategy decides where it has to decide something."""
    compaction = await strategy.compact(await context(contents, llm, **settings))
    assert compaction is not None
    return compaction


def names(contents: Sequence[types.Content]) -> list[str]:
    """The first word of each content."""
    return [(text_of(content).split() or [""])[0] for content in contents]


def small_talk(count: int, size_tokens: int = 1) -> list[types.Content]:
    """Alternating messages, the last of them the user's."""
    return [
        (user if (count - number) % 2 else model)(words(size_tokens, f"m{number}"))
        for number in range(count)
    ]


# --- Settings ---------------------------------------------------------------------


def test_max_tokens_is_another_name_of_the_context_window() -> None:
    """A window from a configuration may carry either name."""
    settings = Threshold.model_validate({"max_tokens": 32_000})
    assert settings == Threshold(context_window=32_000)
    assert settings.max_tokens == 32_000


def test_max_turns_is_another_name_of_max_messages() -> None:
    """The number may be given and read under either name, but given once."""
    settings = SlidingWindow.model_validate({"max_turns": 9})
    assert settings == SlidingWindow(max_messages=9)
    assert settings.max_turns == 9
    with pytest.raises(ValidationError, match="give one"):
        SlidingWindow.model_validate({"max_turns": 9, "max_messages": 9})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"context_window": 999}, "1000"),
        ({"contextwindow": 8_000}, "Did you mean .context_window."),
        ({"max_compaction_attempts": 11}, "10"),
        ({"summary_timeout_seconds": 0}, "0"),
        ({"summarizer": 7}, "BaseLlm"),
        ({"max_messages": 3}, "4"),
        ({"trigger": 999}, "a part of the window"),
        ({"preview_tokens": 99}, "a part of the window"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    """A mistake is an error at start that names the setting and its bound."""
    with pytest.raises(ValidationError, match=complaint) as caught:
        SlidingWindow(**settings)
    assert next(iter(settings)) in str(caught.value)


# --- Threshold --------------------------------------------------------------------


async def test_threshold_leaves_a_small_request_alone() -> None:
    """Below the threshold, or without a history, nothing is decided."""
    llm = SimulatedLlm()
    small = await context(small_talk(5), llm, tokens=3_199)
    assert await Threshold().compact(small) is None
    assert await Threshold().compact(await context([], llm, tokens=9_999)) is None
    assert llm.calls == 0


@pytest.mark.parametrize(
    ("reason", "tokens"), [("tokens", 3_200), ("requested", 300), ("overflow", 300)]
)
async def test_threshold_summarizes_everything(reason: str, tokens: int) -> None:
    """At the threshold, or when asked, into one summary and the continuation."""
    llm = SimulatedLlm(summary_replies=["Short enough."])
    contents = small_talk(5, 100)
    compaction = await compact(Threshold(), contents, llm, tokens=tokens, reason=reason)
    assert compaction.stored.text == "Short enough."
    assert compaction.covered == frozenset(range(5))
    assert compaction.attempts == llm.summaries == 1
    assert len(compaction.contents) == 1
    assert names(take_apart(compaction.contents)) == ["[Previous", "[System:"]


async def test_more_attempts_only_while_over_the_threshold() -> None:
    """Each further attempt asks for half the length, up to the setting."""
    llm = SimulatedLlm(summary_replies=lambda request: "fact 4711. " * 1_000)
    # The live request and the fixed part leave no room for a summary of 200.
    contents = [*small_talk(4, 300)[:-1], user(words(1_100, "live"))]
    compaction = await compact(
        Threshold(), contents, llm, tokens=4_000, config_heuristic_tokens=1_780
    )
    budgets = [request.config.max_output_tokens for request in llm.requests]
    assert budgets == [400, 200, 100]
    assert compaction.attempts == 3
    assert compaction.tokens <= 3_200


@pytest.mark.parametrize(
    ("reply", "fixed_tokens"),
    [("Short enough.", 2_300), (RuntimeError("down"), 1_700)],
    ids=["a shorter one would not help", "the summarizer is down"],
)
async def test_another_summary_is_not_asked_for(reply: Any, fixed_tokens: int) -> None:
    """Where it would not help, the request is shortened in another way."""
    llm = SimulatedLlm(summary_replies=lambda request: reply)
    contents = [*small_talk(4, 300)[:-1], user(words(1_100, "live"))]
    compaction = await compact(
        Threshold(), contents, llm, tokens=4_000, config_heuristic_tokens=fixed_tokens
    )
    assert llm.summaries == compaction.attempts == 1
    assert compaction.stored.is_mechanical is isinstance(reply, Exception)
    assert compaction.tokens <= 3_200


# --- SlidingWindow ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_messages", "count", "kept_count"),
    [(20, 41, 13), (4, 5, 3)],
    ids=["30 percent", "at least 3"],
)
async def test_sliding_window_fires_beyond_its_turns(
    max_messages: int, count: int, kept_count: int
) -> None:
    """With more contents than `max_messages` about 30 % of them stay, word for word."""
    llm, contents = SimulatedLlm(), small_talk(count, 60)
    strategy = SlidingWindow(max_messages=max_messages)
    enough = await context(contents[-max_messages:], llm, window_tokens=100_000)
    assert await strategy.compact(enough) is None
    compaction = await compact(strategy, contents, llm, window_tokens=100_000)
    kept = without_head(compaction.contents)
    assert kept == contents[count - len(kept) :]
    assert len(kept) == pytest.approx(kept_count, abs=1)
    assert len(compaction.covered) == count - len(kept)


@pytest.mark.parametrize(
    ("max_messages", "contents", "kept_count"),
    [
        pytest.param(40, small_talk(21, 450), 3, id="30 percent would not fit"),
        pytest.param(40, small_talk(31, 150), 3, id="tokens ran out"),
        pytest.param(30, small_talk(31, 100), 9, id="only turns ran out"),
        pytest.param(
            40, [*small_talk(9, 1_500), user("live request")], 0, id="not even 3 fit"
        ),
    ],
)
async def test_sliding_window_keeps_what_leaves_room(
    max_messages: int, contents: list[types.Content], kept_count: int
) -> None:
    """What stays must not soon fill the window again; one summary is paid for."""
    llm = SimulatedLlm(summary_replies=["Short enough."])
    compaction = await compact(SlidingWindow(max_messages=max_messages), contents, llm)
    assert llm.summaries == 1
    assert compaction.tokens <= 3_200
    if kept_count:
        assert without_head(compaction.contents) == contents[-kept_count:]
    else:
        assert "`live request`" in text_of(take_apart(compaction.contents)[1])


async def test_sliding_window_has_nothing_left_to_summarize() -> None:
    """A history of three contents stays, even at the threshold, if it must."""
    llm = SimulatedLlm()
    contents = [*small_talk(1), call("ask"), call("wait")]
    open_calls = await context(contents, llm)
    assert await SlidingWindow(max_messages=4).compact(open_calls) is None
    assert llm.calls == 0


async def test_sliding_window_merges_its_own_summary() -> None:
    """The next summary is made of the previous one and of what came since."""
    llm = SimulatedLlm(
        context_window=32_000, summary_replies=["FIRST one.", "SECOND one."]
    )
    chat = guarded_chat(llm, SlidingWindow(context_window=32_000, max_messages=6))
    for number in range(6):
        await chat.say(words(400, f"turn{number}"))
    first, second = summary_requests(llm)
    assert "turn0" in first.text
    assert "FIRST" in second.text
    assert "user:\n  turn0" not in second.text
    assert "user:\n  turn2" in second.text
    assert (await chat.state())[SUMMARY] == "SECOND one."
