"""The guard between a real Runner and a real model, which counts and refuses itself.

Runs with `-m real_model` where the extra `real-model` is installed. The model is tiny:
what it writes is poor, but its counts, its refusals and its summaries are its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.events.event import Event
from google.adk.models.base_llm import BaseLlm
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.providers.overflow import parse_overflow
from contextguard_adk.telemetry import CompactionRecord
from tests.builders import Chat, answer_text, call_part, event, model, response, user
from tests.real_model import (
    WINDOW_TOKENS,
    find_missing_modules,
    refuse_outside,
    refused_hosts,
    serve_model,
)

pytestmark = [
    pytest.mark.real_model,
    # LiteLLM's own classes and event loops, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:pydantic"),
]

KEY = "__context_guard_{}_agent"
REPORT = (
    "At 03:1{n} pump {n} of hall {n} ran at 4{n}0 rpm and the valve behind it was "
    "open; the night shift wrote that nothing leaked and went on to the next pump. "
)
TOPICS = (
    "the sea",
    "bread",
    "the moon",
    "clocks",
    "maps",
    "tea",
    "snow",
    "bridges",
    "salt",
    "glass",
    "trees",
    "ships",
)


TOOL_TURNS = (1, 4, 7, 9)
"""After these turns a tool returns about 3 KB."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the model's API; nothing else can be reached."""
    missing = find_missing_modules()
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (extra `real-model`)")
    sys.addaudithook(refuse_outside)
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    with pytest.MonkeyPatch.context() as patch, serve_model(log_path) as served:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            patch.delenv(name, raising=False)
            patch.delenv(name.lower(), raising=False)
        yield served
    assert not refused_hosts


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def is_streaming(request: pytest.FixtureRequest) -> bool:
    """Both ways in which the model's answer arrives."""
    return bool(request.param)


def connect(address: str, max_tokens: int) -> BaseLlm:
    """The model, as ADK reaches it."""
    import litellm
    from google.adk.models.lite_llm import LiteLlm

    litellm.suppress_debug_info = True
    return LiteLlm(
        model="openai/smollm2",
        api_base=address,
        api_key="none",
        # ADK sends `max_completion_tokens`, which this server does not know.
        extra_body={"max_tokens": max_tokens},
    )


def open_chat(
    address: str, guard: ContextGuardPlugin | None, is_streaming: bool = False
) -> Chat:
    """A chat with the real model; its answers are short."""
    agent = LlmAgent(
        name="agent",
        model=connect(address, max_tokens=24),
        instruction="You answer in one short sentence.",
        generate_content_config=types.GenerateContentConfig(temperature=0.0),
    )
    return Chat(agent, [guard] if guard else [], is_streaming=is_streaming)


def guard_window(
    address: str, window_tokens: int = WINDOW_TOKENS, **settings: Any
) -> ContextGuardPlugin:
    """A guard that lets a summary take its time: the machine may be busy."""
    strategy = Threshold(
        context_window=window_tokens,
        summarizer=connect(address, max_tokens=96),
        summarizer_context_window=WINDOW_TOKENS,
        summary_timeout_seconds=600,
    )
    return ContextGuardPlugin(default=strategy, **settings)


async def plant_tool_use(chat: Chat, number: int, result: str) -> None:
    """Adds a turn with a tool to the session; the model is too small to call one."""
    call_id = f"call_{number}"
    asking = types.Content(
        role="model",
        parts=[
            types.Part(text="I will read the report."),
            call_part("read_report", call_id, number=number),
        ],
    )
    contents = (
        user(f"Please read report {number}."),
        asking,
        response("read_report", result, call_id),
        model(f"Report {number} is read: pump {number} ran all night."),
    )
    session = await chat.sessions.get_session(
        app_name="app", user_id="user", session_id=chat.session_id
    )
    assert session is not None
    for content in contents:
        author = "agent" if content is not contents[0] else "user"
        await chat.sessions.append_event(session, event(content, author))


