"""Has the summaries of one compaction written, and counts the costs.

There are three ways to write a summary:

- From a transcript: a model reads the messages as a text in a prompt of its own.
- In place: the agent's model reads its own conversation, with a question for a summary
  at the end. A prompt cache may have this conversation already.
- Mechanically: excerpts of the messages are taken, and no model is asked.

A message is covered if a summary of any kind replaces it, and summarized if a model
wrote that summary. Kept messages are those of `Turn.kept`, which stay word for word.
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
from contextguard_adk._providers.costs import Costs, price_calls
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
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.facts import Outcome
from contextguard_adk._turn.turn import Turn
from contextguard_adk.errors import SummaryError, UnusableAnswerError
from contextguard_adk.records import Usage

logger = logging.getLogger("contextguard_adk.summarizer")

_LEAST_CACHED_RATIO = 0.5
"""A summary is asked for in place if a cache had this part of the last prompt."""

_EXCERPTS_RATIO = 0.20
"""The excerpts of one summary may take this part of the threshold."""

_MOST_WAITED_TENTHS = 5
"""A failing summarizer is asked again at the latest after this much new history.

The figure is in tenths of the window. About as much comes between two compactions.
"""


@dataclass(frozen=True)
class Failed:
    """The failures of a summarizer in a row.

    Attributes:
        model: The name of the model; "" if it has not failed.
        count: How often it has failed in a row. An answer that is no summary counts as
            two failures, because such a model was asked twice.
        newest: The name of the newest message at the last failure, as
            `History.name_content` returns it; "" if there was no message.
    """

    model: str = ""
    count: int = 0
    newest: str = ""


@dataclass(frozen=True)
class InPlace:
    """Whether the agent's model has proved unable to write summaries in place."""

    is_useless: bool = False


@dataclass(frozen=True)
class Refused:
    """Whether the user has refused a summary that was written ahead of time.

    The next compaction takes excerpts, and asks neither a model nor the user.
    """

    is_pending: bool = False


