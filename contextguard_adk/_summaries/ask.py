"""Has the summaries of one compaction written, and counts the costs.

A model writes a summary from a transcript or in place: then the question stands at the
end of the agent's own conversation, which a prompt cache serves. Without a model the
summary is mechanical: it is made of excerpts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from contextguard_adk import _sections
from contextguard_adk._history.stored import Draft
from contextguard_adk._providers.calling import is_transient, name_error
from contextguard_adk._providers.clients import answers_freely, find_llm
from contextguard_adk._providers.costs import price_calls
from contextguard_adk._providers.registry import resolve_costs
from contextguard_adk._runtime.memory import AgentMemory
from contextguard_adk._runtime.runs import Guard
from contextguard_adk._summaries import compose
from contextguard_adk._summaries.model import (
    SummaryModel,
    describe_model,
    find_summarizer,
)
from contextguard_adk._summaries.write import (
    SummaryTask,
    count_excerpted,
    find_conversation,
    is_overflow,
    render_messages,
    write_from_transcript,
    write_in_place,
    write_mechanical_summary,
)
from contextguard_adk._turn.facts import Outcome
from contextguard_adk._turn.turn import Turn
from contextguard_adk.errors import SummaryError, UnusableAnswerError
from contextguard_adk.records import Usage

logger = logging.getLogger("contextguard_adk.summarizer")

_LEAST_CACHED_RATIO = 0.5
"""From this part of the last prompt on, a prompt cache is worth a question in place."""

_EXCERPTS_RATIO = 0.20
"""The part of the threshold that excerpts may take."""

_MOST_WAITED_TENTHS = 5
"""A failing summarizer is left alone for at most this many tenths of the window.

This is about the distance of two compactions.
"""


@dataclass(frozen=True)
class Failed:
    """The failures of a summarizer in a row.

    Attributes:
        model: The name of the model; "" if it has not failed.
        count: How often it has failed in a row. An answer that is no summary counts as
            two failures, because such a model was asked twice.
        newest: The name of the newest message at the last failure, which
            `History.name_content` gives it.
    """

    model: str = ""
    count: int = 0
    newest: str = ""


@dataclass(frozen=True)
class InPlace:
    """Whether the agent's model has proved unable to write summaries in place."""

    is_useless: bool = False


