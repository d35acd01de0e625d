"""What of a request comes from the session, judged on requests that ADK built."""

from __future__ import annotations

from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.run_config import RunConfig
from google.adk.artifacts import InMemoryArtifactService
from google.adk.code_executors import BaseCodeExecutor
from google.adk.code_executors.code_execution_utils import CodeExecutionResult
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions, EventCompaction
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.genai import types

from contextguard_adk.history.origin import find_history
from contextguard_adk.history.pairs import content_text
from contextguard_adk.testing import SimulatedLlm
from contextguard_adk.testing import call as asks_for
from tests.builders import Chat, call, event, model, queued_tool, response, user

IMAGE = types.Part.from_bytes(data=b"pixels", mime_type="image/png")
FILE = types.Part.from_uri(file_uri="gs://bucket/a.pdf", mime_type="application/pdf")
HAS_INPUT_CONTEXT = "model_input_context" in RunConfig.model_fields


def shown(*parts: types.Part, role: str = "user") -> types.Content:
    """A content with these parts."""
    return types.Content(role=role, parts=list(parts))


RAN = shown(
    types.Part.from_executable_code(code="f()", language=types.Language.PYTHON),
    types.Part.from_code_execution_result(outcome=types.Outcome.OUTCOME_OK, output="5"),
    role="model",
)
"""Code that the model ran, and its output."""


