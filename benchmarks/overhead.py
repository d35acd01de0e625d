"""Measures what the guard adds to a model call: time, memory, import.

    python benchmarks/overhead.py [--json FILE] [--sizes N ...] [--pairs N]

A turn of four model calls, three of which call a tool, is run by turns without and with
the guard, in one process, on sessions of the same contents: processor time, garbage
collector off, medians. The model answers at once, and the sessions are in ADK's
`InMemorySessionService`, the fastest that it has, so that nothing but ADK's own work
stands beside the guard's. That service copies the whole session for each turn; a second
ratio leaves out the time that this takes, on both sides. Each turn is taken out of the
session again. A third ratio is that of the first turn that a process sees of a session,
where the guard has kept nothing from the turns before.

Memory is traced in turns of their own: the most that was held in the second of two,
once the session was loaded and with the collector off as well, of all that they
allocated, and what is still held of that in the end.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.events.event import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types
from pydantic import PrivateAttr
from rich.progress import track

from benchmarks import _common
from contextguard_adk import ContextGuardPlugin, Threshold, request_compaction

SIZES = (10, 100, 1_000, 5_000)
PAIRS = 30
CALLS = 4
"""Model calls in a turn."""

TEXT_CHARS = 800
RESULT_CHARS = 4_000
TOKENS_PER_CONTENT = {"text": 215, "languages": 200, "summary": 215, "tools": 800}
"""What o200k_base counts for a content of such a session."""

IMPORTS = 7

KINDS = {
    "text": "text, below the threshold",
    "languages": "text in German, Spanish, Russian, Arabic, Hindi",
    "tools": f"every second content {RESULT_CHARS // 1_000} KB of nested JSON",
    "summary": "text, a stored summary covers half",
    "tools, summary": "nested JSON, a stored summary covers half",
}
GOALS = {("text", 1_000): 1.03, ("tools", 1_000): 1.10, ("summary", 1_000): 1.05}
IMPORT_GOAL_MS = 50


class InstantLlm(BaseLlm):
    """A model that calls a tool, and again, and then answers, each at once."""

    tokens_per_content: int
    """What it reports of its prompts, about what o200k_base counts."""

    _step: int = PrivateAttr(default=0)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers."""
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=self.tokens_per_content * len(llm_request.contents),
            candidates_token_count=3,
        )
        part = types.Part(text="Understood.")
        # A request for a summary declares no tools.
        self._step += bool(llm_request.config.tools)
        if llm_request.config.tools and self._step % CALLS:
            look = types.FunctionCall(name="look", args={})
            part = types.Part(function_call=look)
        yield LlmResponse(
            content=types.Content(role="model", parts=[part]), usage_metadata=usage
        )


def look() -> dict[str, str]:
    """Looks."""
    return {"status": "ok"}


class TimedSessions(InMemorySessionService):
    """Measures how long it takes to hand out a session."""

    def __init__(self) -> None:
        super().__init__()
        self.loading_seconds = 0.0

    async def get_session(self, **arguments: Any) -> Session | None:
        """Returns a copy of the session."""
        started = time.process_time()
        session = await super().get_session(**arguments)
        self.loading_seconds += time.process_time() - started
        if tracemalloc.is_tracing():
            # To copy takes far more than the copy, and all else would hide behind it.
            tracemalloc.reset_peak()
        return session

    @property
    def stored(self) -> Session:
        """The one session, as it is stored."""
        return self.sessions["app"]["user"]["session"]


def make_events(kind: str, count: int) -> list[Event]:
    """A history of so many contents."""
    rng = random.Random(f"{kind}-{count}")
    events = []
    for number in range(count):
        role = ("user", "model")[number % 2]
        if kind.startswith("tools"):
            ref = f"call-{number // 2}"
            name = "kubectl_get"
            if number % 2 == 0:
                role = "model"
                made = types.FunctionCall(id=ref, name=name, args={"page": number})
                part = types.Part(function_call=made)
            else:
                role = "user"
                rows = _common.make_list(RESULT_CHARS, rng)
                found = types.FunctionResponse(id=ref, name=name, response=rows)
                part = types.Part(function_response=found)
        else:
            pool = "other languages" if kind == "languages" else "prose"
            text = f"{number}: {_common.cut_text(pool, TEXT_CHARS, rng)}"
            part = types.Part(text=text)
        is_user = role == "user" and not part.function_response
        events.append(
            Event(
                author="user" if is_user else "agent",
                invocation_id=f"i-{number // 2}",
                content=types.Content(role=role, parts=[part]),
            )
        )
    return events


