"""What the simulated model and its tools say in a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.adk.models.llm_request import LlmRequest
from google.adk.tools.base_tool import BaseTool
from google.genai import types

from benchmarks._conversations import Conversation
from contextguard_adk.testing import Reply

INSTRUCTION = "You help an engineer with whatever is asked, and use the tools for it."


class ScriptedTool(BaseTool):
    """A tool that returns what was prepared for the `ref` of its call."""

    def __init__(self, name: str, results: dict[str, Any]) -> None:
        super().__init__(name=name, description="Returns what it finds.")
        self._results = results

    def _get_declaration(self) -> types.FunctionDeclaration:
        ref = types.Schema(type=types.Type.STRING, description="What to look up.")
        schema = types.Schema(type=types.Type.OBJECT, properties={"ref": ref})
        return types.FunctionDeclaration(
            name=self.name, description=self.description, parameters=schema
        )

    async def run_async(self, *, args: dict[str, Any], tool_context: Any) -> Any:
        """Returns the prepared result."""
        return self._results[args["ref"]]


@dataclass
class Script:
    """The model's part; it keeps to the turn, whatever became of the one before."""

    conversation: Conversation
    instruction: str = INSTRUCTION
    turn: int = 0
    step: int = 0

    def answer(self, request: LlmRequest) -> Reply:
        """Says what comes next in this turn."""
        turn = self.conversation.turns[self.turn]
        step = self.step
        self.step += 1
        if step >= len(turn.steps):
            return turn.answer
        return [
            types.Part(
                function_call=types.FunctionCall(
                    name=use.tool,
                    args={**use.args, "ref": f"{self.turn}.{step}.{number}"},
                )
            )
            for number, use in enumerate(turn.steps[step])
        ]

    def make_tools(self) -> list[BaseTool]:
        """Makes the tools that are called."""
        results = self.list_results()
        names = sorted(self.conversation.tools)
        return [ScriptedTool(name, results) for name in names]

    def list_results(self) -> dict[str, Any]:
        """What the tools return, by turn, step and place among parallel calls."""
        return {
            f"{t}.{s}.{n}": use.result
            for t, turn in enumerate(self.conversation.turns)
            for s, step in enumerate(turn.steps)
            for n, use in enumerate(step)
        }
