"""The samples, loaded as `adk web samples` loads them, and run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.apps import App
from google.adk.cli.utils.agent_loader import AgentLoader
from google.adk.events import Event
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types

from contextguard_adk import ContextGuardPlugin
from contextguard_adk.testing import SimulatedLlm

SAMPLES = Path(__file__).parent.parent / "samples"
NAMES = ["coordinator", "custom_strategy", "guarded_agent"]


@pytest.fixture(autouse=True)
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentLoader]:
    """ADK's loader on the samples folder; what it imports is forgotten again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield AgentLoader(str(SAMPLES))
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in NAMES:
            del sys.modules[name]


def load_app(loader: AgentLoader, name: str) -> App:
    """Loads a sample, which must be an app with plugins."""
    app = loader.load_agent(name)
    assert isinstance(app, App)
    return app


async def converse(
    app: App, messages: Sequence[str], streaming: str | None = None
) -> tuple[list[Event], Session]:
    """Sends messages one after another; returns all events and the session."""
    sessions = InMemorySessionService()
    runner = Runner(app=app, session_service=sessions)
    session = await sessions.create_session(app_name=app.name, user_id="user")
    events = []
    for message in messages:
        content = types.Content(role="user", parts=[types.Part(text=message)])
        async for event in runner.run_async(
            user_id="user",
            session_id=session.id,
            new_message=content,
            run_config=RunConfig.model_validate({"streaming_mode": streaming}),
        ):
            assert not event.error_code, event.error_message
            events.append(event)
    await runner.close()
    stored = await sessions.get_session(
        app_name=app.name, user_id="user", session_id=session.id
    )
    assert stored is not None
    return events, stored


def list_models(app: App) -> list[SimulatedLlm]:
    """The models of all agents of an app."""
    root = app.root_agent
    assert isinstance(root, LlmAgent)
    agents = [root, *root.sub_agents]
    return [a.model for a in agents if isinstance(a, LlmAgent)]  # type: ignore[misc]


def count_compactions(events: Sequence[Event], agent: str) -> int:
    """How often an agent's history was compacted."""
    key = f"__context_guard_summarized_at_{agent}"
    whole = [event for event in events if not event.partial]
    return sum(bool(event.actions.state_delta.get(key)) for event in whole)


def list_calls(events: Sequence[Event]) -> list[tuple[str, str, dict[str, Any]]]:
    """Who called which tool how."""
    return [
        (event.author, call.name or "", call.args or {})
        for event in events
        if not event.partial
        for call in event.get_function_calls()
    ]


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_listed_and_guarded(loader: AgentLoader, name: str) -> None:
    """`adk web samples` offers them, and the app brings its guard along."""
    app = load_app(loader, name)

    assert loader.list_agents() == NAMES
    assert app.name == name
    assert [type(plugin) for plugin in app.plugins] == [ContextGuardPlugin]


@pytest.mark.parametrize("streaming", [None, "sse"])
async def test_guarded_agent_compacts_within_a_few_messages(
    loader: AgentLoader, streaming: str | None
) -> None:
    """Whatever is said, it inspects and answers; by the sixth message it compacted."""
    app = load_app(loader, "guarded_agent")
    messages = ["Hello", "And staging?", "And monitoring?", "?", "Once more", "Thanks"]

    events, session = await converse(app, messages, streaming)

    (model,) = list_models(app)
    assert count_compactions(events, "operator") == 1
    assert model.rejections == model.violations == 0
    assert model.largest_request_tokens <= 8_000
    assert session.state["__context_guard_summary_operator"]
    inspected = [arguments["namespace"] for *_, arguments in list_calls(events)]
    assert inspected[:3] == ["production", "staging", "monitoring"]
    answers = [event for event in events if event.is_final_response()]
    whole = [event for event in answers if not event.partial]
    assert len(whole) == len(messages)
    for event in whole:
        assert event.content
        assert event.content.parts
        assert "pods are down: " in (event.content.parts[0].text or "")


@pytest.mark.slow
async def test_guarded_agent_goes_on_for_long(loader: AgentLoader) -> None:
    """Twenty messages need several compactions, and no request is refused."""
    app = load_app(loader, "guarded_agent")

    events, _ = await converse(app, ["Look again"] * 20)

    (model,) = list_models(app)
    assert count_compactions(events, "operator") >= 4
    assert model.rejections == model.violations == 0


async def test_coordinator_hands_over_by_the_users_words(loader: AgentLoader) -> None:
    """The words choose the agent, whoever had the floor."""
    app = load_app(loader, "coordinator")
    messages = ["Hello", "find papers on sleep", "write it up", "shorter", "find tea"]

    events, _ = await converse(app, messages)

    assert [(author, name) for author, name, _ in list_calls(events)] == [
        ("coordinator", "transfer_to_agent"),
        ("researcher", "search_papers"),
        ("researcher", "transfer_to_agent"),
        ("writer", "get_style_guide"),
        ("writer", "get_style_guide"),
        ("writer", "transfer_to_agent"),
        ("researcher", "search_papers"),
    ]


async def test_coordinator_guards_each_agent_in_its_own_way(
    loader: AgentLoader, caplog: pytest.LogCaptureFixture
) -> None:
    """The researcher compacts by contents, the writer by tokens, each on its own."""
    app = load_app(loader, "coordinator")
    messages = ["find sleep", "write it", "find tea", "find rice", "write it"] * 4

    with caplog.at_level(logging.INFO, "contextguard_adk"):
        events, session = await converse(app, messages)

    for model in list_models(app):
        assert model.rejections == model.violations == 0
    assert count_compactions(events, "researcher") >= 3
    assert count_compactions(events, "writer") >= 1
    log = caplog.text
    assert "Compacted agent 'researcher' (turns)" in log
    assert "Compacted agent 'writer' (tokens)" in log
    summaries = [
        session.state[f"__context_guard_summary_{a}"] for a in ("researcher", "writer")
    ]
    assert summaries[0] != summaries[1]
