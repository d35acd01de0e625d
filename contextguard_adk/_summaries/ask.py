"""How a strategy has summaries written; counts what they take."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.adk.models.base_llm import BaseLlm
from google.adk.models.registry import LLMRegistry
from google.genai import types

from contextguard_adk import _sections
from contextguard_adk._history.contents import pair_boundaries
from contextguard_adk._history.draft import Draft
from contextguard_adk._history.transcript import Entry, render_entries
from contextguard_adk._history.truncation import without_names
from contextguard_adk._providers.clients import answers_freely, find_llm
from contextguard_adk._providers.costs import price_calls
from contextguard_adk._providers.registry import (
    LitellmRegistry,
    resolve_context_window,
    resolve_costs,
    resolve_output_limit,
)
from contextguard_adk._providers.retry import is_transient, name_error
from contextguard_adk._runtime.memory import AgentMemory
from contextguard_adk._runtime.runs import Guard
from contextguard_adk._shapes.sealed_thoughts import newest_thoughts
from contextguard_adk._summaries import compose
from contextguard_adk._summaries.model import SummaryModel
from contextguard_adk._summaries.prompts import SUMMARY_INSTRUCTION
from contextguard_adk._summaries.write import (
    SummaryTask,
    is_overflow,
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

_REGISTRY = LitellmRegistry()  # Its table is read once for each process.


@dataclass(frozen=True)
class Failed:
    """A summarizer's failures in a row, and which content was newest at the last."""

    model: str = ""
    count: int = 0
    newest: str = ""

    def after(self, model: str, count: int, newest: str) -> Failed:
        """Adds failures of a model that was asked; an answer ends the count."""
        before = self.count if self.model == model else 0
        return Failed(model, before + count, newest) if count else Failed()


@dataclass(frozen=True)
class InPlace:
    """Whether summaries at the end of the conversation have proved to be useless."""

    is_useless: bool = False


