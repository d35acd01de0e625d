"""When a summary is asked for at the end of the conversation itself.

A summary call that repeats the conversation in a prompt of its own pays for all of it
anew. Where the provider serves the beginning of the agent's prompts from a cache, the
same request with one more message behind it costs a fraction of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk.memory import Memory, SessionKey

ReusePromptCache = Literal["auto"] | bool
"""Whether to; `"auto"` where the provider was seen to serve the last prompt so."""

MIN_CACHED_RATIO = 0.5
"""How much of the last prompt must have come from the cache."""


class PromptCache:
    """What is known of the prompt cache of one agent in one session.

    Args:
        memory: Where it is remembered.
        session_key: The agent and the session.
        setting: Whether to make use of it.
    """

    def __init__(
        self, memory: Memory, session_key: SessionKey, setting: ReusePromptCache
    ) -> None:
        self._memory = memory
        self._session_key = session_key
        self._setting = setting

    def find_conversation(
        self, request: LlmRequest, contents: Sequence[types.Content], agent: object
    ) -> LlmRequest | None:
        """Returns the request that a summary may be asked for at the end of.

        Args:
            request: The agent's request.
            contents: What it would send without a compaction.
            agent: The agent.

        Returns:
            The request with these contents; None where asking so would gain nothing,
            or was tried in vain.
        """
        if not self._setting or not answers_freely(request, agent):
            return None
        if self._memory.in_vain.get(self._session_key):
            return None
        cached_ratio = self._memory.cached_ratios.get(self._session_key) or 0.0
        if self._setting == "auto" and cached_ratio < MIN_CACHED_RATIO:
            return None
        return request.model_copy(update={"contents": list(contents)})

    def give_up(self) -> None:
        """Takes note that the model gave no summary so, for the rest of the session."""
        self._memory.in_vain.put(self._session_key, True)


def answers_freely(request: LlmRequest, agent: object) -> bool:
    """Tells whether nothing forces the form of an answer to a request.

    That is a built-in tool, an output schema or a forced tool choice.
    """
    config = request.config
    if not all(map(_has_functions_alone, config.tools or ())):
        return False
    if config.response_schema or config.response_json_schema:
        return False
    if getattr(agent, "output_schema", None) is not None:
        return False
    calling = config.tool_config and config.tool_config.function_calling_config
    mode = calling.mode if calling else None
    return mode in (None, "AUTO", "VALIDATED", "MODE_UNSPECIFIED")


def _has_functions_alone(tool: object) -> bool:
    if not isinstance(tool, types.Tool):
        return False
    return {name for name, value in tool if value is not None} == {
        "function_declarations"
    }
