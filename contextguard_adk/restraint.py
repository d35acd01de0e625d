"""When a compaction that is due is better left undone: no loops, nothing in vain."""

from __future__ import annotations

import logging

from google.genai import types

from contextguard_adk.measuring.budgets import Budgets
from contextguard_adk.measuring.calibration import request_spare_tokens
from contextguard_adk.memory import Memory, SessionKey
from contextguard_adk.summarizing.context import CompactionContext

logger = logging.getLogger("contextguard_adk.restraint")


class Restraint:
    """Holds back compactions of one agent in one session.

    Args:
        memory: Where is remembered what earlier ones came to.
        session_key: The agent and the session.
    """

    def __init__(self, memory: Memory, session_key: SessionKey) -> None:
        self._memory = memory
        self._session_key = session_key

    def holds_back(
        self,
        context: CompactionContext,
        config: types.GenerateContentConfig,
        lowered_ratio: float,
    ) -> bool:
        """Tells whether to leave the request as it is; asked once for a call.

        Not on two calls running, not again soon after one that gained nothing, and
        not where nothing is to be gained; but a request that would hardly be accepted
        is always worth a try, and so is what someone demands.

        Args:
            context: What is known about the call.
            config: The request's, whose instruction no compaction removes.
            lowered_ratio: How far the estimate of the request is below bytes / 4.
        """
        just_compacted = self._memory.compacted.pop(self._session_key)
        must_wait = just_compacted or self._has_gained_nothing(context)
        is_overfull = context.tokens >= context.budgets.overfull_tokens
        if must_wait and context.reason == "tokens" and not is_overfull:
            return True
        return self._is_futile(context, config, lowered_ratio)

    def note(self, context: CompactionContext, has_gained: bool) -> None:
        """Remembers a compaction, and where it gained nothing how large it was."""
        self._memory.compacted.put(self._session_key, True)
        if not has_gained:
            self._memory.dropped.put(self._session_key, context.tokens)

    def forget_dropped(self) -> None:
        """Forgets that one gained nothing: another one stands now."""
        self._memory.dropped.pop(self._session_key)

    def _has_gained_nothing(self, context: CompactionContext) -> bool:
        """Tells whether a compaction was dropped and little has come since."""
        dropped_at = self._memory.dropped.get(self._session_key)
        if dropped_at is None:
            return False
        return context.tokens - dropped_at < context.budgets.summary_tokens // 2

    def _is_futile(
        self,
        context: CompactionContext,
        config: types.GenerateContentConfig,
        lowered_ratio: float,
    ) -> bool:
        """Tells whether a compaction would be paid for without gaining anything."""
        if not context.is_due or context.reason != "tokens":
            return False
        budgets, view = context.budgets, context.view
        fixed_tokens = context.fixed_tokens
        if lowered_ratio < 1:
            # A compaction's own measure is never below bytes / 4, this estimate may be,
            # as far as the scripts of the fixed part itself explain it.
            spare_tokens = request_spare_tokens(context.fixed_contents, config)
            lowered = int(fixed_tokens * lowered_ratio)
            fixed_tokens = max(lowered, fixed_tokens - spare_tokens)
        if fixed_tokens >= budgets.threshold_tokens:
            self._warn_fixed_part(context.agent, fixed_tokens, budgets)
            is_hopeless = fixed_tokens >= budgets.overfull_tokens
            if is_hopeless or context.tokens < budgets.overfull_tokens:
                return True
        if context.tokens >= budgets.overfull_tokens:
            return False
        # The live request would be quoted again.
        new = context.measure(
            [view.contents[i] for i in view.uncovered if i != view.live_index]
        )
        new -= context.measure([])
        return new < budgets.summary_tokens // 2

    def _warn_fixed_part(self, agent: str, fixed_tokens: int, budgets: Budgets) -> None:
        """Says once for a session that its history is not the problem."""
        if self._memory.reported.get(self._session_key):
            return
        self._memory.reported.put(self._session_key, True)
        logger.warning(
            "System instruction, tools and other context of agent %r take %d of %d "
            "tokens alone, the threshold is %d: compaction cannot help. Use a larger "
            "window or less instruction.",
            agent,
            fixed_tokens,
            budgets.window_tokens,
            budgets.threshold_tokens,
        )
