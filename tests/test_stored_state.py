"""The guard's keys in session state, which anybody may have written."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import pytest
from google.adk.agents import LlmAgent

from contextguard_adk import (
    CallRecord,
    ContextGuardPlugin,
    Pipeline,
    Threshold,
    ToolOutputTruncation,
    request_compaction,
)
from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat, KeptSessions, answer_text, call, model, response, user
from tests.chats import KEY, demand, guarded_chat, seed, words

SUMMARY = KEY.format("summary")
COUNTS = {KEY.format("real_tokens"), KEY.format("last_heuristic")}
CONVERSATION = [
    user("The task."),
    call("look", "1"),
    response("look", words(2_000), "1"),
    model(words(4_000)),
]


def make_llm(summary: str = "All is known.") -> SimulatedLlm:
    """A model whose summaries all say the same."""
    return SimulatedLlm(
        context_window=20_000, token_ratio=1.0, summary_replies=lambda _: summary
    )


async def compacted(llm: SimulatedLlm, **settings: Any) -> Chat:
    """A chat whose history was compacted."""
    chat = guarded_chat(llm, **settings)
    await seed(chat, *CONVERSATION, state=demand())
    await chat.say("Go on.")
    assert (await chat.state())[SUMMARY]
    return chat


def guard_keys(state: dict[str, Any]) -> dict[str, Any]:
    """What the guard keeps in session state."""
    return {key: value for key, value in state.items() if "context_guard" in key}


def guard_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the guard has warned of."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("contextguard") and record.levelno >= logging.WARNING
    ]


# --- What is written --------------------------------------------------------------


async def test_values_are_written_only_when_they_change() -> None:
    """A turn without a compaction changes the counts, and nothing else."""
    chat = await compacted(make_llm())
    count = len(await chat.events())
    await chat.say("And now?")
    written = {
        key
        for item in (await chat.events())[count:]
        for key in guard_keys(item.actions.state_delta)
    }
    assert written >= COUNTS
    assert written <= {*COUNTS, *demand()}


async def test_nothing_is_reset_that_was_never_stored() -> None:
    """State has no delete: None is written only in the place of a value."""
    llm = SimulatedLlm(context_window=20_000, usage="never")
    state = await (await compacted(llm)).state()
    assert None not in guard_keys(state).values()


async def test_state_survives_json() -> None:
    """Any session service can keep it, and another process goes on with it."""
    llm = make_llm()
    chat = await compacted(llm)
    state = await chat.state()
    stored = json.loads(json.dumps(guard_keys(state), allow_nan=False))
    assert stored == guard_keys(state)
    await chat.set_state(stored)
    sent = llm.requests[-1].contents
    successor = guarded_chat(llm, session_service=chat.sessions)
    await successor.say("And now?")
    assert llm.requests[-1].contents[:2] == sent


# --- What others may have written -------------------------------------------------

BROKEN: dict[str, Any] = {
    "number": 7,
    "huge number": 10**400,
    "nan": math.nan,
    "true": True,
    "none": None,
    "bytes": b"SECRET",
    "list": ["SECRET"],
    "dict": {"SECRET": 1},
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
        llm = make_llm()
        successor = guarded_chat(llm, pipeline, session_service=sessions)
        assert answer_text(await successor.say("And now?"))
        llm.summary_replies = lambda _: "Anew."
        await seed(successor, user(words(600)), state=demand())
        assert answer_text(await successor.say("And then?"))
        assert (await successor.state())[SUMMARY].startswith("Anew.")
        assert "Anew." in llm.requests[-1].text
        assert llm.violations == llm.rejections == 0
        messages = guard_messages(caplog)
        assert len(messages) <= 1
        assert "SECRET" not in "".join(messages)


async def test_a_value_of_the_wrong_type_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The warning names the key and the type, not the value."""
    llm = make_llm()
    agent = LlmAgent(name="misled", model=llm, instruction="You help.")
    chat = Chat(agent, [ContextGuardPlugin(default=Threshold(context_window=4_000))])
    key = "__context_guard_real_tokens_misled"
    await chat.set_state({key: ["SECRET"]})
    for _ in range(3):
        await chat.set_state({key: ["SECRET"]})
        await chat.say("Hello.")
    [message] = guard_messages(caplog)
    assert key in message
    assert "list" in message
    assert "SECRET" not in message


