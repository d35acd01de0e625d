"""One model call of one guarded agent: who makes it, and what it may change."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from google.adk.agents.callback_context import CallbackContext
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest

from contextguard_adk._history.history import History
from contextguard_adk._providers.clients import find_llm
from contextguard_adk._runtime.runs import Guard, digest, summary_scope
from contextguard_adk._turn.facts import Counts
from contextguard_adk.records import CompactionRecord, Origin
from contextguard_adk.strategies.base import Strategy


@dataclass(frozen=True)
class Bounds:
    """The bounds that a request has to respect beside its model's limits.

    Attributes:
        is_rejected: Whether the provider found the request too long.
        is_rendered: Whether the stored summary is already in its contents.
        threshold_ratio: The part of the usual threshold at which a compaction is due.
        window_tokens: A window for this request alone; None for the model's window.
        correction: Real tokens per heuristic token; None for the known correction.
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
        request: The request; it is changed when it is sent.
        strategy: The strategy of the agent.
        is_observed: Whether the guard only watches.
        llm: The client of the agent's model; None if it is not known.
        scope: The scope in which a summary of this agent is valid.
        origin: Whose request it is, for the log and for records.
        asked_model: The model that was asked first, if a fallback may have put its own
            name in the request since; "" if the request names the model.
        history: The request's history; None until it is read.
        counts: The provider's last count, and its correction.
        compaction: The record of this call's compaction; None if there was none.
        is_compacted: Whether it was compacted by a summary that was paid for in it.
        is_recovery_paid: Whether the recovery from a rejection has let the strategy
            compact, which it does once.
        tokens_before: The estimate before any compaction.
        started_seconds: When the call began, or was compacted, on the loop's clock.
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
        app = session.app_name
        user = session.user_id

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
            app=app,
            user=user if guard.settings.user_ids == "plain" else digest([app, user]),
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
        """The name of the model that the request goes to first."""
        named = self.asked_model or self.request.model
        if named:
            return named
        return self.llm.model if self.llm else ""

    @property
    def client(self) -> tuple[str, int]:
        """The client whose limits count: a model's name, and the id of its object.

        Two agents may ask models of one name at different servers, or with different
        keys. The id is 0 where the agent names its model by a string.
        """
        # An agent without a model of its own has that of its nearest parent.
        agent: Any = self.invocation.agent
        while agent is not None and not getattr(agent, "model", None):
            agent = getattr(agent, "parent_agent", None)
        model = getattr(agent, "model", None)
        object_id = id(model) if isinstance(model, BaseLlm) else 0
        return self.model, object_id

    async def wait(self) -> None:
        """Waits for the summary that is under way, if there is one."""
        # A summary takes three calls at most.
        timeout_seconds = 3 * self.strategy.summary_timeout_seconds
        await self.memory.pending.wait(timeout_seconds)