class Ask:
    """Has the summaries of one compaction written, and measures what they come to.

    Attributes:
        attempts: How many summaries were written, those without a model included.
        failures: What went wrong with the summarizer, newest last.
    """

    def __init__(self, turn: Turn, agent: object, memory: AgentMemory, guard: Guard):
        self.attempts = 0
        self.failures: list[SummaryError] = []
        self._turn = turn
        self._agent = agent
        self._memory = memory
        self._guard = guard

    async def summarize(
        self, turn: Turn, covered: frozenset[int], budget_tokens: int | None = None
    ) -> Draft:
        """Has messages summarized; never fails.

        Args:
            turn: The model call.
            covered: Indexes of the messages, as `Turn.older_than` returns them.
            budget_tokens: What the summary may take; None is the usual budget.

        Returns:
            A draft, whose text is made of excerpts where no model gives a summary.
        """
        self.attempts += 1
        covered = turn.whole(covered - turn.kept.pending)
        budget_tokens = budget_tokens or compose.summary_tokens(turn, covered)
        text = await self._write(turn, covered, budget_tokens)
        if not text:
            return self._summarize_mechanically(turn, covered)
        return _with_kept(turn, Draft(text, covered, covered, len(text), turn.reason))

    async def summarize_all(self, turn: Turn) -> Draft | None:
        """Summarizes all that may be, ever shorter while the request does not fit.

        At most `max_compaction_attempts` summaries are written, but one in any case.
        None where there is nothing to summarize.
        """
        covered = turn.older_than(0)
        if not covered - turn.summarized:
            stored = turn.history.stored
            if stored is None or turn.kept.truncation is None:
                return None
            known = replace(turn.draft, truncation=None, truncated_upto=-1)
            return compose.squeeze(turn, _with_kept(turn, known)).draft
        budget_tokens = turn.summary_tokens // 2
        draft = await self.summarize(turn, covered)
        most = turn.settings.max_compaction_attempts
        while self.attempts < most and self._may_fit(turn, draft, budget_tokens):
            draft = await self.summarize(turn, covered, budget_tokens)
            budget_tokens //= 2
        return compose.squeeze(turn, draft).draft

    def _may_fit(self, turn: Turn, draft: Draft, budget_tokens: int) -> bool:
        """Whether a summary of that length is needed, shorter, and could be enough."""
        outcome = compose.compose(turn, draft)
        if compose.fits(turn, outcome) or draft.is_mechanical:
            return False
        text_tokens = turn.count(draft.text)
        without_text = outcome.tokens - text_tokens
        return text_tokens > budget_tokens and without_text < turn.limit_tokens

    def outcome(self, turn: Turn, draft: Draft) -> Outcome:
        """Returns the request with a draft in place, and its estimate."""
        return compose.compose(turn, draft)

    def _summarize_mechanically(self, turn: Turn, covered: frozenset[int]) -> Draft:
        """Covers as much as has to be, by excerpts after what a model wrote before."""
        new = sorted(covered - turn.summarized)
        budget_tokens = int(turn.budgets.threshold_tokens * 0.20)
        if turn.reason != "turns":
            new = new[: _find_mechanical_end(turn, new, budget_tokens)]
        covered = turn.whole(new)
        stored = turn.history.stored
        previous = stored.model_text if stored else ""
        entries = _render_entries(turn, [i for i in new if i in covered])
        text = write_mechanical_summary(entries, previous, budget_tokens, turn.count)
        draft = Draft(text, covered, turn.summarized, len(previous), turn.reason)
        return _with_kept(turn, draft)

    @functools.cached_property
    def model(self) -> SummaryModel | None:
        """The model to ask; None where there is none, or none is to be asked now."""
        settings = self._turn.settings
        own = find_llm(self._agent)
        if settings.summaries == "stored":
            return None
        llm = _resolve(settings.summarizer) or own
        if llm is None or self._is_left_alone(llm.model):
            return None
        registry = self._guard.registry
        window = settings.summarizer_context_window
        if window is None and llm is own:
            window = self._turn.budgets.window_tokens
        if window is None:
            window = resolve_context_window(llm.model, registry=registry).tokens
        # A registry of the user's own need not know which models think.
        ask = getattr(registry, "supports_reasoning", _REGISTRY.supports_reasoning)
        return SummaryModel(
            llm=llm,
            window_tokens=window,
            timeout_seconds=settings.summary_timeout_seconds,
            config=self._turn.request.config,
            instruction=settings.summary_instruction or SUMMARY_INSTRUCTION,
            is_agents_own=llm is own,
            can_think=bool(ask(llm.model)),
            max_output_tokens=resolve_output_limit(llm.model, registry),
        )

    def _is_left_alone(self, model: str) -> bool:
        """Whether a model has failed twice in a row, and little has come since.

        After two a tenth of the window; with each further failure another tenth, up to
        half of it, about what comes between two compactions.
        """
        failed = self._memory.facts.unit(Failed)
        history = self._turn.history
        if failed.model != model or failed.count < 2:
            return False
        new = history.contents[history.find_place(failed.newest) + 1 :]
        most_tokens = self._turn.budgets.window_tokens * min(failed.count - 1, 5) // 10
        return self._turn.measure_alone(new) < most_tokens

    @property
    def may_recover(self) -> bool:
        """Whether no model has written a summary now, but soon one may.

        One that lets its time run out would cost it again on each call.
        """
        if self._turn.settings.summaries == "stored":
            return False
        if self.failures:
            return not isinstance(self.failures[-1].__cause__, TimeoutError)
        return vars(self).get("model", self) is None

    def end(self) -> dict[str, Any]:
        """Counts what the compaction took, once; returns it as fields of a record."""
        asked: SummaryModel | None = vars(self).get("model")  # Where it was wanted.
        name, usages = (asked.llm.model, asked.usages) if asked else ("", [])
        usage = sum(usages, Usage())
        cost = 0.0 if asked is None else None
        failure = "not_asked" if vars(self).get("model", self) is None else ""
        failure = next((name_error(e.__cause__ or e) for e in self.failures), failure)
        if asked is not None:
            # For what is no summary a model is asked twice.
            count = sum(2 - getattr(e, "is_blocked", True) for e in self.failures)
            history = self._turn.history
            failed = self._memory.facts.unit(Failed)
            newest = history.name_place(max(history.indexes, default=-1))
            self._memory.keep(failed.after(name, count, newest))
            costs = resolve_costs(
                name, self._guard.settings.prices, self._guard.registry
            )
            cost = price_calls(usages, costs)
        self._memory.add_costs(usage, cost)
        took = {"usage": usage, "cost": cost, "attempts": self.attempts}
        return {"model": name, "failure": failure, **took}

    async def _write(
        self, turn: Turn, covered: frozenset[int], budget_tokens: int
    ) -> str:
        """Has a summary written, in place or from a transcript; "" where it fails."""
        # A summarizer that has just failed would only cost its timeout once more.
        if self.failures or self.model is None:
            return ""
        history = turn.history
        pinned = [*history.user_messages[:1], history.request_index]
        known = history.stored.model_text if history.stored else ""
        new = sorted(covered - turn.summarized)
        if turn.kept.truncation:
            new += sorted(turn.kept.indexes)  # The agent is not shown all of it.
        redact = history.redactor.text
        sections = _sections.SECTIONS
        briefs = {section.name: redact(section.brief(turn)) for section in sections}
        task = SummaryTask(
            entries=_render_entries(turn, new, [i for i in pinned if i is not None]),
            previous_summary=redact(known),
            live_request=redact(turn.request_text),
            briefs=briefs,
            budget_tokens=budget_tokens,
            correction=turn.size.correction,
            focus=redact(turn.focus),
            conversation_tokens=turn.tokens,
        )
        try:
            text = ""
            if turn.reason != "overflow" and self._is_in_place_wanted(self.model):
                summarized = covered | turn.kept.indexes
                text = await self._write_in_place(turn, task, summarized, self.model)
            return text or await write_from_transcript(task, self.model)
        except SummaryError as error:
            self.failures.append(error)
            logger.warning(
                "The summarizer of agent %r, %r, failed (%s); excerpts take the place "
                "of its summary where the window is nearly full; %s.",
                *(turn.agent, self.model.llm.model, error, turn.origin.place),
            )
            return ""

    def _is_in_place_wanted(self, model: SummaryModel) -> bool:
        """Whether a summary in place is worth a try, and would be plain text."""
        if not model.is_agents_own or self._turn.history.redactor:
            return False  # The conversation itself would be sent.
        setting = self._turn.settings.reuse_prompt_cache
        facts = self._memory.facts
        has_cache = setting is True or facts.cached_ratio >= 0.5
        request = self._turn.request
        config = self._turn.request.config
        is_text = config.response_mime_type in (None, "text/plain")
        is_useless = facts.unit(InPlace).is_useless
        if is_useless or not (setting and has_cache and is_text):
            return False
        return not config.stop_sequences and answers_freely(request, self._agent)

    async def _write_in_place(
        self,
        turn: Turn,
        task: SummaryTask,
        summarized: Collection[int],
        model: SummaryModel,
    ) -> str:
        contents = _find_conversation(turn, summarized)
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
            # Where the answer shows that it is no use, it is not asked so again.
            if isinstance(error, UnusableAnswerError) or is_overflow(error):
                self._memory.keep(InPlace(is_useless=True))
            logger.info("No summary in place (%s): it gets a transcript.", error)
            return ""


