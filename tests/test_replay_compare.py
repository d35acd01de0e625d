"""`contextguard replay --compare` on real recordings, with and without a cache."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from contextguard_adk import Costs, Threshold
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._tools.cli import main
from contextguard_adk._tools.recordings import SessionKey, load_session
from contextguard_adk._tools.replay import ReplaySettings, replay_session
from contextguard_adk.config import (
    CONFIG_VARIABLE,
    STRATEGIES,
    PluginSettings,
    load_settings,
)
from contextguard_adk.telemetry import Usage
from tests.test_replay import WINDOW, fail, record, two_agents_with

ROWS = [
    "threshold",
    "sliding_window",
    "pipeline",
    "threshold, trigger 0.5",
    "threshold, trigger 0.25",
    "threshold, trigger 0.1",
    "threshold, trigger auto",
]

PRICES = """
[prices.simulated]
input = 1.0
cached_input = 0.25
output = 4.0
"""


@pytest.fixture(scope="module", params=[False, True], ids=["no cache", "cache"])
def export(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    """The export of a session, whose provider had a prompt cache or none."""
    session, _ = asyncio.run(record(has_cache=request.param))
    path: Path = tmp_path_factory.mktemp("recorded") / "session.json"
    path.write_text(session.model_dump_json())
    return path


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


def compare(capsys: pytest.CaptureFixture[str], source: Path, *arguments: str) -> str:
    """What the command prints."""
    assert main(["replay", str(source), "--compare", *arguments]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_the_cheapest_row_is_marked_and_told(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By tokens, weighted, where nobody knows the price; its settings can be loaded."""
    printed = compare(capsys, export, "--window", str(WINDOW))
    _, head, *lines = printed.partition("\n\n")[0].splitlines()
    names = [line[2:].partition("  ")[0] for line in lines]
    assert names == ["no guard", *ROWS]
    columns = re.split(r"\s{2,}", head.strip())
    cells = [line.split()[-len(columns) :] for line in lines]
    rows = [dict(zip(columns, row, strict=True)) for row in cells]
    assert {row["cost"] for row in rows} == {"unknown"}
    assert "a tenth of the cached ones" in printed
    over = [int(row["over window"]) for row in rows]
    weighted = [int(row["weighted"].replace(",", "")) for row in rows]
    (best,) = [number for number, line in enumerate(lines) if line.startswith("*")]
    fitting = [number for number, count in enumerate(over) if number and not count]
    assert over[0] > 0
    assert best in fitting
    assert weighted[best] == min(weighted[number] for number in fitting)
    path = tmp_path / "best.toml"
    path.write_text(printed[printed.index("[default]") :])
    kind, _, trigger = names[best].partition(", trigger ")
    chosen: dict[str, Any] = {"trigger": float(trigger)} if trigger else {}
    wanted = STRATEGIES[kind](context_window=WINDOW, **chosen)
    assert load_settings(path).default == wanted


async def test_a_cache_is_assumed_where_one_was_recorded(export: Path) -> None:
    """As large as the recorded one; summaries at the end of the conversation use it."""
    session = await load_session(str(export), SessionKey())
    usages = [read_usage(event.usage_metadata) for event in session.events]
    recorded = sum(usages, Usage())
    # In a larger window, the question has room behind the conversation.
    default = Threshold(context_window=6_000)
    settings = ReplaySettings(PluginSettings(default=default))
    replayed = await replay_session(session, settings)
    cached = replayed.without_guard.usage.cached_tokens
    assert cached == pytest.approx(recorded.cached_tokens, rel=0.1)
    summaries = [c.compaction.usage for c in replayed.calls if c.compaction]
    assert summaries
    are_served = any(u.cached_tokens > u.prompt_tokens / 2 for u in summaries)
    assert are_served == replayed.has_cache == bool(recorded.cached_tokens)


