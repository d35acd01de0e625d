"""Whole conversations stay inside the window, and a compaction loses nothing in them.

Every test plays one conversation with a real Runner against the strict provider.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk.strategies import SlidingWindow, Strategy, Threshold
from contextguard_adk.testing import SimulatedLlm
from tests.builders import (
    SUMMARY_BEGIN,
    AgentCall,
    Conversation,
    KeptSessions,
    Played,
    ToolUse,
    Turn,
    play,
)
from tests.chats import (
    take_apart,
    text_of,
    without_head,
)
from tests.judging import (
    check_answers,
    check_live_requests,
    check_pauses,
    check_provider,
)
from tests.scenarios import (
    SCENARIOS,
    Writer,
    total_tokens,
    write_conversation,
)

# Streaming, call ids of the model, strategy.
MODES: dict[str, tuple[bool, bool, type[Strategy]]] = {
    "plain-Threshold": (False, False, Threshold),
    "ids-SlidingWindow": (False, True, SlidingWindow),
    "stream-SlidingWindow": (True, False, SlidingWindow),
    "stream+ids-Threshold": (True, True, Threshold),
}


CELLS = [
    ("normal talk", 4_000, "plain-Threshold"),
    ("tool-heavy", 8_000, "stream+ids-Threshold"),
    ("parallel bursts", 40_000, "stream-SlidingWindow"),
    ("no usage", 8_000, "ids-SlidingWindow"),
    ("fifty turns", 4_000, "plain-Threshold"),
    ("late usage, ratio 5", 4_000, "ids-SlidingWindow"),
    ("only tool results", 4_000, "plain-Threshold"),
    ("rapid short", 40_000, "stream+ids-Threshold"),
    ("empty results", 8_000, "stream-SlidingWindow"),
    ("media", 200_000, "ids-SlidingWindow"),
    ("kubernetes", 4_000, "stream-SlidingWindow"),
    ("coding agent", 12_000, "ids-SlidingWindow"),
]
"""Every scenario, on one of the windows, in one of the modes."""

LARGE_CELLS = [
    ("tool-heavy", 32_000, "stream+ids-Threshold"),
    ("parallel bursts", 1_000_000, "stream-SlidingWindow"),
    ("fifty turns", 200_000, "plain-Threshold"),
    ("only tool results", 32_000, "plain-Threshold"),
    ("rapid short", 1_000_000, "stream+ids-Threshold"),
    ("coding agent", 32_000, "ids-SlidingWindow"),
]
"""The same on a larger window, where each takes seconds."""


def test_every_scenario_has_a_cell() -> None:
    """Each kind of conversation is played."""
    assert [name for name, *_ in CELLS] == [*SCENARIOS]


@pytest.mark.quick(
    "normal talk-4000-plain-Threshold",
    "late usage, ratio 5-4000-ids-SlidingWindow",
    "rapid short-40000-stream+ids-Threshold",
    "kubernetes-4000-stream-SlidingWindow",
)
@pytest.mark.parametrize(
    ("name", "window_tokens", "mode"),
    [*CELLS, *(pytest.param(*each, marks=pytest.mark.slow) for each in LARGE_CELLS)],
)
async def test_a_conversation_stays_inside_the_window(
    name: str, window_tokens: int, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No request is refused, no pair broken, no message of the user lost."""
    conversation = write_conversation(name, window_tokens)
    is_streaming, has_ids, strategy = MODES[mode]
    llm = SimulatedLlm(
        context_window=window_tokens,
        token_ratio=conversation.token_ratio,
        media_tokens=conversation.media_tokens,
        usage=conversation.usage,
        call_ids=has_ids,
        summary_replies=_summarize_briefly if window_tokens > 8_000 else None,
    )

    caplog.set_level(logging.ERROR, "contextguard_adk")
    played = await play(
        conversation,
        # With smaller previews, some of the conversations fit into the window.
        strategy(context_window=window_tokens, preview_tokens=0.1),
        llm,
        is_streaming=is_streaming,
        session_service=KeptSessions(),
    )

    assert not caplog.records, caplog.text
    check_provider(name, played)
    check_answers(name, played, [turn.answer for turn in conversation.turns])
    check_live_requests(name, played.calls)
    check_pauses(name, played.calls, window_tokens)

    paid = [call for call in played.calls if call.summary_count]
    # Counting messages, a summary can turn out longer than what it covers.
    most_unused = 0 if strategy is Threshold else 2
    assert sum(not call.is_compacted for call in paid) <= most_unused
    if strategy is Threshold:
        check_form(played.calls)
    assert 2.5 <= total_tokens(conversation) / window_tokens <= 4
    assert any(call.is_compacted for call in played.calls)