class Ask:
    """Has the summaries of one compaction written, and measures the result.

    Attributes:
        attempts: How many summaries were written, those without a model included.
        failures: The errors of the summarizer, newest last.
    """

    def __init__(self, turn: Turn, agent: object, memory: AgentMemory, guard: Guard):
        self.attempts = 0
        self.failures: list[SummaryError] = []
        # A strategy may pass a copy of this turn to a method, with another `keep_count`
        # or `reason`.
        self._turn = turn
        self._agent = agent
        self._memory = memory
        self._guard = guard
        # The model is chosen when the first summary is asked for. It may be None.
        self._has_chosen_model = False
        self._model: SummaryModel | None = None

    async def summarize(
        self, turn: Turn, covered: frozenset[int], budget_tokens: int | None = None
    ) -> Draft:
        """Has messages summarized, or takes excerpts of them; it raises no error.

        Args:
            turn: The model call.
            covered: Indexes of the messages, as `Turn.older_than` returns them.
            budget_tokens: The most that the summary may take; None or 0 for the usual
                budget.

        Returns:
            A draft, whose text is made of excerpts if no model writes a summary.
        """
        self.attempts += 1
        # The model has not seen the pending results, so they stay.
        replaced = turn.with_summarized(covered - turn.kept.pending)
        if not budget_tokens:
            budget_tokens = compose.summary_tokens(turn, replaced)
        text = await self._write(turn, replaced, budget_tokens)
        if not text:
            return _summarize_mechanically(turn, replaced)

        draft = Draft(
            text, replaced, replaced, model_chars=len(text), reason=turn.reason
        )
        return _shorten_kept(turn, draft)

    async def summarize_all(self, turn: Turn) -> Draft | None:
        """Summarizes all messages but the kept ones.

        While the request does not fit, the summary is written again, with half of the
        budget each time. `max_compaction_attempts` limits the number of all summaries
        of this compaction.

        Returns:
            The draft. If a model has summarized all these messages before, it is the
            stored summary with shorter results beside it, or None if there is nothing
            to shorten.
        """
        covered = turn.older_than(0)
        has_new_messages = bool(covered - turn.history.model_covered)
        if not has_new_messages:
            return _shorten_kept_only(turn)

        draft = await self.summarize(turn, covered)
        budget_tokens = turn.summary_tokens // 2
        most_attempts = turn.settings.max_compaction_attempts
        while self.attempts < most_attempts and _may_help(turn, draft, budget_tokens):
            draft = await self.summarize(turn, covered, budget_tokens)
            budget_tokens //= 2
        return compose.squeeze(turn, draft).draft

    def outcome(self, turn: Turn, draft: Draft) -> Outcome:
        """Returns the request with a draft in place, and its estimate."""
        return compose.compose(turn, draft)

    def _choose_model(self) -> SummaryModel | None:
        """Chooses the model that writes the summaries of this compaction.

        Returns:
            The model of the setting `summarizer`, else the agent's own. None if there
            is no model, if settings forbid to ask it, or if it has failed too often to
            be asked again yet.
        """
        settings = self._turn.settings
        if settings.summaries == "stored":
            return None

        agents_llm = find_llm(self._agent)
        llm = find_summarizer(settings.summarizer) or agents_llm
        if llm is None or self._is_left_alone(llm.model):
            return None
        is_agents_own = llm is agents_llm
        return describe_model(self._turn, llm, is_agents_own, self._guard.registry)

    def _is_left_alone(self, model: str) -> bool:
        """Whether a model has failed too often to be asked again yet.

        After two failures in a row it is left alone until the messages since the last
        one take a tenth of the window. Each further failure adds a tenth, up to half of
        the window.
        """
        failed = self._memory.facts.unit(Failed)
        if failed.model != model or failed.count < 2:
            return False

        history = self._turn.history
        newest_index = history.find_named(failed.newest)
        messages_since = history.contents[newest_index + 1 :]
        waited_tenths = min(failed.count - 1, _MOST_WAITED_TENTHS)
        wait_tokens = self._turn.budgets.window_tokens * waited_tenths // 10
        return self._turn.measure_alone(messages_since) < wait_tokens

    @property
    def may_recover(self) -> bool:
        """Whether no model has written a summary now, but one may do so soon.

        That is so if a model has failed, or was not asked because it had failed before.
        A model that used up its time does not count: it might do so on each call.
        """
        if self._turn.settings.summaries == "stored":
            return False
        if self.failures:
            is_timeout = isinstance(self.failures[-1].__cause__, TimeoutError)
            return not is_timeout
        return self._has_chosen_model and self._model is None

    def end(self) -> dict[str, Any]:
        """Stores the compaction's costs and failures; returns the fields of its record.

        It is called once, at the end of the compaction: each call adds the costs to
        those of the agent.
        """
        if self._model is None:
            name = ""
            usage = Usage()
            cost: float | None = 0.0
        else:
            name = self._model.llm.model
            usage = sum(self._model.usages, Usage())
            stated_prices = self._guard.settings.prices
            prices = resolve_costs(name, stated_prices, self._guard.registry)
            cost = price_calls(self._model.usages, prices)  # None if it is unknown.
            # A success ends the row of failures.
            failed = self._count_failures(name) if self.failures else Failed()
            self._memory.remember_unit(failed)
        self._memory.add_summary_costs(usage, cost)

        if self.failures:
            first_error = self.failures[0]
            failure = name_error(first_error.__cause__ or first_error)
        elif self._has_chosen_model and self._model is None:
            failure = "not_asked"
        else:
            failure = ""
        return {
            "model": name,
            "failure": failure,
            "usage": usage,
            "cost": cost,
            "attempts": self.attempts,
        }

    def _count_failures(self, model: str) -> Failed:
        """Returns the failures of a model in a row, with those of this compaction."""
        count = 0
        for error in self.failures:
            # A model was asked twice if its answer was no summary, but not if a filter
            # of the provider ended the answer.
            was_asked_twice = (
                isinstance(error, UnusableAnswerError) and not error.is_blocked
            )
            count += 2 if was_asked_twice else 1

        earlier = self._memory.facts.unit(Failed)
        if earlier.model == model:
            count += earlier.count
        history = self._turn.history
        newest_index = max(history.indexes, default=-1)
        return Failed(model, count, history.name_content(newest_index))

    async def _write(
        self, turn: Turn, covered: frozenset[int], budget_tokens: int
    ) -> str:
        """Has a model write a summary, in place or from a transcript.

        Returns "" if there is no model to ask, or if it fails. The failure is added to
        `failures`.
        """
        # After a failure, another try would only cost the timeout once more.
        if self.failures:
            return ""

        if not self._has_chosen_model:
            self._model = self._choose_model()
            self._has_chosen_model = True
        model = self._model
        if model is None:
            return ""

        task = _describe_task(turn, covered, budget_tokens)
        # After an overflow, the conversation does not fit even without a question.
        fits_in_place = turn.reason != "overflow"
        try:
            if fits_in_place and self._is_in_place_wanted(model):
                read_indexes = covered | turn.kept.indexes
                text = await self._write_in_place(turn, task, read_indexes, model)
                if text:
                    return text
            return await write_from_transcript(task, model)
        except SummaryError as error:
            self.failures.append(error)
            logger.warning(
                "The summarizer of agent %r, %r, failed (%s); excerpts take the place "
                "of its summary where the window is nearly full; %s.",
                turn.agent,
                model.llm.model,
                error,
                turn.origin.place,
            )
            return ""

    def _is_in_place_wanted(self, model: SummaryModel) -> bool:
        """Whether to ask for the summary in place. All of these have to hold:

        - The model is the agent's own.
        - Nothing has to be redacted: in place the conversation is sent as it is.
        - A prompt cache is used, by the setting or as the provider's counts show.
        - The model has not proved unable to write summaries in place.
        - The agent's request lets the model answer with free text.
        """
        if not model.is_agents_own or self._turn.history.redactor:
            return False

        facts = self._memory.facts
        setting = self._turn.settings.reuse_prompt_cache
        if isinstance(setting, bool):
            uses_cache = setting
        else:
            uses_cache = facts.cached_ratio >= _LEAST_CACHED_RATIO
        if not uses_cache or facts.unit(InPlace).is_useless:
            return False

        request = self._turn.request
        is_text = request.config.response_mime_type in (None, "text/plain")
        has_stops = bool(request.config.stop_sequences)
        return is_text and not has_stops and answers_freely(request, self._agent)

    async def _write_in_place(
        self,
        turn: Turn,
        task: SummaryTask,
        read_indexes: Collection[int],
        model: SummaryModel,
    ) -> str:
        """Asks for the summary in place.

        Args:
            turn: The model call.
            task: The text to summarize, and the budget of the summary.
            read_indexes: The indexes of the messages that the model is to read.
            model: The agent's own model.

        Returns:
            The summary; "" if a transcript is to be tried.

        Raises:
            SummaryError: The provider is down, so that a transcript would fail as well.
        """
        contents = find_conversation(turn, read_indexes)
        if not contents:
            return ""

        update = {"contents": contents, "config": turn.config}
        conversation = self._turn.request.model_copy(update=update)
        try:
            return await write_in_place(task, model, conversation)
        except SummaryError as error:
            is_down = error.__cause__ is not None and is_transient(error.__cause__)
            if is_down:
                raise
            # A later try would end in the same way.
            if isinstance(error, UnusableAnswerError) or is_overflow(error):
                self._memory.remember_unit(InPlace(is_useless=True))
            logger.info(
                "The model wrote no summary at the end of the conversation (%s); it is "
                "asked again with a transcript.",
                error,
            )
            return ""


