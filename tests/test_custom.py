"""Strategies and reducers of one's own, in code, in a file and in the sample."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from google.adk.apps import App
from google.adk.cli.utils.agent_loader import AgentLoader

from contextguard_adk import (
    Compaction,
    CompactionContext,
    ContextGuardPlugin,
    Pipeline,
    Reducer,
    Reduction,
    Strategy,
    StrategyResult,
)
from contextguard_adk.testing import SimulatedLlm
from tests.builders import SUMMARY_BEGIN, Chat, guarded_agent

ROOT = Path(__file__).parent.parent


class KeepLastTurn(Strategy):
    """Summarizes all but the newest message on every call."""

    at_least: int = 3

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Summarizes as soon as there is something to summarise."""
        covered = context.older_than(self.at_least)
        if not covered - context.view.model_covered:
            return None
        return await context.summarize(covered)


class DropAll(Reducer):
    """Drops every message that may be dropped."""

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Drops."""
        return reduction.drop(reduction.kept)


async def converse(path: Path, config: str, turns: int) -> SimulatedLlm:
    """Talks under the guard of a configuration file; returns the provider."""
    path.write_text(config, "utf-8")
    llm = SimulatedLlm(context_window=8_000)
    return await talk(llm, ContextGuardPlugin.from_file(path), turns)


async def talk(
    llm: SimulatedLlm, plugin: ContextGuardPlugin, turns: int
) -> SimulatedLlm:
    """Says so much that it must be compacted; the newest message is always sent."""
    chat = Chat(guarded_agent(llm), [plugin])
    for number in range(turns):
        await chat.say(f"Message {number}. " + "Some words follow here. " * 60)
        assert f"Message {number}." in llm.requests[-1].text
    assert (llm.rejections, llm.violations) == (0, 0)
    return llm


async def test_a_strategy_of_ones_own_from_a_file(tmp_path: Path) -> None:
    """A dotted path names it, its settings stand beside."""
    config = f"[default]\nstrategy = '{__name__}.KeepLastTurn'\nat_least = 5\n"
    llm = await converse(tmp_path / "guard.toml", config + "max_tokens = 8000\n", 8)
    assert llm.summaries
    assert SUMMARY_BEGIN in llm.requests[-1].text


async def test_a_reducer_of_ones_own_from_a_file(tmp_path: Path) -> None:
    """It runs after the built-in ones; the live request is out of its reach."""
    config = (
        "[default]\nstrategy = 'pipeline'\nmax_tokens = 2000\nwindow = false\n"
        "tool_output = false\nsummary = false\n[[default.reducers]]\n"
        f"reducer = '{__name__}.DropAll'\n"
    )
    llm = await converse(tmp_path / "guard.toml", config, 8)
    assert len(llm.requests[-1].contents) < 8
    assert llm.summaries == 0


async def test_the_docs_show_classes_that_work() -> None:
    """What can be copied from there runs, and keeps requests inside the window."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    block = next(block for block in blocks if "(Reducer)" in block)
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(block, "docs", "exec", dont_inherit=True), names)
    pipeline = Pipeline(
        context_window=2_000,
        window=None,
        summary=None,
        reducers=(names["DropOldest"](),),
    )
    for strategy in (names["KeepNewest"](context_window=2_000), pipeline):
        llm = SimulatedLlm(context_window=2_000)
        await talk(llm, ContextGuardPlugin(default=strategy), 8)
        assert bool(llm.summaries) is not (strategy is pipeline)
        assert SUMMARY_BEGIN in llm.requests[-1].text


async def test_the_sample_runs_without_a_summary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stale quotes leave, what the user wrote stays word for word, nothing is paid."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    sample = AgentLoader(str(ROOT / "samples")).load_agent("custom_strategy")
    assert isinstance(sample, App)
    agent = sample.root_agent
    llm: SimulatedLlm = agent.model  # type: ignore[union-attr]
    llm.keep_requests = None
    chat = Chat(agent, sample.plugins)
    notes = [f"Note {number}: look at Zurich." for number in range(16)]
    for note in notes:
        await chat.say(note)
    assert (llm.summaries, llm.rejections, llm.violations) == (0, 0, 0)
    newest = llm.requests[-1]
    assert all(note in newest.text for note in notes)
    results = [p for c in newest.contents for p in c.parts or [] if p.function_response]
    assert 1 <= len(results) < len(notes)