class Recorder(BasePlugin):
    """Notes what is history, and what is not, in every request of one agent."""

    def __init__(self, agent: str = "agent") -> None:
        super().__init__(name="recorder")
        self.agent = agent
        self.history: list[list[str]] = []
        self.foreign: list[list[str]] = []

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Sorts the contents of a request."""
        if callback_context.agent_name != self.agent:
            return
        invocation = callback_context.get_invocation_context()
        transient = getattr(invocation.run_config, "model_input_context", None) or ()
        contents = llm_request.contents
        found = find_history(contents, invocation.session.events, transient)
        texts = [shorthand(content) for content in contents]
        self.history.append([texts[index] for index in found])
        self.foreign.append([t for i, t in enumerate(texts) if i not in found])


def shorthand(content: types.Content) -> str:
    """A content in few words: its text, else what its parts are."""
    kinds = [
        next(iter(part.model_dump(exclude_none=True)), "nothing")
        for part in content.parts or ()
    ]
    return content_text(content) or " ".join(kinds)


def scripted(*replies: Any, **settings: Any) -> LlmAgent:
    """An agent whose model gives these replies."""
    settings.setdefault("instruction", "You help.")
    llm = SimulatedLlm(script=list(replies))
    return LlmAgent(name="agent", model=llm, **settings)


async def seed(chat: Chat, *events: Event) -> None:
    """Puts earlier events into the session."""
    session = await chat.sessions.create_session(
        app_name="app", user_id="user", session_id=chat.session_id
    )
    for item in events:
        await chat.sessions.append_event(session, item)


# --- requests that ADK built ---


async def test_everything_of_a_plain_conversation_is_history() -> None:
    """Messages, answers, calls and results are history, whoever begins how."""
    recorder = Recorder()
    search = queued_tool("search", ["found"])
    agent = scripted("Hello.", asks_for("search"), "Sunny.", tools=[search])
    chat = Chat(agent, [recorder])
    await chat.say("For context: I live in Rome.")
    await chat.say(shown(IMAGE))
    assert recorder.history[-1] == [
        "For context: I live in Rome.",
        "Hello.",
        "inline_data",
        "function_call",
        "function_response",
    ]
    assert recorder.foreign == [[], [], []]


async def test_instructions_among_the_contents_are_not_history() -> None:
    """Beside a static instruction the dynamic one travels as a content, as files do."""
    recorder = Recorder()
    agent = scripted(
        "Hello.",
        asks_for("search"),
        "Sunny.",
        static_instruction=shown(types.Part(text="You are a guide."), IMAGE),
        instruction="Today is May 1.",
        tools=[queued_tool("search", ["found"])],
    )
    chat = Chat(agent, [recorder])
    await chat.say("Hi.")
    await chat.say("How is Rome?")
    assert len(recorder.foreign) == 3
    for foreign in recorder.foreign:
        assert len(foreign) >= 2
        assert any("Today is May 1." in text for text in foreign)
    assert recorder.history[1] == ["Hi.", "Hello.", "How is Rome?"]


@pytest.mark.skipif(not HAS_INPUT_CONTEXT, reason="this ADK has no such setting")
async def test_model_input_context_is_not_history() -> None:
    """Context that a caller adds to one run belongs to no session."""
    recorder = Recorder()
    context = [user("Who?"), model("A pilot."), call("look"), response("look", "a man")]
    config = RunConfig.model_validate({"model_input_context": context})
    chat = Chat(scripted("Hello."), [recorder], run_config=config)
    await chat.say("Hi.")
    await chat.say("Ciao.")
    assert recorder.foreign == [[shorthand(content) for content in context]] * 2
    assert recorder.history[-1] == ["Hi.", "Hello.", "Ciao."]


@pytest.mark.parametrize(
    "reply", ["It is sunny.", shown(IMAGE), RAN], ids=["text", "image", "code"]
)
async def test_relay_of_another_agent_is_history(reply: str | types.Content) -> None:
    """What another agent said or did derives from its events."""
    recorder = Recorder("agent")
    helper = LlmAgent(name="helper", model=SimulatedLlm(script=[reply]))
    transfer = asks_for("transfer_to_agent", agent_name="helper")
    agent = scripted(transfer, "Fine.", sub_agents=[helper])
    chat = Chat(agent, [recorder])
    await chat.say("How is Rome?")
    await seed_turn_for(chat, "agent")
    await chat.say("Thanks.")
    assert len(recorder.history) == 2
    assert recorder.foreign == [[], []]
    assert any(text.startswith("For context:") for text in recorder.history[-1])


async def seed_turn_for(chat: Chat, author: str) -> None:
    """Lets an agent have the last word, so that it is asked next."""
    session = await chat.sessions.get_session(
        app_name="app", user_id="user", session_id=chat.session_id
    )
    assert session is not None
    await chat.sessions.append_event(session, event(model("I am back."), author))


class FixedExecutor(BaseCodeExecutor):
    """Runs no code, and says that it printed four."""

    def execute_code(
        self, invocation_context: Any, code_execution_input: Any
    ) -> CodeExecutionResult:
        """Returns the same output for any code."""
        return CodeExecutionResult(stdout="4")


async def test_executed_code_is_history() -> None:
    """Code and its output reach the model as text between fences of the executor."""
    recorder = Recorder()
    agent = scripted(
        "Let me see.\n```python\nprint(2 + 2)\n```",
        "It is 4.",
        static_instruction="You compute.",
        instruction="4 digits at most.",
        code_executor=FixedExecutor(
            execution_result_delimiters=("<out>\n", "\n</out>")
        ),
    )
    chat = Chat(agent, [recorder])
    chat.runner.artifact_service = InMemoryArtifactService()
    await chat.say("What is 2 + 2?")
    assert len(recorder.history[-1]) == 3
    assert "Code execution result:\n4" in recorder.history[-1][-1]
    assert len(recorder.foreign[-1]) == 1
    assert "4 digits at most." in recorder.foreign[-1][0]


def spoken(text: str, is_user: bool = True) -> Event:
    """An event of a live session, in which somebody spoke."""
    heard = types.Transcription(text=text, finished=True)
    if is_user:
        return Event(author="user", input_transcription=heard)
    return Event(author="agent", output_transcription=heard)


NOTHING_SAID = Event(author="agent", turn_complete=True)


@pytest.mark.parametrize(
    "events",
    [
        pytest.param(
            [spoken("Hi, "), NOTHING_SAID, spoken("you.")], id="joined-over-silence"
        ),
        pytest.param(
            [spoken("Hi."), spoken("Hello.", False), spoken("Bye.")], id="dialogue"
        ),
    ],
)
async def test_transcriptions_are_history(events: list[Event]) -> None:
    """What was spoken in an earlier live session is history, however it is joined."""
    recorder = Recorder()
    chat = Chat(scripted("Sure."), [recorder])
    await seed(chat, *events)
    await chat.say("Where were we?")
    assert recorder.foreign == [[]]
    assert recorder.history[0][0].startswith("Hi")


async def test_summary_of_adks_own_compaction_is_history() -> None:
    """A summary that ADK put in place of events derives from the session."""
    recorder = Recorder()
    chat = Chat(scripted("Sure."), [recorder])
    first, old = event(user("Hello?")), event(model("Hi."))
    compaction = EventCompaction(
        start_timestamp=old.timestamp,
        end_timestamp=old.timestamp,
        compacted_content=model("They greeted."),
    )
    summary = Event(author="user", actions=EventActions(compaction=compaction))
    await seed(chat, first, old, summary)
    await chat.say("Go on.")
    assert recorder.foreign == [[]]
    assert len(recorder.history[0]) == 3
    assert "They greeted." in recorder.history[0][1]


async def test_message_that_a_plugin_extends_stays_history() -> None:
    """A part that another plugin adds does not make the user's message foreign."""

    class Extender(BasePlugin):
        async def before_model_callback(
            self, *, callback_context: CallbackContext, llm_request: LlmRequest
        ) -> None:
            last = llm_request.contents[-1]
            last.parts = [*(last.parts or ()), types.Part(text="It is noon.")]

    recorder = Recorder()
    chat = Chat(scripted("Sure."), [Extender(name="extender"), recorder])
    await chat.say("Hi.")
    assert recorder.history == [["Hi.\nIt is noon."]]


# --- contents by hand ---


HI = event(user("Hi."))
FIVE = event(RAN)
HISTORY = {
    "said": (user("Hi."), HI),
    "model": (model("Rewritten by a plugin."), HI),
    "short-output": (user("```tool_output\n5\n```"), FIVE),
    "code": (user("```tool_code\nf()\n```"), FIVE),
    "relay": (user("For context:", "[b] said: hi"), event(model("hi"), "b")),
}
FOREIGN = {
    "not-said": (user("Hi."), event(user("Hi. "))),
    "no-fences": (user("Today is the 5 of May."), FIVE),
    "one-word-before": (user("Five? 5"), FIVE),
    "relay-of-nobody": (user("For context:", "[b] said: hi"), event(model("hi"), "c")),
}


@pytest.mark.parametrize(
    ("item", "behind", "expected"),
    [
        *(pytest.param(*case, [0], id=name) for name, case in HISTORY.items()),
        *(pytest.param(*case, [], id=name) for name, case in FOREIGN.items()),
    ],
)
def test_single_contents(
    item: types.Content, behind: Event, expected: list[int]
) -> None:
    """A content is history when one of its parts has an event behind it."""
    assert find_history([item], [behind]) == expected
