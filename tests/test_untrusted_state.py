"""Session state in which anybody has written anything under the guard's keys."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from hypothesis import given, settings
from hypothesis import strategies as st

from contextguard_adk import (
    CompactionRecord,
    ContextGuardPlugin,
    Pipeline,
    SlidingWindow,
    Threshold,
)
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests.builders import Chat, KeptSessions, answer_text, guarded_agent
from tests.chats import words

WINDOW = 8_000
TURNS = 8
"""Two compactions: an attack may find a stored summary, and be followed by another."""

STRATEGIES: list[Strategy] = [
    Threshold(context_window=WINDOW),
    SlidingWindow(context_window=WINDOW),
    Pipeline(context_window=WINDOW),
]
FORMS = ["__context_guard_{}_agent", "context_guard:{}:agent"]
NAMES = ["summary", "summarized_at", "real_tokens", "last_heuristic", "scopes", "todos"]
SHARED = ["todos", *(f"context_guard:compact{s}" for s in ("", ":agent", "_focus"))]
HEADING = "Previous conversation summary"

State = dict[str, Any]
Attack = Callable[[State], State]
"""Makes values for a state from what stands there."""


class Clock(BasePlugin):
    """Notes before and behind the guard what CPU time its callbacks take."""

    def __init__(self, begins: Clock | None = None) -> None:
        super().__init__(name="clock" if begins else "first_clock")
        self.begins = begins
        self.now = 0.0
        self.spent = list[float]()

    def _note(self) -> None:
        self.now = time.process_time()
        if self.begins:
            self.spent.append(self.now - self.begins.now)

    async def before_model_callback(self, **_: Any) -> None:
        """Notes it."""
        self._note()

    async def after_model_callback(self, **_: Any) -> None:
        """Notes it."""
        self._note()


def look(step: int) -> str:
    """Looks for something."""
    return words(700, f"row {step}")


@dataclass
class Played:
    """Turns of two calls each: those that were compacted, and the time."""

    compacted: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    llm: SimulatedLlm = field(default_factory=SimulatedLlm)


async def play(
    strategy: Strategy, attack: Attack | None = None, turn: int = 0, **llm: Any
) -> Played:
    """Plays them; before one of the turns somebody writes to session state."""
    steps = itertools.count()
    done = list[CompactionRecord]()

    def answer(request: LlmRequest) -> Reply:
        parts = request.contents[-1].parts or []
        is_told = any(part.function_response for part in parts)
        return words(500, "Found.") if is_told else call("look", step=next(steps))

    settings = {"context_window": 100_000, "token_ratio": 1.0, **llm}
    said = "All of it is known, and the work goes on."
    model = SimulatedLlm(script=answer, summary_replies=lambda _: said, **settings)
    first = Clock()
    second = Clock(first)
    guard = ContextGuardPlugin(default=strategy, on_compaction=done.append)
    agent = guarded_agent(model, [look])
    sessions = KeptSessions()
    chat = Chat(agent, [first, guard, second], session_service=sessions)
    played = Played(seconds=second.spent, llm=model)
    for number in range(TURNS):
        if attack and number == turn:
            await chat.set_state(attack(await chat.state()))
        before = len(done)
        assert answer_text(await chat.say(words(500, f"Request {number}.")))
        played.compacted += [number] * (len(done) - before)
    assert model.rejections == model.violations == 0
    return played


CLEAN: dict[tuple[str, str], Played] = {}


async def check(
    strategy: Strategy, attack: Attack, turn: int, usage: str = "last"
) -> None:
    """What is written costs no turn, two compactions at most, and little time."""
    case = type(strategy).__name__, usage
    if case not in CLEAN:
        await play(strategy)  # Modules are loaded.
        CLEAN[case] = await play(strategy, usage=usage)
    clean = CLEAN[case]
    played = await play(strategy, attack, turn, usage=usage)
    assert len(clean.compacted) >= 2
    assert len(played.compacted) <= len(clean.compacted) + 2, played.compacted
    # What it guards against takes seconds; here coverage may be measured as well.
    most_seconds = 3 * max(clean.seconds) + 0.3
    if max(played.seconds) >= most_seconds:  # By the garbage collector, perhaps.
        again = await play(strategy, attack, turn, usage=usage)
        both = zip(played.seconds, again.seconds, strict=False)
        assert max(min(pair) for pair in both) < most_seconds


def write(**values: Any) -> Attack:
    """Writes values under the keys of an agent."""
    return lambda state: {FORMS[0].format(name): v for name, v in values.items()}


def change(of_summary: State | None = None, **values: Any) -> Attack:
    """Changes fields of the record; the others stay."""
    key = FORMS[0].format("record")

    def attack(state: State) -> State:
        record = {"version": 2, **json.loads(state.get(key) or "{}"), **values}
        if of_summary:
            record["summary"] = {**(record.get("summary") or {}), **of_summary}
        return {key: json.dumps(record)}

    return attack


def learned(**values: Any) -> Attack:
    """Changes the limits of a model, which only earlier releases read."""
    return change(learned={"simulated": values})


NEGATIVE = dict.fromkeys(("max_length", "head_length", "result_length"), -100)
CRAFTED: dict[str, Attack] = {
    "window of 300": learned(window_tokens=300),
    "window of 1,000": learned(window_tokens=1_000),
    "window of 2,000": learned(window_tokens=2_000),
    "output of 2**50": learned(output_tokens=2**50),
    "correction of 20": learned(correction=20),
    "correction of infinity": learned(correction=math.inf),
    "count of 2**53": write(real_tokens=2**53, last_heuristic=1),
    "two counts of 2**53": write(real_tokens=2**53, last_heuristic=2**53),
    "count of the window": write(real_tokens=WINDOW - 1, last_heuristic=500),
    "half of a count": write(real_tokens=WINDOW - 1, last_heuristic=None),
    "count that is no number": write(real_tokens=math.nan, last_heuristic=math.inf),
    "count of lists": write(real_tokens=[[0] * 9] * 30_000, last_heuristic=True),
    "brackets": write(summary="[" * 30_000 + HEADING + "]" * 30_000),
    "long summary": write(summary="word " * 1_000_000),
    "broken text": write(summary="\ud800"),
    "brackets as JSON": write(record="[" * 60_000 + "]" * 60_000),
    "deep JSON": change(
        of_summary={"beside": {"done": json.loads("[" * 60 + "]" * 60)}}
    ),
    "long JSON": change(helped={str(n): "x" * 99 for n in range(20_000)}),
    "negative numbers": change({"model_chars": -9, "truncation": NEGATIVE}),
    "number of 5,000 digits": write(record='{"version": ' + "9" * 5_000 + "}"),
    "todos": write(todos=[{"content": f"task {n}"} for n in range(100_000)]),
    "long todos": write(todos=[{"content": "task " * 2_000} for _ in range(1_000)]),
    "todos of everybody": lambda _: {"todos": [{"content": "x" * 99}] * 100_000},
    "scopes": write(scopes=[f"{n:016x}" for n in range(100_000)]),
    "demand": lambda _: dict.fromkeys(SHARED[1:3], True) | {SHARED[3]: "x" * 10**6},
}


def slow_rows(rows: Iterable[tuple[object, ...]]) -> list[Any]:
    """Rows for the slow tier."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


