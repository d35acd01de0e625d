"""What people are shown of a compaction: a line in session state, and an artifact."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.artifacts import (
    BaseArtifactService,
    FileArtifactService,
    InMemoryArtifactService,
)
from google.adk.events import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.sessions import DatabaseSessionService
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.load_artifacts_tool import load_artifacts_tool
from google.adk.tools.long_running_tool import LongRunningFunctionTool
from pydantic import BaseModel

from contextguard_adk import CompactionRecord, ContextGuardPlugin, Costs, Threshold
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests.builders import Chat, answer_text, model, user
from tests.chats import DEMAND, words

pytestmark = pytest.mark.filterwarnings(
    "ignore:The `plugins` argument:DeprecationWarning"  # By ADK's own AgentTool.
)

SUMMARY = "The user wants the hall ```looked at```, and says it twice."
LINE = r"[\d,]+ → [\d,]+ tokens, 5 → \d messages, 1 summary by simulated"


def look(place: str) -> str:
    """Looks at a place."""
    return f"Nothing is in the {place}."


def look_closely(place: str) -> str:
    """Looks at a place, and has much to say."""
    return words(700, place)


def act(request: LlmRequest) -> Reply:
    """Looks where that is asked for, and says that it did."""
    *_, newest = request.contents[-1].parts or []
    if "look" in (newest.text or "").lower():
        return call("look", place="hall")
    return "It is done."


def make_llm(**settings: Any) -> SimulatedLlm:
    """The model of an agent that looks, with a summary of its own."""
    settings = {"script": act, "summary_replies": lambda _: SUMMARY, **settings}
    return SimulatedLlm(**settings)


def make_agent(name: str = "agent", *tools: Any, **settings: Any) -> LlmAgent:
    """An agent that can look."""
    llm = settings.pop("model", None) or make_llm()
    return LlmAgent(name=name, model=llm, tools=[look, *tools], **settings)


async def open_chat(
    artifacts: BaseArtifactService | None,
    agent: LlmAgent | None = None,
    window_tokens: int = 4_000,
    chat: dict[str, Any] | None = None,
    **guard: Any,
) -> Chat:
    """A chat whose next call is compacted."""
    strategy = Threshold(context_window=window_tokens)
    plugin = ContextGuardPlugin(default=strategy, **guard)
    opened = Chat(agent or make_agent(), [plugin], **(chat or {}))
    opened.runner.artifact_service = artifacts
    old = user("The task."), model(words(1_500)), user("And?"), model(words(1_500))
    await opened.tell(old)
    return opened


def deltas(events: list[Event]) -> list[dict[str, int]]:
    """What the events say of artifacts."""
    return [e.actions.artifact_delta for e in events if e.actions.artifact_delta]


async def load(service: BaseArtifactService, name: str, version: int = 0) -> str:
    """The text of an artifact of the chat's session."""
    part = await service.load_artifact(
        app_name="app",
        user_id="user",
        session_id="session",
        filename=name,
        version=version,
    )
    assert part
    assert part.inline_data
    assert part.inline_data.mime_type == "text/markdown"
    return (part.inline_data.data or b"").decode()


async def list_names(service: BaseArtifactService) -> list[str]:
    """The artifacts of the chat's session."""
    return await service.list_artifact_keys(
        app_name="app", user_id="user", session_id="session"
    )


SERVICES: dict[str, Callable[[Path], BaseArtifactService]] = {
    "memory": lambda _: InMemoryArtifactService(),
    "file": lambda path: FileArtifactService(root_dir=path),
}


@pytest.mark.parametrize("name", SERVICES)
async def test_event_of_a_compaction_names_its_artifact(
    name: str, tmp_path: Path
) -> None:
    """A tool call after a compaction has the line first, and the artifact's version."""
    service = SERVICES[name](tmp_path)
    prices = {"simulated": Costs(input=1, output=1)}
    chat = await open_chat(service, prices=prices)

    events = await chat.say("Look.")

    assert deltas(events) == [{"compaction-agent.md": 0}]
    event = next(event for event in events if event.actions.artifact_delta)
    assert event.get_function_calls()
    line = event.actions.state_delta["context_guard:compacted:agent"]
    assert next(iter(event.actions.state_delta)) == "context_guard:compacted:agent"
    assert re.fullmatch(rf"{LINE}, cost \$0\.00\d\d", line)
    text = await load(service, "compaction-agent.md")
    assert f"\n{line.replace('→', 'to')}\n" in text
    assert "- Strategy: Threshold\n" in text
    assert f"````\n{SUMMARY}\n````\n" in text
    assert SUMMARY not in line


