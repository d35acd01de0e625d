"""What a pipeline has decided so far, and what its reducers may do about it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from contextguard_adk.history.pairs import (
    has_function_call,
    has_function_response,
    keep_pairs_whole,
)
from contextguard_adk.history.rendering import find_fingerprint
from contextguard_adk.history.truncation import Truncation, truncate_content
from contextguard_adk.measuring.tokens import estimate_contents_tokens
from contextguard_adk.strategies.reducers import Relaxed, StrategyResult
from contextguard_adk.summarizing.compose import Draft

if TYPE_CHECKING:
    from contextguard_adk.summarizing.context import Compaction, CompactionContext


class Reduction:
    """The working state of one pipeline run.

    Attributes:
        context: What is known about the model call.
        target_tokens: Where the pipeline may stop.
        relaxed: Which settings are relaxed in this pass.
        compaction: What has been decided so far; None while nothing has.
        attempts: How many summaries were paid for.
    """

    def __init__(self, context: CompactionContext, target_tokens: int) -> None:
        self.context = context
        self.target_tokens = target_tokens
        self.relaxed = Relaxed()
        self.compaction: Compaction | None = None
        self.attempts = 0
        view = context.view
        stored = view.stored
        self._draft = Draft(
            stored.text if stored else "",
            view.covered,
            view.model_covered,
            stored.model_chars if stored else 0,
        )
        if stored and stored.truncation:
            # What an earlier run decided, while it still concerns the request.
            upto = find_fingerprint(view, stored.truncated_upto)
            if upto >= 0 and upto not in view.covered:
                self._draft = replace(
                    self._draft, truncation=stored.truncation, truncated_upto=upto
                )

    @property
    def tokens(self) -> int:
        """The estimate of the request as it stands now."""
        return self.compaction.tokens if self.compaction else self.context.tokens

    @property
    def kept(self) -> list[int]:
        """Indexes of the history that stands in the request, oldest first."""
        return [i for i in self.context.view.history if i not in self._draft.covered]

    @property
    def protected(self) -> frozenset[int]:
        """What no reducer removes: the live request and calls that are open."""
        view = self.context.view
        live = () if view.live_index is None else (view.live_index,)
        return view.pinned_calls | frozenset(live)

    @property
    def truncation(self) -> tuple[Truncation, int] | None:
        """How tool results in the request are shortened, and up to which content."""
        draft = self._draft
        return (draft.truncation, draft.truncated_upto) if draft.truncation else None

    def measure(self, indexes: Iterable[int]) -> int:
        """Heuristic tokens of some contents, shortened as they stand."""
        truncation, upto = self.truncation or (None, -1)
        contents = []
        for index in indexes:
            content = self.context.view.contents[index]
            if truncation and index <= upto:
                has_recall = self.context.has_recall
                content = truncate_content(content, truncation, has_recall)
            contents.append(content)
        return estimate_contents_tokens(contents)

    def expect_beside_summary(self, keep_count: int) -> int:
        """Estimates what would stand beside a summary and the newest contents."""
        covered, draft = self.context.older_than(keep_count), self._draft
        beside = Draft("", covered, covered, 0, draft.truncation, draft.truncated_upto)
        return self.context.render(beside).tokens

    def drop(self, indexes: Collection[int]) -> StrategyResult:
        """Takes contents out of the request, calls and results together.

        They are not summarized; a later summary starts from the originals.
        """
        draft = self._draft
        wanted = draft.covered | (frozenset(indexes) - self.protected)
        covered = keep_pairs_whole(wanted, self.context.view.pairs)
        if covered <= draft.covered:
            return StrategyResult.NO_CHANGE
        text = draft.text[: draft.model_chars]
        return self._apply(replace(draft, covered=covered, text=text))

    def truncate(self, truncation: Truncation, upto: int) -> StrategyResult:
        """Shortens every tool result up to and including content `upto`."""
        draft = replace(self._draft, truncation=truncation, truncated_upto=upto)
        return self._apply(draft)

    async def summarize(self, keep_count: int) -> StrategyResult:
        """Has all but the newest `keep_count` contents summarized.

        A summarizer that has failed is not asked again in the same run.
        """
        covered = self.context.older_than(keep_count)
        if self.context.failures or not covered - self._draft.model_covered:
            return StrategyResult.NO_CHANGE
        compaction = await self.context.summarize(covered)
        self.attempts += 1
        stored, known = compaction.stored, self._draft.model_covered
        draft = replace(
            self._draft,
            text=stored.text,
            covered=compaction.covered,
            model_covered=known if stored.is_mechanical else compaction.covered,
            model_chars=stored.model_chars,
        )
        return self._apply(draft)

    def _apply(self, draft: Draft) -> StrategyResult:
        """Renders what was decided, and tells what it achieved."""
        before = self.tokens
        self._draft = draft
        self.compaction = self.context.render(draft)
        if self.tokens <= self.target_tokens:
            return StrategyResult.TARGET_REACHED
        changed = self.tokens < before
        return StrategyResult.APPLIED if changed else StrategyResult.NO_CHANGE

    def last_tool_result(self, before: int | None = None) -> int | None:
        """The index of the newest tool result in the request, older than `before`."""
        contents = self.context.view.contents
        indexes = (i for i in reversed(self.kept) if before is None or i < before)
        return next((i for i in indexes if has_function_response(contents[i])), None)

    def is_instruction(self, index: int) -> bool:
        """Tells whether a history content is an instruction, not a message."""
        content = self.context.view.contents[index]
        is_tool = has_function_call(content) or has_function_response(content)
        return content.role not in ("user", "model") and not is_tool
