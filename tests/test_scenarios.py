"""Whole conversations stay inside the window, whatever fills it.

Every cell plays one scenario with a real Runner against the strict provider.
"""

from __future__ import annotations

import itertools
import logging

import pytest
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk._history.pairs import has_tool
from contextguard_adk.strategies import SlidingWindow, Strategy, Threshold
from contextguard_adk.testing import SimulatedLlm
from tests.builders import SUMMARY_BEGIN, AgentCall, KeptSessions, Played, play
from tests.chats import take_apart, text_of
from tests.scenarios import SCENARIOS, find_obstacle, total_tokens, write_conversation

WINDOWS_TOKENS = (4_000, 8_000, 32_000, 200_000, 1_000_000)
OVERFULL_RATIO = 0.97

# Streaming, call ids of the model, strategy.
MODES: dict[str, tuple[bool, bool, type[Strategy]]] = {
    "plain-Threshold": (False, False, Threshold),
    "ids-SlidingWindow": (False, True, SlidingWindow),
    "stream-SlidingWindow": (True, False, SlidingWindow),
    "stream+ids-Threshold": (True, True, Threshold),
}


def _list_cells() -> list[object]:
    """Every scenario on every window; modes take turns, and all but one are slow."""
    cells: list[object] = []
    for row, name in enumerate(SCENARIOS):
        for column, window_tokens in enumerate(WINDOWS_TOKENS):
            mode = [*MODES][(row + column) % len(MODES)]
            is_default = column == 2 * row % len(WINDOWS_TOKENS)
            label = f"{name}-{window_tokens // 1000}k-{mode}"
            marks = [] if is_default else [pytest.mark.slow]
            cells.append(pytest.param(name, window_tokens, mode, id=label, marks=marks))
    return cells


@pytest.mark.parametrize(("name", "window_tokens", "mode"), _list_cells())
async def test_a_conversation_stays_inside_the_window(
    name: str, window_tokens: int, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No request is refused, no pair broken, no message of the user lost, and
    compaction comes when it must and not twice running."""
    conversation = write_conversation(name, window_tokens)
    if obstacle := find_obstacle(conversation, window_tokens):
        pytest.skip(obstacle)
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
        strategy(context_window=window_tokens),
        llm,
        is_streaming=is_streaming,
        session_service=KeptSessions(),
    )
    assert not caplog.records, caplog.text
    check_provider(name, played)
    check_answers(name, played, [turn.answer for turn in conversation.turns])
    check_live_requests(name, played.calls)
    check_pauses(name, played.calls, window_tokens)
    # Counting messages, a summary can turn out longer than what it covers.
    check_waste(played.calls, allowed=0 if strategy is Threshold else 2)
    if strategy is Threshold:
        check_form(played.calls)
    assert 2.5 <= total_tokens(conversation) / window_tokens <= 4
    assert any(call.is_compacted for call in played.calls)


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
    """The provider took every request, the summarizer's too."""
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
    """The newest user text of every request is, or quotes, the current message, and
    has its attachments."""
    for call in calls:
        newest = _newest_user_content(call.record.contents)
        texts = [part.text for part in newest.parts or [] if part.text]
        assert any(call.turn.text in text for text in texts), (
            f"{cell}: call {call.number} lacks {call.turn.text[:60]!r} in {texts}"
        )
        if isinstance(call.turn.request, types.Content):
            assert _attachments(newest) == _attachments(call.turn.request), call.number


def _attachments(content: types.Content) -> list[types.Blob]:
    return [part.inline_data for part in content.parts or () if part.inline_data]


def _newest_user_content(contents: list[types.Content]) -> types.Content:
    for content in reversed(take_apart(contents)):
        texts = [part.text for part in content.parts or [] if part.text]
        # A pipeline may leave out what came after the request: then this follows it.
        is_summary = bool(texts) and texts[0].startswith(SUMMARY_BEGIN)
        if content.role == "user" and texts and not is_summary:
            return content
    return types.Content()


def check_pauses(cell: str, calls: list[AgentCall], window_tokens: int) -> None:
    """Nothing is compacted on two calls running, unless it would not fit."""
    for before, call in itertools.pairwise(calls):
        if call.compaction and before.compaction:
            tokens = call.compaction.tokens_before
            assert tokens >= OVERFULL_RATIO * window_tokens, (
                f"{cell}: calls {before.number} and {call.number}, at {tokens:,} tokens"
            )


def check_waste(calls: list[AgentCall], allowed: int) -> None:
    """Summaries that were paid for were used."""
    paid = (call for call in calls if call.summary_count)
    assert len([c.number for c in paid if not c.is_compacted]) <= allowed


def check_form(calls: list[AgentCall]) -> None:
    """A compacted request is the summary, the continuation and the newest steps."""
    for call in calls:
        if call.is_compacted:
            summary, continuation, *newest = take_apart(call.contents)
            assert text_of(summary).startswith(SUMMARY_BEGIN)
            assert text_of(continuation).startswith("[System: The conversation")
            assert all(map(has_tool, newest)), call.number
            assert newest == call.contents[1:]
            assert len(newest) % 2 == 0
