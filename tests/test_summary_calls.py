"""What a summary call asks for, when it is made again, and what is a summary."""

from __future__ import annotations

import importlib.util
import json
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from contextguard_adk import CompactionRecord, Threshold
from contextguard_adk._measuring.budgets import summary_budget_tokens
from contextguard_adk._memory import CircuitBreaker, SessionMemory
from contextguard_adk._providers.retry import call_with_retries, is_transient
from contextguard_adk._providers.windows import LitellmRegistry
from contextguard_adk._summarizing.summarizer import Summarizer, SummaryTask
from contextguard_adk._summarizing.transcript import Entry
from contextguard_adk.testing import Reply, SimulatedLlm, call
from contextguard_adk.testing import SimulatedProviderError as ProviderError
from tests.builders import answer_text, model, user
from tests.chats import (
    DEMAND,
    EXACT,
    SUMMARY,
    ProviderBusyError,
    guarded_chat,
    seed,
    summary_requests,
    words,
)

GOOD = "## Current State\nThe budget is 4,711 EUR; the report is half written."
REGISTRY = LitellmRegistry()


def list_limits() -> dict[str, int]:
    """What chat models can write at most, where litellm's table knows it."""
    spec = importlib.util.find_spec("litellm")
    assert spec
    assert spec.origin
    file = "model_prices_and_context_window_backup.json"
    table = json.loads(Path(spec.origin).with_name(file).read_text("utf-8"))
    return {
        name: entry["max_output_tokens"]
        for name, entry in table.items()
        if entry.get("mode") == "chat" and entry.get("max_output_tokens")
    }


async def ask(
    name: str, window_tokens: int, config: types.GenerateContentConfig | None = None
) -> types.GenerateContentConfig:
    """What a summary call to the agent's model of this name has in its config."""
    llm = SimulatedLlm(model=name, token_ratio=1.0, summary_replies=[GOOD])
    summarizer = Summarizer(
        settings=Threshold(),
        request=LlmRequest(config=config or types.GenerateContentConfig()),
        agent=LlmAgent(name="agent", model=llm),
        window_tokens=window_tokens,
        registry=None,
        session=SessionMemory(),
        breaker=CircuitBreaker(),
    )
    budget_tokens = summary_budget_tokens(window_tokens)
    task = SummaryTask([Entry("user:", "Hello.")], budget_tokens=budget_tokens)
    assert await summarizer.summarize(task)
    return llm.requests[0].config


async def test_no_summary_call_asks_for_more_than_a_model_gives() -> None:
    """Nor for much less than the budget, where the model gives that."""
    limits = list_limits()
    models: dict[tuple[object, ...], str] = {}  # Others would be asked the same.
    for name, limit in limits.items():
        if window_tokens := REGISTRY.context_window(name):
            found = REGISTRY.max_output_tokens(name) or 0
            assert limit / 4 <= found <= limit or found == window_tokens, name
            thinks = REGISTRY.supports_reasoning(name), "gemini-2.5-flash" in name
            models[limit, window_tokens, thinks] = name
    assert len(models) > 200
    for name in models.values():
        # A window that is configured may be larger than that of the table.
        for tokens in (REGISTRY.context_window(name) or 0, 1_000_000):
            asked = (await ask(name, tokens)).max_output_tokens or 0
            limit, budget = limits[name], summary_budget_tokens(tokens)
            assert min(limit, budget) // 2 <= asked <= limit, name


@pytest.mark.parametrize(
    ("name", "limit_tokens"),
    [
        *(("gpt-4-turbo", 4_096), ("openrouter/openai/gpt-4-turbo", 4_096)),
        *(("anthropic/claude-3-haiku-20240307", 4_096), ("nobody-knows", None)),
    ],
)
def test_output_limits_are_found_by_name(name: str, limit_tokens: int | None) -> None:
    """As windows are."""
    assert REGISTRY.max_output_tokens(name) == limit_tokens


