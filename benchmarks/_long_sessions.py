"""Sessions of 600 model calls in a large window, and what `trigger="auto"` saves.

ADK's own work for 600 calls takes longer than all that is measured here. So nothing but
the callbacks of the plugin is called, on the events, contents and requests that a
`Runner` would make of the session, and each content is counted once, by bytes / 4.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.run_config import RunConfig
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.plugin_manager import PluginManager
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types

from benchmarks import _common
from benchmarks._play import CountingLlm
from benchmarks._scripts import ScriptedTool
from contextguard_adk import CompactionRecord, ContextGuardPlugin, Threshold
from contextguard_adk._providers.costs import TYPICAL_COSTS
from contextguard_adk.strategies import Strategy

CALLS = 600
WINDOW_TOKENS = 1_000_000
DEFAULT = "Threshold"
AUTO = 'trigger="auto"'
AUTO_PREVIEWS = f"{AUTO}, previews"
INSTRUCTION_CHARS = 4_000
NOTES = """\
Sessions of {calls} model calls: a chat, in which each is a turn, and turns of 30 calls
whose results have 2 or 40 KB, in a window of {window:,} tokens; the number of
compactions is in parentheses. "-" is a session that ended in a refused request.
Threshold compacts 20,000 tokens below the window, the others at their trigger. All show
results whole, but for the last, which has all else default.

cost             in uncached prompt tokens: one that the cache served costs {cached:g},
                 one of an answer or a summary {output:g}; summaries are included.
