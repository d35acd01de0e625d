"""Names that a later google-adk may change: the package does without them."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import google.adk.apps.llm_event_summarizer
import google.adk.cli.utils.agent_loader
import google.adk.flows.llm_flows.contents
import google.adk.tools.load_artifacts_tool
import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.artifacts import InMemoryArtifactService
from google.adk.runners import Runner

from tests.builders import Chat, answer_text, model, user
from tests.chats import words

PACKAGE = "contextguard_adk"
NAMES = [
    "google.adk.cli.utils.agent_loader.AgentLoader",
    "google.adk.events.event_actions.EventCompaction",
    "google.adk.plugins.plugin_manager.PluginManager",
    "google.adk.sessions.base_session_service.GetSessionConfig",
    "google.adk.tools.load_artifacts_tool.LoadArtifactsTool",
]
"""What no app has to name, so ADK may change it in a minor version."""

if importlib.util.find_spec("google.adk.flows.llm_flows.context"):
    # An older ADK reads this name itself, at each run.
    NAMES.append("google.adk.flows.llm_flows.contents.request_processor")

EACH = [
    pytest.param([path], id=path.rpartition(".")[2], marks=pytest.mark.slow)
    for path in NAMES
]


@pytest.fixture(params=[pytest.param(NAMES, id="all"), *EACH])
def package(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """The package, imported anew without these names in ADK's modules."""
    for path in request.param:
        monkeypatch.delattr(path)
    before = list_own_modules()
    for name in before:
        del sys.modules[name]
    yield importlib.import_module(PACKAGE)

    for name in list_own_modules():
        del sys.modules[name]
    sys.modules.update(before)


def list_own_modules() -> dict[str, ModuleType]:
    """The modules of the package that are imported."""
    return {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] == PACKAGE
    }


async def test_without_a_name_of_adk_no_turn_is_lost(
    package: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """A session is compacted, saved, recalled, loaded in part and left as ever."""
    caplog.set_level(logging.INFO, PACKAGE)
    sessions: Any = importlib.import_module(f"{PACKAGE}.sessions")
    testing: Any = importlib.import_module(f"{PACKAGE}.testing")
    compactions = list[object]()
    guard = package.ContextGuardPlugin(
        default=package.Threshold(context_window=4_000, recall=True),
        on_compaction=compactions.append,
        recent_events=True,
        summary_artifacts=True,
    )
    recalling = testing.call("recall_history", query="old 0")
    llm = testing.SimulatedLlm(
        context_window=4_000, script=["First.", "Second.", recalling, "Third."]
    )
    chat = Chat(LlmAgent(name="agent", model=llm), [guard])
    artifacts = InMemoryArtifactService()
    chat.runner = Runner(
        app=chat.app, session_service=chat.sessions, artifact_service=artifacts
    )
    for number in range(20):
        await chat.tell([user(f"This is old {number}."), model(words(200))])
    answers = [answer_text(await chat.say("Go on.")) for _ in range(2)]

    place: Any = {"user_id": chat.user_id, "session_id": chat.session_id}
    config = await sessions.load_recent(chat.sessions, chat.app, **place)
    chat.run_config = RunConfig(get_session_config=config)
    answers.append(answer_text(await chat.say("What did I say first?")))
    await chat.runner.close()
    assert answers == ["First.", "Second.", "Third."]
    assert compactions
    assert await artifacts.list_artifact_keys(app_name="app", **place) == [
        "compaction-agent.md"
    ]
    assert config.after_timestamp > 0
    *_, result = llm.requests[-1].contents[-1].parts or []
    assert "This is old 0." in str(result.function_response)

    assert "ADK's own compaction" in await sessions.leave(
        chat.sessions, await chat.session()
    )
    [compaction] = [
        e.actions.compaction for e in await chat.events() if e.actions.compaction
    ]
    assert "old 0" in str(compaction.compacted_content)
    warnings = [
        r
        for r in caplog.records
        if r.name.startswith(PACKAGE) and r.levelno > logging.INFO
    ]
    assert not warnings


def test_commands_do_without_names_of_adk(
    package: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a folder cannot be checked without ADK's loader, and one line says so."""
    for name in ("replay", "why", "report", "requests"):
        assert importlib.import_module(f"{PACKAGE}._tools.{name}")
    command: Any = importlib.import_module(f"{PACKAGE}._tools.cli")
    assert command.main(["check"]) == 0
    capsys.readouterr()

    exit_code = command.main(["check", str(tmp_path)])
    said = capsys.readouterr()
    if hasattr(google.adk.cli.utils.agent_loader, "AgentLoader"):
        assert exit_code == 1
        assert "No root_agent found" in said.out
    else:
        assert exit_code == 2
        assert said.err.count("\n") == 1
        assert "this google-adk has no AgentLoader" in said.err
