"""Summaries asked for at the end of the conversation, which a prompt cache serves."""

from __future__ import annotations

from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from contextguard_adk import SlidingWindow, Threshold
from contextguard_adk._measuring.budgets import plan_budgets
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import (
    ContextOverflowError,
    RecordedRequest,
    Reply,
    SimulatedLlm,
    call,
)
from contextguard_adk.testing import SimulatedProviderError as ProviderError
from tests.builders import Chat, answer_text, model, queued_tool
from tests.chats import (
    DEMAND,
    Changing,
    ProviderBusyError,
    agent_requests,
    guarded_chat,
    summary_requests,
    text_of,
)

WINDOW = 8_000
SUMMARY = "## Current State\nThe budget is 4,711 EUR; the report is half written."


def is_at_end(request: RecordedRequest) -> bool:
    """Whether a request asks for a summary at the end of the conversation itself."""
    last = text_of(request.contents[-1])
    return request.is_summary and last.startswith("[System: Summar")


def kinds(llm: SimulatedLlm) -> list[str]:
    """How each summary was asked for."""
    asked = summary_requests(llm)
    assert all(is_at_end(r) or "<transcript-" in r.text for r in asked)
    return ["at the end" if is_at_end(r) else "transcript" for r in asked]


def make_llm(**settings: Any) -> SimulatedLlm:
    """A provider with a prompt cache."""
    defaults = {"prompt_cache": True, "summary_replies": [SUMMARY] * 20}
    return SimulatedLlm(context_window=WINDOW, **{**defaults, **settings})


def make_strategy(**settings: Any) -> Threshold:
    """A strategy that compacts everything."""
    return Threshold(context_window=WINDOW, recall=False, **settings)


def make_chat(
    llm: SimulatedLlm, strategy: Strategy | None = None, **agent: Any
) -> Chat:
    """A chat with an agent that reads notes."""
    notes = queued_tool("read_note", [{"note": "The budget is 4,711 EUR. " * 40}])
    agent = {"tools": [notes], **agent}
    return guarded_chat(llm, strategy or make_strategy(), agent=agent)


async def talk(chat: Chat, turns: int) -> None:
    """Talks; 14 turns are long enough for a compaction."""
    for turn in range(turns):
        assert answer_text(await chat.say(f"Question {turn}. " + "Tell more. " * 150))


async def talk_and_demand(chat: Chat) -> None:
    """Talks for a while and demands a compaction."""
    await talk(chat, 4)
    await chat.set_state(DEMAND)
    assert answer_text(await chat.say("Question 4."))


def use_tool(request: LlmRequest) -> Reply:
    """Calls the tool once a turn."""
    parts = request.contents[-1].parts or []
    if any(part.function_response for part in parts):
        return "Noted."
    return call("read_note")


async def test_a_summary_is_asked_for_at_the_end_of_the_conversation() -> None:
    """Nearly all of such a call is served from the cache, tools included."""
    llm = make_llm(script=use_tool)
    chat = make_chat(llm)
    for _ in range(3):
        await talk_and_demand(chat)
    assert kinds(llm) == ["at the end"] * 3

    agent = agent_requests(llm)
    for request in summary_requests(llm):
        before = llm.requests[llm.requests.index(request) - 1]
        assert request.contents[: len(before.contents)] == before.contents
        assert request.cached_tokens >= 0.75 * request.prompt_tokens
        assert request.system_instruction == agent[0].system_instruction
        assert request.config.tools == agent[0].config.tools

    assert llm.rejections == llm.violations == 0

    # The ledger and the current request do not depend on how it was asked for.
    shown = (SUMMARY, "Question 0.", "Question 4.")
    assert all(text in agent[-1].text for text in shown)


async def test_a_summary_in_place_may_be_a_little_shorter() -> None:
    """Where the window has no room for the whole budget, and nearly all of it."""
    window = 4_000
    llm = make_llm()
    llm.context_window = window
    chat = make_chat(llm, Threshold(context_window=window))
    for turn in range(60):
        await chat.say(f"Question {turn}. " + "Tell more. " * 30)

    *_, last = summary_requests(llm)
    assert is_at_end(last)
    whole_tokens = plan_budgets(window).summary_tokens
    most_tokens = last.config.max_output_tokens or 0
    assert 0.75 * whole_tokens <= most_tokens < whole_tokens
    assert last.prompt_tokens + most_tokens <= window


