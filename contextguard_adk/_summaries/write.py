"""Writes one summary: from a transcript, in place, or without a model.

In place means that the question stands at the end of the agent's own conversation. This
file also finds the messages that each kind of summary is made of.

An index is the position of a message among the contents of the request. A message is
covered if a summary of any kind replaces it, and summarized if a model wrote that
summary.
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
"""Prompt and answer may fill this part of the window.

The rest is for the error of the estimate: the provider may count more tokens.
"""

RETRY_RATIO = 0.6
"""After a prompt that was too long, the next prompt has this part of its size."""

PREVIOUS_RATIO = 0.4
"""The previous summary takes at most this part of a prompt."""

REQUEST_RATIO = 0.15
"""The current request takes at most this part of a prompt."""

LEAST_IN_PLACE_RATIO = 0.75
"""A summary is asked for in place if it may take at least this part of its budget."""

SMALL_TALK_RATIO = 0.05
"""An answer that takes less than this part of its budget may be small talk."""

STAYS_RATIO = 0.45
"""The messages that stay beside excerpts take at most this part of the threshold."""

STAYS_RATIO_WITHOUT_MODEL = 0.30
"""This ratio replaces `STAYS_RATIO` if the settings forbid a model's summary.

If more messages stayed, each turn would need another compaction.
"""


@dataclass(frozen=True)
class SummaryTask:
    """The text that is to be summarized, and the most that the summary may take.

    Attributes:
        entries: The transcript of the messages that no model has summarized.
        previous_summary: The summary that the new one replaces; "" for none.
        live_request: The user's current request; "" if unknown.
        briefs: The texts of sections for the summarizer, by the section's name.
        focus: What the summary should keep above all; "" for nothing.
        budget_tokens: The most that the summary may take.
        correction: Tokens of the model per heuristic token (4 bytes); None if the
            provider has counted nothing yet.
        conversation_tokens: The estimate of the agent's own request.
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
        # If the provider has counted the answer, no estimate is used: an estimate may
        # be too high, and would cut facts from an answer that fits.
        is_counted = answer.output_tokens > 0
        if is_counted and answer.output_tokens <= self.budget_tokens:
            return answer.text
        count = token_counter(self.correction)
        return shorten_to_tokens(answer.text, self.budget_tokens, count)


def render_messages(
    turn: Turn, indexes: Iterable[int], required: Collection[int] = ()
) -> list[Entry]:
    """Renders messages as entries of a transcript.

    The summarizer reads each result as the tool has answered it, also a result that the
    agent was shown only in part. `fit_entries` shortens what has no room.

    Args:
        turn: The model call.
        indexes: The indexes of the messages.
        required: Indexes of messages whose entries are never dropped for lack of room.
    """
    history = turn.history

    # A handle is the name under which the recall tool finds a part. The handle is a
    # digest of the part before redaction. If the agent has no recall tool, the entries
    # have no handles.
    wholes_for_handles = history.contents if turn.has_recall else None
    return render_entries(
        history.told, indexes, required, wholes_for_handles, history.outputs
    )


