"""The documented simulations, and what a compaction must not lose."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from google.genai import types

from contextguard_adk import ContextGuardPlugin
from contextguard_adk._history.pairs import content_text
from contextguard_adk._measuring.budgets import summary_budget_tokens
from contextguard_adk._measuring.tokens import estimate_contents_tokens
from contextguard_adk._summarizing.ledger import MAX_LEDGER_BYTES
from contextguard_adk.strategies import SlidingWindow, Strategy, Threshold
from contextguard_adk.testing import SimulatedLlm
from tests.builders import (
    AgentCall,
    Chat,
    Conversation,
    RequestTap,
    ToolUse,
    Turn,
    call,
    guarded_agent,
    play,
    response,
    user,
)
from tests.chats import slow, take_apart, without_head
from tests.scenarios import Kind, Writer

# What a model writes of a storm of tool results.
TERSE_SUMMARY = """\
## Current State
All rows were fetched and checked.

## Key Information
Shard 3 is behind by 41 s; trace 5e2c0a91 shows the slow query.

## Context & Decisions
The user wants a report before the review; nothing may be deleted.

## Exact Next Steps
Compare shard 3 with shard 2, then write the report.

## Language and Tools
English; fetch_rows."""


@pytest.fixture(autouse=True)
def _lean_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps ADK from copying every request into its spans, which takes longer than
    the rest."""
    monkeypatch.setenv("ADK_TELEMETRY_SCHEMA_VERSION_OPT_IN", "1")
    monkeypatch.setenv("ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS", "false")


async def ask_after(
    history: Sequence[types.Content], strategy: Strategy, llm: SimulatedLlm
) -> RequestTap:
    """Asks one more question after this history; returns what the guard was given."""
    tap = RequestTap()
    chat = Chat(guarded_agent(llm), [tap, ContextGuardPlugin(default=strategy)])
    await chat.tell(history)
    await chat.say("Go on.")
    return tap


both_strategies = pytest.mark.parametrize("strategy", [Threshold, SlidingWindow])


@both_strategies
async def test_a_tool_storm_is_removed(strategy: type[Strategy]) -> None:
    """One compaction removes nearly all of a storm of tool results.

    The summary that takes their place is not counted.
    """
    writer = Writer("storm", 8_000, 1.0)
    history = [user("Fetch all rows and check them. " + writer.text("prose", 0.02))]
    for number in range(20):
        text = writer.text("log", 1.0)[:2_000]
        history += [call("fetch_rows", page=number), response("fetch_rows", text)]
    llm = SimulatedLlm(context_window=8_000, summary_replies=lambda _: TERSE_SUMMARY)
    settings = {"max_messages": 10} if strategy is SlidingWindow else {}
    guard = strategy.model_validate({"context_window": 8_000, **settings})
    tap = await ask_after(history, guard, llm)
    sent = [record for record in llm.requests if not record.is_summary][-1].contents
    if strategy is SlidingWindow:
        # A pair that is kept takes 5 % alone: what counts is what has left.
        sent = without_head(sent)
    assert not llm.rejections
    assert 1 <= llm.summaries <= 3
    left = estimate_contents_tokens(sent) / estimate_contents_tokens(tap.contents[0])
    assert left <= 0.051


@both_strategies
@pytest.mark.parametrize(
    "kind",
    ["log", *slow("json", "code")],
)
async def test_a_tool_result_of_750k_characters_fits(
    kind: Kind, strategy: type[Strategy]
) -> None:
    """A result many times the window is summarized in requests that all fit, and the
    user's message survives it."""
    giant = Writer("giant", 750_000, 4.0).text(kind, 1.0)[:750_000]
    assert len(giant) == 750_000
    request = "Which of the pods restarted after 06:12? Name each of them."
    steps = [[ToolUse("dump", giant)], [ToolUse("count", 3)]]
    llm = SimulatedLlm(context_window=32_000, summary_replies=lambda _: TERSE_SUMMARY)
    played = await play(
        Conversation([Turn(request, steps, "Three of them."), Turn("Thanks.")]),
        strategy(context_window=32_000, preview_tokens=None),
        llm,
    )
    assert played.answers == ["Three of them.", "Done."]
    assert not llm.rejections
    assert not llm.violations
    assert sum(agent_call.is_compacted for agent_call in played.calls) == 1
    assert all(request in c.record.text for c in played.calls if c.turn.text == request)


STATIC_RULE = "Static rule: you never delete anything."
DYNAMIC_RULE = "Dynamic rule: answer in metric units."


def is_rule(content: types.Content) -> bool:
    """Tells whether a content is the dynamic instruction."""
    return any(DYNAMIC_RULE in (part.text or "") for part in content.parts or [])