@pytest.mark.xfail(strict=False, reason="state becomes one record with a version")
async def test_a_record_of_an_unknown_version_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning, the originals go out again, and the next compaction works."""
    record, llm = KEY.format("record"), make_llm("New.")
    chat = guarded_chat(llm, Threshold(context_window=20_000))
    state = {record: json.dumps({"version": 999}), SUMMARY: "Of another release."}
    await seed(chat, *CONVERSATION, state=state)
    for _ in range(2):
        assert answer_text(await chat.say("Go on."))
    assert "The task." in llm.requests[-1].text
    assert "Of another release." not in llm.requests[-1].text
    [message] = guard_messages(caplog)
    assert record in message
    await chat.set_state(demand())
    await chat.say("And now?")
    assert (await chat.state())[SUMMARY].startswith("New.")
    assert json.loads((await chat.state())[record])["version"] != 999


async def test_state_that_was_copied_from_another_session_is_not_used() -> None:
    """A foreign summary does not get into a conversation."""
    llm = make_llm()
    chat = await compacted(llm)
    other = guarded_chat(llm, session_service=chat.sessions, session_id="other")
    await seed(other, state=guard_keys(await chat.state()))
    await other.say("Hello.")
    assert llm.requests[-1].contents == [user("Hello.")]


@pytest.mark.parametrize("name", ["summary", "other"])
async def test_a_summary_of_which_half_is_lost_is_not_used(name: str) -> None:
    """Its text is nothing without what it stands for, and the other way round."""
    llm = make_llm()
    chat = await compacted(llm)
    kept = {*COUNTS, KEY.format("summarized_at")}
    for key in guard_keys(await chat.state()):
        if key not in kept and (key == SUMMARY) is (name == "summary"):
            await chat.set_state({key: None})
    successor = guarded_chat(
        llm, Threshold(context_window=20_000), session_service=chat.sessions
    )
    await successor.say("And now?")
    assert "The task." in llm.requests[-1].text
    assert "All is known." not in llm.requests[-1].text


# --- The form of the keys ---------------------------------------------------------


async def test_values_under_the_other_form_are_hidden_not_changed() -> None:
    """A schema may forbid the other keys: a reset does not touch them."""
    records: list[CallRecord] = []
    llm = SimulatedLlm(context_window=100_000, usage="never")
    chat = guarded_chat(llm, guard={"on_call": records.append})
    other = {
        "context_guard:real_tokens:agent": 4_000,
        "context_guard:last_heuristic:agent": 1_000,
    }
    await seed(chat, user(words(600)), model("Yes."), state={**other, **demand()})
    await chat.say("Go on.")
    assert llm.summaries
    state = await chat.state()
    assert {key: state[key] for key in other} == other
    await chat.say(words(300))
    heuristic = llm.requests[-1].prompt_tokens
    assert records[-1].estimated_tokens < 3 * heuristic


# --- Asking for a compaction ------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "count"),
    [
        pytest.param(None, 1, id="any agent"),
        pytest.param("", 1, id="no name"),
        pytest.param("agent", 1, id="this agent"),
        pytest.param("other", 0, id="another agent"),
    ],
)
async def test_requested_compaction(agent: str | None, count: int) -> None:
    """A request reaches its agent, or whoever comes first, and is served once."""
    state: dict[str, Any] = {}
    request_compaction(state, agent)
    assert all(":" in key for key in state)
    llm = make_llm()
    chat = guarded_chat(llm, Threshold(context_window=20_000))
    await seed(chat, *CONVERSATION, state=state)
    for _ in range(2):
        await chat.say("Go on.")
    assert llm.summaries == count


@pytest.mark.parametrize("value", [None, False, 0, 1, "yes", ["x"]])
async def test_only_true_requests_a_compaction(value: object) -> None:
    """Another value under the key requests nothing."""
    llm = make_llm()
    chat = guarded_chat(llm, Threshold(context_window=20_000))
    await seed(chat, *CONVERSATION, state=dict.fromkeys(demand(), value))
    await chat.say("Go on.")
    assert llm.summaries == 0
