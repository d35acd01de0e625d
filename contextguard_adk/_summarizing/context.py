"""One compaction: what a strategy may read, and the summaries that it can have made."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from google.genai import types

from contextguard_adk._history.pairs import (
    find_safe_split,
    keep_pairs_whole,
    pair_boundaries,
    pair_contents,
)
from contextguard_adk._history.rendering import render_request
from contextguard_adk._history.stored import StoredSummary
from contextguard_adk._history.view import HistoryView
from contextguard_adk._measuring.budgets import Budgets
from contextguard_adk._measuring.calibration import (
    DEFAULT_CORRECTION,
    estimate_prompt_tokens,
    token_counter,
)
from contextguard_adk._summarizing.compose import Compaction, Composer, Draft
from contextguard_adk._summarizing.items import attach_files
from contextguard_adk._summarizing.model import find_conversation
from contextguard_adk._summarizing.running_turn import (
    DONE_RATIO,
    KeptSteps,
    find_kept_steps,
)
from contextguard_adk._summarizing.summarizer import (
    Summarizer,
    SummaryTask,
    write_mechanical_summary,
)
from contextguard_adk._summarizing.todos import TodoList
from contextguard_adk._summarizing.transcript import Entry, render_entries
from contextguard_adk.errors import SummaryError
from contextguard_adk.telemetry import PressureRecord

Reason = Literal["tokens", "requested", "overflow", "turns"]
"""Why a history is compacted; `turns` where there are too many contents."""


@dataclass(frozen=True)
class CompactionContext:
    """All that a strategy may read about one model call.

    Attributes:
        agent: The agent's name.
        reason: Why a compaction is considered: `requested` and `overflow` demand
            one; otherwise the strategy decides.
        tokens: The estimate of the request as it stands, in real tokens.
        config_heuristic_tokens: Heuristic of system instruction and tools.
        correction: Real tokens per heuristic token; None while unknown.
        budgets: Window, threshold and what follows from them.
        view: The history.
        contents: What would be sent without a compaction.
        scope: Where a summary is valid.
        summarizer: Has summaries written.
        todos: The agent's todo list.
        has_recall: Whether the agent can read back what is left out.
        keep_tokens: What the newest steps of the running turn may take that stay word
            for word.
        keep_count: How many contents these steps may be; 0 keeps none, not even a step
            whose results the model has not seen.
        focus: What a compaction that somebody asked for should keep above all.
        uncounted_tokens: By how much `tokens` exceeds what the provider counted last.
    """

    agent: str
    reason: Reason
    tokens: int
    config_heuristic_tokens: int
    correction: float | None
    budgets: Budgets
    view: HistoryView
    contents: Sequence[types.Content]
    scope: str
    summarizer: Summarizer
    todos: TodoList
    has_recall: bool = False
    keep_tokens: int = 0
    keep_count: int = sys.maxsize
    focus: str = ""
    uncounted_tokens: int = 0

    @property
    def failures(self) -> Sequence[SummaryError]:
        """What went wrong with the summarizer, newest last."""
        return self.summarizer.failures

    @property
    def fullness(self) -> float:
        """Tokens as a part of the threshold; at least 1 where someone demands it."""
        fullness = self.tokens / self.budgets.threshold_tokens
        is_demanded = self.reason in ("requested", "overflow")
        return max(1.0, fullness) if is_demanded else fullness

    @property
    def is_due(self) -> bool:
        """Whether the request has reached the threshold, or someone demands it."""
        return self.fullness >= 1

    @property
    def fits_yet(self) -> bool:
        """Whether the request may go out as it is, whatever the threshold."""
        is_overfull = self.most_tokens >= self.budgets.overfull_tokens
        return self.reason == "tokens" and not is_overfull

    @property
    def most_tokens(self) -> float:
        """The estimate, with room for an error.

        Of digits and markup o200k_base counts up to a seventh more than is estimated.
        """
        return self.tokens + self.uncounted_tokens / 6

    @property
    def has_room(self) -> bool:
        """Whether the request may go out as it is, with room for its answer."""
        has_room = self.most_tokens < self.budgets.room_for_answer_tokens
        return self.reason == "tokens" and (has_room or not self.is_due)

    def describe_pressure(
        self, tokens: int, session_id: str, warning_threshold: float
    ) -> PressureRecord:
        """Describes a request of so many tokens that fills much of the window."""
        window_tokens = self.budgets.window_tokens
        return PressureRecord(
            agent=self.agent,
            session_id=session_id,
            tokens=tokens,
            window_tokens=window_tokens,
            pressure_before=self.tokens / window_tokens,
            pressure=tokens / window_tokens,
            warning_threshold=warning_threshold,
        )

    def measure(self, contents: Sequence[types.Content]) -> int:
        """Estimates a request with these contents, in real tokens."""
        memo = self.view.memo
        heuristic = memo.estimate_tokens(contents) + self.config_heuristic_tokens
        return estimate_prompt_tokens(
            heuristic, None, None, contents, default=self._factor, memo=memo
        )

    def count(self, text: str) -> int:
        """Estimates a text, in real tokens."""
        return token_counter(self._factor)(text)

    @property
    def _factor(self) -> float:
        return self.correction or DEFAULT_CORRECTION

    @cached_property
    def fixed_tokens(self) -> int:
        """Of instruction, tools, open calls and contents that are not history."""
        return self.measure(self.fixed_contents)

    @cached_property
    def fixed_contents(self) -> list[types.Content]:
        """The contents that no compaction can remove."""
        view = self.view
        removable = set(view.history) - view.pinned_calls
        return [c for i, c in enumerate(view.shown) if i not in removable]

    @property
    def limit_tokens(self) -> int:
        """What a compacted request must stay under: the threshold, where it can."""
        budgets = self.budgets
        if self.fixed_tokens + budgets.summary_tokens < budgets.full_tokens:
            return budgets.full_tokens
        return budgets.overfull_tokens

    def fits(self, compaction: Compaction) -> bool:
        """Whether a compacted request may go out."""
        return compaction.tokens <= self.limit_tokens

    @cached_property
    def kept(self) -> KeptSteps:
        """The newest steps of the running turn, which stay word for word."""
        view = self.view
        covered = frozenset(view.compactable) | view.model_covered
        room_tokens = self.limit_tokens - self.expect(covered)
        # Where there is none, what stands beside them can be shortened.
        least_tokens = self.budgets.working_tokens // 20
        return find_kept_steps(self, max(least_tokens, room_tokens))

    def older_than(self, keep_count: int) -> frozenset[int]:
        """Covers all but about the newest `keep_count` contents and splits no pair.

        Nor does it cover the steps of the running turn that stay. Empty when nothing is
        left to summarize.
        """
        kept = self.kept.indexes
        candidates = [i for i in self.view.compactable if i not in kept]
        wished = len(self.view.compactable) - keep_count
        if candidates and wished >= len(candidates):
            return frozenset(candidates) | self.view.model_covered
        if wished < 1:
            return frozenset()
        split = find_safe_split([self.view.contents[i] for i in candidates], wished)
        return self.whole(candidates[:split])

    def whole(self, indexes: Iterable[int]) -> frozenset[int]:
        """Adds what is covered already; takes out pairs that would be split."""
        covered = frozenset(indexes) | self.view.model_covered
        return keep_pairs_whole(covered, self.view.pairs)

    def expect(self, covered: frozenset[int]) -> int:
        """Estimates the request with a full-length summary of these contents."""
        beside = self.render(Draft("", covered, covered, 0))
        return beside.tokens + self.budgets.summary_tokens

    async def summarize(
        self, covered: frozenset[int], budget_tokens: int | None = None
    ) -> Compaction:
        """Has contents, as `older_than` returns them, summarized; never fails.

        The summary is mechanical where no model gives one. None is the usual budget.
        """
        covered = self.whole(covered - self.kept.unseen)
        budget_tokens = budget_tokens or self.budgets.summary_tokens
        text = await self.summarizer.summarize(self._task(covered, budget_tokens))
        if not text:
            return self._summarize_mechanically(covered)
        return self._render_summary(text, covered, covered, len(text))

    def _render_summary(
        self,
        text: str,
        covered: frozenset[int],
        model_covered: frozenset[int],
        model_chars: int,
    ) -> Compaction:
        draft = Draft(text, covered, model_covered, model_chars)
        if self.kept.truncation and self.kept.indexes.isdisjoint(covered):
            upto = max(self.kept.indexes)
            draft = replace(draft, truncation=self.kept.truncation, truncated_upto=upto)
        return self.render(draft)

    async def summarize_all(
        self, max_attempts: int, spent: int = 0
    ) -> Compaction | None:
        """Summarizes all that may be, ever shorter while it does not fit."""
        view, covered = self.view, self.older_than(0)
        if not covered - view.model_covered:
            stored = view.stored
            if stored is None or self.kept.truncation is None:
                return None
            known = stored.text, view.covered, view.model_covered, stored.model_chars
            return self.squeeze(self._render_summary(*known)).after(0)
        attempts, budget_tokens = 1, self.budgets.summary_tokens // 2
        compaction = await self.summarize(covered)
        most = max_attempts - spent
        while attempts < most and self._may_fit(compaction, budget_tokens):
            compaction = await self.summarize(covered, budget_tokens)
            attempts, budget_tokens = attempts + 1, budget_tokens // 2
        return self.squeeze(compaction).after(spent + attempts)

    def _may_fit(self, compaction: Compaction, budget_tokens: int) -> bool:
        """Whether a summary of that length is needed, shorter, and could be enough."""
        if self.fits(compaction) or compaction.stored.is_mechanical:
            return False
        text_tokens = self.count(compaction.stored.text)
        without_text = compaction.tokens - text_tokens
        return text_tokens > budget_tokens and without_text < self.limit_tokens

    def _task(self, covered: frozenset[int], budget_tokens: int) -> SummaryTask:
        view = self.view
        pinned = [i for i in (view.first_task_index, view.live_index) if i is not None]
        new = sorted(covered - view.model_covered)
        if self.kept.truncation:
            new += sorted(self.kept.indexes)  # The agent is not shown all of it.
        conversation: Sequence[types.Content] = ()
        if self.reason != "overflow" and self.summarizer.is_in_place_wanted:
            summarized = covered | self.kept.indexes
            conversation = find_conversation(view, summarized, self.contents)
        return SummaryTask(
            entries=self._render_entries(new, pinned),
            previous_summary=view.stored.model_text if view.stored else "",
            live_request=self.composer.live_text,
            todos=self.todos.render(8_000, len),
            budget_tokens=budget_tokens,
            correction=self.correction,
            focus=self.focus,
            conversation=conversation,
            conversation_tokens=self.tokens,
        )

    def _render_entries(
        self, indexes: Iterable[int], pinned: Collection[int] = ()
    ) -> list[Entry]:
        view = self.view  # The summarizer reads what the agent was shown.
        wholes = view.contents if self.has_recall else None
        return render_entries(view.shown, indexes, pinned, wholes, view.outputs)

    def _summarize_mechanically(self, covered: frozenset[int]) -> Compaction:
        view = self.view
        new = sorted(covered - view.model_covered)
        budget_tokens = int(self.budgets.threshold_tokens * 0.20)
        if self.reason != "turns":
            new = new[: self._find_mechanical_end(new, budget_tokens)]
        covered = self.whole(new)
        previous = view.stored.model_text if view.stored else ""
        indexes = [i for i in new if i in covered]
        entries = self._render_entries(indexes)
        text = write_mechanical_summary(entries, previous, budget_tokens, self.count)
        return self._render_summary(text, covered, view.model_covered, len(previous))

    def _find_mechanical_end(self, new: Sequence[int], budget_tokens: int) -> int:
        """How many contents a mechanical summary has to cover; the newest can stay."""
        taken = self.fixed_tokens + 2 * budget_tokens
        taken += int(self.budgets.working_tokens * DONE_RATIO)
        room = min(int(self.budgets.threshold_tokens * 0.45), self.limit_tokens - taken)
        room -= self.kept.tokens
        contents = [self.view.shown[i] for i in new]
        memo = self.view.memo
        heuristics = (memo.estimate_tokens([c]) for c in reversed(contents[1:]))
        costs = (int(heuristic * self._factor + 1) for heuristic in heuristics)
        end = len(new) - sum(used <= room for used in itertools.accumulate(costs))
        boundaries = pair_boundaries(pair_contents(contents), len(contents))
        return next((i for i in range(end, len(new)) if boundaries[i]), len(new))

    def squeeze(self, compaction: Compaction) -> Compaction:
        """Shortens a compacted request until it fits, the user's request last."""
        for stored in self.composer.shorten(compaction.stored):
            if self.fits(compaction):
                break
            compaction = self.apply(stored, compaction.covered)
        return compaction

    def render(self, draft: Draft) -> Compaction:
        """Composes what is to be stored, applies it, and measures the result."""
        return self.apply(self.composer.compose(draft), draft.covered)

    def apply(self, stored: StoredSummary, covered: frozenset[int]) -> Compaction:
        """Applies a stored summary, and measures the result."""
        contents = render_request(self.view, stored, covered)
        if self.has_recall:
            contents = attach_files(contents, self.view.contents, self.view.history)
        tokens = self.measure(contents)
        stored = stored.model_copy(update={"left_tokens": tokens})
        return Compaction(stored, covered, contents, tokens)

    @cached_property
    def composer(self) -> Composer:
        """Composes what a compaction of this history would store."""
        return Composer(self)
