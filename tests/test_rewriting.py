"""Plugins that rewrite messages: what they rewrote is history all the same."""

from __future__ import annotations

import itertools
import re
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
from google.adk.events.event import Event, NodeInfo
from google.adk.events.event_actions import EventActions
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.plugin_manager import PluginManager
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types

from contextguard_adk._history.rendering import LEDGER_HEADING
from contextguard_adk._history.shown import is_visible
from contextguard_adk._history.view import HistoryView
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import call, event, guarded_agent, model, response, user
from tests.chats import (
    CONTINUATION_BEGIN,
    Changing,
    agent_requests,
    summary_requests,
    take_apart,
    text_of,
)
from tests.rewriting import (
    SECRET,
    Rewrite,
    encoding,
    masking,
    naming,
    stamping,
    stamping_parts,
    stamping_texts,
)
from tests.talks import (
    Talk,
    every_strategy,
    looking_tool,
    message,
    spread,
    summarizing_llm,
)

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
    """A long conversation, in which every other message tells a secret."""
    llm = summarizing_llm(acting())
    agent = guarded_agent(llm, [looking_tool()], **settings)
    talk = Talk(agent, strategy, llm, **plugins)
    for number in range(24):
        code = SECRET if number % 2 else "none"
        await talk.say(f"mark-ask-{number:03}! It is {code}. {'notebooks ' * 60}")
    assert (llm.rejections, llm.violations) == (0, 0)
    return llm


REWRITES = {
    "stamping": (stamping, {}),
    "stamping_texts": (stamping_texts, {}),
    "stamping_parts": (stamping_parts, {}),
    "naming": (naming, {}),
    "masking": (masking, {}),
    "encoding": (encoding, {}),
    "stamping-dynamic": (stamping, DYNAMIC),
    "stamping_parts-dynamic": (stamping_parts, DYNAMIC),
    "naming-dynamic": (naming, DYNAMIC),
    "masking-dynamic": (masking, DYNAMIC),
}


RARE = ("stamping_parts-dynamic", "naming-dynamic", "masking-dynamic")


@spread("case", REWRITES, slow=RARE)
async def test_rewritten_messages_are_summarized_as_others_are(
    strategy: Strategy, case: tuple[Callable[[], Rewrite], dict[str, str]]
) -> None:
    """As many summaries as without the plugin; what is masked stays masked, and
    instructions stay."""
    rewrite, settings = case
    plain = await converse(strategy, {}, **settings)
    llm = await converse(strategy, {"before": [Changing(rewrite())]}, **settings)
    allowed = max(1, plain.summaries * 0.2)
    assert plain.summaries >= 5
    assert abs(llm.summaries - plain.summaries) <= allowed
    for request in agent_requests(llm) if settings else ():
        assert "Today is May 1." in request.text
    is_masked = not any(SECRET in request.text for request in llm.requests)
    assert is_masked is (rewrite in (masking, encoding))


@spread("rewrite", {each.__name__: each for each in (stamping, naming, masking)})
async def test_what_is_rewritten_behind_the_guard_changes_nothing(
    strategy: Strategy, rewrite: Callable[[], Rewrite]
) -> None:
    """The guard does not see it, but its tokens are counted."""
    plain = await converse(strategy, {})
    llm = await converse(strategy, {"after": [Changing(rewrite())]})
    assert abs(llm.summaries - plain.summaries) <= max(1, plain.summaries * 0.2)


@every_strategy
@pytest.mark.parametrize("rewrite", [stamping, masking, encoding])
async def test_the_request_of_a_long_turn_stays_as_it_was_rewritten(
    strategy: Strategy, rewrite: Callable[[], Rewrite]
) -> None:
    """It is in every request of its turn, the way the plugin has written it."""
    asked = f"mark-ask-001! It is {SECRET}, and nothing else matters here."
    steps = [scripted_call("look", step=step) for step in range(16)]
    llm = summarizing_llm([*steps, "Done."])
    agent = guarded_agent(llm, [looking_tool(100)])
    change = rewrite()
    talk = Talk(agent, strategy, llm, before=[Changing(change)])
    await talk.ask(asked, "Done.")
    assert llm.summaries >= 2
    shown = LlmRequest(contents=[user(asked)])
    change(shown)
    words = re.sub(r"^\[.*?\] ", "", text_of(shown.contents[0]))
    for request in agent_requests(llm):
        assert words in request.text
    assert (SECRET in llm.requests[-1].text) is (rewrite in (stamping, naming))


# --- which content stands for which event ---


def invocation_of(events: list[Event], **settings: Any) -> InvocationContext:
    """A run of an agent in a session of these events."""
    agent = LlmAgent(name="agent", model=SimulatedLlm(), **settings.pop("agent", {}))
    return InvocationContext(
        invocation_id="now",
        agent=agent,
        session=Session(id="session", app_name="app", user_id="user", events=events),
        session_service=InMemorySessionService(),
        plugin_manager=PluginManager(),
        **settings,
    )