NUMBERS = [name for name in CRAFTED if name.startswith(("window", "out", "c", "half"))]
CASES: list[Any] = [(name, 0, 0, "last") for name in CRAFTED]
CASES += slow_rows((name, 0, 4, "last") for name in CRAFTED)
CASES += [(name, n % 2 + 1, 0, "last") for n, name in enumerate(NUMBERS)]
CASES += slow_rows((name, (n + 1) % 2 + 1, 0, "last") for n, name in enumerate(NUMBERS))
CASES += [(name, 0, 0, "never") for name in NUMBERS]


@pytest.mark.quick(
    "window of 1,000-0-0-last",
    "window of 2,000-0-0-last",
    "correction of infinity-0-0-last",
    "count that is no number-0-0-last",
    "long summary-0-0-last",
    "broken text-0-0-last",
    "number of 5,000 digits-0-0-last",
    "todos-0-0-last",
    "scopes-0-0-last",
    "output of 2**50-2-0-last",
    "correction of infinity-2-0-last",
    "count that is no number-2-0-last",
    "window of 1,000-0-0-never",
    "window of 2,000-0-0-never",
    "correction of infinity-0-0-never",
    "half of a count-0-0-never",
)
@pytest.mark.parametrize(("attack", "strategy", "turn", "usage"), CASES)
async def test_a_crafted_value_costs_little(
    attack: str, strategy: int, turn: int, usage: str
) -> None:
    """Neither time nor compactions nor turns."""
    await check(STRATEGIES[strategy], CRAFTED[attack], turn, usage)


numbers = st.integers() | st.floats() | st.sampled_from([-1, 0, 1, 500, 2**53, 10**40])
scalars = st.none() | st.booleans() | numbers | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
limits = st.dictionaries(
    st.sampled_from(["window_tokens", "output_tokens", "correction"]),
    st.integers(1, 3 * WINDOW) | st.floats(1, 20) | values,
)
RECORD = ["covered", "scope", "invocation", "last_event", "reason", "request"]
RECORD += ["request_chars", "model_chars", "model_covered_count", "truncation"]
RECORD += ["truncated_upto", "has_recall", "left_tokens", "beside"]
fields = st.dictionaries(st.sampled_from(RECORD), values, max_size=4)
records = st.builds(
    lambda shown, changed: (
        lambda state: {
            **(learned(**shown)(state) if shown else {}),
            **(change(of_summary=changed)(state) if changed else {}),
        }
    ),
    limits,
    fields,
)
counts = st.integers(1, 2 * WINDOW) | values
OWN = [form.format(name) for form in FORMS for name in [*NAMES, "record"]]
keys = st.sampled_from([*OWN, *SHARED])
plain = st.dictionaries(keys, counts, max_size=6).map(lambda made: lambda _: made)
any_state = given(
    st.sampled_from(STRATEGIES), plain | records, st.integers(0, TURNS - 2)
)


@any_state
@settings(max_examples=6)
async def test_any_value_costs_little(
    strategy: Strategy, attack: Attack, turn: int
) -> None:
    """Neither time nor compactions nor turns."""
    await check(strategy, attack, turn)


@pytest.mark.slow
@any_state
@settings(max_examples=150)
async def test_any_of_many_values_costs_little(
    strategy: Strategy, attack: Attack, turn: int
) -> None:
    """Neither time nor compactions nor turns."""
    await check(strategy, attack, turn)
