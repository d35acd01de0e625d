"""An agent that does what no call or text of a request shows to be done."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.adk.agents.invocation_context import LlmCallsLimitExceededError
from google.adk.agents.run_config import RunConfig
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk import CompactionRecord
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply, SimulatedLlm, call
from contextguard_adk.testing.provider import list_content_texts
from tests.builders import KeptSessions, answer_text
from tests.chats import guarded_chat

INSTRUCTION = (
    "You work through numbered jobs in order, each exactly once: of every three you "
    "ship one order, mail one invoice and close one ticket. Say when all is done."
)
_LOG_WORDS = (
    "carrier depot pallet label signature invoice ledger refund courier customs weight "
    "route delay warehouse receipt balance queue manifest driver counter accepted"
)
_NAME = re.compile(r"(?<![\w-])(?:[A-Za-z]+-)?\d+(?![\w-])")
_RANGE = re.compile(r"([A-Za-z]*-?)(\d+) (?:to|through) \1(\d+)(?![\w-])")


@dataclass(frozen=True)
class Job:
    """Something to be done once by one call; `name` stands in nothing but its call."""

    name: str
    tool: str
    args: dict[str, str]


def make_jobs(count: int, *, are_plain_numbers: bool = False) -> list[Job]:
    """Jobs of three kinds in turn, such as to ship the order ORD-0001."""
    jobs = []
    for number in range(1, count + 1):
        kind = number % 3
        name = f"{('TCK', 'ORD', 'INV')[kind]}-{number:04}"
        if are_plain_numbers:
            name = str(40_000 + number)
        mail = {"to": f"customer{number % 7}@example.org", "subject": name}
        args = ({"ticket": name}, {"order": name}, mail)[kind]
        tool = ("close_ticket", "ship_order", "send_mail")[kind]
        jobs.append(Job(name, tool, args))

    return jobs


def find_named(contents: Sequence[types.Content], names: Sequence[str]) -> set[str]:
    """The names that calls or texts of a request show, whole or within "A to B"."""
    shown: set[str] = set()
    parts = [part for content in contents for part in content.parts or ()]
    for made in (part.function_call for part in parts if part.function_call):
        shown.update(v for v in (made.args or {}).values() if isinstance(v, str))
    text = "\n".join(part.text or "" for part in parts)

    for prefix, first, last in _RANGE.findall(text):
        numbers = range(int(first), int(last) + 1)
        shown.update(f"{prefix}{n:0{len(first)}}" for n in numbers)

    shown.update(_NAME.findall(text))
    return shown.intersection(names)


@dataclass
class ActingAgent:
    """Plays the model (`reply`), offers the `tools`, and counts what they did."""

    jobs: Sequence[Job]
    parallel_calls: int = 1
    executed: Counter[str] = field(default_factory=Counter)

    @property
    def request(self) -> str:
        """What the user asks for; it names no job."""
        before = "40000" if self.jobs[0].name.isdecimal() else "0000"
        return f"Handle the {len(self.jobs)} jobs that follow number {before}."

    def reply(self, request: LlmRequest) -> Reply:
        """Does the first jobs that do not look done."""
        done = find_named(request.contents, [job.name for job in self.jobs])
        waiting = [job for job in self.jobs if job.name not in done]
        wanted = waiting[: self.parallel_calls]
        return [call(job.tool, **job.args) for job in wanted] or "All done."

    def ship_order(self, order: str) -> dict[str, Any]:
        """Ships an order."""
        return self.execute(order, "shipped")

    def send_mail(self, to: str, subject: str) -> dict[str, Any]:
        """Sends a mail."""
        return self.execute(subject, "sent")

    def close_ticket(self, ticket: str) -> dict[str, Any]:
        """Closes a ticket."""
        return self.execute(ticket, "closed")

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """The tools; each execution counts."""
        return [self.ship_order, self.send_mail, self.close_ticket]

    def execute(self, name: str, status: str) -> dict[str, Any]:
        """Does a job; the result, of 300 to 800 tokens, does not name it."""
        self.executed[name] += 1
        chance = random.Random(name)
        words = chance.choices(_LOG_WORDS.split(), k=chance.randint(160, 440))
        log = " ".join(words)
        return {"status": status, "reference": f"{chance.random():.6f}", "log": log}

    @property
    def wrong(self) -> dict[str, int]:
        """The jobs that were not done once, and how often they were done."""
        counts = {job.name: self.executed[job.name] for job in self.jobs}
        return {name: count for name, count in counts.items() if count != 1}


def name_all(request: LlmRequest) -> str:
    """A summary that names all the jobs that it was shown."""
    found = _NAME.findall("\n".join(list_content_texts(request.contents)))
    names = [name for name in found if "-" in name or name.startswith("400")]
    return f"## Current State\nDone: {', '.join(dict.fromkeys(names))}."


def say_nothing(request: LlmRequest) -> str:
    """A summary that is well-formed and of no use."""
    return "## Current State\nThe assistant works through the list and gets on."


SUMMARIZERS: dict[str, Callable[[LlmRequest], Reply]] = {
    "good": name_all,
    "useless": say_nothing,
    "failing": lambda _: ValueError("no summaries today"),
    "absent": lambda _: "",
}


@dataclass(frozen=True)
class Outcome:
    """How a turn of an agent ended; "" where it ran out of model calls."""

    answer: str
    llm: SimulatedLlm
    compactions: list[CompactionRecord]


async def run_turn(
    strategy: Strategy,
    script: Callable[[LlmRequest], Reply],
    tools: Sequence[Callable[..., Any]],
    request: str,
    *,
    summarizer: Callable[[LlmRequest], Reply],
    max_calls: int,
    token_ratio: float | None = 1.0,
    instruction: str = INSTRUCTION,
    **settings: Any,
) -> Outcome:
    """Runs one turn of a guarded agent in a new session."""
    llm = SimulatedLlm(
        context_window=strategy.context_window or 0,
        token_ratio=token_ratio,
        script=script,
        summary_replies=summarizer,
    )
    compactions: list[CompactionRecord] = []
    chat = guarded_chat(
        llm,
        strategy,
        guard={"on_compaction": compactions.append},
        agent={"tools": tools, "instruction": instruction},
        session_service=KeptSessions(),
        run_config=RunConfig(max_llm_calls=max_calls),
        **settings,
    )

    try:
        answer = answer_text(await chat.say(request))
    except LlmCallsLimitExceededError:
        answer = ""
    return Outcome(answer, llm, compactions)
