"""Strategies and reducers of one's own, in code, in a file and in the sample."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from google.adk.apps import App
from google.adk.cli.utils.agent_loader import AgentLoader

from contextguard_adk import ContextGuardPlugin, Pipeline, Threshold
from contextguard_adk.strategies import Ask, Draft, Turn
from contextguard_adk.testing import SimulatedLlm
from tests.background import OLD, SIZES, Talk, settle
from tests.builders import SUMMARY_BEGIN, Chat, guarded_agent
from tests.chats import Doing, seed, words
from tests.guarded import is_compacted

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
    names: dict[str, Any] = {"__name__": __name__}
    for block in blocks:
        if "(Reducer)" in block or "(Strategy)" in block:
            exec(compile(block, "docs", "exec", dont_inherit=True), names)

    reducers = (names["DropOldest"](),)
    only: dict[str, Any] = {"window": None, "summary": None, "reducers": reducers}
    pipeline = Pipeline(context_window=2_000, **only)
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
    notes = [f"Note {number}: look at Zurich." for number in range(12)]
    for note in notes:
        await chat.say(note)
    assert (llm.summaries, llm.rejections, llm.violations) == (0, 0, 0)

    newest = llm.requests[-1]
    assert all(note in newest.text for note in notes)

    results = [p for c in newest.contents for p in c.parts or [] if p.function_response]
    assert 1 <= len(results) < len(notes)


class Early(Threshold):
    """Has its own idea of when, and tells nobody."""

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Compacts from 0.4 of the threshold on."""
        return await ask.summarize_all(turn) if turn.fullness >= 0.4 else None


class EarlyTelling(Early):
    """Says as well how near that is."""

    def fullness(self, turn: Turn) -> float:
        """As `compact` sees it."""
        return turn.fullness / 0.4


@pytest.mark.parametrize(("kind", "is_ahead"), [(Early, False), (EarlyTelling, True)])
async def test_a_subclass_may_compact_early(
    kind: type[Threshold], is_ahead: bool
) -> None:
    """It is called for every request, whatever its base class says; for one that does
    not say how near it is, nothing is written in the background."""
    talk = Talk(kind(**SIZES))
    talk.writer.may_end.set()
    await talk.begin(2_600)
    await settle()
    assert talk.llm.summaries == is_ahead
    assert is_compacted(await talk.say(words(1_000, "SECOND")))
    assert talk.were_ahead == [is_ahead]
    assert talk.llm.summaries == 1


async def test_an_error_after_a_turn_was_cancelled_is_no_noise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A strategy that fails when nobody waits for it any more fails quietly."""

    async def act(turn: Turn, ask: Ask) -> Draft | None:
        await ask.summarize_all(turn)
        raise RuntimeError("boom")

    talk = Talk(Doing.model_validate({"act": act, **SIZES}))
    await seed(talk.chat, *OLD)
    await talk.interrupt("First.")
    await talk.writer.end()
    assert not [record for record in caplog.records if record.name == "asyncio"]
