"""Several agents in one app: hand-overs, branches, tools, workflows and tasks.

However they share a session: no request is refused, each turn is answered, and no
summary of one turns up where another history goes on.
"""

from __future__ import annotations

import itertools
import re

import pytest
from google.adk.agents import (
    BaseAgent,
    LlmAgent,
    LoopAgent,
    ParallelAgent,
    SequentialAgent,
)
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.plugin_manager import PluginManager
from google.adk.sessions import InMemorySessionService
from google.adk.workflow import START, Workflow
from pydantic import BaseModel

from contextguard_adk import ContextGuardPlugin, SlidingWindow
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply
from contextguard_adk.testing import call as scripted_call
from tests.builders import Chat, answer_text, guarded_agent, model, user
from tests.chats import agent_requests
from tests.talks import (
    STRATEGIES,
    Talk,
    acting,
    looking_tool,
    message,
    spread,
    summarizing_llm,
    workflow_agents,
)

agent_tools = pytest.mark.filterwarnings(
    "ignore:The `plugins` argument is deprecated:DeprecationWarning"
)


def strategies(*names: str) -> pytest.MarkDecorator:
    """A test with some of the strategies."""
    cells = [pytest.param(STRATEGIES[name], id=name) for name in names]
    return pytest.mark.parametrize("strategy", cells)


async def test_each_agent_has_its_own_strategy_and_summary() -> None:
    """Agents that hand over keep their state apart; one may be exempt."""
    llms = {name: summarizing_llm() for name in ("root", "researcher", "writer")}
    llms["root"].context_window = llms["writer"].context_window = 1_000_000
    llms["root"].script = [
        scripted_call("transfer_to_agent", agent_name="researcher"),
        "Welcome back.",
    ]
    to_root = scripted_call("transfer_to_agent", agent_name="root")
    to_writer = scripted_call("transfer_to_agent", agent_name="writer")
    steps = [scripted_call("look", step=step) for step in range(4)]
    llms["researcher"].script = [*steps, "Found it.", to_writer]
    llms["writer"].script = [message(7, "answer"), to_root]
    researcher, writer = (
        LlmAgent(name=name, model=llms[name], tools=[looking_tool(300)])
        for name in ("researcher", "writer")
    )
    agents: list[BaseAgent] = [researcher, writer]
    root = LlmAgent(name="root", model=llms["root"], sub_agents=agents)
    plugin = ContextGuardPlugin(
        agents={
            "researcher": STRATEGIES["threshold"],
            "writer": SlidingWindow(context_window=100_000, max_messages=6),
            "root": None,
        }
    )
    chat = Chat(root, [plugin])
    asked = ("Look it up.", "Write it down.", "Back to the start.")
    answers = [answer_text(await chat.say(text)) for text in asked]
    assert answers == ["Found it.", message(7, "answer"), "Welcome back."]
    state = await chat.state()
    summarized = {name: f"__context_guard_summary_{name}" in state for name in llms}
    assert summarized == {"root": False, "researcher": True, "writer": True}
    assert llms["root"].summaries == 0
    assert "mark-result-003!" in llms["root"].requests[-1].text
    assert all(llm.rejections == llm.violations == 0 for llm in llms.values())


@workflow_agents
@spread("kind", {k.__name__: k for k in (ParallelAgent, SequentialAgent, LoopAgent)})
async def test_agents_side_by_side(strategy: Strategy, kind: type[BaseAgent]) -> None:
    """Steps and rounds of several agents, and branches with keys of their own."""
    llms = {
        name: summarizing_llm(acting(), latency_seconds=0.001)
        for name in ("left", "middle", "right")
    }
    agents: list[BaseAgent] = [
        LlmAgent(name=name, model=llm, tools=[looking_tool()])
        for name, llm in llms.items()
    ]
    root = kind(name="root", sub_agents=agents)
    if isinstance(root, LoopAgent):
        root.max_iterations = 2
    talk = Talk(root, strategy, *llms.values())
    for number in range(4):
        await talk.ask(message(number, words=200))
    talk.check()
    state = await talk.state()
    for name, llm in llms.items():
        assert llm.summaries
        key = f"__context_guard_summary_{name}"
        [found] = [k for k in state if k.startswith(key)]
        assert found.startswith(f"{key}@") is (kind is ParallelAgent)


