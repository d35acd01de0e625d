"""What ADK keeps from an agent, the guard keeps from it as well.

Judged on what ADK puts into each request: neither the agent's requests nor those for
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

from contextguard_adk import ContextGuardPlugin
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import Chat
from tests.chats import Changing, text_of
from tests.rewriting import stamping
from tests.talks import MARKER, STRATEGIES, every_strategy, message, summarizing_llm

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:\w+Agent is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The `plugins` argument:DeprecationWarning"),
]
ITEM = re.compile(r"mark-item([a-z])-\d{3}!")
STEPS = 9


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
        agent, contents = callback_context.agent_name, llm_request.contents
        branch = callback_context.get_invocation_context().branch
        if self._first is None:
            self.contents[agent, branch] = list(contents)
            known = self.shown.setdefault(agent, set())
            known |= (found := find_markers(contents))
            self.has_mixed |= len(set(map(_item_of, found)) - {""}) > 1
            return
        before = self._first.contents[agent, branch]
        if added := find_markers(contents) - find_markers(before):
            self.wrong.append(f"{agent} was shown {added}")
        sent = "\n".join(map(text_of, contents))
        inputs = [c for c in before if c.role == "user" and text_of(c)]
        if agent.startswith("worker") and text_of(inputs[-1]) not in sent:
            self.wrong.append(f"{agent} has lost its input")


def find_markers(contents: Sequence[types.Content]) -> set[str]:
    """The markers in what some contents say."""
    return set(MARKER.findall(str([c.model_dump(mode="json") for c in contents])))


def working(steps: int = STEPS) -> Callable[[LlmRequest], Reply]:
    """A model that looks things up for the item of its input, and answers."""
    counts = Counter[str]()

    def work(request: LlmRequest) -> Reply:
        found = ITEM.search("\n".join(map(text_of, request.contents)))
        item = found[1] if found else "lost"
        counts[item] += 1
        if counts[item] % steps == 0:
            return f"mark-answer{item}-{counts[item]:03}! It is done."
        return scripted_call("look", item=item, step=counts[item])

    return work


def look(item: str, step: int) -> str:
    """Looks something up."""
    return f"mark-look{item}-{step:03}! {'notebooks ' * 150}"


def worker(name: str, script: Any = None, **settings: Any) -> LlmAgent:
    """An agent that works for long enough to be compacted."""
    llm = summarizing_llm(script or working())
    return LlmAgent(name=name, model=llm, tools=[look], **settings)


def assigning(item: str) -> LlmAgent:
    """An agent that names an item, and nothing of what the user said."""
    numbers = itertools.count()
    llm = summarizing_llm(lambda request: f"Do mark-item{item}-{next(numbers):03}! now")
    return LlmAgent(name=f"assigning_{item}", model=llm)


def delegating(tool: str) -> Callable[[LlmRequest], Reply]:
    """A model that has another agent do it, and answers."""
    numbers = itertools.count()

    def delegate(request: LlmRequest) -> Reply:
        number = next(numbers)
        if number % 2:
            return "It is done."
        return scripted_call(tool, request=f"Do mark-itema-{number:03}! now.")

    return delegate


def behind_another() -> tuple[Any, list[LlmAgent]]:
    """An agent without contents behind another one, whose reply is its input."""
    own = worker("worker", include_contents="none")
    return SequentialAgent(name="all", sub_agents=[assigning("a"), own]), [own]


def workflow(*nodes: Any) -> Workflow:
    """A workflow whose first node gives the others their input."""
    return Workflow(name="flow", edges=[(START, *nodes)])


async def shape(node_input: Any) -> str:
    """Gives the next node an input of its own."""
    return "Do mark-itema-000! now."


async def list_items(node_input: Any) -> list[str]:
    """Gives each worker an item."""
    return [f"Do mark-item{item}-000! now." for item in "abcd"]


def single_turn() -> tuple[Any, list[LlmAgent]]:
    """A node of a workflow, which sees its own input."""
    own = worker("worker")
    return workflow(shape, own), [own]


def single_turn_with_history() -> tuple[Any, list[LlmAgent]]:
    """A node that sees what was said in its own place."""
    own = worker("worker", mode="single_turn", include_contents="default")
    return workflow(shape, own), [own]


def task() -> tuple[Any, list[LlmAgent]]:
    """A task that another agent delegates."""
    numbers = itertools.count(1)

    def finish(request: LlmRequest) -> Reply:
        reply = work(request)
        if isinstance(reply, str):
            return scripted_call("finish_task", result=f"Result {next(numbers)}.")
        return reply

    work = working()
    own = worker("worker", finish, mode="task", description="Works.")
    llm = summarizing_llm(delegating("worker"))
    return LlmAgent(name="root", model=llm, sub_agents=[own]), [own]


def agent_tool() -> tuple[Any, list[LlmAgent]]:
    """An agent as a tool of another one."""
    own = worker("worker")
    llm = summarizing_llm(delegating("worker"))
    return LlmAgent(name="root", model=llm, tools=[AgentTool(own)]), [own]


def branches() -> tuple[Any, list[LlmAgent]]:
    """Parallel branches, each with an assigning agent of its own."""
    owns = [worker(f"worker_{item}", include_contents="none") for item in "abc"]
    pairs: list[BaseAgent] = [
        SequentialAgent(name=f"branch_{item}", sub_agents=[assigning(item), own])
        for item, own in zip("abc", owns, strict=True)
    ]
    return ParallelAgent(name="all", sub_agents=pairs), owns


def parallel_workers() -> tuple[Any, list[LlmAgent]]:
    """One agent as several workers at once."""
    own = worker("worker")
    return workflow(list_items, node(own, parallel_worker=True)), [own]


def loop() -> tuple[Any, list[LlmAgent]]:
    """An agent without contents that gets an input again and again in one turn."""
    own = worker("worker", include_contents="none")
    agents: list[BaseAgent] = [assigning("a"), own]
    return LoopAgent(name="all", sub_agents=agents, max_iterations=2), [own]


def loop_with_one_input() -> tuple[Any, list[LlmAgent]]:
    """The same, but each time it gets the same input."""
    own = worker("worker", include_contents="none")
    llm = summarizing_llm(lambda request: "Do mark-itema-000! now")
    first = LlmAgent(name="first", model=llm, include_contents="none")
    agents: list[BaseAgent] = [first, own]
    return LoopAgent(name="all", sub_agents=agents, max_iterations=2), [own]


def workflow_loop(is_same: bool = False, **settings: Any) -> tuple[Any, list[LlmAgent]]:
    """A node that runs several times in one turn, each time with an input."""
    own, numbers = worker("worker", **settings), itertools.count(1)

    async def repeat(node_input: Any) -> Event:
        number = next(numbers)
        route = "stop" if number % 3 == 0 else "more"
        task = f"Do mark-itema-{0 if is_same else number:03}! now."
        return Event.model_validate({"route": route, "output": task})

    async def stop(node_input: Any) -> str:
        return "It is done."

    edges: list[Any] = [
        (START, repeat),
        (repeat, {"more": own, "stop": stop}),
        (own, repeat),
    ]
    return Workflow(name="flow", edges=edges), [own]


def workflow_loop_with_one_input() -> tuple[Any, list[LlmAgent]]:
    """The same, but each time it gets the same input."""
    return workflow_loop(is_same=True)


def workflow_loop_with_history() -> tuple[Any, list[LlmAgent]]:
    """The same, and each time it is shown the user's message as well."""
    return workflow_loop(mode="single_turn", include_contents="default")


