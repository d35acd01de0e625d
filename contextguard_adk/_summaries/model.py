"""The model that writes summaries: which one it is, and how it is asked."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.registry import LLMRegistry
from google.genai import types

from contextguard_adk._history.contents import content_text, parts_of
from contextguard_adk._providers.calling import (
    BrokenCallError,
    Closing,
    call_apart,
    call_with_retries,
    is_transient,
    read_status,
)
from contextguard_adk._providers.clients import read_tokens, read_usage, thinking_tokens
from contextguard_adk._providers.overflow import parse_overflow
from contextguard_adk._providers.registry import (
    LitellmRegistry,
    ModelRegistry,
    resolve_context_window,
    resolve_output_limit,
)
from contextguard_adk._summaries.judge import Answer, judge
from contextguard_adk._summaries.prompts import SUMMARY_INSTRUCTION
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.turn import Turn
from contextguard_adk.errors import SummaryError, UnusableAnswerError
from contextguard_adk.records import Usage

logger = logging.getLogger("contextguard_adk.summarizer")

_REGISTRY = LitellmRegistry()  # Its table is read once for each process.

# The errors of clients that find no key, before they send anything.
_KEY = re.compile(r"api[ _-]?key|credentials|_PROJECT\b.* must be set", re.IGNORECASE)
_VARIABLE = re.compile(r"\b[A-Z]{2,}(?:_[A-Z]+)*_(?:API_KEY|PROJECT|LOCATION|TOKEN)\b")


class OutputTokens(NamedTuple):
    """How many tokens of a model's output a summary and its thoughts may take."""

    text: int
    thoughts: int


@dataclass(frozen=True)
class SummaryModel:
    """A model that writes summaries, and how to call it.

    Attributes:
        llm: ADK's client of the model.
        window_tokens: Its context window.
        timeout_seconds: How long a summary may take, with all tries.
        config: The config of the agent's request.
        instruction: The template of the instruction for a summary.
        has_own_form: Whether its summaries have the headings that the guard asks for.
        is_agents_own: Whether the agent uses this model itself.
        can_think: Whether it may think before it answers.
        max_output_tokens: The most that it can write; None if that is not known.
        usages: The usage of each call. It is zero where the provider has told none.
    """

    llm: BaseLlm
    window_tokens: int
    timeout_seconds: float
    config: types.GenerateContentConfig
    instruction: str
    has_own_form: bool
    is_agents_own: bool
    can_think: bool
    max_output_tokens: int | None
    usages: list[Usage] = field(default_factory=list)

    @property
    def transcript_config(self) -> types.GenerateContentConfig:
        """The config of a call with a transcript.

        - Gemini 2.5 Flash is asked not to think.
        - Another Gemini that is the agent's own thinks as the agent's request says.
        - Of other models no thoughts are asked for.
        """
        thinking: types.ThinkingConfig | None = None
        if "gemini-2.5-flash" in self.llm.model:
            thinking = types.ThinkingConfig(thinking_budget=0)
        elif self.is_agents_own and "gemini" in self.llm.model:
            thinking = self.config.thinking_config
        return types.GenerateContentConfig(
            thinking_config=thinking,
            http_options=self.config.http_options,
            labels=self.config.labels,
            safety_settings=self.config.safety_settings,
        )

    def divide_output(
        self, budget_tokens: int, config: types.GenerateContentConfig
    ) -> OutputTokens:
        """Divides the output of one call between a summary and its thoughts.

        Together they take no more than the model can give.

        Args:
            budget_tokens: The most that the summary may take.
            config: The config of the call.
        """
        # A model that can think may do so without being asked.
        asked_tokens = thinking_tokens(self.llm, config)
        thinking = config.thinking_config
        is_off = thinking is not None and thinking.thinking_budget == 0
        thought_tokens = asked_tokens
        if self.can_think and not is_off:
            room_tokens = min(4_096, int(0.08 * self.window_tokens))
            thought_tokens = max(asked_tokens, room_tokens)

        # If the limit leaves less room beside all thoughts, the text may take half of
        # the room beside the thoughts that were asked for, or an eighth of the limit.
        limit_tokens = self.max_output_tokens or budget_tokens + thought_tokens
        most_text_tokens = max(
            limit_tokens - thought_tokens,
            (limit_tokens - asked_tokens) // 2,
            limit_tokens // 8,
        )
        text_tokens = min(budget_tokens, most_text_tokens)
        left_tokens = limit_tokens - text_tokens
        return OutputTokens(text_tokens, thoughts=min(thought_tokens, left_tokens))


