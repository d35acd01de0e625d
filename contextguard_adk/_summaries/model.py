"""The model that writes summaries: which model it is, and how it is asked.

A model is asked with a transcript of the messages, or in place: at the end of the
agent's own conversation.
"""

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

_REGISTRY = LitellmRegistry()
"""Shared, because its table is read once."""

_MOST_UNASKED_TOKENS = 4_096
"""The most tokens for thoughts if no setting asks for thoughts."""

_UNASKED_RATIO = 0.08
"""The most of the summarizer's window for thoughts if no setting asks for thoughts."""

_MISSING_KEY = re.compile(
    r"api[ _-]?key|credentials|_PROJECT\b.* must be set", re.IGNORECASE
)
"""Words in the message of an error that a client raises if it has no key."""

_KEY_VARIABLE = re.compile(
    r"\b[A-Z]{2,}(?:_[A-Z]+)*_(?:API_KEY|PROJECT|LOCATION|TOKEN)\b"
)
"""Environment variables for keys, such as `OPENAI_API_KEY`."""

_MOST_ERROR_CHARS = 2_000
"""Only the beginning of an error's message is searched: a message has any length."""


class OutputTokens(NamedTuple):
    """The shares of a model's output for a summary and for the thoughts before it."""

    text_tokens: int
    thought_tokens: int