def view_of(
    contents: list[types.Content], events: list[Event], **settings: Any
) -> HistoryView:
    """What is known of a request in a session of these events."""
    invocation = invocation_of(events, **settings)
    return HistoryView(contents, invocation, events[-1].content)


def hidden(content: types.Content, **changes: Any) -> Event:
    """An event that ADK keeps from the agent."""
    return event(content).model_copy(update=changes)


U, A, M = event(user("How is Rome?")), event(model("Sunny.")), event(user("Merci."))
CALL, FOUND = call("look", step=1), response("look", "a man")
INSTRUCTION = user("Be brief. Speak of nothing but the weather, and never of money.")
FENCED = user("<<<BEGIN_SYSTEM_INSTRUCTION>>>\nBe.\n<<<END_SYSTEM_INSTRUCTION>>>")
LONG = " ".join(map(str, range(99)))
REWIND = EventActions(rewind_before_invocation_id="old")
PLACES: dict[str, tuple[list[types.Content], list[Event], list[int]]] = {
    "stamped": ([user("[1] How is Rome?"), model("Sunny.")], [U, A], [0, 1]),
    "masked": ([user("How is ****?"), model("Sunny.")], [U, A], [0, 1]),
    "as many as events": ([user("???"), model("Sunny.")], [U, A], [0, 1]),
    "beside what was inserted": (
        [INSTRUCTION, user("Ann: How is Rome?"), model("Sunny.")],
        [U, A],
        [1, 2],
    ),
    "more than events": ([INSTRUCTION, user("???"), model("Sunny.")], [U, A], [2]),
    "inserted alone": (
        [user("How is Rome?"), model("Sunny."), INSTRUCTION],
        [U, A],
        [0, 1],
    ),
    "in place of a message": ([FENCED, model("Sunny.")], [U, A], [1]),
    "in another gap": ([model("Sunny."), user("[1] How is Rome?")], [U, A], [0]),
    "repeated": (
        [user("[1] Merci."), model("Sunny."), user("[2] Merci."), INSTRUCTION],
        [M, A, M],
        [0, 1, 2],
    ),
    "behind a result": (
        [user("[1] Merci."), CALL, FOUND, INSTRUCTION],
        [M, event(CALL), event(FOUND, "agent")],
        [0, 1, 2],
    ),
    "extended by a part": ([user("12:00", "Merci."), INSTRUCTION], [M], [0]),
    "one word of a long text": ([user("Merci. " + LONG), user("?")], [M], []),
    "another branch": (
        [user("[1] How is Rome?"), user("Merci.")],
        [hidden(user("How is Rome?"), branch="b"), M],
        [1],
    ),
    "another node": (
        [user("???"), user("Merci.")],
        [hidden(user("Go."), node_info=NodeInfo(path="n@1")), M],
        [1],
    ),
    "rewound": (
        [user("???"), model("Sunny.")],
        [
            hidden(user("Go."), invocation_id="old"),
            Event(
                author="user", actions=EventActions(rewind_before_invocation_id="old")
            ),
            A,
        ],
        [1],
    ),
}


@pytest.mark.parametrize(
    ("contents", "events", "expected"), PLACES.values(), ids=PLACES
)
def test_places(
    contents: list[types.Content], events: list[Event], expected: list[int]
) -> None:
    """History is what stands where an event stood, never what has no event there."""
    assert view_of(contents, events, branch="a").history == expected


def test_a_stamp_does_not_change_the_fingerprint() -> None:
    """What is stamped anew on each call stays the same content."""
    stamped = [[user(f"[{n}] How is Rome?"), model("Sunny.")] for n in (1, 2)]
    first, second = (view_of(contents, [U, A]) for contents in stamped)
    assert first.fingerprint(0) == second.fingerprint(0)
    other = view_of(stamped[0], [event(user("[1] How is Paris?")), A])
    assert other.fingerprint(0) != first.fingerprint(0)


def test_a_task_without_an_event_is_not_history() -> None:
    """The task text of an isolated agent comes first, whatever the user says later."""
    events = [hidden(user("Go on."), isolation_scope="task")]
    contents = [user("The task."), user("[1] Go on.")]
    assert view_of(contents, events, isolation_scope="task").history == [1]
    assert view_of(contents[:1], events, isolation_scope="task").history == []


def test_without_contents_only_this_turn_counts() -> None:
    """What ADK keeps from such an agent gives no other content a place."""
    agent = {"include_contents": "none"}
    contents = [INSTRUCTION, user("[1] Merci.")]
    assert view_of(contents, [U, A, M], agent=agent).history == [1]
    assert view_of(contents[:1], [U, A, U], agent=agent).history == [0]


