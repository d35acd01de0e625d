"""In a long turn with side effects nothing is done twice, and nothing is left out."""

from __future__ import annotations

from typing import Any

import pytest
from google.adk.events.event import Event
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from contextguard_adk import Pipeline, SlidingWindow, Threshold, request_compaction
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply, call
from tests.acting import SUMMARIZERS, ActingAgent, Job, Outcome, make_jobs, run_turn
from tests.chats import agent_requests, words

STRATEGIES: dict[str, type[Strategy]] = {
    "threshold": Threshold,
    "sliding": SlidingWindow,
    "pipeline": Pipeline,
}
# A useless summary leaves most to be seen; one by one the pipeline's window has most to
# drop without a summary.
CASES: list[Any] = [
    *((name, kind, 15, 4_000, 1) for name in STRATEGIES for kind in SUMMARIZERS),
    *((name, "useless", 15, 4_000, 3) for name in STRATEGIES),
    pytest.param("pipeline", "useless", 40, 4_000, 1, marks=pytest.mark.slow),
    pytest.param("sliding", "useless", 40, 4_000, 3, marks=pytest.mark.slow),
    pytest.param("pipeline", "useless", 100, 16_000, 1, marks=pytest.mark.slow),
    pytest.param("sliding", "useless", 100, 16_000, 3, marks=pytest.mark.slow),
]
with_and_without_summary = pytest.mark.parametrize(
    ("strategy", "summarizer"),
    [
        (strategy, summarizer)
        for summarizer in ("useless", "failing")
        for strategy in STRATEGIES
    ],
)


def check(outcome: Outcome, agent: ActingAgent, answer: str = "All done.") -> int:
    """Checks that each job was done once; returns the number of compactions."""
    assert agent.wrong == {}
    assert (outcome.llm.rejections, outcome.llm.violations) == (0, 0)
    assert outcome.answer == answer
    assert outcome.compactions
    return len(outcome.compactions)


async def do_jobs(
    strategy: Strategy, summarizer: str, agent: ActingAgent, **settings: Any
) -> int:
    """Has an agent do its jobs, and checks them."""
    calls = -(-len(agent.jobs) // agent.parallel_calls) + 10
    settings |= {"summarizer": SUMMARIZERS[summarizer], "max_calls": calls}
    place = (strategy, agent.reply, agent.tools, agent.request)
    return check(await run_turn(*place, **settings), agent)


@pytest.mark.quick(
    "threshold-useless-15-4000-1",
    "sliding-good-15-4000-1",
    "pipeline-good-15-4000-1",
    "pipeline-absent-15-4000-1",
    "pipeline-useless-15-4000-3",
)
@pytest.mark.parametrize(
    ("strategy", "summarizer", "count", "window", "parallel"), CASES
)
async def test_each_job_is_done_once(
    strategy: str, summarizer: str, count: int, window: int, parallel: int
) -> None:
    """Whoever summarizes, a job that was done looks done, and the turn ends."""
    agent = ActingAgent(make_jobs(count), parallel)
    await do_jobs(STRATEGIES[strategy](context_window=window), summarizer, agent)


@pytest.mark.quick("pipeline")
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_plain_numbers_are_done_once(strategy: str) -> None:
    """It is the same where the jobs are plain numbers and a real tokenizer counts."""
    agent = ActingAgent(make_jobs(15, are_plain_numbers=True))
    made = STRATEGIES[strategy](context_window=4_000)
    await do_jobs(made, "useless", agent, token_ratio=None)


@pytest.mark.quick("pipeline-useless", "pipeline-failing")
@with_and_without_summary
async def test_chapters_are_written_once(strategy: str, summarizer: str) -> None:
    """A tool that asks for a compaction at each chapter's end gets one for each at
    most, and no chapter is written or closed again."""
    jobs = []
    for number in range(1, 6):
        draft = f"draft-{number:02}"
        title = f"chapter-{number:02}"
        jobs.append(Job(draft, "write_chapter", {"draft": draft}))
        jobs.append(Job(title, "finish_chapter", {"title": title}))
    agent = ActingAgent(jobs)

    def write_chapter(draft: str) -> dict[str, str]:
        """Writes a chapter."""
        agent.execute(draft, "written")
        return {"text": words(600)}

    def finish_chapter(title: str, tool_context: ToolContext) -> dict[str, str]:
        """Closes a chapter and frees the context window."""
        agent.execute(title, "closed")
        request_compaction(tool_context.state)
        return {"status": "closed"}

    outcome = await run_turn(
        STRATEGIES[strategy](context_window=4_000),
        agent.reply,
        [write_chapter, finish_chapter],
        "Write a book, and close each chapter.",
        summarizer=SUMMARIZERS[summarizer],
        max_calls=2 * len(jobs),
    )
    assert check(outcome, agent) <= 5


PIXELS = b"\x89PNG of the page"


class Photographer(BasePlugin):
    """Adds the image to the result of `screenshot`, as newer ADKs do by themselves."""

    async def on_event_callback(self, *, invocation_context: Any, event: Event) -> None:
        """Adds it before the event is stored."""
        image = {"data": PIXELS, "mime_type": "image/png"}
        for response in event.get_function_responses():
            if response.name == "screenshot":
                response.parts = [types.FunctionResponsePart.from_bytes(**image)]  # type: ignore[arg-type]


@with_and_without_summary
async def test_screenshot_is_seen(strategy: str, summarizer: str) -> None:
    """An image that a tool has just returned is in the next request, also where a
    compaction is due in that very call."""
    steps: list[Reply] = [call("read", step=n) for n in range(7)]
    steps += [call("screenshot"), "Seen."]
    replies = iter(steps)

    def read(step: int) -> str:
        """Reads a page."""
        return words(840, f"page-{step}")

    def screenshot() -> dict[str, str]:
        """Takes a picture of the page, and lists what is on it."""
        return {"elements": words(1_000, "elements")}

    patient = {"max_messages": 50} if strategy == "sliding" else {}
    outcome = await run_turn(
        STRATEGIES[strategy].model_validate({"context_window": 8_000, **patient}),
        lambda _: next(replies),
        [read, screenshot],
        "Look at the page.",
        summarizer=SUMMARIZERS[summarizer],
        max_calls=len(steps),
        before=[Photographer("photographer")],
    )
    assert outcome.answer == "Seen."
    *_, before, after = agent_requests(outcome.llm)
    [compaction] = outcome.compactions
    assert compaction.tokens_before > before.prompt_tokens + 900  # The last call's.
    parts = [part for content in after.contents for part in content.parts or ()]
    results = [part.function_response for part in parts if part.function_response]
    inner = [part.inline_data for result in results for part in result.parts or ()]
    blobs = [*inner, *(part.inline_data for part in parts)]
    assert PIXELS in [blob.data for blob in blobs if blob]
