"""Writes one summary: from a transcript, after the conversation, or without a model.

It also finds the part of the conversation that is read for each of these.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk import _sections
from contextguard_adk._history.contents import pair_boundaries
from contextguard_adk._history.thoughts import newest_thoughts
from contextguard_adk._history.transcript import Entry, fit_entries, render_entries
from contextguard_adk._history.truncation import without_names
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
from contextguard_adk._turn.turn import Turn
from contextguard_adk.errors import SummaryError, UnusableAnswerError

WINDOW_RATIO = 0.95  # Of the window: the provider may count more than the guard.
RETRY_RATIO = 0.6  # Of a prompt that the provider has found too long.
PREVIOUS_RATIO = 0.4  # Of the prompt, for the previous summary.
REQUEST_RATIO = 0.15  # Of the prompt, for the current request.
SMALL_TALK_RATIO = 0.05  # Of the budget: a summary takes more.


@dataclass(frozen=True)
class SummaryTask:
    """The text that is to be summarized, and the most that the summary may take."""

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
        # The provider's count is exact; by an estimate, facts might be cut for nothing.
        if 0 < answer.output_tokens <= self.budget_tokens:
            return answer.text
        count = token_counter(self.correction)
        return shorten_to_tokens(answer.text, self.budget_tokens, count)


def render_messages(
    turn: Turn, indexes: Iterable[int], always: Collection[int | None] = ()
) -> list[Entry]:
    """Renders messages as entries of a transcript.

    The summarizer reads what the agent was shown. Only the values that shortened
    results name are left out: a list beside the summary has them.

    Args:
        turn: The model call.
        indexes: The indexes of the messages.
        always: Indexes of messages whose entries are never dropped for lack of room;
            None among them is no message.
    """
    history = turn.history
    if history.redactor:
        # Whole messages: the half of a number that is cut would not be redacted.
        contents = list(history.told)
    else:
        contents = [
            whole if shown is whole else without_names(shown, whole)
            for shown, whole in zip(history.shown, history.contents, strict=True)
        ]

    wholes = history.contents if turn.has_recall else None
    required = [index for index in always if index is not None]
    return render_entries(contents, indexes, required, wholes, history.outputs)


async def write_from_transcript(task: SummaryTask, model: SummaryModel) -> str:
    """Asks for a summary of a transcript.

    Where the provider finds the prompt too long, a shorter one is sent once.

    Raises:
        SummaryError: The model has written no summary.
    """
    config = model.transcript_config
    text_tokens, thought_tokens = model.divide_output(task.budget_tokens, config)
    fitting = replace(task, budget_tokens=text_tokens)
    window_tokens = model.window_tokens

    left_tokens = int(WINDOW_RATIO * window_tokens) - text_tokens - thought_tokens
    input_tokens = max(left_tokens, window_tokens // 4)
    try:
        return await _summarize_within(fitting, model, input_tokens)
    except SummaryError as error:
        if not is_overflow(error):
            raise
    return await _summarize_within(fitting, model, int(input_tokens * RETRY_RATIO))


async def _summarize_within(
    task: SummaryTask, model: SummaryModel, input_tokens: int
) -> str:
    """Asks for a summary with a prompt of at most `input_tokens`."""
    count = functools.cache(token_counter(task.correction or DEFAULT_CORRECTION))
    instruction = summary_instruction(task.budget_tokens, model.instruction)
    most_previous = PREVIOUS_RATIO * input_tokens
    previous = shorten_to_tokens(task.previous_summary, most_previous, count)
    most_request = REQUEST_RATIO * input_tokens
    request = shorten_to_tokens(task.live_request, most_request, count)
    texts = {"previous-summary": previous, "transcript": "", "current-request": request}
    empty_prompt = summary_prompt(texts, task.briefs, task.focus)

    # The transcript takes the rest of the room.
    left_tokens = input_tokens - count(instruction) - count(empty_prompt)
    entries = fit_entries(task.entries, max(left_tokens, input_tokens // 8), count)
    texts["transcript"] = "\n".join(entry.text for entry in entries)
    prompt = summary_prompt(texts, task.briefs, task.focus)
    answer = await ask_with_transcript(model, instruction, prompt, task.budget_tokens)
    return task.clip(answer)


def find_conversation(turn: Turn, summarized: Collection[int]) -> list[types.Content]:
    """Returns the contents after which a model can be asked to summarize them.

    Contents that the app adds to this call alone are left out, unless thoughts may need
    them. The result is empty where a question at the end is not possible: the provider
    may refuse it, the model would not see all messages, or not all are to be covered.

    Args:
        turn: The model call.
        summarized: Indexes of the messages that the summary would cover or leave.
    """
    history = turn.history
    contents = turn.contents
    if history.pairs.open_calls - history.covered:
        return []  # A question after a call without its result may be refused.
    if not set(summarized) >= set(turn.compactable):
        return []

    stored = history.stored
    if stored:
        is_shortened = stored.truncation or stored.request_chars >= 0
        if is_shortened or history.covered != history.model_covered:
            return []

    if newest_thoughts(contents):
        return list(contents)  # They may need everything before them.

    history_indexes = set(history.indexes)
    added_indexes = [
        index for index in range(len(history.contents)) if index not in history_indexes
    ]
    # Without contents at its beginning the prompt is another one for a prompt cache.
    if added_indexes and added_indexes[0] < min(history_indexes, default=0):
        return []
    added_ids = {id(history.contents[index]) for index in added_indexes}
    return [content for content in contents if id(content) not in added_ids]


async def write_in_place(
    task: SummaryTask, model: SummaryModel, conversation: LlmRequest
) -> str:
    """Asks the agent's model to end the conversation with its summary.

    Returns:
        The summary; "" where conversation, question and answer do not fit.

    Raises:
        SummaryError: The model has written no summary.
    """
    text_tokens, thought_tokens = model.divide_output(task.budget_tokens, model.config)
    fitting = replace(task, budget_tokens=text_tokens)
    prompt = closing_prompt(text_tokens, model.instruction, task.briefs, task.focus)
    count = token_counter(task.correction or DEFAULT_CORRECTION)
    room_tokens = model.window_tokens - task.conversation_tokens - count(prompt)
    # Thoughts that nobody has asked for may have less room.
    asked_tokens = thinking_tokens(model.llm, model.config)
    if room_tokens < text_tokens + max(asked_tokens, thought_tokens // 4):
        return ""

    output_tokens = min(text_tokens + thought_tokens, room_tokens)
    answer = await ask_in_place(model, conversation, prompt, text_tokens, output_tokens)
    # An answer so short, and without a heading, is small talk.
    is_short = count(answer.text) < SMALL_TALK_RATIO * text_tokens
    if model.has_own_form and is_short and "#" not in answer.text:
        raise UnusableAnswerError("the answer is no summary")
    return fitting.clip(answer)


def write_mechanical_summary(
    entries: Sequence[Entry],
    previous_summary: str,
    budget_tokens: int,
    count: TokenCounter,
) -> str:
    """Writes a summary without a model: the previous one, then excerpts."""
    lines = [entry.text for entry in fit_entries(entries, budget_tokens, count)]
    before = [previous_summary, EXCERPTS] if previous_summary else []
    return "\n".join([*before, *lines])


def find_mechanical_end(turn: Turn, new: Sequence[int], budget_tokens: int) -> int:
    """Returns how many messages of `new`, from the first on, excerpts have to replace.

    The newest messages that have room below the threshold stay.

    Args:
        turn: The model call.
        new: Indexes of the messages that no model has summarized, in their order.
        budget_tokens: The most that the excerpts may take.
    """
    held_ratio = sum(section.held_ratio for section in _sections.SECTIONS)
    held_tokens = int(turn.budgets.working_tokens * held_ratio)
    taken_tokens = turn.fixed_tokens + 2 * budget_tokens + held_tokens
    # Where no model will write a summary soon, less stays: otherwise every turn would
    # have to be cut again.
    stays_ratio = 0.30 if turn.settings.summaries == "stored" else 0.45
    most_tokens = int(turn.budgets.threshold_tokens * stays_ratio)
    room_tokens = min(most_tokens, turn.limit_tokens - taken_tokens) - turn.kept.tokens

    # The first message never stays, so that something is covered.
    contents = [turn.history.shown[index] for index in new]
    memo = turn.history.memo
    used_tokens = 0
    end = len(new)
    for content in reversed(contents[1:]):
        used_tokens += int(memo.estimate_tokens([content]) * turn.correction + 1)
        if used_tokens > room_tokens:
            break
        end -= 1

    # A call and its result are not parted.
    boundaries = pair_boundaries(contents)
    while end < len(new) and not boundaries[end]:
        end += 1
    return end


def is_overflow(error: SummaryError) -> bool:
    """Returns whether a summary failed because its input was too long."""
    return error.__cause__ is not None and parse_overflow(error.__cause__) is not None
