"""What people see in session state, of a compaction and of each call; artifacts."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.apps.app import EventsCompactionConfig
from google.adk.artifacts import (
    BaseArtifactService,
    InMemoryArtifactService,
)
from google.adk.events import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.tools.load_artifacts_tool import load_artifacts_tool
from google.adk.tools.long_running_tool import LongRunningFunctionTool
from google.genai import types

from contextguard_adk import (
    CompactionRecord,
    ContextGuardPlugin,
    Costs,
    PlannedSummary,
    Threshold,
)
from contextguard_adk.testing import (
    Reply,
    SimulatedLlm,
    SimulatedProviderError,
    call,
)
from tests.background import in_virtual_time
from tests.builders import Chat, answer_text, model, user
from tests.chats import DEMAND, words

pytestmark = pytest.mark.filterwarnings(
    "ignore:The `plugins` argument:DeprecationWarning"  # By ADK's own AgentTool.
)

SUMMARY = "The user wants the hall ```looked at```, and says it twice."
LINE = r"[\d,]+ → [\d,]+ tokens, 5 → \d messages, 1 summary by simulated"
KEY = "context_guard:compacted:agent"
ARTIFACT = "compaction-agent.md"


def look(place: str) -> str:
    """Looks at a place."""
    return f"Nothing is in the {place}."


def act(request: LlmRequest) -> Reply:
    """Looks where that is asked for, and says that it did."""
    *_, newest = request.contents[-1].parts or []
    *_, line = ["", *(newest.text or "").splitlines()]
    if "look" in line.lower():
        return call("look", place="hall")
    return "It is done."


def make_llm(**settings: Any) -> SimulatedLlm:
    """The model of an agent that looks, with a summary of its own."""
    settings = {"script": act, "summary_replies": lambda _: SUMMARY, **settings}
    return SimulatedLlm(**settings)


def make_agent(*tools: Any, **settings: Any) -> LlmAgent:
    """An agent that can look."""
    settings = {"name": "agent", "model": make_llm(), **settings}
    return LlmAgent(tools=[look, *tools], **settings)


async def open_chat(
    artifacts: BaseArtifactService | None,
    agent: LlmAgent | None = None,
    chat: dict[str, Any] | None = None,
    **guard: Any,
) -> Chat:
    """A chat whose next call is compacted."""
    if not guard.pop("is_default", False):
        guard = {"summary_artifacts": True, **guard}
    plugin = ContextGuardPlugin(default=Threshold(context_window=4_000), **guard)
    opened = Chat(agent or make_agent(), [plugin], **(chat or {}))
    opened.runner.artifact_service = artifacts
    old = user("The task."), model(words(1_700)), user("And?"), model(words(1_700))
    await opened.tell(old)
    return opened


def deltas(events: list[Event]) -> list[dict[str, int]]:
    """What the events say of artifacts."""
    return [e.actions.artifact_delta for e in events if e.actions.artifact_delta]


async def load(service: BaseArtifactService, version: int = 0) -> str:
    """The text of the artifact of the chat's session."""
    place: Any = {"app_name": "app", "user_id": "user", "session_id": "session"}
    part = await service.load_artifact(**place, filename=ARTIFACT, version=version)
    assert part
    assert part.inline_data
    assert part.inline_data.mime_type == "text/markdown"
    return (part.inline_data.data or b"").decode()


async def list_names(service: BaseArtifactService) -> list[str]:
    """The artifacts of the chat's session."""
    place: Any = {"app_name": "app", "user_id": "user", "session_id": "session"}
    return await service.list_artifact_keys(**place)


async def test_event_of_a_compaction_names_its_artifact() -> None:
    """A tool call after a compaction has the line first, and the artifact's version."""
    service = InMemoryArtifactService()
    llm = make_llm()
    prices = {"simulated": Costs(input=1, output=1)}
    chat = await open_chat(service, make_agent(model=llm), prices=prices)
    events = await chat.say("Look.")

    assert deltas(events) == [{ARTIFACT: 0}]
    event = next(event for event in events if event.actions.artifact_delta)
    assert event.get_function_calls()
    assert next(iter(event.actions.state_delta)) == KEY
    line = event.actions.state_delta[KEY]
    assert re.fullmatch(rf"{LINE}, cost \$0\.00\d\d", line)
    text = await load(service)
    assert f"\n{line.replace('→', 'to')}\n" in text
    assert "- Strategy: Threshold\n" in text
    assert f"````\n{SUMMARY}\n````\n" in text
    assert SUMMARY not in line

    await chat.tell([model(words(3_300)), user("More?"), model("No.")])
    assert deltas(await chat.say("Look.")) == [{ARTIFACT: 1}]
    assert (await chat.state())[KEY] != line
    assert "- Waited: " in await load(service, 1)

    sent = "\n".join(request.text for request in llm.requests)
    assert not re.search(r"Compaction of |compacted:agent| → ", sent)


