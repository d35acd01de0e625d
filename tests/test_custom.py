"""Strategies and reducers of one's own, in code, in a file and in the sample."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from google.adk.apps import App
from google.adk.cli.utils.agent_loader import AgentLoader

from contextguard_adk import ContextGuardPlugin, Pipeline
from contextguard_adk.testing import SimulatedLlm
from tests.builders import SUMMARY_BEGIN, Chat, guarded_agent

ROOT = Path(__file__).parent.parent


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
