"""The samples, loaded as `adk web samples` loads them, and run."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.events import Event

from contextguard_adk import ContextGuardPlugin
from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat, answer_text

if TYPE_CHECKING:
    from google.adk.cli.utils.agent_loader import AgentLoader

SAMPLES = Path(__file__).parent.parent / "samples"
NAMES = ["coordinator", "custom_strategy", "guarded_agent"]


@pytest.fixture(autouse=True)
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentLoader]:
    """ADK's loader on the samples folder; what it imports is forgotten again."""
    from google.adk.cli.utils.agent_loader import AgentLoader

    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield AgentLoader(str(SAMPLES))
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in NAMES:
            del sys.modules[name]


def load_app(loader: AgentLoader, name: str) -> App:
    """Loads a sample, which must be an app with its guard."""
    app = loader.load_agent(name)
    assert isinstance(app, App)
    assert app.name == name
    assert [type(plugin) for plugin in app.plugins] == [ContextGuardPlugin]
    return app


async def converse(
    app: App, messages: Sequence[str], is_streaming: bool = False
) -> tuple[list[Event], dict[str, Any]]:
    """Sends messages one after another; returns the whole events and the state."""
    assert isinstance(app.root_agent, LlmAgent)
    chat = Chat(app.root_agent, app.plugins, is_streaming=is_streaming)
    events = [event for message in messages for event in await chat.say(message)]
    assert not any(event.error_code for event in events)

    for agent in (app.root_agent, *app.root_agent.sub_agents):
        assert isinstance(agent, LlmAgent)
        assert isinstance(agent.model, SimulatedLlm)
        assert agent.model.rejections == agent.model.violations == 0
        assert agent.model.largest_request_tokens <= agent.model.context_window

    return [event for event in events if not event.partial], await chat.state()


def count_compactions(events: Sequence[Event], agent: str) -> int:
    """How often an agent's history was compacted."""
    key = f"__context_guard_summarized_at_{agent}"
    return sum(bool(event.actions.state_delta.get(key)) for event in events)


def test_samples_are_listed_and_guarded(loader: AgentLoader) -> None:
    """`adk web samples` offers them, and each app brings its guard along."""
    # An older ADK lists every folder, and so that of the server to copy.
    assert [name for name in loader.list_agents() if name != "team"] == NAMES
    assert all(load_app(loader, name) for name in NAMES)


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_guarded_agent_compacts_within_a_few_messages(
    loader: AgentLoader, is_streaming: bool
) -> None:
    """Whatever is said, it inspects once and answers; by the sixth it compacted."""
    app = load_app(loader, "guarded_agent")
    messages = ["Hello", "And staging?", "And monitoring?", "?", "Once more", "Thanks"]
    events, state = await converse(app, messages, is_streaming)
    assert count_compactions(events, "operator") == 1

    summary = state["__context_guard_summary_operator"]
    assert re.search(r"\n- production: 2 pods are down: production-api-\d+, ", summary)
    assert re.search(r"\n- monitoring: 2 pods are down: ", summary)
    assert '- The user asked: "Once more"' in summary

    calls = [call for event in events for call in event.get_function_calls()]
    inspected = [(call.args or {})["namespace"] for call in calls]
    assert inspected == ["production", "staging", "monitoring", *["production"] * 3]

    answers = [event for event in events if event.is_final_response()]
    assert len(answers) == len(messages)
    assert all("pods are down: " in answer_text([event]) for event in answers)


async def test_coordinator_guards_each_agent_in_its_own_way(
    loader: AgentLoader, caplog: pytest.LogCaptureFixture
) -> None:
    """The user's words choose the agent, whoever had the floor; the researcher compacts
    by messages, the writer by tokens, each on its own."""
    app = load_app(loader, "coordinator")
    first = ["Hello", "find papers on sleep", "write it up", "shorter", "find tea"]
    messages = ["find rice", "write it", "find tea", "find rice", "write it"] * 2
    with caplog.at_level(logging.INFO, "contextguard_adk"):
        events, state = await converse(app, [*first, *messages])

    calls = [(e.author, c.name) for e in events for c in e.get_function_calls()]
    assert calls[:7] == [
        ("coordinator", "transfer_to_agent"),
        ("researcher", "search_papers"),
        ("researcher", "transfer_to_agent"),
        ("writer", "get_style_guide"),
        ("writer", "get_style_guide"),
        ("writer", "transfer_to_agent"),
        ("researcher", "search_papers"),
    ]

    assert count_compactions(events, "researcher") >= 3
    assert count_compactions(events, "writer") >= 1
    assert "Compacted agent 'researcher' (turns)" in caplog.text
    assert "Compacted agent 'writer' (tokens)" in caplog.text
    key = "__context_guard_summary_{}"
    assert state[key.format("researcher")] != state[key.format("writer")]
    assert "- Papers were searched: find rice\n" in state[key.format("researcher")]
    assert "- A text was written" in state[key.format("writer")]
