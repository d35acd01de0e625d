"""`contextguard check` of a folder of agents: what guards each, and what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contextguard_adk._tools.cli import main
from contextguard_adk.config import CONFIG_VARIABLE

Check = Callable[..., tuple[int, dict[str, Any]]]
HEAD = """
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.apps.app import EventsCompactionConfig
from contextguard_adk import ContextGuardPlugin, Threshold

def search(query: str) -> str:
    '''Searches.'''
    return query

print("An agent may print.")
agent = LlmAgent(name="finder", model="gemini-pro-latest", tools=[search])
"""
GOOD = "root_agent = agent"
GUARDED = "app = App(name='{}', root_agent=agent, plugins=[{}])"
TWO = "ContextGuardPlugin(name='a'), ContextGuardPlugin(name='b')"
COMPACTED = """
app = App(name="compacted", root_agent=agent, plugins=[ContextGuardPlugin()],
    events_compaction_config=EventsCompactionConfig(
        compaction_interval=3, overlap_size=1))
"""


LOST = """
from google.genai import types
body = {"context_management": [{"type": "compaction"}]}
options = types.HttpOptions(extra_body=body)
agent.generate_content_config = types.GenerateContentConfig(http_options=options)
root_agent = agent
"""


def guarded(name: str, settings: str) -> str:
    """An app whose own guard has such settings."""
    return GUARDED.format(name, f"ContextGuardPlugin({settings})")


WRONG = {
    "broken": (
        "raise RuntimeError('no\\nkey')",
        "cannot be loaded: …no key",
    ),
    "named": (guarded("named", "agents={'findr': None}"), "…Did you mean 'finder'?"),
    "kept": (
        guarded("kept", "default=Threshold(keep_tools=('serch',))"),
        "finder: `keep_tools` names 'serch', which is not there. "
        "Did you mean 'search'?",
    ),
    "summed": (
        guarded("summed", "default=Threshold(summarizer='no-such-model')"),
        "finder: ADK cannot resolve its summarizer: …",
    ),
    "house": (
        "root_agent = LlmAgent(name='root', model='no-such-model')",
        "root: ADK cannot resolve its model: …",
    ),
    "unknown": (
        "root_agent = LlmAgent(name='root', model='gemini-nobody-knows')",
        "root: the window of 'gemini-nobody-knows' is unknown: set context_window",
    ),
    "twice": (GUARDED.format("twice", TWO), "two guards: …"),
    "lost": (LOST, "finder: `context_management` has the provider compact …"),
    "compacted": (COMPACTED, "events_compaction_config: …"),
}


@pytest.fixture
def check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Iterator[Check]:
    """Writes agents, and checks the folder, or one of them."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)

    def run(apps: dict[str, str], *path: str) -> tuple[int, dict[str, Any]]:
        for name, source in apps.items():
            folder = tmp_path / name
            folder.mkdir()
            (folder / "__init__.py").touch()
            (folder / "agent.py").write_text(HEAD + source)
        code = main(["check", str(tmp_path.joinpath(*path)), "--json"])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return code, found

    yield run
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {*WRONG, "good", "other"}:
            del sys.modules[name]


def test_each_agent_is_described(check: Check, capsys: Any, tmp_path: Path) -> None:
    """An app without a guard has the one of --extra_plugins; it may be early."""
    early = "agents={'finder': Threshold(trigger='auto', keep_tools=('search',))}"
    (tmp_path / "notes").mkdir()  # Not an agent.
    code, found = check({"good": GOOD, "other": guarded("other", early)})
    assert code == 0
    assert [app["app"] for app in found["apps"]] == ["good", "other"]

    budgets = [app["agents"][0]["budgets"][0] for app in found["apps"]]
    assert [each["threshold_tokens"] for each in budgets] == [1_028_576, 32_000]
    assert main(["check", str(tmp_path / "good")]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["good: good", "  finder: Threshold"]

    costs = "compacts at 1,028,576 tokens, a prompt of that size costs $4.11"
    assert costs in [line.strip() for line in lines]
    assert "other: good" not in lines


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(check: Check, name: str) -> None:
    """With exit code 1, so that CI fails."""
    source, said = WRONG[name]
    code, found = check({name: source}, name)
    [problem] = found["apps"][0]["problems"]
    begin, _, end = said.partition("…")
    assert problem.startswith(begin)
    assert problem.endswith(end)
    assert code == 1


def test_a_shared_file_may_name_agents_of_any_app(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that no app has is wrong."""
    file = tmp_path / "guard.toml"
    file.write_text('[agents]\nfinder = "none"\nroot = "pipeline"\nroute = "none"')
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    root = "root_agent = LlmAgent(name='root', model='gemini-pro-latest')"
    code, found = check({"good": GOOD, "other": root})
    assert code == 1

    good, other, shared = found["apps"]
    assert good["agents"][0]["strategy"] is None
    assert other["agents"][0]["strategy"] == "Pipeline"
    assert good["problems"] == other["problems"] == []

    [problem] = shared["problems"]
    assert problem == "`agents` names 'route', which is not there. Did you mean 'root'?"


def test_a_folder_without_agents_is_wrong(check: Check, capsys: Any) -> None:
    """As is --model, which is for a file."""
    code, found = check({})
    assert code == 1
    assert "cannot be loaded" in found["apps"][0]["problems"][0]
    assert main(["check", ".", "--model", "gpt-5.4-mini"]) == 2
    assert "--model is for a file" in capsys.readouterr().err