def _shorten_kept_only(turn: Turn) -> Draft | None:
    """Returns the stored summary with shorter results of the kept steps beside it.

    Returns None if there is no summary, or if no result is too large to stay.
    """
    if turn.history.stored is None or turn.kept.truncation is None:
        return None
    with_whole_results = replace(turn.draft, truncation=None, truncated_upto=-1)
    return compose.squeeze(turn, _shorten_kept(turn, with_whole_results)).draft


def _may_help(turn: Turn, draft: Draft, budget_tokens: int) -> bool:
    """Whether the request does not fit, but could with a summary of `budget_tokens`."""
    outcome = compose.compose(turn, draft)
    if outcome.tokens <= turn.limit_tokens:
        return False
    # Another try would not make excerpts shorter.
    if draft.is_mechanical:
        return False

    text_tokens = turn.count(draft.text)
    other_tokens = outcome.tokens - text_tokens
    can_be_shorter = text_tokens > budget_tokens
    leaves_room = other_tokens < turn.limit_tokens
    return can_be_shorter and leaves_room


def _describe_task(
    turn: Turn, covered: frozenset[int], budget_tokens: int
) -> SummaryTask:
    """Describes the summary that a model is asked for.

    Args:
        turn: The model call.
        covered: Indexes of the messages that the summary replaces.
        budget_tokens: The most that the summary may take.
    """
    history = turn.history
    redact = history.redactor.redact_text
    previous = history.stored.model_text if history.stored else ""
    new_indexes = sorted(covered - history.model_covered)
    if turn.kept.truncation is not None:
        # The agent will see only a part of the kept results. So the summary tells of
        # them as well.
        new_indexes += sorted(turn.kept.indexes)

    # The first message of the user is the task, without which the current request may
    # make no sense.
    first_messages = history.user_messages[:1]
    required_indexes = {*first_messages, history.request_index}
    briefs = {}
    for section in _sections.SECTIONS:
        if section.is_briefed:
            briefs[section.name] = redact(section.brief(turn))
    return SummaryTask(
        entries=render_messages(turn, new_indexes, required_indexes),
        previous_summary=redact(previous),
        live_request=redact(turn.request_text),
        briefs=briefs,
        budget_tokens=budget_tokens,
        correction=turn.size.correction,
        focus=redact(turn.focus),
        conversation_tokens=turn.tokens,
    )


