"""The guard with a real model: with `-m real_model` and the extra `real-model`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.events.event import Event
from google.genai import types

from benchmarks import _models, real_models
from benchmarks._models import GEMMA, SMOLLM, SmallModel, connect, serve
from contextguard_adk import (
    CallRecord,
    CompactionRecord,
    ContextGuardPlugin,
    Threshold,
)
from contextguard_adk._providers.overflow import parse_overflow
from tests.builders import Chat, answer_text, call_part, calls, model, response, user
from tests.chats import HEURISTIC, REAL, SUMMARY

pytestmark = [
    pytest.mark.real_model,
    # LiteLLM's own classes and event loops, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:pydantic"),
]

WINDOW_TOKENS = 2_048
"""What the server accepts; the model itself could take four times as much."""

REPORT = (
    "At 03:1{n} pump {n} of hall {n} ran at 4{n}0 rpm and the valve behind it was "
    "open; the night shift wrote that nothing leaked and went on to the next pump. "
)
QUESTION = "Which pump ran all night?"


def skip_without(small_model: SmallModel) -> None:
    """Skips a test whose model or server is not installed."""
    missing = _models.list_missing((*_models.SERVER_MODULES, small_model.module))
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (extra `real-model`)")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the API of SmolLM2."""
    skip_without(SMOLLM)
    with serve(SMOLLM, WINDOW_TOKENS, tmp_path_factory.mktemp("server")) as url:
        yield url


def open_chat(
    address: str, window_tokens: int | None, is_streaming: bool = False, **guard: Any
) -> Chat:
    """A chat with short answers, guarded where a window is given."""
    agent = LlmAgent(
        name="agent",
        model=connect(SMOLLM, address, max_tokens=24),
        instruction="You answer in one short sentence.",
        generate_content_config=types.GenerateContentConfig(temperature=0.0),
    )
    strategy = Threshold(
        context_window=window_tokens,
        summarizer=connect(SMOLLM, address, max_tokens=96),
        summarizer_context_window=WINDOW_TOKENS,
        summary_timeout_seconds=600,
    )
    plugin = ContextGuardPlugin(default=strategy, **guard)
    return Chat(agent, [plugin] if window_tokens else [], is_streaming=is_streaming)


async def plant_report(chat: Chat, number: int) -> None:
    """Adds a turn with a tool to the session; the model is too small to call one."""
    reading = types.Part(text="I will read the report.")  # The server wants a text.
    asking = calls(reading, call_part("read_report", f"call_{number}", number=number))
    report = response("read_report", REPORT.format(n=number) * 18, f"call_{number}")
    answer = model(f"Report {number} is read: pump {number} ran all night.")
    await chat.tell([user(f"Please read report {number}."), asking, report, answer])


async def overfill(chat: Chat) -> None:
    """Plants tool results that are too much for the window together."""
    await chat.say("Hello.")
    for number in range(1, 4):
        await plant_report(chat, number)


def prompt_counts(events: list[Event]) -> list[int]:
    """What the provider counted; an answer cut at its length is no error."""
    cut = types.FinishReason.MAX_TOKENS
    assert all(event.error_code in (None, cut) for event in events)
    usages = [event.usage_metadata for event in events if not event.partial]
    return [usage.prompt_token_count or 0 for usage in usages if usage]


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
async def test_every_turn_of_a_long_conversation_is_answered(
    address: str, is_streaming: bool
) -> None:
    """The model's own summaries keep twelve turns inside its window."""
    done: list[CompactionRecord] = []
    chat = open_chat(address, WINDOW_TOKENS, is_streaming, on_compaction=done.append)
    counts: list[int] = []
    topics = ("the sea", "bread", "clocks", "maps", "tea", "snow") * 2

    for number, topic in enumerate(topics):
        events = await chat.say(f"Tell me one thing about {topic}.")
        assert answer_text(events), f"no answer about {topic}"
        counts += prompt_counts(events)
        if number in (1, 4, 7, 9):
            await plant_report(chat, number)

    state = await chat.state()
    assert len(counts) == len(topics)
    assert max(counts) <= WINDOW_TOKENS
    assert sum(not each.is_mechanical for each in done) >= 2
    assert state[SUMMARY]
    assert state[REAL] == counts[-1]
    assert state[HEURISTIC] > 0


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
async def test_thirty_short_messages_are_answered(
    address: str, is_streaming: bool
) -> None:
    """The server's chat template takes strings only; no message is a list of texts."""
    done: list[CompactionRecord] = []
    chat = open_chat(address, WINDOW_TOKENS, is_streaming, on_compaction=done.append)
    counts: list[int] = []

    for number in range(30):
        message = f"{number}: " + "and so on with the plan for the old harbor, " * 8
        events = await chat.say(f"{message}is that fine?")
        assert answer_text(events), f"no answer in turn {number}"
        counts += prompt_counts(events)

    assert len(counts) == 30
    assert max(counts) <= WINDOW_TOKENS
    assert len(done) >= 2


async def test_a_window_that_was_set_too_large_is_learned(address: str) -> None:
    """The server refuses in numbers; the limit is remembered, and the turn answered."""
    from litellm.exceptions import ContextWindowExceededError

    records = list[CallRecord]()
    unguarded = open_chat(address, None)
    chat = open_chat(address, 4 * WINDOW_TOKENS, on_call=records.append)
    for each in (unguarded, chat):
        await overfill(each)

    with pytest.raises(ContextWindowExceededError) as refusal:
        await unguarded.say(QUESTION)
    events = await chat.say(QUESTION)

    overflow = parse_overflow(refusal.value)
    assert overflow is not None
    assert overflow.limit_tokens == WINDOW_TOKENS
    assert (overflow.prompt_tokens or 0) > WINDOW_TOKENS
    assert answer_text(events)
    assert records[-1].is_recovered
    assert records[-1].window_tokens == WINDOW_TOKENS
    assert 0 < prompt_counts(events)[-1] <= WINDOW_TOKENS


@pytest.mark.parametrize("small_model", [SMOLLM, GEMMA], ids=lambda each: each.name)
async def test_a_session_with_results_is_never_refused(
    small_model: SmallModel, tmp_path: Path
) -> None:
    """Every turn is answered, by estimates that are near what the model counts."""
    skip_without(small_model)
    with serve(small_model, WINDOW_TOKENS, tmp_path) as url:
        played = await real_models.play(small_model, url, WINDOW_TOKENS, turns=16)

    assert (played.turns, played.unanswered, played.rejected) == (16, 0, 0)
    assert len(played.counts) == 16
    assert max(played.counts) <= WINDOW_TOKENS
    assert played.by_model >= 1
    assert statistics.median(map(abs, played.errors)) < 0.08
    assert min(played.errors) > -0.35
    left = played.user_facts
    assert left.in_request == left.summarized > 0
