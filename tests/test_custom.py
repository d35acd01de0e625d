"""Strategies and reducers of one's own, in code, in a file and in the sample."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
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
from tests.builders import Chat, guarded_agent

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


async def test_a_strategy_of_ones_own_from_a_file(tmp_path: Path) -> None:
    """A dotted path names it, its settings stand beside."""
    path = tmp_path / "guard.toml"
    path.write_text(
        f"[default]\nstrategy = '{__name__}.KeepLastTurn'\n"
        "at_least = 5\nmax_tokens = 8000\n",
        "utf-8",
    )
    llm = SimulatedLlm(context_window=8_000)
    chat = Chat(guarded_agent(llm), [ContextGuardPlugin.from_file(path)])
    await chat.say("Hello.")  # The first message is kept beside every summary.
    for number in range(6):
        await chat.say(f"Message {number}. " + "Some words follow here. " * 60)
    assert llm.summaries
    assert not llm.rejections
    assert "[Previous conversation summary]" in llm.requests[-1].text


async def test_a_reducer_of_ones_own_from_a_file(tmp_path: Path) -> None:
    """It runs after the built-in ones; the live request is out of its reach."""
    path = tmp_path / "guard.toml"
    path.write_text(
        "[default]\nstrategy = 'pipeline'\nmax_tokens = 2000\nwindow = false\n"
        "tool_output = false\nsummary = false\n[[default.reducers]]\n"
        f"reducer = '{__name__}.DropAll'\n",
        "utf-8",
    )
    llm = SimulatedLlm(context_window=2_000)
    plugin = ContextGuardPlugin.from_file(path)
    chat = Chat(guarded_agent(llm), [plugin])
    for number in range(8):
        await chat.say(f"Message {number}. " + "Some words follow here. " * 60)
        assert f"Message {number}." in llm.requests[-1].text
    assert len(llm.requests[-1].contents) < 8
    assert (llm.summaries, llm.rejections, llm.violations) == (0, 0, 0)


async def test_the_docs_show_classes_that_work() -> None:
    """What can be copied from there runs, and keeps requests inside the window."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    block = next(block for block in blocks if "(Reducer)" in block)
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(block, "docs", "exec", dont_inherit=True), names)
    strategies: list[tuple[Strategy, bool]] = [
        (names["KeepNewest"](context_window=2_000), True),
        (
            Pipeline(
                context_window=2_000,
                window=None,
                summary=None,
                reducers=(names["DropOldest"](),),
            ),
            False,
        ),
    ]
    for strategy, is_paid in strategies:
        llm = SimulatedLlm(context_window=2_000)
        chat = Chat(guarded_agent(llm), [ContextGuardPlugin(default=strategy)])
        for number in range(10):
            await chat.say(f"Message {number}. " + "Some words follow here. " * 40)
            assert f"Message {number}." in llm.requests[-1].text
        assert bool(llm.summaries) is is_paid
        assert (llm.rejections, llm.violations) == (0, 0)
        assert "[Previous conversation summary]" in llm.requests[-1].text


@pytest.fixture(name="sample")
def _sample(monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """The sample, loaded as `adk web samples` does; forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    app = AgentLoader(str(ROOT / "samples")).load_agent("custom_strategy")
    assert isinstance(app, App)
    yield app
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "custom_strategy":
            del sys.modules[name]


async def test_the_sample_runs_without_a_summary(sample: App) -> None:
    """Stale quotes leave, what the user wrote stays word for word, nothing is paid."""
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
