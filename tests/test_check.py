"""The command line: `contextguard check`, what it prints and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from contextguard_adk.config import CONFIG_VARIABLE
from contextguard_adk.tools.check import DEFAULT
from contextguard_adk.tools.cli import main

SETTINGS = """
warning_threshold = 0.8

[default]
strategy = "sliding_window"
max_turns = 30

[agents.writer]
strategy = "pipeline"
context_window = 50_000
summarizer = "gemini-2.5-flash"
summary = false

[agents.router]
strategy = "none"
"""


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
    assert found == {
        "config": str(config),
        "observe": False,
        "state_keys": "auto",
        "warning_threshold": 0.8,
    }
    sizes = {
        "window_tokens": 128_000,
        "buffer_tokens": 25_600,
        "threshold_tokens": 102_400,
        "summary_tokens": 12_800,
    }
    assert default == {
        "agent": DEFAULT,
        "strategy": "SlidingWindow",
        "settings": {"max_turns": 30},
        "summarizer": None,
        "budgets": [
            {
                "model": models[0],
                "source": "registry",
                "registry_entry": "gpt-4o",
                **sizes,
            },
            {"model": models[1], "source": "default", "registry_entry": None, **sizes},
        ],
    }
    assert writer["strategy"] == "Pipeline"
    assert writer["summarizer"] == "gemini-2.5-flash"
    assert {(b["source"], b["window_tokens"]) for b in writer["budgets"]} == {
        ("configured", 50_000)
    }
    assert router == {
        "agent": "router",
        "strategy": None,
        "settings": {},
        "summarizer": None,
        "budgets": [],
    }


def test_it_prints_a_table_for_people(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Agent by agent: strategy, settings, summarizer, and a row for each model."""
    assert main(["check", str(config), "--model", "gpt-4o", "nobody-knows-it"]) == 0
    output = capsys.readouterr()
    assert output.err == ""  # The table says what the guard would warn of.
    lines = [" ".join(line.split()) for line in output.out.splitlines()]
    assert lines[0].endswith("guard.toml: good")
    assert "gpt-4o 128,000 registry: gpt-4o 25,600 102,400 12,800" in lines
    assert (
        "nobody-knows-it 128,000 unknown model: assumed 25,600 102,400 12,800" in lines
    )
    writer = lines.index("writer")
    assert lines[writer + 1 : writer + 4] == [
        "strategy Pipeline",
        "summary = false",
        "summaries by gemini-2.5-flash",
    ]
    assert "gpt-4o 50,000 config 10,000 40,000 5,000" in lines[writer:]
    assert lines[-2:] == ["router", "not guarded"]


def test_without_a_model_it_shows_what_the_file_says(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A configured window needs no model; any other depends on one."""
    assert main(["check", str(config)]) == 0
    output = capsys.readouterr().out
    assert "name models with --model" in output
    assert "any 50,000 config" in " ".join(output.split())


@pytest.mark.parametrize("is_set", [False, True])
def test_the_variable_names_the_file(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_set: bool,
) -> None:
    """As for the plugin itself; without it the built-in settings are shown."""
    if is_set:
        monkeypatch.setenv(CONFIG_VARIABLE, str(config))
    found = check_json(capsys, "--model", "gpt-4o")
    assert found["config"] == (str(config) if is_set else None)
    assert len(found["agents"]) == (3 if is_set else 1)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("bad.toml", "[default]\nmax_turn = 3", "max_turn"),
        ("bad.toml", "[default", "Expected ']'"),
        ("bad.yaml", "default: [\nagents: {", "bad.yaml"),
        ("bad.json", "{}", ".toml, .yaml or .yml"),
        ("bad.toml", "[default]\nstrategy = 'magic'", "default.strategy"),
        ("bad.toml", "[default]\nsummarizer = 'gemnii'", "default.summarizer"),
        ("bad.toml", None, "cannot be read"),
    ],
    ids=["key", "TOML", "YAML", "suffix", "strategy", "summarizer", "missing"],
)
def test_a_wrong_file_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str | None,
    reason: str,
) -> None:
    """With the path and the reason, on stderr."""
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert main(["check", str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith(f"contextguard check: error: {path}:")
    assert reason in line


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


def test_a_file_among_the_models_is_an_error(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise it would be taken for a model, and not be read."""
    assert main(["check", "--model", "gpt-4o", str(config)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "name the file before --model" in output.err


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


def test_no_number_is_cut(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a narrow terminal the table is wider than it is."""
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["check", str(config), "--model", "gpt-4o"]) == 0
    printed = capsys.readouterr().out
    for number in ("128,000", "25,600", "102,400", "12,800"):
        assert number in printed
    assert "…" not in printed
