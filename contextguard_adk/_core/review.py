"""Shows a summary to the user's `after_summary` before it is used."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

from contextguard_adk._history.stored import MAX_SUMMARY_CHARS, Draft
from contextguard_adk._measuring.budgets import shorten_to_tokens
from contextguard_adk._runtime.runs import Guard
from contextguard_adk._summaries.ask import Ask
from contextguard_adk._summaries.compose import squeeze
from contextguard_adk._support.log import log_failures, warn_once
from contextguard_adk._turn.turn import Turn
from contextguard_adk.records import PlannedSummary

MOST_ANSWER_RATIO = 0.5
"""The most that a text of `after_summary` takes, as a part of `Turn.limit_tokens`."""

logger = logging.getLogger("contextguard_adk.call")


async def review_summary(guard: Guard, turn: Turn, ask: Ask, draft: Draft) -> Draft:
    """Returns a draft with the text that the user's `after_summary` wants.

    Args:
        guard: The memory of the plugin, with the user's functions.
        turn: The model call.
        ask: Through which the strategy has had the summary written.
        draft: The draft of the strategy.

    Returns:
        One of three drafts:
        - If the function returns a text: the draft with this text as its summary.
        - If the function returns False, or a text without any word: a draft of
          excerpts, which no model has written.
        - In all other cases the draft itself.
    """
    has_function = guard.observers.listeners.after_summary is not None
    if not has_function or not ask.has_written:
        return draft

    answer = await _call_user(guard, turn, ask, draft)
    if answer is None:
        return draft
    if answer is False or (isinstance(answer, str) and not answer.strip()):
        logger.info(
            "A summary of agent %r is refused; %s.", turn.agent, turn.origin.place
        )
        return ask.refuse(turn, draft)
    if not isinstance(answer, str):
        message = "after_summary returned %s, no str, False or None: ignored."
        warn_once(logger, message, type(answer).__name__)
        return draft

    most_tokens = MOST_ANSWER_RATIO * turn.limit_tokens
    text = shorten_to_tokens(answer[:MAX_SUMMARY_CHARS], most_tokens, turn.count)
    excerpts = draft.text[draft.model_chars :]
    changed = replace(draft, text=text + excerpts, model_chars=len(text))
    # The new text may be longer than the one that the strategy has measured.
    return squeeze(turn, changed).draft


async def _call_user(guard: Guard, turn: Turn, ask: Ask, draft: Draft) -> object:
    """Calls the user's `after_summary`, and returns its answer.

    The answer may be any value; it is None if the function fails or is late.
    """
    with log_failures(logger, "after_summary could not be asked"):
        new_indexes = sorted(draft.covered - turn.history.model_covered)
        # The function gets copies, because it may change them.
        messages = copy.deepcopy([turn.messages[index] for index in new_indexes])
        planned = PlannedSummary(
            **vars(turn.origin),
            text=draft.text[: draft.model_chars],
            messages=tuple(messages),
            model=ask.model_name,
            reason=draft.reason,
            summary_tokens=turn.summary_tokens,
            is_ahead=ask.is_ahead,
        )
        answer: object = await guard.observers.tell(planned)
        return answer

    # `log_failures` has caught an error.
    return None
