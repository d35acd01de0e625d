"""What happens around one model call: measure, compact where due, remember."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk.history.rendering import render_request
from contextguard_adk.history.state import GuardState
from contextguard_adk.history.stored_summary import StoredSummary
from contextguard_adk.history.view import HistoryView
from contextguard_adk.kept_measures import KeptMeasures
from contextguard_adk.measuring.budgets import (
    Budgets,
    summary_budget_tokens,
    threshold_tokens,
)
from contextguard_adk.measuring.calibration import (
    DEFAULT_CORRECTION,
    correction_factor,
    estimate_prompt_tokens,
    token_counter,
)
from contextguard_adk.measuring.shortening import TokenCounter
from contextguard_adk.measuring.tokens import (
    estimate_config_tokens,
    text_bytes,
)
from contextguard_adk.memory import CallInFlight, Memory, SessionKey
from contextguard_adk.pressure import Pressure
from contextguard_adk.providers.overflow import MIN_LIMIT_TOKENS
from contextguard_adk.providers.windows import ModelRegistry, resolve_context_window
from contextguard_adk.recall.offer import RecallOffer
from contextguard_adk.restraint import Restraint
from contextguard_adk.run_cache import RunCache
from contextguard_adk.strategies.base import Strategy
from contextguard_adk.summarizers import Summarizers
from contextguard_adk.summarizing.context import Compaction, CompactionContext, Reason
from contextguard_adk.summarizing.in_place import ConversationEnd
from contextguard_adk.summarizing.summary_call import SummaryModel
from contextguard_adk.summarizing.todos import (
    TODOS_TOOL,
    load_todos,
    render_todos,
    write_todo_list,
)
from contextguard_adk.summary_store import SummaryStore
from contextguard_adk.telemetry import (
    CompactionRecord,
    Observers,
    report_compaction,
)
from contextguard_adk.usage import call_key, name_session

if TYPE_CHECKING:
    from google.adk.agents.callback_context import CallbackContext
    from google.adk.agents.invocation_context import InvocationContext

logger = logging.getLogger("contextguard_adk.guard")

TRUST_RATIO = 0.8
"""Of the threshold: while the provider last counted less, old results are not looked
through again in each run, and one that was edited in place may count what it did.
To overflow so, such an edit must add more than the buffer while the run itself adds all
that is left below the threshold; the provider's refusal is then recovered from."""