async def test_every_compaction_is_a_version_of_the_artifact() -> None:
    """A second compaction of the session is version 1, and the line is its own."""
    service = InMemoryArtifactService()
    chat = await open_chat(service)
    await chat.say("Look.")
    first = (await chat.state())["context_guard:compacted:agent"]
    await chat.tell([model(words(3_000)), user("More?"), model("No.")])

    events = await chat.say("Look.")

    assert deltas(events) == [{"compaction-agent.md": 1}]
    assert (await chat.state())["context_guard:compacted:agent"] != first
    assert "- Waited: " in await load(service, "compaction-agent.md", 1)


async def test_text_is_never_beside_an_artifact() -> None:
    """ADK's web UI shows an artifact in place of text: the next tool call names it."""
    chat = await open_chat(InMemoryArtifactService())

    first = await chat.say("Thanks.")
    second = await chat.say("Look.")

    assert answer_text(first) == "It is done."
    assert (await chat.state())["context_guard:compacted:agent"]
    assert deltas(first) == []
    assert deltas(second) == [{"compaction-agent.md": 0}]


async def test_long_running_call_names_no_artifact() -> None:
    """ADK's web UI fails at such an event with an artifact: its result names it."""
    agent = make_agent()
    agent.tools = [LongRunningFunctionTool(look)]
    chat = await open_chat(InMemoryArtifactService(), agent)

    events = await chat.say("Look.")

    waiting = [event for event in events if event.long_running_tool_ids]
    assert waiting
    assert deltas(waiting) == []
    assert deltas(events) == [{"compaction-agent.md": 0}]