CASES = [
    loop,
    loop_with_one_input,
    workflow_loop,
    workflow_loop_with_one_input,
    workflow_loop_with_history,
    behind_another,
    single_turn,
    single_turn_with_history,
    task,
    agent_tool,
    branches,
    parallel_workers,
]


def all_cases() -> list[Any]:
    """Each case with each strategy; by default with one of them, in turn."""
    cases = []
    for number, build in enumerate(CASES):
        for place, (title, strategy) in enumerate(STRATEGIES.items()):
            marks = () if number % len(STRATEGIES) == place else pytest.mark.slow
            case_id = f"{build.__name__}-{title}"
            cases.append(pytest.param(strategy, build, id=case_id, marks=marks))
    return cases


@pytest.mark.parametrize(("strategy", "build"), all_cases())
async def test_no_agent_is_told_more_than_adk_shows_it(
    strategy: Strategy, build: Callable[[], tuple[Any, list[LlmAgent]]]
) -> None:
    """No word of the user that ADK keeps from it, and none of another branch."""
    if "mode" not in LlmAgent.model_fields:
        pytest.skip("this ADK has no tasks")
    root, workers = build()
    await check(root, workers, strategy)


@every_strategy
@pytest.mark.parametrize(
    "build", [behind_another, single_turn], ids=lambda build: build.__name__
)
async def test_nor_behind_a_plugin_that_rewrites(
    strategy: Strategy, build: Callable[[], tuple[Any, list[LlmAgent]]]
) -> None:
    """The input stays word for word, behind the time that it was stamped with."""
    root, workers = build()
    await check(root, workers, strategy, Changing(stamping()))


async def check(
    root: Any,
    workers: Sequence[LlmAgent],
    strategy: Strategy,
    *before: BasePlugin,
) -> None:
    """Talks for three turns, and judges all requests."""
    first = Watch()
    last = Watch(first)
    guard = ContextGuardPlugin(default=strategy)
    chat = Chat(root, [first, *before, guard, last])
    for number in range(3):
        await chat.say(message(number, "raw", 40))
    assert not last.wrong
    for own in workers:
        llm = own.model
        assert isinstance(llm, SimulatedLlm)
        assert llm.summaries >= 3
        assert (llm.rejections, llm.violations) == (0, 0)
        for request in llm.requests:
            said = set(MARKER.findall(request.text))
            assert said <= first.shown[own.name]
            # ADK 2.0 itself gives parallel workers the input of the last one.
            assert first.has_mixed or len(set(map(_item_of, said)) - {""}) <= 1


def _item_of(marker: str) -> str:
    found = re.match(r"mark-(?:item|look|answer)([a-z])-", marker)
    return found[1] if found else ""


@every_strategy
async def test_an_agent_without_contents_forgets_earlier_turns(
    strategy: Strategy,
) -> None:
    """Alone at the root its input is the user's message, of this turn alone."""
    llm = summarizing_llm(working())
    agent = LlmAgent(name="agent", model=llm, tools=[look], include_contents="none")
    first = Watch()
    last = Watch(first)
    chat = Chat(agent, [first, ContextGuardPlugin(default=strategy), last])
    for item in "abc":
        await chat.say(f"Do mark-item{item}-000! now.")
    assert llm.summaries >= 3
    assert not last.wrong
    for request in llm.requests:
        items = {_item_of(marker) for marker in MARKER.findall(request.text)}
        assert len(items - {""}) == 1
