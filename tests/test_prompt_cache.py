"""Summaries asked for at the end of the conversation, which a prompt cache serves."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from pydantic import BaseModel

from contextguard_adk import (
    Compaction,
    CompactionContext,
    ContextGuardPlugin,
    Pipeline,
    SlidingWindow,
    Strategy,
    Threshold,
    request_compaction,
)
from contextguard_adk.summarizing.in_place import answers_freely
from contextguard_adk.testing import (
    ContextOverflowError,
    RecordedRequest,
    Reply,
    SimulatedLlm,
    call,
)
from contextguard_adk.testing import SimulatedProviderError as ProviderError
from tests.builders import Chat, answer_text, guarded_agent, queued_tool

WINDOW = 8_000
QUESTION = "[System: Summarise the conversation above now"
TRANSCRIPT = "<transcript-"
SUMMARY = "## Current State\nThe budget is 4,711 EUR; the report is half written."


def is_at_end(request: RecordedRequest) -> bool:
    """Whether a request asks for a summary at the end of the conversation itself."""
    last = (request.contents[-1].parts or [types.Part()])[0].text or ""
    return request.is_summary and last.startswith(QUESTION)


def is_transcript(request: RecordedRequest) -> bool:
    """Whether a request shows a summariser a transcript."""
    return request.is_summary and TRANSCRIPT in request.text


def kinds(llm: SimulatedLlm) -> list[str]:
    """How each summary was asked for."""
    asked = [request for request in llm.requests if request.is_summary]
    return ["at the end" if is_at_end(r) else "transcript" for r in asked]


def make_llm(**settings: Any) -> SimulatedLlm:
    """A provider with a prompt cache."""
    settings.setdefault("prompt_cache", True)
    settings.setdefault("summary_replies", [SUMMARY] * 20)
    return SimulatedLlm(context_window=WINDOW, **settings)


def make_chat(
    llm: SimulatedLlm, strategy: Strategy | None = None, **settings: Any
) -> Chat:
    """A chat with an agent that reads notes."""
    notes = queued_tool("read_note", [{"note": "The budget is 4,711 EUR. " * 40}])
    settings.setdefault("tools", [notes])
    plugin = ContextGuardPlugin(
        default=strategy or Threshold(context_window=WINDOW, recall=False)
    )
    return Chat(guarded_agent(llm, **settings), [plugin])


async def talk(chat: Chat, turns: int = 40) -> None:
    """Talks long enough for several compactions."""
    for turn in range(turns):
        answer = answer_text(await chat.say(f"Question {turn}. " + "Tell more. " * 80))
        assert answer, f"turn {turn} was lost"


# --- Where the provider was seen to have a cache ----------------------------------


async def test_a_summary_is_asked_for_at_the_end_of_the_conversation() -> None:
    """Nearly all of such a call is served from the cache, tools included."""
    llm = make_llm(script=lambda request: script(request))
    await talk(make_chat(llm))
    assert len(kinds(llm)) >= 3
    assert set(kinds(llm)) == {"at the end"}
    agent = [request for request in llm.requests if not request.is_summary]
    for request in filter(is_at_end, llm.requests):
        assert request.cached_tokens >= 0.75 * request.prompt_tokens
        assert request.system_instruction == agent[0].system_instruction
        assert request.config.tools == agent[0].config.tools
    assert llm.rejections == llm.violations == 0
    assert SUMMARY in agent[-1].text


def script(request: LlmRequest) -> Reply:
    """Calls the tool once a turn."""
    parts = request.contents[-1].parts or []
    if any(part.function_response for part in parts):
        return "Noted."
    return call("read_note")


async def test_the_whole_conversation_stands_before_the_question() -> None:
    """What was sent last stands there word for word, and what came since behind it."""
    llm = make_llm()
    await talk(make_chat(llm), 25)
    requests = llm.requests
    first = next(index for index, r in enumerate(requests) if is_at_end(r))
    before, asked = requests[first - 1], requests[first]
    assert asked.contents[: len(before.contents)] == before.contents
    newest = asked.contents[-2].parts or []
    assert (newest[0].text or "").startswith("Question ")
    assert "at most" in (asked.contents[-1].parts or [])[0].text  # type: ignore[operator]


async def test_what_the_guard_guarantees_stands_beside_such_a_summary() -> None:
    """The ledger and the current request do not depend on how it was asked for."""
    llm = make_llm()
    chat = make_chat(llm)
    await talk(chat, 25)
    final = [request for request in llm.requests if not request.is_summary][-1].text
    assert SUMMARY in final
    assert "Question 0." in final
    assert "Question 24." in final


async def test_the_length_of_the_summary_is_bounded() -> None:
    """It may have half of the buffer, as any other; more is cut."""
    llm = make_llm(summary_replies=["word " * 4_000] * 10)
    await talk(make_chat(llm), 25)
    assert set(kinds(llm)) == {"at the end"}
    asked = [request for request in llm.requests if is_at_end(request)]
    assert {request.config.max_output_tokens for request in asked} == {WINDOW // 10}
    final = [request for request in llm.requests if not request.is_summary][-1].text
    assert SUMMARY not in final
    assert final.count("word ") <= WINDOW // 10


@pytest.mark.parametrize(
    "strategy",
    [
        SlidingWindow(context_window=WINDOW, recall=False, reuse_prompt_cache=True),
        Pipeline(context_window=WINDOW, recall=False, reuse_prompt_cache=True),
    ],
    ids=["SlidingWindow", "Pipeline"],
)
async def test_a_summary_of_a_part_is_written_from_a_transcript(
    strategy: Strategy,
) -> None:
    """What stays word for word must not stand in the summary as well."""
    llm = make_llm(script=lambda request: script(request))
    await talk(make_chat(llm, strategy))
    assert set(kinds(llm)) == {"transcript"}


class HalfAndAll(Strategy):
    """Summarises half of the history, then all of it, by turns."""

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Compacts when it is due."""
        if not context.is_due:
            return None
        keep = 0 if context.view.stored else len(context.view.compactable) // 2
        return await context.summarize(context.older_than(keep))


