"""The documented simulations, and what a compaction must not lose."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk import ContextGuardPlugin
from contextguard_adk.measuring.budgets import summary_budget_tokens, threshold_tokens
from contextguard_adk.measuring.tokens import estimate_contents_tokens
from contextguard_adk.strategies import SlidingWindow, Strategy, Threshold
from contextguard_adk.summarizing.ledger import MAX_LEDGER_BYTES
from contextguard_adk.testing import SimulatedLlm
from tests.builders import (
    AgentCall,
    Chat,
    Conversation,
    KeptSessions,
    RequestTap,
    ToolUse,
    Turn,
    call,
    event,
    guarded_agent,
    model,
    play,
    response,
    user,
)
from tests.scenarios import Kind, Writer, kubernetes, mixed

SUMMARY_BEGIN = "[Previous conversation summary]"
CONTINUATION_BEGIN = "[System: The conversation was compacted"

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


def list_contents(conversation: Conversation) -> list[types.Content]:
    """The contents that a conversation without parallel calls leaves in a session."""
    contents = []
    for turn in conversation.turns:
        contents.append(user(turn.text))
        for (use,) in turn.steps:
            call_id = f"adk-{len(contents)}"  # ADK gives every call one.
            contents.append(call(use.tool, call_id, **use.args))
            contents.append(response(use.tool, use.result, call_id))
        contents.append(model(turn.answer))
    return contents


async def ask_after(
    history: Sequence[types.Content], strategy: Strategy, llm: SimulatedLlm
) -> RequestTap:
    """Asks one more question in a session that holds this history already.

    Returns:
        What the guard was given.
    """
    tap = RequestTap()
    chat = Chat(guarded_agent(llm), [tap, ContextGuardPlugin(default=strategy)])
    session = await chat.sessions.create_session(
        app_name="app", user_id="user", session_id=chat.session_id
    )
    for content in history:
        await chat.sessions.append_event(session, event(content))
    await chat.say("Go on.")
    return tap


def agent_contents(llm: SimulatedLlm) -> list[types.Content]:
    """The contents of the newest request of the agent."""
    return [record for record in llm.requests if not record.is_summary][-1].contents


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(lambda tokens: Threshold(context_window=tokens), id="Threshold"),
        pytest.param(
            lambda tokens: SlidingWindow(context_window=tokens, max_turns=10),
            id="SlidingWindow",
        ),
    ],
)
@pytest.mark.parametrize(
    ("calls", "result_chars", "window_tokens", "removed_ratio"),
    [
        pytest.param(20, 2_000, 8_000, 0.949, id="20x2k-8k"),
        pytest.param(50, 5_000, 32_000, 0.98, id="50x5k-32k", marks=pytest.mark.slow),
    ],
)
async def test_a_tool_storm_is_removed(
    calls: int,
    result_chars: int,
    window_tokens: int,
    removed_ratio: float,
    strategy: object,
) -> None:
    """One compaction removes nearly all of a storm of tool results.

    The summary that takes their place is not counted.
    """
    assert callable(strategy)
    writer = Writer("storm", window_tokens, 1.0)
    history = [user("Fetch all rows and check them. " + writer.text("prose", 0.02))]
    for number in range(calls):
        text = writer.text("log", 1.0)[:result_chars]
        history += [call("fetch_rows", page=number), response("fetch_rows", text)]
    llm = SimulatedLlm(
        context_window=window_tokens, summary_replies=lambda request: TERSE_SUMMARY
    )
    tap = await ask_after(history, strategy(window_tokens), llm)
    before = estimate_contents_tokens(tap.contents[0])
    sent = agent_contents(llm)
    if isinstance(strategy(window_tokens), SlidingWindow):
        # A pair that is kept takes 5 % and 2 % alone: what counts is what has left.
        sent = sent[head_length(sent) :]
    after = estimate_contents_tokens(sent)
    assert not llm.rejections
    assert 1 <= llm.summaries <= 3
    removed = 1 - after / before
    assert removed >= removed_ratio, (
        f"{removed:.1%} of {before:,} tokens were removed, {after:,} are left in "
        f"{len(sent)} contents"
    )


KUBERNETES = [
    pytest.param(3, 8_000, id="3-8k"),
    *[
        pytest.param(rounds, window, id=f"{rounds}-{window}", marks=pytest.mark.slow)
        for rounds in (5, 20)
        for window in (8_000, 32_000, 128_000)
    ],
]


def write_kubernetes(rounds: int, window_tokens: int) -> Conversation:
    """Rounds of four tool results with about 8,000 tokens together."""
    writer = Writer(f"kubernetes {rounds}", window_tokens, None)
    return kubernetes(writer, rounds, share=1_900 / window_tokens)


@pytest.mark.parametrize("strategy", [Threshold, SlidingWindow])
@pytest.mark.parametrize(("rounds", "window_tokens"), KUBERNETES)
async def test_a_kubernetes_history_fits(
    rounds: int, window_tokens: int, strategy: type[Strategy]
) -> None:
    """However many rounds a session already holds, the next request stays below the
    threshold."""
    history = list_contents(write_kubernetes(rounds, window_tokens))
    llm = SimulatedLlm(context_window=window_tokens)
    tap = await ask_after(history, strategy(context_window=window_tokens), llm)
    assert estimate_contents_tokens(tap.contents[0]) >= rounds * 3_000
    assert not llm.rejections
    assert not llm.violations
    sent = [record for record in llm.requests if not record.is_summary]
    assert sent[-1].prompt_tokens < threshold_tokens(window_tokens)


@pytest.mark.parametrize("strategy", [Threshold, SlidingWindow])
@pytest.mark.parametrize(("rounds", "window_tokens"), KUBERNETES)
async def test_a_kubernetes_assistant_fits_on_every_call(
    rounds: int, window_tokens: int, strategy: type[Strategy]
) -> None:
    """From the first round to the last every request stays below the threshold, or,
    where the call before has just been compacted, below the window."""
    llm = SimulatedLlm(context_window=window_tokens)
    played = await play(
        write_kubernetes(rounds, window_tokens),
        strategy(context_window=window_tokens),
        llm,
        session_service=KeptSessions(),
    )
    assert not llm.rejections
    assert not llm.violations
    was_compacted = False
    for agent_call in played.calls:
        tokens = agent_call.record.prompt_tokens
        most_tokens = (
            window_tokens if was_compacted else threshold_tokens(window_tokens)
        )
        assert tokens < most_tokens, f"call {agent_call.number} took {tokens:,} tokens"
        was_compacted = agent_call.is_compacted


@pytest.mark.parametrize("strategy", [Threshold, SlidingWindow])
@pytest.mark.parametrize(
    ("kind", "window_tokens"),
    [
        pytest.param("log", 32_000, id="log-32k"),
        pytest.param("json", 32_000, id="json-32k", marks=pytest.mark.slow),
        pytest.param("code", 32_000, id="code-32k", marks=pytest.mark.slow),
        pytest.param("log", 200_000, id="log-200k", marks=pytest.mark.slow),
    ],
)
async def test_a_tool_result_of_750k_characters_fits(
    window_tokens: int, kind: Kind, strategy: type[Strategy]
) -> None:
    """A result many times the window is summarized in requests that all fit, and the
    user's message survives it."""
    writer = Writer("giant", 750_000, 4.0)
    giant = writer.text(kind, 1.0)[:750_000]
    assert len(giant) == 750_000
    request = "Which of the pods restarted after 06:12? Name each of them."
    steps = [[ToolUse("dump", giant)], [ToolUse("count", 3)]]
    llm = SimulatedLlm(
        context_window=window_tokens, summary_replies=lambda request: TERSE_SUMMARY
    )
    played = await play(
        Conversation([Turn(request, steps, "Three of them."), Turn("Thanks.")]),
        strategy(context_window=window_tokens),
        llm,
    )
    assert played.answers == ["Three of them.", "Done."]
    assert not llm.rejections
    assert not llm.violations
    assert sum(agent_call.is_compacted for agent_call in played.calls) == 1
    assert all(request in c.record.text for c in played.calls if c.turn.text == request)


