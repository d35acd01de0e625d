"""The stage that pays: the strategy compacts, and its summary is ready.

A summary that is ready (`SessionFacts.ready`) waits until it is put in a request.

A compaction is fruitless if it gains nothing, or if it is put off.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from contextguard_adk import _listeners
from contextguard_adk._core.review import review_summary
from contextguard_adk._history.contents import keep_pairs_whole
from contextguard_adk._history.stored import Draft, StoredSummary
from contextguard_adk._runtime.memory import AgentMemory, ReadySummary
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


class Written(NamedTuple):
    """The result of a strategy.

    Attributes:
        draft: The draft; None if the strategy leaves the request as it is.
        facts: Fields of the `CompactionRecord`, such as `usage` and `duration_seconds`.
        ask: Through which the strategy has had summaries written.
    """

    draft: Draft | None
    facts: dict[str, Any]
    ask: Ask


@dataclass(frozen=True)
class Payer:
    """Lets a strategy compact, also after the run of its model call has ended.

    So a payer holds nothing of the run.

    Attributes:
        guard: The memory of the plugin.
        memory: The memory of the agent.
        strategy: The strategy of the agent.
        agent: ADK's agent, whose model writes summaries unless another one is set.
    """

    guard: Guard
    memory: AgentMemory
    strategy: Strategy
    agent: object

    async def pay(self, turn: Turn) -> bool:
        """Lets the strategy compact; its summary is then ready if it saves tokens.

        Returns:
            False if the user's `before_compaction` puts the compaction off.
        """
        allowed_turn = await self.ask_user(turn, turn.budgets.threshold_tokens)
        if allowed_turn is None:
            return False

        written = await self.write(allowed_turn)
        stored = self._check_gain(allowed_turn, written)
        if stored is not None:
            ready = ReadySummary(stored, written.facts)
            self.memory.facts = replace(self.memory.facts, ready=ready)
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
            - The turn with the user's focus added to its own, if the answer is a text.
            - None if the answer is False, and the compaction can wait.
            - The unchanged turn in all other cases: the compaction is to go on.
        """
        new_indexes = turn.older_than(keep_count=0) - turn.history.model_covered
        # A strategy that cannot tell how near a compaction is has a nearness of
        # infinity: it is asked to compact before each call. Below the threshold it
        # mostly compacts nothing, so the user is not asked each time.
        is_unlikely = turn.nearness == math.inf and not turn.is_due
        has_function = self.guard.observers.listeners.before_compaction is not None
        is_free = turn.settings.summaries == "stored"
        if not has_function or is_unlikely or is_free or not new_indexes:
            return turn

        answer = await self._call_user(turn, new_indexes, threshold_tokens, is_ahead)
        if isinstance(answer, str):
            focus = answer[:MAX_FOCUS_CHARS]
            return replace(turn, focus=f"{turn.focus}\n{focus}".strip())
        if answer is not None and answer is not False:
            message = "before_compaction returned %s, no str, False or None: ignored."
            warn_once(logger, message, type(answer).__name__)

        # After a rejection, no compaction can wait. Any other compaction can wait if
        # the request has room without it. `has_room` knows that for the reason "tokens"
        # alone, so the property is read with this reason.
        has_room = replace(turn, reason="tokens").has_room
        can_wait = has_room and turn.reason != "overflow"
        is_put_off = answer is False and can_wait
        if not is_put_off:
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
        """Calls the user's `before_compaction`, and returns its answer.

        Args:
            turn: The model call.
            new_indexes: The indexes of the messages that no model has summarized yet.
            threshold_tokens: The size at which a compaction is due.
            is_ahead: Whether the summary is written before it is due.

        Returns:
            The answer, which may be any value; None if the function fails or is late.
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

        # `log_failures` has caught an error.
        return None

    async def write(self, turn: Turn, is_ahead: bool = False) -> Written:
        """Lets the strategy compact, and tells the listeners of its summary calls.

        The user's `after_summary` may change or refuse the summary. If the strategy
        fails, the listeners are told all the same, because the calls before the failure
        are paid for. Then the error is raised.

        Args:
            turn: The model call.
            is_ahead: Whether the summary is written before it is due.
        """
        started_seconds = time.monotonic()
        ask = Ask(turn, self.agent, self.memory, self.guard, is_ahead)
        try:
            draft = await self.strategy.compact(turn, ask)
            if draft is not None:
                draft = await review_summary(self.guard, turn, ask, draft)
        finally:
            facts = ask.store_costs()
            event = Summarized(turn.origin, facts)
            for listener in _listeners.SUMMARIZED:
                with log_failures(logger, f"{type(listener).__name__} failed"):
                    listener.summarized(event)

        duration_seconds = time.monotonic() - started_seconds
        return Written(draft, {**facts, "duration_seconds": duration_seconds}, ask)

    def _check_gain(self, turn: Turn, written: Written) -> StoredSummary | None:
        """Returns a draft as session state has it, if it makes the request smaller.

        Otherwise the draft is dropped, and the compaction is fruitless. The result is
        also None if the strategy leaves the request as it is.

        Args:
            turn: The model call.
            written: The draft of the strategy.
        """
        draft = written.draft
        if draft is None:
            return None

        most_tokens = turn.tokens + turn.size.error_tokens
        is_accepted_as_is = most_tokens < turn.budgets.overfull_tokens
        is_for_size = turn.is_due and turn.reason == "tokens"
        if written.ask.may_recover and is_for_size and is_accepted_as_is:
            # The summarizer has failed, so the draft has excerpts only. The compaction
            # waits until the request has grown, when the summarizer may work again.
            self._note_fruitless(turn)
            return None

        # A user's own strategy may cover contents that are to stay, or a call without
        # its result.
        allowed_indexes = draft.covered - turn.always_kept
        covered = keep_pairs_whole(allowed_indexes, turn.history.pairs)
        model_covered = draft.model_covered & covered
        valid_draft = replace(draft, covered=covered, model_covered=model_covered)
        outcome = compose(turn, valid_draft)

        tokens_before = turn.measure(turn.contents)
        if outcome.tokens >= tokens_before:
            self._note_fruitless(turn)
            message = "Compaction for agent %r dropped: %d tokens would become %d; %s."
            place = turn.origin.place
            logger.info(message, turn.agent, tokens_before, outcome.tokens, place)
            return None
        return outcome.stored

    def _note_fruitless(self, turn: Turn) -> None:
        """Remembers the size of a request whose compaction was fruitless.

        The next compaction waits until a request is larger, see `decide`.
        """
        self.memory.facts = replace(self.memory.facts, fruitless_tokens=turn.tokens)
