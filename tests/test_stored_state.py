"""The guard's keys in session state, which anybody may have written."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import pytest
from google.adk.agents import LlmAgent

from contextguard_adk import (
    ContextGuardPlugin,
    MessageWindow,
    Pipeline,
    Threshold,
    ToolOutputTruncation,
    request_compaction,
)
from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat, KeptSessions, answer_text, call, model, response, user
from tests.chats import DEMAND, HEURISTIC, KEY, REAL, SUMMARY, guarded_chat, seed, words

CONVERSATION = [
    user("The task."),
    call("look", "1"),
    response("look", words(2_000), "1"),
    model(words(4_000)),
]
WIDE = Threshold(context_window=20_000)


def make_llm(summary: str = "All is known.", **settings: Any) -> SimulatedLlm:
    """A model whose summaries all say the same."""
    settings = {"context_window": 20_000, "token_ratio": 1.0, **settings}
    return SimulatedLlm(summary_replies=lambda _: summary, **settings)


async def compacted(llm: SimulatedLlm, **settings: Any) -> Chat:
    """A chat whose history was compacted."""
    chat = guarded_chat(llm, **settings)
    await seed(chat, *CONVERSATION, state=DEMAND)
    await chat.say("Go on.")
    assert (await chat.state())[SUMMARY]
    return chat


def guard_keys(state: dict[str, Any]) -> dict[str, Any]:
    """What the guard keeps in session state."""
    return {key: value for key, value in state.items() if "context_guard" in key}


def guard_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the guard has warned of."""
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    return [r.getMessage() for r in warnings if r.name.startswith("contextguard")]


async def test_values_are_written_only_when_they_change() -> None:
    """A turn without a compaction changes the counts; no key is reset needlessly."""
    chat = await compacted(make_llm())
    count = len(await chat.events())
    await chat.say("And now?")
    events = (await chat.events())[count:]
    written = {key for e in events for key in guard_keys(e.actions.state_delta)}
    assert {REAL, HEURISTIC} <= written <= {REAL, HEURISTIC, *DEMAND}
    uncounted = await compacted(make_llm(usage="never"))
    assert None not in guard_keys(await uncounted.state()).values()


async def test_a_count_under_the_other_form_of_a_key_ends_with_a_compaction() -> None:
    """A 0 hides what a `state_schema` may forbid to change."""
    llm = make_llm(usage="never")
    chat = guarded_chat(llm, WIDE, guard={"state_keys": "namespaced"})
    counts = {REAL: 5_000, HEURISTIC: 4_000}
    await seed(chat, *CONVERSATION, state={**DEMAND, **counts})
    await chat.say("Go on.")
    state = await chat.state()
    names = [
        f"context_guard:{name}:agent" for name in ("real_tokens", "last_heuristic")
    ]
    assert [state[name] for name in (*names, *counts)] == [0, 0, *counts.values()]


async def test_state_survives_json() -> None:
    """Any session service can keep it, and another process goes on with it."""
    llm = make_llm()
    chat = await compacted(llm)
    state = guard_keys(await chat.state())
    stored = json.loads(json.dumps(state, allow_nan=False))
    assert stored == state
    await chat.set_state(stored)
    sent = llm.requests[-1].contents
    await guarded_chat(llm, session_service=chat.sessions).say("And now?")
    assert llm.requests[-1].contents[: len(sent)] == sent


BROKEN: dict[str, Any] = {
    "number": 7,
    "huge number": 10**400,
    "nan": math.nan,
    "none": None,
    "bytes": b"SECRET",
    "list": ["SECRET"],
    "no JSON": "SECRET {",
    "JSON list": "[1]",
    "JSON of wrong types": '{"scope": 1, "request_chars": "7", "version": "1"}',
    "deep JSON": "[" * 100_000,
    "long number": '{"request_chars": ' + "9" * 5_000 + "}",
}