@pytest.mark.parametrize("strategy", [Threshold, SlidingWindow])
async def test_a_system_prompt_of_12k_characters_fits_a_window_of_8k(
    strategy: type[Strategy],
) -> None:
    """A large system prompt leaves room enough to work in, and stays as it is."""
    writer = Writer("rules", 8_000, None)
    rules = "You run the operations desk.\n" + writer.text("prose", 1.0)
    talk = mixed(writer)
    conversation = Conversation(talk.turns, instruction=rules[:12_000])
    llm = SimulatedLlm(context_window=8_000)
    played = await play(conversation, strategy(context_window=8_000), llm)
    assert played.answers == [turn.answer for turn in conversation.turns]
    assert not llm.rejections
    assert sum(agent_call.is_compacted for agent_call in played.calls) >= 2
    for agent_call in played.calls:
        assert rules[:12_000] in agent_call.record.system_instruction


STATIC_RULE = "Static rule: you never delete anything."
DYNAMIC_RULE = "Dynamic rule: answer in metric units."


def is_rule(content: types.Content) -> bool:
    """Tells whether a content is the dynamic instruction."""
    return any(DYNAMIC_RULE in (part.text or "") for part in content.parts or [])


def head_length(contents: Sequence[types.Content]) -> int:
    """How many of these contents are summary and continuation."""
    texts = [
        (content.parts or [types.Part()])[0].text or "" for content in contents[:2]
    ]
    starts = zip(texts, (SUMMARY_BEGIN, CONTINUATION_BEGIN), strict=False)
    return sum(text.startswith(start) for text, start in starts)