def _summarize_mechanically(turn: Turn, covered: frozenset[int]) -> Draft:
    """Puts excerpts of messages after the model's last summary.

    The newest of the covered messages stay as far as they have room. But if the reason
    for the compaction is the number of messages, none of them stay.
    """
    summarized = turn.history.model_covered
    candidates = sorted(covered - summarized)
    budget_tokens = int(turn.budgets.threshold_tokens * _EXCERPTS_RATIO)
    if turn.reason == "turns":
        replaced_count = len(candidates)
    else:
        replaced_count = count_excerpted(turn, candidates, budget_tokens)

    replaced = turn.with_summarized(candidates[:replaced_count])
    excerpted = sorted(replaced - summarized)
    stored = turn.history.stored
    previous = stored.model_text if stored else ""
    entries = render_messages(turn, excerpted)
    text = write_mechanical_summary(entries, previous, budget_tokens, turn.count)
    draft = Draft(
        text, replaced, summarized, model_chars=len(previous), reason=turn.reason
    )
    return _shorten_kept(turn, draft)


def _shorten_kept(turn: Turn, draft: Draft) -> Draft:
    """Has the draft shorten the results of kept steps that are too large to stay."""
    kept = turn.kept
    has_large_results = kept.truncation is not None
    are_covered = not kept.indexes.isdisjoint(draft.covered)
    if not has_large_results or are_covered:
        return draft
    return replace(draft, truncation=kept.truncation, truncated_upto=max(kept.indexes))
