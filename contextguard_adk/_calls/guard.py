"""What lives as long as the plugin, and is common to all calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from contextguard_adk._history.state import AgentState
from contextguard_adk._memory import Memory, branch_scope
from contextguard_adk._providers.costs import Costs
from contextguard_adk._providers.windows import ModelRegistry
from contextguard_adk.telemetry import Observers

if TYPE_CHECKING:
    from google.adk.agents.callback_context import CallbackContext


@dataclass
class Guard:
    """What lives as long as the plugin; `registry=None` is the default registry."""

    registry: ModelRegistry | None = None
    prices: Mapping[str, Costs] = field(default_factory=dict)
    observers: Observers = field(default_factory=Observers)
    has_namespaced_keys: bool = False
    has_artifacts: bool = True
    memory: Memory = field(default_factory=Memory)

    def state(self, context: CallbackContext) -> AgentState:
        """The values of a callback's agent in session state."""
        return AgentState(
            context.state,
            context.agent_name,
            self.has_namespaced_keys,
            branch_scope(context.get_invocation_context()),
            self.memory.run(context.get_invocation_context()).writes,
        )