async def test_what_is_no_history_does_not_stand_before_the_question() -> None:
    """An instruction that changes from call to call stays out of the summary."""
    llm = make_llm(summary_replies=["Short."] * 9)
    moving = "The customer on the line is number 815."
    instruction = "Write a haiku of {max_words} words."
    own = make_strategy(summary_instruction=instruction, user_messages=0)
    chat = make_chat(llm, own, static_instruction="Help.", instruction=moving)
    await talk(chat, 14)
    assert set(kinds(llm)) == {"at the end"}

    for request in llm.requests:
        assert (moving in request.text) is not is_at_end(request)
    assert "Write a haiku of 600 words." in summary_requests(llm)[0].text


FUNCTION = types.Tool(function_declarations=[types.FunctionDeclaration(name="f")])
SEARCH = types.Tool(google_search=types.GoogleSearch())
PLACES: dict[str, tuple[Strategy, bool, dict[str, Any], str]] = {
    "on": (make_strategy(reuse_prompt_cache=True), False, {}, "at the end"),
    "off": (make_strategy(reuse_prompt_cache=False), True, {}, "transcript"),
    "auto": (make_strategy(), True, {}, "at the end"),
    "no cache": (make_strategy(), False, {}, "transcript"),
    # What stays word for word must not stand in the summary as well.
    "of a part": (
        SlidingWindow(context_window=WINDOW, max_messages=7, reuse_prompt_cache=True),
        True,
        {},
        "transcript",
    ),
    # What ends or forms an answer is the agent's, and the question would share it.
    "built-in": (make_strategy(), True, {"tools": [FUNCTION, SEARCH]}, "transcript"),
    "schema": (
        make_strategy(),
        True,
        {"response_json_schema": {"type": "object"}},
        "transcript",
    ),
    "stop": (make_strategy(), True, {"stop_sequences": ["\n\n"]}, "transcript"),
}


@pytest.mark.parametrize(
    ("strategy", "has_cache", "config", "expected"), PLACES.values(), ids=PLACES
)
async def test_where_a_summary_is_asked_for(
    strategy: Strategy, has_cache: bool, config: dict[str, Any], expected: str
) -> None:
    """At the end where everything is covered and no setting is in the way."""

    def configure(request: LlmRequest) -> None:
        request.config = request.config.model_copy(update=config)

    llm = make_llm(prompt_cache=has_cache)
    chat = guarded_chat(llm, strategy, before=[Changing(configure)])
    await talk_and_demand(chat)
    assert set(kinds(llm)) == {expected}


HALF = LlmResponse(
    content=model(SUMMARY[:20]), finish_reason=types.FinishReason.MAX_TOKENS
)
NO_SUMMARY: dict[str, Reply] = {
    "too long": ContextOverflowError("prompt is too long: 8100 tokens > 8000 maximum"),
    "only thoughts": types.Part(text="Hm.", thought=True),
    "small talk": "Sure! Next I will read the other notes.",
    "half a summary": HALF,
}


@pytest.mark.parametrize("reply", NO_SUMMARY.values(), ids=NO_SUMMARY)
async def test_a_model_that_gives_no_summary_is_shown_a_transcript(
    reply: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, and for the rest of the session; nothing is lost by it."""
    llm = make_llm(summary_replies=[reply, *[SUMMARY] * 20])
    chat = make_chat(llm)
    with caplog.at_level("INFO", "contextguard_adk"):
        for _ in range(2):
            await talk_and_demand(chat)

    assert kinds(llm) == ["at the end", "transcript", "transcript"]

    messages = [record.getMessage() for record in caplog.records]
    [said] = [message for message in messages if "transcript" in message]
    assert "Question" not in said
    assert SUMMARY in agent_requests(llm)[-1].text


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([ProviderError("Bad")], ["at the end", "transcript", "at the end"]),
        ([ProviderBusyError("503")] * 3, ["at the end"] * 4),
    ],
    ids=["refused", "stays busy"],
)
async def test_a_passing_error_is_forgotten(
    errors: list[Exception], expected: list[str]
) -> None:
    """Where it failed once, it is asked at the end again, three times at most."""
    llm = make_llm(summary_replies=[*errors, *[SUMMARY] * 20])
    chat = make_chat(llm)
    for _ in range(2):
        await talk_and_demand(chat)
    assert kinds(llm) == expected
