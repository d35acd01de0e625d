"""In a long turn with side effects nothing is done twice, and nothing is left out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from google.adk.events.event import Event
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from contextguard_adk import Pipeline, SlidingWindow, Threshold, request_compaction
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply, call
from tests.acting import SUMMARIZERS, ActingAgent, Job, make_jobs, run_turn
from tests.chats import agent_requests, words

STRATEGIES: dict[str, type[Strategy]] = {
    "threshold": Threshold,
    "sliding": SlidingWindow,
    "pipeline": Pipeline,
}
PAIRS = list(itertools.product(STRATEGIES, SUMMARIZERS))
with_and_without_summary = pytest.mark.parametrize(
    ("strategy", "summarizer"),
    [(name, kind) for name in STRATEGIES for kind in ("useless", "failing")],
)


def list_cases() -> list[Any]:
    """Strategy, summarizer, jobs, window and calls at once; the largest are slow."""
    sizes = [(30, 8_000, 1), (15, 8_000, 1), (30, 8_000, 3), (100, 16_000, 1),
             (100, 16_000, 3), (100, 8_000, 1), (100, 32_000, 3)]  # fmt: skip
    cases = []
    for (strategy, summarizer), size in itertools.product(PAIRS, sizes):
        # A useless summary leaves most to be seen.
        is_fast = size == sizes[0] or (summarizer == "useless" and size in sizes[1:3])
        # One by one the pipeline's window has most to drop without a summary.
        is_fast |= (strategy, summarizer, size) == ("pipeline", "useless", sizes[3])
        is_fast |= (strategy, summarizer, size) == ("sliding", "useless", sizes[4])
        case = (strategy, summarizer, *size)
        marks = () if is_fast else pytest.mark.slow
        cases.append(pytest.param(*case, id="-".join(map(str, case)), marks=marks))
    return cases


async def check_jobs(
    strategy: Strategy, summarizer: str, agent: ActingAgent, **settings: Any
) -> int:
    """Has an agent do its jobs, and checks that each was done once and that the turn
    ends; returns the number of compactions."""
    outcome = await run_turn(
        strategy,
        agent.reply,
        agent.tools,
        agent.request,
        summarizer=SUMMARIZERS[summarizer],
        max_calls=-(-len(agent.jobs) // agent.parallel_calls) + 10,
        **settings,
    )
    assert agent.wrong == {}
    assert (outcome.llm.rejections, outcome.llm.violations) == (0, 0)
    assert outcome.answer == "All done."
    assert outcome.compactions
    return len(outcome.compactions)


@pytest.mark.parametrize(
    ("strategy", "summarizer", "count", "window", "parallel"), list_cases()
)
async def test_each_job_is_done_once(
    strategy: str, summarizer: str, count: int, window: int, parallel: int
) -> None:
    """Whoever summarizes, a job that was done looks done, and the turn ends."""
    agent = ActingAgent(make_jobs(count), parallel)
    await check_jobs(STRATEGIES[strategy](context_window=window), summarizer, agent)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_plain_numbers_are_done_once(strategy: str) -> None:
    """It is the same where the jobs are plain numbers and a real tokenizer counts."""
    agent = ActingAgent(make_jobs(30, are_plain_numbers=True))
    made = STRATEGIES[strategy](context_window=8_000)
    await check_jobs(made, "useless", agent, token_ratio=None)


async def test_a_window_of_contents_is_not_compacted_more_often() -> None:
    """Without a model it covers what is too much as well, not only what it must."""
    window = SlidingWindow(context_window=16_000)
    good, failing = [
        await check_jobs(window, summarizer, ActingAgent(make_jobs(40)))
        for summarizer in ("good", "failing")
    ]
    assert good == failing


@with_and_without_summary
async def test_chapters_are_written_once(strategy: str, summarizer: str) -> None:
    """A tool that asks for a compaction at each chapter's end gets one for each at
    most, and no chapter is written or closed again."""
    jobs = []
    for number in range(1, 9):
        draft, title = f"draft-{number:02}", f"chapter-{number:02}"
        jobs.append(Job(draft, "write_chapter", {"draft": draft}))
        jobs.append(Job(title, "finish_chapter", {"title": title}))
    agent = ActingAgent(jobs)

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
        max_calls=2 * len(jobs),
    )
    assert agent.wrong == {}
    assert outcome.answer == "All done."
    assert 1 <= len(outcome.compactions) <= 8
    assert (outcome.llm.rejections, outcome.llm.violations) == (0, 0)


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


def list_images(contents: list[types.Content]) -> list[bytes | None]:
    """The images in a request, within tool results or by themselves."""
    parts = [part for content in contents for part in content.parts or ()]
    results = [part.function_response for part in parts if part.function_response]
    inner = [part.inline_data for result in results for part in result.parts or ()]
    blobs = [*inner, *(part.inline_data for part in parts)]
    return [blob.data for blob in blobs if blob]


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
    *_, before, after = agent_requests(outcome.llm)
    assert outcome.answer == "Seen."
    [compaction] = outcome.compactions
    assert compaction.tokens_before > before.prompt_tokens + 900  # The last call's.
    assert PIXELS in list_images(after.contents)