@dataclass
class Chat:
    """One session, with or without the guard, that stays as long as it is."""

    kind: str
    guard: ContextGuardPlugin | None
    runner: Runner
    sessions: TimedSessions
    base: list[Event]

    async def turn(self) -> list[Event]:
        """Plays a turn and takes it back; returns its events."""
        message = types.Content(role="user", parts=[types.Part(text="Go on, please.")])
        async for _ in self.runner.run_async(
            user_id="user", session_id="session", new_message=message
        ):
            pass
        stored = self.sessions.stored
        events = stored.events[len(self.base) :]
        stored.events[:] = self.base
        return events

    async def timed_turn(self) -> tuple[float, float]:
        """Plays a turn; returns the processor time of a call, in milliseconds.

        And how much of it went into loading the session.
        """
        self.sessions.loading_seconds = 0.0
        started = time.process_time()
        await self.turn()
        seconds = time.process_time() - started
        return seconds * 1_000 / CALLS, self.sessions.loading_seconds * 1_000 / CALLS

    async def make_anew(self) -> Chat:
        """Makes the same session in the same state, with a runner and guard of its
        own, as another process would have it."""
        guard = _make_guard() if self.guard else None
        chat = await _make_chat(self.kind, self.base, guard)
        chat.sessions.stored.state.update(self.sessions.stored.state)
        return chat


def _make_guard() -> ContextGuardPlugin:
    return ContextGuardPlugin(default=Threshold(context_window=100_000_000))


async def _make_chat(
    kind: str, events: Sequence[Event], guard: ContextGuardPlugin | None
) -> Chat:
    agent = LlmAgent(
        name="agent",
        model=InstantLlm(
            model="instant", tokens_per_content=TOKENS_PER_CONTENT[kind.split(",")[0]]
        ),
        instruction="You help.",
        tools=[look],
    )
    plugins = [guard] if guard else []
    app = App(name="app", root_agent=agent, plugins=[*plugins])
    sessions = TimedSessions()
    await sessions.create_session(app_name="app", user_id="user", session_id="session")
    sessions.stored.events.extend(events)
    runner = Runner(app=app, session_service=sessions)
    return Chat(kind, guard, runner, sessions, list(events))


async def make_pair(kind: str, count: int) -> tuple[Chat, Chat]:
    """Makes the session without the guard and the one with it."""
    events = make_events(kind, count)
    guarded = await _make_chat(kind, events, _make_guard())
    stored = guarded.sessions.stored
    if kind.endswith("summary"):
        half = count // 2 // 2 * 2
        guarded.base = events[:half]
        stored.events[:] = guarded.base
        request_compaction(stored.state)
    turn = await guarded.turn()
    if kind.endswith("summary"):
        if not any("summary" in key for key in stored.state):
            raise RuntimeError("no summary was stored")
        # The session goes on behind the question and the answer of that turn.
        events[half : half + 2] = turn[0], turn[-1]
    # What the guard says of a call is stored with each answer, and loaded with it.
    described = {"custom_metadata": turn[-1].custom_metadata}
    guarded.base = [
        event if event.author == "user" else event.model_copy(update=described)
        for event in events
    ]
    stored.events[:] = guarded.base
    bare = [event.model_copy(update={"custom_metadata": None}) for event in events]
    return await _make_chat(kind, bare, None), guarded


async def time_pairs(kind: str, count: int, pairs: int) -> dict[str, float]:
    """Runs turns without and with the guard by turns."""
    chats = await make_pair(kind, count)
    for chat in chats:
        await chat.turn()
    times: list[list[tuple[float, float]]] = [[], []]
    first: list[list[float]] = [[], []]
    gc.collect()
    gc.freeze()
    for number in range(pairs):
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            times[which].append(await _time(chats[which]))
        for which in order if number % 3 == 0 else ():
            whole_ms, _ = await _time(await chats[which].make_anew())
            first[which].append(whole_ms)
    gc.unfreeze()
    whole = [[whole for whole, _ in side] for side in times]
    calls = [[whole - loading for whole, loading in side] for side in times]
    added_ms = statistics.median(
        guarded - bare for bare, guarded in zip(*whole, strict=True)
    )
    return {
        "adk_ms": statistics.median(whole[0]),
        "adk_loading_ms": statistics.median(loading for _, loading in times[0]),
        "added_ms": added_ms,
        "ratio": _ratio(whole),
        "ratio_without_loading": _ratio(calls),
        "ratio_of_first_turn": _ratio(first),
        "added_us_per_content": 1_000 * added_ms / count,
        **await measure_memory(chats),
    }


async def _time(chat: Chat) -> tuple[float, float]:
    gc.collect()
    gc.disable()
    times = await chat.timed_turn()
    gc.enable()
    return times


