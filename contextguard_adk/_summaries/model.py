"""Asks the model that writes summaries."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from dataclasses import dataclass, field

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk._history.contents import content_text, parts_of
from contextguard_adk._providers.apart import BrokenCallError, Closing, call_apart
from contextguard_adk._providers.clients import read_tokens, read_usage, thinking_tokens
from contextguard_adk._providers.overflow import parse_overflow
from contextguard_adk._providers.retry import (
    call_with_retries,
    is_transient,
    read_status,
)
from contextguard_adk._summaries.judge import Answer, judge
from contextguard_adk._summaries.prompts import SUMMARY_INSTRUCTION
from contextguard_adk.errors import SummaryError, UnusableAnswerError
from contextguard_adk.records import Usage

# What clients say that find no key, before they send anything.
_KEY = re.compile(r"api[ _-]?key|credentials|_PROJECT\b.* must be set", re.IGNORECASE)
_VARIABLE = re.compile(r"\b[A-Z]{2,}(?:_[A-Z]+)*_(?:API_KEY|PROJECT|LOCATION|TOKEN)\b")


@dataclass(frozen=True)
class SummaryModel:
    """A model that writes summaries, and how to call it."""

    llm: BaseLlm
    window_tokens: int
    timeout_seconds: float
    config: types.GenerateContentConfig  # That of the agent's request.
    instruction: str
    is_agents_own: bool
    can_think: bool
    max_output_tokens: int | None
    usages: list[Usage] = field(default_factory=list)  # Zeros where it is unknown.

    @property
    def has_own_form(self) -> bool:
        """Whether summaries have the sections that the guard asks for."""
        return self.instruction == SUMMARY_INSTRUCTION

    @property
    def transcript_config(self) -> types.GenerateContentConfig:
        """The config of a call with a transcript; no thoughts where they can be off."""
        thinking = None
        if re.search(r"gemini-2\.5-flash", self.llm.model):
            thinking = types.ThinkingConfig(thinking_budget=0)
        elif self.is_agents_own and "gemini" in self.llm.model:
            thinking = self.config.thinking_config  # The others do not think unasked.
        return types.GenerateContentConfig(
            thinking_config=thinking,
            http_options=self.config.http_options,
            labels=self.config.labels,
            safety_settings=self.config.safety_settings,
        )

    def divide_output(
        self, budget_tokens: int, config: types.GenerateContentConfig
    ) -> tuple[int, int]:
        """Returns what a summary may take of that budget, and its thoughts beside it.

        Both are output; together they are no more than the model can give.
        """
        asked = thinking_tokens(self.llm, config)
        thinking = config.thinking_config
        is_off = thinking is not None and thinking.thinking_budget == 0
        can_think = self.can_think and not is_off
        room = min(4_096, int(0.08 * self.window_tokens)) if can_think else 0
        thoughts = max(asked, room)
        limit = self.max_output_tokens or budget_tokens + thoughts
        # Where the limit is low, room for thoughts yields; what is asked for does not.
        text = max(limit - thoughts, (limit - asked) // 2, limit // 8)
        text = min(budget_tokens, text)
        return text, min(thoughts, limit - text)


async def ask_with_transcript(
    model: SummaryModel, instruction: str, prompt: str, budget_tokens: int
) -> Answer:
    """Has a model summarize what stands in a prompt; may raise a `SummaryError`."""
    config = model.transcript_config
    config.system_instruction = instruction
    request = LlmRequest(model=model.llm.model, contents=[types.UserContent(prompt)])
    output_tokens = sum(model.divide_output(budget_tokens, config))
    request.config = config.model_copy(update={"max_output_tokens": output_tokens})
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
    """Asks after the conversation, unchanged so that a prompt cache can serve it."""
    request = conversation.model_copy()
    request.contents = [*conversation.contents, types.UserContent(prompt)]
    update = {"max_output_tokens": output_tokens}
    request.config = conversation.config.model_copy(update=update)
    # No Gemini cache is to be created for this one call.
    request.cacheable_contents_token_count = None
    return await _ask(_Question(model, budget_tokens, request))


@dataclass
class _Question:
    """What a model is asked, up to three times in all.

    Where it is refused as such, or the answer is no summary, it is asked once more
    with the relaxed request, if there is one.
    """

    model: SummaryModel
    budget_tokens: int
    request: LlmRequest
    relaxed: LlmRequest | None = None

    async def ask(self) -> Answer:
        """Asks once."""
        # A client may change it, as ADK's takes out what a Gemini cache holds.
        update = {"config": self.request.config.model_copy()}
        request = self.request.model_copy(update=update)
        usages = self.model.usages
        usages.append(Usage())  # Until there is an answer, nobody knows.
        try:
            answer = await call_apart(lambda: _read_answer(self.model.llm, request))
        except Exception as error:
            if 400 <= (read_status(error) or 0) < 500:
                usages.pop()  # No provider bills what it refuses.
            raise
        usages[-1] = answer.usage
        shown = "\n".join(map(content_text, request.contents))
        return judge(answer, self.budget_tokens, self.model.has_own_form, shown)

    def may_ask_again(self, error: BaseException) -> bool:
        """Whether another try is worth it; decides what is asked then."""
        if is_transient(error):
            return True
        if isinstance(error, UnusableAnswerError):
            is_worth_it = not error.is_blocked
        else:
            is_refused = read_status(error) in (400, 422)
            is_worth_it = is_refused and parse_overflow(error) is None
        if not is_worth_it or self.relaxed is None:
            return False
        self.request = self.relaxed
        self.relaxed = None
        return True


async def _ask(question: _Question) -> Answer:
    """Asks a model; the one place where its failures are caught."""
    timeout_seconds = question.model.timeout_seconds
    try:
        async with asyncio.timeout(timeout_seconds):
            return await call_with_retries(
                question.ask, timeout_seconds, question.may_ask_again
            )
    except TimeoutError as error:
        raise SummaryError(f"no answer in {timeout_seconds} s") from error
    except SummaryError:
        raise
    except BrokenCallError as error:
        raise SummaryError(f"the call failed: {error}") from error
    except Exception as error:  # A provider's client may raise anything.
        # What it says may quote the conversation.
        status = read_status(error)
        known = type(error).__name__ + (f", status {status}" if status else "")
        known += _explain_key(error, status)
        raise SummaryError(f"the call failed: {known}") from error


def _explain_key(error: Exception, status: int | None) -> str:
    """Says so where a client has no key, with the variables that its error names."""
    text = ""
    with suppress(Exception):  # Anyone's code may fail to say what it is.
        text = str(error)[:2_000]
    if status not in (401, 403) and not _KEY.search(text):
        return ""
    named = ", ".join(dict.fromkeys(_VARIABLE.findall(text)))
    named = named or "its provider's (Gemini's is GOOGLE_API_KEY)"
    said = f"set {named} in the environment, or name another `summarizer`"
    return f"; it has no valid key: {said}"


async def _read_answer(llm: BaseLlm, request: LlmRequest) -> Answer:
    text = ""
    output_tokens = 0
    has_calls = False
    finish = ""
    used = Usage()
    async with Closing(llm.generate_content_async(request, stream=False)) as responses:
        async for response in responses:
            if response.partial:
                continue
            for part in parts_of(response.content):
                if part.text and not part.thought:
                    text += part.text
            has_calls = has_calls or bool(response.get_function_calls())
            reason = response.finish_reason or response.error_code or finish
            finish = str(getattr(reason, "name", reason))
            if usage := response.usage_metadata:
                output_tokens = read_tokens(usage.candidates_token_count)
                used = read_usage(usage)
    return Answer(text.strip(), output_tokens, has_calls, finish, used)
