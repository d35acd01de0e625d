"""From where on a history is compacted, where that is set: `trigger`."""

from __future__ import annotations

import itertools
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
from contextguard_adk._history.stored import AgentRecord
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


async def stored(chat: Chat) -> dict[str, Any]:
    """What is stored with the summary."""
    text = (await chat.state())[KEY.format("record")]
    summary = AgentRecord.model_validate_json(text).summary
    assert summary
    return summary.model_dump()


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
    forged = re.sub(r'"(left|trigger)_tokens":\d+', rf'"\1_tokens":{size}', text)
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


# --- By cost ----------------------------------------------------------------------


async def find_auto(
    llm: SimulatedLlm,
    turns: int = 12,
    tokens: int = 4_000,
    **settings: Any,
) -> tuple[int, list[CallRecord]]:
    """The trigger that is stored after some turns, and the calls."""
    chat, calls, compactions = open_chat(llm, "auto", **settings)
    await talk(chat, turns, tokens)
    assert compactions
    return (await stored(chat))["trigger_tokens"], calls


async def test_auto_begins_at_its_least_and_stays_within_the_window() -> None:
    """It changes at a compaction alone."""
    chat, calls, compactions = open_chat(make_llm(prompt_cache=True), "auto")
    await talk(chat, 20)
    chosen = (await stored(chat))["trigger_tokens"]
    assert compactions[0].tokens_before >= LEAST
    assert compactions[0].tokens_before < LEAST + 6_000
    assert LEAST <= chosen <= FULL
    thresholds = [record.threshold_tokens for record in calls]
    changes = sum(a != b for a, b in itertools.pairwise(thresholds))
    assert changes <= len(compactions)


async def test_auto_follows_prices_and_the_prompt_cache() -> None:
    """Output that is dear asks for fewer summaries; without a cache each call pays for
    all that stands in the request."""
    cheap = {"simulated": Costs(input=1, output=1, cached_input=0.1)}
    dear = {"simulated": Costs(input=1, output=400, cached_input=0.1)}
    found = {}
    for name, prices, has_cache in (
        ("cheap", cheap, True),
        ("dear", dear, True),
        ("no cache", dear, False),
        ("usual", {}, True),
    ):
        llm = make_llm(prompt_cache=has_cache)
        found[name], _ = await find_auto(llm, guard={"prices": prices})
    assert found["cheap"] < found["dear"]
    assert found["no cache"] < found["dear"]
    assert found["cheap"] <= found["usual"] <= found["dear"]


async def test_auto_reads_the_prices_of_the_table() -> None:
    """Where the setting names none for the model."""
    found = []
    for name, prices in (
        ("gpt-4o", {}),
        ("other", {"other": Costs(input=2.5, output=10, cached_input=1.25)}),
        ("other", {"other": Costs(input=2.5, output=10, cached_input=0.01)}),
    ):
        llm = make_llm(model=name, prompt_cache=True)
        trigger, _ = await find_auto(llm, guard={"prices": prices})
        found.append(trigger)
    assert found[0] == found[1] != found[2]


async def test_auto_survives_a_restart(tmp_path: Path) -> None:
    """What was chosen is stored with the summary."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"
    dear = {"simulated": Costs(input=1, output=400, cached_input=0.1)}
    chosen = []
    for turns in (12, 1):
        service = DatabaseSessionService(url)
        llm = make_llm(prompt_cache=True)
        settings: dict[str, Any] = {"guard": {"prices": dear}}
        chat, calls, _ = open_chat(llm, "auto", session_service=service, **settings)
        await talk(chat, turns, 4_000 if turns > 1 else 10)
        chosen.append((calls[-1].threshold_tokens, await stored(chat)))
        await service.close()
    assert chosen[0] == chosen[1]
    assert chosen[0][0] == chosen[0][1]["trigger_tokens"] > LEAST


def test_a_trigger_has_no_part_in_small_windows() -> None:
    """There the usual threshold is the lower one."""
    assert plan_budgets(8_000, 0, LEAST) == plan_budgets(8_000)