@pytest.mark.parametrize(
    ("strategy", "has_ids"), [(Threshold, False), (SlidingWindow, True)]
)
async def test_compaction_in_a_tool_loop_keeps_moving_instructions(
    strategy: type[Strategy], has_ids: bool
) -> None:
    """Every request has both instructions, once, and all history that no summary
    covers, in order; no summary swallows an instruction."""
    writer = Writer("loop", 8_000, None)
    turns = []
    for _ in range(3):
        steps = [[ToolUse("fetch", writer.result("log", 0.12))] for _ in range(8)]
        turns.append(Turn(writer.ask(0.02), steps, writer.text("prose", 0.02)))
    llm = SimulatedLlm(context_window=8_000, call_ids=has_ids)
    played = await play(
        Conversation(turns, instruction=DYNAMIC_RULE),
        strategy(context_window=8_000),
        llm,
        agent={"static_instruction": STATIC_RULE},
    )
    assert played.answers == [turn.answer for turn in turns]
    assert not llm.rejections
    assert not llm.violations
    covered_before = 0
    for agent_call in played.calls:
        label = f"call {agent_call.number}"
        assert STATIC_RULE in agent_call.record.system_instruction, label
        assert sum(map(is_rule, agent_call.contents)) == 1, label
        covered = _check_uncovered(agent_call, label)
        assert (covered > covered_before) is agent_call.is_compacted, label
        covered_before = covered
    assert not any(r.is_summary and DYNAMIC_RULE in r.text for r in llm.requests)


def _check_uncovered(agent_call: AgentCall, label: str) -> int:
    """Checks what stands beside the summary; returns how much the summary covers."""
    sent = without_head(agent_call.contents)
    covered = len(agent_call.original) - len(sent)
    expected, skipped = [], 0
    for content in agent_call.original:
        if is_rule(content) or skipped == covered:
            expected.append(content)
        else:
            skipped += 1
    assert sent == expected, label
    return covered


FACT = re.compile(r"KX-[0-9a-f]{10}")


def find_facts(contents: Sequence[types.Content]) -> dict[str, None]:
    """The facts that stand anywhere in some contents, in order."""
    texts = (content.model_dump_json() for content in contents)
    return dict.fromkeys(FACT.findall("".join(texts)))


@both_strategies
async def test_facts_reach_the_summarizer_and_the_next_request(
    strategy: type[Strategy],
) -> None:
    """Every fact in a covered tool result stands in a summarizer's prompt and, where
    the summarizer keeps it, in the agent's next request."""
    writer, turns = Writer("facts", 32_000, None), []
    for number in range(6):
        steps = []
        for step in range(4):
            half = writer.text("code" if step == 1 else "log", 0.06)
            key = (4 * number + step + 1) * 7_919_777_777 % 16**10
            fact = f"\nrelease key KX-{key:010x} is valid\n"
            steps.append([ToolUse("fetch", half + fact + half)])
        turns.append(Turn(writer.ask(0.01), steps, "Noted."))
    llm = SimulatedLlm(
        context_window=32_000,
        summary_replies=lambda request: (
            "Keys: " + ", ".join(find_facts(request.contents[-1:]))
        ),
    )
    played = await play(Conversation(turns), strategy(context_window=32_000), llm)
    assert not llm.rejections
    compacted = [c for c in played.calls if c.is_compacted]
    assert len(compacted) >= 3
    assert all(agent_call.summary_count <= 3 for agent_call in compacted)
    prompts = [record for record in llm.requests if record.is_summary]
    shown = find_facts([content for record in prompts for content in record.contents])
    for agent_call in played.calls:
        sent = agent_call.contents
        known = find_facts(agent_call.original).keys()
        covered = known - find_facts(without_head(sent)).keys()
        label = f"call {agent_call.number}"
        assert covered <= shown.keys(), label
        assert known <= find_facts(sent).keys(), label


LEDGER_HEADING = "[The user's messages up to here"


def read_ledger(contents: Sequence[types.Content]) -> list[str]:
    """The excerpts beside a summary."""
    listed = (
        content_text(take_apart(contents)[0]).partition(LEDGER_HEADING)[2].split("\n")
    )
    return [line[2:] for line in listed if line.startswith("- ")]


@both_strategies
@pytest.mark.parametrize(
    ("turns", "message_share", "answer_share"),
    [
        pytest.param(14, 0.004, 0.15, id="short"),
        pytest.param(14, 0.05, 0.12, id="long"),
        pytest.param(60, 0.02, 0.03, id="many", marks=pytest.mark.slow),
    ],
)
async def test_user_messages_keep_an_excerpt_beside_the_summary(
    turns: int, message_share: float, answer_share: float, strategy: type[Strategy]
) -> None:
    """Every covered message of the user stands beside the summary, whole where it is
    short, within the ledger's budget, whatever the summarizer wrote."""
    writer = Writer("ledger", 8_000, None)
    said = [writer.talk(message_share, answer_share) for _ in range(turns)]
    llm = SimulatedLlm(context_window=8_000, summary_replies=lambda _: TERSE_SUMMARY)
    played = await play(Conversation(said), strategy(context_window=8_000), llm)
    assert not llm.rejections
    most_bytes = min(MAX_LEDGER_BYTES, summary_budget_tokens(8_000) * 4)
    compacted = [c for c in played.calls if c.is_compacted]
    assert len(compacted) >= 2
    for agent_call in compacted:
        label = f"call {agent_call.number}"
        excerpts = read_ledger(agent_call.contents)
        beside = without_head(agent_call.contents)
        kept = {part.text for content in beside for part in content.parts or []}
        texts = [turn.text for turn in said[: agent_call.number]]
        covered = [" ".join(text.split()) for text in texts if text not in kept]
        length = None if message_share < 0.01 else 12
        cut = [excerpt[:length] for excerpt in excerpts]
        assert cut == [text[:length] for text in covered], label
        assert sum(len(line.encode()) for line in excerpts) <= most_bytes, label
