"""Has summaries written: by which model, in how many calls, and without one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.registry import LLMRegistry
from google.genai import types
from pydantic import ConfigDict, Field, InstanceOf, field_validator

from contextguard_adk._measuring.budgets import TokenCounter, shorten_to_tokens
from contextguard_adk._measuring.calibration import DEFAULT_CORRECTION, token_counter
from contextguard_adk._providers.clients import find_llm, thinking_tokens
from contextguard_adk._providers.costs import Costs, add_costs, price_calls
from contextguard_adk._providers.overflow import parse_overflow
from contextguard_adk._providers.retry import is_transient
from contextguard_adk._providers.windows import (
    LitellmRegistry,
    ModelRegistry,
    resolve_context_window,
    resolve_costs,
    resolve_output_limit,
)
from contextguard_adk._settings import Settings
from contextguard_adk._summarizing.model import (
    Answer,
    SummaryModel,
    answers_freely,
    ask_in_place,
    ask_with_transcript,
)
from contextguard_adk._summarizing.prompts import (
    SUMMARY_INSTRUCTION,
    closing_prompt,
    summary_instruction,
    summary_prompt,
)
from contextguard_adk._summarizing.transcript import Entry, fit_entries, split_entries
from contextguard_adk.errors import SummaryError, UnusableAnswerError
from contextguard_adk.telemetry import Usage, warn_once

if TYPE_CHECKING:
    from contextguard_adk._memory import CircuitBreaker, SessionMemory

logger = logging.getLogger("contextguard_adk.summarizer")

_REGISTRY = LitellmRegistry()  # Its table is read once for each process.


class SummarySettings(Settings):
    """The settings of an agent that say how its summaries are written."""

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True)

    summarizer: InstanceOf[BaseLlm] | str | None = Field(
        default=None,
        description="The model that writes summaries: a `BaseLlm`, or a model name "
        "that ADK's `LLMRegistry` knows. None: the agent's own model.",
    )
    summarizer_context_window: int | None = Field(
        default=None,
        ge=1_000,
        strict=True,
        description="The summarizer's context window in tokens, at least 1,000. None: "
        "the agent's window where its own model summarizes, else the model registry's.",
    )
    summary_timeout_seconds: float = Field(
        default=60.0,
        gt=0,
        le=3_600,
        strict=True,
        description="How long one summary call may take with all its tries, in "
        "seconds, more than 0 and at most 3,600.",
    )
    summary_instruction: str | None = Field(
        default=None,
        pattern=r"\S",
        description="The system instruction of a summary call; in it `{max_words}` is "
        "replaced by how many words the summary may have. Where the summary is asked "
        "for at the end of the conversation, it is part of that question. None: the "
        "guard's own.",
    )
    reuse_prompt_cache: Literal["auto"] | bool = Field(
        default="auto",
        description="Whether the agent's own model is asked for a summary at the end "
        "of the conversation itself, which a prompt cache serves, and not with a "
        'transcript in a prompt of its own. "auto": where the provider reported that '
        "at least half of the agent's last prompt came from a cache. It applies only "
        "to summaries of all the history but the newest steps, as `Threshold` makes "
        "them. Where the conversation and the question do not fit, the agent has to "
        "answer with something other than plain text, or the answer is no summary, a "
        "transcript is used.",
    )

    @field_validator("summarizer", mode="before")
    @classmethod
    def _check_summarizer(cls, value: object) -> object:
        if not isinstance(value, BaseLlm | str | None):
            raise ValueError("a BaseLlm, or the name of a model, is expected")
        return value


@dataclass(frozen=True)
class SummaryTask:
    """What is to be summarized, and what the summary may take."""

    entries: Sequence[Entry]
    previous_summary: str = ""
    live_request: str = ""
    todos: str = ""
    focus: str = ""
    budget_tokens: int = 1_000
    correction: float | None = None
    # The conversation itself, where it shows all of the transcript.
    conversation: Sequence[types.Content] = ()
    conversation_tokens: int = 0

    def clip(self, answer: Answer) -> str:
        """Cuts an answer that is too long."""
        # The provider's count is exact, and an answer cut for nothing loses facts.
        if 0 < answer.output_tokens <= self.budget_tokens:
            return answer.text
        count = token_counter(self.correction)
        return shorten_to_tokens(answer.text, self.budget_tokens, count)


@dataclass
class Summarizer:
    """Writes the summaries of one compaction of one agent."""

    settings: SummarySettings
    request: LlmRequest
    agent: object
    window_tokens: int
    registry: ModelRegistry | None
    session: SessionMemory
    breaker: CircuitBreaker
    prices: Mapping[str, Costs] = field(default_factory=dict)
    failures: list[SummaryError] = field(default_factory=list)

    @functools.cached_property
    def model(self) -> SummaryModel | None:
        """The model to ask; None where there is none, or its circuit is open."""
        settings, own = self.settings, find_llm(self.agent)
        llm = _resolve(settings.summarizer) or own
        if llm is None or not self.breaker.allows(llm.model):
            return None
        window = settings.summarizer_context_window
        if window is None and llm is own:
            window = self.window_tokens
        if window is None:
            window = resolve_context_window(llm.model, registry=self.registry).tokens
        # A registry of the user's own need not know which models think.
        ask = getattr(self.registry, "supports_reasoning", _REGISTRY.supports_reasoning)
        return SummaryModel(
            llm=llm,
            window_tokens=window,
            timeout_seconds=settings.summary_timeout_seconds,
            config=self.request.config,
            instruction=settings.summary_instruction or SUMMARY_INSTRUCTION,
            is_agents_own=llm is own,
            can_think=bool(ask(llm.model)),
            max_output_tokens=resolve_output_limit(llm.model, self.registry),
        )

    @property
    def is_in_place_wanted(self) -> bool:
        """Whether a summary in place is worth a try, and would be plain text."""
        if self.model is None or not self.model.is_agents_own:
            return False
        setting, session = self.settings.reuse_prompt_cache, self.session
        has_cache = setting is True or session.cached_ratio >= 0.5
        config = self.request.config
        is_text = config.response_mime_type in (None, "text/plain")
        if session.is_in_place_useless or not (setting and has_cache and is_text):
            return False
        return not config.stop_sequences and answers_freely(self.request, self.agent)

    @property
    def may_recover(self) -> bool:
        """Whether no model has written a summary now, but soon one may.

        One that lets its time run out would cost it again on each call.
        """
        if self.failures:
            return not isinstance(self.failures[-1].__cause__, TimeoutError)
        return self.__dict__.get("model", self) is None

    @property
    def _asked(self) -> SummaryModel | None:
        """The model, where it was wanted."""
        return self.__dict__.get("model")

    @property
    def model_name(self) -> str:
        """The model that was asked; "" where none was."""
        return self._asked.llm.model if self._asked else ""

    @property
    def usage(self) -> Usage:
        """What all its answers took, those included that were of no use."""
        return sum(self._asked.answered if self._asked else (), Usage())

    @property
    def cost(self) -> float | None:
        """The price of these in US dollars; None where it is unknown."""
        if self._asked is None:
            return 0.0
        costs = resolve_costs(self.model_name, self.prices, self.registry)
        return price_calls(self._asked.answered, costs)

    async def summarize(self, task: SummaryTask) -> str:
        """Has a summary written, in place or from a transcript; "" where it fails."""
        # A summarizer that has just failed would only cost its timeout once more.
        if self.failures or self.model is None:
            return ""
        try:
            text = await self._summarize_in_place(task, self.model)
            return text or await summarize(task, self.model)
        except SummaryError as error:
            self.failures.append(error)
            logger.warning(
                "The summarizer of agent %r failed (%s); a mechanical summary takes "
                "its place where the window is nearly full.",
                getattr(self.agent, "name", ""),
                error,
            )
            return ""

    def end(self) -> None:
        """Counts how the compaction ended and what it took; called once behind it."""
        if self._asked is not None:
            self.breaker.note(self._asked.llm.model, bool(self.failures))
        session = self.session
        session.summary_usage += self.usage
        session.summary_cost = add_costs((session.summary_cost, self.cost))

    async def _summarize_in_place(self, task: SummaryTask, model: SummaryModel) -> str:
        """Has the agent's model end the conversation with its summary, else ""."""
        budget, thoughts = model.divide_output(task.budget_tokens, model.config)
        task = replace(task, budget_tokens=budget)
        prompt = closing_prompt(budget, model.instruction, task.todos, task.focus)
        count = token_counter(task.correction or DEFAULT_CORRECTION)
        room = model.window_tokens - task.conversation_tokens - count(prompt)
        # Room for thoughts that nobody has asked for may be less.
        asked = thinking_tokens(model.llm, model.config)
        least = budget + max(asked, thoughts // 4)
        if not task.conversation or room < least:
            return ""
        contents = list(task.conversation)
        conversation = self.request.model_copy(update={"contents": contents})
        try:
            output_tokens = min(budget + thoughts, room)
            answer = await ask_in_place(
                model, conversation, prompt, budget, output_tokens
            )
            # So short, and without a heading, it is small talk.
            is_short = count(answer.text) < 0.05 * budget
            if model.has_own_form and is_short and "#" not in answer.text:
                raise UnusableAnswerError("the answer is no summary")
        except SummaryError as error:
            # A provider that is down now will not read a transcript either.
            if error.__cause__ is not None and is_transient(error.__cause__):
                raise
            # Where the answer shows that it is no use, it is not asked so again.
            if isinstance(error, UnusableAnswerError) or _is_overflow(error):
                self.session.is_in_place_useless = True
            logger.info("No summary in place (%s); a transcript is used.", error)
            return ""
        return task.clip(answer)


def _resolve(model: BaseLlm | str | None) -> BaseLlm | None:
    if not isinstance(model, str):
        return model
    try:
        # Each time anew: a client belongs to the event loop that it was made in.
        return LLMRegistry.new_llm(model)
    except (ValueError, ImportError):
        message = (
            "ADK knows no model %r for summaries; the agent's own model writes them. "
            "Set `summarizer` to a model name that ADK's LLMRegistry resolves."
        )
        warn_once(logger, message, model)
        return None


def _is_overflow(error: SummaryError) -> bool:
    return error.__cause__ is not None and parse_overflow(error.__cause__) is not None


async def summarize(task: SummaryTask, model: SummaryModel) -> str:
    """Asks for a summary of a transcript, in one call as a rule."""
    budget, thoughts = model.divide_output(task.budget_tokens, model.transcript_config)
    task = replace(task, budget_tokens=budget)
    window_tokens = model.window_tokens
    # The provider may count more than the guard.
    input_tokens = int(0.95 * window_tokens) - budget - thoughts
    input_tokens = max(input_tokens, window_tokens // 4)
    try:
        return await _summarize_within(task, model, input_tokens)
    except SummaryError as error:
        if not _is_overflow(error):
            raise
    # Its input was too long.
    return await _summarize_within(task, model, int(input_tokens * 0.6))


async def _summarize_within(
    task: SummaryTask, model: SummaryModel, input_tokens: int
) -> str:
    count = functools.cache(token_counter(task.correction or DEFAULT_CORRECTION))
    live_request = shorten_to_tokens(task.live_request, 0.15 * input_tokens, count)
    summary = shorten_to_tokens(task.previous_summary, 0.4 * input_tokens, count)
    instruction = summary_instruction(task.budget_tokens, model.instruction)
    around = summary_prompt("", "", live_request, task.todos, task.focus)
    room = input_tokens - count(instruction) - count(around)
    for part in _divide_transcript(task, count(summary), room, count):
        transcript = "\n".join(entry.text for entry in part)
        prompt = summary_prompt(
            transcript, summary, live_request, task.todos, task.focus
        )
        summary = task.clip(
            await ask_with_transcript(model, instruction, prompt, task.budget_tokens)
        )
    return summary


def _divide_transcript(
    task: SummaryTask, summary_tokens: int, room_tokens: int, count: TokenCounter
) -> list[list[Entry]]:
    """Fits a transcript into one call, or into three if it would lose too much there.

    A call reads the summary so far as well: the one before, or what was just written.
    """
    least = room_tokens // 4
    room = max(room_tokens - summary_tokens, least)
    entries_tokens = sum(count(entry.text) for entry in task.entries)
    if entries_tokens <= 1.3 * room:
        return [fit_entries(task.entries, room, count)]
    room = max(room_tokens - max(summary_tokens, task.budget_tokens), least)
    parts = split_entries(task.entries, room, count)
    for slack in (0.8, 0.6):  # Parts end between entries.
        if len(parts) > 3:
            fitted = fit_entries(task.entries, int(slack * 3 * room), count)
            parts = split_entries(fitted, room, count)
    return parts[-3:]


def write_mechanical_summary(
    entries: Sequence[Entry],
    previous_summary: str,
    budget_tokens: int,
    count: TokenCounter,
) -> str:
    """Writes a summary without a model: what was said before, then excerpts."""
    lines = [entry.text for entry in fit_entries(entries, budget_tokens, count)]
    return "\n".join([previous_summary, *lines] if previous_summary else lines)
