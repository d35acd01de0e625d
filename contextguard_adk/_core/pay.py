"""The stage that pays: the strategy compacts, and its summary goes on the shelf.

The shelf is `SessionFacts.ready`. A summary stays there until it is put in a request. A
compaction that gains nothing is called fruitless.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from dataclasses import dataclass, replace
from typing import Any

from contextguard_adk import _listeners
from contextguard_adk._history.contents import keep_pairs_whole
from contextguard_adk._history.stored import Draft
from contextguard_adk._runtime.memory import AgentMemory, Paid
from contextguard_adk._runtime.runs import Guard
from contextguard_adk._runtime.state import MAX_FOCUS_CHARS
from contextguard_adk._summaries.ask import Ask
from contextguard_adk._summaries.compose import compose
from contextguard_adk._support.log import log_failures, warn_once
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Summarized
from contextguard_adk.records import PlannedCompaction
from contextguard_adk.strategies.base import Strategy

logger = logging.getLogger("contextguard_adk.call")


@dataclass(frozen=True)
class Payer:
    """Lets a strategy compact. It holds nothing of the run, which may have ended.

    Attributes:
        guard: The memory of the plugin.
        memory: The memory of the agent, which has the shelf.
        strategy: The strategy of the agent.
        agent: ADK's agent, whose model writes summaries unless another one is set.
    """

    guard: Guard
    memory: AgentMemory
    strategy: Strategy
    agent: object

    async def pay(self, turn: Turn) -> bool:
        """Lets the strategy compact; its summary goes on the shelf if it gains tokens.

        Returns:
            False if the user's `before_compaction` puts the compaction off.
        """
        allowed_turn = await self.ask_user(turn, turn.budgets.threshold_tokens)
        if allowed_turn is None:
            return False

        draft, facts, ask = await self.compact(allowed_turn)
        if draft is not None:
            self._put_on_shelf(allowed_turn, draft, facts, ask)
        return True

    async def ask_user(
        self, turn: Turn, threshold_tokens: int, is_ahead: bool = False
    ) -> Turn | None:
        """Asks the user's `before_compaction` whether to compact, and with what focus.

        Args:
            turn: The model call.
            threshold_tokens: The size at which a compaction is due.
            is_ahead: Whether the summary is written before it is due.

        Returns:
            One of three outcomes:
            - The turn with a focus: the answer is a text.
            - None: the answer is False, and the request fits without a compaction.
            - The unchanged turn: in all other cases, or if no function is set.
        """
        new_indexes = turn.older_than(0) - turn.history.model_covered
        # A strategy that cannot tell how near it is may compact nothing.
        is_unclear = turn.nearness == math.inf and not turn.is_due
        has_function = self.guard.observers.listeners.before_compaction is not None
        if not has_function or is_unclear or not new_indexes:
            # There is nobody to ask, or nothing to ask about.
            return turn

        answer = await self._call_user(turn, new_indexes, threshold_tokens, is_ahead)
        if answer is None:
            return turn
        if isinstance(answer, str):
            focus = answer[:MAX_FOCUS_CHARS]
            return replace(turn, focus=f"{turn.focus}\n{focus}".strip())
        if answer is not False:
            message = "before_compaction returned %s, no str, False or None: ignored."
            warn_once(logger, message, type(answer).__name__)
            return turn

        # `has_room` tells the room for the reason "tokens", and is False for all
        # others. A compaction that was requested can also be put off.
        as_if_full = replace(turn, reason="tokens")
        can_wait = turn.reason != "overflow" and as_if_full.has_room
        if not can_wait:
            return turn

        message = "A compaction of agent %r is put off; %s."
        logger.info(message, turn.agent, turn.origin.place)
        self._note_fruitless(turn)
        return None

    async def _call_user(
        self,
        turn: Turn,
        new_indexes: frozenset[int],
        threshold_tokens: int,
        is_ahead: bool,
    ) -> object:
        """Calls the user's `before_compaction`; returns None if it fails or is late.

        Args:
            turn: The model call.
            new_indexes: The indexes of the messages that no summary covers yet.
            threshold_tokens: The size at which a compaction is due.
            is_ahead: Whether the summary is written before it is due.
        """
        observers = self.guard.observers
        with log_failures(logger, "before_compaction could not be asked"):
            new_messages = [turn.messages[index] for index in sorted(new_indexes)]
            # The function gets copies, because it may change them.
            messages = copy.deepcopy(new_messages)
            planned = PlannedCompaction(
                **vars(turn.origin),
                reason=turn.reason if turn.is_due else self.strategy.early_reason,
                messages=tuple(messages),
                tokens=turn.tokens,
                window_tokens=turn.budgets.window_tokens,
                threshold_tokens=threshold_tokens,
                summary_tokens=turn.summary_tokens,
                is_ahead=is_ahead,
            )
            answer: object = await observers.tell(planned)
            return answer

        # A failure that was logged leads here.
        return None

    async def compact(self, turn: Turn) -> tuple[Draft | None, dict[str, Any], Ask]:
        """Lets the strategy compact, and tells the listeners what that took.

        Returns:
            Three values:
            - The draft of the strategy; None if it leaves the request as it is.
            - The fields of the `CompactionRecord` that tell what the compaction took.
            - The object that has had summaries written for the strategy.
        """
        started_seconds = time.monotonic()
        ask = Ask(turn, self.agent, self.memory, self.guard)
        try:
            draft = await self.strategy.compact(turn, ask)
        finally:
            facts = ask.store_costs()
            event = Summarized(turn.origin, facts)
            for listener in _listeners.SUMMARIZED:
                with log_failures(logger, f"{type(listener).__name__} failed"):
                    listener.summarized(event)

        duration_seconds = time.monotonic() - started_seconds
        return draft, {**facts, "duration_seconds": duration_seconds}, ask

    def _put_on_shelf(
        self, turn: Turn, draft: Draft, facts: dict[str, Any], ask: Ask
    ) -> None:
        """Puts a summary on the shelf if it makes the request smaller.

        Args:
            turn: The model call.
            draft: The draft of the strategy.
            facts: The fields of the `CompactionRecord`, see `compact`.
            ask: The object that has had summaries written.
        """
        most_tokens = turn.tokens + turn.size.error_tokens
        can_wait = most_tokens < turn.budgets.overfull_tokens
        is_for_size = turn.is_due and turn.reason == "tokens"
        if ask.may_recover and is_for_size and can_wait:
            # The summarizer has failed, so the draft has excerpts only. The summarizer
            # may answer at the next try, once the request has grown.
            self._note_fruitless(turn)
            return

        # A user's own strategy may cover a call without its result, or contents that
        # are to stay.
        may_cover = draft.covered - turn.always_kept
        covered = keep_pairs_whole(may_cover, turn.history.pairs)
        model_covered = draft.model_covered & covered
        valid_draft = replace(draft, covered=covered, model_covered=model_covered)
        outcome = compose(turn, valid_draft)

        tokens_before = turn.measure(turn.contents)
        if outcome.tokens >= tokens_before:
            self._note_fruitless(turn)
            message = "Compaction for agent %r dropped: %d tokens would become %d; %s."
            place = turn.origin.place
            logger.info(message, turn.agent, tokens_before, outcome.tokens, place)
            return

        paid = Paid(
            draft=valid_draft,
            stored=outcome.stored,
            facts=facts,
            run_id=turn.origin.invocation_id,
        )
        self.memory.facts = replace(self.memory.facts, ready=paid)

    def _note_fruitless(self, turn: Turn) -> None:
        """Remembers the size of the request whose compaction gained nothing."""
        self.memory.facts = replace(self.memory.facts, fruitless_tokens=turn.tokens)