async def overfill(chat: Chat) -> None:
    """Plants tool results that are too much for the window together."""
    await chat.say("Hello.")
    for number in range(1, 4):
        await plant_tool_use(chat, number, REPORT.format(n=number) * 18)


def list_errors(events: list[Event]) -> list[Event]:
    """The events with an error; an answer that was cut at its length is none."""
    cut = types.FinishReason.MAX_TOKENS
    return [each for each in events if each.error_code not in (None, cut)]


def prompt_counts(events: list[Event]) -> list[int]:
    """What the provider counted, answer by answer."""
    usages = [each.usage_metadata for each in events if not each.partial]
    return [usage.prompt_token_count or 0 for usage in usages if usage]


async def test_without_the_guard_the_provider_refuses(address: str) -> None:
    """The history outgrows the window and the server says so, in numbers."""
    from litellm.exceptions import ContextWindowExceededError

    chat = open_chat(address, None)
    await overfill(chat)

    with pytest.raises(ContextWindowExceededError) as refusal:
        await chat.say("Which pump ran all night?")

    overflow = parse_overflow(refusal.value)
    assert overflow is not None
    assert overflow.limit_tokens == WINDOW_TOKENS
    assert overflow.prompt_tokens is not None
    assert overflow.prompt_tokens > WINDOW_TOKENS
    print(f"\nrefused: {overflow}")


async def test_every_turn_of_a_long_conversation_is_answered(
    address: str, is_streaming: bool
) -> None:
    """The model's own summaries keep twelve turns inside its window."""
    compactions: list[CompactionRecord] = []
    guard = guard_window(address, on_compaction=compactions.append)
    chat = open_chat(address, guard, is_streaming)
    counts: list[int] = []

    for number, topic in enumerate(TOPICS):
        events = await chat.say(f"Tell me one thing about {topic}.")
        assert answer_text(events), f"no answer about {topic}"
        assert not list_errors(events)
        counts += prompt_counts(events)
        print(f"\n{topic}: {counts[-1:]} {answer_text(events)!r}")
        if number in TOOL_TURNS:
            await plant_tool_use(chat, number, REPORT.format(n=number) * 18)

    state = await chat.state()
    by_model = [each for each in compactions if not each.is_mechanical]
    print(f"\nprompt tokens: {counts}")
    for each in compactions:
        print(f"compaction: {each}")
    print(f"last summary: {state[KEY.format('summary')]!r}")
    assert len(counts) == len(TOPICS)
    assert max(counts) <= WINDOW_TOKENS
    assert len(by_model) >= 2
    assert state[KEY.format("summary")]
    assert state[KEY.format("real_tokens")] == counts[-1]
    assert state[KEY.format("last_heuristic")] > 0


async def test_a_window_that_was_set_too_large_is_learned(address: str) -> None:
    """The refusal is understood, its limit remembered, and the turn answered."""
    chat = open_chat(address, guard_window(address, 4 * WINDOW_TOKENS))
    await overfill(chat)

    events = await chat.say("Which pump ran all night?")

    assert answer_text(events)
    assert not list_errors(events)
    assert (await chat.state())[KEY.format("learned_window")] == WINDOW_TOKENS
    counts = prompt_counts(events)
    print(f"\nanswered at {counts} tokens: {answer_text(events)!r}")
    assert 0 < counts[-1] <= WINDOW_TOKENS


async def test_a_stream_that_ends_empty_is_reported(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """This server refuses a streamed request by saying nothing; the log tells."""
    chat = open_chat(address, guard_window(address, observe=True), is_streaming=True)
    await overfill(chat)
    caplog.set_level(logging.WARNING, logger="contextguard_adk")

    events = await chat.say("Which pump ran all night?")

    assert answer_text(events) == ""
    assert "answered nothing, not even usage" in caplog.text