cached           the provider has a prompt cache.
"""

TOOL = "read_file"
_TEXTS = ("code", "prose", "json")


@dataclass(frozen=True)
class Kind:
    """How a session goes.

    Attributes:
        message_chars: What a message of the user has.
        turn_calls: Model calls of a turn; all but the last one call a tool.
        result_chars: What each result of a tool has.
        answer_chars: What the answer has that ends a turn.
    """

    message_chars: int
    turn_calls: int = 1
    result_chars: int = 0
    answer_chars: int = 600


KINDS = {
    "chat": Kind(1_200),
    "results of 2 KB": Kind(300, 30, 2_000),
    "results of 40 KB": Kind(300, 30, 40_000),
}


@dataclass(frozen=True)
class Cell:
    """A session of one kind, with one model.

    Attributes:
        kind: One of `KINDS`.
        has_cache: Whether the provider has a prompt cache.
    """

    kind: str
    has_cache: bool

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.kind}, cached" if self.has_cache else self.kind


CELLS = tuple(Cell(kind, has_cache) for kind in KINDS for has_cache in (True, False))

WAYS: dict[str, Strategy] = {
    # Previews follow from the trigger: it alone is to differ, but for the last.
    DEFAULT: Threshold(context_window=WINDOW_TOKENS, preview_tokens=None),
    AUTO: Threshold(context_window=WINDOW_TOKENS, trigger="auto", preview_tokens=None),
    AUTO_PREVIEWS: Threshold(context_window=WINDOW_TOKENS, trigger="auto"),
}


@dataclass(frozen=True)
class Spent:
    """What a session came to.

    Attributes:
        cost_tokens: In uncached prompt tokens; None where a request was refused.
        compactions: How many there were.
    """

    cost_tokens: int | None
    compactions: int = 0


@dataclass(frozen=True)
class Step:
    """What a model call is made for, and what the model says."""

    content: types.Content
    reply: types.Content


@lru_cache(maxsize=1)
def write_steps(kind: str, calls: int) -> list[Step]:
    """Writes a session of one of `KINDS`, the same on every run."""
    shape = KINDS[kind]
    rng = random.Random(kind)
    steps = []

    for number in range(calls):
        place = number % shape.turn_calls
        if place:
            text = _common.cut_text(_TEXTS[number % 3], shape.result_chars, rng)
            found = types.FunctionResponse(
                id=f"call-{number - 1}", name=TOOL, response={"result": text}
            )
            part = types.Part(function_response=found)
        else:
            part = types.Part(text=_common.cut_text("prose", shape.message_chars, rng))

        if place < shape.turn_calls - 1:
            ref = f"src/{_common.read_pool('digits')[number * 20 :][:10]}/{number}.py"
            made = types.FunctionCall(id=f"call-{number}", name=TOOL, args={"ref": ref})
            reply = types.Part(function_call=made)
        else:
            answer = _common.cut_text("prose", shape.answer_chars, rng)
            reply = types.Part(text=answer)
        steps.append(Step(types.UserContent([part]), types.ModelContent([reply])))

    return steps


class _Play:
    """One session that grows, and the plugin that sees each of its model calls."""

    def __init__(self, llm: CountingLlm, *plugins: ContextGuardPlugin) -> None:
        self._llm = llm
        self._plugins = PluginManager([*plugins])
        self._tool = ScriptedTool(TOOL, {})
        self._agent = LlmAgent(name="agent", model=llm, tools=[self._tool])
        self._session = Session(id="s", app_name="app", user_id="u")
        self._contents: list[types.Content] = []

    async def turn(self, number: int, steps: Sequence[Step]) -> None:
        """Makes the model calls of one turn."""
        invocation = InvocationContext(
            session_service=InMemorySessionService(),
            session=self._session,
            invocation_id=f"i-{number}",
            agent=self._agent,
            user_content=steps[0].content,
            run_config=RunConfig(),
            plugin_manager=self._plugins,
        )
        await self._plugins.run_before_run_callback(invocation_context=invocation)

        for place, step in enumerate(steps):
            author = "agent" if place else "user"
            await self._add(invocation, author, step.content, EventActions())
            actions = EventActions()
            response = await self._call(invocation, actions, step.reply)
            await self._add(invocation, "agent", response, actions)

        await self._plugins.run_after_run_callback(invocation_context=invocation)

    async def _call(
        self, invocation: InvocationContext, actions: EventActions, reply: types.Content
    ) -> types.Content:
        context = CallbackContext(invocation, event_actions=actions)
        request = LlmRequest(model=self._llm.model, contents=[*self._contents])
        request.config.system_instruction = _instruction()
        request.append_tools([self._tool])
        await self._plugins.run_before_model_callback(
            callback_context=context, llm_request=request
        )
        response = self._llm.say(request, reply)
        await self._plugins.run_after_model_callback(
            callback_context=context, llm_response=response
        )
        return reply

    async def _add(
        self,
        invocation: InvocationContext,
        author: str,
        content: types.Content,
        actions: EventActions,
    ) -> None:
        event = Event(
            author=author,
            invocation_id=invocation.invocation_id,
            content=content,
            actions=actions,
        )
        await self._plugins.run_on_event_callback(
            invocation_context=invocation, event=event
        )
        self._session.events.append(event)
        self._contents.append(content)


@lru_cache(maxsize=1)
def _instruction() -> str:
    return _common.cut_text("prose", INSTRUCTION_CHARS, random.Random("instruction"))


async def play(cell: Cell, strategy: Strategy, calls: int = CALLS) -> Spent:
    """Plays a session to its end, or to the first request that is refused.

    Args:
        cell: The session.
        strategy: What guards it.
        calls: How many model calls it has.
    """
    llm = CountingLlm(
        model="counting", window_tokens=WINDOW_TOKENS, has_cache=cell.has_cache
    )
    compactions: list[CompactionRecord] = []
    guard = ContextGuardPlugin(default=strategy, on_compaction=compactions.append)
    session = _Play(llm, guard)
    steps = write_steps(cell.kind, calls)
    length = KINDS[cell.kind].turn_calls

    try:
        for start in range(0, calls, length):
            await session.turn(start // length, steps[start : start + length])
    except OverflowError:
        return Spent(None, len(compactions))
    return Spent(llm.cost_tokens, len(compactions))


Figures = dict[Cell, dict[str, Spent]]


def measure(kinds: Collection[str]) -> Figures:
    """Plays the sessions of some of `KINDS` in all ways."""
    tasks = [(cell, name) for cell in CELLS for name in WAYS if cell.kind in kinds]
    figures: Figures = {}
    spent = _common.map_in_processes(_play_task, tasks)
    for (cell, name), one in zip(tasks, spent, strict=True):
        figures.setdefault(cell, {})[name] = one
    return figures


def _play_task(task: tuple[Cell, str]) -> Spent:
    cell, name = task
    return asyncio.run(play(cell, WAYS[name]))


def build_figures(found: Figures) -> dict[str, Any]:
    """What long sessions cost, by session and way."""
    return {
        cell.name: {
            "ways": {name: asdict(one) for name, one in spent.items()},
            "of the default": _divide(spent[AUTO], spent[DEFAULT]),
            "of the default, with previews": _divide(
                spent[AUTO_PREVIEWS], spent[DEFAULT]
            ),
        }
        for cell, spent in found.items()
    }


def _divide(spent: Spent, default: Spent) -> float | None:
    if not (spent.cost_tokens and default.cost_tokens):
        return None
    return spent.cost_tokens / default.cost_tokens


def print_figures(figures: Mapping[str, Any]) -> None:
    """Prints what `build_figures` returns."""
    sessions = figures.values()
    rows = [[way, *(_spell_cost(one["ways"][way]) for one in sessions)] for way in WAYS]
    for what in ("of the default", "of the default, with previews"):
        rows.append([f"auto: {what}", *(one[what] for one in sessions)])
    _common.print_table("Cost, k, and compactions", ("", *figures), rows)
    print(
        NOTES.format(
            calls=CALLS,
            window=WINDOW_TOKENS,
            cached=TYPICAL_COSTS.cached_input,
            output=TYPICAL_COSTS.output,
        )
    )


def _spell_cost(spent: Mapping[str, Any]) -> str | None:
    if spent["cost_tokens"] is None:
        return None
    return f"{spent['cost_tokens'] // 1_000:,} ({spent['compactions']})"
