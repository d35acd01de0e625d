"""One model call of one guarded agent: its request, and what is known of the call."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from google.adk.agents.callback_context import CallbackContext
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest

from contextguard_adk._history.history import History
from contextguard_adk._providers.clients import find_llm
from contextguard_adk._runtime.runs import Guard, name_user, summary_scope
from contextguard_adk._turn.facts import Counts
from contextguard_adk.records import CompactionRecord, Origin
from contextguard_adk.strategies.base import Strategy


@dataclass(frozen=True)
class Bounds:
    """The bounds that a request has to respect beside its model's limits.

    The defaults hold for a new request. Other values hold after a rejection.

    Attributes:
        is_rejected: Whether the provider has rejected a request of this call.
        is_rendered: Whether the request's contents already have the stored summary.
        threshold_ratio: The part of the usual threshold at which a compaction is due.
        window_tokens: A window for this call alone; None for the model's window.
        correction: Tokens of the model per heuristic token, which is 4 bytes; None for
            the correction in `Call.counts`.
    """

    is_rejected: bool = False
    is_rendered: bool = False
    threshold_ratio: float = 1.0
    window_tokens: int | None = None
    correction: float | None = None


class Call:
    """A model call, from the request that ADK has built to the one that is sent.

    Attributes:
        guard: The memory of the plugin.
        context: The context of ADK's callback.
        request: The request. The guard changes it just before it is sent.
        strategy: The strategy of the agent.
        is_observed: Whether the guard only watches, and changes nothing.
        invocation: ADK's context of the run.
        llm: The client of the agent's model; None if the client is unknown.
        agent: The name of the agent.
        scope: The scope in which a summary of this agent is valid.
        origin: The agent, session and run of the call, for the log and for records.
        state: The agent's values in session state.
        memory: What this process remembers of the agent in this scope.
        run: What this process remembers of the run.
        memo: Remembers the sizes and texts of contents.
        asked_model: The model that was asked first, if a fallback may have put its own
            name in the request since; "" if the request names the model.
        history: The request's history; None until the first look at the call.
        counts: The provider's last count, and its correction.
        compaction: The record of this call's compaction; None if there was none.
        is_compacted: Whether the call has let the strategy compact, and has put the
            summary in its request. A recovery from a rejection does not count.
        is_recovery_paid: Whether the recovery from a rejection has let the strategy
            compact. A recovery does so once.
        tokens_before: The estimate of the request before any compaction; 0 until the
            first look at the call.
        started_seconds: When the call began, or was last compacted, on the clock of the
            event loop.
    """

    def __init__(
        self,
        guard: Guard,
        context: CallbackContext,
        request: LlmRequest,
        strategy: Strategy,
        is_observed: bool = False,
    ) -> None:
        invocation = context.get_invocation_context()
        session = invocation.session

        self.guard = guard
        self.context = context
        self.request = request
        self.strategy = strategy
        self.is_observed = is_observed
        self.invocation = invocation
        self.llm = find_llm(invocation.agent)
        self.agent = context.agent_name
        self.scope = summary_scope(invocation)
        self.origin = Origin(
            agent=self.agent,
            session_id=session.id,
            app=session.app_name,
            user=name_user(invocation, guard.settings),
            strategy=type(strategy).__name__,
            invocation_id=invocation.invocation_id,
        )

        # The memories: session state, the process, and the run.
        self.state = guard.state(context)
        self.memory = guard.memory(invocation, self.agent, self.scope)
        self.run = guard.run(invocation)
        self.memo = self.run.memo(invocation)

        # Findings of the call.
        self.asked_model = ""
        self.history: History | None = None
        self.counts = Counts()
        self.compaction: CompactionRecord | None = None
        self.is_compacted = False
        self.is_recovery_paid = False
        self.tokens_before = 0
        self.started_seconds = asyncio.get_running_loop().time()

    @property
    def model(self) -> str:
        """The name of the model that the request goes to first; "" if unknown."""
        if self.asked_model:
            return self.asked_model
        if self.request.model:
            return self.request.model
        return self.llm.model if self.llm else ""

    @property
    def server_key(self) -> tuple[str, int]:
        """The key of `Guard.limits` and `Guard.accepted` for the server of the model.

        The key has the name of the model and the `id()` of ADK's model object. The name
        is not enough, because two agents may ask models of one name at different
        servers, or with different API keys. If the agent has only the name of a model,
        the id is 0.
        """
        # An agent without a model of its own uses the model of its nearest parent.
        owner: Any = self.invocation.agent
        while owner is not None and not getattr(owner, "model", None):
            owner = getattr(owner, "parent_agent", None)
        model = getattr(owner, "model", None)
        model_id = id(model) if isinstance(model, BaseLlm) else 0
        return self.model, model_id

    async def wait(self) -> None:
        """Waits for the summary that is under way, if there is one."""
        # A summary takes at most three calls of a model, each with this timeout.
        timeout_seconds = 3 * self.strategy.summary_timeout_seconds
        await self.memory.pending.wait(timeout_seconds)
