"""Recorded sessions as conversations to play, and what their tool calls needed.

What a call needs is decided as in `contextguard replay`: the ids, numbers, names and
paths among its arguments that stood somewhere before. Beside them, the whole lines of
its arguments are looked for: an edit repeats lines of the file that it changes.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
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
from contextguard_adk._tools.replaying.need import Needed, Needs, read_part
from contextguard_adk.testing import Reply

FOLDER = Path(__file__).parent / "recordings_data"

LEAST_LINE_CHARS = 24
"""A shorter line, such as "return None", stands in many requests by chance."""

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


def read_file(path: Path) -> dict[str, Any]:
    """Reads a file of recorded sessions.

    Raises:
        ValueError: If the file does not name its license, or the source of a session.
    """
    with gzip.open(path, "rt", encoding="utf-8") as opened:
        found: dict[str, Any] = json.load(opened)

    if not found.get("license"):
        raise ValueError(f"{path.name} names no license")
    source = found.get("source")  # Of all sessions, or of each one.
    sources = source if isinstance(source, dict) else dict.fromkeys(found["sessions"])
    if not source or not sources.keys() >= found["sessions"].keys():
        raise ValueError(f"{path.name} does not name the source of each session")
    return found


def read_recording(file: str, names: Sequence[str], window_tokens: int) -> Recording:
    """Reads sessions of a file in `recordings_data`, for a window."""
    found = read_file(FOLDER / f"{file}.json.gz")

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
        lines: The whole lines among the arguments of each step that were said before,
            without those in the instruction or the declarations of the tools.
        missing_lines: Which of them were not in the request before the step.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording, recording.instruction)
        self._recording = recording
        events, calls = self._list_events()
        self._needs = Needs(events, calls.values())
        contents = [event.content for event in events if event.content]
        fixed = recording.instruction + json.dumps(recording.tool_specs)

        self.needed: dict[Place, list[Needed]] = {}
        self.lines: dict[Place, list[str]] = {}
        for place, call in calls.items():
            before = contents[: call.index]
            found = self._needs.find(call, before, recording.window_tokens)
            self.needed[place] = [each for each in found if each.value not in fixed]
            said = _read_contents(before)
            lines = self._list_lines(*place)
            self.lines[place] = [
                line for line in lines if line in said and line not in fixed
            ]

        self.missing = dict(self.needed)
        self.missing_lines = dict(self.lines)

    def answer(self, request: LlmRequest) -> Reply:
        """Says what was said at this step, and looks for what that needed."""
        place = self.turn, self.step
        self.step += 1
        if place not in self.needed:
            return self.conversation.turns[self.turn].answer
        needed = self.needed[place]
        self.missing[place] = self._needs.find_missing(needed, request.contents)
        sent = _read_contents(request.contents)
        lines = self.lines[place]
        self.missing_lines[place] = [line for line in lines if line not in sent]
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

    def _list_lines(self, turn: int, step: int) -> list[str]:
        """Lists the lines among the arguments of a step that are long, each once."""
        uses = self.conversation.turns[turn].steps[step]
        texts = [text for use in uses for text in _list_texts(use.args)]
        lines = [line.strip() for text in texts for line in text.splitlines()]
        long_lines = [line for line in lines if len(line) >= LEAST_LINE_CHARS]
        return list(dict.fromkeys(long_lines))

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


def _list_texts(value: object) -> Iterator[str]:
    """Yields the texts in arguments."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _list_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _list_texts(item)


def _read_contents(contents: Sequence[types.Content]) -> str:
    """All that contents say, without the escapes of JSON."""
    parts = [part for content in contents for part in content.parts or ()]
    return "\n".join(read_part(part) for part in parts)


def _make_event(role: str, *parts: types.Part) -> Event:
    return Event(author=role, content=types.Content(role=role, parts=[*parts]))
