"""Compactions that somebody asks for: with a focus, and refused where in vain."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from google.adk.events.event import Event

from contextguard_adk import (
    CompactionRecord,
    CompactTool,
    Threshold,
    request_compaction,
)
from contextguard_adk.records import METADATA_KEY
from contextguard_adk.strategies import Ask, Strategy, Turn
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests.builders import Chat, answer_text, model, user
from tests.builders import call as scripted
from tests.chats import (
    DEMAND,
    agent_requests,
    guarded_chat,
    seed,
    summary_requests,
    take_apart,
    text_of,
    words,
)

WINDOW = 8_000
WIDE = Threshold(context_window=WINDOW)
FOCUS = "the numbers of the invoices"
REFUSED = "context_guard:compact_refused"
ASKED = call("compact_history")


def open_chat(
    *script: Reply, strategy: Strategy = WIDE, tool: CompactTool | None = None
) -> tuple[SimulatedLlm, Chat, list[CompactionRecord]]:
    """A chat whose agent may ask for compactions; what it is told of them."""
    llm = SimulatedLlm(
        context_window=WINDOW,
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
    await seed(chat, user("The task."), model(words(1_200)))
    assert answer_text(await chat.say("Go on.")) == "Done."

    [record] = records
    assert record.reason == "requested"

    [summary] = summary_requests(llm)
    assert f"names of people\n{FOCUS}" in summary.text
    assert (len(summary.contents) > 1) == in_place

    _, after, *_ = take_apart(agent_requests(llm)[-1].contents)
    assert "was compacted because it was requested." in text_of(after)
    assert "result" in answers_of_the_tool(llm)[0]

    state = await chat.state()
    assert FOCUS not in json.dumps(list(state.values()))


async def test_an_agent_that_asks_again_at_once_is_refused() -> None:
    """It reads why, and nothing is compacted on two calls running."""
    llm, chat, records = open_chat(*[ASKED] * 4, "Done.")
    await seed(chat, user("The task."), model(words(1_200)))
    assert answer_text(await chat.say("Go on.")) == "Done."
    assert len(records) == 1
    first, second, *_ = answers_of_the_tool(llm)
    assert "result" in first
    assert "just before this step" in second["refused"]


async def test_a_compaction_of_a_worker_beside_it_refuses_nothing() -> None:
    """Parallel workers have one name and one session; the call tells them apart."""
    compacted: dict[str, Any] = {METADATA_KEY: {"compaction": {}}}
    own = Event(author="agent", content=scripted("compact_history", "own"))
    other = Event(author="agent", content=scripted("look", "other"))
    other.custom_metadata = compacted
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


class Idle(Strategy):
    """Never compacts."""

    async def compact(self, turn: Turn, ask: Ask) -> None:
        """Leaves it."""


@pytest.mark.parametrize(
    ("strategy", "agent", "reason"),
    [
        (WIDE, None, "nothing would be gained"),
        (WIDE, "agent", "nothing would be gained"),
        (Idle(context_window=WINDOW), None, "nothing could be compacted"),
    ],
)
async def test_a_request_in_vain_is_refused(
    strategy: Strategy,
    agent: str | None,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No summary is paid for, and it is not asked again on later calls; log and session
    state say why, until the next one."""
    caplog.set_level(logging.INFO, "contextguard_adk")
    llm, chat, records = open_chat(strategy=strategy)
    demand: dict[str, Any] = {}
    request_compaction(demand, agent, FOCUS)
    is_idle = isinstance(strategy, Idle)
    await seed(chat, model(words(1_200 if is_idle else 2)), state=demand)
    await chat.say("Go on.")
    assert not llm.summaries

    key = f"{REFUSED}:{agent}" if agent else REFUSED
    state = await chat.state()
    assert reason in state[key]
    assert not any(state[name] for name in demand)
    assert f"refused for agent 'agent': {state[key]}." in caplog.text
    assert FOCUS not in caplog.text

    if not is_idle:
        await seed(chat, model(words(1_200)), state=dict.fromkeys(demand, True))
        await chat.say("And now?")
        assert len(records) == 1
        assert (await chat.state())[key] == ""


@pytest.mark.parametrize(
    ("script", "tokens", "state", "reasons"),
    [
        ([ASKED], 6_400, {}, ["requested", "tokens"]),
        ([], 1_200, DEMAND, ["requested", "requested"]),
        ([], 6_560, {}, ["requested", "tokens"]),
    ],
    ids=["beside one that is refused", "asked for in the next run", "full right after"],
)
async def test_a_compaction_on_demand_does_not_put_off_the_next(
    script: list[Reply], tokens: int, state: dict[str, Any], reasons: list[str]
) -> None:
    """Only two calls running of one run are too many, and a full request is compacted
    before it is sent."""
    llm, chat, records = open_chat(*script)
    await seed(chat, user("The task."), model(words(1_200)), state=DEMAND)
    await chat.say("Go on.")
    await seed(chat, user("More."), model(words(tokens)), state=state)
    await chat.say("Go on.")
    assert [record.reason for record in records] == reasons
    assert records[1].tokens_before < 0.97 * WINDOW
    assert llm.rejections == 0