def find_summarizer(setting: BaseLlm | str | None) -> BaseLlm | None:
    """Returns the model that a setting names; None for the agent's own."""
    if not isinstance(setting, str):
        return setting
    try:
        # A client belongs to the event loop that it was made in, so none is kept.
        return LLMRegistry.new_llm(setting)
    except (ValueError, ImportError):
        message = (
            "ADK knows no model %r for summaries; the agent's own model writes them. "
            "Set `summarizer` to a model name that ADK's LLMRegistry resolves."
        )
        warn_once(logger, message, setting)
        return None


def describe_model(
    turn: Turn, llm: BaseLlm, is_agents_own: bool, registry: ModelRegistry | None
) -> SummaryModel:
    """Returns a model with its limits, and how to call it for this agent."""
    settings = turn.settings
    own_tokens = turn.budgets.window_tokens if is_agents_own else None
    window_tokens = settings.summarizer_context_window or own_tokens
    if window_tokens is None:
        window_tokens = resolve_context_window(llm.model, registry=registry).tokens

    # A registry of the user's own may lack this method.
    can_think = getattr(registry, "supports_reasoning", _REGISTRY.supports_reasoning)
    instruction = settings.summary_instruction or SUMMARY_INSTRUCTION
    return SummaryModel(
        llm=llm,
        window_tokens=window_tokens,
        timeout_seconds=settings.summary_timeout_seconds,
        config=turn.request.config,
        instruction=instruction,
        has_own_form=instruction == SUMMARY_INSTRUCTION,
        is_agents_own=is_agents_own,
        can_think=bool(can_think(llm.model)),
        max_output_tokens=resolve_output_limit(llm.model, registry),
    )


async def ask_with_transcript(
    model: SummaryModel, instruction: str, prompt: str, budget_tokens: int
) -> Answer:
    """Has a model answer a prompt that holds a transcript.

    Raises:
        SummaryError: The call failed, or its answer is no summary.
    """
    config = model.transcript_config
    config.system_instruction = instruction
    output_tokens = sum(model.divide_output(budget_tokens, config))
    request = LlmRequest(model=model.llm.model, contents=[types.UserContent(prompt)])
    request.config = config.model_copy(update={"max_output_tokens": output_tokens})

    # Some models refuse the limit, or a call without thoughts.
    without_limits = config.model_copy(update={"thinking_config": None})
    relaxed = request.model_copy(update={"config": without_limits})
    return await _ask(_Question(model, budget_tokens, request, relaxed))


async def ask_in_place(
    model: SummaryModel,
    conversation: LlmRequest,
    prompt: str,
    budget_tokens: int,
    output_tokens: int,
) -> Answer:
    """Asks at the end of the conversation, so that a prompt cache can serve it.

    Raises:
        SummaryError: The call failed, or its answer is no summary.
    """
    request = conversation.model_copy()
    request.contents = [*conversation.contents, types.UserContent(prompt)]
    update = {"max_output_tokens": output_tokens}
    request.config = conversation.config.model_copy(update=update)
    # No Gemini cache is to be created for this one call.
    request.cacheable_contents_token_count = None
    return await _ask(_Question(model, budget_tokens, request))


