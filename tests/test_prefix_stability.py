"""Between compactions a request only grows at its end: provider caches stay warm."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from google.genai import types

from contextguard_adk import ContextGuardPlugin
from contextguard_adk.strategies import SlidingWindow, Strategy, Threshold
from contextguard_adk.testing import SimulatedLlm, call
from tests.builders import (
    AgentCall,
    Chat,
    KeptSessions,
    RequestTap,
    ScriptedTool,
    guarded_agent,
    play,
)
from tests.scenarios import write_conversation

WINDOW_TOKENS = 8_000
LONG_RUNS = (
    "normal talk",
    "tool-heavy",
    "parallel bursts",
    "no usage",
    "fifty turns",
    "rapid short",
    "only tool results",
    "empty results",
    "media",
    "kubernetes",
    "coding agent",
)
STRATEGIES = (Threshold, SlidingWindow)
SUMMARY_BEGIN = "[Previous conversation summary]"
CONTINUATION_BEGIN = "[System: The conversation was compacted"


_played: dict[tuple[str, str, bool], list[AgentCall]] = {}


async def play_long_run(
    name: str, strategy: type[Strategy], has_ids: bool = False
) -> list[AgentCall]:
    """Plays a scenario of three windows, once, and returns the agent's model calls."""
    key = (name, strategy.__name__, has_ids)
    if key not in _played:
        _played[key] = await _play_long_run(name, strategy, has_ids)
    return _played[key]


async def _play_long_run(
    name: str, strategy: type[Strategy], has_ids: bool
) -> list[AgentCall]:
    conversation = write_conversation(name, WINDOW_TOKENS)
    llm = SimulatedLlm(
        context_window=WINDOW_TOKENS,
        token_ratio=conversation.token_ratio,
        media_tokens=conversation.media_tokens,
        usage=conversation.usage,
        call_ids=has_ids,
    )
    played = await play(
        conversation,
        strategy(context_window=WINDOW_TOKENS),
        llm,
        session_service=KeptSessions(),
    )
    assert not llm.rejections, f"{name}: a request was refused"
    assert sum(call.is_compacted for call in played.calls) >= 2, name
    return played.calls


def to_bytes(contents: Sequence[types.Content]) -> list[str]:
    """The contents as they would go over the wire."""
    return [content.model_dump_json(exclude_none=True) for content in contents]


def opening(content: types.Content) -> str:
    """The first text of a content."""
    return next((part.text for part in content.parts or [] if part.text), "")


def head_length(contents: Sequence[types.Content]) -> int:
    """How many contents the summary and its continuation are, 0 without a summary."""
    if not contents or not opening(contents[0]).startswith(SUMMARY_BEGIN):
        return 0
    follows = len(contents) > 1 and opening(contents[1]).startswith(CONTINUATION_BEGIN)
    return 1 + follows


@pytest.mark.parametrize("has_ids", [False, True], ids=["no-ids", "ids"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LONG_RUNS)
async def test_requests_grow_only_at_their_end(
    name: str, strategy: type[Strategy], has_ids: bool
) -> None:
    """Each request begins with the bytes of the whole request before it."""
    calls = await play_long_run(name, strategy, has_ids)
    for before, after in itertools.pairwise(calls):
        if after.is_compacted:
            continue
        sent, resent = to_bytes(before.contents), to_bytes(after.contents)
        assert len(resent) > len(sent), f"{name}: call {after.number} added nothing"
        for position, (old, new) in enumerate(zip(sent, resent, strict=False)):
            assert old == new, (
                f"{name}, {strategy.__name__}: content {position} changed on call "
                f"{after.number}: {old[:200]} became {new[:200]}"
            )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LONG_RUNS)
async def test_nothing_leaves_but_what_is_covered(
    name: str, strategy: type[Strategy]
) -> None:
    """Behind summary and continuation stands the history from one place on, whole;
    that place moves only when a compaction moves it."""
    covered_before = 0
    for agent_call in await play_long_run(name, strategy):
        kept = agent_call.contents[head_length(agent_call.contents) :]
        covered = len(agent_call.original) - len(kept)
        label = f"{name}, {strategy.__name__}: call {agent_call.number}"
        assert to_bytes(kept) == to_bytes(agent_call.original[covered:]), label
        if agent_call.is_compacted:
            assert covered > covered_before, label
        else:
            assert covered == covered_before, label
        covered_before = covered


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["normal talk", "kubernetes", "rapid short", "media"])
async def test_a_new_turn_keeps_summary_and_continuation(
    name: str, strategy: type[Strategy]
) -> None:
    """The first request of a turn starts with the very summary and continuation of
    the turn before, although the user now asks for something else."""
    checked = 0
    calls = await play_long_run(name, strategy)
    for before, after in itertools.pairwise(calls):
        length = head_length(before.contents)
        if after.turn is before.turn or after.is_compacted or not length:
            continue
        checked += 1
        heads = before.contents[:length], after.contents[:length]
        assert to_bytes(heads[0]) == to_bytes(heads[1]), f"{name}: call {after.number}"
        assert head_length(after.contents) == length, f"{name}: call {after.number}"
        assert opening(after.contents[-1]) == after.turn.text.split("\n")[0] or (
            after.turn.text in opening(after.contents[-1])
        ), f"{name}: call {after.number}"
    assert checked, f"{name}: no turn began after a compaction without another"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("is_streaming", [False, True], ids=["plain", "stream"])
async def test_a_small_request_leaves_as_it_came(
    strategy: type[Strategy], is_streaming: bool
) -> None:
    """Below the threshold and without a summary the guard hands on the same list
    with the same content objects, and writes no summary to state."""
    tool = ScriptedTool("look_up")
    tool.results = {"a": {"rows": [1, 2]}, "b": "text"}
    llm = SimulatedLlm(
        context_window=32_000,
        script=[call("look_up", ref="a"), call("look_up", ref="b"), "Two rows."] * 3,
    )
    before, after = RequestTap("before"), RequestTap("after")
    guard = ContextGuardPlugin(default=strategy(context_window=32_000))
    chat = Chat(
        guarded_agent(llm, [tool]),
        [before, guard, after],
        is_streaming=is_streaming,
    )
    for message in ("How many rows?", "Are you sure?", "And now?"):
        await chat.say(message)
    assert len(before.lists) == 9
    for number, (came, left) in enumerate(
        zip(before.lists, after.lists, strict=True), start=1
    ):
        assert left is came, f"call {number} got another list"
        ids = [id(content) for content in before.contents[number - 1]]
        assert [id(content) for content in left] == ids, f"call {number}"
    stored = [key for key in await chat.state() if "summary" in key or "covered" in key]
    assert not stored, json.dumps(stored)
