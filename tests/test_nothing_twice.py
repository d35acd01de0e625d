"""In a long turn with side effects nothing is done twice, and nothing is left out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from google.adk.events.event import Event
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from contextguard_adk import (
    Pipeline,
    SlidingWindow,
    Strategy,
    Threshold,
    request_compaction,
)
from contextguard_adk.testing import RecordedRequest, Reply, call
from tests.acting import SUMMARIZERS, ActingAgent, Job, find_named, make_jobs, run_turn
from tests.chats import agent_requests, slow, words

STRATEGIES: dict[str, type[Strategy]] = {
    "threshold": Threshold,
    "sliding": SlidingWindow,
    "pipeline": Pipeline,
}
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
every_summarizer = pytest.mark.parametrize("summarizer", SUMMARIZERS)

SIZES = [(15, 8_000), (30, 8_000), (30, 16_000), (100, 8_000), (100, 16_000),
         (100, 32_000)]  # fmt: skip
"""Jobs and windows; in a larger window so few jobs would need no compaction."""


def spread() -> list[Any]:
    """All cases; by default few jobs one by one, and larger cases for some."""
    settings = itertools.product(STRATEGIES, SUMMARIZERS, SIZES, (1, 3))
    cases = []
    for strategy, summarizer, (count, window), parallel in settings:
        is_fast = (count, window, parallel) == (30, 8_000, 1)
        if summarizer == "useless":  # The others leave more to be seen.
            is_fast |= (count, parallel) == (15, 1)
            is_fast |= (count, window, parallel) == (30, 8_000, 3)
            # One by one the pipeline's window has most to drop without a summary.
            one_large = (100, 16_000, 1 if strategy == "pipeline" else 3)
            is_fast |= (count, window, parallel) == one_large
        case = (strategy, summarizer, count, window, parallel)
        marks = () if is_fast else pytest.mark.slow
        cases.append(pytest.param(*case, id="-".join(map(str, case)), marks=marks))
    return cases


async def check_jobs(
    strategy: Strategy, summarizer: str, agent: ActingAgent, **settings: Any
) -> None:
    """Has an agent do its jobs, and checks that each was done once."""
    steps = -(-len(agent.jobs) // agent.parallel_calls)
    outcome = await run_turn(
        strategy,
        agent.reply,
        agent.tools,
        agent.request,
        summarizer=SUMMARIZERS[summarizer],
        max_calls=steps + 10,  # A loop ends soon.
        **settings,
    )
    assert outcome.compactions
    assert (outcome.llm.rejections, outcome.llm.violations) == (0, 0)
    assert (len(agent.twice), len(agent.never)) == (0, 0)
    assert outcome.answer == "All done."


@pytest.mark.parametrize(
    ("strategy", "summarizer", "count", "window", "parallel"), spread()
)
async def test_each_job_is_done_once(
    strategy: str, summarizer: str, count: int, window: int, parallel: int
) -> None:
    """Whoever summarizes, a job that was done looks done, and the turn ends."""
    agent = ActingAgent(make_jobs(count), parallel)
    await check_jobs(STRATEGIES[strategy](context_window=window), summarizer, agent)


@every_strategy
@pytest.mark.parametrize("summarizer", ["useless", *slow("good", "failing", "absent")])
async def test_plain_numbers_are_done_once(strategy: str, summarizer: str) -> None:
    """It is the same where the jobs are plain numbers and a real tokenizer counts."""
    agent = ActingAgent(make_jobs(30, are_plain_numbers=True))
    made = STRATEGIES[strategy](context_window=8_000)
    await check_jobs(made, summarizer, agent, token_ratio=None)


async def test_a_window_of_contents_is_not_compacted_more_often() -> None:
    """Without a model it covers what is too much as well, not only what it must."""
    compactions = []
    for summarizer in ("good", "failing"):
        agent = ActingAgent(make_jobs(40))
        outcome = await run_turn(
            SlidingWindow(context_window=16_000),
            agent.reply,
            agent.tools,
            agent.request,
            summarizer=SUMMARIZERS[summarizer],
            max_calls=50,
        )
        assert (agent.twice, agent.never) == ([], [])
        compactions.append(len(outcome.compactions))
    assert compactions[0] == compactions[1]


# --- a tool that asks for a compaction ---


@every_strategy
@every_summarizer
async def test_chapters_are_written_once(strategy: str, summarizer: str) -> None:
    """A tool that asks for a compaction at each chapter's end gets one for each at
    most, and no chapter is written or closed again."""
    chapters = [f"{number:02}" for number in range(1, 9)]
    pairs = [
        (
            Job(f"draft-{number}", "write_chapter", {"draft": f"draft-{number}"}),
            Job(f"chapter-{number}", "finish_chapter", {"title": f"chapter-{number}"}),
        )
        for number in chapters
    ]
    agent = ActingAgent([*itertools.chain(*pairs)])

    def write_chapter(draft: str) -> dict[str, str]:
        """Writes a chapter."""
        agent.execute(draft, "written")
        return {"text": words(1_200)}

    def finish_chapter(title: str, tool_context: ToolContext) -> dict[str, str]:
        """Closes a chapter and frees the context window."""
        agent.execute(title, "closed")
        request_compaction(tool_context.state)
        return {"status": "closed"}

    outcome = await run_turn(
        STRATEGIES[strategy](context_window=8_000),
        agent.reply,
        [write_chapter, finish_chapter],
        "Write a book, and close each chapter.",
        summarizer=SUMMARIZERS[summarizer],
        max_calls=2 * len(agent.jobs),
    )
    assert (agent.twice, agent.never) == ([], [])
    assert outcome.answer == "All done."
    assert 1 <= len(outcome.compactions) <= len(chapters)
    assert (outcome.llm.rejections, outcome.llm.violations) == (0, 0)


# --- a screenshot ---

PIXELS = b"\x89PNG of the page"


class Photographer(BasePlugin):
    """Adds the image to the result of `screenshot`, as newer ADKs do by themselves."""

    async def on_event_callback(self, *, invocation_context: Any, event: Event) -> None:
        """Adds it before the event is stored."""
        for response in event.get_function_responses():
            if response.name == "screenshot":
                image = types.FunctionResponsePart.from_bytes(
                    data=PIXELS, mime_type="image/png"
                )
                response.parts = [image]


def has_screenshot(record: RecordedRequest) -> bool:
    """Whether the image is in a request, within a tool's result or by itself."""
    parts = [part for content in record.contents for part in content.parts or ()]
    results = [part.function_response for part in parts if part.function_response]
    inner = [part.inline_data for result in results for part in result.parts or ()]
    blobs = [*inner, *(part.inline_data for part in parts)]
    return any(blob is not None and blob.data == PIXELS for blob in blobs)


@every_strategy
@every_summarizer
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

    outcome = await run_turn(
        STRATEGIES[strategy](context_window=8_000, **_quiet(strategy)),
        lambda _: next(replies),
        [read, screenshot],
        "Look at the page.",
        summarizer=SUMMARIZERS[summarizer],
        max_calls=len(steps),
        before=[Photographer("photographer")],
    )
    *_, before, after = agent_requests(outcome.llm)
    assert outcome.answer == "Seen."
    [compaction] = outcome.compactions
    assert compaction.tokens_before > before.prompt_tokens + 900  # The last call's.
    assert has_screenshot(after)


def _quiet(strategy: str) -> dict[str, Any]:
    """Settings with which the strategy waits for the threshold."""
    return {"max_messages": 50} if strategy == "sliding" else {}


# --- the agent itself ---


def test_what_counts_as_shown() -> None:
    """A job looks done by its whole name, or within a range, not by a part of one."""
    names = [job.name for job in make_jobs(12)]
    said = types.Part(
        text="Shipped ORD-0001, ORD-00041 and 0005; TCK-0003 to TCK-0006."
    )
    shown = find_named([types.Content(parts=[said])], names)
    assert shown == {"ORD-0001", "TCK-0003", "TCK-0006"}
