"""From where on a history is compacted, with and without `trigger`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contextguard_adk import (
    CallRecord,
    CompactionRecord,
    Pipeline,
    SlidingWindow,
    Threshold,
)
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import SimulatedLlm, call
from tests.builders import Chat, answer_text, model, queued_tool, user
from tests.chats import (
    DEMAND,
    EXACT,
    agent_requests,
    guarded_chat,
    seed,
    summary_requests,
    words,
)

WINDOW = 200_000
LEAST = 32_000
TRIGGER = 8_000


def make_llm(**settings: Any) -> SimulatedLlm:
    """A model of a large window that counts as is estimated."""
    defaults = {"context_window": WINDOW, "token_ratio": 1.0}
    settings.setdefault("summary_replies", lambda _: words(400, "SUMMARY"))
    return SimulatedLlm(**{**defaults, **settings})


def open_chat(
    llm: SimulatedLlm,
    trigger: Any = None,
    *,
    kind: type[Strategy] = Threshold,
    strategy: dict[str, Any] | None = None,
    looks: tuple[int, int] = (0, 0),
    **settings: Any,
) -> tuple[Chat, list[CallRecord], list[CompactionRecord]]:
    """A chat, with what its listeners hear."""
    calls = list[CallRecord]()
    compactions = list[CompactionRecord]()
    listeners = {"on_call": calls.append, "on_compaction": compactions.append}
    guard = {**listeners, **settings.pop("guard", {})}
    if looks[0]:
        llm.script = [*(call("look", step=n) for n in range(looks[0])), "Done."]
        settings["agent"] = {"tools": [queued_tool("look", [words(looks[1])])]}
    made = {"context_window": llm.context_window, "trigger": trigger}
    built = kind.model_validate({**made, **(strategy or {})})
    return guarded_chat(llm, built, guard=guard, **settings), calls, compactions


async def talk(chat: Chat, count: int, tokens: int = 1_000) -> None:
    """Has turns of so many tokens."""
    for number in range(count):
        assert answer_text(await chat.say(words(tokens, f"turn-{number}")))


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        (Threshold, "trigger"),
        (SlidingWindow, "trigger"),
        (Pipeline, "compression_threshold"),
    ],
)
async def test_a_history_is_compacted_at_the_token(
    kind: type[Strategy], setting: str, beyond: int
) -> None:
    """At the size that is set, and not one token below it."""
    size = 0
    for _ in range(2):  # The first run finds out how large the request is.
        tokens = size + beyond
        value = tokens if setting == "trigger" else (tokens - 0.5) / 10_000
        llm = make_llm(context_window=10_000)
        settings = {setting: value} if size else {}
        chat, calls, compactions = open_chat(llm, kind=kind, strategy=settings)
        told = [user(words(500)), model(words(500))] * 6
        await seed(chat, *told, state=EXACT)
        await chat.say("Go on.")
        size = size or calls[0].estimated_tokens

    assert len(compactions) == (0 if beyond else 1)


@pytest.mark.parametrize(
    ("window", "trigger", "due_tokens", "summary_tokens"),
    [
        (WINDOW, None, 180_000, 10_000),
        (WINDOW, 40_000, 40_000, 5_000),
        (WINDOW, 0.2, 40_000, 5_000),
        (WINDOW, "auto", LEAST, 4_000),
        (WINDOW, 190_000, 180_000, 10_000),
        (8_000, "auto", 6_400, 800),
    ],
)
async def test_sizes_follow_from_the_trigger(
    window: int, trigger: Any, due_tokens: int, summary_tokens: int
) -> None:
    """The summary's budget is an eighth, where no words of the user stand beside it."""
    llm = make_llm(context_window=window)
    chat, calls, _ = open_chat(llm, trigger, strategy={"user_messages": 0})
    await seed(chat, user("The task."), model(words(4_000)), state=DEMAND)
    await chat.say("Hello.")
    assert calls[0].threshold_tokens == due_tokens
    [asked] = summary_requests(llm)
    assert asked.config.max_output_tokens == summary_tokens


async def test_a_long_instruction_above_the_trigger_neither_loops_nor_fails() -> None:
    """No summary is paid for that makes little room; the window stays out of reach."""
    llm = make_llm()
    fixed_tokens = 10_000
    agent = {"instruction": words(fixed_tokens)}
    chat, calls, compactions = open_chat(llm, TRIGGER, agent=agent)
    await talk(chat, 16, 1_500)

    assert llm.rejections == 0
    assert 1 <= len(compactions) <= 5
    assert all(each.tokens_before >= 2 * fixed_tokens for each in compactions)
    assert all(each.tokens_after < 0.75 * each.tokens_before for each in compactions)
    # The first one comes before anything is counted, by an estimate of 1.5.
    assert max(record.estimated_tokens for record in calls) < 25_000


async def test_what_a_compaction_leaves_does_not_set_off_the_next_one() -> None:
    """The next one comes at twice that: a large request stays word for word."""
    llm = make_llm(context_window=1_000_000)
    chat, _, compactions = open_chat(llm, TRIGGER, looks=(15, 1_000))
    live = words(15_000, "LIVE")
    await seed(chat, user("Earlier."), model(words(5_000)))
    assert answer_text(await chat.say(live)) == "Done."
    assert 1 <= len(compactions) <= 2
    assert all(live in request.text for request in agent_requests(llm))

    left = compactions[0].tokens_after
    assert all(each.tokens_before >= 1.9 * left for each in compactions[1:])


async def test_a_failing_summarizer_below_the_window_is_asked_again_later() -> None:
    """The request goes out as it is, and is not asked about at every call."""
    llm = make_llm(summary_replies=lambda _: RuntimeError("down"))
    chat, _, compactions = open_chat(llm, TRIGGER)
    await talk(chat, 7)
    assert llm.summaries == 0

    await talk(chat, 1)
    asked = llm.summaries
    assert asked >= 1
    assert not compactions
    assert "turn-0" in llm.requests[-1].text

    await chat.say("A little more.")
    assert llm.summaries == asked

    llm.summary_replies = lambda _: "A summary."
    await talk(chat, 2)
    assert len(compactions) == 1
    assert llm.rejections == 0


async def test_auto_survives_a_restart(tmp_path: Path) -> None:
    """What was left is stored with the summary."""
    from google.adk.sessions import DatabaseSessionService

    url = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"
    due: list[int] = []
    for is_new in (True, False):
        service = DatabaseSessionService(url)
        chat, calls, _ = open_chat(make_llm(), "auto", session_service=service)
        if is_new:
            await seed(chat, user("Earlier."), model(words(12_000)))
            await chat.say(words(24_000))
        await chat.say("Go on.")
        due.append(calls[-1].threshold_tokens)
        await service.close()
    assert due[0] == due[1] > LEAST
