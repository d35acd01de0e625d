"""Plugins that rewrite messages: what they rewrote is history all the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.artifacts import InMemoryArtifactService
from google.adk.code_executors.base_code_executor import BaseCodeExecutor
from google.adk.code_executors.code_execution_utils import (
    CodeExecutionInput,
    CodeExecutionResult,
)
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk.strategies import Strategy, Threshold
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import call, event, guarded_agent, model, response, user
from tests.chats import (
    CONTINUATION_BEGIN,
    DEMAND,
    Changing,
    agent_requests,
    take_apart,
    text_of,
    without_head,
    words,
)
from tests.rewriting import (
    SECRET,
    Rewrite,
    encoding,
    masking,
    naming,
    stamping,
    stamping_parts,
)
from tests.talks import (
    Talk,
    every_strategy,
    looking_tool,
    message,
    spread,
    summarizing_llm,
)

TURNS = 12
WORDS = 130
DYNAMIC = {"static_instruction": "You help.", "instruction": "Today is May 1."}


def acting() -> Callable[[LlmRequest], Reply]:
    """A model that calls a tool once for each message, wherever instructions stand."""
    numbers = itertools.count(1)

    def reply(request: LlmRequest) -> Reply:
        newest = [part for c in request.contents[-2:] for part in c.parts or ()]
        if any(part.function_response for part in newest):
            return message(next(numbers), "answer", 30)
        return scripted_call("look", step=next(numbers))

    return reply


async def converse(
    strategy: Strategy, plugins: dict[str, Any], **settings: Any
) -> SimulatedLlm:
    """Several windows of conversation; every other message tells a secret."""
    llm = summarizing_llm(acting())
    agent = guarded_agent(llm, [looking_tool(WORDS)], **settings)
    talk = Talk(agent, strategy, llm, **plugins)
    for number in range(TURNS):
        code = SECRET if number % 2 else "none"
        await talk.say(f"mark-ask-{number:03}! It is {code}. {'notebooks ' * WORDS}")
    assert (llm.rejections, llm.violations) == (0, 0)
    return llm


REWRITES = {
    "stamping": (stamping, {}, "before"),
    "stamping_parts": (stamping_parts, {}, "before"),
    "naming": (naming, {}, "before"),
    "masking": (masking, {}, "before"),
    "encoding": (encoding, {}, "before"),
    "stamping-dynamic": (stamping, DYNAMIC, "before"),
    "stamping-behind": (stamping, {}, "after"),
    "masking-behind": (masking, {}, "after"),
}
plain_counts: dict[str, int] = {}


@pytest.mark.quick("threshold-masking", "sliding-masking-behind")
@spread(
    "case",
    REWRITES,
    slow=("stamping_parts", "naming", "stamping-dynamic", "stamping-behind"),
)
async def test_rewritten_messages_are_summarized_as_others_are(
    strategy: Strategy, case: tuple[Callable[[], Rewrite], dict[str, str], str]
) -> None:
    """As many summaries as without the plugin, wherever it stands."""
    rewrite, settings, place = case
    known = f"{strategy!r} {settings}"
    if known not in plain_counts:
        plain_counts[known] = (await converse(strategy, {}, **settings)).summaries
    plain = plain_counts[known]
    llm = await converse(strategy, {place: [Changing(rewrite())]}, **settings)
    assert plain >= 5
    assert abs(llm.summaries - plain) <= max(1, plain * 0.2)

    for request in agent_requests(llm) if settings else ():
        assert "Today is May 1." in request.text
    if place == "before":
        is_masked = not any(SECRET in request.text for request in llm.requests)
        assert is_masked is (rewrite in (masking, encoding))


# --- what is history, and what is not ---

INSTRUCTION = "Be brief. Speak of nothing but the weather, and never of money."
IMAGE = types.Part.from_bytes(data=b"pixels", mime_type="image/png")
CODE = types.Part.from_executable_code(code="f()", language=types.Language.PYTHON)
OUTPUT = types.Part.from_code_execution_result(
    outcome=types.Outcome.OUTCOME_OK, output="5"
)
Q = event(user("How is Rome?"))
A = event(model("Sunny."))
M = event(user("Merci."))
LOOK = [event(call("look", step=1)), event(response("look", "a man"), "agent")]
GONE = EventActions(rewind_before_invocation_id="old")


def by_helper(*parts: types.Part) -> Event:
    """What another agent said or did."""
    return event(types.Content(role="model", parts=list(parts)), "helper")


def add(place: int, *contents: types.Content) -> Rewrite:
    """Puts contents in between."""
    return lambda request: request.contents.__setitem__(slice(place, place), contents)


def put(place: int, *texts: str) -> Rewrite:
    """Has a message say something else."""
    return lambda request: request.contents.__setitem__(place, user(*texts))


Case = tuple[list[Event], list[Rewrite], list[str]]
PLACES: dict[str, Case] = {
    "as it was said": (
        [Q, A, *LOOK, event(user("For context: I am in Rome."))],
        [],
        [],
    ),
    "an image": ([event(types.Content(role="user", parts=[IMAGE])), A], [], []),
    "masked": ([Q, A], [put(1, "How is ****?")], []),
    "beside what was inserted": (
        [Q, A],
        [put(1, "Ann: How is Rome?"), add(1, user(INSTRUCTION))],
        [INSTRUCTION],
    ),
    "more than events": (
        [Q, A],
        [put(1, "???"), add(1, user(INSTRUCTION))],
        [INSTRUCTION, "???"],
    ),
    "inserted alone": ([Q, A], [add(3, user(INSTRUCTION))], [INSTRUCTION]),
    "repeated": (
        [M, A, M],
        [put(1, "[1] Merci."), put(3, "[2] Merci."), add(4, user(INSTRUCTION))],
        [INSTRUCTION],
    ),
    "rewound": (
        [
            event(user("Go.")).model_copy(update={"invocation_id": "old"}),
            Event(author="user", actions=GONE),
            A,
        ],
        [add(1, user("???"))],
        ["???"],
    ),
    "relay": ([Q, by_helper(types.Part(text="It is sunny.")), A], [], []),
    "relayed code": ([Q, by_helper(CODE, OUTPUT), A], [], []),
}


@pytest.mark.parametrize(
    ("events", "changes", "kept"), PLACES.values(), ids=PLACES.keys()
)
async def test_history_is_summarized_and_all_else_stays(
    events: list[Event], changes: list[Rewrite], kept: list[str]
) -> None:
    """History is what stands where an event stood, whoever has rewritten it."""
    llm = SimulatedLlm(context_window=8_000, summary_replies=["A summary."])
    agent = guarded_agent(llm)
    agent.sub_agents = [LlmAgent(name="helper", model=SimulatedLlm())]
    talk = Talk(
        agent,
        Threshold(context_window=8_000),
        before=[Changing(change) for change in changes],
    )

    await talk.tell([model(words(1_500, "FILLER"))])
    for number, each in enumerate(events):
        copied = each.model_copy(deep=True, update={"id": f"event-{number}"})
        await talk.sessions.append_event(await talk.session(), copied)
    await talk.set_state(DEMAND)
    await talk.ask("And now?")

    assert llm.summaries == 1
    stays = [text_of(content) for content in without_head(llm.requests[-1].contents)]
    assert "\n".join(stays) == "\n".join(kept)
    shown = llm.requests[0].text
    assert not [text for text in kept if text in shown]
    assert llm.violations == 0


# --- what executed code has written ---


class Computing(BaseCodeExecutor):
    """Answers all code with a long output."""

    def execute_code(
        self,
        invocation_context: InvocationContext,
        code_execution_input: CodeExecutionInput,
    ) -> CodeExecutionResult:
        """Returns it."""
        return CodeExecutionResult(stdout=f"OUTPUT {'notebooks ' * 150}")


def quoted_request(request: RecordedRequest) -> str:
    """The continuation of a request; "" where there is none."""
    texts = (text_of(content) for content in take_apart(request.contents))
    return next((t for t in texts if t.startswith(CONTINUATION_BEGIN)), "")


def ledger_of(request: RecordedRequest) -> str:
    """The user's messages beside the summary."""
    head = text_of(take_apart(request.contents)[0])
    return head.partition("[The user's messages")[2]


@pytest.mark.quick("threshold")
@every_strategy
async def test_output_of_code_is_not_the_users_word(strategy: Strategy) -> None:
    """Neither quoted as the request nor listed among the user's messages."""
    code = "Look:\n```tool_code\nprint(1)\n```"
    llm = summarizing_llm([*[code] * 12, "Done.", *[code] * 12, "Done."])
    agent = guarded_agent(llm, code_executor=Computing())
    talk = Talk(agent, strategy, llm, before=[Changing(stamping())])
    talk.runner.artifact_service = InMemoryArtifactService()
    # A user may type what looks like output.
    for asked in ("mark-ask-001! Compute it.", "```tool_output\n5\n```"):
        await talk.ask(asked, "Done.")
        assert asked in quoted_request(agent_requests(llm)[-1])

    assert llm.summaries >= 3

    talk.check()
    for request in agent_requests(llm):
        assert "OUTPUT" not in quoted_request(request) + ledger_of(request)
    assert "mark-ask-001!" in ledger_of(agent_requests(llm)[-1])
