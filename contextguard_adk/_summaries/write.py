"""Writes one summary: from a transcript, after the conversation, or without a model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from google.adk.models.llm_request import LlmRequest

from contextguard_adk._history.transcript import Entry, fit_entries
from contextguard_adk._measuring.budgets import TokenCounter, shorten_to_tokens
from contextguard_adk._measuring.calibration import DEFAULT_CORRECTION, token_counter
from contextguard_adk._providers.clients import thinking_tokens
from contextguard_adk._providers.overflow import parse_overflow
from contextguard_adk._summaries.judge import Answer
from contextguard_adk._summaries.model import (
    SummaryModel,
    ask_in_place,
    ask_with_transcript,
)
from contextguard_adk._summaries.prompts import (
    closing_prompt,
    summary_instruction,
    summary_prompt,
)
from contextguard_adk._support.phrases import EXCERPTS
from contextguard_adk.errors import SummaryError, UnusableAnswerError


@dataclass(frozen=True)
class SummaryTask:
    """What is to be summarized, and what the summary may take."""

    entries: Sequence[Entry]
    previous_summary: str
    live_request: str
    briefs: Mapping[str, str]  # Of sections, by name.
    focus: str
    budget_tokens: int
    correction: float | None
    conversation_tokens: int

    def clip(self, answer: Answer) -> str:
        """Cuts an answer that is too long."""
        # The provider's count is exact, and an answer cut for nothing loses facts.
        if 0 < answer.output_tokens <= self.budget_tokens:
            return answer.text
        count = token_counter(self.correction)
        return shorten_to_tokens(answer.text, self.budget_tokens, count)


async def write_from_transcript(task: SummaryTask, model: SummaryModel) -> str:
    """Asks for a summary of a transcript; with less of it where that was too long."""
    budget, thoughts = model.divide_output(task.budget_tokens, model.transcript_config)
    task = replace(task, budget_tokens=budget)
    window_tokens = model.window_tokens
    # The provider may count more than the guard.
    input_tokens = int(0.95 * window_tokens) - budget - thoughts
    input_tokens = max(input_tokens, window_tokens // 4)
    try:
        return await _summarize_within(task, model, input_tokens)
    except SummaryError as error:
        if not is_overflow(error):
            raise
    return await _summarize_within(task, model, int(input_tokens * 0.6))


async def _summarize_within(
    task: SummaryTask, model: SummaryModel, input_tokens: int
) -> str:
    count = functools.cache(token_counter(task.correction or DEFAULT_CORRECTION))
    request = shorten_to_tokens(task.live_request, 0.15 * input_tokens, count)
    summary = shorten_to_tokens(task.previous_summary, 0.4 * input_tokens, count)
    instruction = summary_instruction(task.budget_tokens, model.instruction)
    texts = {"previous-summary": summary, "transcript": "", "current-request": request}
    around = summary_prompt(texts, task.briefs, task.focus)
    room = max(input_tokens - count(instruction) - count(around), input_tokens // 8)
    entries = fit_entries(task.entries, room, count)
    texts["transcript"] = "\n".join(entry.text for entry in entries)
    prompt = summary_prompt(texts, task.briefs, task.focus)
    answer = await ask_with_transcript(model, instruction, prompt, task.budget_tokens)
    return task.clip(answer)


async def write_in_place(
    task: SummaryTask, model: SummaryModel, conversation: LlmRequest
) -> str:
    """Asks the agent's model to end the conversation with its summary, else ""."""
    budget, thoughts = model.divide_output(task.budget_tokens, model.config)
    task = replace(task, budget_tokens=budget)
    prompt = closing_prompt(budget, model.instruction, task.briefs, task.focus)
    count = token_counter(task.correction or DEFAULT_CORRECTION)
    room = model.window_tokens - task.conversation_tokens - count(prompt)
    # Room for thoughts that were not asked for may be less.
    asked = thinking_tokens(model.llm, model.config)
    if room < budget + max(asked, thoughts // 4):
        return ""
    output_tokens = min(budget + thoughts, room)
    answer = await ask_in_place(model, conversation, prompt, budget, output_tokens)
    # So short, and without a heading, it is small talk.
    is_short = count(answer.text) < 0.05 * budget
    if model.has_own_form and is_short and "#" not in answer.text:
        raise UnusableAnswerError("the answer is no summary")
    return task.clip(answer)


def is_overflow(error: SummaryError) -> bool:
    """Returns whether a summary failed because its input was too long."""
    return error.__cause__ is not None and parse_overflow(error.__cause__) is not None


def write_mechanical_summary(
    entries: Sequence[Entry],
    previous_summary: str,
    budget_tokens: int,
    count: TokenCounter,
) -> str:
    """Writes a summary without a model: what was said before, then excerpts."""
    lines = [entry.text for entry in fit_entries(entries, budget_tokens, count)]
    # At the margin of what follows only the guard writes.
    before = [previous_summary, EXCERPTS] if previous_summary else []
    return "\n".join([*before, *lines])
