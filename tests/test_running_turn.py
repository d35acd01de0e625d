"""What stands of a running turn: its newest steps, and a list of the others."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.apps.app import EventsCompactionConfig
from google.adk.models.llm_request import LlmRequest
from google.adk.tools.base_tool import BaseTool
from google.adk.workflow import START, Workflow
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Pipeline, SlidingWindow, Threshold
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import (
    ContextOverflowError,
    RecordedRequest,
    Reply,
    SimulatedLlm,
    call,
)
from contextguard_adk.testing.provider import count_tokens, list_content_texts
from tests import builders
from tests.acting import run_turn, say_nothing
from tests.chats import (
    DEMAND,
    agent_requests,
    guarded_chat,
    seed,
    some_slow,
    summary_requests,
    words,
)

ORDERS = [f"ORD-{number:04}" for number in range(1, 16)]


class Ship(BaseTool):
    """Takes any arguments, and returns prepared results, the last one for ever."""

    def __init__(self, results: Sequence[Any]) -> None:
        super().__init__(name="ship", description="Ships.")
        self._results = [*results]

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(name=self.name, description="Ships.")

    async def run_async(self, *, args: dict[str, Any], tool_context: Any) -> Any:
        """Returns the next one."""
        return self._results.pop(0) if len(self._results) > 1 else self._results[0]


async def list_done(
    arguments: Sequence[dict[str, Any]], *results: Any, window: int = 4_000
) -> str:
    """The newest list of what is done, in a turn of these calls."""
    replies: list[Reply] = [call("ship", **args) for args in arguments]
    script = iter([*replies, "Done."])
    outcome = await run_turn(
        Threshold(context_window=window, keep=0),
        lambda _: next(script),
        [Ship(results or [{"status": "ok", "log": words(450)}])],  # type: ignore[list-item]
        "Ship all.",
        summarizer=say_nothing,
        max_calls=len(arguments) + 1,
    )
    assert (outcome.answer, outcome.llm.rejections) == ("Done.", 0)
    head = "\n".join(list_content_texts(agent_requests(outcome.llm)[-1].contents[:1]))
    done = head.partition("[Done so far")[2].partition("\n[")[0]
    assert 0 < count_tokens([done], 1.0) <= window // 10
    return done + str(agent_requests(outcome.llm)[-1].contents[1:])


PATHS = [f"src/{'handlers/' * 10}{n:02}/config.yaml" for n in range(10, 25)]
NESTED = {"customer": {"name": "Jane Example", "notes": words(30)}}
ARGUMENTS: dict[str, tuple[list[dict[str, Any]], int, list[str]]] = {
    "long notes": (
        [{"order": it, "to": "Rome", "note": words(30, it)} for it in ORDERS],
        4_000,
        ORDERS,
    ),
    "paths without room": (
        [{"path": path} for path in PATHS],
        4_000,
        [f"{n}" for n in range(10, 24)],
    ),
    "inside an argument": (
        [{"order": {**NESTED, "id": it, "note": words(30, it)}} for it in ORDERS],
        4_000,
        ORDERS,
    ),
    "nothing": ([{}] * 20, 4_000, [" times"]),
}


@pytest.mark.parametrize(
    ("arguments", "window", "named"), ARGUMENTS.values(), ids=ARGUMENTS
)
async def test_what_tells_calls_apart_is_listed(
    arguments: list[dict[str, Any]], window: int, named: list[str]
) -> None:
    """Each call of the turn is named, in less room by less."""
    done = await list_done(arguments, window=window)
    assert [name for name in named if name not in done] == []


FAILURES = {
    "text": "Error: no such carrier",
    "status": {"status": "error", "error_message": "no such carrier"},
    "exit code": {"exit_code": 2, "stderr": "no such carrier"},
    "mcp": {"content": [{"type": "text", "text": "no carrier"}], "isError": True},
}
DONE = {"status": "ok", "success": True, "exit_code": 0, "error": None}


@pytest.mark.parametrize("name", some_slow(FAILURES, "status", "mcp"))
async def test_failed_calls_show_at_every_length(name: str) -> None:
    """A call that failed does not look like one that succeeded."""
    failure = FAILURES[name]
    for window in (4_000, 8_000):
        arguments = [{"order": it, "note": words(60, it)} for it in ORDERS]
        results = failure, {**DONE, "log": words(450)}
        done = await list_done(arguments, *results, window=window)
        first, rest = done.split("ORD-0002", 1)
        assert re.search(r"error|carrier", first, re.IGNORECASE)
        assert not re.search(r"→ error", rest)


EMPTY: list[Any] = [None, [], False, "", 0, {}, "none"]


@pytest.mark.parametrize(("indent", "is_text"), [(None, True), (1, True), (0, False)])
async def test_an_empty_error_is_no_failure(indent: int | None, is_text: bool) -> None:
    """Tools name fields for errors that there were none; also in JSON as a text."""
    results: list[Any] = [
        {"error": none, "nested": {"errors": none}, "log": words(450)} for none in EMPTY
    ]
    results.append({"ok": True, "errors": {"a": 1}, "log": words(450)})
    if is_text:
        results = [json.dumps(result, indent=indent) for result in results]
    arguments = [{"order": it, "note": words(60, it)} for it in ORDERS]
    done = await list_done(arguments, *results)
    listed = [item for item in ORDERS if re.search(rf"{item}[^;]*→ error", done)]

    assert listed == ORDERS[len(EMPTY) : len(EMPTY) + len(listed)] != []


# --- the newest steps ---


async def read(
    *results: str, window: int = 8_000, state: Any = None, **settings: Any
) -> tuple[SimulatedLlm, list[str]]:
    """The model of a turn with these results, and what it was shown of them last."""
    note = settings.pop("note", "")
    replies: list[Reply] = [
        call("read", step=n, note=note) for n in range(len(results))
    ]
    script = iter([*replies, "Done."])
    llm = SimulatedLlm(context_window=100_000, token_ratio=1.0)
    llm.script = lambda _: next(script)

    def read_page(step: int, note: str) -> str:
        return results[step]

    read_page.__name__ = "read"
    strategy = Threshold(context_window=window, preview_tokens=None, **settings)
    chat = guarded_chat(llm, strategy, agent={"tools": [read_page]})
    if state:
        task = [builders.user("Task."), builders.model(words(2_000))]
        await seed(chat, *task, state=state)
    await chat.say("Read.")
    return llm, shown_results(agent_requests(llm)[-1])


def shown_results(request: RecordedRequest) -> list[str]:
    """The results of tools in a request."""
    parts = [part for each in request.contents for part in each.parts or ()]
    found = [part.function_response for part in parts if part.function_response]
    return [str((result.response or {})["result"]) for result in found]


@pytest.mark.parametrize(
    ("keep", "expected"), [(0, [13]), (1_300, [12, 13]), (0.2, [11, 12, 13])]
)
async def test_newest_steps_within_keep_stay(keep: float, expected: list[int]) -> None:
    """Calls and results, as many as fit; without `keep` those that were not seen."""
    results = [words(500, f"page-{n}") for n in range(13)]
    llm, shown = await read(*results, keep=keep)
    assert llm.summaries == 1
    assert shown == [results[number - 1] for number in expected]


async def test_a_large_unseen_result_is_shortened() -> None:
    """Also one larger than the window, and right behind a compaction."""
    settings: dict[str, Any] = {"summarizer_context_window": 100_000}
    llm, [shown] = await read(words(20_000, "RESULT"), **settings)
    assert "truncated" in shown
    assert 0 < len(shown) / 4 <= 2_400

    [summary] = summary_requests(llm)
    assert words(20_000, "RESULT") in summary.text

    llm, [shown] = await read(words(20_000), state=DEMAND)
    assert (llm.summaries, llm.rejections) == (1, 0)
    assert "truncated" in shown


async def test_a_call_that_is_too_large_itself_does_not_stay() -> None:
    """What the model wrote cannot be shortened; the list names such a call."""
    llm, shown = await read("ok", note=words(7_000))
    assert shown == []
    assert "- read(step=0" in agent_requests(llm)[-1].text


# --- where no summary helps ---


@pytest.mark.parametrize("text", ["7f3a-90817263-5544 ", "押して", "The gate. "])
async def test_what_is_left_of_a_turn_that_is_refused_twice(text: str) -> None:
    """Whatever the density of its text, the user's request stays."""
    results = [f"A{text * (4_000 // len(text))}Z"]
    refusal = ContextOverflowError("prompt is too long: 9000 tokens > 8000 maximum")
    llm = SimulatedLlm(context_window=200_000)
    shipped: list[Reply] = [call("ship", order=order) for order in ORDERS]
    llm.script = [*shipped, refusal, refusal, "Done."]
    strategy = Threshold(context_window=200_000, preview_tokens=None, keep=0.1)
    chat = guarded_chat(llm, strategy, agent={"tools": [Ship(results)]})
    assert builders.answer_text(await chat.say("Ship all of them.")) == "Done."
    assert llm.violations == 0

    last = agent_requests(llm)[-1]
    assert last.prompt_tokens <= 4_000
    assert "Ship all of them." in last.text
    assert [order for order in ORDERS if order not in last.text] == []

    shown = shown_results(last)
    assert 1 <= len(shown) < len(ORDERS)
    assert (shown[-1][0], shown[-1][-1]) == ("A", "Z")


