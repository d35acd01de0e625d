"""What holds for each conversation that was played."""

from __future__ import annotations

import itertools

from google.genai import types

from tests.builders import (
    SUMMARY_BEGIN,
    AgentCall,
    Played,
)
from tests.chats import (
    take_apart,
    text_of,
)

OVERFULL_RATIO = 0.97


def check_provider(cell: str, played: Played) -> None:
    """The provider took every request, the summarizer's too."""
    for number, record in enumerate(played.llm.requests, start=1):
        assert record.rejected is None, (
            f"{cell}: request {number} ({'summary' if record.is_summary else 'agent'}) "
            f"was refused as {record.rejected} with {record.prompt_tokens:,} tokens"
        )
    assert played.llm.violations == 0


def check_answers(cell: str, played: Played, expected: list[str]) -> None:
    """Every turn ended with the answer that the script has for it."""
    for answer, wanted in zip(played.answers, expected, strict=True):
        assert answer == wanted, f"{cell}: a turn ended with {answer[:80]!r}"


def check_live_requests(cell: str, calls: list[AgentCall]) -> None:
    """The newest user text of every request is, or quotes, the current message."""
    for call in calls:
        newest = _newest_user_content(call.contents)
        assert call.turn.text in text_of(newest), f"{cell}: call {call.number}"
        if isinstance(call.turn.request, types.Content):
            assert _attachments(newest) == _attachments(call.turn.request), call.number


def _attachments(content: types.Content) -> list[types.Blob]:
    return [part.inline_data for part in content.parts or () if part.inline_data]


def _newest_user_content(contents: list[types.Content]) -> types.Content:
    for content in reversed(take_apart(contents)):
        text = text_of(content)
        # A pipeline may leave out what came after the request: then this follows it.
        is_summary = text.startswith(SUMMARY_BEGIN)
        if content.role == "user" and text and not is_summary:
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
