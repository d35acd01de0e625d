"""Sessions as a release has left them: `python -m tests.stored_states 2` adds files.

Files of a version are never made again: they show that later releases read it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from google.adk.agents import ParallelAgent
from google.adk.agents.base_agent import BaseAgent
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest

from contextguard_adk import (
    ContextGuardPlugin,
    PinTool,
    Pipeline,
    Threshold,
    TodosTool,
    pin,
)
from contextguard_adk.strategies import (
    Strategy,
    SummaryCompaction,
    ToolOutputTruncation,
)
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests.builders import Chat, guarded_agent

FOLDER = Path(__file__).parent / "states"
WINDOW = 6_000
SUMMARY = "The stored summary: shelves were counted."
STRATEGIES: dict[str, Strategy] = {
    "plain": Threshold(context_window=WINDOW, keep_tools=("rules",)),
    "namespaced": Threshold(context_window=WINDOW, keep=0.3),
    "scopes": Threshold(context_window=WINDOW),
    "shortened": Pipeline(
        context_window=WINDOW,
        window=None,
        tool_output=ToolOutputTruncation(max_length=200, head_length=150),
        summary=SummaryCompaction(min_messages_for_summary=4),
    ),
    "learned": Threshold(),
    "excerpts": Threshold(context_window=WINDOW),
    "texts": Threshold(context_window=WINDOW),
}
"""How the sessions were made, by the name of the file.

In "excerpts" and in the files before it, the record has excerpts and sizes in place of
some of the texts beside the summary. In "texts" it has all texts as they are shown.
"""


def rules() -> str:
    """Returns the rules."""
    return "Rule 1: count twice."


def look(shelf: int) -> str:
    """Tells what stands on a shelf."""
    return f"Shelf {shelf}: " + f"crate {shelf} for Lisbon, " * 100


def make_llm() -> SimulatedLlm:
    """A model that looks once in each turn, and at first reads, plans and pins."""
    todos = [{"content": "Count shelf 7", "status": "in_progress"}]
    first: list[Reply] = [
        call("rules"),
        call("todos", todos=todos),
        call("pin", text="Shelf 3 is locked."),
    ]
    begins = iter(first)
    shelves = itertools.count()

    def script(request: LlmRequest) -> Reply:
        *_, part = request.contents[-1].parts or []
        first_reply = next(begins, None) if "todos" in request.tools_dict else None
        if first_reply:
            return first_reply
        if part.function_response:
            return "Counted."
        return call("look", shelf=next(shelves))

    return SimulatedLlm(
        context_window=WINDOW, script=script, summary_replies=lambda _: SUMMARY
    )


def make_chat(name: str, llm: SimulatedLlm) -> Chat:
    """A chat with the agents of a file, as a process that has just started."""
    agent: BaseAgent = guarded_agent(llm, [rules, look, TodosTool(), PinTool()])
    if name == "scopes":
        workers = [guarded_agent(llm, [look]) for _ in "ab"]
        for worker, letter in zip(workers, "ab", strict=True):
            worker.name = f"worker_{letter}"
        agent = ParallelAgent(name="all", sub_agents=[*workers])
    keys: Any = "namespaced" if name == "namespaced" else "plain"
    guard = ContextGuardPlugin(default=STRATEGIES[name], state_keys=keys)
    return Chat(agent, [guard])


async def make(name: str) -> list[dict[str, Any]]:
    """Plays a session up to the second answer after its first compaction."""
    llm = make_llm()
    chat = make_chat(name, llm)
    left = 2
    delta: dict[str, Any] = {}
    pin(delta, "Never open a crate.", "crates")
    await chat.set_state(delta)

    for number in range(60):
        left -= SUMMARY in (await chat.state()).values()
        if not left:
            break
        await chat.say(f"Count shelf {number}, please. " + "Take your time. " * 20)

    return [
        event.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        for event in await chat.events()
    ]


async def load(chat: Chat, path: Path) -> None:
    """Puts the stored session into a chat, its state included."""
    session = await chat.session()
    for item in json.loads(path.read_text())["events"]:
        event = Event.model_validate(item)
        await chat.sessions.append_event(session, event)


def main() -> None:
    """Writes the files that are missing."""
    for name in STRATEGIES:
        path = FOLDER / f"version-{sys.argv[1]}-{name}.json"
        if not path.exists():
            made = asyncio.run(make(name))
            lines = ",\n".join(json.dumps(event) for event in made)
            path.write_text(f'{{"events": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
