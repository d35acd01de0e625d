"""One compaction: what a strategy may read, and the summaries that it can have made.

A strategy decides which contents a summary should cover; everything that must hold
for any strategy (pairs, the live request, the budgets, the mechanical fallback) is
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from google.genai import types

from contextguard_adk.errors import SummaryError
from contextguard_adk.history.pairs import (
    find_safe_split,
    keep_pairs_whole,
    pair_boundaries,
    pair_contents,
)
from contextguard_adk.history.rendering import render_request
from contextguard_adk.measuring.budgets import Budgets
from contextguard_adk.measuring.calibration import (
    DEFAULT_CORRECTION,
    estimate_prompt_tokens,
    token_counter,
)
from contextguard_adk.measuring.tokens import estimate_contents_tokens
from contextguard_adk.summarizing.compose import Composer, Draft
from contextguard_adk.summarizing.in_place import find_conversation
from contextguard_adk.summarizing.items import attach_files
from contextguard_adk.summarizing.summarizer import (
    Summarizer,
    SummaryTask,
    write_mechanical_summary,
)
from contextguard_adk.summarizing.transcript import render_entries

if TYPE_CHECKING:
    from contextguard_adk.history.stored_summary import StoredSummary
    from contextguard_adk.history.view import HistoryView
    from contextguard_adk.summarizing.todos import TodoList

MECHANICAL_TAIL_RATIO = 0.45
"""How much of the threshold stays as it is when no model wrote the summary."""

MECHANICAL_SUMMARY_RATIO = 0.20
"""How much of the threshold a mechanical summary may take."""

MAX_TODOS_CHARS = 8_000
"""What a summarizer is shown of a todo list."""

Reason = Literal["tokens", "requested", "overflow", "turns"]
"""Why a history is compacted; `turns` where there are too many contents."""


@dataclass(frozen=True)
class Compaction:
    """A summary that could stand in the place of history.

    Attributes:
        stored: The summary, as it would be kept in session state.
        covered: Indexes of the contents that it stands for.
        contents: The request's contents with it.
        tokens: The estimate of that request.
        attempts: How many times a summarizer was asked.
        reason: Why, where that is not what `CompactionContext.reason` says.
    """

    stored: StoredSummary
    covered: frozenset[int]
    contents: list[types.Content]
    tokens: int
    attempts: int = 1
    reason: Reason | None = None

    def after(self, attempts: int) -> Compaction:
        """The same compaction, with the number of summaries that it took."""
        return replace(self, attempts=attempts)


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

    @property
    def failures(self) -> Sequence[SummaryError]:
        """What went wrong with the summarizer, newest last."""
        return self.summarizer.failures

    @property
    def is_due(self) -> bool:
        """Whether the request has reached the threshold, or someone demands it."""
        return (
            self.reason in ("requested", "overflow")
            or self.tokens >= self.budgets.threshold_tokens
        )

    def measure(self, contents: Sequence[types.Content]) -> int:
        """Estimates a request with these contents, in real tokens."""
        heuristic = estimate_contents_tokens(contents) + self.config_heuristic_tokens
        return estimate_prompt_tokens(
            heuristic,
            None,
            None,
            contents,
            default=self.correction or DEFAULT_CORRECTION,
        )

    @cached_property
    def fixed_tokens(self) -> int:
        """What no compaction can remove: instruction, tools, calls still open, and
        contents that are not history."""
        return self.measure(self.fixed_contents)

    @cached_property
    def fixed_contents(self) -> list[types.Content]:
        """The contents that no compaction can remove."""
        view = self.view
        removable = set(view.history) - view.pinned_calls
        return [c for i, c in enumerate(view.contents) if i not in removable]

    @property
    def limit_tokens(self) -> int:
        """What a compacted request must stay under.

        The threshold; where the fixed part alone comes near it, as much as the
        window is expected to take.
        """
        budgets = self.budgets
        if self.fixed_tokens + budgets.summary_tokens < budgets.threshold_tokens:
            return budgets.threshold_tokens
        return budgets.overfull_tokens

    def fits(self, compaction: Compaction) -> bool:
        """Whether a compacted request may go out."""
        return compaction.tokens <= self.limit_tokens

    def older_than(self, keep_count: int) -> frozenset[int]:
        """Chooses what to cover so that about the newest `keep_count` contents stay.

        Args:
            keep_count: How many contents of what a summary could newly cover to
                keep; the cut moves to where it separates no call from its response.

        Returns:
            Indexes to cover, those that a model has summarized included; empty when
            nothing is left to summarise.
        """
        candidates = self.view.compactable
        if not candidates:
            return frozenset()
        if keep_count <= 0:
            return frozenset(candidates) | self.view.model_covered
        wished = len(candidates) - keep_count
        if wished < 1:
            return frozenset()
        split = find_safe_split([self.view.contents[i] for i in candidates], wished)
        return self._whole(candidates[:split])

    def _whole(self, indexes: Sequence[int]) -> frozenset[int]:
        """Adds what is covered already; takes out pairs that would be split."""
        return keep_pairs_whole(
            frozenset(indexes) | self.view.model_covered, self.view.pairs
        )

    def expect(self, covered: frozenset[int]) -> int:
        """Estimates the request with a full-length summary of these contents."""
        beside = self.render(Draft("", covered, covered, 0))
        return beside.tokens + self.budgets.summary_tokens

    async def summarize(
        self, covered: frozenset[int], budget_tokens: int | None = None
    ) -> Compaction:
        """Has contents summarized; never fails.

        Where the summarizer gives nothing usable, a mechanical summary covers no
        more than it must.

        Args:
            covered: What to cover, as `older_than` returns it.
            budget_tokens: What the summary may take; None is the usual budget.
        """
        task = self._task(covered, budget_tokens or self.budgets.summary_tokens)
        text = await self.summarizer.summarize(task)
        if not text:
            return self._summarize_mechanically(covered)
        return self.render(Draft(text, covered, covered, len(text)))

    async def summarize_all(self, max_attempts: int) -> Compaction | None:
        """Summarizes all history that may be, in as few summaries as it takes.

        Args:
            max_attempts: How many summaries may be paid for; each further one is
                asked for half the length.

        Returns:
            The compaction; None when nothing is left to summarize.
        """
        covered = self.older_than(0)
        if not covered - self.view.model_covered:
            return None
        budget_tokens = self.budgets.summary_tokens
        compaction = await self.summarize(covered)
        attempts = 1
        while (
            not self.fits(compaction)
            and attempts < max_attempts
            and not compaction.stored.is_mechanical
            and self._can_shorter_fit(compaction, budget_tokens // 2)
        ):
            budget_tokens //= 2
            compaction = await self.summarize(covered, budget_tokens)
            attempts += 1
        return self.squeeze(compaction).after(attempts)

    def _can_shorter_fit(self, compaction: Compaction, budget_tokens: int) -> bool:
        """Whether a summary of that length is shorter, and could be enough."""
        count = token_counter(self.correction or DEFAULT_CORRECTION)
        text_tokens = count(compaction.stored.text)
        without_text = compaction.tokens - text_tokens
        return text_tokens > budget_tokens and without_text < self.limit_tokens

    def _task(self, covered: frozenset[int], budget_tokens: int) -> SummaryTask:
        view = self.view
        pinned = [i for i in (view.first_task_index, view.live_index) if i is not None]
        new = sorted(covered - view.model_covered)
        conversation: Sequence[types.Content] = ()
        if self.reason != "overflow" and self.summarizer.is_in_place_wanted:
            conversation = find_conversation(view, covered, self.contents)
        return SummaryTask(
            entries=render_entries(view.contents, new, pinned, self.has_recall),
            previous_summary=view.stored.model_text if view.stored else "",
            live_request=self.composer.live_text,
            todos=self.todos.render(MAX_TODOS_CHARS, len),
            budget_tokens=budget_tokens,
            correction=self.correction,
            conversation=conversation,
            conversation_tokens=self.tokens,
        )

    def _summarize_mechanically(self, covered: frozenset[int]) -> Compaction:
        view = self.view
        new = sorted(covered - view.model_covered)
        new = new[: len(new) - self._mechanical_tail_count(new)]
        covered = self._whole(new)
        previous = view.stored.model_text if view.stored else ""
        text = write_mechanical_summary(
            render_entries(
                view.contents, [i for i in new if i in covered], (), self.has_recall
            ),
            previous,
            int(self.budgets.threshold_tokens * MECHANICAL_SUMMARY_RATIO),
            token_counter(self.correction or DEFAULT_CORRECTION),
        )
        return self.render(Draft(text, covered, view.model_covered, len(previous)))

    def _mechanical_tail_count(self, new: Sequence[int]) -> int:
        """How many of the newest contents need no mechanical summary."""
        budgets = self.budgets
        mechanical = int(budgets.threshold_tokens * MECHANICAL_SUMMARY_RATIO)
        room = min(
            int(budgets.threshold_tokens * MECHANICAL_TAIL_RATIO),
            self.limit_tokens - self.fixed_tokens - 2 * mechanical,
        )
        factor = self.correction or DEFAULT_CORRECTION
        count = 0
        for index in reversed(new):
            room -= int(
                estimate_contents_tokens([self.view.contents[index]]) * factor + 1
            )
            if room < 0:
                break
            count += 1
        if not count or len(new) < 2:
            return 0
        contents = [self.view.contents[i] for i in new]
        boundaries = pair_boundaries(pair_contents(contents), len(contents))
        least = max(1, len(new) - count)
        return next((len(new) - i for i in range(least, len(new)) if boundaries[i]), 0)

    def squeeze(self, compaction: Compaction) -> Compaction:
        """Shortens a compacted request until it fits, the user's request last.

        Returns:
            The first version that fits; where none does, the shortest.
        """
        shorter = self.composer.shorten(compaction.stored)
        while not self.fits(compaction):
            stored = next(shorter, None)
            if stored is None:
                break
            compaction = self.apply(stored, compaction.covered)
        return compaction

    def render(self, draft: Draft) -> Compaction:
        """Composes what is to be stored, applies it, and measures the result."""
        return self.apply(self.composer.compose(draft), draft.covered)

    def apply(self, stored: StoredSummary, covered: frozenset[int]) -> Compaction:
        """Applies a summary to this history, and measures the result."""
        contents = render_request(self.view, stored, covered)
        if self.has_recall:
            contents = attach_files(contents, self.view.contents, self.view.history)
        return Compaction(stored, covered, contents, self.measure(contents))

    @cached_property
    def composer(self) -> Composer:
        """Composes what a compaction of this history would store."""
        return Composer(
            view=self.view,
            window_tokens=self.budgets.window_tokens,
            summary_tokens=self.budgets.summary_tokens,
            correction=self.correction,
            scope=self.scope,
            todos=self.todos,
            has_recall=self.has_recall,
        )