@pytest.mark.parametrize(
    ("strategy", "has_ids"), [(Threshold, False), (SlidingWindow, True)]
)
async def test_compaction_in_a_tool_loop_keeps_moving_instructions(
    strategy: type[Strategy], has_ids: bool
) -> None:
    """With static and dynamic instructions every request has both, once, and all
    history that no summary covers, in order; no summary swallows an instruction."""
    writer = Writer("loop", 8_000, None)
    turns = [
        Turn(
            writer.ask(0.02),
            [[ToolUse("fetch", writer.result("log", 0.12))] for _ in range(8)],
            writer.text("prose", 0.02),
        )
        for _ in range(3)
    ]
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
    assert any(_is_in_a_loop(c) for c in played.calls if c.is_compacted)
    covered_before = 0
    for agent_call in played.calls:
        label = f"call {agent_call.number}"
        assert STATIC_RULE in agent_call.record.system_instruction, label
        assert sum(map(is_rule, agent_call.contents)) == 1, label
        covered = _check_uncovered(agent_call, label)
        grows = covered > covered_before
        assert grows is agent_call.is_compacted, f"{label}: {covered_before}, {covered}"
        if agent_call.is_compacted and strategy is Threshold:
            # The summary, the continuation, and what is not history.
            assert len(agent_call.contents) == 3, label
        covered_before = covered
    for record in llm.requests:
        assert not (record.is_summary and DYNAMIC_RULE in record.text)


def _is_in_a_loop(agent_call: AgentCall) -> bool:
    history = [c for c in agent_call.original if not is_rule(c)]
    return any(part.function_response for part in history[-1].parts or [])


def _check_uncovered(agent_call: AgentCall, label: str) -> int:
    """Checks what stands beside the summary; returns how much the summary covers."""
    sent = list(agent_call.contents)
    start = next((i for i in range(len(sent)) if head_length(sent[i:])), None)
    if start is not None:
        del sent[start : start + head_length(sent[start:])]
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


