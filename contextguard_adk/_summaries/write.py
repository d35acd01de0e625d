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
from contextguard_adk._history.history import History
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

WINDOW_RATIO = 0.95
"""Prompt and answer fill this part of the window: the provider may count more."""

RETRY_RATIO = 0.6
"""The second prompt is this part of one that the provider has found too long."""

PREVIOUS_RATIO = 0.4
"""The previous summary takes at most this part of a prompt."""

REQUEST_RATIO = 0.15
"""The current request takes at most this part of a prompt."""

SMALL_TALK_RATIO = 0.05
"""A summary takes more than this part of its budget."""

STAYS_RATIO = 0.45
"""After a summary without a model, messages up to this part of the threshold stay."""

STAYS_RATIO_WITHOUT_MODEL = 0.30
"""The same where no model will write a summary soon.

With more, every turn would have to be cut again.
"""


@dataclass(frozen=True)
class SummaryTask:
    """The text that is to be summarized, and the most that the summary may take.

    Attributes:
        entries: The transcript of the messages that no model has summarized.
        previous_summary: The summary that the new one replaces; "" for none.
        live_request: The user's current request.
        briefs: Texts of sections, by the section's name.
        focus: What the summary should keep above all; "" for nothing.
        budget_tokens: The most that the summary may take.
        correction: The factor between estimates and the provider's counts; None if the
            provider has counted nothing yet.
        conversation_tokens: The tokens of the agent's own request.
    """

    entries: Sequence[Entry]
    previous_summary: str
    live_request: str
    briefs: Mapping[str, str]
    focus: str
    budget_tokens: int
    correction: float | None
    conversation_tokens: int

    def clip(self, answer: Answer) -> str:
        """Returns the text of an answer, shortened if it exceeds the budget."""
        # By an estimate, facts might be cut for nothing. The provider's count is exact.
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
    """Asks for a summary with instruction and prompt of at most `input_tokens`.

    Only where instruction, sections and focus alone take nearly all of this, the prompt
    is longer: the transcript always has an eighth of `input_tokens`.
    """
    count = functools.cache(token_counter(task.correction or DEFAULT_CORRECTION))
    instruction = summary_instruction(task.budget_tokens, model.instruction)

    # The previous summary and the request are shortened to their parts of the prompt.
    previous = shorten_to_tokens(
        task.previous_summary, PREVIOUS_RATIO * input_tokens, count
    )
    request = shorten_to_tokens(task.live_request, REQUEST_RATIO * input_tokens, count)
    texts = {"previous-summary": previous, "transcript": "", "current-request": request}
    empty_prompt = summary_prompt(texts, task.briefs, task.focus)

    # The transcript takes the rest of the room.
    left_tokens = input_tokens - count(instruction) - count(empty_prompt)
    transcript_tokens = max(left_tokens, input_tokens // 8)
    entries = fit_entries(task.entries, transcript_tokens, count)
    texts["transcript"] = "\n".join(entry.text for entry in entries)
    prompt = summary_prompt(texts, task.briefs, task.focus)

    answer = await ask_with_transcript(model, instruction, prompt, task.budget_tokens)
    return task.clip(answer)


def find_conversation(turn: Turn, summarized: Collection[int]) -> list[types.Content]:
    """Returns the conversation, so that a question for its summary can follow.

    The result is [] where such a question is not possible:

    - A call has no result yet. The provider may refuse any other content after it.
    - Some messages are not to be summarized. The model would summarize them as well.
    - The request does not show all that is to be summarized.
    - The app has added contents at the beginning.

    Args:
        turn: The model call.
        summarized: Indexes of the messages that are to be summarized.
    """
    history = turn.history
    has_open_call = bool(history.pairs.open_calls - history.covered)
    is_all_summarized = set(summarized) >= set(turn.compactable)
    if has_open_call or not is_all_summarized or not _shows_all(history):
        return []

    # The newest thoughts may be valid only after exactly the contents before them.
    if newest_thoughts(turn.contents):
        return list(turn.contents)
    return _without_additions(turn)


def _shows_all(history: History) -> bool:
    """Whether the agent's request shows each message, or a model's summary of it.

    It does not if a compaction has shortened results or the quote of the request, or if
    excerpts stand for messages that no model has summarized.
    """
    stored = history.stored
    if not stored:
        return True
    is_shortened = stored.truncation or stored.request_chars >= 0
    return not is_shortened and history.covered == history.model_covered


def _without_additions(turn: Turn) -> list[types.Content]:
    """Returns the request's contents without those that the app adds to this call.

    The result is [] if such contents stand before the history. A prompt without them
    begins in another way, so that a prompt cache could not serve it.
    """
    history = turn.history
    history_indexes = set(history.indexes)
    added_indexes = [
        index for index in range(len(history.contents)) if index not in history_indexes
    ]
    if added_indexes and added_indexes[0] < min(history_indexes, default=0):
        return []

    # The request has other indexes than the history, but the same objects. They are
    # compared by id, since a message of the history may equal an added content.
    added_ids = {id(history.contents[index]) for index in added_indexes}
    return [content for content in turn.contents if id(content) not in added_ids]


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

    # Thoughts that nobody has asked for can do with a quarter of their room.
    asked_tokens = thinking_tokens(model.llm, model.config)
    least_thought_tokens = max(asked_tokens, thought_tokens // 4)
    if room_tokens < text_tokens + least_thought_tokens:
        return ""

    output_tokens = min(text_tokens + thought_tokens, room_tokens)
    answer = await ask_in_place(model, conversation, prompt, text_tokens, output_tokens)

    # A short answer without a heading is small talk.
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
    """Returns the number of the oldest messages in `new` that excerpts replace.

    The newest messages stay, as far as they have room below the threshold.

    Args:
        turn: The model call.
        new: Indexes of the messages that no model has summarized, in their order.
        budget_tokens: The most that the excerpts may take.
    """
    held_ratio = sum(section.held_ratio for section in _sections.SECTIONS)
    held_tokens = int(turn.budgets.working_tokens * held_ratio)
    taken_tokens = turn.fixed_tokens + 2 * budget_tokens + held_tokens
    stays_ratio = STAYS_RATIO
    if turn.settings.summaries == "stored":
        stays_ratio = STAYS_RATIO_WITHOUT_MODEL
    most_tokens = int(turn.budgets.threshold_tokens * stays_ratio)
    free_tokens = turn.limit_tokens - taken_tokens
    room_tokens = min(most_tokens, free_tokens) - turn.kept.tokens

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
