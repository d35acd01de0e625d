"""Compactions that somebody asks for: with a focus, and refused where in vain."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from google.adk.events.event import Event

from contextguard_adk import (
    Compaction,
    CompactionContext,
    CompactionRecord,
    CompactTool,
    Strategy,
    Threshold,
)
from contextguard_adk._history.state import REFUSED_KEY, request_compaction
from contextguard_adk.telemetry import METADATA_KEY
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests.builders import Chat, answer_text, model, user
from tests.builders import call as scripted
from tests.chats import (
    DEMAND,
    Doing,
    agent_requests,
    guarded_chat,
    seed,
    summary_requests,
    take_apart,
    text_of,
    words,
)

WIDE = Threshold(context_window=20_000)
FOCUS = "the numbers of the invoices"


def open_chat(
    *script: Reply, strategy: Strategy = WIDE, tool: CompactTool | None = None
) -> tuple[SimulatedLlm, Chat, list[CompactionRecord]]:
    """A chat whose agent may ask for compactions; what it is told of them."""
    llm = SimulatedLlm(
        context_window=20_000,
        token_ratio=1.0,
        script=list(script),
        summary_replies=lambda _: "## Current State\nAll is known.",
    )
    records: list[CompactionRecord] = []
    agent = {"tools": [tool or CompactTool()]}
    guard = {"on_compaction": records.append}
    return llm, guarded_chat(llm, strategy, guard=guard, agent=agent), records


def answers_of_the_tool(llm: SimulatedLlm) -> list[dict[str, Any]]:
    """What the tool has told the agent, as its last request shows it."""
    parts = [p for c in agent_requests(llm)[-1].contents for p in c.parts or ()]
    results = (part.function_response for part in parts if part.function_response)
    return [result.response or {} for result in results]


@pytest.mark.parametrize("in_place", [False, True])
async def test_an_agent_compacts_with_a_focus(in_place: bool) -> None:
    """The next request is compacted and says why; the summarizer is told the focus."""
    strategy = WIDE.model_copy(update={"reuse_prompt_cache": in_place})
    asked = call("compact_history", focus=FOCUS)
    llm, chat, records = open_chat(
        asked, "Done.", strategy=strategy, tool=CompactTool("names of people")
    )
    await seed(chat, user("The task."), model(words(3_000)))
    assert answer_text(await chat.say("Go on.")) == "Done."
    [record] = records
    assert record.reason == "requested"
    [summary] = summary_requests(llm)
    assert f"names of people\n{FOCUS}" in summary.text
    assert (len(summary.contents) > 1) == in_place
    _, after, *_ = take_apart(agent_requests(llm)[-1].contents)
    assert "was compacted because somebody asked for it." in text_of(after)
    assert "result" in answers_of_the_tool(llm)[0]
    state = await chat.state()
    assert FOCUS not in json.dumps(list(state.values()))


async def test_an_agent_that_asks_again_at_once_is_refused() -> None:
    """It reads why, and nothing is compacted on two calls running."""
    asked = call("compact_history")
    llm, chat, records = open_chat(asked, asked, asked, asked, "Done.")
    await seed(chat, user("The task."), model(words(3_000)))
    assert answer_text(await chat.say("Go on.")) == "Done."
    assert len(records) == 1
    first, second, *_ = answers_of_the_tool(llm)
    assert "result" in first
    assert "just before this step" in second["refused"]


async def test_a_compaction_of_a_worker_beside_it_refuses_nothing() -> None:
    """Parallel workers have one name and one session; the call tells them apart."""
    compacted: dict[str, Any] = {METADATA_KEY: {"compaction": {}}}
    own = Event(author="agent", content=scripted("compact_history", "own"))
    other = Event(
        author="agent",
        content=scripted("look", "other"),
        custom_metadata=compacted,
    )
    answers = []
    for call_id in ("own", "other"):
        context: Any = SimpleNamespace(
            session=SimpleNamespace(events=[own, other]),
            function_call_id=call_id,
            agent_name="agent",
            state={},
        )
        answers.append(await CompactTool().run_async(args={}, tool_context=context))
    assert ["refused" in answer for answer in answers] == [False, True]


@pytest.mark.parametrize("agent", [None, "agent"])
async def test_a_request_in_vain_is_refused(
    agent: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """No summary is paid for; log and session state say why, until the next one."""
    caplog.set_level(logging.INFO, "contextguard_adk")
    llm, chat, records = open_chat()
    demand: dict[str, Any] = {}
    request_compaction(demand, agent, FOCUS)
    await seed(chat, user("Hello."), state=demand)
    await chat.say("Go on.")
    assert not llm.summaries
    key = f"{REFUSED_KEY}:{agent}" if agent else REFUSED_KEY
    state = await chat.state()
    assert state[key] == "nothing would be gained"
    assert not any(state[name] for name in demand)
    assert "refused for agent 'agent': nothing would be gained." in caplog.text
    assert FOCUS not in caplog.text
    await seed(chat, model(words(3_000)), state=dict.fromkeys(demand, True))
    await chat.say("And now?")
    assert len(records) == 1
    assert (await chat.state())[key] == ""


async def test_a_full_request_is_compacted_although_one_asks_too_often() -> None:
    """A refusal does not keep the threshold from its work."""
    asked = call("compact_history")
    llm, chat, records = open_chat(asked, "Done.", "Done.")
    await seed(chat, user("The task."), model(words(3_000)), state=DEMAND)
    await chat.say("Go on.")
    await seed(chat, user("More."), model(words(16_000)))
    await chat.say("Go on.")
    assert [record.reason for record in records] == ["requested", "tokens"]
    assert llm.rejections == 0


@pytest.mark.parametrize("tokens", [None, 1_000_000], ids=["nothing", "larger"])
async def test_a_request_that_the_strategy_cannot_serve_is_refused(
    tokens: int | None,
) -> None:
    """Else it would be asked again on every later call."""

    async def act(context: CompactionContext) -> Compaction | None:
        if tokens is None or context.reason != "requested":
            return None
        compaction = await context.summarize(context.older_than(0))
        return replace(compaction, tokens=tokens)

    _, chat, records = open_chat(strategy=Doing(context_window=20_000, act=act))
    await seed(chat, user("The task."), model(words(3_000)), state=DEMAND)
    await chat.say("Go on.")
    state = await chat.state()
    assert not any(state[name] for name in DEMAND)
    wanted = "nothing to compact" if tokens is None else "made the request larger"
    assert wanted in state[REFUSED_KEY]
    assert not records


async def test_the_first_call_of_a_run_may_be_compacted_after_that_of_another() -> None:
    """Only two calls running of one run are too many."""
    _, chat, records = open_chat("Done.", "Done.")
    await seed(chat, user("The task."), model(words(3_000)), state=DEMAND)
    await chat.say("Go on.")
    await seed(chat, user("More."), model(words(3_000)), state=DEMAND)
    await chat.say("Go on.")
    assert [record.reason for record in records] == ["requested", "requested"]


async def test_a_compaction_on_demand_does_not_put_off_the_next() -> None:
    """A request that is full right after it is compacted, not sent and refused."""
    llm, chat, records = open_chat()
    await seed(chat, user("The task."), model(words(3_000)), state=DEMAND)
    await chat.say("Go on.")
    await seed(chat, user("More."), model(words(16_400)))
    await chat.say("Go on.")
    assert [record.reason for record in records] == ["requested", "tokens"]
    assert 16_000 <= records[1].tokens_before < 0.97 * 20_000
    assert llm.rejections == 0
