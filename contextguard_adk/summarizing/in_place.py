"""Summaries asked for in place: by one more message behind the conversation itself.

A summary call that repeats the conversation in a prompt of its own pays for all of it
anew. Where the provider serves the beginning of the agent's prompts from a cache, the
same request with one more message behind it costs a fraction of that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

from google.adk.models.llm_request import LlmRequest
from google.genai import types

if TYPE_CHECKING:
    from contextguard_adk.history.view import HistoryView

ReusePromptCache = Literal["auto"] | bool
"""Whether to; `"auto"` where the provider was seen to serve the last prompt so."""

MIN_CACHED_RATIO = 0.5
"""How much of the last prompt must have come from the cache."""


def is_wanted(
    setting: ReusePromptCache, cached_ratio: float, request: LlmRequest, agent: object
) -> bool:
    """Whether a summary in place is worth a try, and its answer would be plain text.

    Args:
        setting: The agent's setting.
        cached_ratio: How much of the last prompt came from a cache.
        request: The agent's request.
        agent: The agent.
    """
    if not setting or (setting == "auto" and cached_ratio < MIN_CACHED_RATIO):
        return False
    config = request.config
    is_text = config.response_mime_type in (None, "text/plain")
    return is_text and not config.stop_sequences and answers_freely(request, agent)


def find_conversation(
    view: HistoryView, covered: Collection[int], contents: Sequence[types.Content]
) -> list[types.Content]:
    """Finds the conversation that shows, unshortened, what a summary has to cover.

    It leaves out what is no history: instructions and the like stay in the request and
    must not stand in a summary. ADK puts most of it behind the history, where no cache
    knows it; in front of it, it would have to stay.

    Args:
        view: The history.
        covered: Indexes of what the summary is to cover.
        contents: What would be sent without a compaction.

    Returns:
        The contents to send; empty where a transcript has to do.
    """
    if view.pinned_calls or not set(covered) >= set(view.compactable):
        return []
    if stored := view.stored:
        is_shortened = stored.truncation or stored.request_chars >= 0
        if is_shortened or view.covered != view.model_covered:
            return []
    history = set(view.history)
    foreign = {i for i in range(len(view.contents)) if i not in history}
    if any(index < min(history, default=0) for index in foreign):
        return []
    hidden = {id(view.contents[index]) for index in foreign}
    return [content for content in contents if id(content) not in hidden]


def answers_freely(request: LlmRequest, agent: object) -> bool:
    """Whether nothing forces the form of an answer to a request.

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
