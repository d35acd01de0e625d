"""A guarded chat with a small window."""

from __future__ import annotations

from typing import Any

from google.genai import types

from contextguard_adk import Threshold
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import RecordedRequest, SimulatedLlm
from tests import chats
from tests.builders import SUMMARY_BEGIN, Chat, model, user
from tests.chats import seed, text_of, words

WINDOW = 4_000
"""Threshold 3,200 tokens, summaries of 400."""

SMALL = Threshold(context_window=WINDOW, summarizer_context_window=100_000)
"""A history of a few windows still fits one summary call."""

NOW = {"context_guard:compact": True}
"""State that asks for a compaction."""

SUMMARY_BEGINS = f"{SUMMARY_BEGIN}\n"


def guarded_chat(
    llm: SimulatedLlm,
    strategy: Strategy = SMALL,
    *,
    guard: dict[str, Any] | None = None,
    chat: dict[str, Any] | None = None,
    **agent: Any,
) -> Chat:
    """A chat with one guarded agent; further settings are the agent's."""
    return chats.guarded_chat(llm, strategy, guard=guard, agent=agent, **(chat or {}))


def original(token_count: int = 3_000) -> types.Content:
    """A long answer of the model, which no summary repeats."""
    return model(words(token_count, "ORIGINAL"))


async def long_chat(
    llm: SimulatedLlm, tokens: int = 3_300, say: str = "Go on.", **settings: Any
) -> Chat:
    """A chat that goes on after a long answer of the model."""
    state = settings.pop("state", None)
    llm.summary_replies = llm.summary_replies or ["A summary."]
    chat = guarded_chat(llm, **settings)
    await seed(chat, user("The task."), original(tokens), state=state)
    await chat.say(say)
    return chat


def is_compacted(request: RecordedRequest) -> bool:
    """Whether a summary stands at the beginning of a request."""
    return text_of(request.contents[0]).startswith(SUMMARY_BEGINS)
