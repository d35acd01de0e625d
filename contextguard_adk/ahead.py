"""Summaries that are written ahead of time, while the agent goes on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from contextguard_adk.due import should_skip_compaction
from contextguard_adk.history.state import AgentState
from contextguard_adk.history.stored import AheadSummary
from contextguard_adk.history.view import HistoryView
from contextguard_adk.memory import SessionMemory
from contextguard_adk.pending import SummaryTasks
from contextguard_adk.strategies.base import Strategy
from contextguard_adk.summarizing.compaction import Compaction
from contextguard_adk.summarizing.context import CompactionContext


@dataclass(frozen=True)
class AheadOfTime:
    """Has the next summary of an agent written while the agent goes on."""

    strategy: Strategy
    state: AgentState
    session: SessionMemory
    tasks: SummaryTasks

    def plan(self, context: CompactionContext) -> Callable[[int], None] | None:
        """What to call with the tokens of the request once it is answered.

        None where nothing is to be written: it is not wanted, there is a summary, or
        one was tried since the last compaction.
        """
        if self.strategy.ahead is None:
            return None
        stored = self.state.read("ahead")
        if ahead := self.session.ahead:
            # The event of this call brings it to the session; the next call sees that.
            self.session.ahead = "" if ahead == stored else ahead
            self.state.write("ahead", ahead)
        if self.session.is_ahead_tried or stored:
            return None
        summarizer = context.summarizer
        config = summarizer.request.config.model_copy()  # A client may change it.
        request = summarizer.request.model_copy(update={"config": config})
        summarizer = replace(summarizer, request=request)
        return partial(self._start, replace(context, summarizer=summarizer))

    def _start(self, context: CompactionContext, tokens: int) -> None:
        session, ahead = self.session, self.strategy.ahead
        context = replace(context, tokens=tokens)
        if ahead is None or session.is_ahead_tried or session.pending.is_under_way:
            return
        if not ahead <= self.strategy.fullness(context) < 1:
            return
        # As if it were due now. What comes from here on stays word for word.
        is_full = context.fullness >= ahead
        context = replace(
            context,
            reason="tokens" if is_full else self.strategy.early_reason,
            budgets=replace(context.budgets, threshold_tokens=tokens),
            keep_count=0,
        )
        if not (is_full and should_skip_compaction(context, False)):
            session.is_ahead_tried = True
            session.pending.start(self._write(context))

    async def _write(self, context: CompactionContext) -> None:
        if not await self.tasks.take_place():
            return
        started, summarizer = time.monotonic(), context.summarizer
        try:
            compaction = await self.strategy.compact(context)
        finally:
            summarizer.end()
        # A pipeline may do without a summary.
        if not (compaction and compaction.attempts) or compaction.stored.is_mechanical:
            return
        stored = compaction.stored
        ahead = AheadSummary(
            text=stored.model_text,
            covered=stored.covered,
            scope=context.scope,
            invocation=context.view.invocation_id,
            made_for=_digest_settings(context),
            model=summarizer.model_name,
            usage=summarizer.usage,
            cost=summarizer.cost,
            duration_seconds=time.monotonic() - started,
        )
        self.session.ahead = ahead.model_dump_json()

    def take(self, context: CompactionContext) -> AheadSummary | None:
        """Takes the summary that was written, where a compaction is due."""
        is_due = self.strategy.is_due(context)
        if self.strategy.ahead is None or not is_due or context.focus:
            return None
        ahead = self.state.read_ahead(self.session.ahead, context.scope)
        self.session.ahead = ""
        self.state.write("ahead", None)  # It is put in now, or is out of date.
        return ahead


def render_ahead(
    context: CompactionContext,
    view: HistoryView,
    ahead: AheadSummary,
    strategy: Strategy,
) -> Compaction | None:
    """The request with a summary that was written ahead; None where it does not hold.

    The view is of the same contents, with that summary in place.
    """
    if ahead.made_for != _digest_settings(context):
        return None
    if not (view.is_summary_valid and context.view.covered < view.covered):
        return None
    if not context.is_due:
        context = replace(context, reason=strategy.early_reason)
    covered = context.whole(view.covered - context.kept.indexes)
    text = ahead.text
    compaction = context.render_summary(text, covered, covered, len(text))
    is_smaller = compaction.tokens < context.measure(context.contents)
    return compaction if is_smaller else None


def _digest_settings(context: CompactionContext) -> str:
    """A digest of the models and settings that decide what a summary says."""
    settings = context.summarizer.settings
    said = (
        type(settings).__name__,
        context.summarizer.request.model,
        getattr(settings.summarizer, "model", settings.summarizer),
        settings.summary_instruction,
    )
    return hashlib.blake2b(repr(said).encode(), digest_size=8).hexdigest()
