"""What a replay assumes of the app, and how it stays offline."""

from __future__ import annotations

from dataclasses import dataclass, field

from contextguard_adk.config import PluginSettings
from contextguard_adk.providers.windows import resolve_context_window
from contextguard_adk.strategies import Strategy


@dataclass(frozen=True)
class ReplaySettings:
    """What is assumed of the replayed app.

    Attributes:
        guard: The plugin's settings.
        agent: Only this agent's calls; None replays all.
        model: The model whose window counts; None takes the one that each response
            names.
        window_tokens: The window of all strategies; None leaves theirs.
    """

    guard: PluginSettings = field(default_factory=PluginSettings)
    agent: str | None = None
    model: str | None = None
    window_tokens: int | None = None

    def make_offline(self) -> PluginSettings:
        """Returns the plugin's settings with the wanted windows, and with summaries
        by the agent's own model, which a replay simulates."""
        agents = {name: self._adapt(item) for name, item in self.guard.agents.items()}
        default = self._adapt(self.guard.default)
        return self.guard.model_copy(update={"agents": agents, "default": default})

    def _adapt(self, strategy: Strategy | None) -> Strategy | None:
        if strategy is None:
            return None
        summarizer = strategy.summarizer
        summary_window_tokens = strategy.summarizer_context_window
        if summarizer is not None and summary_window_tokens is None:
            name = summarizer if isinstance(summarizer, str) else summarizer.model
            summary_window_tokens = resolve_context_window(name).tokens
        return strategy.model_copy(
            update={
                "context_window": self.window_tokens or strategy.context_window,
                "summarizer": None,
                "summarizer_context_window": summary_window_tokens,
            }
        )
