"""Sessions of 600 model calls in large windows, and what they cost by trigger.

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
from typing import Any, Literal

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
from benchmarks._play import CountingLlm, ScriptedTool
from contextguard_adk import (
    CallRecord,
    CompactionRecord,
    ContextGuardPlugin,
    Strategy,
    Threshold,
)
from contextguard_adk._measuring.budgets import threshold_tokens
from contextguard_adk._providers.costs import TYPICAL_COSTS

CALLS = 600
WINDOWS_TOKENS = (200_000, 1_000_000)
NO_GUARD, DEFAULT = "no guard", "Threshold"
AUTO, AUTO_PREVIEWS = 'trigger="auto"', 'trigger="auto", previews'
FIXED_TRIGGERS = 10
LEAST_TRIGGER_TOKENS = 32_000
INSTRUCTION_CHARS = 4_000
NOTES = """\
Sessions of {calls} model calls: a chat, in which each is a turn, and turns of 30 calls
whose results have 2 or 40 KB. "-" is a session that ended in a refused request.
Threshold compacts 20,000 tokens below the window, the others at their trigger. All show
results whole, but for the last, which has all else default.

cost             in uncached prompt tokens: one that the cache served costs {cached:g},
                 one of an answer or a summary {output:g}; summaries are included.
cached           the provider has a prompt cache.
auto             compared with the cheapest of the fixed triggers and with the default;
                 and the trigger that it had chosen in the end.
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
        window_tokens: The model's context window.
        has_cache: Whether the provider has a prompt cache.
    """

    kind: str
    window_tokens: int
    has_cache: bool

    @property
    def name(self) -> str:
        """What a table of its window calls it."""
        return f"{self.kind}, cached" if self.has_cache else self.kind


CELLS = tuple(
    Cell(kind, window_tokens, has_cache)
    for window_tokens in WINDOWS_TOKENS
    for kind in KINDS
    for has_cache in (True, False)
)


@dataclass(frozen=True)
class Spent:
    """What a session came to.

    Attributes:
        cost_tokens: In uncached prompt tokens; None where a request was refused.
        compactions: How many there were.
        trigger_tokens: From where on the last call would have been compacted.
    """

    cost_tokens: int | None
    compactions: int = 0
    trigger_tokens: int | None = None


@dataclass(frozen=True)
class Step:
    """What a model call is made for, and what the model says."""

    content: types.Content
    reply: types.Content


@lru_cache(maxsize=1)
def write_steps(kind: str, calls: int) -> list[Step]:
    """Writes a session of one of `KINDS`, the same on every run."""
    shape, rng = KINDS[kind], random.Random(kind)
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


async def play(cell: Cell, strategy: Strategy | None, calls: int = CALLS) -> Spent:
    """Plays a session to its end, or to the first request that is refused.

    Args:
        cell: The session.
        strategy: What guards it; None for no guard.
        calls: How many model calls it has.
    """
    llm = CountingLlm(
        model="counting", window_tokens=cell.window_tokens, has_cache=cell.has_cache
    )
    compactions: list[CompactionRecord] = []
    records: list[CallRecord] = []
    guard = ContextGuardPlugin(
        default=strategy, on_compaction=compactions.append, on_call=records.append
    )
    session, steps = _Play(llm, guard), write_steps(cell.kind, calls)
    length = KINDS[cell.kind].turn_calls
    try:
        for start in range(0, calls, length):
            await session.turn(start // length, steps[start : start + length])
    except OverflowError:
        return Spent(None, len(compactions))
    trigger_tokens = records[-1].threshold_tokens if records else None
    return Spent(llm.cost_tokens, len(compactions), trigger_tokens)


def list_triggers(window_tokens: int) -> list[int]:
    """The fixed triggers for a window: each so much above the one before."""
    most_tokens = threshold_tokens(window_tokens)
    growth = (most_tokens / LEAST_TRIGGER_TOKENS) ** (1 / (FIXED_TRIGGERS - 1))
    steps = range(FIXED_TRIGGERS - 1)
    fixed = [round(LEAST_TRIGGER_TOKENS * growth**step) for step in steps]
    return [*fixed, most_tokens]


def list_ways(window_tokens: int) -> dict[str, Strategy | None]:
    """What guards a session in a window, by the name of its row."""
    triggers = {
        f"trigger={number:,}": number for number in list_triggers(window_tokens)
    }
    named: dict[str, int | Literal["auto"] | None] = {DEFAULT: None, **triggers}
    named[AUTO] = "auto"
    strategies = {
        # Previews follow from the trigger: it alone is to differ.
        name: Threshold(
            context_window=window_tokens, trigger=trigger, preview_tokens=None
        )
        for name, trigger in named.items()
    }
    previews = Threshold(context_window=window_tokens, trigger="auto")
    return {NO_GUARD: None, **strategies, AUTO_PREVIEWS: previews}


Figures = dict[Cell, dict[str, Spent]]


def measure(kinds: Collection[str]) -> Figures:
    """Plays the sessions of some of `KINDS` in all ways."""
    tasks = [
        (cell, name)
        for cell in CELLS
        for name in list_ways(cell.window_tokens)
        if cell.kind in kinds
    ]
    figures: Figures = {}
    spent = _common.map_in_processes(_play_task, tasks)
    for (cell, name), one in zip(tasks, spent, strict=True):
        figures.setdefault(cell, {})[name] = one
    return figures


def _play_task(task: tuple[Cell, str]) -> Spent:
    cell, name = task
    return asyncio.run(play(cell, list_ways(cell.window_tokens)[name]))


def _compare_auto(spent: Mapping[str, Spent]) -> dict[str, float | int | None]:
    """Compares the automatic trigger with the others, for one session."""
    fixed = [one.cost_tokens for name, one in spent.items() if name[-1].isdigit()]
    auto, default = spent[AUTO], spent[DEFAULT].cost_tokens
    return {
        "of the cheapest": _divide(auto, min(filter(None, fixed), default=None)),
        "of the default": _divide(auto, default),
        "of the default, with previews": _divide(spent[AUTO_PREVIEWS], default),
        "chosen at last": auto.trigger_tokens,
    }


def _divide(spent: Spent, cost_tokens: int | None) -> float | None:
    if not (spent.cost_tokens and cost_tokens):
        return None
    return spent.cost_tokens / cost_tokens


def build_figures(found: Figures) -> dict[str, Any]:
    """What long sessions cost, by window, session and way."""
    figures: dict[str, Any] = {}
    for cell, spent in found.items():
        ways = {name: asdict(one) for name, one in spent.items()}
        figures.setdefault(f"{cell.window_tokens:,}", {})[cell.name] = {
            "ways": ways,
            "auto": _compare_auto(spent),
        }
    return figures


def print_figures(figures: Mapping[str, Any]) -> None:
    """Prints a table for each window."""
    for window, sessions in figures.items():
        first = next(iter(sessions.values()))
        rows = [
            [way, *(_spell_cost(one["ways"][way]) for one in sessions.values())]
            for way in first["ways"]
        ]
        rows += [
            [f"auto: {what}", *(one["auto"][what] for one in sessions.values())]
            for what in first["auto"]
        ]
        title = f"Window of {window} tokens: cost, k, and compactions"
        _common.print_table(title, ("", *sessions), rows)
    print(
        NOTES.format(
            calls=CALLS,
            cached=TYPICAL_COSTS.cached_input,
            output=TYPICAL_COSTS.output,
        )
    )


def _spell_cost(spent: Mapping[str, Any]) -> str | None:
    if spent["cost_tokens"] is None:
        return None
    return f"{spent['cost_tokens'] // 1_000:,} ({spent['compactions']})"