def test_prices_and_strategies_of_a_file_are_compared(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In money; the file's own settings are one more row."""
    config = tmp_path / "guard.toml"
    config.write_text(f"[default]\ncontext_window = {WINDOW}\n{PRICES}")
    found = json.loads(compare(capsys, export, "--config", str(config), "--json"))
    assert [row["name"] for row in found["rows"]] == [*ROWS, "your settings"]
    costs = Costs(input=1.0, cached_input=0.25, output=4.0)
    for row in (found["without_guard"], *found["rows"]):
        assert row["cost"] == pytest.approx(costs.price(Usage(**row["usage"])))
    default, *_, mine = found["rows"]
    assert mine == {
        **default,
        "name": "your settings",
    }  # Equal settings, equal figures.
    (best,) = [row for row in found["rows"] if row["is_best"]]
    assert best["cost"] == min(row["cost"] for row in found["rows"])
    config.write_text("\n".join(found["toml"]))
    chosen = load_settings(config).default
    assert isinstance(chosen, Threshold)
    assert best["name"] == f"threshold, trigger {chosen.trigger}"


def test_the_summarizer_of_a_file_is_that_of_all_rows(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its window, also in the settings that are told; what is not played is."""
    config = tmp_path / "guard.toml"
    config.write_text(
        f"[default]\ncontext_window = {WINDOW}\nsummarizer = 'gpt-4o-mini'\n"
        f"summarizer_context_window = 9000\n{PRICES}"
    )
    printed = compare(capsys, export, "--config", str(config))
    assert "calls of recall_history are not played" in printed
    assert '"auto" is the usual threshold' in printed
    assert "windows differ" not in printed
    config.write_text(printed[printed.index("[default]") :])
    told = load_settings(config).default
    assert told
    chosen = told.context_window, told.summarizer, told.summarizer_context_window
    assert chosen == (WINDOW, "gpt-4o-mini", 9_000)


def test_windows_that_differ_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each request is held against the window of its agent."""
    path, config = tmp_path / "session.json", tmp_path / "guard.toml"
    path.write_text(two_agents_with(20_000))
    config.write_text("[agents.scout]\ncontext_window = 9_000")
    printed = compare(capsys, path, "--model", "gpt-4o", "--config", str(config))
    assert "differ, from 9,000 to 128,000 tokens" in printed
    assert "usual threshold" not in printed


async def test_a_summarizer_is_paid_by_its_own_price(export: Path) -> None:
    """And reads transcripts: the cache is that of the agent's model."""
    prices = {
        "simulated": Costs(input=0.0, output=0.0),
        "writer": Costs(input=2.0, output=2.0),
    }
    default = Threshold(
        context_window=WINDOW, summarizer="writer", summarizer_context_window=8_000
    )
    settings = ReplaySettings(PluginSettings(default=default, prices=prices))
    session = await load_session(str(export), SessionKey())
    replayed = await replay_session(session, settings)
    done = [call.compaction for call in replayed.calls if call.compaction]
    assert {item.model for item in done} == {"writer"}
    usage = sum((item.usage for item in done), Usage())
    assert usage.cached_tokens == 0
    assert replayed.with_guard.cost == pytest.approx(prices["writer"].price(usage))


def test_it_says_when_nothing_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No row is marked, and no settings are told."""
    path = tmp_path / "session.json"
    path.write_text(two_agents_with(300_000))
    printed = compare(capsys, path, "--model", "gpt-4o")
    assert "*" not in printed
    assert "Each of them has requests over the window." in printed
    assert "[default]" not in printed


def test_without_a_guard_nothing_fits_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exempt agent has the window of its model, or the one that is given."""
    path, config = tmp_path / "session.json", tmp_path / "guard.toml"
    path.write_text(two_agents_with(300_000))
    config.write_text("[default]\nstrategy = 'none'")
    for window in ("--model", "gpt-4o"), ("--window", "128000"):
        printed = compare(capsys, path, *window, "--config", str(config))
        assert "*" not in printed
        assert "Each of them has requests over the window." in printed


def test_your_settings_may_be_the_cheapest(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then there is nothing to change."""
    config = tmp_path / "guard.toml"
    settings = f"context_window = {WINDOW}\ntrigger = 0.25\npreview_tokens = 100"
    config.write_text(f'[default]\nstrategy = "pipeline"\n{settings}')
    printed = compare(capsys, export, "--config", str(config))
    assert "* your settings  " in printed
    assert "* Your settings: the cheapest" in printed


def test_one_table_is_not_drawn(
    export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plot shows one replay."""
    line = fail(capsys, str(export), "--compare", "--plot", "out.svg")
    assert "without --compare" in line