class OwnRegistry:
    """A registry of the user's own that knows output limits, or what it says."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def context_window(self, name: str) -> int:
        """Returns a window."""
        return 100_000

    def max_output_tokens(self, name: str) -> object:
        """Returns the answer."""
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "asked"),
    [(500, 500), (None, 10_000), ("500", 10_000), (RuntimeError("down"), 10_000)],
    ids=["known", "unknown", "text", "raises"],
)
async def test_a_registry_may_know_output_limits(answer: object, asked: int) -> None:
    """What it cannot say properly means that nobody knows."""
    llm = SimulatedLlm(model="gpt-4-turbo", summary_replies=[GOOD])
    guard = {"registry": OwnRegistry(answer)}
    chat = guarded_chat(llm, Threshold(recall=False), guard=guard)
    await seed(chat, user(words(3_000)), state={**EXACT, **DEMAND})
    await chat.say("Go on.")
    assert summary_requests(llm)[0].config.max_output_tokens == asked


async def test_thoughts_that_the_agent_asks_for_have_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The output limit is above what `LiteLlm` was told to think."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from google.adk.models.lite_llm import LiteLlm, LiteLLMClient
    from litellm import ModelResponse

    sent: list[dict[str, Any]] = []

    class Client(LiteLLMClient):
        async def acompletion(
            self, model: Any, messages: Any, tools: Any, **more: Any
        ) -> ModelResponse:
            sent.append(more)
            said = {"role": "assistant", "content": GOOD}
            choice = {"index": 0, "finish_reason": "stop", "message": said}
            return ModelResponse(choices=[choice])

    cases: list[tuple[dict[str, Any], int]] = [
        ({"thinking": {"type": "enabled", "budget_tokens": 16_000}}, 16_000),
        ({"reasoning_effort": "xhigh"}, 8_192),
        ({}, 4_096),
    ]
    for arguments, thoughts in cases:
        llm = LiteLlm("anthropic/claude-sonnet-4-5", llm_client=Client(), **arguments)
        strategy = Threshold(summarizer=llm, recall=False)
        chat = guarded_chat(SimulatedLlm(context_window=10**9), strategy)
        await seed(chat, user(words(3_000)), state={**EXACT, **DEMAND})
        await chat.say("Go on.")
        budget_tokens = summary_budget_tokens(128_000)
        assert sent[-1]["max_completion_tokens"] == budget_tokens + thoughts


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("gemini-2.5-pro", 128, 128),
        ("gemini-2.5-flash", 128, 0),
        ("claude-sonnet-4-5", 2_048, None),
    ],
)
async def test_thinking_settings_of_the_agent(
    name: str, asked: int, expected: int | None
) -> None:
    """They hold where thoughts cannot be turned off."""
    thinking = types.ThinkingConfig(thinking_budget=asked)
    config = types.GenerateContentConfig(thinking_config=thinking)
    found = (await ask(name, 100_000, config)).thinking_config
    assert (found.thinking_budget if found else None) == expected


class Written:
    """A compaction whose summary is asked for with a transcript."""

    def __init__(self, *replies: Reply, **settings: Any) -> None:
        self.llm = SimulatedLlm(
            model="gemini-2.5-flash", token_ratio=1.0, summary_replies=list(replies)
        )
        self.records: list[CompactionRecord] = []
        strategy = Threshold(
            context_window=8_000, recall=False, reuse_prompt_cache=False, **settings
        )
        guard = {"on_compaction": self.records.append}
        self.chat = guarded_chat(self.llm, strategy, guard=guard)

    async def compact(self) -> str:
        """Has it written; "" for a mechanical one."""
        await seed(self.chat, user(words(3_000)), state={**EXACT, **DEMAND})
        assert answer_text(await self.chat.say("Go on."))
        text = str((await self.chat.state())[SUMMARY])
        return "" if self.records[0].is_mechanical else text

    @property
    def asked(self) -> list[types.GenerateContentConfig]:
        """The configs of the summary calls."""
        return [request.config for request in summary_requests(self.llm)]


async def test_a_refused_call_is_made_again_without_our_limits() -> None:
    """Neither the output limit nor a switch for thoughts can be what was wrong then."""
    written = Written(ProviderError("max_tokens is too large"), GOOD)
    assert await written.compact() == GOOD
    first, second = written.asked
    assert first.max_output_tokens == 800
    assert first.thinking_config
    assert (second.max_output_tokens, second.thinking_config) == (None, None)


async def test_a_busy_provider_is_asked_three_times() -> None:
    """With the very same request; what it said is logged without its words."""
    written = Written(ProviderBusyError("secret"), ProviderBusyError("secret"), GOOD)
    assert await written.compact() == GOOD
    assert [config.max_output_tokens for config in written.asked] == [800] * 3


async def test_a_longer_wait_than_there_is_time_for_is_not_begun() -> None:
    """The turn goes on at once, with a mechanical summary."""
    busy = ProviderBusyError("later")
    busy.response = SimpleNamespace(headers={"Retry-After": "3600"})
    written = Written(busy, GOOD)
    assert not await written.compact()
    assert len(written.asked) == 1


def ended(text: str, reason: str) -> LlmResponse:
    """An answer that ended for a reason."""
    finish = types.FinishReason(reason)
    return LlmResponse(content=model(text), finish_reason=finish)


NO_SUMMARY: dict[str, Reply] = {
    "English": "I'm sorry, but I can't help with that.",
    "typographic": "I\u2019m sorry, I can\u2019t assist with that request.",
    "plain": "I cannot assist with this request.",
    "German": "Es tut mir leid, dabei kann ich nicht helfen.",
    "Spanish": "Lo siento, no puedo ayudar con eso.",
    "French": "Je suis désolé, je ne peux pas vous aider.",
    "Chinese": "抱歉 我无法协助完成该请求。",
    "Japanese": "申し訳ありませんが、お手伝いできません。",
    "Russian": "Извините, не могу помочь.",
    "stub": "The",
    "half a heading": "## Current St",
    "heading": "## Current State\n",
    "cut": ended("## Current State\nThe budg", "MAX_TOKENS"),
    "dot": ".",
    "back-ticks": "```\n```",
    "tool": '{"name": "look", "arguments": {"at": "the budget of 4,711 EUR"}}',
    "fenced tool": '```json\n{"tool": "look", "at": "the budget"}\n```',
    "words beside a call": [types.Part(text=GOOD), call("look")],
}


@pytest.mark.parametrize("reply", NO_SUMMARY.values(), ids=NO_SUMMARY)
async def test_what_is_no_summary_is_asked_for_once_more(reply: Reply) -> None:
    """A second answer of that kind leaves it to a mechanical summary."""
    written = Written(reply, GOOD)
    assert await written.compact() == GOOD
    hopeless = Written(reply, reply, GOOD)
    assert not await hopeless.compact()
    assert len(hopeless.asked) == 2


@pytest.mark.parametrize("reason", ["SAFETY", "PROHIBITED_CONTENT", "RECITATION"])
async def test_an_answer_that_a_filter_ended_is_not_asked_for_again(
    reason: str,
) -> None:
    """The same transcript would end so again."""
    written = Written(ended(GOOD, reason), GOOD)
    assert not await written.compact()
    assert len(written.asked) == 1


ACCEPTED: dict[str, tuple[Reply, dict[str, Any]]] = {
    "short": ("They spoke of tea.", {}),
    "Chinese": ("用户要预订机票。", {}),
    "bad news": ("Leider war der Flug ausgebucht; es geht am Montag weiter.", {}),
    "sorry in it": ("The user was told: I'm sorry, I can't help with that.", {}),
    "long and sorry": (f"I'm sorry, said the user. {words(200)}".strip(), {}),
    "JSON in it": ('## Current State\nCall {"name": "look"} next.', {}),
    "lines of JSON": ('{"said": "tea"}\n{"said": "milk"}', {}),
    "JSON of one's own": ('{"said": "tea"}', {"summary_instruction": "Write JSON."}),
    "of one's own": ("Tea.", {"summary_instruction": "Write one word."}),
    "unknown end": (ended(GOOD, "OTHER"), {}),
}


@pytest.mark.parametrize(("reply", "settings"), ACCEPTED.values(), ids=ACCEPTED)
async def test_a_summary_may_be_short(reply: Reply, settings: dict[str, Any]) -> None:
    """What it says cannot be judged, and is taken at the first try."""
    written = Written(reply, **settings)
    assert await written.compact()
    assert len(written.asked) == 1


def failure(**attributes: Any) -> Exception:
    """A client's error."""
    error = named("ClientError")
    vars(error).update(attributes)
    return error