@dataclass(frozen=True)
class SummaryModel:
    """A model that writes summaries, and how to call it.

    Attributes:
        llm: ADK's client of the model.
        window_tokens: The context window of the model.
        timeout_seconds: How long a summary may take, with all tries.
        config: The config of the agent's own request.
        instruction: The template of the instruction for a summary.
        has_own_form: Whether `instruction` asks for the guard's own headings.
        is_agents_own: Whether the agent uses this model itself.
        can_think: Whether the model is known to think before it answers.
        max_output_tokens: The most that the model can write, thoughts included; None if
            unknown.
        usages: The usage of each call so far. A call has zeros if its usage is unknown.
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

        - If the model is Gemini 2.5 Flash: it is asked not to think, which saves time
          and tokens.
        - If the model is another Gemini and the agent's own: it thinks as the agent's
          request asks.
        - Otherwise: the model is told nothing about thoughts.
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
        """Divides the output of one call between a summary and the thoughts before it.

        If the limit of the model is unknown, or has room for both, the summary gets
        `budget_tokens`, and the thoughts get all that they may take. Otherwise the
        summary may get less, and the thoughts get the rest of the limit.

        Args:
            budget_tokens: The most that the summary may take.
            config: The config of the call, which may ask for thoughts.
        """
        asked_tokens = thinking_tokens(self.llm, config)
        thinking = config.thinking_config
        is_off = thinking is not None and thinking.thinking_budget == 0
        if self.can_think and not is_off:
            # The model may think without being asked.
            window_share_tokens = int(_UNASKED_RATIO * self.window_tokens)
            unasked_tokens = min(_MOST_UNASKED_TOKENS, window_share_tokens)
            thought_tokens = max(asked_tokens, unasked_tokens)
        else:
            thought_tokens = asked_tokens

        limit_tokens = self.max_output_tokens
        if limit_tokens is None:
            return OutputTokens(budget_tokens, thought_tokens)

        # The summary may take the largest of three sizes:
        # - The tokens that all thoughts leave.
        # - Half of the tokens that the asked thoughts leave. The other half is for
        #   thoughts that were not asked for.
        # - An eighth of the limit, even if the asked thoughts would fill the limit.
        left_by_all_tokens = limit_tokens - thought_tokens
        left_by_asked_tokens = limit_tokens - asked_tokens
        most_text_tokens = max(
            left_by_all_tokens, left_by_asked_tokens // 2, limit_tokens // 8
        )
        text_tokens = min(budget_tokens, most_text_tokens)
        left_tokens = limit_tokens - text_tokens
        return OutputTokens(text_tokens, min(thought_tokens, left_tokens))


def find_summarizer(setting: BaseLlm | str | None) -> BaseLlm | None:
    """Returns the model that the setting `summarizer` names.

    Returns None for the agent's own model: if nothing is set, or if ADK does not know
    the name.
    """
    if not isinstance(setting, str):
        return setting
    try:
        # A client belongs to the event loop that it was made in, so each compaction
        # makes a new one.
        return LLMRegistry.new_llm(setting)
    except (ValueError, ImportError):
        message = (
            "ADK knows no model %r for summaries; the agent's own model writes them. "
            "Set `summarizer` to a model name that ADK's LLMRegistry resolves. "
            'Names such as "openai/gpt-5.4" need litellm: pip install "litellm[mcp]".'
        )
        warn_once(logger, message, setting)
        return None


def describe_model(
    turn: Turn, llm: BaseLlm, is_agents_own: bool, registry: ModelRegistry | None
) -> SummaryModel:
    """Describes a model: its limits, and how it is called for this agent.

    Args:
        turn: The model call.
        llm: ADK's client of the model.
        is_agents_own: Whether the agent uses this model itself.
        registry: Knows the limits of models; None stands for litellm's table.
    """
    settings = turn.settings
    if settings.summarizer_context_window is not None:
        window_tokens = settings.summarizer_context_window
    elif is_agents_own:
        window_tokens = turn.budgets.window_tokens
    else:
        window_tokens = resolve_context_window(llm.model, registry=registry).tokens

    # If `registry` is None, or is one of the user's own without this method, the
    # built-in registry answers.
    supports_reasoning = getattr(
        registry, "supports_reasoning", _REGISTRY.supports_reasoning
    )
    instruction = settings.summary_instruction or SUMMARY_INSTRUCTION
    return SummaryModel(
        llm=llm,
        window_tokens=window_tokens,
        timeout_seconds=settings.summary_timeout_seconds,
        config=turn.request.config,
        instruction=instruction,
        has_own_form=instruction == SUMMARY_INSTRUCTION,
        is_agents_own=is_agents_own,
        can_think=bool(supports_reasoning(llm.model)),
        max_output_tokens=resolve_output_limit(llm.model, registry),
    )


async def ask_with_transcript(
    model: SummaryModel, instruction: str, prompt: str, budget_tokens: int
) -> Answer:
    """Has a model answer a prompt that holds a transcript.

    Args:
        model: The model that writes the summary.
        instruction: The system instruction of the call.
        prompt: The user content of the call, with the transcript.
        budget_tokens: The most that the summary may take.

    Raises:
        SummaryError: The call failed, or its answer is no summary.
    """
    config = model.transcript_config
    config.system_instruction = instruction
    output = model.divide_output(budget_tokens, config)
    output_tokens = output.text_tokens + output.thought_tokens
    limited = config.model_copy(update={"max_output_tokens": output_tokens})
    request = LlmRequest(model=model.llm.model, contents=[types.UserContent(prompt)])
    request.config = limited

    # Some models refuse an output limit, and others refuse the order not to think. So
    # the relaxed request has neither.
    without_demands = config.model_copy(update={"thinking_config": None})
    relaxed = request.model_copy(update={"config": without_demands})
    return await _ask(_Question(model, budget_tokens, request, relaxed))


async def ask_in_place(
    model: SummaryModel,
    conversation: LlmRequest,
    prompt: str,
    budget_tokens: int,
    output_tokens: int,
) -> Answer:
    """Asks for a summary at the end of the agent's conversation.

    A prompt cache can serve the conversation, because the agent has sent it before.

    Args:
        model: The agent's own model.
        conversation: The agent's request.
        prompt: The question for a summary.
        budget_tokens: The most that the summary may take.
        output_tokens: The most that the summary and the model's thoughts may take.

    Raises:
        SummaryError: The call failed, or its answer is no summary.
    """
    request = conversation.model_copy()
    request.contents = [*conversation.contents, types.UserContent(prompt)]
    update = {"max_output_tokens": output_tokens}
    request.config = conversation.config.model_copy(update=update)
    # With this count, ADK may create a Gemini cache, which would be used only once.
    request.cacheable_contents_token_count = None
    return await _ask(_Question(model, budget_tokens, request))


@dataclass
class _Question:
    """A question for a summary, which may be asked several times.

    Attributes:
        model: The model that is asked.
        budget_tokens: The most that the summary may take.
        request: The request that the next try sends.
        relaxed: A request with fewer demands. It is tried once, if the first request is
            refused or its answer is no summary. None if there is no such request, or if
            `prepare_retry` has made it the next one.
    """

    model: SummaryModel
    budget_tokens: int
    request: LlmRequest
    relaxed: LlmRequest | None = None

    async def ask(self) -> Answer:
        """Sends the request once, and adds the usage of this call to `model.usages`.

        Raises:
            UnusableAnswerError: The answer is no summary.
            Exception: The call failed. Anything that the client raises is passed on.
        """
        # A client may change the config, as ADK's does for a Gemini cache. The next try
        # needs the unchanged config.
        update = {"config": self.request.config.model_copy()}
        request = self.request.model_copy(update=update)

        # If the call fails or is canceled, its usage is unknown, and these zeros stay.
        usages = self.model.usages
        usages.append(Usage())
        try:
            answer = await call_apart(lambda: _read_answer(self.model.llm, request))
        except Exception as error:
            # A provider does not bill a call that it refuses.
            status = read_status(error)
            is_refused = status is not None and 400 <= status < 500
            if is_refused:
                usages.pop()
            raise

        usages[-1] = answer.usage
        # `judge` compares the answer with all texts that the model has read.
        source = "\n".join(content_text(content) for content in request.contents)
        return judge(answer, self.budget_tokens, self.model.has_own_form, source)

    def prepare_retry(self, error: BaseException) -> bool:
        """Prepares the next try after an error; returns whether there is to be one.

        - If the error may pass: True, and `request` stays the same.
        - If the provider has refused a setting, or if the answer is no summary: whether
          there is a relaxed request. That request becomes `request`.
        - Otherwise: False.
        """
        if is_transient(error):
            return True

        if isinstance(error, UnusableAnswerError):
            # A filter that has ended the answer would end the next one as well.
            relaxed_may_help = not error.is_blocked
        else:
            # A refused setting has one of these statuses, but so has a prompt that is
            # too long.
            is_invalid = read_status(error) in (400, 422)
            is_too_long = parse_overflow(error) is not None
            relaxed_may_help = is_invalid and not is_too_long
        if not relaxed_may_help or self.relaxed is None:
            return False

        self.request = self.relaxed
        self.relaxed = None
        return True


async def _ask(question: _Question) -> Answer:
    """Asks a model, with retries.

    Raises:
        SummaryError: The calls took too long or failed, or the answer is no summary. If
            the calls failed, the `__cause__` is the error of the model's client.
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
        # `judge` found that the answer is no summary. Its error stays as it is.
        raise
    except BrokenCallError as error:
        # This error is the guard's own, so its message quotes no conversation.
        raise SummaryError(f"the call failed: {error}") from error
    except Exception as error:
        # The message of a client's error may quote the conversation. So only the class
        # and the status are named.
        status = read_status(error)
        shown_status = f", status {status}" if status else ""
        key_help = _explain_key(error, status)
        message = f"the call failed: {type(error).__name__}{shown_status}{key_help}"
        raise SummaryError(message) from error


