"""What comes of a compaction: a summary, and the request with it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from google.genai import types

from contextguard_adk._history.stored import StoredSummary
from contextguard_adk._measuring.tokens import text_bytes
from contextguard_adk.telemetry import CompactionRecord

if TYPE_CHECKING:
    from contextguard_adk._summarizing.context import CompactionContext


@dataclass(frozen=True)
class Compaction:
    """A summary that could stand in the place of history.

    Attributes:
        stored: The summary, as it would be kept in session state.
        covered: Indexes of the contents that it stands for.
        contents: The request's contents with it.
        tokens: The estimate of that request.
        attempts: How many summaries it took, mechanical ones included.
    """

    stored: StoredSummary
    covered: frozenset[int]
    contents: list[types.Content]
    tokens: int
    attempts: int = 1

    @property
    def reason(self) -> str:
        """Why the history was compacted."""
        return self.stored.reason

    def after(self, attempts: int) -> Compaction:
        """The same compaction, with the number of summaries that it took."""
        return replace(self, attempts=attempts)

    def describe(
        self, context: CompactionContext, session_id: str, started_seconds: float
    ) -> CompactionRecord:
        """Describes what began at `started_seconds` and has just ended."""
        scale = context.tokens / max(1, context.measure(context.contents))
        return CompactionRecord(
            agent=context.agent,
            session_id=session_id,
            strategy=type(context.summarizer.settings).__name__,
            reason=self.stored.reason,
            tokens_before=context.tokens,
            tokens_after=int(self.tokens * scale),
            contents_before=len(context.contents),
            contents_after=len(self.contents),
            summary_tokens=text_bytes(self.stored.text) // 4,
            duration_seconds=time.monotonic() - started_seconds,
            attempts=self.attempts,
            is_mechanical=self.stored.is_mechanical,
            model=context.summarizer.model_name,
            usage=context.summarizer.usage,
            cost=context.summarizer.cost,
        )
