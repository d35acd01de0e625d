"""A summarizer that keeps failing is asked less often, and made only once."""

from __future__ import annotations

from typing import Any

import pytest
from google.adk.models.registry import LLMRegistry

from contextguard_adk import (
    Compaction,
    CompactionContext,
    CompactionRecord,
    Strategy,
    Threshold,
)
from contextguard_adk.testing import SimulatedLlm
from tests.builders import model, user
from tests.chats import words
from tests.guarded import NOW, guarded_chat

WIDE = Threshold(context_window=100_000)
DOWN = RuntimeError("out of order")


class NamedLlm(SimulatedLlm):
    """A model that ADK finds by its name."""

    @classmethod
    def supported_models(cls) -> list[str]:
        """The names."""
        return [r"contextguard-breaker-.*"]

    def model_post_init(self, context: Any) -> None:
        """Counts its construction."""
        super().model_post_init(context)
        made_models.append(self.model)
        if "bad" in self.model:
            self.summary_replies = lambda _: DOWN


made_models: list[str] = []


class TwoSummaries(Strategy):
    """Asks for two summaries whenever a compaction is demanded."""

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Compacts a part, and then everything."""
        if context.reason != "requested":
            return None
        await context.summarize(context.older_than(3))
        return await context.summarize(context.older_than(0))


async def count_asked(strategy: Strategy, replies: Any, demands: int) -> list[int]:
    """How many summaries were asked for on each demand."""
    llm = SimulatedLlm(context_window=200_000, summary_replies=replies)
    chat = guarded_chat(llm, strategy)
    asked = []
    for number in range(demands):
        before = llm.summaries
        await chat.set_state(NOW)
        await chat.tell([user(words(600)), model(words(600))])
        await chat.say(f"{number} {words(225)}")
        asked.append(llm.summaries - before)
    return asked


@pytest.mark.parametrize(
    ("strategy", "replies", "expected"),
    [
        pytest.param(
            WIDE,
            [DOWN, DOWN, DOWN, "They spoke."],
            [1, 1, 1, 0, 1, 1],
            id="pauses after three failures, for one compaction",
        ),
        pytest.param(
            WIDE,
            [DOWN, DOWN, "They spoke."] * 3,
            [1] * 9,
            id="a success ends the count",
        ),
        pytest.param(
            TwoSummaries(context_window=100_000),
            lambda _: DOWN,
            [1, 1, 1, 0, 1, 0, 1, 0],
            id="counts compactions, not calls, and goes on",
        ),
        pytest.param(
            Threshold(context_window=100_000, summarizer="no-such-model"),
            None,
            [1, 1],
            id="an unknown summarizer leaves it to the agent's own model",
        ),
    ],
)
async def test_a_failing_summarizer_is_asked_less_often(
    strategy: Strategy, replies: Any, expected: list[int]
) -> None:
    """Only failures of compactions in a row count; one is skipped, then it is tried."""
    assert await count_asked(strategy, replies, len(expected)) == expected


@pytest.mark.parametrize("name", ["good", "bad"])
async def test_a_summarizer_by_name_is_made_once_for_a_compaction(name: str) -> None:
    """A client may cost a connection, so no other one is made to read its name."""
    LLMRegistry.register(NamedLlm)
    made_models.clear()
    summarizer = f"contextguard-breaker-{name}"
    strategy = WIDE.model_copy(update={"summarizer": summarizer})
    assert await count_asked(strategy, None, 2) == [0, 0]
    assert made_models == [summarizer] * 2


@pytest.mark.parametrize("failures", [1, 2, 99])
async def test_a_request_that_fits_waits_for_a_better_summary(failures: int) -> None:
    """Up to 97 % of the window, with a sixth added to the newest message, it goes out
    as it is, and the next call asks again."""
    records = list[CompactionRecord]()
    replies: list[Any] = [*[DOWN] * failures, *["They spoke of stars."] * 9]
    llm = SimulatedLlm(context_window=10_000, token_ratio=1.0, summary_replies=replies)
    strategy = Threshold(context_window=10_000)
    chat = guarded_chat(llm, strategy, guard={"on_compaction": records.append})
    while not records:
        await chat.say(words(520))
    assert records[0].is_mechanical is (failures == 99)
    assert llm.rejections == 0
    if failures < 99:
        assert llm.summaries == failures + 1
    else:
        assert records[0].tokens_before >= 9_700 - 600 / 6  # A message is below 600.
