"""Whole conversations stay inside the window, whatever fills it.

Every cell plays one scenario with a real Runner against the strict provider, in one
window, streaming or not, with call ids or without, under one strategy.
"""

from __future__ import annotations

import itertools
import logging

import pytest
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk.strategies import SlidingWindow, Strategy, Threshold
from contextguard_adk.testing import SimulatedLlm
from tests.builders import SUMMARY_BEGIN, AgentCall, KeptSessions, Played, play
from tests.scenarios import (
    LARGEST_BPE_WINDOW_TOKENS,
    SCENARIOS,
    find_obstacle,
    total_tokens,
    write_conversation,
)

WINDOWS_TOKENS = (4_000, 8_000, 32_000, 200_000, 1_000_000)
STRATEGIES: tuple[type[Strategy], ...] = (Threshold, SlidingWindow)
OVERFULL_RATIO = 0.97

# Streaming, call ids of the model.
MODES = {
    "plain": (False, False),
    "ids": (False, True),
    "stream": (True, False),
    "stream+ids": (True, True),
}


def _list_cells() -> list[object]:
    """Every scenario on every window under each strategy; modes take turns.

    Of most scenarios the default tier plays one cell under each strategy, each on
    another window. The other cells are slow.
    """
    cells: list[object] = []
    for row, name in enumerate(SCENARIOS):
        for column, window_tokens in enumerate(WINDOWS_TOKENS):
            for number, strategy in enumerate(STRATEGIES):
                mode = [*MODES][(row + column + 2 * number) % len(MODES)]
                is_default = column == (row + 2 * number) % len(WINDOWS_TOKENS)
                is_default &= name != "two hundred turns"
                cell = pytest.param(
                    name,
                    window_tokens,
                    mode,
                    strategy,
                    id=f"{name}-{window_tokens // 1000}k-{mode}-{strategy.__name__}",
                    marks=[] if is_default else pytest.mark.slow,
                )
                cells.append(cell)
    return cells


@pytest.mark.parametrize(("name", "window_tokens", "mode", "strategy"), _list_cells())
async def test_a_conversation_stays_inside_the_window(
    name: str,
    window_tokens: int,
    mode: str,
    strategy: type[Strategy],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No request is refused, no pair broken, no message of the user lost, and
    compaction comes when it must and not twice running."""
    conversation = write_conversation(name, window_tokens)
    if obstacle := find_obstacle(conversation, window_tokens):
        pytest.skip(obstacle)
    is_streaming, has_ids = MODES[mode]
    is_large = window_tokens > LARGEST_BPE_WINDOW_TOKENS
    is_slow = is_large or SCENARIOS[name].is_long
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
        strategy(context_window=window_tokens),
        llm,
        is_streaming=is_streaming,
        session_service=KeptSessions() if is_slow else None,
    )
    cell = f"{name!r} on {window_tokens:,} tokens, {mode}, {strategy.__name__}"
    assert not caplog.records, f"{cell}: {caplog.text}"
    check_provider(cell, played)
    check_answers(cell, played, [turn.answer for turn in conversation.turns])
    check_live_requests(cell, played.calls)
    check_pauses(cell, played.calls, window_tokens)
    # Counting messages, a summary can turn out longer than what it covers.
    check_waste(cell, played.calls, allowed=0 if strategy is Threshold else 2)
    if strategy is Threshold:
        check_form(cell, played.calls)
    total_ratio = total_tokens(conversation) / window_tokens
    assert 2.5 <= total_ratio <= 4, f"{cell}: it fills {total_ratio:.2f} windows"
    assert any(call.is_compacted for call in played.calls), (
        f"{cell}: nothing was compacted"
    )


def _summarize_briefly(request: LlmRequest) -> str:
    """Ten excerpts of the transcript; extraction would take long on a large one."""
    parts = request.contents[-1].parts or []
    text = (parts[0].text or "").replace("<", "")
    budget_tokens = request.config.max_output_tokens or 1_000
    excerpt_chars = budget_tokens * 4 // 50
    step = max(1, len(text) // 10)
    excerpts = [text[i : i + excerpt_chars] for i in range(0, len(text), step)]
    return "\n".join(excerpts[:10])


def check_provider(cell: str, played: Played) -> None:
    """The provider took every request, the summariser's too."""
    for number, record in enumerate(played.llm.requests, start=1):
        assert record.rejected is None, (
            f"{cell}: request {number} ({'summary' if record.is_summary else 'agent'}) "
            f"was refused as {record.rejected} with {record.prompt_tokens:,} tokens "
            f"in {len(record.contents)} contents"
        )


def check_answers(cell: str, played: Played, expected: list[str]) -> None:
    """Every turn ended with the answer that the script has for it."""
    for number, (answer, wanted) in enumerate(
        zip(played.answers, expected, strict=True), start=1
    ):
        assert answer == wanted, f"{cell}: turn {number} ended with {answer[:80]!r}"


def check_live_requests(cell: str, calls: list[AgentCall]) -> None:
    """The newest user text of every request is, or quotes, the current message."""
    for call in calls:
        newest = _newest_user_content(call.record.contents)
        texts = [part.text for part in newest.parts or [] if part.text]
        assert any(call.turn.text in text for text in texts), (
            f"{cell}: call {call.number} lacks the live request "
            f"{call.turn.text[:60]!r}; its newest user text is {texts[0][:160]!r}"
        )
        if isinstance(call.turn.request, types.Content):
            attached = [p for p in call.turn.request.parts or [] if p.inline_data]
            sent = [part for part in newest.parts or [] if part.inline_data]
            assert [p.inline_data for p in sent] == [p.inline_data for p in attached], (
                f"{cell}: call {call.number} lacks attachments of the live request"
            )


def _newest_user_content(contents: list[types.Content]) -> types.Content:
    for content in reversed(contents):
        texts = [part.text for part in content.parts or [] if part.text]
        # A pipeline may leave out what came after the request: then this follows it.
        is_summary = bool(texts) and texts[0].startswith(SUMMARY_BEGIN)
        if content.role == "user" and texts and not is_summary:
            return content
    return types.Content()


def check_pauses(cell: str, calls: list[AgentCall], window_tokens: int) -> None:
    """Nothing is compacted on two calls running, unless it would not fit."""
    for before, call in itertools.pairwise(calls):
        if call.is_compacted and before.is_compacted:
            assert call.summarized_at >= OVERFULL_RATIO * window_tokens, (
                f"{cell}: compacted on calls {before.number} and {call.number} "
                f"running, at {call.summarized_at:,} tokens"
            )


def check_waste(cell: str, calls: list[AgentCall], allowed: int) -> None:
    """Summaries that were paid for were used."""
    unused = [call for call in calls if call.summary_count and not call.is_compacted]
    assert len(unused) <= allowed, (
        f"{cell}: the summaries before calls {[call.number for call in unused]} were "
        "paid for and not used"
    )


def check_form(cell: str, calls: list[AgentCall]) -> None:
    """A compacted request is the summary and the continuation, nothing else."""
    for call in calls:
        if call.is_compacted:
            texts = [
                content.parts and content.parts[0].text
                for content in call.record.contents
            ]
            assert len(texts) == 2, (
                f"{cell}: call {call.number} keeps {len(texts)} contents"
            )
            assert str(texts[0]).startswith(SUMMARY_BEGIN), cell
            assert str(texts[1]).startswith("[System: The conversation"), cell
