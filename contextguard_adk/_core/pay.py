"""The stage that pays: the strategy compacts, now or in the background."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from contextguard_adk._core.call import Call
from contextguard_adk._core.decide import is_worth_it, may_begin_in_background
from contextguard_adk._history.contents import keep_pairs_whole
from contextguard_adk._history.draft import Draft
from contextguard_adk._listeners.metrics import count_summaries
from contextguard_adk._runtime.memory import AgentMemory, Paid
from contextguard_adk._runtime.runs import Guard
from contextguard_adk._summaries.ask import Ask
from contextguard_adk._summaries.compose import compose
from contextguard_adk._support.log import log_failures, warn_once
from contextguard_adk._turn.turn import Turn
from contextguard_adk.records import PlannedCompaction
from contextguard_adk.strategies.base import Strategy

logger = logging.getLogger("contextguard_adk.call")


@dataclass(frozen=True)
class Payer:
    """Lets a strategy compact; holds nothing of the run, which may have ended."""

    guard: Guard
    memory: AgentMemory
    strategy: Strategy
    agent: object

    @classmethod
    def of(cls, call: Call) -> Payer:
        return cls(call.guard, call.memory, call.strategy, call.invocation.agent)

    async def pay(self, turn: Turn) -> bool:
        """Lets the strategy compact, unless the user's function puts it off: False."""
        if planned := await self._plan(turn, None):
            await self._pay(planned)
        return planned is not None

    async def _plan(self, turn: Turn, ahead_tokens: int | None) -> Turn | None:
        """Asks the user's function for a focus; None where it puts off what fits."""
        observers = self.guard.observers
        new = turn.older_than(0) - turn.summarized
        # A strategy that does not say how near it is may want nothing.
        is_unclear = turn.nearness == math.inf and not turn.is_due
        if observers.listeners.before_compaction is None or is_unclear or not new:
            return turn
        said: object = None
        with log_failures(logger, "before_compaction could not be asked"):
            reason = turn.reason if turn.is_due else self.strategy.early_reason
            messages = tuple(copy.deepcopy([turn.messages[i] for i in sorted(new)]))
            due_tokens = ahead_tokens or turn.budgets.threshold_tokens
            planned = PlannedCompaction(
                **vars(turn.origin),
                reason=reason,
                messages=messages,
                tokens=turn.tokens,
                window_tokens=turn.budgets.window_tokens,
                threshold_tokens=due_tokens,
                summary_tokens=turn.summary_tokens,
                is_ahead=ahead_tokens is not None,
            )
            said = await observers.tell(planned)
            if isinstance(said, str):
                return replace(turn, focus=f"{turn.focus}\n{said[:1_000]}".strip())
        if said is not None and said is not False:
            message = "before_compaction returned %s, no str, False or None: ignored."
            warn_once(logger, message, type(said).__name__)
        has_room = replace(turn, reason="tokens").has_room
        if said is not False or turn.reason == "overflow" or not has_room:
            return turn
        message = "A compaction of agent %r is put off; %s."
        logger.info(message, turn.agent, turn.origin.place)
        self._note_fruitless(turn)
        return None

    async def _pay(self, turn: Turn) -> None:
        """Has a summary made; it goes on the shelf where it gains."""
        draft, facts, ask = await self._compact(turn)
        if draft is None:
            return
        fits_yet = turn.most_tokens < turn.budgets.overfull_tokens
        is_full = turn.is_due and turn.reason == "tokens"
        if is_full and fits_yet and ask.may_recover:
            # It still fits: the next try is made once it has grown.
            self._note_fruitless(turn)
            return
        # What a strategy of the user's own covers may split a call from its result.
        covered = keep_pairs_whole(draft.covered - turn.stays, turn.history.pairs)
        summarized = draft.model_covered & covered
        draft = replace(draft, covered=covered, model_covered=summarized)
        outcome = compose(turn, draft)
        tokens = turn.measure(turn.contents)
        if outcome.tokens >= tokens:
            self._note_fruitless(turn)
            message = "Compaction for agent %r dropped: %d tokens would become %d; %s."
            place = turn.origin.place
            logger.info(message, turn.agent, tokens, outcome.tokens, place)
            return
        run_id = turn.history.invocation_id
        paid = Paid(draft, outcome.stored, facts, run_id)
        self.memory.facts = replace(self.memory.facts, ready=paid)

    def _note_fruitless(self, turn: Turn) -> None:
        """Remembers the size at which a compaction gained nothing."""
        self.memory.facts = replace(self.memory.facts, fruitless_tokens=turn.tokens)

    async def pay_in_background(self, turn: Turn, threshold_tokens: int) -> None:
        """Writes a summary that waits on the shelf until a compaction is due."""
        if not await self.guard.tasks.take_place():
            return
        if (planned := await self._plan(turn, threshold_tokens)) is None:
            return
        draft, facts, ask = await self._compact(turn := planned)
        # A pipeline may do without a summary.
        if draft is None or not ask.attempts or draft.is_mechanical:
            return
        stored = compose(turn, draft).stored
        draft = Draft(stored.model_text, frozenset(), model_chars=stored.model_chars)
        stored = stored.model_copy(update={"beside": {}, "truncation": None})
        facts["was_ahead"] = True
        run_id = turn.history.invocation_id
        paid = Paid(draft, stored, facts, run_id, is_background=True)
        self.memory.facts = replace(self.memory.facts, ready=paid)

    async def _compact(self, turn: Turn) -> tuple[Draft | None, dict[str, Any], Ask]:
        started = time.monotonic()
        ask = Ask(turn, self.agent, self.memory, self.guard)
        try:
            draft = await self.strategy.compact(turn, ask)
        finally:
            facts = ask.end()
            count_summaries(turn.origin, facts)
        return draft, {**facts, "duration_seconds": time.monotonic() - started}, ask


