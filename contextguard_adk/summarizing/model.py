"""One call of the model that writes summaries: with a transcript, or in place."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk.errors import SummaryError, UnusableAnswerError
from contextguard_adk.summarizing.prompts import SUMMARY_INSTRUCTION

if TYPE_CHECKING:
    from contextguard_adk.history.view import HistoryView


@dataclass(frozen=True)
class SummaryModel:
    """A model that writes summaries, and how to call it."""

    llm: BaseLlm
    window_tokens: int
    timeout_seconds: float = 60.0
    config: types.GenerateContentConfig = field(  # That of the agent's request.
        default_factory=types.GenerateContentConfig
    )
    instruction: str = SUMMARY_INSTRUCTION
    is_agents_own: bool = False
    can_think: bool = False

    @property
    def headroom_tokens(self) -> int:
        """What thoughts, which count as output, may take beside a summary."""
        return min(4_096, int(0.08 * self.window_tokens)) if self.can_think else 0


@dataclass(frozen=True)
class Answer:
    """What a model wrote, without thoughts; 0 tokens where nobody counted them."""

    text: str
    output_tokens: int
    has_calls: bool = False
    is_cut: bool = False


async def ask_with_transcript(
    model: SummaryModel, instruction: str, prompt: str, budget_tokens: int
) -> Answer:
    """Has a model summarize what stands in a prompt; may raise a `SummaryError`."""
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
    """Asks behind the conversation, unchanged so that a prompt cache can serve it."""
    request = conversation.model_copy()
    request.contents = [*conversation.contents, _user_content(prompt)]
    update = {"max_output_tokens": output_tokens}
    request.config = conversation.config.model_copy(update=update)
    # No Gemini cache is to be created for this one call.
    request.cacheable_contents_token_count = None
    answer = await _ask(model, request)
    if answer.has_calls or answer.is_cut:
        what = "calls a tool" if answer.has_calls else "was cut at its limit"
        raise UnusableAnswerError(f"the answer {what}")
    return answer


async def _ask(model: SummaryModel, request: LlmRequest) -> Answer:
    """Makes one model call; the one place where its failures are caught."""
    answer, output_tokens, has_calls, is_cut = "", 0, False, False
    try:
        async with asyncio.timeout(model.timeout_seconds):
            responses = model.llm.generate_content_async(request, stream=False)
            async for response in responses:
                if response.partial:
                    continue
                if response.error_code and not response.content:
                    raise SummaryError(f"error {response.error_code}")
                parts = response.content and response.content.parts
                for part in parts or ():
                    if part and part.text and not part.thought:
                        answer += part.text
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


def _user_content(text: str) -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=text)])


def find_conversation(
    view: HistoryView, covered: Collection[int], contents: Sequence[types.Content]
) -> list[types.Content]:
    """Finds the conversation without what is no history; empty if it does not do."""
    if view.pinned_calls or not set(covered) >= set(view.compactable):
        return []
    if stored := view.stored:
        is_shortened = stored.truncation or stored.request_chars >= 0
        if is_shortened or view.covered != view.model_covered:
            return []
    history = set(view.history)
    foreign = [i for i in range(len(view.contents)) if i not in history]
    if foreign and foreign[0] < min(history, default=0):
        return []
    hidden = {id(view.contents[index]) for index in foreign}
    return [content for content in contents if id(content) not in hidden]


def answers_freely(request: LlmRequest, agent: object) -> bool:
    """Whether no built-in tool, schema or forced choice decides the form of answers."""
    config = request.config
    for tool in config.tools or ():
        settings = tool if isinstance(tool, types.Tool) else ()
        kinds = [name for name, value in settings if value is not None]
        if kinds != ["function_declarations"]:
            return False
    has_schema = config.response_schema or config.response_json_schema
    if has_schema or getattr(agent, "output_schema", None) is not None:
        return False
    calling = config.tool_config and config.tool_config.function_calling_config
    mode = calling.mode if calling else None
    return mode in (None, "AUTO", "VALIDATED", "MODE_UNSPECIFIED")
