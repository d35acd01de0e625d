"""Several agents in one app: hand-overs, branches, tools, workflows, loops and tasks.

Judged on what ADK puts into each request: neither an agent's requests nor those for
summaries say more, and the agent's own input is in all of them, word for word.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from google.adk.agents import (
    BaseAgent,
    LlmAgent,
    LoopAgent,
    ParallelAgent,
    SequentialAgent,
)
from google.adk.agents.callback_context import CallbackContext
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import START, Workflow, node
from google.genai import types

from contextguard_adk import ContextGuardPlugin, SlidingWindow
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import Chat, answer_text
from tests.chats import Changing, text_of
from tests.rewriting import stamping
from tests.talks import (
    MARKER,
    STRATEGIES,
    looking_tool,
    message,
    summarizing_llm,
)

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:\w+Agent is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The `plugins` argument:DeprecationWarning"),
]
ITEM = re.compile(r"mark-item([a-z])-\d{3}!")
STEPS = 4


class Watch(BasePlugin):
    """Stands before the guard, and a second one behind it: what did the guard add?"""

    def __init__(self, first: Watch | None = None) -> None:
        super().__init__(name="watch_last" if first else "watch_first")
        self._first = first
        self.shown: dict[str, set[str]] = {}
        self.contents: dict[tuple[str, str | None], list[types.Content]] = {}
        self.wrong: list[str] = []
        self.has_mixed = False

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Notes what ADK shows an agent; then what it is sent beyond that, or not."""
        agent = callback_context.agent_name
        contents = llm_request.contents
        branch = callback_context.get_invocation_context().branch

        if self._first is None:
            self.contents[agent, branch] = list(contents)
            found = find_markers(contents)
            self.shown.setdefault(agent, set()).update(found)
            self.has_mixed |= len(items_of(found)) > 1
            return

        before = self._first.contents[agent, branch]
        added = find_markers(contents) - find_markers(before)
        if added:
            self.wrong.append(f"{agent} was shown {added}")

        sent = "\n".join(text_of(content) for content in contents)
        inputs = [c for c in before if c.role == "user" and text_of(c)]
        if agent.startswith("worker") and text_of(inputs[-1]) not in sent:
            self.wrong.append(f"{agent} has lost its input")


def find_markers(contents: Sequence[types.Content]) -> set[str]:
    """The markers in what some contents say."""
    return set(MARKER.findall("\n".join(c.model_dump_json() for c in contents)))


def items_of(markers: set[str]) -> set[str]:
    """The items that some markers belong to."""
    return set(re.findall(r"mark-(?:item|look|answer)([a-z])-", " ".join(markers)))


def working(finish: bool = False) -> Callable[[LlmRequest], Reply]:
    """A model that looks things up for the item of its input, and answers."""
    counts = Counter[str]()

    def work(request: LlmRequest) -> Reply:
        found = ITEM.search("\n".join(text_of(content) for content in request.contents))
        item = found[1] if found else "lost"
        counts[item] += 1
        if counts[item] % STEPS:
            return scripted_call("look", item=item, step=counts[item])
        if finish:
            return scripted_call("finish_task", result=f"Result {counts[item]}.")
        return f"mark-answer{item}-{counts[item]:03}! It is done."

    return work


def look(item: str, step: int) -> str:
    """Looks something up."""
    return f"mark-look{item}-{step:03}! {'notebooks ' * 350}"


def worker(name: str = "worker", finish: bool = False, **settings: Any) -> LlmAgent:
    """An agent that works for long enough to be compacted."""
    llm = summarizing_llm(working(finish))
    return LlmAgent(name=name, model=llm, tools=[look], **settings)


def assigning(item: str = "a") -> LlmAgent:
    """An agent that names an item, and nothing of what the user said."""
    numbers = itertools.count()
    llm = summarizing_llm(lambda _: f"Do mark-item{item}-{next(numbers):03}! now")
    return LlmAgent(name=f"assigning_{item}", model=llm)


def delegating(**settings: Any) -> LlmAgent:
    """An agent that has the worker do it, and answers."""
    numbers = itertools.count()

    def delegate(request: LlmRequest) -> Reply:
        number = next(numbers)
        if number % 2:
            return "It is done."
        return scripted_call("worker", request=f"Do mark-itema-{number:03}! now.")

    return LlmAgent(name="root", model=summarizing_llm(delegate), **settings)


def flow_loop() -> tuple[Any, list[LlmAgent]]:
    """A node that runs several times in one turn, each time with an input."""
    own = worker()
    numbers = itertools.count(1)

    async def repeat(node_input: Any) -> Event:
        number = next(numbers)
        route = "stop" if number % 3 == 0 else "more"
        task = f"Do mark-itema-{number:03}! now."
        return Event.model_validate({"route": route, "output": task})

    async def stop(node_input: Any) -> str:
        return "It is done."

    ways: Any = (repeat, {"more": own, "stop": stop})
    return Workflow(name="flow", edges=[(START, repeat), ways, (own, repeat)]), [own]


def behind(first: BaseAgent, is_loop: bool = False) -> tuple[Any, list[LlmAgent]]:
    """An agent without contents behind another one, whose reply is its input."""
    own = worker(include_contents="none")
    agents: list[BaseAgent] = [first, own]
    if is_loop:
        return LoopAgent(name="all", sub_agents=agents, max_iterations=2), [own]
    return SequentialAgent(name="all", sub_agents=agents), [own]


def single_turn(**settings: Any) -> tuple[Any, list[LlmAgent]]:
    """A node of a workflow, which another one gives its input."""
    own = worker(**settings)

    async def shape(node_input: Any) -> str:
        return "Do mark-itema-000! now."

    return Workflow(name="flow", edges=[(START, shape, own)]), [own]