class Ask:
    """Has the summaries of one compaction written, and measures the result.

    Attributes:
        attempts: How many summaries were asked for. Mechanical ones count as well.
        failures: The error of the summarizer, or nothing. After a failure, the
            summarizer is not asked again in this compaction.
        has_written: Whether a model has written a summary in this compaction.
        is_refused: Whether the user has refused what a model has written.
        is_ahead: Whether the summary is written before it is due.
    """

    def __init__(
        self,
        turn: Turn,
        agent: object,
        memory: AgentMemory,
        guard: Guard,
        is_ahead: bool = False,
    ):
        """Begins the summaries of a compaction.

        Args:
            turn: The model call.
            agent: ADK's agent, whose model writes summaries unless another one is set.
            memory: The memory of the agent.
            guard: The memory of the plugin.
            is_ahead: Whether the summary is written before it is due.
        """
        self.attempts = 0
        self.is_ahead = is_ahead
        self.failures: list[SummaryError] = []
        self.has_written = False
        self.is_refused = False

        # A strategy may call a method with a copy of this turn that has, for example,
        # another `keep_count`. So these methods have an argument `turn`.
        self._turn = turn
        self._agent = agent
        self._memory = memory
        self._guard = guard
        # The model is chosen when the first summary is asked for. The choice may be to
        # ask no model.
        self._is_choice_made = False
        self._model: SummaryModel | None = None

    async def summarize(
        self, turn: Turn, covered: frozenset[int], budget_tokens: int | None = None
    ) -> Draft:
        """Has messages summarized, or takes excerpts of them. Raises no error.

        Args:
            turn: The model call.
            covered: Indexes of the messages, as `Turn.older_than` returns them.
            budget_tokens: The most that the summary may take; None or 0 for the usual
                budget.

        Returns:
            A draft whose text is the summary of a model. If no model has written one,
            the text is a model's last summary, followed by excerpts, and the newest
            messages of `covered` may stay.
        """
        self.attempts += 1
        # The pending results stay, because the agent's model has not seen them.
        replaced = turn.whole(covered - turn.kept.pending)
        if not budget_tokens:
            budget_tokens = compose.summary_tokens(turn, replaced)
        text = await self._write(turn, replaced, budget_tokens)
        if not text:
            return _summarize_mechanically(turn, replaced)

        self.has_written = True
        draft = Draft(
            text,
            covered=replaced,
            model_covered=replaced,
            model_chars=len(text),
            reason=turn.reason,
        )
        return _shorten_kept(turn, draft)

    async def summarize_all(self, turn: Turn) -> Draft | None:
        """Summarizes all messages but the kept ones.

        While the request does not fit, the summary is written again, with half of the
        budget each time. `max_compaction_attempts` limits the number of all summaries
        of this compaction.

        Returns:
            A draft with a new summary, if some of the messages are not summarized yet.
            If all are summarized, but kept results are too large, a draft with the
            stored summary and with shorter results beside it. None if there is nothing
            to shorten.
        """
        covered = turn.older_than(keep_count=0)
        has_new_messages = bool(covered - turn.history.model_covered)
        if not has_new_messages:
            return _shorten_kept_only(turn)

        draft = await self.summarize(turn, covered)
        budget_tokens = compose.summary_tokens(turn, draft.covered) // 2
        most_attempts = turn.settings.max_compaction_attempts
        while self.attempts < most_attempts:
            if not _needs_shorter_summary(turn, draft, budget_tokens):
                break
            draft = await self.summarize(turn, covered, budget_tokens)
            budget_tokens //= 2

        # `squeeze` shortens the draft if the request still does not fit.
        return compose.squeeze(turn, draft).draft

    def refuse(self, turn: Turn, draft: Draft) -> Draft:
        """Returns a draft of excerpts in place of one whose summary the user refuses.

        Args:
            turn: The model call.
            draft: The draft with the summary.
        """
        self.is_refused = True
        self._memory.remember_unit(Refused(is_pending=self.is_ahead))
        for_reason = replace(turn, reason=draft.reason)
        excerpts = _summarize_mechanically(for_reason, draft.covered)
        return compose.squeeze(turn, excerpts).draft

    @property
    def model_name(self) -> str:
        """The name of the model that was asked for summaries; "" if none was."""
        return "" if self._model is None else self._model.llm.model

    def outcome(self, turn: Turn, draft: Draft) -> Outcome:
        """Returns the request with a draft in place, and its estimate."""
        return compose.compose(turn, draft)

    def _choose_model(self) -> SummaryModel | None:
        """Chooses the model that writes the summaries of this compaction.

        This is the model of the setting `summarizer`, or the agent's own if the setting
        names none that ADK knows. The result is None in three cases:

        - If the setting `summaries` forbids new summaries.
        - If the user has refused the summary that was written ahead of time.
        - If the agent's own model is needed, but unknown.
        - If the model has failed too often to be asked again yet.
        """
        settings = self._turn.settings
        if settings.summaries == "stored":
            return None
        if self._memory.facts.unit(Refused).is_pending:
            self.is_refused = True
            # A summary that is due takes the excerpts; one ahead of time does not.
            self._memory.remember_unit(Refused(is_pending=self.is_ahead))
            return None

        agents_llm = find_llm(self._agent)
        llm = find_summarizer(settings.summarizer) or agents_llm
        if llm is None or self._is_left_alone(llm.model):
            return None
        is_agents_own = llm is agents_llm
        return describe_model(self._turn, llm, is_agents_own, self._guard.registry)

    def _is_left_alone(self, model: str) -> bool:
        """Whether a model has failed too often to be asked again yet.

        After two failures in a row, a model is not asked until the messages since the
        last failure take a tenth of the window. Each further failure adds a tenth, up
        to half of the window.
        """
        failed = self._memory.facts.unit(Failed)
        if failed.model != model or failed.count < 2:
            return False

        history = self._turn.history
        # The index is -1 if the message is gone. Then all messages count as newer.
        newest_index = history.find_named(failed.newest)
        messages_since = history.contents[newest_index + 1 :]
        waited_tenths = min(failed.count - 1, _MOST_WAITED_TENTHS)
        wait_tokens = self._turn.budgets.window_tokens * waited_tenths // 10
        return self._turn.measure_alone(messages_since) < wait_tokens

    @property
    def may_recover(self) -> bool:
        """Whether no model has written a summary now, but the next try may succeed.

        - If the setting `summaries` forbids new summaries: False.
        - If the user has refused the summary: False. The excerpts are wanted.
        - If a model was asked and failed: True, unless the model took too long. The
          next try might make the user wait for just as long.
        - If a summary was needed, but no model was asked: True. A model that has failed
          before may be asked again soon.
        - Otherwise: False.
        """
        if self._turn.settings.summaries == "stored" or self.is_refused:
            return False
        if self.failures:
            is_timeout = isinstance(self.failures[-1].__cause__, TimeoutError)
            return not is_timeout
        return self._is_choice_made and self._model is None

    def store_costs(self) -> dict[str, Any]:
        """Stores the costs and failures of this compaction in the agent's memory.

        It is called once, at the end of the compaction, because each call adds the
        costs to those of the agent.

        Returns:
            The fields of the `CompactionRecord` that tell about the summaries.
        """
        name = self.model_name
        if self._model is None:
            usage = Usage()
            cost: float | None = 0.0
        else:
            usage = sum(self._model.usages, Usage())
            stated_prices = self._guard.settings.prices
            prices = resolve_costs(name, stated_prices, self._guard.registry)
            # The cost is None if a price is unknown.
            cost = price_calls(self._model.usages, prices)
            self._count_spending(self._model, prices)
            # A success ends the row of failures.
            failed = self._count_failures(name) if self.failures else Failed()
            self._memory.remember_unit(failed)
        self._memory.add_summary_costs(usage, cost)

        if self.failures:
            first_error = self.failures[0]
            failure = name_error(first_error.__cause__ or first_error)
        elif self.is_refused:
            failure = "refused"
        elif self._is_choice_made and self._model is None:
            is_over_budget = self._memory.spending.is_over
            failure = "over_budget" if is_over_budget else "not_asked"
        else:
            failure = ""
        return {
            "model": name,
            "failure": failure,
            "usage": usage,
            "cost": cost,
            "attempts": self.attempts,
        }

    def _count_spending(self, model: SummaryModel, prices: Costs | None) -> None:
        """Counts the cost of this compaction for the budget, if there is one.

        A call whose usage is not reported counts nothing.

        Args:
            model: The model that was asked.
            prices: Its prices; None if they are unknown.
        """
        budget = self._guard.settings.summary_budget
        if budget is None:
            return
        if prices is None and budget.is_in_dollars:
            warn_once(
                logger,
                "No prices are known for model %r, so summary_budget does not count "
                "the dollars of its summaries. Set `prices`, or limit the tokens.",
                model.llm.model,
            )

        if self.has_written and sum(model.usages, Usage()) == Usage():
            warn_once(
                logger,
                "Model %r reports no usage, so summary_budget counts nothing for its "
                "summaries.",
                model.llm.model,
            )

        dollars = sum(prices.price(each) for each in model.usages) if prices else 0.0
        tokens = sum(each.prompt_tokens + each.output_tokens for each in model.usages)
        self._memory.spending.add(dollars, tokens, budget.period_hours)

    def _count_failures(self, model: str) -> Failed:
        """Returns the number of a model's failures in a row, this compaction included.

        The number is stored together with the newest message of the request.
        """
        count = 0
        for error in self.failures:
            # A model whose answer is no summary is asked once more, unless a filter of
            # the provider has ended the answer.
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

        Args:
            turn: The model call.
            covered: Indexes of the messages that the summary replaces.
            budget_tokens: The most that the summary may take.

        Returns:
            The summary; "" in three cases:

            - If there is no model to ask.
            - If the model has failed before in this compaction.
            - If the model fails now. The failure is added to `failures`.

            After "", the caller makes a draft of excerpts. The draft may stay unused:
            while the window has room, the compaction can wait, see `may_recover`.
        """
        # After a failure, another try would only cost the timeout once more.
        if self.failures:
            return ""

        if not self._is_choice_made:
            self._model = self._choose_model()
            self._is_choice_made = True
        model = self._model
        if model is None:
            return ""

        task = _describe_task(turn, covered, budget_tokens)
        # After an overflow, the conversation does not fit even without a question.
        fits_in_place = turn.reason != "overflow"
        try:
            if fits_in_place and self._is_in_place_wanted(model):
                # In place, the model also reads the messages that stay.
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
        - The setting `reuse_prompt_cache` is True. If it is "auto", a cache must have
          had enough of the agent's last prompt.
        - The model has not proved unable to write summaries in place.
        - The agent's request lets the model answer with free text of any length.
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
        # A stop sequence could end the summary in the middle.
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
            The summary; "" if the summary has to be asked for with a transcript.

        Raises:
            SummaryError: The provider is down, so that a transcript would fail as well.
        """
        contents = find_conversation(turn, read_indexes)
        if not contents:
            return ""

        # A cache serves only the contents and the config that the agent itself sends.
        update = {"contents": contents, "config": turn.config}
        conversation = self._turn.request.model_copy(update=update)
        try:
            return await write_in_place(task, model, conversation)
        except SummaryError as error:
            is_down = error.__cause__ is not None and is_transient(error.__cause__)
            if is_down:
                raise
            # A later question in place would end in the same way.
            if isinstance(error, UnusableAnswerError) or is_overflow(error):
                self._memory.remember_unit(InPlace(is_useless=True))
            logger.info(
                "The model wrote no summary at the end of the conversation (%s); it is "
                "asked again with a transcript.",
                error,
            )
            return ""


