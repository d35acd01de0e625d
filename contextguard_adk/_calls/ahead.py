"""Summaries that are written ahead of time, while the agent goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from contextguard_adk._calls.due import should_skip_compaction
from contextguard_adk._history.stored import AheadSummary
from contextguard_adk._history.view import HistoryView
from contextguard_adk._memory import SessionMemory
from contextguard_adk._summarizing.compose import Compaction, Draft
from contextguard_adk._summarizing.context import CompactionContext
from contextguard_adk.strategies.base import Strategy


@dataclass(frozen=True)
class AheadOfTime:
    """Has the next summary of an agent written while the agent goes on."""

    strategy: Strategy
    session: SessionMemory

    def plan(self, context: CompactionContext) -> Callable[[int], None] | None:
        """What to call with the tokens of the request once it is answered.

        None where nothing is to be written: the request is too small, there is a
        summary, or one was tried since the last compaction.
        """
        if not self.may_begin(context):
            return None
        context.view.let_go()
        summarizer = context.summarizer
        config = summarizer.request.config.model_copy()
        update = {"config": config, "tools_dict": {}}  # A tool may hold the run.
        request = summarizer.request.model_copy(update=update)
        summarizer, contents = replace(summarizer, request=request), context.contents
        context = replace(context, summarizer=summarizer, contents=[*contents])
        return partial(self._start, context)

    def may_begin(self, context: CompactionContext) -> bool:
        """Whether one may be begun once this request is answered."""
        ahead, session = self.strategy.ahead, self.session
        if ahead is None or session.ahead or session.is_ahead_tried:
            return False
        if session.pending.is_under_way:
            return False
        # A strategy that does not say how near it is has an infinite one.
        return ahead <= self.strategy.fullness(context) < math.inf

    def _start(self, context: CompactionContext, tokens: int) -> None:
        context, budgets = replace(context, tokens=tokens), context.budgets
        if not self.may_begin(context):
            return
        is_full = context.fullness >= (self.strategy.ahead or 1.0)
        at_trigger = replace(context, tokens=max(tokens, budgets.threshold_tokens))
        if is_full and should_skip_compaction(at_trigger, False):
            return
        # As if it had just become due. What comes from here on stays word for word.
        ratio = min(1.0, 0.99 * tokens / budgets.threshold_tokens)
        budgets = replace(
            budgets,
            threshold_tokens=int(ratio * budgets.threshold_tokens),
            full_tokens=int(ratio * budgets.full_tokens),
            working_tokens=int(ratio * budgets.working_tokens),
        )
        reason = "tokens" if is_full else self.strategy.early_reason
        context = replace(context, reason=reason, budgets=budgets, keep_count=0)
        self.session.is_ahead_tried = True
        self.session.pending.start(self._write(context))

    async def _write(self, context: CompactionContext) -> None:
        if not await self.session.pending.tasks.take_place():
            return
        started, summarizer = time.monotonic(), context.summarizer
        try:
            compaction = await self.strategy.compact(context)
        finally:
            summarizer.end()
        # A pipeline may do without a summary.
        if not (compaction and compaction.attempts) or compaction.stored.is_mechanical:
            return
        facts = {
            "model": summarizer.model_name,
            "usage": summarizer.usage,
            "cost": summarizer.cost,
            "attempts": compaction.attempts,
            "duration_seconds": time.monotonic() - started,
            "was_ahead": True,
        }
        stored, run_id = compaction.stored, context.view.invocation_id
        ahead = AheadSummary(stored.model_text, stored.covered, run_id, facts)
        self.session.ahead = ahead

    def take(self, context: CompactionContext) -> AheadSummary | None:
        """Takes the summary that was written, where a compaction is due."""
        ahead = self.session.ahead
        if ahead is None or context.focus or not self.strategy.is_due(context):
            return None
        self.session.ahead = None  # It is put in now, or is out of date.
        return ahead


def render_ahead(
    context: CompactionContext, view: HistoryView, strategy: Strategy
) -> Compaction | None:
    """The request with a summary that was written ahead; None where it does not hold.

    The view is of the same contents, with that summary in place.
    """
    if not (view.is_summary_valid and context.view.covered < view.covered):
        return None
    text = view.stored.text if view.stored else ""
    if not context.is_due:
        context = replace(context, reason=strategy.early_reason)
    covered = context.whole(view.covered - context.kept.indexes)
    draft = replace(
        Draft.continue_from(context.view),
        text=text,
        covered=covered,
        model_covered=covered,
        model_chars=len(text),
    )
    compaction = context.render(draft)
    if compaction.tokens >= context.measure(context.contents):
        return None
    # What came since is left by this compaction, but not by one like it.
    kept = context.kept.indexes
    since = [view.shown[i] for i in view.uncovered if i not in kept]
    left_tokens = compaction.tokens - context.measure(since) + context.measure([])
    left_tokens = max(context.fixed_tokens, left_tokens)  # Some may stand shortened.
    stored = compaction.stored.model_copy(update={"left_tokens": left_tokens})
    return replace(compaction, stored=stored)