def test_a_node_sees_its_own_place_alone() -> None:
    """What other nodes were given or did cannot be recalled by a node either."""
    paths = ["", "flow@1", "flow@1/own@1", "flow@1/own@1/tool@1", "flow@1/own@2"]
    events = [hidden(model(path), node_info=NodeInfo(path=path)) for path in paths]
    events.append(hidden(user("Go."), node_info=NodeInfo(path="flow@1")))
    invocation = invocation_of(
        events, agent={"mode": "single_turn"}, node_path="flow@1/own@1"
    )
    shown = [is_visible(each, invocation) for each in events]
    assert shown == [True, True, True, True, False, False]


# --- the live request ---


def now(content: types.Content, author: str = "") -> Event:
    """An event of this invocation."""
    return hidden(
        content, invocation_id="now", **({"author": author} if author else {})
    )


RAW = now(user("Raw words."))
GIVEN = hidden(user("Go."), invocation_id="now", node_info=NodeInfo(path="n@1"))
RELAY = user("For context:", "[helper] said: Sunny.")
LIVE: dict[str, tuple[list[types.Content], list[Event], int | None]] = {
    "stamped, newer than its like": (
        [model("a"), user("Raw words."), model("b"), user("[1] Raw words.")],
        [event(model("a")), event(user("Raw words.")), event(model("b")), RAW],
        3,
    ),
    "input of a node": ([user("Go."), CALL], [RAW, GIVEN], 0),
    "input of a node beside the message": (
        [user("Raw words."), user("Go."), CALL],
        [RAW, GIVEN],
        1,
    ),
    "relay alone": ([RELAY], [RAW, now(model("Sunny."), "helper")], 0),
    "relay behind a message of this run": (
        [user("An input."), RELAY],
        [RAW, now(user("An input.")), now(model("Sunny."), "helper")],
        0,
    ),
    "message of an earlier run": ([user("Merci."), model("a")], [M, RAW], None),
    "tool result": ([user("Merci."), FOUND], [M, now(FOUND, "user")], None),
}


@pytest.mark.parametrize(("contents", "events", "expected"), LIVE.values(), ids=LIVE)
def test_live_request(
    contents: list[types.Content], events: list[Event], expected: int | None
) -> None:
    """It is what ADK shows the agent of what started the run, never what it hides."""
    asked = RAW if RAW in events else events[-1]
    settings: dict[str, Any] = {"node_path": "n@1"} if GIVEN in events else {}
    view = HistoryView(contents, invocation_of(events, **settings), asked.content)
    assert view.live_index == expected


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
    texts = map(text_of, take_apart(request.contents))
    return next((t for t in texts if t.startswith(CONTINUATION_BEGIN)), "")


def ledger_of(request: RecordedRequest) -> str:
    """The user's messages beside the summary."""
    _, _, ledger = text_of(take_apart(request.contents)[0]).partition(LEDGER_HEADING)
    return ledger


@every_strategy
@pytest.mark.parametrize("before", [[], [stamping]], ids=["plain", "stamped"])
async def test_output_of_code_is_not_the_users_word(
    strategy: Strategy, before: list[Callable[[], Rewrite]]
) -> None:
    """Neither quoted as the request nor listed among the user's messages."""
    code = "Look:\n```tool_code\nprint(1)\n```"
    llm = summarizing_llm([*[code] * 12, "Done.", *[code] * 12, "Done."])
    agent = guarded_agent(llm, code_executor=Computing())
    plugins = [Changing(rewrite()) for rewrite in before]
    talk = Talk(agent, strategy, llm, before=plugins)
    talk.runner.artifact_service = InMemoryArtifactService()
    for asked in ("mark-ask-001! Compute it.", "mark-ask-002! And once more."):
        await talk.ask(asked, "Done.")
        assert asked in quoted_request(agent_requests(llm)[-1])
    assert llm.summaries >= 3
    talk.check()
    for request in agent_requests(llm):
        assert "OUTPUT" not in quoted_request(request) + ledger_of(request)
    assert "mark-ask-001!" in ledger_of(agent_requests(llm)[-1])
    shown = [request.text for request in summary_requests(llm)]
    lines = "\n".join(shown).splitlines()
    headings = [
        above
        for above, line in itertools.pairwise(lines)
        if line.endswith("```tool_output")
    ]
    assert headings
    assert set(headings) == {"tool: [code returned a result]"}


def test_a_user_may_type_what_looks_like_output() -> None:
    """Only what executed code has written is the tool's word."""
    typed, output = "```tool_output\n5\n```", "```tool_output\n6\n```"
    result = types.Part.from_code_execution_result(
        outcome=types.Outcome.OUTCOME_OK, output="6"
    )
    ran = event(types.Content(role="model", parts=[result]))
    view = view_of([user(typed), user(output)], [event(user(typed)), ran])
    assert view.history == [0, 1]
    assert view.user_messages == [0]