@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
async def test_a_broken_value_costs_no_turn(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever stands under a key, the turn and the next compaction work."""
    pipeline = Pipeline(
        context_window=4_000,
        summarizer_context_window=100_000,
        window=MessageWindow(),
        tool_output=ToolOutputTruncation(max_length=500),
    )
    sessions = KeptSessions()
    await compacted(make_llm(), strategy=pipeline, session_service=sessions)
    before = sessions.kept["session"].model_copy(deep=True)
    for key in guard_keys(before.state):
        caplog.clear()
        sessions.kept["session"] = before.model_copy(deep=True)
        sessions.kept["session"].state[key] = value
        # A new process: nothing is remembered but what state holds.
        llm = make_llm("Written anew.")
        successor = guarded_chat(llm, pipeline, session_service=sessions)
        assert answer_text(await successor.say("And now?"))
        await seed(successor, user(words(600)), state=DEMAND)
        assert answer_text(await successor.say("And then?"))
        assert (await successor.state())[SUMMARY].startswith("Written anew.")
        assert "Written anew." in llm.requests[-1].text
        assert llm.violations == llm.rejections == 0
        messages = guard_messages(caplog)
        assert len(messages) <= 1
        assert "SECRET" not in "".join(messages)


async def test_a_record_of_an_unknown_version_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning, the originals go out again, and the next compaction works."""
    record, summary = (f"__context_guard_{x}_updated" for x in ("record", "summary"))
    llm = make_llm("A new one.")
    agent = LlmAgent(name="updated", model=llm)
    chat = Chat(agent, [ContextGuardPlugin(default=WIDE)])
    state = {record: json.dumps({"version": 999}), summary: "Of another release."}
    await seed(chat, *CONVERSATION, state=state)
    for _ in range(2):
        assert answer_text(await chat.say("Go on."))
    assert "The task." in llm.requests[-1].text
    assert "Of another release." not in llm.requests[-1].text
    [message] = guard_messages(caplog)
    assert record in message
    await chat.set_state(DEMAND)
    await chat.say("And now?")
    assert (await chat.state())[summary].startswith("A new one.")
    assert json.loads((await chat.state())[record])["version"] != 999


async def test_unknown_fields_of_a_record_are_ignored() -> None:
    """What another release has stored beside the known is no reason to start anew."""
    llm = make_llm()
    chat = await compacted(llm)
    state = await chat.state()
    key = KEY.format("record")
    record = json.loads(state[key])
    record |= {"future": 1, "summary": {**record["summary"], "repeats_upto": "ab.1"}}
    await chat.set_state({key: json.dumps(record)})
    await chat.say("Go on.")
    assert state[SUMMARY] in llm.requests[-1].text


async def test_state_that_was_copied_from_another_session_is_not_used() -> None:
    """A foreign summary does not get into a conversation."""
    llm = make_llm()
    chat = await compacted(llm)
    other = guarded_chat(llm, session_service=chat.sessions, session_id="other")
    await seed(other, state=guard_keys(await chat.state()))
    await other.say("Hello.")
    assert llm.requests[-1].contents == [user("Hello.")]


@pytest.mark.parametrize("lost", [SUMMARY, KEY.format("record")])
async def test_a_summary_of_which_half_is_lost_is_not_used(lost: str) -> None:
    """Its text is nothing without what it stands for, and the other way round."""
    llm = make_llm()
    chat = await compacted(llm)
    assert (await chat.state())[lost]
    await chat.set_state({lost: None})
    await guarded_chat(llm, WIDE, session_service=chat.sessions).say("And now?")
    assert "The task." in llm.requests[-1].text
    assert "All is known." not in llm.requests[-1].text


@pytest.mark.parametrize(
    ("agent", "value", "count"),
    [
        *((None, True, 1), ("", True, 1), ("agent", True, 1), ("other", True, 0)),
        *((None, None, 0), (None, False, 0), (None, 1, 0), (None, "yes", 0)),
    ],
)
async def test_requested_compaction(
    agent: str | None, value: object, count: int
) -> None:
    """True reaches its agent, or whoever comes first, and is served once."""
    state: dict[str, Any] = {}
    request_compaction(state, agent)
    llm = make_llm()
    chat = guarded_chat(llm, WIDE)
    await seed(chat, *CONVERSATION, state=dict.fromkeys(state, value))
    for _ in range(2):
        await chat.say("Go on.")
    assert llm.summaries == count
