"""What happens around one model call: measure, compact where due, remember."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk._calls.ahead import AheadOfTime, render_ahead
from contextguard_adk._calls.due import find_refusal, should_skip_compaction
from contextguard_adk._calls.limits import Limits
from contextguard_adk._calls.outgoing import Outgoing
from contextguard_adk._calls.shown_compaction import show_compaction
from contextguard_adk._history.rendering import mend_contents, render_request
from contextguard_adk._history.stored import AheadSummary, StoredSummary
from contextguard_adk._history.view import HistoryView
from contextguard_adk._measuring.calibration import (
    DEFAULT_CORRECTION,
    estimate_prompt_tokens,
    token_counter,
)
from contextguard_adk._measuring.tokens import estimate_config_tokens
from contextguard_adk._memory import (
    CallInFlight,
    Guard,
    Unsaved,
    call_key,
    name_session,
    summary_scope,
)
from contextguard_adk._providers.clients import find_llm
from contextguard_adk._recall.offer import RecallOffer
from contextguard_adk._summarizing.compose import Compaction
from contextguard_adk._summarizing.context import CompactionContext
from contextguard_adk._summarizing.items import attach_files
from contextguard_adk._summarizing.summarizer import Summarizer
from contextguard_adk._summarizing.todos import TodoList
from contextguard_adk.telemetry import (
    CompactionRecord,
    report_compaction,
    report_pressure,
)

if TYPE_CHECKING:
    from google.adk.agents.callback_context import CallbackContext

    from contextguard_adk.strategies.base import Strategy

logger = logging.getLogger("contextguard_adk.call")


class ModelCall:
    """One model call of one guarded agent."""

    def __init__(
        self,
        guard: Guard,
        context: CallbackContext,
        request: LlmRequest,
        strategy: Strategy,
    ) -> None:
        self._invocation = invocation = context.get_invocation_context()
        self.agent = context.agent_name
        self.request = request
        self.strategy = strategy
        self.state = guard.state(context)
        self.compaction: CompactionRecord | None = None
        self.is_rendered = False  # The request's contents hold the stored summary.
        self._reported: CompactionRecord | None = None
        self._started_seconds = asyncio.get_running_loop().time()
        self._guard = guard
        self._context = context
        self._scope = summary_scope(invocation)
        session_key = name_session(invocation), self.agent, self._scope
        self._session = guard.memory.session(session_key)
        self._ahead = AheadOfTime(strategy, self._session)
        self._run = guard.memory.run(invocation)
        self.memo = self._run.memo(invocation)
        self.limits = Limits(
            agent=self.agent,
            request=request,
            llm=find_llm(invocation.agent),
            strategy=strategy,
            registry=guard.registry,
            state=self.state,
            session=self._session,
        )
        self.outgoing = Outgoing(self.limits, invocation.session.events, self.memo)
        self._counts = self.limits.read_counts()
        self._recall = RecallOffer(
            invocation,
            request,
            strategy.recall,
            strategy.recall_page_tokens,
            token_counter(self._counts.correction or DEFAULT_CORRECTION),
        )

    async def run(self, is_observing: bool = False) -> None:
        """Changes the request so that it fits, and remembers what is sent."""
        original = self.request.contents
        view = self._view(None if is_observing else self._load_summary())
        contents = original if is_observing else self._apply_summary(view)
        if not is_observing:
            contents = self.outgoing.shape(contents, contents is not original)
        context = self._examine(view, contents)
        tokens, heuristic = context.tokens, self._heuristic
        if not is_observing:
            if self._session.pending.is_under_way and not context.has_room:
                await self.wait()
                await self.run()  # The summary is there, unless it failed.
                return
            if await self.put_in_ahead(context):
                await self.run()  # What came since may be too much as well.
                return
        await self._report(context)
        compaction = None if is_observing else await self._compact(context)
        if compaction is not None:
            contents = self.outgoing.shape(compaction.contents)
            tokens = compaction.tokens
            heuristic = context.config_heuristic_tokens
            heuristic += self.memo.estimate_tokens(contents)
        if contents is not original:
            self.request.contents = list(contents)
        if not is_observing:
            self.limits.fit_output(tokens)
            if self.compaction is None:
                self.outgoing.watch()
        elif context.is_due:
            logger.info(
                "Observing agent %r: a compaction would be due at %d tokens, the "
                "threshold is %d.",
                *(self.agent, context.tokens, context.budgets.threshold_tokens),
            )
        may_follow = not (is_observing or compaction)
        write_ahead = self._ahead.plan(context) if may_follow else None
        is_coming = self._session.pending.is_under_way or write_ahead is not None
        is_final = not may_follow or (context.is_due and not is_coming)
        await self._watch_pressure(context, tokens, is_final)
        call = CallInFlight(
            heuristic_tokens=heuristic,
            estimated_tokens=tokens,
            window_tokens=context.budgets.window_tokens,
            threshold_tokens=context.budgets.threshold_tokens,
            model=self.limits.model,
            original_contents=tuple(original),
            sent_contents=tuple(contents),
            sent_config=self.request.config.model_copy(),
            sealed=self.outgoing.sealed,
            session=self._session,
            compaction=self.compaction,
            write_ahead=write_ahead,
        )
        self._run.calls[call_key(self._context)] = call

    def _view(self, stored: StoredSummary | None) -> HistoryView:
        window, has_recall = self.limits.known_window_tokens(), self._recall.is_possible
        preview = self.strategy.preview(window, has_recall)
        return HistoryView(
            [*self.request.contents],
            self._invocation,
            self._context.user_content,
            stored,
            self.memo,
            preview and replace(preview, form=self.memo.form),
        )

    def _load_summary(self) -> StoredSummary | None:
        """Reads the stored summary; writes a paid one again whose state was lost."""
        if self.is_rendered:
            return None
        stored, run_id = self.state.record.summary, self._run.invocation_id
        if unsaved := self._session.take_lost(stored, run_id):
            view = self._view(unsaved.summary)
            if view.is_summary_valid:
                self._save(unsaved.summary, unsaved.tokens)
                self.compaction = unsaved.unreported
                if self.compaction and self.compaction.reason == "requested":
                    self.state.answer_request()
        return self._recall.adapt(self.state.load_summary(self._scope))

    def _save(self, summary: StoredSummary, tokens: int) -> None:
        replaced, run_id = self.state.record.summary, self._run.invocation_id
        unsaved = Unsaved(summary, tokens, replaced, run_id)
        self._run.keep_written(self._session, unsaved, self.state.key("record"))
        self._session.ahead, self._session.is_ahead_tried = None, False
        self.state.save_summary(summary, tokens)

    def _apply_summary(self, view: HistoryView) -> list[types.Content]:
        """The contents, with the stored summary in place of what it covers."""
        may_bind = self.outgoing.thinker.may_bind
        if self._recall.is_wanted(view, self.state, may_bind):
            window = self.limits.window_tokens()
            self._recall.make(view, view.stored, view.covered, window)
        if view.stored is None:
            contents = view.shown if view.previewed else self.request.contents
            return mend_contents(contents)
        contents = render_request(view, view.stored, view.covered)
        if self._recall.is_possible:
            contents = attach_files(contents, view.contents, view.history)
        return contents

    def render(self) -> list[types.Content]:
        """The request's contents, with the stored summary in place."""
        return self._apply_summary(self._view(self._load_summary()))

    def _examine(
        self, view: HistoryView, contents: Sequence[types.Content]
    ) -> CompactionContext:
        """Estimates the request with these contents; gathers what a strategy reads."""
        config_tokens = estimate_config_tokens(self.request.config)
        contents_tokens = self.memo.estimate_tokens(contents)
        self._heuristic = config_tokens + contents_tokens
        budgets, counts = self.limits.budgets(), self._counts
        is_requested = self.state.is_compaction_requested
        tokens = estimate_prompt_tokens(
            self._heuristic,
            counts.real_tokens,
            counts.heuristic_tokens,
            contents,
            default=counts.correction or DEFAULT_CORRECTION,
            config=self.request.config,
            memo=self.memo,
        )
        return CompactionContext(
            agent=self.agent,
            reason="requested" if is_requested else "tokens",
            tokens=tokens,
            config_heuristic_tokens=config_tokens + self._recall.missing_tokens,
            correction=counts.measured_correction,
            budgets=budgets,
            view=view,
            contents=contents,
            scope=self._scope,
            summarizer=Summarizer(
                settings=self.strategy,
                request=self.request,
                agent=self._invocation.agent,
                window_tokens=budgets.window_tokens,
                registry=self._guard.registry,
                session=self._session,
                breaker=self._guard.memory.breaker,
                prices=self._guard.prices,
            ),
            todos=TodoList(
                self._context.state, self.agent, self._guard.has_namespaced_keys
            ),
            has_recall=self._recall.is_possible,
            keep_tokens=self.strategy.keep_tokens(budgets.working_tokens),
            focus=self.state.requested_focus if is_requested else "",
            uncounted_tokens=max(0, tokens - (counts.real_tokens or 0)),
        )

    def examine_rejected(self, ratio: float) -> CompactionContext:
        """Gathers what a strategy reads, for that part of the usual threshold."""
        self._counts = self.limits.read_counts()
        view = self._view(self._load_summary())
        context = self._examine(view, view.shown)
        known = context.budgets
        budgets = replace(
            known,
            threshold_tokens=int(known.threshold_tokens * ratio),
            full_tokens=int(known.full_tokens * ratio),
        )
        return replace(context, reason="overflow", budgets=budgets)

    async def _compact(self, context: CompactionContext) -> Compaction | None:
        """Lets the strategy compact, and takes its result where that is smaller."""
        session = self._session
        if session.pending.is_under_way:
            return None  # A later call has what a cancelled one has paid for.
        compacted_run, session.compacted_run = session.compacted_run, ""
        if context.reason == "requested":
            was_running = compacted_run == self._invocation.invocation_id
            if refusal := find_refusal(context, was_running):
                self.state.answer_request(refusal)
                context = replace(context, reason="tokens")
        if not self.strategy.is_due(context):
            return None
        if context.has_room and self._ahead.may_begin(context):
            return None  # It is begun once this call is answered.
        if should_skip_compaction(context, bool(compacted_run) and session.was_full):
            return None
        started = time.monotonic()
        compaction, refusal = await self.summarize(context), ""
        if compaction is None:
            refusal = "the strategy found nothing to compact"
        elif compaction.tokens >= (before_tokens := context.measure(context.contents)):
            refusal = "it would have made the request larger"
            logger.info(
                "Compaction for agent %r dropped: %d tokens would become %d.",
                self.agent,
                before_tokens,
                compaction.tokens,
            )
        if compaction is None or refusal:
            if context.reason == "requested":
                self.state.answer_request(refusal)
            return None
        await self.accept(context, compaction, started)
        return compaction

    async def summarize(self, context: CompactionContext) -> Compaction | None:
        """Lets the strategy compact, which goes on when this call is cancelled."""
        await self.wait()  # A resend may find that of another turn.
        return await self._session.pending.write(self._summarize(context))

    async def wait(self) -> None:
        """Waits for the summary that is under way, if there is one."""
        # A summary takes three calls at most.
        await self._session.pending.wait(3 * self.strategy.summary_timeout_seconds)

    async def put_in_ahead(self, context: CompactionContext) -> Compaction | None:
        """Accepts the summary that was written ahead of time, where one is due."""
        if (ahead := self._ahead.take(context)) is None:
            return None
        compaction = render_ahead(context, self._view(ahead.stored), self.strategy)
        if compaction is not None:
            await self.accept(context, compaction, time.monotonic(), ahead)
        return compaction

    async def _summarize(self, context: CompactionContext) -> Compaction | None:
        """Has the next call find what comes of it, for this one may be gone."""
        started = time.monotonic()
        try:
            compaction = await self.strategy.compact(context)
        finally:
            context.summarizer.end()
        if compaction is None:
            return None
        if context.is_due and context.fits_yet and context.summarizer.may_recover:
            # It goes out as it is; once it has grown, there may be a summary.
            self._session.dropped_tokens = context.tokens
            return None
        if compaction.tokens < context.measure(context.contents):
            replaced, run = self.state.record.summary, self._run.invocation_id
            made = compaction.describe(context, self._invocation.session.id, started)
            unsaved = Unsaved(compaction.stored, context.tokens, replaced, run, made)
            self._session.keep(unsaved)
        else:
            self._session.dropped_tokens = context.tokens
        return compaction

    async def accept(
        self,
        context: CompactionContext,
        compaction: Compaction,
        started_seconds: float,
        ahead: AheadSummary | None = None,
    ) -> None:
        """Stores a compaction that began at `started_seconds`, and reports it."""
        stored, session = compaction.stored, self._session
        self._save(stored, context.tokens)
        session.dropped_tokens = None
        if context.reason != "overflow" and ahead is None:
            session.compacted_run = self._invocation.invocation_id
            session.was_full = context.reason != "requested"
        if context.reason == "requested":
            self.state.answer_request()
        window_tokens = context.budgets.window_tokens
        self._recall.make(context.view, stored, compaction.covered, window_tokens)
        self.request.cache_metadata = None  # It describes a prefix that is gone.
        session_id = self._invocation.session.id
        record = compaction.describe(context, session_id, started_seconds)
        self.compaction = replace(record, **ahead.facts) if ahead else record
        await self._report(context)

    async def _report(self, context: CompactionContext) -> None:
        if (made := self.compaction) and made is not self._reported:
            now_seconds = asyncio.get_running_loop().time()
            waited_seconds = now_seconds - self._started_seconds
            made = replace(made, waited_seconds=round(waited_seconds, 3))
            self._started_seconds = now_seconds
            self.compaction = self._reported = made
            threshold = context.budgets.threshold_tokens
            await report_compaction(made, threshold, self._guard.observers)
            await show_compaction(self._guard, self._context, self.state, made)

    async def _watch_pressure(
        self, context: CompactionContext, tokens: int, is_final: bool
    ) -> None:
        """Reports once that what is sent still fills much of the window.

        Not on the way up to the threshold, where compaction has its turn later.
        """
        observers, session = self._guard.observers, self._session
        if tokens / context.budgets.window_tokens < observers.warning_threshold:
            session.is_under_pressure = False
        elif is_final and not session.is_under_pressure:
            session.is_under_pressure = True
            place = self._invocation.session.id, observers.warning_threshold
            await report_pressure(context.describe_pressure(tokens, *place), observers)