async def write_from_transcript(task: SummaryTask, model: SummaryModel) -> str:
    """Asks for a summary of a transcript.

    If the provider finds the prompt too long, a shorter one is sent once.

    Raises:
        SummaryError: The model has written no summary.
    """
    # The model may not be able to write as much as the budget allows.
    output = model.divide_output(task.budget_tokens, model.transcript_config)
    fitting = replace(task, budget_tokens=output.text_tokens)

    usable_tokens = int(WINDOW_RATIO * model.window_tokens)
    left_tokens = usable_tokens - output.text_tokens - output.thought_tokens
    # The prompt gets at least a quarter of the window. An answer rarely takes as much
    # as it may take.
    input_tokens = max(left_tokens, model.window_tokens // 4)
    try:
        return await _summarize_within(fitting, model, input_tokens)
    except SummaryError as error:
        if not is_overflow(error):
            raise
    return await _summarize_within(fitting, model, int(input_tokens * RETRY_RATIO))


async def _summarize_within(
    task: SummaryTask, model: SummaryModel, input_tokens: int
) -> str:
    """Asks for a summary, with a transcript that is shortened to fit.

    Args:
        task: The text to summarize, and the budget of the summary.
        model: The model that writes the summary.
        input_tokens: The most that instruction and prompt should take. They may take
            more if the instruction is long, because the transcript always gets an
            eighth of `input_tokens`.

    Raises:
        SummaryError: The model has written no summary.
    """
    # Entries and texts are counted several times, so their counts are cached.
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
    least_tokens = input_tokens // 8
    transcript_tokens = max(left_tokens, least_tokens)
    entries = fit_entries(task.entries, transcript_tokens, count)
    texts["transcript"] = "\n".join(entry.text for entry in entries)
    prompt = summary_prompt(texts, task.briefs, task.focus)

    answer = await ask_with_transcript(model, instruction, prompt, task.budget_tokens)
    return task.clip(answer)


def find_conversation(turn: Turn, read_indexes: Collection[int]) -> list[types.Content]:
    """Returns the conversation that a question for a summary can follow.

    Returns [] if a summary in place is not possible:

    - If a call has no result yet: a provider may refuse a question after such a call.
    - If the conversation has messages beside those of `read_indexes`: the model would
      summarize these messages as well.
    - If the request does not show all messages of `read_indexes`.
    - If the app has added contents that cannot be left out, see `_without_additions`.

    Args:
        turn: The model call.
        read_indexes: Indexes of the messages that the model is to read.
    """
    history = turn.history
    has_open_call = bool(history.pairs.open_calls - history.covered)
    has_others = not set(turn.compactable).issubset(read_indexes)
    if has_open_call or has_others or not _shows_all(history):
        return []

    # A thought may be valid only after exactly the contents that stood before it. So
    # if there are thoughts, even the contents that the app has added stay.
    if newest_thoughts(turn.contents):
        return list(turn.contents)
    return _without_additions(turn)


def _shows_all(history: History) -> bool:
    """Whether the agent's request shows each message, or a model's summary of it.

    The result is False in these cases:

    - If a compaction has shortened results.
    - If a compaction has shortened the quote of the user's request.
    - If excerpts replace messages that no model has summarized.
    """
    stored = history.stored
    if stored is None:
        return True

    has_short_results = stored.truncation is not None
    has_short_quote = stored.request_chars >= 0
    has_excerpts = history.covered != history.model_covered
    return not (has_short_results or has_short_quote or has_excerpts)


def _without_additions(turn: Turn) -> list[types.Content]:
    """Returns the request's contents without those that the app adds to this call.

    Returns [] if the app has added contents before the history. Without these contents,
    the prompt would not begin as the agent's requests do, and no prompt cache could
    serve the prompt.
    """
    history = turn.history
    history_indexes = set(history.indexes)
    first_index = min(history_indexes, default=0)
    added_ids: set[int] = set()
    for index, content in enumerate(history.contents):
        if index in history_indexes:
            continue
        if index < first_index:
            return []
        added_ids.add(id(content))

    # A summary in `turn.contents` shifts the indexes, but the added contents are still
    # the same objects. They are not found by equality, because an added content may
    # equal a message of the history.
    return [content for content in turn.contents if id(content) not in added_ids]


async def write_in_place(
    task: SummaryTask, model: SummaryModel, conversation: LlmRequest
) -> str:
    """Asks the agent's model for a summary at the end of its own conversation.

    Args:
        task: The budget of the summary, and what it should keep.
        model: The agent's own model.
        conversation: The agent's request.

    Returns:
        The summary; "" if beside conversation and question the window has no room for
        `LEAST_IN_PLACE_RATIO` of the budget.

    Raises:
        SummaryError: The model has written no summary.
    """
    output = model.divide_output(task.budget_tokens, model.config)

    def write_prompt(text_tokens: int) -> str:
        return closing_prompt(text_tokens, model.instruction, task.briefs, task.focus)

    count = token_counter(task.correction or DEFAULT_CORRECTION)
    prompt_tokens = count(write_prompt(output.text_tokens))
    room_tokens = model.window_tokens - task.conversation_tokens - prompt_tokens

    # Thoughts rarely take all that they may take, so room for a quarter of them is
    # enough. But the tokens that the agent's request asks for must have room.
    asked_tokens = thinking_tokens(model.llm, model.config)
    least_thought_tokens = max(asked_tokens, output.thought_tokens // 4)
    # A summary that is a little shorter costs less than a transcript in a new prompt.
    text_tokens = min(output.text_tokens, room_tokens - least_thought_tokens)
    if text_tokens < LEAST_IN_PLACE_RATIO * output.text_tokens:
        return ""

    prompt = write_prompt(text_tokens)
    output_tokens = min(text_tokens + output.thought_tokens, room_tokens)
    answer = await ask_in_place(model, conversation, prompt, text_tokens, output_tokens)

    # The model may go on with the conversation instead, for example with "You're
    # welcome!". The guard's own instruction asks for headings, so a short answer
    # without headings is no summary. Another instruction may ask for anything.
    is_short = count(answer.text) < SMALL_TALK_RATIO * text_tokens
    has_heading = "#" in answer.text
    if model.has_own_form and is_short and not has_heading:
        raise UnusableAnswerError("the answer is no summary")

    fitting = replace(task, budget_tokens=text_tokens)
    return fitting.clip(answer)


def write_mechanical_summary(
    entries: Sequence[Entry],
    previous_summary: str,
    budget_tokens: int,
    count: TokenCounter,
) -> str:
    """Writes a summary without a model: the previous summary, then excerpts.

    Args:
        entries: The transcript of the messages of which excerpts are taken.
        previous_summary: The summary that a model wrote; "" for none.
        budget_tokens: The most that the excerpts may take.
        count: Counts the tokens of a text.
    """
    excerpts = [entry.text for entry in fit_entries(entries, budget_tokens, count)]
    if not previous_summary:
        return "\n".join(excerpts)
    return "\n".join([previous_summary, EXCERPTS, *excerpts])


def count_excerpted(turn: Turn, candidates: Sequence[int], excerpts_tokens: int) -> int:
    """Returns how many candidates, from the oldest on, are replaced by excerpts.

    The newest candidates stay word for word, as far as they have room beside the
    excerpts. At least the oldest candidate is replaced, and no call is parted from its
    result. The result is 0 if there are no candidates.

    Args:
        turn: The model call.
        candidates: Indexes of messages that no model has summarized, oldest first.
        excerpts_tokens: The most that the excerpts may take.
    """
    stays_ratio = STAYS_RATIO
    if turn.settings.summaries == "stored":
        stays_ratio = STAYS_RATIO_WITHOUT_MODEL
    most_staying_tokens = int(turn.budgets.threshold_tokens * stays_ratio)

    # A model's previous summary and the sections beside it are expected to take as much
    # as the excerpts.
    previous_tokens = excerpts_tokens
    # The text of a section with a `held_ratio` may be long, so it has room of its own.
    held_ratio = sum(section.held_ratio for section in _sections.SECTIONS)
    held_tokens = int(turn.budgets.working_tokens * held_ratio)
    taken_tokens = turn.fixed_tokens + excerpts_tokens + previous_tokens + held_tokens
    free_tokens = turn.limit_tokens - taken_tokens
    # The kept steps stay in any case, so the candidates get the rest of the room.
    room_tokens = min(most_staying_tokens, free_tokens) - turn.kept.tokens

    # The loop leaves out the oldest candidate: a compaction has to replace something.
    contents = [turn.history.shown[index] for index in candidates]
    memo = turn.history.memo
    replaced_count = len(contents)
    staying_tokens = 0
    for content in reversed(contents[1:]):
        # Each estimate is rounded up.
        staying_tokens += int(memo.estimate_tokens([content]) * turn.correction + 1)
        if staying_tokens > room_tokens:
            break
        replaced_count -= 1

    # The last item of `may_split_before` is for a split after the last content. This
    # item is always True, so the loop ends.
    may_split_before = pair_boundaries(contents)
    while not may_split_before[replaced_count]:
        replaced_count += 1
    return replaced_count


def is_overflow(error: SummaryError) -> bool:
    """Whether a summary failed because the provider found its prompt too long."""
    return error.__cause__ is not None and parse_overflow(error.__cause__) is not None
