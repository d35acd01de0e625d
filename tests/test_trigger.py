"""From where on a history is compacted, where that is set: `trigger`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from google.adk.sessions import DatabaseSessionService

from contextguard_adk import (
    CallRecord,
    CompactionContext,
    CompactionRecord,
    Costs,
    SlidingWindow,
    Strategy,
    Threshold,
)
from contextguard_adk._measuring.budgets import plan_budgets
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests.builders import Chat, answer_text, model, queued_tool, user
from tests.chats import (
    KEY,
    Doing,
    agent_requests,
    guarded_chat,
    seed,
    summary_requests,
    words,
)

WINDOW = 200_000
FULL = 180_000
LEAST = 32_000


def make_llm(**settings: Any) -> SimulatedLlm:
    """A model of a large window that counts as is estimated."""
    defaults = {"context_window": WINDOW, "token_ratio": 1.0}
    settings.setdefault("summary_replies", lambda _: words(400, "SUMMARY"))
    return SimulatedLlm(**{**defaults, **settings})


def open_chat(
    llm: SimulatedLlm,
    trigger: Any,
    *,
    kind: type[Strategy] = Threshold,
    strategy: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[Chat, list[CallRecord], list[CompactionRecord]]:
    """A chat, with what its listeners hear."""
    calls: list[CallRecord] = []
    compactions: list[CompactionRecord] = []
    listeners = {"on_call": calls.append, "on_compaction": compactions.append}
    guard = {**listeners, **settings.pop("guard", {})}
    made = {"context_window": WINDOW, "trigger": trigger, **(strategy or {})}
    chat = guarded_chat(llm, kind.model_validate(made), guard=guard, **settings)
    return chat, calls, compactions


async def talk(chat: Chat, count: int, tokens: int = 4_000) -> None:
    """Has turns of so many tokens."""
    for number in range(count):
        assert answer_text(await chat.say(words(tokens, f"turn-{number}")))


# --- Settings ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trigger", "due_tokens", "summary_tokens", "working_tokens"),
    [
        (None, FULL, 10_000, WINDOW),
        (40_000, 40_000, 5_000, 50_000),
        (0.2, 40_000, 5_000, 50_000),
        ("auto", LEAST, 4_000, 40_000),
        (170_000, 170_000, 10_000, 190_000),
        (190_000, FULL, 10_000, WINDOW),
        (1.0, FULL, 10_000, WINDOW),
    ],
)
async def test_sizes_follow_from_the_trigger(
    trigger: Any, due_tokens: int, summary_tokens: int, working_tokens: int
) -> None:
    """The summary's budget is an eighth; parts of the window are of 5/4 of it. Above
    the usual threshold a trigger says nothing."""
    seen: list[CompactionContext] = []

    async def act(context: CompactionContext) -> None:
        seen.append(context)

    settings = {"act": act, "trigger": trigger, "context_window": WINDOW}
    chat = guarded_chat(make_llm(), Doing.model_validate(settings))
    await chat.say("Hello.")
    budgets = seen[0].budgets
    assert (budgets.threshold_tokens, budgets.full_tokens) == (due_tokens, FULL)
    assert (budgets.summary_tokens, budgets.working_tokens) == (
        summary_tokens,
        working_tokens,
    )
    assert seen[0].keep_tokens == working_tokens // 10


# --- Tokens and parts -------------------------------------------------------------


@pytest.mark.parametrize("kind", [Threshold, SlidingWindow])
@pytest.mark.parametrize("trigger", [40_000, 0.2])
async def test_history_is_compacted_at_the_trigger(
    kind: type[Strategy], trigger: Any
) -> None:
    """Not before; the request is small then, and so is the summary."""
    llm = make_llm()
    chat, calls, compactions = open_chat(llm, trigger, kind=kind)
    while not compactions:
        assert len(calls) < 16
        assert all(record.estimated_tokens < 40_000 for record in calls)
        await talk(chat, 1)
    [compaction] = compactions
    assert 40_000 <= compaction.tokens_before < 45_000
    assert compaction.tokens_after < 20_000
    [asked] = summary_requests(llm)
    assert asked.config.max_output_tokens == 5_000
    assert llm.rejections == 0


@pytest.mark.parametrize("fixed_tokens", [28_000, 40_000])
async def test_a_long_instruction_above_the_trigger_neither_loops_nor_fails(
    fixed_tokens: int,
) -> None:
    """No summary is paid for that makes little room; the window stays out of reach."""
    llm = make_llm()
    agent = {"instruction": words(fixed_tokens)}
    chat, calls, compactions = open_chat(llm, LEAST, agent=agent)
    await talk(chat, 24, 5_000)
    assert llm.rejections == 0
    assert 1 <= len(compactions) <= 200_000 / fixed_tokens
    assert all(each.tokens_before >= 2 * fixed_tokens for each in compactions)
    assert all(each.tokens_after < 0.75 * each.tokens_before for each in compactions)
    # The first one comes before anything is counted, by an estimate of 1.5.
    assert max(record.estimated_tokens for record in calls) < 100_000


async def test_what_a_compaction_leaves_does_not_set_off_the_next_one() -> None:
    """The next one comes at twice that: a large request stays word for word."""
    llm = make_llm(context_window=1_000_000)
    script: list[Reply] = [call("look", step=n) for n in range(30)]
    llm.script = [*script, "Done."]
    tools = [queued_tool("look", [words(2_000)])]
    chat, _, compactions = open_chat(
        llm,
        LEAST,
        strategy={"context_window": 1_000_000},
        agent={"tools": tools},
    )
    live = words(60_000, "LIVE")
    await seed(chat, user("Earlier."), model(words(20_000)))
    assert answer_text(await chat.say(live)) == "Done."
    assert compactions
    assert all(live in request.text for request in agent_requests(llm))
    left = compactions[0].tokens_after
    assert all(each.tokens_before >= 1.9 * left for each in compactions[1:])
    assert len(compactions) <= 2


async def test_a_failing_summarizer_below_the_window_is_asked_again_later() -> None:
    """The request goes out as it is, and is not asked about at every call."""
    llm = make_llm(summary_replies=lambda _: RuntimeError("down"))
    chat, _, compactions = open_chat(llm, LEAST)
    await talk(chat, 7)
    assert llm.summaries == 0
    await talk(chat, 1)
    asked = llm.summaries
    assert asked >= 1
    assert not compactions
    assert "turn-0" in llm.requests[-1].text
    await seed(chat, user("A little."))
    await chat.say("A little more.")
    assert llm.summaries == asked
    llm.summary_replies = lambda _: "A summary."
    await talk(chat, 2)
    assert len(compactions) == 1
    assert llm.rejections == 0


async def test_a_failing_summarizer_is_not_paid_at_every_step() -> None:
    """Far below the window it is asked again only when the request has grown."""
    llm = make_llm(summary_replies=lambda _: "I'm sorry, I can't help with that.")
    chat, _, compactions = open_chat(llm, 20_000)
    await talk(chat, 30)
    # By an eighth: from 20,000 to 120,000 tokens that is 15 times, two calls for each.
    assert 2 <= llm.summaries <= 30
    assert not compactions
    assert llm.rejections == 0


async def test_a_trigger_does_not_climb() -> None:
    """What a compaction leaves puts off the next one, and widens nothing."""
    llm = make_llm(context_window=1_000_000)
    script: list[Reply] = [call("look", step=n) for n in range(60)]
    llm.script = [*script, "Done."]
    tools = [queued_tool("look", [words(1_500)])]
    settings = {"context_window": 1_000_000, "keep": 0.5}
    chat, _, compactions = open_chat(
        llm, 20_000, strategy=settings, agent={"tools": tools}
    )
    assert answer_text(await chat.say("Look.")) == "Done."
    assert len(compactions) >= 5
    assert max(each.tokens_before for each in compactions) < 40_000


@pytest.mark.parametrize("size", [10**400, 2**60, -1])
async def test_stored_sizes_out_of_bounds_are_ignored(size: int) -> None:
    """Session state is untrusted: the record counts as absent, and nothing fails."""
    chat, _, compactions = open_chat(make_llm(), "auto")
    await talk(chat, 9)
    assert len(compactions) == 1
    key = KEY.format("record")
    text = (await chat.state())[key]
    assert '"left_tokens":' in text
    forged = re.sub(r'"left_tokens":\d+', f'"left_tokens":{size}', text)
    await seed(chat, user("More."), state={key: forged})
    await talk(chat, 1)
    assert len(compactions) == 2


async def test_recovery_works_with_a_trigger() -> None:
    """A provider that takes far less than is known refuses once."""
    llm = make_llm(context_window=24_000)
    chat, _, compactions = open_chat(llm, LEAST)
    await talk(chat, 8)
    assert llm.rejections == 1
    assert compactions[0].reason == "overflow"
    assert all(each.reason == "tokens" for each in compactions[1:])


# --- "auto" -----------------------------------------------------------------------


async def test_auto_acts_at_its_least() -> None:
    """Whatever the model costs, and whether or not a prompt cache serves it."""
    dear = {"simulated": Costs(input=1, output=400, cached_input=0.1)}
    for prices, has_cache in (({}, False), (dear, True)):
        chat, calls, compactions = open_chat(
            make_llm(prompt_cache=has_cache), "auto", guard={"prices": prices}
        )
        await talk(chat, 20)
        assert len(compactions) >= 2
        assert all(LEAST <= c.tokens_before < LEAST + 6_000 for c in compactions)
        assert {record.threshold_tokens for record in calls} == {LEAST}


@pytest.mark.parametrize(
    ("window", "full"), [(1_000_000, 980_000), (80_000, 64_000)], ids=["wide", "narrow"]
)
async def test_auto_is_twice_what_was_left_and_never_above_the_threshold(
    window: int, full: int
) -> None:
    """The current request is quoted whole, so a long one is left by each compaction."""
    llm = make_llm(context_window=window)
    llm.script = [*(call("look", step=n) for n in range(20)), "Done."]
    chat, calls, compactions = open_chat(
        llm,
        "auto",
        strategy={"context_window": window},
        agent={"tools": [queued_tool("look", [words(2_000)])]},
    )
    await seed(chat, user("Earlier."), model(words(12_000)))
    assert answer_text(await chat.say(words(36_000, "LIVE"))) == "Done."
    left = compactions[0].tokens_after
    due = [record.threshold_tokens for record in calls][1]
    assert due == pytest.approx(min(full, 2 * left), rel=0.1)
    assert all(record.threshold_tokens <= full for record in calls)
    assert llm.rejections == 0


async def test_auto_survives_a_restart(tmp_path: Path) -> None:
    """What was left is stored with the summary."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"
    due: list[int] = []
    for text in (words(24_000), "Go on."):
        service = DatabaseSessionService(url)
        chat, calls, _ = open_chat(make_llm(), "auto", session_service=service)
        if not due:
            await seed(chat, user("Earlier."), model(words(12_000)))
            await chat.say(text)
            text = "Go on."
        await chat.say(text)
        due.append(calls[-1].threshold_tokens)
        await service.close()
    assert due[0] == due[1] > LEAST


async def test_a_trigger_that_an_earlier_version_stored_is_ignored() -> None:
    """It raises nothing, and moves nothing; the summary beside it stays."""
    chat, calls, compactions = open_chat(make_llm(), "auto")
    await talk(chat, 9)
    key = KEY.format("record")
    text = (await chat.state())[key]
    old = text.replace('"left_tokens":', '"trigger_tokens":90000,"left_tokens":')
    assert old != text
    await seed(chat, user("More."), state={key: old})
    await talk(chat, 1)
    assert calls[-1].threshold_tokens == LEAST
    assert len(compactions) == 1


def test_a_trigger_has_no_part_in_small_windows() -> None:
    """There the usual threshold is the lower one."""
    assert plan_budgets(8_000, 0, LEAST) == plan_budgets(8_000)
