"""What of a request comes from the session, judged on requests that ADK built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.run_config import RunConfig
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.genai import types

from contextguard_adk._history.origin import EventIndex, find_history
from contextguard_adk._history.pairs import content_text
from contextguard_adk.testing import SimulatedLlm
from contextguard_adk.testing import call as asks_for
from tests.builders import Chat, call, event, model, queued_tool, response, user
from tests.chats import Changing

IMAGE = types.Part.from_bytes(data=b"pixels", mime_type="image/png")
SHOWN = types.Content(role="user", parts=[IMAGE])
CODE = types.Part.from_executable_code(code="f()", language=types.Language.PYTHON)
OUTPUT = types.Part.from_code_execution_result(
    outcome=types.Outcome.OUTCOME_OK, output="5"
)
RAN = types.Content(role="model", parts=[CODE, OUTPUT])
HAS_INPUT_CONTEXT = "model_input_context" in RunConfig.model_fields


class Recorder(BasePlugin):
    """Notes what is history, and what is not, in every request of the root agent."""

    def __init__(self) -> None:
        super().__init__(name="recorder")
        self.history: list[list[str]] = []
        self.foreign: list[list[str]] = []

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Sorts the contents of a request."""
        if callback_context.agent_name != "agent":
            return
        invocation = callback_context.get_invocation_context()
        transient = getattr(invocation.run_config, "model_input_context", None) or ()
        contents, index = llm_request.contents, EventIndex(invocation.session.events)
        found = find_history(contents, index, transient)
        texts = [shorthand(content) for content in contents]
        self.history.append([texts[index] for index in found])
        self.foreign.append([t for i, t in enumerate(texts) if i not in found])


def shorthand(content: types.Content) -> str:
    """A content in few words: its text, else what its parts are."""
    kinds = [next(iter(p.model_dump(exclude_none=True))) for p in content.parts or ()]
    return content_text(content) or " ".join(kinds)


def scripted(*replies: Any, **settings: Any) -> LlmAgent:
    """An agent whose model gives these replies."""
    settings.setdefault("instruction", "You help.")
    llm = SimulatedLlm(script=list(replies))
    return LlmAgent(name="agent", model=llm, **settings)


async def record(
    agent: LlmAgent,
    *said: str | types.Content,
    events: Sequence[Event] = (),
    before: Sequence[BasePlugin] = (),
    **settings: Any,
) -> Recorder:
    """Says these messages in a session with earlier events."""
    recorder = Recorder()
    chat = Chat(agent, [*before, recorder], **settings)
    session = await chat.session()
    for item in events:
        await chat.sessions.append_event(session, item)
    for message in said:
        await chat.say(message)
    return recorder


# --- requests that ADK built ---


async def test_everything_of_a_plain_conversation_is_history() -> None:
    """Messages, answers, calls and results are history, whoever begins how."""
    search = queued_tool("search", ["found"])
    agent = scripted("Hello.", asks_for("search"), "Sunny.", tools=[search])
    recorder = await record(agent, "For context: I live in Rome.", SHOWN)
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
    static = types.Content(role="user", parts=[types.Part(text="A guide."), IMAGE])
    agent = scripted(
        "Hello.", "Sunny.", static_instruction=static, instruction="Today is May 1."
    )
    recorder = await record(agent, "Hi.", "How is Rome?")
    for foreign in recorder.foreign:
        assert len(foreign) >= 2
        assert any("Today is May 1." in text for text in foreign)
    assert recorder.history[1] == ["Hi.", "Hello.", "How is Rome?"]


@pytest.mark.skipif(not HAS_INPUT_CONTEXT, reason="this ADK has no such setting")
async def test_model_input_context_is_not_history() -> None:
    """Context that a caller adds to one run belongs to no session; what the user said
    stays history, though a caller adds the same text."""
    added = [user("Hi."), model("Yes?"), call("look"), response("look", "a man")]
    config = RunConfig.model_validate({"model_input_context": added})
    recorder = await record(scripted("Hello."), "Ho.", "Hi.", run_config=config)
    assert recorder.foreign[0] == [shorthand(content) for content in added]
    assert {"Ho.", "Hello.", "Hi."} <= {*recorder.history[-1]}


@pytest.mark.parametrize(
    "reply", ["It is sunny.", SHOWN, RAN], ids=["text", "image", "code"]
)
async def test_relay_of_another_agent_is_history(reply: str | types.Content) -> None:
    """What another agent said or did derives from its events."""
    content = model(reply) if isinstance(reply, str) else reply
    helped = event(content.model_copy(update={"role": "model"}), "helper")
    helper = LlmAgent(name="helper", model=SimulatedLlm())
    agent = scripted("Fine.", sub_agents=[helper])
    earlier = [event(user("How is Rome?")), helped, event(model("I am back."))]
    recorder = await record(agent, "Thanks.", events=earlier)
    assert recorder.foreign == [[]]
    assert any(text.startswith("For context:") for text in recorder.history[-1])


def spoken(text: str, is_user: bool = True) -> Event:
    """An event of a live session, in which somebody spoke."""
    heard = types.Transcription(text=text, finished=True)
    if is_user:
        return Event(author="user", input_transcription=heard)
    return Event(author="agent", output_transcription=heard)


NOTHING_SAID = Event(author="agent", turn_complete=True)
SPOKEN = {
    "joined-over-silence": [spoken("Hi, "), NOTHING_SAID, spoken("you.")],
    "dialogue": [spoken("Hi."), spoken("Hello.", False), spoken("Bye.")],
}


@pytest.mark.parametrize("events", SPOKEN.values(), ids=SPOKEN)
async def test_transcriptions_are_history(events: list[Event]) -> None:
    """What was spoken in an earlier live session is history, however it is joined."""
    recorder = await record(scripted("Sure."), "Where were we?", events=events)
    assert recorder.foreign == [[]]
    assert recorder.history[0][0].startswith("Hi")


async def test_message_that_a_plugin_extends_stays_history() -> None:
    """A part that another plugin adds does not make the user's message foreign."""

    def extend(request: LlmRequest) -> None:
        last = request.contents[-1]
        last.parts = [*(last.parts or ()), types.Part(text="It is noon.")]

    recorder = await record(scripted("Sure."), "Hi.", before=[Changing(extend)])
    assert recorder.history == [["Hi.\nIt is noon."]]


# --- contents by hand ---


HI, FIVE = event(user("Hi.")), event(RAN)
RELAY = user("For context:", "[b] said: hi")


@pytest.mark.parametrize(
    ("item", "behind", "is_history"),
    [
        pytest.param(model("Rewritten by a plugin."), HI, True, id="model"),
        pytest.param(user("```tool_output\n5\n```"), FIVE, True, id="short-output"),
        pytest.param(user("```tool_code\nf()\n```"), FIVE, True, id="code"),
        pytest.param(RELAY, event(model("hi"), "b"), True, id="relay"),
        pytest.param(RELAY, event(model("hi"), "c"), False, id="relay-of-nobody"),
        pytest.param(user("Hi."), event(user("Hi. ")), False, id="not-said"),
        pytest.param(user("Today is the 5 of May."), FIVE, False, id="no-fences"),
        pytest.param(user("Five? 5"), FIVE, False, id="one-word-before"),
    ],
)
def test_single_contents(item: types.Content, behind: Event, is_history: bool) -> None:
    """A content is history when one of its parts has an event behind it."""
    assert find_history([item], EventIndex([behind])) == [0] * is_history
