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
    """What a request has to respect beside its model's limits.

    Attributes:
        is_rejected: Whether the provider found the request too long.
        is_rendered: Whether the stored summary is already in its contents.
        threshold_ratio: Which part of the usual threshold counts.
        window_tokens: A window for this request alone; None for that of the model.
        correction: Real tokens per heuristic token; None for what is known.
    """

    is_rejected: bool = False
    is_rendered: bool = False
    threshold_ratio: float = 1.0
    window_tokens: int | None = None
    correction: float | None = None


class Call:
    """A model call, from its request to what is sent."""

    def __init__(
        self,
        guard: Guard,
        context: CallbackContext,
        request: LlmRequest,
        strategy: Strategy,
        is_observed: bool = False,
    ) -> None:
        self.guard = guard
        self.context = context
        self.request = request
        self.strategy = strategy
        self.is_observed = is_observed
        self.invocation = invocation = context.get_invocation_context()
        self.llm = find_llm(invocation.agent)
        self.agent = context.agent_name
        self.scope = summary_scope(invocation)
        app = invocation.session.app_name
        user = invocation.session.user_id
        user = user if guard.settings.user_ids == "plain" else digest([app, user])
        names = {"app": app, "user": user, "strategy": type(strategy).__name__}
        names["invocation_id"] = invocation.invocation_id
        self.origin = Origin(self.agent, invocation.session.id, **names)
        self.state = guard.state(context)
        self.memory = guard.memory(invocation, self.agent, self.scope)
        self.asked_model = ""  # Where a fallback has changed the request's.
        self.run = guard.run(invocation)
        self.memo = self.run.memo(invocation)
        self.history: History | None = None
        self.counts = Counts()
        self.compaction: CompactionRecord | None = None
        self.is_compacted = False  # By a summary that was paid for in this call.
        self.is_recovery_paid = False  # The recovery has compacted once.
        self.tokens_before = 0  # The estimate before any compaction.
        self.started_seconds = asyncio.get_running_loop().time()

    @property
    def model(self) -> str:
        """The name of the model that the request goes to first."""
        named = self.asked_model or self.request.model
        return named or (self.llm.model if self.llm else "")

    @property
    def client(self) -> tuple[str, int]:
        """Whose limits count: a model's name, and the object that asks it, if it stays.

        Two agents may ask models of one name with keys, or at servers, of their own.
        """
        agent: Any = self.invocation.agent
        while agent is not None and not getattr(agent, "model", None):
            agent = getattr(agent, "parent_agent", None)  # It inherits the model.
        model = getattr(agent, "model", None)
        return self.model, id(model) if isinstance(model, BaseLlm) else 0

    async def wait(self) -> None:
        """Waits for the summary that is under way, if there is one."""
        # A summary takes three calls at most.
        timeout_seconds = 3 * self.strategy.summary_timeout_seconds
        await self.memory.pending.wait(timeout_seconds)
