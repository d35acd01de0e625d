"""The tool by which an agent has its own history summarized."""

from __future__ import annotations

from typing import Any

from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from contextguard_adk._history.adk_events import COMPACT_TOOL
from contextguard_adk._runtime.state import request_compaction
from contextguard_adk._turn.units import declare
from contextguard_adk.records import METADATA_KEY


class CompactTool(BaseTool):
    """A tool named `compact_history`: has the history summarized before the next step.

    Args:
        focus: The subjects that each summary of this tool should keep above all; "" for
            none. The agent may name more.
    """

    def __init__(self, focus: str = "") -> None:
        super().__init__(
            name=COMPACT_TOOL,
            description="Replaces the conversation so far by a summary, to make room "
            "when a part of the work is finished. focus: what the summary must keep in "
            "detail.",
        )
        self._focus = focus

    def _get_declaration(self) -> types.FunctionDeclaration:
        return declare(self, focus={"type": "string"})

    async def run_async(
        self, *, args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, str]:
        """Asks for a compaction, or returns the reason why there will be none.

        `args` are the arguments that the model has written: "focus" or none.
        """
        if _was_just_compacted(tool_context):
            return {
                "refused": "The conversation was summarized just before this step; "
                "there is nothing to gain. Carry on with the task."
            }

        asked_focus = str(args.get("focus") or "")
        focus = "\n".join(text for text in (self._focus, asked_focus) if text)
        request_compaction(tool_context.state, tool_context.agent_name, focus)
        return {
            "result": "The conversation is summarized before your next step if that "
            "makes room. Carry on with the task."
        }


def _was_just_compacted(tool_context: ToolContext) -> bool:
    """Whether the request that led to this tool call was compacted.

    The guard notes a compaction in the metadata of the event that has the call. Returns
    False if no event has the call.
    """
    call_id = tool_context.function_call_id
    for event in reversed(tool_context.session.events):
        if not any(call.id == call_id for call in event.get_function_calls()):
            continue
        # The app may write to the metadata as well, so the value may be anything.
        notes = (event.custom_metadata or {}).get(METADATA_KEY)
        return isinstance(notes, dict) and "compaction" in notes
    return False