class ModelCall:
    """One model call of one guarded agent.

    Args:
        context: ADK's callback context.
        invocation: Its invocation context.
        request: The request, as the plugin sees it.
        strategy: The agent's strategy.
        memory: What the plugin remembers in process.
        registry: Where context windows are looked up; None is the default.
        is_namespaced: Which form of state keys to write.
        observers: Who is told what happened.
    """

    def __init__(
        self,
        context: CallbackContext,
        invocation: InvocationContext,
        request: LlmRequest,
        strategy: Strategy,
        memory: Memory,
        registry: ModelRegistry | None,
        is_namespaced: bool,
        observers: Observers | None = None,
    ) -> None:
        self.agent = context.agent_name
        self.request = request
        self.strategy = strategy
        self.state = GuardState(context.state, self.agent, is_namespaced)
        self._context = context
        self._invocation = invocation
        self._memory = memory
        self._registry = registry
        self._is_namespaced = is_namespaced
        self.scope = _scope(invocation)
        self.session_key: SessionKey = (
            name_session(invocation),
            self.agent,
            self.scope,
        )
        self._observers = observers or Observers()
        self.compaction: CompactionRecord | None = None
        self._store = SummaryStore(self.state, memory, self.session_key)
        self._restraint = Restraint(memory, self.session_key)
        self._pressure = Pressure(
            memory, self.session_key, invocation.session.id, self._observers
        )
        self._calibration = _Calibration()
        self._recall = RecallOffer(
            invocation,
            request,
            strategy.recall,
            strategy.recall_page_tokens,
            self._calibration.load_counter,
        )
        self._summarizers = Summarizers(memory, registry)
        key = call_key(context, invocation)
        self._cache = memory.caches.get(key) or self._begin_cache(key[0])
        self._cache.begin_call(invocation.session.events, context.invocation_id)
        memory.caches.put(key, self._cache)
        self._measured: tuple[Sequence[types.Content], int] = ((), 0)
        self._lowered_ratio = 1.0

    def _begin_cache(self, session: str) -> RunCache:
        kept = self._memory.kept.get(session) or KeptMeasures()
        kept.begin_run(self._context.invocation_id)
        self._memory.kept.put(session, kept)
        real = self.state.read_count("real_tokens") or 0
        is_far = 0 < real < self.budgets().threshold_tokens * TRUST_RATIO
        return RunCache(kept, trusts_sizes=is_far)

    async def guard(self, is_observing: bool = False) -> None:
        """Changes the request so that it fits, and remembers what is sent."""
        original = self.request.contents
        stored = None if is_observing else self._load_summary()
        view = self._view(stored)
        contents: Sequence[types.Content] = original
        if stored is not None:
            contents = render_request(view, stored, view.covered)
            self._recall.make(view, stored, view.covered, self.window_tokens())
            contents = self._recall.attach(view, contents)
        context = self._measure(view, contents)
        tokens = context.tokens
        if is_observing:
            self._report(context)
            await self._pressure.watch(context, tokens, is_final=True)
        else:
            compaction = await self._compact(context, contents)
            if compaction is not None:
                contents = compaction.contents
                tokens = compaction.tokens
            is_final = context.is_due or compaction is not None
            await self._pressure.watch(context, tokens, is_final)
            if contents is not original:
                self.request.contents = list(contents)
        measured, contents_tokens = self._measured
        if contents is not measured:
            contents_tokens = self._cache.estimate_contents_tokens(contents)
        config_tokens = estimate_config_tokens(self.request.config)
        self._memory.calls.put(
            call_key(self._context, self._invocation),
            CallInFlight(
                heuristic_tokens=config_tokens + contents_tokens,
                estimated_tokens=tokens,
                window_tokens=context.budgets.window_tokens,
                original_contents=tuple(original),
                sent_contents=tuple(contents),
                sent_config=self.request.config,
                threshold_tokens=context.budgets.threshold_tokens,
                compaction=self.compaction,
                session_key=self.session_key,
            ),
        )

    def _load_summary(self) -> StoredSummary | None:
        return self._recall.adapt(self._store.load(self._view))

    def _view(self, stored: StoredSummary | None) -> HistoryView:
        run_config = self._invocation.run_config
        transient = getattr(run_config, "model_input_context", None) or ()
        return HistoryView(
            self.request.contents,
            events=self._invocation.session.events,
            transient=transient,
            user_content=self._context.user_content,
            invocation_id=self._context.invocation_id,
            stored=stored,
            take_fingerprint=self._cache.fingerprint,
            find_history=self._cache.find_history,
        )

    def _measure(
        self, view: HistoryView, contents: Sequence[types.Content]
    ) -> CompactionContext:
        """Estimates the request as it stands, and gathers what a strategy reads."""
        config_tokens = estimate_config_tokens(self.request.config)
        contents_tokens = self._cache.estimate_contents_tokens(contents)
        self._measured = contents, contents_tokens
        heuristic = config_tokens + contents_tokens
        real = self.state.read_count("real_tokens")
        last = self.state.read_count("last_heuristic")
        reason: Reason = "tokens"
        if self.state.is_compaction_requested():
            reason = "requested"
        correction = self._learned_correction()
        tokens = estimate_prompt_tokens(
            heuristic,
            real,
            last,
            contents,
            default=correction or DEFAULT_CORRECTION,
            config=self.request.config,
            measure=self._cache.measure_part,
        )
        self._lowered_ratio = min(1.0, tokens / max(1, heuristic))
        if real and last:
            correction = correction_factor(real, last)
        self._calibration.correction = correction or DEFAULT_CORRECTION
        return CompactionContext(
            agent=self.agent,
            reason=reason,
            tokens=tokens,
            config_heuristic_tokens=config_tokens + self._recall.missing_tokens,
            correction=correction,
            budgets=self.budgets(),
            view=view,
            scope=self.scope,
            load_summary_model=self._summary_model,
            conversation_end=ConversationEnd(
                self._memory,
                self.session_key,
                self.strategy.reuse_prompt_cache,
                self._invocation.agent,
                self.request,
                contents,
            ),
            load_todos=self._todos,
            load_todo_list=self._todo_list,
            has_recall=self._recall.is_possible,
            attach_files=partial(self._recall.attach, view),
        )

    def examine_rejected(self, ratio: float) -> CompactionContext:
        """Gathers what a strategy reads after the provider said "too long".

        Args:
            ratio: How much of the usual threshold the next request may take.
        """
        stored = self._load_summary()
        view = self._view(stored)
        context = self._measure(view, self.request.contents)
        budgets = context.budgets
        threshold = int(budgets.threshold_tokens * ratio)
        return replace(
            context,
            reason="overflow",
            budgets=replace(budgets, threshold_tokens=threshold),
        )

    async def _compact(
        self, context: CompactionContext, contents: Sequence[types.Content]
    ) -> Compaction | None:
        """Lets the strategy compact, and takes its result where that is smaller."""
        if self._restraint.holds_back(
            context, self.request.config, self._lowered_ratio
        ):
            return None
        started = time.monotonic()
        compaction = await self.strategy.compact(context)
        if compaction is not None or context.failures:
            has_failed = bool(context.failures)
            self._summarizers.note(self.strategy, self._agent_model(), has_failed)
        if context.reason == "requested":
            self.state.clear_compaction_request()
        if compaction is None:
            return None
        before = context.measure(contents)
        has_gained = compaction.tokens < before
        self._restraint.note(context, has_gained)
        if not has_gained:
            logger.info(
                "Compaction for agent %r dropped: %d tokens would become %d.",
                self.agent,
                before,
                compaction.tokens,
            )
            return None
        await self.accept(context, compaction, started, len(contents))
        return compaction

    async def accept(
        self,
        context: CompactionContext,
        compaction: Compaction,
        started_seconds: float,
        contents_before: int,
    ) -> None:
        """Stores a compaction and says so.

        Args:
            context: What the strategy read.
            compaction: What it returned.
            started_seconds: When it began, by `time.monotonic`.
            contents_before: How many contents would have been sent without it.
        """
        self._store.save(compaction.stored, context.tokens)
        self._restraint.forget_dropped()
        self._recall.make(
            context.view,
            compaction.stored,
            compaction.covered,
            context.budgets.window_tokens,
        )
        self.request.cache_metadata = None  # It describes a prefix that is gone.
        stored = compaction.stored
        record = CompactionRecord(
            agent=self.agent,
            session_id=self._invocation.session.id,
            strategy=type(self.strategy).__name__,
            reason=compaction.reason or context.reason,
            tokens_before=context.tokens,
            tokens_after=compaction.tokens,
            contents_before=contents_before,
            contents_after=len(compaction.contents),
            summary_tokens=text_bytes(stored.text) // 4,
            duration_seconds=time.monotonic() - started_seconds,
            attempts=compaction.attempts,
            is_mechanical=stored.is_mechanical,
        )
        self.compaction = record
        await report_compaction(
            record, context.budgets.threshold_tokens, self._observers
        )

    def _report(self, context: CompactionContext) -> None:
        """Says what a guard that only observes would have done."""
        if context.is_due:
            logger.info(
                "Observing agent %r: %d tokens have reached the threshold of %d; a "
                "compaction would be due.",
                self.agent,
                context.tokens,
                context.budgets.threshold_tokens,
            )

    def budgets(self) -> Budgets:
        """The sizes that this call has to respect."""
        window = self.window_tokens()
        reserved = self.request.config.max_output_tokens or 0
        return Budgets(
            window_tokens=window,
            threshold_tokens=threshold_tokens(window, reserved),
            summary_tokens=summary_budget_tokens(window),
        )

    def window_tokens(self) -> int:
        """The agent's context window, never wider than a provider has said."""
        window = resolve_context_window(
            self._model_name(),
            configured=self.strategy.context_window,
            registry=self._registry,
            agent=self.agent,
        ).tokens
        learned = self.state.read_count("learned_window") or 0
        return min(window, learned) if learned >= MIN_LIMIT_TOKENS else window

    def _learned_correction(self) -> float | None:
        """What a rejection has taught about the tokenizer of a silent provider."""
        percent = self.state.read_count("learned_correction")
        return percent / 100 if percent else None

    def _model_name(self) -> str:
        if self.request.model:
            return self.request.model
        llm = self._agent_model()
        return llm.model if llm else ""

    def _agent_model(self) -> BaseLlm | None:
        model = getattr(self._invocation.agent, "canonical_model", None)
        return model if isinstance(model, BaseLlm) else None

    def _summary_model(self) -> SummaryModel | None:
        return self._summarizers.choose(
            self.strategy, self._agent_model(), self.window_tokens(), self.request
        )

    def _todos(self) -> str:
        has_tool = TODOS_TOOL in self.request.tools_dict
        return render_todos(self._load_todos(), has_todos_tool=has_tool)

    def _todo_list(self, budget_tokens: int, count: TokenCounter) -> str:
        return write_todo_list(self._load_todos(), budget_tokens, count)

    def _load_todos(self) -> list[tuple[str, str]]:
        return load_todos(self._context.state, self.agent, self._is_namespaced)


@dataclass
class _Calibration:
    """How many real tokens a heuristic one stands for, as far as is known.

    The recall tool, which the request holds, holds this rather than the model call:
    that would be a cycle, and every request stay in memory until it is collected.
    """

    correction: float = DEFAULT_CORRECTION

    def load_counter(self) -> TokenCounter:
        """Returns what counts tokens of a text."""
        return token_counter(self.correction)


def _scope(invocation: InvocationContext) -> str:
    """A digest of session, branch and isolation scope; of the invocation as well
    where the agent sees nothing else."""
    scope = [
        invocation.session.id,
        invocation.branch or "",
        getattr(invocation, "isolation_scope", None) or "",
    ]
    if getattr(invocation.agent, "include_contents", "default") == "none":
        scope.append(invocation.invocation_id)
    return hashlib.blake2b("\0".join(scope).encode(), digest_size=8).hexdigest()