def named(name: str) -> Exception:
    """A client's error without a status."""
    error: Exception = type(name, (Exception,), {})("Something happened.")
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *((failure(status_code=n), True) for n in (429, 500, 502, 503, 504, 529)),
        *((failure(code=n), True) for n in (429, "503")),
        *((failure(status_code=n), False) for n in (400, 401, 404, 413, 422)),
        (failure(response=SimpleNamespace(status_code=503)), True),
        (failure(code="context_length_exceeded"), False),
        (failure(status_code=500, message="maximum context length is 600"), False),
        (failure(code=400, name="ServiceUnavailable"), False),
        *((named(n), True) for n in ("APITimeoutError", "OverloadedError")),
        *((named(n), True) for n in ("RemoteProtocolError", "APIConnectionError")),
        *((each(), True) for each in (TimeoutError, ConnectionResetError)),
        *((each(), False) for each in (ValueError, KeyError, OSError)),
    ],
    ids=str,
)
def test_which_errors_are_transient(error: Exception, expected: bool) -> None:
    """The status decides, then the names of classes."""
    assert is_transient(error) is expected


@pytest.mark.parametrize(
    "says",
    [
        {"response": SimpleNamespace(headers={"retry-after": "0.01"})},
        {"response": SimpleNamespace(headers={"Retry-After": formatdate(0)})},
        {"litellm_response_headers": {"retry-after": "0.01"}},
        {"args": ("{'retryDelay': '0.01s'}",)},
    ],
    ids=["seconds", "date", "LiteLLM's", "Gemini's"],
)
async def test_a_provider_says_when_to_come_back(says: dict[str, Any]) -> None:
    """In a header, or in the body; ours would not fit the time that is left."""
    error, outcomes = failure(status_code=429), [True]
    for name, value in says.items():
        setattr(error, name, value)

    async def ask_once() -> str:
        if outcomes:
            outcomes.pop()
            raise error
        return "Here."

    assert await call_with_retries(ask_once, 0.9) == "Here."
