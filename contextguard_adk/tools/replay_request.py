"""Stands in for what a recording does not hold of a request: instruction and tools."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.tools.base_tool import BaseTool
from google.genai import types

from contextguard_adk.measuring.tokens import estimate_config_tokens
from contextguard_adk.recall.offer import INTERNAL_CALLS
from contextguard_adk.summarizing.transcript import RECALL_TOOL

_FILLER = "instruction "


class _RecordedTool(BaseTool):
    """A tool of which only the name is known."""

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(name=self.name)


def list_tools(events: Sequence[Event], agent: str) -> list[str]:
    """Lists the tools that an agent has called, without ADK's and the guard's own."""
    calls = [
        call.name
        for event in events
        if event.author == agent
        for call in event.get_function_calls()
    ]
    own = {*INTERNAL_CALLS, RECALL_TOOL}
    return [name for name in dict.fromkeys(calls) if name and name not in own]


def build_request(
    model: str | None,
    contents: Sequence[types.Content],
    tools: Collection[str],
    fixed_tokens: int,
) -> LlmRequest:
    """Builds a request as large as the recorded one.

    Args:
        model: The model's name.
        contents: What ADK built.
        tools: The names of the agent's tools.
        fixed_tokens: What instruction and tools take together, by bytes / 4.
    """
    request = LlmRequest(model=model, contents=list(contents))
    request.append_tools([_RecordedTool(name=n, description=n) for n in tools])
    text_chars = 4 * max(0, fixed_tokens - estimate_config_tokens(request.config))
    filler = (_FILLER * (text_chars // len(_FILLER) + 1))[:text_chars]
    request.config.system_instruction = filler or None
    return request
