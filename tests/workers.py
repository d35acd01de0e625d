"""One agent at work on several items at once."""

from __future__ import annotations

import inspect
import re

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions import BaseSessionService
from google.adk.workflow import START, Workflow, node

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import Chat, guarded_agent
from tests.chats import agent_requests

shows_own_items = pytest.mark.skipif(
    "max_parallel_workers" not in inspect.signature(node).parameters,
    reason="this ADK shows a worker the items of others",
)

WINDOW = 1_500
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
        numbers = [int(step) for step in re.findall(r"step-(\d+)!", say(request))]
        step = 1 + max(numbers, default=0)
        [item] = set(ITEM.findall(say(request)))  # It sees no other branch.
        done = step == call_count
        return "Done." if done else scripted_call("look", step=step, item=item)

    def items() -> list[str]:
        """The items to work on."""
        return [f"Look for item-{number:02}." for number in range(item_count)]

    llm = SimulatedLlm(
        context_window=WINDOW,
        token_ratio=1.0,
        latency_seconds=0.001,
        script=reply,
        summary_replies=summarize,
    )
    agent = guarded_agent(llm, [look])
    workers = node(agent, parallel_worker=True, max_parallel_workers=max_workers)
    flow = Workflow(name="flow", edges=[(START, items, workers)])
    guard = ContextGuardPlugin(default=Threshold(context_window=WINDOW))
    await Chat(flow, [guard], session_service=sessions).say("Go.")
    requests = agent_requests(llm)
    assert len(requests) == item_count * call_count
    assert all(len(set(ITEM.findall(each.text))) == 1 for each in requests)
    assert (llm.rejections, llm.violations) == (0, 0)
    return llm