def _with_kept(turn: Turn, draft: Draft) -> Draft:
    """Shortens the results of the newest steps where they are too large to stay."""
    kept = turn.kept
    if kept.truncation is None or not kept.indexes.isdisjoint(draft.covered):
        return draft
    return replace(draft, truncation=kept.truncation, truncated_upto=max(kept.indexes))


def _render_entries(
    turn: Turn, indexes: Iterable[int], pinned: Collection[int] = ()
) -> list[Entry]:
    history = turn.history
    # The summarizer reads what the agent was shown, but for values: they are listed.
    read = [*map(without_names, history.shown, history.contents)]
    if history.redactor:  # Of a text that is cut before, half a number would stay.
        read = [*history.told]
    wholes = history.contents if turn.has_recall else None
    return render_entries(read, indexes, pinned, wholes, history.outputs)


def _find_mechanical_end(turn: Turn, new: Sequence[int], budget_tokens: int) -> int:
    """How many contents a mechanical summary has to cover; the newest can stay."""
    taken = turn.fixed_tokens + 2 * budget_tokens
    held_ratio = sum(section.held_ratio for section in _sections.SECTIONS)
    taken += int(turn.budgets.working_tokens * held_ratio)
    # Where no summary follows soon, less stays: else each turn would be cut again.
    ratio = 0.30 if turn.settings.summaries == "stored" else 0.45
    room_tokens = int(turn.budgets.threshold_tokens * ratio)
    room = min(room_tokens, turn.limit_tokens - taken)
    room -= turn.kept.tokens
    contents = [turn.history.shown[i] for i in new]
    memo = turn.history.memo
    heuristics = (memo.estimate_tokens([c]) for c in reversed(contents[1:]))
    costs = (int(heuristic * turn.correction + 1) for heuristic in heuristics)
    end = len(new) - sum(used <= room for used in itertools.accumulate(costs))
    boundaries = pair_boundaries(contents)
    return next((i for i in range(end, len(new)) if boundaries[i]), len(new))


def _find_conversation(turn: Turn, summarized: Collection[int]) -> list[types.Content]:
    """Finds the conversation without what is no history; empty if it does not do."""
    history = turn.history
    contents = turn.contents
    if history.pairs.open_calls - history.covered:
        return []  # A question after a call without its result may be refused.
    if not set(summarized) >= set(turn.compactable):
        return []
    if stored := history.stored:
        is_shortened = stored.truncation or stored.request_chars >= 0
        if is_shortened or history.covered != history.model_covered:
            return []
    if newest_thoughts(contents):
        return list(contents)  # They may need all that stands before them.
    known = set(history.indexes)
    foreign = [i for i in range(len(history.contents)) if i not in known]
    if foreign and foreign[0] < min(known, default=0):
        return []
    hidden = {id(history.contents[index]) for index in foreign}
    return [content for content in contents if id(content) not in hidden]


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
