"""One agent at work on several items at once: each worker keeps its own summary."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions import BaseSessionService, InMemorySessionService
from google.adk.workflow import START, Workflow, node

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import Chat, guarded_agent
from tests.chats import agent_requests
from tests.test_databases import own_database, store_marks

pytestmark = pytest.mark.skipif(
    "max_parallel_workers" not in inspect.signature(node).parameters,
    reason="this ADK shows a worker the items of others",
)
ITEM = re.compile(r"item-\d\d")


def say(request: LlmRequest) -> str:
    """All that a request says, as JSON."""
    return request.model_dump_json(include={"contents"})


def summarize(request: LlmRequest) -> str:
    """A summary that names the item and the steps, and nothing else."""
    return " ".join(dict.fromkeys(re.findall(r"item-\d\d|step-\d+!", say(request))))


async def work(
    item_count: int,
    call_count: int,
    words: int,
    sessions: BaseSessionService,
    max_workers: int | None = None,
) -> SimulatedLlm:
    """Has an agent look `call_count - 1` times for each item, all items at once."""

    def look(step: int, item: str) -> str:
        """Looks something up."""
        return f"{item} step-{step}! " + "notebooks " * words

    def reply(request: LlmRequest) -> Reply:
        step = 1 + max(map(int, re.findall(r"step-(\d+)!", say(request))), default=0)
        [item] = set(ITEM.findall(say(request)))  # It sees no other branch.
        done = step == call_count
        return "Done." if done else scripted_call("look", step=step, item=item)

    def items() -> list[str]:
        """The items to work on."""
        return [f"Look for item-{number:02}." for number in range(item_count)]

    llm = SimulatedLlm(
        context_window=3_000,
        token_ratio=1.0,
        latency_seconds=0.001,
        script=reply,
        summary_replies=summarize,
    )
    agent = guarded_agent(llm, [look])
    workers = node(agent, parallel_worker=True, max_parallel_workers=max_workers)
    flow = Workflow(name="flow", edges=[(START, items, workers)])
    guard = ContextGuardPlugin(default=Threshold(context_window=3_000))
    await Chat(flow, [guard], session_service=sessions).say("Go.")
    requests = agent_requests(llm)
    assert len(requests) == item_count * call_count
    assert all(len(set(ITEM.findall(each.text))) == 1 for each in requests)
    assert (llm.rejections, llm.violations) == (0, 0)
    return llm


@pytest.mark.parametrize(
    ("kind", "item_count", "call_count", "words"),
    [
        ("memory", 2, 31, 60),
        ("memory", 20, 6, 600),
        pytest.param("postgres", 2, 31, 60, marks=store_marks("postgres")),
    ],
)
async def test_workers_at_once_cost_no_more_summaries(
    kind: str, item_count: int, call_count: int, words: int, tmp_path: Path
) -> None:
    """Also of more workers than scopes are kept none loses its summary meanwhile."""
    summaries = []
    for count in (1, item_count):
        (folder := tmp_path / str(count)).mkdir()
        async with own_database(kind, folder) as store, store.open() as sessions:
            llm = await work(count, call_count, words, sessions)
        summaries.append(llm.summaries)
    assert summaries[0] >= 2
    assert summaries[1] <= 1.2 * item_count * summaries[0]


async def test_of_items_done_in_one_run_16_are_kept() -> None:
    """However many an agent works through, those that are done make room."""
    sessions = InMemorySessionService()
    await work(20, 2, 60, sessions, max_workers=2)
    chat = Chat(guarded_agent(SimulatedLlm()), session_service=sessions)
    live = [key for key, value in (await chat.state()).items() if value is not None]
    assert len({key.partition("@")[2] for key in live} - {""}) == 16