def _ratio(sides: list[list[float]]) -> float:
    """The median over pairs: the machine is as fast for one turn as for the next."""
    pairs = zip(sides[0], sides[1], strict=True)
    return statistics.median(guarded / bare for bare, guarded in pairs)


async def measure_memory(chats: tuple[Chat, Chat]) -> dict[str, float]:
    """The most that a turn holds at once, and what stays of it, without and with."""
    peaks, kept = [], []
    for chat in chats:
        await chat.turn()  # The first turn of all imports modules.
        gc.collect()
        tracemalloc.start()
        # What this turn replaces was allocated untraced, and frees nothing.
        await chat.turn()
        gc.collect()
        gc.disable()  # Whether it comes before the peak or after it is chance.
        await chat.turn()
        gc.enable()
        _, peak = tracemalloc.get_traced_memory()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        peaks.append(peak)
        kept.append(after)
    return {
        "adk_peak_kb": peaks[0] / 1_024,
        "guard_peak_kb": (peaks[1] - peaks[0]) / 1_024,
        "peak_ratio": peaks[1] / peaks[0],
        "adk_kept_kb": kept[0] / 1_024,
        "kept_kb": (kept[1] - kept[0]) / 1_024,
    }


_IMPORT = """
import gc, time
gc.disable()  # Whether it runs in one import or the other is chance.
started = time.process_time()
import google.adk.agents, google.adk.apps, google.adk.plugins, google.adk.runners
import google.adk.sessions
between = time.process_time()
import contextguard_adk
print(between - started, time.process_time() - between)
"""


def time_imports(repeats: int = IMPORTS) -> tuple[float, float]:
    """Measures importing ADK, and what the plugin adds to it, in milliseconds."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    found: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _IMPORT],
            cwd=Path(__file__).parent.parent,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        adk, ours = map(float, done.stdout.split())
        found.append((adk, ours))
    del found[0]  # It may have compiled.
    return tuple(1_000 * statistics.median(side) for side in zip(*found, strict=True))


async def measure(
    sizes: Sequence[int], pairs: int, kinds: Sequence[str] = (*KINDS,)
) -> dict[str, Any]:
    """Measures kinds of history at every size."""
    cases = [(kind, size) for kind in kinds for size in sizes]
    shown = track(cases, "timing", transient=True, disable=not sys.stderr.isatty())
    rows = []
    for kind, size in shown:
        # Large sessions take seconds a turn, and vary less.
        count = pairs if size <= 1_000 else max(3, pairs // 3)
        figures = await time_pairs(kind, size, count)
        goal = GOALS.get((kind, size))
        rows.append({"kind": kind, "contents": size, **figures, "goal": goal})
    return {"calls": rows}


def print_figures(figures: dict[str, Any]) -> None:
    """Prints the tables."""
    rows = figures["calls"]
    times = [
        [
            KINDS[row["kind"]],
            row["contents"],
            *(f"{row[name]:.2f}" for name in ("adk_ms", "adk_loading_ms", "added_ms")),
            row["ratio"],
            f"≤ {row['goal']:.2f}" if row["goal"] else "",
            row["ratio_without_loading"],
            row["ratio_of_first_turn"],
            f"{row['added_us_per_content']:.1f}",
        ]
        for row in rows
    ]
    header = (
        *("history", "contents", "ADK, ms", "of that, loading", "guard adds, ms"),
        *("ratio", "goal", "without loading", "first turn", "added µs a content"),
    )
    imported = (
        f"Importing contextguard_adk adds {figures['import_ms']:.0f} ms to the "
        f"{figures['import_adk_ms']:.0f} ms of ADK (goal: at most "
        f"{IMPORT_GOAL_MS})."
    )
    _common.print_table("Processor time of one model call", header, times, imported)
    memory = [
        [
            KINDS[row["kind"]],
            row["contents"],
            *(f"{row[name]:,.0f}" for name in ("adk_peak_kb", "guard_peak_kb")),
            row["peak_ratio"],
            *(f"{row[name]:,.1f}" for name in ("adk_kept_kb", "kept_kb")),
        ]
        for row in rows
    ]
    memory_header = (
        *("history", "contents", "ADK's peak, KB", "guard adds, KB", "ratio"),
        *("ADK keeps, KB", "guard keeps, KB"),
    )
    _common.print_table("Memory of one turn", memory_header, memory)


def main() -> None:
    """Prints the tables, and writes them as JSON where asked."""
    parser = _common.build_parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N")
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N")
    arguments = parser.parse_args()
    _common.quiet()
    figures = asyncio.run(measure(arguments.sizes, arguments.pairs))
    figures["import_adk_ms"], figures["import_ms"] = time_imports()
    print_figures(figures)
    _common.write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
