"""Measures what the pipeline promises, on long conversations and a strict provider.

    python benchmarks/pipeline_figures.py [--json FILE]

No key and no network is needed: a simulated provider counts by BPE and refuses what
exceeds its window. Five figures: how well estimates follow the provider's counts, how
many overflow errors remain, how much a compaction removes, whether sessions that stay
below the threshold are left without warnings, and how many summaries are paid for on
tool-heavy conversations. Where one is not what is promised the exit code is 1.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.apps import App
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

from benchmarks import _common
from contextguard_adk import (
    CallRecord,
    CompactionRecord,
    ContextGuardPlugin,
    Pipeline,
    PressureRecord,
    Threshold,
)
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests.builders import KeptSessions
from tests.builders import play as play_conversation
from tests.scenarios import write_conversation

WINDOW_TOKENS = 16_000
TURNS = 20
KINDS = ("prose", "log", "json")
SHORT_WORDS = 40

TOOL_HEAVY_WINDOW_TOKENS = 32_000
TOOL_HEAVY = (
    "tool-heavy",
    "parallel bursts",
    "only tool results",
    "kubernetes",
    "coding agent",
)

PROMISED: dict[str, tuple[float, float]] = {
    "correlation of estimate and real tokens": (0.95, 1.0),
    "failed turns without a guard": (1, math.inf),  # Else there is nothing to show.
    "requests refused, Pipeline": (0, 0),
    "overflow errors less": (0.80, 1.0),
    "compactions": (1, math.inf),
    "tokens removed per compaction (mean)": (0.30, 1.0),
    "tokens removed per compaction (median)": (0.30, 1.0),
    "their compactions": (0, 0),
    "their warnings": (0, 0),
    "tool-heavy: summaries saved": (1, math.inf),
}
"""The least and the most that a figure may be."""

WORDS = [
    "the",
    "billing",
    "service",
    "waits",
    "for",
    "a",
    "payment",
    "gateway",
    "because",
    "nightly",
    "imports",
    "were",
    "moved",
    "behind",
    "our",
    "staging",
    "cluster",
    "and",
    "the",
    "search",
    "index",
    "still",
    "disagrees",
    "with",
    "what",
    "the",
    "data",
    "warehouse",
    "reported",
    "in",
    "two",
    "of",
    "five",
    "regions",
    "since",
    "Tuesday",
    "evening",
]


def write_text(kind: str, words: int, rng: random.Random) -> str:
    """Writes prose, log lines or rows."""
    if kind == "prose":
        return " ".join(rng.choices(WORDS, k=words)) + "."
    if kind == "log":
        return "\n".join(
            f"2026-02-{rng.randrange(1, 29):02} ERROR worker[{rng.randrange(64)}] "
            f"GET /orders/{rng.randrange(10**6)} {rng.choice(WORDS)}"
            for _ in range(words // 6)
        )
    rows = [
        {"id": rng.getrandbits(32), "state": rng.choice(WORDS)}
        for _ in range(words // 6)
    ]
    return json.dumps(rows)


@dataclass
class Measured:
    """What one session showed."""

    llm: SimulatedLlm
    compactions: list[CompactionRecord] = field(default_factory=list)
    warnings: list[PressureRecord] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    failed_turns: int = 0

    def pairs(self) -> list[tuple[int, int]]:
        """Each estimate with what the provider counted for that very request."""
        return [
            (c.estimated_tokens, c.real_tokens) for c in self.calls if c.real_tokens
        ]


async def play(seed: int, kind: str, strategy: Strategy | None, words: int) -> Measured:
    """Plays one session of turns with a tool each."""
    rng = random.Random(f"{seed}-{kind}")

    def script(request: LlmRequest) -> Reply:
        parts = request.contents[-1].parts or []
        if any(part.function_response for part in parts):
            return "Noted: " + write_text("prose", 30, random.Random(len(str(request))))
        return call("look_up", topic=kind)

    llm = SimulatedLlm(context_window=WINDOW_TOKENS, script=script)
    measured = Measured(llm)

    def look_up(topic: str) -> dict[str, str]:
        """Looks a topic up."""
        return {"result": write_text(topic, rng.randrange(words, 2 * words), rng)}

    plugins: list[BasePlugin] = []
    if strategy is not None:
        guard = ContextGuardPlugin(
            default=strategy,
            on_compaction=measured.compactions.append,
            on_pressure=measured.warnings.append,
            on_call=measured.calls.append,
        )
        plugins.append(guard)
    agent = LlmAgent(name="agent", model=llm, instruction="You help.", tools=[look_up])
    sessions = InMemorySessionService()
    runner = Runner(
        app=App(name="app", root_agent=agent, plugins=plugins),
        session_service=sessions,
    )
    await sessions.create_session(app_name="app", user_id="user", session_id="s")
    for number in range(TURNS):
        text = f"Question {number}: {write_text('prose', 30, rng)}"
        message = types.Content(role="user", parts=[types.Part(text=text)])
        try:
            async for _ in runner.run_async(
                user_id="user",
                session_id="s",
                new_message=message,
                run_config=RunConfig(),
            ):
                pass
        except Exception:  # noqa: BLE001 - what the user would see as an error.
            measured.failed_turns += 1
    return measured


async def count_summaries(name: str, strategy: Strategy) -> int:
    """Plays a tool-heavy conversation, and counts the summary calls that it cost."""
    window_tokens = TOOL_HEAVY_WINDOW_TOKENS
    conversation = write_conversation(name, window_tokens)
    llm = SimulatedLlm(
        context_window=window_tokens,
        token_ratio=conversation.token_ratio,
        usage=conversation.usage,
    )
    await play_conversation(conversation, strategy, llm, session_service=KeptSessions())
    return llm.summaries


async def measure_tool_heavy() -> dict[str, float]:
    """Compares what pipelines and full summaries pay for."""
    window_tokens = TOOL_HEAVY_WINDOW_TOKENS
    figures: dict[str, float] = {}
    saved = 0
    for name in TOOL_HEAVY:
        paid = await count_summaries(name, Pipeline(context_window=window_tokens))
        other = await count_summaries(name, Threshold(context_window=window_tokens))
        figures[f"{name}: summaries, Pipeline"] = paid
        figures[f"{name}: summaries, Threshold"] = other
        saved += other - paid

    return {**figures, "tool-heavy: summaries saved": saved}


def find_broken(figures: Mapping[str, float]) -> list[str]:
    """Names the figures that are missing, or not what is promised."""
    return [
        name
        for name, (least, most) in PROMISED.items()
        if not least <= figures.get(name, math.nan) <= most
    ]


async def play_kinds(strategy: Strategy | None, words: int) -> list[Measured]:
    """Plays a session of each kind, with messages of so many words."""
    return [await play(0, kind, strategy, words) for kind in KINDS]


def count_failed(sessions: Sequence[Measured]) -> int:
    """How many turns ended in an error."""
    return sum(session.failed_turns for session in sessions)


async def measure() -> dict[str, float]:
    """Plays all sessions and computes the figures."""
    strategies: dict[str, Strategy | None] = {
        "no guard": None,
        "Pipeline": Pipeline(context_window=WINDOW_TOKENS),
        "Threshold": Threshold(context_window=WINDOW_TOKENS),
    }
    played = {
        name: await play_kinds(strategy, 500) for name, strategy in strategies.items()
    }
    guarded = played["Pipeline"]
    short = await play_kinds(strategies["Pipeline"], SHORT_WORDS)

    pairs = [pair for session in (*guarded, *short) for pair in session.pairs()]
    estimates, counted = zip(*pairs, strict=True)
    compactions = [record for session in guarded for record in session.compactions]
    removed = [1 - each.tokens_after / each.tokens_before for each in compactions]
    errors = {name: count_failed(sessions) for name, sessions in played.items()}

    return {
        "requests measured": len(pairs),
        "correlation of estimate and real tokens": statistics.correlation(
            estimates, counted
        ),
        "failed turns without a guard": errors["no guard"],
        "failed turns with Pipeline": errors["Pipeline"],
        "requests refused, Pipeline": sum(s.llm.rejections for s in guarded),
        "overflow errors less": 1 - errors["Pipeline"] / max(1, errors["no guard"]),
        "compactions": len(removed),
        "tokens removed per compaction (mean)": statistics.mean(removed),
        "tokens removed per compaction (median)": statistics.median(removed),
        "tokens removed per compaction (least)": min(removed),
        "summary calls, Pipeline": sum(s.llm.summaries for s in guarded),
        "summary calls, Threshold": sum(s.llm.summaries for s in played["Threshold"]),
        "sessions below the threshold": len(short),
        "their compactions": sum(len(s.compactions) for s in short),
        "their warnings": sum(len(s.warnings) for s in short),
        "warnings in long sessions": sum(len(s.warnings) for s in guarded),
    }


def main() -> int:
    """Prints the table, and writes it as JSON where asked; 1 for a broken promise."""
    arguments = _common.build_parser(__doc__).parse_args()
    _common.quiet()
    figures = {**asyncio.run(measure()), **asyncio.run(measure_tool_heavy())}
    broken = find_broken(figures)

    for name, value in figures.items():
        digits = 3 if isinstance(value, float) else 0
        note = "  BROKEN" if name in broken else ""
        print(f"{name:44} {value:10.{digits}f}{note}")

    _common.write_json(arguments.json, figures)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