def refuse_summary(_: PlannedSummary) -> bool:
    return False


NO_MODEL: dict[str, tuple[dict[str, Any], str, str]] = {
    "summarizer fails": ({}, "simulated: refused", "refused"),
    "user refuses": (
        {"after_summary": refuse_summary},
        "simulated: refused",
        "refused",
    ),
    "stored only": ({"summaries": "stored"}, "not asked", "not_asked"),
}


@pytest.mark.parametrize(("guard", "why", "failure"), NO_MODEL.values(), ids=NO_MODEL)
async def test_excerpts_are_never_said_to_be_by_a_model(
    guard: dict[str, Any],
    why: str,
    failure: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Log, state, event and artifact say that no model wrote a word, and why."""
    caplog.set_level(logging.INFO, "contextguard_adk")
    service = InMemoryArtifactService()
    error = SimulatedProviderError("No such key.")
    llm = make_llm() if guard else make_llm(summary_replies=lambda _: error)
    chat = await open_chat(service, make_agent(model=llm), **guard)
    events = await chat.say("Look.")

    said = f"messages, excerpts, no model ({why})"
    line = (await chat.state())[KEY]
    assert said in line
    [logged] = [text for text in caplog.messages if text.startswith("Compacted agent")]
    assert said in logged
    text = await load(service)
    assert said in text
    assert "## Excerpts, without a model" in text
    assert f"by {llm.model}" not in line + logged + text

    metadata = [event.custom_metadata or {} for event in events]
    [told] = [each["context_guard"] for each in metadata if "context_guard" in each]
    assert told["compaction"]["failure"] == failure


async def test_excerpts_after_a_summary_are_not_by_its_model() -> None:
    """The earlier summary stays, and the artifact tells the two apart."""
    replies = [SUMMARY, RuntimeError("down")]
    service = InMemoryArtifactService()
    chat = await open_chat(service, make_agent(model=make_llm(summary_replies=replies)))
    await chat.say("Look.")
    await chat.tell([model(words(3_300)), user("More?"), model("No.")])
    await chat.say("Look.")
    assert "excerpts, no model (simulated: other)" in (await chat.state())[KEY]
    text = await load(service, 1)
    assert "## Earlier summary, then excerpts without a model" in text
    assert SUMMARY in text


async def test_only_the_event_of_a_compaction_is_labeled() -> None:
    """`adk web` labels events by the keys of their state."""
    chat = await open_chat(None, usage_in_state=True)
    before = await chat.say("Look.")
    after = await chat.say("And look again.")
    labeled = [
        event
        for event in [*before, *after]
        if any("compacted" in key for key in event.actions.state_delta)
    ]
    assert len(labeled) == 1
    assert "compaction" in (labeled[0].custom_metadata or {})["context_guard"]


async def test_text_is_never_beside_an_artifact() -> None:
    """ADK's web UI shows an artifact in place of text: the next tool call names it."""
    chat = await open_chat(InMemoryArtifactService())
    first = await chat.say("Thanks.")
    assert answer_text(first) == "It is done."
    assert (await chat.state())[KEY]
    assert deltas(first) == []
    assert deltas(await chat.say("Look.")) == [{ARTIFACT: 0}]


async def test_long_running_call_names_no_artifact() -> None:
    """ADK's web UI fails at such an event with an artifact: its result names it."""
    agent = make_agent()
    agent.tools = [LongRunningFunctionTool(look)]
    chat = await open_chat(InMemoryArtifactService(), agent)
    events = await chat.say("Look.")
    waiting = [event for event in events if event.long_running_tool_ids]
    assert waiting
    assert deltas(waiting) == []
    assert deltas(events) == [{ARTIFACT: 0}]


LISTED = make_agent(load_artifacts_tool, name="other")


@pytest.mark.parametrize(
    ("agent", "guard", "has_line"),
    [
        ({}, {"is_default": True}, True),
        ({"sub_agents": [LISTED]}, {}, True),
        ({}, {"observe": True}, False),
        ({}, {}, False),
    ],
    ids=["default", "another's tool", "observing", "recorded"],
)
async def test_where_there_is_no_artifact(
    agent: dict[str, Any],
    guard: dict[str, Any],
    has_line: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By default, or told to the model by a tool of ADK: the line alone, if that."""
    is_recorded = not (agent or guard)
    if is_recorded:
        monkeypatch.setenv("PYTEST_CURRENT_TEST", "rebuild")

    settings = {"name": "agent", "model": make_llm(), "tools": [look], **agent}
    service = InMemoryArtifactService()
    chat = await open_chat(service, LlmAgent(**settings), **guard)
    events = await chat.say("Look.")
    assert answer_text(events) == "It is done."

    state = await chat.state()
    assert bool(re.match(r"\d", str(state.get(KEY)))) is has_line
    assert not (is_recorded and "context_guard" in str(state))
    assert deltas(events) == []
    assert await list_names(service) == []
    assert "artifact" not in caplog.text


class Broken(InMemoryArtifactService):
    """A service that fails, or never ends."""

    seconds: float = 0

    async def save_artifact(self, **_: Any) -> int:
        """Raises, with words that may quote a message."""
        await asyncio.sleep(self.seconds)
        raise RuntimeError("it quotes ORIGINAL words")


@pytest.mark.parametrize(("seconds", "most_seconds"), [(0, 0), (3_600, 2)])
@in_virtual_time
async def test_broken_service_ends_no_turn(
    seconds: float, most_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The turn goes on after two seconds at most; one warning says so, not its text."""
    chat = await open_chat(Broken(seconds=seconds))
    caplog.set_level(logging.WARNING, "contextguard_adk")
    events = await chat.say("Look.")
    assert asyncio.get_running_loop().time() <= most_seconds

    await chat.set_state(DEMAND)
    await chat.say("Look.")
    assert answer_text(events) == "It is done."
    assert (await chat.state())[KEY]
    assert deltas(await chat.events()) == []

    said = [r.getMessage() for r in caplog.records if "artifact" in r.getMessage()]
    assert len(said) == 1
    assert "ORIGINAL" not in caplog.text


@pytest.mark.skipif(
    EventsCompactionConfig.model_fields["compaction_interval"].is_required(),
    reason="this google-adk may lose a tool's result when its run is cancelled",
)
async def test_a_turn_that_is_cancelled_while_it_is_reported() -> None:
    """Listeners have heard of what was paid for, and nothing is paid for twice."""
    llm = make_llm()
    told = list[CompactionRecord]()

    async def hear(record: CompactionRecord) -> None:
        told.append(record)
        turn.cancel()

    service = Broken()
    agent = make_agent(model=llm, name="cancelled")
    chat = await open_chat(service, agent, on_compaction=hear)
    turn = asyncio.create_task(chat.say("Look."))
    await asyncio.wait([turn])
    assert turn.cancelled()
    paid = llm.summaries
    assert answer_text(await chat.say("Look.")) == "It is done."
    assert (llm.summaries, len(told)) == (paid, 1)


USAGE = "context_guard:usage:agent"


@pytest.mark.parametrize("observe", [False, True], ids=["guarding", "observing"])
@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
async def test_state_says_how_full_the_window_is(
    is_streaming: bool, observe: bool
) -> None:
    """One line for people, of the last request, with the event of each answer."""
    llm = SimulatedLlm(context_window=8_000)
    strategy = Threshold(context_window=8_000)
    plugin = ContextGuardPlugin(default=strategy, observe=observe)
    chat = Chat(make_agent(model=llm), [plugin], is_streaming=is_streaming)
    for number in range(3):
        events = await chat.say(f"Turn {number}. {words(700)}")
        tokens = llm.requests[-1].prompt_tokens
        said = f"{tokens:,} of 8,000 tokens, {100 * tokens / 8_000:.0f} %"
        deltas = [event.actions.state_delta for event in events]
        assert [d[USAGE] for d in deltas if USAGE in d] == [said]
        assert (await chat.state())[USAGE] == said


@pytest.mark.parametrize(
    ("settings", "usage"),
    [({"usage_in_state": False}, 900), ({}, None), ({}, 90_000)],
    ids=["switched off", "no count", "no size"],
)
async def test_what_is_no_size_is_not_written(
    settings: dict[str, Any], usage: int | None
) -> None:
    """Nor is anything where it is switched off."""
    counted = types.GenerateContentResponseUsageMetadata(prompt_token_count=usage)
    answer = LlmResponse(content=model("Done."), usage_metadata=counted)
    llm = SimulatedLlm(script=[answer], usage="never")
    plugin = ContextGuardPlugin(default=Threshold(context_window=8_000), **settings)
    chat = Chat(make_agent(model=llm), [plugin])
    await chat.say(words(900))
    assert USAGE not in await chat.state()