# --- Branches, workflows and isolated tasks ---------------------------------------


async def test_at_most_16_branches_of_an_agent_are_kept() -> None:
    """Of twenty branches the oldest ones are cleared, and no key is left of them."""
    plugin = ContextGuardPlugin(default=STRATEGIES["threshold"])
    agent = guarded_agent(summarizing_llm())
    sessions = InMemorySessionService()
    session = await sessions.create_session(app_name="app", user_id="user")
    added = []
    for number in range(20):
        known = {key for key, value in session.state.items() if value is not None}
        invocation = InvocationContext(
            invocation_id=f"invocation-{number}",
            branch=f"root.agent_{number}",
            agent=agent,
            session=session,
            session_service=sessions,
            plugin_manager=PluginManager(plugins=[plugin]),
        )
        context = CallbackContext(invocation)
        contents = [user("Hello."), model("notebooks " * 2_000), user("Go on.")]
        request = LlmRequest(model="simulated", contents=contents)
        await plugin.before_model_callback(
            callback_context=context, llm_request=request
        )
        added.append({k for k, v in session.state.items() if v is not None} - known)
    kept = {key for key, value in session.state.items() if value is not None}
    assert [bool(keys & kept) for keys in added[-16:]] == [True] * 16
    branches = {key.partition("@")[2] for key in kept} - {""}
    assert len(branches) == 16


class Declared(BaseModel):
    """The only keys that nodes may write."""

    topic: str = ""


@spread("schema", {"free": None, "declared": Declared})
async def test_workflows(strategy: Strategy, schema: type[BaseModel] | None) -> None:
    """Agents that are nodes of a workflow keep their summaries from turn to turn."""
    llms = [summarizing_llm(acting()) for _ in ("one", "two")]
    one, two = (
        LlmAgent(name=f"agent_{number}", model=llm, tools=[looking_tool(150)])
        for number, llm in enumerate(llms)
    )
    flow = Workflow(name="flow", edges=[(START, one, two)], state_schema=schema)
    talk = Talk(flow, strategy, *llms)
    for number in range(10):
        await talk.ask(message(number, words=90))
    state = await talk.state()
    assert any("context_guard" in key for key in state)
    assert schema is None or not any(key.startswith("__context_guard") for key in state)
    talk.check()


@pytest.mark.skipif(
    "mode" not in LlmAgent.model_fields, reason="this ADK has no task agents"
)
@strategies("threshold", "sliding")
async def test_tasks_are_kept_apart(strategy: Strategy) -> None:
    """Each task has its own scope: no summary of one task turns up in another."""
    steps = itertools.count(1)

    def work(request: LlmRequest) -> Reply:
        """Looks things up, asks the user in between, and finishes."""
        number = next(steps)
        if number % 9 == 5:
            return message(number, "question", 30)
        if number % 9 == 0:
            return scripted_call("finish_task", result=f"Result {number}.")
        return scripted_call("look", step=number)

    def delegate(request: LlmRequest) -> Reply:
        """Hands each message of the user to the worker."""
        newest = request.contents[-1].parts or []
        if any(part.function_response for part in newest):
            return message(next(steps_of_root), "answer", 30)
        return scripted_call("worker", request=f"Task {next(steps_of_root):04}.")

    steps_of_root = itertools.count(1)
    worker_llm, llm = summarizing_llm(work), summarizing_llm(delegate)
    worker = LlmAgent(
        name="worker",
        model=worker_llm,
        mode="task",
        description="Works.",
        tools=[looking_tool(180)],
    )
    root = LlmAgent(name="root", model=llm, sub_agents=[worker])
    talk = Talk(root, strategy, llm, worker_llm)
    for number in range(8):
        await talk.ask(message(number, words=40))
    assert worker_llm.summaries >= 4
    talk.check()
    seen: set[str] = set()
    for request in agent_requests(worker_llm):
        tasks = set(re.findall(r"Task \d{4}\.", request.text))
        assert len(tasks) == 1, "a request speaks of another task, or of none"
        seen |= tasks
    assert len(seen) >= 4
