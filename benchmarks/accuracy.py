"""Measures how well the guard foresees what a provider will count.

    python benchmarks/accuracy.py [--json FILE] [--calls N]

Sessions of one kind of text each go through a real runner with the guard; the provider
counts by BPE, o200k_base, cl100k_base or 1.35 times o200k_base (as providers with a
smaller vocabulary do), and reports what it has counted. Each estimate is compared with
the count of that very request. Beside it stand the estimates that others would have
made of the same requests.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.apps import App
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types
from rich.progress import track

from benchmarks import _common
from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk._measuring.calibration import (
    MeasuredRequest,
    estimate_prompt_tokens,
)
from contextguard_adk._measuring.tokens import Memo, estimate_config_tokens
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import provider as _simulated

WINDOW_TOKENS = 32_000
CALLS = 40
TOKENIZERS = {
    "o200k_base": ("o200k_base", 1.0),
    "cl100k_base": ("cl100k_base", 1.0),
    "1.35 x o200k_base": ("o200k_base", 1.35),
}
"""How a provider counts: by an encoding, times a factor."""

MIXED = "mixed tool results"
KINDS = (*_common.KINDS, MIXED)
WAYS = ("guard", "chars / 4", "ADK", "LangChain")

GOALS = {
    "later calls": {"median": 0.01, "p95": 0.12, "low": 0.005},
    "first call": {"median": 0.20},
}
LOW_RATIO = 0.9
"""Below this share of the real count an estimate is too low."""

SIZES = (300, 700, 1_200, 2_500, 5_000)
"""Characters of a tool's result."""


@lru_cache(maxsize=100_000)
def _count_text(encoding: str, text: str) -> int:
    return len(_common.load_encoding(encoding).encode_ordinary(text))


def count_request(request: LlmRequest, tokenizer: str) -> int:
    """Counts like the simulated provider: texts, calls, results, tools, 3 a content."""
    encoding, factor = TOKENIZERS[tokenizer]
    tokens = sum(_count_text(encoding, text) for text in list_texts(request))
    return int(tokens * factor) + 3 * len(request.contents)


def list_texts(request: LlmRequest) -> list[str]:
    """Lists all texts of a request that a provider counts."""
    contents = [_simulated.read_system(request), *request.contents]
    texts = list(_simulated.list_content_texts(contents))
    tools = [tool.model_dump_json(exclude_none=True) for tool in _tools(request)]
    return [*texts, *tools]


def _tools(request: LlmRequest) -> list[types.Tool]:
    return [tool for tool in request.config.tools or () if isinstance(tool, types.Tool)]


@dataclass
class _LangChain:
    """`count_tokens_approximately` of langchain-core 1, as its middleware calls it.

    Characters / 4, rounded up, and 3 for each message, with the role, the calls as
    Python writes them and the id of the call that a result answers; scaled by what the
    last answer reported over what was expected there, between 1 and 1.25.
    """

    scale: float = 1.0

    def estimate(self, request: LlmRequest) -> int:
        """Estimates a request."""
        return math.ceil(self._plain(request) * self.scale)

    def learn(self, request: LlmRequest, real: int, answer: types.Content) -> None:
        """Takes note of what the provider reported, prompt and answer."""
        output = _langchain_tokens(answer)
        self.scale = min(
            max((real + output) / (self._plain(request) + output), 1), 1.25
        )

    def _plain(self, request: LlmRequest) -> int:
        system = str(request.config.system_instruction or "")
        messages = sum(_langchain_tokens(content) for content in request.contents)
        tools = sum(math.ceil(len(t.model_dump_json()) / 4) for t in _tools(request))
        return messages + math.ceil((len(system) + len("system")) / 4) + 3 + tools


def _langchain_tokens(content: types.Content) -> int:
    tokens = chars = 0
    calls = []
    for part in content.parts or ():
        if part.function_call:
            call = part.function_call
            made = {"name": call.name, "args": call.args, "id": "call_" + "0" * 24}
            calls.append({**made, "type": "tool_call"})
        elif part.function_response:
            text = json.dumps(part.function_response.response, ensure_ascii=False)
            name = part.function_response.name or ""
            size = len(text) + len("tool") + len(name) + len("call_") + 24
            tokens += math.ceil(size / 4) + 3
        else:
            chars += len(part.text or "")

    if chars or calls:
        role = "assistant" if content.role == "model" else "user"
        chars += len(role) + (len(repr(calls)) if calls else 0)
        tokens += math.ceil(chars / 4) + 3
    return tokens


