"""One call of the model that writes summaries."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk.errors import SummaryError, UnusableAnswerError
from contextguard_adk.summarizing.prompts import SUMMARY_INSTRUCTION

THINKING_HEADROOM_TOKENS = 4_096
THINKING_HEADROOM_RATIO = 0.08
"""Extra output for models that cannot stop thinking: thoughts count as output."""


@dataclass(frozen=True)
class SummaryModel:
    """A model that writes summaries, and how to call it.

    Attributes:
        llm: The model.
        window_tokens: Its context window.
        timeout_seconds: How long one call may take.
        config: Settings of the agent's request that the call shares:
            `http_options`, `labels` and `safety_settings`.
        instruction: The system instruction; `{max_words}` is replaced in it.
        is_agents_own: Whether it is the model that the agent itself calls.
        can_think: Whether it may think before it answers.
    """

    llm: BaseLlm
    window_tokens: int
    timeout_seconds: float = 60.0
    config: types.GenerateContentConfig = field(
        default_factory=types.GenerateContentConfig
    )
    instruction: str = SUMMARY_INSTRUCTION
    is_agents_own: bool = False
    can_think: bool = False

    @property
    def headroom_tokens(self) -> int:
        """What thoughts may take beside a summary, in tokens."""
        if not self.can_think:
            return 0
        most = int(THINKING_HEADROOM_RATIO * self.window_tokens)
        return min(THINKING_HEADROOM_TOKENS, most)


@dataclass(frozen=True)
class Answer:
    """What a model wrote.

    Attributes:
        text: The text, without thoughts.
        output_tokens: What its provider counted; 0 where it did not.
        has_calls: Whether it calls tools as well.
        is_cut: Whether the provider ended it at the limit of its length.
    """

    text: str
    output_tokens: int
    has_calls: bool = False
    is_cut: bool = False


async def ask_with_transcript(
    model: SummaryModel, instruction: str, prompt: str, budget_tokens: int
) -> Answer:
    """Has a model summarize what stands in a prompt.

    Raises:
        SummaryError: The model failed, timed out, or wrote nothing.
    """
    # Thoughts are turned off where the model allows it, else there is room for them.
    thinks = re.search(r"gemini-2\.5-flash", model.llm.model) is None
    request = LlmRequest(
        model=model.llm.model,
        contents=[_user_content(prompt)],
        config=types.GenerateContentConfig(
            system_instruction=instruction,
            max_output_tokens=budget_tokens + model.headroom_tokens * thinks,
            thinking_config=None if thinks else types.ThinkingConfig(thinking_budget=0),
            http_options=model.config.http_options,
            labels=model.config.labels,
            safety_settings=model.config.safety_settings,
        ),
    )
    return await _ask(model, request)


async def ask_in_place(
    model: SummaryModel, conversation: LlmRequest, prompt: str, output_tokens: int
) -> Answer:
    """Has the agent's model summarize the conversation that it has before it.

    Everything before the prompt is what the agent itself would send, tools and
    settings included: a change would cost the prompt cache.

    Raises:
        UnusableAnswerError: The model called a tool, or its answer was cut.
        SummaryError: The model failed, timed out, or wrote nothing.
    """
    config = conversation.config.model_copy(update={"max_output_tokens": output_tokens})
    request = conversation.model_copy(
        update={
            "contents": [*conversation.contents, _user_content(prompt)],
            "config": config,
            # No Gemini cache is to be created for this one call.
            "cacheable_contents_token_count": None,
        }
    )
    answer = await _ask(model, request)
    if answer.has_calls:
        raise UnusableAnswerError("the answer calls a tool")
    if answer.is_cut:
        raise UnusableAnswerError("the answer was cut at its limit")
    return answer


async def _ask(model: SummaryModel, request: LlmRequest) -> Answer:
    """Makes one model call; the one place where its failures are caught."""
    answer, output_tokens, has_calls, is_cut = "", 0, False, False
    try:
        async with asyncio.timeout(model.timeout_seconds):
            async for response in model.llm.generate_content_async(
                request, stream=False
            ):
                if response.partial:
                    continue
                if response.error_code and not response.content:
                    raise SummaryError(f"error {response.error_code}")
                answer += _answer_text(response.content)
                has_calls = has_calls or bool(response.get_function_calls())
                is_cut = response.finish_reason == types.FinishReason.MAX_TOKENS
                if usage := response.usage_metadata:
                    output_tokens = usage.candidates_token_count or 0
    except TimeoutError as error:
        raise SummaryError(f"no answer in {model.timeout_seconds} s") from error
    except SummaryError:
        raise
    except Exception as error:  # A provider's client may raise anything.
        raise SummaryError(f"the call failed: {type(error).__name__}") from error
    if not answer.strip():
        raise UnusableAnswerError("the answer holds no text")
    return Answer(answer.strip(), output_tokens, has_calls, is_cut)


def _answer_text(content: types.Content | None) -> str:
    parts = content.parts if content else None
    return "".join(
        part.text for part in parts or () if part and part.text and not part.thought
    )


def _user_content(text: str) -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=text)])
