"""Between compactions a request only grows at its end: provider caches stay warm."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from google.genai import types

from contextguard_adk.strategies import SlidingWindow, Threshold
from contextguard_adk.testing import SimulatedLlm
from tests.builders import AgentCall, KeptSessions, play
from tests.chats import without_head
from tests.scenarios import write_conversation

WINDOW_TOKENS = 8_000
SLOW = pytest.mark.slow
LONG_RUNS = ("normal talk", "tool-heavy", "no usage", "rapid short", "media")
SLOW_RUNS = ("parallel bursts", "fifty turns", "only tool results", "coding agent")

# Strategies and call ids take turns.
MODES = list(itertools.product((Threshold, SlidingWindow), (False, True)))
each_run = pytest.mark.parametrize(
    "name", [*LONG_RUNS, *(pytest.param(name, marks=SLOW) for name in SLOW_RUNS)]
)

_played: dict[str, list[AgentCall]] = {}


async def play_long_run(name: str) -> list[AgentCall]:
    """Plays a scenario of three windows, once, and returns the agent's model calls."""
    if name not in _played:
        strategy, has_ids = MODES[(LONG_RUNS + SLOW_RUNS).index(name) % len(MODES)]
        conversation = write_conversation(name, WINDOW_TOKENS)
        llm = SimulatedLlm(
            context_window=WINDOW_TOKENS,
            token_ratio=conversation.token_ratio,
            media_tokens=conversation.media_tokens,
            usage=conversation.usage,
            call_ids=has_ids,
        )
        kept = KeptSessions()
        guard = strategy(context_window=WINDOW_TOKENS)
        played = await play(conversation, guard, llm, session_service=kept)
        assert not llm.rejections, f"{name}: a request was refused"
        assert sum(call.is_compacted for call in played.calls) >= 2, name
        _played[name] = played.calls
    return _played[name]


def to_bytes(contents: Sequence[types.Content]) -> list[str]:
    """The contents as they would go over the wire."""
    return [content.model_dump_json(exclude_none=True) for content in contents]


@each_run
async def test_requests_grow_only_at_their_end(name: str) -> None:
    """Each request begins with the bytes of the whole request before it, summary and
    continuation included, whether or not a new turn begins."""
    for before, after in itertools.pairwise(await play_long_run(name)):
        if after.is_compacted:
            continue
        sent, resent = to_bytes(before.contents), to_bytes(after.contents)
        assert len(resent) > len(sent), f"{name}: call {after.number} added nothing"
        assert resent[: len(sent)] == sent, f"{name}: call {after.number}"


def is_shortened(sent: types.Content, original: types.Content) -> bool:
    """Whether these are the same results, of the same calls, with less text."""
    results, whole = (
        [part.function_response for part in content.parts or ()]
        for content in (sent, original)
    )
    named = [[r and (r.name, r.id) for r in each] for each in (results, whole)]
    is_less = len(to_bytes([sent])[0]) < len(to_bytes([original])[0])
    return all(results) and named[0] == named[1] and is_less


@each_run
async def test_nothing_leaves_but_what_is_covered(name: str) -> None:
    """Behind summary and continuation stands the history from one place on, whole;
    that place moves only when a compaction moves it."""
    covered_before = 0
    for agent_call in await play_long_run(name):
        kept = without_head(agent_call.contents)
        covered = len(agent_call.original) - len(kept)
        label = f"{name}: call {agent_call.number}"
        # A result that the model has not seen may be too large to stay whole.
        for sent, original in zip(kept, agent_call.original[covered:], strict=True):
            is_whole = to_bytes([sent]) == to_bytes([original])
            assert is_whole or is_shortened(sent, original), label
        if agent_call.is_compacted:
            assert covered > covered_before, label
        else:
            assert covered == covered_before, label
        covered_before = covered
