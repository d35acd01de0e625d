"""What a request reserves for its output, by whatever means, costs no turn."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from pydantic import PrivateAttr

from contextguard_adk._providers.clients import reserved_output_tokens
from contextguard_adk.testing import ContextOverflowError, SimulatedLlm
from contextguard_adk.testing.provider import (
    count_request_tokens,
    looks_like_summary_request,
)
from tests.builders import answer_text
from tests.chats import slow, words
from tests.test_learned_limits import learned, open_chat, searching


class Summing(SimulatedLlm):
    """A provider that counts the reserved output against its window."""

    max_tokens: int | None = None
    refusals: int = 0

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers, or says that input and output are too much."""
        output = llm_request.config.max_output_tokens or self.max_tokens or 0
        prompt = count_request_tokens(llm_request, self.token_ratio, 258)
        limit, total = self.context_window, prompt + output
        if prompt <= limit < total and not looks_like_summary_request(llm_request):
            self.refusals += 1
            raise ContextOverflowError(
                f"This endpoint's maximum context length is {limit} tokens. However, "
                f"you requested about {total} tokens ({prompt} of text input, {output} "
                "in the output)."
            )
        async for response in super().generate_content_async(llm_request, stream):
            yield response


class LiteLlm(Summing):
    """Spells what it reserves as ADK's LiteLLM client does."""

    _additional_args: dict[str, Any] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any) -> None:
        """Takes the constructor's arguments."""
        self._additional_args = {"max_tokens": self.max_tokens}


class AnthropicLlm(Summing):
    """Has the attribute of ADK's client for Anthropic's API."""


RESERVED = [0.25, 0.95, *slow(0.05, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9)]


@pytest.mark.parametrize("window_tokens", [8_000, 200_000, *slow(32_000)])
@pytest.mark.parametrize("kind", [Summing, LiteLlm, AnthropicLlm])
@pytest.mark.parametrize("ratio", RESERVED)
async def test_reserved_output_costs_one_rejection_at_most(
    kind: type[Summing], window_tokens: int, ratio: float
) -> None:
    """Wherever it is set and however large it is, no turn is lost."""
    reserved = int(window_tokens * ratio)
    llm = kind(
        context_window=window_tokens,
        token_ratio=1.1,
        script=searching(6, 4),
        max_tokens=None if kind is Summing else reserved,
    )
    agent: dict[str, Any] = {}
    if kind is Summing:
        config = types.GenerateContentConfig(max_output_tokens=reserved)
        agent = {"generate_content_config": config}
    found = words(window_tokens // 16)
    chat = open_chat(llm, found, window_tokens=window_tokens, agent=agent)
    for turn in range(6):
        assert answer_text(await chat.say(f"Question {turn}?")) == "Done."
    assert llm.refusals + llm.rejections <= 1
    assert llm.violations == 0


async def test_a_reserve_that_nobody_knows_of_is_learned() -> None:
    """A client of one's own may reserve what only the rejection names."""
    llm = Summing(context_window=32_000, token_ratio=1.0, max_tokens=16_000)
    llm.script = searching(2, 9)
    chat = open_chat(llm, window_tokens=32_000)
    for _ in range(2):
        assert answer_text(await chat.say("Go on.")) == "Done."
    assert llm.refusals == 1
    assert (await learned(chat))["learned_output_tokens"] == 16_000


@pytest.mark.parametrize(
    ("model", "arguments", "asked", "reserved"),
    [
        ("openai/gpt-4o", {}, None, None),
        ("openai/gpt-4o", {"max_tokens": 5_000}, None, 5_000),
        ("openai/gpt-4o", {"max_tokens": 5_000}, 700, 700),
        ("openai/gpt-4o", {"max_completion_tokens": 5, "max_tokens": 7}, None, 5),
        ("anthropic/claude-3-haiku-20240307", {}, None, 4_096),
        ("anthropic/claude-3-haiku-20240307", {"max_tokens": 900}, None, 900),
        ("openrouter/anthropic/claude-3-haiku", {}, None, None),
    ],
)
def test_what_litellm_reserves_is_known(
    model: str, arguments: dict[str, int], asked: int | None, reserved: int | None
) -> None:
    """The request's own number counts first, then the constructor's, then the table."""
    lite_llm = pytest.importorskip("google.adk.models.lite_llm")
    llm = lite_llm.LiteLlm(model, **arguments)
    config = types.GenerateContentConfig(max_output_tokens=asked)
    assert reserved_output_tokens(llm, model, config) == reserved


def test_what_adks_claude_reserves_is_known() -> None:
    """ADK's client for Anthropic's API always names a number."""
    anthropic_llm = pytest.importorskip("google.adk.models.anthropic_llm")
    llm = anthropic_llm.Claude(model="claude-sonnet-4-5", max_tokens=12_345)
    config = types.GenerateContentConfig()
    assert reserved_output_tokens(llm, llm.model, config) == 12_345
    assert reserved_output_tokens(object(), "gemini-2.5-flash", config) is None
