"""Asks a model for a summary, and writes one mechanically where that fails."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from contextguard_adk.errors import SummaryError
from contextguard_adk.measuring.budgets import summarizer_input_tokens
from contextguard_adk.measuring.calibration import DEFAULT_CORRECTION, token_counter
from contextguard_adk.measuring.shortening import TokenCounter, shorten_to_tokens
from contextguard_adk.providers.overflow import parse_overflow
from contextguard_adk.summarizing.prompts import summary_instruction, summary_prompt
from contextguard_adk.summarizing.summary_call import (
    Answer,
    SummaryModel,
    ask_with_transcript,
)
from contextguard_adk.summarizing.transcript import Entry, fit_entries, split_entries

logger = logging.getLogger("contextguard_adk.summarizing.summarizer")

MAX_ROLLING_CALLS = 3
"""Into how many calls a transcript is split before its payloads are shortened."""

LIVE_REQUEST_RATIO = 0.15
PREVIOUS_SUMMARY_RATIO = 0.4
"""What the live request and the previous summary may take of the input at most."""

OVERFLOW_RETRY_RATIO = 0.6
"""How much of the input is tried again after the provider found it too long."""


@dataclass(frozen=True)
class SummaryTask:
    """What is to be summarised.

    Attributes:
        entries: The transcript.
        previous_summary: The summary so far; it is merged into the new one.
        live_request: What the user wants now.
        todos: The rendered todo list.
        budget_tokens: What the summary may take.
        correction: Real tokens per estimated token of the agent's model; None while
            unknown.
    """

    entries: Sequence[Entry]
    previous_summary: str = ""
    live_request: str = ""
    todos: str = ""
    budget_tokens: int = 1_000
    correction: float | None = None


async def summarize(task: SummaryTask, model: SummaryModel) -> str:
    """Asks a model for a summary, in up to three rolling calls.

    Each call stays within 80 % of the model's window; every call after the first
    merges the summary so far. Beyond three calls tool results are shortened.

    Returns:
        The summary, at most `task.budget_tokens` long.

    Raises:
        SummaryError: The model failed, timed out, or wrote nothing.
    """
    input_tokens = summarizer_input_tokens(model.window_tokens)
    try:
        return await _summarize_within(task, model, input_tokens)
    except SummaryError as error:
        if error.__cause__ is None or parse_overflow(error.__cause__) is None:
            raise
    logger.info("The summariser found its input too long; trying again with less.")
    return await _summarize_within(
        task, model, int(input_tokens * OVERFLOW_RETRY_RATIO)
    )


async def _summarize_within(
    task: SummaryTask, model: SummaryModel, input_tokens: int
) -> str:
    count = functools.cache(token_counter(task.correction or DEFAULT_CORRECTION))
    live_request = shorten_to_tokens(
        task.live_request, LIVE_REQUEST_RATIO * input_tokens, count
    )
    summary = shorten_to_tokens(
        task.previous_summary, PREVIOUS_SUMMARY_RATIO * input_tokens, count
    )
    instruction = summary_instruction(task.budget_tokens, model.instruction)
    around = summary_prompt("", "", live_request, task.todos)
    beside = count(instruction) + count(around)
    parts = _split_transcript(
        task.entries,
        # One call alone reads the summary so far; a later one reads what was written.
        max(input_tokens - beside - count(summary), input_tokens // 4),
        max(
            input_tokens - beside - max(count(summary), task.budget_tokens),
            input_tokens // 4,
        ),
        count,
    )
    for part in parts:
        transcript = "\n".join(entry.text for entry in part)
        prompt = summary_prompt(transcript, summary, live_request, task.todos)
        answer = await ask_with_transcript(
            model, instruction, prompt, task.budget_tokens
        )
        summary = clip_answer(answer, task)
    return summary


def clip_answer(answer: Answer, task: SummaryTask) -> str:
    """Cuts an answer that is too long."""
    # The provider's count is exact, and an answer cut for nothing loses facts.
    if 0 < answer.output_tokens <= task.budget_tokens:
        return answer.text
    return shorten_to_tokens(
        answer.text, task.budget_tokens, token_counter(task.correction)
    )


def _split_transcript(
    entries: Sequence[Entry],
    single_room_tokens: int,
    room_tokens: int,
    count: TokenCounter,
) -> list[list[Entry]]:
    """Splits a transcript into at most three parts, shortening it where it must."""
    parts = split_entries(entries, single_room_tokens, count)
    if len(parts) == 1:
        return parts
    parts = split_entries(entries, room_tokens, count)
    for slack in (0.95, 0.8, 0.6):
        if len(parts) <= MAX_ROLLING_CALLS:
            return parts
        budget = int(MAX_ROLLING_CALLS * room_tokens * slack)
        parts = split_entries(fit_entries(entries, budget, count), room_tokens, count)
    return parts[-MAX_ROLLING_CALLS:]


def write_mechanical_summary(
    entries: Sequence[Entry],
    previous_summary: str,
    budget_tokens: int,
    count: TokenCounter,
) -> str:
    """Writes a summary without a model: what was said before, then excerpts.

    Args:
        entries: The transcript to cover.
        previous_summary: What it begins with, whole.
        budget_tokens: What the excerpts may take.
        count: Tokens of a text.

    Returns:
        The previous summary and an excerpt of each message, head and tail; of the
        newest where not all fit.
    """
    lines = [entry.text for entry in fit_entries(entries, budget_tokens, count)]
    return "\n".join([previous_summary, *lines] if previous_summary else lines)
