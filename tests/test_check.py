"""The command line: `contextguard check`, what it prints and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from contextguard_adk._tools.cli import main
from contextguard_adk.config import CONFIG_VARIABLE

SETTINGS = """
warning_threshold = 0.8

[default]
strategy = "sliding_window"
max_messages = 30

[agents.writer]
strategy = "pipeline"
context_window = 50_000
summarizer = "gemini-2.5-flash"
summary = false

[agents.router]
strategy = "none"

[prices.own-model]
input = 0
output = 0.5
"""
MODELS = ["gpt-4o", "nobody-knows-it", "own-model"]


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A settings file with three kinds of agents."""
    path = tmp_path / "guard.toml"
    path.write_text(SETTINGS)
    return path


def check_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What the command prints as JSON."""
    main(["check", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_each_agent_and_model_has_its_budgets(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A configured window wins, the table is asked, and the unknown is assumed."""
    models = ["openrouter/openai/gpt-4o", "nobody-knows-it"]
    found = check_json(capsys, str(config), "--model", *models)
    default, writer, router = found.pop("agents")
    assert (found["config"], found["warning_threshold"]) == (str(config), 0.8)
    known, unknown = default.pop("budgets")
    assert default == {
        "agent": "(default)",
        "strategy": "SlidingWindow",
        "settings": {"max_messages": 30},
        "summarizer": None,
    }
    assert known == {
        "model": models[0],
        "source": "registry",
        "registry_entry": "gpt-4o",
        "window_tokens": 128_000,
        "buffer_tokens": 25_600,
        "threshold_tokens": 102_400,
        "summary_tokens": 12_800,
        "costs": {"input": 2.5, "output": 10, "cached_input": 1.25},
    }
    changes = {"model": models[1], "source": "default", "registry_entry": None}
    changes["costs"] = None
    assert unknown == known | changes
    assert writer["summarizer"] == "gemini-2.5-flash"
    assert {b["window_tokens"] for b in writer["budgets"]} == {50_000}
    assert (router["strategy"], router["budgets"]) == (None, [])


def test_it_prints_lines_for_people(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Agent by agent, and no number is cut however narrow the terminal."""
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["check", str(config), "--model", *MODELS]) == 0
    output = capsys.readouterr()
    assert output.err == ""  # The lines say what the guard would warn of.
    lines = output.out.splitlines()
    assert lines[0].endswith("guard.toml: good")
    sizes = "buffer 25,600, threshold 102,400, summary 12,800"
    assert f"  gpt-4o: window 128,000 (registry: gpt-4o), {sizes}" in lines
    assert any("(unknown model: assumed)" in line for line in lines)
    prices = "    dollars per million tokens: "
    assert f"{prices}input 2.5, output 10, cached_input 1.25" in lines
    assert f"{prices}unknown" in lines
    assert f"{prices}input 0, output 0.5" in lines
    writer = lines.index("writer: Pipeline")
    assert lines[writer + 1 : writer + 3] == [
        "  summary = false",
        "  summaries by gemini-2.5-flash",
    ]
    assert lines[writer + 3].startswith("  gpt-4o: window 50,000 (config)")
    assert lines[-1] == "router: not guarded"

    assert main(["check", str(config)]) == 0
    printed = capsys.readouterr().out
    assert "name models with --model" in printed
    assert "any model: window 50,000 (config)" in printed


def test_the_variable_names_the_file(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for the plugin itself; without it the built-in settings are shown."""
    found = check_json(capsys)
    assert (found["config"], len(found["agents"])) == (None, 1)
    monkeypatch.setenv(CONFIG_VARIABLE, str(config))
    found = check_json(capsys)
    assert (found["config"], len(found["agents"])) == (str(config), 3)


@pytest.mark.parametrize(("window", "shown"), [(128_000, "32,000"), (8_000, "6,400")])
def test_the_automatic_trigger_is_a_threshold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], window: int, shown: str
) -> None:
    """It is shown as such; in a small window it is the usual one."""
    path = tmp_path / "guard.toml"
    path.write_text(f"[default]\ntrigger = 'auto'\ncontext_window = {window}")
    assert main(["check", str(path)]) == 0
    assert f"threshold {shown}, summary" in capsys.readouterr().out


def test_a_pipeline_shows_when_it_runs_and_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may run before the threshold, and its own reducers have names."""
    path = tmp_path / "guard.toml"
    path.write_text(
        "[default]\nstrategy = 'pipeline'\ncompression_threshold = 0.75\n"
        "context_window = 32_000\n[[default.reducers]]\n"
        "reducer = 'contextguard_adk.TokenWindow'\nbudget_tokens = 500\n"
    )
    default = check_json(capsys, str(path))["agents"][0]
    assert default["budgets"][0]["threshold_tokens"] == 24_000
    assert default["settings"]["reducers"] == [
        {
            "reducer": "contextguard_adk.strategies.reducers.TokenWindow",
            "budget_tokens": 500,
        }
    ]


def test_classes_of_the_present_folder_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A strategy in a module beside the agents needs no installing."""
    (tmp_path / "our_strategies_here.py").write_text(
        "from contextguard_adk import Threshold\n\n\nclass Ours(Threshold):\n    pass\n"
    )
    path = tmp_path / "guard.toml"
    path.write_text("default = 'our_strategies_here.Ours'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert check_json(capsys, str(path))["agents"][0]["strategy"] == "Ours"