def read_tries(request: LlmRequest) -> dict[str, bool]:
    """The orders that a request names, and whether the last try of each has failed."""
    parts = [part for item in request.contents for part in item.parts or ()]
    whole_text = "\n".join(part.text or "" for part in parts)
    # Among the lines word for word an order says nothing of its last try.
    text = re.sub(r"\n\[Lines of .*?(?=\n\n|\n\[|$)", "", whole_text, flags=re.DOTALL)
    said = re.findall(r"ORD-\d+\)?(?: → [^;\n]*)?", text)
    has_failed = {each[:8]: "error" in each for each in said}

    order = ""
    for part in parts:
        if part.function_call:
            order = (part.function_call.args or {})["order"]
        if part.function_response:
            has_failed[order] = "error" in (part.function_response.response or {})

    return has_failed


@pytest.mark.parametrize("kind", [Threshold, Pipeline])
async def test_failed_calls_are_tried_again(kind: type[Threshold | Pipeline]) -> None:
    """An agent that comes back to what did not work at the end leaves nothing out."""
    orders = [f"ORD-{number:04}" for number in range(1, 31)]
    tried = Counter[str]()
    shipped = Counter[str]()

    def ship(order: str) -> dict[str, Any]:
        """Ships an order; every fourth time the carrier is away at first."""
        tried[order] += 1
        if int(order[-4:]) % 4 == 0 and tried[order] == 1:
            return {"error": "the carrier is away, try again later"}
        shipped[order] += 1
        return {"status": "shipped", "log": words(200)}

    def reply(request: LlmRequest) -> Reply:
        """Ships the first order that is not named, else one whose last try failed."""
        has_failed = read_tries(request)
        waiting = [order for order in orders if order not in has_failed]
        waiting += [order for order, failed in has_failed.items() if failed]
        return call("ship", order=waiting[0]) if waiting else "All done."

    outcome = await run_turn(
        kind(context_window=4_000),
        reply,
        [ship],
        "Ship all orders.",
        summarizer=say_nothing,
        max_calls=45,
    )
    assert outcome.answer == "All done."
    assert outcome.compactions
    assert shipped == Counter(orders)