def task() -> tuple[Any, list[LlmAgent]]:
    """A task that another agent delegates."""
    own = worker(finish=True, mode="task", description="Works.")
    return delegating(sub_agents=[own]), [own]


def agent_tool() -> tuple[Any, list[LlmAgent]]:
    """An agent as a tool of another one."""
    own = worker()
    return delegating(tools=[AgentTool(own)]), [own]


def branches() -> tuple[Any, list[LlmAgent]]:
    """Parallel branches, each with an assigning agent of its own."""
    owns = [worker(f"worker_{item}", include_contents="none") for item in "ab"]
    pairs: list[BaseAgent] = [
        SequentialAgent(name=f"branch_{item}", sub_agents=[assigning(item), own])
        for item, own in zip("ab", owns, strict=True)
    ]
    return ParallelAgent(name="all", sub_agents=pairs), owns


def parallel_workers() -> tuple[Any, list[LlmAgent]]:
    """One agent as several workers at once, each with an item."""
    own = worker()

    async def list_items(node_input: Any) -> list[str]:
        return [f"Do mark-item{item}-000! now." for item in "abc"]

    workers = node(own, parallel_worker=True)
    return Workflow(name="flow", edges=[(START, list_items, workers)]), [own]


REPEATED = ("loop", "workflow loop", "parallel workers")
"""Cases whose worker runs several times in a turn."""

CASES: dict[str, Callable[[], tuple[Any, list[LlmAgent]]]] = {
    "loop": lambda: behind(assigning(), is_loop=True),
    "workflow loop": flow_loop,
    "behind another": lambda: behind(assigning()),
    "single turn": single_turn,
    "single turn with history": lambda: single_turn(
        mode="single_turn", include_contents="default"
    ),
    "task": task,
    "agent tool": agent_tool,
    "branches": branches,
    "parallel workers": parallel_workers,
}


SPREAD = [
    pytest.param(strategy, name, id=f"{name}-{title}")
    for name, (title, strategy) in zip(
        CASES, itertools.cycle(STRATEGIES.items()), strict=False
    )
]


async def converse(
    root: Any, workers: Sequence[LlmAgent], strategy: Strategy, *says: str, **by: Any
) -> None:
    """Has some turns, and judges all requests."""
    first = Watch()
    last = Watch(first)
    guard = ContextGuardPlugin(default=strategy)
    chat = Chat(root, [first, *by.get("before", ()), guard, last])

    for said in says:
        await chat.say(said)

    assert not last.wrong
    for own in workers:
        llm = own.model
        assert isinstance(llm, SimulatedLlm)
        assert llm.summaries >= 3
        assert (llm.rejections, llm.violations) == (0, 0)
        for request in llm.requests:
            said_there = set(MARKER.findall(request.text))
            assert said_there <= first.shown[own.name]
            # ADK 2.0 itself gives parallel workers the input of the last one.
            assert first.has_mixed or len(items_of(said_there)) <= 1


@pytest.mark.parametrize(("strategy", "name"), SPREAD)
async def test_no_agent_is_told_more_than_adk_shows_it(
    strategy: Strategy, name: str
) -> None:
    """No word of the user that ADK keeps from it, and none of another branch."""
    if "mode" not in LlmAgent.model_fields:
        pytest.skip("this ADK has no tasks")
    turns = 2 if name in REPEATED else 3
    says = [message(number, "raw", 40) for number in range(turns)]
    before = [Changing(stamping())] if name == "single turn" else []
    await converse(*CASES[name](), strategy, *says, before=before)


async def test_each_agent_has_its_own_strategy_and_summary() -> None:
    """Agents that hand over keep their state apart; one may be exempt."""
    llms = {name: summarizing_llm() for name in ("root", "researcher", "writer")}
    llms["root"].context_window = llms["writer"].context_window = 1_000_000

    def go_to(name: str) -> Reply:
        return scripted_call("transfer_to_agent", agent_name=name)

    steps = [scripted_call("look", step=step) for step in range(4)]
    llms["root"].script = [go_to("researcher"), "Welcome back."]
    llms["researcher"].script = [*steps, "Found it.", go_to("writer")]
    llms["writer"].script = [message(7, "answer"), go_to("root")]
    agents: list[BaseAgent] = [
        LlmAgent(name=name, model=llms[name], tools=[looking_tool(300)])
        for name in ("researcher", "writer")
    ]
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
    summarized = [f"__context_guard_summary_{name}" in state for name in llms]
    assert summarized == [False, True, True]
    assert llms["root"].summaries == 0
    assert "mark-result-003!" in llms["root"].requests[-1].text
    assert all(llm.rejections == llm.violations == 0 for llm in llms.values())


async def test_guards_of_different_agents_are_no_mistake(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each agent has one guard, so none is said to be idle."""
    llm = SimulatedLlm(script=["To you.", "Done."])
    agents = [LlmAgent(name=name, model=llm) for name in ("writer", "editor")]
    strategy = SlidingWindow(context_window=8_000)
    guards = [
        ContextGuardPlugin(
            agents={agent.name: strategy}, default=None, name=f"guard_{agent.name}"
        )
        for agent in agents
    ]
    chat = Chat(SequentialAgent(name="both", sub_agents=[*agents]), guards)

    assert answer_text(await chat.say("Please write.")) == "Done."
    warnings = [each for each in caplog.records if each.levelname == "WARNING"]
    assert not [each for each in warnings if each.name.startswith("contextguard")]