def _summarize_briefly(request: LlmRequest) -> str:
    """Ten excerpts of the transcript; extraction would take long on a large one."""
    text = text_of(request.contents[-1]).replace("<", "")
    excerpt_chars = (request.config.max_output_tokens or 1_000) * 4 // 50
    step = max(1, len(text) // 10)
    excerpts = [text[i : i + excerpt_chars] for i in range(0, len(text), step)]
    return "\n".join(excerpts[:10])


def check_form(calls: list[AgentCall]) -> None:
    """A compacted request is the summary and the newest messages as they are, or the
    summary, the continuation and the newest steps."""
    for call in calls:
        if not call.is_compacted:
            continue
        summary, *newest = take_apart(call.contents)
        assert text_of(summary).startswith(SUMMARY_BEGIN)
        if text_of(newest[0]).startswith("[System: The conversation"):
            check_steps(newest[1:], call)
        else:
            check_messages(newest, call)


def check_steps(steps: list[types.Content], call: AgentCall) -> None:
    """Behind the summary stand calls and their results alone."""
    parts = [part for content in steps for part in content.parts or ()]
    assert all(part.function_call or part.function_response for part in parts)
    assert steps == call.contents[1:]
    assert len(steps) % 2 == 0


def check_messages(messages: list[types.Content], call: AgentCall) -> None:
    """Behind the summary stand the newest messages, that of the turn among them."""
    newest = [text_of(content) for content in messages]
    assert call.turn.text in newest
    texts = [text_of(content) for content in call.original]
    assert newest == texts[-len(newest) :]


# --- What a compaction must not lose, and must remove -----------------------------

TERSE_SUMMARY = """\
## Done
All rows were fetched and checked.

## Key Information
Shard 3 is behind by 41 s; trace 5e2c0a91 shows the slow query.

## Decisions & Next Steps
Compare shard 3 with shard 2, then write the report."""

both_strategies = pytest.mark.parametrize("strategy", [Threshold, SlidingWindow])


async def play_fitting(
    turns: Sequence[Turn],
    strategy: Strategy,
    *,
    instruction: str = "You help.",
    summary_replies: Any = lambda _: TERSE_SUMMARY,
    agent: dict[str, Any] | None = None,
    **llm: Any,
) -> Played:
    """Plays turns of which no request may be refused and no answer be lost."""
    window = strategy.context_window or 0
    made = SimulatedLlm(context_window=window, summary_replies=summary_replies, **llm)
    talk = Conversation(turns, instruction=instruction)
    played = await play(talk, strategy, made, agent=agent or {})
    check_provider("", played)
    check_answers("", played, [turn.answer for turn in turns])
    return played


@both_strategies
async def test_a_tool_result_of_750k_characters_fits(strategy: type[Strategy]) -> None:
    """A result many times the window is summarized in requests that all fit."""
    giant = Writer("giant", 750_000, 4.0).text("log", 1.0)[:750_000]
    request = "Which of the pods restarted after 06:12? Name each of them."
    steps = [[ToolUse("dump", giant)], [ToolUse("count", 3)]]
    turns = [Turn(request, steps, "Three of them."), Turn("Thanks.")]
    whole = strategy(context_window=32_000, preview_tokens=None)
    played = await play_fitting(turns, whole)
    assert sum(call.is_compacted for call in played.calls) == 1
    assert all(request in c.record.text for c in played.calls if c.turn.text == request)


STATIC_RULE = "Static rule: you never delete anything."
DYNAMIC_RULE = "Dynamic rule: answer in metric units."


def is_rule(content: types.Content) -> bool:
    """Whether ADK has put the agent's instruction into the contents here."""
    return DYNAMIC_RULE in text_of(content)


@pytest.mark.parametrize(
    ("strategy", "has_ids"), [(Threshold, False), (SlidingWindow, True)]
)
async def test_compaction_in_a_tool_loop_keeps_moving_instructions(
    strategy: type[Strategy], has_ids: bool
) -> None:
    """Every request has both instructions, once."""
    writer = Writer("loop", 4_000, None)
    turns = []
    for _ in range(2):
        steps = [[ToolUse("fetch", writer.result("log", 0.12))] for _ in range(8)]
        turns.append(Turn(writer.ask(0.02), steps, writer.text("prose", 0.02)))

    played = await play_fitting(
        turns,
        strategy(context_window=4_000, preview_tokens=None),
        instruction=DYNAMIC_RULE,
        agent={"static_instruction": STATIC_RULE},
        summary_replies=None,
        call_ids=has_ids,
    )
    assert sum(call.is_compacted for call in played.calls) >= 2

    covered_before = 0
    for call in played.calls:
        assert STATIC_RULE in call.record.system_instruction
        assert sum(is_rule(content) for content in call.contents) == 1
        sent = without_head(call.contents)
        covered = len(call.original) - len(sent)
        spoken = [each for each in call.original if not is_rule(each)]
        gone = {id(each) for each in spoken[:covered]}
        assert sent == [each for each in call.original if id(each) not in gone]
        assert (covered > covered_before) is call.is_compacted
        covered_before = covered

    assert not any(r.is_summary and DYNAMIC_RULE in r.text for r in played.llm.requests)


def find_facts(contents: Sequence[types.Content]) -> dict[str, None]:
    """The facts that stand anywhere in some contents, in order."""
    text = "".join(content.model_dump_json() for content in contents)
    return dict.fromkeys(re.findall(r"KX-[0-9a-f]{10}", text))


@both_strategies
async def test_facts_reach_the_summarizer_and_the_next_request(
    strategy: type[Strategy],
) -> None:
    """Every fact in a covered tool result stands in a summarizer's prompt and, where
    the summarizer keeps it, in the agent's next request."""
    writer = Writer("facts", 16_000, None)
    turns = []
    for number in range(4):
        steps = []
        for step in range(4):
            half = writer.text("code" if step == 1 else "log", 0.06)
            key = (4 * number + step + 1) * 7_919_777_777 % 16**10
            fact = f"\nrelease key KX-{key:010x} is valid\n"
            steps.append([ToolUse("fetch", half + fact + half)])
        turns.append(Turn(writer.ask(0.01), steps, "Noted."))

    played = await play_fitting(
        turns,
        strategy(context_window=16_000, preview_tokens=None),
        summary_replies=lambda request: (
            "Keys: " + ", ".join(find_facts(request.contents[-1:]))
        ),
    )

    compacted = [call for call in played.calls if call.is_compacted]
    assert len(compacted) >= 3
    assert all(call.summary_count <= 3 for call in compacted)
    prompts = [record for record in played.llm.requests if record.is_summary]
    shown = find_facts([content for record in prompts for content in record.contents])

    for call in played.calls:
        known = find_facts(call.original).keys()
        beside = find_facts(without_head(call.contents)).keys()
        assert known - beside <= shown.keys()
        assert known <= find_facts(call.contents).keys()