def _shorten_kept_only(turn: Turn) -> Draft | None:
    """Returns the stored summary as a draft that shortens results of the kept steps.

    Returns None if there is no summary, or if no kept result is too large to stay.
    """
    if turn.history.stored is None or turn.kept.truncation is None:
        return None
    # An earlier compaction may have shortened results in another way.
    with_whole_results = replace(turn.draft, truncation=None, truncated_upto=-1)
    return compose.squeeze(turn, _shorten_kept(turn, with_whole_results)).draft


def _needs_shorter_summary(turn: Turn, draft: Draft, budget_tokens: int) -> bool:
    """Whether a summary of `budget_tokens` is to be tried in place of a draft.

    All of these have to hold:

    - The request with the draft does not fit.
    - A model wrote the draft. Excerpts would not become shorter.
    - The summary in the draft takes more than `budget_tokens`.
    - The rest of the request leaves room for a summary.
    """
    outcome = compose.compose(turn, draft)
    if outcome.tokens <= turn.limit_tokens or draft.is_mechanical:
        return False

    text_tokens = turn.count(draft.text)
    rest_tokens = outcome.tokens - text_tokens
    return text_tokens > budget_tokens and rest_tokens < turn.limit_tokens


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
    rendered_indexes = sorted(covered - history.model_covered)
    if turn.kept.truncation is not None:
        # The agent will see only a part of the kept results. So the summary tells of
        # these results as well.
        rendered_indexes += sorted(turn.kept.indexes)

    # The first message of the user is the task, without which the current request may
    # make no sense.
    required_indexes = set(history.user_messages[:1])
    if history.request_index is not None:
        required_indexes.add(history.request_index)
    briefs = {}
    for section in _sections.SECTIONS:
        if section.is_briefed:
            briefs[section.name] = redact(section.brief(turn))
    return SummaryTask(
        entries=render_messages(turn, rendered_indexes, required_indexes),
        previous_summary=redact(previous),
        live_request=redact(turn.request_text),
        briefs=briefs,
        budget_tokens=budget_tokens,
        correction=turn.size.correction,
        focus=redact(turn.focus),
        conversation_tokens=turn.tokens,
    )