def _explain_key(error: Exception, status: int | None) -> str:
    """Returns how to set a key, as the end of a message.

    For example "; it has no valid key: set OPENAI_API_KEY in the environment, or …".
    Returns "" for an error that has nothing to do with a key.

    Args:
        error: The error of a model's client.
        status: The HTTP status of the error; None if it has none.
    """
    text = ""
    # To print an error may raise another error, if a client has classes of its own.
    with suppress(Exception):
        text = str(error)[:_MOST_ERROR_CHARS]
    is_key_refused = status in (401, 403)
    if not is_key_refused and not _MISSING_KEY.search(text):
        return ""

    # The keys of a dict keep the order of the message, and name each variable once.
    variables = dict.fromkeys(_KEY_VARIABLE.findall(text))
    named = ", ".join(variables) or "its provider's (Gemini's is GOOGLE_API_KEY)"
    return (
        f"; it has no valid key: set {named} in the environment, or name another "
        "`summarizer`"
    )


async def _read_answer(llm: BaseLlm, request: LlmRequest) -> Answer:
    """Sends a request, and joins the texts of all responses to one answer.

    Partial responses are skipped, because a later response repeats their texts. If
    several responses report a usage, the last usage counts. If several report a reason
    for their end, the last reason counts.
    """
    texts: list[str] = []
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

            # A finish reason is an enum, an error code is a text.
            reason = response.finish_reason or response.error_code
            if reason:
                finish = str(getattr(reason, "name", reason))

            metadata = response.usage_metadata
            if metadata is not None:
                output_tokens = read_tokens(metadata.candidates_token_count)
                usage = read_usage(metadata)
    return Answer("".join(texts).strip(), output_tokens, has_calls, finish, usage)