async def test_strategies_of_ones_own_use_the_cache() -> None:
    """Where they have all of the history summarised."""
    llm = make_llm()
    await talk(make_chat(llm, HalfAndAll(context_window=WINDOW, recall=False)))
    assert kinds(llm)[0] == "transcript"
    assert set(kinds(llm)[1:]) == {"at the end"}


async def test_what_is_no_history_does_not_stand_before_the_question() -> None:
    """An instruction that changes from call to call stays out of the summary."""
    llm = make_llm()
    chat = make_chat(
        llm,
        static_instruction="You help.",
        instruction="The customer on the line is number 815.",
    )
    await talk(chat, 25)
    assert set(kinds(llm)) == {"at the end"}
    for request in llm.requests:
        assert ("number 815" in request.text) is not is_at_end(request)


async def test_thoughts_have_room() -> None:
    """The output limit is not below the length of thoughts that the agent allows."""
    llm = make_llm()
    config = types.GenerateContentConfig(
        thinking_config=types.ThinkingConfig(thinking_budget=100)
    )
    await talk(make_chat(llm, generate_content_config=config), 25)
    asked = [request for request in llm.requests if is_at_end(request)]
    limits = {request.config.max_output_tokens for request in asked}
    assert limits == {WINDOW // 10 + 100}


async def test_no_cache_is_created_for_the_question() -> None:
    """Gemini's explicit caches are made for prompts that come again."""
    seen: list[LlmRequest] = []

    class Model(SimulatedLlm):
        async def generate_content_async(
            self, llm_request: LlmRequest, stream: bool = False
        ) -> AsyncGenerator[LlmResponse, None]:
            seen.append(llm_request)
            async for response in super().generate_content_async(llm_request, stream):
                yield response

    llm = Model(context_window=WINDOW, prompt_cache=True)
    await talk(make_chat(llm), 25)
    asked = [r for r in seen if llm.is_summary_request(r)]
    assert asked
    assert {r.cacheable_contents_token_count for r in asked} == {None}


# --- Where it is not ------------------------------------------------------------------


async def test_without_a_cache_a_transcript_is_shown() -> None:
    """A provider that reports nothing of a cache is asked as ever."""
    llm = make_llm(prompt_cache=False)
    await talk(make_chat(llm), 25)
    assert set(kinds(llm)) == {"transcript"}


@pytest.mark.parametrize(
    ("setting", "has_cache", "expected"),
    [
        pytest.param(True, False, "at the end", id="always"),
        pytest.param(False, True, "transcript", id="never"),
        pytest.param("auto", True, "at the end", id="auto"),
    ],
)
async def test_the_setting_decides(
    setting: Any, has_cache: bool, expected: str
) -> None:
    """The cache can be taken for granted, or left alone."""
    llm = make_llm(prompt_cache=has_cache)
    strategy = Threshold(
        context_window=WINDOW, recall=False, reuse_prompt_cache=setting
    )
    await talk(make_chat(llm, strategy), 25)
    assert set(kinds(llm)) == {expected}


async def test_another_summariser_is_shown_a_transcript() -> None:
    """Its cache holds nothing of this conversation."""
    llm, other = make_llm(), make_llm(model="other")
    strategy = Threshold(context_window=WINDOW, recall=False, summarizer=other)
    await talk(make_chat(llm, strategy), 25)
    assert kinds(llm) == []
    assert set(kinds(other)) == {"transcript"}


async def test_an_output_schema_wants_a_transcript() -> None:
    """The agent's own configuration would turn the summary into its JSON."""

    class Verdict(BaseModel):
        text: str

    llm = make_llm(script=lambda _: '{"text": "fine"}')
    await talk(make_chat(llm, tools=[], output_schema=Verdict), 25)
    assert set(kinds(llm)) == {"transcript"}


async def test_a_request_that_is_nearly_full_wants_a_transcript() -> None:
    """The question and its answer must fit behind the conversation."""
    llm = make_llm()
    chat = make_chat(llm)
    while not llm.requests or llm.requests[-1].prompt_tokens < 0.72 * WINDOW:
        await chat.say("Go on. " + "Tell more. " * 60)
    assert llm.summaries == 0
    await chat.say("And this? " + "Read it. " * int(0.25 * WINDOW / 3))
    assert kinds(llm)[0] == "transcript"
    assert llm.rejections == 0


# --- Where it fails -------------------------------------------------------------------

NO_SUMMARY: dict[str, Reply] = {
    "a tool call": call("read_note"),
    "blanks": "  \n",
    "too long": ContextOverflowError(
        "This model's maximum context length is 8000 tokens. However, your messages "
        "resulted in 8100 tokens."
    ),
    "only thoughts": types.Part(text="Hm.", thought=True),
    "words beside a tool call": [
        types.Part(text="## Plan\nLet me read that note first."),
        call("read_note"),
    ],
    "small talk": "Sure! Next I will read the other notes.",
    "half a summary": LlmResponse(
        content=types.Content(role="model", parts=[types.Part(text=SUMMARY[:20])]),
        finish_reason=types.FinishReason.MAX_TOKENS,
    ),
}


@pytest.mark.parametrize("reply", NO_SUMMARY.values(), ids=NO_SUMMARY)
async def test_a_model_that_gives_no_summary_is_shown_a_transcript(
    reply: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, and for the rest of the session; nothing is lost by it."""
    llm = make_llm(summary_replies=[reply, *[SUMMARY] * 20])
    with caplog.at_level(logging.INFO, "contextguard_adk"):
        await talk(make_chat(llm), 45)
    assert kinds(llm)[:2] == ["at the end", "transcript"]
    assert len(kinds(llm)) >= 3
    assert set(kinds(llm)[1:]) == {"transcript"}
    said = [r.getMessage() for r in caplog.records if "shown a transcript" in r.msg]
    assert len(said) == 1
    assert "Question" not in said[0]
    final = [request for request in llm.requests if not request.is_summary][-1].text
    assert SUMMARY in final


async def test_a_passing_error_is_forgotten() -> None:
    """A provider that is busy once is asked at the end of the conversation again."""
    busy = ProviderError("429 Too Many Requests")
    llm = make_llm(summary_replies=[busy, *[SUMMARY] * 20])
    await talk(make_chat(llm), 45)
    assert kinds(llm)[:2] == ["at the end", "transcript"]
    assert len(kinds(llm)) >= 3
    assert kinds(llm)[-1] == "at the end"


@pytest.mark.parametrize(
    "config",
    [
        {"stop_sequences": ["\n\n"]},
        {"response_mime_type": "application/json"},
    ],
    ids=["stop sequences", "JSON"],
)
async def test_settings_that_end_or_form_an_answer_want_a_transcript(
    config: dict[str, Any],
) -> None:
    """They are the agent's, and the question would share them."""
    llm = make_llm()
    settings = types.GenerateContentConfig(**config)
    await talk(make_chat(llm, generate_content_config=settings), 25)
    assert set(kinds(llm)) == {"transcript"}


async def test_instructions_of_ones_own_stand_in_the_question() -> None:
    """With the number of words put in; any answer is then taken for a summary."""
    llm = make_llm(summary_replies=["Short."] * 9)
    strategy = Threshold(
        context_window=WINDOW,
        recall=False,
        summary_instruction="Write a haiku of {max_words} words.",
    )
    await talk(make_chat(llm, strategy), 25)
    assert set(kinds(llm)) == {"at the end"}
    asked = next(request for request in llm.requests if is_at_end(request))
    assert "Write a haiku of 600 words." in asked.text


async def test_a_timeout_is_waited_for_once() -> None:
    """A model that hangs is not asked a second time for the same summary."""
    llm = make_llm(summary_replies=[TimeoutError("slow")] * 20)
    await talk(make_chat(llm), 25)
    assert kinds(llm)[0] == "at the end"
    requests = llm.requests
    first = next(index for index, r in enumerate(requests) if r.is_summary)
    assert not requests[first + 1].is_summary


async def test_an_unfinished_summary_is_written_from_the_originals() -> None:
    """What a mechanical summary clipped does not stand in the conversation."""
    llm = make_llm(summary_replies=[TimeoutError("slow"), *[SUMMARY] * 20])
    await talk(make_chat(llm), 50)
    assert kinds(llm)[:2] == ["at the end", "transcript"]
    assert kinds(llm)[-1] == "at the end"
    second = [request for request in llm.requests if request.is_summary][1]
    assert "Question 0." in second.text


async def test_a_demand_uses_the_cache_too() -> None:
    """A compaction that someone asks for is no different."""
    llm = make_llm()
    chat = make_chat(llm)
    await talk(chat, 5)
    demand: dict[str, Any] = {}
    request_compaction(demand)
    await chat.set_state(demand)
    await chat.say("Question 5.")
    assert kinds(llm) == ["at the end"]


# --- Requests that leave the form of their answer open ----------------------------

FUNCTION = types.Tool(function_declarations=[types.FunctionDeclaration(name="f")])
SEARCH = types.Tool(google_search=types.GoogleSearch())


def forced(mode: str) -> types.ToolConfig:
    """A tool choice."""
    return types.ToolConfig(
        function_calling_config=types.FunctionCallingConfig(
            mode=types.FunctionCallingConfigMode(mode)
        )
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({}, True, id="nothing"),
        pytest.param({"tools": [FUNCTION]}, True, id="functions"),
        pytest.param({"tools": [FUNCTION, SEARCH]}, False, id="built-in"),
        pytest.param({"tools": [len]}, False, id="callable"),
        pytest.param({"response_schema": {"type": "OBJECT"}}, False, id="schema"),
        pytest.param({"response_json_schema": {"type": "object"}}, False, id="json"),
        pytest.param({"tool_config": forced("ANY")}, False, id="forced"),
        pytest.param({"tool_config": forced("AUTO")}, True, id="auto"),
    ],
)
def test_what_leaves_an_answer_open(config: dict[str, Any], expected: bool) -> None:
    """Function tools do; built-in tools, schemas and forced choices do not."""
    request = LlmRequest(config=types.GenerateContentConfig(**config))
    assert answers_freely(request, object()) is expected
