"""Summaries that a model writes from a transcript."""

from __future__ import annotations

from typing import Any

from google.adk.models.llm_response import LlmResponse
from google.genai import types

from contextguard_adk import CompactionRecord, Threshold
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import answer_text, model
from tests.chats import (
    DEMAND,
    EXACT,
    SUMMARY,
    guarded_chat,
    seed,
    summary_requests,
    words,
)

GOOD = "## Current State\nThe budget is 4,711 EUR; the report is half written."


class Written:
    """A compaction whose summary the agent's own model writes from a transcript."""

    def __init__(
        self, *replies: Reply, model: str = "gemini-2.5-flash-001", **settings: Any
    ) -> None:
        self.llm = SimulatedLlm(
            model=model, token_ratio=1.0, summary_replies=list(replies)
        )
        self.records: list[CompactionRecord] = []
        guard = {"on_compaction": self.records.append, **settings.pop("guard", {})}
        agent = settings.pop("agent", {})
        settings.setdefault("context_window", 8_000)
        strategy = Threshold(recall=False, reuse_prompt_cache=False, **settings)
        self.chat = guarded_chat(self.llm, strategy, guard=guard, agent=agent)

    async def compact(self, *said: types.Content) -> str:
        """Has it written; "" for a mechanical one."""
        said = said or (model(words(3_000)),)
        await seed(self.chat, *said, state={**EXACT, **DEMAND})
        assert answer_text(await self.chat.say("Go on."))
        text = str((await self.chat.state())[SUMMARY])
        return "" if self.records[0].is_mechanical else text

    @property
    def asked(self) -> list[types.GenerateContentConfig]:
        """The configs of the summary calls."""
        return [request.config for request in summary_requests(self.llm)]


def ended(text: str, reason: str) -> LlmResponse:
    """An answer that ended for a reason."""
    finish = types.FinishReason(reason)
    return LlmResponse(content=model(text), finish_reason=finish)