@pytest.mark.parametrize("service", [None, InMemoryArtifactService()])
async def test_artifacts_can_be_off(
    service: BaseArtifactService | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a service, or by the setting, there is the line and nothing else."""
    chat = await open_chat(service, summary_artifacts=service is None)

    events = await chat.say("Look.")

    assert answer_text(events) == "It is done."
    assert (await chat.state())["context_guard:compacted:agent"]
    assert deltas(events) == []
    assert service is None or await list_names(service) == []
    assert "artifact" not in caplog.text


class Broken(InMemoryArtifactService):
    """A service that fails, or never ends."""

    seconds: float = 0

    async def save_artifact(self, **_: Any) -> int:
        """Raises, with words that may quote a message."""
        await asyncio.sleep(self.seconds)
        raise RuntimeError("it quotes ORIGINAL words")


@pytest.mark.parametrize("seconds", [0, 3_600])
async def test_broken_service_ends_no_turn(
    seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The turn goes on after two seconds at most; one warning says so, not its text."""
    agent = make_agent(f"agent_{seconds}")
    chat = await open_chat(Broken(seconds=seconds), agent)

    with caplog.at_level(logging.WARNING, "contextguard_adk"):
        started = time.monotonic()
        events = await chat.say("Look.")
        assert time.monotonic() - started < 5
        await chat.set_state(DEMAND)
        await chat.say("Look.")

    assert answer_text(events) == "It is done."
    assert (await chat.state())[f"context_guard:compacted:{agent.name}"]
    assert deltas(await chat.events()) == []
    said = [r.getMessage() for r in caplog.records if "artifact" in r.getMessage()]
    assert len(said) == 1
    assert "ORIGINAL" not in caplog.text


async def test_a_turn_that_is_cancelled_while_saving_is_reported() -> None:
    """Listeners have heard of what was paid for, and nothing is paid for twice."""
    llm, told = make_llm(), list[CompactionRecord]()
    agent = make_agent("cancelled", model=llm)
    service = Broken(seconds=3_600)
    chat = await open_chat(service, agent, on_compaction=told.append)
    turn = asyncio.create_task(chat.say("Look."))
    while not told:
        await asyncio.sleep(0.01)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    paid = llm.summaries
    del turn

    assert answer_text(await chat.say("Look.")) == "It is done."
    assert (llm.summaries, len(told)) == (paid, 1)


async def test_no_artifact_where_the_model_is_told_of_all() -> None:
    """`LoadArtifactsTool` would list it, also in the agent that calls this one."""
    for agent in (
        make_agent("agent", load_artifacts_tool),
        make_agent("agent", sub_agents=[make_agent("other", load_artifacts_tool)]),
    ):
        service = InMemoryArtifactService()
        chat = await open_chat(service, agent)
        await chat.say("Look.")
        assert (await chat.state())["context_guard:compacted:agent"]
        assert await list_names(service) == []


@pytest.mark.parametrize("is_listed", [False, True])
async def test_compaction_in_an_agent_tool(is_listed: bool) -> None:
    """The line and the artifact are those of the caller's session."""
    steps: list[Reply] = [call("look_closely", place="hall")] * 9
    llm = make_llm(script=[*steps, "Nothing."])
    inner = LlmAgent(name="inner", model=llm, tools=[look_closely])
    root = make_llm(script=[call("inner", request="Look at all."), "It is done."])
    tools: list[Any] = [AgentTool(inner), *([load_artifacts_tool] if is_listed else [])]
    service = InMemoryArtifactService()
    plugin = ContextGuardPlugin(default=Threshold(context_window=4_000))
    chat = Chat(LlmAgent(name="root", model=root, tools=tools), [plugin])
    chat.runner.artifact_service = service

    events = await chat.say("Look at all.")

    assert answer_text(events) == "It is done."
    assert (await chat.state())["context_guard:compacted:inner"]
    names = [] if is_listed else ["compaction-inner.md"]
    assert await list_names(service) == names


async def test_observing_shows_nothing() -> None:
    """A guard that changes no request writes no line and no artifact."""
    service = InMemoryArtifactService()
    chat = await open_chat(service, observe=True)

    await chat.say("Look.")

    assert not [key for key in await chat.state() if "compacted" in key]
    assert await list_names(service) == []


async def test_recorded_tests_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`adk test` compares state: there is no line while it records or replays."""
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "rebuild")
    service = InMemoryArtifactService()
    chat = await open_chat(service)

    await chat.say("Look.")

    assert not [key for key in await chat.state() if "context_guard" in key]
    assert await list_names(service) == []


class Declared(BaseModel):
    """A schema of session state that does not know the guard."""

    name: str = ""


async def test_line_passes_a_state_schema() -> None:
    """An app that declares its state gets the line under the same key."""
    chat = await open_chat(None, make_agent(state_schema=Declared))

    events = await chat.say("Look.")

    assert answer_text(events) == "It is done."
    assert (await chat.state())["context_guard:compacted:agent"]


async def test_rejected_request_is_shown_as_such() -> None:
    """A compaction after the provider's rejection has both, and says so."""
    service = InMemoryArtifactService()
    llm = make_llm(context_window=2_900, token_ratio=1.0)
    chat = await open_chat(service, make_agent(model=llm), window_tokens=8_000)

    events = await chat.say("Look.")

    assert answer_text(events) == "It is done."
    assert llm.rejections
    (delta,) = deltas(events)
    text = await load(service, "compaction-agent.md", delta["compaction-agent.md"])
    assert "- Reason: the provider rejected the request as too long\n" in text
    assert (await chat.state())["context_guard:compacted:agent"]


async def test_database_and_rewind(tmp_path: Path) -> None:
    """The line survives a reload, and goes with the turn when that is taken back."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"
    sessions, service = DatabaseSessionService(url), InMemoryArtifactService()
    chat = await open_chat(service, chat={"session_service": sessions})
    events = await chat.say("Look.")
    assert (await chat.state())["context_guard:compacted:agent"]
    assert deltas(await chat.events()) == [{"compaction-agent.md": 0}]

    await chat.runner.rewind_async(
        user_id="user",
        session_id="session",
        rewind_before_invocation_id=events[0].invocation_id,
    )

    assert (await chat.state()).get("context_guard:compacted:agent") is None
    assert answer_text(await chat.say("Look.")) == "It is done."
    await sessions.db_engine.dispose()


async def test_artifact_is_not_part_of_a_request() -> None:
    """Neither the line nor the artifact reaches the model."""
    llm = make_llm()
    chat = await open_chat(InMemoryArtifactService(), make_agent(model=llm))

    await chat.say("Look.")
    await chat.say("Look.")

    sent = "\n".join(request.text for request in llm.requests)
    assert not re.search(r"Compaction of |compacted:agent| → ", sent)


async def test_summary_ahead_of_time_is_shown_once_it_is_put_in() -> None:
    """It says so, and the line comes with the call that the summary went into."""
    service = InMemoryArtifactService()
    llm = make_llm(token_ratio=1.0)
    strategy = Threshold(context_window=4_000, ahead=0.5)
    agent = make_agent(model=llm)
    chat = Chat(agent, [ContextGuardPlugin(default=strategy)])
    chat.runner.artifact_service = service
    await chat.tell([user("The task."), model(words(1_000)), user("?"), model("!")])
    while llm.summaries == 0:
        assert not [key for key in await chat.state() if "compacted" in key]
        await chat.say(words(400, "Look."))
    await chat.say(words(1_200, "Look."))
    await chat.say(words(400, "Look."))

    (delta,) = deltas(await chat.events())[:1]
    text = await load(service, "compaction-agent.md", delta["compaction-agent.md"])
    assert "Written ahead of time" in text