def plant_facts() -> Conversation:
    """Tool results for three windows of 32k, each with a fact in its midst."""
    writer = Writer("facts", 32_000, None)
    turns, number = [], 0
    for _ in range(6):
        steps = []
        for kind in ("log", "code", "prose", "log"):
            number += 1
            half = writer.text("code" if kind == "code" else "log", 0.06)
            fact = f"\nrelease key KX-{number * 7_919_777_777 % 16**10:010x} is valid\n"
            steps.append([ToolUse("fetch", half + fact + half)])
        turns.append(Turn(writer.ask(0.01), steps, "Noted."))
    return Conversation(turns)


def find_facts(contents: Sequence[types.Content]) -> set[str]:
    """The facts that stand anywhere in some contents."""
    return set(FACT.findall("".join(c.model_dump_json() for c in contents)))


def echo_facts(request: LlmRequest) -> str:
    """A summarizer that copies every fact it is shown."""
    found = FACT.findall(request.contents[-1].model_dump_json())
    return "Release keys so far: " + ", ".join(dict.fromkeys(found))


@pytest.mark.parametrize("strategy", [Threshold, SlidingWindow])
async def test_facts_reach_the_summarizer_and_the_next_request(
    strategy: type[Strategy],
) -> None:
    """Every fact in a covered tool result stands in a summarizer's prompt and, where
    the summarizer keeps it, in the agent's next request."""
    llm = SimulatedLlm(context_window=32_000, summary_replies=echo_facts)
    played = await play(plant_facts(), strategy(context_window=32_000), llm)
    assert not llm.rejections
    compacted = [c for c in played.calls if c.is_compacted]
    assert len(compacted) >= 3
    assert all(agent_call.summary_count <= 3 for agent_call in compacted)
    prompts = [record for record in llm.requests if record.is_summary]
    assert not any("left out" in record.text for record in prompts), "does not fit"
    shown = find_facts([content for record in prompts for content in record.contents])
    covered_count = 0
    for agent_call in played.calls:
        sent = find_facts(agent_call.contents)
        known = find_facts(agent_call.original)
        beside = agent_call.contents[head_length(agent_call.contents) :]
        covered = known - find_facts(beside)
        covered_count = max(covered_count, len(covered))
        label = f"{strategy.__name__}: call {agent_call.number}"
        assert covered <= shown, f"{label}: not shown: {covered - shown}"
        assert known <= sent, f"{label}: lost: {known - sent}"
    assert covered_count >= 12


LEDGER_HEADING = "[The user's messages up to here"


def read_ledger(contents: Sequence[types.Content]) -> list[str]:
    """The excerpts beside a summary."""
    parts = contents[0].parts or []
    listed = (parts[0].text or "").partition(LEDGER_HEADING)[2].split("\n")
    return [line[2:] for line in listed if line.startswith("- ")]


@pytest.mark.parametrize("strategy", [Threshold, SlidingWindow])
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
    conversation = Conversation(
        [writer.talk(message_share, answer_share) for _ in range(turns)]
    )
    llm = SimulatedLlm(
        context_window=8_000, summary_replies=lambda request: TERSE_SUMMARY
    )
    played = await play(conversation, strategy(context_window=8_000), llm)
    assert not llm.rejections
    most_bytes = min(MAX_LEDGER_BYTES, summary_budget_tokens(8_000) * 4)
    messages = [turn.text for turn in conversation.turns]
    compacted = [c for c in played.calls if c.is_compacted]
    assert len(compacted) >= 2
    for agent_call in compacted:
        label = f"{strategy.__name__}: call {agent_call.number}"
        excerpts = read_ledger(agent_call.contents)
        beside = agent_call.contents[head_length(agent_call.contents) :]
        kept = {part.text for content in beside for part in content.parts or []}
        covered = [text for text in messages[: agent_call.number] if text not in kept]
        assert len(excerpts) == len(covered), label
        for excerpt, text in zip(excerpts, covered, strict=True):
            opening = " ".join(text.split())[:12]
            assert excerpt.startswith(opening), f"{label}: {excerpt!r} of {opening!r}"
            if message_share < 0.01:
                assert excerpt == " ".join(text.split()), label
        assert sum(len(line.encode()) for line in excerpts) <= most_bytes, label
