"""Recorded sessions as conversations to play, and what their tool calls needed.

What a call needs is decided as in `contextguard replay`: the ids, numbers, names and
paths among its arguments that stood somewhere before.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.tools.base_tool import BaseTool
from google.genai import types

from benchmarks._conversations import Conversation, ToolUse, Turn
from benchmarks._scripts import Script
from contextguard_adk._tools.recordings import RecordedCall
from contextguard_adk._tools.replaying.need import Needed, Needs
from contextguard_adk.testing import Reply

FOLDER = Path(__file__).parent / "recordings_data"

Place = tuple[int, int]  # A turn, and a step in it.


@dataclass(frozen=True)
class Recording(Conversation):
    """Recorded sessions, one after the other in a session.

    Attributes:
        instruction: Of the agent.
        tool_specs: The tools, each with `name`, `description` and `parameters`.
        texts: What the model said beside the calls of a step.
    """

    instruction: str
    tool_specs: Sequence[dict[str, Any]]
    texts: dict[Place, str]


def read_recording(file: str, names: Sequence[str], window_tokens: int) -> Recording:
    """Reads sessions of a file in `recordings_data`, for a window."""
    with gzip.open(FOLDER / f"{file}.json.gz", "rt", encoding="utf-8") as opened:
        found = json.load(opened)

    turns = list[Turn]()
    texts = dict[Place, str]()
    recorded_turns = [turn for name in names for turn in found["sessions"][name]]
    for message, steps, answer in recorded_turns:
        texts |= {(len(turns), number): text for number, (text, _) in enumerate(steps)}
        uses = [
            [ToolUse(tool, result, args) for tool, args, result in made]
            for _, made in steps
        ]
        turns.append(Turn(message, uses, answer))

    return Recording(
        name=" + ".join(names),
        turns=turns,
        user_facts=(),
        tool_facts=(),
        notes={},
        window_tokens=window_tokens,
        configured_tokens=window_tokens,
        instruction=found["instruction"],
        tool_specs=found["tools"],
        texts=texts,
    )


class _RecordedTool(BaseTool):
    """A tool that returns what was recorded for the id of its call."""

    def __init__(self, spec: dict[str, Any], results: dict[str, Any]) -> None:
        super().__init__(name=spec["name"], description=spec["description"])
        self._schema = spec["parameters"]
        self._results = results

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(
            name=self.name,
            description=self.description,
            parameters_json_schema=self._schema,
        )

    async def run_async(self, *, args: dict[str, Any], tool_context: Any) -> Any:
        """Returns the recorded result."""
        return self._results[tool_context.function_call_id]


class RecordedScript(Script):
    """The recorded model, which notes what it needed and what of it was missing.

    Attributes:
        needed: What each step with calls needed of what was said before, without what
            stands in the instruction or the declarations of the tools.
        missing: What of it was not in the request before the step. All of it, where
            the session did not come that far, or the request was refused.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording, recording.instruction)
        self._recording = recording
        events, calls = self._list_events()
        self._needs = Needs(events, calls.values())
        contents = [event.content for event in events if event.content]
        fixed = recording.instruction + json.dumps(recording.tool_specs)

        self.needed: dict[Place, list[Needed]] = {}
        for place, call in calls.items():
            before = contents[: call.index]
            found = self._needs.find(call, before, recording.window_tokens)
            self.needed[place] = [each for each in found if each.value not in fixed]

        self.missing = dict(self.needed)

    def answer(self, request: LlmRequest) -> Reply:
        """Says what was said at this step, and looks for what that needed."""
        place = self.turn, self.step
        self.step += 1
        if place not in self.needed:
            return self.conversation.turns[self.turn].answer
        needed = self.needed[place]
        self.missing[place] = self._needs.find_missing(needed, request.contents)
        return self._list_parts(*place)

    def make_tools(self) -> list[BaseTool]:
        """Makes the tools that were declared."""
        results = self.list_results()
        return [_RecordedTool(spec, results) for spec in self._recording.tool_specs]

    def _list_parts(self, turn: int, step: int) -> list[types.Part]:
        text = self._recording.texts[turn, step]
        calls = [
            types.FunctionCall(id=f"{turn}.{step}.{n}", name=use.tool, args=use.args)
            for n, use in enumerate(self.conversation.turns[turn].steps[step])
        ]
        parts = [types.Part(text=text)] if text else []
        return [*parts, *(types.Part(function_call=call) for call in calls)]

    def _list_events(self) -> tuple[list[Event], dict[Place, RecordedCall]]:
        """Makes the events of the session, and of the model calls those with tools."""
        events = list[Event]()
        calls = dict[Place, RecordedCall]()
        make = types.Part.from_function_response

        for number, turn in enumerate(self.conversation.turns):
            events.append(_make_event("user", types.Part(text=turn.message)))
            for step, uses in enumerate(turn.steps):
                event = _make_event("model", *self._list_parts(number, step))
                calls[number, step] = RecordedCall(len(events), event, 0, False, None)
                found = [make(name=u.tool, response={"result": u.result}) for u in uses]
                events += [event, _make_event("user", *found)]
            events.append(_make_event("model", types.Part(text=turn.answer)))

        return events, calls


def _make_event(role: str, *parts: types.Part) -> Event:
    return Event(author=role, content=types.Content(role=role, parts=[*parts]))