def plan_background(call: Call, turn: Turn) -> Callable[[int], None] | None:
    """Returns what to call with the tokens of the request once it is answered.

    None where nothing is to be written: the request is too small, there is a
    summary, or one was tried since the last compaction.
    """
    if call.is_observed or turn.is_settled or not may_begin_in_background(turn):
        return None
    turn.history.release()
    # What is kept must not hold the run: its tools may.
    update = {"config": turn.config.model_copy(), "tools_dict": {}}
    request = turn.request.model_copy(update=update)
    turn = replace(turn, request=request, contents=[*turn.contents])
    return partial(_begin, Payer.of(call), turn)


def _begin(payer: Payer, turn: Turn, tokens: int) -> None:
    size = replace(turn.size, tokens=tokens)
    budgets = turn.budgets
    facts = replace(payer.memory.facts, compacted_run="")
    is_writing = payer.memory.pending.is_under_way
    turn = replace(turn, size=size, facts=facts, is_writing=is_writing)
    turn = replace(turn, nearness=payer.strategy.fullness(turn))
    if not may_begin_in_background(turn):
        return
    is_full = turn.fullness >= (turn.settings.ahead or 1.0)
    at_trigger = replace(size, tokens=max(tokens, budgets.threshold_tokens))
    if is_full and not is_worth_it(replace(turn, size=at_trigger)):
        return
    # As if this size were the threshold. What comes later stays word for word.
    due_tokens = budgets.threshold_tokens
    ratio = min(1.0, 0.99 * tokens / due_tokens)
    budgets = replace(
        budgets,
        threshold_tokens=int(ratio * due_tokens),
        full_tokens=int(ratio * budgets.full_tokens),
        working_tokens=int(ratio * budgets.working_tokens),
    )
    reason = "tokens" if is_full else payer.strategy.early_reason
    turn = replace(turn, reason=reason, budgets=budgets, keep_count=0)
    payer.memory.facts = replace(payer.memory.facts, is_background_tried=True)
    payer.memory.pending.start(payer.pay_in_background(turn, due_tokens))