@dataclass
class _Question:
    """A question to a model, which is asked up to three times in all.

    Attributes:
        model: The model.
        budget_tokens: The most that the summary may take.
        request: The request that is sent next.
        relaxed: A request with fewer demands. It is sent once, after the provider has
            refused the first one, or has answered without a summary. None: there is
            none, or it has been sent.
    """

    model: SummaryModel
    budget_tokens: int
    request: LlmRequest
    relaxed: LlmRequest | None = None

    async def ask(self) -> Answer:
        """Asks once, and adds the usage of the call to those of the model."""
        # A client may change the config, as ADK's does for a Gemini cache.
        update = {"config": self.request.config.model_copy()}
        request = self.request.model_copy(update=update)

        usages = self.model.usages
        usages.append(Usage())  # Zeros until there is an answer.
        try:
            answer = await call_apart(lambda: _read_answer(self.model.llm, request))
        except Exception as error:
            if 400 <= (read_status(error) or 0) < 500:
                usages.pop()  # No provider bills what it refuses.
            raise

        usages[-1] = answer.usage
        source = "\n".join(content_text(each) for each in request.contents)
        return judge(answer, self.budget_tokens, self.model.has_own_form, source)

    def prepare_retry(self, error: BaseException) -> bool:
        """Prepares the next try after an error; returns whether there is to be one.

        - After a failure that may pass, the same request is sent again.
        - After a refusal of its form, or an answer that is no summary, the relaxed
          request takes its place, if there is one.
        - After any other error there is no further try.
        """
        if is_transient(error):
            return True

        if isinstance(error, UnusableAnswerError):
            relaxed_may_help = not error.is_blocked
        else:
            is_refused = read_status(error) in (400, 422)
            relaxed_may_help = is_refused and parse_overflow(error) is None
        if not relaxed_may_help or self.relaxed is None:
            return False

        self.request = self.relaxed
        self.relaxed = None
        return True


async def _ask(question: _Question) -> Answer:
    """Asks a model, with retries.

    Raises:
        SummaryError: The call failed, whatever the model's client has raised.
    """
    timeout_seconds = question.model.timeout_seconds

    try:
        async with asyncio.timeout(timeout_seconds):
            return await call_with_retries(
                question.ask, timeout_seconds, question.prepare_retry
            )
    except TimeoutError as error:
        raise SummaryError(f"no answer in {timeout_seconds} s") from error
    except SummaryError:
        raise
    except BrokenCallError as error:
        raise SummaryError(f"the call failed: {error}") from error
    except Exception as error:  # A provider's client may raise anything.
        # The error's message may quote the conversation, so it is not repeated.
        status = read_status(error)
        shown_status = f", status {status}" if status else ""
        key_help = _explain_key(error, status)
        message = f"the call failed: {type(error).__name__}{shown_status}{key_help}"
        raise SummaryError(message) from error


def _explain_key(error: Exception, status: int | None) -> str:
    """Returns how to set a key; "" for an error that has nothing to do with a key."""
    text = ""
    with suppress(Exception):  # The message comes from anybody's code.
        text = str(error)[:2_000]
    if status not in (401, 403) and not _KEY.search(text):
        return ""

    # Each variable that the message names, once and in its order.
    variables = dict.fromkeys(_VARIABLE.findall(text))
    named = ", ".join(variables) or "its provider's (Gemini's is GOOGLE_API_KEY)"
    return (
        f"; it has no valid key: set {named} in the environment, or name another "
        "`summarizer`"
    )


async def _read_answer(llm: BaseLlm, request: LlmRequest) -> Answer:
    """Sends a request, and joins the texts of its responses.

    Partial responses are skipped: a whole one repeats their texts. Of several usages or
    reasons to finish, the last one counts.
    """
    texts = []
    output_tokens = 0
    has_calls = False
    finish = ""
    usage = Usage()
    async with Closing(llm.generate_content_async(request, stream=False)) as responses:
        async for response in responses:
            if response.partial:
                continue

            parts = parts_of(response.content)
            texts += [part.text for part in parts if part.text and not part.thought]
            has_calls = has_calls or bool(response.get_function_calls())
            reason = response.finish_reason or response.error_code or finish
            finish = str(getattr(reason, "name", reason))
            metadata = response.usage_metadata
            if metadata:
                output_tokens = read_tokens(metadata.candidates_token_count)
                usage = read_usage(metadata)
    return Answer("".join(texts).strip(), output_tokens, has_calls, finish, usage)