def _summarize_mechanically(turn: Turn, covered: frozenset[int]) -> Draft:
    """Puts excerpts of messages after a model's last summary, if there is one.

    Args:
        turn: The model call.
        covered: Indexes of the messages that may be replaced. The newest of these stay
            as far as they have room. But if the number of messages is the reason for
            the compaction, none of these stay.
    """
    summarized = turn.history.model_covered
    # Messages of which a stored summary has excerpts are excerpted anew.
    candidates = sorted(covered - summarized)
    excerpts_tokens = int(turn.budgets.threshold_tokens * _EXCERPTS_RATIO)
    if turn.reason == "turns":
        replaced_count = len(candidates)
    else:
        replaced_count = count_excerpted(turn, candidates, excerpts_tokens)

    replaced = turn.whole(candidates[:replaced_count])
    excerpted = sorted(replaced - summarized)
    stored = turn.history.stored
    previous = stored.model_text if stored else ""
    entries = render_messages(turn, excerpted)
    text = write_mechanical_summary(entries, previous, excerpts_tokens, turn.count)
    draft = Draft(
        text,
        covered=replaced,
        model_covered=summarized,
        model_chars=len(previous),
        reason=turn.reason,
    )
    return _shorten_kept(turn, draft)


def _shorten_kept(turn: Turn, draft: Draft) -> Draft:
    """Adds to a draft how the kept results are shortened that are too large to stay.

    Returns the draft itself if there are no such results, or if the draft covers some
    of the kept messages, as a strategy of the user's own may do.
    """
    kept = turn.kept
    has_large_results = kept.truncation is not None
    are_covered = not kept.indexes.isdisjoint(draft.covered)
    if not has_large_results or are_covered:
        return draft
    return replace(draft, truncation=kept.truncation, truncated_upto=max(kept.indexes))
