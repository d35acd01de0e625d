"""Has the summaries of one compaction written, and counts the costs."""

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
    find_conversation,
    find_mechanical_end,
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


@dataclass(frozen=True)
class Failed:
    """The failures of a summarizer in a row.

    Attributes:
        model: The name of the model; "" if it has not failed.
        count: How often it has failed in a row. A useless answer counts as two.
        newest: The newest message at the last failure, as `History.name_content` names
            it.
    """

    model: str = ""
    count: int = 0
    newest: str = ""


@dataclass(frozen=True)
class InPlace:
    """Whether summaries at the end of the conversation have proved to be useless."""

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
        self._turn = turn
        self._agent = agent
        self._memory = memory
        self._guard = guard
        self._is_model_wanted = False  # Whether a summary was to be written by one.
        self._model: SummaryModel | None = None

    async def summarize(
        self, turn: Turn, covered: frozenset[int], budget_tokens: int | None = None
    ) -> Draft:
        """Has messages summarized, or takes excerpts of them; it raises no error.

        Args:
            turn: The model call.
            covered: Indexes of the messages, as `Turn.older_than` returns them.
            budget_tokens: The most that the summary may take; None for the usual
                budget.

        Returns:
            A draft, whose text is made of excerpts where no model gives a summary.
        """
        self.attempts += 1
        whole = turn.whole(covered - turn.kept.pending)
        most_tokens = budget_tokens or compose.summary_tokens(turn, whole)
        text = await self._write(turn, whole, most_tokens)
        if not text:
            return _summarize_mechanically(turn, whole)

        draft = Draft(text, whole, whole, model_chars=len(text), reason=turn.reason)
        return _shorten_kept(turn, draft)

    async def summarize_all(self, turn: Turn) -> Draft | None:
        """Summarizes all messages that may be, ever shorter until the request fits.

        At least one summary is written. More are written while all summaries of this
        compaction are fewer than `max_compaction_attempts`, and a shorter one may help.

        Returns:
            The draft. If a model has summarized all these messages before, it is the
            stored summary with shorter results beside it, or None if there is nothing
            to shorten.
        """
        covered = turn.older_than(0)
        if not covered - turn.history.model_covered:
            return _shorten_kept_only(turn)

        budget_tokens = turn.summary_tokens // 2
        most_attempts = turn.settings.max_compaction_attempts
        draft = await self.summarize(turn, covered)
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
            None if there is no model, if settings forbid to ask it, or if it has failed
            too often to be asked again yet.
        """
        settings = self._turn.settings
        if settings.summaries == "stored":
            return None

        own = find_llm(self._agent)
        llm = find_summarizer(settings.summarizer) or own
        if llm is None or self._is_left_alone(llm.model):
            return None
        return describe_model(self._turn, llm, llm is own, self._guard.registry)

    def _is_left_alone(self, model: str) -> bool:
        """Whether a model has failed too often to be asked again yet.

        After two failures in a row it is left alone until new messages take a tenth of
        the window. Each further failure adds a tenth, up to half of the window: this is
        about the distance of two compactions.
        """
        failed = self._memory.facts.unit(Failed)
        if failed.model != model or failed.count < 2:
            return False

        history = self._turn.history
        newest_index = history.find_named(failed.newest)
        new = history.contents[newest_index + 1 :]
        tenths = min(failed.count - 1, 5)
        wait_tokens = self._turn.budgets.window_tokens * tenths // 10
        return self._turn.measure_alone(new) < wait_tokens

    @property
    def may_recover(self) -> bool:
        """Whether no model has written a summary now, but one may do so soon.

        A model that lets its time run out would cost that time again on each call.
        """
        if self._turn.settings.summaries == "stored":
            return False
        if self.failures:
            return not isinstance(self.failures[-1].__cause__, TimeoutError)
        return self._is_model_wanted and self._model is None

    def end(self) -> dict[str, Any]:
        """Keeps the compaction's costs and failures; returns the fields of its record.

        It is called once for a compaction, at its end: a second call would add the
        costs to those of the agent again.
        """
        name = ""
        usage = Usage()
        cost: float | None = 0.0  # None stands for an unknown price.
        if self._model is not None:
            name = self._model.llm.model
            usages = self._model.usages
            usage = sum(usages, Usage())
            stated_prices = self._guard.settings.prices
            prices = resolve_costs(name, stated_prices, self._guard.registry)
            cost = price_calls(usages, prices)
            self._memory.keep(self._count_failures(name))
        self._memory.add_summary_costs(usage, cost)

        failure = ""
        if self.failures:
            first = self.failures[0]
            failure = name_error(first.__cause__ or first)
        elif self._is_model_wanted and self._model is None:
            failure = "not_asked"
        return {
            "model": name,
            "failure": failure,
            "usage": usage,
            "cost": cost,
            "attempts": self.attempts,
        }

    def _count_failures(self, model: str) -> Failed:
        """Returns the failures of a model in a row, with those of this compaction.

        A model that has not failed now has succeeded: this ends the row.
        """
        count = 0
        for error in self.failures:
            # A model whose answer was no summary was asked twice.
            if isinstance(error, UnusableAnswerError) and not error.is_blocked:
                count += 2
            else:
                count += 1

        if not count:
            return Failed()

        failed = self._memory.facts.unit(Failed)
        if failed.model == model:
            count += failed.count
        history = self._turn.history
        newest = history.name_content(max(history.indexes, default=-1))
        return Failed(model, count, newest)

    async def _write(
        self, turn: Turn, covered: frozenset[int], budget_tokens: int
    ) -> str:
        """Has a summary written, in place or from a transcript.

        The result is "" where no model is asked, or where it fails.
        """
        # After a failure, another try would only cost the timeout once more.
        if self.failures:
            return ""
        if not self._is_model_wanted:
            self._model = self._choose_model()
            self._is_model_wanted = True
        model = self._model
        if model is None:
            return ""

        task = _describe_task(turn, covered, budget_tokens)
        try:
            text = ""
            if turn.reason != "overflow" and self._is_in_place_wanted(model):
                summarized = covered | turn.kept.indexes
                text = await self._write_in_place(turn, task, summarized, model)
            return text or await write_from_transcript(task, model)
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
        """Whether to ask at the end of the conversation itself.

        - The model is the agent's own, and nothing has to be redacted.
        - A prompt cache is used: by the setting, or as the provider's counts show.
        - Such summaries have not proved to be useless.
        - The agent's request lets the model answer with free text.
        """
        # The conversation itself would be sent, with the texts that are to be redacted.
        if not model.is_agents_own or self._turn.history.redactor:
            return False

        setting = self._turn.settings.reuse_prompt_cache
        facts = self._memory.facts
        has_cache = setting is True or facts.cached_ratio >= 0.5
        if not (setting and has_cache) or facts.unit(InPlace).is_useless:
            return False

        request = self._turn.request
        config = request.config
        is_text = config.response_mime_type in (None, "text/plain")
        is_plain = is_text and not config.stop_sequences
        return is_plain and answers_freely(request, self._agent)

    async def _write_in_place(
        self,
        turn: Turn,
        task: SummaryTask,
        summarized: Collection[int],
        model: SummaryModel,
    ) -> str:
        """Asks at the end of the conversation; "" where that is not possible."""
        contents = find_conversation(turn, summarized)
        if not contents:
            return ""

        update = {"contents": contents, "config": turn.config}
        conversation = self._turn.request.model_copy(update=update)
        try:
            return await write_in_place(task, model, conversation)
        except SummaryError as error:
            # A provider that is down now will not read a transcript either.
            if error.__cause__ is not None and is_transient(error.__cause__):
                raise
            # Neither an answer that is no summary nor a lack of room will change.
            if isinstance(error, UnusableAnswerError) or is_overflow(error):
                self._memory.keep(InPlace(is_useless=True))
            logger.info(
                "The model wrote no summary at the end of the conversation (%s); it is "
                "asked again with a transcript.",
                error,
            )
            return ""


def _shorten_kept_only(turn: Turn) -> Draft | None:
    """Returns the stored summary with shorter results of the newest steps beside it.

    None if there is no summary, or no result to shorten.
    """
    if turn.history.stored is None or turn.kept.truncation is None:
        return None
    known = replace(turn.draft, truncation=None, truncated_upto=-1)
    return compose.squeeze(turn, _shorten_kept(turn, known)).draft


def _may_help(turn: Turn, draft: Draft, budget_tokens: int) -> bool:
    """Whether the request does not fit, but could with a summary of `budget_tokens`.

    Excerpts that stand for a summary do not become shorter by another try.
    """
    outcome = compose.compose(turn, draft)
    if outcome.tokens <= turn.limit_tokens or draft.is_mechanical:
        return False

    text_tokens = turn.count(draft.text)
    other_tokens = outcome.tokens - text_tokens
    return text_tokens > budget_tokens and other_tokens < turn.limit_tokens


def _describe_task(
    turn: Turn, covered: frozenset[int], budget_tokens: int
) -> SummaryTask:
    history = turn.history
    redact = history.redactor.redact_text
    known = history.stored.model_text if history.stored else ""
    new = sorted(covered - turn.history.model_covered)
    if turn.kept.truncation:
        new += sorted(turn.kept.indexes)  # The agent is shown only a part of them.

    # The first message of the user is the task, and may lead to the newest one.
    always = {*history.user_messages[:1], history.request_index}
    briefs = {}
    for section in _sections.SECTIONS:
        if section.is_briefed:
            briefs[section.name] = redact(section.brief(turn))
    return SummaryTask(
        entries=render_messages(turn, new, always),
        previous_summary=redact(known),
        live_request=redact(turn.request_text),
        briefs=briefs,
        budget_tokens=budget_tokens,
        correction=turn.size.correction,
        focus=redact(turn.focus),
        conversation_tokens=turn.tokens,
    )


def _summarize_mechanically(turn: Turn, covered: frozenset[int]) -> Draft:
    """Puts excerpts of as few messages as possible after the model's last summary."""
    summarized = turn.history.model_covered
    new = sorted(covered - summarized)
    budget_tokens = int(turn.budgets.threshold_tokens * 0.20)
    if turn.reason != "turns":
        new = new[: find_mechanical_end(turn, new, budget_tokens)]

    whole = turn.whole(new)
    stored = turn.history.stored
    previous = stored.model_text if stored else ""
    entries = render_messages(turn, [i for i in new if i in whole])
    text = write_mechanical_summary(entries, previous, budget_tokens, turn.count)
    draft = Draft(
        text, whole, summarized, model_chars=len(previous), reason=turn.reason
    )
    return _shorten_kept(turn, draft)


def _shorten_kept(turn: Turn, draft: Draft) -> Draft:
    """Shortens the results of the newest steps where they are too large to stay."""
    kept = turn.kept
    if kept.truncation is None or not kept.indexes.isdisjoint(draft.covered):
        return draft
    return replace(draft, truncation=kept.truncation, truncated_upto=max(kept.indexes))