def estimate_by_chars(request: LlmRequest) -> int:
    """Characters / 4 of all that is sent."""
    return sum(len(text) for text in list_texts(request)) // 4


def estimate_like_adk(request: LlmRequest, last_real: int) -> int:
    """What ADK's own compaction compares with its threshold.

    The last reported count; before there is one, the characters of texts, calls and
    results (as `json.dumps` writes them) / 4.
    """
    if last_real:
        return last_real
    parts = [part for content in request.contents for part in content.parts or ()]
    return sum(_count_chars(part) for part in parts) // 4


def _count_chars(part: types.Part) -> int:
    chars = len(part.text or "")
    if part.function_call:
        chars += len(part.function_call.name or "")
        chars += len(json.dumps(part.function_call.args or {}))
    if part.function_response:
        chars += len(part.function_response.name or "")
        chars += len(json.dumps(part.function_response.response or {}))
    return chars


@dataclass
class Session:
    """The estimates of one session, each with what the provider counted.

    Attributes:
        estimates: Of each way, in order of the calls.
        first: The guard's of each request, had the provider counted nothing before.
        real: What the provider counted.
    """

    kind: str
    tokenizer: str
    first: list[int] = field(default_factory=list)
    estimates: dict[str, list[int]] = field(
        default_factory=lambda: {way: [] for way in WAYS}
    )
    real: list[int] = field(default_factory=list)


async def play(kind: str, tokenizer: str, calls: int) -> Session:
    """Plays a session of so many model calls."""
    session = Session(kind, tokenizer)
    rng = random.Random(kind)
    langchain = _LangChain()

    def script(request: LlmRequest) -> Reply:
        real = count_request(request, tokenizer)
        last = session.real[-1] if session.real else 0
        others = {
            "chars / 4": estimate_by_chars(request),
            "ADK": estimate_like_adk(request, last),
            "LangChain": langchain.estimate(request),
        }
        for way, estimate in others.items():
            session.estimates[way].append(estimate)
        session.real.append(real)
        session.first.append(_estimate_first(request))
        content = _answer(kind, len(session.real), rng)
        langchain.learn(request, real, content)
        usage = types.GenerateContentResponseUsageMetadata(prompt_token_count=real)
        return LlmResponse(content=content, usage_metadata=usage)

    # It counts for itself; its own window only has to be out of the way.
    llm = SimulatedLlm(context_window=1_000_000, script=script)
    guard = ContextGuardPlugin(
        default=Threshold(context_window=WINDOW_TOKENS),
        on_call=lambda record: session.estimates["guard"].append(
            record.estimated_tokens
        ),
    )

    def fetch(page: int) -> Any:
        """Fetches a page of what was asked for."""
        return write_result(kind, page, rng)

    agent = LlmAgent(name="agent", model=llm, instruction="You help.", tools=[fetch])
    app = App(name="app", root_agent=agent, plugins=[guard])
    runner = Runner(app=app, session_service=InMemorySessionService())
    place: dict[str, Any] = {"user_id": "user", "session_id": "session"}
    await runner.session_service.create_session(app_name="app", **place)
    while len(session.real) < calls:
        text = "Go on, please. " + _common.cut_text(_text_kind(kind), 200, rng)
        message = types.Content(role="user", parts=[types.Part(text=text)])
        async for _ in runner.run_async(
            **place, new_message=message, run_config=RunConfig(max_llm_calls=0)
        ):
            pass
    return session


def _estimate_first(request: LlmRequest) -> int:
    """What the guard estimates where nothing was counted, as in a new process."""
    config = request.config
    contents = request.contents
    memo = Memo()
    heuristic = estimate_config_tokens(config) + memo.estimate_tokens(contents)
    measured = MeasuredRequest(contents, heuristic, config, memo)
    return estimate_prompt_tokens(measured)


def _text_kind(kind: str) -> str:
    return kind if kind in ("prose", "cjk", "other languages") else "prose"


def _answer(kind: str, number: int, rng: random.Random) -> types.Content:
    """What the model says: three calls, then a text, and so on."""
    if number % 4:
        call = types.FunctionCall(name="fetch", args={"page": number})
        return types.Content(role="model", parts=[types.Part(function_call=call)])
    text = _common.cut_text(_text_kind(kind), 600, rng)
    return types.Content(role="model", parts=[types.Part(text=text)])