# --- the request itself ---

BY_SIZE = [
    Threshold(context_window=8_000),
    SlidingWindow(context_window=8_000, max_messages=6),
    Pipeline(context_window=8_000),
]
by_size = pytest.mark.parametrize("strategy", BY_SIZE, ids=lambda s: type(s).__name__)


def work_long() -> SimulatedLlm:
    """A model that looks at much, and does not say what its requests take."""
    steps: list[Reply] = [call("look")] * 9
    llm = SimulatedLlm(context_window=8_000, usage="never", script=[*steps, "Done."])
    llm.summary_replies = lambda _: "They spoke of valves."
    return llm


def check_quoted(llm: SimulatedLlm, task: str, least: int) -> None:
    """The task stands word for word in each request."""
    assert (llm.violations, llm.rejections) == (0, 0)
    assert llm.summaries >= least
    assert all(task in request.text for request in agent_requests(llm))


def list_steps(count: int) -> str:
    """A task in plain words."""
    steps = (f"Then see to the {place} valve of the press. " for place in "north east")
    return "".join([*steps] * count)[: 4 * 2_150]


@by_size
async def test_a_task_below_30_percent_is_quoted_whole(strategy: Strategy) -> None:
    """Measured by its own text: factors that all of a request needs are too large."""
    llm = work_long()
    chat = guarded_chat(
        llm, strategy, agent={"tools": [builders.queued_tool("look", [words(1_200)])]}
    )
    task = list_steps(60)
    await chat.say(task)
    check_quoted(llm, task, least=not isinstance(strategy, Pipeline))


@by_size
@pytest.mark.parametrize("contents", ["none", "default"])
async def test_the_input_of_a_node_is_its_request(
    strategy: Strategy, contents: Any
) -> None:
    """A node of a workflow that takes a single turn is quoted all that it was given."""
    if EventsCompactionConfig.model_fields["compaction_interval"].is_required():
        pytest.skip("this ADK does not tell which event is a node's input")
    llm = work_long()
    task = list_steps(25)
    kind: dict[str, Any] = {"mode": "single_turn", "include_contents": contents}
    tools = [builders.queued_tool("look", [words(1_200)])]
    own = LlmAgent(name="own", model=llm, tools=[*tools], **kind)

    async def give(node_input: Any) -> str:
        return task

    flow = Workflow(name="flow", edges=[(START, give, own)])
    chat = builders.Chat(flow, [ContextGuardPlugin(default=strategy)])
    await chat.say("Do the usual.")
    check_quoted(llm, task, least=not isinstance(strategy, Pipeline))
