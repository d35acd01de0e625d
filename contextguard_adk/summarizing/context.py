"""One compaction: what a strategy may read, and the summaries that it can have made.

A strategy decides which contents a summary should cover; everything that must hold
for any strategy (pairs, the live request, the budgets, the mechanical fallback) is
here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from google.genai import types

from contextguard_adk.errors import SummaryError
from contextguard_adk.history.pairs import (
    find_safe_split,
    keep_pairs_whole,
    pair_boundaries,
    pair_contents,
)
from contextguard_adk.history.rendering import render_request
from contextguard_adk.history.stored_summary import StoredSummary
from contextguard_adk.history.view import HistoryView
from contextguard_adk.measuring.budgets import Budgets
from contextguard_adk.measuring.calibration import (
    DEFAULT_CORRECTION,
    estimate_prompt_tokens,
    token_counter,
)
from contextguard_adk.measuring.shortening import TokenCounter
from contextguard_adk.measuring.tokens import (
    estimate_contents_tokens,
)
from contextguard_adk.summarizing.compose import Drafts
from contextguard_adk.summarizing.in_place import ConversationEnd
from contextguard_adk.summarizing.summarizer import (
    SummaryTask,
    summarize,
    write_mechanical_summary,
)
from contextguard_adk.summarizing.summary_call import SummaryModel
from contextguard_adk.summarizing.transcript import render_entries

logger = logging.getLogger("contextguard_adk.summarizing.context")

MECHANICAL_TAIL_RATIO = 0.45
"""How much of the threshold stays as it is when no model wrote the summary."""

MECHANICAL_SUMMARY_RATIO = 0.20
"""How much of the threshold a mechanical summary may take."""


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
        attempts: How many times a summariser was asked.
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
        scope: Where the summary is valid.
        load_summary_model: Gives the model that writes summaries; None asks for a
            mechanical one.
        conversation_end: Where a summary may be asked for without a transcript.
        load_todos: Gives the rendered todo list, as the summariser is shown it.
        load_todo_list: Gives the todo list for the agent, cut to a number of tokens.
        has_recall: Whether the agent can read back what is left out.
        attach_files: Adds the files that the agent has read back.
        failures: What went wrong with the summariser, newest last.
    """

    agent: str
    reason: Reason
    tokens: int
    config_heuristic_tokens: int
    correction: float | None
    budgets: Budgets
    view: HistoryView
    scope: str = ""
    load_summary_model: Callable[[], SummaryModel | None] = lambda: None
    conversation_end: ConversationEnd | None = None
    load_todos: Callable[[], str] = lambda: ""
    load_todo_list: Callable[[int, TokenCounter], str] = lambda _tokens, _count: ""
    has_recall: bool = False
    attach_files: Callable[[Sequence[types.Content]], Sequence[types.Content]] = list
    failures: list[SummaryError] = field(default_factory=list)

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
        """Tells whether a compacted request may go out."""
        return compaction.tokens <= self.limit_tokens

    def older_than(self, keep_count: int) -> frozenset[int]:
        """Chooses what to cover so that about the newest `keep_count` contents stay.

        Args:
            keep_count: How many contents of what a summary could newly cover to
                keep; the cut moves to where it separates no call from its response.

        Returns:
            Indexes to cover, those that a model has summarised included; empty when
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
        draft = self._draft("", covered, covered, 0)
        return draft.tokens + self.budgets.summary_tokens

    async def summarize(
        self, covered: frozenset[int], budget_tokens: int | None = None
    ) -> Compaction:
        """Has contents summarised; never fails.

        Where the summariser gives nothing usable, a mechanical summary covers no
        more than it must.

        Args:
            covered: What to cover, as `older_than` returns it.
            budget_tokens: What the summary may take; None is the usual budget.
        """
        # A summariser that has just failed would only cost its timeout once more.
        model = None if self.failures else self.load_summary_model()
        if model is None:
            return self._summarize_mechanically(covered)
        task = self._task(covered, budget_tokens or self.budgets.summary_tokens)
        try:
            text = ""
            if self.conversation_end and self.reason != "overflow":
                text = await self.conversation_end.summarize(
                    task, model, self.view, covered, self.tokens
                )
            text = text or await summarize(task, model)
        except SummaryError as error:
            self.failures.append(error)
            logger.warning(
                "The summariser of agent %r failed (%s); a mechanical summary takes "
                "its place.",
                self.agent,
                error,
            )
            return self._summarize_mechanically(covered)
        return self._draft(text, covered, covered, len(text))

    def _task(self, covered: frozenset[int], budget_tokens: int) -> SummaryTask:
        view = self.view
        pinned = [i for i in (view.first_task_index, view.live_index) if i is not None]
        new = sorted(covered - view.model_covered)
        return SummaryTask(
            entries=render_entries(view.contents, new, pinned, self.has_recall),
            previous_summary=view.stored.model_text if view.stored else "",
            live_request=self.drafts.live_text,
            todos=self.load_todos(),
            budget_tokens=budget_tokens,
            correction=self.correction,
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
        return self._draft(text, covered, view.model_covered, len(previous))

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
        shorter = self.drafts.shorten(compaction.stored)
        while not self.fits(compaction):
            stored = next(shorter, None)
            if stored is None:
                break
            compaction = self.render(stored, compaction.covered)
        return compaction

    def _draft(
        self,
        text: str,
        covered: frozenset[int],
        model_covered: Collection[int],
        model_chars: int,
    ) -> Compaction:
        stored = self.drafts.write(text, covered, model_covered, model_chars)
        return self.render(stored, covered)

    def render(self, stored: StoredSummary, covered: frozenset[int]) -> Compaction:
        """Applies a summary to this history, and measures the result."""
        contents = list(self.attach_files(render_request(self.view, stored, covered)))
        return Compaction(stored, covered, contents, self.measure(contents))

    @cached_property
    def drafts(self) -> Drafts:
        """Makes what a compaction of this history would store."""
        return Drafts(
            view=self.view,
            window_tokens=self.budgets.window_tokens,
            summary_tokens=self.budgets.summary_tokens,
            correction=self.correction,
            scope=self.scope,
            has_recall=self.has_recall,
            load_todos=self.load_todo_list,
        )