def write_result(kind: str, page: int, rng: random.Random) -> Any:
    """What the tool returns: a text, or JSON."""
    if kind == MIXED:
        kind = rng.choice(_common.KINDS)
    chars = rng.choice(SIZES)
    if kind == "json":
        return _common.make_list(chars, rng)
    return {"page": page, "result": _common.cut_text(kind, chars, rng)}


def rate(pairs: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Rates estimates against real counts."""
    errors = sorted(abs(guess / real - 1) for guess, real in pairs)
    low = sum(guess < LOW_RATIO * real for guess, real in pairs)
    return {
        "calls": len(pairs),
        "median": statistics.median(errors),
        "p95": errors[min(len(errors) - 1, math.ceil(0.95 * len(errors)) - 1)],
        "low": low / len(pairs),
    }


def _pairs(
    sessions: Sequence[Session], way: str, is_first: bool
) -> list[tuple[int, int]]:
    pairs = []
    for session in sessions:
        is_own = is_first and way == "guard"
        estimates = session.first if is_own else session.estimates[way]
        found = list(zip(estimates, session.real, strict=True))
        pairs += found if is_own else found[:1] if is_first else found[1:]
    return pairs


def build_figures(sessions: Sequence[Session]) -> dict[str, Any]:
    """Everything that is measured, as it is written to the file."""
    groups: dict[str, Callable[[Session], bool]] = {
        "all": lambda _: True,
        "all but other languages": lambda session: session.kind != "other languages",
    }
    for kind in KINDS:
        groups[kind] = lambda session, kind=kind: session.kind == kind  # type: ignore[misc]
    for name in TOKENIZERS:
        groups[name] = lambda session, name=name: session.tokenizer == name  # type: ignore[misc]

    members = {
        group: [session for session in sessions if holds(session)]
        for group, holds in groups.items()
    }

    def rate_ways(is_first: bool) -> dict[str, dict[str, dict[str, float]]]:
        return {
            way: {
                group: rate(_pairs(found, way, is_first))
                for group, found in members.items()
            }
            for way in WAYS
        }

    return {
        "goals": GOALS,
        "first call": rate_ways(is_first=True),
        "later calls": rate_ways(is_first=False),
    }


NOTES = """\
later calls  from the second call of a session on, those after a compaction included.
guard        this package's estimate. First call: of every request of the sessions, had
             the provider counted nothing before; of the others of the first ones.
chars / 4    of instruction, tools, texts, calls and results.
ADK          what ADK's own compaction compares with its threshold: the last reported
             count (results that came since are not in it); before, chars / 4.
LangChain    count_tokens_approximately with the scaling that its summarization
             middleware uses: chars / 4 + 3 a message, times at most 1.25.
too low      estimates more than 10 % below the count.
"""


def print_figures(figures: dict[str, Any]) -> None:
    """Prints the tables."""
    header = ("", "", "calls", "median error", "p95 error", "too low")
    for call in ("later calls", "first call"):
        rows = [
            _write_row(way, group, rated)
            for way in WAYS
            for group, rated in figures[call][way].items()
            if way == "guard" or group == "all"
        ]
        goals = figures["goals"][call].items()
        wanted = ", ".join(f"{name} at most {goal:.1%}" for name, goal in goals)
        notes = NOTES if call == "first call" else ""
        title = f"Estimates against BPE counts, {call}"
        _common.print_table(title, header, rows, f"Goals: {wanted}.\n{notes}")


def _write_row(way: str, group: str, rated: Mapping[str, float]) -> list[Any]:
    shares = (f"{rated[name]:.1%}" for name in ("median", "p95", "low"))
    return [way, group, rated["calls"], *shares]


def main() -> None:
    """Prints the tables, and writes them as JSON where asked."""
    parser = _common.build_parser(__doc__)
    parser.add_argument("--calls", type=int, default=CALLS, metavar="N")
    arguments = parser.parse_args()
    _common.quiet()
    cases = [(kind, tokenizer) for kind in KINDS for tokenizer in TOKENIZERS]
    shown = track(cases, "playing", transient=True, disable=not sys.stderr.isatty())
    sessions = [asyncio.run(play(*case, arguments.calls)) for case in shown]
    figures = build_figures(sessions)
    print_figures(figures)
    _common.write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
