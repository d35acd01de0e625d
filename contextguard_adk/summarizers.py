"""Chooses the model that writes a summary, and spares one that keeps failing."""

from __future__ import annotations

import functools
import logging

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.registry import LLMRegistry

from contextguard_adk.memory import Memory
from contextguard_adk.providers.windows import ModelRegistry, resolve_context_window
from contextguard_adk.strategies.base import Strategy
from contextguard_adk.summarizing.prompts import SUMMARY_INSTRUCTION
from contextguard_adk.summarizing.summary_call import SummaryModel

logger = logging.getLogger("contextguard_adk.summarizers")

FAILURES_BEFORE_SPARING = 3
"""After so many failures in a row a summariser is spared …"""

SPARED_COMPACTIONS = 5
"""… for so many compactions, which are then mechanical."""


class Summarizers:
    """Finds summarisers for strategies.

    Args:
        memory: Where failures are counted.
        registry: Where context windows are looked up; None is the default.
    """

    def __init__(self, memory: Memory, registry: ModelRegistry | None) -> None:
        self._memory = memory
        self._registry = registry

    def choose(
        self,
        strategy: Strategy,
        agent_model: BaseLlm | None,
        agent_window_tokens: int,
        request: LlmRequest,
    ) -> SummaryModel | None:
        """Returns the model to ask; None while it is spared, or where there is none.

        Args:
            strategy: Its settings name the summariser.
            agent_model: The agent's own model.
            agent_window_tokens: Its context window.
            request: The agent's request, whose `http_options` and the like are
                shared.
        """
        llm = _resolve(strategy.summarizer) or agent_model
        if llm is None or self._is_spared(llm.model):
            return None
        window = strategy.summarizer_context_window
        if window is None and llm is agent_model:
            window = agent_window_tokens
        if window is None:
            window = resolve_context_window(llm.model, registry=self._registry).tokens
        return SummaryModel(
            llm=llm,
            window_tokens=window,
            timeout_seconds=strategy.summary_timeout_seconds,
            config=request.config,
            instruction=strategy.summary_instruction or SUMMARY_INSTRUCTION,
            is_agents_own=llm is agent_model,
        )

    def note(
        self, strategy: Strategy, agent_model: BaseLlm | None, has_failed: bool
    ) -> None:
        """Counts a failure; a success ends the count."""
        llm = _resolve(strategy.summarizer) or agent_model
        if llm is None:
            return
        failures = self._memory.failures.get(llm.model) or 0
        if has_failed:
            self._memory.failures.put(llm.model, failures + 1)
        elif failures > 0:  # Not where a mechanical summary was made to spare it.
            self._memory.failures.pop(llm.model)

    def _is_spared(self, model: str) -> bool:
        failures = self._memory.failures.get(model) or 0
        if failures >= FAILURES_BEFORE_SPARING:
            failures = -SPARED_COMPACTIONS
        if failures < 0:
            self._memory.failures.put(model, failures + 1)
            return True
        return False


def _resolve(model: BaseLlm | str | None) -> BaseLlm | None:
    if not isinstance(model, str):
        return model
    try:
        # Each time anew: a client belongs to the event loop that it was made in.
        return LLMRegistry.new_llm(model)
    except (ValueError, ImportError) as error:
        _warn_unknown(model, type(error).__name__)
        return None


@functools.lru_cache(maxsize=64)
def _warn_unknown(name: str, error: str) -> None:
    logger.warning(
        "ADK knows no model %r for summaries (%s); the agent's own model writes them. "
        "Set `summarizer` to a model name that ADK's LLMRegistry resolves.",
        name,
        error,
    )
