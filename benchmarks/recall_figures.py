"""Measures whether anything is lost: facts planted in long conversations, asked later.

    python benchmarks/recall_figures.py [--json FILE] [--seeds N]

No key and no network is needed. Facts stand at random places in tool results of 4,000
to 240,000 characters, in the user's messages and in the model's answers. After ten
compactions a scripted agent wants each of them back that a compaction has taken out.
A fact counts as kept when it stands in the request before it is asked for anything,
and as reached when at most two calls of `recall_history` show it. The exit code is 1
where a fact was out of reach, or a request was refused.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.apps import App
from google.adk.models.llm_request import LlmRequest
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

from benchmarks import _common
from benchmarks._extractive import ExtractiveSummaries
from contextguard_adk import CompactionRecord, ContextGuardPlugin, Threshold
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm, call

WINDOWS_TOKENS = (8_000, 32_000, 200_000)
MIN_COMPACTIONS = 10
MAX_TURNS = 400
MAX_RECALLS = 2
SHORTEST_CHARS = 4_000
LONGEST_CHARS = 240_000
RECALL_TOOL = "recall_history"

NAMES = ("amber", "birch", "cedar", "ember", "falcon", "garnet", "harbor", "indigo")
THINGS = ("access code", "serial number", "port", "owner id", "ticket", "checksum")
FILLER = (
    "pod api-{a} restarted {b} times on node-{c}; memory {a}{b} MiB, ready",
    '{{"name": "svc-{a}", "replicas": {b}, "image": "registry/app:{c}.{a}"}}',
    "The import of batch {a} took {b} seconds and moved {c} rows without complaint.",
    "def handler_{a}(event, retries={b}): return dispatch(event, {c}, retries)",
)


@dataclass(frozen=True)
class Fact:
    """One thing worth knowing."""

    thing: str
    owner: str
    value: str
    request_count: int
    """How many requests there had been when it was said."""

    @property
    def subject(self) -> str:
        """What it is about."""
        return f"{self.thing} of {self.owner}"

    @property
    def query(self) -> str:
        """How an agent looks for it: the right words, but not the phrase."""
        return f"{self.owner} {self.thing}"

    @property
    def line(self) -> str:
        """How it is said."""
        return f"The {self.subject} is {self.value}."


@dataclass
class Figures:
    """What one conversation showed."""

    window_tokens: int
    facts: int = 0
    compactions: int = 0
    refused: int = 0
    shown_to_summarizer: int = 0
    fitting: int = 0
    fitting_shown: int = 0
    in_request: int = 0
    first_recall: int = 0
    second_recall: int = 0
    out_of_reach: int = 0

    @property
    def is_broken(self) -> bool:
        """Whether a promise does not hold."""
        was_cut = self.fitting_shown < self.fitting
        return bool(was_cut or self.out_of_reach or self.refused)


class Conversation:
    """A scripted agent that first works, and then is asked for what it saw.

    Args:
        window_tokens: The model's context window.
        seed: Where facts stand, and how long results are.
    """

    def __init__(self, window_tokens: int, seed: int) -> None:
        self.random = random.Random(seed * 1_000_003 + window_tokens)
        self.figures = Figures(window_tokens)
        self.facts: list[Fact] = []
        self.asked: Fact | None = None

        self.llm = SimulatedLlm(
            context_window=window_tokens,
            script=self._reply,
            summary_replies=ExtractiveSummaries(),
        )
        guard = ContextGuardPlugin(
            default=Threshold(context_window=window_tokens),
            on_compaction=self._count,
        )
        agent = LlmAgent(
            name="agent",
            model=self.llm,
            instruction="You look things up.",
            tools=[self.look_up],
        )

        self.sessions = InMemorySessionService()
        self.runner = Runner(
            app=App(name="recall", root_agent=agent, plugins=[guard]),
            session_service=self.sessions,
        )

    def _count(self, record: CompactionRecord) -> None:
        self.figures.compactions += 1

    def _new_fact(self) -> Fact:
        draw = self.random
        owner = f"{draw.choice(NAMES)}-{len(self.facts)}-{draw.randrange(10_000)}"
        value = f"{draw.randrange(16**8):08x}"
        fact = Fact(draw.choice(THINGS), owner, value, len(self.llm.requests))
        self.facts.append(fact)
        return fact

    def _filler(self, chars: int) -> list[str]:
        draw = self.random
        lines = []
        used = 0
        kind = draw.choice(FILLER)

        while used < chars:
            numbers = {name: draw.randrange(1, 10_000) for name in "abc"}
            lines.append(kind.format(**numbers))
            used += len(lines[-1]) + 1

        return lines

    def look_up(self, page: int = 0) -> str:
        """Looks something up.

        Args:
            page: Which page.
        """
        draw = self.random
        # Half of the lengths are below the geometric mean; none fills four windows.
        longest = min(LONGEST_CHARS, 12 * self.figures.window_tokens)
        chars = int(SHORTEST_CHARS * (longest / SHORTEST_CHARS) ** draw.random())
        lines = self._filler(chars)

        for _ in range(2):
            place = draw.randrange(len(lines) + 1)
            lines.insert(place, self._new_fact().line)

        return "\n".join(lines)

    def _reply(self, request: LlmRequest) -> Reply:
        last = request.contents[-1]
        results = [p.function_response for p in last.parts or () if p.function_response]
        if self.asked is None:
            if results:
                return f"Done. {self._new_fact().line}"
            return call("look_up", page=len(self.facts))
        pages = [found for found in results if found.name == RECALL_TOOL]
        if not pages:
            return call(RECALL_TOOL, query=self.asked.query)
        text = str((pages[-1].response or {}).get("result"))
        if self.asked.value in text or self._recalls(request) >= MAX_RECALLS:
            return "Thank you."
        more = re.search(r"offset=(\d+)\)\]$", text)
        offset = int(more[1]) if more else 0
        return call(RECALL_TOOL, query=self.asked.query, offset=offset)

    def _recalls(self, request: LlmRequest) -> int:
        assert self.asked is not None
        return sum(
            bool(
                part.function_call
                and part.function_call.name == RECALL_TOOL
                and (part.function_call.args or {}).get("query") == self.asked.query
            )
            for content in request.contents
            for part in content.parts or ()
        )

    async def run(self) -> Figures:
        """Works until there were ten compactions; then asks for every fact."""
        await self.sessions.create_session(
            app_name="recall", user_id="u", session_id="s"
        )

        turn = 0
        while self.figures.compactions < MIN_COMPACTIONS and turn < MAX_TURNS:
            turn += 1
            words = " ".join(self._filler(120))
            fact = self._new_fact()
            await self._say(f"{turn}. {fact.line} Now look further. {words}")

        facts = self._judge_prompts()
        self.figures.facts = len(facts)
        request = self._last_agent_request().text
        for fact in facts:
            if fact.value in request:
                self.figures.in_request += 1
            else:
                await self._ask(fact)

        self.figures.refused = self.llm.rejections + self.llm.violations
        return self.figures

    def _judge_prompts(self) -> list[Fact]:
        """Counts the facts that the summarizer was shown; returns the compacted ones.

        A fact fits where nothing was shortened or left out in the prompts of the
        compaction that took it out of the request.
        """
        compacted = []

        for fact in self.facts:
            prompts = self._find_prompts(fact)
            if not prompts:
                continue  # It was never compacted.
            compacted.append(fact)

            is_shown = any(fact.value in record.text for record in prompts)
            is_whole = not any(" left out" in record.text for record in prompts)
            self.figures.shown_to_summarizer += is_shown
            self.figures.fitting += is_whole
            self.figures.fitting_shown += is_whole and is_shown

        return compacted

    def _find_prompts(self, fact: Fact) -> list[RecordedRequest]:
        """The prompts of the first compaction since the fact was told."""
        prompts: list[RecordedRequest] = []
        for record in self.llm.requests[fact.request_count :]:
            if record.is_summary:
                prompts.append(record)
            elif prompts:
                break
        return prompts

    def _last_agent_request(self) -> RecordedRequest:
        return next(r for r in reversed(self.llm.requests) if not r.is_summary)

    async def _ask(self, fact: Fact) -> None:
        """Asks for a fact, and counts on which page of a recall it was found."""
        self.asked = fact
        seen = len(self.llm.requests)
        await self._say(f"What was the {fact.subject}?")

        records = [each for each in self.llm.requests[seen:] if not each.is_summary]
        texts = [_read_page(record) for record in records]
        pages = [text for text in texts if text]
        found_on = [number for number, page in enumerate(pages) if fact.value in page]
        if not found_on:
            self.figures.out_of_reach += 1
        elif found_on[0] == 0:
            self.figures.first_recall += 1
        else:
            self.figures.second_recall += 1

    async def _say(self, text: str) -> None:
        message = types.Content(role="user", parts=[types.Part(text=text)])
        async for _ in self.runner.run_async(
            user_id="u",
            session_id="s",
            new_message=message,
            run_config=RunConfig(max_llm_calls=0),
        ):
            pass


def _read_page(record: RecordedRequest) -> str:
    """What a request has just been told by a recall; "" for nothing."""
    results = [part.function_response for part in record.contents[-1].parts or ()]
    return "\n".join(
        str(result.response)
        for result in results
        if result and result.name == RECALL_TOOL
    )


def _print(all_figures: list[Figures]) -> None:
    header = (
        "window",
        "facts",
        "compactions",
        "refused",
        "in a prompt",
        "of those that fit",
        "in the request",
        "first recall",
        "second recall",
        "out of reach",
    )
    rows = [
        [
            f"{f.window_tokens:,}",
            f.facts,
            f.compactions,
            f.refused,
            f"{f.shown_to_summarizer} of {f.facts}",
            f"{f.fitting_shown} of {f.fitting}",
            f.in_request,
            f.first_recall,
            f.second_recall,
            f.out_of_reach,
        ]
        for f in all_figures
    ]

    facts, kept, first, second = (
        sum(getattr(f, name) for f in all_figures)
        for name in ("facts", "in_request", "first_recall", "second_recall")
    )
    notes = (
        f"Of {facts} facts {kept} ({kept / facts:.0%}) are in the request, {first} on "
        f"the first page of a recall, {second} on the second."
    )
    title = "Facts taken out by a compaction, after ten of them and more"
    _common.print_table(title, header, rows, notes)


async def measure(windows_tokens: tuple[int, ...], seeds: int) -> list[Figures]:
    """Plays one conversation for each window and seed."""
    return [
        await Conversation(window_tokens, seed).run()
        for window_tokens in windows_tokens
        for seed in range(seeds)
    ]


def main() -> int:
    """Prints the figures; 1 where something was lost or refused."""
    parser = _common.build_parser(__doc__)
    parser.add_argument(
        "--seeds", type=int, default=2, metavar="N", help="conversations of each window"
    )
    arguments = parser.parse_args()
    _common.quiet()
    all_figures = asyncio.run(measure(WINDOWS_TOKENS, max(1, arguments.seeds)))
    _print(all_figures)
    figures = {"conversations": [asdict(found) for found in all_figures]}
    _common.write_json(arguments.json, figures)
    return int(any(f.is_broken for f in all_figures))


if __name__ == "__main__":
    raise SystemExit(main())
